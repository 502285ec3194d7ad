"""Train the demo mixture-of-experts model (DeepSeek-V3 architecture), on one GPU.

Writes config.json and model.safetensors under the tensor names that Hugging Face's
DeepseekV3ForCausalLM reads, and state.pt for train_draft.py. Before it exits it compares that
implementation's logits with its own.

Usage: train_target.py --data tokens.bin --out DIR --minutes 8
"""

import argparse
import json
import math
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file

CONFIG = dict(
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    torch_dtype="bfloat16",
    hidden_act="silu",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    moe_intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=16,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    first_k_dense_replace=1,
    moe_layer_freq=1,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=2048,
    initializer_range=0.02,
    attention_bias=False,
    attention_dropout=0.0,
    tie_word_embeddings=False,
    use_cache=True,
    rope_interleave=True,
    pretraining_tp=1,
    rope_scaling=dict(
        type="yarn",
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=512,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)

VALIDATION_TOKENS = 1 << 19
BALANCE_WEIGHT = 0.002
BIAS_RATE = 0.002
REPORT_STEPS = 200


class Config:
    """A configuration dictionary whose keys are attributes."""

    def __init__(self, values):
        self.__dict__.update(values)


def yarn_magnitude(factor, multiplier):
    """Return YaRN's magnitude correction for a context extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def yarn_dimension(rotations, size, theta, scaling):
    """Return the rotary dimension that turns `rotations` times over the original context."""
    wavelength = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
    return size * math.log(wavelength) / (2 * math.log(theta))


def yarn_inverse_frequencies(config):
    """Return the inverse frequencies, the cos/sin factor and the softmax factor of YaRN.

    All three as DeepSeek-V3 applies them.
    """
    size, theta, scaling = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    powers = theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    extrapolated = 1.0 / powers
    interpolated = 1.0 / (scaling["factor"] * powers)
    low = max(math.floor(yarn_dimension(scaling["beta_fast"], size, theta, scaling)), 0)
    high = min(math.ceil(yarn_dimension(scaling["beta_slow"], size, theta, scaling)), size - 1)
    if low == high:
        high = high + 0.001
    ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    magnitude = yarn_magnitude(scaling["factor"], scaling["mscale"])
    magnitude_all = yarn_magnitude(scaling["factor"], scaling["mscale_all_dim"])
    frequencies = interpolated * (1 - keep) + extrapolated * keep
    return frequencies, magnitude / magnitude_all, magnitude_all**2


class RMSNorm(nn.Module):
    """Root-mean-square norm whose weight follows the input's dtype."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        """Normalise the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def linear(inputs, outputs):
    """Return a linear layer without a bias."""
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x, cos, sin):
    """Apply rotary positions to x (B, T, H, D), whose pairs are interleaved."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form."""

    def __init__(self, config, softmax_factor):
        super().__init__()
        self.config = config
        heads = config.num_attention_heads
        query_size = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = linear(config.q_lora_rank, heads * query_size)
        self.kv_a_proj_with_mqa = linear(
            config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim
        )
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim)
        )
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size)
        self.scale = query_size**-0.5 * softmax_factor

    def forward(self, x, cos, sin):
        """Return the attention output of x (B, T, hidden)."""
        config = self.config
        batch, length, _ = x.shape
        heads = config.num_attention_heads
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.view(batch, length, heads, -1)
        query_plain, query_rotary = query.split(
            [config.qk_nope_head_dim, config.qk_rope_head_dim], -1
        )
        latent, key_rotary = self.kv_a_proj_with_mqa(x).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], -1
        )
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, heads, -1)
        key_plain, value = expanded.split([config.qk_nope_head_dim, config.v_head_dim], -1)
        query_rotary = rotate(query_rotary, cos, sin)
        key_rotary = rotate(key_rotary.unsqueeze(2), cos, sin).expand(batch, length, heads, -1)
        query = torch.cat((query_plain, query_rotary), -1).transpose(1, 2)
        key = torch.cat((key_plain, key_rotary), -1).transpose(1, 2)
        # Flash attention wants one head size, so the values are padded to the keys'.
        value = F.pad(value, (0, query.shape[-1] - value.shape[-1])).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        mixed = mixed[..., : config.v_head_dim]
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(self, x):
        """Return down(silu(gate(x)) * up(x))."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Grouped sigmoid router with a correction bias that only the choice sees."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, x):
        """Route x (N, hidden).

        Returns the dense weights (N, experts), zero where an expert is not chosen, the mask of
        the chosen ones and all scores.
        """
        config = self.config
        group_size = config.n_routed_experts // config.n_group
        scores = torch.sigmoid(F.linear(x.float(), self.weight.float()))
        biased = scores.detach() + self.e_score_correction_bias
        groups = biased.view(-1, config.n_group, group_size).topk(2, -1)[0].sum(-1)
        chosen_groups = groups.topk(config.topk_group, -1)[1]
        keep = torch.zeros_like(groups).scatter_(1, chosen_groups, 1.0)
        biased = biased.masked_fill(keep.repeat_interleave(group_size, 1) == 0, 0.0)
        chosen = biased.topk(config.num_experts_per_tok, -1)[1]
        mask = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        weights = scores * mask
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
        return weights, mask, scores


def side_by_side(experts, dtype):
    """Return expert weights (E, hidden, m) as one matrix (hidden, E * m)."""
    count, hidden_size, intermediate_size = experts.shape
    columns = count * intermediate_size
    return experts.permute(1, 0, 2).reshape(hidden_size, columns).to(dtype)


class MoE(nn.Module):
    """Routed and shared experts; every expert is computed densely.

    That is cheap at this size, and it compiles.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        count = config.n_routed_experts
        hidden_size, intermediate_size = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config)
        self.w1 = nn.Parameter(torch.empty(count, hidden_size, intermediate_size))
        self.w3 = nn.Parameter(torch.empty(count, hidden_size, intermediate_size))
        self.w2 = nn.Parameter(torch.empty(count, intermediate_size, hidden_size))
        self.shared_experts = MLP(hidden_size, intermediate_size * config.n_shared_experts)

    def forward(self, x):
        """Return the output for x (B, T, hidden), the load of each expert and the balance loss."""
        batch, length, hidden_size = x.shape
        flat = x.reshape(-1, hidden_size)
        weights, mask, scores = self.gate(flat)
        count, intermediate_size = self.w1.shape[0], self.w1.shape[2]
        columns = count * intermediate_size
        gated = F.silu(flat @ side_by_side(self.w1, flat.dtype))
        gated = gated * (flat @ side_by_side(self.w3, flat.dtype))
        gated = gated.view(-1, count, intermediate_size) * weights.to(flat.dtype).unsqueeze(-1)
        down = self.w2.reshape(columns, hidden_size).to(flat.dtype)
        y = gated.view(-1, columns) @ down
        load = mask.mean(0)
        share = (scores / scores.sum(-1, keepdim=True)).mean(0)
        balance = (load * share).sum() * count / self.config.num_experts_per_tok
        return (y + self.shared_experts(flat)).view(batch, length, hidden_size), load, balance


