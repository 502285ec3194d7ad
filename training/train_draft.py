"""Train an EAGLE-3 draft for the demo model, on one GPU.

It uses the training-time test of the EAGLE-3 paper: the draft is unrolled on its own hidden
states, so that it learns the inputs it will meet when drafting. Writes config.json and
model.safetensors under the tensor names of published EAGLE-3 heads.

Usage: train_draft.py --data tokens.bin --target DIR --out DIR --minutes 4
"""

import argparse
import json
import os
import time

import torch
import torch.nn as nn
from safetensors.torch import save_file

from train_target import (
    CONFIG,
    MLP,
    Config,
    Model,
    RMSNorm,
    linear,
    load_tokens,
    random_windows,
)

# The draft sees the residual streams that enter these layers.
CAPTURE = [2, CONFIG["num_hidden_layers"] // 2, CONFIG["num_hidden_layers"] - 3]
DRAFT = dict(
    architectures=["LlamaForCausalLMEagle3"],
    model_type="llama",
    hidden_size=256,
    intermediate_size=768,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    num_hidden_layers=1,
    hidden_act="silu",
    vocab_size=CONFIG["vocab_size"],
    draft_vocab_size=2048,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    eagle_config=dict(
        eagle_aux_hidden_state_layer_ids=[layer - 1 for layer in CAPTURE],
        use_aux_hidden_state=True,
    ),
)

STEP_DECAY = 0.85
REPORT_STEPS = 200


class Attention(nn.Module):
    """Grouped-query attention over the unrolled steps, with half-split rotary pairs."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = linear(2 * config.hidden_size, query_size)
        self.k_proj = linear(2 * config.hidden_size, key_size)
        self.v_proj = linear(2 * config.hidden_size, key_size)
        self.o_proj = linear(query_size, config.hidden_size)

    def _rotate(self, x, cos, sin):
        half = self.config.head_dim // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def _cos_sin(self, positions, dtype):
        config = self.config
        exponents = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
        angles = positions[:, None].float() * (1.0 / config.rope_theta**exponents)
        angles = torch.cat((angles, angles), -1)
        return angles.cos()[None, None].to(dtype), angles.sin()[None, None].to(dtype)

    def forward(self, x, positions, past):
        """Attend from x (B, T, 2 * hidden).

        `past` holds the (key, value) of the unrolled steps before this one, and this step adds
        its own. Position t sees step 0 up to t, and of the later steps its own column.
        """
        config = self.config
        batch, length, _ = x.shape
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        scale = config.head_dim**-0.5
        cos, sin = self._cos_sin(positions, x.dtype)
        query = self.q_proj(x).view(batch, length, heads, config.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, key_heads, config.head_dim).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, key_heads, config.head_dim).transpose(1, 2)
        query = self._rotate(query, cos, sin)
        key = self._rotate(key, cos, sin).repeat_interleave(heads // key_heads, 1)
        value = value.repeat_interleave(heads // key_heads, 1)
        past.append((key, value))

        first_key, first_value = past[0]
        future = torch.ones(length, length, device=x.device, dtype=torch.bool).triu(1)
        scores = (query @ first_key.transpose(-1, -2)) * scale
        scores = [scores.masked_fill(future, float("-inf"))]
        for step_key, _ in past[1:]:
            scores.append((query * step_key).sum(-1, keepdim=True) * scale)
        weights = torch.cat(scores, -1).float().softmax(-1).to(x.dtype)
        mixed = weights[..., :length] @ first_value
        for step, (_, step_value) in enumerate(past[1:]):
            column = length + step
            mixed = mixed + weights[..., column : column + 1] * step_value
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class DraftLayer(nn.Module):
    """The draft's one layer, whose attention reads the embedding beside the hidden state."""

    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, embedding, hidden, positions, past):
        """Return the next hidden state of each position."""
        joined = torch.cat((self.input_layernorm(embedding), self.hidden_norm(hidden)), -1)
        x = hidden + self.self_attn(joined, positions, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    """The draft's parameters, under their published names."""

    def __init__(self, config):
        super().__init__()
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = linear(3 * config.hidden_size, config.hidden_size)
        self.lm_head = linear(config.hidden_size, config.draft_vocab_size)


class DraftVocabulary:
    """The most frequent target ids, in rising order.

    `kept` holds the target id of each draft id, `t2d` whether a target id is kept, and `d2t` the
    distance from a draft id to its target id.
    """

    def __init__(self, tokens, config):
        frequency = torch.bincount(tokens.long(), minlength=config.vocab_size)
        # The first three special ids are kept however rare they are.
        frequency[:3] = frequency.max() + 1
        self.kept = frequency.topk(config.draft_vocab_size)[1].sort()[0]
        self.t2d = torch.zeros(config.vocab_size, dtype=torch.bool, device=tokens.device)
        self.t2d[self.kept] = True
        self.d2t = self.kept - torch.arange(config.draft_vocab_size, device=tokens.device)
        covered = (frequency[self.kept].sum() / frequency.sum()).item()
        print("draft vocabulary covers", covered)


class Unroll:
    """Runs the frozen target once and then the draft `steps` times on its own hidden states."""

    def __init__(self, target, draft, vocabulary, steps):
        self.target = target
        self.target_forward = torch.compile(target)
        self.draft = draft
        self.vocabulary = vocabulary
        self.steps = steps

    def __call__(self, ids):
        """Return the loss and the share of first choices equal to the target's, for each step."""
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            hidden, _, _, captured = self.target_forward(ids, tuple(CAPTURE))
            logits = self.target.lm_head(hidden).float()
            captured = torch.cat(captured, -1)
        losses, matches, past = [], [], []
        with torch.autocast("cuda", dtype=torch.bfloat16):
            hidden = self.draft.fc(captured)
            for step in range(self.steps):
                # Column t reads token t + 1 + step and drafts the one after it.
                tokens = ids.roll(-1 - step, 1)
                positions = torch.arange(ids.shape[1], device=ids.device) + step
                embedding = self.target.embed_tokens(tokens).to(hidden.dtype)
                hidden = self.draft.midlayer(embedding, hidden, positions, past)
                output = self.draft.lm_head(self.draft.norm(hidden)).float()
                loss, match = self._score(output, logits.roll(-1 - step, 1), step)
                losses.append(loss)
                matches.append(match)
        return losses, matches

    def _score(self, output, logits, step):
        kept = self.vocabulary.kept
        length = logits.shape[1]
        best = logits.argmax(-1)
        usable = self.vocabulary.t2d[best]
        usable[:, length - 1 - step :] = False
        probabilities = logits[..., kept].softmax(-1)
        cross_entropy = -(probabilities * output.log_softmax(-1)).sum(-1)
        loss = (cross_entropy * usable).sum() / usable.sum()
        hit = kept[output.argmax(-1)] == best
        valid = torch.ones_like(hit)
        valid[:, length - 1 - self.steps :] = False
        return loss, (hit & valid).sum() / valid.sum()


def windows_of(tokens, count, length):
    """Return `count` windows of `length` tokens from random places."""
    return random_windows(tokens, count, length)[:, :length]


def train_for(arguments, draft, unroll, tokens):
    """Train for `arguments.minutes`, counted from the end of the first step, which compiles."""
    optimizer = torch.optim.AdamW(
        draft.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    start = None
    step = 0
    while True:
        fraction = 0.0 if start is None else (time.time() - start) / (arguments.minutes * 60)
        if fraction >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * min(1, (step + 1) / 100) * max(0.02, 1 - fraction)
        losses, matches = unroll(windows_of(tokens, arguments.batch, arguments.seq))
        sum(loss * STEP_DECAY**index for index, loss in enumerate(losses)).backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if start is None:
            torch.cuda.synchronize()
            start = time.time()
        if step % REPORT_STEPS == 0:
            print(
                f"step {step} t {time.time() - start:.0f}s",
                f"loss {[round(loss.item(), 3) for loss in losses]}",
                f"top-1 match by step {[round(match.item(), 3) for match in matches]}",
                flush=True,
            )


def export(draft, vocabulary, out):
    """Write the draft's checkpoint."""
    tensors = {
        name: value.detach().bfloat16().cpu().contiguous()
        for name, value in draft.state_dict().items()
    }
    tensors["d2t"] = vocabulary.d2t.cpu()
    tensors["t2d"] = vocabulary.t2d.cpu()
    save_file(tensors, os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(out, "config.json"), "w") as file:
        json.dump(DRAFT, file, indent=1)


def parse_arguments():
    """Return the command line's settings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    parser.add_argument("--target")
    parser.add_argument("--out")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


def main():
    """Train, validate and export."""
    arguments = parse_arguments()
    os.makedirs(arguments.out, exist_ok=True)
    torch.manual_seed(0)
    config = Config(DRAFT)
    target = Model(Config(CONFIG))
    target.load_state_dict(torch.load(os.path.join(arguments.target, "state.pt")))
    target.to("cuda").eval().requires_grad_(False)
    train, validation = load_tokens(arguments.data, "cuda")
    vocabulary = DraftVocabulary(train, config)
    draft = Draft(config).to("cuda")
    unroll = Unroll(target, draft, vocabulary, arguments.steps)
    train_for(arguments, draft, unroll, train)

    draft.eval()
    with torch.no_grad():
        torch.manual_seed(1)
        matches = torch.stack(
            [torch.stack(unroll(windows_of(validation, 32, arguments.seq))[1]) for _ in range(8)]
        ).mean(0)
    rounded = [round(match, 3) for match in matches.tolist()]
    print("validation top-1 match by step", rounded)
    export(draft, vocabulary, arguments.out)


if __name__ == "__main__":
    main()
