// Sixteen fp32 lanes as plain C. Defines what the other v16_*.h must reproduce bit for bit.
#pragma once

struct V16 {
    float v[16];
};

#define K3_EACH for (int i = 0; i < 16; ++i)

K3_INLINE V16 set1(float x) {
    V16 r;
    K3_EACH r.v[i] = x;
    return r;
}
K3_INLINE V16 zero() { return set1(0.0f); }
K3_INLINE V16 load(const float* p) {
    V16 r;
    K3_EACH r.v[i] = p[i];
    return r;
}
K3_INLINE V16 load_n(const float* p, int64_t n) {
    V16 r;
    K3_EACH r.v[i] = i < n ? p[i] : 0.0f;
    return r;
}
K3_INLINE void store(float* p, V16 a) { K3_EACH p[i] = a.v[i]; }
K3_INLINE void store_n(float* p, V16 a, int64_t n) { K3_EACH if (i < n) p[i] = a.v[i]; }
K3_INLINE V16 add(V16 a, V16 b) {
    K3_EACH a.v[i] += b.v[i];
    return a;
}
K3_INLINE V16 sub(V16 a, V16 b) {
    K3_EACH a.v[i] -= b.v[i];
    return a;
}
K3_INLINE V16 mul(V16 a, V16 b) {
    K3_EACH a.v[i] *= b.v[i];
    return a;
}
K3_INLINE V16 div(V16 a, V16 b) {
    K3_EACH a.v[i] /= b.v[i];
    return a;
}
K3_INLINE V16 fma(V16 a, V16 b, V16 c) {
    K3_EACH c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return c;
}
// Ternaries rather than fmax: what happens with NaN is then the same everywhere (the second operand wins).
K3_INLINE V16 vmax(V16 a, V16 b) {
    K3_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}
K3_INLINE V16 vmin(V16 a, V16 b) {
    K3_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return a;
}
K3_INLINE V16 if_less(V16 a, V16 b, V16 x, V16 y) {
    K3_EACH x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
    return x;
}
K3_INLINE V16 vabs(V16 a) {
    K3_EACH a.v[i] = __builtin_fabsf(a.v[i]);
    return a;
}
// magnitude must be non-negative
K3_INLINE V16 with_sign(V16 magnitude, V16 sign) {
    K3_EACH magnitude.v[i] = __builtin_copysignf(magnitude.v[i], sign.v[i]);
    return magnitude;
}

K3_INLINE uint32_t bits_of(float f) {
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    return u;
}
K3_INLINE float of_bits(uint32_t u) {
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}

// a * 2^n, where t = n + kMagic; in two factors so that subnormal results and 2^128 come out right.
K3_INLINE V16 scale_by(V16 a, V16 t) {
    K3_EACH {
        int32_t n = (int32_t)(bits_of(t.v[i]) - bits_of(kMagic));
        int32_t n1 = n >> 1, n2 = n - n1;
        a.v[i] = a.v[i] * of_bits((uint32_t)(n1 + 127) << 23) * of_bits((uint32_t)(n2 + 127) << 23);
    }
    return a;
}

K3_INLINE V16 load_bf16(const bf16* p) {
    V16 r;
    K3_EACH r.v[i] = of_bits((uint32_t)p[i] << 16);
    return r;
}
// 32 bf16 numbers as those with even and those with odd index
K3_INLINE void load_pairs(const bf16* p, V16& even, V16& odd) {
    K3_EACH {
        even.v[i] = of_bits((uint32_t)p[2 * i] << 16);
        odd.v[i] = of_bits((uint32_t)p[2 * i + 1] << 16);
    }
}
K3_INLINE void deinterleave(const float* p, V16& even, V16& odd) {
    K3_EACH {
        even.v[i] = p[2 * i];
        odd.v[i] = p[2 * i + 1];
    }
}

// The 32 numbers of an MXFP4 group as two vectors; lane order: see kMxOrder.
K3_INLINE void load_mx(const uint8_t* p, uint8_t s, V16& first, V16& second) {
    const float* value = mx_value[s];
    K3_EACH {
        int e = kMxOrder[i];
        first.v[i] = value[(p[e >> 1] >> (4 * (e & 1))) & 15];
        second.v[i] = value[(p[(e >> 1) + 1] >> (4 * (e & 1))) & 15];
    }
}
K3_INLINE void arrange_mx(const float* p, V16& first, V16& second) {
    K3_EACH {
        first.v[i] = p[kMxOrder[i]];
        second.v[i] = p[kMxOrder[i] + 2];
    }
}

K3_INLINE float reduce(V16 a) {
    for (int d = 8; d > 0; d >>= 1)
        for (int i = 0; i < d; ++i) a.v[i] += a.v[i + d];
    return a.v[0];
}
K3_INLINE float reduce_mx(V16 a) { return reduce(a); }
K3_INLINE float reduce_max(V16 a) {
    for (int d = 8; d > 0; d >>= 1)
        for (int i = 0; i < d; ++i) a.v[i] = a.v[i] > a.v[i + d] ? a.v[i] : a.v[i + d];
    return a.v[0];
}
K3_INLINE float first_lane(V16 a) { return a.v[0]; }

// Register blocking: accumulators that fit, x rows per block, columns of V16 kept in registers.
#undef K3_EACH

// A part is what one register holds; tiles are worked on part by part where sixteen lanes take several registers.
using Part = V16;
K3_INLINE Part load_one(const float* p) { return load(p); }
K3_INLINE void store_one(float* p, Part a) { store(p, a); }
K3_INLINE Part fma_one(Part a, Part b, Part c) { return fma(a, b, c); }

// Register blocking, by measurement. Up to kDirectRows rows of x, blocks of kRowsFor[columns] weight rows times at most
// kMaxCols columns; beyond, tiles. kWide vectors are worked on side by side where a loop runs along a row.
enum { kPartLanes = 16, kTileRows = 2, kTileCols = 2, kDirectRows = 8, kMaxCols = 4, kWide = 2 };
constexpr int kRowsFor[] = {0, 2, 1, 1, 1};
