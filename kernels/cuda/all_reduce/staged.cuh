// Outboxes in pinned host memory: each rank writes into its own and reads those of its peers. A
// flag for each block says that its data are there, so nothing is written or read twice; the price
// is a fence for each block and stage.
#pragma once

#include "params.cuh"

namespace paceline {

constexpr int kBlocksMax = 64;
constexpr int kFlagBytes = 128;
constexpr int kFlagsBytes = 2 * kBlocksMax * kFlagBytes;

struct Outbox {
    const Call& call;

    __device__ __forceinline__ uint32_t* flag(int rank, int stage) const {
        uint64_t place = stage * kBlocksMax + blockIdx.x;
        return reinterpret_cast<uint32_t*>(call.link.box[rank] + place * kFlagBytes);
    }
    __device__ __forceinline__ Vector* data(int rank, int stage) const {
        uint64_t place = (call.epoch & 1) * 2 + stage;
        return reinterpret_cast<Vector*>(call.link.box[rank] + kFlagsBytes +
                                         place * call.link.slot_bytes);
    }
};

// All threads of the block: what they wrote before, be it with plain stores, is visible to whoever
// sees the flag. The barrier and the release order it.
__device__ __forceinline__ void raise(const Call& call, int stage) {
    __syncthreads();
    if (threadIdx.x == 0)
        store_release_sys(Outbox{call}.flag(call.link.rank, stage), call.epoch);
}

// All threads of the block: waits until the same block of every peer has raised its flag.
__device__ __forceinline__ void await_peers(Call& call, int stage) {
    int source = threadIdx.x;
    if (source < call.link.world && source != call.link.rank) {
        const uint32_t* flag = Outbox{call}.flag(source, stage);
        // A peer may be one call ahead, and the epoch wraps.
        while (call.alive && int32_t(load_acquire_sys(flag) - call.epoch) < 0)
            if (call.gives_up(source)) break;
    }
    call.alive = __syncthreads_and(call.alive);
}

// The block's share of `count` vectors.
struct Share {
    uint64_t begin, end;

    __device__ __forceinline__ explicit Share(uint64_t count) {
        uint64_t each = (count + gridDim.x - 1) / gridDim.x;
        begin = min(blockIdx.x * each, count) + threadIdx.x;
        end = min((blockIdx.x + 1) * each, count);
    }
};

// Combines vector `index` of stage 0 of all ranks in their order; `own` is this rank's.
template <class T, int kWorld>
__device__ __forceinline__ Vector combine_staged(const Call& call, uint64_t index,
                                                 const Vector& own, Op op) {
    Combined<T> combined;
    if constexpr (kWorld == 0) {
        for (int source = 0; source < call.link.world; ++source) {
            Vector v = own;
            if (source != call.link.rank)
                v = load_relaxed_sys(Outbox{call}.data(source, 0) + index);
            source == 0 ? combined.start(v) : combined.add(v, op);
        }
    } else {
        Vector vector[kWorld];
#pragma unroll
        for (int source = 0; source < kWorld; ++source) {
            vector[source] = own;
            if (source != call.link.rank)
                vector[source] = load_relaxed_sys(Outbox{call}.data(source, 0) + index);
        }
#pragma unroll
        for (int source = 0; source < kWorld; ++source)
            source == 0 ? combined.start(vector[source]) : combined.add(vector[source], op);
    }
    return combined.rounded();
}

}  // namespace paceline
