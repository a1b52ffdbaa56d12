// Penalties, bias, masks and forbidden tokens, in this order, on one row of logits. All state is the history of the
// sequence: its prompt and what was drawn so far, to which every draw appends. So a step can be computed before anybody has
// looked at the one before, and going back is nothing but a smaller num_output. Several rows of a step may read one history,
// each what lies before its own token, where the tokens of the others are still drafts and may become what another thread
// draws: an entry is read once for each thing that is made of it, or a row that is of no use any more would leave its
// counts behind.
//
//   repetition           tokens of prompt and output (Keskar et al., "CTRL", 2019)
//   frequency, presence  tokens of the output
//   DRY                  tokens that would go on with a repeated run ("Don't repeat yourself", text-generation-webui's
//                        pull request 5677)
#include "adjust.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

namespace mill {

namespace {

constexpr uint32_t kInPrompt = 1u << 31;
constexpr int kDryLongest = 64;  // of a repeated run: tokens that are compared
constexpr auto kNap = std::chrono::microseconds(20);
constexpr auto kLongestNap = std::chrono::milliseconds(1);  // what a nap counts at most: a stopped process does not wait

// Each distinct token of the history once.
void penalise(const tm_adjustment& how, int num_output, float* logits, int num_cols, uint32_t* counts) {
  const int end = how.num_prompt + num_output;
  const int first = how.repetition_penalty == 1.0f ? how.num_prompt : 0;
  std::vector<int32_t> found;
  for (int i = first; i < end; i++) {
    const int32_t token = how.history[i];
    if (token < 0 || token >= num_cols) continue;
    if (counts[token] == 0) found.push_back(token);
    counts[token] = i < how.num_prompt ? kInPrompt : counts[token] + 1;
  }
  for (const int32_t token : found) {
    const uint32_t count = counts[token];
    counts[token] = 0;
    float value = logits[token];
    value = value > 0 ? value / how.repetition_penalty : value * how.repetition_penalty;
    value = std::min(std::max(value, kNever), -kNever);
    const float produced = static_cast<float>(count & ~kInPrompt);
    logits[token] = value - how.frequency_penalty * produced - how.presence_penalty * (produced > 0 ? 1.0f : 0.0f);
  }
}

// A token that followed an earlier occurrence of the last n tokens, n >= allowed_length, loses multiplier *
// base^(n - allowed_length), for the longest such n. No run reaches over a breaker.
void penalise_repeats(const tm_adjustment& how, int num_output, float* logits, int num_cols, uint32_t* counts) {
  const int end = how.num_prompt + num_output;
  const int begin = how.dry_penalty_last_n < 0 ? 0 : std::max(0, end - how.dry_penalty_last_n);
  const int32_t *last = how.history + end, *breakers = how.dry_breakers, *breakers_end = breakers + how.num_dry_breakers;
  const auto breaks = [&](int32_t token) { return std::binary_search(breakers, breakers_end, token); };
  int most = 0;  // tokens that a run can have
  while (most < std::min(kDryLongest, end - begin) && !breaks(last[-1 - most])) most++;
  const int least = std::max(how.dry_allowed_length, 1);
  if (most < least) return;
  std::vector<int32_t> found;
  for (int i = begin; i + 1 < end; i++) {  // history[i] would be the run's last token, the next one what follows it
    const int32_t* run = how.history + i + 1;
    const int32_t next = *run;
    if (next < 0 || next >= num_cols || run[-1] != last[-1]) continue;
    int length = 1;
    while (length < std::min(most, i + 1 - begin) && run[-1 - length] == last[-1 - length]) length++;
    if (length < least || static_cast<uint32_t>(length) <= counts[next] || breaks(next)) continue;
    if (counts[next] == 0) found.push_back(next);
    counts[next] = static_cast<uint32_t>(length);
  }
  for (const int32_t token : found) {
    float penalty = how.dry_multiplier;
    for (int n = how.dry_allowed_length; n < static_cast<int>(counts[token]); n++) penalty *= how.dry_base;
    logits[token] = std::max(logits[token] - std::min(penalty, -kNever), kNever);
    counts[token] = 0;
  }
}

// Whether the mask of this output position is there; while it is not, only this row waits.
bool wait_for_mask(const tm_adjustment& how, int num_output) {
  using std::chrono::steady_clock;
  steady_clock::duration left = std::chrono::microseconds(how.mask_wait_us);
  while (__atomic_load_n(how.mask_until, __ATOMIC_ACQUIRE) <= num_output) {
    if (left <= steady_clock::duration::zero()) return false;
    const auto before = steady_clock::now();
    std::this_thread::sleep_for(kNap);
    left -= std::min<steady_clock::duration>(steady_clock::now() - before, kLongestNap);
  }
  return true;
}

// Copies what the mask allows. Whole words of it at a time: most are all zeros or all ones.
void apply_mask(const uint32_t* mask, const float* from, float* to, int num_cols) {
  for (int first = 0; first < num_cols; first += 32) {
    const uint32_t bits = mask[first / 32];
    const int end = std::min(first + 32, num_cols);
    if (bits == 0) {
      std::fill(to + first, to + end, kNever);
    } else {
      for (int i = first; i < end; i++) to[i] = bits >> (i - first) & 1 ? from[i] : kNever;
    }
  }
}

using Held = std::vector<std::pair<int32_t, float>>;  // ids that are not to be drawn, and their logits

// Rules them out, unless nothing else is left.
void rule_out(const Held& held, float* logits, int num_cols) {
  if (held.empty()) return;
  for (const auto& one : held) logits[one.first] = kNever;
  if (std::all_of(logits, logits + num_cols, [](float value) { return value <= kNever; }))
    for (const auto& one : held) logits[one.first] = one.second;
}

void hold_back(const tm_adjustment& how, float* logits, int num_cols) {
  Held held;
  for (int i = 0; i < how.num_held_back; i++) held.emplace_back(how.held_back[i], logits[how.held_back[i]]);
  rule_out(held, logits, num_cols);
}

// The last token of each word whose others were just drawn.
void forbid_words(const tm_adjustment& how, int num_output, float* logits, int num_cols) {
  const int32_t* end = how.history + how.num_prompt + num_output;
  Held held;
  for (int w = 0; w < how.num_bad_words; w++) {
    const int32_t *word = how.bad_tokens + how.bad_starts[w], *last = how.bad_tokens + how.bad_starts[w + 1] - 1;
    if (last - word > num_output || !std::equal(word, last, end - (last - word))) continue;
    held.emplace_back(*last, logits[*last]);
  }
  rule_out(held, logits, num_cols);
}

}  // namespace

bool adjust_row(const tm_adjustment& how, int num_output, const float* logits, float* adjusted, int num_cols,
                uint32_t* counts) {
  const bool penalises = how.repetition_penalty != 1.0f || how.frequency_penalty != 0.0f || how.presence_penalty != 0.0f;
  const bool penalises_repeats = how.dry_multiplier > 0.0f && how.dry_penalty_last_n != 0;
  const bool is_only_masked = how.mask != nullptr && !penalises && !penalises_repeats && how.num_bias == 0;
  if (!is_only_masked) std::copy(logits, logits + num_cols, adjusted);
  if (penalises) penalise(how, num_output, adjusted, num_cols, counts);
  if (penalises_repeats) penalise_repeats(how, num_output, adjusted, num_cols, counts);
  for (int i = 0; i < how.num_bias; i++) adjusted[how.bias_ids[i]] += how.bias[i];
  if (how.mask != nullptr) {
    if (!wait_for_mask(how, num_output)) return false;
    apply_mask(how.mask, is_only_masked ? logits : adjusted, adjusted, num_cols);
  }
  if (num_output < how.min_tokens) hold_back(how, adjusted, num_cols);
  if (how.num_bad_words > 0) forbid_words(how, num_output, adjusted, num_cols);
  return true;
}

}  // namespace mill
