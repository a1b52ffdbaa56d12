// See moe_rows.h.
#include "moe_rows.h"

#include <algorithm>

namespace mill {

namespace {

// The number in a route, or -1 where it is no expert's.
int expert_of(float id, int num_experts) {
  return id >= 0 && id < static_cast<float>(num_experts) ? static_cast<int>(id) : -1;
}

}  // namespace

void ExpertRows::reserve(int64_t num_rows, int num_experts, int num_threads) {
  rows.reserve(num_rows);
  runs.reserve(num_experts);
  blocks.reserve(num_experts + num_rows / kBlock + 1);
  counts_.reserve(num_experts);
  gathered_.resize(num_threads);
}

void ExpertRows::find(const float* routes, int num_rows, int top_k, int num_experts) {
  counts_.assign(num_experts, 0);
  runs.clear();
  blocks.clear();
  for (Gathered& of_thread : gathered_) of_thread.block = -1;
  for (int row = 0; row < num_rows; row++)
    for (int i = 0; i < top_k; i++) {
      const int expert = expert_of(routes[static_cast<int64_t>(row) * 2 * top_k + i], num_experts);
      if (expert >= 0) counts_[expert]++;
    }
  int first = 0, slot = 0;
  for (int expert = 0; expert < num_experts; expert++) {
    const int count = counts_[expert];
    counts_[expert] = first;  // from here on: where its next row goes
    if (count == 0) continue;
    if (slot % kPanel + count > kPanel) slot += (kPanel - slot % kPanel) % kPanel;  // by fewer slots than it has rows, or 11
    runs.push_back({expert, first, count, slot});
    for (int begin = 0; begin < count; begin += kBlock)
      blocks.push_back({static_cast<int>(runs.size()) - 1, begin, std::min(count, begin + kBlock)});
    first += count;
    slot += count;
  }
  rows.resize(first);
  for (int row = 0; row < num_rows; row++) {
    const float* ids = routes + static_cast<int64_t>(row) * 2 * top_k;
    for (int i = 0; i < top_k; i++) {
      const int expert = expert_of(ids[i], num_experts);
      if (expert >= 0) rows[counts_[expert]++] = {row, ids[top_k + i]};
    }
  }
}

}  // namespace mill
