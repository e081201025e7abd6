// Latent attention in absorbed form. A query is carried into the latent space once per head, attends to the cache rows
// there, and only the mixed latent is carried back. The softmax is taken online over tiles of 64 cache rows counted
// from row 0, so the order of operations for a row depends on its position alone.
#pragma once

constexpr int64_t kCacheTile = 64;
constexpr int64_t kHeadBlock = 32;

// latent[t][l] = sum_n q[t][n] w[n][l], n ascending, for 16 J columns from l and C rows. `ahead` is what will be read
// later, 32 J bytes a step: rows of w are only touched in short pieces, which caches do not recognise as a stream.
template <int J, int C>
static void absorb(const bf16* w, int64_t lora, int64_t nope, int64_t l, const bf16* ahead, const float* q, int64_t ldq,
                   Panels::Place to, int64_t ldo) {
    int64_t n = lora - l;
    V16 acc[C][J];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) acc[c][j] = zero();
    for (int64_t i = 0; i < nope; ++i) {
        for (int j = 0; j < J; j += 2) __builtin_prefetch(ahead + i * 16 * J + 16 * j, 0, 2);
        V16 v[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) v[j] = weight_part(w + i * lora, true, l + 16 * j, n - 16 * j);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            V16 x = set1(q[c * ldq + i]);
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j) acc[c][j] = fma(x, v[j], acc[c][j]);
        }
    }
    for (int c = 0; c < C; ++c)
        for (int j = 0; j < J; ++j) {
            int64_t at = l + 16 * j;
            store_part(to.first + c * ldo + at / 32 * to.stride + at % 32, acc[c][j], n - 16 * j);
        }
}

// ctx[h][l] = alpha_h ctx[h][l] + sum_s p[h][s] cache[s][l], s ascending, for 16 J columns and C heads.
template <int J, int C>
static void mix(const float* cache, int64_t ldc, int64_t count, const float* p, const float* alpha, int64_t n,
                float* ctx, int64_t ldctx) {
    V16 acc[C][J];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) acc[c][j] = mul(load(ctx + c * ldctx + 16 * j), set1(alpha[c]));
    for (int64_t s = 0; s < count; ++s) {
        V16 v[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) v[j] = load_part(cache + s * ldc + 16 * j, n - 16 * j);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            V16 x = set1(p[c * kCacheTile + s]);
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j) acc[c][j] = fma(x, v[j], acc[c][j]);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) store(ctx + c * ldctx + 16 * j, acc[c][j]);
}

// One row's `count` heads over cache rows [0, limit). Scratch: ctx [count][ldctx]; p [count][tile], then 3 a head.
static void attend(const Mla& a, int64_t limit, const Panels& query, float* ctx, int64_t ldctx, float* p) {
    int64_t count = query.rows;
    float *top = p + kHeadBlock * kCacheTile, *sum = top + kHeadBlock, *alpha = sum + kHeadBlock;
    int64_t width = a.lora + a.rope;
    for (int64_t h = 0; h < count; ++h) {
        top[h] = -__builtin_inff();
        sum[h] = 0;
        for (int64_t i = 0; i < ldctx; i += 16) store(ctx + h * ldctx + i, zero());
    }
    for (int64_t s0 = 0; s0 < limit; s0 += kCacheTile) {
        int64_t n = min64(kCacheTile, limit - s0);
        const float* rows = a.cache + s0 * a.ldc;
        direct(FloatRows{rows, a.ldc, width}, 0, n, rows, query, p, 1, kCacheTile);
        for (int64_t h = 0; h < count; ++h) {
            float* ph = p + h * kCacheTile;
            V16 peak = set1(top[h]), scale = set1(a.scale), total = zero();
            for (int64_t i = n; i < up(n, 16); ++i) ph[i] = -__builtin_inff();
            for (int64_t i = 0; i < n; i += 16) {
                V16 v = mul(load(ph + i), scale);
                store(ph + i, v);
                peak = vmax(v, peak);
            }
            float now = reduce_max(peak);
            alpha[h] = exp1(top[h] - now);
            top[h] = now;
            for (int64_t i = 0; i < n; i += 16) {
                V16 v = vexp(sub(load(ph + i), set1(now)));
                store(ph + i, v);
                total = add(total, v);
            }
            sum[h] = __builtin_fmaf(sum[h], alpha[h], reduce(total));
        }
        for (int64_t l = 0; l < a.lora; l += 16 * kWide)
            for (int64_t h = 0; h < count; h += kWide) {
                const float *ph = p + h * kCacheTile, *c = rows + l;
                float* dst = ctx + h * ldctx + l;
                if (h + kWide <= count && l + 16 * kWide <= a.lora) {
                    mix<kWide, kWide>(c, a.ldc, n, ph, alpha + h, 16 * kWide, dst, ldctx);
                    continue;
                }
                for (int64_t i = 0; i < min64(kWide, count - h); ++i)
                    for (int64_t j = 0; j < 16 * kWide && l + j < a.lora; j += 16)
                        mix<1, 1>(c + j, a.ldc, n, ph + i * kCacheTile, alpha + h + i, a.lora - l - j,
                                  dst + i * ldctx + j, ldctx);
            }
    }
    for (int64_t h = 0; h < count; ++h)
        for (int64_t i = 0; i < ldctx; i += 16)
            store(ctx + h * ldctx + i, div(load(ctx + h * ldctx + i), set1(sum[h])));
}

