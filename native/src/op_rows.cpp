// Operations that make each row by itself: lookups, norms, sums, activations.
#include <cstring>

#include "pack.h"
#include "workspace.h"

namespace mill {

int plan_rows(Workspace& w, const Op& op, double* cost_ns) {
  const int rows = w.num_rows(op.op);
  const int64_t width = w.buffers[op.op.out >= 0 ? op.op.out : op.op.in0].width;
  *cost_ns = static_cast<double>(rows) * width * 0.5;
  w.rows_per_unit = std::max<int64_t>(1, std::min<int64_t>(ceil_div(rows, 4 * w.num_threads), 16384 / width + 1));
  return ceil_div(rows, w.rows_per_unit);
}

void find_rows(const Workspace& w, const Op& op, int unit, int* begin, int* end) {
  *begin = unit * w.rows_per_unit;
  *end = std::min(w.num_rows(op.op), *begin + w.rows_per_unit);
}

namespace {

// float32 of the operation's width in, the same out.
std::string check_same(const Workspace& w, const tm_op& o) {
  return unless(w.fits(o.in0, o.rows, o.width) && w.fits(o.out, o.rows, o.width));
}

// Of a vector of as many values.
bool has_vector(const tm_op& o) { return o.vector_rows == o.width; }

// ---- embed: out f32; weight, by_place

std::string check_embed(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_weight(w, o);
  if (!wrong.empty()) return wrong;
  return unless(o.rows == TM_ROWS_TOKENS && w.fits(o.out, o.rows, o.weight->num_cols) && o.width == o.weight->num_cols &&
                o.weight->num_parts >= 1);
}

std::string check_ids(const Workspace&, const tm_op& o, const tm_step& step) {
  const int32_t* ids = o.by_place ? step.places : step.tokens;
  if (ids == nullptr) return "the step has no places";
  for (int i = 0; i < step.num_tokens; i++)
    if (ids[i] < 0 || ids[i] >= o.weight->num_rows)
      return say(o.by_place ? "place out of range" : "token id out of range", ids[i], o.weight->num_rows);
  return "";
}

void embed_row(Workspace& w, const Op& op, int row, int) {
  int64_t id = (op.op.by_place ? w.step.places : w.step.tokens)[row];
  for (const Part& part : op.parts) {
    if (id < part.num_rows) return unpack_row(part, id, w.rows_of(op.op.out, row));
    id -= part.num_rows;
  }
}

// ---- rms_norm, layer_norm, activate: in0 f32; out f32, quantised or wide

using Source = void (*)(const Kernels&, const tm_op&, const float* from, float* to);

void rms_norm(const Kernels& kernels, const tm_op& o, const float* from, float* to) {
  kernels.rms_norm_row(from, o.vector, o.value, o.width, to);
}

void layer_norm(const Kernels& kernels, const tm_op& o, const float* from, float* to) {
  kernels.layer_norm_row(from, o.vector, o.vector2, o.value, o.width, to);
}

void activate(const Kernels& kernels, const tm_op& o, const float* from, float* to) {
  kernels.activate(o.activation, from, o.width, to);
}

// A row as float32, and from there as codes or digits, or rounded, where readers want that.
template <Source Make>
void source_row(Workspace& w, const Op& op, int row, int thread) {
  const tm_op& o = op.op;
  const bool quantise = w.buffers[o.out].form != TM_FORM_F32;
  float* to = quantise || !op.keeps ? w.thread_floats(thread) : w.rows_of(o.out, row);
  Make(*w.kernels, o, w.rows_of(o.in0, row), to);
  if (quantise) w.quantise_row(to, o.out, row);
  if (op.rounded_out >= 0) w.kernels->round_row(to, o.width, w.rounded_row(op.rounded_out, row, o.width));
}

// Codes are made by whole groups of rows, digits with the norm.
void run_rms_norm(Workspace& w, const Op& op, int unit, int thread) {
  const tm_op& o = op.op;
  const int form = w.buffers[o.out].form;
  if (form == TM_FORM_F32) return run_rows<source_row<rms_norm>>(w, op, unit, thread);
  int begin, end;
  find_rows(w, op, unit, &begin, &end);
  if (form == TM_FORM_QUANTISED) {
    const Quantised out = w.quantised(o.out);
    return w.kernels->rms_norm_rows(w.rows_of(o.in0, begin), end - begin, o.vector, o.value, o.width, &out, begin);
  }
  const Wide out = w.wide(o.out);
  for (int row = begin; row < end; row++)
    w.kernels->rms_norm_wide(w.rows_of(o.in0, row), o.vector, o.value, o.width, w.thread_floats(thread), &out, row);
}

std::string check_source(const Workspace& w, const tm_op& o) {
  return unless(w.fits(o.in0, o.rows, o.width) && w.fits_any_form(o.out, o.rows, o.width));
}

std::string check_rms_norm(const Workspace& w, const tm_op& o) { return has_vector(o) ? check_source(w, o) : unless(false); }

std::string check_layer_norm(const Workspace& w, const tm_op& o) {
  return has_vector(o) && o.vector2_rows == o.width ? check_source(w, o) : unless(false);
}

std::string check_activate(const Workspace& w, const tm_op& o) {
  return is_gating(o.activation) || o.activation == TM_RELU2 ? check_source(w, o) : unless(false);
}

bool always(const Workspace&, const Op&) { return true; }

// ---- quantise: in0 f32; out quantised or wide

std::string check_quantise(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_source(w, o);
  return !wrong.empty() ? wrong : unless(w.buffers[o.out].form != TM_FORM_F32);
}

void quantise_row(Workspace& w, const Op& op, int row, int) { w.quantise_row(w.rows_of(op.op.in0, row), op.op.out, row); }

void round_row(Workspace& w, const Op& op, int row, int) {
  w.kernels->round_row(w.rows_of(op.op.in0, row), op.op.width, w.rounded_row(op.rounded_out, row, op.op.width));
}

// ---- add: in0, in1. add_bias: in0; vector

std::string check_add(const Workspace& w, const tm_op& o) {
  return w.fits(o.in1, o.rows, o.width) ? check_same(w, o) : unless(false);
}

void add_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  w.kernels->add(w.rows_of(o.in0, row), w.rows_of(o.in1, row), o.width, w.rows_of(o.out, row));
}

std::string check_add_bias(const Workspace& w, const tm_op& o) { return has_vector(o) ? check_same(w, o) : unless(false); }

void add_bias_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  w.kernels->add(w.rows_of(o.in0, row), o.vector, o.width, w.rows_of(o.out, row));
}

