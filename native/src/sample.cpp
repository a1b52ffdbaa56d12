// From a row of logits to a token. Every id gets a mass, exp((logit - max) / temperature), 1 for the most likely one;
// filters keep a list of surviving ids in ascending order, and the survivors race for the draw (race.h):
//
//   top_k  by logit, ties to the lower id
//   top_p  by falling mass, ties to the lower id, until the share is reached
//   min_p  mass against the largest
//
// Sums are of integers, round(mass * 2^40), so that they are exact and have no order. Both selections first collect the
// few candidates that can matter, then find the border by a radix walk over keys.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "half.h"
#include "race.h"

namespace mill {

namespace {

constexpr int kRadixBits = 11;

// Order-preserving: a larger float has a larger key; both zeros share one.
uint32_t sortable(float value) {
  const uint32_t bits = float_to_bits(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Scratch {
  float* mass;       // [num_cols]
  int32_t* ids;      // [num_cols]
  float* chunk_max;  // [num_cols / 16 + 1]
};

Scratch split(void* memory, int64_t num_cols) {
  float* floats = static_cast<float*>(memory);
  return {floats, reinterpret_cast<int32_t*>(floats + num_cols), floats + 2 * num_cols};
}

// The key at which the weights of all greater keys, in falling order, first reach `target` together with it; *above is
// the weight of the keys strictly greater. Three passes over 11, 11 and 10 bits.
template <class Key, class Weight>
uint32_t find_border(const int32_t* ids, int count, uint64_t target, const Key& key, const Weight& weight,
                     uint64_t* above) {
  uint32_t prefix = 0;
  uint64_t passed = 0;
  int shift = 32;
  while (shift > 0) {
    const int bits = std::min(kRadixBits, shift);
    const uint32_t high_mask = shift == 32 ? 0 : ~0u << shift;
    shift -= bits;
    uint64_t sums[1 << kRadixBits] = {};
    for (int i = 0; i < count; i++) {
      const uint32_t k = key(ids[i]);
      if ((k & high_mask) == prefix) sums[k >> shift & ((1u << bits) - 1)] += weight(ids[i]);
    }
    uint32_t digit = (1u << bits) - 1;
    while (digit > 0 && passed + sums[digit] < target) passed += sums[digit--];
    prefix |= digit << shift;
  }
  *above = passed;
  return prefix;
}

// Keep, in ascending order, the shortest run of falling keys (ties: lower id first) whose weights reach `target`.
template <class Key, class Weight>
int keep_heaviest(int32_t* ids, int count, uint64_t target, const Key& key, const Weight& weight) {
  uint64_t reached;
  const uint32_t border = find_border(ids, count, target, key, weight, &reached);
  int kept = 0;
  for (int i = 0; i < count; i++) {
    const int32_t id = ids[i];
    const uint32_t k = key(id);
    if (k < border || (k == border && reached >= target)) continue;
    if (k == border) reached += weight(id);
    ids[kept++] = id;
  }
  return kept;
}

// A list of ids, ascending, that holds the k largest logits: those not below the k-th largest chunk maximum.
int candidates_for_top(const Kernels* kernels, const float* logits, int num_cols, int k, const Scratch& scratch) {
  const int num_runs = num_cols / kChunkRun;
  const int num_chunks = num_runs * kLanes;
  if (k > num_chunks) {
    for (int i = 0; i < num_cols; i++) scratch.ids[i] = i;
    return num_cols;
  }
  kernels->chunk_max(logits, num_runs, scratch.chunk_max);
  std::nth_element(scratch.chunk_max, scratch.chunk_max + k - 1, scratch.chunk_max + num_chunks, std::greater<float>());
  return kernels->collect_ge(logits, num_cols, scratch.chunk_max[k - 1], scratch.ids);
}

// What sum_mass adds for one id. What is added to 3 * 2^51 is rounded to whole numbers.
uint64_t whole_mass(float mass) {
  const double sum = static_cast<double>(mass) * 0x1p40 + 0x1.8p52, none = 0x1.8p52;
  uint64_t bits, none_bits;
  memcpy(&bits, &sum, 8);
  memcpy(&none_bits, &none, 8);
  return bits - none_bits;
}

// The heaviest ids that together have at least `share` of what `ids` have, or where count is -1, all ids.
int keep_share(const Kernels* kernels, const float* mass, int num_cols, float share, int32_t* ids, int count) {
  const auto weight = [&](int32_t id) { return whole_mass(mass[id]); };
  uint64_t total = 0;
  if (count < 0) total = kernels->sum_mass(mass, num_cols);
  for (int i = 0; i < count; i++) total += weight(ids[i]);
  const double wanted = static_cast<double>(share) * static_cast<double>(total);
  const uint64_t target = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(wanted)));
  if (count < 0) {
    // Ids this light weigh less than total - target together, so none of them is needed to reach the target.
    const uint64_t floor = (total - std::min(target, total)) / static_cast<uint64_t>(num_cols);
    const double lightest = (static_cast<double>(floor) - 1) * 0x1p-40 * (1 - 1e-6);
    count = kernels->collect_ge(mass, num_cols, static_cast<float>(std::max(lightest, 1e-37)), ids);
  }
  return keep_heaviest(ids, count, target, [&](int32_t id) { return float_to_bits(mass[id]); }, weight);
}

// The winner among the ids of a list. A long one is raced as all ids are, the others having no mass.
int32_t race_of(const Kernels* kernels, float* mass, int num_cols, const int32_t* ids, int count, const DrawName& name) {
  if (count < num_cols / 32) {
    Race race;
    for (int i = 0; i < count; i++)
      if (mass[ids[i]] > 0.0f) race.enter(ids[i], mass[ids[i]], philox(name, static_cast<uint32_t>(ids[i]) / 4).words[ids[i] % 4]);
    return race.winner;
  }
  int next = 0;
  for (int i = 0; i < count; next = ids[i++] + 1) std::fill(mass + next, mass + ids[i], 0.0f);
  std::fill(mass + next, mass + num_cols, 0.0f);
  return kernels->race(mass, num_cols, name);
}

}  // namespace

int64_t sample_scratch_bytes(int64_t num_cols) { return ((2 * num_cols + num_cols / kLanes + 1) * 4 + 63) / 64 * 64; }

int32_t sample_row(const Kernels* kernels, const float* logits, int num_cols, const SamplingRow& how, void* memory) {
  if (!(how.temperature > 0.0f)) return kernels->argmax(logits, num_cols);
  const Scratch scratch = split(memory, num_cols);
  float* mass = scratch.mass;
  int32_t* ids = scratch.ids;
  const float highest = kernels->max_of(logits, num_cols);
  if (std::isnan(highest)) return -1;
  const float inverse = std::min(1.0f / how.temperature, std::numeric_limits<float>::max());
  kernels->exp_mass(logits, num_cols, highest, inverse, mass);

  int count = -1;  // -1: every id survives and no list is needed
  if (how.top_k > 0 && how.top_k < num_cols) {
    count = candidates_for_top(kernels, logits, num_cols, how.top_k, scratch);
    const auto key = [&](int32_t id) { return sortable(logits[id]); };
    count = keep_heaviest(ids, count, static_cast<uint64_t>(how.top_k), key, [](int32_t) { return 1u; });
  }
  if (how.top_p < 1.0f) count = keep_share(kernels, mass, num_cols, how.top_p, ids, count);
  if (how.min_p > 0.0f) {
    if (count < 0) {
      count = kernels->collect_ge(mass, num_cols, how.min_p, ids);
    } else {
      count = static_cast<int>(std::remove_if(ids, ids + count, [&](int32_t id) { return mass[id] < how.min_p; }) - ids);
    }
  }
  const DrawName name = {how.seed, static_cast<uint32_t>(how.position), static_cast<uint32_t>(how.choice), kPurposeToken};
  return count < 0 ? kernels->race(mass, num_cols, name) : race_of(kernels, mass, num_cols, ids, count, name);
}

void logprobs_row(const Kernels* kernels, const float* logits, int num_cols, int32_t token, int num_top,
                  float* logprob, int32_t* rank, int32_t* top_ids, float* top_logprobs, void* memory) {
  const Scratch scratch = split(memory, num_cols);
  const float highest = kernels->max_of(logits, num_cols);
  if (std::isnan(highest)) {
    *rank = 0;
    *logprob = highest;
    std::iota(top_ids, top_ids + num_top, 0);
    std::fill(top_logprobs, top_logprobs + num_top, highest);
    return;
  }
  const float log_sum = static_cast<float>(std::log(static_cast<double>(kernels->sum_exp(logits, num_cols, highest))));
  const float own = logits[token];
  *logprob = (own - highest) - log_sum;
  int better = 0;
  for (int i = 0; i < num_cols; i++) better += logits[i] > own;
  for (int i = 0; i < token; i++) better += logits[i] == own;
  *rank = better + 1;
  if (num_top == 0) return;
  const int count = candidates_for_top(kernels, logits, num_cols, num_top, scratch);
  std::partial_sort_copy(scratch.ids, scratch.ids + count, top_ids, top_ids + num_top, [&](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  });
  for (int i = 0; i < num_top; i++) top_logprobs[i] = (logits[top_ids[i]] - highest) - log_sum;
}

}  // namespace mill
