// The interpreter: a flat list of operations over buffers, run for one step after another. Knows rows, buffers and
// kernels; knows no model.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../include/tokenmill_native.h"
#include "kernels.h"
#include "team.h"

namespace mill {

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Activations as digits: bytes of a panel of rows, and of a buffer.
inline int64_t wide_panel_bytes(int64_t width) {
  return static_cast<int64_t>(ceil_div(width, kWideStep)) * 2 * kWidePanel * kWideStep;
}
inline int64_t wide_bytes(int64_t max_rows, int64_t width) {
  return ceil_div(max_rows, kWidePanel) * (wide_panel_bytes(width) + kWidePanel * 4);
}

// What kernels for integer kinds need besides, for many rows or, of a row as wide as this, for two: see linear_tiles.inc.
inline int64_t wide_scratch_bytes(int64_t max_rows, int64_t width) {
  const int64_t many = kMostExactSteps * 2048 + 8192 + ceil_div(max_rows, kWidePanel) * 2048;
  const int64_t few = 16 * num_exact_blocks(kW8, ceil_div(width, kGroup));
  return std::max(many, (few + 63) / 64 * 64);
}

// The same of the kernel for bf16 weights on tiles: see bf16_tiles.inc.
inline int64_t rounded_scratch_bytes(int64_t max_rows) {
  return (2 + ceil_div(max_rows, kRoundedPanel)) * kRoundedSums * 4;
}

class Program final : public Job {
 public:
  // `error` says what is wrong with the list, if anything; such a program must not be run.
  Program(Team* team, const Kernels* kernels, const tm_op* ops, int num_ops, const tm_buffer* buffers, int num_buffers,
          const tm_limits& limits, void* scratch, int64_t scratch_bytes, std::string* error);

  // The reason why a step cannot be run, or an empty string after it has. `draws` may be null; `aside`: see Team::run.
  std::string run(const tm_step& step, const tm_draws* draws, const std::function<void()>& aside);

  // From now on add each operation's nanoseconds to ns[its place in the list], those of drawing after them; null stops.
  void time(int64_t* ns) { times_ns_ = ns; }

 private:
  struct Op {
    tm_op op;
    std::vector<Part> parts;
    int place;  // in the list that was given
    int rounded_in = 0, rounded_out = -1;  // sets of rounded_ that it reads and writes; -1 for none
    bool keeps = true;  // its output; false where its one reader takes it rounded
  };

  // A query row and the keys [first, limit) it sees. Both rise with the rows of a sequence.
  struct QueryRow {
    int row, first, limit;
  };

  // Rows that pass over the keys of spans [span_begin, span_end) together. Rows of several sequences may, where all
  // their block tables name the same blocks there.
  struct Pass {
    int sequence;  // whose block table is used
    int begin, num_rows;  // in the plan's rows
    int span_begin, span_end;
    bool partial;  // leaves the result of each span for the merge; otherwise these are all spans the rows see
  };

  static constexpr int kPreparedSpans = 8;  // that a thread keeps: the first of a pass, and one that changes

  // A span's keys and values that a thread has in the order of the kernels: of one head in an operation.
  struct PreparedSpan {
    int64_t operation;
    int kv_head, span, sequence;
    int first, end;  // keys that it has
  };

  // How a step's attention is cut, for operations of one pool, geometry and window.
  struct AttentionPlan {
    const tm_kv* kv;
    int window, whole, num_heads, num_kv_heads, head_dim;
    int heads_per_unit, head_chunks;  // of the query heads that share a KV head
    bool by_head;  // the order of units: see attention_unit
    std::vector<QueryRow> rows;  // all rows of the step, then those of passes over shared blocks
    std::vector<Pass> passes;
    std::vector<int64_t> partial_at;  // of each row: where its partial results lie in scratch; -1 for none
    std::vector<QueryRow> split_rows;  // rows that have partial results
    double cost_ns, merge_cost_ns;
  };

