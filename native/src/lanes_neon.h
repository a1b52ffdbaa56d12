// Sixteen lanes in four 128-bit registers (AArch64 with the dot-product instructions; with TM_NEON_I8MM those of mixed
// signs as well). See lanes_scalar.h for the meaning.
#pragma once
#include <arm_neon.h>

#include "half.h"
#include "kernels.h"

namespace {

struct F { float32x4_t a, b, c, d; };
struct I { int32x4_t a, b, c, d; };
struct D { uint64x2_t a, b, c, d; };
typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

#define TM_EACH1(op, x) {op(x.a), op(x.b), op(x.c), op(x.d)}
#define TM_EACH2(op, x, y) {op(x.a, y.a), op(x.b, y.b), op(x.c, y.c), op(x.d, y.d)}
#define TM_EACH3(op, x, y, z) {op(x.a, y.a, z.a), op(x.b, y.b, z.b), op(x.c, y.c, z.c), op(x.d, y.d, z.d)}

// Not vmaxq and vminq, which treat zeros of different signs and what is not a number otherwise.
inline float32x4_t max4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline float32x4_t min4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
inline float32x4_t fma4(float32x4_t x, float32x4_t y, float32x4_t z) { return vfmaq_f32(z, x, y); }
inline float32x4_t half4(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline float32x4_t bf4(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline void put_half4(uint16_t* p, float32x4_t x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, F x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
inline F set1(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {v, v, v, v};
}
inline F add(F x, F y) { return TM_EACH2(vaddq_f32, x, y); }
inline F sub(F x, F y) { return TM_EACH2(vsubq_f32, x, y); }
inline F mul(F x, F y) { return TM_EACH2(vmulq_f32, x, y); }
inline F div(F x, F y) { return TM_EACH2(vdivq_f32, x, y); }
inline F fma(F x, F y, F z) { return TM_EACH3(fma4, x, y, z); }
inline F max(F x, F y) { return TM_EACH2(max4, x, y); }
inline F min(F x, F y) { return TM_EACH2(min4, x, y); }
inline F abs(F x) { return TM_EACH1(vabsq_f32, x); }
inline F load_half(const uint16_t* p) { return {half4(p), half4(p + 4), half4(p + 8), half4(p + 12)}; }
inline F load_bf16(const uint16_t* p) { return {bf4(p), bf4(p + 4), bf4(p + 8), bf4(p + 12)}; }
inline void store_half(uint16_t* p, F x) {
  put_half4(p, x.a);
  put_half4(p + 4, x.b);
  put_half4(p + 8, x.c);
  put_half4(p + 12, x.d);
}
inline void put_bf164(uint16_t* p, float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), upper = vshrq_n_u32(bits, 16);
  const uint32x4_t half = vaddq_u32(vandq_u32(upper, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, half), 16), quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
  vst1_u16(p, vmovn_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet)));
}
inline void store_bf16(uint16_t* p, F x) {
  put_bf164(p, x.a);
  put_bf164(p + 4, x.b);
  put_bf164(p + 8, x.c);
  put_bf164(p + 12, x.d);
}
inline void store_normal_bf16(uint16_t* p, F x) { store_bf16(p, x); }
template <int H>
inline float32x4_t butterfly4(float32x4_t x) {
  const float signs[4] = {1.0f, H == 1 ? -1.0f : 1.0f, H == 1 ? 1.0f : -1.0f, -1.0f};
  return fma4(x, vld1q_f32(signs), H == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2));
}
template <int H>
inline F butterfly(F x) { return TM_EACH1(butterfly4<H>, x); }
template <>
inline F butterfly<4>(F x) { return {vaddq_f32(x.a, x.b), vsubq_f32(x.a, x.b), vaddq_f32(x.c, x.d), vsubq_f32(x.c, x.d)}; }
template <>
inline F butterfly<8>(F x) { return {vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d), vsubq_f32(x.a, x.c), vsubq_f32(x.b, x.d)}; }
inline I as_int(F x) { return TM_EACH1(vreinterpretq_s32_f32, x); }
inline F as_float(I x) { return TM_EACH1(vreinterpretq_f32_s32, x); }
inline I iset1(int32_t x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {v, v, v, v};
}
inline I iadd(I x, I y) { return TM_EACH2(vaddq_s32, x, y); }
inline I imax(I x, I y) { return TM_EACH2(vmaxq_s32, x, y); }
inline I isub(I x, I y) { return TM_EACH2(vsubq_s32, x, y); }
inline I shift_left_23(I x) {
  return {vshlq_n_s32(x.a, 23), vshlq_n_s32(x.b, 23), vshlq_n_s32(x.c, 23), vshlq_n_s32(x.d, 23)};
}
inline int32x4_t right7(int32x4_t x) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), 7)); }
inline I shift_right_7(I x) { return TM_EACH1(right7, x); }
inline I bit_and(I x, I y) { return TM_EACH2(vandq_s32, x, y); }
inline int32x4_t up16(int32x4_t x) { return vshlq_n_s32(x, 16); }
inline I shift_left_16(I x) { return TM_EACH1(up16, x); }
inline I shift_left_15(I x) {
  return {vshlq_n_s32(x.a, 15), vshlq_n_s32(x.b, 15), vshlq_n_s32(x.c, 15), vshlq_n_s32(x.d, 15)};
}
inline void store_int(int32_t* p, I x) {
  vst1q_s32(p, x.a);
  vst1q_s32(p + 4, x.b);
  vst1q_s32(p + 8, x.c);
  vst1q_s32(p + 12, x.d);
}
inline I load_int(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
inline void store_low_bytes(int8_t* p, I x) {
  const int16x8_t low = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b)), high = vcombine_s16(vmovn_s32(x.c), vmovn_s32(x.d));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
