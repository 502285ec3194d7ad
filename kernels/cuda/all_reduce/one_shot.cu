// All-reduce in one step: each rank writes its input into the inbox of every peer and combines
// what it finds in its own.
//
// Traffic per rank: (world - 1) * bytes out and in, nothing else on the link. Needs: peers'
// inboxes mapped here. Bound: one way to the peer + traffic / link bandwidth.
#include "instances.cuh"
#include "params.cuh"

namespace paceline {

template <class T, int kWorld>
__device__ __forceinline__ void one_shot(const AllReduceParams& params) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);
    Span x = params.input(), out = params.output();
    Stride mine;

    // Most calls are so small that a thread has one vector: it stays in registers.
    Vector first = {};
    if (mine.begin < x.vectors()) first = x.load<T>(mine.begin);
    clean<T>(first);
    auto own = [&](uint64_t index) {
        Vector v = first;
        if (index != mine.begin) {
            v = x.load<T>(index);
            clean<T>(v);
        }
        return v;
    };
    if (call.alive)
        for (uint64_t index = mine.begin; index < x.vectors(); index += mine.step)
            send_to_all<kWorld>(call, 0, index, own(index));
    call.count();
    for (uint64_t index = mine.begin; index < x.vectors(); index += mine.step) {
        Vector sum = combine<T, kWorld>(call, 0, index, own(index), params.op);
        if (!call.alive) return;
        out.store<T>(index, sum);
    }
}

#define ONE_SHOT(name, T, dtype, world)                                        \
    extern "C" __global__ void __launch_bounds__(512)                          \
        name##_##dtype##_w##world(const __grid_constant__ AllReduceParams p) { \
        one_shot<T, world>(p);                                                 \
    }
PACELINE_FOR_ALL(ONE_SHOT, all_reduce_one_shot)

}  // namespace paceline
