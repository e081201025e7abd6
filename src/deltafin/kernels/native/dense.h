// Matrix products. y[t][n] = sum_k w[n][k] x[t][k], with one order of additions whatever the number of rows: lane l of
// one 16-lane accumulator takes two numbers of each chunk of 32, chunks ascending, and the lanes are added in a fixed
// tree. Blocking decides only which outputs are in registers together.
#pragma once

// ---- weights: row pointers, and the two vectors of one chunk of 32 ----

struct Bf16Rows {  // first = even, second = odd numbers
    const bf16* base;
    int64_t in;
    using Row = const bf16*;
    Row row(int64_t n) const { return base + n * in; }
    // Rows follow each other in memory, so R chunks of the coming R rows can be asked for in linear order.
    static K3_INLINE_MEMBER void prefetch(Row r, int64_t g, int rows) {
        for (int i = 0; i < rows; ++i) __builtin_prefetch(r + 32 * (g * rows + i), 0, 3);
    }
    static K3_INLINE_MEMBER void prefetch_slice(Row r, int64_t g, int64_t chunks) {
        for (int64_t i = 0; i < chunks; ++i) __builtin_prefetch(r + 32 * (g + i), 0, 3);
    }
    static K3_INLINE_MEMBER void chunk(Row r, int64_t g, V16& a, V16& b) { load_pairs(r + 32 * g, a, b); }
    static K3_INLINE_MEMBER void last(Row r, int64_t g, int64_t n, V16& a, V16& b) {
        bf16 t[32] = {0};
        __builtin_memcpy(t, r + 32 * g, (size_t)n * 2);
        load_pairs(t, a, b);
    }
    static K3_INLINE_MEMBER float sum(V16 a) { return reduce(a); }
};

struct MxRows {  // see kMxOrder
    const uint8_t *packed, *scale;
    int64_t in;
    struct Row {
        const uint8_t *p, *s;
    };
    Row row(int64_t n) const { return {packed + n * (in / 2), scale + n * (in / 32)}; }
    static K3_INLINE_MEMBER void prefetch(Row r, int64_t g, int rows) {
        for (int i = 0; i < rows; i += 4) __builtin_prefetch(r.p + 16 * (g * rows + i), 0, 2);
        __builtin_prefetch(r.s + g * rows, 0, 2);
    }
    static K3_INLINE_MEMBER void prefetch_slice(Row r, int64_t g, int64_t chunks) {
        for (int64_t i = 0; i < chunks; i += 4) __builtin_prefetch(r.p + 16 * (g + i), 0, 3);
        __builtin_prefetch(r.s + g, 0, 3);
    }
    static K3_INLINE_MEMBER void chunk(Row r, int64_t g, V16& a, V16& b) { load_mx(r.p + 16 * g, r.s[g], a, b); }
    static K3_INLINE_MEMBER void last(Row, int64_t, int64_t, V16& a, V16& b) { a = b = zero(); }  // in % 32 == 0
    static K3_INLINE_MEMBER float sum(V16 a) { return reduce_mx(a); }
};

struct FloatRows {  // natural order
    const float* base;
    int64_t ld, in;
    using Row = const float*;
    Row row(int64_t n) const { return base + n * ld; }
    static K3_INLINE_MEMBER void prefetch(Row, int64_t, int) {}  // in cache: read for every head
    static K3_INLINE_MEMBER void prefetch_slice(Row, int64_t, int64_t) {}
    static K3_INLINE_MEMBER void chunk(Row r, int64_t g, V16& a, V16& b) {
        a = load(r + 32 * g);
        b = load(r + 32 * g + 16);
    }
    static K3_INLINE_MEMBER void last(Row r, int64_t g, int64_t n, V16& a, V16& b) {
        a = load_part(r + 32 * g, n);
        b = n > 16 ? load_n(r + 32 * g + 16, n - 16) : zero();
    }
    static K3_INLINE_MEMBER float sum(V16 a) { return reduce(a); }
};