class Layer(nn.Module):
    """One transformer layer; the first ones have a dense network in place of the experts."""

    def __init__(self, config, index, softmax_factor):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, softmax_factor)
        self.moe = index >= config.first_k_dense_replace
        if self.moe:
            self.mlp = MoE(config)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x, cos, sin):
        """Return the output, and load and balance loss or None for a dense layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y = self.mlp(self.post_attention_layernorm(x))
        if self.moe:
            output, load, balance = y
            return x + output, load, balance
        return x + y, None, None


def initial_deviation(name, parameter, config):
    """Return the standard deviation that a parameter is initialised with."""
    deviation = 0.02
    if "o_proj" in name or "down" in name or "w2" in name:
        # These write into the residual stream, once or twice a layer.
        deviation = deviation / math.sqrt(2 * config.num_hidden_layers)
    if parameter.shape[0] != config.vocab_size:
        deviation = deviation * 2
    return deviation


class Model(nn.Module):
    """The model, up to and without the product with `lm_head`."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        frequencies, self.cos_sin_factor, softmax_factor = yarn_inverse_frequencies(config)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [Layer(config, index, softmax_factor) for index in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=initial_deviation(name, parameter, config))

    def forward(self, ids, capture=()):
        """Run ids (B, T).

        Returns the normed hidden states, the expert loads (MoE layers, E), the summed balance
        loss and the residual streams that enter the layers of `capture`.
        """
        positions = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        angles = positions[:, None] * self.inverse_frequencies
        cos = (angles.cos() * self.cos_sin_factor)[None, :, None, :]
        sin = (angles.sin() * self.cos_sin_factor)[None, :, None, :]
        x = self.embed_tokens(ids)
        dtype = x.dtype
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
        x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
        loads, balance, captured = [], 0.0, []
        for index, layer in enumerate(self.layers):
            if index in capture:
                captured.append(x)
            x, layer_load, layer_balance = layer(x, cos, sin)
            if layer_load is not None:
                loads.append(layer_load)
                balance = balance + layer_balance
        return self.norm(x), (torch.stack(loads) if loads else None), balance, captured


def export(model, out, dtype=torch.bfloat16):
    """Write the checkpoint under Hugging Face's tensor names."""
    projections = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    named = list(model.named_parameters())
    named += [(name, buffer) for name, buffer in model.named_buffers() if "e_score" in name]
    tensors = {}
    for name, value in named:
        value = value.detach().cpu()
        full_name = name if name.startswith("lm_head") else "model." + name
        if ".mlp.w" in name:
            # Ours are (expert, in, out); a checkpoint has one (out, in) tensor an expert.
            prefix, projection = full_name[:-2], projections[name[-2:]]
            for expert in range(value.shape[0]):
                tensor = value[expert].t().contiguous().to(dtype)
                tensors[f"{prefix}experts.{expert}.{projection}.weight"] = tensor
        elif "e_score" in name:
            tensors[full_name] = value.contiguous()
        else:
            tensors[full_name] = value.to(dtype).contiguous()
    save_file(tensors, os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(out, "config.json"), "w") as file:
        json.dump(CONFIG, file, indent=1)


