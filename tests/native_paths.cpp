// Every path that this CPU (or emulator) can run, against the portable one: products bit for bit, attention within
// rounding, and a row's bits in any company. For machines without ONNX Runtime; prints a line a path, exits with 1 at
// the first difference.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "../runtime/native/half.h"
#include "../runtime/native/matrix.h"

using namespace elsi;

static std::mt19937 draw(1);

static size_t below(size_t most) { return std::uniform_int_distribution<size_t>(0, most - 1)(draw); }

static std::vector<float> floats(size_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> out(count);
  for (float& x : out) x = normal(draw);
  return out;
}

[[noreturn]] static void fail(const Path& path, const char* what) {
  std::printf("%s: %s differs\n", path.name, what);
  std::exit(1);
}

static std::vector<float> product(const Path& path, const PackedMatrix& matrix, const float* x, size_t rows) {
  const Pool pool(nullptr, nullptr);  // never asked: the shapes are small
  const Activations acts(path, pool, x, rows, matrix);
  std::vector<float> y(rows * matrix.columns());
  for (size_t chunk = 0; chunk < acts.chunks(); ++chunk)
    matrix.multiply(path, acts.chunk(chunk), 0, matrix.groups(), y.data() + acts.first_row(chunk) * matrix.columns(),
                    matrix.columns());
  return y;
}

// A tensor over a vector's elements.
template <class T>
static Tensor over(std::vector<T>& elements, int type, std::vector<int64_t> shape) {
  Tensor tensor;
  tensor.type = type;
  tensor.shape = std::move(shape);
  tensor.data = elements.data();
  return tensor;
}

static std::vector<uint8_t> bytes(size_t count) {
  std::vector<uint8_t> out(count);
  for (auto& byte : out) byte = static_cast<uint8_t>(below(256));
  return out;
}

static void products(const Path& path) {
  for (int trial = 0; trial < 90; ++trial) {
    const bool shifted = trial % 3 == 2;
    const size_t inputs = shifted ? 32 * (1 + below(40)) : 1 + below(200), columns = 1 + below(70),
                 rows = 1 + below(25);
    const int bits = trial % 3 ? 4 : 8;
    const size_t blocks = (inputs + 31) / 32, shift_blocks = (blocks + 31) / 32;
    const auto n = static_cast<int64_t>(columns), b = static_cast<int64_t>(blocks),
               s = static_cast<int64_t>(shift_blocks);
    std::vector<uint8_t> values = bytes(columns * blocks * 4 * static_cast<size_t>(bits)),
                         shift_values = bytes(columns * shift_blocks * 32);
    std::vector<float> scales = floats(columns * blocks), x = floats(rows * inputs),
                       shift_scales = floats(columns * shift_blocks);
    for (float& scale : scales) scale *= trial % 2 ? 1e-7f : 1.0f;  // the first give subnormal 16-bit floats
    for (float& scale : shift_scales) scale *= 0.01f;
    PackedMatrix::Tensors tensors{over(values, abi::kUint8, {n, b, 4 * bits}), over(scales, abi::kFloat, {n, b})};
    tensors.shifted = shifted;
    tensors.shift_values = over(shift_values, abi::kUint8, {n, s, 32});
    tensors.shift_scales = over(shift_scales, abi::kFloat, {n, s});
    const PackedMatrix matrix(tensors, inputs, columns, bits);
    const std::vector<float> wanted = product(kPortable, matrix, x.data(), rows),
                             got = product(path, matrix, x.data(), rows);
    if (std::memcmp(wanted.data(), got.data(), got.size() * sizeof(float)) != 0)
      fail(path, shifted ? "a shifted product" : "a product");
    const std::vector<float> one = product(path, matrix, x.data() + (rows - 1) * inputs, 1);
    if (std::memcmp(one.data(), got.data() + (rows - 1) * columns, one.size() * sizeof(float)) != 0)
      fail(path, "a row alone");
  }
}

// Every finite 16-bit float comes back, and what lies half way between two goes to the even one.
static void sixteen_bits() {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    if (!is_finite_half(half)) continue;
    const auto next = static_cast<uint16_t>(half + 1);
    const float here = from_half(half), there = is_finite_half(next) ? from_half(next) : std::copysign(65536.0f, here);
    const uint16_t even = half % 2 ? next : half;
    const float middle = (here + there) / 2;
    if (to_half(here) != half || to_half(middle) != even || to_half(std::nextafter(middle, here)) != half ||
        to_half(std::nextafter(middle, there)) != next)
      fail(kPortable, "a 16-bit float");
  }
}

