// The avx512 variant of every kernel.
#include "lanes_avx512.h"
#define TM_TABLE kAvx512Kernels
#define TM_NAME "avx512"
#include "kernels.inc"