// ---- scale: in0; value = factor

void scale_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  w.kernels->scale(w.rows_of(o.in0, row), o.value, o.width, w.rows_of(o.out, row));
}

// ---- soft_cap: in0; cap

std::string check_soft_cap(const Workspace& w, const tm_op& o) { return o.cap > 0 ? check_same(w, o) : unless(false); }

void soft_cap_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  w.kernels->soft_cap(w.rows_of(o.in0, row), o.cap, o.width, w.rows_of(o.out, row));
}

// ---- gated: in0 [2 * width]; activation; out [width]

std::string check_gated(const Workspace& w, const tm_op& o) {
  return unless(is_gating(o.activation) && w.fits(o.in0, o.rows, 2 * static_cast<int64_t>(o.width)) &&
                w.fits(o.out, o.rows, o.width));
}

void gated_row(Workspace& w, const Op& op, int row, int thread) {
  const tm_op& o = op.op;
  const float* gate = w.rows_of(o.in0, row);
  float* to = op.keeps ? w.rows_of(o.out, row) : w.thread_floats(thread);
  w.kernels->gated(o.activation, gate, gate + o.width, o.width, to);
  if (op.rounded_out >= 0) w.kernels->round_row(to, o.width, w.rounded_row(op.rounded_out, row, o.width));
}

// ---- pick: in0; order; out: column k is column order[k] of in0

std::string check_pick(const Workspace& w, const tm_op& o) {
  if (o.in0 == o.out || o.order == nullptr) return unless(false);
  for (int k = 0; k < o.width; k++)
    if (o.order[k] < 0 || o.order[k] >= o.width) return unless(false);
  return check_same(w, o);
}

void pick_row(Workspace& w, const Op& op, int row, int) {
  const float* from = w.rows_of(op.op.in0, row);
  float* to = w.rows_of(op.op.out, row);
  for (int k = 0; k < op.op.width; k++) to[k] = from[op.op.order[k]];
}

// ---- spread: in0; order; value; out: column order[k] is column k of in0, the others are the value

std::string check_spread(const Workspace& w, const tm_op& o) {
  if (o.in0 < 0 || o.in0 == o.out || o.order == nullptr || !w.fits(o.in0, o.rows, w.buffers[o.in0].width)) return unless(false);
  for (int64_t k = 0; k < w.buffers[o.in0].width; k++)
    if (o.order[k] < 0 || o.order[k] >= o.width) return unless(false);
  return unless(w.fits(o.out, o.rows, o.width));
}

