// Sixteen fp32 lanes in two AVX2 registers.
#pragma once

struct V16 {
    __m256 lo, hi;
};

K3_INLINE V16 set1(float x) {
    __m256 v = _mm256_set1_ps(x);
    return {v, v};
}
K3_INLINE V16 zero() {
    __m256 v = _mm256_setzero_ps();
    return {v, v};
}
K3_INLINE V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
K3_INLINE __m256i first_n(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
K3_INLINE V16 load_n(const float* p, int64_t n) {
    return {_mm256_maskload_ps(p, first_n(n)), _mm256_maskload_ps(p + 8, first_n(n - 8))};
}
K3_INLINE void store(float* p, V16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
K3_INLINE void store_n(float* p, V16 a, int64_t n) {
    _mm256_maskstore_ps(p, first_n(n), a.lo);
    _mm256_maskstore_ps(p + 8, first_n(n - 8), a.hi);
}
K3_INLINE V16 add(V16 a, V16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
K3_INLINE V16 sub(V16 a, V16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
K3_INLINE V16 mul(V16 a, V16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
K3_INLINE V16 div(V16 a, V16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
K3_INLINE V16 fma(V16 a, V16 b, V16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
K3_INLINE V16 vmax(V16 a, V16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
K3_INLINE V16 vmin(V16 a, V16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
K3_INLINE V16 if_less(V16 a, V16 b, V16 x, V16 y) {
    return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
K3_INLINE V16 vabs(V16 a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
K3_INLINE V16 with_sign(V16 magnitude, V16 sign) {
    __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(magnitude.lo, _mm256_and_ps(bit, sign.lo)),
            _mm256_or_ps(magnitude.hi, _mm256_and_ps(bit, sign.hi))};
}

K3_INLINE __m256 scale_by(__m256 a, __m256 t) {
    __m256i n = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_castps_si256(_mm256_set1_ps(kMagic)));
    __m256i n1 = _mm256_srai_epi32(n, 1), n2 = _mm256_sub_epi32(n, n1), bias = _mm256_set1_epi32(127);
    __m256 f1 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n1, bias), 23));
    __m256 f2 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n2, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(a, f1), f2);
}
K3_INLINE V16 scale_by(V16 a, V16 t) { return {scale_by(a.lo, t.lo), scale_by(a.hi, t.hi)}; }

K3_INLINE __m256 widen(__m128i p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(p), 16)); }
K3_INLINE V16 load_bf16(const bf16* p) {
    return {widen(_mm_loadu_si128((const __m128i*)p)), widen(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
K3_INLINE void load_pairs(const bf16* p, V16& even, V16& odd) {
    __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 16));
    __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}
K3_INLINE void deinterleave8(const float* p, __m256& even, __m256& odd) {
    __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8);
    even = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88)), 0xd8));
    odd = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8));
}
K3_INLINE void deinterleave(const float* p, V16& even, V16& odd) {
    deinterleave8(p, even.lo, odd.lo);
    deinterleave8(p + 16, even.hi, odd.hi);
}

// Both nibbles of each byte are looked up as the two bytes of a bf16 pattern (the scale is already in the table), low
// nibbles in the lower half of the register, high nibbles in the upper.
K3_INLINE void load_mx(const uint8_t* p, uint8_t s, V16& first, V16& second) {
    __m256i packed = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    __m256i nibbles = _mm256_and_si256(_mm256_srlv_epi64(packed, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
    __m256i lows =
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)mx_bytes[s])), nibbles);
    __m256i highs =
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)(mx_bytes[s] + 16))), nibbles);
    __m256i a = _mm256_unpacklo_epi8(lows, highs), b = _mm256_unpackhi_epi8(lows, highs);
    __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    first = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    second = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}
// Transposes two 4x4 blocks, see kMxOrder.
K3_INLINE void arrange8(const float* p, __m256& first, __m256& second) {
    __m128 a = _mm_loadu_ps(p), b = _mm_loadu_ps(p + 4), c = _mm_loadu_ps(p + 8), d = _mm_loadu_ps(p + 12);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    first = _mm256_setr_m128(a, b);
    second = _mm256_setr_m128(c, d);
}
K3_INLINE void arrange_mx(const float* p, V16& first, V16& second) {
    arrange8(p, first.lo, second.lo);
    arrange8(p + 16, first.hi, second.hi);
}

K3_INLINE float reduce(V16 a) {
    __m256 s8 = _mm256_add_ps(a.lo, a.hi);
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
K3_INLINE float reduce_mx(V16 a) { return reduce(a); }
K3_INLINE float reduce_max(V16 a) {
    __m256 s8 = _mm256_max_ps(a.lo, a.hi);
    __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_max_ss(s2, _mm_movehdup_ps(s2)));
}
K3_INLINE float first_lane(V16 a) { return _mm256_cvtss_f32(a.lo); }

using Part = __m256;
K3_INLINE Part load_one(const float* p) { return _mm256_loadu_ps(p); }
K3_INLINE void store_one(float* p, Part a) { _mm256_storeu_ps(p, a); }
K3_INLINE Part fma_one(Part a, Part b, Part c) { return _mm256_fmadd_ps(a, b, c); }

// Register blocking, by measurement. Up to kDirectRows rows of x, blocks of kRowsFor[columns] weight rows times at most
// kMaxCols columns; beyond, tiles. kWide vectors are worked on side by side where a loop runs along a row.
enum { kPartLanes = 8, kTileRows = 3, kTileCols = 4, kDirectRows = 6, kMaxCols = 3, kWide = 2 };
constexpr int kRowsFor[] = {0, 4, 2, 1};
