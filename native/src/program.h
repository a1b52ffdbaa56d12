// The interpreter: a flat list of operations over buffers, run for one step after another. Knows rows, buffers and
// kernels; knows no model.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "../include/tokenmill_native.h"
#include "kernels.h"
#include "team.h"

namespace mill {

class Program final : public Job {
 public:
  // `error` says what is wrong with the list, if anything; such a program must not be run.
  Program(Team* team, const Kernels* kernels, const tm_op* ops, int num_ops, const tm_buffer* buffers, int num_buffers,
          const tm_limits& limits, void* scratch, int64_t scratch_bytes, std::string* error);

  // The reason why a step cannot be run, or an empty string after it has.
  std::string run(const tm_step& step);

  // From now on add each operation's nanoseconds to ns[its place in the list]; null stops.
  void time(int64_t* ns) { times_ns_ = ns; }

 private:
  struct Op {
    tm_op op;
    std::vector<Part> parts;
    int place;  // in the list that was given
  };

  // A run of query rows of one sequence that share their pass over the keys.
  struct RowTile {
    int sequence, row0, num_rows;
    int first_limit;  // keys visible to row0; each further row sees one more
  };

  // What an attention unit computes: query heads [head0, head0 + num_heads) of a tile, all of one KV head.
  struct AttentionShare {
    const RowTile* tile;
    int kv_head, head0, num_heads;
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

  int num_rows(const tm_op& op) const { return op.rows == TM_ROWS_TOKENS ? step_.num_tokens : step_.num_logit_rows; }
  float* rows_of(int buffer, int64_t row) const;
  Quantised quantised(int buffer) const;
  float* thread_floats(int thread) { return thread_floats_.data() + thread * floats_per_thread_; }

  int plan(const Op& op, double* cost_ns);
  void run_row(const Op& op, int row, int thread);
  void norm_heads_row(const Op& op, int row);
  void rope_row(const Op& op, int row);
  void write_kv_row(const Op& op, const float* qkv, int row);

  int plan_linear(const Op& op, double* cost_ns);
  void run_linear(const Op& op, int unit);
  void run_linear_gated(const Op& op, int unit);

  int plan_attention(const Op& op, double* cost_ns);
  int num_attention_tiles(const Op& op) const;
  void make_row_tiles(int rows_per_tile);
  AttentionShare attention_share(const Op& op, int index) const;
  SpanState partial_state(const Op& op, int index, int span) const;
  void run_attention(const Op& op, int unit, int thread);
  void run_merge(const Op& op, int unit);
  static int first_visible(const tm_op& o, int limit);
  static int keys_in_span(const tm_op& o, int limit, int span);
  static void set_visible(const tm_op& o, int limit, int span, int query, SpanArgs* args);
  void fold_span(const tm_op& o, int limit, int span, int n, const SpanState& state, const SpanState& part) const;
  void write_attention(const Op& op, const AttentionShare& share, const float* sums, float* accs) const;
  void fill_keys(const Op& op, int sequence, int kv_head, int span, int num_keys, int thread, SpanArgs* args);

  Team* team_;
  const Kernels* kernels_;
  std::vector<Op> ops_;
  std::vector<tm_buffer> buffers_;
  tm_limits limits_;
  float* scratch_;
  int64_t scratch_floats_;
  int64_t floats_per_thread_ = 0;
  std::vector<float> thread_floats_;

  // The step under way.
  tm_step step_ = {};
  std::vector<int> row_sequence_;  // of each token row
  size_t next_ = 0;
  const Op* current_ = nullptr;
  int64_t* times_ns_ = nullptr;
  std::chrono::steady_clock::time_point timed_until_;

  // How the current operation is cut.
  int rows_per_unit_ = 1, tiles_per_unit_ = 1, num_row_blocks_ = 1;
  std::vector<RowTile> row_tiles_;
  int rows_per_tile_ = 0;  // for which row_tiles_ was made in this step; 0 for none
  int heads_per_unit_ = 1, head_chunks_ = 1, num_spans_ = 1;
  bool split_spans_ = false;
};

}  // namespace mill
