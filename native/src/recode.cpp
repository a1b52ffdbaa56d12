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

// value = scale * code + minimum; scales and minima for equal runs of values.
struct Decoded {
  int8_t codes[kMostValues];
  float scales[kMostValues / 16], minima[kMostValues / 16];
};

using Reader = void (*)(const uint8_t* block, Decoded* to);

float half_of(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return half_to_float(bits);
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
      for (int i = 0; i < 32; i++) codes[run * 128 + shift * 32 + i] = static_cast<int8_t>(from[run * 32 + i] >> 2 * shift & 3);
}

void add(int8_t* codes, int n, int what) {
  for (int i = 0; i < n; i++) codes[i] = static_cast<int8_t>(codes[i] + what);
}

void fifth_bits(const uint8_t* from, int8_t* codes) {
  for (int i = 0; i < 32; i++) codes[i] = static_cast<int8_t>(codes[i] | (from[i / 8] >> i % 8 & 1) << 4);
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
  const float scale = half_of(block + 80), minimum = half_of(block + 82);
  for (int i = 0; i < 16; i++) {
    to->scales[i] = scale * static_cast<float>(block[i] & 15);
    to->minima[i] = -(minimum * static_cast<float>(block[i] >> 4));
  }
  crumbs(block + 16, to->codes);
}

void read_q3_k(const uint8_t* block, Decoded* to) {
  crumbs(block + 32, to->codes);
  for (int bit = 0; bit < 8; bit++)
    for (int i = 0; i < 32; i++) {
      int8_t* code = to->codes + bit * 32 + i;
      *code = static_cast<int8_t>((*code | (block[i] >> bit & 1) << 2) - 4);
    }
  const uint8_t* packed = block + 96;
  const float scale = half_of(block + 108);
  for (int i = 0; i < 16; i++) {
    const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4, high = packed[8 + i % 4] >> 2 * (i / 4) & 3;
    to->scales[i] = scale * static_cast<float>((low | high << 4) - 32);
  }
}

// Eight 6-bit scales and minima in 12 bytes: 0 to 3 in the low bits of bytes 0-3 and 4-7, 4 to 7 with their low nibbles in
// bytes 8-11 and their upper bits in what is left of the former.
void affine_scales(const uint8_t* block, Decoded* to) {
  const float scale = half_of(block), minimum = half_of(block + 2);
  const uint8_t* packed = block + 4;
  for (int i = 0; i < 4; i++) {
    to->scales[i] = scale * static_cast<float>(packed[i] & 63);
    to->minima[i] = -(minimum * static_cast<float>(packed[4 + i] & 63));
    to->scales[4 + i] = scale * static_cast<float>((packed[8 + i] & 15) | packed[i] >> 6 << 4);
    to->minima[4 + i] = -(minimum * static_cast<float>(packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4));
  }
}

void read_q4_k(const uint8_t* block, Decoded* to) {
  affine_scales(block, to);
  for (int run = 0; run < 4; run++) nibbles(block + 16 + run * 32, 32, to->codes + run * 64);
}

void read_q5_k(const uint8_t* block, Decoded* to) {
  affine_scales(block, to);
  for (int run = 0; run < 4; run++) nibbles(block + 48 + run * 32, 32, to->codes + run * 64);
  for (int run = 0; run < 8; run++)
    for (int i = 0; i < 32; i++) {
      int8_t* code = to->codes + run * 32 + i;
      *code = static_cast<int8_t>(*code | (block[16 + i] >> run & 1) << 4);
    }
}

void read_q6_k(const uint8_t* block, Decoded* to) {
  int8_t upper[kMostValues];
  crumbs(block + 128, upper);
  for (int run = 0; run < 2; run++) nibbles(block + run * 64, 64, to->codes + run * 128);
  for (int i = 0; i < kMostValues; i++) to->codes[i] = static_cast<int8_t>((to->codes[i] | upper[i] << 4) - 32);
  const float scale = half_of(block + 208);
  for (int i = 0; i < 16; i++) to->scales[i] = scale * static_cast<float>(static_cast<int8_t>(block[192 + i]));
}

void read_q8_k(const uint8_t* block, Decoded* to) {
  std::memcpy(to->scales, block, 4);
  std::memcpy(to->codes, block + 4, 256);
}

constexpr int8_t kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kE2M1Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

void look_up(const int8_t* values, int n, int8_t* codes) {
  for (int i = 0; i < n; i++) codes[i] = values[static_cast<int>(codes[i])];
}

void read_iq4_nl(const uint8_t* block, Decoded* to) {
  to->scales[0] = half_of(block);
  nibbles(block + 2, 16, to->codes);
  look_up(kIQ4Values, 32, to->codes);
}

void read_iq4_xs(const uint8_t* block, Decoded* to) {
  const float scale = half_of(block);
  const int upper = block[2] | block[3] << 8;
  for (int run = 0; run < 8; run++) {
    const int low = block[4 + run / 2] >> 4 * (run % 2) & 15, high = upper >> 2 * run & 3;
    to->scales[run] = scale * static_cast<float>((low | high << 4) - 32);
    nibbles(block + 8 + run * 16, 16, to->codes + run * 32);
  }
  look_up(kIQ4Values, 256, to->codes);
}

