// Linears whose weight is one of a stack of matrices, decided by the head.
#include "stack.h"

#include <algorithm>

#include "pack.h"
#include "workspace.h"

namespace mill {

namespace {

constexpr int kRowBlock = 8 * kPanel;

// ---- linear_heads: in0 f32 (dense kinds) or in1 quantised; stack; out: of each head's columns, times its matrix. With `latent`
// the first columns of each head's query are taken, and the first of each head's latent query are made.

// Columns from one head to the next, of what is taken and of what is made.
int64_t head_cols(const tm_op& o) { return o.latent == nullptr ? o.stack->num_cols : o.latent->nope_dim + o.latent->rope_dim; }
int64_t head_rows(const tm_op& o) { return o.latent == nullptr ? o.stack->num_rows : o.latent->latent_dim + o.latent->rope_dim; }

std::string check_linear_heads(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_stack(o.stack);
  if (!wrong.empty()) return wrong;
  const tm_stack& stack = *o.stack;
  const int64_t num_cols = stack.num_matrices * head_cols(o), num_rows = stack.num_matrices * head_rows(o);
  const bool quantised = is_quantised(stack.kind);
  if (num_cols > INT32_MAX || num_rows > INT32_MAX || head_cols(o) < stack.num_cols || head_rows(o) < stack.num_rows) return unless(false);
  return unless((!quantised || head_cols(o) % kGroup == 0) && o.width == num_rows && w.fits(o.out, o.rows, num_rows) &&
                w.fits(quantised ? o.in1 : o.in0, o.rows, num_cols, quantised ? TM_FORM_QUANTISED : TM_FORM_F32));
}

// Units are blocks of rows by heads by blocks of a head's tiles.
int plan_linear_heads(Workspace& w, const Op& op, double* cost_ns) {
  const tm_stack& stack = *op.op.stack;
  const int rows = w.num_rows(op.op), tiles = ceil_div(stack.num_rows, kLanes);
  const double bytes = static_cast<double>(tile_bytes(stack.kind, stack.num_cols)) * tiles * stack.num_matrices;
  *cost_ns = bytes / 20.0 + bytes * rows / 100.0;
  LinearCut& cut = w.linear;
  cut.num_row_blocks = ceil_div(rows, kRowBlock);
  const int wanted = ceil_div(6 * w.num_threads, stack.num_matrices * cut.num_row_blocks);
  cut.tiles_per_unit = ceil_div(tiles, std::min(tiles, wanted));
  cut.num_tile_blocks = ceil_div(tiles, cut.tiles_per_unit);
  return cut.num_row_blocks * stack.num_matrices * cut.num_tile_blocks;
}

void run_linear_heads(Workspace& w, const Op& op, int unit, int) {
  const tm_op& o = op.op;
  const tm_stack& stack = *o.stack;
  const LinearCut& cut = w.linear;
  const int block = unit % cut.num_tile_blocks, head = unit / cut.num_tile_blocks % stack.num_matrices;
  const int row_block = unit / (cut.num_tile_blocks * stack.num_matrices);
  const Part part = matrix_of(stack, head);
  LinearArgs args = {};
  Quantised codes;
  args.part = &part;
  args.tile_bytes = tile_bytes(stack.kind, stack.num_cols);
  args.tile0 = block * cut.tiles_per_unit;
  args.num_tiles = std::min(cut.tiles_per_unit, ceil_div(stack.num_rows, kLanes) - args.tile0);
  args.row0 = row_block * kRowBlock;
  args.num_rows = std::min(kRowBlock, w.num_rows(o) - args.row0);
  args.ld_out = o.width;
  args.out = w.rows_of(o.out, args.row0) + head * head_rows(o) + args.tile0 * kLanes;
  if (is_quantised(stack.kind)) {
    codes = w.quantised(o.in1).from_group(static_cast<int>(head * head_cols(o) / kGroup));
    args.xq = &codes;
  } else {
    args.ld_x = stack.num_matrices * head_cols(o);
    args.x = w.rows_of(o.in0, 0) + head * head_cols(o);
  }
  w.kernels->linear(&args);
}

}  // namespace

std::string check_stack(const tm_stack* stack, bool may_be_stored) {
  if (stack == nullptr || stack->num_matrices < 1) return "no stack";
  if (stack->data == nullptr && (stack->store == nullptr || !may_be_stored)) return "no stack";
  if (is_integer(stack->kind)) return "a stack of an integer kind";
  const int64_t need = tm_packed_bytes(stack->kind, stack->num_rows, stack->num_cols);
  if (need <= 0 || stack->stride < need) return say("bytes of a matrix of a stack", stack->stride, need);
  return stack->stride % 64 == 0 ? "" : "matrices of a stack begin in a line";
}

extern const OpKind kStackOps[] = {
    {"linear_heads", check_linear_heads, plan_linear_heads, run_linear_heads},
    {},
};

}  // namespace mill
