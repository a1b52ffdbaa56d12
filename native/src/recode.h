// Blocks as checkpoints store them -> blocks of the kinds that the kernels take.
#pragma once
#include <cstdint>

#include "kernels.h"
#include "team.h"

namespace mill {

enum Stored : int32_t {
  kStoredQ5_0 = 0, kStoredQ5_1 = 1, kStoredQ8_1 = 2, kStoredQ2_K = 3, kStoredQ3_K = 4, kStoredQ4_K = 5, kStoredQ5_K = 6,
  kStoredQ6_K = 7, kStoredQ8_K = 8, kStoredIQ4_NL = 9, kStoredIQ4_XS = 10, kStoredMXFP4 = 11, kStoredTQ2_0 = 12,
  kStoredTQ1_0 = 13, kStoredNVFP4 = 14, kStoredIQ1_S = 15, kStoredIQ1_M = 16, kStoredIQ2_XXS = 17, kStoredIQ2_XS = 18,
  kStoredIQ2_S = 19, kStoredIQ3_XXS = 20, kStoredIQ3_S = 21, kNumStored = 22
};

// Values and bytes of a stored block.
int stored_values(int32_t stored);
int stored_bytes(int32_t stored);

// Whether a format becomes this kind: the narrowest that keeps its codes, with a scale or with a factor of one for each group.
bool becomes(int32_t stored, int32_t kind);

// Bytes of the code book that a format's indices lead into; 0: it has none.
int book_bytes(int32_t stored);

// The factors of a super-block's 8 or 16 scales, and of as many minima where it has them, as its first words hold them: see kernels.h.
void write_factors(int32_t kind, const int8_t* scales, const int8_t* minima, uint8_t* words);
void read_factors(int32_t kind, const uint8_t* words, int8_t* scales, int8_t* minima);

// 32 codes as a block of a quantised kind holds them, behind its scales and minima.
void write_codes(int32_t kind, const int8_t* codes, uint8_t* to);

// Codes are moved, scales and minima rounded to float16. False where that would lose more than float16's own precision of
// the largest scale, or minimum, of all. Threads over blocks.
bool recode(Team* team, int32_t stored, int32_t kind, const int8_t* book, int64_t num_blocks, const uint8_t* data, uint8_t* out);

}  // namespace mill
