// All kernels for one instruction set. A unit defines K3_V16 (the vector header) and K3_TABLE (the name it exports).
#include "api.h"

namespace k3 {
namespace {
#include "common.h"
#include K3_V16
#include "functions.h"
#include "norm.h"
#include "dense.h"
#include "expert.h"
#include "router.h"
#include "kda.h"
#include "mla.h"
#include "probe.h"
}  // namespace

extern const Kernels K3_TABLE;
const Kernels K3_TABLE = {
    linear,        rmsnorm, attnres_mix_norm, situ,         gated_mlp,  kda_prepare, kda_recurrence, kda_output,
    mla_attention, router,  expert_forward,   combine_norm, dequantize, unary,       read_sum,       fma_burn,
};
}  // namespace k3
