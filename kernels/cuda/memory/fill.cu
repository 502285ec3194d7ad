// Fills a buffer of 32-bit words with one pattern.
//
// Algorithm: a grid-stride loop, one word a thread and step; correct for any grid and block.
// Memory traffic: 4 * count bytes written, none read.
// Needs: any architecture; may be launched with programmatic dependent launch.
// Bound: the memory's write bandwidth.
#include <cstddef>
#include <cstdint>

#include "../common/ptx.cuh"

// The twin of a `#[repr(C)]` struct of the launcher.
struct FillParams {
    uint32_t* destination;  // `count` words of device memory, aligned to 4 bytes
    uint64_t count;         // words
    uint32_t pattern;       // the value of every word
    uint32_t padding;       // not read
};
static_assert(sizeof(FillParams) == 24);
static_assert(offsetof(FillParams, count) == 8 && offsetof(FillParams, pattern) == 16);

extern "C" __global__ void fill_u32(FillParams params) {
    paceline::let_next_kernel_start();
    paceline::wait_for_previous_kernel();
    const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
    const uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    for (uint64_t index = first; index < params.count; index += step) {
        params.destination[index] = params.pattern;
    }
}
