// How data and "it is here" travel together, so that no fence is needed: two wire formats.
#pragma once

#include "../common/types.cuh"
#include "link.cuh"

namespace paceline {

// Words travel as they are; memory that holds nothing new holds words of all ones, which the
// reader puts back. In every float type such a word is a pair of NaNs (or one): a payload of it
// travels as another NaN. For memory on a GPU. Traffic: the payload, and once more within the
// reader's own memory.
struct SentinelWire {
    static constexpr int kVectors = 1;
    static constexpr int kSlots = 1;
    static constexpr int kLanes = 1;
    static constexpr uint32_t kEmpty = 0xffffffff;

    template <class T>
    __device__ __forceinline__ static void clean(Vector (&payload)[kVectors]) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (payload[0].word[i] == kEmpty) payload[0].word[i] = T::kNan;
    }
    // `payload` must be clean.
    __device__ __forceinline__ static void send(Vector* slots, const Vector (&payload)[kVectors],
                                                uint32_t) {
        store_relaxed_sys(slots, payload[0]);
    }
    __device__ __forceinline__ static bool receive(const Vector* slots,
                                                   Vector (&payload)[kVectors], uint32_t) {
        payload[0] = load_relaxed_sys(slots);
        const uint32_t(&w)[4] = payload[0].word;
        return w[0] != kEmpty && w[1] != kEmpty && w[2] != kEmpty && w[3] != kEmpty;
    }
    __device__ __forceinline__ static void release(Vector* slots) {
        store_relaxed_sys(slots, {{kEmpty, kEmpty, kEmpty, kEmpty}});
    }
};

// Each 16 bytes are three words of payload and the epoch, in one atomic access. Any payload; no
// cleaning up. For pinned host memory, where every write crosses PCIe. Traffic: 4/3 of the payload.
// The lanes of a warp write side by side, so that PCIe carries few large packets: 128 bytes and
// more instead of 16 (seen on an H200: 22 us instead of 6 for 14 KiB).
struct PacketWire {
    static constexpr int kVectors = 3;
    static constexpr int kSlots = 4;
    static constexpr int kLanes = 32;

    template <class T>
    __device__ __forceinline__ static void clean(Vector (&)[kVectors]) {}

    __device__ __forceinline__ static void send(Vector* slots, const Vector (&payload)[kVectors],
                                                uint32_t epoch) {
#pragma unroll
        for (int i = 0; i < kSlots; ++i)
            store_whole_sys(slots + i * kLanes, {{word(payload, 3 * i), word(payload, 3 * i + 1),
                                         word(payload, 3 * i + 2), epoch}});
    }
    __device__ __forceinline__ static bool receive(const Vector* slots,
                                                   Vector (&payload)[kVectors], uint32_t epoch) {
        Vector packet[kSlots];
#pragma unroll
        for (int i = 0; i < kSlots; ++i) packet[i] = load_whole_sys(slots + i * kLanes);
        bool here = true;
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
            here = here && packet[i].word[3] == epoch;
#pragma unroll
            for (int j = 0; j < 3; ++j)
                payload[(3 * i + j) / 4].word[(3 * i + j) % 4] = packet[i].word[j];
        }
        return here;
    }
    __device__ __forceinline__ static void release(Vector*) {}

private:
    __device__ __forceinline__ static uint32_t word(const Vector (&payload)[kVectors], int index) {
        return payload[index / 4].word[index % 4];
    }
};

// What one thread handles at a time: the vectors of one send. The units of kLanes threads are
// interleaved: vector i of each, then vector i + 1 of each.
template <class T, class Wire>
struct Unit {
    Vector vector[Wire::kVectors];

    __device__ __forceinline__ void load(const Span& span, uint64_t index) {
#pragma unroll
        for (int i = 0; i < Wire::kVectors; ++i) {
            uint64_t at = place<Wire::kVectors>(index) + i * Wire::kLanes;
            vector[i] = at < span.vectors() ? span.load<T>(at) : Vector{};
        }
        Wire::template clean<T>(vector);
    }
    __device__ __forceinline__ void store(const Span& span, uint64_t index) const {
#pragma unroll
        for (int i = 0; i < Wire::kVectors; ++i) {
            uint64_t at = place<Wire::kVectors>(index) + i * Wire::kLanes;
            if (at < span.vectors()) span.store<T>(at, vector[i]);
        }
    }
    // Units that hold something: those of whole groups, and in the last group one for each of its
    // first vectors.
    __device__ __forceinline__ static uint64_t count(const Span& span) {
        constexpr int kGroup = Wire::kVectors * Wire::kLanes;
        uint64_t groups = span.vectors() / kGroup, rest = span.vectors() % kGroup;
        return groups * Wire::kLanes + min(rest, uint64_t(Wire::kLanes));
    }
    // The first of unit `index`'s places, where each unit has `kPlaces`.
    template <int kPlaces>
    __device__ __forceinline__ static uint64_t place(uint64_t index) {
        return index / Wire::kLanes * (kPlaces * Wire::kLanes) + index % Wire::kLanes;
    }
};

