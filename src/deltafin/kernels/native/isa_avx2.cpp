#include <immintrin.h>
#define K3_V16 "v16_avx2.h"
#define K3_TABLE kernels_avx2
#include "kernels.inl"
