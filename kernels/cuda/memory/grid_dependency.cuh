// Programmatic dependent launch (PTX ISA, `griddepcontrol`): a kernel may start while the one
// before it in the stream still runs.
//
// Both functions do nothing before sm_90, where a launch never starts early.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define GRID_DEPENDENCY(instruction) asm volatile("griddepcontrol." instruction ";" ::: "memory")
#else
#define GRID_DEPENDENCY(instruction) static_cast<void>(0)
#endif

// Waits until the kernels before this one have ended and their writes are visible.
__device__ __forceinline__ void grid_dependency_wait() { GRID_DEPENDENCY("wait"); }

// Lets the kernel after this one start; call it as soon as its start can do no harm.
__device__ __forceinline__ void grid_dependency_launch_dependents() {
    GRID_DEPENDENCY("launch_dependents");
}

#undef GRID_DEPENDENCY
