// RMS norm, the attention-residual mixture and the weighted sum of expert outputs. One row is one unit of work.
#pragma once

K3_INLINE V16 weight_part(const void* w, bool is_bf16, int64_t i, int64_t n) {
    if (!is_bf16) return load_part((const float*)w + i, n);
    if (n >= 16) return load_bf16((const bf16*)w + i);
    bf16 t[16] = {0};
    __builtin_memcpy(t, (const bf16*)w + i, (size_t)n * 2);
    return load_bf16(t);
}

static inline void norm_row(const Norm& a, const float* x, float* out) {
    V16 scale = set1(inverse_rms(sum_squares(x, a.width), a.width, a.eps));
    for (int64_t i = 0; i < a.width; i += 16) {
        int64_t n = a.width - i;
        store_part(out + i, mul(mul(load_part(x + i, n), scale), weight_part(a.w, a.w_is_bf16, i, n)), n);
    }
}

static void rmsnorm(const Norm& a) {
    parallel(a.rows, (double)a.rows * (double)a.width * 2,
             [&](int64_t row, int) { norm_row(a, a.x + row * a.ldx, a.out + row * a.ldo); });
}

static void attnres_mix_norm(const AttnResMix& a) {
    const Norm& n = a.norm;
    float* shares = (float*)scratch(kSmall, (size_t)(threads() * up(a.count, 16)) * 4);
    parallel(n.rows, (double)n.rows * (double)n.width * (double)a.count * 3, [&](int64_t row, int worker) {
        float* p = shares + worker * up(a.count, 16);
        float* out = n.out + row * n.ldo;
        float top = -__builtin_inff(), total = 0;
        for (int64_t i = 0; i < a.count; ++i) {
            const float* v = a.sources[i] + row * a.ld[i];
            Sum dot, squares;
            for (int64_t d = 0; d < n.width; d += 64)
                for (int j = 0; j < 4 && d + 16 * j < n.width; ++j) {
                    V16 x = load_part(v + d + 16 * j, n.width - d - 16 * j);
                    dot.a[j] = fma(x, load_part(a.score_w + d + 16 * j, n.width - d - 16 * j), dot.a[j]);
                    squares.a[j] = fma(x, x, squares.a[j]);
                }
            p[i] = dot.total() * inverse_rms(squares.total(), n.width, n.eps);
            top = p[i] > top ? p[i] : top;
        }
        for (int64_t i = 0; i < a.count; ++i) {
            p[i] = exp1(p[i] - top);
            total += p[i];
        }
        for (int64_t i = 0; i < a.count; ++i) p[i] /= total;
        if (a.count == 1) p[0] = 1;  // also when the score overflowed
        for (int64_t d = 0; d < n.width; d += 16) {
            V16 h = mul(set1(p[0]), load_part(a.sources[0] + row * a.ld[0] + d, n.width - d));
            for (int64_t i = 1; i < a.count; ++i)
                h = fma(set1(p[i]), load_part(a.sources[i] + row * a.ld[i] + d, n.width - d), h);
            store_part(out + d, h, n.width - d);
        }
        norm_row(n, out, out);
    });
}

static void combine_norm(const CombineNorm& a) {
    const Norm& n = a.norm;
    parallel(n.rows, (double)n.rows * (double)n.width * (double)(a.k + 2), [&](int64_t row, int) {
        float* out = n.out + row * n.ldo;
        const float *y = a.y + row * a.k * n.width, *w = a.weights + row * a.k;
        for (int64_t d = 0; d < n.width; d += 16) {
            V16 sum = mul(set1(w[0]), load_part(y + d, n.width - d));
            for (int64_t j = 1; j < a.k; ++j) sum = fma(set1(w[j]), load_part(y + j * n.width + d, n.width - d), sum);
            store_part(out + d, sum, n.width - d);
        }
        norm_row(n, out, out);
    });
}
