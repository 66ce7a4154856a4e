// 16-bit floats (IEEE 754 binary16) in plain C++, as the conversion instructions of every path have them.
#pragma once

#include <cstdint>
#include <cstring>

namespace elsi {

constexpr uint16_t kHalfInfinity = 0x7c00;

inline bool is_finite_half(uint16_t half) { return (half & kHalfInfinity) != kHalfInfinity; }

// Rounded to nearest, ties to even; infinity from 65520 on, and for what is no number.
inline uint16_t to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u) return sign | kHalfInfinity;  // 65536 and more
  if (bits < 0x38800000u) {                              // below 2^-14: a multiple of 2^-24, which 0.5's last bit is
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return sign | static_cast<uint16_t>(bits - 0x3f000000u);
  }
  bits += 0xfffu + (bits >> 13 & 1u);
  return sign | static_cast<uint16_t>((bits - 0x38000000u) >> 13);
}

// Exact, for finite ones.
inline float from_half(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  float out = static_cast<float>(magnitude) * 0x1p-24f;  // below 2^-14; no subnormal float on the way
  if (magnitude >= 0x400u) {
    const uint32_t bits = (magnitude << 13) + 0x38000000u;
    std::memcpy(&out, &bits, 4);
  }
  return half & 0x8000u ? -out : out;
}

}  // namespace elsi
