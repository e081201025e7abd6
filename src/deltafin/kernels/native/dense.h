// Matrix products. y[t][n] = sum_k w[n][k] x[t][k], with one order of additions whatever the number of rows: lane l of one
// 16-lane accumulator takes two numbers of each chunk of 32, chunks ascending, and the lanes are added in a fixed tree.
// Blocking decides only which outputs are in registers together.
#pragma once

// A weight source gives row pointers and the two vectors of one chunk of 32. x is stored to match ("packed"): per chunk,
// the 16 partners of the first vector, then those of the second.
struct Bf16Rows {  // first = even, second = odd numbers
    const bf16* base;
    int64_t ld, in;
    using Row = const bf16*;
    Row row(int64_t n) const { return base + n * ld; }
    int64_t full() const { return in / 32; }
    int64_t tail() const { return in % 32; }
    static K3_INLINE_MEMBER void chunk(Row r, int64_t g, V16& a, V16& b) { load_pairs(r + 32 * g, a, b); }
    static K3_INLINE_MEMBER void last(Row r, int64_t g, int64_t n, V16& a, V16& b) {
        bf16 t[32] = {0};
        __builtin_memcpy(t, r + 32 * g, (size_t)n * 2);
        load_pairs(t, a, b);
    }
    static K3_INLINE_MEMBER float sum(V16 a) { return reduce(a); }
};

struct MxRows {
    const uint8_t *packed, *scale;
    int64_t in;
    struct Row { const uint8_t *p, *s; };
    Row row(int64_t n) const { return {packed + n * (in / 2), scale + n * (in / 32)}; }
    int64_t full() const { return in / 32; }
    int64_t tail() const { return 0; }
    static K3_INLINE_MEMBER void chunk(Row r, int64_t g, V16& a, V16& b) { load_mx(r.p + 16 * g, r.s[g], a, b); }
    static K3_INLINE_MEMBER void last(Row, int64_t, int64_t, V16& a, V16& b) { a = b = zero(); }
    static K3_INLINE_MEMBER float sum(V16 a) { return reduce_mx(a); }
};

struct FloatRows {  // natural order
    const float* base;
    int64_t ld, in;
    using Row = const float*;
    Row row(int64_t n) const { return base + n * ld; }
    int64_t full() const { return in / 32; }
    int64_t tail() const { return in % 32; }
    static K3_INLINE_MEMBER void chunk(Row r, int64_t g, V16& a, V16& b) { a = load(r + 32 * g); b = load(r + 32 * g + 16); }
    static K3_INLINE_MEMBER void last(Row r, int64_t g, int64_t n, V16& a, V16& b) {
        a = load_part(r + 32 * g, n);
        b = n > 16 ? load_n(r + 32 * g + 16, n - 16) : zero();
    }
    static K3_INLINE_MEMBER float sum(V16 a) { return reduce(a); }
};

static inline void pack_pairs(const float* x, int64_t n, float* out) {
    V16 a, b;
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        deinterleave(x + i, a, b);
        store(out + i, a);
        store(out + i + 16, b);
    }
    if (i < n) {
        float t[32] = {0};
        __builtin_memcpy(t, x + i, (size_t)(n - i) * 4);
        deinterleave(t, a, b);
        store(out + i, a);
        store(out + i + 16, b);
    }
}

static inline void pack_mx(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 32) {
        V16 a, b;
        arrange_mx(x + i, a, b);
        store(out + i, a);
        store(out + i + 16, b);
    }
}

// R rows of w (clamped to `last_row`) times C packed rows of x. With `carry`, accumulators start from and return to it.
template <class W, int R, int C>
K3_INLINE void block(const W& w, int64_t n0, int64_t last_row, const float* x, int64_t ldx, V16 (&acc)[R][C]) {
    typename W::Row row[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) row[r] = w.row(min64(n0 + r, last_row));
    int64_t full = w.full();
    for (int64_t g = 0; g < full; ++g) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            V16 a, b;
            W::chunk(row[r], g, a, b);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                acc[r][c] = fma(a, load(x + c * ldx + 32 * g), acc[r][c]);
                acc[r][c] = fma(b, load(x + c * ldx + 32 * g + 16), acc[r][c]);
            }
        }
    }
    if (w.tail()) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            V16 a, b;
            W::last(row[r], full, w.tail(), a, b);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                acc[r][c] = fma(a, load(x + c * ldx + 32 * full), acc[r][c]);
                acc[r][c] = fma(b, load(x + c * ldx + 32 * full + 16), acc[r][c]);
            }
        }
    }
}

// Rows per block for C columns.
template <int C>
struct RowsFor { static constexpr int value = C == 1 ? kStreamRows : kMaxAcc / C < 1 ? 1 : kMaxAcc / C > 8 ? 8 : kMaxAcc / C; };

template <class W, int C>
static void sweep(const W& w, int64_t begin, int64_t end, const float* x, int64_t ldx, float* y, int64_t rs, int64_t cs) {
    constexpr int R = RowsFor<C>::value;
    for (int64_t n = begin; n < end; n += R) {
        V16 acc[R][C];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[r][c] = zero();
        block<W, R, C>(w, n, end - 1, x, ldx, acc);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            if (n + r < end)
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) y[(n + r - begin) * rs + c * cs] = W::sum(acc[r][c]);
    }
}

