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
  for (int i = 0; i < draws.num_rows && draws.num_top != nullptr; i++)
    if (draws.num_top[i] > draws.top_width) return "more alternatives than there is room for";
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
  const SamplingRow how = sampling_row(draws_->how, row);
  const tm_adjustment* adjustment = draws_->adjustments == nullptr ? nullptr : draws_->adjustments[row];
  const int32_t token = adjustment == nullptr
                            ? sample_row(space_.kernels, logits, num_cols, how, scratch)
                            : sample_adjusted_row(space_.kernels, logits, num_cols, how, *adjustment, scratch);
  draws_->tokens[row] = token;
  draws_->drawn[draws_->slots[row]] = std::max(token, 0);  // a step that follows already must find some token
  if (draws_->num_top == nullptr || draws_->num_top[row] < 0) return;
  const int64_t at = static_cast<int64_t>(row) * draws_->top_width;
  logprobs_row(space_.kernels, logits, num_cols, std::max(token, 0), draws_->num_top[row], draws_->logprobs + row,
               draws_->ranks + row, draws_->top_ids + at, draws_->top_logprobs + at, scratch);
}

}  // namespace mill
