// All-reduce in two steps: each rank combines one part and writes the result into every inbox.
// The steps alone are reduce-scatter and all-gather.
//
// Traffic per rank: 2 * (world - 1) / world * bytes out and in (times 4/3 with packets). Needs:
// peers' inboxes mapped here. Bound: two ways to the peer + traffic / link bandwidth.
#include "instances.cuh"
#include "wire.cuh"

namespace paceline {

struct PartsParams {
    Link link;
    const uint8_t* x;
    uint8_t* out;  // all-reduce: may be x
    // Of the tensor that all parts together make, and of each part but perhaps the last.
    uint64_t bytes;
    uint64_t part_bytes;
    Op op;
    uint32_t unused;
};
static_assert(sizeof(PartsParams) == 216, "twin of PartsParams in all_reduce.rs");

constexpr int kScatter = 0;
constexpr int kGather = 1;

__device__ __forceinline__ Span part(const uint8_t* data, const PartsParams& params, int rank) {
    uint64_t begin = min(rank * params.part_bytes, params.bytes);
    uint64_t end = min(begin + params.part_bytes, params.bytes);
    return {const_cast<uint8_t*>(data) + begin, end - begin};
}

// Thread i handles unit i of every part, so no block ever waits for another.
struct Units {
    uint64_t begin, count, stride;

    template <class T, class Wire>
    __device__ __forceinline__ static Units of(const PartsParams& params) {
        return {uint64_t(blockIdx.x) * blockDim.x + threadIdx.x,
                Unit<T, Wire>::count(part(nullptr, params, 0)), uint64_t(gridDim.x) * blockDim.x};
    }
};

// Sends to each peer its part of `x`.
template <class T, class Wire, int kWorld>
__device__ __forceinline__ void scatter(Call& call, const PartsParams& params, const Units& units) {
    int world = kWorld ? kWorld : call.link.world;
    if (call.alive)
        for (uint64_t index = units.begin; index < units.count; index += units.stride)
#pragma unroll
            for (int step = 1; step < world; ++step) {
                int target = (call.link.rank + step) % world;
                Span from = part(params.x, params, target);
                if (index >= Unit<T, Wire>::count(from)) continue;
                Unit<T, Wire> unit;
                unit.load(from, index);
                Vector* slots = call.slot(kScatter, target, call.link.rank);
                Wire::send(slots + Unit<T, Wire>::template place<Wire::kSlots>(index), unit.vector,
                           call.epoch);
            }
}

// Receives the parts of the peers into `out`.
template <class T, class Wire, int kWorld>
__device__ __forceinline__ void gather(Call& call, const PartsParams& params, const Units& units) {
    int world = kWorld ? kWorld : call.link.world;
    for (uint64_t index = units.begin; index < units.count; index += units.stride)
#pragma unroll
        for (int step = 1; step < world; ++step) {
            int source = (call.link.rank + step) % world;
            Span to = part(params.out, params, source);
            if (index >= Unit<T, Wire>::count(to)) continue;
            Unit<T, Wire> unit = receive<T, Wire>(call, kGather, source, index);
            if (!call.alive) return;
            unit.store(to, index);
        }
}

template <class T, class Wire, int kWorld>
__device__ __forceinline__ void two_shot(const PartsParams& params) {
    using Part = Unit<T, Wire>;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);
    Units units = Units::of<T, Wire>(params);
    scatter<T, Wire, kWorld>(call, params, units);
    call.count();
    Span own_x = part(params.x, params, call.link.rank);
    Span own_out = part(params.out, params, call.link.rank);
    for (uint64_t index = units.begin; index < Part::count(own_x); index += units.stride) {
        Part own;
        own.load(own_x, index);
        Part sum = combine<T, Wire, kWorld>(call, kScatter, index, own, params.op);
        if (!call.alive) return;
        send_to_all<T, Wire, kWorld>(call, kGather, index, sum);
        sum.store(own_out, index);
    }
    gather<T, Wire, kWorld>(call, params, units);
}

// `out` is this rank's part alone.
template <class T, class Wire, int kWorld>
__device__ __forceinline__ void reduce_scatter(const PartsParams& params) {
    using Part = Unit<T, Wire>;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);
    Units units = Units::of<T, Wire>(params);
    scatter<T, Wire, kWorld>(call, params, units);
    call.count();
    Span own_x = part(params.x, params, call.link.rank);
    Span own_out = {params.out, own_x.bytes};
    for (uint64_t index = units.begin; index < Part::count(own_x); index += units.stride) {
        Part own;
        own.load(own_x, index);
        Part sum = combine<T, Wire, kWorld>(call, kScatter, index, own, params.op);
        if (!call.alive) return;
        sum.store(own_out, index);
    }
}

// `x` is this rank's part alone. Bytes travel in packets, which carry any payload.
template <int kWorld>
__device__ __forceinline__ void all_gather(const PartsParams& params) {
    using Part = Unit<Bytes, PacketWire>;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);
    Units units = Units::of<Bytes, PacketWire>(params);
    Span own_out = part(params.out, params, call.link.rank);
    Span own_x = {const_cast<uint8_t*>(params.x), own_out.bytes};
    if (call.alive)
        for (uint64_t index = units.begin; index < Part::count(own_x); index += units.stride) {
            Part own;
            own.load(own_x, index);
            send_to_all<Bytes, PacketWire, kWorld>(call, kGather, index, own);
            own.store(own_out, index);
        }
    call.count();
    gather<Bytes, PacketWire, kWorld>(call, params, units);
}

#define TWO_SHOT(operation, Wire, wire, T, dtype, world)                                 \
    extern "C" __global__ void __launch_bounds__(512)                                    \
        operation##_##wire##_##dtype##_w##world(const __grid_constant__ PartsParams p) { \
        two_shot<T, Wire, world>(p);                                                     \
    }
PACELINE_FOR_ALL(TWO_SHOT, all_reduce_two_shot)

#define REDUCE_SCATTER(operation, Wire, wire, T, dtype, world)                           \
    extern "C" __global__ void __launch_bounds__(512)                                    \
        operation##_##wire##_##dtype##_w##world(const __grid_constant__ PartsParams p) { \
        reduce_scatter<T, Wire, world>(p);                                               \
    }
PACELINE_FOR_TYPES(REDUCE_SCATTER, reduce_scatter, ::paceline::SentinelWire, sentinel, 0)
PACELINE_FOR_TYPES(REDUCE_SCATTER, reduce_scatter, ::paceline::PacketWire, packet, 0)

extern "C" __global__ void __launch_bounds__(512)
    all_gather_packet_w0(const __grid_constant__ PartsParams p) {
    all_gather<0>(p);
}

}  // namespace paceline