inline float32x4_t unless_less(float32x4_t value, float32x4_t x, float32x4_t y) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, y)));
}
inline F zero_where_less(F value, F x, F y) { return TM_EACH3(unless_less, value, x, y); }
inline uint32_t bits_of(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  const uint16x8_t low = vcombine_u16(vmovn_u32(a), vmovn_u32(b)), high = vcombine_u16(vmovn_u32(c), vmovn_u32(d));
  const uint16_t places[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  const uint16x8_t place = vld1q_u16(places);
  return (uint32_t)vaddvq_u16(vandq_u16(low, place)) | (uint32_t)vaddvq_u16(vandq_u16(high, place)) << 8;
}
inline uint32_t mask_ge(F x, F y) {
  return bits_of(vcgeq_f32(x.a, y.a), vcgeq_f32(x.b, y.b), vcgeq_f32(x.c, y.c), vcgeq_f32(x.d, y.d));
}
inline uint32_t mask_int_ge(I x, I y) {
  return bits_of(vcgeq_s32(x.a, y.a), vcgeq_s32(x.b, y.b), vcgeq_s32(x.c, y.c), vcgeq_s32(x.d, y.d));
}

inline D dset1(uint32_t x) {
  const uint64x2_t v = vdupq_n_u64(x);
  return {v, v, v, v};
}
inline uint64x2_t mul2(uint64x2_t x, uint64x2_t y) { return vmull_u32(vmovn_u64(x), vmovn_u64(y)); }
inline uint64x2_t upper2(uint64x2_t x) { return vshrq_n_u64(x, 32); }
inline D dadd(D x, D y) { return TM_EACH2(vaddq_u64, x, y); }
inline D dxor(D x, D y) { return TM_EACH2(veorq_u64, x, y); }
inline D dxor3(D x, D y, D z) { return dxor(dxor(x, y), z); }
inline D dmul(D x, D y) { return TM_EACH2(mul2, x, y); }
inline D dupper(D x) { return TM_EACH1(upper2, x); }
inline D block_numbers() {
  const uint64_t numbers[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  return {vld1q_u64(numbers), vld1q_u64(numbers + 2), vld1q_u64(numbers + 4), vld1q_u64(numbers + 6)};
}
inline D dload(const uint64_t* p) { return {vld1q_u64(p), vld1q_u64(p + 2), vld1q_u64(p + 4), vld1q_u64(p + 6)}; }
inline uint8x16_t zero_places(int32x4_t x, uint8x16_t places) { return vandq_u8(vceqzq_u8(vreinterpretq_u8_s32(x)), places); }
inline uint64_t zero_bytes(I x) {
  const uint8_t eight[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t places = vld1q_u8(eight);
  const uint8x16_t low = vpaddq_u8(zero_places(x.a, places), zero_places(x.b, places));
  const uint8x16_t high = vpaddq_u8(zero_places(x.c, places), zero_places(x.d, places));
  const uint8x16_t four = vpaddq_u8(low, high);
  return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(four, four)), 0);
}
inline uint64x2_t word_pairs(uint64x2_t x, uint64x2_t y) { return vsliq_n_u64(x, y, 32); }
inline int32x4_t first_of(uint64x2_t x, uint64x2_t y) { return vreinterpretq_s32_u64(vzip1q_u64(x, y)); }
inline int32x4_t second_of(uint64x2_t x, uint64x2_t y) { return vreinterpretq_s32_u64(vzip2q_u64(x, y)); }
inline void words_in_order(D w0, D w1, D w2, D w3, I* first, I* second) {
  const D low = TM_EACH2(word_pairs, w0, w1), high = TM_EACH2(word_pairs, w2, w3);
  *first = TM_EACH2(first_of, low, high);
  *second = TM_EACH2(second_of, low, high);
}

inline float sum_lanes(F x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float max_lanes(F x) {
  const float32x4_t four = max4(max4(x.a, x.c), max4(x.b, x.d));
  const float32x4_t two = max4(four, vextq_f32(four, four, 2));
  const float p = vgetq_lane_f32(two, 0), q = vgetq_lane_f32(two, 1);
  return p > q ? p : q;
}
inline int32_t sum_int_lanes(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d))); }