enum class Op : uint32_t { kSum = 0, kMax = 1 };

// The elements of several units, combined in f32.
template <class T, class Wire>
struct Combined {
    float value[Wire::kVectors][T::kElements];

    __device__ __forceinline__ void start(const Unit<T, Wire>& unit) {
#pragma unroll
        for (int i = 0; i < Wire::kVectors; ++i) T::unpack(unit.vector[i], value[i]);
    }
    __device__ __forceinline__ void add(const Unit<T, Wire>& unit, Op op) {
#pragma unroll
        for (int i = 0; i < Wire::kVectors; ++i) {
            float other[T::kElements];
            T::unpack(unit.vector[i], other);
#pragma unroll
            for (int j = 0; j < T::kElements; ++j) {
                float& v = value[i][j];
                // fmaxf would drop a NaN.
                v = op == Op::kSum ? v + other[j]
                                   : (v != v || other[j] != other[j] ? v + other[j]
                                                                     : fmaxf(v, other[j]));
            }
        }
    }
    __device__ __forceinline__ Unit<T, Wire> rounded() const {
        Unit<T, Wire> unit;
#pragma unroll
        for (int i = 0; i < Wire::kVectors; ++i) unit.vector[i] = T::pack(value[i]);
        Wire::template clean<T>(unit.vector);
        return unit;
    }
};

// Sends `unit` to all peers, beginning with the next, so that they are not all written to at once.
template <class T, class Wire, int kWorld>
__device__ __forceinline__ void send_to_all(const Call& call, int stage, uint64_t index,
                                            const Unit<T, Wire>& unit) {
    int world = kWorld ? kWorld : call.link.world;
#pragma unroll
    for (int step = 1; step < world; ++step) {
        int target = (call.link.rank + step) % world;
        Vector* slots = call.slot(stage, target, call.link.rank) + Unit<T, Wire>::template place<Wire::kSlots>(index);
        Wire::send(slots, unit.vector, call.epoch);
    }
}

// Waits for unit `index` of rank `source`. On failure the unit's contents mean nothing.
template <class T, class Wire>
__device__ __forceinline__ Unit<T, Wire> receive(Call& call, int stage, int source,
                                                 uint64_t index) {
    Vector* slots = call.slot(stage, call.link.rank, source) + Unit<T, Wire>::template place<Wire::kSlots>(index);
    Unit<T, Wire> unit;
    while (call.alive && !Wire::receive(slots, unit.vector, call.epoch))
        if (call.gives_up(source)) break;
    if (call.alive) Wire::release(slots);
    return unit;
}

// Combines unit `index` of all ranks in the order of ranks, this rank's being `own`.
template <class T, class Wire, int kWorld>
__device__ __forceinline__ Unit<T, Wire> combine(Call& call, int stage, uint64_t index,
                                                 const Unit<T, Wire>& own, Op op) {
    int world = kWorld ? kWorld : call.link.world;
    Combined<T, Wire> combined;
    if constexpr (kWorld == 0) {
        for (int source = 0; source < world; ++source) {
            Unit<T, Wire> unit = own;
            if (source != call.link.rank) unit = receive<T, Wire>(call, stage, source, index);
            source == 0 ? combined.start(unit) : combined.add(unit, op);
        }
    } else {
        // All peers' memory is asked before the first answer is needed.
        Unit<T, Wire> unit[kWorld];
        bool missing = call.alive;
        while (missing) {
            missing = false;
            int waits_for = 0;
#pragma unroll
            for (int source = 0; source < kWorld; ++source) {
                // This rank's own slot is read too, in vain: without a branch the units stay in
                // registers.
                const Vector* slots =
                    call.slot(stage, call.link.rank, source) + Unit<T, Wire>::template place<Wire::kSlots>(index);
                bool here = Wire::receive(slots, unit[source].vector, call.epoch);
                if (!here && source != call.link.rank) {
                    missing = true;
                    waits_for = source;
                }
            }
            if (missing && call.gives_up(waits_for)) break;
        }
#pragma unroll
        for (int source = 0; source < kWorld; ++source) {
            bool is_own = source == call.link.rank;
            if (!is_own && call.alive)
                Wire::release(call.slot(stage, call.link.rank, source) + Unit<T, Wire>::template place<Wire::kSlots>(index));
            Unit<T, Wire> from = unit[source];
            if (is_own) from = own;
            source == 0 ? combined.start(from) : combined.add(from, op);
        }
    }
    return combined.rounded();
}

}  // namespace paceline
