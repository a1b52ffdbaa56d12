// From a row of logits to a token. Every id gets a mass, exp((logit - max) / temperature), 1 for the most likely one;
// filters keep a list of surviving ids in ascending order, and the survivors race for the draw (race.h):
//
//   top_n_sigma  logits within n standard deviations of the largest (Tang et al., "Top-nsigma", 2024)
//   top_k        by logit, ties to the lower id
//   typical_p    by closeness of the surprise to what is expected, ties to the lower id, until the share is reached
//                (Meister et al., "Locally typical sampling", 2022)
//   top_p        by falling mass, ties to the lower id, until the share is reached (Holtzman et al., 2019)
//   min_p        mass against the largest (Nguyen et al., 2024)
//   XTC          with a probability, all but the lightest of those whose share reaches the threshold are dropped ("Exclude
//                top choices", text-generation-webui's pull request 6335)
//
// Where many ids survive there is no list: all others have their mass set to 0.
//
// Sums are of integers, round(mass * 2^40), so that they are exact and have no order. Selections first narrow down the
// candidates that can be at the border, then find it by a radix walk over their keys.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "adjust.h"
#include "half.h"
#include "race.h"

namespace mill {

namespace {

constexpr int kRadixBits = 11;
constexpr float kAll = std::numeric_limits<float>::infinity();

// Order-preserving: a larger float has a larger key; both zeros share one.
uint32_t sortable(float value) {
  const uint32_t bits = float_to_bits(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

float from_sortable(uint32_t key) { return bits_to_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

struct Scratch {
  float* mass;       // [num_cols]
  int32_t* ids;      // [num_cols]
  float* chunk_max;  // [num_cols / 16 + 1]
  float* adjusted;   // [num_cols]
  uint32_t* counts;  // [num_cols]: zeros
  float* keys;       // [num_cols]
};

Scratch split(void* memory, int64_t num_cols) {
  float* floats = static_cast<float*>(memory);
  return {floats, reinterpret_cast<int32_t*>(floats + num_cols), floats + 5 * num_cols, floats + 2 * num_cols,
          reinterpret_cast<uint32_t*>(floats + 3 * num_cols), floats + 4 * num_cols};
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
  return kernels->collect(logits, num_cols, scratch.chunk_max[k - 1], kAll, scratch.ids);
}

float heaviest(const float* mass, const int32_t* ids, int count) {
  float most = 0;
  for (int i = 0; i < count; i++) most = std::max(most, mass[ids[i]]);
  return most;
}

// What sum_mass adds for one id. What is added to 3 * 2^51 is rounded to whole numbers.
uint64_t whole_mass(float mass) {
  const double sum = static_cast<double>(mass) * 0x1p40 + 0x1.8p52, none = 0x1.8p52;
  uint64_t bits, none_bits;
  memcpy(&bits, &sum, 8);
  memcpy(&none_bits, &none, 8);
  return bits - none_bits;
}

// The sum of f(id) in float64, in an order that depends on nothing but the list.
template <class Value>
double sum_of(const int32_t* ids, int count, const Value& value) {
  double sums[8] = {};
  for (int i = 0; i < count; i++) sums[i % 8] += value(ids[i]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <class Keep>
int keep_if(int32_t* ids, int count, const Keep& keep) {
  int kept = 0;
  for (int i = 0; i < count; i++)
    if (keep(ids[i])) ids[kept++] = ids[i];
  return kept;
}

// Logits that are ruled out do not count towards the deviation.
int keep_within_sigma(const float* logits, int num_cols, float highest, float num_sigma, int32_t* ids) {
  int count = 0;
  for (int i = 0; i < num_cols; i++)
    if (logits[i] > kNever) ids[count++] = i;
  if (count == 0) return 0;
  const double mean = sum_of(ids, count, [&](int32_t id) { return static_cast<double>(logits[id]); }) / count;
  const double square = sum_of(ids, count, [&](int32_t id) {
    return (logits[id] - mean) * (logits[id] - mean);
  }) / count;
  const double least = highest - num_sigma * std::sqrt(square);
  return keep_if(ids, count, [&](int32_t id) { return logits[id] >= least; });
}

// A list that is shorter than this is kept as one.
int short_list(int num_cols) { return std::max(num_cols / 32, 256); }

uint64_t target_of(float share, uint64_t total) {
  return std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(static_cast<double>(share) * static_cast<double>(total))));
}

// Of all ids, those with a key of at least `least`: a list, or -1 where it would be long and the others' mass is 0 now.
int keep_from(const Kernels* kernels, float* mass, const float* keys, int num_cols, float least, int32_t* ids) {
  int count;
  kernels->sum_mass(mass, keys, num_cols, least, &count);
  if (count <= short_list(num_cols)) return kernels->collect(keys, num_cols, least, kAll, ids);
  kernels->drop_below(mass, keys, num_cols, least);
  return -1;
}

// Of all ids, those with the greatest keys (ties: lower id first) whose masses reach `target`; as keep_from tells it. Those
// with a key of at least `least` do reach it, and no key is above `most`. Bisection leaves few keys for the radix walk.
int keep_greatest(const Kernels* kernels, float* mass, const float* keys, int num_cols, uint64_t target, float least,
                  float most, int32_t* ids) {
  const auto key = [&](int32_t id) { return sortable(keys[id]); };
  const auto weight = [&](int32_t id) { return whole_mass(mass[id]); };
  uint32_t low = sortable(least), high = sortable(most) + 1, middle = low;  // of [low, high): all that may be the border
  uint64_t above = 0;
  int from_low = num_cols, from_high = 0;
  while (from_low - from_high > short_list(num_cols) && high - low > 1) {
    int count;
    const uint64_t sum = kernels->sum_mass(mass, keys, num_cols, from_sortable(middle), &count);
    if (sum >= target) {
      low = middle, from_low = count;
    } else {
      high = middle, from_high = count, above = sum;
    }
    middle = low + (high - low) / 2;
  }
  const bool is_short = from_low <= short_list(num_cols);
  if (is_short) high = sortable(most) + 1, above = 0;
  int count = kernels->collect(keys, num_cols, from_sortable(low), from_sortable(high), ids);
  if (is_short) return keep_heaviest(ids, count, target, key, weight);
  kernels->drop_below(mass, keys, num_cols, from_sortable(low));
  uint64_t reached;
  const uint32_t border = find_border(ids, count, target - above, key, weight, &reached);
  for (int i = 0; i < count; i++) {
    const int32_t id = ids[i];
    const uint32_t k = key(id);
    const bool has_room = reached < target - above;
    if (k == border && has_room) reached += weight(id);
    if (k < border || (k == border && !has_room)) mass[id] = 0.0f;
  }
  return -1;
}

// The surprise of an id is a constant - log(mass), and what is expected that constant - the mean of log(mass).
int keep_typical(const Kernels* kernels, const float* logits, int num_cols, float highest, float inverse, float share,
                 const Scratch& scratch, int count) {
  float *mass = scratch.mass, *keys = scratch.keys;
  const auto log_mass = [&](int32_t id) { return std::max((logits[id] - highest) * inverse, -128.0f); };
  uint64_t total = 0, sum = 0;
  if (count < 0) {
    int ignored;
    total = kernels->sum_mass(mass, mass, num_cols, 0.0f, &ignored);
    kernels->entropy_terms(logits, mass, num_cols, highest, inverse, keys);
    sum = kernels->sum_mass(keys, mass, num_cols, 0.0f, &ignored);
  }
  for (int i = 0; i < count; i++) {
    const int32_t id = scratch.ids[i];
    total += whole_mass(mass[id]);
    sum += whole_mass(-(mass[id] * log_mass(id)));
  }
  const float mean = static_cast<float>(-(static_cast<double>(sum) / static_cast<double>(total)));
  const uint64_t target = target_of(share, total);
  if (count < 0) {
    kernels->typicality(logits, num_cols, highest, inverse, mean, keys);
    return keep_greatest(kernels, mass, keys, num_cols, target, -128.0f, 0.0f, scratch.ids);
  }
  const auto key = [&](int32_t id) { return sortable(-std::abs(log_mass(id) - mean)); };
  return keep_heaviest(scratch.ids, count, target, key, [&](int32_t id) { return whole_mass(mass[id]); });
}

int exclude_top(const float* mass, float threshold, int32_t* ids, int count) {
  uint64_t total = 0;
  for (int i = 0; i < count; i++) total += whole_mass(mass[ids[i]]);
  const double least = static_cast<double>(threshold) * static_cast<double>(total);
  const auto is_top = [&](int32_t id) { return mass[id] > 0.0f && static_cast<double>(whole_mass(mass[id])) >= least; };
  int32_t spared = -1;  // the lightest of them, of equals the last
  for (int i = 0; i < count; i++)
    if (is_top(ids[i]) && (spared < 0 || mass[ids[i]] <= mass[spared])) spared = ids[i];
  return keep_if(ids, count, [&](int32_t id) { return id == spared || !is_top(id); });
}

// The heaviest ids that together have at least `share` of what `ids` have, or where count is -1, all ids.
int keep_share(const Kernels* kernels, float* mass, int num_cols, float share, int32_t* ids, int count) {
  const auto weight = [&](int32_t id) { return whole_mass(mass[id]); };
  uint64_t total = 0;
  if (count < 0) {
    int ignored;
    total = kernels->sum_mass(mass, mass, num_cols, 0.0f, &ignored);
    const uint64_t target = target_of(share, total);
    // Ids this light weigh less than total - target together, so none of them is needed to reach the target.
    const uint64_t floor = (total - std::min(target, total)) / static_cast<uint64_t>(num_cols);
    const double lightest = (static_cast<double>(floor) - 1) * 0x1p-40 * (1 - 1e-6);
    const float least = static_cast<float>(std::max(lightest, 1e-37));
    return keep_greatest(kernels, mass, mass, num_cols, target, least, 1.0f, ids);
  }
  for (int i = 0; i < count; i++) total += weight(ids[i]);
  return keep_heaviest(ids, count, target_of(share, total), [&](int32_t id) { return float_to_bits(mass[id]); }, weight);
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

int64_t sample_scratch_bytes(int64_t num_cols) { return ((5 * num_cols + num_cols / kLanes + 1) * 4 + 63) / 64 * 64; }

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
  const auto list_all = [&] {
    if (count < 0) count = kernels->collect(mass, num_cols, std::numeric_limits<float>::min(), kAll, ids);
  };
  if (how.top_n_sigma > 0.0f && highest > kNever)
    count = keep_within_sigma(logits, num_cols, highest, how.top_n_sigma, ids);
  if (how.top_k > 0 && how.top_k < num_cols) {
    if (count < 0) count = candidates_for_top(kernels, logits, num_cols, how.top_k, scratch);
    const auto key = [&](int32_t id) { return sortable(logits[id]); };
    if (count > how.top_k) count = keep_heaviest(ids, count, static_cast<uint64_t>(how.top_k), key, [](int32_t) { return 1u; });
  }
  if (how.typical_p < 1.0f)
    count = keep_typical(kernels, logits, num_cols, highest, inverse, how.typical_p, scratch, count);
  if (how.top_p < 1.0f) count = keep_share(kernels, mass, num_cols, how.top_p, ids, count);
  if (how.min_p > 0.0f) {
    if (count < 0) {
      const float most = how.typical_p < 1.0f ? kernels->max_of(mass, num_cols) : 1.0f;
      count = keep_from(kernels, mass, mass, num_cols, how.min_p * most, ids);
    } else {
      const float least = how.min_p * heaviest(mass, ids, count);
      count = keep_if(ids, count, [&](int32_t id) { return mass[id] >= least; });
    }
  }
  if (how.xtc_probability > 0.0f) {
    const DrawName xtc = {how.seed, static_cast<uint32_t>(how.position), static_cast<uint32_t>(how.choice), kPurposeXtc};
    if ((philox(xtc, 0).words[0] + 0.5) * 0x1p-32 < how.xtc_probability) {
      list_all();
      count = exclude_top(mass, how.xtc_threshold, ids, count);
    }
  }
  const DrawName name = {how.seed, static_cast<uint32_t>(how.position), static_cast<uint32_t>(how.choice), kPurposeToken};
  return count < 0 ? kernels->race(mass, num_cols, name) : race_of(kernels, mass, num_cols, ids, count, name);
}

int32_t sample_adjusted_row(const Kernels* kernels, const float* logits, int num_cols, const SamplingRow& how,
                            const tm_adjustment& adjustment, void* memory) {
  const Scratch scratch = split(memory, num_cols);
  int32_t token = TM_NOT_FINITE;
  if (!std::isnan(kernels->max_of(logits, num_cols))) {
    token = adjust_row(adjustment, how.position, logits, scratch.adjusted, num_cols, scratch.counts)
                ? sample_row(kernels, scratch.adjusted, num_cols, how, memory)
                : TM_MASK_LATE;
  }
  adjustment.history[adjustment.num_prompt + how.position] = std::max(token, 0);
  return token;
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