static void attention(const Path& path) {
  for (int trial = 0; trial < 40; ++trial) {
    const size_t group = 1 + below(5), kv_heads = 1 + below(2), width = 16 * (1 + below(6)), cached = below(200),
                 rows = 1 + below(9);
    const size_t capacity = cached + rows;
    AttentionCall call{};
    call.heads = group * kv_heads;
    call.kv_heads = kv_heads;
    call.width = width;
    call.capacity = capacity;
    call.cached = cached;
    call.softcap = trial % 3 ? 0.0f : 4.0f;
    const std::vector<float> queries = floats(rows * call.heads * width), keys = floats(kv_heads * capacity * width),
                             values = floats(kv_heads * capacity * width);
    std::vector<int32_t> chain(rows);
    std::vector<size_t> starts(rows, 0), ends(rows);
    std::vector<const int32_t*> paths(rows, chain.data());
    for (size_t row = 0; row < rows; ++row) {
      chain[row] = static_cast<int32_t>(cached + row);
      ends[row] = cached + row + 1;
    }
    call.queries = queries.data();
    call.keys = keys.data();
    call.values = values.data();
    call.starts = starts.data();
    call.ends = ends.data();
    call.paths = paths.data();
    std::vector<float> scratch(attention_scratch(call, rows));
    const size_t row_floats = group * call.state();
    std::vector<float> wanted(rows * row_floats), got(wanted), alone(row_floats);
    for (size_t span = 0; span * kSpan < capacity; ++span) {
      kPortable.attend(call, kv_heads - 1, 0, rows, span, wanted.data(), scratch.data());
      path.attend(call, kv_heads - 1, 0, rows, span, got.data(), scratch.data());
      path.attend(call, kv_heads - 1, rows - 1, rows, span, alone.data(), scratch.data());
      for (size_t row = 0; row < rows; ++row)
        for (size_t i = 0; call.sees(row, span) && i < row_floats; ++i) {
          if (i % call.state() > width + 1) continue;  // padding
          const float a = wanted[row * row_floats + i], b = got[row * row_floats + i];
          if (!(std::fabs(a - b) <= 1e-4f * (1.0f + std::fabs(a)))) fail(path, "attention");
          if (row == rows - 1 && std::memcmp(&b, &alone[i], 4) != 0) fail(path, "an attention row alone");
        }
    }
  }
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<float> gate = floats(16), up = floats(16);
    for (float& x : gate) x *= 30.0f;
    std::vector<float> wanted = gate;
    kPortable.gate(wanted.data(), up.data());
    path.gate(gate.data(), up.data());
    for (size_t i = 0; i < 16; ++i)
      if (!(std::fabs(gate[i] - wanted[i]) <= 1e-6f * (1e-30f + std::fabs(wanted[i])))) fail(path, "the gate");
  }
}

// Against a plain loop, run after run, with equal values and what is no number among them.
static void largest(const Path& path) {
  for (int trial = 0; trial < 500; ++trial) {
    Largest wanted, got;
    for (size_t first = 0, count = 0; first < 600; first += count) {
      count = 1 + below(200);
      std::vector<float> x = floats(count);
      for (float& value : x) {
        if (trial % 2) value = std::round(4 * value);
        if (trial % 3 == 0 && below(20) == 0) value = NAN;
        if (trial % 7 == 0) value = -INFINITY;
      }
      for (size_t i = 0; i < count; ++i)
        if (x[i] > wanted.value) wanted = {x[i], first + i};
      path.largest(x.data(), count, first, &got);
      if (got.value != wanted.value || got.column != wanted.column) fail(path, "the largest");
    }
  }
}

int main() {
  sixteen_bits();
  for (const Path* path : paths()) {
    if (!path->usable()) {
      std::printf("%s: not on this CPU\n", path->name);
      continue;
    }
    products(*path);
    attention(*path);
    largest(*path);
    std::printf("%s: ok\n", path->name);
  }
  return 0;
}
