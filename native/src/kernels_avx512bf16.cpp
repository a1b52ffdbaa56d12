// The avx512bf16 variant of every kernel.
#define TM_AVX512_BF16 1
#include "lanes_avx512.h"
#define TM_TABLE kAvx512Bf16Kernels
#define TM_NAME "avx512bf16"
#include "kernels.inc"
