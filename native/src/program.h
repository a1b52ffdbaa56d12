// The interpreter: a flat list of operations over buffers, run for one step after another. Knows rows and buffers; what an
// operation is, its table says (op.h). Knows no model.
#pragma once
#include <time.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "../include/tokenmill_native.h"
#include "team.h"
#include "workspace.h"

namespace mill {

inline int64_t now_ns() {
  using std::chrono::nanoseconds, std::chrono::steady_clock;
  return std::chrono::duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// Processor time of this thread: while it waits for one, it stands still.
inline int64_t thread_ns() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

class Program final : public Job {
 public:
  // `error` says what is wrong with the list, if anything; such a program must not be run.
  Program(Team* team, const Kernels* kernels, const tm_op* ops, int num_ops, const tm_buffer* buffers, int num_buffers,
          const tm_limits& limits, void* scratch, int64_t scratch_bytes, std::string* error);

  // The reason why a step cannot be run, or an empty string after it has. `draws` may be null; `aside`: see Team::run.
  std::string run(const tm_step& step, const tm_draws* draws, const std::function<void()>& aside);

  // From now on add each operation's nanoseconds to ns[its place in the list], those of drawing after them; null stops.
  void time(int64_t* ns) { times_ns_ = ns; }

  // From now on cut steps as for so many threads, do their units on one, and write them to `units`; null stops.
  void record(int num_threads, tm_unit* units, int64_t capacity) { record_ = {units, capacity, num_threads, 0, 0}; }
  int64_t num_recorded() const { return record_.num_units; }

 private:
  int next_phase() override;
  void run_unit(int unit, int thread) override;
  void do_unit(int unit, int thread);
  void take_time();
  void take_weight(const tm_weight* weight);
  std::string find_lost_weights() const;

  std::string add_op(const tm_op* ops, int num_ops, int place);
  void round_inputs(Op* op, const tm_op* ops, int num_ops);
  void note_step_check(const Op& op);

  std::string check_buffers() const;
  std::string check_step(const tm_step& step) const;
  std::string check_tables(const tm_step& step, const tm_kv& kv) const;

  // The ends of a step: program_draw.cpp.
  std::string check_draws(const tm_step& step, const tm_draws& draws) const;
  void fill_in_drawn(const tm_draws& draws);
  void draw(int row, int thread);

  Workspace space_;
  std::vector<Op> ops_;
  std::vector<const tm_kv*> pools_;  // that operations use, each once
  std::vector<tm_store*> stores_;    // the same
  std::vector<const Op*> step_checks_;  // operations that check a step, each weight, vector and table once
  int num_rounded_ = 0;  // linears that take rounded inputs

  // The step under way.
  const tm_draws* draws_ = nullptr;
  std::vector<int32_t> tokens_;  // the step's, where some of them were drawn by earlier steps
  size_t next_ = 0;
  const Op* current_ = nullptr;  // null: drawing, or nothing yet
  bool is_under_way_ = false;   // it was planned, and has not ended
  const tm_weight* taken_ = nullptr;  // that is in memory for now
  int64_t* times_ns_ = nullptr;
  struct {
    tm_unit* units;
    int64_t capacity;
    int num_threads, num_phases;
    int64_t num_units;
  } record_ = {};
  std::chrono::steady_clock::time_point timed_until_;
};

}  // namespace mill