void read_mxfp4(const uint8_t* block, Decoded* to) {
  to->scales[0] = std::ldexp(1.0f, block[0] - 128);
  nibbles(block + 1, 16, to->codes);
  look_up(kE2M1Values, 32, to->codes);
}

void read_tq2_0(const uint8_t* block, Decoded* to) {
  crumbs(block, to->codes);
  add(to->codes, 256, -1);
  to->scales[0] = half_of(block + 64);
}

struct Format {
  Reader read;
  int values, bytes, scales;
  int32_t kind;
};

constexpr Format kFormats[kNumStored] = {
    {read_q5_0, 32, 22, 1, kQ6_H},    {read_q5_1, 32, 24, 1, kQ8_M},    {read_q8_1, 32, 36, 1, kQ8_0},
    {read_q2_k, 256, 84, 16, kQ8_HM}, {read_q3_k, 256, 110, 16, kQ6_H}, {read_q4_k, 256, 144, 8, kQ4_1},
    {read_q5_k, 256, 176, 8, kQ8_M},  {read_q6_k, 256, 210, 16, kQ6_H}, {read_q8_k, 256, 292, 1, kQ8_0},
    {read_iq4_nl, 32, 18, 1, kQ8_0},  {read_iq4_xs, 256, 136, 8, kQ8_0}, {read_mxfp4, 32, 17, 1, kQ8_0},
    {read_tq2_0, 256, 66, 1, kQ4_0},
};

// The largest value that was rounded to float16, and the largest difference that made.
struct Loss {
  float largest = 0, lost = 0;

  void merge(const Loss& other) {
    largest = other.largest > largest ? other.largest : largest;
    if (other.lost > lost || other.lost != other.lost) lost = other.lost;  // what is not a number stays
  }
  bool fits() const { return lost <= largest * 0x1p-11f; }
};

void write_half(float value, Loss* loss, uint8_t* to) {
  const uint16_t half = float_to_half(value);
  std::memcpy(to, &half, 2);
  loss->merge({std::fabs(value), std::fabs(half_to_float(half) - value)});
}

void write_codes(int32_t kind, const int8_t* codes, uint8_t* to) {
  if (is_wide(kind)) {
    std::memcpy(to, codes, kGroup);
    return;
  }
  const int offset = kind == kQ6_H ? 32 : kind == kQ4_0 ? 8 : 0;
  uint8_t raw[kGroup];
  for (int i = 0; i < kGroup; i++) raw[i] = static_cast<uint8_t>(codes[i] + offset);
  for (int i = 0; i < 16; i++) to[i] = static_cast<uint8_t>((raw[i] & 15) | raw[i + 16] << 4);
  if (kind != kQ6_H) return;
  for (int half = 0; half < 2; half++)
    for (int i = 0; i < 4; i++) {
      const uint8_t* at = raw + half * 16 + i;
      to[16 + half * 4 + i] = static_cast<uint8_t>(at[0] >> 4 | at[4] >> 4 << 2 | at[8] >> 4 << 4 | at[12] >> 4 << 6);
    }
}

struct BlockLoss {
  Loss scales, minima;
};

void write_blocks(const Format& format, const Decoded& from, BlockLoss* loss, uint8_t* out) {
  const int32_t kind = format.kind;
  const int halves = has_halves(kind) ? 2 : 1, per_scale = format.values / format.scales;
  for (int group = 0; group < format.values / kGroup; group++) {
    for (int half = 0; half < halves; half++)
      write_half(from.scales[(group * kGroup + half * 16) / per_scale], &loss->scales, out + 2 * half);
    out += 2 * halves;
    if (has_minima(kind)) {
      for (int half = 0; half < halves; half++)
        write_half(from.minima[(group * kGroup + half * 16) / per_scale], &loss->minima, out + 2 * half);
      out += 2 * halves;
    }
    write_codes(kind, from.codes + group * kGroup, out);
    out += code_bytes(kind);
  }
}

}  // namespace

int stored_values(int32_t stored) { return kFormats[stored].values; }
int stored_bytes(int32_t stored) { return kFormats[stored].bytes; }
int32_t recoded_kind(int32_t stored) { return kFormats[stored].kind; }

bool recode(Team* team, int32_t stored, int64_t num_blocks, const uint8_t* data, uint8_t* out) {
  const Format& format = kFormats[stored];
  const int64_t out_bytes = raw_row_bytes(format.kind, format.values);
  const int num_units = static_cast<int>((num_blocks + kBlocksPerUnit - 1) / kBlocksPerUnit);
  std::vector<BlockLoss> losses(num_units);
  team->for_each(num_units, [&](int unit, int) {
    const int64_t first = static_cast<int64_t>(unit) * kBlocksPerUnit;
    const int64_t end = first + kBlocksPerUnit < num_blocks ? first + kBlocksPerUnit : num_blocks;
    Decoded decoded;
    for (int64_t block = first; block < end; block++) {
      format.read(data + block * format.bytes, &decoded);
      write_blocks(format, decoded, &losses[unit], out + block * out_bytes);
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
