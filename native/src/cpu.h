// Which instruction-set variants this processor and operating system can run.
#pragma once
#include "kernels.h"

namespace mill {

// The variant called `name`, or for "auto" the widest one; null when unknown or not runnable here.
const Kernels* find_kernels(const char* name);

}  // namespace mill
