// Drawing tokens from rows of logits and telling their log probabilities.
#pragma once
#include <cstdint>

#include "../include/tokenmill_native.h"
#include "kernels.h"

namespace mill {

// The settings of one row; what has no column is off. What each means, and which value is off: core/sampling.py.
struct SamplingRow {
#define TM_COLUMN(type, name, off) type name;
  TM_SAMPLING_COLUMNS(TM_COLUMN)
#undef TM_COLUMN
};

inline SamplingRow sampling_row(const tm_sampling& how, int64_t row) {
#define TM_COLUMN(type, name, off) how.name == nullptr ? static_cast<type>(off) : how.name[row],
  return {TM_SAMPLING_COLUMNS(TM_COLUMN)};
#undef TM_COLUMN
}

// Bytes of scratch one row needs.
int64_t sample_scratch_bytes(int64_t num_cols);

// The token; -1 where not all logits are finite.
int32_t sample_row(const Kernels* kernels, const float* logits, int num_cols, const SamplingRow& how, void* scratch);

// The same from adjusted logits, which leaves `logits` as they are; TM_MASK_LATE where the adjustment's mask does not come. The
// token is appended to its history. This scratch must have been zeros at first.
int32_t sample_adjusted_row(const Kernels* kernels, const float* logits, int num_cols, const SamplingRow& how,
                            const tm_adjustment& adjustment, void* scratch);

// Where not all logits are finite, the rank is 0 and the log probabilities are NaN.
void logprobs_row(const Kernels* kernels, const float* logits, int num_cols, int32_t token, int num_top,
                  float* logprob, int32_t* rank, int32_t* top_ids, float* top_logprobs, void* scratch);

}  // namespace mill
