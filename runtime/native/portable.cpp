// Plain C++: what every path must compute, bit for bit. Compiled without contraction of a * b + c.
#include <cmath>
#include <cstring>
#include <limits>

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

template <int kBits>
void add_block(const uint8_t* record, const int8_t* q, int32_t offset, float scale, float* sums) {
  int32_t dots[kColumns];
  for (size_t c = 0; c < kColumns; ++c) dots[c] = offset;
  const uint8_t* w = record + kScaleBytes;
  for (size_t four = 0; four < kBlock / 4; ++four)
    for (size_t c = 0; c < kColumns; ++c)
      for (size_t i = 0; i < 4; ++i) {
        const size_t at = (kBits == 4 ? four % 4 : four) * 64 + c * 4 + i;
        const int value = kBits == 4 ? (four < 4 ? w[at] & 15 : w[at] >> 4) : w[at];
        dots[c] += value * q[four * 4 + i];
      }
  for (size_t c = 0; c < kColumns; ++c) {
    float column_scale;
    std::memcpy(&column_scale, record + 4 * c, 4);
    sums[c] += static_cast<float>(dots[c]) * scale * column_scale;
  }
}

template <int kBits>
void multiply(const QuantisedRows& rows, const Columns& columns) {
  for (size_t group = columns.first_group; group < columns.last_group; ++group) {
    const uint8_t* weights = columns.weights + group * rows.blocks * record_bytes(kBits);
    const size_t width = columns.columns - group * kColumns < kColumns ? columns.columns - group * kColumns : kColumns;
    for (size_t row = 0; row < rows.count; ++row) {
      float sums[kColumns] = {};
      for (size_t block = 0; block < rows.blocks; ++block) {
        const uint8_t* chunk = rows.data + block * rows.count * kRowBytes;
        int32_t offset;
        float scale;
        std::memcpy(&offset, chunk + rows.count * kBlock + 4 * row, 4);
        std::memcpy(&scale, chunk + rows.count * (kBlock + 4) + 4 * row, 4);
        add_block<kBits>(weights + block * record_bytes(kBits), reinterpret_cast<const int8_t*>(chunk + row * kBlock), offset,
                         scale, sums);
      }
      std::memcpy(columns.out + row * columns.stride + group * kColumns, sums, width * sizeof(float));
    }
  }
}

bool always() { return true; }

}  // namespace

const Path kPortable = {"portable", always, quantise, multiply<4>, multiply<8>};

}  // namespace elsi
