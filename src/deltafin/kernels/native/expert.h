// Routed experts: w2 . SiTU(w1 x, w3 x) straight from the released bytes, and MXFP4 decoding for inspection.
#pragma once

static void expert_forward(const Experts& a) {
    const ExpertLayout& l = a.layout;
    int64_t total = a.splits[a.count];
    if (total == 0) return;
    // Distinct x rows are packed once: in decode sixteen experts share one row.
    int32_t* place = (int32_t*)scratch(kIndex, (size_t)a.x_rows * 4);
    for (int64_t i = 0; i < a.x_rows; ++i) place[i] = -1;
    int32_t distinct = 0;
    for (int64_t i = 0; i < total; ++i)
        if (place[a.rows[i]] < 0) place[a.rows[i]] = distinct++;

    int64_t most = 0;
    for (int64_t e = 0; e < a.count; ++e) most = max64(most, a.splits[e + 1] - a.splits[e]);
    // An expert's rows must lie together for `product`, so each entry has its own packed copy unless there is one row.
    bool shared = distinct == 1;
    int64_t copies = shared ? 1 : total;
    float* packed = (float*)scratch(kPacked, (size_t)(copies * l.latent) * 4);
    float* h = (float*)scratch(kHidden, (size_t)(total * l.intermediate) * 4);
    float* local = (float*)scratch(kWorker, (size_t)(threads() * most * 64) * 4);
    parallel(copies, (double)(copies * l.latent), [&](int64_t i, int) { pack_mx(a.x + a.rows[i] * a.ldx, l.latent, packed + i * l.latent); });

    V16 beta = set1(a.beta), linear_beta = set1(a.linear_beta);
    double work = (double)total * (double)l.latent * (double)l.intermediate;
    int64_t per_task = 32, blocks = (l.intermediate + per_task - 1) / per_task;
    parallel(a.count * blocks, 2 * work, [&](int64_t task, int worker) {
        int64_t e = task / blocks, begin = task % blocks * per_task, first = a.splits[e], rows = a.splits[e + 1] - first;
        if (rows == 0) return;
        const uint8_t* blob = a.blobs[e];
        MxRows w1{blob + l.packed[0], blob + l.scale[0], l.latent}, w3{blob + l.packed[2], blob + l.scale[2], l.latent};
        const float* x = packed + (shared ? 0 : first * l.latent);
        float *g = local + worker * most * 64, *u = g + most * 32;
        int64_t ldx = shared ? 0 : l.latent;
        product(w1, begin, begin + 32, x, ldx, rows, g, 1, 32);
        product(w3, begin, begin + 32, x, ldx, rows, u, 1, 32);
        situ_block(g, u, 32, rows, beta, linear_beta, h + first * l.intermediate + begin, l.intermediate, pack_mx);
    });

    int64_t step = min64(64, l.latent), steps = (l.latent + step - 1) / step;
    parallel(a.count * steps, work, [&](int64_t task, int worker) {
        int64_t e = task / steps, begin = task % steps * step, end = min64(l.latent, begin + step);
        int64_t first = a.splits[e], rows = a.splits[e + 1] - first;
        if (rows == 0) return;
        const uint8_t* blob = a.blobs[e];
        MxRows w2{blob + l.packed[1], blob + l.scale[1], l.intermediate};
        float* y = local + worker * most * 64;
        product(w2, begin, end, h + first * l.intermediate, l.intermediate, rows, y, 1, 64);
        for (int64_t t = 0; t < rows; ++t)
            __builtin_memcpy(a.out + a.slots[first + t] * a.ldo + begin, y + t * 64, (size_t)(end - begin) * 4);
    });
}

static void dequantize(const Dequantize& a) {
    parallel(a.rows, (double)a.rows * (double)a.cols, [&](int64_t row, int) {
        const uint8_t *p = a.packed + row * (a.cols / 2), *s = a.scale + row * (a.cols / 32);
        float t[32];
        for (int64_t g = 0; g < a.cols / 32; ++g) {
            // through the kernel's own decoder: it is what a test of this function should cover
            V16 first, second, where_first, where_second;
            for (int i = 0; i < 32; ++i) t[i] = (float)i;
            arrange_mx(t, where_first, where_second);
            load_mx(p + 16 * g, s[g], first, second);
            float value[32], where[32];
            store(value, first);
            store(value + 16, second);
            store(where, where_first);
            store(where + 16, where_second);
            for (int i = 0; i < 32; ++i) a.out[row * a.cols + 32 * g + (int)where[i]] = value[i];
        }
    });
}
