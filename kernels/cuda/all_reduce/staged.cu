// Collectives through pinned host memory, for GPUs that cannot reach each other's memory.
//
// All-reduce, one shot: `bytes` up, (world - 1) * bytes down; two shots: (1 + 1 / world) * bytes
// up, 2 * (world - 1) / world * bytes down. Needs: outboxes mapped here. Bound: two crossings of
// PCIe and a fence for each shot + traffic / PCIe bandwidth.
#include "instances.cuh"
#include "staged.cuh"

namespace paceline {

template <class T, int kWorld>
__device__ __forceinline__ void one_shot(const AllReduceParams& params) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);
    Span x = params.input(), out = params.output();
    Share share(x.vectors());
    Vector* staged = Outbox{call}.data(call.link.rank, 0);
    if (call.alive)
        for (uint64_t index = share.begin; index < share.end; index += blockDim.x)
            staged[index] = x.load<T>(index);
    raise(call, 0);
    call.count();
    await_peers(call, 0);
    if (!call.alive) return;
    for (uint64_t index = share.begin; index < share.end; index += blockDim.x)
        out.store<T>(index, combine_staged<T, kWorld>(call, index, x.load<T>(index), params.op));
}

template <class T, int kWorld>
__device__ __forceinline__ void two_shot(const AllReduceParams& params) {
    int world = kWorld ? kWorld : params.link.world;
    int rank = params.link.rank;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);
    Span x = params.input(), out = params.output();
    uint64_t part = params.part_bytes / sizeof(Vector);
    // The block's share of every part, so that no block waits for another's.
    Share share(part);
    Vector* staged = Outbox{call}.data(rank, 0);
    Vector* result = Outbox{call}.data(rank, 1);
    if (call.alive)
        for (uint64_t index = share.begin; index < share.end; index += blockDim.x)
            for (int step = 1; step < world; ++step) {
                uint64_t at = (rank + step) % world * part + index;
                if (at < x.vectors()) staged[at] = x.load<T>(at);
            }
    raise(call, 0);
    call.count();
    await_peers(call, 0);
    if (call.alive)
        for (uint64_t index = share.begin; index < share.end; index += blockDim.x) {
            uint64_t at = rank * part + index;
            if (at >= x.vectors()) break;
            Vector sum = combine_staged<T, kWorld>(call, at, x.load<T>(at), params.op);
            result[index] = sum;
            out.store<T>(at, sum);
        }
    raise(call, 1);
    await_peers(call, 1);
    if (!call.alive) return;
    for (uint64_t index = share.begin; index < share.end; index += blockDim.x)
        for (int step = 1; step < world; ++step) {
            int source = (rank + step) % world;
            uint64_t at = source * part + index;
            if (at < x.vectors())
                out.store<T>(at, load_relaxed_sys(Outbox{call}.data(source, 1) + index));
        }
}

template <class T>
__device__ __forceinline__ void reduce_scatter(const PartsParams& params) {
    int world = params.link.world, rank = params.link.rank;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);
    Span own = params.part(params.x, rank), out = params.whole(params.out);
    uint64_t part = own.vectors();
    Share share(part);
    Vector* staged = Outbox{call}.data(rank, 0);
    if (call.alive)
        for (uint64_t index = share.begin; index < share.end; index += blockDim.x)
            for (int step = 1; step < world; ++step) {
                int target = (rank + step) % world;
                staged[target * part + index] = params.part(params.x, target).load<T>(index);
            }
    raise(call, 0);
    call.count();
    await_peers(call, 0);
    if (!call.alive) return;
    for (uint64_t index = share.begin; index < share.end; index += blockDim.x)
        out.store<T>(index, combine_staged<T, 0>(call, rank * part + index, own.load<T>(index),
                                                 params.op));
}

__device__ __forceinline__ void all_gather(const PartsParams& params) {
    int world = params.link.world, rank = params.link.rank;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);
    Span x = params.whole(params.x), own = params.part(params.out, rank);
    Share share(x.vectors());
    Vector* staged = Outbox{call}.data(rank, 0);
    if (call.alive)
        for (uint64_t index = share.begin; index < share.end; index += blockDim.x) {
            Vector v = x.load<Bytes>(index);
            staged[index] = v;
            own.store<Bytes>(index, v);
        }
    raise(call, 0);
    call.count();
    await_peers(call, 0);
    if (!call.alive) return;
    for (uint64_t index = share.begin; index < share.end; index += blockDim.x)
        for (int step = 1; step < world; ++step) {
            int source = (rank + step) % world;
            Vector v = load_relaxed_sys(Outbox{call}.data(source, 0) + index);
            params.part(params.out, source).store<Bytes>(index, v);
        }
}

#define STAGED_ONE_SHOT(name, T, dtype, world)                                 \
    extern "C" __global__ void __launch_bounds__(512)                          \
        name##_##dtype##_w##world(const __grid_constant__ AllReduceParams p) { \
        one_shot<T, world>(p);                                                 \
    }
PACELINE_FOR_ALL(STAGED_ONE_SHOT, all_reduce_staged_one_shot)

#define STAGED_TWO_SHOT(name, T, dtype, world)                                 \
    extern "C" __global__ void __launch_bounds__(512)                          \
        name##_##dtype##_w##world(const __grid_constant__ AllReduceParams p) { \
        two_shot<T, world>(p);                                                 \
    }
PACELINE_FOR_ALL(STAGED_TWO_SHOT, all_reduce_staged_two_shot)

#define STAGED_REDUCE_SCATTER(name, T, dtype, world)                       \
    extern "C" __global__ void __launch_bounds__(512)                      \
        name##_##dtype##_w##world(const __grid_constant__ PartsParams p) { \
        reduce_scatter<T>(p);                                              \
    }
PACELINE_FOR_TYPES(STAGED_REDUCE_SCATTER, reduce_scatter_staged, 0)

extern "C" __global__ void __launch_bounds__(512)
    all_gather_staged(const __grid_constant__ PartsParams p) {
    all_gather(p);
}

}  // namespace paceline
