// Linears of a step: how they are cut into units, and how a unit runs.
#include <algorithm>

#include "pack.h"
#include "program.h"

namespace mill {

namespace {

constexpr int kRowBlock = 8 * kPanel;
constexpr int kTileRowBlock = 256;  // on tiles

}  // namespace

// Room a thread needs on tiles.
int64_t Program::linear_floats(const tm_op& o) {
  const int64_t most_rows = kTileRowBlock + kRoundedPanel;
  return std::max(wide_scratch_bytes(most_rows, o.weight->num_cols), rounded_scratch_bytes(most_rows)) / 4;
}

// Units are blocks of tiles by blocks of rows. Few rows: weights are read once, units only balance the threads. Many
// rows: a thread's run of units is a share of the rows, which stay in its cache from one operation to the next; a block
// of tiles stays there too while the share's blocks of rows pass.
int Program::plan_linear(const Op& op, double* cost_ns) {
  const int rows = num_rows(op.op);
  const bool gated = op.op.code == TM_LINEAR_GATED;
  int tiles = 0;
  double bytes = 0;
  for (const Part& part : op.parts) {
    tiles += ceil_div(part.num_rows, kLanes);
    bytes += static_cast<double>(part.num_bytes);
  }
  if (gated) tiles = op.op.width / kGroup;  // a unit of work is a group of 32 outputs: two gate and two up tiles
  const bool wide = is_integer(op.parts[0].kind), on_tiles = wide || takes_rounded(op);
  *cost_ns = bytes / 20.0 + bytes * rows / (wide ? 500.0 : on_tiles ? 250.0 : 100.0);
  const int most = gated ? (on_tiles ? 8 : 4) : 16;
  rows_per_panel_ = wide ? kWidePanel : on_tiles ? kRoundedPanel : kPanel;
  const int least_blocks = ceil_div(rows, on_tiles ? kTileRowBlock : kRowBlock);
  const int shares = std::min(team_->num_threads(), least_blocks);
  blocks_per_share_ = ceil_div(least_blocks, shares);
  num_row_blocks_ = shares * blocks_per_share_;
  const int wanted = ceil_div((on_tiles ? 3 : 6) * team_->num_threads(), num_row_blocks_);
  tiles_per_unit_ = std::max(1, std::min(most, tiles / wanted));
  tiles_per_unit_ = ceil_div(tiles, ceil_div(tiles, tiles_per_unit_));
  if (on_tiles && !gated) tiles_per_unit_ += tiles_per_unit_ % 2;  // their kernels take two at a time
  num_tile_blocks_ = 0;
  if (gated) {
    num_tile_blocks_ = ceil_div(tiles, tiles_per_unit_);
  } else {
    for (const Part& part : op.parts) num_tile_blocks_ += ceil_div(ceil_div(part.num_rows, kLanes), tiles_per_unit_);
  }
  return num_tile_blocks_ * num_row_blocks_;
}

// The block of tiles and the rows of a unit: share by share, and there by tiles, then rows.
Program::LinearUnit Program::linear_unit(int unit, int num_rows) const {
  const int per_share = num_tile_blocks_ * blocks_per_share_;
  const int block = unit / per_share * blocks_per_share_ + unit % blocks_per_share_;
  const int64_t panels = ceil_div(num_rows, rows_per_panel_);
  const int begin = static_cast<int>(panels * block / num_row_blocks_) * rows_per_panel_;
  const int end = static_cast<int>(panels * (block + 1) / num_row_blocks_) * rows_per_panel_;
  return {unit % per_share / blocks_per_share_, begin, std::min(end, num_rows)};
}

bool Program::takes_rounded(const Op& op) const {
  if ((op.op.code != TM_LINEAR && op.op.code != TM_LINEAR_GATED) || !kernels_->has_tiles) return false;
  return std::any_of(op.parts.begin(), op.parts.end(), [](const Part& part) { return part.kind == kBF16; });
}

void Program::give_inputs(const Op& op, const Part& part, int thread, LinearInputs* held, LinearArgs* args) {
  const tm_op& o = op.op;
  args->part = &part;
  args->tile_bytes = tile_bytes(part.kind, part.num_cols);
  if (o.code == TM_LINEAR_GATED && (is_integer(part.kind) || part.kind == kBF16)) {
    args->up_tiles = o.width / kLanes;
    args->activation = o.activation;
  }
  if (is_integer(part.kind)) {
    held->digits = wide(o.in1);
    args->wide = &held->digits;
    args->scratch = thread_floats(thread);
  } else if (is_quantised(part.kind)) {
    held->codes = quantised(o.in1);
    args->xq = &held->codes;
  } else {
    args->x = rows_of(o.in0, 0);
    args->ld_x = part.num_cols;
    args->rounded = rounded_row(op.rounded_in, 0, part.num_cols);
    args->ld_rounded = rounded_stride(part.num_cols);
    args->scratch = thread_floats(thread);
  }
}

void Program::run_linear(const Op& op, int unit, int thread) {
  const tm_op& o = op.op;
  const LinearUnit cut = linear_unit(unit, num_rows(o));
  const int row0 = cut.row_begin;
  int block = cut.tile_block;
  const Part* part = op.parts.data();
  for (;; part++) {
    const int blocks = ceil_div(ceil_div(part->num_rows, kLanes), tiles_per_unit_);
    if (block < blocks) break;
    block -= blocks;
  }
  LinearArgs args = {};
  LinearInputs held;
  give_inputs(op, *part, thread, &held, &args);
  args.tile0 = block * tiles_per_unit_;
  args.num_tiles = std::min(tiles_per_unit_, ceil_div(part->num_rows, kLanes) - args.tile0);
  args.row0 = row0;
  args.num_rows = cut.row_end - row0;
  const int64_t column = part->column0 + static_cast<int64_t>(args.tile0) * kLanes;
  args.out = rows_of(o.out, row0) + column;
  args.ld_out = o.weight->num_rows;
  if (o.in2 >= 0) {
    args.residual = rows_of(o.in2, row0) + column;
    args.ld_residual = o.weight->num_rows;
  }
  kernels_->linear(&args);
}

// Gate and up columns of one output group, a panel of rows at a time, through act(gate) * up into the group's codes. On
// tiles the kernel does all of it, into float32.
void Program::run_linear_gated(const Op& op, int unit, int thread) {
  const tm_op& o = op.op;
  const LinearUnit cut = linear_unit(unit, num_rows(o));
  const int group_begin = cut.tile_block * tiles_per_unit_;
  const int group_end = std::min(o.width / kGroup, group_begin + tiles_per_unit_);
  LinearArgs args = {};
  LinearInputs held;
  give_inputs(op, op.parts.front(), thread, &held, &args);
  if (args.up_tiles) {
    args.tile0 = group_begin * (kGroup / kLanes);
    args.num_tiles = (group_end - group_begin) * (kGroup / kLanes);
    args.row0 = cut.row_begin;
    args.num_rows = cut.row_end - cut.row_begin;
    if (op.keeps) args.out = rows_of(o.out, cut.row_begin) + group_begin * kGroup;
    args.ld_out = o.width;
    if (op.rounded_out >= 0) args.out_rounded = rounded_row(op.rounded_out, cut.row_begin, o.width) + group_begin * kGroup;
    args.ld_out_rounded = rounded_stride(o.width);
    return kernels_->linear(&args);
  }
  args.num_tiles = kGroup / kLanes;
  args.ld_out = 2 * kGroup;
  const Quantised out = quantised(o.out);
  alignas(64) float both[kPanel][2 * kGroup];
  for (int row = cut.row_begin; row < cut.row_end; row += kPanel) {
    args.row0 = row;
    args.num_rows = std::min(kPanel, cut.row_end - row);
    for (int group = group_begin; group < group_end; group++) {
      args.tile0 = group * (kGroup / kLanes);
      args.out = both[0];
      kernels_->linear(&args);
      args.tile0 += o.width / kLanes;
      args.out = both[0] + kGroup;
      kernels_->linear(&args);
      kernels_->gated_group(o.activation, both[0], args.num_rows, &out, row, group);
    }
  }
}

}  // namespace mill
