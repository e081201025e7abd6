// Thread pool, scratch memory and MXFP4 tables. Compiled for the baseline instruction set.
#include "api.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/mman.h>
#endif

namespace k3 {
namespace {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Work too small to be worth waking anybody: about three microseconds of one core.
constexpr double kAlone = 96 * 1024;
// How long a worker looks for the next job before it sleeps. Longer than the Python between two kernels of a layer,
// much shorter than a read from a drive.
constexpr auto kSpin = std::chrono::microseconds(60);

class Pool {
public:
    explicit Pool(int n) : count_(n) {
        for (int i = 1; i < n; ++i) threads_.emplace_back([this, i] { work(i); });
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            stop_ = true;
            generation_.fetch_add(1);
        }
        wake_.notify_all();
        for (auto& t : threads_) t.join();
    }
    int count() const { return count_; }

    void run(int64_t tasks, void (*fn)(void*, int64_t, int), void* ctx) {
        fn_ = fn;
        ctx_ = ctx;
        tasks_ = tasks;
        next_.store(0);
        open_.store(true);
        generation_.fetch_add(1);
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> hold(mutex_);
            wake_.notify_all();
        }
        drain(0);
        // Nobody can enter after this; whoever is inside still finishes a task whose context is on our stack.
        open_.store(false);
        for (int spins = 0; inside_.load() > 0; ++spins) {
            if (spins < 20000)
                relax();
            else
                std::this_thread::yield();
        }
    }

private:
    void drain(int worker) {
        for (int64_t t; (t = next_.fetch_add(1)) < tasks_;) fn_(ctx_, t, worker);
    }

    void work(int worker) {
        uint64_t seen = 0;
        for (;;) {
            wait(seen);
            if (stop_.load()) return;
            inside_.fetch_add(1);
            seen = generation_.load();
            if (open_.load()) drain(worker);
            inside_.fetch_sub(1);
        }
    }

    void wait(uint64_t seen) {
        auto until = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < 64; ++i) {
                if (generation_.load(std::memory_order_acquire) != seen) return;
                relax();
            }
        } while (std::chrono::steady_clock::now() < until);
        std::unique_lock<std::mutex> hold(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(hold, [&] { return generation_.load() != seen; });
        sleepers_.fetch_sub(1);
    }

    const int count_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<bool> stop_{false};
    std::atomic<bool> open_{false};
    std::atomic<uint64_t> generation_{0};
    std::atomic<int> inside_{0}, sleepers_{0};
    std::atomic<int64_t> next_{0};
    int64_t tasks_ = 0;
    void (*fn_)(void*, int64_t, int) = nullptr;
    void* ctx_ = nullptr;
};

struct Buffer {
    void* data = nullptr;
    size_t size = 0;
};

std::mutex* call_mutex = new std::mutex;
Pool* pool = nullptr;
int wanted = 0;
Buffer buffers[kSlots];

int default_threads() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    unsigned n = std::thread::hardware_concurrency();
    return n ? (int)n : 1;
}

// The child of a fork has the parent's memory but none of its threads: forget them (without joining) and start anew.
void after_fork() {
    pool = nullptr;
    call_mutex = new std::mutex;
}

struct Startup {
    Startup() {
        const float e2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
        for (int s = 0; s < 256; ++s) {
            uint32_t bits = s == 0 ? 0x00400000u : s == 255 ? 0x7fc00000u : (uint32_t)s << 23;
            float scale;
            std::memcpy(&scale, &bits, 4);
            for (int n = 0; n < 16; ++n) {
                float v = (n & 8 ? -e2m1[n & 7] : e2m1[n & 7]) * scale;
                std::memcpy(&bits, &v, 4);
                mx_value[s][n] = v;
                mx_bytes[s][n] = (uint8_t)(bits >> 16);
                mx_bytes[s][16 + n] = (uint8_t)(bits >> 24);
            }
        }
        pthread_atfork(nullptr, nullptr, after_fork);
    }
} startup;

}  // namespace

alignas(64) float mx_value[256][16];
alignas(64) uint8_t mx_bytes[256][32];

int threads() {
    if (wanted == 0) wanted = default_threads();
    return wanted;
}

void set_threads(int n) {
    if (n == wanted && pool) return;
    delete pool;
    pool = nullptr;
    wanted = n;
}

void parallel_run(int64_t tasks, double work, void (*fn)(void*, int64_t, int), void* ctx) {
    if (tasks <= 1 || work < kAlone || threads() == 1) {
        for (int64_t t = 0; t < tasks; ++t) fn(ctx, t, 0);
        return;
    }
    if (!pool) pool = new Pool(threads());
    pool->run(tasks, fn, ctx);
}

void* scratch(Slot slot, size_t bytes) {
    Buffer& b = buffers[slot];
    if (b.size >= bytes) return b.data;
    std::free(b.data);
    b.data = nullptr;
    b.size = 0;
    const size_t align = bytes >= (2u << 20) ? 2u << 20 : 64;
    const size_t size = (bytes + align - 1) / align * align;
    b.data = std::aligned_alloc(align, size);
    if (!b.data) throw std::bad_alloc();
#if defined(__linux__)
    if (align > 64) madvise(b.data, size, MADV_HUGEPAGE);
#endif
    b.size = size;
    return b.data;
}

CallLock::CallLock() { call_mutex->lock(); }
CallLock::~CallLock() { call_mutex->unlock(); }

}  // namespace k3
