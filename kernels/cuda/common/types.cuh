// Element types: how the 16 bytes of a vector become f32 values and back, with one rounding.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx.cuh"

namespace paceline {

struct F32 {
    static constexpr int kBytes = 4;
    static constexpr int kElements = 4;
    // A NaN in each element, other than the word of all ones.
    static constexpr uint32_t kNan = 0x7fffffff;

    __device__ static void unpack(const Vector& v, float (&values)[kElements]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = __uint_as_float(v.word[i]);
    }
    __device__ static Vector pack(const float (&values)[kElements]) {
        Vector v;
#pragma unroll
        for (int i = 0; i < 4; ++i) v.word[i] = __float_as_uint(values[i]);
        return v;
    }
};

struct Bf16 {
    static constexpr int kBytes = 2;
    static constexpr int kElements = 8;
    static constexpr uint32_t kNan = 0x7fff7fff;

    __device__ static void unpack(const Vector& v, float (&values)[kElements]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[2 * i] = __uint_as_float(v.word[i] << 16);
            values[2 * i + 1] = __uint_as_float(v.word[i] & 0xffff0000u);
        }
    }
    __device__ static Vector pack(const float (&values)[kElements]) {
        Vector v;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
            v.word[i] = *reinterpret_cast<uint32_t*>(&pair);
        }
        return v;
    }
};

struct F16 {
    static constexpr int kBytes = 2;
    static constexpr int kElements = 8;
    static constexpr uint32_t kNan = 0x7fff7fff;

    __device__ static void unpack(const Vector& v, float (&values)[kElements]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&v.word[i]));
            values[2 * i] = pair.x;
            values[2 * i + 1] = pair.y;
        }
    }
    __device__ static Vector pack(const float (&values)[kElements]) {
        Vector v;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            __half2 pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
            v.word[i] = *reinterpret_cast<uint32_t*>(&pair);
        }
        return v;
    }
};

// Bytes that nobody computes with.
struct Bytes {
    static constexpr int kBytes = 1;
    static constexpr int kElements = 16;
};

// The elements of a vector that ends early or is not aligned; the rest are zeros.
template <class T>
__device__ __noinline__ Vector load_elements(const uint8_t* from, uint64_t bytes) {
    Vector v = {};
#pragma unroll
    for (int i = 0; i < sizeof(Vector); i += T::kBytes)
        if (i < bytes) memcpy(reinterpret_cast<uint8_t*>(&v) + i, from + i, T::kBytes);
    return v;
}

template <class T>
__device__ __noinline__ void store_elements(uint8_t* to, uint64_t bytes, Vector v) {
#pragma unroll
    for (int i = 0; i < sizeof(Vector); i += T::kBytes)
        if (i < bytes) memcpy(to + i, reinterpret_cast<const uint8_t*>(&v) + i, T::kBytes);
}

// A run of bytes in device memory that starts at any element and may end within a vector.
struct Span {
    uint8_t* data;
    uint64_t bytes;

    // Vector `index`, zeros beyond the end.
    template <class T>
    __device__ __forceinline__ Vector load(uint64_t index) const {
        const uint8_t* from = data + index * sizeof(Vector);
        if (whole(index)) return *reinterpret_cast<const Vector*>(from);
        return load_elements<T>(from, bytes - index * sizeof(Vector));
    }
    template <class T>
    __device__ __forceinline__ void store(uint64_t index, const Vector& v) const {
        uint8_t* to = data + index * sizeof(Vector);
        if (whole(index))
            *reinterpret_cast<Vector*>(to) = v;
        else
            store_elements<T>(to, bytes - index * sizeof(Vector), v);
    }
    __device__ __forceinline__ bool whole(uint64_t index) const {
        bool aligned = reinterpret_cast<uint64_t>(data) % sizeof(Vector) == 0;
        return aligned && (index + 1) * sizeof(Vector) <= bytes;
    }
    __device__ __forceinline__ uint64_t vectors() const {
        return (bytes + sizeof(Vector) - 1) / sizeof(Vector);
    }
};

}  // namespace paceline
