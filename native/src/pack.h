// Checkpoint rows -> packed tiles (see Part in kernels.h), and single rows back to float32.
#pragma once
#include <cstdint>

#include "integer_fit.h"
#include "kernels.h"
#include "team.h"

namespace mill {

// Bytes of one tile of 16 rows; tiles start at multiples of 64 bytes.
int64_t tile_bytes(int32_t kind, int64_t num_cols);

// Values of a block of a quantised kind.
inline int64_t block_values(int32_t kind) { return is_super(kind) ? kSuperblock : kGroup; }

// Bytes of one row as it comes to be packed, in blocks for the quantised kinds.
int64_t raw_row_bytes(int32_t kind, int64_t num_cols);

// Rows of one kind, stacked from several matrices.
struct RawRows {
  const uint8_t* const* data;
  const int64_t* num_rows;
  int count;
};

// Blocks of a row of an integer kind, each with a scale of its own.
inline int64_t integer_blocks(int64_t num_cols, int32_t kind) { return num_exact_blocks(kind, static_cast<int>(num_cols / kGroup)); }

// Whether an integer kind holds these rows well: adds little to the noise of the codes that they have. fits: what was
// found for each block, row by row; not all where the answer is no.
bool fits_integer(Team* team, int32_t kind, const RawRows& rows, int64_t num_cols, IntegerFit* fits);

// Whether packed bf16 has room for what these rows of bf16 have besides frequent exponents.
constexpr int64_t kMostPackedCols = int64_t{1} << 20;  // what the step of a patch can count
bool fits_packed(Team* team, const RawRows& rows, int64_t num_cols);

// Fill part.data, which the caller allocated with tile_bytes * ceil(num_rows / 16) bytes. Threads over tiles. fits: what
// fits_integer found, or null.
void pack(Team* team, const RawRows& rows, const Part& part, const IntegerFit* fits, uint8_t* out);

// Rows of a dense kind -> rows of to_kind, both as a checkpoint stores them. Threads over rows.
void quantise_rows(Team* team, int32_t from_kind, int32_t to_kind, int64_t num_rows, int64_t num_cols,
                   const uint8_t* data, uint8_t* out);

// Dequantised row of a packed part.
void unpack_row(const Part& part, int64_t row, float* out);

}  // namespace mill
