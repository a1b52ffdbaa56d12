// Blocks as checkpoints store them -> blocks of the kinds that the kernels take.
#pragma once
#include <cstdint>

#include "team.h"

namespace mill {

enum Stored : int32_t {
  kStoredQ5_0 = 0, kStoredQ5_1 = 1, kStoredQ8_1 = 2, kStoredQ2_K = 3, kStoredQ3_K = 4, kStoredQ4_K = 5, kStoredQ5_K = 6,
  kStoredQ6_K = 7, kStoredQ8_K = 8, kStoredIQ4_NL = 9, kStoredIQ4_XS = 10, kStoredMXFP4 = 11, kStoredTQ2_0 = 12,
  kNumStored = 13
};

// Values and bytes of a stored block.
int stored_values(int32_t stored);
int stored_bytes(int32_t stored);

// The kind that a format becomes: the narrowest that keeps its codes.
int32_t recoded_kind(int32_t stored);

// Codes are moved, scales and minima rounded to float16. False where that would lose more than float16's own precision of
// the largest scale, or minimum, of all. Threads over blocks.
bool recode(Team* team, int32_t stored, int64_t num_blocks, const uint8_t* data, uint8_t* out);

}  // namespace mill