  // A sequence that may share its blocks of a span, and the hash of their ids.
  struct Sharer {
    uint64_t hash;
    int sequence;
  };

  // Sequences that see the same blocks in a span: a run of shared_members_.
  struct SharedSpan {
    int span, begin, count;
  };

  // Consecutive rows with one adapter.
  struct LoraRun {
    int row0, num_rows, slot;
  };

  // What one unit of a linear covers.
  struct LinearUnit {
    int tile_block, row_begin, row_end;
  };

  struct SpanState {
    float *max, *sum, *acc;
  };

  int next_phase() override;
  void take_time();
  void run_unit(int unit, int thread) override;

  std::string check_list() const;
  std::string check_op(const tm_op& op) const;
  std::string check_step(const tm_step& step) const;
  std::string check_draws(const tm_step& step, const tm_draws& draws) const;
  std::string check_tables(const tm_step& step, const tm_kv& kv) const;

  // Blocks of a sequence in the pool of `kv`.
  static const int32_t* table_of(const tm_step& step, const tm_kv& kv, int sequence) {
    return step.block_tables + (static_cast<int64_t>(kv.table) * step.num_seqs + sequence) * step.table_width;
  }

  int num_rows(const tm_op& op) const { return op.rows == TM_ROWS_TOKENS ? step_.num_tokens : step_.num_logit_rows; }
  float* rows_of(int buffer, int64_t row) const;
  Quantised quantised(int buffer) const;
  Wide wide(int buffer) const;
  void quantise_row(const float* from, int buffer, int row);
  float* thread_floats(int thread) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(thread_floats_.data()) + 63;
    return reinterpret_cast<float*>(base / 64 * 64) + thread * floats_per_thread_;
  }

  void fill_in_drawn(const tm_draws& draws);
  void draw(int row, int thread);

  int plan(const Op& op, double* cost_ns);
  void run_row(const Op& op, int row, int thread);
  void rms_norm_rows(const tm_op& o, int row, int num_rows);
  void norm_heads_row(const Op& op, int row);
  void rope_row(const Op& op, int row);
  void write_kv_row(const Op& op, const float* qkv, int row);

  static int64_t linear_floats(const tm_op& o);
  bool takes_rounded(const Op& op) const;
  void round_inputs(Op* op, const tm_op* ops, int num_ops);
  int plan_linear(const Op& op, double* cost_ns);
  LinearUnit linear_unit(int unit, int num_rows) const;
  // What a call takes its inputs from, besides its arguments.
  struct LinearInputs {
    Wide digits;
    Quantised codes;
  };
  void give_inputs(const Op& op, const Part& part, int thread, LinearInputs* held, LinearArgs* args);
  void run_linear(const Op& op, int unit, int thread);
  void run_linear_gated(const Op& op, int unit, int thread);

  std::string check_lora(const tm_op& op) const;
  std::string check_adapters(const tm_step& step, const tm_op& op) const;
  void find_lora_runs();
  const std::vector<LoraRun>& lora_runs(const tm_op& op) const { return lora_runs_[op.rows == TM_ROWS_TOKENS ? 0 : 1]; }
  int plan_lora(const Op& op, double* cost_ns) const;
  void run_lora_shrink(const Op& op, int unit);
  void run_lora_lookup(const Op& op, int unit);
  void run_lora_expand(const Op& op, int unit);

