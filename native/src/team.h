// A persistent team of threads that runs jobs made of phases; the calling thread is one of them.
//
// A phase is a number of independent units. Threads claim units one by one; whoever finishes the last unit of a phase
// prepares the next one (running small ones on the spot), so a phase waits for its units, never for a thread: a worker
// that the system has descheduled holds nobody up. Waiting threads spin for some microseconds, then sleep.
//
// Each thread begins with a run of units of its own and helps with the others' runs after that. So phases of equal shape
// give a thread neighbouring units, and mostly those that touch what is in its caches.
//
// A job may be for the first threads alone: where memory keeps fewer busy, more only wait for each other. The others sleep
// until a job has a part for them.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace mill {

struct Job {
  virtual ~Job() = default;
  // Prepare the next phase and return its number of units; 0 ends the job. One thread at a time, after all units of
  // the phase before.
  virtual int next_phase() = 0;
  virtual void run_unit(int unit, int thread) = 0;
};

class Team {
 public:
  // Threads call `rest` before they sleep, and the caller of run before it returns.
  Team(int num_threads, void (*rest)());
  ~Team();
  Team(const Team&) = delete;

  // Another number with every unit that is claimed, or told of by `tick`.
  uint64_t progress() const {
    uint64_t taken = 0;
    for (int t = 0; t < num_threads(); t++) taken += runs_[t].left.load(std::memory_order_relaxed) >> 32;
    return phase_.load(std::memory_order_relaxed) << 32 | static_cast<uint32_t>(taken);
  }

  // A job runs a unit by itself, within next_phase: where it is for one thread, no other waits for it.
  void tick() {
    if (taking_part_.load(std::memory_order_relaxed) == 1) phase_.store(phase_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  int num_threads() const { return 1 + static_cast<int>(workers_.size()); }

  // How many threads are for steps of so many rows, where `limit` has said so; else all.
  int num_threads_for(int num_rows) const {
    for (const Limit& limit : limits_)
      if (num_rows <= limit.most_rows) return std::min(limit.num_threads, num_threads());
    return num_threads();
  }

  // Steps of at most so many rows, rising, take so many threads, those of more take all. Between jobs.
  struct Limit {
    int most_rows, num_threads;
  };
  void limit(std::vector<Limit> limits) { limits_ = std::move(limits); }

  // Lets a thread run on these processors alone, as the system numbers them, where the system can be told so. Thread 0 is
  // whoever calls `run`: its place is its own affair.
  void place(int thread, const int32_t* processors, int num_processors);

  // Run the job to its end, with the first `num_threads` threads; 0: all. One caller at a time, who does `aside`, if there
  // is such, once the others have work, or at once where there are no others: it may cost the caller its processor.
  void run(Job* job, const std::function<void()>& aside = nullptr, int num_threads = 0);

  // `function(unit, thread)` for every unit in [0, num_units), by the first `num_threads` threads; 0: all.
  template <class Function>
  void for_each(int num_units, const Function& function, int num_threads = 0) {
    struct Loop final : Job {
      int units;
      const Function* body;
      int next_phase() override {
        const int n = units;
        units = 0;
        return n;
      }
      void run_unit(int unit, int thread) override { (*body)(unit, thread); }
    } loop;
    loop.units = num_units;
    loop.body = &function;
    run(&loop, nullptr, num_threads);
  }

 private:
  void participate(int thread);
  void advance();
  void publish(int num_units);
  int take(int of);
  void finish(int of, int num_done);
  bool help(int thread);
  void wait_for_change(uint64_t seen, bool is_caller);
  void wait_for_part(int thread);

  // The units that are left of a thread's run: the next one in the high half, the end in the low.
  struct alignas(64) Run {
    std::atomic<uint64_t> left{0};
  };
  struct alignas(64) Group {
    std::atomic<int> unfinished{0};  // units of its threads' runs
  };
  static constexpr int kGroupThreads = 8;
  static int num_groups(int num_threads) { return (num_threads + kGroupThreads - 1) / kGroupThreads; }

  void (*const rest_)();
  std::vector<Limit> limits_;
  alignas(64) std::atomic<uint64_t> phase_{0};    // how many were published
  alignas(64) std::atomic<int> open_groups_{0};  // with unfinished units
  alignas(64) std::atomic<int> sleeping_workers_{0};
  std::atomic<int> taking_part_;  // threads of the job; set before its first phase
  std::atomic<int> caller_sleeps_{0};
  std::atomic<bool> is_finished_{false};  // the latest job
  std::atomic<bool> stopping_{false};
  Job* job_ = nullptr;
  std::unique_ptr<Run[]> runs_;      // of each thread
  std::unique_ptr<Group[]> groups_;  // of kGroupThreads threads each
  std::mutex mutex_;
  std::condition_variable workers_wake_, caller_wakes_, part_begins_;
  std::vector<std::thread> workers_;
};

}  // namespace mill
