// See workspace.h.
#include "workspace.h"

#include <algorithm>

namespace mill {

void Workspace::reserve(const std::vector<Op>& ops) {
  needs_low_sums_.resize(buffers.size());
  for (const Op& op : ops) {
    for (const Part& part : op.parts)
      if (sums_halves(part.kind) && op.op.in1 >= 0) needs_low_sums_[op.op.in1] = true;
    const tm_op& o = op.op;
    const int stack_input = o.stack2 == nullptr ? o.in1 : o.in0;
    if (o.stack != nullptr && sums_halves(o.stack->kind) && stack_input >= 0) needs_low_sums_[stack_input] = true;
    if (o.stack2 != nullptr && sums_halves(o.stack2->kind)) needs_low_sums_[o.in2] = true;
    if (o.stack2 != nullptr)
      experts.reserve(static_cast<int64_t>(buffers[o.in1].max_rows) * o.moe->top_k, o.moe->num_experts, team->num_threads() + 1);
    if (op.kind->takes_rounded != nullptr && op.kind->takes_rounded(*this, op)) {
      const int64_t rows = buffers[op.op.in0].max_rows + kLanes;
      rounded_lines_ = std::max(rounded_lines_, rows * rounded_stride(op.op.weight->num_cols) / 32);
    }
    int64_t floats = op.op.width;
    if (op.kind->thread_floats != nullptr) floats = std::max(floats, op.kind->thread_floats(*this, op));
    floats_per_thread_ = std::max(floats_per_thread_, (floats + 15) / 16 * 16);
  }
  rounded_.reset(new RoundedLine[2 * rounded_lines_ + 1]);
  // One set more than threads: small operations run where the step is being advanced.
  thread_floats_.resize(floats_per_thread_ * (team->num_threads() + 1) + kLanes);
  attention.reserve(team->num_threads() + 1);
  row_sequence.resize(limits.max_tokens);
}

bool Workspace::fits(int buffer, int rows, int64_t width, int form) const {
  return buffer >= 0 && buffers[buffer].rows == rows && buffers[buffer].width == width && buffers[buffer].form == form;
}

bool Workspace::fits_any_form(int buffer, int rows, int64_t width) const {
  if (fits(buffer, rows, width)) return true;
  return width % kGroup == 0 && (fits(buffer, rows, width, TM_FORM_QUANTISED) || fits(buffer, rows, width, TM_FORM_WIDE));
}

Quantised Workspace::quantised(int buffer) const {
  const tm_buffer& b = buffers[buffer];
  const int64_t groups = b.width / kGroup;
  const int64_t slots = static_cast<int64_t>(ceil_div(b.max_rows, kPanel)) * kPanel * groups;
  Quantised q;
  q.codes = static_cast<int8_t*>(b.data);
  q.facts = reinterpret_cast<GroupFacts*>(q.codes + slots * kGroup);
  q.low_sums = needs_low_sums_[buffer] ? reinterpret_cast<int32_t*>(q.facts + slots) : nullptr;
  q.num_groups = static_cast<int32_t>(groups);
  return q;
}

Wide Workspace::wide(int buffer) const {
  const tm_buffer& b = buffers[buffer];
  Wide w;
  w.codes = static_cast<int8_t*>(b.data);
  w.panel_bytes = wide_panel_bytes(b.width);
  w.scales = reinterpret_cast<float*>(w.codes + ceil_div(b.max_rows, kWidePanel) * w.panel_bytes);
  return w;
}

void Workspace::quantise_row(const float* from, int buffer, int row) const {
  const int width = buffers[buffer].width;
  if (buffers[buffer].form == TM_FORM_WIDE) {
    const Wide out = wide(buffer);
    return kernels->quantise_wide(from, width, &out, row);
  }
  const Quantised out = quantised(buffer);
  kernels->quantise_row(from, &out, row, 0, width / kGroup);
}

}  // namespace mill
