// Operations on rows of heads (H of queries, G of keys, G of values): norms of heads, rotation, and storing K and V.
#include <algorithm>
#include <cstring>
#include <limits>

#include "kv_layout.h"
#include "workspace.h"

namespace mill {

namespace {

int64_t qkv_width(const tm_op& o) { return static_cast<int64_t>(o.num_heads + 2 * o.num_kv_heads) * o.head_dim; }

// qkv in, qkv out.
std::string check_qkv(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_heads(w, o);
  return !wrong.empty() ? wrong : unless(w.fits(o.out, o.rows, qkv_width(o)));
}

// ---- norm_heads: in0 qkv; vector = q weight, vector2 = k weight, value = eps; out qkv

std::string check_norm_heads(const Workspace& w, const tm_op& o) {
  const bool by_head = o.vector_rows == o.head_dim && o.vector2_rows == o.head_dim;
  const bool together = o.vector_rows == static_cast<int64_t>(o.num_heads) * o.head_dim &&
                        o.vector2_rows == static_cast<int64_t>(o.num_kv_heads) * o.head_dim;
  return by_head || together ? check_qkv(w, o) : unless(false);
}

void norm_heads_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  const float* from = w.rows_of(o.in0, row);
  float* to = w.rows_of(o.out, row);
  const int q_end = o.num_heads * o.head_dim, k_end = q_end + o.num_kv_heads * o.head_dim;
  for (int at = 0; at < q_end; at += static_cast<int>(o.vector_rows))
    w.kernels->rms_norm_row(from + at, o.vector, o.value, static_cast<int>(o.vector_rows), to + at);
  for (int at = q_end; at < k_end; at += static_cast<int>(o.vector2_rows))
    w.kernels->rms_norm_row(from + at, o.vector2, o.value, static_cast<int>(o.vector2_rows), to + at);
  if (to != from) std::memcpy(to + k_end, from + k_end, static_cast<size_t>(o.num_kv_heads) * o.head_dim * 4);
}

// ---- write_kv: in0 qkv; kv, layer

// Rows of a head.
struct NoNumbers {
  float nans[kMaxHeadDim], zeros[kMaxHeadDim] = {};
  NoNumbers() { std::fill(nans, nans + kMaxHeadDim, std::numeric_limits<float>::quiet_NaN()); }
};

// Values in a pool are finite, always: a weight of 0 then hides the values of a key, which may be left from another sequence.
// Where K or V of a token are not finite, K is stored as NaN, so that all queries that see the key become NaN, and V as 0.
void store_kv(Workspace& w, const tm_op& o, const float* qkv, int row) {
  static const NoNumbers no_numbers;
  const Kernels& kernels = *w.kernels;
  const tm_kv& kv = *o.kv;
  const int sequence = w.row_sequence[row];
  const int position = w.step.context_lens[sequence] - (w.step.row_starts[sequence + 1] - row);
  const int32_t* table = w.table_of(kv, sequence);
  const KVLayout layout(kv);
  uint8_t* block = layout.block(o.layer, table[position / kv.block_size]);
  const int slot = position % kv.block_size;
  const int64_t value_bytes = kv.dtype == kF32 ? 4 : 2;
  const float* k = qkv + static_cast<int64_t>(o.num_heads) * o.head_dim;
  const float* v = k + static_cast<int64_t>(o.num_kv_heads) * o.head_dim;
  const float limit = layout.limit();
  for (int head = 0; head < kv.num_kv_heads; head++, k += o.head_dim, v += o.head_dim) {
    uint8_t *keys = layout.keys(block, head), *values = layout.values(block, head);
    const float *own_k = k, *own_v = v;
    float rotated_k[kMaxHeadDim], rotated_v[kMaxHeadDim];
    if (layout.is_codes()) {
      kernels.rotate(k, layout.key_factors(o.layer, head), o.head_dim, rotated_k);
      kernels.rotate(v, nullptr, o.head_dim, rotated_v);
      own_k = rotated_k;
      own_v = rotated_v;
    }
    if (!kernels.is_within(own_k, o.head_dim, limit) || !kernels.is_within(own_v, o.head_dim, limit)) {
      own_k = no_numbers.nans;
      own_v = no_numbers.zeros;
    }
    if (layout.is_codes()) {
      uint8_t* v_slot = values + static_cast<int64_t>(slot / 4) * 4 * o.head_dim + slot % 4;
      kernels.store_codes(own_k, o.head_dim, 128, 4 * kv.block_size, 1, keys + 4 * slot, layout.k_scales(block, head) + slot);
      kernels.store_codes(own_v, o.head_dim, 0, 16, 4, v_slot, layout.v_scales(block, head) + slot);
    } else {
      kernels.store_k(kv.dtype, own_k, o.head_dim, kv.block_size, keys + slot * value_bytes);
      kernels.store_v(kv.dtype, own_v, o.head_dim, values + static_cast<int64_t>(slot) * o.head_dim * value_bytes);
    }
  }
}

std::string check_write_kv(const Workspace& w, const tm_op& o) { return o.kv != nullptr ? check_heads(w, o) : unless(false); }

void write_kv_row(Workspace& w, const Op& op, int row, int) { store_kv(w, op.op, w.rows_of(op.op.in0, row), row); }

// ---- rope: in0 qkv; vector = table of num_turned columns; out qkv; with kv set also stores K and V

std::string check_rope(const Workspace& w, const tm_op& o) {
  const bool turns = o.vector_rows > 0 && o.num_turned >= 2 && o.num_turned % 2 == 0 && o.num_turned <= o.head_dim;
  return turns ? check_qkv(w, o) : unless(false);
}

std::string check_positions(const Workspace&, const tm_op& o, const tm_step& step) {
  for (int i = 0; i < step.num_tokens; i++)
    if (step.positions[i] < 0 || step.positions[i] >= o.vector_rows)
      return say("position out of range", step.positions[i], o.vector_rows);
  return "";
}

void rope_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  const float* from = w.rows_of(o.in0, row);
  float* to = w.rows_of(o.out, row);
  const float* cos_sin = o.vector + static_cast<int64_t>(w.step.positions[row]) * o.num_turned;
  if (to != from) std::memcpy(to, from, static_cast<size_t>(w.buffers[o.in0].width) * 4);
  for (int head = 0; head < o.num_heads + o.num_kv_heads; head++) {
    const int64_t at = static_cast<int64_t>(head) * o.head_dim;
    w.kernels->rope_head(from + at, cos_sin, o.num_turned, to + at);
  }
  if (o.kv != nullptr) store_kv(w, o, to, row);
}

}  // namespace

