// Reads ranges of a file of packed matrices into memory, by threads of its own: several requests at once keep a disk busy.
// Who needs a range waits for that range alone.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace mill {

// A checksum of memory, of whole words of 8 bytes: finds accidents, not forgery. Eight chains of words, each
// h = rotate(h ^ word, 29) * odd, so any one changed word changes it, and so do words that are exchanged.
uint64_t range_sum(const uint8_t* data, int64_t num_bytes);

// A range of the file and where it goes. Offset, size and address are multiples of a page.
struct Load {
  enum State { kIdle, kAsked, kReady };
  int64_t offset = 0, num_bytes = 0;
  uint8_t* to = nullptr;
  uint64_t sum = 0;
  std::atomic<int> state{kIdle};
  int next_piece = 0, pieces_left = 0;  // the reader's own
  bool failed_piece = false;
};

class DiskReader {
 public:
  // The file stays the caller's, and open.
  DiskReader(int file, int num_threads);
  ~DiskReader();
  DiskReader(const DiskReader&) = delete;

  // Whoever asks keeps the load until it is ready or withdrawn. What is guessed waits for what is needed.
  void ask(Load* load, bool is_guess);
  // No longer a guess.
  void hurry(Load* load);
  // True where nothing of it had begun: then it is idle again.
  bool withdraw(Load* load);
  // Until it is ready. What could not be read, or has another checksum, is ready too: see `failure`.
  void wait(Load* load);

  // Why some range could not be had, once that is so; empty before.
  std::string failure();
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }

  int64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
  int64_t waited_ns() const { return waited_ns_.load(std::memory_order_relaxed); }

 private:
  void serve();
  bool read_piece(const Load& load, int piece) const;
  bool is_sound(const Load& load) const;
  void finish(Load* load);

  const int file_;
  std::mutex mutex_;
  std::condition_variable work_, arrivals_;
  std::deque<Load*> needed_, guessed_;
  bool stopping_ = false;
  int num_waiting_ = 0;
  std::string failure_;
  std::atomic<bool> has_failed_{false};
  std::atomic<int64_t> bytes_read_{0}, waited_ns_{0};
  std::vector<std::thread> threads_;
};

}  // namespace mill
