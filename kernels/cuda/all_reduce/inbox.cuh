// All-reduce over inboxes in GPU memory: data and "it is here" travel together, without a fence.
//
// Words travel as they are; memory that holds nothing new holds words of all ones (the sentinel),
// which the reader puts back. In every float type such a word is NaNs: a payload of it travels as
// another NaN. This is the Lamport form of FlashInfer's and TensorRT-LLM's one-shot kernels.
#pragma once

#include "../common/types.cuh"
#include "link.cuh"

namespace paceline {

constexpr uint32_t kEmpty = 0xffffffff;

enum class Op : uint32_t { kSum = 0, kMax = 1 };

// Makes `v` fit to be sent.
template <class T>
__device__ __forceinline__ void clean(Vector& v) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (v.word[i] == kEmpty) v.word[i] = T::kNan;
}

__device__ __forceinline__ bool is_here(const Vector& v) {
    return v.word[0] != kEmpty && v.word[1] != kEmpty && v.word[2] != kEmpty && v.word[3] != kEmpty;
}

__device__ __forceinline__ void release(Vector* slot) {
    store_relaxed_sys(slot, {{kEmpty, kEmpty, kEmpty, kEmpty}});
}

// One vector of elements, combined in f32 and rounded once.
template <class T>
struct Combined {
    float value[T::kElements];

    __device__ __forceinline__ void start(const Vector& v) { T::unpack(v, value); }
    __device__ __forceinline__ void add(const Vector& v, Op op) {
        float other[T::kElements];
        T::unpack(v, other);
#pragma unroll
        for (int i = 0; i < T::kElements; ++i) {
            float sum = value[i] + other[i];
            // fmaxf would drop a NaN; the sum keeps it.
            bool is_nan = value[i] != value[i] || other[i] != other[i];
            value[i] = op == Op::kSum || is_nan ? sum : fmaxf(value[i], other[i]);
        }
    }
    __device__ __forceinline__ Vector rounded() const {
        Vector v = T::pack(value);
        clean<T>(v);
        return v;
    }
};

// Sends to all peers, beginning with the next, so that they are not all written to at once.
template <int kWorld>
__device__ __forceinline__ void send_to_all(const Call& call, int stage, uint64_t index,
                                            const Vector& v) {
    int world = kWorld ? kWorld : call.link.world;
#pragma unroll
    for (int step = 1; step < world; ++step) {
        int target = (call.link.rank + step) % world;
        store_relaxed_sys(call.slot(stage, target, call.link.rank) + index, v);
    }
}

// Waits for vector `index` of rank `source`. On failure its value means nothing.
__device__ __forceinline__ Vector receive(Call& call, int stage, int source, uint64_t index) {
    Vector* slot = call.slot(stage, call.link.rank, source) + index;
    Vector v = {};
    while (call.alive && !is_here(v = load_relaxed_sys(slot)))
        if (call.gives_up(source)) break;
    if (call.alive) release(slot);
    return v;
}

// Combines vector `index` of all ranks in the order of ranks, this rank's being `own`.
template <class T, int kWorld>
__device__ __forceinline__ Vector combine(Call& call, int stage, uint64_t index, const Vector& own,
                                          Op op) {
    Combined<T> combined;
    if constexpr (kWorld == 0) {
        for (int source = 0; source < call.link.world; ++source) {
            Vector v = own;
            if (source != call.link.rank) v = receive(call, stage, source, index);
            source == 0 ? combined.start(v) : combined.add(v, op);
        }
    } else {
        // All slots are asked before the first answer is needed. This rank's own is read too, in
        // vain: without a branch the vectors stay in registers.
        Vector vector[kWorld];
        bool missing = call.alive;
        while (missing) {
            missing = false;
            int waits_for = 0;
#pragma unroll
            for (int source = 0; source < kWorld; ++source) {
                vector[source] =
                    load_relaxed_sys(call.slot(stage, call.link.rank, source) + index);
                if (!is_here(vector[source]) && source != call.link.rank) {
                    missing = true;
                    waits_for = source;
                }
            }
            if (missing && call.gives_up(waits_for)) break;
        }
#pragma unroll
        for (int source = 0; source < kWorld; ++source) {
            Vector v = vector[source];
            if (source == call.link.rank) v = own;
            else if (call.alive) release(call.slot(stage, call.link.rank, source) + index);
            source == 0 ? combined.start(v) : combined.add(v, op);
        }
    }
    return combined.rounded();
}

}  // namespace paceline
