// Routed experts: w2 . SiTU(w1 x, w3 x) straight from the released bytes, and MXFP4 decoding for inspection.
#pragma once

static void run_experts(const Experts& a) {
    const ExpertLayout& l = a.layout;
    int64_t total = a.splits[a.count];
    if (total == 0) return;
    int64_t most = 0;
    bool same = true;  // in decode sixteen experts share one row, packed once
    for (int64_t e = 0; e < a.count; ++e) most = max64(most, a.splits[e + 1] - a.splits[e]);
    for (int64_t i = 1; i < total; ++i) same &= a.rows[i] == a.rows[0];
    same &= most == 1;

    float* packed = (float*)scratch(kPacked, (size_t)((same ? 1 : total) * l.latent) * 4);
    float* packed_h = (float*)scratch(kHidden, (size_t)(total * l.intermediate) * 4);
    int64_t each = kTileScratch + most * 64;
    float* local = (float*)scratch(kWorker, (size_t)(threads() * each) * 4);
    auto inputs = [&](int64_t e) {
        return Panels(packed + (same ? 0 : a.splits[e] * l.latent), l.latent, a.splits[e + 1] - a.splits[e]);
    };
    auto hidden = [&](int64_t e) {
        return Panels(packed_h + a.splits[e] * l.intermediate, l.intermediate, a.splits[e + 1] - a.splits[e]);
    };
    if (same) pack_mx(a.x + a.rows[0] * a.ldx, l.latent, Panels(packed, l.latent, 1).place(0));
    parallel(same ? 0 : a.count, (double)(total * l.latent), [&](int64_t e, int) {
        Panels x = inputs(e);
        for (int64_t t = 0; t < x.rows; ++t) pack_mx(a.x + a.rows[a.splits[e] + t] * a.ldx, l.latent, x.place(t));
    });

    V16 beta = set1(a.beta), linear_beta = set1(a.linear_beta);
    double work = (double)total * (double)l.latent * (double)l.intermediate;
    // Up to four groups of 32 rows a task: enough tasks for every thread, runs as long as possible.
    int64_t groups = l.intermediate / 32, run = max64(1, min64(4, a.count * groups / (4 * threads()))),
            tasks = (groups + run - 1) / run;
    parallel(a.count * tasks, 2 * work, [&](int64_t task, int worker) {
        int64_t e = task / tasks;
        Panels x = inputs(e);
        if (x.rows == 0) return;
        const uint8_t* blob = a.blobs[e];
        MxRows w1{blob + l.packed[0], blob + l.scale[0], l.latent}, w3{blob + l.packed[2], blob + l.scale[2], l.latent};
        float *mine = local + worker * each, *g = mine + kTileScratch, *u = g + most * 32;
        for (int64_t k = task % tasks * run; k < min64(groups, (task % tasks + 1) * run); ++k) {
            int64_t n = 32 * k, next = min64(n + 32, l.intermediate - 1);
            product(w1, n, n + 32, w3.row(n), x, g, 1, 32, mine);
            product(w3, n, n + 32, w1.row(next), x, u, 1, 32, mine);
            situ_block<pack_mx>(g, u, 32, beta, linear_beta, hidden(e), k);
        }
    });

    int64_t step = 32 * run, steps = (l.latent + step - 1) / step;
    parallel(a.count * steps, work, [&](int64_t task, int worker) {
        int64_t e = task / steps, end = min64(l.latent, (task % steps + 1) * step);
        Panels h = hidden(e);
        if (h.rows == 0) return;
        const uint8_t* blob = a.blobs[e];
        MxRows w2{blob + l.packed[1], blob + l.scale[1], l.intermediate};
        float *mine = local + worker * each, *y = mine + kTileScratch;
        for (int64_t n = task % steps * step; n < end; n += 32) {
            product(w2, n, n + 32, w2.row(min64(n + 32, l.latent - 1)), h, y, 1, 32, mine);
            for (int64_t t = 0; t < h.rows; ++t)
                __builtin_memcpy(a.out + a.slots[a.splits[e] + t] * a.ldo + n, y + t * 32, 32 * 4);
        }
    });
}

// At most this many rows at a time: their packed inputs and hidden numbers stay below 32 MB at K3's widths.
constexpr int64_t kEntries = 1024;

static void expert_forward(const Experts& a) {
    int64_t total = a.splits[a.count];
    if (total <= kEntries) return run_experts(a);
    int32_t* splits = (int32_t*)scratch(kIndex, (size_t)(a.count + 1) * 4);
    for (int64_t begin = 0; begin < total; begin += kEntries) {
        for (int64_t e = 0; e <= a.count; ++e)
            splits[e] = (int32_t)(max64(begin, min64(a.splits[e], min64(begin + kEntries, total))) - begin);
        Experts part = a;
        part.splits = splits;
        part.rows += begin;
        part.slots += begin;
        run_experts(part);
    }
}

static void dequantize(const Dequantize& a) {
    parallel(a.rows, (double)a.rows * (double)a.cols, [&](int64_t row, int) {
        const uint8_t *p = a.packed + row * (a.cols / 2), *s = a.scale + row * (a.cols / 32);
        // Through the products' own decoder, which is what a test of this function should cover.
        float index[32], where[32], value[32];
        V16 first, second;
        for (int i = 0; i < 32; ++i) index[i] = (float)i;
        arrange_mx(index, first, second);
        store(where, first);
        store(where + 16, second);
        for (int64_t g = 0; g < a.cols / 32; ++g) {
            load_mx(p + 16 * g, s[g], first, second);
            store(value, first);
            store(value + 16, second);
            for (int i = 0; i < 32; ++i) a.out[row * a.cols + 32 * g + (int)where[i]] = value[i];
        }
    });
}
