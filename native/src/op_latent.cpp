// Latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form: queries' channels that turn, latents made and stored,
// and attention over them. Queries go into the latent space by linear_heads (op_stacks.cpp).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kv_layout.h"
#include "workspace.h"

namespace mill {

namespace {

constexpr int kMostLatent = 1 << 14;

int key_dim(const tm_latent& latent) { return latent.latent_dim + latent.rope_dim; }
int query_dim(const tm_latent& latent) { return latent.nope_dim + latent.rope_dim; }

std::string check_latent(const Workspace&, const tm_op& o) {
  if (o.latent == nullptr || o.rows != TM_ROWS_TOKENS) return unless(false);
  const tm_latent& latent = *o.latent;
  for (const int size : {latent.num_heads, latent.nope_dim, latent.rope_dim, latent.latent_dim})
    if (size < 1 || size > kMostLatent) return say("bad size of latents", size, kMostLatent);
  return latent.rope_dim % 2 == 0 ? "" : say("an odd number of channels that turn", latent.rope_dim, 2);
}

std::string check_pool(const tm_op& o) {
  const tm_kv& kv = *o.kv;
  if (kv.num_kv_heads != 1 || kv.head_dim != key_dim(*o.latent) || kv.value_dim != o.latent->latent_dim) return "the KV pool has other latents";
  if (o.layer < 0 || o.layer >= kv.num_layers) return say("unknown layer", o.layer, kv.num_layers);
  if (kv.table < 0) return say("unknown block table", kv.table, 0);
  if (kv.block_size < 1 || kv.dtype < kF32 || kv.dtype > kInt8) return "bad KV pool";
  const int64_t need = kv.num_layers * LatentLayout(kv).layer_bytes();
  return kv.bytes_per_block == need ? "" : say("bytes of a KV block", kv.bytes_per_block, need);
}

// ---- latent_turn: in0 queries [heads][nope, rope]; vector = table of rope_dim columns; the heads' last channels of
// out [heads][latent, rope], whose others linear_heads makes

std::string check_turn(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_latent(w, o);
  if (!wrong.empty()) return wrong;
  const int64_t heads = o.latent->num_heads;
  return unless(o.num_turned == o.latent->rope_dim && o.vector_rows > 0 && w.fits(o.in0, o.rows, heads * query_dim(*o.latent)) &&
                w.fits(o.out, o.rows, heads * key_dim(*o.latent)));
}

std::string check_positions(const tm_step& step, int64_t num_positions) {
  for (int i = 0; i < step.num_tokens; i++)
    if (step.positions[i] < 0 || step.positions[i] >= num_positions)
      return say("position out of range", step.positions[i], num_positions);
  return "";
}

std::string check_turn_step(const Workspace&, const tm_op& o, const tm_step& step) { return check_positions(step, o.vector_rows); }

void turn_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  const tm_latent& latent = *o.latent;
  const float* cos_sin = o.vector + static_cast<int64_t>(w.step.positions[row]) * latent.rope_dim;
  const float* from = w.rows_of(o.in0, row) + latent.nope_dim;
  float* to = w.rows_of(o.out, row) + latent.latent_dim;
  for (int head = 0; head < latent.num_heads; head++, from += query_dim(latent), to += key_dim(latent))
    w.kernels->rope_head(from, cos_sin, latent.rope_dim, to);
}

// ---- latent_kv: in0 latents; vector = weight of the norm, vector2 = table of rope_dim columns, value = eps; out latents; with kv
// set also stores them. write_latent: in0 latents; kv, layer

std::string check_latents(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_latent(w, o);
  if (!wrong.empty()) return wrong;
  if (!w.fits(o.in0, o.rows, key_dim(*o.latent))) return unless(false);
  return o.kv == nullptr ? "" : check_pool(o);
}

std::string check_latent_kv(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_latents(w, o);
  if (!wrong.empty()) return wrong;
  return unless(o.vector_rows == o.latent->latent_dim && o.vector2_rows > 0 && w.fits(o.out, o.rows, key_dim(*o.latent)));
}

std::string check_write(const Workspace& w, const tm_op& o) { return o.kv != nullptr ? check_latents(w, o) : unless(false); }

std::string check_latent_kv_step(const Workspace&, const tm_op& o, const tm_step& step) { return check_positions(step, o.vector2_rows); }

// What is not finite as stored becomes 0, but in channels of the key alone NaN: who sees the token becomes NaN, nobody else.
// bf16 is stored as it is used: 0 below 2^-56.
void store_latent(Workspace& w, const tm_op& o, const float* from, int row, float* room) {
  const tm_kv& kv = *o.kv;
  const LatentLayout layout(kv);
  const int sequence = w.row_sequence[row], width = kv.head_dim;
  const int position = w.step.context_lens[sequence] - (w.step.row_starts[sequence + 1] - row);
  const int slot = position % kv.block_size;
  uint8_t* block = layout.block(o.layer, w.table_of(kv, sequence)[position / kv.block_size]);
  const bool is_codes = kv.dtype == kInt8, fits = w.kernels->is_within(from, width, KVLayout(kv).limit());
  for (int c = 0; c < width; c++) room[c] = kv.dtype == kBF16 && std::abs(from[c]) < 0x1p-56f ? 0.0f : from[c];
  if (!fits) {
    std::fill(room, room + width, 0.0f);
    if (!is_codes) std::fill(room + kv.value_dim, room + width, std::numeric_limits<float>::quiet_NaN());
  }
  if (!is_codes) return w.kernels->store_v(kv.dtype, room, width, layout.row(block, slot));
  float scale;
  w.kernels->store_codes(room, width, 0, 4, 1, layout.row(block, slot), &scale);
  if (!fits) scale = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(layout.scale(block, slot), &scale, 4);
}

void latent_kv_row(Workspace& w, const Op& op, int row, int thread) {
  const tm_op& o = op.op;
  const int size = o.latent->latent_dim, turned = o.latent->rope_dim;
  const float* from = w.rows_of(o.in0, row);
  float* to = w.rows_of(o.out, row);
  w.kernels->rms_norm_row(from, o.vector, o.value, size, to);
  w.kernels->rope_head(from + size, o.vector2 + static_cast<int64_t>(w.step.positions[row]) * turned, turned, to + size);
  if (o.kv != nullptr) store_latent(w, o, to, row, w.thread_floats(thread));
}

void write_latent_row(Workspace& w, const Op& op, int row, int thread) {
  store_latent(w, op.op, w.rows_of(op.op.in0, row), row, w.thread_floats(thread));
}

int64_t latent_floats(const Workspace&, const Op& op) { return key_dim(*op.op.latent); }

// ---- latent_attention: in0 queries [heads][latent, rope]; kv, layer, value = scale; head_dim = channels of values; out f32 or
// quantised [heads][latent]

std::string check_attention(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_latent(w, o);
  if (!wrong.empty() || o.kv == nullptr) return wrong.empty() ? unless(false) : wrong;
  const tm_latent& latent = *o.latent;
  const int64_t mixed = static_cast<int64_t>(latent.num_heads) * latent.latent_dim;
  const bool same = o.num_heads == latent.num_heads && o.num_kv_heads == 1 && o.head_dim == latent.latent_dim && o.window == 0 && !o.whole &&
                    o.vector == nullptr;
  const bool fits = w.fits(o.in0, o.rows, static_cast<int64_t>(latent.num_heads) * key_dim(latent)) &&
                    (w.fits(o.out, o.rows, mixed) || (latent.latent_dim % kGroup == 0 && w.fits(o.out, o.rows, mixed, TM_FORM_QUANTISED)));
  return same && fits ? check_pool(o) : unless(false);
}

// What a thread has for a pass: queries, scores, states, what a span gave, tiles, latents as bf16, one of zeros.
struct LatentRoom {
  float *words, *scores, *state, *span, *tiles, *scales;
  const uint16_t** rows;
  uint16_t *values, *zeros;
  int64_t num_floats;