// ---- activations ----

// Rows of x in groups of at most kMaxCols (or kTileCols when there are many), each group chunk by chunk: the 32 numbers
// of its first row, of its second, ... Within a chunk the numbers stand as the weight's two vectors want them.
struct Panels {
    float* base;
    int64_t width, rows, groups;  // width: numbers per row, a multiple of 32
    Panels(float* base, int64_t width, int64_t rows)
        : Panels(base, width, rows, rows > kDirectRows ? kTileCols : kMaxCols) {}
    Panels(float* base, int64_t width, int64_t rows, int64_t most)
        : base(base), width(width), rows(rows), groups((rows + most - 1) / most) {}
    bool tiled() const { return rows > kDirectRows; }
    int64_t begin(int64_t g) const { return rows * g / groups; }
    int64_t cols(int64_t g) const { return begin(g + 1) - begin(g); }
    const float* group(int64_t g) const { return base + begin(g) * width; }
    struct Place {
        float* first;    // chunk 0
        int64_t stride;  // from chunk to chunk
    };
    Place place(int64_t t) const {
        int64_t g = ((t + 1) * groups + rows - 1) / rows - 1, b = begin(g), c = begin(g + 1) - b;
        return {base + b * width + (t - b) * 32, 32 * c};
    }
};

// A row of n numbers into its place, padded with zeros to full chunks.
template <void (*arrange)(const float*, V16&, V16&)>
static inline void pack(const float* x, int64_t n, Panels::Place to) {
    V16 a, b;
    float* out = to.first;
    for (int64_t i = 0; i < n; i += 32, out += to.stride) {
        if (i + 32 <= n) {
            arrange(x + i, a, b);
        } else {
            float t[32] = {0};
            __builtin_memcpy(t, x + i, (size_t)(n - i) * 4);
            arrange(t, a, b);
        }
        store(out, a);
        store(out + 16, b);
    }
}
static inline void pack_pairs(const float* x, int64_t n, Panels::Place to) { pack<deinterleave>(x, n, to); }
static inline void pack_mx(const float* x, int64_t n, Panels::Place to) { pack<arrange_mx>(x, n, to); }

// ---- few rows: weights are decoded into registers and used at once ----

// R rows of w (clamped to `last_row`) times the C columns of a group.
template <class W, int R, int C>
K3_INLINE void block(const W& w, int64_t n0, int64_t last_row, typename W::Row next, const float* x, V16 (&acc)[R][C]) {
    typename W::Row row[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) row[r] = w.row(min64(n0 + r, last_row));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = zero();
    int64_t full = w.in / 32;
    for (int64_t g = 0; g < full; ++g, x += C * 32) {
        W::prefetch(next, g, R);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            V16 a, b;
            W::chunk(row[r], g, a, b);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[r][c] = fma(b, load(x + c * 32 + 16), fma(a, load(x + c * 32), acc[r][c]));
        }
    }
    if (w.in % 32) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            V16 a, b;
            W::last(row[r], full, w.in % 32, a, b);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[r][c] = fma(b, load(x + c * 32 + 16), fma(a, load(x + c * 32), acc[r][c]));
        }
    }
}

template <class W, int C>
static void sweep(const W& w, int64_t begin, int64_t end, typename W::Row then, const float* x, float* y, int64_t rs,
                  int64_t cs) {
    constexpr int R = kRowsFor[C];
    for (int64_t n = begin; n < end; n += R) {
        V16 acc[R][C];
        block<W, R, C>(w, n, end - 1, n + R < end ? w.row(n + R) : then, x, acc);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            if (n + r < end)
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) y[(n + r - begin) * rs + c * cs] = W::sum(acc[r][c]);
    }
}

