// What an operation is: a row of a table, one table for each family (op_rows.cpp, op_heads.cpp, op_linear.cpp, op_lora.cpp,
// op_attention.cpp, op_latent.cpp, op_stacks.cpp, op_moe.cpp, op_state.cpp). The interpreter (program.cpp) knows an operation by nothing else. docs/develop/write-an-op.md adds one.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../include/tokenmill_native.h"
#include "kernels.h"

namespace mill {

class Workspace;
struct OpKind;

// An operation of a program.
struct Op {
  tm_op op;
  const OpKind* kind;
  std::vector<Part> parts;  // of its weight
  int place;                // in the list that was given
  int rounded_in = 0, rounded_out = -1;  // sets of rounded rows that it reads and writes; -1 for none
  bool keeps = true;  // its output; false where its one reader takes it rounded
};

// Null stands for what a kind does not need. An operation is cut into units of work, which any thread may do in any order: a
// unit owns whole output values and makes each of them as if it were alone, so no cut changes a bit.
struct OpKind {
  const char* name;
  // What is wrong with an operation of a list; empty where nothing is.
  std::string (*check)(const Workspace&, const tm_op&) = nullptr;
  // Cuts it for the step under way: the number of units, and what all of them cost one thread, roughly.
  int (*plan)(Workspace&, const Op&, double* cost_ns) = nullptr;
  void (*run)(Workspace&, const Op&, int unit, int thread) = nullptr;
  // What is wrong with a step; asked once for all operations that have the same weight, vector and table of adapters.
  std::string (*check_step)(const Workspace&, const tm_op&, const tm_step&) = nullptr;
  // Room that a thread needs, in floats, besides a row of its output.
  int64_t (*thread_floats)(const Workspace&, const Op&) = nullptr;
  // Whether it takes in0 rounded to bf16; and whether it can leave its output so, for the one after it.
  bool (*takes_rounded)(const Workspace&, const Op&) = nullptr;
  bool (*makes_rounded)(const Workspace&, const Op&) = nullptr;
  const OpKind* then = nullptr;  // a kind that comes after each of these
  // Of such a kind, once it has ended: whether both must be done once more.
  bool (*again)(Workspace&, const Op&) = nullptr;
};

// Runs of rows of the step that share an adapter: op_lora.cpp.
void find_lora_runs(Workspace& w);

// Null for a name that no table has.
const OpKind* find_op(const char* name);

// The same for rows of float32 into a set of rounded rows.
extern const OpKind kRoundRows;

// ---- for tables

int plan_rows(Workspace& w, const Op& op, double* cost_ns);
void find_rows(const Workspace& w, const Op& op, int unit, int* begin, int* end);

// A kind that makes each row by itself.
template <void (*Row)(Workspace&, const Op&, int row, int thread)>
void run_rows(Workspace& w, const Op& op, int unit, int thread) {
  int begin, end;
  find_rows(w, op, unit, &begin, &end);
  for (int row = begin; row < end; row++) Row(w, op, row, thread);
}

// Gates and what they are multiplied by, of some rows and groups of inner values: row counts from the first of the call. Where
// nothing is gated, `gate` has all there is.
struct GateUp {
  alignas(64) float gate[kPanel][kGatedGroups * kGroup], up[kPanel][kGatedGroups * kGroup];
  int row, num_rows, group, num_groups;

  static constexpr int64_t kStride = kGatedGroups * kGroup;  // from one row to the next
};

// `use(GateUp*)` for the groups [begin, end) of a weight of `width` gates and then as many ups (0: of one that is not gated), and
// all rows of the arguments, of which it makes the rest. Weights that come from memory are read in long runs; what passes again comes from a cache, where less
// at a time is better.
template <class Use>
void each_gate_up(const Kernels& kernels, LinearArgs args, int width, int begin, int end, const Use& use) {
  GateUp both;
  const int row0 = args.row0, num_rows = args.num_rows, most_groups = num_rows > kPanel ? 1 : kGatedGroups;
  args.ld_out = GateUp::kStride;
  for (both.row = 0; both.row < num_rows; both.row += kPanel) {
    both.num_rows = std::min(kPanel, num_rows - both.row);
    args.row0 = row0 + both.row;
    args.num_rows = both.num_rows;
    for (both.group = begin; both.group < end; both.group += both.num_groups) {
      both.num_groups = std::min(most_groups, end - both.group);
      args.num_tiles = both.num_groups * (kGroup / kLanes);
      args.tile0 = both.group * (kGroup / kLanes);
      args.out = both.gate[0];
      kernels.linear(&args);
      if (width > 0) {
        args.tile0 += width / kLanes;
        args.out = both.up[0];
        kernels.linear(&args);
      }
      use(&both);
    }
  }
}

// act(gate) * up of them, as codes of rows of `out` from out_row on.
inline void gate_into_codes(const Kernels& kernels, int activation, const GateUp& both, const Quantised& out, int out_row) {
  for (int i = 0; i < both.num_groups; i++)
    kernels.gated_group(activation, both.gate[0] + i * kGroup, both.up[0] + i * kGroup, GateUp::kStride, both.num_rows, &out,
                        out_row + both.row, both.group + i);
}

// A pool of states; and what is wrong with the table of a sequence that has rows for the positions [begin, end): op_state.cpp.
inline bool is_of_states(const tm_kv& kv) { return kv.num_kv_heads == 0; }
std::string check_states(const int32_t* table, int64_t begin, int64_t end, const int32_t* further, const tm_kv& kv);

// Heads and KV of an operation: op_heads.cpp.
std::string check_heads(const Workspace& w, const tm_op& o);
// A weight's parts line up and hold all their bytes: op_linear.cpp.
std::string check_weight(const Workspace& w, const tm_op& o);

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Of a gate, which something is multiplied by.
inline bool is_gating(int32_t code) { return code == TM_SILU || code == TM_GELU || code == TM_GELU_ERF; }

inline std::string say(const char* what, int64_t got, int64_t bound) {
  return std::string(what) + " (" + std::to_string(got) + " against " + std::to_string(bound) + ")";
}

inline std::string unless(bool good) { return good ? "" : "buffers do not fit"; }

}  // namespace mill
