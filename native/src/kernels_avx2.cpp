// The avx2 variant of every kernel.
#include "lanes_avx2.h"
#define TM_TABLE kAvx2Kernels
#define TM_NAME "avx2"
#include "kernels.inc"
