// All-reduce, residual addition and RMSNorm in one kernel: the end of a transformer's half layer.
//
// residual = round(residual + round(sum of x over ranks)); out = round(residual / rms * weight),
// the roundings being those of the three operators one after the other. A block takes whole rows:
// it sends all its rows, then finishes them one by one. Traffic on the link: that of one shot;
// besides, the residual is read and written and the output written once.
#include "instances.cuh"
#include "staged.cuh"

namespace paceline {

// Vectors of a row that one thread keeps in registers; a block has as many threads as that takes.
constexpr int kVectorsMax = 2;
constexpr int kWarp = 32;

// Through inboxes in GPU memory.
template <class T, int kWorld>
struct Pushed {
    __device__ __forceinline__ static void send(const Call& call, uint64_t index, const Vector& v) {
        send_to_all<kWorld>(call, 0, index, v);
    }
    __device__ __forceinline__ static void settle(Call& call) { call.count(); }
    __device__ __forceinline__ static Vector sum(Call& call, uint64_t index, const Vector& own) {
        return combine<T, kWorld>(call, 0, index, own, Op::kSum);
    }
};

// Through outboxes in host memory.
template <class T, int kWorld>
struct Staged {
    __device__ __forceinline__ static void send(const Call& call, uint64_t index, const Vector& v) {
        Outbox{call}.data(call.link.rank, 0)[index] = v;
    }
    __device__ __forceinline__ static void settle(Call& call) {
        raise(call, 0);
        call.count();
        await_peers(call, 0);
    }
    __device__ __forceinline__ static Vector sum(Call& call, uint64_t index, const Vector& own) {
        return combine_staged<T, kWorld>(call, index, own, Op::kSum);
    }
};

// The sum over all threads of the block, on all of them. Two calls one after the other have
// different `turn`s, 0 and 1.
__device__ __forceinline__ float block_sum(float value, int turn) {
    __shared__ float partial[2][kWarp];
    float* sums = partial[turn];
#pragma unroll
    for (int lane = kWarp / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
    if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = value;
    __syncthreads();
    int warps = blockDim.x / kWarp;
    value = threadIdx.x % kWarp < warps ? sums[threadIdx.x % kWarp] : 0.0f;
#pragma unroll
    for (int lane = kWarp / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
    return value;
}

template <class T, class Way>
__device__ __forceinline__ void add_rms_norm(const AddRmsNormParams& params) {
    uint32_t vectors = params.row_bytes / sizeof(Vector);
    float inverse_width = 1.0f / (params.row_bytes / T::kBytes);
    auto vector_of = [&](const uint8_t* data, uint32_t row, uint32_t index) {
        return reinterpret_cast<Vector*>(const_cast<uint8_t*>(data) + row * params.row_bytes) +
               index;
    };
    auto index_of = [&](int i) { return i * blockDim.x + threadIdx.x; };
    // The weight is no kernel's output.
    Vector weight[kVectorsMax] = {};
#pragma unroll
    for (int i = 0; i < kVectorsMax; ++i)
        if (index_of(i) < vectors) weight[i] = *vector_of(params.weight, 0, index_of(i));
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);

    auto own_x = [&](uint32_t row, uint32_t index) {
        Vector v = *vector_of(params.x, row, index);
        clean<T>(v);
        return v;
    };
    if (call.alive)
        for (uint32_t row = blockIdx.x; row < params.rows; row += gridDim.x)
#pragma unroll
            for (int i = 0; i < kVectorsMax; ++i)
                if (index_of(i) < vectors)
                    Way::send(call, uint64_t(row) * vectors + index_of(i), own_x(row, index_of(i)));
    Way::settle(call);

    int turn = 0;
    for (uint32_t row = blockIdx.x; row < params.rows; row += gridDim.x, turn ^= 1) {
        float value[kVectorsMax][T::kElements];
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kVectorsMax; ++i) {
            uint32_t index = index_of(i);
            if (index >= vectors) continue;
            Vector* residual = vector_of(params.residual, row, index);
            Vector before = *residual;
            Combined<T> added;
            added.start(Way::sum(call, uint64_t(row) * vectors + index, own_x(row, index)));
            added.add(before, Op::kSum);
            Vector after = T::pack(added.value);
            if (call.alive) *residual = after;
            T::unpack(after, value[i]);
#pragma unroll
            for (int j = 0; j < T::kElements; ++j) squares += value[i][j] * value[i][j];
        }
        float scale = rsqrtf(block_sum(squares, turn) * inverse_width + params.epsilon);
#pragma unroll
        for (int i = 0; i < kVectorsMax; ++i) {
            if (index_of(i) >= vectors || !call.alive) continue;
            float factor[T::kElements];
            T::unpack(weight[i], factor);
#pragma unroll
            for (int j = 0; j < T::kElements; ++j) factor[j] *= value[i][j] * scale;
            *vector_of(params.out, row, index_of(i)) = T::pack(factor);
        }
    }
}

#define ADD_RMS_NORM(name, T, dtype, world)                                             \
    extern "C" __global__ void __launch_bounds__(1024)                                  \
        name##_inbox_##dtype##_w##world(const __grid_constant__ AddRmsNormParams p) {   \
        add_rms_norm<T, Pushed<T, world>>(p);                                           \
    }                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024)                                  \
        name##_staged_##dtype##_w##world(const __grid_constant__ AddRmsNormParams p) {  \
        add_rms_norm<T, Staged<T, world>>(p);                                           \
    }
PACELINE_FOR_ALL(ADD_RMS_NORM, all_reduce_add_rms_norm)

}  // namespace paceline
