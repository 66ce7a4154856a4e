// AVX2: two registers of 8 columns x 4 inputs. vpmaddubsw saturates at 16 bits, so weights go through it 4 bits at a
// time: 15 * 127 * 2 fits; 8-bit weights are 16 * high + low.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include <cstring>

#include "path.h"

#define ELSI_256 __attribute__((target("avx2,fma,f16c")))
#define ELSI_256_INLINE __attribute__((target("avx2,fma,f16c"), always_inline)) inline

namespace elsi {
namespace {

constexpr int kPassRows = 4;  // what 16 registers hold

ELSI_256_INLINE __m256 halves(const uint8_t* head) {  // 8 of 16 bits
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(head)));
}

// totals += a block's products with 8 of the columns; `levels` begin with theirs. Rows are those of a chunk from
// `first_row` on.
template <int kRows, int kBits>
ELSI_256_INLINE void add_block(const uint8_t* chunk, size_t all_rows, size_t first_row, const uint8_t* levels,
                               size_t lines, __m256 scales, __m256* totals) {
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
  const uint8_t* values = chunk + first_row * kBlock;
  __m256i dots[kRows];
  for (int r = 0; r < kRows; ++r) {
    int32_t offset;
    std::memcpy(&offset, chunk + all_rows * kBlock + 4 * (first_row + r), 4);
    dots[r] = _mm256_set1_epi32(offset);
  }
  for (size_t i = 0; i < lines; ++i) {
    const __m256i raw = _mm256_load_si256(reinterpret_cast<const __m256i*>(levels + 64 * i));
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
  for (int r = 0; r < kRows; ++r) {
    float scale;
    std::memcpy(&scale, chunk + all_rows * (kBlock + 4) + 4 * (first_row + r), 4);
    const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dots[r]), _mm256_set1_ps(scale));
    totals[r] = _mm256_add_ps(totals[r], _mm256_mul_ps(scaled, scales));
  }
}

template <int kRows, int kBits, bool kShifted>
ELSI_256 void pass(const QuantisedRows& rows, size_t first_row, const Columns& columns) {
  const size_t blocks = rows.blocks, all_rows = rows.count;
  for (size_t group = columns.first_group; group < columns.last_group; ++group) {
    float sums[kRows][kColumns];
    for (size_t half = 0; half < 2; ++half) {
      const uint8_t* weights = columns.weights + group * group_bytes(kBits, kShifted, blocks);
      const uint8_t* chunk = rows.data;
      __m256 totals[kRows];
      for (int r = 0; r < kRows; ++r) totals[r] = _mm256_setzero_ps();
      for (size_t block = 0; block < blocks; ++block, chunk += all_rows * kRowBytes) {
        const uint8_t* levels = weights + levels_at(kBits, block) + 32 * half;
        const __m256 scales = halves(weights + scales_at(kBits, block) + 16 * half);
        add_block<kRows, kBits>(chunk, all_rows, first_row, levels, kBits, scales, totals);
      }
      chunk = rows.sums;
      for (size_t first = 0; kShifted && first < blocks; first += kBlock, chunk += all_rows * kRowBytes) {
        const uint8_t* shifts = weights + shifts_at(kBits, blocks, first) + 32 * half;
        const __m256 scales = _mm256_load_ps(reinterpret_cast<const float*>(shifts));
        add_block<kRows, 8>(chunk, all_rows, first_row, shifts + 64, shift_lines(blocks, first), scales, totals);
      }
      for (int r = 0; r < kRows; ++r) _mm256_storeu_ps(sums[r] + 8 * half, totals[r]);
    }
    const size_t left = columns.columns - group * kColumns, width = left < kColumns ? left : kColumns;
    for (int r = 0; r < kRows; ++r)
      std::memcpy(columns.out + (first_row + r) * columns.stride + (group - columns.first_group) * kColumns, sums[r],
                  width * sizeof(float));
  }
}

