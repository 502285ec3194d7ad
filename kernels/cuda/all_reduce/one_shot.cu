// All-reduce in one step: each rank writes its input into the inbox of every peer and combines
// what it finds in its own.
//
// Traffic per rank: (world - 1) * bytes out and in (times 4/3 with packets), nothing else on the
// link. Needs: peers' inboxes mapped here. Bound: one way to the peer + traffic / link bandwidth.
#include "instances.cuh"
#include "wire.cuh"

namespace paceline {

struct OneShotParams {
    Link link;
    const uint8_t* x;
    uint8_t* out;  // may be x
    uint64_t bytes;
    Op op;
    uint32_t unused;
};
static_assert(sizeof(OneShotParams) == 208, "twin of OneShotParams in all_reduce.rs");

template <class T, class Wire, int kWorld>
__device__ __forceinline__ void one_shot(const OneShotParams& params) {
    using Part = Unit<T, Wire>;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);
    Span x = {const_cast<uint8_t*>(params.x), params.bytes}, out = {params.out, params.bytes};
    uint64_t units = Part::count(x), stride = uint64_t(gridDim.x) * blockDim.x;
    uint64_t begin = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;

    Part first = {};
    if (begin < units) first.load(x, begin);
    if (call.alive)
        for (uint64_t index = begin; index < units; index += stride) {
            Part part = first;
            if (index != begin) part.load(x, index);
            send_to_all<T, Wire, kWorld>(call, 0, index, part);
        }
    call.count();
    for (uint64_t index = begin; index < units; index += stride) {
        Part part = first;
        if (index != begin) part.load(x, index);
        Part sum = combine<T, Wire, kWorld>(call, 0, index, part, params.op);
        if (!call.alive) return;
        sum.store(out, index);
    }
}

#define ONE_SHOT(operation, Wire, wire, T, dtype, world)                                   \
    extern "C" __global__ void __launch_bounds__(512)                                      \
        operation##_##wire##_##dtype##_w##world(const __grid_constant__ OneShotParams p) { \
        one_shot<T, Wire, world>(p);                                                       \
    }
PACELINE_FOR_ALL(ONE_SHOT, all_reduce_one_shot)

}  // namespace paceline