// `then`: what the caller reads next, fetched ahead during the last block.
template <class W>
static void direct(const W& w, int64_t begin, int64_t end, typename W::Row then, const Panels& x, float* y, int64_t rs,
                   int64_t cs) {
    for (int64_t g = 0; g < x.groups; ++g) {
        const float* p = x.group(g);
        float* yg = y + x.begin(g) * cs;
        switch (x.cols(g)) {
            case 1: sweep<W, 1>(w, begin, end, then, p, yg, rs, cs); break;
            case 2: sweep<W, 2>(w, begin, end, then, p, yg, rs, cs); break;
            case 3: sweep<W, 3>(w, begin, end, then, p, yg, rs, cs); break;
            case 4:
                if constexpr (kMaxCols >= 4) sweep<W, 4>(w, begin, end, then, p, yg, rs, cs);
                break;
            case 5:
                if constexpr (kMaxCols >= 5) sweep<W, 5>(w, begin, end, then, p, yg, rs, cs);
                break;
        }
    }
}

// ---- many rows: a slice of the weights is decoded to fp32 once and multiplied from cache ----

constexpr int64_t kTileChunks = 16;  // chunks of 32 per slice: with a group of x it fits the first-level cache
constexpr int64_t kTileOuts = 12;    // weight rows per tile, a multiple of every kTileRows
constexpr int64_t kTileGroups = 16;  // groups of x whose accumulators wait between slices

// One register tile over a slice. Accumulators continue from `acc` unless this is the first slice.
template <int C>
static void tile(const float* w, const float* x, int64_t chunks, bool first, float* acc) {
    constexpr int R = kTileRows;
    for (int part = 0; part < 16; part += kPartLanes) {
        Part sum[R][C];
        float* mine = acc + part;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sum[r][c] = first ? Part{} : load_one(mine + (r * C + c) * 16);
        const float *wk = w + part, *xk = x + part;
        for (int64_t k = 0; k < chunks; ++k, wk += R * 32, xk += C * 32)
#pragma GCC unroll 2
            for (int half = 0; half < 32; half += 16) {
                Part wr[R];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) wr[r] = load_one(wk + half + r * 32);
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) {
                    Part xc = load_one(xk + half + c * 32);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) sum[r][c] = fma_one(wr[r], xc, sum[r][c]);
                }
            }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) store_one(mine + (r * C + c) * 16, sum[r][c]);
    }
}

static inline void tile_any(int64_t cols, const float* w, const float* x, int64_t chunks, bool first, float* acc) {
    switch (cols) {
        case 1: return tile<1>(w, x, chunks, first, acc);
        case 2: return tile<2>(w, x, chunks, first, acc);
        case 3:
            if constexpr (kTileCols >= 3)
                return tile<3>(w, x, chunks, first, acc);
            else
                break;
        case 4:
            if constexpr (kTileCols >= 4)
                return tile<4>(w, x, chunks, first, acc);
            else
                break;
        case 5:
            if constexpr (kTileCols >= 5)
                return tile<5>(w, x, chunks, first, acc);
            else
                break;
        case 6:
            if constexpr (kTileCols >= 6)
                return tile<6>(w, x, chunks, first, acc);
            else
                break;
    }
}

// Floats of per-worker memory that `tiles` needs.
constexpr int64_t kTileScratch = kTileOuts * kTileChunks * 32 + kTileOuts * kTileGroups * kTileCols * 16;

