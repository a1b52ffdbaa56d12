// See team.h. The only shared words are the ticket (phase number and units left), the count of unfinished units, how far
// each thread's run of units is taken, and the counts of sleepers. A claim is a compare-and-swap on the ticket, so a late
// thread can never take a unit of a phase other than the one it looked at; the thread that holds a claim keeps its phase,
// and so its runs, alive.
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

inline uint32_t phase_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
inline uint32_t left_of(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

}  // namespace

Team::Team(int num_threads, void (*rest)()) : rest_(rest), taking_part_(num_threads), runs_(new Run[num_threads]) {
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
  for (int t = 0; t < threads; t++) {
    runs_[t].taken.store(static_cast<int>(static_cast<int64_t>(num_units) * t / threads), std::memory_order_relaxed);
    runs_[t].end = static_cast<int>(static_cast<int64_t>(num_units) * (t + 1) / threads);
  }
  unfinished_.store(num_units, std::memory_order_relaxed);
  const uint32_t phase = phase_of(ticket_.load(std::memory_order_relaxed)) + 1;
  if (num_units == 0) finished_phase_.store(phase, std::memory_order_relaxed);
  ticket_.store(static_cast<uint64_t>(phase) << 32 | static_cast<uint32_t>(num_units), std::memory_order_seq_cst);
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

// For a thread that holds a claim: there are as many claims as units, so it finds one.
int Team::next_unit(int thread) {
  const int threads = taking_part_.load(std::memory_order_relaxed);
  for (int turn = thread;; turn = turn + 1 == threads ? 0 : turn + 1) {
    Run& run = runs_[turn];
    if (run.taken.load(std::memory_order_relaxed) >= run.end) continue;
    const int unit = run.taken.fetch_add(1, std::memory_order_relaxed);
    if (unit < run.end) return unit;
  }
}

void Team::advance() { publish(job_->next_phase()); }

// Claim and run units: a worker until the team stops, the caller of run until its job has ended.
void Team::participate(int thread) {
  for (;;) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    // Of this ticket's job, or of a later one: then the claim fails.
    if (thread >= taking_part_.load(std::memory_order_relaxed)) {
      if (stopping_.load(std::memory_order_acquire)) return;
      wait_for_part(thread);
      continue;
    }
    if (left_of(ticket) > 0) {
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
      job_->run_unit(next_unit(thread), thread);
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) advance();
      continue;
    }
    const bool is_caller = thread == 0;
    if (is_caller && finished_phase_.load(std::memory_order_relaxed) == phase_of(ticket)) return;
    if (!is_caller && stopping_.load(std::memory_order_acquire)) return;
    wait_for_change(ticket, is_caller);
  }
}

void Team::wait_for_change(uint64_t seen, bool is_caller) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::microseconds(kSpinMicroseconds);
  const auto unchanged = [&] {
    const uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
    return phase_of(ticket) == phase_of(seen) && !stopping_.load();
  };
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
  advance();
  if (aside && !is_alone) aside();
  participate(0);
  rest_();
}

}  // namespace mill
