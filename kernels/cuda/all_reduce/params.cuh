// What the kernels of this folder take; the Rust twins are in src/ops/all_reduce.rs.
#pragma once

#include "../common/types.cuh"
#include "inbox.cuh"
#include "link.cuh"

namespace paceline {

// Every rank ends with the combination of all `x`.
struct AllReduceParams {
    Link link;
    const uint8_t* x;
    uint8_t* out;  // may be x
    uint64_t bytes;
    // Two shots: bytes of each rank's part but perhaps the last, a multiple of 16.
    uint64_t part_bytes;
    Op op;
    uint32_t unused;

    __device__ __forceinline__ Span input() const { return {const_cast<uint8_t*>(x), bytes}; }
    __device__ __forceinline__ Span output() const { return {out, bytes}; }
};
static_assert(sizeof(AllReduceParams) == 216, "twin of AllReduceParams in all_reduce.rs");

// Reduce-scatter and all-gather: one side is `world` parts of `part_bytes`, the other one part.
struct PartsParams {
    Link link;
    const uint8_t* x;
    uint8_t* out;
    uint64_t part_bytes;
    // From one part to the next: more than `part_bytes` if this call does a piece of each.
    uint64_t stride_bytes;
    Op op;
    uint32_t unused;

    __device__ __forceinline__ Span part(const uint8_t* data, int rank) const {
        return {const_cast<uint8_t*>(data) + rank * stride_bytes, part_bytes};
    }
    __device__ __forceinline__ Span whole(const uint8_t* data) const {
        return {const_cast<uint8_t*>(data), part_bytes};
    }
};
static_assert(sizeof(PartsParams) == 216, "twin of PartsParams in all_reduce.rs");

// The end of a transformer's half layer.
struct AddRmsNormParams {
    Link link;
    const uint8_t* x;
    uint8_t* residual;
    const uint8_t* weight;
    uint8_t* out;  // may be x
    uint64_t row_bytes;
    uint32_t rows;
    float epsilon;
};
static_assert(sizeof(AddRmsNormParams) == 224, "twin of AddRmsNormParams in all_reduce.rs");

// What a thread does of `count` vectors.
struct Stride {
    uint64_t begin = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    uint64_t step = uint64_t(gridDim.x) * blockDim.x;
};

}  // namespace paceline
