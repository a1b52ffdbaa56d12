// A persistent team of threads that runs jobs made of phases; the calling thread is one of them.
//
// A phase is a number of independent units. Threads claim units one by one; whoever finishes the last unit of a phase
// prepares the next one (running small ones on the spot), so a phase waits for its units, never for a thread: a worker
// that the system has descheduled holds nobody up. Waiting threads spin for some microseconds, then sleep.
//
// Each thread begins with a run of units of its own and helps with the others' runs after that. So phases of equal shape
// give a thread neighbouring units, and mostly those that touch what is in its caches.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
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
  uint64_t progress() const { return ticket_.load(std::memory_order_relaxed); }

  // A job runs a unit by itself, within next_phase: no worker waits for it where there is none.
  void tick() {
    if (workers_.empty()) ticket_.store(ticket_.load(std::memory_order_relaxed) + kPhase, std::memory_order_relaxed);
  }

  int num_threads() const { return 1 + static_cast<int>(workers_.size()); }

  // Run the job to its end. One caller at a time, who does `aside`, if there is such, once the others have work, or at
  // once where there are no others: it may cost the caller its processor.
  void run(Job* job, const std::function<void()>& aside = nullptr);

  // `function(unit, thread)` for every unit in [0, num_units).
  template <class Function>
  void for_each(int num_units, const Function& function) {
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
    run(&loop);
  }

 private:
  void participate(int thread);
  void advance();
  void publish(int num_units);
  int next_unit(int thread);
  void wait_for_change(uint64_t seen, bool is_caller);

  // The units [taken, end) of a thread's run are left.
  struct alignas(64) Run {
    std::atomic<int> taken{0};
    int end = 0;
  };

  void (*const rest_)();
  // High half: phase number. Low half: units not yet claimed.
  static constexpr uint64_t kPhase = uint64_t{1} << 32;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> unfinished_{0};
  alignas(64) std::atomic<int> sleeping_workers_{0};
  std::atomic<int> caller_sleeps_{0};
  std::atomic<uint32_t> finished_phase_{0};  // the phase number that announced the end of the latest job
  std::atomic<bool> stopping_{false};
  Job* job_ = nullptr;
  std::unique_ptr<Run[]> runs_;  // of each thread
  std::mutex mutex_;
  std::condition_variable workers_wake_, caller_wakes_;
  std::vector<std::thread> workers_;
};

}  // namespace mill
