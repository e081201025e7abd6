// Constants and small helpers every kernel uses. Included inside the unit's anonymous namespace.
#pragma once

#define K3_INLINE static inline __attribute__((always_inline))
#define K3_INLINE_MEMBER inline __attribute__((always_inline))

// Order of numbers in a lane pair of an MXFP4 group: lane i multiplies number kMxOrder[i], then kMxOrder[i] + 2. It is
// what falls out of byte lookups on AVX2 and NEON without any further shuffle.
constexpr int kMxOrder[16] = {0, 4, 8, 12, 1, 5, 9, 13, 16, 20, 24, 28, 17, 21, 25, 29};

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low mantissa bits

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class F>
static void parallel(int64_t tasks, double work, F f) {
    parallel_run(tasks, work, [](void* c, int64_t task, int worker) { (*(F*)c)(task, worker); }, &f);
}
