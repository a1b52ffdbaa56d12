// What the matrix unit's variant computes, as plain loops: the definition of its bits, for tests on any processor.
#define TM_NO_UNROLL 1
#define TM_TILES 1
#include "lanes_scalar.h"
#define TM_TABLE kScalarTilesKernels
#define TM_NAME "scalartiles"
#include "kernels.inc"
