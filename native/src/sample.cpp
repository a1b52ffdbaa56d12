// Probabilities become integers ("mass", 2^29 for the most likely token) as soon as they are made, so that every sum
// below is exact and has no order. Filters keep a list of surviving ids in ascending order:
//
//   top_k  by logit, ties to the lower id
//   top_p  by falling mass, ties to the lower id, until the share is reached
//   min_p  mass against the largest
//
// Both selections first collect the few candidates that can matter, then find the border by a radix walk over keys.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "half.h"
#include "philox.h"

namespace mill {

namespace {

constexpr uint32_t kFullMass = 1u << 29;
constexpr int kRadixBits = 11;

// Order-preserving: a larger float has a larger key; both zeros share one.
uint32_t sortable(float value) {
  const uint32_t bits = float_to_bits(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Scratch {
  uint32_t* mass;    // [num_cols]
  int32_t* ids;      // [num_cols]
  float* chunk_max;  // [num_cols / 16 + 1]
};

Scratch split(void* memory, int64_t num_cols) {
  uint32_t* words = static_cast<uint32_t*>(memory);
  return {words, reinterpret_cast<int32_t*>(words + num_cols), reinterpret_cast<float*>(words + 2 * num_cols)};
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

uint64_t sum_all(const uint32_t* mass, int n) {
  uint64_t total = 0;
  for (int i = 0; i < n; i++) total += mass[i];
  return total;
}

int32_t draw_from_all(const uint32_t* mass, int num_cols, uint64_t total, uint32_t random24) {
  uint64_t left = static_cast<uint64_t>((static_cast<unsigned __int128>(total) * random24) >> 24);
  int begin = 0;
  for (; begin + 1024 < num_cols; begin += 1024) {
    const uint64_t chunk = sum_all(mass + begin, 1024);
    if (left < chunk) break;
    left -= chunk;
  }
  for (int i = begin; i < num_cols; i++) {
    if (left < mass[i]) return i;
    left -= mass[i];
  }
  return num_cols - 1;
}

}  // namespace

int64_t sample_scratch_bytes(int64_t num_cols) { return ((2 * num_cols + num_cols / kLanes + 1) * 4 + 63) / 64 * 64; }

int32_t sample_row(const Kernels* kernels, const float* logits, int num_cols, const SamplingRow& how, void* memory) {
  if (!(how.temperature > 0.0f)) return kernels->argmax(logits, num_cols);
  const Scratch scratch = split(memory, num_cols);
  uint32_t* mass = scratch.mass;
  const float highest = kernels->max_of(logits, num_cols);
  if (std::isnan(highest)) return -1;
  kernels->exp_mass(logits, num_cols, highest, 1.0f / how.temperature, mass);
  uint64_t total = sum_all(mass, num_cols);
  const uint32_t random24 = philox(how.seed, static_cast<uint32_t>(how.position), static_cast<uint32_t>(how.choice), 0) >> 8;

  const auto mass_of = [&](int32_t id) { return mass[id]; };
  int32_t* ids = scratch.ids;
  int count = -1;  // -1: every id survives and no list is needed
  if (how.top_k > 0 && how.top_k < num_cols) {
    count = candidates_for_top(kernels, logits, num_cols, how.top_k, scratch);
    const auto key = [&](int32_t id) { return sortable(logits[id]); };
    count = keep_heaviest(ids, count, static_cast<uint64_t>(how.top_k), key, [](int32_t) { return 1u; });
    total = 0;
    for (int i = 0; i < count; i++) total += mass[ids[i]];
  }
  if (how.top_p < 1.0f) {
    const double wanted = static_cast<double>(how.top_p) * static_cast<double>(total);
    const uint64_t target = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(wanted)));
    if (count < 0) {
      // Ids this light weigh less than total - target together, so none of them is needed to reach the target.
      const uint64_t floor = (total - std::min(target, total)) / static_cast<uint64_t>(num_cols);
      count = kernels->collect_mass_ge(mass, num_cols, static_cast<uint32_t>(std::max<uint64_t>(1, floor)), ids);
    }
    count = keep_heaviest(ids, count, target, mass_of, mass_of);
  }
  if (how.min_p > 0.0f) {
    const uint32_t floor = static_cast<uint32_t>(std::ceil(static_cast<double>(how.min_p) * kFullMass));
    if (count < 0) {
      count = kernels->collect_mass_ge(mass, num_cols, floor, ids);
    } else {
      int kept = 0;
      for (int i = 0; i < count; i++)
        if (mass[ids[i]] >= floor) ids[kept++] = ids[i];
      count = kept;
    }
  }
  if (count < 0) return draw_from_all(mass, num_cols, total, random24);
  total = 0;
  for (int i = 0; i < count; i++) total += mass[ids[i]];
  uint64_t left = static_cast<uint64_t>((static_cast<unsigned __int128>(total) * random24) >> 24);
  for (int i = 0; i < count; i++) {
    if (left < mass[ids[i]]) return ids[i];
    left -= mass[ids[i]];
  }
  return ids[count - 1];
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
