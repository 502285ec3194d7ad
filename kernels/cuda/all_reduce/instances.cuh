// Names kernels `<operation>_<wire>_<dtype>_w<world>`; w0 takes any world.
#pragma once

#define PACELINE_FOR_TYPES(DO, operation, Wire, wire, world)            \
    DO(operation, Wire, wire, ::paceline::Bf16, bf16, world)            \
    DO(operation, Wire, wire, ::paceline::F16, f16, world)              \
    DO(operation, Wire, wire, ::paceline::F32, f32, world)
#define PACELINE_FOR_WORLDS(DO, operation, Wire, wire)                  \
    PACELINE_FOR_TYPES(DO, operation, Wire, wire, 2)                    \
    PACELINE_FOR_TYPES(DO, operation, Wire, wire, 4)                    \
    PACELINE_FOR_TYPES(DO, operation, Wire, wire, 8)                    \
    PACELINE_FOR_TYPES(DO, operation, Wire, wire, 0)
#define PACELINE_FOR_ALL(DO, operation)                                 \
    PACELINE_FOR_WORLDS(DO, operation, ::paceline::SentinelWire, sentinel) \
    PACELINE_FOR_WORLDS(DO, operation, ::paceline::PacketWire, packet)