template <int kBits, bool kShifted>
void multiply(const QuantisedRows& rows, const Columns& columns) {
  // A group at a time, so that its weights are still in the cache for the rows that follow.
  for (size_t group = columns.first_group; group < columns.last_group; ++group) {
    Columns one = columns;
    one.first_group = group;
    one.last_group = group + 1;
    one.out += (group - columns.first_group) * kColumns;
    for (size_t row = 0; row < rows.count; row += kPassRows) switch (rows.count - row) {
        case 1:
          pass<1, kBits, kShifted>(rows, row, one);
          break;
        case 2:
          pass<2, kBits, kShifted>(rows, row, one);
          break;
        case 3:
          pass<3, kBits, kShifted>(rows, row, one);
          break;
        default:
          pass<4, kBits, kShifted>(rows, row, one);
      }
  }
}

struct V16 {
  __m256 low, high;
  ELSI_256_INLINE static V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  ELSI_256_INLINE void store(float* p) const {
    _mm256_storeu_ps(p, low);
    _mm256_storeu_ps(p + 8, high);
  }
  ELSI_256_INLINE static V16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  ELSI_256_INLINE static V16 add(V16 a, V16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  ELSI_256_INLINE static V16 sub(V16 a, V16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
  ELSI_256_INLINE static V16 mul(V16 a, V16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  ELSI_256_INLINE static V16 div(V16 a, V16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
  ELSI_256_INLINE static V16 fma(V16 a, V16 b, V16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  ELSI_256_INLINE static V16 max(V16 a, V16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
  ELSI_256_INLINE static V16 rint(V16 a) {
    return {_mm256_round_ps(a.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(a.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  ELSI_256_INLINE static V16 scale2(V16 a, V16 n) { return {scale2(a.low, n.low), scale2(a.high, n.high)}; }
  // Sums within lanes of 4: out[4 * lane + i] is that of the i-th argument.
  ELSI_256_INLINE static V16 sum4(V16 a, V16 b, V16 c, V16 d) {
    return {sum4(a.low, b.low, c.low, d.low), sum4(a.high, b.high, c.high, d.high)};
  }
  // The four lanes of each argument added up: the sums of 16 vectors in their order.
  ELSI_256_INLINE static V16 sum16(V16 a, V16 b, V16 c, V16 d) {
    return {_mm256_set_m128(lanes(b), lanes(a)), _mm256_set_m128(lanes(d), lanes(c))};
  }

 private:
  ELSI_256_INLINE static __m256 power(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  ELSI_256_INLINE static __m256 scale2(__m256 a, __m256 n) {  // in two steps, as 2^n alone may be below the least float
    const __m256 tiny = _mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
    const __m256 by = power(_mm256_add_ps(n, _mm256_and_ps(tiny, _mm256_set1_ps(64.0f))));
    return _mm256_mul_ps(_mm256_mul_ps(by, a), _mm256_blendv_ps(_mm256_set1_ps(1.0f), _mm256_set1_ps(0x1p-64f), tiny));
  }
  ELSI_256_INLINE static __m256 sum4(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  ELSI_256_INLINE static __m128 lanes(V16 a) {
    return _mm_add_ps(_mm_add_ps(_mm256_castps256_ps128(a.low), _mm256_extractf128_ps(a.low, 1)),
                      _mm_add_ps(_mm256_castps256_ps128(a.high), _mm256_extractf128_ps(a.high, 1)));
  }
};

#define ELSI_PATH ELSI_256
#define ELSI_PATH_INLINE ELSI_256_INLINE
#include "attention_body.h"

bool has_f16c() {  // compilers older than GCC 11 have no name for it
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool usable() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

}  // namespace

const Path kAvx2 = {
    "avx2", usable, kPortable.quantise, multiply<4, false>, multiply<8, false>, multiply<4, true>, attend, gate,
    merge,  divide, largest};

}  // namespace elsi
#endif