  LatentRoom(float* base, const tm_kv& kv, int num_queries) {
    const int64_t width = latent_width(kv.head_dim);
    float* at = base;
    const auto take = [&](int64_t count) {
      float* taken = at;
      at += (count + 15) / 16 * 16;
      return taken;
    };
    words = take(num_queries * latent_stride(width));
    scores = take(num_queries * latent_stride(kSpan));
    state = take(static_cast<int64_t>(num_queries) * kv.value_dim);
    span = take(static_cast<int64_t>(num_queries) * kv.value_dim);
    tiles = take(latent_room(kv.head_dim));
    scales = take(kSpan);
    rows = reinterpret_cast<const uint16_t**>(take(kSpan * sizeof(void*) / 4));
    zeros = reinterpret_cast<uint16_t*>(take(width / 2));
    values = reinterpret_cast<uint16_t*>(take(is_used_in_place(kv) ? 0 : kSpan * width / 2));
    num_floats = at - base;
  }

  // Latents are read where they lie.
  static bool is_used_in_place(const tm_kv& kv) { return kv.dtype == kBF16 && kv.head_dim == latent_width(kv.head_dim); }
};

int64_t attention_floats(const Workspace&, const Op& op) { return LatentRoom(nullptr, *op.op.kv, kLatentQueries).num_floats; }

int plan_attention(Workspace& w, const Op& op, double* cost_ns) {
  const AttentionPlan* plan = w.attention.plans.plan_for(w, op.op);
  w.attention.plan = plan;
  *cost_ns = plan->cost_ns;
  return static_cast<int>(plan->passes.size()) * plan->head_chunks;
}

// Point at the latents of a span, and at zeros up to a multiple of 16.
void find_rows(const Workspace& w, const tm_op& o, int sequence, int span, const LatentRoom& room, LatentArgs* args) {
  const tm_kv& kv = *o.kv;
  const LatentLayout layout(kv);
  const int32_t* table = w.table_of(kv, sequence);
  const int64_t width = latent_width(kv.head_dim);
  for (int i = 0; i < args->num_rows; i++) {
    const int position = span * kSpan + i, slot = position % kv.block_size;
    uint8_t* block = layout.block(o.layer, table[position / kv.block_size]);
    room.rows[i] = reinterpret_cast<const uint16_t*>(layout.row(block, slot));
    if (kv.dtype == kInt8) std::memcpy(room.scales + i, layout.scale(block, slot), 4);
    if (LatentRoom::is_used_in_place(kv)) continue;
    w.kernels->latent_row(kv.dtype, room.rows[i], kv.head_dim, room.values + i * width);
    room.rows[i] = room.values + i * width;
  }
  std::memset(room.zeros, 0, 2 * width);
  for (int i = args->num_rows; i % kLanes != 0; i++) room.rows[i] = room.zeros, room.scales[i] = 0.0f;
}

void run_attention(Workspace& w, const Op& op, int unit, int thread) {
  const tm_op& o = op.op;
  const AttentionPlan& plan = *w.attention.plan;
  const Pass& pass = plan.passes[unit / plan.head_chunks];
  const QueryRow* rows = plan.rows.data() + pass.begin;
  const int head0 = unit % plan.head_chunks * plan.heads_per_unit, heads = std::min(plan.heads_per_unit, o.num_heads - head0);
  const int num_queries = pass.num_rows * heads;
  const int64_t size = o.head_dim, width = o.kv->head_dim, q_stride = latent_stride(latent_width(width));
  const LatentRoom room(w.thread_floats(thread), *o.kv, kLatentQueries);
  float state_max[kLatentQueries], state_sum[kLatentQueries], span_max[kLatentQueries], span_sum[kLatentQueries];
  int num_keys[kLatentQueries];
  for (int n = 0; n < num_queries; n++)
    w.kernels->factor_words(w.rows_of(o.in0, rows[n / heads].row) + (head0 + n % heads) * width, o.kv->head_dim, room.words + n * q_stride);
  LatentArgs args = {};
  args.key_dim = o.kv->head_dim;
  args.value_dim = o.head_dim;
  args.rows = room.rows;
  args.row_scales = o.kv->dtype == kInt8 ? room.scales : nullptr;
  args.num_keys = num_keys;
  args.scale = o.value;
  args.scores = room.scores;
  args.room = room.tiles;
  for (int span = pass.span_begin; span < pass.span_end; span++) {
    // Rows of a sequence see more and more keys: those that see any of this span are the last ones.
    int first = 0;
    while (rows[first].limit <= span * kSpan) first++;
    const int n0 = first * heads, count = num_queries - n0;
    const bool into_state = !pass.partial && span == 0;
    const SpanState state = {state_max + n0, state_sum + n0, room.state + n0 * size};
    const SpanState to = into_state ? state : SpanState{span_max, span_sum, room.span};
    for (int n = 0; n < count; n++) num_keys[n] = std::min(kSpan, rows[first + n / heads].limit - span * kSpan);
    args.num_queries = count;
    args.num_rows = *std::max_element(num_keys, num_keys + count);
    args.q = room.words + n0 * q_stride;
    args.max = to.max;
    args.sum = to.sum;
    args.acc = to.acc;
    find_rows(w, o, pass.sequence, span, room, &args);
    w.kernels->attend_latents(&args);
    if (into_state) continue;
    if (!pass.partial) {
      w.kernels->merge_span(state.max, state.sum, state.acc, to.max, to.sum, to.acc, count, o.head_dim);
      continue;
    }
    for (int r = first; r < pass.num_rows; r++) {
      const SpanState into = partial_state(w, plan, rows[r], span, head0);
      const int n = (r - first) * heads;
      std::copy(to.max + n, to.max + n + heads, into.max);
      std::copy(to.sum + n, to.sum + n + heads, into.sum);
      std::copy(to.acc + n * size, to.acc + (n + heads) * size, into.acc);
    }
  }
  if (pass.partial) return;
  for (int r = 0; r < pass.num_rows; r++)
    write_attention(w, o, rows[r].row, head0, heads, {state_max + r * heads, state_sum + r * heads, room.state + r * heads * size});
}

}  // namespace

extern const OpKind kLatentOps[] = {
    {"latent_turn", check_turn, plan_rows, run_rows<turn_row>, check_turn_step},
    {"latent_kv", check_latent_kv, plan_rows, run_rows<latent_kv_row>, check_latent_kv_step, latent_floats},
    {"write_latent", check_write, plan_rows, run_rows<write_latent_row>, nullptr, latent_floats},
    {"latent_attention", check_attention, plan_attention, run_attention, nullptr, attention_floats, nullptr, nullptr, &kMergeSpans},
    {},
};

}  // namespace mill
