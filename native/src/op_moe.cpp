// Mixtures of experts: how rows choose experts, and what these compute.
//
// moe_ffn is two phases. First units are blocks of one expert's rows by blocks of its inner values: gate and up, and the
// activation of both, as the second phase takes it. Then a unit is a block of output columns, for which it walks all experts in
// ascending order and adds each one's rows, weighed, to their sums; so no sum waits for another unit, and a row's experts
// are added in one order however rows are mixed. Only experts that some row chose are read.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "moe_store.h"
#include "pack.h"
#include "stack.h"
#include "workspace.h"

namespace mill {

namespace {

constexpr int kMostExperts = 1 << 16;
constexpr int kDownRows = 4 * kPanel;  // that are computed before they are added to their sums
constexpr int kAheadBytes = 2048;      // of the next matrix, fetched while few rows meet this one
constexpr int kFewRows = 8;

// ---- moe_route: in0 logits [E]; moe; vector: scales of the experts, null for none; out [2k]

std::string check_moe_route(const Workspace& w, const tm_op& o) {
  if (o.moe == nullptr) return "no routing";
  const tm_moe& m = *o.moe;
  if (m.num_experts < 1 || m.num_experts > kMostExperts) return say("experts", m.num_experts, kMostExperts);
  if (m.num_groups < 1 || m.num_experts % m.num_groups || m.top_groups < 1 || m.top_groups > m.num_groups) return "bad groups";
  if (m.group_score < 1 || m.group_score > 2) return say("experts that score for a group", m.group_score, 2);
  const int candidates = m.num_experts / m.num_groups * m.top_groups;
  if (m.top_k < 1 || m.top_k > candidates) return say("experts of a row", m.top_k, candidates);
  if (m.score < TM_SCORE_SOFTMAX || m.score > TM_SCORE_SPARSE_MIXER) return say("unknown score", m.score, TM_SCORE_SPARSE_MIXER);
  if (m.score == TM_SCORE_SPARSE_MIXER && (m.bias != nullptr || m.num_groups > 1 || m.normalise)) return "a sparse mixer has none of these";
  if (!(m.min_share >= 0 && m.min_share <= 1) || !std::isfinite(m.floor) || !std::isfinite(m.scale)) return "bad weights";
  for (int e = 0; m.bias != nullptr && e < m.num_experts; e++)
    if (!std::isfinite(m.bias[e])) return say("the bias of an expert is not finite", e, m.num_experts);
  if (o.vector != nullptr && o.vector_rows != m.num_experts) return say("scales of experts", static_cast<int>(o.vector_rows), m.num_experts);
  return unless(o.width == 2 * m.top_k && w.fits(o.in0, o.rows, m.num_experts) && w.fits(o.out, o.rows, o.width));
}

int64_t route_floats(const Workspace&, const Op& op) { return 5 * static_cast<int64_t>(op.op.moe->num_experts); }

// The `most` best of values that `allowed` lists (of all [0, n) where it is null), by descending value, ties to the lower
// number; `best` and `values_of` have room for so many.
template <class Allowed>
int choose(const float* values, int n, int most, const Allowed& allowed, int* best, float* values_of) {
  int count = 0;
  for (int i = 0; i < n; i++) {
    if (!allowed(i) || (count == most && !(values[i] > values_of[count - 1]))) continue;
    int at = count < most ? count++ : most - 1;
    for (; at > 0 && values[i] > values_of[at - 1]; at--) {
      best[at] = best[at - 1];
      values_of[at] = values_of[at - 1];
    }
    best[at] = i;
    values_of[at] = values[i];
  }
  return count;
}

float group_value(const tm_moe& m, const float* choice, int size) {
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < size; i++) {
    second = std::max(second, std::min(first, choice[i]));
    first = std::max(first, choice[i]);
  }
  return m.group_score == 1 || size == 1 ? first : first + second;
}

// The best experts one after the other, and `scores` of them: each one's softmax over those that none before it was and
// that are near it.
void mix_sparsely(const Workspace& w, const tm_moe& m, const float* logits, float* room, int* chosen, float* scores) {
  for (int place = 0; place < m.top_k; place++) {
    const auto is_free = [&](int e) { return std::find(chosen, chosen + place, e) == chosen + place; };
    int best = -1, count = 0, at = 0;
    for (int e = 0; e < m.num_experts; e++)
      if (is_free(e) && (best < 0 || logits[e] > logits[best])) best = e;
    for (int e = 0; e < m.num_experts; e++) {
      if (!is_free(e) || (logits[best] - logits[e]) / std::max(std::fabs(logits[e]), logits[best]) > m.margin) continue;
      if (e == best) at = count;
      room[count++] = logits[e];
    }
    w.kernels->softmax(room, count, room);
    chosen[place] = best;
    scores[best] = room[at];
  }
}

void moe_route_row(Workspace& w, const Op& op, int row, int thread) {
  const tm_moe& m = *op.op.moe;
  const int num_experts = m.num_experts, k = m.top_k;
  const float* logits = w.rows_of(op.op.in0, row);
  float *ids = w.rows_of(op.op.out, row), *weights = ids + k;
  const float highest = w.kernels->max_of(logits, num_experts);
  if (std::isnan(highest)) {  // not all are finite
    for (int i = 0; i < k; i++) ids[i] = static_cast<float>(i);
    return std::fill(weights, weights + k, std::nanf(""));
  }
  float* scores = w.thread_floats(thread);
  float *choice = scores + num_experts, *room = choice + num_experts;
  int* chosen = reinterpret_cast<int*>(room + 2 * num_experts);
  if (m.score == TM_SCORE_SOFTMAX) w.kernels->softmax(logits, num_experts, scores);
  if (m.score == TM_SCORE_SOFTMAX_CHOSEN) std::copy(logits, logits + num_experts, scores);
  if (m.score == TM_SCORE_SIGMOID) w.kernels->sigmoid(logits, num_experts, scores);
  if (m.bias == nullptr) choice = scores;
  else w.kernels->add(scores, m.bias, num_experts, choice);
  if (m.score == TM_SCORE_SPARSE_MIXER) {
    mix_sparsely(w, m, logits, room, chosen, scores);
  } else if (m.top_groups == m.num_groups) {
    choose(choice, num_experts, k, [](int) { return true; }, chosen, room);
  } else {
    const int size = num_experts / m.num_groups;
    float* values = room;  // of groups, and behind them room for the best
    for (int g = 0; g < m.num_groups; g++) values[g] = group_value(m, choice + g * size, size);
    uint8_t kept[kMostExperts / 8 + 1];
    std::memset(kept, 0, m.num_groups / 8 + 1);
    choose(values, m.num_groups, m.top_groups, [](int) { return true; }, chosen, values + m.num_groups);
    for (int i = 0; i < m.top_groups; i++) kept[chosen[i] / 8] |= 1 << chosen[i] % 8;
    const auto allowed = [&](int e) { return (kept[e / size / 8] >> e / size % 8 & 1) != 0; };
    choose(choice, num_experts, k, allowed, chosen, room);
  }
  std::sort(chosen, chosen + k);
  for (int i = 0; i < k; i++) weights[i] = scores[chosen[i]];
  if (m.score == TM_SCORE_SOFTMAX_CHOSEN) w.kernels->softmax(weights, k, weights);
  const float least = m.min_share * *std::max_element(weights, weights + k);
  int count = 0;
  float sum = 0;
  for (int i = 0; i < k; i++) {
    if (!(weights[i] >= least)) continue;
    ids[count] = static_cast<float>(chosen[i]);
    weights[count++] = weights[i];
    sum += weights[count - 1];
  }
  for (int i = 0; i < k; i++) {
    if (i >= count) ids[i] = -1, weights[i] = 0;
    else if (m.normalise) weights[i] = weights[i] / (sum + m.floor) * m.scale;
    else weights[i] *= m.scale;
    if (i < count && op.op.vector != nullptr) weights[i] *= op.op.vector[static_cast<int>(ids[i])];
  }
}

// ---- moe_ffn: in0 f32 (dense experts) or quantised, in1 routes [2k], in2 room for inner values: k * F of float32, where
// down is dense, else 2k * F quantised; stack, stack2; moe; activation; out f32

int inner_width(const tm_op& o) { return o.stack2->num_cols; }

// Whether a stack has gates above ups, or ups alone.
bool is_gated(const tm_op& o) { return o.activation != TM_RELU2; }

std::string check_moe_ffn(const Workspace& w, const tm_op& o) {
  for (const tm_stack* stack : {o.stack, o.stack2}) {
    const std::string wrong = check_stack(stack, true);
    if (!wrong.empty()) return wrong;
  }
  if (o.moe == nullptr) return "no experts";
  const tm_stack &up = *o.stack, &down = *o.stack2;
  const tm_moe& m = *o.moe;
  if (up.num_matrices != down.num_matrices || m.num_experts != up.num_matrices || m.num_experts > kMostExperts)
    return say("experts in one stack", up.num_matrices, down.num_matrices);
  if (m.top_k < 1 || m.top_k > m.num_experts) return say("experts of a row", m.top_k, m.num_experts);
  const int64_t both = static_cast<int64_t>(is_gated(o) ? 2 : 1) * down.num_cols;
  if (up.num_rows != both) return say("inner values", up.num_rows, both);
  if (o.activation == TM_SWIGLU ? !(m.limit > 0) || !std::isfinite(m.alpha) : is_gated(o) && !is_gating(o.activation)) return "bad activation";
  if (!is_gated(o) && m.gate_up_bias != nullptr) return "biases of experts that are not gated";
  const bool takes_codes = is_quantised(up.kind), inner_codes = is_quantised(down.kind);
  const int64_t inner = static_cast<int64_t>(inner_codes ? 2 : 1) * m.top_k * down.num_cols;
  const std::string apart = check_experts_store(o);
  if (!apart.empty()) return apart;
  return unless(o.in2 != o.in0 && o.in2 != o.in1 && o.in2 != o.out && o.out != o.in0 && o.width == down.num_rows &&
                w.fits(o.in0, o.rows, up.num_cols, takes_codes ? TM_FORM_QUANTISED : TM_FORM_F32) &&
                w.fits(o.in1, o.rows, 2 * static_cast<int64_t>(m.top_k)) &&
                w.fits(o.in2, o.rows, inner, inner_codes ? TM_FORM_QUANTISED : TM_FORM_F32) && w.fits(o.out, o.rows, o.width));
}

// Codes of inner values, slot by slot.
Quantised inner_codes(const Workspace& w, const tm_op& o) {
  Quantised codes = w.quantised(o.in2);
  codes.num_groups = inner_width(o) / kGroup;
  return codes;
}

float* inner_row(const Workspace& w, const tm_op& o, int64_t index) {
  return static_cast<float*>(w.buffers[o.in2].data) + index * inner_width(o);
}

// Whether inner values are made group by group, from codes to codes.
bool by_groups(const tm_op& o) { return is_quantised(o.stack->kind) && is_quantised(o.stack2->kind); }

// A thread's room: inputs that are gathered, and gate and up beside each other.
int64_t gather_floats(const tm_op& o) {
  const int64_t cols = o.stack->num_cols;
  if (!is_quantised(o.stack->kind)) return ExpertRows::kBlock * cols;
  return ExpertRows::kBlock * (cols / kGroup) * ((kGroup + sizeof(GroupFacts) + sizeof(int32_t)) / 4);
}

int64_t up_floats(const Workspace&, const Op& op) {
  const int64_t both = by_groups(op.op) ? 0 : (ExpertRows::kBlock * 2 + 1) * static_cast<int64_t>(inner_width(op.op));
  return gather_floats(op.op) + 64 + both;
}

// What experts in use cost one thread, roughly.
double experts_cost(const Workspace& w, const tm_stack& stack) {
  const double bytes = static_cast<double>(stack.stride);
  return bytes * w.experts.runs.size() / 20.0 + bytes * w.experts.rows.size() / 100.0;
}

int plan_up(Workspace& w, const Op& op, double* cost_ns) {
  const tm_op& o = op.op;
  const tm_moe& m = *o.moe;
  ExpertRows& experts = w.experts;
  if (!experts.is_again) {
    experts.find(w.rows_of(o.in1, 0), w.num_rows(o), m.top_k, m.num_experts);
    for (const ExpertRun& run : experts.runs)
      if (m.tally != nullptr) m.tally[run.expert] += run.num_rows;
    begin_waves(w, o);
    if (!experts.blocks.empty()) next_wave(w, op);
  }
  experts.is_again = false;
  if (experts.blocks.empty()) return 0;
  *cost_ns = experts_cost(w, *o.stack);
  const int groups = inner_width(o) % kGroup == 0 ? inner_width(o) / kGroup : 1;  // else an expert's are made together
  const int wanted = ceil_div(10 * w.num_threads, experts.num_blocks());
  experts.columns_per_unit = ceil_div(groups, std::min(groups, wanted));
  experts.num_column_blocks = ceil_div(groups, experts.columns_per_unit);
  return experts.num_blocks() * experts.num_column_blocks;
}

// Inputs of a block of an expert's rows as the kernels take them: rows as they are where one is alone, else gathered.
struct ExpertInputs {
  Quantised codes;
  const float* x;
  int row0;
};

ExpertInputs gather(Workspace& w, const tm_op& o, int index, int thread) {
  const ExpertBlock& block = w.experts.blocks[index];
  const ExpertRow* rows = w.experts.rows.data() + w.experts.runs[block.run].first + block.begin;
  const int count = block.end - block.begin, cols = o.stack->num_cols;
  const bool is_done = w.experts.gathered(thread) == index;
  w.experts.gathered(thread) = index;
  float* room = w.thread_floats(thread);
  if (!is_quantised(o.stack->kind)) {
    if (count == 1) return {{}, w.rows_of(o.in0, 0), rows[0].row};
    for (int i = 0; i < count && !is_done; i++)
      std::memcpy(room + static_cast<int64_t>(i) * cols, w.rows_of(o.in0, rows[i].row), static_cast<size_t>(cols) * 4);
    return {{}, room, 0};
  }
  const Quantised from = w.quantised(o.in0);
  if (count == 1) return {from, nullptr, rows[0].row};
  const int64_t places = static_cast<int64_t>(ExpertRows::kBlock) * (cols / kGroup);
  Quantised to;
  to.codes = reinterpret_cast<int8_t*>(room);
  to.facts = reinterpret_cast<GroupFacts*>(to.codes + places * kGroup);
  to.low_sums = from.low_sums == nullptr ? nullptr : reinterpret_cast<int32_t*>(to.facts + places);
  to.num_groups = cols / kGroup;
  for (int i = 0; i < count && !is_done; i++) w.kernels->copy_codes(&from, rows[i].row, &to, i);
  return {to, nullptr, 0};
}

void fetch_ahead(const uint8_t* data) {
  for (int at = 0; at < kAheadBytes; at += 64) __builtin_prefetch(data + at);
}

// Gate and up of groups of inner values, a panel of rows at a time, straight into codes.
void run_groups(Workspace& w, const tm_op& o, const ExpertInputs& in, LinearArgs args, const ExpertRun& run, int slot,
                int begin, int end) {
  const tm_moe& m = *o.moe;
  const int width = inner_width(o);
  const float* bias = m.gate_up_bias == nullptr ? nullptr : m.gate_up_bias + static_cast<int64_t>(run.expert) * 2 * width;
  const Quantised out = inner_codes(w, o);
  args.row0 = in.row0;
  each_gate_up(*w.kernels, args, is_gated(o) ? width : 0, begin, end, [&](GateUp* both) {
    const int columns = both->num_groups * kGroup;
    for (int r = 0; bias != nullptr && r < both->num_rows; r++) {
      w.kernels->add(both->gate[r], bias + both->group * kGroup, columns, both->gate[r]);
      w.kernels->add(both->up[r], bias + width + both->group * kGroup, columns, both->up[r]);
    }
    if (is_gating(o.activation)) return gate_into_codes(*w.kernels, o.activation, *both, out, slot);
    for (int r = 0; r < both->num_rows; r++) {
      if (is_gated(o)) w.kernels->swiglu(both->gate[r], both->up[r], columns, m.limit, m.alpha, both->gate[r]);
      else w.kernels->activate(o.activation, both->gate[r], columns, both->gate[r]);
      w.kernels->quantise_row(both->gate[r], &out, slot + both->row + r, both->group, both->num_groups);
    }
  });
}

// The same where either side is float32.
void run_columns(Workspace& w, const tm_op& o, LinearArgs args, const ExpertRun& run, int begin, int end, int first, int count,
                 float* room) {
  const tm_moe& m = *o.moe;
  const int width = inner_width(o), inner = end - begin;
  const bool is_whole = inner == width;
  float* one = room + static_cast<int64_t>(ExpertRows::kBlock) * 2 * width;
  args.ld_out = 2 * inner;
  args.out = room;
  args.tile0 = begin / kLanes;
  args.num_tiles = ceil_div(is_whole && is_gated(o) ? 2 * width : inner, kLanes);
  w.kernels->linear(&args);
  if (!is_whole && is_gated(o)) {
    args.tile0 += width / kLanes;
    args.out = room + inner;
    w.kernels->linear(&args);
  }
  const float* bias = m.gate_up_bias == nullptr ? nullptr : m.gate_up_bias + static_cast<int64_t>(run.expert) * 2 * width;
  const bool to_codes = is_quantised(o.stack2->kind);
  for (int r = 0; r < count; r++) {
    float *gate = room + static_cast<int64_t>(r) * 2 * inner, *up = gate + inner;
    if (bias != nullptr) {
      w.kernels->add(gate, bias + begin, inner, gate);
      w.kernels->add(up, bias + width + begin, inner, up);
    }
    float* to = to_codes ? one : inner_row(w, o, run.first + first + r) + begin;
    if (o.activation == TM_SWIGLU) w.kernels->swiglu(gate, up, inner, m.limit, m.alpha, to);
    else if (!is_gated(o)) w.kernels->activate(o.activation, gate, inner, to);
    else w.kernels->gated(o.activation, gate, up, inner, to);
    if (!to_codes) continue;
    const Quantised out = inner_codes(w, o);
    w.kernels->quantise_row(to, &out, run.slot + first + r, begin / kGroup, inner / kGroup);
  }
}

void run_up(Workspace& w, const Op& op, int unit, int thread) {
  const tm_op& o = op.op;
  const ExpertRows& experts = w.experts;
  const int index = experts.block_at(unit / experts.num_column_blocks);
  const ExpertBlock& block = experts.blocks[index];
  const ExpertRun& run = experts.runs[block.run];
  const int width = inner_width(o), groups = width % kGroup == 0 ? width / kGroup : 1;
  const int begin = unit % experts.num_column_blocks * experts.columns_per_unit;
  const int end = std::min(groups, begin + experts.columns_per_unit);
  const ExpertInputs in = gather(w, o, index, thread);
  const Part part = expert_matrix(w, o, false, run.expert);
  LinearArgs args = {};
  args.part = &part;
  args.tile_bytes = tile_bytes(part.kind, part.num_cols);
  args.xq = &in.codes;
  args.x = in.x;
  args.ld_x = part.num_cols;
  args.row0 = in.row0;
  args.num_rows = block.end - block.begin;
  if (by_groups(o)) return run_groups(w, o, in, args, run, run.slot + block.begin, begin, end);
  float* room = w.thread_floats(thread) + (gather_floats(o) + 15) / 16 * 16;
  const int per_group = width % kGroup == 0 ? kGroup : width;
  run_columns(w, o, args, run, begin * per_group, end * per_group, block.begin, block.end - block.begin, room);
}

// ---- the second phase of moe_ffn

int64_t down_floats(const Workspace&, const Op& op) { return kDownRows * static_cast<int64_t>((op.op.width + 15) / 16 * 16); }

int plan_down(Workspace& w, const Op& op, double* cost_ns) {
  ExpertRows& experts = w.experts;
  *cost_ns = experts_cost(w, *op.op.stack2) + static_cast<double>(w.num_rows(op.op)) * op.op.width * 0.1;
  const int tiles = ceil_div(op.op.width, kLanes);
  const bool few = static_cast<int>(experts.rows.size()) <= kFewRows * static_cast<int>(experts.runs.size());
  const int wanted = std::min(tiles, (few ? 8 : 4) * w.num_threads);
  experts.columns_per_unit = ceil_div(tiles, wanted);
  experts.num_column_blocks = ceil_div(tiles, experts.columns_per_unit);
  return experts.num_column_blocks;
}

void run_down(Workspace& w, const Op& op, int unit, int thread) {
  const tm_op& o = op.op;
  const tm_stack& stack = *o.stack2;
  const ExpertRows& experts = w.experts;
  LinearArgs args = {};
  args.tile_bytes = tile_bytes(stack.kind, stack.num_cols);
  args.tile0 = unit * experts.columns_per_unit;
  args.num_tiles = std::min(experts.columns_per_unit, ceil_div(o.width, kLanes) - args.tile0);
  const int column = args.tile0 * kLanes, width = std::min(o.width - column, args.num_tiles * kLanes);
  const Quantised codes = is_quantised(stack.kind) ? inner_codes(w, o) : Quantised{};
  args.xq = &codes;
  args.ld_x = stack.num_cols;
  args.out = w.thread_floats(thread);
  args.ld_out = width;
  for (int row = 0; row < w.num_rows(o) && experts.wave_begin == 0; row++)
    std::memset(w.rows_of(o.out, row) + column, 0, static_cast<size_t>(width) * 4);
  for (size_t r = experts.wave_begin; r < experts.wave_end; r++) {
    const ExpertRun& run = experts.runs[r];
    const Part part = expert_matrix(w, o, true, run.expert);
    args.part = &part;
    if (stack.store == nullptr && run.num_rows <= kFewRows && r + 1 < experts.runs.size())
      fetch_ahead(matrix_data(stack, experts.runs[r + 1].expert) + args.tile0 * args.tile_bytes);
    const float* bias = o.moe->down_bias == nullptr ? nullptr : o.moe->down_bias + static_cast<int64_t>(run.expert) * o.width + column;
    for (int begin = 0; begin < run.num_rows; begin += kDownRows) {
      args.num_rows = std::min(kDownRows, run.num_rows - begin);
      args.row0 = is_quantised(stack.kind) ? run.slot + begin : 0;
      if (!is_quantised(stack.kind)) args.x = inner_row(w, o, run.first + begin);
      w.kernels->linear(&args);
      for (int i = 0; i < args.num_rows; i++) {
        const ExpertRow& to = experts.rows[run.first + begin + i];
        float* y = args.out + static_cast<int64_t>(i) * width;
        if (bias != nullptr) w.kernels->add(y, bias, width, y);
        w.kernels->add_scaled(y, to.weight, width, w.rows_of(o.out, to.row) + column);
      }
    }
  }
}

bool next_down_wave(Workspace& w, const Op& op) {
  w.experts.is_again = next_wave(w, op);
  return w.experts.is_again;
}

const OpKind kMoeDown = {"moe_down", nullptr, plan_down, run_down, nullptr, down_floats, nullptr, nullptr, nullptr, next_down_wave};

}  // namespace

extern const OpKind kMoeOps[] = {
    {"moe_route", check_moe_route, plan_rows, run_rows<moe_route_row>, nullptr, route_floats},
    {"moe_ffn", check_moe_ffn, plan_up, run_up, nullptr, up_floats, nullptr, nullptr, &kMoeDown},
    {},
};

}  // namespace mill
