// Attention of a step: how it is cut into passes over the keys, and how a pass runs.
//
// A pass takes some tiles of query vectors of one KV head (of 12, or as many as the kernels like) over one span after
// another, while its keys are in cache. A row's spans are done by one pass that folds them as it goes; or, where threads
// need more units or rows of several sequences see the same blocks, by several passes that leave partial results, which a
// second phase folds. Both fold in span order by one formula, so how a step is cut changes no bit.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "kv_layout.h"
#include "program.h"

namespace mill {

namespace {

constexpr int kPassTiles = 4, kPreparedPassTiles = 8;  // the latter where kernels prepare a span for all tiles
constexpr int kMaxPassQueries = kPreparedPassTiles * kMaxTile;
constexpr int kUnitsPerThread = 6;  // fewer leave threads idle at the end of a phase

// End of the keys [first, limit) in the span; 0 where there are none.
int keys_in_span(int first, int limit, int span) {
  if (first >= (span + 1) * kSpan) return 0;
  return std::max(0, std::min(kSpan, limit - span * kSpan));
}

}  // namespace

bool Program::is_on_tiles(const tm_kv& kv) const { return kernels_->prepare_span != nullptr && kv.dtype == kBF16; }

int Program::pass_tiles() const { return kernels_->prepare_span != nullptr ? kPreparedPassTiles : kPassTiles; }

int Program::pass_queries() const { return pass_tiles() * kernels_->tile_queries; }

// Room a thread needs: queries, their states, the results of a span, prepared and gathered keys and values.
int64_t Program::attention_floats(const tm_op& o) const {
  const int64_t prepared = kernels_->prepare_span != nullptr ? (kPreparedSpans + 1) * prepared_bytes(o.head_dim) / 4 + kLanes : 0;
  const int64_t accs = pass_queries() + kernels_->tile_queries + 2 * kSpan;
  return accs * o.head_dim + pass_queries() * kQueryStride + prepared + kLanes;
}

// ------------------------------------------------------------------------------------------------------------ planning

int Program::plan_attention(const Op& op, double* cost_ns) {
  const tm_op& o = op.op;
  plan_ = nullptr;
  for (int i = 0; i < num_plans_ && plan_ == nullptr; i++) {
    const AttentionPlan& p = plans_[i];
    if (p.kv == o.kv && p.window == o.window && p.whole == o.whole && p.num_heads == o.num_heads &&
        p.num_kv_heads == o.num_kv_heads && p.head_dim == o.head_dim)
      plan_ = &p;
  }
  if (plan_ == nullptr) {
    if (num_plans_ == static_cast<int>(plans_.size())) plans_.emplace_back();
    make_plan(o, &plans_[num_plans_]);
    plan_ = &plans_[num_plans_++];
  }
  attention_operation_++;
  *cost_ns = plan_->cost_ns;
  return static_cast<int>(plan_->passes.size()) * o.num_kv_heads * plan_->head_chunks;
}

int Program::plan_merge(const Op& op, double* cost_ns) const {
  *cost_ns = plan_->merge_cost_ns;
  return static_cast<int>(plan_->split_rows.size()) * op.op.num_kv_heads;
}

void Program::make_plan(const tm_op& o, AttentionPlan* plan) {
  plan->kv = o.kv;
  plan->window = o.window;
  plan->whole = o.whole;
  plan->num_heads = o.num_heads;
  plan->num_kv_heads = o.num_kv_heads;
  plan->head_dim = o.head_dim;
  plan->rows.clear();
  plan->passes.clear();
  plan->split_rows.clear();
  plan->partial_at.assign(step_.num_tokens, -1);
  int longest = 0;
  for (int s = 0; s < step_.num_seqs; s++) {
    const int end = step_.row_starts[s + 1];
    if (end > step_.row_starts[s]) longest = std::max(longest, step_.context_lens[s]);
    for (int row = step_.row_starts[s]; row < end; row++) {
      const int position = step_.context_lens[s] - (end - row);
      const int ahead = !o.whole ? 1 : o.window > 0 ? o.window : step_.context_lens[s];  // keys from its own on
      const int first = o.window > 0 ? std::max(0, position + 1 - o.window) : 0;
      plan->rows.push_back({row, first, std::min(step_.context_lens[s], position + ahead)});
    }
  }
  const int num_spans = ceil_div(longest, kSpan);

  // The largest units that still keep all threads busy; where even the smallest are too few, spans are cut apart.
  const int sharing = o.num_heads / o.num_kv_heads;
  const int wanted = team_->num_threads() > 1 ? kUnitsPerThread * team_->num_threads() : 1;
  int rows_per_pass = 1, units = 0;
  for (int tiles = pass_tiles(); tiles >= 1; tiles /= 2) {
    plan->head_chunks = ceil_div(sharing, tiles * kernels_->tile_queries);
    plan->heads_per_unit = ceil_div(sharing, plan->head_chunks);
    rows_per_pass = std::max(1, tiles * kernels_->tile_queries / plan->heads_per_unit);
    units = 0;
    for (int s = 0; s < step_.num_seqs; s++) units += ceil_div(step_.row_starts[s + 1] - step_.row_starts[s], rows_per_pass);
    units *= o.num_kv_heads * plan->head_chunks;
    if (units >= wanted) break;
  }
  int64_t used = 0;
  bool split = units < wanted && num_spans > 1;
  for (int s = 0; s < step_.num_seqs && split; s++) split = reserve_partials(s, &used, plan);
  if (!split) {
    used = 0;
    std::fill(plan->partial_at.begin(), plan->partial_at.end(), -1);
  }

  find_shared(num_spans, sharing, plan);
  add_shared_passes(num_spans, &used, plan);
  for (int s = 0; s < step_.num_seqs; s++) add_own_passes(s, rows_per_pass, split ? 1 : num_spans, num_spans, plan);
  for (int row = 0; row < step_.num_tokens; row++)
    if (plan->partial_at[row] >= 0) plan->split_rows.push_back(plan->rows[row]);
  plan->by_head = false;
  for (const Pass& pass : plan->passes)
    if (is_on_tiles(*o.kv) && pass.num_rows * plan->heads_per_unit > kernels_->tile_queries) plan->by_head = true;
  estimate(plan);
}

// Give all rows of the sequence room in scratch for the results of the spans they see, if there is enough.
bool Program::reserve_partials(int sequence, int64_t* used, AttentionPlan* plan) const {
  const int begin = step_.row_starts[sequence], end = step_.row_starts[sequence + 1];
  int64_t at = *used;
  for (int row = begin; row < end; row++) {
    const QueryRow& seen = plan->rows[row];
    plan->partial_at[row] = at;
    at += static_cast<int64_t>(ceil_div(seen.limit, kSpan) - seen.first / kSpan) * plan->num_heads * (plan->head_dim + 2);
  }
  if (at > scratch_floats_) {
    std::fill(plan->partial_at.begin() + begin, plan->partial_at.begin() + end, -1);
    return false;
  }
  *used = at;
  return true;
}

// Sequences with fewer rows than fill a tile whose block tables agree from the start, span after span. With a window,
// they need agree only in a span that they see whole: before it, a table has entries that name no block.
void Program::find_shared(int num_spans, int sharing, AttentionPlan* plan) {
  shared_spans_.clear();
  shared_members_.clear();
  candidates_.clear();
  for (int s = 0; s < step_.num_seqs; s++) {
    const int rows = step_.row_starts[s + 1] - step_.row_starts[s];
    if (rows == 1 || (rows > 1 && rows * sharing < kernels_->tile_queries)) candidates_.push_back({0, s});
  }
  sharers_ = candidates_;
  for (int span = 0; span < num_spans && sharers_.size() > 1; span++) {
    size_t kept = 0;
    for (const Sharer& sharer : sharers_) {
      const int s = sharer.sequence, length = step_.context_lens[s];
      if (length >= (span + 1) * kSpan && plan->rows[step_.row_starts[s + 1] - 1].first <= span * kSpan)
        sharers_[kept++] = {hash_blocks(*plan->kv, s, span), s};
    }
    sharers_.resize(kept);
    std::sort(sharers_.begin(), sharers_.end(), [](const Sharer& a, const Sharer& b) {
      return a.hash != b.hash ? a.hash < b.hash : a.sequence < b.sequence;
    });
    kept = 0;
    for (size_t begin = 0, end; begin < sharers_.size(); begin = end) {
      const int first = sharers_[begin].sequence;
      for (end = begin + 1; end < sharers_.size() && sharers_[end].hash == sharers_[begin].hash; end++)
        if (!same_blocks(*plan->kv, first, sharers_[end].sequence, span, kSpan)) break;
      if (end - begin < 2) continue;
      SharedSpan shared = {span, static_cast<int>(shared_members_.size()), 0};
      for (size_t i = begin; i < end; i++) {
        const int s = sharers_[i].sequence;
        sharers_[kept++] = sharers_[i];
        // All of its rows see the whole span.
        if (plan->rows[step_.row_starts[s]].limit >= (span + 1) * kSpan) shared_members_.push_back(s);
      }
      shared.count = static_cast<int>(shared_members_.size()) - shared.begin;
      if (shared.count > 1) shared_spans_.push_back(shared);
    }
    sharers_.resize(kept);
    if (plan->window > 0) sharers_ = candidates_;
  }
}

// Sequences for whose partial results scratch has no room do without sharing.
void Program::add_shared_passes(int num_spans, int64_t* used, AttentionPlan* plan) {
  const int most_rows = std::max(1, pass_queries() / plan->heads_per_unit);
  covered_.assign(static_cast<size_t>(step_.num_seqs) * num_spans, 0);
  for (const SharedSpan& shared : shared_spans_) {
    const int begin = static_cast<int>(plan->rows.size());
    int sequence = 0;
    for (int i = shared.begin; i < shared.begin + shared.count; i++) {
      const int s = shared_members_[i], row0 = step_.row_starts[s];
      if (plan->partial_at[row0] < 0 && !reserve_partials(s, used, plan)) continue;
      sequence = s;
      covered_[static_cast<size_t>(s) * num_spans + shared.span] = 1;
      for (int row = row0; row < step_.row_starts[s + 1]; row++) {
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
void Program::add_own_passes(int sequence, int rows_per_pass, int spans_per_pass, int num_spans, AttentionPlan* plan) const {
  const uint8_t* covered = covered_.data() + static_cast<size_t>(sequence) * num_spans;
  const int end_row = step_.row_starts[sequence + 1], num_rows = end_row - step_.row_starts[sequence];
  // All about one size, for a small rest is dear, and on the matrix unit hardly less work; and those of a lone sequence as many
  // for each thread.
  if (num_rows > rows_per_pass) {
    int num_passes = ceil_div(num_rows, rows_per_pass);
    const int threads = team_->num_threads(), together = threads / std::gcd(threads, plan->num_kv_heads);
    if (step_.num_seqs == 1 && together <= num_passes) num_passes = ceil_div(num_passes, together) * together;
    rows_per_pass = ceil_div(num_rows, num_passes);
  }
  for (int row = step_.row_starts[sequence]; row < end_row; row += rows_per_pass) {
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

void Program::estimate(AttentionPlan* plan) const {
  // Nanoseconds for a channel of a key: what it takes by itself, and for each query.
  const bool on_tiles = is_on_tiles(*plan->kv);
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

uint64_t Program::hash_blocks(const tm_kv& kv, int sequence, int span) const {
  const int32_t* table = table_of(step_, kv, sequence);
  uint64_t hash = 0;
  for (int b = span * kSpan / kv.block_size; b <= ((span + 1) * kSpan - 1) / kv.block_size; b++)
    hash = (hash ^ static_cast<uint32_t>(table[b])) * 0x9E3779B97F4A7C15u;
  return hash;
}

bool Program::same_blocks(const tm_kv& kv, int one, int other, int span, int num_keys) const {
  const int begin = span * kSpan / kv.block_size, end = ceil_div(span * kSpan + num_keys, kv.block_size);
  const int32_t *a = table_of(step_, kv, one), *b = table_of(step_, kv, other);
  return std::equal(a + begin, a + end, b + begin);
}

// ------------------------------------------------------------------------------------------------------------- running

// Where scratch holds a row's result of a span, for query heads from `head` on.
Program::SpanState Program::partial_state(const AttentionPlan& plan, const QueryRow& row, int span, int head) const {
  const int64_t index = span - row.first / kSpan;
  float* at = scratch_ + plan.partial_at[row.row] + index * plan.num_heads * (plan.head_dim + 2);
  return {at + head, at + plan.num_heads + head, at + 2 * plan.num_heads + static_cast<int64_t>(head) * plan.head_dim};
}

// By pass and then by KV head. Or, where spans are prepared, for a thread's share of the passes by head and then by pass, so
// that it has the head's spans already; from the last pass on, because later rows see more keys and a phase ends best with
// small units.
Program::AttentionUnit Program::attention_unit(int unit, int num_kv_heads) const {
  const int chunk = unit % plan_->head_chunks, at = unit / plan_->head_chunks, num_passes = static_cast<int>(plan_->passes.size());
  if (!plan_->by_head) return {&plan_->passes[at / num_kv_heads], at % num_kv_heads, chunk};
  int begin = 0, end = 0;
  for (int thread = 1; end * num_kv_heads <= at; thread++) {
    begin = end;
    end = static_cast<int>(static_cast<int64_t>(num_passes) * thread / team_->num_threads());
  }
  const int place = at - begin * num_kv_heads, count = end - begin;
  return {&plan_->passes[end - 1 - place % count], place / count, chunk};
}

int Program::prepared_slot(const Pass& pass, int span) { return std::min(span - pass.span_begin, kPreparedSpans - 1); }

// Bring the keys and values of a span in the order of the kernels, unless this thread has done so already: for another pass
// over the same blocks, be it of the same sequence or not. All that the step leaves there, for later passes see more of it.
void Program::prepare(const Op& op, const Pass& pass, int kv_head, int span, int thread, uint8_t* to, float* gather,
                      SpanArgs* args) {
  const tm_kv& kv = *op.op.kv;
  const int slot = prepared_slot(pass, span);
  const int first = std::max(0, plan_->rows[pass.begin].first - span * kSpan);
  const int end = std::min(kSpan, step_.context_lens[pass.sequence] - span * kSpan);
  PreparedSpan& held = prepared_[static_cast<size_t>(thread) * kPreparedSpans + slot];
  const bool same = held.operation == attention_operation_ && held.kv_head == kv_head && held.span == span &&
                    held.first <= first && held.end >= end;
  if (same && same_blocks(kv, held.sequence, pass.sequence, span, end)) return;
  held = {attention_operation_, kv_head, span, pass.sequence, first, end};
  fill_keys(op, pass.sequence, kv_head, span, end, gather, args);
  args->prepared = to + slot * prepared_bytes(kv.head_dim);
  kernels_->prepare_span(args, first, end);
}

void Program::run_attention(const Op& op, int unit, int thread) {
  const tm_op& o = op.op;
  const AttentionPlan& plan = *plan_;
  const int num_units = static_cast<int>(plan.passes.size()) * o.num_kv_heads * plan.head_chunks;
  const AttentionUnit at = attention_unit(unit, o.num_kv_heads);
  const Pass& pass = *at.pass;
  const int chunk = at.chunk, kv_head = at.kv_head;
  const QueryRow* rows = plan.rows.data() + pass.begin;
  const int sharing = o.num_heads / o.num_kv_heads;
  const int head0 = kv_head * sharing + chunk * plan.heads_per_unit;
  const int heads = std::min(plan.heads_per_unit, sharing - chunk * plan.heads_per_unit);
  const int num_queries = pass.num_rows * heads;
  const int64_t head_dim = o.head_dim;

  float* const q = thread_floats(thread);
  const int tile_queries = kernels_->tile_queries;
  const bool is_codes = o.kv->dtype == kInt8, on_tiles = is_on_tiles(*o.kv);
  uint8_t* const prepared = reinterpret_cast<uint8_t*>(q + pass_queries() * kQueryStride);
  float* const state_acc = reinterpret_cast<float*>(prepared + (on_tiles ? (kPreparedSpans + 1) * prepared_bytes(o.head_dim) : 0));
  float* const span_acc = state_acc + pass_queries() * head_dim;
  float* const gathered = span_acc + tile_queries * head_dim;
  float state_max[kMaxPassQueries], state_sum[kMaxPassQueries], span_max[kMaxTile], span_sum[kMaxTile];
  float q_scales[kMaxPassQueries];
  int32_t q_starts[kMaxPassQueries * kQueryStarts];
  int8_t* const planes = reinterpret_cast<int8_t*>(q);
  uint16_t* const q_bf16 = reinterpret_cast<uint16_t*>(q);
  const int64_t plane_bytes = 8 * ceil_div(head_dim, 4);  // of one query
  const int64_t q_stride = rounded_stride(head_dim);      // of one as bf16
  for (int n = 0, row = 0, head = 0; n < num_queries; n++) {
    const int tile0 = n / tile_queries * tile_queries, count = std::min(tile_queries, num_queries - tile0);
    const float* from = rows_of(o.in0, rows[row].row) + (head0 + head) * head_dim;
    if (++head == heads) {
      head = 0;
      row++;
    }
    if (is_codes) {
      kernels_->split_query(from, o.head_dim, 8 * count, planes + tile0 * plane_bytes + 8 * (n - tile0), q_scales + n,
                            q_starts + n * kQueryStarts);
    } else if (on_tiles) {
      kernels_->round_row(from, o.head_dim, q_bf16 + n * q_stride);
    } else {
      std::copy(from, from + head_dim, q + n * kQueryStride);
    }
  }
  SpanArgs args;
  args.dtype = o.kv->dtype;
  args.head_dim = o.head_dim;
  args.scale = o.value;
  args.cap = o.cap;
  args.is_prepared = on_tiles && num_queries > tile_queries;
  const int num_tiles = ceil_div(num_queries, tile_queries);
  // Spans that are prepared at once are gone through tile by tile, so that a tile's state stays near; others one by one.
  for (int begin = pass.span_begin, end; begin < pass.span_end; begin = end) {
    end = args.is_prepared && begin == pass.span_begin ? std::min(pass.span_end, begin + kPreparedSpans - 1) : begin + 1;
    if (args.is_prepared) {
      for (int span = begin; span < end; span++) prepare(op, pass, kv_head, span, thread, prepared, gathered, &args);
    } else {
      const int num_keys = std::min(kSpan, rows[pass.num_rows - 1].limit - begin * kSpan);
      fill_keys(op, pass.sequence, kv_head, begin, num_keys, gathered, &args);
      if (on_tiles) {
        const bool last = end == pass.span_end;
        const AttentionUnit next = last && unit + 1 < num_units ? attention_unit(unit + 1, o.num_kv_heads) : at;
        point_ahead(op, *next.pass, next.kv_head, last ? next.pass->span_begin : end, &args);
      }
    }
    for (int tile = 0; tile < num_tiles * (end - begin); tile++) {
      const int span = begin + tile % (end - begin), tile0 = tile / (end - begin) * tile_queries;
      const int count = std::min(tile_queries, num_queries - tile0);
      const SpanState state = {state_max + tile0, state_sum + tile0, state_acc + tile0 * head_dim};
      const bool into_state = !pass.partial && span == pass.span_begin;
      const SpanState to = into_state ? state : SpanState{span_max, span_sum, span_acc};
      args.num_queries = count;
      args.q = q + tile0 * kQueryStride;
      args.q_bf16 = q_bf16 + tile0 * q_stride;
      args.codes = {planes + tile0 * plane_bytes, q_scales + tile0, q_starts + tile0 * kQueryStarts};
      args.prepared = prepared + (args.is_prepared ? prepared_slot(pass, span) : kPreparedSpans) * prepared_bytes(o.head_dim);
      args.max = to.max;
      args.sum = to.sum;
      args.acc = to.acc;
      for (int n = 0, row = tile0 / heads; n < count; row++) {
        const int num_keys_seen = keys_in_span(rows[row].first, rows[row].limit, span);
        const int first = num_keys_seen ? std::max(0, rows[row].first - span * kSpan) : kSpan;
        for (const int end = std::min(count, (row + 1) * heads - tile0); n < end; n++) {
          args.num_keys[n] = num_keys_seen;
          args.first_key[n] = first;
        }
      }
      kernels_->attend_span(&args);
      if (into_state) continue;
      // Mostly all queries fold; else those of one row are treated alike.
      const bool all_fold = !pass.partial && rows[(tile0 + count - 1) / heads].first / kSpan < span &&
                            *std::min_element(args.num_keys, args.num_keys + count) > 0;
      if (all_fold) {
        kernels_->merge_span(state.max, state.sum, state.acc, to.max, to.sum, to.acc, count, o.head_dim);
        continue;
      }
      for (int n = 0, end; n < count; n = end) {
        const QueryRow& row = rows[(tile0 + n) / heads];
        end = std::min(count, n + heads - (tile0 + n) % heads);
        if (args.num_keys[n] == 0) continue;
        SpanState into = {state.max + n, state.sum + n, state.acc + n * head_dim};
        if (pass.partial) into = partial_state(plan, row, span, head0 + (tile0 + n) % heads);
        if (!pass.partial && row.first / kSpan < span) {
          kernels_->merge_span(into.max, into.sum, into.acc, to.max + n, to.sum + n, to.acc + n * head_dim, end - n, o.head_dim);
          continue;
        }
        std::copy(to.max + n, to.max + end, into.max);
        std::copy(to.sum + n, to.sum + end, into.sum);
        std::copy(to.acc + n * head_dim, to.acc + end * head_dim, into.acc);
      }
    }
  }
  if (pass.partial) return;
  for (int r = 0; r < pass.num_rows; r++)
    write_attention(o, rows[r].row, head0, heads, state_sum + r * heads, state_acc + r * heads * head_dim);
}

// Fold the partial results of one row, for the query heads of one KV head.
void Program::run_merge(const Op& op, int unit) {
  const tm_op& o = op.op;
  const AttentionPlan& plan = *plan_;
  const QueryRow& row = plan.split_rows[unit / o.num_kv_heads];
  const int heads = o.num_heads / o.num_kv_heads, head0 = unit % o.num_kv_heads * heads;
  const int first = row.first / kSpan;
  const SpanState state = partial_state(plan, row, first, head0);
  for (int span = first + 1; span < ceil_div(row.limit, kSpan); span++) {
    const SpanState part = partial_state(plan, row, span, head0);
    kernels_->merge_span(state.max, state.sum, state.acc, part.max, part.sum, part.acc, heads, o.head_dim);
  }
  write_attention(o, row.row, head0, heads, state.sum, state.acc);
}

void Program::write_attention(const tm_op& o, int row, int head0, int num_heads, const float* sums, float* accs) const {
  const bool quantise = buffers_[o.out].form == TM_FORM_QUANTISED;
  for (int h = 0; h < num_heads; h++) {
    const int64_t column = static_cast<int64_t>(head0 + h) * o.head_dim;
    float* acc = accs + static_cast<int64_t>(h) * o.head_dim;
    if (quantise) {
      const Quantised out = quantised(o.out);
      kernels_->divide(acc, sums[h], o.head_dim, acc);
      kernels_->quantise_row(acc, &out, row, static_cast<int>(column / kGroup), o.head_dim / kGroup);
    } else if (is_on_tiles(*o.kv)) {
      kernels_->scale(acc, 1.0f / sums[h], o.head_dim, rows_of(o.out, row) + column);
    } else {
      kernels_->divide(acc, sums[h], o.head_dim, rows_of(o.out, row) + column);
    }
  }
}

// Point at the keys of a span, or of what a pass sees of it, that will be wanted next.
void Program::point_ahead(const Op& op, const Pass& pass, int kv_head, int span, SpanArgs* args) const {
  const tm_kv& kv = *op.op.kv;
  args->num_next = 0;
  if (kv.block_size % kLanes != 0) return;
  const KVLayout layout(kv);
  const int32_t* table = table_of(step_, kv, pass.sequence);
  const int limit = plan_->rows[pass.begin + pass.num_rows - 1].limit, num_chunks = ceil_div(std::min(kSpan, limit - span * kSpan), kLanes);
  int place = span * kSpan / kv.block_size, slot = span * kSpan % kv.block_size;
  while (args->num_next < num_chunks) {
    args->next_keys[args->num_next++] = layout.keys(layout.block(op.op.layer, table[place]), kv_head) + 2 * slot;
    slot += kLanes;
    if (slot < kv.block_size) continue;
    slot = 0;
    place++;
  }
}

// Point at the keys and values of a span, in chunks of 16 tokens. Blocks of a multiple of 16 tokens are used in place;
// from other block sizes the chunks are gathered first.
void Program::fill_keys(const Op& op, int sequence, int kv_head, int span, int num_keys, float* gather,
                        SpanArgs* args) const {
  const tm_kv& kv = *op.op.kv;
  const KVLayout layout(kv);
  const int64_t value_bytes = layout.is_codes() ? 1 : kv.dtype == kF32 ? 4 : 2;
  const int32_t* table = table_of(step_, kv, sequence);
  const int64_t key_unit = layout.is_codes() ? 4 : value_bytes;  // what lies together of one key
  const int num_units = layout.is_codes() ? ceil_div(kv.head_dim, 4) : kv.head_dim;
  if (kv.block_size % kLanes == 0) {
    args->k_stride = layout.is_codes() ? 4 * kv.block_size : kv.block_size;
    int place = span * kSpan / kv.block_size, slot = span * kSpan % kv.block_size;
    for (int chunk = 0; chunk * kLanes < num_keys; chunk++) {
      uint8_t* block = layout.block(op.op.layer, table[place]);
      args->k_chunks[chunk] = layout.keys(block, kv_head) + slot * key_unit;
      args->v_chunks[chunk] = layout.values(block, kv_head) + static_cast<int64_t>(slot) * kv.head_dim * value_bytes;
      args->k_scales[chunk] = layout.k_scales(block, kv_head) + slot;
      args->v_scales[chunk] = layout.v_scales(block, kv_head) + slot;
      slot += kLanes;
      if (slot < kv.block_size) continue;
      slot = 0;
      place++;
    }
    return;
  }
  args->k_stride = layout.is_codes() ? 4 * kLanes : kLanes;
  float* scales = gather;
  uint8_t* to = reinterpret_cast<uint8_t*>(layout.is_codes() ? gather + 2 * kSpan : gather);
  for (int chunk = 0; chunk * kLanes < num_keys; chunk++) {
    uint8_t *keys = to, *values = to + kLanes * num_units * key_unit;
    to = values + kLanes * kv.head_dim * value_bytes;
    args->k_chunks[chunk] = keys;
    args->v_chunks[chunk] = values;
    args->k_scales[chunk] = scales;
    args->v_scales[chunk] = scales + kLanes;
    for (int i = 0; i < kLanes && chunk * kLanes + i < num_keys; i++) {
      const int position = span * kSpan + chunk * kLanes + i, slot = position % kv.block_size;
      uint8_t* block = layout.block(op.op.layer, table[position / kv.block_size]);
      const uint8_t *from_keys = layout.keys(block, kv_head), *from_values = layout.values(block, kv_head);
      for (int64_t d = 0; d < num_units; d++)
        std::memcpy(keys + (d * kLanes + i) * key_unit, from_keys + (d * kv.block_size + slot) * key_unit, key_unit);
      if (layout.is_codes()) {
        for (int64_t c = 0; c < kv.head_dim; c++)
          values[(i / 4 * kv.head_dim + c) * 4 + i % 4] = from_values[(slot / 4 * kv.head_dim + c) * 4 + slot % 4];
        scales[i] = layout.k_scales(block, kv_head)[slot];
        scales[kLanes + i] = layout.v_scales(block, kv_head)[slot];
      } else {
        const int64_t row_bytes = kv.head_dim * value_bytes;
        std::memcpy(values + i * row_bytes, from_values + slot * row_bytes, row_bytes);
      }
    }
    scales += 2 * kLanes;
  }
}

}  // namespace mill
