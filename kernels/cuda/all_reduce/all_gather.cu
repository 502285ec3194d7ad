// All-gather over inboxes in GPU memory, of any bytes: each 16 bytes on the way are three words of
// payload and the epoch, in one atomic access, so that no value is reserved and nothing is put back.
//
// Traffic per rank: (world - 1) * part * 4/3 out and in. Needs: peers' inboxes mapped here. Bound:
// one way to the peer + traffic / link bandwidth.
#include "params.cuh"

namespace paceline {

constexpr int kStage = 0;
// A unit: what one thread sends at a time. The units of the lanes of a warp are interleaved, so
// that lanes touch memory side by side.
constexpr int kVectors = 3;
constexpr int kPackets = 4;
constexpr int kLanes = 32;

// Units that hold something: those of whole groups of lanes, and in the last group one for each of
// its first vectors.
__device__ __forceinline__ uint64_t units(const Span& span) {
    uint64_t groups = span.vectors() / (kVectors * kLanes);
    uint64_t rest = span.vectors() % (kVectors * kLanes);
    return groups * kLanes + min(rest, uint64_t(kLanes));
}

// The first of the places of unit `index`, where each has `places`.
__device__ __forceinline__ uint64_t place(uint64_t index, int places) {
    return index / kLanes * (places * kLanes) + index % kLanes;
}

__device__ __forceinline__ void all_gather(const PartsParams& params) {
    int world = params.link.world, rank = params.link.rank;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);
    Span x = params.whole(params.x), own = params.part(params.out, rank);
    Stride mine;
    uint64_t count = units(x);
    if (call.alive)
        for (uint64_t index = mine.begin; index < count; index += mine.step) {
            uint32_t word[4 * kVectors] = {};
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                uint64_t at = place(index, kVectors) + i * kLanes;
                if (at >= x.vectors()) continue;
                Vector v = x.load<Bytes>(at);
                own.store<Bytes>(at, v);
#pragma unroll
                for (int j = 0; j < 4; ++j) word[4 * i + j] = v.word[j];
            }
            for (int step = 1; step < world; ++step) {
                Vector* slots = call.slot(kStage, (rank + step) % world, rank);
#pragma unroll
                for (int i = 0; i < kPackets; ++i)
                    store_whole_sys(
                        slots + place(index, kPackets) + i * kLanes,
                        {{word[3 * i], word[3 * i + 1], word[3 * i + 2], call.epoch}});
            }
        }
    call.count();
    for (uint64_t index = mine.begin; index < count; index += mine.step)
        for (int step = 1; step < world; ++step) {
            int source = (rank + step) % world;
            const Vector* slots = call.slot(kStage, rank, source) + place(index, kPackets);
            uint32_t word[4 * kVectors];
            bool missing = call.alive;
            while (missing) {
                missing = false;
#pragma unroll
                for (int i = 0; i < kPackets; ++i) {
                    Vector packet = load_whole_sys(slots + i * kLanes);
                    missing = missing || packet.word[3] != call.epoch;
#pragma unroll
                    for (int j = 0; j < 3; ++j) word[3 * i + j] = packet.word[j];
                }
                if (missing && call.gives_up(source)) break;
            }
            if (!call.alive) return;
            Span to = params.part(params.out, source);
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                uint64_t at = place(index, kVectors) + i * kLanes;
                if (at < to.vectors())
                    to.store<Bytes>(at, {{word[4 * i], word[4 * i + 1], word[4 * i + 2],
                                          word[4 * i + 3]}});
            }
        }
}

extern "C" __global__ void __launch_bounds__(512)
    all_gather_inbox(const __grid_constant__ PartsParams p) {
    all_gather(p);
}

}  // namespace paceline
