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
// Sums are of integers, round(mass * 2^40), so that they are exact and have no order. Both selections first collect the
// few candidates that can matter, then find the border by a radix walk over keys.
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

// Order-preserving: a larger float has a larger key; both zeros share one.
uint32_t sortable(float value) {
  const uint32_t bits = float_to_bits(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Scratch {
  float* mass;       // [num_cols]
  int32_t* ids;      // [num_cols]
  float* chunk_max;  // [num_cols / 16 + 1]
  float* adjusted;   // [num_cols]
  uint32_t* counts;  // [num_cols]: zeros
};

Scratch split(void* memory, int64_t num_cols) {
  float* floats = static_cast<float*>(memory);
  return {floats, reinterpret_cast<int32_t*>(floats + num_cols), floats + 4 * num_cols, floats + 2 * num_cols,
          reinterpret_cast<uint32_t*>(floats + 3 * num_cols)};
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

// Of t = log(mass) the surprise is a constant - t, and what is expected that constant - the mean of t.
int keep_typical(const float* logits, const float* mass, float highest, float temperature, float share, int32_t* ids, int count) {
  const auto log_mass = [&](int32_t id) { return (static_cast<double>(logits[id]) - highest) / temperature; };
  count = keep_if(ids, count, [&](int32_t id) { return whole_mass(mass[id]) > 0; });
  const double total = sum_of(ids, count, [&](int32_t id) { return static_cast<double>(mass[id]); });
  const double mean = sum_of(ids, count, [&](int32_t id) { return mass[id] * log_mass(id); }) / total;
  const auto closeness = [&](int32_t id) {
    return ~float_to_bits(static_cast<float>(std::abs(log_mass(id) - mean)));
  };
  uint64_t whole = 0;
  for (int i = 0; i < count; i++) whole += whole_mass(mass[ids[i]]);
  const double wanted = static_cast<double>(share) * static_cast<double>(whole);
  const uint64_t target = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(wanted)));
  return keep_heaviest(ids, count, target, closeness, [&](int32_t id) { return whole_mass(mass[id]); });
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

int64_t sample_scratch_bytes(int64_t num_cols) { return ((4 * num_cols + num_cols / kLanes + 1) * 4 + 63) / 64 * 64; }

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
    if (count < 0) count = kernels->collect_ge(mass, num_cols, std::numeric_limits<float>::min(), ids);
  };
  if (how.top_n_sigma > 0.0f && highest > kNever)
    count = keep_within_sigma(logits, num_cols, highest, how.top_n_sigma, ids);
  if (how.top_k > 0 && how.top_k < num_cols) {
    if (count < 0) count = candidates_for_top(kernels, logits, num_cols, how.top_k, scratch);
    const auto key = [&](int32_t id) { return sortable(logits[id]); };
    if (count > how.top_k) count = keep_heaviest(ids, count, static_cast<uint64_t>(how.top_k), key, [](int32_t) { return 1u; });
  }
  if (how.typical_p < 1.0f) {
    list_all();
    count = keep_typical(logits, mass, highest, how.temperature, how.typical_p, ids, count);
  }
  if (how.top_p < 1.0f) count = keep_share(kernels, mass, num_cols, how.top_p, ids, count);
  if (how.min_p > 0.0f) {
    if (count < 0) {
      count = kernels->collect_ge(mass, num_cols, how.min_p, ids);
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
  int32_t token = -1;
  if (!std::isnan(kernels->max_of(logits, num_cols))) {
    memcpy(scratch.adjusted, logits, static_cast<size_t>(num_cols) * 4);
    if (adjust_row(adjustment, how.position, scratch.adjusted, num_cols, scratch.counts))
      token = sample_row(kernels, scratch.adjusted, num_cols, how, memory);
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
