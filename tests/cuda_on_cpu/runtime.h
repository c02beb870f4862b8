// CUDA on a CPU, for tests: blocks run one after another, the threads of a block as fibers.
//
// A fiber runs until it waits or ends, so what a barrier should have ordered and did not is found:
// the fibers of a block take turns in ascending order, then in descending order, and so on.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

using std::max;
using std::min;

struct Index { unsigned x = 0, y = 0, z = 0; };
static Index threadIdx, blockIdx, blockDim, gridDim;

// --- fibers ------------------------------------------------------------------------------------

enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    State state;
    uint64_t given;  // to a shuffle
};

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current;
static void (*function)(void **);
static void **arguments;

static void fiber_main() {
    function(arguments);
    fibers[current].state = DONE;
    swapcontext(&fibers[current].context, &scheduler);
}

static void wait_for(State state) {
    fibers[current].state = state;
    swapcontext(&fibers[current].context, &scheduler);
}

static void __syncthreads() { wait_for(AT_BLOCK); }
static void __syncwarp(unsigned = 0xffffffffu) { wait_for(AT_WARP); }

template <class T> static T exchange(T value, int lane, int width) {
    int me = current;
    fibers[me].given = 0;
    memcpy(&fibers[me].given, &value, sizeof(T));
    wait_for(AT_WARP);
    int start = me / width * width, from = start + lane;
    T got = value;
    if (lane >= 0 && lane < width && from < (int)fibers.size())
        memcpy(&got, &fibers[from].given, sizeof(T));
    wait_for(AT_WARP);
    return got;
}
template <class T> static T __shfl_sync(unsigned, T v, int lane, int width = 32) {
    return exchange(v, lane & (width - 1), width);
}
template <class T> static T __shfl_down_sync(unsigned, T v, unsigned d, int width = 32) {
    return exchange(v, (int)(threadIdx.x % width + d), width);
}
template <class T> static T __shfl_xor_sync(unsigned, T v, int mask, int width = 32) {
    return exchange(v, (int)(threadIdx.x % width) ^ mask, width);
}

// Lets every fiber that may go on do so; false if none can and some are not done.
static bool release(int threads) {
    int live = 0, at_block = 0;
    bool moved = false;
    for (auto &f : fibers) {
        live += f.state != DONE;
        at_block += f.state == AT_BLOCK;
    }
    if (live == 0) return true;
    if (at_block == live) {
        for (auto &f : fibers)
            if (f.state == AT_BLOCK) f.state = READY;
        return true;
    }
    for (int w = 0; w < threads; w += 32) {
        int end = min(w + 32, threads), alive = 0, waiting = 0;
        for (int t = w; t < end; t++) {
            alive += fibers[t].state != DONE;
            waiting += fibers[t].state == AT_WARP;
        }
        if (waiting && waiting == alive) {
            for (int t = w; t < end; t++)
                if (fibers[t].state == AT_WARP) fibers[t].state = READY;
            moved = true;
        }
    }
    return moved;
}

// 0, or 1 if the threads of a block wait for each other at different places.
extern "C" int run_blocks(void (*call)(void **), void **args, long long first, long long blocks,
                          long long grid, int threads, int waits) {
    function = call;
    arguments = args;
    blockDim = {(unsigned)threads, 1, 1};
    gridDim = {(unsigned)grid, 1, 1};
    for (long long block = first; block < first + blocks; block++) {
        blockIdx = {(unsigned)block, 0, 0};
        if (!waits) {
            for (int t = 0; t < threads; t++) {
                threadIdx = {(unsigned)t, 0, 0};
                call(args);
            }
            continue;
        }
        fibers.resize(threads);
        for (auto &f : fibers) {
            f.stack.resize(1 << 16);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data();
            f.context.uc_stack.ss_size = f.stack.size();
            f.context.uc_link = nullptr;
            makecontext(&f.context, fiber_main, 0);
            f.state = READY;
        }
        for (int turn = 0;; turn++) {
            int live = 0;
            for (int n = 0; n < threads; n++) {
                current = turn % 2 ? threads - 1 - n : n;
                if (fibers[current].state == READY) {
                    threadIdx = {(unsigned)current, 0, 0};
                    swapcontext(&scheduler, &fibers[current].context);
                }
            }
            for (auto &f : fibers) live += f.state != DONE;
            if (!live) break;
            if (!release(threads)) return 1;
        }
    }
    return 0;
}

// --- what CUDA has and C++ has not -------------------------------------------------------------

static int __float_as_int(float x) { int n; memcpy(&n, &x, 4); return n; }
static float __int_as_float(int n) { float x; memcpy(&x, &n, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned n; memcpy(&n, &x, 4); return n; }
static float __uint_as_float(unsigned n) { float x; memcpy(&x, &n, 4); return x; }
static long long __double_as_longlong(double x) { long long n; memcpy(&n, &x, 8); return n; }
static double __longlong_as_double(long long n) { double x; memcpy(&x, &n, 8); return x; }
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
