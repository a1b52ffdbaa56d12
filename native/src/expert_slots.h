// Which experts are in memory, and who leaves: plain bookkeeping, without a clock, a file or a thread.
//
// The victim is who is least likely to be asked for in the next step: by its load in the last one, since consecutive tokens
// share experts, and by its average load over hundreds of steps. Load is the share of a step's rows, so a long prompt, which asks for every expert, says no more than one token does, and drives nobody
// out by itself. Both are kept of experts that are not in memory, too.
#pragma once
#include <cstdint>
#include <vector>

namespace mill {

class ExpertSlots {
 public:
  // Number of the first expert of the layer; the others follow.
  int add_layer(int num_experts);
  void resize(int num_slots);

  int num_slots() const { return static_cast<int>(slots_.size()); }
  int num_layers() const { return static_cast<int>(layers_.size()); }
  int first_of(int layer) const { return layers_[layer].first; }
  int experts_of(int layer) const { return layers_[layer].count; }

  // A step's rows for experts of a layer (places in it), of total_rows.
  void count(int layer, const int* experts, const int* rows, int num_experts, int total_rows);

  // -1 where it has none.
  int slot_of(int expert) const { return slot_of_[expert]; }
  // A slot for an expert that has none: a free one, or that of the victim. -1: all are held.
  int take(int expert);
  void give_back(int expert);
  // Held experts are no victims.
  void hold(int expert) { held_[expert] = 1; }
  void let_go(int expert) { held_[expert] = 0; }

  float score(int expert) const { return kShare * last_[expert] + usually_[expert]; }

 private:
  static constexpr float kShare = 0.5f, kUsually = 1.0f / 512;

  struct Layer {
    int first, count, steps;
  };

  std::vector<Layer> layers_;
  std::vector<int> slots_;  // the expert in each, -1: none
  std::vector<int> free_;
  std::vector<int> slot_of_;
  std::vector<uint8_t> held_;
  std::vector<float> last_, usually_;
};

}  // namespace mill
