// What a sequence's settings do to its logits before a token is drawn.
#pragma once
#include <cstdint>

#include "../include/tokenmill_native.h"

namespace mill {

// The logit of a token that must not be drawn.
constexpr float kNever = -3.40282346638528859812e38f;

// Writes to `adjusted` what a row of logits becomes with num_output tokens drawn before. counts: [num_cols] zeros, and zeros
// again afterwards. False where the row's mask has not come in time.
bool adjust_row(const tm_adjustment& how, int num_output, const float* logits, float* adjusted, int num_cols,
                uint32_t* counts);

}  // namespace mill
