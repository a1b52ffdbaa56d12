// Attention: how a pass over the keys runs, and how partial results become one. How a step is cut: attention_plan.h.
#include <algorithm>
#include <cstring>

#include "attention_keys.h"
#include "kv_layout.h"
#include "workspace.h"

namespace mill {

SpanState partial_state(const Workspace& w, const AttentionPlan& plan, const QueryRow& row, int span, int head) {
  const int64_t index = span - row.first / kSpan;
  float* at = w.scratch + plan.partial_at[row.row] + index * plan.num_heads * (plan.head_dim + 2);
  return {at + head, at + plan.num_heads + head, at + 2 * plan.num_heads + static_cast<int64_t>(head) * plan.head_dim};
}

namespace {

// Sinks are keys behind all others, of value 0: folded in as a span that has just that one.
void fold_sinks(const Workspace& w, const tm_op& o, int head0, int num_heads, const SpanState& state) {
  static const float nothing[kMaxHeadDim] = {};
  for (int h = 0; h < num_heads; h++) {
    const float top = o.vector[head0 + h] * kLog2E, one = 1.0f;
    w.kernels->merge_span(state.max + h, state.sum + h, state.acc + static_cast<int64_t>(h) * o.head_dim, &top, &one, nothing, 1, o.head_dim);
  }
}

}  // namespace

void write_attention(const Workspace& w, const tm_op& o, int row, int head0, int num_heads, const SpanState& state) {
  const bool quantise = w.buffers[o.out].form == TM_FORM_QUANTISED, is_rotated = o.kv->dtype == kInt8 && o.kv->value_dim == 0;
  if (o.vector != nullptr) fold_sinks(w, o, head0, num_heads, state);
  for (int h = 0; h < num_heads; h++) {
    const int64_t column = static_cast<int64_t>(head0 + h) * o.head_dim;
    float* acc = state.acc + static_cast<int64_t>(h) * o.head_dim;
    if (is_rotated) {
      w.kernels->rotate(acc, nullptr, o.head_dim, acc);
      state.sum[h] *= rotated_block(o.head_dim);
    }
    if (quantise) {
      const Quantised out = w.quantised(o.out);
      w.kernels->divide(acc, state.sum[h], o.head_dim, acc);
      w.kernels->quantise_row(acc, &out, row, static_cast<int>(column / kGroup), o.head_dim / kGroup);
    } else if (is_on_tiles(*w.kernels, *o.kv)) {
      w.kernels->scale(acc, 1.0f / state.sum[h], o.head_dim, w.rows_of(o.out, row) + column);
    } else {
      w.kernels->divide(acc, state.sum[h], o.head_dim, w.rows_of(o.out, row) + column);
    }
  }
}

namespace {

// End of the keys [first, limit) in the span; 0 where there are none.
int keys_in_span(int first, int limit, int span) {
  if (first >= (span + 1) * kSpan) return 0;
  return std::max(0, std::min(kSpan, limit - span * kSpan));
}

std::string check_attention(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_heads(w, o);
  if (!wrong.empty()) return wrong;
  const int64_t mixed = static_cast<int64_t>(o.num_heads) * o.head_dim;
  return unless(o.kv != nullptr && (o.window >= 0 || !o.whole) && o.cap >= 0 && (o.vector == nullptr || o.vector_rows == o.num_heads) &&
                (w.fits(o.out, o.rows, mixed) ||
                 (o.head_dim % kGroup == 0 && w.fits(o.out, o.rows, mixed, TM_FORM_QUANTISED))));
}

// Room a thread needs: queries, their states, the results of a span, prepared and gathered keys and values.
int64_t attention_floats(const Workspace& w, const Op& op) {
  const Kernels& kernels = *w.kernels;
  const int head_dim = op.op.head_dim, queries = pass_queries(kernels);
  const int64_t prepared = kernels.prepare_span != nullptr ? (kPreparedSpans + 1) * prepared_bytes(head_dim) / 4 + kLanes : 0;
  const int64_t accs = queries + kernels.tile_queries + 2 * kSpan;
  return accs * head_dim + queries * kQueryStride + prepared + kLanes;
}

int plan_attention(Workspace& w, const Op& op, double* cost_ns) {
  const AttentionPlan* plan = w.attention.plans.plan_for(w, op.op);
  w.attention.plan = plan;
  w.attention.operation++;
  *cost_ns = plan->cost_ns;
  return static_cast<int>(plan->passes.size()) * op.op.num_kv_heads * plan->head_chunks;
}

// Query heads of a unit of the merge: those of one KV head, or a few of the many that share latents.
int merged_heads(const tm_op& o) {
  const int sharing = o.num_heads / o.num_kv_heads;
  return o.kv->value_dim > 0 ? std::min(sharing, 4) : sharing;
}

int plan_merge(Workspace& w, const Op& op, double* cost_ns) {
  *cost_ns = w.attention.plan->merge_cost_ns;
  return static_cast<int>(w.attention.plan->split_rows.size()) * ceil_div(op.op.num_heads, merged_heads(op.op));
}

// What a unit of attention is about.
struct AttentionUnit {
  const Pass* pass;
  int kv_head, chunk;
};

// By pass and then by KV head. Or, where spans are prepared, for a thread's share of the passes by head and then by pass, so
// that it has the head's spans already; from the last pass on, because later rows see more keys and a phase ends best with
// small units.
AttentionUnit attention_unit(const Workspace& w, int unit, int num_kv_heads) {
  const AttentionPlan& plan = *w.attention.plan;
  const int chunk = unit % plan.head_chunks, at = unit / plan.head_chunks, num_passes = static_cast<int>(plan.passes.size());
  if (!plan.by_head) return {&plan.passes[at / num_kv_heads], at % num_kv_heads, chunk};
  int begin = 0, end = 0;
  for (int thread = 1; end * num_kv_heads <= at; thread++) {
    begin = end;
    end = static_cast<int>(static_cast<int64_t>(num_passes) * thread / w.num_threads);
  }
  const int place = at - begin * num_kv_heads, count = end - begin;
  return {&plan.passes[end - 1 - place % count], place / count, chunk};
}

int prepared_place(const Pass& pass, int span) { return std::min(span - pass.span_begin, kPreparedSpans - 1); }

// Bring the keys and values of a span in the order of the kernels, unless this thread has done so already: for another pass
// over the same blocks, be it of the same sequence or not. All that the step leaves there, for later passes see more of it.
void prepare(Workspace& w, const Op& op, const Pass& pass, int kv_head, int span, int thread, uint8_t* to, float* gather,
             SpanArgs* args) {
  const tm_kv& kv = *op.op.kv;
  const AttentionPlan& plan = *w.attention.plan;
  const int place = prepared_place(pass, span);
  const int first = std::max(0, plan.rows[pass.begin].first - span * kSpan);
  const int end = std::min(kSpan, w.step.context_lens[pass.sequence] - span * kSpan);
  PreparedSpan& held = w.attention.prepared[static_cast<size_t>(thread) * kPreparedSpans + place];
  const bool same = held.operation == w.attention.operation && held.kv_head == kv_head && held.span == span &&
                    held.first <= first && held.end >= end;
  if (same && same_blocks(w, kv, held.sequence, pass.sequence, span, end)) return;
  held = {w.attention.operation, kv_head, span, pass.sequence, first, end};
  fill_keys(w, op, pass.sequence, kv_head, span, end, gather, args);
  args->prepared = to + place * prepared_bytes(kv.head_dim);
  w.kernels->prepare_span(args, first, end);
}

void run_attention(Workspace& w, const Op& op, int unit, int thread) {
  const tm_op& o = op.op;
  const AttentionPlan& plan = *w.attention.plan;
  const int64_t num_units = static_cast<int64_t>(plan.passes.size()) * o.num_kv_heads * plan.head_chunks;
  const int64_t end_of_run = std::min(num_units, num_units * (thread + 1) / w.num_threads);  // of this thread's by plan
  const AttentionUnit at = attention_unit(w, unit, o.num_kv_heads);
  const Pass& pass = *at.pass;
  const int chunk = at.chunk, kv_head = at.kv_head;
  const QueryRow* rows = plan.rows.data() + pass.begin;
  const int sharing = o.num_heads / o.num_kv_heads;
  const int head0 = kv_head * sharing + chunk * plan.heads_per_unit;
  const int heads = std::min(plan.heads_per_unit, sharing - chunk * plan.heads_per_unit);
  const int num_queries = pass.num_rows * heads;
  const int64_t head_dim = o.head_dim;

  float* const q = w.thread_floats(thread);
  const int tile_queries = w.kernels->tile_queries;
  const bool is_codes = o.kv->dtype == kInt8, on_tiles = is_on_tiles(*w.kernels, *o.kv);
  uint8_t* const prepared = reinterpret_cast<uint8_t*>(q + pass_queries(*w.kernels) * kQueryStride);
  float* const state_acc = reinterpret_cast<float*>(prepared + (on_tiles ? (kPreparedSpans + 1) * prepared_bytes(o.head_dim) : 0));
  float* const span_acc = state_acc + pass_queries(*w.kernels) * head_dim;
  float* const gathered = span_acc + tile_queries * head_dim;
  float state_max[kMaxPassQueries], state_sum[kMaxPassQueries], span_max[kMaxTile], span_sum[kMaxTile];
  float q_scales[kMaxPassQueries];
  int32_t q_starts[kMaxPassQueries * kQueryStarts];
  const float* const query_factors = KVLayout(*o.kv).query_factors(o.layer, kv_head);
  int8_t* const planes = reinterpret_cast<int8_t*>(q);
  uint16_t* const q_bf16 = reinterpret_cast<uint16_t*>(q);
  const int64_t plane_bytes = 8 * ceil_div(head_dim, 4);  // of one query
  const int64_t q_stride = rounded_stride(head_dim);      // of one as bf16
  for (int n = 0, row = 0, head = 0; n < num_queries; n++) {
    const int tile0 = n / tile_queries * tile_queries, count = std::min(tile_queries, num_queries - tile0);
    const float* from = w.rows_of(o.in0, rows[row].row) + (head0 + head) * head_dim;
    if (++head == heads) {
      head = 0;
      row++;
    }
    if (is_codes) {
      float rotated[kMaxHeadDim];
      w.kernels->rotate(from, query_factors, o.head_dim, rotated);
      w.kernels->split_query(rotated, o.head_dim, 8 * count, planes + tile0 * plane_bytes + 8 * (n - tile0), q_scales + n,
                            q_starts + n * kQueryStarts);
    } else if (on_tiles) {
      w.kernels->round_row(from, o.head_dim, q_bf16 + n * q_stride);
    } else if (o.kv->dtype == kBF16) {
      w.kernels->factor_words(from, o.head_dim, q + n * kQueryStride);
    } else {
      std::copy(from, from + head_dim, q + n * kQueryStride);
    }
  }
  SpanArgs args;
  args.dtype = o.kv->dtype;
  args.head_dim = o.head_dim;
  args.scale = is_codes ? o.value / rotated_block(o.head_dim) : o.value;
  args.cap = o.cap;
  args.is_prepared = on_tiles && num_queries > tile_queries;
  const int num_tiles = ceil_div(num_queries, tile_queries);
  int num_next = 0;  // that the last tile fetches
  // Spans that are prepared at once are gone through tile by tile, so that a tile's state stays near; others one by one.
  for (int begin = pass.span_begin, end; begin < pass.span_end; begin = end) {
    end = args.is_prepared && begin == pass.span_begin ? std::min(pass.span_end, begin + kPreparedSpans - 1) : begin + 1;
    if (args.is_prepared) {
      for (int span = begin; span < end; span++) prepare(w, op, pass, kv_head, span, thread, prepared, gathered, &args);
    } else {
      const int num_keys = std::min(kSpan, rows[pass.num_rows - 1].limit - begin * kSpan);
      fill_keys(w, op, pass.sequence, kv_head, begin, num_keys, gathered, &args);
      const bool last = end == pass.span_end;
      num_next = 0;
      if (!last || unit + 1 < end_of_run) {
        const AttentionUnit next = last ? attention_unit(w, unit + 1, o.num_kv_heads) : at;
        point_ahead(w, op, *next.pass, next.kv_head, last ? next.pass->span_begin : end, &args);
        num_next = args.num_next;
      }
    }
    for (int tile = 0; tile < num_tiles * (end - begin); tile++) {
      const int span = begin + tile % (end - begin), tile0 = tile / (end - begin) * tile_queries;
      const int count = std::min(tile_queries, num_queries - tile0);
      const SpanState state = {state_max + tile0, state_sum + tile0, state_acc + tile0 * head_dim};
      const bool into_state = !pass.partial && span == pass.span_begin;
      const SpanState to = into_state ? state : SpanState{span_max, span_sum, span_acc};
      args.num_queries = count;
      args.num_next = tile0 + count == num_queries ? num_next : 0;
      args.q = q + tile0 * kQueryStride;
      args.q_bf16 = q_bf16 + tile0 * q_stride;
      args.codes = {planes + tile0 * plane_bytes, q_scales + tile0, q_starts + tile0 * kQueryStarts};
      args.prepared = prepared + (args.is_prepared ? prepared_place(pass, span) : kPreparedSpans) * prepared_bytes(o.head_dim);
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
      w.kernels->attend_span(&args);
      if (into_state) continue;
      // Mostly all queries fold; else those of one row are treated alike.
      const bool all_fold = !pass.partial && rows[(tile0 + count - 1) / heads].first / kSpan < span &&
                            *std::min_element(args.num_keys, args.num_keys + count) > 0;
      if (all_fold) {
        w.kernels->merge_span(state.max, state.sum, state.acc, to.max, to.sum, to.acc, count, o.head_dim);
        continue;
      }
      for (int n = 0, end; n < count; n = end) {
        const QueryRow& row = rows[(tile0 + n) / heads];
        end = std::min(count, n + heads - (tile0 + n) % heads);
        if (args.num_keys[n] == 0) continue;
        SpanState into = {state.max + n, state.sum + n, state.acc + n * head_dim};
        if (pass.partial) into = partial_state(w, plan, row, span, head0 + (tile0 + n) % heads);
        if (!pass.partial && row.first / kSpan < span) {
          w.kernels->merge_span(into.max, into.sum, into.acc, to.max + n, to.sum + n, to.acc + n * head_dim, end - n, o.head_dim);
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
    write_attention(w, o, rows[r].row, head0, heads, {state_max + r * heads, state_sum + r * heads, state_acc + r * heads * head_dim});
}

// Fold the partial results of one row, for some query heads.
void run_merge(Workspace& w, const Op& op, int unit, int) {
  const tm_op& o = op.op;
  const AttentionPlan& plan = *w.attention.plan;
  const int per_unit = merged_heads(o), num_chunks = ceil_div(o.num_heads, per_unit);
  const QueryRow& row = plan.split_rows[unit / num_chunks];
  const int head0 = unit % num_chunks * per_unit, heads = std::min(per_unit, o.num_heads - head0);
  const int first = row.first / kSpan;
  const SpanState state = partial_state(w, plan, row, first, head0);
  for (int span = first + 1; span < ceil_div(row.limit, kSpan); span++) {
    const SpanState part = partial_state(w, plan, row, span, head0);
    w.kernels->merge_span(state.max, state.sum, state.acc, part.max, part.sum, part.acc, heads, o.head_dim);
  }
  write_attention(w, o, row.row, head0, heads, state);
}

}  // namespace

const OpKind kMergeSpans = {"attention_merge", nullptr, plan_merge, run_merge};

// attention: in0 qkv; kv, layer, value = scale, window (below 0: of chunks of so many positions), cap, whole; vector: sinks of the heads, null for none; out f32 or quantised.
extern const OpKind kAttentionOps[] = {
    {"attention", check_attention, plan_attention, run_attention, nullptr, attention_floats, nullptr, nullptr, &kMergeSpans},
    {},
};

}  // namespace mill
