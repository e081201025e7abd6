// Sixteen fp32 lanes in one AVX-512 register (F, BW, VL, DQ).
#pragma once

struct V16 {
    __m512 v;
};

K3_INLINE V16 set1(float x) { return {_mm512_set1_ps(x)}; }
K3_INLINE V16 zero() { return {_mm512_setzero_ps()}; }
K3_INLINE V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
K3_INLINE __mmask16 first_n(int64_t n) { return (__mmask16)((1u << n) - 1); }
K3_INLINE V16 load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_n(n), p)}; }
K3_INLINE void store(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
K3_INLINE void store_n(float* p, V16 a, int64_t n) { _mm512_mask_storeu_ps(p, first_n(n), a.v); }
K3_INLINE V16 add(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
K3_INLINE V16 sub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
K3_INLINE V16 mul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
K3_INLINE V16 div(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
K3_INLINE V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
K3_INLINE V16 vmax(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
K3_INLINE V16 vmin(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
K3_INLINE V16 if_less(V16 a, V16 b, V16 x, V16 y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
K3_INLINE V16 vabs(V16 a) { return {_mm512_abs_ps(a.v)}; }
K3_INLINE V16 with_sign(V16 magnitude, V16 sign) {
    return {_mm512_or_ps(magnitude.v, _mm512_and_ps(_mm512_set1_ps(-0.0f), sign.v))};
}

K3_INLINE V16 scale_by(V16 a, V16 t) {
    __m512i n = _mm512_sub_epi32(_mm512_castps_si512(t.v), _mm512_castps_si512(_mm512_set1_ps(kMagic)));
    __m512i n1 = _mm512_srai_epi32(n, 1), n2 = _mm512_sub_epi32(n, n1), bias = _mm512_set1_epi32(127);
    __m512 f1 = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n1, bias), 23));
    __m512 f2 = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n2, bias), 23));
    return {_mm512_mul_ps(_mm512_mul_ps(a.v, f1), f2)};
}

K3_INLINE V16 load_bf16(const bf16* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
K3_INLINE void load_pairs(const bf16* p, V16& even, V16& odd) {
    __m512i w = _mm512_loadu_si512(p);
    even = {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
    odd = {_mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u)))};
}
K3_INLINE void deinterleave(const float* p, V16& even, V16& odd) {
    __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
    __m512i index = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    even = {_mm512_permutex2var_ps(a, index, b)};
    odd = {_mm512_permutex2var_ps(a, _mm512_add_epi32(index, _mm512_set1_epi32(1)), b)};
}

// A group is four dwords of eight nibbles. Each 128-bit lane shifts its copy of them so that the wanted nibble is
// lowest (vpermps looks at no other bits); the lanes stand in the order of kMxOrder only after `mx_to_order`.
K3_INLINE void load_mx(const uint8_t* p, uint8_t s, V16& first, V16& second) {
    __m512i packed = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
    __m512i index =
        _mm512_srlv_epi32(packed, _mm512_setr_epi32(0, 0, 0, 0, 16, 16, 16, 16, 4, 4, 4, 4, 20, 20, 20, 20));
    __m512 value = _mm512_load_ps(mx_value[s]);
    first = {_mm512_permutexvar_ps(index, value)};
    second = {_mm512_permutexvar_ps(_mm512_srli_epi32(index, 8), value)};
}
K3_INLINE void arrange_mx(const float* p, V16& first, V16& second) {
    __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
    __m512i index = _mm512_setr_epi32(0, 8, 16, 24, 4, 12, 20, 28, 1, 9, 17, 25, 5, 13, 21, 29);
    first = {_mm512_permutex2var_ps(a, index, b)};
    second = {_mm512_permutex2var_ps(a, _mm512_add_epi32(index, _mm512_set1_epi32(2)), b)};
}
K3_INLINE V16 mx_to_order(V16 a) {
    return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15), a.v)};
}

K3_INLINE float reduce(V16 a) {
    __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
K3_INLINE float reduce_mx(V16 a) { return reduce(mx_to_order(a)); }
K3_INLINE float reduce_max(V16 a) {
    __m256 s8 = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_max_ss(s2, _mm_movehdup_ps(s2)));
}
K3_INLINE float first_lane(V16 a) { return _mm512_cvtss_f32(a.v); }

using Part = __m512;
K3_INLINE Part load_one(const float* p) { return _mm512_loadu_ps(p); }
K3_INLINE void store_one(float* p, Part a) { _mm512_storeu_ps(p, a); }
K3_INLINE Part fma_one(Part a, Part b, Part c) { return _mm512_fmadd_ps(a, b, c); }

// Register blocking, by measurement. Up to kDirectRows rows of x, blocks of kRowsFor[columns] weight rows times at most
// kMaxCols columns; beyond, tiles. kWide vectors are worked on side by side where a loop runs along a row.
enum { kPartLanes = 16, kTileRows = 4, kTileCols = 6, kDirectRows = 16, kMaxCols = 5, kWide = 4 };
constexpr int kRowsFor[] = {0, 8, 8, 6, 4, 4};
