// Sixteen lanes in two 256-bit registers (AVX2, FMA, F16C); with TM_AVX_VNNI the VEX form of vpdpbusd as well. See
// lanes_scalar.h for the meaning.
#pragma once
#include <immintrin.h>

#include "half.h"
#include "kernels.h"

namespace {

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct D { __m256i a, b; };
typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline __m256 half8(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline __m256 bf8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F load_half(const uint16_t* p) { return {half8(p), half8(p + 8)}; }
inline F load_bf16(const uint16_t* p) { return {bf8(p), bf8(p + 8)}; }
inline void store_half(uint16_t* p, F x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline __m256i bf16_of(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16);
  const __m256i half = _mm256_add_epi32(_mm256_and_si256(upper, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline void store_bf16(uint16_t* p, F x) {
  const __m256i both = _mm256_packus_epi32(bf16_of(x.a), bf16_of(x.b));  // quarters 0, 2, 1, 3
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
}
inline void store_normal_bf16(uint16_t* p, F x) { store_bf16(p, x); }
template <int H>
inline __m256 butterfly8(__m256 x) {
  const __m256 signs = _mm256_blend_ps(_mm256_set1_ps(1.0f), _mm256_set1_ps(-1.0f), H == 1 ? 0xaa : H == 2 ? 0xcc : 0xf0);
  const __m256 other = H == 1 ? _mm256_permute_ps(x, 0xb1) : H == 2 ? _mm256_permute_ps(x, 0x4e) : _mm256_permute2f128_ps(x, x, 1);
  return _mm256_fmadd_ps(x, signs, other);
}
template <int H>
inline F butterfly(F x) { return {butterfly8<H>(x.a), butterfly8<H>(x.b)}; }
template <>
inline F butterfly<8>(F x) { return {_mm256_add_ps(x.a, x.b), _mm256_sub_ps(x.a, x.b)}; }
inline I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I imax(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline I isub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I shift_left_23(I x) { return {_mm256_slli_epi32(x.a, 23), _mm256_slli_epi32(x.b, 23)}; }
inline I shift_right_7(I a) { return {_mm256_srli_epi32(a.a, 7), _mm256_srli_epi32(a.b, 7)}; }
inline I bit_and(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I shift_left_16(I x) { return {_mm256_slli_epi32(x.a, 16), _mm256_slli_epi32(x.b, 16)}; }
inline I shift_left_15(I x) { return {_mm256_slli_epi32(x.a, 15), _mm256_slli_epi32(x.b, 15)}; }
inline void store_int(int32_t* p, I x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
inline I load_int(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline void store_low_bytes(int8_t* p, I x) {
  const __m256i low = _mm256_set1_epi32(255);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  const __m256i words = _mm256_permute4x64_epi64(packed, 0xd8);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i*)p, bytes);
}
inline F zero_where_less(F value, F x, F y) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NLT_UQ), value.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, y.b, _CMP_NLT_UQ), value.b)};
}
inline uint32_t mask_ge(F x, F y) {
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)) |
         (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)) << 8;
}
inline uint32_t mask_int_ge(I x, I y) {
  const uint32_t less_a = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(y.a, x.a)));
  const uint32_t less_b = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(y.b, x.b)));
  return ~(less_a | less_b << 8) & 0xffffu;
}

inline D dset1(uint32_t x) { return {_mm256_set1_epi64x(x), _mm256_set1_epi64x(x)}; }
inline D dadd(D x, D y) { return {_mm256_add_epi64(x.a, y.a), _mm256_add_epi64(x.b, y.b)}; }
inline D dxor(D x, D y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline D dxor3(D x, D y, D z) { return dxor(dxor(x, y), z); }
inline D dmul(D x, D y) { return {_mm256_mul_epu32(x.a, y.a), _mm256_mul_epu32(x.b, y.b)}; }
inline D dupper(D x) { return {_mm256_srli_epi64(x.a, 32), _mm256_srli_epi64(x.b, 32)}; }
inline D block_numbers() { return {_mm256_set_epi64x(5, 1, 4, 0), _mm256_set_epi64x(7, 3, 6, 2)}; }
inline D dload(const uint64_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)}; }
inline uint64_t zero_bytes(I x) {
  const __m256i zero = _mm256_setzero_si256();
  const uint32_t a = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(x.a, zero));
  const uint32_t b = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(x.b, zero));
  return a | (uint64_t)b << 32;
}
inline __m256i word_pairs(__m256i x, __m256i y) { return _mm256_blend_epi32(x, _mm256_slli_epi64(y, 32), 0xaa); }
inline void words_in_order(D w0, D w1, D w2, D w3, I* first, I* second) {
  const D low = {word_pairs(w0.a, w1.a), word_pairs(w0.b, w1.b)}, high = {word_pairs(w2.a, w3.a), word_pairs(w2.b, w3.b)};
  *first = {_mm256_unpacklo_epi64(low.a, high.a), _mm256_unpacklo_epi64(low.b, high.b)};
  *second = {_mm256_unpackhi_epi64(low.a, high.a), _mm256_unpackhi_epi64(low.b, high.b)};
}

