// All-reduce in two steps: each rank combines one part and writes the result into every inbox.
// Reduce-scatter is the first step alone.
//
// Traffic per rank: 2 * (world - 1) / world * bytes out and in. Needs: peers' inboxes mapped here.
// Bound: two ways to the peer + traffic / link bandwidth.
#include "instances.cuh"
#include "params.cuh"

namespace paceline {

constexpr int kScatter = 0;
constexpr int kGather = 1;

template <class T, int kWorld>
__device__ __forceinline__ void two_shot(const AllReduceParams& params) {
    int world = kWorld ? kWorld : params.link.world;
    int rank = params.link.rank;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);
    Span x = params.input(), out = params.output();
    uint64_t part = params.part_bytes / sizeof(Vector);
    // A thread has the same vectors of every part, so no block waits for another.
    Stride mine;

    if (call.alive)
        for (uint64_t index = mine.begin; index < part; index += mine.step)
#pragma unroll
            for (int step = 1; step < world; ++step) {
                int target = (rank + step) % world;
                uint64_t at = target * part + index;
                if (at >= x.vectors()) continue;
                Vector v = x.load<T>(at);
                clean<T>(v);
                store_relaxed_sys(call.slot(kScatter, target, rank) + index, v);
            }
    call.count();
    for (uint64_t index = mine.begin; index < part; index += mine.step) {
        uint64_t at = rank * part + index;
        if (at >= x.vectors()) break;
        Vector v = x.load<T>(at);
        clean<T>(v);
        Vector sum = combine<T, kWorld>(call, kScatter, index, v, params.op);
        if (!call.alive) return;
        send_to_all<kWorld>(call, kGather, index, sum);
        out.store<T>(at, sum);
    }
    for (uint64_t index = mine.begin; index < part; index += mine.step)
#pragma unroll
        for (int step = 1; step < world; ++step) {
            int source = (rank + step) % world;
            uint64_t at = source * part + index;
            if (at >= x.vectors()) continue;
            Vector sum = receive(call, kGather, source, index);
            if (!call.alive) return;
            out.store<T>(at, sum);
        }
}

template <class T>
__device__ __forceinline__ void reduce_scatter(const PartsParams& params) {
    int world = params.link.world, rank = params.link.rank;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);
    Span own = params.part(params.x, rank), out = params.whole(params.out);
    Stride mine;
    if (call.alive)
        for (uint64_t index = mine.begin; index < own.vectors(); index += mine.step)
            for (int step = 1; step < world; ++step) {
                int target = (rank + step) % world;
                Vector v = params.part(params.x, target).load<T>(index);
                clean<T>(v);
                store_relaxed_sys(call.slot(kScatter, target, rank) + index, v);
            }
    call.count();
    for (uint64_t index = mine.begin; index < own.vectors(); index += mine.step) {
        Vector v = own.load<T>(index);
        clean<T>(v);
        Vector sum = combine<T, 0>(call, kScatter, index, v, params.op);
        if (!call.alive) return;
        out.store<T>(index, sum);
    }
}

#define TWO_SHOT(name, T, dtype, world)                                        \
    extern "C" __global__ void __launch_bounds__(512)                          \
        name##_##dtype##_w##world(const __grid_constant__ AllReduceParams p) { \
        two_shot<T, world>(p);                                                 \
    }
PACELINE_FOR_ALL(TWO_SHOT, all_reduce_two_shot)

#define REDUCE_SCATTER(name, T, dtype, world)                              \
    extern "C" __global__ void __launch_bounds__(512)                      \
        name##_##dtype##_w##world(const __grid_constant__ PartsParams p) { \
        reduce_scatter<T>(p);                                              \
    }
PACELINE_FOR_TYPES(REDUCE_SCATTER, reduce_scatter_inbox, 0)

}  // namespace paceline
