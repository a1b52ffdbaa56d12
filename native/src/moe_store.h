// Experts of an operation whose stacks are in a store: see expert_store.h. A step meets them in waves, each a run of experts in
// rising order, so that sums grow in the order in which they would if all were in memory.
#pragma once
#include <string>

#include "workspace.h"

namespace mill {

// Experts are in memory or in one store, gate and up with down. The layer is made known to the store.
std::string check_experts_store(const tm_op& o);

// The step's experts were found: the first wave of them.
void begin_waves(Workspace& w, const tm_op& o);
// The next wave, once all of this one is computed; false where there is none.
bool next_wave(Workspace& w, const Op& op);

// A matrix of an expert of the wave: of gate and up, or down. Waits for it.
Part expert_matrix(const Workspace& w, const tm_op& o, bool is_down, int expert);

}  // namespace mill
