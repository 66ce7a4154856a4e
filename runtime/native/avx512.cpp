// AVX512-VNNI: a register holds 16 columns x 4 inputs; vpdpbusd adds their products with 4 values of a row.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "path.h"

#define ELSI_512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define ELSI_512_INLINE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"), always_inline)) inline

namespace elsi {
namespace {

constexpr size_t kAhead = 4096;  // bytes of weights asked for before they are needed

ELSI_512_INLINE __m512i four(const uint8_t* values) {  // 4 inputs of a row, the same for all 16 columns
  int32_t bits;
  std::memcpy(&bits, values, 4);
  return _mm512_set1_epi32(bits);
}

ELSI_512_INLINE __m512 halves(const uint8_t* head) {  // 16 of 16 bits
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(head)));
}

// sums += a block's products; `lines` of its levels, all of them but at the end of shifts.
template <int kRows, int kBits>
ELSI_512_INLINE void add_block(const uint8_t* chunk, const uint8_t* levels, size_t lines, __m512 scales, __m512* sums) {
  const __m512i low = _mm512_set1_epi8(15);
  __m512i dots[kRows];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) dots[r] = four(chunk + kRows * kBlock + 4 * r);
#pragma GCC unroll 8
  for (size_t i = 0; i < lines; ++i) {
    const __m512i raw = _mm512_load_si512(levels + 64 * i);
    const __m512i first = kBits == 4 ? _mm512_and_si512(raw, low) : raw;
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) dots[r] = _mm512_dpbusd_epi32(dots[r], first, four(chunk + r * kBlock + 4 * i));
    if constexpr (kBits == 4) {
      const __m512i second = _mm512_and_si512(_mm512_srli_epi16(raw, 4), low);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r)
        dots[r] = _mm512_dpbusd_epi32(dots[r], second, four(chunk + r * kBlock + 16 + 4 * i));
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    float scale;
    std::memcpy(&scale, chunk + kRows * (kBlock + 4) + 4 * r, 4);
    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[r]), _mm512_set1_ps(scale));
    sums[r] = _mm512_add_ps(sums[r], _mm512_mul_ps(scaled, scales));
  }
}

ELSI_512_INLINE void fetch(const uint8_t* line) {
  _mm_prefetch(reinterpret_cast<const char*>(line + kAhead), _MM_HINT_T1);
}

template <int kRows, int kBits, bool kShifted>
ELSI_512 void pass(const QuantisedRows& rows, const Columns& columns) {
  for (size_t group = columns.first_group; group < columns.last_group; ++group) {
    // Step by step through the group: with scales_at and levels_at a step of the model took 3 % longer.
    const uint8_t* at = columns.weights + group * group_bytes(kBits, kShifted, rows.blocks);
    const uint8_t* chunk = rows.data;
    const uint8_t* head = at;
    __m512 sums[kRows];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) sums[r] = _mm512_setzero_ps();
    for (size_t block = 0; block < rows.blocks; ++block, at += level_bytes(kBits), chunk += kRows * kRowBytes) {
      if (block % 2 == 0) {
        fetch(at);
        head = at;
        at += kHeadBytes;
      }
#pragma GCC unroll 8
      for (int line = 0; line < kBits; ++line) fetch(at + 64 * line);
      add_block<kRows, kBits>(chunk, at, kBits, halves(head + block % 2 * (kHeadBytes / 2)), sums);
    }
    if constexpr (kShifted) {
      chunk = rows.sums;
      for (size_t block = 0; block < rows.blocks; block += kBlock, chunk += kRows * kRowBytes) {
        const size_t lines = shift_lines(rows.blocks, block);
        for (size_t line = 0; line <= lines; ++line) fetch(at + 64 * line);
        add_block<kRows, 8>(chunk, at + 64, lines, _mm512_load_ps(at), sums);
        at += 64 + 64 * lines;
      }
    }
    const size_t left = columns.columns - group * kColumns;
    const __mmask16 mask = left >= kColumns ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r)
      _mm512_mask_storeu_ps(columns.out + r * columns.stride + (group - columns.first_group) * kColumns, mask, sums[r]);
  }
}

