// The neoni8mm variant of every kernel.
#define TM_NEON_I8MM 1
#include "lanes_neon.h"
#define TM_TABLE kNeonI8mmKernels
#define TM_NAME "neoni8mm"
#include "kernels.inc"
