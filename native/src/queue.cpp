// See queue.h.
#include "queue.h"

#include <chrono>
#include <exception>
#include <string>
#include <utility>

#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif

namespace {

void set_error(tm_call* call, const std::string& wrong) { call->error[wrong.copy(call->error, TM_ERROR_BYTES - 1)] = 0; }

}  // namespace

void mill::run_call(tm_call* call, const std::function<void()>& aside) {
  call->began_ns = mill::now_ns();
  try {
    set_error(call, call->program->program->run(call->step, call->has_draws ? &call->draws : nullptr, aside));
  } catch (const std::exception& error) {
    set_error(call, error.what());
  }
}

void tm_queue::push(tm_call* call) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    (first_ == nullptr ? first_ : last_->next) = call;
    last_ = call;
  }
  arrived_.notify_one();
}

tm_call* tm_queue::run(int32_t wake_fd, int64_t rest_ns) {
  if (hosted_ != nullptr) end(std::exchange(hosted_, nullptr));
  const auto tell_last = [&] { tell(wake_fd); };
  while (tm_call* call = next(wake_fd, rest_ns)) {
    if (call->program == nullptr) {
      tell(wake_fd);
      call->began_ns = mill::now_ns();
      return hosted_ = call;
    }
    mill::run_call(call, tell_last);
    tell(wake_fd);  // where it was refused
    end(call);
  }
  return nullptr;
}

// The next call, once there is one. Null once the queue is closed, and where nothing has come for a while.
tm_call* tm_queue::next(int32_t wake_fd, int64_t rest_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (first_ == nullptr) {  // nothing is about to begin, after which to tell
    lock.unlock();
    tell(wake_fd);
    lock.lock();
  }
  const auto is_due = [&] { return is_closed_ || first_ != nullptr; };
  if (has_rested_) {
    arrived_.wait(lock, is_due);
  } else if (!arrived_.wait_for(lock, std::chrono::nanoseconds(rest_ns), is_due)) {
    has_rested_ = true;
    return nullptr;
  }
  if (is_closed_) return nullptr;
  tm_call* call = first_;
  first_ = call->next;
  has_rested_ = false;
  return call;
}

// A call that nobody is told of may be gone as soon as the lock is.
void tm_queue::end(tm_call* call) {
  std::lock_guard<std::mutex> lock(mutex_);
  owes_ = call->tells != 0;
  call->ended_ns = mill::now_ns();
  ended_.notify_all();
}

// Where the other end is gone, nobody needs to be told.
void tm_queue::tell(int32_t wake_fd) {
  if (!std::exchange(owes_, false)) return;
#ifdef _WIN32
  [[maybe_unused]] const auto written = _write(wake_fd, "", 1);
#else
  [[maybe_unused]] const auto written = write(wake_fd, "", 1);
#endif
}

bool tm_queue::is_empty() {
  std::lock_guard<std::mutex> lock(mutex_);
  return first_ == nullptr;
}

void tm_queue::wait(const tm_call* call) {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [&] { return call->ended_ns != 0; });
}

void tm_queue::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  while (first_ != nullptr) {
    tm_call* call = std::exchange(first_, first_->next);
    set_error(call, "closed before it began");
    call->ended_ns = mill::now_ns();
  }
  arrived_.notify_one();
  ended_.notify_all();
}