  int plan_attention(const Op& op, double* cost_ns);
  int plan_merge(const Op& op, double* cost_ns) const;
  bool is_on_tiles(const tm_kv& kv) const;  // keys and values meet the matrix unit
  int pass_tiles() const;
  int pass_queries() const;
  int64_t attention_floats(const tm_op& o) const;
  void make_plan(const tm_op& o, AttentionPlan* plan);
  bool reserve_partials(int sequence, int64_t* used, AttentionPlan* plan) const;
  void find_shared(int num_spans, int sharing, AttentionPlan* plan);
  void add_shared_passes(int num_spans, int64_t* used, AttentionPlan* plan);
  void add_own_passes(int sequence, int rows_per_pass, int spans_per_pass, int num_spans, AttentionPlan* plan) const;
  void estimate(AttentionPlan* plan) const;
  uint64_t hash_blocks(const tm_kv& kv, int sequence, int span) const;
  bool same_blocks(const tm_kv& kv, int one, int other, int span, int num_keys) const;
  SpanState partial_state(const AttentionPlan& plan, const QueryRow& row, int span, int head) const;
  // What a unit of attention is about.
  struct AttentionUnit {
    const Pass* pass;
    int kv_head, chunk;
  };
  AttentionUnit attention_unit(int unit, int num_kv_heads) const;
  static int prepared_slot(const Pass& pass, int span);
  void prepare(const Op& op, const Pass& pass, int kv_head, int span, int thread, uint8_t* to, float* gather,
               SpanArgs* args);
  void run_attention(const Op& op, int unit, int thread);
  void run_merge(const Op& op, int unit);
  void write_attention(const tm_op& o, int row, int head0, int num_heads, const float* sums, float* accs) const;
  void point_ahead(const Op& op, const Pass& pass, int kv_head, int span, SpanArgs* args) const;
  void fill_keys(const Op& op, int sequence, int kv_head, int span, int num_keys, float* gather, SpanArgs* args) const;

  Team* team_;
  const Kernels* kernels_;
  std::vector<Op> ops_;
  std::vector<const tm_kv*> pools_;  // that operations use, each once
  std::vector<tm_buffer> buffers_;
  std::vector<uint8_t> needs_low_sums_;  // of each buffer: some weight that reads it has a scale for each 16 values
  tm_limits limits_;
  float* scratch_;
  int64_t scratch_floats_;
  int64_t floats_per_thread_ = 0;
  std::vector<float> thread_floats_;
  struct alignas(64) RoundedLine {  // of the nearest cache: rows of tiles that cross lines take twice as long
    uint16_t values[32];
  };
  uint16_t* rounded_row(int set, int64_t row, int64_t width) const {
    return rounded_[set * rounded_lines_].values + row * rounded_stride(width);
  }
  int num_rounded_ = 0;  // linears that take rounded inputs
  int64_t rounded_lines_ = 0;  // of a set
  std::unique_ptr<RoundedLine[]> rounded_;  // two sets, each the inputs of one linear, and room for the rest of a tile

  // The step under way.
  tm_step step_ = {};
  const tm_draws* draws_ = nullptr;
  std::vector<int32_t> tokens_;  // the step's, where some of them were drawn by earlier steps
  std::vector<int> row_sequence_;  // of each token row
  std::vector<LoraRun> lora_runs_[2];  // of token rows and of logit rows
  size_t next_ = 0;
  const Op* current_ = nullptr;  // null: drawing, or nothing yet
  int64_t* times_ns_ = nullptr;
  std::chrono::steady_clock::time_point timed_until_;

  // How the current operation is cut.
  int rows_per_unit_ = 1, rows_per_panel_ = kPanel, tiles_per_unit_ = 1, num_tile_blocks_ = 1, num_row_blocks_ = 1, blocks_per_share_ = 1;

  // How its attention is cut: plans made in this step, the current one, and what making one needs.
  std::vector<AttentionPlan> plans_;
  int num_plans_ = 0;
  const AttentionPlan* plan_ = nullptr;
  int64_t attention_operation_ = 0;  // counts those that were begun
  std::vector<PreparedSpan> prepared_;  // of each thread, kPreparedSpans
  std::vector<Sharer> candidates_, sharers_;
  std::vector<SharedSpan> shared_spans_;
  std::vector<int> shared_members_;
  std::vector<uint8_t> covered_;  // [sequence][span]: a pass over shared blocks does it
};

}  // namespace mill