def load_tokens(path, device):
    """Return the training and the validation part of the token stream, on the device."""
    data = np.memmap(path, dtype=np.uint16, mode="r")
    train = torch.from_numpy(data[:-VALIDATION_TOKENS].astype(np.int32)).to(device)
    validation = torch.from_numpy(data[-VALIDATION_TOKENS:].astype(np.int32)).to(device)
    return train, validation


def random_windows(tokens, count, length):
    """Return `count` windows of length + 1 tokens from random places."""
    offsets = torch.arange(length + 1, device=tokens.device)
    last = len(tokens) - length - 1
    starts = torch.randint(0, last, (count, 1), device=tokens.device)
    return tokens[starts + offsets].long()


def make_optimizer(model, learning_rate):
    """Return AdamW with weight decay on the matrices only."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return torch.optim.AdamW(
        [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)],
        lr=learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )


def learning_rate_at(step, fraction, peak):
    """Return the rate: warm-up over 200 steps, flat, then falling over the last 30 %."""
    decay = 1.0 if fraction < 0.7 else max(0.02, (1 - fraction) / 0.3)
    return peak * min(1.0, (step + 1) / 200) * decay


def balance_experts(model, loads, fraction):
    """Move the routers' correction biases towards an even load."""
    with torch.no_grad():
        layers = [layer for layer in model.layers if layer.moe]
        for layer, load in zip(layers, loads):
            rate = BIAS_RATE * (1 - 0.9 * fraction)
            layer.mlp.gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)


def loss_of(model, forward, ids):
    """Return the cross entropy of the windows, the expert loads and the balance loss."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        hidden, loads, balance, _ = forward(ids[:, :-1])
        logits = model.lm_head(hidden)
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    return loss, loads, balance


def train_for(arguments, model, forward, tokens):
    """Train for `arguments.minutes`, counted from the end of the first step; return tokens seen.

    The first step is left out because it compiles the model.
    """
    optimizer = make_optimizer(model, arguments.lr)
    begin = time.time()
    start = None
    step = seen = 0
    while True:
        elapsed = 0.0 if start is None else time.time() - start
        fraction = elapsed / (arguments.minutes * 60)
        if fraction >= 1:
            return seen
        learning_rate = learning_rate_at(step, fraction, arguments.lr)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        ids = random_windows(tokens, arguments.batch, arguments.seq)
        loss, loads, balance = loss_of(model, forward, ids)
        (loss + BALANCE_WEIGHT * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += arguments.batch * arguments.seq
        balance_experts(model, loads, fraction)
        step += 1
        if start is None:
            torch.cuda.synchronize()
            start = time.time()
            seen = 0
        if step % REPORT_STEPS == 0:
            speed = seen / 1e6 / max(1e-9, time.time() - start)
            print(
                f"step {step} t {time.time() - begin:.0f}s loss {loss.item():.3f}",
                f"lr {learning_rate:.1e} Mtok/s {speed:.2f}",
                f"load max/mean {(loads.max() / loads.mean()).item():.2f}",
                flush=True,
            )


def compare_with_transformers(model, out, validation, length):
    """Print how far Hugging Face's implementation of the exported files is from the model.

    The model's own weights are rounded to bf16 first, as the exported ones are.
    """
    from transformers import DeepseekV3ForCausalLM

    reference_model = DeepseekV3ForCausalLM.from_pretrained(out, dtype=torch.float32)
    reference_model = reference_model.to(validation.device).eval()
    ids = random_windows(validation, 4, length)[:, :256]
    with torch.no_grad():
        state = model.state_dict()
        for name, value in state.items():
            if value.ndim >= 1 and "e_score" not in name:
                state[name] = value.bfloat16().float()
        model.load_state_dict(state)
        logits = model.lm_head(model(ids)[0]).float()
        reference = reference_model(ids).logits.float()
    error = ((logits - reference).norm() / reference.norm()).item()
    same = (logits.argmax(-1) == reference.argmax(-1)).float().mean().item()
    print("relative error against transformers", error, "same argmax", same, flush=True)


def parse_arguments():
    """Return the command line's settings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    parser.add_argument("--out")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def main():
    """Train, validate, export and compare."""
    arguments = parse_arguments()
    os.makedirs(arguments.out, exist_ok=True)
    torch.manual_seed(0)
    train, validation = load_tokens(arguments.data, "cuda")
    model = Model(Config(CONFIG)).to("cuda")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"parameters {parameters / 1e6} M; tokens {len(train) / 1e6} M", flush=True)
    forward = torch.compile(model)
    seen = train_for(arguments, model, forward, train)

    model.eval()
    with torch.no_grad():
        torch.manual_seed(1)
        loss = 0
        for _ in range(8):
            windows = random_windows(validation, 64, arguments.seq)
            loss += loss_of(model, forward, windows)[0].item()
        print(f"validation loss {loss / 8} tokens seen {seen / 1e6} M", flush=True)
    export(model, arguments.out)
    torch.save(model.state_dict(), os.path.join(arguments.out, "state.pt"))
    compare_with_transformers(model, arguments.out, validation, arguments.seq)


if __name__ == "__main__":
    main()
