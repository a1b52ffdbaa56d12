// Operations of layers that keep a state, and products that come with them. A state goes on from the one before the first row
// of its sequence, and stays where a block ends that has a place in the table, at the last row, and behind each row that has a
// block for it of its own.
#include <algorithm>
#include <cstring>

#include "workspace.h"

namespace mill {

namespace {

constexpr int kMostSize = 1 << 16, kMostTaps = 16;
constexpr int kUnitChannels = 512, kUnitColumns = 32;

int64_t inputs_of(const tm_state& state) { return static_cast<int64_t>(state.taps - 1) * state.conv_width; }
int64_t head_values(const tm_state& state) { return static_cast<int64_t>(state.key_dim) * state.value_dim; }
int64_t values_of(const tm_state& state) { return inputs_of(state) + state.num_heads * head_values(state); }
int64_t keys_width(const tm_state& state) { return static_cast<int64_t>(state.num_key_heads) * state.key_dim; }
int64_t values_width(const tm_state& state) { return static_cast<int64_t>(state.num_heads) * state.value_dim; }
// Steps of a row: of each head, of each channel of its keys, or of each of its values, which have no other factor.
int64_t num_steps(const tm_state& state) {
  return static_cast<int64_t>(state.num_heads) * (state.decay == kByKey ? state.key_dim : state.decay == kByValue ? state.value_dim : 1);
}
int64_t gates_width(const tm_state& state) { return num_steps(state) + (state.decay == kByValue ? 0 : state.num_heads); }

std::string check_state(const tm_op& o) {
  if (o.state == nullptr || o.rows != TM_ROWS_TOKENS) return unless(false);
  const tm_state& state = *o.state;
  for (const int size : {state.conv_width, state.num_heads, state.num_key_heads, state.key_dim, state.value_dim})
    if (size < 0 || size > kMostSize) return say("bad size of states", size, kMostSize);
  if (state.taps < 1 || state.taps > kMostTaps) return say("bad number of taps", state.taps, kMostTaps);
  if (state.decay < TM_DECAY_BY_HEAD || state.decay > TM_DECAY_BY_VALUE) return say("unknown decay", state.decay, TM_DECAY_BY_VALUE);
  if (state.num_heads == 0) return "";
  const bool fits = state.num_key_heads > 0 && state.num_heads % state.num_key_heads == 0 && state.key_dim > 0 && state.value_dim > 0;
  return fits && state.key_dim % 4 == 0 && state.value_dim % kLanes == 0 ? "" : "bad heads of states";
}

std::string check_pool(const tm_op& o) {
  const std::string wrong = check_state(o);
  if (!wrong.empty()) return wrong;
  if (o.kv == nullptr || !is_of_states(*o.kv)) return "needs a pool of states";
  const tm_kv& kv = *o.kv;
  if (o.layer < 0 || o.layer >= kv.num_layers) return say("unknown layer", o.layer, kv.num_layers);
  if (kv.table < 0) return say("unknown block table", kv.table, 0);
  if (kv.block_size < 1 || kv.dtype != kF32) return "bad pool of states";
  const int64_t need = 4 * kv.num_layers * values_of(*o.state);
  return kv.bytes_per_block == need ? "" : say("bytes of a block of states", kv.bytes_per_block, need);
}

float* values_at(const tm_op& o, int32_t block, int64_t first) {
  return reinterpret_cast<float*>(o.kv->pool + block * o.kv->bytes_per_block) + o.layer * values_of(*o.state) + first;
}

// The rows of a sequence in the step, from one state that stays to the next.
struct Walk {
  int row, num_rows;         // before the next that stays
  int64_t position, end;
  int block_size;
  const int32_t *table, *further;
  int32_t blocks[2] = {-1, -1};  // where it stays: by the table, and by the row itself; -1: it does not

