// How the attention of a step is cut into passes over the keys.
//
// A pass takes some tiles of query vectors of one KV head (of 12, or as many as the kernels like) over one span after
// another, while its keys are in cache. A row's spans are done by one pass that folds them as it goes; or, where threads
// need more units or rows of several sequences see the same blocks, by several passes that leave partial results, which a
// second phase folds. Both fold in span order by one formula, so how a step is cut changes no bit.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../include/tokenmill_native.h"
#include "kernels.h"

namespace mill {

class Workspace;
struct OpKind;

constexpr int kPassTiles = 4, kPreparedPassTiles = 8;  // the latter where kernels prepare a span for all tiles
constexpr int kMaxPassQueries = kPreparedPassTiles * kMaxTile;
constexpr int kPreparedSpans = 8;  // that a thread keeps: the first of a pass, and one that changes

// A query row and the keys [first, limit) it sees. Both rise with the rows of a sequence.
struct QueryRow {
  int row, first, limit;
};

// Rows that pass over the keys of spans [span_begin, span_end) together. Rows of several sequences may, where all
// their block tables name the same blocks there.
struct Pass {
  int sequence;         // whose block table is used
  int begin, num_rows;  // in the plan's rows
  int span_begin, span_end;
  bool partial;  // leaves the result of each span for the merge; otherwise these are all spans the rows see
};

// How a step's attention is cut, for operations of one pool, geometry and window.
struct AttentionPlan {
  const tm_kv* kv;
  int window, whole, num_heads, num_kv_heads, head_dim;
  int heads_per_unit, head_chunks;  // of the query heads that share a KV head
  bool by_head;                     // the order of units: see attention_unit
  std::vector<QueryRow> rows;       // all rows of the step, then those of passes over shared blocks
  std::vector<Pass> passes;
  std::vector<int64_t> partial_at;   // of each row: where its partial results lie in scratch; -1 for none
  std::vector<QueryRow> split_rows;  // rows that have partial results
  double cost_ns, merge_cost_ns;
};

// Keys and values of this type meet the matrix unit.
bool is_on_tiles(const Kernels& kernels, const tm_kv& kv);
// Query vectors of a pass, at most; of heads, and of latents.
int pass_queries(const Kernels& kernels);
constexpr int kLatentTile = 16, kLatentPassTiles = 6, kLatentQueries = kLatentTile * kLatentPassTiles;

// Whether two sequences have the same blocks in the first keys of a span.
bool same_blocks(const Workspace& w, const tm_kv& kv, int one, int other, int span, int num_keys);

// Plans of a step, and what making them needs.
class AttentionPlans {
 public:
  void clear() { num_plans_ = 0; }

  // The plan for an operation; that of another of the same pool, geometry and window, where there is one.
  const AttentionPlan* plan_for(const Workspace& w, const tm_op& o);

 private:
  // A sequence that may share its blocks of a span, and the hash of their ids.
  struct Sharer {
    uint64_t hash;
    int sequence;
  };

  // Sequences that see the same blocks in a span: a run of shared_members_.
  struct SharedSpan {
    int span, begin, count;
  };

  void make_plan(const Workspace& w, const tm_op& o, AttentionPlan* plan);
  void find_shared(const Workspace& w, int num_spans, int tile_queries, int sharing, AttentionPlan* plan);
  void add_shared_passes(const Workspace& w, int num_spans, int most_queries, int64_t* used, AttentionPlan* plan);
  void add_own_passes(const Workspace& w, int sequence, int rows_per_pass, int spans_per_pass, int num_spans,
                      AttentionPlan* plan) const;

  std::vector<AttentionPlan> plans_;
  int num_plans_ = 0;
  std::vector<Sharer> candidates_, sharers_;
  std::vector<SharedSpan> shared_spans_;
  std::vector<int> shared_members_;
  std::vector<uint8_t> covered_;  // [sequence][span]: a pass over shared blocks does it
};

// A span's keys and values that a thread has in the order of the kernels: of one head in an operation.
struct PreparedSpan {
  int64_t operation;
  int kv_head, span, sequence;
  int first, end;  // keys that it has
};

// What attention operations keep between their phases, and from one to the next.
struct AttentionState {
  AttentionPlans plans;
  const AttentionPlan* plan = nullptr;  // of the operation under way
  int64_t operation = 0;                // counts those that were begun
  std::vector<PreparedSpan> prepared;   // of each thread, kPreparedSpans

  void reserve(int num_threads) { prepared.resize(static_cast<size_t>(num_threads) * kPreparedSpans); }
};

// ---- what attention of heads and of latents have in common: op_attention.cpp

// Softmaxes of some query vectors over what they have seen so far.
struct SpanState {
  float *max, *sum, *acc;
};

// Where scratch holds a row's result of a span, for query heads from `head` on.
SpanState partial_state(const Workspace& w, const AttentionPlan& plan, const QueryRow& row, int span, int head);

// What all spans of a row come to, for query heads from head0 on.
void write_attention(const Workspace& w, const tm_op& o, int row, int head0, int num_heads, const SpanState& state);

// Follows every attention; idle unless spans were split.
extern const OpKind kMergeSpans;

}  // namespace mill
