// Drawing tokens from rows of logits and telling their log probabilities.
#pragma once
#include <cstdint>

#include "../include/tokenmill_native.h"
#include "kernels.h"

namespace mill {

struct SamplingRow {
  float temperature;  // 0 = greedy
  int32_t top_k;      // 0 = off
  float top_p;        // 1 = off
  float min_p;        // 0 = off
  uint64_t seed;
  int32_t choice, position;
  float typical_p;        // 1 = off
  float top_n_sigma;      // 0 = off
  float xtc_probability;  // 0 = off
  float xtc_threshold;
};

inline SamplingRow sampling_row(const tm_sampling& how, int64_t row) {
  const auto of = [&](const float* column, float off) { return column == nullptr ? off : column[row]; };
  return {how.temperature[row], how.top_k[row],  how.top_p[row],   how.min_p[row],
          how.seed[row],        how.choice[row], how.position[row], of(how.typical_p, 1.0f),
          of(how.top_n_sigma, 0.0f), of(how.xtc_probability, 0.0f), of(how.xtc_threshold, 1.0f)};
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