  Walk(const Workspace& w, const tm_op& o, int sequence)
      : row(w.step.row_starts[sequence]), num_rows(0), end(w.step.context_lens[sequence]), block_size(o.kv->block_size),
        table(w.table_of(*o.kv, sequence)), further(w.step.state_blocks) {
    position = end - (w.step.row_starts[sequence + 1] - row);
  }

  // The block with the state before the first row; -1 for none.
  int32_t source() const { return position == 0 ? -1 : table[(position - 1) / block_size]; }

  // On to the next row behind which a state stays; false where all has been done.
  bool next() {
    row += num_rows;
    num_rows = 0;
    blocks[0] = blocks[1] = -1;
    while (position < end && blocks[0] < 0 && blocks[1] < 0) {
      const int64_t border = std::min(end, (position / block_size + 1) * block_size);
      const int32_t in_table = table[position / block_size];
      if (further == nullptr) {
        num_rows += static_cast<int>(border - position);
        position = border;
      }
      while (position < border && blocks[1] < 0) {
        blocks[1] = further[row + num_rows++];
        position++;
      }
      if (position == border) blocks[0] = in_table;
    }
    return blocks[0] >= 0 || blocks[1] >= 0;
  }
};

// ---- causal_conv: in0 inputs; kv, layer, state; vector = weights [taps][conv_width], vector2 = bias or null, whole = silu of it

std::string check_conv(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_pool(o);
  if (!wrong.empty()) return wrong;
  const int64_t width = o.state->conv_width;
  return unless(o.width == width && w.fits(o.in0, o.rows, width) && w.fits(o.out, o.rows, width) && o.in0 != o.out &&
                o.vector_rows == o.state->taps && (o.vector2 == nullptr || o.vector2_rows == width));
}

int num_parts(int64_t width, int part) { return ceil_div(width, part); }

int plan_conv(Workspace& w, const Op& op, double* cost_ns) {
  *cost_ns = 0.3 * op.op.state->taps * w.step.num_tokens * op.op.width;
  return w.step.num_seqs * num_parts(op.op.width, kUnitChannels);
}

void run_conv(Workspace& w, const Op& op, int unit, int) {
  const tm_op& o = op.op;
  const int num_before = o.state->taps - 1, parts = num_parts(o.width, kUnitChannels);
  const int first = unit % parts * kUnitChannels, count = std::min(kUnitChannels, o.width - first);
  Walk walk(w, o, unit / parts);
  float before[kMostTaps][kUnitChannels] = {};
  const int32_t source = walk.source();
  const int begin = walk.row;
  // The input `back` positions before a row: of the step, or kept.
  const auto input = [&](int row, int back) -> const float* {
    return row - back >= begin ? w.rows_of(o.in0, row - back) + first : before[num_before + row - back - begin];
  };
  if (walk.position == walk.end) return;
  for (int j = 0; j < num_before && source >= 0; j++)
    std::memcpy(before[j], values_at(o, source, static_cast<int64_t>(j) * o.width + first), count * sizeof(float));
  while (walk.next()) {
    for (int row = walk.row; row < walk.row + walk.num_rows; row++) {
      const float* taps[kMostTaps];
      for (int j = 0; j <= num_before; j++) taps[j] = input(row, num_before - j);
      w.kernels->convolve(taps, o.vector + first, o.width, o.vector2 == nullptr ? nullptr : o.vector2 + first, num_before + 1,
                          o.whole != 0, count, w.rows_of(o.out, row) + first);
    }
    const int last = walk.row + walk.num_rows - 1;
    for (const int32_t block : walk.blocks)
      for (int j = 0; j < num_before && block >= 0; j++)
        std::memcpy(values_at(o, block, static_cast<int64_t>(j) * o.width + first), input(last, num_before - 1 - j), count * sizeof(float));
  }
}

// ---- scan_gates: in0 what steps are made of, in1 [num_heads] the same of factors, or -1 where these are the steps of heads or
// there are none; state; out decays and then factors, or by value steps

std::string check_gates(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_state(o);
  if (!wrong.empty()) return wrong;
  const tm_state& state = *o.state;
  const bool by_value = state.decay == kByValue, has_factors = o.in1 >= 0 && w.fits(o.in1, o.rows, state.num_heads);
  return unless(state.num_heads > 0 && (state.rates != nullptr) != by_value && state.dt_bias != nullptr &&
                w.fits(o.in0, o.rows, num_steps(state)) && (o.in1 < 0 ? state.decay != kByKey : has_factors && !by_value) &&
                o.width == gates_width(state) && w.fits(o.out, o.rows, o.width));
}

void gates_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  const tm_state& state = *o.state;
  const int num = static_cast<int>(num_steps(state));
  float* out = w.rows_of(o.out, row);
  float* decays = state.decay == kByValue ? nullptr : out;
  float* steps = o.in1 >= 0 ? nullptr : decays == nullptr ? out : out + num;
  w.kernels->scan_gates(w.rows_of(o.in0, row), state.rates, state.dt_bias, state.low, state.high, num, decays, steps);
  if (o.in1 >= 0) w.kernels->sigmoid(w.rows_of(o.in1, row), state.num_heads, out + num);
}

// ---- state_scan: in0 queries, then keys [num_key_heads][key_dim] each; in1 values [num_heads][value_dim]; in2 of scan_gates;
// kv, layer, state; out as in1

std::string check_scan(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_pool(o);
  if (!wrong.empty()) return wrong;
  const int64_t width = values_width(*o.state);
  return unless(o.state->num_heads > 0 && o.width == width && w.fits(o.in0, o.rows, 2 * keys_width(*o.state)) && w.fits(o.in1, o.rows, width) &&
                (o.state->decay != kByValue || o.state->rates != nullptr) && w.fits(o.in2, o.rows, gates_width(*o.state)) &&
                w.fits(o.out, o.rows, width));
}

int units_per_head(const tm_state& state) { return ceil_div(state.value_dim, kUnitColumns); }

int plan_scan(Workspace& w, const Op& op, double* cost_ns) {
  const tm_state& state = *op.op.state;
  *cost_ns = (state.decay == kByValue ? 0.2 : 0.05) * state.num_heads * head_values(state) * (w.step.num_tokens + 2.0 * w.step.num_seqs);
  return w.step.num_seqs * state.num_heads * units_per_head(state);
}

// A unit's columns of a head, which lie together while it goes over its rows.
void run_scan(Workspace& w, const Op& op, int unit, int thread) {
  const tm_op& o = op.op;
  const tm_state& state = *o.state;
  const int parts = units_per_head(state), head = unit / parts % state.num_heads;
  const int first = unit % parts * kUnitColumns, count = std::min(kUnitColumns, state.value_dim - first);
  const int64_t at = inputs_of(state) + head * head_values(state) + first;
  Walk walk(w, o, unit / parts / state.num_heads);
  if (walk.position == walk.end) return;
  float* columns = w.thread_floats(thread);
  const int32_t source = walk.source();
  for (int i = 0; i < state.key_dim; i++) {
    float* to = columns + static_cast<int64_t>(i) * count;
    if (source < 0) std::fill(to, to + count, 0.0f);
    else std::memcpy(to, values_at(o, source, at + static_cast<int64_t>(i) * state.value_dim), count * sizeof(float));
  }
  const int64_t key_at = static_cast<int64_t>(head / (state.num_heads / state.num_key_heads)) * state.key_dim;
  const int64_t value_at = static_cast<int64_t>(head) * state.value_dim + first;
  ScanArgs args = {};
  args.key_dim = state.key_dim;
  args.num_columns = count;
  args.is_delta = state.is_delta != 0;
  args.ld_keys = 2 * keys_width(state);
  args.ld_values = args.ld_out = o.width;
  args.ld_gates = gates_width(state);
  const bool by_value = state.decay == kByValue;
  const int64_t of_head = by_value ? value_at : head;
  args.decay = state.decay;
  args.rates = by_value ? state.rates + value_at : nullptr;
  args.skip = state.skip == nullptr ? nullptr : state.skip + of_head;
  args.state = columns;
  args.state_stride = count;
  while (walk.next()) {
    args.num_tokens = walk.num_rows;
    args.q = w.rows_of(o.in0, walk.row) + key_at;
    args.k = args.q + keys_width(state);
    args.v = w.rows_of(o.in1, walk.row) + value_at;
    const float* gates = w.rows_of(o.in2, walk.row);
    args.decays = gates + (state.decay == kByKey ? static_cast<int64_t>(head) * state.key_dim : head);
    args.factors = gates + (by_value ? 0 : num_steps(state)) + of_head;
    args.out = w.rows_of(o.out, walk.row) + value_at;
    w.kernels->scan(&args);
    for (const int32_t block : walk.blocks)
      for (int i = 0; i < state.key_dim && block >= 0; i++)
        std::memcpy(values_at(o, block, at + static_cast<int64_t>(i) * state.value_dim), columns + static_cast<int64_t>(i) * count, count * sizeof(float));
  }
}

int64_t scan_floats(const Workspace&, const Op& op) { return static_cast<int64_t>(op.op.state->key_dim) * kUnitColumns; }

// ---- multiply: in0, in1

std::string check_multiply(const Workspace& w, const tm_op& o) {
  return unless(w.fits(o.in0, o.rows, o.width) && w.fits(o.in1, o.rows, o.width) && w.fits(o.out, o.rows, o.width));
}

void multiply_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  w.kernels->multiply(w.rows_of(o.in0, row), w.rows_of(o.in1, row), o.width, w.rows_of(o.out, row));
}

