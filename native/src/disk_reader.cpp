// See disk_reader.h. A load is cut into pieces, which threads take one by one; who ends the last piece checks the whole.
#include "disk_reader.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#ifndef _WIN32
#include <unistd.h>
#endif

namespace mill {

namespace {

constexpr int64_t kPieceBytes = 512 * 1024;
constexpr int kSpinMicroseconds = 20;

inline uint64_t rotate(uint64_t x) { return x << 29 | x >> 35; }

int num_pieces(const Load& load) { return static_cast<int>((load.num_bytes + kPieceBytes - 1) / kPieceBytes); }

int64_t nanoseconds_since(std::chrono::steady_clock::time_point then) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - then).count();
}

// All bytes of the range, or false.
bool read_all(int file, uint8_t* to, int64_t num_bytes, int64_t offset) {
#ifdef _WIN32
  (void)file, (void)to, (void)num_bytes, (void)offset;
  return false;
#else
  while (num_bytes > 0) {
    const ssize_t got = pread(file, to, static_cast<size_t>(num_bytes), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    num_bytes -= got;
    offset += got;
  }
  return true;
#endif
}

}  // namespace

uint64_t range_sum(const uint8_t* data, int64_t num_bytes) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;
  uint64_t chains[8];
  for (int i = 0; i < 8; i++) chains[i] = kOdd * (i + 1);
  const int64_t num_words = num_bytes / 8;
  for (int64_t first = 0; first < num_words; first += 8) {
    uint64_t words[8] = {};
    std::memcpy(words, data + first * 8, static_cast<size_t>(std::min<int64_t>(8, num_words - first)) * 8);
    for (int i = 0; i < 8; i++) chains[i] = rotate(chains[i] ^ words[i]) * kOdd;
  }
  uint64_t sum = static_cast<uint64_t>(num_bytes);
  for (uint64_t chain : chains) sum = rotate(sum ^ chain ^ chain >> 32) * kOdd;
  return sum ^ sum >> 31;
}

DiskReader::DiskReader(int file, int num_threads) : file_(file) {
  for (int i = 0; i < num_threads; i++) threads_.emplace_back([this] { serve(); });
}

DiskReader::~DiskReader() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void DiskReader::ask(Load* load, bool is_guess) {
  load->next_piece = 0;
  load->pieces_left = num_pieces(*load);
  load->failed_piece = false;
  load->state.store(Load::kAsked, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    (is_guess ? guessed_ : needed_).push_back(load);
  }
  if (num_pieces(*load) > 1) {
    work_.notify_all();
  } else {
    work_.notify_one();
  }
}

void DiskReader::hurry(Load* load) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find(guessed_.begin(), guessed_.end(), load);
  if (found == guessed_.end()) return;
  guessed_.erase(found);
  needed_.push_back(load);
}

bool DiskReader::withdraw(Load* load) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (std::deque<Load*>* queue : {&needed_, &guessed_}) {
    const auto found = std::find(queue->begin(), queue->end(), load);
    if (found == queue->end() || load->next_piece > 0) continue;
    queue->erase(found);
    load->state.store(Load::kIdle, std::memory_order_relaxed);
    return true;
  }
  return false;
}

void DiskReader::wait(Load* load) {
  if (load->state.load(std::memory_order_acquire) == Load::kReady) return;
  const auto began = std::chrono::steady_clock::now();
  while (nanoseconds_since(began) < kSpinMicroseconds * 1000) {
    if (load->state.load(std::memory_order_acquire) == Load::kReady) break;
    std::this_thread::yield();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  num_waiting_++;
  arrivals_.wait(lock, [&] { return load->state.load(std::memory_order_acquire) == Load::kReady; });
  num_waiting_--;
  waited_ns_.fetch_add(nanoseconds_since(began), std::memory_order_relaxed);
}

std::string DiskReader::failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void DiskReader::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stopping_ || !needed_.empty() || !guessed_.empty(); });
    if (stopping_) return;
    std::deque<Load*>& queue = needed_.empty() ? guessed_ : needed_;
    Load* load = queue.front();
    const int piece = load->next_piece++;
    if (load->next_piece == num_pieces(*load)) queue.pop_front();
    lock.unlock();
    const bool done = read_piece(*load, piece);
    lock.lock();
    if (!done) load->failed_piece = true;
    if (--load->pieces_left > 0) continue;
    lock.unlock();
    finish(load);
    lock.lock();
    load->state.store(Load::kReady, std::memory_order_release);
    if (num_waiting_ > 0) arrivals_.notify_all();
  }
}

bool DiskReader::read_piece(const Load& load, int piece) const {
  const int64_t begin = piece * kPieceBytes, num_bytes = std::min(kPieceBytes, load.num_bytes - begin);
  return read_all(file_, load.to + begin, num_bytes, load.offset + begin);
}

bool DiskReader::is_sound(const Load& load) const { return range_sum(load.to, load.num_bytes) == load.sum; }

// What came wrong is read once more: a disk that erred once may not err twice.
void DiskReader::finish(Load* load) {
  bytes_read_.fetch_add(load->num_bytes, std::memory_order_relaxed);
  if (!load->failed_piece && is_sound(*load)) return;
  const bool came = read_all(file_, load->to, load->num_bytes, load->offset);
  if (came && is_sound(*load)) return;
  std::memset(load->to, 0xFF, static_cast<size_t>(load->num_bytes));  // NaN, in floats and scales
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty())
    failure_ = std::string(came ? "damaged weights" : "no weights") + " at byte " + std::to_string(load->offset) + " of the packed file";
  has_failed_.store(true, std::memory_order_release);
}

}  // namespace mill
