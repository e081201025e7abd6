// Ceilings for the benchmarks: how fast this machine reads memory and multiplies, by the same vectors and threads.
#pragma once

static double read_sum(const void* p, int64_t bytes) {
    int64_t chunk = 1 << 20, tasks = bytes / chunk;
    double* sums = (double*)scratch(kWorker, (size_t)threads() * 64);
    for (int i = 0; i < threads(); ++i) sums[8 * i] = 0;
    parallel(tasks, 1e12, [&](int64_t task, int worker) {
        const float* x = (const float*)((const char*)p + task * chunk);
        Sum s;
        for (int64_t i = 0; i < chunk / 4; i += 64)
            for (int j = 0; j < 4; ++j) s.a[j] = add(s.a[j], load(x + i + 16 * j));
        sums[8 * worker] += (double)s.total();
    });
    double total = 0;
    for (int i = 0; i < threads(); ++i) total += sums[8 * i];
    return total;
}

static double fma_burn(int64_t steps) {
    enum {
        kChains = 12 * kPartLanes / 16 < 6 ? 6 : 12 * kPartLanes / 16
    };  // twelve registers: twice two units of latency four
    int64_t tasks = threads();
    float* sink = (float*)scratch(kWorker, (size_t)threads() * 64);
    parallel(tasks, 1e12, [&](int64_t task, int) {
        // Different in every lane, or the compiler computes registers that start equal only once.
        float start[16 * kChains];
        for (int i = 0; i < 16 * kChains; ++i) start[i] = (float)(i + task);
        V16 acc[kChains], x = set1(0.999f), y = set1(1e-3f);
#pragma GCC unroll 16
        for (int c = 0; c < kChains; ++c) acc[c] = load(start + 16 * c);
        for (int64_t i = 0; i < steps; ++i)
#pragma GCC unroll 16
            for (int c = 0; c < kChains; ++c) acc[c] = fma(acc[c], x, y);
        V16 total = zero();
        for (int c = 0; c < kChains; ++c) total = add(total, acc[c]);
        sink[16 * task] = reduce(total);
    });
    return (double)steps * kChains * 16 * (double)tasks;
}
