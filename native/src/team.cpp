// See team.h. Threads share as few cache lines as they can, because a line that all write goes from one core to the next. Each
// has its run of units in a word of its own line; a claim is a compare-and-swap on the word, which holds the end of the run
// too, so it takes a unit that is there even where the thread has looked at an earlier phase. Units that were done are
// counted off in groups of threads, each thread's own run at once, and groups in one more count. A phase cannot end before
// the units that were claimed, so whoever holds a claim keeps its phase, and the job, alive.
#include "team.h"

#include <chrono>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace mill {

namespace {

constexpr int kSpinMicroseconds = 40;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Team::Team(int num_threads, void (*rest)()) : rest_(rest), taking_part_(num_threads), runs_(new Run[num_threads]), groups_(new Group[num_groups(num_threads)]) {
  for (int i = 1; i < num_threads; i++) workers_.emplace_back([this, i] { participate(i); });
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
  }
  workers_wake_.notify_all();
  part_begins_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Team::place(int thread, const int32_t* processors, int num_processors) {
#if defined(__linux__)
  if (thread < 1 || thread >= num_threads()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int i = 0; i < num_processors; i++)
    if (processors[i] >= 0 && processors[i] < CPU_SETSIZE) CPU_SET(processors[i], &set);
  // Refused where none of them may be used any longer: the thread then stays where it was.
  pthread_setaffinity_np(workers_[thread - 1].native_handle(), sizeof(set), &set);
#else
  (void)thread, (void)processors, (void)num_processors;
#endif
}

void Team::publish(int num_units) {
  const int threads = taking_part_.load(std::memory_order_relaxed);
  const auto begin_of = [&](int thread) { return static_cast<int64_t>(num_units) * std::min(thread, threads) / threads; };
  int open = 0;
  for (int g = 0; g < num_groups(threads); g++) {
    const int units = static_cast<int>(begin_of((g + 1) * kGroupThreads) - begin_of(g * kGroupThreads));
    groups_[g].unfinished.store(units, std::memory_order_relaxed);
    open += units > 0;
  }
  open_groups_.store(open, std::memory_order_relaxed);
  // From here on late threads may already claim.
  for (int t = 0; t < threads; t++)
    runs_[t].left.store(static_cast<uint64_t>(begin_of(t)) << 32 | static_cast<uint64_t>(begin_of(t + 1)), std::memory_order_release);
  if (num_units == 0) is_finished_.store(true, std::memory_order_release);
  // By now others may have ended this phase and published later ones.
  phase_.fetch_add(1, std::memory_order_seq_cst);
  // Workers need not wake for the end of a job.
  if (num_units > 0 && sleeping_workers_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    workers_wake_.notify_all();
  }
  if (caller_sleeps_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    caller_wakes_.notify_one();
  }
}

// The next unit of a thread's run; -1 where there is none.
int Team::take(int of) {
  uint64_t left = runs_[of].left.load(std::memory_order_acquire);
  do {
    if (left >> 32 >= static_cast<uint32_t>(left)) return -1;
  } while (!runs_[of].left.compare_exchange_weak(left, left + (uint64_t{1} << 32), std::memory_order_acquire));
  return static_cast<int>(left >> 32);
}

// So many units of a thread's run are done: whoever did the last ones of all goes on.
void Team::finish(int of, int num_done) {
  if (groups_[of / kGroupThreads].unfinished.fetch_sub(num_done, std::memory_order_acq_rel) != num_done) return;
  if (open_groups_.fetch_sub(1, std::memory_order_acq_rel) == 1) advance();
}

bool Team::help(int thread) {
  const int threads = taking_part_.load(std::memory_order_relaxed);
  for (int i = 1; i < threads; i++) {
    const int of = (thread + i) % threads, unit = take(of);
    if (unit < 0) continue;
    job_->run_unit(unit, thread);
    finish(of, 1);
    return true;
  }
  return false;
}

void Team::advance() { publish(job_->next_phase()); }

// Claim and run units: a worker until the team stops, the caller of run until its job has ended.
void Team::participate(int thread) {
  const bool is_caller = thread == 0;
  for (;;) {
    const uint64_t phase = phase_.load(std::memory_order_acquire);
    if (thread >= taking_part_.load(std::memory_order_relaxed)) {
      if (stopping_.load(std::memory_order_acquire)) return;
      wait_for_part(thread);
      continue;
    }
    int num_done = 0;
    for (int unit; (unit = take(thread)) >= 0; num_done++) job_->run_unit(unit, thread);
    if (num_done > 0) finish(thread, num_done);
    if (num_done > 0 || help(thread)) continue;
    if (is_caller && is_finished_.load(std::memory_order_acquire)) return;
    if (!is_caller && stopping_.load(std::memory_order_acquire)) return;
    wait_for_change(phase, is_caller);
  }
}

void Team::wait_for_change(uint64_t seen, bool is_caller) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::microseconds(kSpinMicroseconds);
  const auto unchanged = [&] { return phase_.load(std::memory_order_seq_cst) == seen && !stopping_.load(); };
  do {
    for (int i = 0; i < 32; i++) {
      if (!unchanged()) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < give_up);
  rest_();
  std::atomic<int>& sleepers = is_caller ? caller_sleeps_ : sleeping_workers_;
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  (is_caller ? caller_wakes_ : workers_wake_).wait(lock, [&] { return !unchanged(); });
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void Team::wait_for_part(int thread) {
  rest_();
  std::unique_lock<std::mutex> lock(mutex_);
  part_begins_.wait(lock, [&] { return thread < taking_part_.load(std::memory_order_relaxed) || stopping_.load(); });
}

void Team::run(Job* job, const std::function<void()>& aside, int num_threads) {
  job_ = job;
  const int threads = num_threads == 0 ? this->num_threads() : num_threads, before = taking_part_.load(std::memory_order_relaxed);
  if (threads != before) {
    std::lock_guard<std::mutex> lock(mutex_);
    taking_part_.store(threads, std::memory_order_relaxed);
    if (threads > before) part_begins_.notify_all();
  }
  const bool is_alone = threads == 1;  // then `advance` does all of the job, which may wait for what `aside` leads to
  if (aside && is_alone) aside();
  is_finished_.store(false, std::memory_order_relaxed);
  advance();
  if (aside && !is_alone) aside();
  participate(0);
  rest_();
}

}  // namespace mill
