// See expert_guess.h.
#include "expert_guess.h"

#include <algorithm>

namespace mill {

void ExpertGuess::add_layer(int num_experts) { layers_.push_back({num_experts, {}}); }

void ExpertGuess::learn(int layer, const std::vector<int>& before, const std::vector<int>& now) {
  if (layer == 0) return;
  Pairs& pairs = layers_[layer - 1];
  const int width = layers_[layer].count;
  pairs.after.resize(static_cast<size_t>(pairs.count) * width, 0);
  for (int a : before) {
    uint16_t* row = &pairs.after[static_cast<size_t>(a) * width];
    bool is_full = false;
    for (int b : now) is_full |= ++row[b] >= kMost;
    if (is_full)
      for (int b = 0; b < width; b++) row[b] /= 2;
  }
}

const std::vector<int>& ExpertGuess::guess(int layer, const std::vector<int>& now, int count) {
  best_.clear();
  if (layer + 1 >= static_cast<int>(layers_.size()) || layers_[layer].after.empty()) return best_;
  const int width = layers_[layer + 1].count;
  scores_.assign(width, 0);
  for (int a : now) {
    const uint16_t* row = &layers_[layer].after[static_cast<size_t>(a) * width];
    int64_t all = 0;
    for (int b = 0; b < width; b++) all += row[b];
    if (all == 0) continue;
    for (int b = 0; b < width; b++) scores_[b] += static_cast<float>(row[b]) / static_cast<float>(all);
  }
  for (int b = 0; b < width; b++)
    if (scores_[b] > 0) best_.push_back(b);
  std::stable_sort(best_.begin(), best_.end(), [&](int a, int b) { return scores_[a] > scores_[b]; });
  if (static_cast<int>(best_.size()) > count) best_.resize(count);
  return best_;
}

void ExpertGuess::judge(int num_right, int num_guessed) {
  for (int i = 0; i < num_guessed; i++) share_right_ += kForget * ((i < num_right ? 1.0f : 0.0f) - share_right_);
}

}  // namespace mill