template <class W>
static void tiles(const W& w, int64_t begin, int64_t end, const Panels& x, float* y, int64_t rs, int64_t cs,
                  float* local) {
    float *decoded = local, *acc = local + kTileOuts * kTileChunks * 32;
    int64_t all = (w.in + 31) / 32;
    // With few groups little time passes between slices: smaller tiles leave the first-level cache room for the next one.
    int64_t outs = x.groups <= 4 ? 2 * kTileRows : kTileOuts;
    for (int64_t n0 = begin; n0 < end; n0 += outs)
        for (int64_t g0 = 0; g0 < x.groups; g0 += kTileGroups) {
            int64_t blocks = (min64(outs, end - n0) + kTileRows - 1) / kTileRows,
                    g1 = min64(x.groups, g0 + kTileGroups);
            for (int64_t k0 = 0; k0 < all; k0 += kTileChunks) {
                int64_t chunks = min64(kTileChunks, all - k0);
                for (int64_t r = 0; r < blocks * kTileRows; ++r) {
                    typename W::Row row = w.row(min64(n0 + r, end - 1));
                    // The next slice, while this one is multiplied: caches see no pattern in such short pieces.
                    if (k0 + kTileChunks < all)
                        W::prefetch_slice(row, k0 + kTileChunks, min64(kTileChunks, all - k0 - kTileChunks));
                    else
                        W::prefetch_slice(w.row(min64(n0 + outs + r, end - 1)), 0, min64(kTileChunks, all));
                    float* to = decoded + (r / kTileRows) * kTileRows * kTileChunks * 32 + (r % kTileRows) * 32;
                    for (int64_t k = 0; k < chunks; ++k, to += kTileRows * 32) {
                        V16 first, second;
                        if (w.in % 32 && k0 + k == all - 1)
                            W::last(row, k0 + k, w.in % 32, first, second);
                        else
                            W::chunk(row, k0 + k, first, second);
                        store(to, first);
                        store(to + 16, second);
                    }
                }
                for (int64_t g = g0; g < g1; ++g)
                    for (int64_t b = 0; b < blocks; ++b)
                        tile_any(x.cols(g), decoded + b * kTileRows * kTileChunks * 32,
                                 x.group(g) + k0 * x.cols(g) * 32, chunks, k0 == 0,
                                 acc + ((g - g0) * (kTileOuts / kTileRows) + b) * kTileRows * kTileCols * 16);
            }
            for (int64_t g = g0; g < g1; ++g)
                for (int64_t n = n0; n < min64(end, n0 + outs); ++n) {
                    int64_t r = (n - n0) % kTileRows, c = x.cols(g);
                    const float* sums =
                        acc + ((g - g0) * (kTileOuts / kTileRows) + (n - n0) / kTileRows) * kTileRows * kTileCols * 16 +
                        r * c * 16;
                    for (int64_t i = 0; i < c; ++i)
                        y[(n - begin) * rs + (x.begin(g) + i) * cs] = W::sum(load(sums + i * 16));
                }
        }
}

// y[(n - begin) * rs + t * cs] for weight rows [begin, end) and every row of x.
template <class W>
static void product(const W& w, int64_t begin, int64_t end, typename W::Row then, const Panels& x, float* y, int64_t rs,
                    int64_t cs, float* local) {
    if (x.tiled())
        tiles(w, begin, end, x, y, rs, cs, local);
    else
        direct(w, begin, end, then, x, y, rs, cs);
}

// ---- the kernels ----

// Rows of x worked on together: their packed copy stays within 16 MB.
static inline int64_t row_tile(int64_t width) { return max64(96, (16 << 20) / (4 * width)); }

// Weight rows per task: long runs stream best, eight tasks a thread even out their speeds.
static inline int64_t outs_per_task(int64_t outs, int64_t rows) {
    return rows > kDirectRows ? 3 * kTileOuts : max64(32, up(outs / (8 * threads()), 32));
}

// out[t][n] for n in [begin, end), in runs that stay in cache while every group of x passes over them.
static void rows_in_runs(const Bf16Rows& w, int64_t begin, int64_t end, const Panels& x, float* out, int64_t ldo,
                         float* local) {
    int64_t run = x.tiled() ? 3 * kTileOuts : 32;
    for (int64_t n = begin; n < end; n += run) {
        int64_t next = min64(end, n + run);
        product(w, n, next, w.row(next < end ? next : n), x, out + n, 1, ldo, local);
    }
}

