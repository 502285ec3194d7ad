// Names kernels `<operation>_<algorithm>_<dtype>_w<world>`; w0 takes any world.
#pragma once

#define PACELINE_FOR_TYPES(DO, name, world)   \
    DO(name, ::paceline::Bf16, bf16, world)   \
    DO(name, ::paceline::F16, f16, world)     \
    DO(name, ::paceline::F32, f32, world)
#define PACELINE_FOR_ALL(DO, name)            \
    PACELINE_FOR_TYPES(DO, name, 2)           \
    PACELINE_FOR_TYPES(DO, name, 4)           \
    PACELINE_FOR_TYPES(DO, name, 8)           \
    PACELINE_FOR_TYPES(DO, name, 0)
