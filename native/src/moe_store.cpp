// See moe_store.h.
#include "moe_store.h"

#include "stack.h"
#include "store.h"

namespace mill {

std::string check_experts_store(const tm_op& o) {
  const tm_stack &up = *o.stack, &down = *o.stack2;
  if (up.store == nullptr && down.store == nullptr) return "";
  if (up.store != down.store || up.extents == nullptr || down.extents == nullptr) return "experts of two stores";
  for (int e = 0; e < up.num_matrices; e++)
    for (const tm_stack* stack : {&up, &down}) {
      const tm_extent& extent = stack->extents[e];
      const bool is_good = extent.num_bytes >= stack->stride && extent.offset % 4096 == 0 && extent.num_bytes % 4096 == 0;
      if (!is_good) return say("the range of an expert", extent.num_bytes, stack->stride);
    }
  up.store->experts.add_layer(up.extents, down.extents, up.num_matrices);
  return up.store->experts.has_room() ? "" : "no room for an expert";
}

void begin_waves(Workspace& w, const tm_op& o) {
  ExpertRows& experts = w.experts;
  experts.wave_begin = 0;
  experts.wave_end = experts.runs.size();
  experts.order.clear();
  if (o.stack->store == nullptr || experts.runs.empty()) return;
  ExpertStore& store = o.stack->store->experts;
  experts.layer = store.add_layer(o.stack->extents, o.stack2->extents, o.stack->num_matrices);
  std::vector<int> ids, rows;
  for (const ExpertRun& run : experts.runs) {
    ids.push_back(run.expert);
    rows.push_back(run.num_rows);
  }
  store.begin(experts.layer, ids.data(), rows.data(), static_cast<int>(ids.size()), w.num_rows(o));
  experts.wave_end = 0;
}

bool next_wave(Workspace& w, const Op& op) {
  ExpertRows& experts = w.experts;
  if (op.op.stack->store == nullptr || experts.wave_end == experts.runs.size()) return false;
  const std::vector<int>& ready_first = op.op.stack->store->experts.next_wave();
  experts.wave_begin = experts.wave_end;
  experts.wave_end += ready_first.size();
  // Blocks in the order of their experts.
  experts.order.clear();
  std::vector<int> run_of(op.op.stack->num_matrices, -1);
  for (size_t run = experts.wave_begin; run < experts.wave_end; run++) run_of[experts.runs[run].expert] = static_cast<int>(run);
  for (int expert : ready_first)
    for (size_t block = 0; block < experts.blocks.size(); block++)
      if (experts.blocks[block].run == run_of[expert]) experts.order.push_back(static_cast<int>(block));
  return true;
}

Part expert_matrix(const Workspace& w, const tm_op& o, bool is_down, int expert) {
  const tm_stack& stack = is_down ? *o.stack2 : *o.stack;
  if (stack.store == nullptr) return matrix_of(stack, expert);
  ExpertStore& store = stack.store->experts;
  const uint8_t* data = is_down ? store.down(w.experts.layer, expert) : store.gate_up(w.experts.layer, expert);
  return {stack.kind, 0, stack.num_rows, stack.num_cols, data, stack.stride};
}

}  // namespace mill
