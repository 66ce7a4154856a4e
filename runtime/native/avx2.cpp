// AVX2: two registers of 8 columns x 4 inputs. vpmaddubsw saturates at 16 bits, so weights go through it 4 bits at a
// time: 15 * 127 * 2 fits; 8-bit weights are 16 * high + low.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "path.h"

#define ELSI_256 __attribute__((target("avx2")))
#define ELSI_256_INLINE __attribute__((target("avx2"), always_inline)) inline

namespace elsi {
namespace {

constexpr int kPassRows = 4;  // what 16 registers hold

template <int kRows, int kBits>
ELSI_256 void pass(const uint8_t* data, size_t all_rows, size_t first_row, size_t blocks, const Columns& columns) {
  constexpr size_t kRecord = record_bytes(kBits);
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
  for (size_t group = columns.first_group; group < columns.last_group; ++group) {
    float sums[kRows][kColumns];
    for (int half = 0; half < 2; ++half) {
      const uint8_t* record = columns.weights + group * blocks * kRecord;
      const uint8_t* chunk = data;
      __m256 totals[kRows];
      for (int r = 0; r < kRows; ++r) totals[r] = _mm256_setzero_ps();
      for (size_t block = 0; block < blocks; ++block, record += kRecord, chunk += all_rows * kRowBytes) {
        const uint8_t* values = chunk + first_row * kBlock;
        __m256i dots[kRows];
        for (int r = 0; r < kRows; ++r) {
          int32_t offset;
          std::memcpy(&offset, chunk + all_rows * kBlock + 4 * (first_row + r), 4);
          dots[r] = _mm256_set1_epi32(offset);
        }
        for (int i = 0; i < kBits; ++i) {
          const __m256i raw = _mm256_load_si256(reinterpret_cast<const __m256i*>(record + kScaleBytes + 64 * i + 32 * half));
          const __m256i lower = _mm256_and_si256(raw, low), upper = _mm256_and_si256(_mm256_srli_epi16(raw, 4), low);
          for (int r = 0; r < kRows; ++r) {
            int32_t first, second;
            std::memcpy(&first, values + r * kBlock + 4 * i, 4);
            std::memcpy(&second, values + r * kBlock + (kBits == 4 ? 16 + 4 * i : 4 * i), 4);
            const __m256i a = _mm256_maddubs_epi16(lower, _mm256_set1_epi32(first));
            const __m256i b = _mm256_maddubs_epi16(upper, _mm256_set1_epi32(second));
            dots[r] = _mm256_add_epi32(dots[r], _mm256_madd_epi16(a, ones));
            dots[r] = _mm256_add_epi32(dots[r], _mm256_madd_epi16(b, kBits == 4 ? ones : sixteens));
          }
        }
        const __m256 scales = _mm256_load_ps(reinterpret_cast<const float*>(record) + 8 * half);
        for (int r = 0; r < kRows; ++r) {
          float scale;
          std::memcpy(&scale, chunk + all_rows * (kBlock + 4) + 4 * (first_row + r), 4);
          const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dots[r]), _mm256_set1_ps(scale));
          totals[r] = _mm256_add_ps(totals[r], _mm256_mul_ps(scaled, scales));
        }
      }
      for (int r = 0; r < kRows; ++r) _mm256_storeu_ps(sums[r] + 8 * half, totals[r]);
    }
    const size_t left = columns.columns - group * kColumns, width = left < kColumns ? left : kColumns;
    for (int r = 0; r < kRows; ++r)
      std::memcpy(columns.out + (first_row + r) * columns.stride + group * kColumns, sums[r], width * sizeof(float));
  }
}

template <int kBits>
void multiply(const QuantisedRows& rows, const Columns& columns) {
  // A group at a time, so that its weights are still in the cache for the rows that follow.
  for (size_t group = columns.first_group; group < columns.last_group; ++group) {
    Columns one = columns;
    one.first_group = group;
    one.last_group = group + 1;
    for (size_t row = 0; row < rows.count; row += kPassRows) switch (rows.count - row) {
        case 1: pass<1, kBits>(rows.data, rows.count, row, rows.blocks, one); break;
        case 2: pass<2, kBits>(rows.data, rows.count, row, rows.blocks, one); break;
        case 3: pass<3, kBits>(rows.data, rows.count, row, rows.blocks, one); break;
        default: pass<4, kBits>(rows.data, rows.count, row, rows.blocks, one);
      }
  }
}

bool usable() { return __builtin_cpu_supports("avx2"); }

}  // namespace

const Path kAvx2 = {"avx2", usable, kPortable.quantise, multiply<4>, multiply<8>};

}  // namespace elsi
#endif
