// SPDX-License-Identifier: Apache-2.0
// In place of CUDA's header: fp16 as bits, as far as the kernels use it.
#pragma once

#include <cmath>
#include <cstdint>

struct __half {
  uint16_t bits;
};
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
  const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent     ? std::ldexp(1024.0f + mantissa, exponent - 25)
                                    : std::ldexp(static_cast<float>(mantissa), -24);
  return x.bits & 0x8000 ? -size : size;
}
// towards zero, so finite values stay finite
inline __half __float2half_rz(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (std::isnan(x)) return {0x7fff};
  if (std::isinf(x)) return {static_cast<uint16_t>(sign | 0x7c00)};
  if (size >= 65504.0f) return {static_cast<uint16_t>(sign | 0x7bff)};
  // size = mantissa * 2 ^ (exponent - 10), mantissa < 2048
  const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  const int mantissa = static_cast<int>(std::ldexp(size, 10 - exponent));
  return {static_cast<uint16_t>(sign | ((exponent + 14) << 10) + mantissa)};
}
// to the nearest, ties to even
inline __half __float2half_rn(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (std::isnan(x)) return {0x7fff};
  if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  // nearbyint rounds to even; a mantissa that becomes 2048 carries into the exponent
  const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return {static_cast<uint16_t>(sign | (((exponent + 14) << 10) + mantissa))};
}