void spread_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  const float* from = w.rows_of(o.in0, row);
  float* to = w.rows_of(o.out, row);
  std::fill(to, to + o.width, o.value);
  for (int64_t k = 0; k < w.buffers[o.in0].width; k++) to[o.order[k]] = from[k];
}

// ---- columns: in0; window = the first; out [width]

std::string check_columns(const Workspace& w, const tm_op& o) {
  if (o.in0 < 0 || !w.fits(o.in0, o.rows, w.buffers[o.in0].width) || !w.fits(o.out, o.rows, o.width)) return unless(false);
  return unless(o.in0 != o.out && o.window >= 0 && o.window <= w.buffers[o.in0].width - o.width);
}

void columns_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  std::memcpy(w.rows_of(o.out, row), w.rows_of(o.in0, row) + o.window, static_cast<size_t>(o.width) * 4);
}

// ---- join: in0, in1, in2 or -1; out: their columns side by side

std::string check_join(const Workspace& w, const tm_op& o) {
  int64_t width = 0;
  for (int in : {o.in0, o.in1, o.in2}) {
    if (in < 0 && in == o.in2) continue;
    if (in < 0 || in == o.out || !w.fits(in, o.rows, w.buffers[in].width)) return unless(false);
    width += w.buffers[in].width;
  }
  return unless(width == o.width && w.fits(o.out, o.rows, o.width));
}

void join_row(Workspace& w, const Op& op, int row, int) {
  float* to = w.rows_of(op.op.out, row);
  for (int in : {op.op.in0, op.op.in1, op.op.in2}) {
    if (in < 0) continue;
    std::memcpy(to, w.rows_of(in, row), static_cast<size_t>(w.buffers[in].width) * 4);
    to += w.buffers[in].width;
  }
}

// ---- gate_rows: in0, in1 [1] or as wide

std::string check_gate_rows(const Workspace& w, const tm_op& o) {
  return w.fits(o.in1, o.rows, 1) || w.fits(o.in1, o.rows, o.width) ? check_same(w, o) : unless(false);
}

void gate_rows_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  const float *from = w.rows_of(o.in0, row), *gate = w.rows_of(o.in1, row);
  if (w.buffers[o.in1].width == o.width && o.width > 1) return w.kernels->gate_each(from, gate, o.width, w.rows_of(o.out, row));
  w.kernels->gate_row(from, *gate, o.width, w.rows_of(o.out, row));
}

// ---- gather: in0 [T]; out [L]

std::string check_gather(const Workspace& w, const tm_op& o) {
  return unless(o.rows == TM_ROWS_LOGITS && w.fits(o.in0, TM_ROWS_TOKENS, o.width) && w.fits(o.out, TM_ROWS_LOGITS, o.width));
}

void gather_row(Workspace& w, const Op& op, int row, int) {
  const tm_op& o = op.op;
  std::memcpy(w.rows_of(o.out, row), w.rows_of(o.in0, w.step.logit_rows[row]), static_cast<size_t>(o.width) * 4);
}

}  // namespace

const OpKind kRoundRows = {"round", nullptr, plan_rows, run_rows<round_row>};

extern const OpKind kRowOps[] = {
    {"embed", check_embed, plan_rows, run_rows<embed_row>, check_ids},
    {"rms_norm", check_rms_norm, plan_rows, run_rms_norm, nullptr, nullptr, nullptr, always},
    {"layer_norm", check_layer_norm, plan_rows, run_rows<source_row<layer_norm>>},
    {"activate", check_activate, plan_rows, run_rows<source_row<activate>>},
    {"quantise", check_quantise, plan_rows, run_rows<quantise_row>},
    {"add", check_add, plan_rows, run_rows<add_row>},
    {"add_bias", check_add_bias, plan_rows, run_rows<add_bias_row>},
    {"scale", check_same, plan_rows, run_rows<scale_row>},
    {"soft_cap", check_soft_cap, plan_rows, run_rows<soft_cap_row>},
    {"gated", check_gated, plan_rows, run_rows<gated_row>, nullptr, nullptr, nullptr, always},
    {"pick", check_pick, plan_rows, run_rows<pick_row>},
    {"spread", check_spread, plan_rows, run_rows<spread_row>},
    {"columns", check_columns, plan_rows, run_rows<columns_row>},
    {"join", check_join, plan_rows, run_rows<join_row>},
    {"gate_rows", check_gate_rows, plan_rows, run_rows<gate_rows_row>},
    {"gather", check_gather, plan_rows, run_rows<gather_row>},
    {},
};

}  // namespace mill
