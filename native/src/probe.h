// What the machine can do at best, measured with the team that runs the kernels: the yardstick of every other figure.
#pragma once
#include <cstdint>

#include "kernels.h"
#include "team.h"

namespace mill {

enum Probe : int32_t { kProbeRead = 0, kProbeInt8 = 1, kProbeF32 = 2, kNumProbes = 3 };

// Amount per second by all threads together: bytes read of `data` (64-byte aligned, each thread its own share, over and
// over), or operations (a multiply-add is two). 0 where this instruction set has no such instruction.
double probe(Team* team, const Kernels* kernels, int32_t what, const uint8_t* data, int64_t num_bytes, int64_t rounds);

}  // namespace mill
