// Sixteen fp32 lanes in four NEON registers (AArch64).
#pragma once

struct V16 {
    float32x4_t v[4];
};

#define K3_EACH for (int i = 0; i < 4; ++i)

K3_INLINE V16 set1(float x) {
    float32x4_t v = vdupq_n_f32(x);
    return {{v, v, v, v}};
}
K3_INLINE V16 zero() { return set1(0.0f); }
K3_INLINE V16 load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
K3_INLINE V16 load_n(const float* p, int64_t n) {
    float t[16] = {0};
    __builtin_memcpy(t, p, (size_t)n * 4);
    return load(t);
}
K3_INLINE void store(float* p, V16 a) { K3_EACH vst1q_f32(p + 4 * i, a.v[i]); }
K3_INLINE void store_n(float* p, V16 a, int64_t n) {
    float t[16];
    store(t, a);
    __builtin_memcpy(p, t, (size_t)n * 4);
}
K3_INLINE V16 add(V16 a, V16 b) {
    K3_EACH a.v[i] = vaddq_f32(a.v[i], b.v[i]);
    return a;
}
K3_INLINE V16 sub(V16 a, V16 b) {
    K3_EACH a.v[i] = vsubq_f32(a.v[i], b.v[i]);
    return a;
}
K3_INLINE V16 mul(V16 a, V16 b) {
    K3_EACH a.v[i] = vmulq_f32(a.v[i], b.v[i]);
    return a;
}
K3_INLINE V16 div(V16 a, V16 b) {
    K3_EACH a.v[i] = vdivq_f32(a.v[i], b.v[i]);
    return a;
}
K3_INLINE V16 fma(V16 a, V16 b, V16 c) {
    K3_EACH c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
    return c;
}
// Compare and select, not vmaxq: the latter propagates NaN from either side, x86 does not.
K3_INLINE V16 vmax(V16 a, V16 b) {
    K3_EACH a.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
    return a;
}
K3_INLINE V16 vmin(V16 a, V16 b) {
    K3_EACH a.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
    return a;
}
K3_INLINE V16 if_less(V16 a, V16 b, V16 x, V16 y) {
    K3_EACH x.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), x.v[i], y.v[i]);
    return x;
}
K3_INLINE V16 vabs(V16 a) {
    K3_EACH a.v[i] = vabsq_f32(a.v[i]);
    return a;
}
K3_INLINE V16 with_sign(V16 magnitude, V16 sign) {
    K3_EACH magnitude.v[i] = vbslq_f32(vdupq_n_u32(0x80000000u), sign.v[i], magnitude.v[i]);
    return magnitude;
}

K3_INLINE V16 scale_by(V16 a, V16 t) {
    K3_EACH {
        int32x4_t n = vsubq_s32(vreinterpretq_s32_f32(t.v[i]), vreinterpretq_s32_f32(vdupq_n_f32(kMagic)));
        int32x4_t n1 = vshrq_n_s32(n, 1), n2 = vsubq_s32(n, n1), bias = vdupq_n_s32(127);
        float32x4_t f1 = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n1, bias), 23));
        float32x4_t f2 = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n2, bias), 23));
        a.v[i] = vmulq_f32(vmulq_f32(a.v[i], f1), f2);
    }
    return a;
}

K3_INLINE V16 load_bf16(const bf16* p) {
    V16 r;
    K3_EACH r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
    return r;
}
K3_INLINE float32x4_t low_half(uint32x4_t w) { return vreinterpretq_f32_u32(vshlq_n_u32(w, 16)); }
K3_INLINE float32x4_t high_half(uint32x4_t w) { return vreinterpretq_f32_u32(vandq_u32(w, vdupq_n_u32(0xffff0000u))); }
K3_INLINE void load_pairs(const bf16* p, V16& even, V16& odd) {
    K3_EACH {
        uint32x4_t w = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
        even.v[i] = low_half(w);
        odd.v[i] = high_half(w);
    }
}
K3_INLINE void deinterleave(const float* p, V16& even, V16& odd) {
    K3_EACH {
        float32x4x2_t t = vld2q_f32(p + 8 * i);
        even.v[i] = t.val[0];
        odd.v[i] = t.val[1];
    }
}

// As on AVX2: nibbles become the two bytes of a scaled bf16 pattern.
K3_INLINE void load_mx(const uint8_t* p, uint8_t s, V16& first, V16& second) {
    uint8x16_t packed = vld1q_u8(p), lows = vld1q_u8(mx_bytes[s]), highs = vld1q_u8(mx_bytes[s] + 16);
    uint8x16_t even = vandq_u8(packed, vdupq_n_u8(15)), odd = vshrq_n_u8(packed, 4);
    uint8x16_t even_lo = vqtbl1q_u8(lows, even), even_hi = vqtbl1q_u8(highs, even);
    uint8x16_t odd_lo = vqtbl1q_u8(lows, odd), odd_hi = vqtbl1q_u8(highs, odd);
    uint32x4_t w[4] = {
        vreinterpretq_u32_u8(vzip1q_u8(even_lo, even_hi)), vreinterpretq_u32_u8(vzip1q_u8(odd_lo, odd_hi)),
        vreinterpretq_u32_u8(vzip2q_u8(even_lo, even_hi)), vreinterpretq_u32_u8(vzip2q_u8(odd_lo, odd_hi))};
    K3_EACH {
        first.v[i] = low_half(w[i]);
        second.v[i] = high_half(w[i]);
    }
}
K3_INLINE void arrange_mx(const float* p, V16& first, V16& second) {
    for (int b = 0; b < 2; ++b) {
        float32x4x4_t t = vld4q_f32(p + 16 * b);
        first.v[2 * b] = t.val[0];
        first.v[2 * b + 1] = t.val[1];
        second.v[2 * b] = t.val[2];
        second.v[2 * b + 1] = t.val[3];
    }
}

K3_INLINE float reduce(V16 a) {
    float32x4_t s = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    float32x2_t s2 = vadd_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(s2, 0) + vget_lane_f32(s2, 1);
}
K3_INLINE float reduce_mx(V16 a) { return reduce(a); }
K3_INLINE float reduce_max(V16 a) {
    float t[16];
    store(t, a);
    for (int d = 8; d > 0; d >>= 1)
        for (int i = 0; i < d; ++i) t[i] = t[i] > t[i + d] ? t[i] : t[i + d];
    return t[0];
}
K3_INLINE float first_lane(V16 a) { return vgetq_lane_f32(a.v[0], 0); }

#undef K3_EACH
using Part = float32x4_t;
K3_INLINE Part load_one(const float* p) { return vld1q_f32(p); }
K3_INLINE void store_one(float* p, Part a) { vst1q_f32(p, a); }
K3_INLINE Part fma_one(Part a, Part b, Part c) { return vfmaq_f32(c, a, b); }

// Register blocking, by measurement. Up to kDirectRows rows of x, blocks of kRowsFor[columns] weight rows times at most
// kMaxCols columns; beyond, tiles. kWide vectors are worked on side by side where a loop runs along a row.
enum { kPartLanes = 4, kTileRows = 4, kTileCols = 6, kDirectRows = 6, kMaxCols = 3, kWide = 2 };
constexpr int kRowsFor[] = {0, 4, 2, 1};