inline int32x4_t max_of_four(I x) { return vmaxq_s32(vmaxq_s32(x.a, x.b), vmaxq_s32(x.c, x.d)); }
inline int32x4_t sum_of_four(I x) { return vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d)); }
// Neighbours side by side, so that a step halves two vectors at once.
inline I4 max_int_lanes4(I p, I q, I r, I s) {
  return (I4)vpmaxq_s32(vpmaxq_s32(max_of_four(p), max_of_four(q)), vpmaxq_s32(max_of_four(r), max_of_four(s)));
}
inline I4 sum_int_lanes4(I p, I q, I r, I s) {
  return (I4)vpaddq_s32(vpaddq_s32(sum_of_four(p), sum_of_four(q)), vpaddq_s32(sum_of_four(r), sum_of_four(s)));
}
inline I4 store_codes4(int8_t* const* to, const I* low, const I* high) {
  I sums[4];
  for (int i = 0; i < 4; i++) {
    store_low_bytes(to[i], low[i]);
    store_low_bytes(to[i] + 16, high[i]);
    sums[i] = iadd(low[i], high[i]);
  }
  return sum_int_lanes4(sums[0], sums[1], sums[2], sums[3]);
}

constexpr int kLinearWidth = 8;
constexpr int kLinearRows = 4;
constexpr int kAttentionRows = 4;
constexpr int kAccumulators = 6;
constexpr int kDenseAccumulators = 8;

struct LF { float32x4_t a, b; };
struct LI { int32x4_t a, b; };
struct LB { uint8x16_t a, b; };

