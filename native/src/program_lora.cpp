// LoRA: rows that have an adapter get scale * B (A x) added to what a linear gave them, in two operations. Shrink makes
// scale * A x, expand adds B to the outputs in place. Both are the dense linear kernel over the adapter's own packed
// matrices, run by run of consecutive rows that have the same adapter; rows without one are not touched. Where the linear is
// the token embedding, A x is a row of A: a lookup. Where the adapter has factors (DoRA), the sum is multiplied by them.
#include <algorithm>

#include "pack.h"
#include "program.h"

namespace mill {

namespace {

constexpr int kRunRows = 96;        // longest run that is one unit's work
constexpr int kExpandTiles = 16;    // tiles of outputs of a unit
constexpr double kValuesPerNs = 8;  // products, roughly

std::string say(const char* what, int64_t got, int64_t bound) {
  return std::string(what) + " (" + std::to_string(got) + " against " + std::to_string(bound) + ")";
}

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

}  // namespace

std::string Program::check_lora(const tm_op& op) const {
  const auto fits = [&](int index, int64_t width) {
    return index >= 0 && buffers_[index].rows == op.rows && buffers_[index].width == width &&
           buffers_[index].form == TM_FORM_F32;
  };
  if (op.lora == nullptr) return "no table of adapters";
  const tm_lora& lora = *op.lora;
  if (lora.num_slots < 1 || lora.num_matrices < 1 || lora.max_rank < kLanes || lora.max_rank % kLanes)
    return "bad table of adapters";
  if (lora.by_token && (lora.num_matrices != 1 || op.rows != TM_ROWS_TOKENS)) return "only a matrix of token rows is by tokens";
  if (op.code != TM_LORA_EXPAND && (op.code == TM_LORA_LOOKUP) != (lora.by_token != 0)) return "a lookup is by tokens";
  const int64_t narrow = static_cast<int64_t>(lora.num_matrices) * lora.max_rank;
  for (int m = 0; m < lora.num_matrices; m++)
    if (lora.columns[0] != 0 || width_of(lora, m) < 1) return "columns of adapters must rise from 0";
  const bool good = op.code == TM_LORA_SHRINK   ? fits(op.in0, lora.num_cols) && fits(op.out, narrow)
                    : op.code == TM_LORA_LOOKUP ? fits(op.out, narrow)
                        : fits(op.in0, narrow) && fits(op.out, lora.columns[lora.num_matrices]) && op.in1 == op.out;
  return good ? "" : "buffers do not fit";
}

// What a table holds is looked at in every step that uses it, because it may have been exchanged since the last.
std::string Program::check_adapters(const tm_step& step, const tm_op& op) const {
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

void Program::find_lora_runs() {
  for (int which = 0; which < 2; which++) {
    std::vector<LoraRun>& runs = lora_runs_[which];
    runs.clear();
    if (step_.adapters == nullptr) continue;
    const int rows = which == 0 ? step_.num_tokens : step_.num_logit_rows;
    for (int row = 0; row < rows; row++) {
      const int slot = step_.adapters[which == 0 ? row : step_.logit_rows[row]];
      if (slot == 0) continue;
      LoraRun* last = runs.empty() ? nullptr : &runs.back();
      if (last != nullptr && last->slot == slot && last->row0 + last->num_rows == row && last->num_rows < kRunRows)
        last->num_rows++;
      else
        runs.push_back({row, 1, slot});
    }
  }
}

// Units of a shrink: run x matrix x tile of 16 ranks. Units of an expand: run x block of output tiles. Of a lookup: run.
int Program::plan_lora(const Op& op, double* cost_ns) const {
  const tm_lora& lora = *op.op.lora;
  const std::vector<LoraRun>& runs = lora_runs(op.op);
  int rows = 0, units = lora.num_matrices * (lora.max_rank / kLanes);
  for (const LoraRun& run : runs) rows += run.num_rows;
  int64_t width = static_cast<int64_t>(lora.num_matrices) * lora.num_cols;
  if (op.op.code == TM_LORA_EXPAND) {
    units = 0;
    for (int m = 0; m < lora.num_matrices; m++) units += expand_blocks(lora, m);
    width = lora.columns[lora.num_matrices];
  }
  if (op.op.code == TM_LORA_LOOKUP) units = width = 1;
  *cost_ns = static_cast<double>(rows) * width * lora.max_rank / kValuesPerNs;
  return static_cast<int>(runs.size()) * units;
}

void Program::run_lora_shrink(const Op& op, int unit) {
  const tm_op& o = op.op;
  const tm_lora& lora = *o.lora;
  const int tiles = lora.max_rank / kLanes;
  const int tile = unit % tiles, matrix = unit / tiles % lora.num_matrices;
  const LoraRun& run = lora_runs(o)[unit / tiles / lora.num_matrices];
  const tm_low_rank& change = change_of(lora, run.slot, matrix);
  if (tile * kLanes >= change.rank) return;
  const Part part = part_of(change.a);
  LinearArgs args = {};
  args.part = &part;
  args.tile_bytes = tile_bytes(part.kind, part.num_cols);
  args.tile0 = tile;
  args.num_tiles = 1;
  args.x = rows_of(o.in0, 0);
  args.ld_x = lora.num_cols;
  args.row0 = run.row0;
  args.num_rows = run.num_rows;
  args.out = rows_of(o.out, run.row0) + matrix * lora.max_rank + tile * kLanes;
  args.ld_out = buffers_[o.out].width;
  kernels_->linear(&args);
  const int num_ranks = std::min(kLanes, change.rank - tile * kLanes);
  for (int row = 0; row < run.num_rows; row++) {
    float* values = args.out + row * args.ld_out;
    kernels_->scale(values, change.scale, num_ranks, values);
  }
}

void Program::run_lora_lookup(const Op& op, int unit) {
  const tm_op& o = op.op;
  const LoraRun& run = lora_runs(o)[unit];
  const tm_low_rank& change = change_of(*o.lora, run.slot, 0);
  if (change.rank == 0) return;
  const Part part = part_of(change.a);
  for (int row = run.row0; row < run.row0 + run.num_rows; row++) {
    float* values = rows_of(o.out, row);
    unpack_row(part, step_.tokens[row], values);
    kernels_->scale(values, change.scale, change.rank, values);
  }
}

void Program::run_lora_expand(const Op& op, int unit) {
  const tm_op& o = op.op;
  const tm_lora& lora = *o.lora;
  int per_run = 0;
  for (int m = 0; m < lora.num_matrices; m++) per_run += expand_blocks(lora, m);
  const LoraRun& run = lora_runs(o)[unit / per_run];
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
  args.x = rows_of(o.in0, 0) + matrix * lora.max_rank;
  args.ld_x = buffers_[o.in0].width;
  args.row0 = run.row0;
  args.num_rows = run.num_rows;
  args.out = rows_of(o.out, run.row0) + lora.columns[matrix] + args.tile0 * kLanes;
  args.ld_out = buffers_[o.out].width;
  args.residual = args.out;
  args.ld_residual = args.ld_out;
  kernels_->linear(&args);
  if (change.factors == nullptr) return;
  const float* factors = change.factors + args.tile0 * kLanes;
  const int num_columns = std::min(args.num_tiles * kLanes, part.num_rows - args.tile0 * kLanes);
  for (int row = 0; row < run.num_rows; row++) {
    float* values = args.out + row * args.ld_out;
    for (int i = 0; i < num_columns; i++) values[i] *= factors[i];
  }
}

}  // namespace mill
