#define K3_V16 "v16_portable.h"
#define K3_TABLE kernels_portable
#include "kernels.inl"
