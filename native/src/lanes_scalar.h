// Sixteen lanes as plain loops: the definition of every operation, and the variant for any processor.
//
// F, I        16 float32 or int32 lanes
// F4, I4      four, as one number of each of four vectors (compilers' own vectors, whatever the instruction set)
// D           eight 64-bit lanes: words of Philox, in their lower halves
// LF, LI, LB  the lanes (kLinearWidth of them) and weight bytes that the linear kernels hold in registers
#pragma once
#include "half.h"
#include "kernels.h"

namespace {

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct D { uint64_t v[8]; };
typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

#define TM_EACH for (int i = 0; i < 16; i++)

inline F load(const float* p) { F r; TM_EACH r.v[i] = p[i]; return r; }
inline void store(float* p, F a) { TM_EACH p[i] = a.v[i]; }
inline F set1(float x) { F r; TM_EACH r.v[i] = x; return r; }
inline F add(F a, F b) { F r; TM_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
inline F sub(F a, F b) { F r; TM_EACH r.v[i] = a.v[i] - b.v[i]; return r; }
inline F mul(F a, F b) { F r; TM_EACH r.v[i] = a.v[i] * b.v[i]; return r; }
inline F div(F a, F b) { F r; TM_EACH r.v[i] = a.v[i] / b.v[i]; return r; }
inline F fma(F a, F b, F c) { F r; TM_EACH r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); return r; }
inline F max(F a, F b) { F r; TM_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }
inline F min(F a, F b) { F r; TM_EACH r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return r; }
inline F abs(F a) { F r; TM_EACH r.v[i] = __builtin_fabsf(a.v[i]); return r; }
inline F load_half(const uint16_t* p) { F r; TM_EACH r.v[i] = mill::half_to_float(p[i]); return r; }
inline F load_bf16(const uint16_t* p) { F r; TM_EACH r.v[i] = mill::bf16_to_float(p[i]); return r; }
inline void store_half(uint16_t* p, F a) { TM_EACH p[i] = mill::float_to_half(a.v[i]); }
inline void store_bf16(uint16_t* p, F a) { TM_EACH p[i] = mill::float_to_bf16(a.v[i]); }
inline void store_normal_bf16(uint16_t* p, F a) { store_bf16(p, a); }  // no subnormal numbers
// Of variants with tiles, to the end of the next section: a[0], b[0], a[1], b[1], .. for 16 of each.
inline void store_pairs(uint16_t* p, const uint16_t* a, const uint16_t* b) {
  TM_EACH p[2 * i] = a[i], p[2 * i + 1] = b[i];
}
// Words are the 32 halves of lanes, as int16: a[0..3], b[0..3], a[4..7], .. in order, to nearest even, in its range; the
// least of it for what is no int32.
inline I fixed_pairs(F a, F b) {
  int16_t words[32];
  for (int i = 0; i < 32; i++) {
    const float x = (i % 8 < 4 ? a : b).v[i / 8 * 4 + i % 4];
    words[i] = -32768;
    if (x >= 32767.0f && x < 2147483648.0f) words[i] = 32767;
    if (x > -32768.0f && x < 32767.0f) words[i] = (int16_t)(mill::float_to_bits(x + mill::kMagic) - (uint32_t)mill::kMagicBits);
  }
  I r;
  memcpy(&r, words, 64);
  return r;
}
template <class Word>
inline I each_word(I a, Word word) {
  int16_t words[32];
  memcpy(words, &a, 64);
  for (int i = 0; i < 32; i++) words[i] = (int16_t)word(words[i], i);
  memcpy(&a, words, 64);
  return a;
}
inline I max_words(I a, I b) {
  int16_t other[32];
  memcpy(other, &b, 64);
  return each_word(a, [&](int x, int i) { return x > other[i] ? x : other[i]; });
}
inline bool any_word_above(I a, int limit) {
  bool any = false;
  each_word(a, [&](int x, int) { return any = any || x > limit; });
  return any;
}
// Words of 1/128ths above -127 -> 2 to their power in bf16, 0 for less than 1. The straight line between two powers of two
// is what such bits mean by themselves; below[f / 2] is how much less the power is, in its last bit, for f 128ths.
inline I weight_pairs(I words, const uint8_t* below) {
  return each_word(words, [&](int x, int) { return x > 127 ? x - below[x / 2 % 64] : 0; });
}
// Weights times 2^-by, 0 where that is subnormal; `by` is below 256.
inline I lower_weights(I weights, int by) {
  return each_word(weights, [&](int x, int) { return x - 128 * by > 127 ? x - 128 * by : 0; });
}
// Minus infinity for lanes outside [first, end).
inline F keep_lanes(F a, int first, int end) {
  TM_EACH a.v[i] = i >= first && i < end ? a.v[i] : -__builtin_inff();
  return a;
}
// Of lanes i and i + H, where i has not that bit: their sum, and by how much the first is greater.
template <int H>
inline F butterfly(F a) { F r; TM_EACH r.v[i] = i & H ? a.v[i ^ H] - a.v[i] : a.v[i] + a.v[i ^ H]; return r; }
inline I as_int(F a) { I r; memcpy(&r, &a, 64); return r; }
inline F as_float(I a) { F r; memcpy(&r, &a, 64); return r; }
inline I iset1(int32_t x) { I r; TM_EACH r.v[i] = x; return r; }
inline I iadd(I a, I b) { I r; TM_EACH r.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]); return r; }
inline I imax(I a, I b) { I r; TM_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }
inline I isub(I a, I b) { I r; TM_EACH r.v[i] = (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]); return r; }
inline I shift_left_23(I a) { I r; TM_EACH r.v[i] = (int32_t)((uint32_t)a.v[i] << 23); return r; }
inline I shift_right_7(I a) { I r; TM_EACH r.v[i] = (int32_t)((uint32_t)a.v[i] >> 7); return r; }
inline I bit_and(I a, I b) { I r; TM_EACH r.v[i] = a.v[i] & b.v[i]; return r; }
inline I shift_left_16(I a) { I r; TM_EACH r.v[i] = (int32_t)((uint32_t)a.v[i] << 16); return r; }
inline I shift_left_15(I a) { I r; TM_EACH r.v[i] = (int32_t)((uint32_t)a.v[i] << 15); return r; }
inline void store_int(int32_t* p, I a) { TM_EACH p[i] = a.v[i]; }
inline I load_int(const int32_t* p) { I r; TM_EACH r.v[i] = p[i]; return r; }
inline void store_low_bytes(int8_t* p, I a) { TM_EACH p[i] = (int8_t)(a.v[i] & 0xff); }
inline F zero_where_less(F value, F a, F b) { F r; TM_EACH r.v[i] = a.v[i] < b.v[i] ? 0.0f : value.v[i]; return r; }
inline uint32_t mask_ge(F a, F b) { uint32_t m = 0; TM_EACH m |= (uint32_t)(a.v[i] >= b.v[i]) << i; return m; }
// For values below 2^31.
inline uint32_t mask_int_ge(I a, I b) { uint32_t m = 0; TM_EACH m |= (uint32_t)(a.v[i] >= b.v[i]) << i; return m; }

