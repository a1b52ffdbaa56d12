// float16 and bfloat16 by integer arithmetic, for machines and moments without a conversion instruction.
#pragma once
#include <stdint.h>
#include <string.h>

namespace mill {

static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline float half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Scaling by 2^112 rebases the exponent and normalises subnormals exactly.
  const float scaled = bits_to_float(magnitude << 13) * bits_to_float(0x77800000u);
  return bits_to_float(sign | float_to_bits(scaled));
}

// Round to nearest even; overflow goes to infinity, NaN stays NaN.
static inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // from 65520 on
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is subnormal: adding 0.5 leaves its 10 bits, rounded, at the end of the mantissa.
    const float sum = bits_to_float(magnitude) + 0.5f;
    return (uint16_t)(sign | (float_to_bits(sum) - 0x3f000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

static inline float bf16_to_float(uint16_t value) { return bits_to_float((uint32_t)value << 16); }

static inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// As a factor of a product of bf16 values: rounded to nearest even, and 0 below 2^-56.
static inline uint16_t bf16_factor(float value) {
  return (float_to_bits(value) & 0x7fffffffu) < 0x23800000u ? 0 : float_to_bf16(value);
}

}  // namespace mill
