// See attention_plan.h.
#include "attention_plan.h"

#include <algorithm>
#include <numeric>

#include "workspace.h"

namespace mill {

namespace {

// Fewer leave threads idle at the end of a phase; but latents are laid out anew in each.
constexpr int kUnitsPerThread = 6, kLatentUnitsPerThread = 2;

int pass_tiles(const Kernels& kernels) { return kernels.prepare_span != nullptr ? kPreparedPassTiles : kPassTiles; }

bool is_latent(const tm_kv& kv) { return kv.value_dim > 0; }

// Give all rows of the sequence room in scratch for the results of the spans they see, if there is enough.
bool reserve_partials(const Workspace& w, int sequence, int64_t* used, AttentionPlan* plan) {
  const int begin = w.step.row_starts[sequence], end = w.step.row_starts[sequence + 1];
  int64_t at = *used;
  for (int row = begin; row < end; row++) {
    const QueryRow& seen = plan->rows[row];
    plan->partial_at[row] = at;
    at += static_cast<int64_t>(ceil_div(seen.limit, kSpan) - seen.first / kSpan) * plan->num_heads * (plan->head_dim + 2);
  }
  if (at > w.scratch_floats) {
    std::fill(plan->partial_at.begin() + begin, plan->partial_at.begin() + end, -1);
    return false;
  }
  *used = at;
  return true;
}

void estimate(const Workspace& w, AttentionPlan* plan) {
  // Nanoseconds for a channel of a key: what it takes by itself, and for each query.
  const bool on_tiles = is_on_tiles(*w.kernels, *plan->kv);
  const double of_key = on_tiles ? 0.05 : 0, of_query = on_tiles ? 0.0035 : 0.06;
  double keys = 0, partials = 0;
  for (const Pass& pass : plan->passes) {
    const QueryRow& last = plan->rows[pass.begin + pass.num_rows - 1];
    const int limit = last.limit, first = std::max(pass.span_begin * kSpan, last.first);
    const int queries = pass.num_rows * plan->num_heads / plan->num_kv_heads;
    keys += (std::min(limit, pass.span_end * kSpan) - first) * (of_key * plan->head_chunks + of_query * queries);
    if (pass.partial) partials += static_cast<double>(pass.span_end - pass.span_begin) * pass.num_rows;
  }
  plan->cost_ns = keys * plan->num_kv_heads * plan->head_dim + 300.0 * static_cast<double>(plan->passes.size());
  plan->merge_cost_ns = partials * plan->num_heads * (5 + 0.1 * plan->head_dim);
}

uint64_t hash_blocks(const Workspace& w, const tm_kv& kv, int sequence, int span) {
  const int32_t* table = w.table_of(kv, sequence);
  uint64_t hash = 0;
  for (int b = span * kSpan / kv.block_size; b <= ((span + 1) * kSpan - 1) / kv.block_size; b++)
    hash = (hash ^ static_cast<uint32_t>(table[b])) * 0x9E3779B97F4A7C15u;
  return hash;
}

}  // namespace

bool same_blocks(const Workspace& w, const tm_kv& kv, int one, int other, int span, int num_keys) {
  const int begin = span * kSpan / kv.block_size, end = ceil_div(span * kSpan + num_keys, kv.block_size);
  const int32_t *a = w.table_of(kv, one), *b = w.table_of(kv, other);
  return std::equal(a + begin, a + end, b + begin);
}

bool is_on_tiles(const Kernels& kernels, const tm_kv& kv) { return kernels.prepare_span != nullptr && kv.dtype == kBF16 && !is_latent(kv); }

int pass_queries(const Kernels& kernels) { return pass_tiles(kernels) * kernels.tile_queries; }

const AttentionPlan* AttentionPlans::plan_for(const Workspace& w, const tm_op& o) {
  for (int i = 0; i < num_plans_; i++) {
    const AttentionPlan& p = plans_[i];
    if (p.kv == o.kv && p.window == o.window && p.whole == o.whole && p.num_heads == o.num_heads &&
        p.num_kv_heads == o.num_kv_heads && p.head_dim == o.head_dim)
      return &p;
  }
  if (num_plans_ == static_cast<int>(plans_.size())) plans_.emplace_back();
  make_plan(w, o, &plans_[num_plans_]);
  return &plans_[num_plans_++];
}

void AttentionPlans::make_plan(const Workspace& w, const tm_op& o, AttentionPlan* plan) {
  plan->kv = o.kv;
  plan->window = o.window;
  plan->whole = o.whole;
  plan->num_heads = o.num_heads;
  plan->num_kv_heads = o.num_kv_heads;
  plan->head_dim = o.head_dim;
  plan->rows.clear();
  plan->passes.clear();
  plan->split_rows.clear();
  plan->partial_at.assign(w.step.num_tokens, -1);
  int longest = 0;
  for (int s = 0; s < w.step.num_seqs; s++) {
    const int end = w.step.row_starts[s + 1];
    if (end > w.step.row_starts[s]) longest = std::max(longest, w.step.context_lens[s]);
    for (int row = w.step.row_starts[s]; row < end; row++) {
      const int position = w.step.context_lens[s] - (end - row);
      const int ahead = !o.whole ? 1 : o.window > 0 ? o.window : w.step.context_lens[s];  // keys from its own on
      const int first = o.window > 0 ? std::max(0, position + 1 - o.window) : o.window < 0 ? position - position % -o.window : 0;
      plan->rows.push_back({row, first, std::min(w.step.context_lens[s], position + ahead)});
    }
  }
  const int num_spans = ceil_div(longest, kSpan);

  // The largest units that still keep all threads busy; where even the smallest are too few, spans are cut apart.
  const int sharing = o.num_heads / o.num_kv_heads;
  const bool latent = is_latent(*o.kv);
  const int tile_queries = latent ? kLatentTile : w.kernels->tile_queries, most_tiles = latent ? kLatentPassTiles : pass_tiles(*w.kernels);
  const int least_tiles = latent ? std::min(most_tiles, ceil_div(sharing, tile_queries)) : 1;  // not to lay latents out for few heads
  const int units_per_thread = latent ? kLatentUnitsPerThread : kUnitsPerThread;
  const int wanted = w.num_threads > 1 ? units_per_thread * w.num_threads : 1;
  int rows_per_pass = 1, units = 0;
  for (int tiles = most_tiles; tiles >= least_tiles; tiles /= 2) {
    plan->head_chunks = ceil_div(sharing, tiles * tile_queries);
    plan->heads_per_unit = ceil_div(sharing, plan->head_chunks);
    rows_per_pass = std::max(1, tiles * tile_queries / plan->heads_per_unit);
    units = 0;
    for (int s = 0; s < w.step.num_seqs; s++) units += ceil_div(w.step.row_starts[s + 1] - w.step.row_starts[s], rows_per_pass);
    units *= o.num_kv_heads * plan->head_chunks;
    if (units >= wanted) break;
  }
  int64_t used = 0;
  bool split = units < wanted && num_spans > 1;
  for (int s = 0; s < w.step.num_seqs && split; s++) split = reserve_partials(w, s, &used, plan);
  if (!split) {
    used = 0;
    std::fill(plan->partial_at.begin(), plan->partial_at.end(), -1);
  }

  find_shared(w, num_spans, tile_queries, sharing, plan);
  add_shared_passes(w, num_spans, most_tiles * tile_queries, &used, plan);
  for (int s = 0; s < w.step.num_seqs; s++) add_own_passes(w, s, rows_per_pass, split ? 1 : num_spans, num_spans, plan);
  for (int row = 0; row < w.step.num_tokens; row++)
    if (plan->partial_at[row] >= 0) plan->split_rows.push_back(plan->rows[row]);
  plan->by_head = false;
  for (const Pass& pass : plan->passes)
    if (is_on_tiles(*w.kernels, *o.kv) && pass.num_rows * plan->heads_per_unit > w.kernels->tile_queries) plan->by_head = true;
  estimate(w, plan);
}

// Sequences with fewer rows than fill a tile whose block tables agree from the start, span after span. With a window,
// they need agree only in a span that they see whole: before it, a table has entries that name no block.
void AttentionPlans::find_shared(const Workspace& w, int num_spans, int tile_queries, int sharing, AttentionPlan* plan) {
  shared_spans_.clear();
  shared_members_.clear();
  candidates_.clear();
  for (int s = 0; s < w.step.num_seqs; s++) {
    const int rows = w.step.row_starts[s + 1] - w.step.row_starts[s];
    if (rows == 1 || (rows > 1 && rows * sharing < tile_queries)) candidates_.push_back({0, s});
  }
  sharers_ = candidates_;
  for (int span = 0; span < num_spans && sharers_.size() > 1; span++) {
    size_t kept = 0;
    for (const Sharer& sharer : sharers_) {
      const int s = sharer.sequence, length = w.step.context_lens[s];
      if (length >= (span + 1) * kSpan && plan->rows[w.step.row_starts[s + 1] - 1].first <= span * kSpan)
        sharers_[kept++] = {hash_blocks(w, *plan->kv, s, span), s};
    }
    sharers_.resize(kept);
    std::sort(sharers_.begin(), sharers_.end(), [](const Sharer& a, const Sharer& b) {
      return a.hash != b.hash ? a.hash < b.hash : a.sequence < b.sequence;
    });
    kept = 0;
    for (size_t begin = 0, end; begin < sharers_.size(); begin = end) {
      const int first = sharers_[begin].sequence;
      for (end = begin + 1; end < sharers_.size() && sharers_[end].hash == sharers_[begin].hash; end++)
        if (!same_blocks(w, *plan->kv, first, sharers_[end].sequence, span, kSpan)) break;
      if (end - begin < 2) continue;
      SharedSpan shared = {span, static_cast<int>(shared_members_.size()), 0};
      for (size_t i = begin; i < end; i++) {
        const int s = sharers_[i].sequence;
        sharers_[kept++] = sharers_[i];
        // All of its rows see the whole span.
        if (plan->rows[w.step.row_starts[s]].limit >= (span + 1) * kSpan) shared_members_.push_back(s);
      }
      shared.count = static_cast<int>(shared_members_.size()) - shared.begin;
      if (shared.count > 1) shared_spans_.push_back(shared);
    }
    sharers_.resize(kept);
    if (plan->window != 0) sharers_ = candidates_;
  }
}

// Sequences for whose partial results scratch has no room do without sharing.
void AttentionPlans::add_shared_passes(const Workspace& w, int num_spans, int most_queries, int64_t* used, AttentionPlan* plan) {
  const int most_rows = std::max(1, most_queries / plan->heads_per_unit);
  covered_.assign(static_cast<size_t>(w.step.num_seqs) * num_spans, 0);
  for (const SharedSpan& shared : shared_spans_) {
    const int begin = static_cast<int>(plan->rows.size());
    int sequence = 0;
    for (int i = shared.begin; i < shared.begin + shared.count; i++) {
      const int s = shared_members_[i], row0 = w.step.row_starts[s];
      if (plan->partial_at[row0] < 0 && !reserve_partials(w, s, used, plan)) continue;
      sequence = s;
      covered_[static_cast<size_t>(s) * num_spans + shared.span] = 1;
      for (int row = row0; row < w.step.row_starts[s + 1]; row++) {
        const QueryRow copied = plan->rows[row];
        plan->rows.push_back(copied);
      }
    }
    const int end = static_cast<int>(plan->rows.size());
    for (int at = begin; at < end; at += most_rows)
      plan->passes.push_back({sequence, at, std::min(most_rows, end - at), shared.span, shared.span + 1, true});
  }
}

// The spans of a sequence that no pass over shared blocks takes.
void AttentionPlans::add_own_passes(const Workspace& w, int sequence, int rows_per_pass, int spans_per_pass, int num_spans,
                                    AttentionPlan* plan) const {
  const uint8_t* covered = covered_.data() + static_cast<size_t>(sequence) * num_spans;
  const int end_row = w.step.row_starts[sequence + 1], num_rows = end_row - w.step.row_starts[sequence];
  // All about one size, for a small rest is dear, and on the matrix unit hardly less work; and those of a lone sequence as many
  // for each thread.
  if (num_rows > rows_per_pass) {
    int num_passes = ceil_div(num_rows, rows_per_pass);
    const int threads = w.num_threads, together = threads / std::gcd(threads, plan->num_kv_heads);
    if (w.step.num_seqs == 1 && together <= num_passes) num_passes = ceil_div(num_passes, together) * together;
    rows_per_pass = ceil_div(num_rows, num_passes);
  }
  for (int row = w.step.row_starts[sequence]; row < end_row; row += rows_per_pass) {
    const int rows = std::min(rows_per_pass, end_row - row);
    const int first = plan->rows[row].first / kSpan;
    const int end = ceil_div(plan->rows[row + rows - 1].limit, kSpan);
    const bool partial = plan->partial_at[row] >= 0;
    if (!partial) spans_per_pass = num_spans;
    for (int span = first; span < end;) {
      const int begin = span;
      while (span < end && span - begin < spans_per_pass && !covered[span]) span++;
      if (span > begin) plan->passes.push_back({sequence, row, rows, begin, span, partial});
      else span++;
    }
  }
}

}  // namespace mill
