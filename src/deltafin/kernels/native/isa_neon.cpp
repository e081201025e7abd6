#include <arm_neon.h>
#define K3_V16 "v16_neon.h"
#define K3_TABLE kernels_neon
#include "kernels.inl"