#define TM_EACH_D for (int i = 0; i < 8; i++)
inline D dset1(uint32_t x) { D r; TM_EACH_D r.v[i] = x; return r; }
inline D dadd(D a, D b) { D r; TM_EACH_D r.v[i] = a.v[i] + b.v[i]; return r; }
inline D dxor(D a, D b) { D r; TM_EACH_D r.v[i] = a.v[i] ^ b.v[i]; return r; }
inline D dxor3(D a, D b, D c) { return dxor(dxor(a, b), c); }
inline D dmul(D a, D b) { D r; TM_EACH_D r.v[i] = (a.v[i] & 0xffffffffu) * (b.v[i] & 0xffffffffu); return r; }
inline D dupper(D a) { D r; TM_EACH_D r.v[i] = a.v[i] >> 32; return r; }
inline D dload(const uint64_t* p) { D r; TM_EACH_D r.v[i] = p[i]; return r; }
// Which of the 64 bytes, those of lane 0 first and of each the lowest, are 0.
inline uint64_t zero_bytes(I a) {
  uint64_t found = 0;
  for (int i = 0; i < 64; i++) found |= (uint64_t)(((uint32_t)a.v[i / 4] >> i % 4 * 8 & 0xffu) == 0) << i;
  return found;
}
// The order in which the lanes hold blocks of four words, and the 32 words of eight blocks in the order of the blocks.
inline D block_numbers() { return D{{0, 4, 1, 5, 2, 6, 3, 7}}; }
inline void words_in_order(D w0, D w1, D w2, D w3, I* first, I* second) {
  const D* words[4] = {&w0, &w1, &w2, &w3};
  TM_EACH {
    first->v[i] = (int32_t)words[i % 4]->v[i / 4 * 2];
    second->v[i] = (int32_t)words[i % 4]->v[i / 4 * 2 + 1];
  }
}
#undef TM_EACH_D

