"""Quantise the routed experts to INT4 (pack-quantized, symmetric, groups of 32).

The scale of each group is the one with the least squared error in a small search.

Usage: quantize_int4.py IN OUT [free]

By default scales are bf16 values with at most 5 significant bits, so that code * scale is exact
in bf16, and dequantising to bf16 or to fp32 gives the same weight. With 'free' they are any bf16
value near the search grid.
"""

import json
import os
import re
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file

GROUP_SIZE = 32
CODE_MIN = -8
CODE_MAX = 7
EXPERT = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")
QUANTIZATION_CONFIG = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP_SIZE,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def round_to_5_bits(x):
    """Return the nearest floats with 5 significant bits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 32) / 32, exponent)


def groups_of(weight):
    """Return the weight (out, in) as (out, in / 32, 32)."""
    return weight.view(weight.shape[0], -1, GROUP_SIZE)


def codes_of(groups, scales):
    """Return the nearest INT4 codes, as floats."""
    return (groups / scales).round().clamp(CODE_MIN, CODE_MAX)


def quantize_by_maximum(weight):
    """Quantise with the plain rule, scale = absmax / 7.5, to compare the search with."""
    groups = groups_of(weight)
    scales = (groups.abs().amax(-1, keepdim=True) / 7.5).bfloat16().float()
    return codes_of(groups, scales), scales


def quantize_by_search(weight, free):
    """Try 53 multiples of absmax / 7 and keep, for each group, the least squared error.

    Returns codes (out, in / 32, 32) and scales (out, in / 32, 1), both as floats.
    """
    groups = groups_of(weight)
    maximum = groups.abs().amax(-1, keepdim=True)
    assert (maximum > 0).all()
    error_best = torch.full_like(maximum, float("inf"))
    scales_best = maximum.clone()
    codes_best = torch.zeros_like(groups)
    for factor in torch.linspace(0.45, 1.10, 53):
        scales = maximum / 7 * factor
        scales = scales.bfloat16().float() if free else round_to_5_bits(scales)
        codes = codes_of(groups, scales)
        error = ((codes * scales - groups) ** 2).sum(-1, keepdim=True)
        better = error < error_best
        error_best = torch.where(better, error, error_best)
        scales_best = torch.where(better, scales, scales_best)
        codes_best = torch.where(better, codes, codes_best)
    return codes_best, scales_best


def pack(codes):
    """Pack integers in -8..7 of shape (out, in) into int32 (out, in / 8), lowest nibble first."""
    nibbles = (codes.to(torch.int64) + 8).view(codes.shape[0], -1, 8)
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def squared_error(codes, scales, weight):
    """Return the summed squared error of a quantised weight."""
    return ((codes * scales - groups_of(weight)) ** 2).sum().item()


def quantize(source, free):
    """Return the tensors of the quantised checkpoint and the relative rms errors of both rules."""
    tensors = {}
    error_maximum = error_search = reference = 0.0
    with safe_open(os.path.join(source, "model.safetensors"), "pt") as file:
        for name in file.keys():
            weight = file.get_tensor(name)
            if not EXPERT.search(name):
                tensors[name] = weight.contiguous()
                continue
            weight = weight.float()
            codes, scales = quantize_by_search(weight, free)
            error_maximum += squared_error(*quantize_by_maximum(weight), weight)
            error_search += squared_error(codes, scales, weight)
            reference += (weight**2).sum().item()
            assert (scales.bfloat16().float() == scales).all()
            if not free:
                product = (codes.bfloat16() * scales.bfloat16()).float()
                assert (product == codes * scales).all()
            base = name[: -len("weight")]
            scales = scales.view(weight.shape[0], -1).bfloat16().contiguous()
            tensors[base + "weight_packed"] = pack(codes.view(weight.shape))
            tensors[base + "weight_scale"] = scales
            tensors[base + "weight_shape"] = torch.tensor(list(weight.shape), dtype=torch.int32)
    return tensors, (error_maximum / reference) ** 0.5, (error_search / reference) ** 0.5


def main():
    """Quantise the checkpoint IN into OUT."""
    source, out = sys.argv[1:3]
    free = len(sys.argv) > 3
    tensors, error_maximum, error_search = quantize(source, free)
    os.makedirs(out, exist_ok=True)
    path = os.path.join(out, "model.safetensors")
    save_file(tensors, path, metadata={"format": "pt"})
    with open(os.path.join(source, "config.json")) as file:
        config = json.load(file)
    config["quantization_config"] = QUANTIZATION_CONFIG
    with open(os.path.join(out, "config.json"), "w") as file:
        json.dump(config, file, indent=1)
    print(
        f"relative rms error: absmax/7.5 {error_maximum} search {error_search}",
        f"tensors {len(tensors)} bytes {os.path.getsize(path)}",
    )


if __name__ == "__main__":
    main()