template <class W>
static void sweep_any(const W& w, int64_t begin, int64_t end, const float* x, int64_t ldx, int64_t cols, float* y, int64_t rs, int64_t cs) {
    switch (cols) {
        case 1: return sweep<W, 1>(w, begin, end, x, ldx, y, rs, cs);
        case 2: return sweep<W, 2>(w, begin, end, x, ldx, y, rs, cs);
        case 3: return sweep<W, 3>(w, begin, end, x, ldx, y, rs, cs);
        case 4: return sweep<W, 4>(w, begin, end, x, ldx, y, rs, cs);
        case 5: if constexpr (kMaxCols >= 5) return sweep<W, 5>(w, begin, end, x, ldx, y, rs, cs); else break;
        case 6: if constexpr (kMaxCols >= 6) return sweep<W, 6>(w, begin, end, x, ldx, y, rs, cs); else break;
        case 7: if constexpr (kMaxCols >= 7) return sweep<W, 7>(w, begin, end, x, ldx, y, rs, cs); else break;
        case 8: if constexpr (kMaxCols >= 8) return sweep<W, 8>(w, begin, end, x, ldx, y, rs, cs); else break;
    }
}

// y[(n - begin) * rs + t * cs] for weight rows [begin, end) and `rows` packed rows of x.
template <class W>
static void product(const W& w, int64_t begin, int64_t end, const float* x, int64_t ldx, int64_t rows, float* y, int64_t rs, int64_t cs) {
    int64_t groups = (rows + kMaxCols - 1) / kMaxCols;
    for (int64_t g = 0; g < groups; ++g) {
        int64_t t0 = rows * g / groups, t1 = rows * (g + 1) / groups;
        sweep_any(w, begin, end, x + t0 * ldx, ldx, t1 - t0, y + t0 * cs, rs, cs);
    }
}

// Rows of x worked on together: their packed copy stays within 16 MB.
static inline int64_t row_tile(int64_t width) { return max64(64, (16 << 20) / (4 * width)); }

// Weight rows per task: enough bytes to stream well, a multiple of 32 (some callers finish groups of 32).
static inline int64_t outs_per_task(int64_t bytes_per_row, int64_t rows) {
    int64_t n = rows == 1 ? (128 << 10) / bytes_per_row : 32;
    return max64(32, n / 32 * 32);
}

static void linear(const Linear& a) {
    int64_t padded = up(a.in, 32), tile = row_tile(padded), step = outs_per_task(a.in * 2, a.rows);
    float* packed = (float*)scratch(kPacked, (size_t)(min64(tile, a.rows) * padded) * 4);
    Bf16Rows w{a.w, a.in, a.in};
    for (int64_t t0 = 0; t0 < a.rows; t0 += tile) {
        int64_t rows = min64(tile, a.rows - t0);
        parallel(rows, (double)(rows * padded), [&](int64_t t, int) { pack_pairs(a.x + (t0 + t) * a.ldx, a.in, packed + t * padded); });
        parallel((a.outs + step - 1) / step, (double)rows * (double)a.in * (double)a.outs, [&](int64_t task, int) {
            int64_t begin = task * step, end = min64(a.outs, begin + step);
            product(w, begin, end, packed, padded, rows, a.out + t0 * a.ldo + begin, 1, a.ldo);
        });
    }
}

// SiTU of gate and up rows [n][t] (at most 32 of them), written packed for the following product.
template <class Pack>
static inline void situ_block(const float* gate, const float* up_, int64_t n, int64_t rows, V16 beta, V16 linear_beta, float* h, int64_t ldh, Pack pack) {
    for (int64_t t = 0; t < rows; ++t) {
        float v[32] = {0};
        store(v, vsitu(load(gate + t * 32), load(up_ + t * 32), beta, linear_beta));
        if (n > 16) store(v + 16, vsitu(load(gate + t * 32 + 16), load(up_ + t * 32 + 16), beta, linear_beta));
        for (int64_t i = n; i < 32; ++i) v[i] = 0;
        pack(v, 32, h + t * ldh);
    }
}

static void gated_mlp(const GatedMlp& a) {
    int64_t in = up(a.in, 32), hidden = up(a.hidden, 32), tile = row_tile(max64(in, hidden));
    int64_t most = min64(tile, a.rows);
    float* packed = (float*)scratch(kPacked, (size_t)(most * in) * 4);
    float* h = (float*)scratch(kHidden, (size_t)(most * hidden) * 4);
    float* local = (float*)scratch(kWorker, (size_t)(threads() * most * 64) * 4);
    V16 beta = set1(a.beta), linear_beta = set1(a.linear_beta);
    Bf16Rows gate{a.gate, a.in, a.in}, up_{a.up, a.in, a.in}, down{a.down, a.hidden, a.hidden};
    for (int64_t t0 = 0; t0 < a.rows; t0 += tile) {
        int64_t rows = min64(tile, a.rows - t0);
        parallel(rows, (double)(rows * in), [&](int64_t t, int) { pack_pairs(a.x + (t0 + t) * a.ldx, a.in, packed + t * in); });
        parallel(hidden / 32, 2.0 * (double)rows * (double)a.in * (double)a.hidden, [&](int64_t task, int worker) {
            int64_t begin = task * 32, end = min64(a.hidden, begin + 32);
            float *g = local + worker * most * 64, *u = g + most * 32;
            product(gate, begin, end, packed, in, rows, g, 1, 32);
            product(up_, begin, end, packed, in, rows, u, 1, 32);
            situ_block(g, u, end - begin, rows, beta, linear_beta, h + begin, hidden, pack_pairs);
        });
        int64_t step = outs_per_task(a.hidden * 2, rows);
        parallel((a.outs + step - 1) / step, (double)rows * (double)a.hidden * (double)a.outs, [&](int64_t task, int) {
            int64_t begin = task * step, end = min64(a.outs, begin + step);
            product(down, begin, end, h, hidden, rows, a.out + t0 * a.ldo + begin, 1, a.ldo);
        });
    }
}