// Sixteen partial values to one: halves folded onto each other, lane i with lane i + 8, then 4, 2, 1.
inline float sum_lanes(F a) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) a.v[i] += a.v[i + width];
  return a.v[0];
}
inline float max_lanes(F a) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  return a.v[0];
}
// Of four vectors: lane i of the result is that of the i-th.
inline F4 max_lanes4(F a, F b, F c, F d) { return F4{max_lanes(a), max_lanes(b), max_lanes(c), max_lanes(d)}; }
inline F4 ceil4(F4 a) { return F4{__builtin_ceilf(a[0]), __builtin_ceilf(a[1]), __builtin_ceilf(a[2]), __builtin_ceilf(a[3])}; }
inline int32_t sum_int_lanes(I a) {
  uint32_t sum = 0;
  TM_EACH sum += (uint32_t)a.v[i];
  return (int32_t)sum;
}

inline int32_t max_int_lanes(I a) {
  int32_t most = a.v[0];
  TM_EACH most = a.v[i] > most ? a.v[i] : most;
  return most;
}

// The same of four vectors: lane i of the result is that of the i-th.
inline I4 max_int_lanes4(I a, I b, I c, I d) {
  return I4{max_int_lanes(a), max_int_lanes(b), max_int_lanes(c), max_int_lanes(d)};
}
inline I4 sum_int_lanes4(I a, I b, I c, I d) {
  return I4{sum_int_lanes(a), sum_int_lanes(b), sum_int_lanes(c), sum_int_lanes(d)};
}
// Four groups of int8 values, each in two vectors, to their places. Returns their sums.
inline I4 store_codes4(int8_t* const* to, const I* low, const I* high) {
  I4 sums;
  for (int g = 0; g < 4; g++) {
    TM_EACH to[g][i] = (int8_t)low[g].v[i], to[g][16 + i] = (int8_t)high[g].v[i];
    sums[g] = sum_int_lanes(low[g]) + sum_int_lanes(high[g]);
  }
  return sums;
}

constexpr int kLinearWidth = 16;
constexpr int kLinearRows = 4;      // most rows of a linear tile
constexpr int kAttentionRows = 4;   // most query vectors of an attention tile
constexpr int kAccumulators = 8;    // vectors a P.V pass keeps in registers
constexpr int kDenseAccumulators = 4;  // the same of a dense linear

typedef F LF;
typedef I LI;
struct LB { uint8_t v[64]; };

