// Calls of programs and functions of the host, done one at a time in the order in which they were pushed, on a thread that
// the host lends. Between two calls that thread stays in native code.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "../include/tokenmill_native.h"
#include "program.h"

struct tm_program {
  std::unique_ptr<mill::Program> program;
};

struct tm_queue {
 public:
  void push(tm_call* call);
  tm_call* run(int32_t wake_fd, int64_t rest_ns);
  bool is_empty();
  void wait(const tm_call* call);
  void close();

 private:
  tm_call* next(int32_t wake_fd, int64_t rest_ns);
  void end(tm_call* call);
  void tell(int32_t wake_fd);

  std::mutex mutex_;
  std::condition_variable arrived_, ended_;
  tm_call *first_ = nullptr, *last_ = nullptr;  // those that have not begun
  bool is_closed_ = false;
  // Of the thread that runs it alone:
  tm_call* hosted_ = nullptr;  // what the host is doing
  bool owes_ = false;          // a call has ended, and its byte is not written yet
  bool has_rested_ = false;    // nothing was done since the host was told that nothing comes
};

namespace mill {

// Makes one call; `aside`: see Team::run.
void run_call(tm_call* call, const std::function<void()>& aside);

}  // namespace mill
