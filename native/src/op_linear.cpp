// Linears: how they are cut into units, and how a unit runs.
#include <algorithm>

#include "pack.h"
#include "store.h"
#include "workspace.h"

namespace mill {

namespace {

constexpr int kRowBlock = 8 * kPanel;
constexpr int kTileRowBlock = 256;  // on tiles

// What kernels for integer kinds need besides, for many rows or, of a row as wide as this, for two: see linear_tiles.inc.
int64_t wide_scratch_bytes(int64_t max_rows, int64_t width) {
  const int64_t many = kMostExactSteps * 2048 + 8192 + ceil_div(max_rows, kWidePanel) * 2048;
  const int64_t few = 16 * num_exact_blocks(kW8, ceil_div(width, kGroup));
  return std::max(many, (few + 63) / 64 * 64);
}

// The same of the kernel for bf16 weights on tiles: see bf16_tiles.inc.
int64_t rounded_scratch_bytes(int64_t max_rows) { return (2 + ceil_div(max_rows, kRoundedPanel)) * kRoundedSums * 4; }

// bf16 weights, where kernels read them so.
bool takes_rounded(const Workspace& w, const Op& op) {
  return w.kernels->round_row != nullptr &&
         std::any_of(op.parts.begin(), op.parts.end(), [](const Part& part) { return is_bf16(part.kind); });
}

// Room a thread needs on tiles.
int64_t tile_floats(const Workspace& w, const Op& op) {
  if (!w.kernels->has_tiles) return 0;
  const auto on_tiles = [&](const Part& part) { return is_integer(part.kind); };
  if (!takes_rounded(w, op) && std::none_of(op.parts.begin(), op.parts.end(), on_tiles)) return 0;
  const int64_t most_rows = kTileRowBlock + kRoundedPanel;
  return std::max(wide_scratch_bytes(most_rows, op.op.weight->num_cols), rounded_scratch_bytes(most_rows)) / 4;
}

// ---- checks

int form_of(int32_t kind) {
  return is_integer(kind) ? TM_FORM_WIDE : is_quantised(kind) ? TM_FORM_QUANTISED : TM_FORM_F32;
}

std::string check_linear(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_weight(w, o);
  if (!wrong.empty()) return wrong;
  for (int p = 0; p < o.weight->num_parts; p++) {
    const int form = form_of(o.weight->parts[p].kind);
    if (!w.fits(form == TM_FORM_F32 ? o.in0 : o.in1, o.rows, o.weight->num_cols, form)) return "input does not fit the weight";
  }
  return unless(w.fits(o.out, o.rows, o.weight->num_rows) && (o.in2 < 0 || w.fits(o.in2, o.rows, o.weight->num_rows)));
}

std::string check_linear_gated(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_weight(w, o);
  if (!wrong.empty()) return wrong;
  const int32_t kind = o.weight->parts[0].kind;
  const bool rounded = kind == kBF16 && w.kernels->has_tiles;
  return unless(is_gating(o.activation) && o.weight->num_parts == 1 && (is_quantised(kind) || rounded) &&
                o.width % kGroup == 0 && o.weight->num_rows == 2 * o.width &&
                w.fits(rounded ? o.in0 : o.in1, o.rows, o.weight->num_cols, form_of(kind)) &&
                w.fits(o.out, o.rows, o.width, rounded || is_integer(kind) ? TM_FORM_F32 : TM_FORM_QUANTISED));
}

// ---- planning

// Units are blocks of tiles by blocks of rows. Few rows: weights are read once, units only balance the threads. Many
// rows: a thread's run of units is a share of the rows, which stay in its cache from one operation to the next; a block
// of tiles stays there too while the share's blocks of rows pass.
template <bool gated>
int plan_linear(Workspace& w, const Op& op, double* cost_ns) {
  const int rows = w.num_rows(op.op);
  LinearCut& cut = w.linear;
  int tiles = 0;
  double bytes = 0;
  for (const Part& part : op.parts) {
    tiles += ceil_div(part.num_rows, kLanes);
    bytes += static_cast<double>(part.num_bytes);
  }
  if (gated) tiles = op.op.width / kGroup;  // a unit of work is a group of 32 outputs: two gate and two up tiles
  const bool wide = is_integer(op.parts[0].kind), on_tiles = wide || (w.kernels->has_tiles && takes_rounded(w, op));
  *cost_ns = bytes / 20.0 + bytes * rows / (wide ? 500.0 : on_tiles ? 250.0 : 100.0);
  const int most = gated ? (on_tiles ? 8 : kGatedGroups) : 16;
  cut.rows_per_panel = wide ? kWidePanel : on_tiles ? kRoundedPanel : kPanel;
  const int least_blocks = ceil_div(rows, on_tiles ? kTileRowBlock : kRowBlock);
  const int shares = std::min(w.num_threads, least_blocks);
  cut.blocks_per_share = ceil_div(least_blocks, shares);
  cut.num_row_blocks = shares * cut.blocks_per_share;
  const int wanted = ceil_div((on_tiles ? 3 : 6) * w.num_threads, cut.num_row_blocks);
  cut.tiles_per_unit = std::max(1, std::min(most, tiles / wanted));
  cut.tiles_per_unit = ceil_div(tiles, ceil_div(tiles, cut.tiles_per_unit));
  if (on_tiles && !gated) cut.tiles_per_unit += cut.tiles_per_unit % 2;  // their kernels take two at a time
  cut.num_tile_blocks = 0;
  if (gated) {
    cut.num_tile_blocks = ceil_div(tiles, cut.tiles_per_unit);
  } else {
    for (const Part& part : op.parts) cut.num_tile_blocks += ceil_div(ceil_div(part.num_rows, kLanes), cut.tiles_per_unit);
  }
  return cut.num_tile_blocks * cut.num_row_blocks;
}

// What one unit covers.
struct LinearUnit {
  int tile_block, row_begin, row_end;
};

// The block of tiles and the rows of a unit: share by share, and there by tiles, then rows.
LinearUnit linear_unit(const LinearCut& cut, int unit, int num_rows) {
  const int per_share = cut.num_tile_blocks * cut.blocks_per_share;
  const int block = unit / per_share * cut.blocks_per_share + unit % cut.blocks_per_share;
  const int64_t panels = ceil_div(num_rows, cut.rows_per_panel);
  const int begin = static_cast<int>(panels * block / cut.num_row_blocks) * cut.rows_per_panel;
  const int end = static_cast<int>(panels * (block + 1) / cut.num_row_blocks) * cut.rows_per_panel;
  return {unit % per_share / cut.blocks_per_share, begin, std::min(end, num_rows)};
}

// What a call takes its inputs from, besides its arguments.
struct LinearInputs {
  Wide digits;
  Quantised codes;
};

void give_inputs(Workspace& w, const Op& op, const Part& part, int thread, LinearInputs* held, LinearArgs* args, bool is_gated) {
  const tm_op& o = op.op;
  args->part = &part;
  args->tile_bytes = tile_bytes(part.kind, part.num_cols);
  if (is_gated && (is_integer(part.kind) || part.kind == kBF16)) {
    args->up_tiles = o.width / kLanes;
    args->activation = o.activation;
  }
  if (is_integer(part.kind)) {
    held->digits = w.wide(o.in1);
    args->wide = &held->digits;
    args->scratch = w.thread_floats(thread);
  } else if (is_quantised(part.kind)) {
    held->codes = w.quantised(o.in1);
    args->xq = &held->codes;
  } else {
    args->x = w.rows_of(o.in0, 0);
    args->ld_x = part.num_cols;
    args->rounded = w.rounded_row(op.rounded_in, 0, part.num_cols);
    args->ld_rounded = rounded_stride(part.num_cols);
    args->scratch = w.thread_floats(thread);
  }
}

void run_linear(Workspace& w, const Op& op, int unit, int thread) {
  const tm_op& o = op.op;
  const LinearCut& cut = w.linear;
  const LinearUnit at = linear_unit(cut, unit, w.num_rows(o));
  const int row0 = at.row_begin;
  int block = at.tile_block;
  const Part* part = op.parts.data();
  for (;; part++) {
    const int blocks = ceil_div(ceil_div(part->num_rows, kLanes), cut.tiles_per_unit);
    if (block < blocks) break;
    block -= blocks;
  }
  LinearArgs args = {};
  LinearInputs held;
  give_inputs(w, op, *part, thread, &held, &args, false);
  args.tile0 = block * cut.tiles_per_unit;
  args.num_tiles = std::min(cut.tiles_per_unit, ceil_div(part->num_rows, kLanes) - args.tile0);
  args.row0 = row0;
  args.num_rows = at.row_end - row0;
  const int64_t column = part->column0 + static_cast<int64_t>(args.tile0) * kLanes;
  args.out = w.rows_of(o.out, row0) + column;
  args.ld_out = o.weight->num_rows;
  if (o.in2 >= 0) {
    args.residual = w.rows_of(o.in2, row0) + column;
    args.ld_residual = o.weight->num_rows;
  }
  w.kernels->linear(&args);
}

// Gate and up columns of some output groups, a panel of rows at a time, through act(gate) * up into the groups' codes. On
// tiles the kernel does all of it, into float32.
void run_linear_gated(Workspace& w, const Op& op, int unit, int thread) {
  const tm_op& o = op.op;
  const LinearCut& cut = w.linear;
  const LinearUnit at = linear_unit(cut, unit, w.num_rows(o));
  const int group_begin = at.tile_block * cut.tiles_per_unit;
  const int group_end = std::min(o.width / kGroup, group_begin + cut.tiles_per_unit);
  LinearArgs args = {};
  LinearInputs held;
  give_inputs(w, op, op.parts.front(), thread, &held, &args, true);
  args.row0 = at.row_begin;
  args.num_rows = at.row_end - at.row_begin;
  if (args.up_tiles) {
    args.tile0 = group_begin * (kGroup / kLanes);
    args.num_tiles = (group_end - group_begin) * (kGroup / kLanes);
    if (op.keeps) args.out = w.rows_of(o.out, at.row_begin) + group_begin * kGroup;
    args.ld_out = o.width;
    if (op.rounded_out >= 0) args.out_rounded = w.rounded_row(op.rounded_out, at.row_begin, o.width) + group_begin * kGroup;
    args.ld_out_rounded = rounded_stride(o.width);
    return w.kernels->linear(&args);
  }
  const Quantised out = w.quantised(o.out);
  each_gate_up(*w.kernels, args, o.width, group_begin, group_end,
               [&](const GateUp* both) { gate_into_codes(*w.kernels, o.activation, *both, out, at.row_begin); });
}

}  // namespace

std::string check_weight(const Workspace& w, const tm_op& o) {
  if (o.weight == nullptr) return "no weight";
  if (o.weight->store != nullptr && (o.weight->place < 0 || o.weight->place >= o.weight->store->ring.num_items()))
    return "the weight has no place in its store";
  int64_t column = 0;
  for (int p = 0; p < o.weight->num_parts; p++) {
    const tm_part& part = o.weight->parts[p];
    if (part.column0 != column || part.num_cols != o.weight->num_cols) return "parts do not line up";
    const int64_t need = tm_packed_bytes(part.kind, part.num_rows, part.num_cols);
    if (need < 0 || part.num_bytes < need) return say("bytes of a packed part", part.num_bytes, need);
    if (is_integer(part.kind) && !w.kernels->has_tiles) return "integer kinds need tiles";
    if (part.kind == kBF16P && w.kernels->has_tiles) return "tiles do not take packed bf16";
    column += part.num_rows;
  }
  return column == o.weight->num_rows ? "" : "parts do not add up";
}

// linear: in0 f32 (dense parts), in1 quantised or wide (the others), in2 residual or -1; weight.
// linear_gated: in1; weight = gate rows then up rows, one part; activation; out [width] quantised, of wide in1 f32. Of bf16,
// on a matrix unit alone: in0, out f32.
extern const OpKind kLinearOps[] = {
    {"linear", check_linear, plan_linear<false>, run_linear, nullptr, tile_floats, takes_rounded},
    {"linear_gated", check_linear_gated, plan_linear<true>, run_linear_gated, nullptr, tile_floats, takes_rounded, takes_rounded},
    {},
};

}  // namespace mill
