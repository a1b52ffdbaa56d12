// Which rows of a step meet which expert, found when the step runs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../include/tokenmill_native.h"
#include "kernels.h"

namespace mill {

// A row and the weight that its expert's output has in it.
struct ExpertRow {
  int row;
  float weight;
};

// An expert in use: rows [first, first + num_rows) of the list; the first of as many slots, which lie in one panel or begin
// one, so that its rows are computed together.
struct ExpertRun {
  int expert, first, num_rows, slot;
};

// Rows of one expert that are computed together.
struct ExpertBlock {
  int run, begin, end;  // rows of the run
};

// The rows of a step by expert, ascending, and there by row.
class ExpertRows {
 public:
  static constexpr int kBlock = 8 * kPanel;  // most rows of an ExpertBlock; whole panels

  std::vector<ExpertRun> runs;
  std::vector<ExpertBlock> blocks;
  std::vector<ExpertRow> rows;

  // Slots are at most two for each row of the list, and a panel.
  static int64_t slots(int64_t num_rows) { return 2 * num_rows; }

  void reserve(int64_t num_rows, int num_experts, int num_threads);
  // routes: [num_rows][2 * top_k], ids and then weights; what is no expert's id is left out.
  void find(const float* routes, int num_rows, int top_k, int num_experts);

  // The block whose inputs a thread has gathered; -1 for none.
  int& gathered(int thread) { return gathered_[thread].block; }

  // ---- those that are computed now: all, unless they are in a store

  size_t wave_begin = 0, wave_end = 0;  // of runs
  std::vector<int> order;               // in which its blocks are taken up; empty: as they are
  int layer = 0;                        // of the store
  bool is_again = false;                // the step has had a wave before
  int num_blocks() const { return static_cast<int>(order.empty() ? blocks.size() : order.size()); }
  int block_at(int index) const { return order.empty() ? index : order[index]; }

  // ---- how the operation under way is cut

  int columns_per_unit = 1, num_column_blocks = 1;  // in groups of inner values, or in tiles of outputs

 private:
  struct alignas(64) Gathered {
    int block;
  };
  std::vector<int> counts_;
  std::vector<Gathered> gathered_;
};

}  // namespace mill