inline LF lload(const float* p) { return load(p); }
inline void lstore(float* p, LF a) { store(p, a); }
inline LF lset1(float x) { return set1(x); }
inline LF ladd(LF a, LF b) { return add(a, b); }
inline LF lmul(LF a, LF b) { return mul(a, b); }
inline LF lfma(LF a, LF b, LF c) { return fma(a, b, c); }
inline LF lload_half(const uint16_t* p) { return load_half(p); }
// Powers of two (0 for an exponent of 0) from their exponents as float32 stores them.
inline LF lload_exponents(const uint8_t* p) { LF r; TM_EACH r.v[i] = mill::bits_to_float((uint32_t)p[i] << 23); return r; }
inline LI liset1(int32_t x) { return iset1(x); }
inline LF las_float(LI a) { return as_float(a); }
inline LB load_bytes(const uint8_t* p) { LB r; memcpy(&r, p, 64); return r; }
inline LB low_nibbles(LB a) { LB r; for (int i = 0; i < 64; i++) r.v[i] = a.v[i] & 15; return r; }
inline LB high_nibbles(LB a) { LB r; for (int i = 0; i < 64; i++) r.v[i] = a.v[i] >> 4; return r; }
// A table of 16 bytes, and what it has at indices from 0 to 15.
inline LB load_table(const uint8_t* p) { LB r; for (int i = 0; i < 64; i++) r.v[i] = p[i % 16]; return r; }
inline LB look_up(LB table, LB indices) { LB r; for (int i = 0; i < 64; i++) r.v[i] = table.v[indices.v[i]]; return r; }
// Products of unsigned and signed bytes, four to a lane; an address stands for the four bytes there in every lane.
inline LB broadcast4(const int8_t* x) { LB r; for (int i = 0; i < 64; i++) r.v[i] = (uint8_t)x[i % 4]; return r; }
inline LI dot4_u8(LI acc, LB w, LB x) {
  const int8_t* s = (const int8_t*)x.v;
  LI r;
  TM_EACH r.v[i] = acc.v[i] + w.v[4 * i] * s[4 * i] + w.v[4 * i + 1] * s[4 * i + 1] + w.v[4 * i + 2] * s[4 * i + 2] +
                   w.v[4 * i + 3] * s[4 * i + 3];
  return r;
}
inline LI dot4_u7(LI acc, LB w, LB x) { return dot4_u8(acc, w, x); }  // for w below 128
inline LI dot4_u8(LI acc, LB w, const int8_t* x) {
  LI r;
  TM_EACH r.v[i] = acc.v[i] + w.v[4 * i] * x[0] + w.v[4 * i + 1] * x[1] + w.v[4 * i + 2] * x[2] + w.v[4 * i + 3] * x[3];
  return r;
}
// For the linear kernels, x being 16 inputs, of which those of word b are taken. 8-bit codes first go through wide_codes_of,
// which subtracts 128 from them where kSignedCodes. Products of codes below 64 are summed apart, from sums_from(start) on,
// and then sums_to(start, sums): in 16 bits hold two words of codes below 64, or eight of codes below 16.
constexpr bool kSignedCodes = false;
typedef LI LS;
inline LB wide_codes_of(LB a) { return a; }
inline LI dot4_wide(LI acc, LB w, const int8_t* x, int b) { return dot4_u8(acc, w, x + 4 * b); }
inline LS sums_from(LI start) { return start; }
inline LS dot4_u6(LS acc, LB w, const int8_t* x, int b) { return dot4_u8(acc, w, x + 4 * b); }
inline LI sums_to(LI, LS sums) { return sums; }
// Of every byte the two bits from `right` on.
inline LB two_bits(LB a, int right) { for (int i = 0; i < 64; i++) a.v[i] = a.v[i] >> right & 3; return a; }
// The bits of every upper byte, `left` places up (or down, where that is negative), that `mask` keeps: set in the nibble in
// its place.
inline LB add_upper_bits(LB nibbles, LB upper, int left, int mask) {
  for (int i = 0; i < 64; i++) nibbles.v[i] |= (uint8_t)((left < 0 ? upper.v[i] >> -left : upper.v[i] << left) & mask);
  return nibbles;
}
inline LI lload_words(const uint8_t* p) { LI r; memcpy(&r, p, 64); return r; }
// Of every word the bits from `shift` on that `mask` keeps, set in `base`.
inline LI lfield(LI words, int shift, int mask, LI base) {
  TM_EACH base.v[i] |= (int32_t)((uint32_t)words.v[i] >> shift) & mask;
  return base;
}
inline LF lround_half(LF a) { TM_EACH a.v[i] = mill::half_to_float(mill::float_to_half(a.v[i])); return a; }

// Weights or inputs of two steps of K. In memory a pair of weights is two bf16 values, a pair of inputs kPairWords words.
struct LPair { LF even, odd; };
constexpr int kPairWords = 2;
inline LPair load_pairs(const uint8_t* p) {
  LPair r;
  TM_EACH {
    uint32_t word;
    memcpy(&word, p + 4 * i, 4);
    r.even.v[i] = mill::bits_to_float(word << 16);
    r.odd.v[i] = mill::bits_to_float(word & 0xffff0000u);
  }
  return r;
}
// Pairs of what stands in the same place of two rows.
inline LPair load_rows(const uint16_t* first, const uint16_t* second) { return {load_bf16(first), load_bf16(second)}; }
inline LPair set1_pair(const float* x) { return {set1(x[0]), set1(x[1])}; }
inline LF dot2(LF acc, LPair w, LPair x) { return lfma(w.even, x.even, lfma(w.odd, x.odd, acc)); }
// The weights of four steps from a group of packed bf16; p: of the first lane. See Part.
inline void load_packed(const uint8_t* p, const uint8_t* highs, LPair* w) {
  for (int step = 0; step < 4; step++) {
    uint8_t words[64];
    for (int j = 0; j < 32; j++) {
      const int at = j / 8 * 16 + step % 2 * 8 + j % 8;
      words[2 * j] = p[64 + step / 2 * 64 + at];
      words[2 * j + 1] = highs[step / 2 ? p[at] >> 4 : p[at] & 15];
    }
    w[step] = load_pairs(words);
  }
}
// words[i]: of sixteen rows the pair of bf16 values 2 i places behind `at`.
inline void transpose_pairs(const uint16_t* const* rows, int at, I* words) {
  TM_EACH for (int r = 0; r < 16; r++) memcpy(&words[i].v[r], rows[r] + at + 2 * i, 4);
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_far(const void*) {}

#undef TM_EACH

}  // namespace
