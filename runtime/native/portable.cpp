// Plain C++: what every path must compute, bit for bit. Compiled without contraction of a * b + c.
#include <cmath>
#include <cstring>
#include <limits>

#include "half.h"
#include "path.h"

namespace elsi {
namespace {

// A block of up to 32 inputs: the largest magnitude becomes 127; ties round to even. A block that holds an infinity
// or NaN yields NaN; one too small to be scaled (below 3.7e-37) yields 0.
void quantise_block(const float* x, size_t count, int zero, int8_t* q, int32_t* offset, float* scale) {
  uint32_t most = 0;  // bits of |x| order as the values do, NaN above infinity
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  float amax;
  std::memcpy(&amax, &most, sizeof amax);
  std::memset(q, 0, kBlock);
  *offset = 0;
  const float inverse = 127.0f / amax;
  *scale = amax / 127.0f;
  if (!(amax <= std::numeric_limits<float>::max())) {
    *scale = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  if (!(inverse <= std::numeric_limits<float>::max())) {
    *scale = 0.0f;
    return;
  }
  int32_t sum = 0;
  for (size_t i = 0; i < count; ++i) {
    q[i] = static_cast<int8_t>(std::lrintf(x[i] * inverse));
    sum += q[i];
  }
  *offset = -zero * sum;
}

void quantise(const float* x, size_t k, int zero, uint8_t* chunk, size_t row, size_t rows) {
  for (size_t start = 0; start < k; start += kBlock, chunk += rows * kRowBytes) {
    int32_t offset;
    float scale;
    const size_t count = k - start < kBlock ? k - start : kBlock;
    quantise_block(x + start, count, zero, reinterpret_cast<int8_t*>(chunk + row * kBlock), &offset, &scale);
    std::memcpy(chunk + rows * kBlock + 4 * row, &offset, 4);
    std::memcpy(chunk + rows * (kBlock + 4) + 4 * row, &scale, 4);
  }
}

// sums += the products of a row's block, which stands in `chunk`.
template <int kBits>
void add_block(const uint8_t* chunk, size_t rows, size_t row, const uint8_t* levels, size_t lines, const float* scales,
               float* sums) {
  const auto* q = reinterpret_cast<const int8_t*>(chunk + row * kBlock);
  int32_t offset;
  float scale;
  std::memcpy(&offset, chunk + rows * kBlock + 4 * row, 4);
  std::memcpy(&scale, chunk + rows * (kBlock + 4) + 4 * row, 4);
  int32_t dots[kColumns];
  for (size_t c = 0; c < kColumns; ++c) dots[c] = offset;
  for (size_t line = 0; line < lines; ++line)
    for (size_t c = 0; c < kColumns; ++c)
      for (size_t i = 4 * line; i < 4 * line + 4; ++i) {
        const int level = levels[64 * line + 4 * c + i % 4];
        dots[c] += kBits == 4 ? (level & 15) * q[i] + (level >> 4) * q[i + 16] : level * q[i];
      }
  for (size_t c = 0; c < kColumns; ++c) sums[c] += static_cast<float>(dots[c]) * scale * scales[c];
}

template <int kBits, bool kShifted>
void multiply(const QuantisedRows& rows, const Columns& columns) {
  for (size_t group = columns.first_group; group < columns.last_group; ++group) {
    const size_t width = columns.columns - group * kColumns < kColumns ? columns.columns - group * kColumns : kColumns;
    for (size_t row = 0; row < rows.count; ++row) {
      const uint8_t* weights = columns.weights + group * group_bytes(kBits, kShifted, rows.blocks);
      const uint8_t* chunk = rows.data;
      float sums[kColumns] = {}, scales[kColumns];
      for (size_t block = 0; block < rows.blocks; ++block, chunk += rows.count * kRowBytes) {
        for (size_t c = 0; c < kColumns; ++c) {
          uint16_t half;
          std::memcpy(&half, weights + scales_at(kBits, block) + 2 * c, 2);
          scales[c] = from_half(half);
        }
        add_block<kBits>(chunk, rows.count, row, weights + levels_at(kBits, block), kBits, scales, sums);
      }
      chunk = rows.sums;
      for (size_t first = 0; kShifted && first < rows.blocks; first += kBlock, chunk += rows.count * kRowBytes) {
        const uint8_t* shifts = weights + shifts_at(kBits, rows.blocks, first);
        std::memcpy(scales, shifts, sizeof scales);
        add_block<8>(chunk, rows.count, row, shifts + 64, shift_lines(rows.blocks, first), scales, sums);
      }
      std::memcpy(columns.out + row * columns.stride + (group - columns.first_group) * kColumns, sums,
                  width * sizeof(float));
    }
  }
}

struct V16 {
  float v[16];
  static V16 load(const float* p) {
    V16 out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
  }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
#define ELSI_EACH(expression)                         \
  V16 out;                                            \
  for (int i = 0; i < 16; ++i) out.v[i] = expression; \
  return out;
  static V16 set1(float x) { ELSI_EACH(x) }
  static V16 add(V16 a, V16 b) { ELSI_EACH(a.v[i] + b.v[i]) }
  static V16 sub(V16 a, V16 b) { ELSI_EACH(a.v[i] - b.v[i]) }
  static V16 mul(V16 a, V16 b) { ELSI_EACH(a.v[i] * b.v[i]) }
  static V16 div(V16 a, V16 b) { ELSI_EACH(a.v[i] / b.v[i]) }
  static V16 fma(V16 a, V16 b, V16 c) {
    ELSI_EACH(a.v[i] * b.v[i] + c.v[i])
  }  // two roundings: baseline CPUs have no other
  static V16 max(V16 a, V16 b) { ELSI_EACH(b.v[i] < a.v[i] ? a.v[i] : b.v[i]) }
  static V16 rint(V16 a) { ELSI_EACH(std::nearbyintf(a.v[i])) }
  static V16 scale2(V16 a, V16 n) {
    ELSI_EACH(power(n.v[i] < -126.0f ? n.v[i] + 64.0f : n.v[i]) * a.v[i] * (n.v[i] < -126.0f ? 0x1p-64f : 1.0f))
  }
#undef ELSI_EACH
  // Sums within lanes of 4: out[4 * lane + i] is that of the i-th argument.
  static V16 sum4(V16 a, V16 b, V16 c, V16 d) {
    V16 out;
    for (int lane = 0; lane < 4; ++lane) {
      int i = 4 * lane;
      for (const V16* x : {&a, &b, &c, &d})
        out.v[i++] = (x->v[4 * lane] + x->v[4 * lane + 2]) + (x->v[4 * lane + 1] + x->v[4 * lane + 3]);
    }
    return out;
  }
  // The four lanes of each argument added up: the sums of 16 vectors in their order.
  static V16 sum16(V16 a, V16 b, V16 c, V16 d) {
    V16 out;
    float* to = out.v;
    for (const V16* x : {&a, &b, &c, &d})
      for (int i = 0; i < 4; ++i) *to++ = (x->v[i] + x->v[4 + i]) + (x->v[8 + i] + x->v[12 + i]);
    return out;
  }

 private:
  static float power(float n) {  // 2^n for -126..127
    const int bits = n == n ? (static_cast<int>(n) + 127) << 23 : 0;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
  }
};

#define ELSI_PATH
#define ELSI_PATH_INLINE inline
#include "attention_body.h"

bool always() { return true; }

}  // namespace

const Path kPortable = {"portable", always, quantise, multiply<4, false>, multiply<8, false>, multiply<4, true>, attend,
                        gate,       merge,  divide, largest};

}  // namespace elsi
