// Elementary functions on V16, so that no maths library decides any bit. Polynomials are minimax fits made for these
// intervals; errors are stated against the exact function.
#pragma once

K3_INLINE V16 load_part(const float* p, int64_t n) { return n >= 16 ? load(p) : load_n(p, n); }
K3_INLINE void store_part(float* p, V16 a, int64_t n) {
    if (n >= 16)
        store(p, a);
    else
        store_n(p, a, n);
}

// e^x, under 1.1 ulp; 0 below -105, infinity above 88.72, subnormal results correctly scaled.
K3_INLINE V16 vexp(V16 x) {
    x = vmin(set1(89.0f), vmax(set1(-105.0f), x));
    V16 t = fma(x, set1(1.44269504f), set1(kMagic));
    V16 n = sub(t, set1(kMagic));
    V16 r = fma(n, set1(-0x1.62ep-1f), x);  // ln 2 in two parts; n times the first is exact
    r = fma(n, set1(-0x1.0bfbe8p-15f), r);
    V16 p = fma(set1(0.00139504919f), r, set1(0.00836888935f));
    p = fma(p, r, set1(0.0416662058f));
    p = fma(p, r, set1(0.166665188f));
    p = fma(p, r, set1(0.500000010f));
    return scale_by(add(fma(p, mul(r, r), r), set1(1.0f)), t);
}

// 1 / (1 + e^-x), under 2.5 ulp
K3_INLINE V16 vsigmoid(V16 x) { return div(set1(1.0f), add(set1(1.0f), vexp(sub(zero(), x)))); }

// x / (1 + e^-x)
K3_INLINE V16 vsilu(V16 x) { return div(x, add(set1(1.0f), vexp(sub(zero(), x)))); }

// Under 2 ulp; keeps relative accuracy near 0 and reaches exactly +-1.
K3_INLINE V16 vtanh(V16 x) {
    V16 a = vabs(x), z = mul(x, x);
    V16 p = fma(set1(-0.00571629065f), z, set1(0.0206499435f));
    p = fma(p, z, set1(-0.0537433112f));
    p = fma(p, z, set1(0.133314892f));
    p = fma(p, z, set1(-0.333332839f));
    V16 small = fma(mul(a, z), p, a);
    V16 large = sub(set1(1.0f), div(set1(2.0f), add(vexp(add(a, a)), set1(1.0f))));
    return with_sign(if_less(a, set1(0.625f), small, large), x);
}

// beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)
K3_INLINE V16 vsitu(V16 g, V16 u, V16 beta, V16 linear_beta) {
    V16 gate = mul(mul(beta, vtanh(div(g, beta))), vsigmoid(g));
    return mul(gate, mul(linear_beta, vtanh(div(u, linear_beta))));
}

static inline float exp1(float x) { return first_lane(vexp(set1(x))); }

// Sums over n numbers: lane l of accumulator j takes numbers 64 i + 16 j + l in ascending order, then a fixed tree.
struct Sum {
    V16 a[4];
    K3_INLINE_MEMBER Sum() { a[0] = a[1] = a[2] = a[3] = zero(); }
    K3_INLINE_MEMBER float total() const { return reduce(add(add(a[0], a[1]), add(a[2], a[3]))); }
};

static inline float sum_squares(const float* x, int64_t n) {
    Sum s;
    for (int64_t i = 0; i < n; i += 64)
        for (int j = 0; j < 4 && i + 16 * j < n; ++j) {
            V16 v = load_part(x + i + 16 * j, n - i - 16 * j);
            s.a[j] = fma(v, v, s.a[j]);
        }
    return s.total();
}

static inline float inverse_rms(float squares, int64_t n, float eps) {
    return 1.0f / __builtin_sqrtf(squares / (float)n + eps);
}

static void unary(const Unary& a) {
    parallel((a.n + 4095) / 4096, (double)a.n * 16, [&](int64_t task, int) {
        int64_t end = min64(a.n, (task + 1) * 4096);
        for (int64_t i = task * 4096; i < end; i += 16) {
            V16 x = load_part(a.x + i, end - i);
            x = a.op == 0 ? vexp(x) : a.op == 1 ? vsigmoid(x) : a.op == 2 ? vtanh(x) : vsilu(x);
            store_part(a.out + i, x, end - i);
        }
    });
}

static void situ(const Situ& a) {
    V16 beta = set1(a.beta), linear_beta = set1(a.linear_beta);
    int64_t chunks = (a.width + 4095) / 4096;
    parallel(a.rows * chunks, (double)a.rows * (double)a.width * 32, [&](int64_t task, int) {
        int64_t row = task / chunks, begin = task % chunks * 4096, end = min64(a.width, begin + 4096);
        const float *g = a.gate + row * a.ldg, *u = a.up + row * a.ldu;
        for (int64_t i = begin; i < end; i += 16)
            store_part(a.out + row * a.ldo + i,
                       vsitu(load_part(g + i, end - i), load_part(u + i, end - i), beta, linear_beta), end - i);
    });
}
