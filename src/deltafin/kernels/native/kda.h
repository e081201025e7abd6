// Kimi Delta Attention: convolution and gates, the recurrence, the gated output norm.
#pragma once

static void kda_prepare(const KdaPrepare& a) {
    int64_t d = a.head_dim, padded = up(d, 16), width = a.heads * d, past = a.taps - 1;
    float root = 1.0f / __builtin_sqrtf((float)d);
    float* local = (float*)scratch(kWorker, (size_t)(threads() * a.taps * padded) * 4);
    parallel(a.heads, (double)a.rows * (double)width * 80, [&](int64_t h, int worker) {
        float* w = local + worker * a.taps * padded;  // [tap][channel]
        float* outs[3] = {a.q, a.k, a.v};
        for (int64_t which = 0; which < 3; ++which) {
            const float* taps = a.conv_w + (which * width + h * d) * a.taps;
            for (int64_t c = 0; c < d; ++c)
                for (int64_t j = 0; j < a.taps; ++j) w[j * padded + c] = taps[c * a.taps + j];
            for (int64_t t = 0; t < a.rows; ++t) {
                float* out = outs[which] + t * width + h * d;
                const float* rows[16];  // oldest first
                for (int64_t j = 0; j < a.taps; ++j) {
                    int64_t s = t - past + j;
                    rows[j] =
                        (s < 0 ? a.history + ((past + s) * 3 + which) * width : a.qkv + s * a.ld + which * width) +
                        h * d;
                }
                for (int64_t c = 0; c < d; c += 16) {
                    V16 y = zero();
                    for (int64_t j = 0; j < a.taps; ++j)
                        y = fma(load(w + j * padded + c), load_part(rows[j] + c, d - c), y);
                    store_part(out + c, vsilu(y), d - c);
                }
                if (which == 2) continue;
                V16 scale = set1(1.0f / __builtin_sqrtf(sum_squares(out, d) + a.qk_eps)), query = set1(root);
                for (int64_t c = 0; c < d; c += 16) {
                    V16 v = mul(load_part(out + c, d - c), scale);
                    store_part(out + c, which == 0 ? mul(v, query) : v, d - c);
                }
            }
        }
        V16 rate = set1(exp1(a.a_log[h])), bound = set1(a.lower_bound);
        for (int64_t t = 0; t < a.rows; ++t) {
            for (int64_t c = 0; c < d; c += 16) {
                int64_t i = h * d + c, n = d - c;
                V16 s = add(load_part(a.r + t * a.ldr + i, n), load_part(a.dt_bias + i, n));
                store_part(a.decay + t * width + i, vexp(mul(bound, vsigmoid(mul(rate, s)))), n);
            }
            a.beta[t * a.heads + h] = first_lane(vsigmoid(set1(a.b[t * a.ldb + h])));
        }
    });
}

// The state of one head, 16 W value columns wide, through all rows. Columns are independent, so blocks of them are
// parallel tasks; the block lives in `local` between the first and the last row. Row t's update and row t+1's decay and
// product with k share one pass. n columns are real.
template <int W>
static void kda_columns(const KdaRecurrence& a, int64_t h, int64_t c0, int64_t n, float* local) {
    int64_t d = a.head_dim, width = a.heads * d;
    const float* in = a.state_in + h * d * d + c0;
    float* out = a.state_out + h * d * d + c0;
    V16 dot[W], u[W], o[W];
    {
        const float *decay = a.decay + h * d, *k = a.k + h * d;
        for (int j = 0; j < W; ++j) dot[j] = zero();
        for (int64_t i = 0; i < d; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < W; ++j) {
                V16 s = mul(load_part(in + i * d + 16 * j, n - 16 * j), set1(decay[i]));
                store(local + (i * W + j) * 16, s);
                dot[j] = fma(s, set1(k[i]), dot[j]);
            }
    }
    for (int64_t t = 0; t < a.rows; ++t) {
        int64_t at = t * width + h * d;
        const float *k = a.k + at, *q = a.q ? a.q + at : k, *next_decay = a.decay + at + width, *next_k = k + width;
        V16 beta = set1(a.beta[t * a.heads + h]);
        bool last = t + 1 == a.rows;
        for (int j = 0; j < W; ++j) {
            u[j] = mul(beta, sub(load_part(a.v + at + c0 + 16 * j, n - 16 * j), dot[j]));
            o[j] = dot[j] = zero();
        }
        for (int64_t i = 0; i < d; ++i) {
            V16 ki = set1(k[i]), qi = set1(q[i]);
            V16 di = set1(last ? 0.0f : next_decay[i]), nk = set1(last ? 0.0f : next_k[i]);
#pragma GCC unroll 4
            for (int j = 0; j < W; ++j) {
                V16 s = fma(ki, u[j], load(local + (i * W + j) * 16));
                o[j] = fma(s, qi, o[j]);
                if (last) {
                    store_part(out + i * d + 16 * j, s, n - 16 * j);
                } else {
                    s = mul(s, di);
                    store(local + (i * W + j) * 16, s);
                    dot[j] = fma(s, nk, dot[j]);
                }
            }
        }
        if (a.out)
            for (int j = 0; j < W; ++j) store_part(a.out + at + c0 + 16 * j, o[j], n - 16 * j);
    }
}

static void kda_recurrence(const KdaRecurrence& a) {
    int64_t d = a.head_dim, block = 16 * kWide, per_head = (d + block - 1) / block;
    int64_t each = d * block;
    float* local = (float*)scratch(kWorker, (size_t)(threads() * each) * 4);
    parallel(a.heads * per_head, 2.0 * (double)a.rows * (double)a.heads * (double)(d * d),
             [&](int64_t task, int worker) {
                 int64_t h = task / per_head, begin = task % per_head * block, end = min64(d, begin + block);
                 float* mine = local + worker * each;
                 if (end - begin == block) return kda_columns<kWide>(a, h, begin, block, mine);
                 for (; begin < end; begin += 16) kda_columns<1>(a, h, begin, min64(16, end - begin), mine);
             });
}

static void kda_output(const KdaOutput& a) {
    int64_t d = a.head_dim;
    parallel(a.rows * a.heads, (double)(a.rows * a.heads * d) * 20, [&](int64_t task, int) {
        int64_t t = task / a.heads, h = task % a.heads;
        const float *o = a.o + t * a.ldo_in + h * d, *g = a.gate + t * a.ldg + h * d;
        V16 scale = set1(inverse_rms(sum_squares(o, d), d, a.eps));
        for (int64_t c = 0; c < d; c += 16) {
            V16 v = mul(mul(load_part(o + c, d - c), scale), load_part(a.w + c, d - c));
            store_part(a.out + t * a.ldo + h * d + c, mul(v, vsigmoid(load_part(g + c, d - c))), d - c);
        }
    });
}
