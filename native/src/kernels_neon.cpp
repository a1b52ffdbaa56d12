// The neon variant of every kernel.
#include "lanes_neon.h"
#define TM_TABLE kNeonKernels
#define TM_NAME "neon"
#include "kernels.inc"
