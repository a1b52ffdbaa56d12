// The avxvnni variant of every kernel.
#define TM_AVX_VNNI 1
#include "lanes_avx2.h"
#define TM_TABLE kAvxVnniKernels
#define TM_NAME "avxvnni"
#include "kernels.inc"
