// Python bindings: raw addresses and sizes in, nothing out. Shapes and dtypes are checked by the Python layer above.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "api.h"

namespace py = pybind11;
using namespace k3;

namespace {

struct Isa {
    const char* name;
    const Kernels* kernels;
};

std::vector<Isa> detect() {
    std::vector<Isa> found;
#if defined(K3_HAVE_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        found.push_back({"avx512", &kernels_avx512});
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back({"avx2", &kernels_avx2});
#endif
#if defined(K3_HAVE_NEON)
    found.push_back({"neon", &kernels_neon});
#endif
    found.push_back({"portable", &kernels_portable});
    return found;
}

const std::vector<Isa>& isas() {
    static const std::vector<Isa> found = detect();
    return found;
}

Isa current = isas().front();

template <class T>
T at(uintptr_t address) {
    return reinterpret_cast<T>(address);
}

// Indices decide addresses: a wrong one must not become a wild write.
void check_indices(const int32_t* splits, int64_t n, const int32_t* rows, int64_t x_rows, const int32_t* slots,
                   int64_t out_rows) {
    if (splits[0] != 0) throw std::invalid_argument("row_splits must start with 0");
    for (int64_t e = 0; e < n; ++e)
        if (splits[e + 1] < splits[e]) throw std::invalid_argument("row_splits must not decrease");
    for (int64_t i = 0; i < splits[n]; ++i)
        if (rows[i] < 0 || rows[i] >= x_rows || slots[i] < 0 || slots[i] >= out_rows)
            throw std::invalid_argument("a row or slot of expert_forward is out of range");
}

// Everything below runs without the interpreter lock, one call at a time.
template <class F>
auto exclusive(F f) {
    py::gil_scoped_release free_;
    CallLock one;
    return f();
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.def("threads", [] { return exclusive([] { return threads(); }); });
    m.def("set_threads", [](int n) {
        exclusive([n] {
            set_threads(n);
            return 0;
        });
    });
    m.def("isa", [] { return std::string(current.name); });
    m.def("available_isas", [] {
        py::list names;
        for (const Isa& i : isas()) names.append(i.name);
        return py::tuple(names);
    });
    m.def("select_isa", [](const std::string& name) {
        for (const Isa& i : isas())
            if (name == i.name) {
                exclusive([&] {
                    current = i;
                    return 0;
                });
                return true;
            }
        return false;
    });

    m.def("linear", [](uintptr_t x, int64_t ldx, uintptr_t w, uintptr_t out, int64_t ldo, int64_t rows, int64_t in,
                       int64_t outs) {
        exclusive([&] {
            current.kernels->linear(
                {at<const float*>(x), ldx, at<const bf16*>(w), at<float*>(out), ldo, rows, in, outs});
            return 0;
        });
    });
    m.def("rmsnorm", [](uintptr_t x, int64_t ldx, uintptr_t w, bool w_is_bf16, uintptr_t out, int64_t ldo, int64_t rows,
                        int64_t width, float eps) {
        exclusive([&] {
            current.kernels->rmsnorm(
                {at<const float*>(x), ldx, at<const void*>(w), w_is_bf16, at<float*>(out), ldo, rows, width, eps});
            return 0;
        });
    });
    m.def("attnres_mix_norm",
          [](const std::vector<uintptr_t>& sources, const std::vector<int64_t>& ld, uintptr_t score_w, uintptr_t w,
             bool w_is_bf16, uintptr_t out, int64_t ldo, int64_t rows, int64_t width, float eps) {
              exclusive([&] {
                  current.kernels->attnres_mix_norm(
                      {reinterpret_cast<const float* const*>(sources.data()),
                       ld.data(),
                       (int64_t)sources.size(),
                       at<const float*>(score_w),
                       {nullptr, 0, at<const void*>(w), w_is_bf16, at<float*>(out), ldo, rows, width, eps}});
                  return 0;
              });
          });
    m.def("situ", [](uintptr_t gate, int64_t ldg, uintptr_t up, int64_t ldu, uintptr_t out, int64_t ldo, int64_t rows,
                     int64_t width, float beta, float linear_beta) {
        exclusive([&] {
            current.kernels->situ({at<const float*>(gate), at<const float*>(up), ldg, ldu, at<float*>(out), ldo, rows,
                                   width, beta, linear_beta});
            return 0;
        });
    });
    m.def("gated_mlp",
          [](uintptr_t x, int64_t ldx, uintptr_t gate, uintptr_t up, uintptr_t down, uintptr_t out, int64_t ldo,
             int64_t rows, int64_t in, int64_t hidden, int64_t outs, float beta, float linear_beta) {
              exclusive([&] {
                  current.kernels->gated_mlp({at<const float*>(x), ldx, at<const bf16*>(gate), at<const bf16*>(up),
                                              at<const bf16*>(down), at<float*>(out), ldo, rows, in, hidden, outs, beta,
                                              linear_beta});
                  return 0;
              });
          });
    m.def("kda_prepare", [](uintptr_t qkv, int64_t ld, uintptr_t history, uintptr_t conv_w, uintptr_t r, int64_t ldr,
                            uintptr_t dt_bias, uintptr_t a_log, uintptr_t b, int64_t ldb, uintptr_t q, uintptr_t k,
                            uintptr_t v, uintptr_t decay, uintptr_t beta, int64_t rows, int64_t heads, int64_t head_dim,
                            int64_t taps, float lower_bound, float qk_eps) {
        exclusive([&] {
            current.kernels->kda_prepare({at<const float*>(qkv),
                                          ld,
                                          at<const float*>(history),
                                          at<const float*>(conv_w),
                                          at<const float*>(r),
                                          ldr,
                                          at<const float*>(dt_bias),
                                          at<const float*>(a_log),
                                          at<const float*>(b),
                                          ldb,
                                          at<float*>(q),
                                          at<float*>(k),
                                          at<float*>(v),
                                          at<float*>(decay),
                                          at<float*>(beta),
                                          rows,
                                          heads,
                                          head_dim,
                                          taps,
                                          lower_bound,
                                          qk_eps});
            return 0;
        });
    });
    m.def("kda_recurrence",
          [](uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t decay, uintptr_t beta, uintptr_t state_in,
             uintptr_t state_out, uintptr_t out, int64_t rows, int64_t heads, int64_t head_dim) {
              exclusive([&] {
                  current.kernels->kda_recurrence({at<const float*>(q), at<const float*>(k), at<const float*>(v),
                                                   at<const float*>(decay), at<const float*>(beta),
                                                   at<const float*>(state_in), at<float*>(state_out), at<float*>(out),
                                                   rows, heads, head_dim});
                  return 0;
              });
          });
    m.def("kda_output", [](uintptr_t o, int64_t ldo_in, uintptr_t gate, int64_t ldg, uintptr_t w, uintptr_t out,
                           int64_t ldo, int64_t rows, int64_t heads, int64_t head_dim, float eps) {
        exclusive([&] {
            current.kernels->kda_output({at<const float*>(o), at<const float*>(gate), ldo_in, ldg, at<const float*>(w),
                                         at<float*>(out), ldo, rows, heads, head_dim, eps});
            return 0;
        });
    });
    m.def("mla_attention", [](uintptr_t q, int64_t ldq, uintptr_t kv_b, uintptr_t cache, int64_t ldc, uintptr_t gate,
                              int64_t ldg, uintptr_t out, int64_t ldo, int64_t rows, int64_t start, int64_t heads,
                              int64_t nope, int64_t rope, int64_t v_dim, int64_t lora, float scale) {
        exclusive([&] {
            current.kernels->mla_attention({at<const float*>(q), ldq, at<const bf16*>(kv_b), at<const float*>(cache),
                                            ldc, at<const float*>(gate), ldg, at<float*>(out), ldo, rows, start, heads,
                                            nope, rope, v_dim, lora, scale});
            return 0;
        });
    });
    m.def("router", [](uintptr_t logits, int64_t ld, uintptr_t bias, uintptr_t ids, uintptr_t weights, int64_t rows,
                       int64_t experts, int64_t k, bool renormalize, float scale, float sum_eps) {
        exclusive([&] {
            current.kernels->router({at<const float*>(logits), ld, at<const float*>(bias), at<int32_t*>(ids),
                                     at<float*>(weights), rows, experts, k, renormalize, scale, sum_eps});
            return 0;
        });
    });
    m.def("expert_forward", [](uintptr_t x, int64_t ldx, int64_t x_rows, const std::vector<uintptr_t>& blobs,
                               int64_t latent, int64_t intermediate, int64_t w1p, int64_t w1s, int64_t w2p, int64_t w2s,
                               int64_t w3p, int64_t w3s, uintptr_t splits, uintptr_t rows, uintptr_t slots,
                               uintptr_t out, int64_t ldo, int64_t out_rows, float beta, float linear_beta) {
        check_indices(at<const int32_t*>(splits), (int64_t)blobs.size(), at<const int32_t*>(rows), x_rows,
                      at<const int32_t*>(slots), out_rows);
        exclusive([&] {
            current.kernels->expert_forward({at<const float*>(x),
                                             ldx,
                                             x_rows,
                                             reinterpret_cast<const uint8_t* const*>(blobs.data()),
                                             (int64_t)blobs.size(),
                                             {latent, intermediate, {w1p, w2p, w3p}, {w1s, w2s, w3s}},
                                             at<const int32_t*>(splits),
                                             at<const int32_t*>(rows),
                                             at<const int32_t*>(slots),
                                             at<float*>(out),
                                             ldo,
                                             beta,
                                             linear_beta});
            return 0;
        });
    });
    m.def("combine_norm", [](uintptr_t y, uintptr_t weights, int64_t k, uintptr_t w, bool w_is_bf16, uintptr_t out,
                             int64_t ldo, int64_t rows, int64_t width, float eps) {
        exclusive([&] {
            current.kernels->combine_norm(
                {at<const float*>(y),
                 at<const float*>(weights),
                 k,
                 {nullptr, 0, at<const void*>(w), w_is_bf16, at<float*>(out), ldo, rows, width, eps}});
            return 0;
        });
    });
    m.def("mxfp4_dequantize", [](uintptr_t packed, uintptr_t scale, uintptr_t out, int64_t rows, int64_t cols) {
        exclusive([&] {
            current.kernels->dequantize(
                {at<const uint8_t*>(packed), at<const uint8_t*>(scale), at<float*>(out), rows, cols});
            return 0;
        });
    });
    m.def("unary", [](uintptr_t x, uintptr_t out, int64_t n, int op) {
        exclusive([&] {
            current.kernels->unary({at<const float*>(x), at<float*>(out), n, op});
            return 0;
        });
    });

    using Clock = std::chrono::steady_clock;
    m.def("read_seconds", [](uintptr_t p, int64_t bytes) {
        return exclusive([&] {
            auto begin = Clock::now();
            volatile double keep = current.kernels->read_sum(at<const void*>(p), bytes);
            (void)keep;
            return std::chrono::duration<double>(Clock::now() - begin).count();
        });
    });
    m.def("fma_per_second", [](int64_t steps) {
        return exclusive([&] {
            auto begin = Clock::now();
            double done = current.kernels->fma_burn(steps);
            return done / std::chrono::duration<double>(Clock::now() - begin).count();
        });
    });
}
