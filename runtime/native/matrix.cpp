#include "matrix.h"

#include <algorithm>
#include <cstring>

#include "half.h"

namespace elsi {
namespace {

constexpr int64_t kMostColumns = 1 << 24;
constexpr size_t kTaskBytes = 48 << 10;  // of weights, at few rows: about 5 us from memory
constexpr size_t kMostTasks = 32;
constexpr size_t kEvenTaskBytes = 64 << 10;  // shorter runs through memory are slower
constexpr size_t kSerialValues = 32 << 10;  // quantised by the caller alone below this

Buffer& activation_buffer() {  // of the thread that runs the graph; its workers read it
  static thread_local Buffer buffer;
  return buffer;
}

unsigned value_at(const uint8_t* block, size_t input, int bits) {
  if (bits == 8) return block[input];
  const uint8_t pair = block[input / 2];
  return input % 2 ? pair >> 4 : pair & 15;
}

// Values uint8 [N, blocks, blob] and their scales float [N, blocks]; `what` is empty or "shift ".
void require_blocks(const std::string& what, const Tensor& values, const Tensor& scales, size_t columns, size_t blocks,
                    size_t blob) {
  const std::vector<int64_t> shape = {static_cast<int64_t>(columns), static_cast<int64_t>(blocks),
                                      static_cast<int64_t>(blob)};
  require(values.type == abi::kUint8 && values.shape == shape,
          "the " + what + (what.empty() ? "weights" : "values") + " are " + text(values.shape) + " of type " +
              std::to_string(values.type) + ", K, N and bits say uint8 " + text(shape));
  require(scales.type == abi::kFloat && scales.size() == columns * blocks,
          "the " + what + "scales are " + text(scales.shape) + " of type " + std::to_string(scales.type) +
              ", K and N say " + std::to_string(columns * blocks) + " float32");
}

void put_half(uint8_t* to, float value, const char* what) {
  const uint16_t half = to_half(value);
  require(is_finite_half(half),
          std::string("a ") + what + " is " + std::to_string(value) + ", a 16-bit float holds up to 65504");
  std::memcpy(to, &half, sizeof half);
}

}  // namespace

int bits_of(const NodeInfo& node) {
  const int bits = static_cast<int>(node.integer("bits", 4, 8));
  require(bits == 4 || bits == 8, "attribute bits is " + std::to_string(bits) + ", it must be 4 or 8");
  return bits;
}

size_t size_of(const NodeInfo& node, const char* name) {
  return static_cast<size_t>(node.integer(name, 1, kMostColumns));
}

PackedMatrix::PackedMatrix(const Tensors& tensors, size_t inputs, size_t columns, int bits)
    : inputs_(inputs), columns_(columns), bits_(bits), shifted_(tensors.shifted) {
  const size_t blob = kBlock * static_cast<size_t>(bits) / 8, shift_blocks = (blocks() + kBlock - 1) / kBlock;
  if (shifted_) {
    require(bits == 4, "attribute bits is " + std::to_string(bits) + ", a product with shifts takes 4");
    require(inputs % kBlock == 0, "K is " + std::to_string(inputs) + ", a product with shifts takes a multiple of 32");
    require_blocks("shift ", tensors.shift_values, tensors.shift_scales, columns, shift_blocks, kBlock);
  }
  require_blocks("", tensors.values, tensors.scales, columns, blocks(), blob);
  const size_t record = record_bytes(bits);
  packed_ = StoredBytes(groups() * group_bytes());
  uint8_t* out = packed_.data();
  for (size_t column = 0; column < columns; ++column)
    for (size_t block = 0; block < blocks(); ++block) {
      const size_t c = column % kColumns;
      uint8_t* to = out + (column / kColumns * blocks() + block) * record;
      const uint8_t* from = tensors.values.as<uint8_t>() + (column * blocks() + block) * blob;
      const float scale = tensors.scales.as<float>()[column * blocks() + block];
      if (shifted_) {
        const size_t at = column * shift_blocks + block / kBlock;
        const int value = tensors.shift_values.as<uint8_t>()[at * kBlock + block % kBlock] - 128;
        put_half(to + 2 * c, scale, "scale");
        const float by = tensors.shift_scales.as<float>()[at];
        put_half(to + kScaleBytes / 2 + 2 * c, static_cast<float>(value) * by, "shift");
      } else {
        std::memcpy(to + 4 * c, &scale, 4);
      }
      const size_t count = std::min(kBlock, inputs - block * kBlock);
      for (size_t i = 0; i < count; ++i) {
        const size_t line = bits == 4 ? i / 4 % 4 : i / 4;
        const unsigned shift = bits == 4 && i >= 16 ? 4 : 0;
        to[kScaleBytes + 64 * line + 4 * c + i % 4] |= static_cast<uint8_t>(value_at(from, i, bits) << shift);
      }
    }
}

void PackedMatrix::multiply(const Path& path, const QuantisedRows& rows, size_t first, size_t last, float* out,
                            size_t stride) const {
  const auto multiply = shifted_ ? path.multiply4_shifted : bits_ == 4 ? path.multiply4 : path.multiply8;
  multiply(rows, {packed_.data(), first, last, columns_, out, stride});
}

void PackedMatrix::fetch_share(size_t task, size_t tasks, size_t most) const {
  const size_t bytes = std::min(most, groups() * group_bytes());
  for (size_t at = task * bytes / tasks / 64 * 64; at < (task + 1) * bytes / tasks; at += 64)
    __builtin_prefetch(packed_.data() + at, 0, 2);
}

PackedMatrix::Tensors PackedMatrix::tensors(const NodeInfo& node, size_t at, size_t shifts_at) {
  Tensors out{node.constant(at), node.constant(at + 1)};
  if (shifts_at > 0) {
    out.shifted = true;
    out.shift_values = node.constant(shifts_at);
    out.shift_scales = node.constant(shifts_at + 1);
  }
  return out;
}

Activations::Activations(size_t rows, size_t inputs)
    : rows_(rows),
      inputs_(inputs),
      blocks_((inputs + kBlock - 1) / kBlock),
      data_(activation_buffer().reserve(rows * blocks_ * kRowBytes)) {}

Activations::Activations(const Path& path, const Pool& pool, const float* x, size_t rows, size_t inputs, int zero)
    : Activations(rows, inputs) {
  auto quantise = [&](size_t index) { quantise_chunk(path, x, index, zero); };
  if (rows * inputs >= kSerialValues) {
    pool.run(chunks(), quantise);
  } else {
    for (size_t index = 0; index < chunks(); ++index) quantise(index);
  }
}

void Activations::make_room(size_t rows, size_t most_inputs) { Activations(rows, most_inputs); }

QuantisedRows Activations::chunk(size_t index) const {
  const size_t first = first_row(index), end = first_row(index + 1);
  return {data_ + first * blocks_ * kRowBytes, end - first, blocks_};
}

void Activations::quantise_chunk(const Path& path, const float* x, size_t index, int zero) const {
  const QuantisedRows rows = chunk(index);
  for (size_t r = 0; r < rows.count; ++r)
    path.quantise(x + (first_row(index) + r) * inputs_, inputs_, zero, const_cast<uint8_t*>(rows.data), r, rows.count);
}

void Activations::quantise_row(const Path& path, const float* x, size_t row, int zero) const {
  size_t index = 0;
  while (first_row(index + 1) <= row) ++index;
  const QuantisedRows rows = chunk(index);
  path.quantise(x, inputs_, zero, const_cast<uint8_t*>(rows.data), row - first_row(index), rows.count);
}

size_t task_count(size_t groups, size_t group_bytes, size_t rows) {
  const size_t work = groups * group_bytes * std::max<size_t>(1, rows / 3);
  return std::clamp<size_t>(work / kTaskBytes, 1, std::min(kMostTasks, groups));
}

size_t even_task_count(size_t groups, size_t group_bytes, size_t threads) {
  const size_t each = std::max<size_t>(1, (groups * group_bytes / threads + kEvenTaskBytes / 2) / kEvenTaskBytes);
  return std::min(groups, threads * each);
}

void multiply_share(const Path& path, const PackedMatrix& matrix, const Activations& acts, size_t task, size_t tasks,
                    float* y) {
  const size_t groups = matrix.groups(), columns = matrix.columns(), end = (task + 1) * groups / tasks;
  // with several chunks, a group stays in the cache for all of them
  const size_t tile = acts.chunks() == 1 ? groups : 1;
  for (size_t group = task * groups / tasks; group < end; group += tile)
    for (size_t chunk = 0; chunk < acts.chunks(); ++chunk)
      matrix.multiply(path, acts.chunk(chunk), group, std::min(end, group + tile),
                      y + acts.first_row(chunk) * columns + group * kColumns, columns);
}

void GatedMatrices::multiply_share(const Path& path, const Activations& acts, size_t task, size_t tasks,
                                   float* y) const {
  const size_t groups = gate.groups(), columns = gate.columns();
  for (size_t group = task * groups / tasks; group < (task + 1) * groups / tasks; ++group)
    for (size_t chunk = 0; chunk < acts.chunks(); ++chunk) {
      const QuantisedRows rows = acts.chunk(chunk);
      float gates[kMaxRows * kColumns] = {}, ups[kMaxRows * kColumns] = {};
      gate.multiply(path, rows, group, group + 1, gates, kColumns);
      up.multiply(path, rows, group, group + 1, ups, kColumns);
      float* out = y + acts.first_row(chunk) * columns + group * kColumns;
      for (size_t row = 0; row < rows.count; ++row) {
        path.gate(gates + row * kColumns, ups + row * kColumns);
        std::copy_n(gates + row * kColumns, std::min(kColumns, columns - group * kColumns), out + row * columns);
      }
    }
}

}  // namespace elsi