// ---- norm_groups: in0; vector = weights of all columns, head_dim = columns of a group, value = eps

std::string check_norm_groups(const Workspace& w, const tm_op& o) {
  return unless(o.head_dim > 0 && o.width % o.head_dim == 0 && o.vector_rows == o.width && w.fits(o.in0, o.rows, o.width) &&
                w.fits(o.out, o.rows, o.width));
}

void norm_groups_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  const float* from = w.rows_of(o.in0, row);
  float* to = w.rows_of(o.out, row);
  for (int i = 0; i < o.width; i += o.head_dim) w.kernels->rms_norm_row(from + i, o.vector + i, o.value, o.head_dim, to + i);
}

}  // namespace

std::string check_states(const int32_t* table, int64_t begin, int64_t end, const int32_t* further, const tm_kv& kv) {
  if (begin == end) return "";
  for (int64_t i = 0; i < end - begin && further != nullptr; i++)
    if (further[i] >= kv.num_blocks) return say("block id out of range", further[i], kv.num_blocks);
  const auto is_there = [&](int64_t position) { return table[position / kv.block_size] >= 0; };
  for (int64_t b = begin / kv.block_size; b <= (end - 1) / kv.block_size; b++)
    if (table[b] >= kv.num_blocks) return say("block id out of range", table[b], kv.num_blocks);
  if (!is_there(end - 1)) return "no state stays behind the last row";
  if (begin == 0) return "";
  if (!is_there(begin - 1) || table[(begin - 1) / kv.block_size] >= kv.num_blocks) return "there is no state before the first row";
  return "";
}

extern const OpKind kStateOps[] = {
    {"causal_conv", check_conv, plan_conv, run_conv},
    {"scan_gates", check_gates, plan_rows, run_rows<gates_row>},
    {"state_scan", check_scan, plan_scan, run_scan, nullptr, scan_floats},
    {"multiply", check_multiply, plan_rows, run_rows<multiply_row>},
    {"norm_groups", check_norm_groups, plan_rows, run_rows<norm_groups_row>},
    {},
};

}  // namespace mill
