// How a rank reaches its peers: inboxes, epochs, bounded waits. The protocol and why it is right
// are in docs/all-reduce.md; the Rust twins of these structs in src/ops/all_reduce.rs.
#pragma once

#include "../common/ptx.cuh"

namespace paceline {

constexpr int kRanksMax = 16;
constexpr uint32_t kTimedOut = 1;
constexpr uint32_t kAborted = 2;

// In this rank's device memory, alone in its 128 bytes. Zero at first.
struct State {
    // Calls that this rank has begun; the same on all ranks.
    uint32_t epoch;
    // Not 0 once a call failed: all later calls end at once.
    uint32_t failed;
    // Blocks of the running call that have read the epoch.
    uint32_t arrived;
    uint32_t unused[29];
};
static_assert(sizeof(State) == 128, "twin of State in all_reduce.rs");

// In pinned host memory: what went wrong first, readable while kernels run. Zero at first.
struct Failure {
    uint32_t code;
    uint32_t rank;
    uint32_t peer;
    uint32_t epoch;
};
static_assert(sizeof(Failure) == 16, "twin of Failure in all_reduce.rs");

struct Link {
    // By rank, as mapped here. Inboxes (on a GPU): [parity 2][stage 2][source rank][slot_bytes].
    // Outboxes (in host memory): [flags][parity 2][stage 2][slot_bytes], see staged.cuh.
    uint64_t box[kRanksMax];
    State* state;
    Failure* failure;
    // In pinned host memory: not 0 asks all waits to end.
    const uint32_t* abort;
    uint64_t timeout_ns;
    uint64_t slot_bytes;
    uint32_t rank;
    uint32_t world;
};
static_assert(sizeof(Link) == 176, "twin of Link in all_reduce.rs");

constexpr uint64_t kNotYet = ~uint64_t(0);

// Looks up from polling: returns the deadline, set now if it was not yet, or 0 if this rank has
// failed. The first thread to notice says why. Not inlined, so that polling needs few registers.
__device__ __noinline__ uint64_t check(const Link& link, uint32_t epoch, int peer,
                                       uint64_t deadline) {
    uint64_t now = nanoseconds();
    if (deadline == kNotYet) deadline = now + link.timeout_ns;
    uint32_t code = 0;
    if (now > deadline) code = kTimedOut;
    if (load_relaxed_sys(link.abort) != 0) code = kAborted;
    if (code != 0 && atomicCAS(&link.state->failed, 0, code) == 0) {
        store_relaxed_sys(&link.failure->rank, link.rank);
        store_relaxed_sys(&link.failure->peer, peer);
        store_relaxed_sys(&link.failure->epoch, epoch);
        store_release_sys(&link.failure->code, code);
    }
    return load_relaxed_gpu(&link.state->failed) == 0 ? deadline : 0;
}

// One call as one thread sees it.
class Call {
public:
    // Every thread of the grid. Loads the epoch; what else the kernel loads now comes with it.
    __device__ __forceinline__ explicit Call(const Link& link) : link(link) {
        epoch = load_relaxed_gpu(&link.state->epoch) + 1;
        alive = load_relaxed_gpu(&link.state->failed) == 0;
    }

    // Every thread, once, after it has used the epoch for sending: the last block to come here
    // counts the call. No block can still be reading the old epoch then.
    __device__ __forceinline__ void count() {
        __syncthreads();
        if (threadIdx.x != 0) return;
        if (atomicAdd(&link.state->arrived, 1) == gridDim.x - 1) {
            link.state->arrived = 0;
            link.state->epoch = epoch;
        }
    }

    // Where rank `source` puts what it sends to rank `target`.
    __device__ __forceinline__ Vector* slot(int stage, int target, int source) const {
        uint64_t place = ((epoch & 1) * 2 + stage) * link.world + source;
        return reinterpret_cast<Vector*>(link.box[target] + place * link.slot_bytes);
    }

    // Of a loop that waits for `peer`: whether to give up.
    __device__ __forceinline__ bool gives_up(int peer) {
        constexpr uint32_t kPolls = 256;
        if (++polls % kPolls != 0) return false;
        deadline = check(link, epoch, peer, deadline);
        alive = deadline != 0;
        return !alive;
    }

    const Link& link;
    uint32_t epoch;
    // False once waiting has failed: the thread then touches nothing more.
    bool alive;

private:
    uint32_t polls = 0;
    uint64_t deadline = kNotYet;
};

}  // namespace paceline
