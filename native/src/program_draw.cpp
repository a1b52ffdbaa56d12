// The ends of a step: tokens that earlier steps drew become its inputs, and its logits become tokens. Both inside the call,
// so that a step need not wait for the results of the one before to have been looked at.
#include <algorithm>

#include "program.h"
#include "sample.h"

namespace mill {

std::string Program::check_draws(const tm_step& step, const tm_draws& draws) const {
  if (step.num_tokens < 0 || step.num_tokens > space_.limits.max_tokens) return "too many tokens";
  if (draws.num_rows < 0 || draws.num_rows > step.num_logit_rows) return "more draws than rows of logits";
  for (int i = 0; i < draws.num_rows; i++)
    if (draws.slots[i] < 0 || draws.slots[i] >= draws.num_slots) return "a draw's slot is out of range";
  for (int i = 0; i < step.num_tokens; i++)
    if (step.tokens[i] < 0 && ~step.tokens[i] >= draws.num_slots) return "a token's slot is out of range";
  if (draws.num_rows == 0) return "";
  if (draws.logits < 0 || draws.logits >= static_cast<int>(space_.buffers.size())) return "unknown buffer of logits";
  const tm_buffer& logits = space_.buffers[draws.logits];
  return logits.rows == TM_ROWS_LOGITS && logits.form == TM_FORM_F32 ? "" : "a buffer that holds no logits";
}

void Program::fill_in_drawn(const tm_draws& draws) {
  for (int i = 0; i < space_.step.num_tokens; i++)
    tokens_[i] = space_.step.tokens[i] < 0 ? draws.drawn[~space_.step.tokens[i]] : space_.step.tokens[i];
  space_.step.tokens = tokens_.data();
}

void Program::draw(int row, int thread) {
  const int num_cols = space_.buffers[draws_->logits].width;
  const float* logits = space_.rows_of(draws_->logits, space_.step.num_logit_rows - draws_->num_rows + row);
  char* scratch = static_cast<char*>(draws_->scratch) + thread * sample_scratch_bytes(num_cols);
  const int32_t token = sample_row(space_.kernels, logits, num_cols, sampling_row(draws_->how, row), scratch);
  draws_->tokens[row] = token;
  draws_->drawn[draws_->slots[row]] = std::max(token, 0);  // a step that follows already must find some token
}

}  // namespace mill
