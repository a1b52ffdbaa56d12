// The draw: an exponential race. Each id gets a random word of its own and from it a time E / mass, where E has the
// exponential distribution; the id with the least time is drawn, which is each id with the probability mass / sum. Because
// the words belong to ids and not to places in a sum, two distributions that share most of their mass mostly draw the same
// id (Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024).
#pragma once
#include "half.h"
#include "philox.h"

namespace mill {

namespace {

// -log(1 - u) for u = (w + 1/2) / 2^32, within 2 ulp at both ends: 1 - u takes the place of u for words in the upper half.
inline float exponential_of(uint32_t w) {
  const bool is_upper = w >> 31;
  const float x = __builtin_fmaf((float)(int32_t)(is_upper ? ~w : w), 0x1p-32f, 0x1p-33f);  // u, or 1 - u; up to 1/2
  int exponent = 0;
  float f = -x;  // 1 - u = 2^exponent * (1 + f)
  if (is_upper) {
    const uint32_t bits = float_to_bits(x) - 0x3f3504f3u;  // from the square root of 1/2 to that of 2
    exponent = (int32_t)bits >> 23;
    f = bits_to_float((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
  } else if (x > 0.29289f) {
    exponent = -1;
    f = __builtin_fmaf(x, -2.0f, 1.0f);
  }
  // log(1 + f) = f - f^2 / 2 + f^3 p(f), fitted for the least relative error.
  float p = -7.63574168e-2f;
  p = __builtin_fmaf(p, f, 1.27627850e-1f);
  p = __builtin_fmaf(p, f, -1.31603003e-1f);
  p = __builtin_fmaf(p, f, 1.42016068e-1f);
  p = __builtin_fmaf(p, f, -1.66233301e-1f);
  p = __builtin_fmaf(p, f, 2.00012326e-1f);
  p = __builtin_fmaf(p, f, -2.50008225e-1f);
  p = __builtin_fmaf(p, f, 3.33333313e-1f);
  const float square = f * f;
  const float low = __builtin_fmaf((float)exponent, 1.42860682e-6f, f * square * p - 0.5f * square);
  return -__builtin_fmaf((float)exponent, 0.693145751953125f, f + low);
}

// The least time so far, and whose it is; of equal times the lower id's.
struct Race {
  float best = __builtin_inff();
  int32_t winner = -1;

  void enter(int32_t id, float mass, uint32_t w) {
    const float time = exponential_of(w) / mass;
    if (time < best || winner < 0 || (time == best && id < winner)) best = time, winner = id;
  }

  // Whether this id cannot win, for E is at least (w + 1/2) / 2^32. The factor covers what rounding takes from E, from the
  // time and from the product.
  bool is_late(float mass, uint32_t w) const { return (float)w * 0x1p-32f > best * 1.0001f * mass; }
};

}  // namespace

}  // namespace mill