template <int kBits, bool kShifted>
void multiply(const QuantisedRows& rows, const Columns& columns) {
  using Pass = void (*)(const QuantisedRows&, const Columns&);
  static constexpr Pass by_rows[kMaxRows + 1] = {
      nullptr,
      pass<1, kBits, kShifted>,
      pass<2, kBits, kShifted>,
      pass<3, kBits, kShifted>,
      pass<4, kBits, kShifted>,
      pass<5, kBits, kShifted>,
      pass<6, kBits, kShifted>,
      pass<7, kBits, kShifted>,
      pass<8, kBits, kShifted>,
      pass<9, kBits, kShifted>,
      pass<10, kBits, kShifted>,
      pass<11, kBits, kShifted>,
      pass<12, kBits, kShifted>,
  };
  by_rows[rows.count](rows, columns);
}

ELSI_512 void quantise(const float* x, size_t k, int zero, uint8_t* chunk, size_t row, size_t rows) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (size_t start = 0; start < k; start += kBlock, chunk += rows * kRowBytes) {
    const size_t count = k - start;
    const __mmask16 first = count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
    const __mmask16 second = count >= 32 ? 0xffff : count > 16 ? static_cast<__mmask16>((1u << (count - 16)) - 1) : 0;
    const __m512 a = _mm512_maskz_loadu_ps(first, x + start), b = _mm512_maskz_loadu_ps(second, x + start + 16);
    const __m512i bits = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                                          _mm512_and_si512(_mm512_castps_si512(b), magnitude));
    const uint32_t most = _mm512_reduce_max_epu32(bits);
    float amax;
    std::memcpy(&amax, &most, 4);
    float inverse = 127.0f / amax, scale = amax / 127.0f;
    if (!(inverse <= 3.402823466e38f)) inverse = scale = 0.0f;  // nothing to scale, or nothing that can be
    if (most >= 0x7f800000u) {
      inverse = 0.0f;
      scale = __builtin_nanf("");
    }
    const __m512 by = _mm512_set1_ps(inverse);
    // an infinity times 0 is NaN, which converts to the most negative number: hence the mask
    const __mmask16 keep = inverse > 0.0f ? 0xffff : 0;
    const __m512i qa = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(a, by));
    const __m512i qb = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(b, by));
    const int32_t offset = -zero * _mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(chunk + row * kBlock), _mm512_cvtepi32_epi8(qa));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(chunk + row * kBlock + 16), _mm512_cvtepi32_epi8(qb));
    std::memcpy(chunk + rows * kBlock + 4 * row, &offset, 4);
    std::memcpy(chunk + rows * (kBlock + 4) + 4 * row, &scale, 4);
  }
}

struct V16 {
  __m512 v;
  ELSI_512_INLINE static V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  ELSI_512_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
  ELSI_512_INLINE static V16 set1(float x) { return {_mm512_set1_ps(x)}; }
  ELSI_512_INLINE static V16 add(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
  ELSI_512_INLINE static V16 sub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  ELSI_512_INLINE static V16 mul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
  ELSI_512_INLINE static V16 div(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
  ELSI_512_INLINE static V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  ELSI_512_INLINE static V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where one is NaN
  ELSI_512_INLINE static V16 rint(V16 a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  ELSI_512_INLINE static V16 scale2(V16 a, V16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
  // Sums within lanes of 4: out[4 * lane + i] is that of the i-th argument.
  ELSI_512_INLINE static V16 sum4(V16 a, V16 b, V16 c, V16 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
    const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    return {_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)))};
  }
  // The four lanes of each argument added up: the sums of 16 vectors in their order.
  ELSI_512_INLINE static V16 sum16(V16 a, V16 b, V16 c, V16 d) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x88), _mm512_shuffle_f32x4(a.v, b.v, 0xdd));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x88), _mm512_shuffle_f32x4(c.v, d.v, 0xdd));
    return {_mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd))};
  }
};

#define ELSI_PATH ELSI_512
#define ELSI_PATH_INLINE ELSI_512_INLINE
#include "attention_body.h"

bool usable() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

}  // namespace

const Path kAvx512Vnni = {
    "avx512vnni", usable, quantise, multiply<4, false>, multiply<8, false>, multiply<4, true>, attend,
    gate,         merge,  divide, largest};

}  // namespace elsi
#endif
