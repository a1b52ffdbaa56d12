// Dense rows as rows of another kind: see quantise in ops/api.py for the numbers.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"
#include "pack.h"

namespace mill {

namespace {

// kKnown: n, or 0 where the compiler cannot know it.
template <int kKnown>
void widen(int32_t kind, const uint8_t* from, int n, float* x) {
  if (kKnown != 0) n = kKnown;
  if (kind == kF32) {
    std::memcpy(x, from, static_cast<size_t>(n) * 4);
    return;
  }
  uint16_t values[kGroup];
  std::memcpy(values, from, static_cast<size_t>(n) * 2);
  if (kind == kBF16)
    for (int i = 0; i < n; i++) x[i] = bf16_to_float(values[i]);
  else
    for (int i = 0; i < n; i++) x[i] = half_to_float(values[i]);
}

void narrow(int32_t kind, const float* x, int n, uint8_t* to) {
  uint16_t values[kGroup];
  for (int i = 0; i < n; i++) values[i] = kind == kF16 ? float_to_half(x[i]) : float_to_bf16(x[i]);
  std::memcpy(to, values, static_cast<size_t>(n) * 2);
}

// Codes of (x - zero) / scale, rounded half to even and held to [least, most], plus an offset.
void codes_of(const float* x, float zero, float scale, float least, float most, int offset, uint8_t* codes) {
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  for (int i = 0; i < kGroup; i++) {
    float v = (x[i] - zero) * inverse;
    v = v > least ? v : least;
    v = v < most ? v : most;
    codes[i] = static_cast<uint8_t>(static_cast<int32_t>(float_to_bits(v + kMagic) - kMagicBits) + offset);
  }
}

// 32 values as one block of a quantised kind: see quantise in ops/api.py for the numbers. A zero scale or minimum has
// no sign, whichever zero came first among the values.
void quantise_block(int32_t kind, const float* x, uint8_t* block) {
  using Lanes = float __attribute__((vector_size(16)));
  constexpr int kWidth = 4;
  Lanes low, high, zeros = {};
  std::memcpy(&low, x, sizeof low);
  high = low;
  for (int at = 0; at < kGroup; at += kWidth) {
    Lanes values;
    std::memcpy(&values, x + at, sizeof values);
    low = values < low ? values : low;
    high = values > high ? values : high;
    zeros += 0.0f * values;
  }
  float zero = 0.0f, least = low[0], most = high[0];  // zero: NaN where a value is not finite, and then the scale is
  for (int i = 0; i < kWidth; i++) {
    zero += zeros[i] * zeros[i];
    least = low[i] < least ? low[i] : least;
    most = high[i] > most ? high[i] : most;
  }
  const float furthest = most >= -least ? most : least;
  uint8_t codes[kGroup];
  uint16_t d;
  if (kind == kQ8_0) {
    d = float_to_half((furthest < 0 ? -furthest : furthest) / 127.0f + zero);
    codes_of(x, 0.0f, half_to_float(d), -127.0f, 127.0f, 0, codes);
    std::memcpy(block, &d, 2);
    std::memcpy(block + 2, codes, kGroup);
    return;
  }
  uint16_t m = 0;
  if (kind == kQ4_0) {
    d = float_to_half(furthest / -8.0f + zero);
    codes_of(x, 0.0f, half_to_float(d), -8.0f, 7.0f, 8, codes);
  } else {
    d = float_to_half((most - least) / 15.0f + zero);
    m = float_to_half(least + 0.0f);
    codes_of(x, half_to_float(m), half_to_float(d), 0.0f, 15.0f, 0, codes);
  }
  std::memcpy(block, &d, 2);
  if (kind == kQ4_1) std::memcpy(block + 2, &m, 2);
  uint8_t* nibbles = block + (kind == kQ4_1 ? 4 : 2);
  for (int i = 0; i < kGroup / 2; i++) nibbles[i] = static_cast<uint8_t>(codes[i] | codes[i + kGroup / 2] << 4);
}

}  // namespace

void quantise_rows(Team* team, int32_t from_kind, int32_t to_kind, int64_t num_rows, int64_t num_cols,
                   const uint8_t* data, uint8_t* out) {
  const int64_t from_bytes = raw_row_bytes(from_kind, num_cols), to_bytes = raw_row_bytes(to_kind, num_cols);
  const int64_t value_bytes = from_kind == kF32 ? 4 : 2;
  team->for_each(static_cast<int>((num_rows + 15) / 16), [&](int block, int) {
    const int64_t end = std::min<int64_t>(num_rows, block * 16 + 16);
    for (int64_t row = block * 16; row < end; row++) {
      const uint8_t* from = data + row * from_bytes;
      uint8_t* to = out + row * to_bytes;
      float x[kGroup];
      for (int64_t k = 0; k < num_cols; k += kGroup) {
        const int n = static_cast<int>(std::min<int64_t>(kGroup, num_cols - k));
        if (n == kGroup) widen<kGroup>(from_kind, from + k * value_bytes, n, x);
        else widen<0>(from_kind, from + k * value_bytes, n, x);
        if (to_kind == kF16 || to_kind == kBF16) {
          narrow(to_kind, x, n, to + k * 2);
        } else {
          quantise_block(to_kind, x, to);
          to += raw_row_bytes(to_kind, kGroup);
        }
      }
    }
  });
}

}  // namespace mill
