// The variant of every kernel for the matrix unit.
#define TM_TILES 1
#define TM_AMX 1
#include "lanes_avx512.h"
#define TM_TABLE kAmxKernels
#define TM_NAME "amx"
#include "kernels.inc"
