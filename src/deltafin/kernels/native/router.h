// Expert choice: the k largest of sigmoid(z) + bias, ties to the smaller id; weights from the unbiased sigmoid.
#pragma once

static void router(const Router& a) {
    int64_t padded = up(a.experts, 16);
    int64_t each = padded + a.k;
    float* local = (float*)scratch(kWorker, (size_t)(threads() * each) * 4);
    parallel(a.rows, (double)a.rows * (double)a.experts * 16, [&](int64_t row, int worker) {
        float *gate = local + worker * each, *best = gate + padded;
        int32_t* ids = a.ids + row * a.k;
        float* weights = a.weights + row * a.k;
        for (int64_t i = 0; i < a.experts; i += 16)
            store(gate + i, vsigmoid(load_part(a.logits + row * a.ld + i, a.experts - i)));
        int64_t held = 0;
        for (int64_t i = 0; i < a.experts; ++i) {
            float s = gate[i] + a.bias[i];
            if (!(s == s)) s = -__builtin_inff();  // NaN: chosen last, never out of range
            if (held == a.k && !(s > best[held - 1])) continue;
            int64_t j = held < a.k ? held++ : held - 1;
            for (; j > 0 && s > best[j - 1]; --j) {
                best[j] = best[j - 1];
                ids[j] = ids[j - 1];
            }
            best[j] = s;
            ids[j] = (int32_t)i;
        }
        float total = 0;
        for (int64_t j = 0; j < a.k; ++j) total += gate[ids[j]];
        total += a.sum_eps;
        for (int64_t j = 0; j < a.k; ++j)
            weights[j] = a.renormalize ? gate[ids[j]] / total * a.scale : gate[ids[j]] * a.scale;
    });
}