inline float sum4(__m128 x) {
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float max4(__m128 x) {
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline float sum_lanes(F a) {
  const __m256 x = _mm256_add_ps(a.a, a.b);
  return sum4(_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
inline float max_lanes(F a) {
  const __m256 x = _mm256_max_ps(a.a, a.b);
  return max4(_mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
inline int32_t sum_int_lanes(I a) {
  const __m256i x = _mm256_add_epi32(a.a, a.b);
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}

// Neighbours side by side, so that a step halves two vectors at once.
inline I4 max_int_lanes4(I p, I q, I r, I s) {
  const __m256i a = _mm256_max_epi32(p.a, p.b), b = _mm256_max_epi32(q.a, q.b);
  const __m256i c = _mm256_max_epi32(r.a, r.b), d = _mm256_max_epi32(s.a, s.b);
  const __m256i ab = _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_max_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  const __m256i all = _mm256_max_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  return (I4)_mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
inline I4 sum_int_lanes4(I p, I q, I r, I s) {
  const __m256i ab = _mm256_hadd_epi32(_mm256_add_epi32(p.a, p.b), _mm256_add_epi32(q.a, q.b));
  const __m256i cd = _mm256_hadd_epi32(_mm256_add_epi32(r.a, r.b), _mm256_add_epi32(s.a, s.b));
  const __m256i all = _mm256_hadd_epi32(ab, cd);
  return (I4)_mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

inline I4 store_codes4(int8_t* const* to, const I* low, const I* high) {
  const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
  I sums[4];
  for (int i = 0; i < 4; i++) {
    const __m256i words = _mm256_packs_epi32(low[i].a, low[i].b), next = _mm256_packs_epi32(high[i].a, high[i].b);
    _mm256_storeu_si256((__m256i*)to[i], _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words, next), order));
    sums[i] = iadd(low[i], high[i]);
  }
  return sum_int_lanes4(sums[0], sums[1], sums[2], sums[3]);
}

constexpr int kLinearWidth = 8;
constexpr int kLinearRows = 4;
constexpr int kAttentionRows = 6;
constexpr int kAccumulators = 6;
constexpr int kDenseAccumulators = 8;

typedef __m256 LF;
typedef __m256i LI;
typedef __m256i LB;

inline LF lload(const float* p) { return _mm256_loadu_ps(p); }
inline void lstore(float* p, LF a) { _mm256_storeu_ps(p, a); }
inline LF lset1(float x) { return _mm256_set1_ps(x); }
inline LF ladd(LF a, LF b) { return _mm256_add_ps(a, b); }
inline LF lmul(LF a, LF b) { return _mm256_mul_ps(a, b); }
inline LF lfma(LF a, LF b, LF c) { return _mm256_fmadd_ps(a, b, c); }
inline LF lload_half(const uint16_t* p) { return half8(p); }
inline LF lload_exponents(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23));
}
inline LI liset1(int32_t x) { return _mm256_set1_epi32(x); }
inline LF las_float(LI a) { return _mm256_castsi256_ps(a); }
inline LB load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline LB low_nibbles(LB a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline LB high_nibbles(LB a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15)); }
inline LB load_table(const uint8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
inline LB look_up(LB table, LB indices) { return _mm256_shuffle_epi8(table, indices); }
inline LB broadcast4(const int8_t* x) {
  int32_t word;
  memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}
#if defined(TM_AVX_VNNI)
inline LI dot4_u8(LI acc, LB w, LB x) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
  return acc;
}
inline LI dot4_u7(LI acc, LB w, LB x) { return dot4_u8(acc, w, x); }
constexpr bool kSignedCodes = false;
typedef LI LS;
inline LB wide_codes_of(LB a) { return a; }
inline LI dot4_wide(LI acc, LB w, const int8_t* x, int b) { return dot4_u8(acc, w, broadcast4(x + 4 * b)); }
inline LS sums_from(LI start) { return start; }
inline LS dot4_u6(LS acc, LB w, const int8_t* x, int b) { return dot4_u8(acc, w, broadcast4(x + 4 * b)); }
inline LI sums_to(LI, LS sums) { return sums; }
#else
// Keeps compilers from adding products in another order, which would hold many of them in registers at once.
inline __m256i in_order(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}
// Codes up to 127: a 16-bit pair sum is at most 127 * 128 * 2 = 32512, so vpmaddubsw cannot saturate.
inline LI dot4_u7(LI acc, LB w, LB x) {
  return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1))));
}
// Codes up to 255 could saturate it, so even and odd bytes are widened to 16 bits and summed in 32.
inline LI dot4_u8(LI acc, LB w, LB wide) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(wide, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(wide, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
// The size of a signed code times the input with its sign: a pair is at most 128 * 127 * 2 = 32512. (An input of -128 is
// beside an infinite scale.)
constexpr bool kSignedCodes = true;
inline LB wide_codes_of(LB a) { return _mm256_xor_si256(a, _mm256_set1_epi8(-128)); }
inline LI dot4_wide(LI acc, LB w, const int8_t* x, int b) {
  return dot4_u7(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(broadcast4(x + 4 * b), w));
}
// In 16 bits: eight words of codes below 16 make at most 15 * 128 * 16 = 30720, two of codes below 64 63 * 128 * 4 = 32256.
typedef __m256i LS;
inline LS sums_from(LI) { return _mm256_setzero_si256(); }
inline LS dot4_u6(LS acc, LB w, const int8_t* x, int b) {
  return in_order(_mm256_add_epi16(acc, _mm256_maddubs_epi16(w, broadcast4(x + 4 * b))));
}
inline LI sums_to(LI start, LS sums) { return _mm256_add_epi32(start, _mm256_madd_epi16(sums, _mm256_set1_epi16(1))); }
#endif
inline LB two_bits(LB a, int right) { return _mm256_and_si256(_mm256_srli_epi16(a, right), _mm256_set1_epi8(3)); }
inline LB add_upper_bits(LB nibbles, LB upper, int left, int mask) {
  const __m256i placed = left < 0 ? _mm256_srli_epi16(upper, -left) : _mm256_slli_epi16(upper, left);
  return _mm256_or_si256(nibbles, _mm256_and_si256(placed, _mm256_set1_epi8((char)mask)));
}
inline LI lload_words(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline LI lfield(LI words, int shift, int mask, LI base) {
  return _mm256_or_si256(base, _mm256_and_si256(_mm256_srli_epi32(words, shift), _mm256_set1_epi32(mask)));
}
inline LF lround_half(LF a) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

struct LPair { LF even, odd; };
constexpr int kPairWords = 2;
inline LPair pairs_of(__m256i pairs) {
  return {las_float(_mm256_slli_epi32(pairs, 16)), las_float(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)))};
}
inline LPair load_rows(const uint16_t* first, const uint16_t* second) { return {bf8(first), bf8(second)}; }
inline LPair set1_pair(const float* x) { return {lset1(x[0]), lset1(x[1])}; }
inline LF dot2(LF acc, LPair w, LPair x) { return lfma(w.even, x.even, lfma(w.odd, x.odd, acc)); }
inline LPair load_pairs(const uint8_t* p) { return pairs_of(_mm256_loadu_si256((const __m256i*)p)); }
inline void load_packed(const uint8_t* p, const uint8_t* highs, LPair* w) {
  const LB table = load_table(highs), indices = load_bytes(p);
  for (int i = 0; i < 2; i++) {
    const __m256i low = _mm256_loadu_si256((const __m256i*)(p + 64 + 64 * i));
    const __m256i high = look_up(table, i ? high_nibbles(indices) : low_nibbles(indices));
    w[2 * i] = pairs_of(_mm256_unpacklo_epi8(low, high));
    w[2 * i + 1] = pairs_of(_mm256_unpackhi_epi8(low, high));
  }
}
inline void transpose8(const uint16_t* const* rows, int at, __m256i* words) {
  __m256i fours[8];  // of rows 4 g to 4 g + 3: half h of fours[4 g + j] has word 4 h + j
  for (int g = 0; g < 2; g++) {
    __m256i row[4];
    for (int i = 0; i < 4; i++) row[i] = _mm256_loadu_si256((const __m256i*)(rows[4 * g + i] + at));
    const __m256i low = _mm256_unpacklo_epi32(row[0], row[1]), high = _mm256_unpackhi_epi32(row[0], row[1]);
    const __m256i other_low = _mm256_unpacklo_epi32(row[2], row[3]), other_high = _mm256_unpackhi_epi32(row[2], row[3]);
    fours[4 * g] = _mm256_unpacklo_epi64(low, other_low);
    fours[4 * g + 1] = _mm256_unpackhi_epi64(low, other_low);
    fours[4 * g + 2] = _mm256_unpacklo_epi64(high, other_high);
    fours[4 * g + 3] = _mm256_unpackhi_epi64(high, other_high);
  }
  for (int j = 0; j < 4; j++) {
    words[j] = _mm256_permute2x128_si256(fours[j], fours[4 + j], 0x20);
    words[4 + j] = _mm256_permute2x128_si256(fours[j], fours[4 + j], 0x31);
  }
}
inline void transpose_pairs(const uint16_t* const* rows, int at, I* words) {
  for (int half = 0; half < 2; half++) {
    __m256i first[8], second[8];
    transpose8(rows, at + 16 * half, first);
    transpose8(rows + 8, at + 16 * half, second);
    for (int i = 0; i < 8; i++) words[8 * half + i] = {first[i], second[i]};
  }
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
