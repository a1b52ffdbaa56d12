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
// Where many ids survive there is no list: all others have their mass set to 0. Masses are made of all ids only where a
// share of their sum is asked for: else of those of a list, or without any filter of the few that might win. Of top_p alone
// it mostly is enough to know that the winner among all ids is kept.
//
// Sums are of integers, round(mass * 2^40), so that they are exact and have no order. Selections first narrow down the
// candidates that can be at the border, then find it by bisection of the keys.
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

constexpr float kAll = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();

// Order-preserving: a larger float has a larger key; both zeros share one.
uint32_t sortable(float value) {
  const uint32_t bits = float_to_bits(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

float from_sortable(uint32_t key) { return bits_to_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// What sum_mass adds for one id. What is added to 3 * 2^51 is rounded to whole numbers.
uint64_t whole_mass(float mass) {
  const double sum = static_cast<double>(mass) * 0x1p40 + 0x1.8p52, none = 0x1.8p52;
  uint64_t bits, none_bits;
  memcpy(&bits, &sum, 8);
  memcpy(&none_bits, &none, 8);
  return bits - none_bits;
}

struct Scratch {
  float* mass;       // [num_cols]
  int32_t* ids;      // [num_cols]
  float* chunk_max;  // [num_cols / 16 + 1]
  float* adjusted;   // [num_cols]
  uint32_t* counts;  // [num_cols]: zeros
  float* keys;       // [num_cols]
  uint32_t* words;   // the same, for the race
  float* list_keys;  // [num_cols]
  float* list_mass;  // [num_cols]
};

Scratch split(void* memory, int64_t num_cols) {
  float* floats = static_cast<float*>(memory);
  return {floats, reinterpret_cast<int32_t*>(floats + num_cols), floats + 7 * num_cols, floats + 2 * num_cols,
          reinterpret_cast<uint32_t*>(floats + 3 * num_cols), floats + 4 * num_cols,
          reinterpret_cast<uint32_t*>(floats + 4 * num_cols), floats + 5 * num_cols, floats + 6 * num_cols};
}

// Values whose keys are in [low, high), one of which the border is: the key at which the masses of all greater ones, of which
// the sum is `above`, first reach a target together with its own.
struct Bracket {
  uint32_t low, high;
  int from_low, from_high;  // values with keys from low and from high on
  uint64_t above = 0;

  // Keys between `least` and `most`, all n of them.
  Bracket(float least, float most, int n) : low(sortable(least)), high(sortable(most) + 1), from_low(n), from_high(0) {}

  // One step: on which side of `middle` the border is.
  void split(const Kernels* kernels, const float* mass, const float* keys, int n, uint64_t target, uint32_t middle) {
    if (middle < low || middle >= high) return;
    int count;
    const uint64_t sum = kernels->sum_mass(mass, keys, n, from_sortable(middle), &count);
    if (sum >= target) {
      low = middle, from_low = count;
    } else {
      high = middle, from_high = count, above = sum;
    }
  }

  // Bisect, until there are no more than `room` values or one key.
  void narrow(const Kernels* kernels, const float* mass, const float* keys, int n, uint64_t target, int room) {
    while (from_low - from_high > room && high - low > 1) split(kernels, mass, keys, n, target, low + (high - low) / 2);
  }
};

// Keep of the list of `count` ids, in ascending order, the shortest run of falling keys (ties: lower id first) whose masses
// reach `target`.
template <class Key, class Mass>
int keep_heaviest(const Kernels* kernels, const Scratch& scratch, int count, uint64_t target, const Key& key, const Mass& mass) {
  float *keys = scratch.list_keys, *masses = scratch.list_mass;
  if (count == 0) return 0;
  float least = kAll, most = -kAll;
  for (int i = 0; i < count; i++) {
    keys[i] = key(scratch.ids[i]);
    masses[i] = mass(scratch.ids[i]);
    least = std::min(least, keys[i]);
    most = std::max(most, keys[i]);
  }
  Bracket border(least, most, count);
  border.narrow(kernels, masses, keys, count, target, 0);
  const float last = from_sortable(border.low);
  int kept = 0;
  for (int i = 0; i < count; i++) {
    if (keys[i] < last || (keys[i] == last && border.above >= target)) continue;
    if (keys[i] == last) border.above += whole_mass(masses[i]);
    scratch.ids[kept++] = scratch.ids[i];
  }
  return kept;
}

// A list of ids, ascending, that holds the k largest logits: those not below the k-th largest of some maxima of chunks.
int candidates_for_top(const Kernels* kernels, const float* logits, int num_cols, int k, const Scratch& scratch) {
  int num_chunks = num_cols / kChunkRun * kLanes;
  if (k > num_chunks) {
    for (int i = 0; i < num_cols; i++) scratch.ids[i] = i;
    return num_cols;
  }
  kernels->chunk_max(logits, num_cols / kChunkRun, scratch.chunk_max);
  for (int fewer; (fewer = num_chunks / kChunkRun * kLanes) >= 2 * k; num_chunks = fewer)
    kernels->chunk_max(scratch.chunk_max, num_chunks / kChunkRun, scratch.chunk_max);
  std::nth_element(scratch.chunk_max, scratch.chunk_max + k - 1, scratch.chunk_max + num_chunks, std::greater<float>());
  return kernels->collect(logits, num_cols, scratch.chunk_max[k - 1], kAll, scratch.ids, num_cols);
}

float heaviest(const float* mass, const int32_t* ids, int count) {
  float most = 0;
  for (int i = 0; i < count; i++) most = std::max(most, mass[ids[i]]);
  return most;
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

constexpr int kPart = 32;  // a group of ids in so many tells of all
constexpr float kHeavy = 0x1p-14f;  // those from here on mostly have the share that is asked for

// A mass below all that are at least `whole` once rounded.
float mass_below(double whole) { return static_cast<float>(std::max((whole - 1) * 0x1p-40 * (1 - 1e-6), 0x1p-126)); }

uint64_t target_of(float share, uint64_t total) {
  return std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(static_cast<double>(share) * static_cast<double>(total))));
}

// Of all ids, those with a mass of at least `least`: a list, or -1 where it would be long and the others' mass is 0 now.
int keep_from(const Kernels* kernels, float* mass, int num_cols, float least, int32_t* ids) {
  const int count = kernels->collect(mass, num_cols, least, kAll, ids, short_list(num_cols));
  if (count <= short_list(num_cols)) return count;
  kernels->drop_below(mass, mass, num_cols, least);
  return -1;
}

// Of all ids, whose masses are `total`, those with the greatest keys (ties: lower id first) whose masses reach `target`; as
// keep_from tells it. Those with a key of at least `least` do reach it, and no key is above `most`.
int keep_greatest(const Kernels* kernels, const float* keys, int num_cols, uint64_t target, uint64_t total, float least,
                  float most, const Scratch& scratch) {
  float* mass = scratch.mass;
  int32_t* ids = scratch.ids;
  const auto key = [&](int32_t id) { return keys[id]; };
  const auto mass_of = [&](int32_t id) { return mass[id]; };
  const int room = short_list(num_cols);
  Bracket border(least, most, num_cols);
  // Where it is about: of a part of all ids, with a little more and a little less of what is to be left out.
  int n = 0, ignored;
  for (int i = 0; i + kLanes <= num_cols; i += kPart * kLanes, n += kLanes) {
    memcpy(scratch.list_keys + n, keys + i, kLanes * sizeof(float));
    memcpy(scratch.list_mass + n, mass + i, kLanes * sizeof(float));
  }
  const double part = static_cast<double>(kernels->sum_mass(scratch.list_mass, scratch.list_keys, n, least, &ignored));
  const double left_out = static_cast<double>(total - target) * n / num_cols;
  for (const double about : {0.93, 1.07}) {
    Bracket sampled(least, most, n);
    const auto wanted = static_cast<uint64_t>(std::max(part - about * left_out, 1.0));
    sampled.narrow(kernels, scratch.list_mass, scratch.list_keys, n, wanted, 4);
    border.split(kernels, mass, keys, num_cols, target, sampled.low);
  }
  border.narrow(kernels, mass, keys, num_cols, target, room);
  if (border.from_low <= room) {
    const int count = kernels->collect(keys, num_cols, from_sortable(border.low), kAll, ids, num_cols);
    return keep_heaviest(kernels, scratch, count, target, key, mass_of);
  }
  const int count = kernels->collect(keys, num_cols, from_sortable(border.low), from_sortable(border.high), ids, num_cols);
  const int kept = keep_heaviest(kernels, scratch, count, target - border.above, key, mass_of);
  for (int i = 0; i < kept; i++) scratch.list_mass[i] = mass[ids[i]];
  kernels->drop_below(mass, keys, num_cols, from_sortable(border.high));
  for (int i = 0; i < kept; i++) mass[ids[i]] = scratch.list_mass[i];
  return -1;
}

// The surprise of an id is a constant - log(mass), and what is expected that constant - the mean of log(mass).
int keep_typical(const Kernels* kernels, const float* logits, int num_cols, float highest, float inverse, float share,
                 uint64_t total, const Scratch& scratch, int count) {
  float *mass = scratch.mass, *keys = scratch.keys;
  const auto log_mass = [&](int32_t id) { return std::max((logits[id] - highest) * inverse, -128.0f); };
  uint64_t sum = 0;
  if (count < 0) {
    int ignored;
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
    return keep_greatest(kernels, keys, num_cols, target, total, -128.0f, 0.0f, scratch);
  }
  const auto key = [&](int32_t id) { return -std::abs(log_mass(id) - mean); };
  return keep_heaviest(kernels, scratch, count, target, key, [&](int32_t id) { return mass[id]; });
}

int exclude_top(const Kernels* kernels, float* mass, int num_cols, float threshold, int32_t* ids, int count) {
  const bool is_list = count >= 0;
  int ignored;
  uint64_t total = is_list ? 0 : kernels->sum_mass(mass, mass, num_cols, 0.0f, &ignored);
  for (int i = 0; i < count; i++) total += whole_mass(mass[ids[i]]);
  const double least = static_cast<double>(threshold) * static_cast<double>(total);
  if (!is_list) count = kernels->collect(mass, num_cols, mass_below(least), kAll, ids, num_cols);
  const auto is_top = [&](int32_t id) { return mass[id] > 0.0f && static_cast<double>(whole_mass(mass[id])) >= least; };
  int32_t spared = -1;  // the lightest of them, of equals the last
  for (int i = 0; i < count; i++)
    if (is_top(ids[i]) && (spared < 0 || mass[ids[i]] <= mass[spared])) spared = ids[i];
  if (is_list) return keep_if(ids, count, [&](int32_t id) { return id == spared || !is_top(id); });
  for (int i = 0; i < count; i++)
    if (is_top(ids[i]) && ids[i] != spared) mass[ids[i]] = 0.0f;
  return -1;
}

// The heaviest ids that together have at least `share` of what `ids` have, or where count is -1, all ids, whose mass is `total`.
int keep_share(const Kernels* kernels, const Scratch& scratch, int num_cols, float share, uint64_t total, int count) {
  float* mass = scratch.mass;
  const auto mass_of = [&](int32_t id) { return mass[id]; };
  const auto sum_of_list = [&] {
    uint64_t sum = 0;
    for (int i = 0; i < count; i++) sum += whole_mass(mass[scratch.ids[i]]);
    return sum;
  };
  const bool is_list = count >= 0;
  const uint64_t target = target_of(share, is_list ? sum_of_list() : total);
  const int room = short_list(num_cols);
  if (!is_list) count = kernels->collect(mass, num_cols, kHeavy, kAll, scratch.ids, room);
  if (is_list || (count <= room && sum_of_list() >= target))
    return keep_heaviest(kernels, scratch, count, target, mass_of, mass_of);
  // Ids this light weigh less than total - target together, so none of them is needed to reach the target.
  const uint64_t floor = (total - std::min(target, total)) / static_cast<uint64_t>(num_cols);
  return keep_greatest(kernels, mass, num_cols, target, total, mass_below(static_cast<double>(floor)), 1.0f, scratch);
}

constexpr int kRaceRun = 1024;
constexpr int kFewWords = 32;  // they are made of so many ids at a time
constexpr double kRounding = 1e-3;  // far more than what rounding takes from the logarithms of masses and times

// Not below e^x for x up to 0, and by at most a fifteenth above: straight lines between powers of two.
float above_exp(double x) {
  const double power = std::max(x * 1.4426950408889634 + 127, 1.0);
  return bits_to_float(static_cast<uint32_t>(power * 0x1p23) + 1);
}

// The winner among all ids; -1 where not all logits are finite. Without masses (null) those race whose logits are above
// `floor`, and masses are made of those that may win alone. These are few: a time is at least (w + 1/2) / 2^32 / mass, so with
// the least time so far an id has to be heavy, or the upper byte of its word 0. Tells the largest value unless `most` is null.
int32_t race_of_all(const Kernels* kernels, const float* logits, const float* mass, int num_cols, float inverse, float floor,
                    const DrawName& name, const Scratch& scratch, float* most) {
  const float* values = mass ? mass : logits;
  float highest = logits[0];  // so far; masses are those against it
  double best = kAll, reach = kAll;  // the logarithm of the least time; that time and a little more
  const auto log_mass = [&](float value) { return (static_cast<double>(value) - highest) * inverse; };
  const auto most_mass = [&](float value) { return mass ? value : above_exp(log_mass(value)); };
  // With an upper byte of 1 and more only what is heavier can win: the mass times the least time is 1/256 there.
  const auto heavy_value = [&] {
    if (mass) return static_cast<float>(0x1p-8 / reach);
    return static_cast<float>(std::max(highest - (std::log(256.0) + best + 2 * kRounding) / inverse, static_cast<double>(kLowest)));
  };
  int32_t* ids = scratch.ids;
  uint32_t* words = scratch.words;
  int count = 0, stop = 0;  // ids that may win, and behind them those whose words tell
  for (int first = 0, end; first < num_cols; first = end) {
    end = std::min({num_cols, first + kRaceRun, std::max(2 * first, 128)});  // at first the bound is loose
    const float top = kernels->max_of(values + first, end - first);
    if (std::isnan(top)) return -1;
    if (mass == nullptr && top > highest) {
      best += log_mass(top);
      reach = std::exp(best + kRounding);
      highest = top;
    }
    if (top > floor) {
      const float heavy = heavy_value();
      const int light = stop;
      stop += kernels->low_ids(name, first, end, ids + stop);
      if (top >= heavy) {
        stop = light + keep_if(ids + light, stop - light, [&](int32_t id) { return values[id] < heavy; });
        const int from = stop;
        stop += kernels->collect(values + first, end - first, heavy, kAll, ids + stop, end - first);
        for (int i = from; i < stop; i++) ids[i] += first;
      }
    }
    if (end > kRaceRun && end < num_cols && stop - count < kFewWords) continue;
    kernels->race_words(name, ids + count, stop - count, words + count);
    const int from = count;
    for (int i = from; i < stop; i++) {
      const float value = values[ids[i]];
      if (!(words[i] * 0x1p-32 <= reach * most_mass(value)) || (mass && value == 0.0f) || !(value > floor)) continue;
      const double time = exponential_of(words[i]);
      const double log_time = mass ? std::log(time / value) : std::log(time) - log_mass(value);
      if (log_time > best + kRounding) continue;
      if (log_time < best) best = log_time, reach = std::exp(best + kRounding);
      ids[count] = ids[i], words[count++] = words[i];
    }
    stop = count;
  }
  for (int i = 0; i < count; i++) scratch.mass[i] = values[ids[i]];
  if (mass == nullptr) kernels->exp_mass(scratch.mass, count, highest, inverse, scratch.mass);
  Race race;
  for (int i = 0; i < count; i++)
    if (scratch.mass[i] > 0.0f) race.enter(ids[i], scratch.mass[i], words[i]);
  if (most) *most = highest;
  return race.winner;
}

// The winner among the ids of a list.
int32_t race_of(const Kernels* kernels, const float* mass, const int32_t* ids, int count, const DrawName& name,
                const Scratch& scratch) {
  kernels->race_words(name, ids, count, scratch.words);
  Race race;
  for (int i = 0; i < count; i++) {
    const float own = mass[ids[i]];
    if (own > 0.0f && !race.is_late(own, scratch.words[i])) race.enter(ids[i], own, scratch.words[i]);
  }
  return race.winner;
}

constexpr int32_t kUndecided = -2;
constexpr float kLargeShare = 0.3f;  // of smaller ones a winner would be one too seldom

// The winner among the heaviest ids that together have `share` of all mass; -1 where not all logits are finite. The winner
// among all is it if it is one of them, as sums of masses that are nearly right mostly tell; if not, those that are heavier
// race. kUndecided where it is too near to the border.
int32_t race_of_share(const Kernels* kernels, const float* logits, int num_cols, float inverse, float share,
                      const DrawName& name, const Scratch& scratch) {
  constexpr int kFew = 64;
  const double error = 2e-4 + num_cols * 0x1p-27;  // of a sum
  // Logits further apart than that have different masses.
  const float apart = static_cast<float>(0x1p-12 / static_cast<double>(inverse));
  float highest = 0, floor = -kAll;
  const auto mass = [&](int32_t id) { return std::exp((static_cast<double>(logits[id]) - highest) * inverse); };
  for (;;) {
    const int32_t winner = race_of_all(kernels, logits, nullptr, num_cols, inverse, floor, name, scratch, &highest);
    if (winner < 0) return floor == -kAll ? winner : kUndecided;
    const float own = logits[winner], low = std::nextafter(own - apart, -kAll), high = std::nextafter(own + apart, kAll);
    // Where few are as heavy, their masses tell. Where many are, all masses have to be summed.
    const int num_heavy = kernels->collect(logits, num_cols, low, kAll, scratch.ids, kFew);
    double heavy = 0;
    for (int i = 0; i < num_heavy; i++) heavy += mass(scratch.ids[i]);
    const double own_mass = mass(winner);
    if (num_heavy <= kFew && heavy - own_mass < share * heavy * (1 - error)) return winner;
    float sums[2];
    kernels->about_mass(logits, num_cols, highest, inverse, low, sums);
    const double wanted = static_cast<double>(share) * sums[0];
    if (sums[1] * (1 + error) - own_mass < wanted * (1 - error)) return winner;
    const int num_near = kernels->collect(logits, num_cols, low, high, scratch.ids, kFew);
    double near = 0;
    for (int i = 0; i < num_near; i++) near += mass(scratch.ids[i]);
    if (num_near > kFew || sums[1] * (1 - error) - near < wanted * (1 + error)) return kUndecided;
    floor = own;
  }
}

}  // namespace

int64_t sample_scratch_bytes(int64_t num_cols) { return ((7 * num_cols + num_cols / kLanes + 1) * 4 + 63) / 64 * 64; }

int32_t sample_row(const Kernels* kernels, const float* logits, int num_cols, const SamplingRow& how, void* memory) {
  if (!(how.temperature > 0.0f)) return kernels->argmax(logits, num_cols);
  const Scratch scratch = split(memory, num_cols);
  float* mass = scratch.mass;
  int32_t* ids = scratch.ids;
  const float inverse = std::min(1.0f / how.temperature, std::numeric_limits<float>::max());
  const DrawName name = {how.seed, static_cast<uint32_t>(how.position), static_cast<uint32_t>(how.choice), kPurposeToken};
  const DrawName xtc = {how.seed, static_cast<uint32_t>(how.position), static_cast<uint32_t>(how.choice), kPurposeXtc};
  const bool excludes_top = how.xtc_probability > 0.0f && (philox(xtc, 0).words[0] + 0.5) * 0x1p-32 < how.xtc_probability;
  const bool has_top_k = how.top_k > 0 && how.top_k < num_cols;
  const bool is_plain = !has_top_k && !(how.top_n_sigma > 0.0f) && !(how.typical_p < 1.0f) && !(how.min_p > 0.0f) && !excludes_top;
  if (is_plain && !(how.top_p < 1.0f))
    return race_of_all(kernels, logits, nullptr, num_cols, inverse, -kAll, name, scratch, nullptr);
  if (is_plain && how.top_p > kLargeShare) {
    const int32_t winner = race_of_share(kernels, logits, num_cols, inverse, how.top_p, name, scratch);
    if (winner != kUndecided) return winner;
  }
  const bool needs_sum = how.typical_p < 1.0f || how.top_p < 1.0f || excludes_top;
  const float highest = kernels->max_of(logits, num_cols);
  if (std::isnan(highest)) return -1;

  int count = -1;  // -1: no list
  if (how.top_n_sigma > 0.0f && highest > kNever)
    count = keep_within_sigma(logits, num_cols, highest, how.top_n_sigma, ids);
  if (has_top_k) {
    if (count < 0) count = candidates_for_top(kernels, logits, num_cols, how.top_k, scratch);
    const uint64_t target = static_cast<uint64_t>(how.top_k) << 40;  // of ids that weigh alike
    const auto logit_of = [&](int32_t id) { return logits[id]; };
    if (count > how.top_k)
      count = keep_heaviest(kernels, scratch, count, target, logit_of, [](int32_t) { return 1.0f; });
  }
  if (count < 0 && !needs_sum) {  // then it is min_p alone: what it leaves out by far needs no mass
    const double least = highest + (std::log(static_cast<double>(how.min_p)) - kRounding) / inverse;
    count = kernels->collect(logits, num_cols, static_cast<float>(std::max(least, static_cast<double>(kLowest))), kAll, ids,
                             short_list(num_cols));
    if (count > short_list(num_cols)) count = -1;
  }
  uint64_t total = 0;
  if (count < 0) total = kernels->exp_mass(logits, num_cols, highest, inverse, mass);
  for (int i = 0; i < count; i++) scratch.keys[i] = logits[ids[i]];
  if (count > 0) kernels->exp_mass(scratch.keys, count, highest, inverse, scratch.keys);
  for (int i = 0; i < count; i++) mass[ids[i]] = scratch.keys[i];

  if (how.typical_p < 1.0f) {
    count = keep_typical(kernels, logits, num_cols, highest, inverse, how.typical_p, total, scratch, count);
    int ignored;
    if (count < 0 && how.top_p < 1.0f) total = kernels->sum_mass(mass, mass, num_cols, 0.0f, &ignored);
  }
  if (how.top_p < 1.0f) count = keep_share(kernels, scratch, num_cols, how.top_p, total, count);
  if (how.min_p > 0.0f) {
    if (count < 0) {
      const float most = how.typical_p < 1.0f ? kernels->max_of(mass, num_cols) : 1.0f;
      count = keep_from(kernels, mass, num_cols, how.min_p * most, ids);
    } else {
      const float least = how.min_p * heaviest(mass, ids, count);
      count = keep_if(ids, count, [&](int32_t id) { return mass[id] >= least; });
    }
  }
  if (excludes_top) count = exclude_top(kernels, mass, num_cols, how.xtc_threshold, ids, count);
  if (count >= 0 && count < num_cols / 32) return race_of(kernels, mass, ids, count, name, scratch);
  if (count >= 0) {  // a long list: all others have no mass
    int next = 0;
    for (int i = 0; i < count; next = ids[i++] + 1) std::fill(mass + next, mass + ids[i], 0.0f);
    std::fill(mass + next, mass + num_cols, 0.0f);
  }
  return race_of_all(kernels, logits, mass, num_cols, inverse, -kAll, name, scratch, nullptr);
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