std::string check_heads(const Workspace& w, const tm_op& o) {
  if (o.num_kv_heads < 1 || o.num_heads % o.num_kv_heads) return "heads must divide into KV heads";
  if (o.head_dim < 2 || o.head_dim % 2 || o.head_dim > kMaxHeadDim) return say("bad head size", o.head_dim, kMaxHeadDim);
  if (o.rows != TM_ROWS_TOKENS) return "needs token rows";
  if (o.kv != nullptr) {
    const tm_kv& kv = *o.kv;
    if (kv.num_kv_heads != o.num_kv_heads || kv.head_dim != o.head_dim) return "the KV pool has other heads";
    if (o.layer < 0 || o.layer >= kv.num_layers) return say("unknown layer", o.layer, kv.num_layers);
    if (kv.table < 0) return say("unknown block table", kv.table, 0);
    if (kv.block_size < 1 || kv.dtype < kF32 || kv.dtype > kInt8) return "bad KV pool";
    const int64_t need = kv.num_layers * KVLayout(kv).layer_bytes();
    if (kv.bytes_per_block != need) return say("bytes of a KV block", kv.bytes_per_block, need);
  }
  return unless(w.fits(o.in0, o.rows, qkv_width(o)));
}

extern const OpKind kHeadOps[] = {
    {"norm_heads", check_norm_heads, plan_rows, run_rows<norm_heads_row>},
    {"rope", check_rope, plan_rows, run_rows<rope_row>, check_positions},
    {"write_kv", check_write_kv, plan_rows, run_rows<write_kv_row>},
    {},
};

}  // namespace mill
