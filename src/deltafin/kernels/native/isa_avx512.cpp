#include <immintrin.h>
#define K3_V16 "v16_avx512.h"
#define K3_TABLE kernels_avx512
#include "kernels.inl"
