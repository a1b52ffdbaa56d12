// Stacks: packed matrices of one kind and shape.
#pragma once
#include <string>

#include "op.h"

namespace mill {

// Where matrix `index` begins, of a stack in memory. Nothing else reads its bytes.
inline const uint8_t* matrix_data(const tm_stack& stack, int index) { return stack.data + index * stack.stride; }

inline Part matrix_of(const tm_stack& stack, int index) {
  return {stack.kind, 0, stack.num_rows, stack.num_cols, matrix_data(stack, index), stack.stride};
}

// What is wrong with a stack; empty where nothing is. Only experts may be in a store.
std::string check_stack(const tm_stack* stack, bool may_be_stored = false);

}  // namespace mill
