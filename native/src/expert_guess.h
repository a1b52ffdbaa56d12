// Which experts of a layer come after those of the layer before: how often two were asked for by one step, counted. A guess is
// made in every step and compared with what comes; only where most of what it would have read was needed, is it read.
#pragma once
#include <cstdint>
#include <vector>

namespace mill {

class ExpertGuess {
 public:
  void add_layer(int num_experts);

  // In a step of few rows layer asked for `now`, the layer before for `before` (places in their layers).
  void learn(int layer, const std::vector<int>& before, const std::vector<int>& now);
  // The best `count` of the layer after, best first, given those of `layer`; fewer where little is known.
  const std::vector<int>& guess(int layer, const std::vector<int>& now, int count);

  // Of what a guess would have read, so many were needed.
  void judge(int num_right, int num_guessed);
  bool pays() const { return share_right_ >= kPays; }

 private:
  static constexpr float kPays = 0.6f, kForget = 1.0f / 64;
  static constexpr uint16_t kMost = 4096;

  struct Pairs {
    int count = 0;                // experts of the layer
    std::vector<uint16_t> after;  // [count][experts of the layer after]; empty before any was seen
  };

  std::vector<Pairs> layers_;
  std::vector<float> scores_;
  std::vector<int> best_;
  float share_right_ = 0;
};

}  // namespace mill