inline LF lload(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void lstore(float* p, LF x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
}
inline LF lset1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline LF ladd(LF x, LF y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline LF lmul(LF x, LF y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline LF lfma(LF x, LF y, LF z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
inline LF lload_half(const uint16_t* p) { return {half4(p), half4(p + 4)}; }
inline LF lload_exponents(const uint8_t* p) {
  const uint16x8_t bytes = vmovl_u8(vld1_u8(p));
  return {vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(bytes)), 23)),
          vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_high_u16(bytes)), 23))};
}
inline LI liset1(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline LF las_float(LI x) { return {vreinterpretq_f32_s32(x.a), vreinterpretq_f32_s32(x.b)}; }
inline LB load_bytes(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
inline LB low_nibbles(LB x) { return {vandq_u8(x.a, vdupq_n_u8(15)), vandq_u8(x.b, vdupq_n_u8(15))}; }
inline LB high_nibbles(LB x) { return {vshrq_n_u8(x.a, 4), vshrq_n_u8(x.b, 4)}; }
inline LB load_table(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p)}; }
inline LB look_up(LB table, LB indices) { return {vqtbl1q_u8(table.a, indices.a), vqtbl1q_u8(table.b, indices.b)}; }
inline int8x16_t broadcast16(const int8_t* x) {
  int32_t word;
  memcpy(&word, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(word));
}
inline LB broadcast4(const int8_t* x) {
  const uint8x16_t wide = vreinterpretq_u8_s8(broadcast16(x));
  return {wide, wide};
}
inline int8x16_t with_sign(uint8x16_t x) { return vreinterpretq_s8_u8(x); }
#if defined(TM_NEON_I8MM)
inline LI dot4_u8(LI acc, LB w, LB x) {
  return {vusdotq_s32(acc.a, w.a, with_sign(x.a)), vusdotq_s32(acc.b, w.b, with_sign(x.b))};
}
#else
// With signed bytes only: w * x = (w - 128) * x + 128 * x, and 128 is 64 twice.
inline int32x4_t dot16_u8(int32x4_t acc, uint8x16_t w, int8x16_t x) {
  const int8x16_t some = vdupq_n_s8(64);
  const int32x4_t rest = vdotq_s32(vdotq_s32(vdupq_n_s32(0), x, some), x, some);
  return vaddq_s32(vdotq_s32(acc, with_sign(veorq_u8(w, vdupq_n_u8(128))), x), rest);
}
inline LI dot4_u8(LI acc, LB w, LB x) {
  return {dot16_u8(acc.a, w.a, with_sign(x.a)), dot16_u8(acc.b, w.b, with_sign(x.b))};
}
#endif
// Codes below 128 have the same sign either way.
inline LI dot4_u7(LI acc, LB w, LB x) {
  return {vdotq_s32(acc.a, with_sign(w.a), with_sign(x.a)), vdotq_s32(acc.b, with_sign(w.b), with_sign(x.b))};
}
// By a switch, because the instructions hold the number of the word.
#define TM_EACH_WORD(op, acc, w)          \
  switch (b) {                            \
    case 0: return op(acc, w, inputs, 0); \
    case 1: return op(acc, w, inputs, 1); \
    case 2: return op(acc, w, inputs, 2); \
    default: return op(acc, w, inputs, 3); \
  }
