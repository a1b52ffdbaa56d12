// What an operation is: a row of a table, one table for each family (op_rows.cpp, op_heads.cpp, op_linear.cpp, op_lora.cpp,
// op_attention.cpp, op_latent.cpp, op_stacks.cpp, op_moe.cpp). The interpreter (program.cpp) knows an operation by nothing else. docs/develop/write-an-op.md adds one.
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

// Heads and KV of an operation: op_heads.cpp.
std::string check_heads(const Workspace& w, const tm_op& o);
// A weight's parts line up and hold all their bytes: op_linear.cpp.
std::string check_weight(const Workspace& w, const tm_op& o);

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

inline bool is_activation(int32_t code) { return code == TM_SILU || code == TM_GELU || code == TM_GELU_ERF; }

inline std::string say(const char* what, int64_t got, int64_t bound) {
  return std::string(what) + " (" + std::to_string(got) + " against " + std::to_string(bound) + ")";
}

inline std::string unless(bool good) { return good ? "" : "buffers do not fit"; }

}  // namespace mill