static void linear(const Linear& a) {
    int64_t padded = up(a.in, 32), most = min64(row_tile(padded), a.rows), step = outs_per_task(a.outs, most);
    float* packed = (float*)scratch(kPacked, (size_t)(most * padded) * 4);
    float* local = (float*)scratch(kWorker, (size_t)(threads() * kTileScratch) * 4);
    Bf16Rows w{a.w, a.in};
    for (int64_t t0 = 0; t0 < a.rows; t0 += most) {
        Panels x(packed, padded, min64(most, a.rows - t0));
        parallel(x.rows, (double)(x.rows * padded),
                 [&](int64_t t, int) { pack_pairs(a.x + (t0 + t) * a.ldx, a.in, x.place(t)); });
        parallel((a.outs + step - 1) / step, (double)x.rows * (double)a.in * (double)a.outs,
                 [&](int64_t task, int worker) {
                     rows_in_runs(w, task * step, min64(a.outs, (task + 1) * step), x, a.out + t0 * a.ldo, a.ldo,
                                  local + worker * kTileScratch);
                 });
    }
}

// SiTU of n <= 32 gate and up outputs [t][32], packed into chunk k of h for the next product.
template <void (*pack_row)(const float*, int64_t, Panels::Place)>
static inline void situ_block(const float* gate, const float* up_, int64_t n, V16 beta, V16 linear_beta,
                              const Panels& h, int64_t k) {
    for (int64_t t = 0; t < h.rows; ++t) {
        float v[32];
        for (int64_t i = 0; i < 32; i += 16)
            store(v + i, vsitu(load(gate + t * 32 + i), load(up_ + t * 32 + i), beta, linear_beta));
        Panels::Place to = h.place(t);
        to.first += k * to.stride;
        pack_row(v, n, to);
    }
}

static void gated_mlp(const GatedMlp& a) {
    int64_t in = up(a.in, 32), hidden = up(a.hidden, 32), most = min64(row_tile(max64(in, hidden)), a.rows);
    float* packed = (float*)scratch(kPacked, (size_t)(most * in) * 4);
    float* packed_h = (float*)scratch(kHidden, (size_t)(most * hidden) * 4);
    int64_t each = kTileScratch + most * 64;
    float* local = (float*)scratch(kWorker, (size_t)(threads() * each) * 4);
    V16 beta = set1(a.beta), linear_beta = set1(a.linear_beta);
    Bf16Rows gate{a.gate, a.in}, up_{a.up, a.in}, down{a.down, a.hidden};
    for (int64_t t0 = 0; t0 < a.rows; t0 += most) {
        int64_t rows = min64(most, a.rows - t0);
        Panels x(packed, in, rows), h(packed_h, hidden, rows);
        parallel(rows, (double)(rows * in),
                 [&](int64_t t, int) { pack_pairs(a.x + (t0 + t) * a.ldx, a.in, x.place(t)); });
        parallel(hidden / 32, 2.0 * (double)rows * (double)a.in * (double)a.hidden, [&](int64_t task, int worker) {
            int64_t begin = task * 32, end = min64(a.hidden, begin + 32);
            float *mine = local + worker * each, *g = mine + kTileScratch, *u = g + most * 32;
            product(gate, begin, end, up_.row(begin), x, g, 1, 32, mine);
            product(up_, begin, end, gate.row(min64(end, a.hidden - 1)), x, u, 1, 32, mine);
            situ_block<pack_pairs>(g, u, end - begin, beta, linear_beta, h, task);
        });
        int64_t step = outs_per_task(a.outs, rows);
        parallel((a.outs + step - 1) / step, (double)rows * (double)a.hidden * (double)a.outs,
                 [&](int64_t task, int worker) {
                     rows_in_runs(down, task * step, min64(a.outs, (task + 1) * step), h, a.out + t0 * a.ldo, a.ldo,
                                  local + worker * each);
                 });
    }
}
