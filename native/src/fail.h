// How functions of the C border tell what went wrong: a sentence of this thread, and 1.
#pragma once
#include <cstdint>
#include <exception>
#include <string>

namespace mill {

extern thread_local std::string last_error;

inline int32_t fail(const std::string& message) {
  last_error = message;
  return 1;
}

template <class Body>
int32_t guarded(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

}  // namespace mill
