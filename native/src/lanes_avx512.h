// Sixteen lanes in one 512-bit register (AVX-512 F, BW, VL, DQ and VNNI); with TM_AVX512_BF16 products of bf16 pairs as
// well. See lanes_scalar.h for the meaning.
#pragma once
#include <immintrin.h>

#include "half.h"
#include "kernels.h"

namespace {

typedef __m512 F;
typedef __m512i I;
typedef __m512i D;
typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F load_bf16(const uint16_t* p) {
#if defined(TM_AMX)
  // Each value to the upper half of its lane, in one step.
  const I order = _mm512_set_epi64(0x1f1e00001d1c0000, 0x1b1a000019180000, 0x1716000015140000, 0x1312000011100000,
                                   0x0f0e00000d0c0000, 0x0b0a000009080000, 0x0706000005040000, 0x0302000001000000);
  const I values = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi8(0xcccccccccccccccc, order, values));
#else
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
#endif
}
inline void store_half(uint16_t* p, F a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bf16(uint16_t* p, F a) {
  const I bits = _mm512_castps_si512(a), upper = _mm512_srli_epi32(bits, 16);
  const I rounded = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_and_si512(upper, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff)));
  const I quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
  const I all = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(all));
}
inline __m512i interleaved(const uint16_t* a, const uint16_t* b) {
  const I order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                   4, 19, 3, 18, 2, 17, 1, 16, 0);
  const I both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)a)),
                                    _mm256_loadu_si256((const __m256i*)b), 1);
  return _mm512_permutexvar_epi16(order, both);
}
inline void store_pairs(uint16_t* p, const uint16_t* a, const uint16_t* b) { _mm512_storeu_si512(p, interleaved(a, b)); }
#if defined(TM_AMX) || defined(TM_AVX512_BF16)
inline void store_normal_bf16(uint16_t* p, F a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a)); }
#else
inline void store_normal_bf16(uint16_t* p, F a) { store_bf16(p, a); }
#endif
#if defined(TM_AMX)
inline I fixed_pairs(F a, F b) { return _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b)); }
inline I max_words(I a, I b) { return _mm512_max_epi16(a, b); }
inline bool any_word_above(I a, int limit) { return _mm512_cmpgt_epi16_mask(a, _mm512_set1_epi16((short)limit)) != 0; }
inline I weight_pairs(I words, const uint8_t* below) {
  const I less = _mm512_maskz_permutexvar_epi8(0x5555555555555555, _mm512_srli_epi16(words, 1), _mm512_load_si512(below));
  return _mm512_maskz_sub_epi16(_mm512_cmpgt_epi16_mask(words, _mm512_set1_epi16(127)), words, less);
}
inline I lower_weights(I weights, int by) {
  const I lower = _mm512_subs_epu16(weights, _mm512_set1_epi16((short)(128 * by)));
  return _mm512_maskz_mov_epi16(_mm512_cmpgt_epi16_mask(lower, _mm512_set1_epi16(127)), lower);
}
inline F keep_lanes(F a, int first, int end) {
  const I lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __mmask16 from_first = _mm512_cmpge_epi32_mask(lanes, _mm512_set1_epi32(first));
  const __mmask16 kept = _mm512_mask_cmplt_epi32_mask(from_first, lanes, _mm512_set1_epi32(end));
  return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), kept, a);
}
#endif
template <int H>
inline F butterfly(F a) {
  constexpr float a1 = H == 1 ? -1 : 1, a2 = H == 2 ? -1 : 1, a4 = H == 4 ? -1 : 1, a8 = H == 8 ? -1 : 1;
  const F signs = _mm512_setr_ps(1, a1, a2, a1 * a2, a4, a4 * a1, a4 * a2, a4 * a2 * a1, a8, a8 * a1, a8 * a2, a8 * a1 * a2,
                                 a8 * a4, a8 * a4 * a1, a8 * a4 * a2, a8 * a4 * a2 * a1);
  const F other = H == 1 ? _mm512_permute_ps(a, 0xb1) : H == 2 ? _mm512_permute_ps(a, 0x4e)
                : H == 4 ? _mm512_shuffle_f32x4(a, a, 0xb1) : _mm512_shuffle_f32x4(a, a, 0x4e);
  return _mm512_fmadd_ps(a, signs, other);
}
inline I as_int(F a) { return _mm512_castps_si512(a); }
inline F as_float(I a) { return _mm512_castsi512_ps(a); }
inline I iset1(int32_t x) { return _mm512_set1_epi32(x); }
inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
inline I imax(I a, I b) { return _mm512_max_epi32(a, b); }
inline I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I shift_left_23(I a) { return _mm512_slli_epi32(a, 23); }
inline I shift_right_7(I a) { return _mm512_srli_epi32(a, 7); }
inline I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
inline I shift_left_16(I a) { return _mm512_slli_epi32(a, 16); }
inline I shift_left_15(I a) { return _mm512_slli_epi32(a, 15); }
inline void store_int(int32_t* p, I a) { _mm512_storeu_si512(p, a); }
inline I load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_low_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
inline F zero_where_less(F value, F a, F b) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), value);
}
inline uint32_t mask_ge(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline uint32_t mask_int_ge(I a, I b) { return _mm512_cmpge_epi32_mask(a, b); }

inline D dset1(uint32_t x) { return _mm512_set1_epi64(x); }
inline D dadd(D a, D b) { return _mm512_add_epi64(a, b); }
inline D dxor(D a, D b) { return _mm512_xor_si512(a, b); }
inline D dxor3(D a, D b, D c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
inline D dmul(D a, D b) { return _mm512_mul_epu32(a, b); }
inline D dupper(D a) { return _mm512_srli_epi64(a, 32); }
inline D block_numbers() { return _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0); }
inline D dload(const uint64_t* p) { return _mm512_loadu_si512(p); }
inline uint64_t zero_bytes(I a) { return _mm512_testn_epi8_mask(a, a); }
inline void words_in_order(D w0, D w1, D w2, D w3, I* first, I* second) {
  const D low = _mm512_mask_mov_epi32(w0, 0xaaaa, _mm512_slli_epi64(w1, 32));
  const D high = _mm512_mask_mov_epi32(w2, 0xaaaa, _mm512_slli_epi64(w3, 32));
  *first = _mm512_unpacklo_epi64(low, high);
  *second = _mm512_unpackhi_epi64(low, high);
}

inline float sum4(__m128 x) {
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float max4(__m128 x) {
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline __m256 high_half(F a) { return _mm512_extractf32x8_ps(a, 1); }
inline float sum_lanes(F a) {
  const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a), high_half(a));
  return sum4(_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
inline float max_lanes(F a) {
  const __m256 x = _mm256_max_ps(_mm512_castps512_ps256(a), high_half(a));
  return max4(_mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
inline int32_t sum_int_lanes(I a) { return _mm512_reduce_add_epi32(a); }

// Neighbours side by side, so that a step halves two vectors at once.
inline F4 max_lanes4(F a, F b, F c, F d) {
  const F ab = max(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)), cd = max(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  const F all = max(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), high_half(all));
  return (F4)_mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline F4 ceil4(F4 a) { return (F4)_mm_ceil_ps((__m128)a); }
inline I4 max_int_lanes4(I a, I b, I c, I d) {
  const I ab = imax(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const I cd = imax(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const I all = imax(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return (I4)_mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
inline I4 sum_int_lanes4(I a, I b, I c, I d) {
  const I ab = iadd(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const I cd = iadd(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const I all = iadd(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return (I4)_mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
inline I4 store_codes4(int8_t* const* to, const I* low, const I* high) {
  const I order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), ones = _mm512_set1_epi8(1);
  I sums[2];
  for (int i = 0; i < 2; i++) {
    const I words = _mm512_packs_epi32(low[2 * i], high[2 * i]), next = _mm512_packs_epi32(low[2 * i + 1], high[2 * i + 1]);
    const I bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words, next));
    _mm256_storeu_si256((__m256i*)to[2 * i], _mm512_castsi512_si256(bytes));
    _mm256_storeu_si256((__m256i*)to[2 * i + 1], _mm512_extracti64x4_epi64(bytes, 1));
    sums[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, bytes);
  }
  // Of each vector's four quarters two belong to one group.
  const I pairs = iadd(_mm512_unpacklo_epi64(sums[0], sums[1]), _mm512_unpackhi_epi64(sums[0], sums[1]));
  const I quarters = iadd(pairs, _mm512_shuffle_i64x2(pairs, pairs, 0xb1));
  const I4 first = (I4)_mm512_castsi512_si128(quarters), second = (I4)_mm512_extracti32x4_epi32(quarters, 2);
  return __builtin_shufflevector(first, second, 0, 4, 2, 6) + __builtin_shufflevector(first, second, 1, 5, 3, 7);
}

constexpr int kLinearWidth = 16;
constexpr int kLinearRows = 12;
constexpr int kAttentionRows = 12;
constexpr int kAccumulators = 24;
constexpr int kDenseAccumulators = 24;

typedef F LF;
typedef I LI;
typedef __m512i LB;

inline LF lload(const float* p) { return load(p); }
inline void lstore(float* p, LF a) { store(p, a); }
inline LF lset1(float x) { return set1(x); }
inline LF ladd(LF a, LF b) { return add(a, b); }
inline LF lmul(LF a, LF b) { return mul(a, b); }
inline LF lfma(LF a, LF b, LF c) { return fma(a, b, c); }
inline LF lload_half(const uint16_t* p) { return load_half(p); }
inline LF lload_exponents(const uint8_t* p) { return as_float(shift_left_23(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))); }
inline LI liset1(int32_t x) { return iset1(x); }
inline LF las_float(LI a) { return as_float(a); }
inline LB load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline LB low_nibbles(LB a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline LB high_nibbles(LB a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
inline LB load_table(const uint8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
inline LB look_up(LB table, LB indices) { return _mm512_shuffle_epi8(table, indices); }
// Written in assembly because compilers copy registers around the intrinsic in unrolled loops.
inline LI dot4_u8(LI acc, LB w, const int8_t* x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const int32_t*)x));
  return acc;
}
constexpr bool kSignedCodes = false;
typedef LI LS;
inline LB wide_codes_of(LB a) { return a; }
inline LI dot4_wide(LI acc, LB w, const int8_t* x, int b) { return dot4_u8(acc, w, x + 4 * b); }
inline LS sums_from(LI start) { return start; }
inline LS dot4_u6(LS acc, LB w, const int8_t* x, int b) { return dot4_u8(acc, w, x + 4 * b); }
inline LI sums_to(LI, LS sums) { return sums; }
inline LB broadcast4(const int8_t* x) {
  int32_t word;
  memcpy(&word, x, 4);
  return _mm512_set1_epi32(word);
}
inline LI dot4_u8(LI acc, LB w, LB x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
}
inline LI dot4_u7(LI acc, LB w, LB x) { return dot4_u8(acc, w, x); }
inline LB two_bits(LB a, int right) { return _mm512_and_si512(_mm512_srli_epi16(a, (unsigned)right), _mm512_set1_epi8(3)); }
inline LB add_upper_bits(LB nibbles, LB upper, int left, int mask) {
  const __m512i placed = left < 0 ? _mm512_srli_epi16(upper, (unsigned)-left) : _mm512_slli_epi16(upper, (unsigned)left);
  return _mm512_ternarylogic_epi32(nibbles, placed, _mm512_set1_epi8((char)mask), 0xf8);  // nibbles | (placed & mask)
}
inline LI lload_words(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline LI lfield(LI words, int shift, int mask, LI base) {
  return _mm512_ternarylogic_epi32(base, _mm512_srli_epi32(words, (unsigned)shift), iset1(mask), 0xf8);  // base | (words & mask)
}
inline LF lround_half(LF a) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#if defined(TM_AVX512_BF16)
typedef __m512i LPair;
constexpr int kPairWords = 1;
inline LPair pairs_of(__m512i words) { return words; }
inline LPair load_rows(const uint16_t* first, const uint16_t* second) { return interleaved(first, second); }
inline LPair set1_pair(const float* x) { return _mm512_castps_si512(_mm512_set1_ps(*x)); }
inline LF dot2(LF acc, LPair w, LPair x) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
}
#else
struct LPair { LF even, odd; };
constexpr int kPairWords = 2;
inline LPair pairs_of(__m512i words) {
  return {as_float(_mm512_slli_epi32(words, 16)), as_float(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)))};
}
inline LPair load_rows(const uint16_t* first, const uint16_t* second) { return {load_bf16(first), load_bf16(second)}; }
inline LPair set1_pair(const float* x) { return {set1(x[0]), set1(x[1])}; }
inline LF dot2(LF acc, LPair w, LPair x) { return fma(w.even, x.even, fma(w.odd, x.odd, acc)); }
#endif
inline LPair load_pairs(const uint8_t* p) { return pairs_of(_mm512_loadu_si512(p)); }
inline void load_packed(const uint8_t* p, const uint8_t* highs, LPair* w) {
  const LB table = load_table(highs), indices = load_bytes(p);
  for (int i = 0; i < 2; i++) {
    const __m512i low = _mm512_loadu_si512(p + 64 + 64 * i), high = look_up(table, i ? high_nibbles(indices) : low_nibbles(indices));
    w[2 * i] = pairs_of(_mm512_unpacklo_epi8(low, high));
    w[2 * i + 1] = pairs_of(_mm512_unpackhi_epi8(low, high));
  }
}
inline void transpose_pairs(const uint16_t* const* rows, int at, I* words) {
  I fours[16];  // of rows 4 g to 4 g + 3: quarter q of fours[4 g + j] has word 4 q + j
  for (int g = 0; g < 4; g++) {
    I row[4];
    for (int i = 0; i < 4; i++) row[i] = _mm512_loadu_si512(rows[4 * g + i] + at);
    const I low = _mm512_unpacklo_epi32(row[0], row[1]), high = _mm512_unpackhi_epi32(row[0], row[1]);
    const I other_low = _mm512_unpacklo_epi32(row[2], row[3]), other_high = _mm512_unpackhi_epi32(row[2], row[3]);
    fours[4 * g] = _mm512_unpacklo_epi64(low, other_low);
    fours[4 * g + 1] = _mm512_unpackhi_epi64(low, other_low);
    fours[4 * g + 2] = _mm512_unpacklo_epi64(high, other_high);
    fours[4 * g + 3] = _mm512_unpackhi_epi64(high, other_high);
  }
  for (int j = 0; j < 4; j++) {
    const I even = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88), odd = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
    const I other_even = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
    const I other_odd = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
    words[j] = _mm512_shuffle_i32x4(even, other_even, 0x88);
    words[4 + j] = _mm512_shuffle_i32x4(odd, other_odd, 0x88);
    words[8 + j] = _mm512_shuffle_i32x4(even, other_even, 0xdd);
    words[12 + j] = _mm512_shuffle_i32x4(odd, other_odd, 0xdd);
  }
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
