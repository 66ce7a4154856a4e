// NEON with the dot-product instructions, and with the 8-bit matrix ones (i8mm) where a CPU has them.
//
// sdot multiplies signed by signed, so weights lose their zero point first: 4 bits become -8..7, 8 bits -128..127, and
// the rows' offsets, made for unsigned weights, are not used. The integer sums are the same. i8mm's usdot multiplies
// unsigned by signed and needs no such step.
#if defined(__aarch64__)
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include <cstring>

#include "path.h"

namespace elsi {
namespace {

constexpr int kPassRows = 4;  // 16 sums of 4 columns, of 32 registers

float32x4_t halves(const uint8_t* head) {  // 4 of 16 bits
  uint16x4_t bits;
  std::memcpy(&bits, head, sizeof bits);
  return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}

using Pass = void (*)(const QuantisedRows&, size_t, const Columns&);

// A group at a time, so that its weights are still in the cache for the rows that follow.
void all_groups(const Pass (&by_rows)[kPassRows], const QuantisedRows& rows, const Columns& columns) {
  for (size_t group = columns.first_group; group < columns.last_group; ++group) {
    Columns one = columns;
    one.first_group = group;
    one.last_group = group + 1;
    one.out += (group - columns.first_group) * kColumns;
    for (size_t row = 0; row < rows.count; row += kPassRows) {
      const size_t left = rows.count - row < kPassRows ? rows.count - row : kPassRows;
      by_rows[left - 1](rows, row, one);
    }
  }
}

namespace dot {
#define ELSI_NEON __attribute__((target("arch=armv8.2-a+dotprod")))
constexpr bool kUnsigned = false;
template <int kBits>
ELSI_NEON inline int32x4_t add(int32x4_t sum, uint8x16_t weights, int8x16_t row) {
  const int8x16_t zero = vdupq_n_s8(kBits == 4 ? 8 : -128);
  return vdotq_s32(sum, vsubq_s8(vreinterpretq_s8_u8(weights), zero), row);
}
#include "neon_body.h"
#undef ELSI_NEON
}  // namespace dot

namespace i8mm {
#define ELSI_NEON __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
constexpr bool kUnsigned = true;
template <int kBits>
ELSI_NEON inline int32x4_t add(int32x4_t sum, uint8x16_t weights, int8x16_t row) {
  return vusdotq_s32(sum, weights, row);
}
#include "neon_body.h"
#undef ELSI_NEON
}  // namespace i8mm

struct V16 {
  float32x4_t v[4];
#define ELSI_EACH(expression)                        \
  V16 out;                                           \
  for (int i = 0; i < 4; ++i) out.v[i] = expression; \
  return out;
  static V16 load(const float* p) { ELSI_EACH(vld1q_f32(p + 4 * i)) }
  void store(float* p) const {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v[i]);
  }
  static V16 set1(float x) { ELSI_EACH(vdupq_n_f32(x)) }
  static V16 add(V16 a, V16 b) { ELSI_EACH(vaddq_f32(a.v[i], b.v[i])) }
  static V16 sub(V16 a, V16 b) { ELSI_EACH(vsubq_f32(a.v[i], b.v[i])) }
  static V16 mul(V16 a, V16 b) { ELSI_EACH(vmulq_f32(a.v[i], b.v[i])) }
  static V16 div(V16 a, V16 b) { ELSI_EACH(vdivq_f32(a.v[i], b.v[i])) }
  static V16 fma(V16 a, V16 b, V16 c) { ELSI_EACH(vfmaq_f32(c.v[i], a.v[i], b.v[i])) }
  static V16 max(V16 a, V16 b) { ELSI_EACH(vmaxq_f32(a.v[i], b.v[i])) }
  static V16 rint(V16 a) { ELSI_EACH(vrndnq_f32(a.v[i])) }
  static V16 scale2(V16 a, V16 n) { ELSI_EACH(scale2(a.v[i], n.v[i])) }
#undef ELSI_EACH
  // Sums within lanes of 4: out[4 * lane + i] is that of the i-th argument.
  static V16 sum4(V16 a, V16 b, V16 c, V16 d) {
    V16 out;
    for (int i = 0; i < 4; ++i) out.v[i] = vpaddq_f32(vpaddq_f32(a.v[i], b.v[i]), vpaddq_f32(c.v[i], d.v[i]));
    return out;
  }
  // The four lanes of each argument added up: the sums of 16 vectors in their order.
  static V16 sum16(V16 a, V16 b, V16 c, V16 d) { return {{lanes(a), lanes(b), lanes(c), lanes(d)}}; }

 private:
  static float32x4_t lanes(V16 a) { return vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3])); }
  static float32x4_t scale2(float32x4_t a, float32x4_t n) {  // in two steps, as 2^n alone may be below the least float
    const uint32x4_t tiny = vcltq_f32(n, vdupq_n_f32(-126.0f));
    const float32x4_t safe = vbslq_f32(tiny, vaddq_f32(n, vdupq_n_f32(64.0f)), n);
    const float32x4_t by = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(safe), vdupq_n_s32(127)), 23));
    return vmulq_f32(vmulq_f32(by, a), vbslq_f32(tiny, vdupq_n_f32(0x1p-64f), vdupq_n_f32(1.0f)));
  }
};

#define ELSI_PATH
#define ELSI_PATH_INLINE inline
#include "attention_body.h"

bool has_dot() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
bool has_i8mm() { return has_dot() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0; }

}  // namespace

const Path kNeonDot = {"neon-dot",
                       has_dot,
                       kPortable.quantise,
                       dot::multiply<4, false>,
                       dot::multiply<8, false>,
                       dot::multiply<4, true>,
                       attend,
                       gate,
                       merge,
                       divide,
                       largest};
const Path kNeonI8mm = {"neon-i8mm",
                        has_i8mm,
                        kPortable.quantise,
                        i8mm::multiply<4, false>,
                        i8mm::multiply<8, false>,
                        i8mm::multiply<4, true>,
                        attend,
                        gate,
                        merge,
                        divide,
                        largest};

}  // namespace elsi
#endif
