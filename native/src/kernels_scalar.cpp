// The scalar variant of every kernel. Unrolling loops of sixteen-fold loops only costs compile time.
#define TM_NO_UNROLL 1
#include "lanes_scalar.h"
#define TM_TABLE kScalarKernels
#define TM_NAME "scalar"
#include "kernels.inc"
