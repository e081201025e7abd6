// What the instruction-set specific translation units and the rest of the extension share: argument structs, the table
// of kernels each unit exports, the thread pool and scratch memory.
//
// Units compiled with -mavx512f and the like must not instantiate inline functions that other units use too: the linker
// keeps one copy, and it may be the one this machine cannot execute. So this header holds plain structs and non-inline
// functions only, and those units include no C++ standard headers with templates.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace k3 {

using bf16 = uint16_t;

// ---- threads and scratch (runtime.cpp) ----

// Runs fn(ctx, task, worker) for every task in [0, tasks), on the caller and the pool's threads. `worker` is smaller
// than threads(). `work` is a rough count of multiply-adds: small jobs stay on the caller.
void parallel_run(int64_t tasks, double work, void (*fn)(void*, int64_t, int), void* ctx);
int threads();
void set_threads(int n);

// 64-byte aligned memory, kept between calls; valid until the next request for the same slot. Throws std::bad_alloc.
enum Slot { kPacked, kHidden, kQuery, kContext, kSmall, kIndex, kWorker, kSlots };
void* scratch(Slot slot, size_t bytes);

struct CallLock {  // one kernel at a time: pool and scratch are shared
    CallLock();
    ~CallLock();
};

// ---- MXFP4 tables, index 0..255 = scale byte (runtime.cpp) ----

// value[s][n] = E2M1(n) * 2^(s-127), exact; the second table holds the same numbers as bf16 bit patterns, low bytes of
// the 16 entries first, then their high bytes.
extern float mx_value[256][16];
extern uint8_t mx_bytes[256][32];

// ---- arguments ----

struct Linear {
    const float* x;
    int64_t ldx;
    const bf16* w;
    float* out;
    int64_t ldo;
    int64_t rows, in, outs;
};

struct Norm {
    const float* x;
    int64_t ldx;
    const void* w;
    bool w_is_bf16;
    float* out;
    int64_t ldo;
    int64_t rows, width;
    float eps;
};

struct AttnResMix {
    const float* const* sources;
    const int64_t* ld;
    int64_t count;
    const float* score_w;
    Norm norm;  // x unused
};

struct Situ {
    const float *gate, *up;
    int64_t ldg, ldu;
    float* out;
    int64_t ldo;
    int64_t rows, width;
    float beta, linear_beta;
};

struct GatedMlp {
    const float* x;
    int64_t ldx;
    const bf16 *gate, *up, *down;
    float* out;
    int64_t ldo;
    int64_t rows, in, hidden, outs;
    float beta, linear_beta;
};

struct KdaPrepare {
    const float* qkv;
    int64_t ld;
    const float *history, *conv_w;
    const float* r;
    int64_t ldr;
    const float *dt_bias, *a_log;
    const float* b;
    int64_t ldb;
    float *q, *k, *v, *decay, *beta;
    int64_t rows, heads, head_dim, taps;
    float lower_bound, qk_eps;
};

struct KdaRecurrence {
    const float *q, *k, *v, *decay, *beta;  // q may be null
    const float* state_in;
    float *state_out, *out;  // out may be null
    int64_t rows, heads, head_dim;
};

struct KdaOutput {
    const float *o, *gate;
    int64_t ldo_in, ldg;
    const float* w;
    float* out;
    int64_t ldo;
    int64_t rows, heads, head_dim;
    float eps;
};

struct Mla {
    const float* q;
    int64_t ldq;
    const bf16* kv_b;
    const float* cache;
    int64_t ldc;
    const float* gate;
    int64_t ldg;  // gate may be null
    float* out;
    int64_t ldo;
    int64_t rows, start, heads, nope, rope, v_dim, lora;
    float scale;
};

struct Router {
    const float* logits;
    int64_t ld;
    const float* bias;
    int32_t* ids;
    float* weights;
    int64_t rows, experts, k;
    bool renormalize;
    float scale, sum_eps;
};

struct ExpertLayout {
    int64_t latent, intermediate;
    int64_t packed[3], scale[3];  // w1, w2, w3
};

struct Experts {
    const float* x;
    int64_t ldx, x_rows;
    const uint8_t* const* blobs;
    int64_t count;
    ExpertLayout layout;
    const int32_t *splits, *rows, *slots;
    float* out;
    int64_t ldo;
    float beta, linear_beta;
};

struct CombineNorm {
    const float *y, *weights;
    int64_t k;
    Norm norm;  // x unused
};

struct Dequantize {
    const uint8_t *packed, *scale;
    float* out;
    int64_t rows, cols;
};

struct Unary {
    const float* x;
    float* out;
    int64_t n;
    int op;  // 0 exp, 1 sigmoid, 2 tanh, 3 silu
};

struct Kernels {
    void (*linear)(const Linear&);
    void (*rmsnorm)(const Norm&);
    void (*attnres_mix_norm)(const AttnResMix&);
    void (*situ)(const Situ&);
    void (*gated_mlp)(const GatedMlp&);
    void (*kda_prepare)(const KdaPrepare&);
    void (*kda_recurrence)(const KdaRecurrence&);
    void (*kda_output)(const KdaOutput&);
    void (*mla_attention)(const Mla&);
    void (*router)(const Router&);
    void (*expert_forward)(const Experts&);
    void (*combine_norm)(const CombineNorm&);
    void (*dequantize)(const Dequantize&);
    void (*unary)(const Unary&);
    double (*read_sum)(const void* p, int64_t bytes);
    double (*fma_burn)(int64_t steps);  // returns fused multiply-adds done, all threads together
};

extern const Kernels kernels_portable, kernels_avx2, kernels_avx512, kernels_neon;

}  // namespace k3
