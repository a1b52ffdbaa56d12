// What the operations of a program share: buffers, kernels, the step under way, and room for each thread.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "../include/tokenmill_native.h"
#include "attention_plan.h"
#include "kernels.h"
#include "moe_rows.h"
#include "op.h"
#include "team.h"

namespace mill {

// Activations as digits: bytes of a panel of rows, and of a buffer.
inline int64_t wide_panel_bytes(int64_t width) {
  return static_cast<int64_t>(ceil_div(width, kWideStep)) * 2 * kWidePanel * kWideStep;
}
inline int64_t wide_bytes(int64_t max_rows, int64_t width) {
  return ceil_div(max_rows, kWidePanel) * (wide_panel_bytes(width) + kWidePanel * 4);
}

// Consecutive rows with one adapter.
struct LoraRun {
  int row0, num_rows, slot;
};

// How the linear under way is cut.
struct LinearCut {
  int rows_per_panel = kPanel, tiles_per_unit = 1, num_tile_blocks = 1, num_row_blocks = 1, blocks_per_share = 1;
};

class Workspace {
 public:
  Workspace(Team* team, const Kernels* kernels, const tm_buffer* buffers, int num_buffers, const tm_limits& limits, void* scratch,
            int64_t scratch_bytes)
      : team(team), kernels(kernels), limits(limits), buffers(buffers, buffers + num_buffers),
        scratch(static_cast<float*>(scratch)), scratch_floats(scratch_bytes / 4) {}

  // Room for the operations of a list.
  void reserve(const std::vector<Op>& ops);

  // ---- the program's

  Team* const team;
  const Kernels* const kernels;
  const tm_limits limits;
  const std::vector<tm_buffer> buffers;
  float* const scratch;  // partial results of attention
  const int64_t scratch_floats;

  // Whether a buffer exists and holds rows of this kind, width and form.
  bool fits(int buffer, int rows, int64_t width, int form = TM_FORM_F32) const;
  bool fits_any_form(int buffer, int rows, int64_t width) const;

  // ---- the step under way

  tm_step step = {};
  int num_threads = 1;                // that it is cut for
  std::vector<int> row_sequence;      // of each token row
  std::vector<LoraRun> lora_runs[2];  // of token rows and of logit rows
  AttentionState attention;

  int num_rows(const tm_op& op) const { return op.rows == TM_ROWS_TOKENS ? step.num_tokens : step.num_logit_rows; }

  // Blocks of a sequence in the pool of `kv`.
  const int32_t* table_of(const tm_kv& kv, int sequence) const { return table_of(step, kv, sequence); }
  static const int32_t* table_of(const tm_step& step, const tm_kv& kv, int sequence) {
    return step.block_tables + (static_cast<int64_t>(kv.table) * step.num_seqs + sequence) * step.table_width;
  }

  // ---- rows of buffers

  float* rows_of(int buffer, int64_t row) const {
    return static_cast<float*>(buffers[buffer].data) + row * buffers[buffer].width;
  }
  Quantised quantised(int buffer) const;
  Wide wide(int buffer) const;
  void quantise_row(const float* from, int buffer, int row) const;  // a row of float32 into a buffer of codes or digits
  uint16_t* rounded_row(int set, int64_t row, int64_t width) const {
    return rounded_[set * rounded_lines_].values + row * rounded_stride(width);
  }

  // ---- the operation under way

  int rows_per_unit = 1;  // of one that is cut by rows
  LinearCut linear;
  ExpertRows experts;

  float* thread_floats(int thread) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(thread_floats_.data()) + 63;
    return reinterpret_cast<float*>(base / 64 * 64) + thread * floats_per_thread_;
  }

 private:
  struct alignas(64) RoundedLine {  // of the nearest cache: rows of tiles that cross lines take twice as long
    uint16_t values[32];
  };

  std::vector<uint8_t> needs_low_sums_;  // of each buffer: some weight that reads it has a scale for each 16 values
  int64_t floats_per_thread_ = 0;
  std::vector<float> thread_floats_;
  int64_t rounded_lines_ = 0;               // of a set
  std::unique_ptr<RoundedLine[]> rounded_;  // two sets, each the inputs of one linear, and room for the rest of a tile
};

}  // namespace mill
