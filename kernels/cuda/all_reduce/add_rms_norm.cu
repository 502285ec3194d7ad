// All-reduce, residual addition and RMSNorm in one kernel: the end of a transformer's half layer.
//
// residual = round(residual + round(sum of x over ranks)); out = round(residual / rms * weight),
// the roundings being those of the three operators one after the other. A block takes whole rows:
// it sends all its rows, then finishes them one by one. Traffic on the link: as one_shot.cu;
// besides, the residual is read and written and the output written once.
#include "instances.cuh"
#include "wire.cuh"

namespace paceline {

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

// Units of a row that one thread keeps in registers; a block has as many threads as that takes.
constexpr int kUnitsMax = 2;
constexpr int kWarp = 32;

// The sum over all threads of the block, on all of them.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[kWarp];
#pragma unroll
    for (int lane = kWarp / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
    if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = value;
    __syncthreads();
    int warps = blockDim.x / kWarp;
    value = threadIdx.x % kWarp < warps ? sums[threadIdx.x % kWarp] : 0.0f;
#pragma unroll
    for (int lane = kWarp / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
    // The next row writes `sums` again.
    __syncthreads();
    return value;
}

template <class T, class Wire, int kWorld>
__device__ __forceinline__ void add_rms_norm(const AddRmsNormParams& params) {
    using Part = Unit<T, Wire>;
    uint64_t units = Part::count({nullptr, params.row_bytes});
    // Places of a row in the inbox: whole groups of lanes.
    uint64_t places = (units + Wire::kLanes - 1) / Wire::kLanes * Wire::kLanes;
    auto row_of = [&](const uint8_t* data, uint32_t row) {
        return Span{const_cast<uint8_t*>(data) + row * params.row_bytes, params.row_bytes};
    };
    // The weight is no kernel's output.
    Part weight[kUnitsMax] = {};
#pragma unroll
    for (int i = 0; i < kUnitsMax; ++i) {
        uint64_t index = i * blockDim.x + threadIdx.x;
        if (index < units) weight[i].load(row_of(params.weight, 0), index);
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
    Call call(params.link);

    if (call.alive)
        for (uint32_t row = blockIdx.x; row < params.rows; row += gridDim.x)
#pragma unroll
            for (int i = 0; i < kUnitsMax; ++i) {
                uint64_t index = i * blockDim.x + threadIdx.x;
                if (index >= units) continue;
                Part part;
                part.load(row_of(params.x, row), index);
                send_to_all<T, Wire, kWorld>(call, 0, row * places + index, part);
            }
    call.count();

    for (uint32_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
        float value[kUnitsMax][Wire::kVectors][T::kElements];
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kUnitsMax; ++i) {
            uint64_t index = i * blockDim.x + threadIdx.x;
            if (index >= units) continue;
            Part own, residual;
            own.load(row_of(params.x, row), index);
            residual.load(row_of(params.residual, row), index);
            Part sum = combine<T, Wire, kWorld>(call, 0, row * places + index, own, Op::kSum);
            Combined<T, Wire> added;
            added.start(sum);
            added.add(residual, Op::kSum);
            residual = added.rounded();
            if (call.alive) residual.store(row_of(params.residual, row), index);
#pragma unroll
            for (int j = 0; j < Wire::kVectors; ++j) {
                T::unpack(residual.vector[j], value[i][j]);
#pragma unroll
                for (int k = 0; k < T::kElements; ++k) squares += value[i][j][k] * value[i][j][k];
            }
        }
        float mean = block_sum(squares) / (params.row_bytes / T::kBytes);
        float scale = rsqrtf(mean + params.epsilon);
#pragma unroll
        for (int i = 0; i < kUnitsMax; ++i) {
            uint64_t index = i * blockDim.x + threadIdx.x;
            if (index >= units || !call.alive) continue;
            Part normed;
#pragma unroll
            for (int j = 0; j < Wire::kVectors; ++j) {
                float factor[T::kElements];
                T::unpack(weight[i].vector[j], factor);
#pragma unroll
                for (int k = 0; k < T::kElements; ++k) factor[k] *= value[i][j][k] * scale;
                normed.vector[j] = T::pack(factor);
            }
            normed.store(row_of(params.out, row), index);
        }
    }
}

#define ADD_RMS_NORM(operation, Wire, wire, T, dtype, world)                                  \
    extern "C" __global__ void __launch_bounds__(Wire::kVectors == 1 ? 1024 : 512)            \
        operation##_##wire##_##dtype##_w##world(const __grid_constant__ AddRmsNormParams p) { \
        add_rms_norm<T, Wire, world>(p);                                                      \
    }
PACELINE_FOR_ALL(ADD_RMS_NORM, all_reduce_add_rms_norm)

}  // namespace paceline
