// All inline PTX of this project, behind plain names. Architecture is tested here and nowhere else.
#pragma once

#include <cstdint>

namespace paceline {

// What one thread moves at a time: 16 bytes as four words.
struct alignas(16) Vector {
    uint32_t word[4];
};

// Waits until the kernel before this one in the stream has finished and its writes are visible.
// Does nothing in a kernel that was not launched as a programmatic dependent (and before sm_90).
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream take its place beside this one; it still waits as above.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Four words, each of them atomic by itself.
__device__ __forceinline__ void store_relaxed_sys(Vector* to, const Vector& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]),
                 "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

__device__ __forceinline__ Vector load_relaxed_sys(const Vector* from) {
    Vector v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from)
                 : "memory");
    return v;
}

// All 16 bytes in one atomic access (PTX ISA, "st" and "ld" with .b128: sm_70 and later).
__device__ __forceinline__ void store_whole_sys(Vector* to, const Vector& v) {
    uint64_t low = static_cast<uint64_t>(v.word[1]) << 32 | v.word[0];
    uint64_t high = static_cast<uint64_t>(v.word[3]) << 32 | v.word[2];
    asm volatile(
        "{\n\t.reg .b128 value;\n\t"
        "mov.b128 value, {%1, %2};\n\t"
        "st.relaxed.sys.global.b128 [%0], value;\n\t}" ::"l"(to), "l"(low), "l"(high)
        : "memory");
}

__device__ __forceinline__ Vector load_whole_sys(const Vector* from) {
    uint64_t low, high;
    asm volatile(
        "{\n\t.reg .b128 value;\n\t"
        "ld.relaxed.sys.global.b128 value, [%2];\n\t"
        "mov.b128 {%0, %1}, value;\n\t}"
        : "=l"(low), "=l"(high)
        : "l"(from)
        : "memory");
    return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
             static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)}};
}

__device__ __forceinline__ uint32_t load_relaxed_sys(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed_sys(uint32_t* to, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release_sys(uint32_t* to, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire_sys(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t load_relaxed_gpu(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Nanoseconds of a clock that all multiprocessors share; its steps may be as long as 1 us.
__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

}  // namespace paceline
