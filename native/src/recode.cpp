// Every format is read as small integer codes with scales, and sometimes minima, then written in one way. Layouts are
// those of ggml's blocks, as formats/blocks.py tells them; it also defines the values, so products are made in its order.
#include "recode.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "half.h"
#include "kernels.h"
#include "pack.h"

namespace mill {

namespace {

constexpr int kMostValues = 256;
constexpr int kBlocksPerUnit = 512;

constexpr int kMostScales = kMostValues / 16;

// value = scale * code + minimum; scales and minima for equal runs of values. Of a super-block also what these are made of
// (of q2_k and q3_k this alone): one scale and one minimum times factors. book: of a format of indices.
struct Decoded {
  int8_t codes[kMostValues];
  float scales[kMostScales] = {}, minima[kMostScales] = {};
  uint16_t scale, minimum;
  int8_t factors[kMostScales], minimum_factors[kMostScales];
  const int8_t* book = nullptr;
};

using Reader = void (*)(const uint8_t* block, Decoded* to);

uint16_t word_of(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
float half_of(const uint8_t* p) { return half_to_float(word_of(p)); }

// Eight codes at a time, one a byte: the builds that this file is for have no shifts of bytes.
constexpr uint64_t kOnes = 0x0101010101010101u;

uint64_t load(const void* from) {
  uint64_t word;
  std::memcpy(&word, from, 8);
  return word;
}

void store(void* to, uint64_t word) { std::memcpy(to, &word, 8); }

// The bits of a byte, lowest first, each as a byte of 0 or 1.
uint64_t spread(uint8_t bits) {
  const uint64_t each = (bits * kOnes) & 0x8040201008040201u;
  return (each + 0x00406070787c7e7fu) >> 7 & kOnes;
}

// n bytes -> n low nibbles, then n high nibbles.
void nibbles(const uint8_t* from, int n, int8_t* codes) {
  for (int i = 0; i < n; i++) codes[i] = static_cast<int8_t>(from[i] & 15);
  for (int i = 0; i < n; i++) codes[n + i] = static_cast<int8_t>(from[i] >> 4);
}

// 64 bytes -> 256 codes of 2 bits: each run of 32 bytes gives four runs of codes, from the lowest bits up.
void crumbs(const uint8_t* from, int8_t* codes) {
  for (int run = 0; run < 2; run++)
    for (int shift = 0; shift < 4; shift++)
      for (int i = 0; i < 32; i += 8) store(codes + run * 128 + shift * 32 + i, load(from + run * 32 + i) >> 2 * shift & 3 * kOnes);
}

// 32 bytes -> to 256 codes, whose place it is, the bits of value `bit`: bit r of byte i is for code i of run r.
void add_bits(const uint8_t* from, int bit, int8_t* codes) {
  for (int run = 0; run < 8; run++)
    for (int i = 0; i < 32; i += 8) {
      int8_t* at = codes + run * 32 + i;
      store(at, load(at) | (load(from + i) >> run & kOnes) << bit);
    }
}

void add(int8_t* codes, int n, int what) {
  for (int i = 0; i < n; i++) codes[i] = static_cast<int8_t>(codes[i] + what);
}

void fifth_bits(const uint8_t* from, int8_t* codes) {
  for (int i = 0; i < 32; i += 8) store(codes + i, load(codes + i) | spread(from[i / 8]) << 4);
}

void read_q5_0(const uint8_t* block, Decoded* to) {
  to->scales[0] = half_of(block);
  nibbles(block + 6, 16, to->codes);
  fifth_bits(block + 2, to->codes);
  add(to->codes, 32, -16);
}

void read_q5_1(const uint8_t* block, Decoded* to) {
  to->scales[0] = half_of(block);
  to->minima[0] = half_of(block + 2);
  nibbles(block + 8, 16, to->codes);
  fifth_bits(block + 4, to->codes);
}

void read_q8_1(const uint8_t* block, Decoded* to) {
  to->scales[0] = half_of(block);
  std::memcpy(to->codes, block + 4, 32);
}

void read_q2_k(const uint8_t* block, Decoded* to) {
  to->scale = word_of(block + 80);
  to->minimum = word_of(block + 82) ^ 0x8000;
  for (int i = 0; i < 16; i++) {
    to->factors[i] = block[i] & 15;
    to->minimum_factors[i] = static_cast<int8_t>(block[i] >> 4);
  }
  crumbs(block + 16, to->codes);
}

void read_q3_k(const uint8_t* block, Decoded* to) {
  crumbs(block + 32, to->codes);
  add_bits(block, 2, to->codes);
  add(to->codes, 256, -4);
  const uint8_t* packed = block + 96;
  to->scale = word_of(block + 108);
  for (int i = 0; i < 16; i++) {
    const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4, high = packed[8 + i % 4] >> 2 * (i / 4) & 3;
    to->factors[i] = static_cast<int8_t>((low | high << 4) - 32);
  }
}

// Eight 6-bit scales and minima in 12 bytes: 0 to 3 in the low bits of bytes 0-3 and 4-7, 4 to 7 with their low nibbles in
// bytes 8-11 and their upper bits in what is left of the former.
void affine_scales(const uint8_t* block, Decoded* to) {
  const uint8_t* packed = block + 4;
  for (int i = 0; i < 4; i++) {
    to->factors[i] = packed[i] & 63;
    to->minimum_factors[i] = packed[4 + i] & 63;
    to->factors[4 + i] = static_cast<int8_t>((packed[8 + i] & 15) | packed[i] >> 6 << 4);
    to->minimum_factors[4 + i] = static_cast<int8_t>(packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4);
  }
  to->scale = word_of(block);
  to->minimum = word_of(block + 2) ^ 0x8000;
  for (int i = 0; i < 8; i++) {
    to->scales[i] = half_to_float(to->scale) * to->factors[i];
    to->minima[i] = half_to_float(to->minimum) * to->minimum_factors[i];
  }
}

void read_q4_k(const uint8_t* block, Decoded* to) {
  affine_scales(block, to);
  for (int run = 0; run < 4; run++) nibbles(block + 16 + run * 32, 32, to->codes + run * 64);
}

void read_q5_k(const uint8_t* block, Decoded* to) {
  affine_scales(block, to);
  for (int run = 0; run < 4; run++) nibbles(block + 48 + run * 32, 32, to->codes + run * 64);
  add_bits(block + 16, 4, to->codes);
}

void read_q6_k(const uint8_t* block, Decoded* to) {
  int8_t upper[kMostValues];
  crumbs(block + 128, upper);
  for (int run = 0; run < 2; run++) nibbles(block + run * 64, 64, to->codes + run * 128);
  for (int i = 0; i < kMostValues; i++) to->codes[i] = static_cast<int8_t>((to->codes[i] | upper[i] << 4) - 32);
  to->scale = word_of(block + 208);
  std::memcpy(to->factors, block + 192, 16);
  for (int i = 0; i < 16; i++) to->scales[i] = half_to_float(to->scale) * to->factors[i];
}

void read_q8_k(const uint8_t* block, Decoded* to) {
  std::memcpy(to->scales, block, 4);
  std::memcpy(to->codes, block + 4, 256);
}

void look_up(const int8_t* values, int n, int8_t* codes) {
  for (int i = 0; i < n; i++) codes[i] = values[static_cast<int>(codes[i])];
}

void read_iq4_nl(const uint8_t* block, Decoded* to) {
  to->scales[0] = half_of(block);
  nibbles(block + 2, 16, to->codes);
}

void read_iq4_xs(const uint8_t* block, Decoded* to) {
  const float scale = half_of(block);
  const int upper = block[2] | block[3] << 8;
  for (int run = 0; run < 8; run++) {
    const int low = block[4 + run / 2] >> 4 * (run % 2) & 15, high = upper >> 2 * run & 3;
    to->scales[run] = scale * static_cast<float>((low | high << 4) - 32);
    nibbles(block + 8 + run * 16, 16, to->codes + run * 32);
  }
}

void read_mxfp4(const uint8_t* block, Decoded* to) {
  to->scales[0] = std::ldexp(1.0f, block[0] - 128);
  nibbles(block + 1, 16, to->codes);
  for (int i = 0; i < 32; i++) to->codes[i] = to->codes[i] == 8 ? 0 : to->codes[i];  // a zero has no sign
}

void read_tq2_0(const uint8_t* block, Decoded* to) {
  crumbs(block, to->codes);
  add(to->codes, 256, -1);
  to->scales[0] = half_of(block + 64);
}

void read_nvfp4(const uint8_t* block, Decoded* to) {
  for (int i = 0; i < 4; i++) {
    const int exponent = block[i] >> 3 & 15;
    const float fraction = static_cast<float>(block[i] & 7);
    const float scale = exponent == 0 ? fraction * 0x1p-9f : std::ldexp(1 + fraction / 8, exponent - 7);
    to->scales[i] = block[i] == 0x7f ? 0 : scale * 0.5f;
    nibbles(block + 4 + i * 8, 8, to->codes + i * 16);
  }
  look_up(kE2M1Values, 64, to->codes);
}

// A byte is a fraction of 256 whose ternary digits are the codes, the first one highest: times 3, the carry is the next.
void read_tq1_0(const uint8_t* block, Decoded* to) {
  constexpr uint8_t kPowers[] = {1, 3, 9, 27, 81};
  int8_t* codes = to->codes;
  const auto digits = [&](const uint8_t* from, int run, int count) {
    for (int digit = 0; digit < count; digit++)
      for (int i = 0; i < run; i++) *codes++ = static_cast<int8_t>((static_cast<uint8_t>(from[i] * kPowers[digit]) * 3 >> 8) - 1);
  };
  digits(block, 32, 5);
  digits(block + 32, 16, 5);
  digits(block + 48, 4, 4);
  to->scales[0] = half_of(block + 52);
}

// Formats of indices into a book of rows of 8 codes, or of 4 (iq3), and signs.

uint32_t long_of(const uint8_t* p) { return word_of(p) | static_cast<uint32_t>(word_of(p + 2)) << 16; }

// Seven sign bits and an eighth that makes their number even.
uint8_t signs_of_seven(uint32_t seven) { return static_cast<uint8_t>(seven | __builtin_parity(seven) << 7); }

// Negates those of 8 codes whose bit is set.
void sign(uint8_t bits, int8_t* codes) {
  int8_t minus[8];
  store(minus, spread(bits) * 255);
  for (int i = 0; i < 8; i++) codes[i] = static_cast<int8_t>((codes[i] ^ minus[i]) - minus[i]);
}

void row_of_8(const Decoded& from, int index, int8_t* codes) { std::memcpy(codes, from.book + index * 8, 8); }
void row_of_4(const Decoded& from, int index, int8_t* codes) { std::memcpy(codes, from.book + index * 4, 4); }

int nibble(const uint8_t* p, int i) { return p[i / 2] >> 4 * (i % 2) & 15; }

void read_iq2_xxs(const uint8_t* block, Decoded* to) {
  const float scale = half_of(block);
  for (int run = 0; run < 8; run++) {
    const uint8_t* at = block + 2 + run * 8;
    const uint32_t signs = long_of(at + 4);
    to->scales[run] = scale * (0.5f + static_cast<float>(signs >> 28)) * 0.25f;
    for (int i = 0; i < 4; i++) {
      int8_t* codes = to->codes + run * 32 + i * 8;
      row_of_8(*to, at[i], codes);
      sign(signs_of_seven(signs >> 7 * i & 127), codes);
    }
  }
}

void read_iq2_xs(const uint8_t* block, Decoded* to) {
  const float scale = half_of(block);
  for (int i = 0; i < 16; i++) to->scales[i] = scale * (0.5f + static_cast<float>(nibble(block + 66, i))) * 0.25f;
  for (int i = 0; i < 32; i++) {
    const uint16_t field = word_of(block + 2 + 2 * i);
    row_of_8(*to, field & 511, to->codes + i * 8);
    sign(signs_of_seven(field >> 9), to->codes + i * 8);
  }
}

void read_iq2_s(const uint8_t* block, Decoded* to) {
  const float scale = half_of(block);
  for (int i = 0; i < 16; i++) to->scales[i] = scale * (0.5f + static_cast<float>(nibble(block + 74, i))) * 0.25f;
  for (int i = 0; i < 32; i++) {
    row_of_8(*to, block[2 + i] | (block[66 + i / 4] >> 2 * (i % 4) & 3) << 8, to->codes + i * 8);
    sign(block[34 + i], to->codes + i * 8);
  }
}

void read_iq3_xxs(const uint8_t* block, Decoded* to) {
  const float scale = half_of(block);
  for (int i = 0; i < 64; i++) row_of_4(*to, block[2 + i], to->codes + i * 4);
  for (int run = 0; run < 8; run++) {
    const uint32_t signs = long_of(block + 66 + run * 4);
    to->scales[run] = scale * (0.5f + static_cast<float>(signs >> 28)) * 0.5f;
    for (int i = 0; i < 4; i++) sign(signs_of_seven(signs >> 7 * i & 127), to->codes + run * 32 + i * 8);
  }
}

void read_iq3_s(const uint8_t* block, Decoded* to) {
  const float scale = half_of(block);
  for (int i = 0; i < 8; i++) to->scales[i] = scale * static_cast<float>(1 + 2 * nibble(block + 106, i));
  for (int i = 0; i < 64; i++) row_of_4(*to, block[2 + i] | (block[66 + i / 8] >> i % 8 & 1) << 8, to->codes + i * 4);
  for (int i = 0; i < 32; i++) sign(block[74 + i], to->codes + i * 8);
}

// Codes of the ternary book plus or minus an eighth, times eight; 8 of them.
void shifted_row(const Decoded& from, int index, bool minus, int8_t* codes) {
  row_of_8(from, index, codes);
  for (int i = 0; i < 8; i++) codes[i] = static_cast<int8_t>(codes[i] * 8 + (minus ? -1 : 1));
}

void read_iq1_s(const uint8_t* block, Decoded* to) {
  const float scale = half_of(block);
  for (int run = 0; run < 8; run++) {
    const uint16_t field = word_of(block + 34 + 2 * run);
    to->scales[run] = scale * static_cast<float>(2 * (field >> 12 & 7) + 1) / 8;
    for (int i = 0; i < 4; i++)
      shifted_row(*to, block[2 + run * 4 + i] | (field >> 3 * i & 7) << 8, field >> 15 != 0, to->codes + run * 32 + i * 8);
  }
}

void read_iq1_m(const uint8_t* block, Decoded* to) {
  uint16_t bits = 0;
  for (int i = 0; i < 4; i++) bits = static_cast<uint16_t>(bits | word_of(block + 48 + 2 * i) >> 12 << 4 * i);
  const float scale = half_to_float(bits);
  for (int i = 0; i < 16; i++) {
    const int own = word_of(block + 48 + i / 4 * 2) >> 3 * (i % 4) & 7;
    to->scales[i] = scale * static_cast<float>(2 * own + 1) / 8;
  }
  for (int i = 0; i < 32; i++) {
    const int field = nibble(block + 32, i);
    shifted_row(*to, block[i] | (field & 7) << 8, field >> 3 != 0, to->codes + i * 8);
  }
}

struct Format {
  Reader read;
  int values, bytes, scales;
  int32_t kind;
  int book = 0;           // bytes of the one that it needs
  int32_t plain_kind = -1;  // a kind without super-blocks that it becomes as well
};

constexpr Format kFormats[kNumStored] = {
    {read_q5_0, 32, 22, 1, kQ5_0},    {read_q5_1, 32, 24, 1, kQ8_M},    {read_q8_1, 32, 36, 1, kQ8_0},
    {read_q2_k, 256, 84, 16, kQ2_K},  {read_q3_k, 256, 110, 16, kQ3_K}, {read_q4_k, 256, 144, 8, kQ4_K, 0, kQ4_1},
    {read_q5_k, 256, 176, 8, kQ5_K},  {read_q6_k, 256, 210, 16, kQ6_K}, {read_q8_k, 256, 292, 1, kQ8_0},
    {read_iq4_nl, 32, 18, 1, kIQ4_NL, 0, kQ8_0}, {read_iq4_xs, 256, 136, 8, kIQ4_NL, 0, kQ8_0}, {read_mxfp4, 32, 17, 1, kMXFP4},
    {read_tq2_0, 256, 66, 1, kQ4_0},  {read_tq1_0, 256, 54, 1, kQ4_0},  {read_nvfp4, 64, 36, 4, kQ8_H},
    {read_iq1_s, 256, 50, 8, kQ8_0, 2048 * 8},   {read_iq1_m, 256, 56, 16, kQ8_H, 2048 * 8},
    {read_iq2_xxs, 256, 66, 8, kQ8_0, 256 * 8},  {read_iq2_xs, 256, 74, 16, kQ8_H, 512 * 8},
    {read_iq2_s, 256, 82, 16, kQ8_H, 1024 * 8},  {read_iq3_xxs, 256, 98, 8, kQ8_0, 256 * 4},
    {read_iq3_s, 256, 110, 8, kQ8_0, 512 * 4},
};

// The largest value that was rounded to float16, and the largest difference that made: as bits, which have the order of
// the numbers, with what is not a number above all.
struct Loss {
  int32_t largest = 0, lost = 0;

  void merge(const Loss& other) {
    largest = other.largest > largest ? other.largest : largest;
    lost = other.lost > lost ? other.lost : lost;
  }
  bool fits() const { return bits_to_float(lost) <= bits_to_float(largest) * 0x1p-11f; }
};

int32_t bits_of(float value) { return static_cast<int32_t>(float_to_bits(value)); }

// As a choice of numbers, not of ways, which compilers make vectors of.
int32_t either(bool first, int32_t one, int32_t other) { return other ^ ((one ^ other) & -static_cast<int32_t>(first)); }

// float_to_half and half_to_float of half.h, in that way.
template <int n>
void to_halves(const float* values, uint16_t* halves, Loss* loss) {
  Loss all = *loss;
  for (int i = 0; i < n; i++) {
    const int32_t bits = bits_of(values[i]), size = bits & 0x7fffffff;
    const int32_t subnormal = bits_of(bits_to_float(size) + 0.5f) - 0x3f000000;
    const int32_t normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    int32_t half = either(size < 0x38800000, subnormal, normal);
    half = either(size >= 0x477ff000, 0x7c00, half);
    half = either(size > 0x7f800000, 0x7e00 | (size >> 13 & 0x3ff), half);
    halves[i] = static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
    const int32_t finite = bits_of(bits_to_float(half << 13) * bits_to_float(0x77800000u));
    const int32_t again = either(half >= 0x7c00, 0x7f800000 | (half & 0x3ff) << 13, finite);
    all.merge({size, bits_of(bits_to_float(again) - bits_to_float(size)) & 0x7fffffff});
  }
  *loss = all;
}

// Of scales that are powers of two: kernels multiply them by kMagic.
constexpr float kLargestPower = 0x1p103f;

struct BlockLoss {
  Loss scales, minima;
};

void write_superblock(int32_t kind, const Decoded& from, uint8_t* out) {
  for (const uint16_t* half : {&from.scale, &from.minimum}) {
    if (half == &from.minimum && !has_minima(kind)) continue;
    std::memcpy(out, half, 2);
    out += 2;
  }
  write_factors(kind, from.factors, from.minimum_factors, out);
  out += 4 * factor_words(kind);
  for (int k = 0; k < kSuperblock; k += kGroup, out += code_bytes(kind)) write_codes(kind, from.codes + k, out);
}

void write_blocks(const Format& format, int32_t kind, const Decoded& from, BlockLoss* loss, uint8_t* out) {
  if (is_super(kind) && !rounds_products(kind)) return write_superblock(kind, from, out);
  const int halves = has_halves(kind) ? 2 : 1, per_scale = format.values / format.scales;
  if (kind == kMXFP4) {
    if (!(from.scales[0] <= kLargestPower)) loss->scales.lost = bits_of(INFINITY);
    *out = static_cast<uint8_t>(float_to_bits(from.scales[0]) >> 23);
    return write_codes(kind, from.codes, out + 1);
  }
  uint16_t scales[kMostScales], minima[kMostScales];
  // Of more than a format has, the others are zeros.
  const auto convert = format.scales == 1 ? to_halves<1> : format.scales <= 8 ? to_halves<8> : to_halves<kMostScales>;
  convert(from.scales, scales, &loss->scales);
  if (has_minima(kind)) convert(from.minima, minima, &loss->minima);
  if (is_super(kind)) return write_superblock(kind, from, out);
  for (int group = 0; group < format.values / kGroup; group++) {
    for (const uint16_t* values : {scales, minima}) {
      if (values == minima && !has_minima(kind)) continue;
      for (int half = 0; half < halves; half++, out += 2) std::memcpy(out, values + (group * kGroup + half * 16) / per_scale, 2);
    }
    write_codes(kind, from.codes + group * kGroup, out);
    out += code_bytes(kind);
  }
}

}  // namespace

// Which factor the field of four in a word is, and whether of a minimum; bytes of q2_k hold both of a half.
struct Field {
  int32_t kind;
  int index;
  bool is_minimum() const { return !has_halves(kind) && index % 2 == 1; }
  int factor() const { return has_halves(kind) ? index : index / 2; }
};

void write_factors(int32_t kind, const int8_t* scales, const int8_t* minima, uint8_t* words) {
  uint32_t packed[4] = {};
  for (int i = 0; i < 16; i++) {
    const Field field{kind, i};
    int value = field.is_minimum() ? minima[field.factor()] : scales[field.factor()] + factor_offset(kind);
    if (kind == kQ2_K) value |= minima[i] << 4;
    packed[i / 4] |= static_cast<uint32_t>(value) << i % 4 * factor_step(kind);
  }
  if (factor_words(kind) == 3)
    for (int w = 0; w < 3; w++) packed[w] |= packed[3] >> 8 * w << 24;
  std::memcpy(words, packed, 4 * factor_words(kind));
}

void read_factors(int32_t kind, const uint8_t* words, int8_t* scales, int8_t* minima) {
  uint32_t packed[4];
  std::memcpy(packed, words, 4 * factor_words(kind));
  if (factor_words(kind) == 3) packed[3] = packed[0] >> 24 | packed[1] >> 24 << 8 | packed[2] >> 24 << 16;
  for (int i = 0; i < 16; i++) {
    const Field field{kind, i};
    const int value = static_cast<int>(packed[i / 4] >> i % 4 * factor_step(kind)) & (factor_words(kind) == 4 ? 255 : 63);
    (field.is_minimum() ? minima : scales)[field.factor()] = static_cast<int8_t>((value & factor_mask(kind)) - factor_offset(kind));
    if (kind == kQ2_K) minima[i] = static_cast<int8_t>(value >> 4);
  }
}

// 32 codes' lowest two bits, those of each half as the four bytes of a word.
static void write_pairs(const uint8_t* raw, uint8_t* to) {
  for (int half = 0; half < 2; half++) {
    uint32_t words[4], pairs = 0;
    std::memcpy(words, raw + half * 16, 16);
    for (int i = 0; i < 4; i++) pairs |= (words[i] & 0x03030303u) << 2 * i;
    std::memcpy(to + half * 4, &pairs, 4);
  }
}

// 32 codes' lowest bits, those of four neighbours in four bytes.
static void write_bits(const uint8_t* raw, uint8_t* to) {
  uint32_t words[8], bits = 0;
  std::memcpy(words, raw, kGroup);
  for (int n = 0; n < 8; n++) bits |= (words[n] & 0x01010101u) << n;
  std::memcpy(to, &bits, 4);
}

void write_codes(int32_t kind, const int8_t* codes, uint8_t* to) {
  if (is_wide(kind)) {
    std::memcpy(to, codes, kGroup);
    return;
  }
  const int lower_bits = kind == kQ2_K || kind == kQ3_K ? 2 : 4;
  uint8_t raw[kGroup], upper[kGroup];
  for (int i = 0; i < kGroup; i++) raw[i] = static_cast<uint8_t>(codes[i] + code_offset(kind));
  for (int i = 0; i < kGroup; i++) upper[i] = static_cast<uint8_t>(raw[i] >> lower_bits);
  if (lower_bits == 2) write_pairs(raw, to);
  else
    for (int i = 0; i < 16; i++) to[i] = static_cast<uint8_t>((raw[i] & 15) | raw[i + 16] << 4);
  if (kind == kQ3_K || is_five(kind)) write_bits(upper, to + kGroup * lower_bits / 8);
  if (kind == kQ6_K) write_pairs(upper, to + kGroup * lower_bits / 8);
}

int stored_values(int32_t stored) { return kFormats[stored].values; }
int stored_bytes(int32_t stored) { return kFormats[stored].bytes; }
bool becomes(int32_t stored, int32_t kind) { return kind == kFormats[stored].kind || kind == kFormats[stored].plain_kind; }
int book_bytes(int32_t stored) { return kFormats[stored].book; }

bool recode(Team* team, int32_t stored, int32_t kind, const int8_t* book, int64_t num_blocks, const uint8_t* data, uint8_t* out) {
  const Format& format = kFormats[stored];
  const int64_t out_bytes = raw_row_bytes(kind, format.values);
  const int num_units = static_cast<int>((num_blocks + kBlocksPerUnit - 1) / kBlocksPerUnit);
  std::vector<BlockLoss> losses(num_units);
  team->for_each(num_units, [&](int unit, int) {
    const int64_t first = static_cast<int64_t>(unit) * kBlocksPerUnit;
    const int64_t end = first + kBlocksPerUnit < num_blocks ? first + kBlocksPerUnit : num_blocks;
    Decoded decoded;
    decoded.book = book;
    for (int64_t block = first; block < end; block++) {
      format.read(data + block * format.bytes, &decoded);
      if (is_looked_up(format.kind) && !is_looked_up(kind)) look_up(values_of(format.kind), format.values, decoded.codes);
      write_blocks(format, kind, decoded, &losses[unit], out + block * out_bytes);
    }
  });
  BlockLoss all;
  for (const BlockLoss& loss : losses) {
    all.scales.merge(loss.scales);
    all.minima.merge(loss.minima);
  }
  return all.scales.fits() && all.minima.fits();
}

}  // namespace mill
