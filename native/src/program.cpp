// See program.h. How an operation is cut into units depends on shapes only where that helps balance; no cut changes a
// bit, because a unit owns whole output values and walks their inputs in the fixed order.
#include "program.h"

#include <algorithm>

#include "store.h"

namespace mill {

namespace {

constexpr double kInlineNs = 2500;  // below this, handing work to another thread costs more than it saves
constexpr double kDrawNs = 10000;   // of a row, at least

}  // namespace

Program::Program(Team* team, const Kernels* kernels, const tm_op* ops, int num_ops, const tm_buffer* buffers,
                 int num_buffers, const tm_limits& limits, void* scratch, int64_t scratch_bytes, std::string* error)
    : space_(team, kernels, buffers, num_buffers, limits, scratch, scratch_bytes) {
  *error = check_buffers();
  for (int place = 0; place < num_ops && error->empty(); place++) *error = add_op(ops, num_ops, place);
  if (!error->empty()) return;
  for (const Op& op : ops_) note_step_check(op);
  space_.reserve(ops_);
  tokens_.resize(limits.max_tokens);
}

// An operation of the list, and those that come with it.
std::string Program::add_op(const tm_op* ops, int num_ops, int place) {
  const tm_op& o = ops[place];
  const int num_buffers = static_cast<int>(space_.buffers.size());
  for (int index : {o.in0, o.in1, o.in2, o.out})
    if (index < -1 || index >= num_buffers) return say("unknown buffer", index, num_buffers);
  const OpKind* kind = find_op(o.kind);
  if (kind == nullptr) return std::string("unknown operation ") + o.kind;
  const std::string wrong = kind->check(space_, o);
  if (!wrong.empty()) return std::string(o.kind) + ": " + wrong;
  Op op{o, kind, {}, place};
  for (int p = 0; o.weight != nullptr && p < o.weight->num_parts; p++) {
    const tm_part& part = o.weight->parts[p];
    op.parts.push_back({part.kind, part.column0, part.num_rows, part.num_cols, part.data, part.num_bytes});
  }
  if (kind->takes_rounded != nullptr && kind->takes_rounded(space_, op)) round_inputs(&op, ops, num_ops);
  if (o.kv != nullptr && std::find(pools_.begin(), pools_.end(), o.kv) == pools_.end()) pools_.push_back(o.kv);
  for (tm_store* store : {o.weight ? o.weight->store : nullptr, o.stack ? o.stack->store : nullptr})
    if (store != nullptr && std::find(stores_.begin(), stores_.end(), store) == stores_.end()) stores_.push_back(store);
  ops_.push_back(op);
  if (kind->then != nullptr) {
    op.kind = kind->then;
    ops_.push_back(op);
  }
  return "";
}

// The inputs of a linear with bf16 weights are rounded once, where its kernel takes them so: by what makes them, where that
// comes right before and can, else by an operation of its own. One set of rows may be read while the next is written.
void Program::round_inputs(Op* op, const tm_op* ops, int num_ops) {
  const int input = op->op.in0, set = num_rounded_++ % 2;
  op->rounded_in = set;
  if (!ops_.empty() && ops_.back().op.out == input) {
    Op& maker = ops_.back();
    if (maker.kind->makes_rounded != nullptr && maker.kind->makes_rounded(space_, maker)) {
      int num_readers = 0;
      for (int i = 0; i < num_ops; i++) num_readers += (ops[i].in0 == input) + (ops[i].in1 == input) + (ops[i].in2 == input);
      maker.rounded_out = set;
      const auto reads_floats = [](const Part& part) { return !is_quantised(part.kind) && !is_bf16(part.kind); };
      maker.keeps = num_readers > 1 || std::any_of(op->parts.begin(), op->parts.end(), reads_floats);
      return;
    }
  }
  Op rounding{{}, &kRoundRows, {}, op->place};
  rounding.op.rows = op->op.rows;
  rounding.op.in0 = input;
  rounding.op.in1 = rounding.op.in2 = rounding.op.out = -1;
  rounding.op.width = op->op.weight->num_cols;
  rounding.rounded_out = set;
  ops_.push_back(rounding);
}

void Program::note_step_check(const Op& op) {
  if (op.kind->check_step == nullptr) return;
  for (const Op* other : step_checks_) {
    const tm_op &a = op.op, &b = other->op;
    if (op.kind == other->kind && a.weight == b.weight && a.by_place == b.by_place && a.vector == b.vector &&
        a.vector_rows == b.vector_rows && a.lora == b.lora)
      return;
  }
  step_checks_.push_back(&op);
}

// ---------------------------------------------------------------------------------------------- checks at the border

std::string Program::check_buffers() const {
  for (const tm_buffer& b : space_.buffers) {
    if (b.data == nullptr || b.num_bytes < tm_buffer_bytes(b.form, b.max_rows, b.width))
      return say("a buffer is too small", b.num_bytes, tm_buffer_bytes(b.form, b.max_rows, b.width));
    const int need = b.rows == TM_ROWS_TOKENS ? space_.limits.max_tokens : space_.limits.max_logit_rows;
    if (b.max_rows < need) return say("a buffer holds too few rows", b.max_rows, need);
  }
  return "";
}

std::string Program::check_step(const tm_step& step) const {
  if (step.num_tokens < 0 || step.num_tokens > space_.limits.max_tokens)
    return say("too many tokens", step.num_tokens, space_.limits.max_tokens);
  if (step.num_seqs < 0 || step.num_seqs > space_.limits.max_seqs)
    return say("too many sequences", step.num_seqs, space_.limits.max_seqs);
  if (step.num_logit_rows < 0 || step.num_logit_rows > space_.limits.max_logit_rows)
    return say("too many logit rows", step.num_logit_rows, space_.limits.max_logit_rows);
  if (step.table_width < 0 || step.table_width > space_.limits.max_blocks_per_seq)
    return say("too many blocks per sequence", step.table_width, space_.limits.max_blocks_per_seq);
  for (int i = 0; i < step.num_logit_rows; i++)
    if (step.logit_rows[i] < 0 || step.logit_rows[i] >= step.num_tokens)
      return say("logit row out of range", step.logit_rows[i], step.num_tokens);
  for (const Op* op : step_checks_) {
    const std::string wrong = op->kind->check_step(space_, op->op, step);
    if (!wrong.empty()) return wrong;
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
    const int32_t* table = Workspace::table_of(step, kv, s);
    if (is_of_states(kv)) {
      const int32_t* further = step.state_blocks == nullptr ? nullptr : step.state_blocks + step.row_starts[s];
      const std::string wrong = check_states(table, length - rows, length, further, kv);
      if (!wrong.empty()) return wrong;
      continue;
    }
    for (int b = 0; b < ceil_div(length, kv.block_size); b++)
      if (table[b] < 0 || table[b] >= kv.num_blocks) return say("block id out of range", table[b], kv.num_blocks);
  }
  return "";
}

// ------------------------------------------------------------------------------------------------------ running a step

std::string Program::run(const tm_step& step, const tm_draws* draws, const std::function<void()>& aside) {
  space_.step = step;
  draws_ = draws;
  std::string wrong = draws == nullptr ? "" : check_draws(step, *draws);
  if (wrong.empty() && draws != nullptr) fill_in_drawn(*draws);
  if (wrong.empty()) wrong = check_step(space_.step);
  if (!wrong.empty()) return wrong;
  for (int s = 0; s < step.num_seqs && step.row_starts != nullptr; s++)
    for (int row = step.row_starts[s]; row < step.row_starts[s + 1]; row++) space_.row_sequence[row] = s;
  find_lora_runs(space_);
  next_ = 0;
  current_ = nullptr;
  is_under_way_ = false;
  space_.attention.plans.clear();
  space_.num_threads = record_.units != nullptr ? record_.num_threads : space_.team->num_threads_for(step.num_tokens);
  record_.num_units = record_.num_phases = 0;
  space_.team->run(this, aside, record_.units != nullptr ? 1 : space_.num_threads);
  return find_lost_weights();
}

std::string Program::find_lost_weights() const {
  for (tm_store* store : stores_)
    if (store->reader.has_failed()) return store->reader.failure();
  return "";
}

// Weights that are read as they are needed: has this one, and none of them any longer where it is null or in memory.
void Program::take_weight(const tm_weight* weight) {
  if (weight != nullptr && weight->store == nullptr) weight = nullptr;
  if (weight == taken_) return;
  if (taken_ != nullptr) taken_->store->ring.done(taken_->place);
  taken_ = weight;
  if (taken_ != nullptr) taken_->store->ring.need(taken_->place);
}

int Program::next_phase() {
  for (;;) {
    if (times_ns_ != nullptr) take_time();
    if (is_under_way_ && current_->kind->again != nullptr && current_->kind->again(space_, *current_)) next_ -= 2;
    is_under_way_ = false;
    if (next_ == ops_.size()) take_weight(nullptr);
    if (next_ > ops_.size()) return 0;
    double cost_ns = 0;
    int units = 0;
    if (next_++ < ops_.size()) {
      current_ = &ops_[next_ - 1];
      if (space_.num_rows(current_->op) == 0) continue;
      take_weight(current_->op.weight);
      is_under_way_ = true;
      units = current_->kind->plan(space_, *current_, &cost_ns);
    } else {
      current_ = nullptr;
      units = draws_ == nullptr ? 0 : draws_->num_rows;
      cost_ns = units * kDrawNs;
    }
    if (units > 1 && cost_ns > kInlineNs && space_.num_threads > 1) {
      record_.num_phases++;
      return units;
    }
    for (int unit = 0; unit < units; unit++) {
      run_unit(unit, space_.team->num_threads());
      space_.team->tick();
    }
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

// Of the phases' units, those on threads of the team are handed out.
void Program::run_unit(int unit, int thread) {
  if (record_.units == nullptr) return do_unit(unit, thread);
  const int64_t began_ns = thread_ns(), index = record_.num_units++;
  do_unit(unit, thread);
  const int place = current_ == nullptr ? ops_.back().place + 1 : current_->place;
  const int phase = thread < space_.team->num_threads() ? record_.num_phases - 1 : -1;
  if (index < record_.capacity) record_.units[index] = {place, phase, began_ns, thread_ns()};
}

void Program::do_unit(int unit, int thread) {
  if (current_ == nullptr) return draw(unit, thread);
  current_->kind->run(space_, *current_, unit, thread);
}

}  // namespace mill
