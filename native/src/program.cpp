// See program.h. How an operation is cut into units depends on shapes only where that helps balance; no cut changes a
// bit, because a unit owns whole output values and walks their inputs in the fixed order.
#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kv_layout.h"
#include "pack.h"

namespace mill {

namespace {

constexpr double kInlineNs = 2500;  // below this, handing work to another thread costs more than it saves
constexpr double kDrawNs = 10000;       // of a row, at least
constexpr int kAttentionMerge = 1000;  // follows every attention; idle unless spans were split
constexpr int kRoundRows = 1001;       // comes before a linear with bf16 weights where its kernel wants rounded inputs

bool is_activation(int32_t code) { return code == TM_SILU || code == TM_GELU || code == TM_GELU_ERF; }

// Rows of a head.
struct NoNumbers {
  float nans[kMaxHeadDim], zeros[kMaxHeadDim] = {};
  NoNumbers() { std::fill(nans, nans + kMaxHeadDim, std::numeric_limits<float>::quiet_NaN()); }
};

std::string say(const char* what, int64_t got, int64_t bound) {
  return std::string(what) + " (" + std::to_string(got) + " against " + std::to_string(bound) + ")";
}

}  // namespace

Program::Program(Team* team, const Kernels* kernels, const tm_op* ops, int num_ops, const tm_buffer* buffers,
                 int num_buffers, const tm_limits& limits, void* scratch, int64_t scratch_bytes, std::string* error)
    : team_(team), kernels_(kernels), buffers_(buffers, buffers + num_buffers), limits_(limits),
      scratch_(static_cast<float*>(scratch)), scratch_floats_(scratch_bytes / 4) {
  for (int i = 0; i < num_ops; i++) {
    Op op{ops[i], {}, i};
    if (ops[i].weight != nullptr)
      for (int p = 0; p < ops[i].weight->num_parts; p++) {
        const tm_part& part = ops[i].weight->parts[p];
        op.parts.push_back({part.kind, part.column0, part.num_rows, part.num_cols, part.data, part.num_bytes});
      }
    if (takes_rounded(op)) round_inputs(&op, ops, num_ops);
    ops_.push_back(op);
    if (op.op.kv != nullptr && std::find(pools_.begin(), pools_.end(), op.op.kv) == pools_.end()) pools_.push_back(op.op.kv);
    if (ops[i].code == TM_ATTENTION) {
      op.op.code = kAttentionMerge;
      ops_.push_back(op);
    }
  }
  *error = check_list();
  if (!error->empty()) return;
  needs_low_sums_.resize(buffers_.size());
  for (const Op& op : ops_)
    for (const Part& part : op.parts)
      if (has_halves(part.kind) && op.op.in1 >= 0) needs_low_sums_[op.op.in1] = true;
  for (const Op& op : ops_) {
    if (!takes_rounded(op)) continue;
    const int64_t rows = buffers_[op.op.in0].max_rows + kLanes;
    rounded_lines_ = std::max(rounded_lines_, rows * rounded_stride(op.op.weight->num_cols) / 32);
  }
  rounded_.reset(new RoundedLine[2 * rounded_lines_ + 1]);
  for (const Op& op : ops_) {
    int64_t floats = op.op.width;
    if (op.op.code == TM_ATTENTION) floats = std::max(floats, attention_floats(op.op));
    for (const Part& part : op.parts)
      if (is_integer(part.kind) || takes_rounded(op)) floats = std::max(floats, linear_floats(op.op));
    floats_per_thread_ = std::max(floats_per_thread_, (floats + 15) / 16 * 16);
  }
  // One set more than threads: small operations run where the step is being advanced.
  thread_floats_.resize(floats_per_thread_ * (team->num_threads() + 1) + kLanes);
  prepared_.resize(static_cast<size_t>(team->num_threads() + 1) * kPreparedSpans);
  row_sequence_.resize(limits.max_tokens);
  tokens_.resize(limits.max_tokens);
}

// The inputs of a linear with bf16 weights on tiles are rounded once: by what makes them, where that comes right before and
// can, else by an operation of its own. One set of rows may be read while the next is written.
void Program::round_inputs(Op* op, const tm_op* ops, int num_ops) {
  const int input = op->op.in0, set = num_rounded_++ % 2;
  op->rounded_in = set;
  if (!ops_.empty() && ops_.back().op.out == input) {
    Op& maker = ops_.back();
    if (maker.op.code == TM_RMS_NORM || (maker.op.code == TM_LINEAR_GATED && takes_rounded(maker))) {
      int num_readers = 0;
      for (int i = 0; i < num_ops; i++) num_readers += (ops[i].in0 == input) + (ops[i].in1 == input) + (ops[i].in2 == input);
      maker.rounded_out = set;
      const auto reads_floats = [](const Part& part) { return !is_quantised(part.kind) && part.kind != kBF16; };
      maker.keeps = num_readers > 1 || std::any_of(op->parts.begin(), op->parts.end(), reads_floats);
      return;
    }
  }
  Op rounding{{}, {}, op->place};
  rounding.op.code = kRoundRows;
  rounding.op.rows = op->op.rows;
  rounding.op.in0 = input;
  rounding.op.in1 = rounding.op.in2 = rounding.op.out = -1;
  rounding.op.width = op->op.weight->num_cols;
  rounding.rounded_out = set;
  ops_.push_back(rounding);
}

// ---------------------------------------------------------------------------------------------- checks at the border

std::string Program::check_list() const {
  for (const tm_buffer& b : buffers_) {
    if (b.data == nullptr || b.num_bytes < tm_buffer_bytes(b.form, b.max_rows, b.width))
      return say("a buffer is too small", b.num_bytes, tm_buffer_bytes(b.form, b.max_rows, b.width));
    const int need = b.rows == TM_ROWS_TOKENS ? limits_.max_tokens : limits_.max_logit_rows;
    if (b.max_rows < need) return say("a buffer holds too few rows", b.max_rows, need);
  }
  for (const Op& op : ops_) {
    if (op.op.code >= kAttentionMerge) continue;
    const std::string wrong = check_op(op.op);
    if (!wrong.empty()) return "operation " + std::to_string(op.op.code) + ": " + wrong;
  }
  return "";
}

std::string Program::check_op(const tm_op& op) const {
  const int count = static_cast<int>(buffers_.size());
  for (int index : {op.in0, op.in1, op.in2, op.out})
    if (index < -1 || index >= count) return say("unknown buffer", index, count);
  const auto fits = [&](int index, int rows, int64_t width, int form) {
    return index >= 0 && buffers_[index].rows == rows && buffers_[index].width == width && buffers_[index].form == form;
  };
  const auto any_form = [&](int index, int64_t width) {
    return fits(index, op.rows, width, TM_FORM_F32) ||
           (width % kGroup == 0 && (fits(index, op.rows, width, TM_FORM_QUANTISED) || fits(index, op.rows, width, TM_FORM_WIDE)));
  };
  const auto form_of = [](int32_t kind) {
    return is_integer(kind) ? TM_FORM_WIDE : is_quantised(kind) ? TM_FORM_QUANTISED : TM_FORM_F32;
  };
  const bool has_heads = (op.code >= TM_ROPE && op.code <= TM_ATTENTION) || op.code == TM_NORM_HEADS;
  const int64_t qkv = has_heads ? static_cast<int64_t>(op.num_heads + 2 * op.num_kv_heads) * op.head_dim : 0;
  if (has_heads) {
    if (op.num_kv_heads < 1 || op.num_heads % op.num_kv_heads) return "heads must divide into KV heads";
    if (op.head_dim < 2 || op.head_dim % 2 || op.head_dim > kMaxHeadDim) return say("bad head size", op.head_dim, kMaxHeadDim);
    if (op.rows != TM_ROWS_TOKENS) return "needs token rows";
    if (op.kv != nullptr) {
      const tm_kv& kv = *op.kv;
      if (kv.num_kv_heads != op.num_kv_heads || kv.head_dim != op.head_dim) return "the KV pool has other heads";
      if (op.layer < 0 || op.layer >= kv.num_layers) return say("unknown layer", op.layer, kv.num_layers);
      if (kv.table < 0) return say("unknown block table", kv.table, 0);
      if (kv.block_size < 1 || kv.dtype < kF32 || kv.dtype > kInt8) return "bad KV pool";
      const int64_t need = kv.num_layers * KVLayout(kv).layer_bytes();
      if (kv.bytes_per_block != need) return say("bytes of a KV block", kv.bytes_per_block, need);
    }
  }
  if (op.code == TM_EMBED || op.code == TM_LINEAR || op.code == TM_LINEAR_GATED) {
    if (op.weight == nullptr) return "no weight";
    int64_t column = 0;
    for (int p = 0; p < op.weight->num_parts; p++) {
      const tm_part& part = op.weight->parts[p];
      if (part.column0 != column || part.num_cols != op.weight->num_cols) return "parts do not line up";
      const int64_t need = tm_packed_bytes(part.kind, part.num_rows, part.num_cols);
      if (need < 0 || part.num_bytes < need) return say("bytes of a packed part", part.num_bytes, need);
      if (is_integer(part.kind) && !kernels_->has_tiles) return "integer kinds need tiles";
      if (op.code == TM_LINEAR) {
        const int form = form_of(part.kind);
        if (!fits(form == TM_FORM_F32 ? op.in0 : op.in1, op.rows, part.num_cols, form)) return "input does not fit the weight";
      }
      column += part.num_rows;
    }
    if (column != op.weight->num_rows) return "parts do not add up";
  }
  bool good = false;
  switch (op.code) {
    case TM_EMBED:
      good = op.rows == TM_ROWS_TOKENS && fits(op.out, op.rows, op.weight->num_cols, TM_FORM_F32) &&
             op.width == op.weight->num_cols && op.weight->num_parts >= 1;
      break;
    case TM_RMS_NORM:
    case TM_LAYER_NORM:
      good = fits(op.in0, op.rows, op.width, TM_FORM_F32) && any_form(op.out, op.width) && op.vector_rows == op.width &&
             (op.code == TM_RMS_NORM || op.vector2_rows == op.width);
      break;
    case TM_NORM_HEADS: {
      const bool by_head = op.vector_rows == op.head_dim && op.vector2_rows == op.head_dim;
      const bool together = op.vector_rows == static_cast<int64_t>(op.num_heads) * op.head_dim &&
                            op.vector2_rows == static_cast<int64_t>(op.num_kv_heads) * op.head_dim;
      good = fits(op.in0, op.rows, qkv, TM_FORM_F32) && fits(op.out, op.rows, qkv, TM_FORM_F32) && (by_head || together);
      break;
    }
    case TM_ADD_BIAS:
    case TM_SCALE:
    case TM_SOFT_CAP:
      good = fits(op.in0, op.rows, op.width, TM_FORM_F32) && fits(op.out, op.rows, op.width, TM_FORM_F32) &&
             (op.code != TM_ADD_BIAS || op.vector_rows == op.width) && (op.code != TM_SOFT_CAP || op.cap > 0);
      break;
    case TM_ACTIVATE:
      good = fits(op.in0, op.rows, op.width, TM_FORM_F32) && any_form(op.out, op.width) && is_activation(op.activation);
      break;
    case TM_QUANTISE:
      good = fits(op.in0, op.rows, op.width, TM_FORM_F32) && any_form(op.out, op.width) &&
             buffers_[op.out].form != TM_FORM_F32;
      break;
    case TM_LINEAR:
      good = fits(op.out, op.rows, op.weight->num_rows, TM_FORM_F32) &&
             (op.in2 < 0 || fits(op.in2, op.rows, op.weight->num_rows, TM_FORM_F32));
      break;
    case TM_LINEAR_GATED: {
      const int32_t kind = op.weight->parts[0].kind;
      const bool rounded = kind == kBF16 && kernels_->has_tiles;
      good = is_activation(op.activation) && op.weight->num_parts == 1 && (is_quantised(kind) || rounded) &&
             op.width % kGroup == 0 && op.weight->num_rows == 2 * op.width &&
             fits(rounded ? op.in0 : op.in1, op.rows, op.weight->num_cols, form_of(kind)) &&
             fits(op.out, op.rows, op.width, rounded || is_integer(kind) ? TM_FORM_F32 : TM_FORM_QUANTISED);
      break;
    }
    case TM_ADD:
      good = fits(op.in0, op.rows, op.width, TM_FORM_F32) && fits(op.in1, op.rows, op.width, TM_FORM_F32) &&
             fits(op.out, op.rows, op.width, TM_FORM_F32);
      break;
    case TM_GATED:
      good = is_activation(op.activation) && fits(op.in0, op.rows, 2 * static_cast<int64_t>(op.width), TM_FORM_F32) &&
             fits(op.out, op.rows, op.width, TM_FORM_F32);
      break;
    case TM_ROPE:
      good = fits(op.in0, op.rows, qkv, TM_FORM_F32) && fits(op.out, op.rows, qkv, TM_FORM_F32) && op.vector_rows > 0 &&
             op.num_turned >= 2 && op.num_turned % 2 == 0 && op.num_turned <= op.head_dim;
      break;
    case TM_WRITE_KV:
      good = fits(op.in0, op.rows, qkv, TM_FORM_F32) && op.kv != nullptr;
      break;
    case TM_ATTENTION: {
      const int64_t mixed = static_cast<int64_t>(op.num_heads) * op.head_dim;
      good = fits(op.in0, op.rows, qkv, TM_FORM_F32) && op.kv != nullptr && op.window >= 0 && op.cap >= 0 &&
             (fits(op.out, op.rows, mixed, TM_FORM_F32) ||
              (op.head_dim % kGroup == 0 && fits(op.out, op.rows, mixed, TM_FORM_QUANTISED)));
      break;
    }
    case TM_GATHER:
      good = op.rows == TM_ROWS_LOGITS && fits(op.in0, TM_ROWS_TOKENS, op.width, TM_FORM_F32) &&
             fits(op.out, TM_ROWS_LOGITS, op.width, TM_FORM_F32);
      break;
    case TM_PICK:
      good = fits(op.in0, op.rows, op.width, TM_FORM_F32) && fits(op.out, op.rows, op.width, TM_FORM_F32) &&
             op.in0 != op.out && op.order != nullptr;
      for (int k = 0; good && k < op.width; k++) good = op.order[k] >= 0 && op.order[k] < op.width;
      break;
    case TM_LORA_SHRINK:
    case TM_LORA_LOOKUP:
    case TM_LORA_EXPAND: return check_lora(op);
    default: return "unknown operation";
  }
  return good ? "" : "buffers do not fit";
}

std::string Program::check_step(const tm_step& step) const {
  if (step.num_tokens < 0 || step.num_tokens > limits_.max_tokens)
    return say("too many tokens", step.num_tokens, limits_.max_tokens);
  if (step.num_seqs < 0 || step.num_seqs > limits_.max_seqs)
    return say("too many sequences", step.num_seqs, limits_.max_seqs);
  if (step.num_logit_rows < 0 || step.num_logit_rows > limits_.max_logit_rows)
    return say("too many logit rows", step.num_logit_rows, limits_.max_logit_rows);
  if (step.table_width < 0 || step.table_width > limits_.max_blocks_per_seq)
    return say("too many blocks per sequence", step.table_width, limits_.max_blocks_per_seq);
  for (int i = 0; i < step.num_logit_rows; i++)
    if (step.logit_rows[i] < 0 || step.logit_rows[i] >= step.num_tokens)
      return say("logit row out of range", step.logit_rows[i], step.num_tokens);
  const auto within = [&](const int32_t* values, int64_t bound) {
    for (int i = 0; i < step.num_tokens; i++)
      if (values[i] < 0 || values[i] >= bound) return i;
    return -1;
  };
  int64_t num_positions = INT64_MAX;
  for (const Op& op : ops_) {
    if (op.op.code == TM_EMBED) {
      const int32_t* ids = op.op.by_place ? step.places : step.tokens;
      if (ids == nullptr) return "the step has no places";
      const int bad = within(ids, op.op.weight->num_rows);
      if (bad >= 0) return say(op.op.by_place ? "place out of range" : "token id out of range", ids[bad], op.op.weight->num_rows);
    }
    if (op.op.code == TM_ROPE && op.op.vector_rows < num_positions) {
      num_positions = op.op.vector_rows;
      const int bad = within(step.positions, num_positions);
      if (bad >= 0) return say("position out of range", step.positions[bad], num_positions);
    }
    if ((op.op.code == TM_LORA_SHRINK || op.op.code == TM_LORA_LOOKUP) && step.adapters != nullptr) {
      const std::string wrong = check_adapters(step, op.op);
      if (!wrong.empty()) return wrong;
    }
  }
  for (const tm_kv* kv : pools_) {
    const std::string wrong = check_tables(step, *kv);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string Program::check_tables(const tm_step& step, const tm_kv& kv) const {
  if (step.num_seqs == 0 && step.num_tokens > 0) return "tokens without a sequence";
  if (step.num_seqs > 0 && (step.row_starts[0] != 0 || step.row_starts[step.num_seqs] != step.num_tokens))
    return "rows of the sequences do not cover the tokens";
  for (int s = 0; s < step.num_seqs; s++) {
    const int rows = step.row_starts[s + 1] - step.row_starts[s];
    const int64_t length = step.context_lens[s], most = static_cast<int64_t>(step.table_width) * kv.block_size;
    if (rows < 0) return "row starts must not fall";
    if (length < rows) return say("context shorter than its rows", length, rows);
    if (length > most) return say("context longer than its block table", length, most);
    const int32_t* table = table_of(step, kv, s);
    for (int b = 0; b < ceil_div(length, kv.block_size); b++)
      if (table[b] < 0 || table[b] >= kv.num_blocks) return say("block id out of range", table[b], kv.num_blocks);
  }
  return "";
}

// ------------------------------------------------------------------------------------------------------ running a step

std::string Program::run(const tm_step& step, const tm_draws* draws, const std::function<void()>& aside) {
  step_ = step;
  draws_ = draws;
  std::string wrong = draws == nullptr ? "" : check_draws(step, *draws);
  if (wrong.empty() && draws != nullptr) fill_in_drawn(*draws);
  if (wrong.empty()) wrong = check_step(step_);
  if (!wrong.empty()) return wrong;
  for (int s = 0; s < step.num_seqs && step.row_starts != nullptr; s++)
    for (int row = step.row_starts[s]; row < step.row_starts[s + 1]; row++) row_sequence_[row] = s;
  find_lora_runs();
  next_ = 0;
  current_ = nullptr;
  num_plans_ = 0;
  team_->run(this, aside);
  return "";
}

int Program::next_phase() {
  for (;;) {
    if (times_ns_ != nullptr) take_time();
    if (next_ > ops_.size()) return 0;
    double cost_ns = 0;
    int units = 0;
    if (next_++ < ops_.size()) {
      current_ = &ops_[next_ - 1];
      if (num_rows(current_->op) == 0) continue;
      units = plan(*current_, &cost_ns);
    } else {
      current_ = nullptr;
      units = draws_ == nullptr ? 0 : draws_->num_rows;
      cost_ns = units * kDrawNs;
    }
    if (units > 1 && cost_ns > kInlineNs && team_->num_threads() > 1) return units;
    for (int unit = 0; unit < units; unit++) run_unit(unit, team_->num_threads());
  }
}

// What has passed since the last call belongs to the operation that has just ended.
void Program::take_time() {
  const auto now = std::chrono::steady_clock::now();
  const size_t place = current_ == nullptr ? ops_.back().place + 1 : current_->place;
  if (next_ > 0)
    times_ns_[place] += std::chrono::duration_cast<std::chrono::nanoseconds>(now - timed_until_).count();
  timed_until_ = now;
}

// Cut the operation into units and estimate its cost on one thread. Returns the number of units.
int Program::plan(const Op& op, double* cost_ns) {
  const int rows = num_rows(op.op);
  switch (op.op.code) {
    case TM_LINEAR:
    case TM_LINEAR_GATED: return plan_linear(op, cost_ns);
    case TM_ATTENTION: return plan_attention(op, cost_ns);
    case kAttentionMerge: return plan_merge(op, cost_ns);
    case TM_LORA_SHRINK:
    case TM_LORA_LOOKUP:
    case TM_LORA_EXPAND: return plan_lora(op, cost_ns);
    default: {
      const int64_t width = buffers_[op.op.out >= 0 ? op.op.out : op.op.in0].width;
      *cost_ns = static_cast<double>(rows) * width * 0.5;
      rows_per_unit_ = std::max<int64_t>(1, std::min<int64_t>(ceil_div(rows, 4 * team_->num_threads()), 16384 / width + 1));
      return ceil_div(rows, rows_per_unit_);
    }
  }
}

void Program::run_unit(int unit, int thread) {
  if (current_ == nullptr) return draw(unit, thread);
  const Op& op = *current_;
  switch (op.op.code) {
    case TM_LINEAR: return run_linear(op, unit, thread);
    case TM_LINEAR_GATED: return run_linear_gated(op, unit, thread);
    case TM_ATTENTION: return run_attention(op, unit, thread);
    case kAttentionMerge: return run_merge(op, unit);
    case TM_LORA_SHRINK: return run_lora_shrink(op, unit);
    case TM_LORA_LOOKUP: return run_lora_lookup(op, unit);
    case TM_LORA_EXPAND: return run_lora_expand(op, unit);
    default: {
      const int begin = unit * rows_per_unit_, end = std::min(num_rows(op.op), begin + rows_per_unit_);
      if (op.op.code == TM_RMS_NORM && buffers_[op.op.out].form == TM_FORM_QUANTISED)
        return rms_norm_rows(op.op, begin, end - begin);
      for (int row = begin; row < end; row++) run_row(op, row, thread);
    }
  }
}

float* Program::rows_of(int buffer, int64_t row) const {
  return static_cast<float*>(buffers_[buffer].data) + row * buffers_[buffer].width;
}

Quantised Program::quantised(int buffer) const {
  const tm_buffer& b = buffers_[buffer];
  const int64_t groups = b.width / kGroup;
  const int64_t slots = static_cast<int64_t>(ceil_div(b.max_rows, kPanel)) * kPanel * groups;
  Quantised q;
  q.codes = static_cast<int8_t*>(b.data);
  q.facts = reinterpret_cast<GroupFacts*>(q.codes + slots * kGroup);
  q.low_sums = needs_low_sums_[buffer] ? reinterpret_cast<int32_t*>(q.facts + slots) : nullptr;
  q.num_groups = static_cast<int32_t>(groups);
  return q;
}

Wide Program::wide(int buffer) const {
  const tm_buffer& b = buffers_[buffer];
  Wide w;
  w.codes = static_cast<int8_t*>(b.data);
  w.panel_bytes = wide_panel_bytes(b.width);
  w.scales = reinterpret_cast<float*>(w.codes + ceil_div(b.max_rows, kWidePanel) * w.panel_bytes);
  return w;
}

// A row of float32 into a buffer of codes or digits.
void Program::quantise_row(const float* from, int buffer, int row) {
  const int width = buffers_[buffer].width;
  if (buffers_[buffer].form == TM_FORM_WIDE) {
    const Wide out = wide(buffer);
    return kernels_->quantise_wide(from, width, &out, row);
  }
  const Quantised out = quantised(buffer);
  kernels_->quantise_row(from, &out, row, 0, width / kGroup);
}

// ------------------------------------------------------------------------------------------------------ row operations

void Program::run_row(const Op& op, int row, int thread) {
  const tm_op& o = op.op;
  const bool quantise = o.out >= 0 && buffers_[o.out].form != TM_FORM_F32;
  switch (o.code) {
    case TM_EMBED: {
      int64_t id = (op.op.by_place ? step_.places : step_.tokens)[row];
      for (const Part& part : op.parts) {
        if (id < part.num_rows) return unpack_row(part, id, rows_of(o.out, row));
        id -= part.num_rows;
      }
      return;
    }
    case TM_RMS_NORM:
    case TM_LAYER_NORM:
    case TM_ACTIVATE: {
      float* to = quantise || !op.keeps ? thread_floats(thread) : rows_of(o.out, row);
      const float* from = rows_of(o.in0, row);
      if (o.code == TM_RMS_NORM && quantise) {  // digits, for codes take whole groups of rows
        const Wide out = wide(o.out);
        return kernels_->rms_norm_wide(from, o.vector, o.value, o.width, to, &out, row);
      }
      if (o.code == TM_RMS_NORM) kernels_->rms_norm_row(from, o.vector, o.value, o.width, to);
      else if (o.code == TM_LAYER_NORM) kernels_->layer_norm_row(from, o.vector, o.vector2, o.value, o.width, to);
      else kernels_->activate(o.activation, from, o.width, to);
      if (quantise) quantise_row(to, o.out, row);
      if (op.rounded_out >= 0) kernels_->round_row(to, o.width, rounded_row(op.rounded_out, row, o.width));
      return;
    }
    case TM_QUANTISE: return quantise_row(rows_of(o.in0, row), o.out, row);
    case kRoundRows:
      return kernels_->round_row(rows_of(o.in0, row), o.width, rounded_row(op.rounded_out, row, o.width));
    case TM_ADD: return kernels_->add(rows_of(o.in0, row), rows_of(o.in1, row), o.width, rows_of(o.out, row));
    case TM_ADD_BIAS: return kernels_->add(rows_of(o.in0, row), o.vector, o.width, rows_of(o.out, row));
    case TM_SCALE: return kernels_->scale(rows_of(o.in0, row), o.value, o.width, rows_of(o.out, row));
    case TM_SOFT_CAP: return kernels_->soft_cap(rows_of(o.in0, row), o.cap, o.width, rows_of(o.out, row));
    case TM_GATED: {
      const float* gate = rows_of(o.in0, row);
      return kernels_->gated(o.activation, gate, gate + o.width, o.width, rows_of(o.out, row));
    }
    case TM_NORM_HEADS: return norm_heads_row(op, row);
    case TM_ROPE: return rope_row(op, row);
    case TM_WRITE_KV: return write_kv_row(op, rows_of(o.in0, row), row);
    case TM_PICK: {
      const float* from = rows_of(o.in0, row);
      float* to = rows_of(o.out, row);
      for (int k = 0; k < o.width; k++) to[k] = from[o.order[k]];
      return;
    }
    case TM_GATHER:
      std::memcpy(rows_of(o.out, row), rows_of(o.in0, step_.logit_rows[row]), static_cast<size_t>(o.width) * 4);
      return;
    default: return;
  }
}

void Program::rms_norm_rows(const tm_op& o, int row, int num_rows) {
  const Quantised out = quantised(o.out);
  kernels_->rms_norm_rows(rows_of(o.in0, row), num_rows, o.vector, o.value, o.width, &out, row);
}

void Program::rope_row(const Op& op, int row) {
  const tm_op& o = op.op;
  const float* from = rows_of(o.in0, row);
  float* to = rows_of(o.out, row);
  const float* cos_sin = o.vector + static_cast<int64_t>(step_.positions[row]) * o.num_turned;
  if (to != from) std::memcpy(to, from, static_cast<size_t>(buffers_[o.in0].width) * 4);
  for (int head = 0; head < o.num_heads + o.num_kv_heads; head++) {
    const int64_t at = static_cast<int64_t>(head) * o.head_dim;
    kernels_->rope_head(from + at, cos_sin, o.num_turned, to + at);
  }
  if (o.kv != nullptr) write_kv_row(op, to, row);
}

void Program::norm_heads_row(const Op& op, int row) {
  const tm_op& o = op.op;
  const float* from = rows_of(o.in0, row);
  float* to = rows_of(o.out, row);
  const int q_end = o.num_heads * o.head_dim, k_end = q_end + o.num_kv_heads * o.head_dim;
  for (int at = 0; at < q_end; at += static_cast<int>(o.vector_rows))
    kernels_->rms_norm_row(from + at, o.vector, o.value, static_cast<int>(o.vector_rows), to + at);
  for (int at = q_end; at < k_end; at += static_cast<int>(o.vector2_rows))
    kernels_->rms_norm_row(from + at, o.vector2, o.value, static_cast<int>(o.vector2_rows), to + at);
  if (to != from) std::memcpy(to + k_end, from + k_end, static_cast<size_t>(o.num_kv_heads) * o.head_dim * 4);
}

// Values in a pool are finite, always: a weight of 0 then hides the values of a key, which may be left from another sequence.
// Where K or V of a token are not finite, K is stored as NaN, so that all queries that see the key become NaN, and V as 0.
void Program::write_kv_row(const Op& op, const float* qkv, int row) {
  static const NoNumbers no_numbers;
  const tm_op& o = op.op;
  const tm_kv& kv = *o.kv;
  const int sequence = row_sequence_[row];
  const int position = step_.context_lens[sequence] - (step_.row_starts[sequence + 1] - row);
  const int32_t* table = table_of(step_, kv, sequence);
  const KVLayout layout(kv);
  uint8_t* block = layout.block(o.layer, table[position / kv.block_size]);
  const int slot = position % kv.block_size;
  const int64_t value_bytes = kv.dtype == kF32 ? 4 : 2;
  const float* k = qkv + static_cast<int64_t>(o.num_heads) * o.head_dim;
  const float* v = k + static_cast<int64_t>(o.num_kv_heads) * o.head_dim;
  const float limit = layout.limit();
  for (int head = 0; head < kv.num_kv_heads; head++, k += o.head_dim, v += o.head_dim) {
    uint8_t *keys = layout.keys(block, head), *values = layout.values(block, head);
    const bool fits = kernels_->is_within(k, o.head_dim, limit) && kernels_->is_within(v, o.head_dim, limit);
    const float *own_k = fits ? k : no_numbers.nans, *own_v = fits ? v : no_numbers.zeros;
    if (layout.is_codes()) {
      uint8_t* v_slot = values + static_cast<int64_t>(slot / 4) * 4 * o.head_dim + slot % 4;
      kernels_->store_codes(own_k, o.head_dim, 128, 4 * kv.block_size, 1, keys + 4 * slot, layout.k_scales(block, head) + slot);
      kernels_->store_codes(own_v, o.head_dim, 0, 16, 4, v_slot, layout.v_scales(block, head) + slot);
    } else {
      kernels_->store_k(kv.dtype, own_k, o.head_dim, kv.block_size, keys + slot * value_bytes);
      kernels_->store_v(kv.dtype, own_v, o.head_dim, values + static_cast<int64_t>(slot) * o.head_dim * value_bytes);
    }
  }
}

}  // namespace mill