inline int32x4_t dot16_word(int32x4_t acc, uint8x16_t w, int8x16_t inputs, int b) {
  TM_EACH_WORD(vdotq_laneq_s32, acc, with_sign(w))
}
inline LI dot4_word(LI acc, LB w, const int8_t* x, int b) {
  const int8x16_t inputs = vld1q_s8(x);
  return {dot16_word(acc.a, w.a, inputs, b), dot16_word(acc.b, w.b, inputs, b)};
}
#if defined(TM_NEON_I8MM)
constexpr bool kSignedCodes = false;
inline LB wide_codes_of(LB a) { return a; }
inline int32x4_t dot16_wide(int32x4_t acc, uint8x16_t w, int8x16_t inputs, int b) { TM_EACH_WORD(vusdotq_laneq_s32, acc, w) }
inline LI dot4_wide(LI acc, LB w, const int8_t* x, int b) {
  const int8x16_t inputs = vld1q_s8(x);
  return {dot16_wide(acc.a, w.a, inputs, b), dot16_wide(acc.b, w.b, inputs, b)};
}
#else
constexpr bool kSignedCodes = true;
inline LB wide_codes_of(LB a) { return {veorq_u8(a.a, vdupq_n_u8(128)), veorq_u8(a.b, vdupq_n_u8(128))}; }
inline LI dot4_wide(LI acc, LB w, const int8_t* x, int b) { return dot4_word(acc, w, x, b); }
#endif
#undef TM_EACH_WORD
typedef LI LS;
inline LS sums_from(LI start) { return start; }
inline LS dot4_u6(LS acc, LB w, const int8_t* x, int b) { return dot4_word(acc, w, x, b); }
inline LI sums_to(LI, LS sums) { return sums; }
inline uint8x16_t two_bits16(uint8x16_t x, int right) { return vandq_u8(vshlq_u8(x, vdupq_n_s8((int8_t)-right)), vdupq_n_u8(3)); }
inline LB two_bits(LB x, int right) { return {two_bits16(x.a, right), two_bits16(x.b, right)}; }
inline uint8x16_t upper16(uint8x16_t nibbles, uint8x16_t upper, int left, int mask) {
  const uint8x16_t placed = vshlq_u8(upper, vdupq_n_s8((int8_t)left));  // to the right where that is negative
  return vbslq_u8(vdupq_n_u8((uint8_t)mask), placed, nibbles);
}
inline LB add_upper_bits(LB nibbles, LB upper, int left, int mask) {
  return {upper16(nibbles.a, upper.a, left, mask), upper16(nibbles.b, upper.b, left, mask)};
}
inline LI lload_words(const uint8_t* p) {
  return {vreinterpretq_s32_u8(vld1q_u8(p)), vreinterpretq_s32_u8(vld1q_u8(p + 16))};
}
inline int32x4_t field4(int32x4_t words, int shift, int mask, int32x4_t base) {
  const uint32x4_t moved = vshlq_u32(vreinterpretq_u32_s32(words), vdupq_n_s32(-shift));
  return vorrq_s32(base, vandq_s32(vreinterpretq_s32_u32(moved), vdupq_n_s32(mask)));
}
inline LI lfield(LI words, int shift, int mask, LI base) {
  return {field4(words.a, shift, mask, base.a), field4(words.b, shift, mask, base.b)};
}
inline float32x4_t round_half4(float32x4_t a) { return vcvt_f32_f16(vcvt_f16_f32(a)); }
inline LF lround_half(LF x) { return {round_half4(x.a), round_half4(x.b)}; }

struct LPair { LF even, odd; };
constexpr int kPairWords = 2;
inline LPair pairs_of(uint8x16_t first, uint8x16_t second) {
  const uint32x4_t a = vreinterpretq_u32_u8(first), b = vreinterpretq_u32_u8(second);
  const uint32x4_t upper = vdupq_n_u32(0xffff0000u);
  return {{vreinterpretq_f32_u32(vshlq_n_u32(a, 16)), vreinterpretq_f32_u32(vshlq_n_u32(b, 16))},
          {vreinterpretq_f32_u32(vandq_u32(a, upper)), vreinterpretq_f32_u32(vandq_u32(b, upper))}};
}
inline LPair load_rows(const uint16_t* first, const uint16_t* second) {
  return {{bf4(first), bf4(first + 4)}, {bf4(second), bf4(second + 4)}};
}
inline LPair set1_pair(const float* x) { return {lset1(x[0]), lset1(x[1])}; }
inline LF dot2(LF acc, LPair w, LPair x) { return lfma(w.even, x.even, lfma(w.odd, x.odd, acc)); }
inline LPair load_pairs(const uint8_t* p) { return pairs_of(vld1q_u8(p), vld1q_u8(p + 16)); }
inline void load_packed(const uint8_t* p, const uint8_t* highs, LPair* w) {
  const LB table = load_table(highs), indices = load_bytes(p);
  for (int i = 0; i < 2; i++) {
    const LB low = load_bytes(p + 64 + 64 * i), high = look_up(table, i ? high_nibbles(indices) : low_nibbles(indices));
    w[2 * i] = pairs_of(vzip1q_u8(low.a, high.a), vzip1q_u8(low.b, high.b));
    w[2 * i + 1] = pairs_of(vzip2q_u8(low.a, high.a), vzip2q_u8(low.b, high.b));
  }
}
inline void transpose_pairs(const uint16_t* const* rows, int at, I* words) {
  for (int i = 0; i < 16; i++) {
    int32_t column[16];
    for (int r = 0; r < 16; r++) memcpy(column + r, rows[r] + at + 2 * i, 4);
    words[i] = load_int(column);
  }
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

#undef TM_EACH1
#undef TM_EACH2
#undef TM_EACH3

}  // namespace
