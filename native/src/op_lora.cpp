// LoRA: rows that have an adapter get scale * B (A x) added to what a linear gave them, in two operations. Shrink makes
// scale * A x, expand adds B to the outputs in place. Both are the dense linear kernel over the adapter's own packed
// matrices, run by run of consecutive rows that have the same adapter; rows without one are not touched. Where the linear is
// the token embedding, A x is a row of A: a lookup. Where the adapter has factors (DoRA), the sum is multiplied by them.
#include <algorithm>

#include "pack.h"
#include "workspace.h"

namespace mill {

namespace {

constexpr int kRunRows = 96;        // longest run that is one unit's work
constexpr int kExpandTiles = 16;    // tiles of outputs of a unit
constexpr double kValuesPerNs = 8;  // products, roughly

Part part_of(const tm_part& part) {
  return {part.kind, 0, part.num_rows, part.num_cols, part.data, part.num_bytes};
}

const tm_low_rank& change_of(const tm_lora& lora, int slot, int matrix) {
  return lora.changes[static_cast<int64_t>(slot - 1) * lora.num_matrices + matrix];
}

int width_of(const tm_lora& lora, int matrix) { return lora.columns[matrix + 1] - lora.columns[matrix]; }

int expand_blocks(const tm_lora& lora, int matrix) { return ceil_div(width_of(lora, matrix), kExpandTiles * kLanes); }

// In a kind that meets the inputs as they are.
bool holds(const tm_part& part, int rows, int cols) {
  const bool good = part.kind == kF32 || part.kind == kF16;
  const int64_t need = good ? tm_packed_bytes(part.kind, rows, cols) : -1;
  return part.num_rows == rows && part.num_cols == cols && need >= 0 && part.num_bytes >= need;
}

// What is wrong with the table itself.
std::string check_table(const tm_op& o, bool is_lookup, bool is_expand) {
  if (o.lora == nullptr) return "no table of adapters";
  const tm_lora& lora = *o.lora;
  if (lora.num_slots < 1 || lora.num_matrices < 1 || lora.max_rank < kLanes || lora.max_rank % kLanes)
    return "bad table of adapters";
  if (lora.by_token && (lora.num_matrices != 1 || o.rows != TM_ROWS_TOKENS)) return "only a matrix of token rows is by tokens";
  if (!is_expand && is_lookup != (lora.by_token != 0)) return "a lookup is by tokens";
  for (int m = 0; m < lora.num_matrices; m++)
    if (lora.columns[0] != 0 || width_of(lora, m) < 1) return "columns of adapters must rise from 0";
  return "";
}

int64_t narrow_width(const tm_lora& lora) { return static_cast<int64_t>(lora.num_matrices) * lora.max_rank; }

std::string check_shrink(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_table(o, false, false);
  if (!wrong.empty()) return wrong;
  return unless(w.fits(o.in0, o.rows, o.lora->num_cols) && w.fits(o.out, o.rows, narrow_width(*o.lora)));
}

std::string check_lookup(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_table(o, true, false);
  return !wrong.empty() ? wrong : unless(w.fits(o.out, o.rows, narrow_width(*o.lora)));
}

std::string check_expand(const Workspace& w, const tm_op& o) {
  const std::string wrong = check_table(o, false, true);
  if (!wrong.empty()) return wrong;
  return unless(w.fits(o.in0, o.rows, narrow_width(*o.lora)) && w.fits(o.out, o.rows, o.lora->columns[o.lora->num_matrices]) &&
                o.in1 == o.out);
}

// What a table holds is looked at in every step that uses it, because it may have been exchanged since the last.
std::string check_adapters(const Workspace&, const tm_op& op, const tm_step& step) {
  if (step.adapters == nullptr) return "";
  const tm_lora& lora = *op.lora;
  int last = 0;
  for (int row = 0; row < step.num_tokens; row++) {
    const int slot = step.adapters[row];
    if (slot == last) continue;
    if (slot < 0 || slot > lora.num_slots) return say("adapter slot out of range", slot, lora.num_slots);
    last = slot;
    for (int m = 0; slot > 0 && m < lora.num_matrices; m++) {
      const tm_low_rank& change = change_of(lora, slot, m);
      if (change.rank == 0) continue;
      if (change.rank < 0 || change.rank > lora.max_rank) return say("rank of an adapter", change.rank, lora.max_rank);
      const bool fits = lora.by_token ? holds(change.a, lora.num_cols, change.rank) : holds(change.a, change.rank, lora.num_cols);
      if (!fits || !holds(change.b, width_of(lora, m), change.rank)) return "the matrices of an adapter do not fit";
    }
  }
  for (int row = 0; lora.by_token && row < step.num_tokens; row++)
    if (step.tokens[row] < 0 || step.tokens[row] >= lora.num_cols)
      return say("token id out of range of an adapter", step.tokens[row], lora.num_cols);
  return "";
}

// Units of a shrink: run x matrix x tile of 16 ranks. Units of an expand: run x block of output tiles. Of a lookup: run.
const std::vector<LoraRun>& runs_of(const Workspace& w, const tm_op& o) {
  return w.lora_runs[o.rows == TM_ROWS_TOKENS ? 0 : 1];
}

int plan_runs(const Workspace& w, const Op& op, int units_of_run, int64_t width, double* cost_ns) {
  const std::vector<LoraRun>& runs = runs_of(w, op.op);
  int rows = 0;
  for (const LoraRun& run : runs) rows += run.num_rows;
  *cost_ns = static_cast<double>(rows) * width * op.op.lora->max_rank / kValuesPerNs;
  return static_cast<int>(runs.size()) * units_of_run;
}

int plan_shrink(Workspace& w, const Op& op, double* cost_ns) {
  const tm_lora& lora = *op.op.lora;
  const int64_t width = static_cast<int64_t>(lora.num_matrices) * lora.num_cols;
  return plan_runs(w, op, lora.num_matrices * (lora.max_rank / kLanes), width, cost_ns);
}

int plan_lookup(Workspace& w, const Op& op, double* cost_ns) { return plan_runs(w, op, 1, 1, cost_ns); }

int plan_expand(Workspace& w, const Op& op, double* cost_ns) {
  const tm_lora& lora = *op.op.lora;
  int units = 0;
  for (int m = 0; m < lora.num_matrices; m++) units += expand_blocks(lora, m);
  return plan_runs(w, op, units, lora.columns[lora.num_matrices], cost_ns);
}

void run_shrink(Workspace& w, const Op& op, int unit, int) {
  const tm_op& o = op.op;
  const tm_lora& lora = *o.lora;
  const int tiles = lora.max_rank / kLanes;
  const int tile = unit % tiles, matrix = unit / tiles % lora.num_matrices;
  const LoraRun& run = runs_of(w, o)[unit / tiles / lora.num_matrices];
  const tm_low_rank& change = change_of(lora, run.slot, matrix);
  if (tile * kLanes >= change.rank) return;
  const Part part = part_of(change.a);
  LinearArgs args = {};
  args.part = &part;
  args.tile_bytes = tile_bytes(part.kind, part.num_cols);
  args.tile0 = tile;
  args.num_tiles = 1;
  args.x = w.rows_of(o.in0, 0);
  args.ld_x = lora.num_cols;
  args.row0 = run.row0;
  args.num_rows = run.num_rows;
  args.out = w.rows_of(o.out, run.row0) + matrix * lora.max_rank + tile * kLanes;
  args.ld_out = w.buffers[o.out].width;
  w.kernels->linear(&args);
  const int num_ranks = std::min(kLanes, change.rank - tile * kLanes);
  for (int row = 0; row < run.num_rows; row++) {
    float* values = args.out + row * args.ld_out;
    w.kernels->scale(values, change.scale, num_ranks, values);
  }
}

void run_lookup(Workspace& w, const Op& op, int unit, int) {
  const tm_op& o = op.op;
  const LoraRun& run = runs_of(w, o)[unit];
  const tm_low_rank& change = change_of(*o.lora, run.slot, 0);
  if (change.rank == 0) return;
  const Part part = part_of(change.a);
  for (int row = run.row0; row < run.row0 + run.num_rows; row++) {
    float* values = w.rows_of(o.out, row);
    unpack_row(part, w.step.tokens[row], values);
    w.kernels->scale(values, change.scale, change.rank, values);
  }
}

void run_expand(Workspace& w, const Op& op, int unit, int) {
  const tm_op& o = op.op;
  const tm_lora& lora = *o.lora;
  int per_run = 0;
  for (int m = 0; m < lora.num_matrices; m++) per_run += expand_blocks(lora, m);
  const LoraRun& run = runs_of(w, o)[unit / per_run];
  int block = unit % per_run, matrix = 0;
  for (; block >= expand_blocks(lora, matrix); matrix++) block -= expand_blocks(lora, matrix);
  const tm_low_rank& change = change_of(lora, run.slot, matrix);
  if (change.rank == 0) return;
  const Part part = part_of(change.b);
  LinearArgs args = {};
  args.part = &part;
  args.tile_bytes = tile_bytes(part.kind, part.num_cols);
  args.tile0 = block * kExpandTiles;
  args.num_tiles = std::min(kExpandTiles, ceil_div(part.num_rows, kLanes) - args.tile0);
  args.x = w.rows_of(o.in0, 0) + matrix * lora.max_rank;
  args.ld_x = w.buffers[o.in0].width;
  args.row0 = run.row0;
  args.num_rows = run.num_rows;
  args.out = w.rows_of(o.out, run.row0) + lora.columns[matrix] + args.tile0 * kLanes;
  args.ld_out = w.buffers[o.out].width;
  args.residual = args.out;
  args.ld_residual = args.ld_out;
  w.kernels->linear(&args);
  if (change.factors == nullptr) return;
  const float* factors = change.factors + args.tile0 * kLanes;
  const int num_columns = std::min(args.num_tiles * kLanes, part.num_rows - args.tile0 * kLanes);
  for (int row = 0; row < run.num_rows; row++) {
    float* values = args.out + row * args.ld_out;
    for (int i = 0; i < num_columns; i++) values[i] *= factors[i];
  }
}

}  // namespace

void find_lora_runs(Workspace& w) {
  for (int which = 0; which < 2; which++) {
    std::vector<LoraRun>& runs = w.lora_runs[which];
    runs.clear();
    if (w.step.adapters == nullptr) continue;
    const int rows = which == 0 ? w.step.num_tokens : w.step.num_logit_rows;
    for (int row = 0; row < rows; row++) {
      const int slot = w.step.adapters[which == 0 ? row : w.step.logit_rows[row]];
      if (slot == 0) continue;
      LoraRun* last = runs.empty() ? nullptr : &runs.back();
      if (last != nullptr && last->slot == slot && last->row0 + last->num_rows == row && last->num_rows < kRunRows)
        last->num_rows++;
      else
        runs.push_back({row, 1, slot});
    }
  }
}

// lora_shrink: in0 f32; lora; out f32 [num_matrices * max_rank]: scale * A x of rows that have an adapter.
// lora_lookup: lora of one matrix by tokens; out f32 [max_rank]: scale * the row of A of each row's token.
// lora_expand: in0 of the shrink or lookup, in1 = out; lora; adds B to what out holds, and scales by factors.
extern const OpKind kLoraOps[] = {
    {"lora_shrink", check_shrink, plan_shrink, run_shrink, check_adapters},
    {"lora_lookup", check_lookup, plan_lookup, run_lookup, check_adapters},
    {"lora_expand", check_expand, plan_expand, run_expand},
    {},
};

}  // namespace mill
