// See expert_slots.h.
#include "expert_slots.h"

#include <algorithm>

namespace mill {

int ExpertSlots::add_layer(int num_experts) {
  const int first = static_cast<int>(slot_of_.size());
  layers_.push_back({first, num_experts, 0});
  const size_t count = slot_of_.size() + num_experts;
  slot_of_.resize(count, -1);
  held_.resize(count, 0);
  last_.resize(count, 0);
  usually_.resize(count, 0);
  return first;
}

void ExpertSlots::resize(int num_slots) {
  slots_.assign(num_slots, -1);
  free_.clear();
  for (int slot = num_slots - 1; slot >= 0; slot--) free_.push_back(slot);
  std::fill(slot_of_.begin(), slot_of_.end(), -1);
}

void ExpertSlots::count(int layer, const int* experts, const int* rows, int num_experts, int total_rows) {
  Layer& at = layers_[layer];
  float* load = &last_[at.first];
  std::fill(load, load + at.count, 0.0f);
  for (int i = 0; i < num_experts; i++) load[experts[i]] = static_cast<float>(rows[i]) / static_cast<float>(total_rows);
  // The first steps weigh as in a plain mean.
  const float usually = std::max(kUsually, 1.0f / static_cast<float>(++at.steps));
  at.steps = std::min(at.steps, 1 << 20);
  for (int e = 0; e < at.count; e++) usually_[at.first + e] += usually * (load[e] - usually_[at.first + e]);
}

int ExpertSlots::take(int expert) {
  int slot = -1;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else {
    float least = 0;
    for (int s = 0; s < num_slots(); s++) {
      const int resident = slots_[s];
      if (held_[resident] || (slot >= 0 && score(resident) >= least)) continue;
      least = score(resident);
      slot = s;
    }
    if (slot < 0) return -1;
    slot_of_[slots_[slot]] = -1;
  }
  slots_[slot] = expert;
  slot_of_[expert] = slot;
  return slot;
}

void ExpertSlots::give_back(int expert) {
  const int slot = slot_of_[expert];
  if (slot < 0) return;
  slots_[slot] = -1;
  slot_of_[expert] = -1;
  free_.push_back(slot);
}

}  // namespace mill
