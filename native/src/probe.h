// What the machine can do at best, measured with the team that runs the kernels: the yardstick of every other figure.
#pragma once
#include <cstdint>

#include "kernels.h"
#include "team.h"

namespace mill {

enum Probe : int32_t { kProbeRead = 0, kProbeInt8 = 1, kProbeF32 = 2, kProbeBf16 = 3, kProbePhase = 4, kNumProbes = 5 };

// Amount per second by the threads that do steps of one row: bytes read of `data` (64-byte aligned, each thread its own share,
// over and over); operations (a multiply-add is two); or phases that are nothing but all threads' way from one to the next. 0 where
// this instruction set has no such instruction.
double probe(Team* team, const Kernels* kernels, int32_t what, uint8_t* data, int64_t num_bytes, int64_t rounds);

}  // namespace mill