static void mla_attention(const Mla& a) {
    int64_t width = a.lora + a.rope, padded = up(width, 32), ldctx = up(a.lora, 32), per_head = a.nope + a.v_dim;
    int64_t most = min64(a.rows, 32), each = max64(kHeadBlock * (ldctx + kCacheTile + 3), kTileScratch);
    float* query = (float*)scratch(kQuery, (size_t)(most * a.heads * padded) * 4);
    float* context = (float*)scratch(kContext, (size_t)(most * a.heads * ldctx) * 4);
    float* local = (float*)scratch(kWorker, (size_t)(threads() * each) * 4);
    for (int64_t t0 = 0; t0 < a.rows; t0 += most) {
        int64_t rows = min64(most, a.rows - t0), ldq = a.heads * padded;
        double absorbing = (double)rows * (double)a.heads * (double)a.lora;
        // Heads that look at a cache row together; fewer when there are few rows, so that every thread has work.
        int64_t wanted = (2 * threads() + rows - 1) / rows;
        int64_t together = max64(1, min64(kHeadBlock, up((a.heads + wanted - 1) / wanted, 4)));
        int64_t blocks = (a.heads + together - 1) / together;
        auto queries = [&](int64_t t, int64_t block) {
            int64_t h = block * together;
            return Panels(query + t * ldq + h * padded, padded, min64(together, a.heads - h), kMaxCols);
        };
        // Runs of heads, so that each can ask for the next one's weights.
        int64_t run = max64(1, a.heads / (4 * threads())), runs = (a.heads + run - 1) / run;
        parallel(runs, absorbing * (double)a.nope, [&](int64_t task, int) {
            for (int64_t h = task * run; h < min64(a.heads, (task + 1) * run); ++h) {
                const bf16* w = a.kv_b + h * per_head * a.lora;
                const bf16* later = h + 1 < a.heads ? w + per_head * a.lora : w;
                const float* q = a.q + t0 * a.ldq + h * (a.nope + a.rope);
                Panels::Place to = queries(0, h / together).place(h % together);
                for (int64_t t = 0; t < rows; ++t)
                    for (int64_t i = a.lora; i < padded; ++i)
                        to.first[t * ldq + i / 32 * to.stride + i % 32] =
                            i < width ? q[t * a.ldq + a.nope + i - a.lora] : 0.0f;
                for (int64_t l = 0; l < a.lora; l += 16 * kWide) {
                    const bf16* ahead = later + l * a.nope;
                    bool full = l + 16 * kWide <= a.lora;
                    for (int64_t t = 0; t < rows;) {
                        const float* qt = q + t * a.ldq;
                        Panels::Place at = {to.first + t * ldq, to.stride};
                        if (full && t + kWide <= rows) {
                            absorb<kWide, kWide>(w, a.lora, a.nope, l, ahead, qt, a.ldq, at, ldq);
                            t += kWide;
                            continue;
                        }
                        if (full)
                            absorb<kWide, 1>(w, a.lora, a.nope, l, ahead, qt, a.ldq, at, ldq);
                        else
                            for (int64_t j = l; j < a.lora; j += 16)
                                absorb<1, 1>(w, a.lora, a.nope, j, ahead, qt, a.ldq, at, ldq);
                        ++t;
                    }
                }
            }
        });
        double attending = (double)(a.start + t0 + rows) * (double)(rows * a.heads) * (double)(width + a.lora);
        parallel(rows * blocks, attending, [&](int64_t task, int worker) {
            int64_t t = task / blocks, block = task % blocks;
            float* ctx = local + worker * each;
            Panels mine = queries(t, block);
            attend(a, a.start + t0 + t + 1, mine, ctx, ldctx, ctx + kHeadBlock * ldctx);
            for (int64_t i = 0; i < mine.rows; ++i) {
                int64_t h = block * together + i;
                pack_pairs(ctx + i * ldctx, a.lora, Panels(context + h * most * ldctx, ldctx, rows).place(t));
            }
        });
        parallel(runs, absorbing * (double)a.v_dim, [&](int64_t task, int worker) {
            for (int64_t h = task * run; h < min64(a.heads, (task + 1) * run); ++h) {
                Bf16Rows w{a.kv_b + (h * per_head + a.nope) * a.lora, a.lora};
                float* out = a.out + t0 * a.ldo + h * a.v_dim;
                const bf16* then = h + 1 < a.heads ? w.base + per_head * a.lora : w.base;
                product(w, 0, a.v_dim, then, Panels(context + h * most * ldctx, ldctx, rows), out, 1, a.ldo,
                        local + worker * each);
                for (int64_t t = 0; a.gate && t < rows; ++t)
                    for (int64_t i = 0; i < a.v_dim; i += 16) {
                        int64_t n = a.v_dim - i;
                        V16 g = vsigmoid(load_part(a.gate + (t0 + t) * a.ldg + h * a.v_dim + i, n));
                        store_part(out + t * a.ldo + i, mul(load_part(out + t * a.ldo + i, n), g), n);
                    }
            }
        });
    }
}
