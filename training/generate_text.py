"""Write simple English stories and short answers, to train the demo model on.

The writer is SmolLM2-135M-Instruct (Apache-2.0), read from a GGUF file. Its prompts are put
together at random out of the word lists below. Documents are separated by a line <|endoftext|>.

Usage: generate_text.py --gguf FILE --out text.txt --minutes 5
"""

import argparse
import copy
import os
import random
import time

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

NOUNS = """
cat dog bird fish frog mouse rabbit fox bear lion tiger horse cow pig sheep duck hen goat bee ant
spider snake turtle owl wolf deer squirrel monkey elephant whale dolphin crab snail butterfly
dragon giant king queen prince princess farmer baker doctor teacher sailor pilot painter singer
dancer cook builder driver soldier nurse child baby boy girl friend brother sister mother father
grandmother grandfather uncle aunt neighbour house castle tower bridge road river lake sea beach
island mountain hill forest tree flower garden park farm field barn village town city school shop
market kitchen bedroom window door key box bag hat coat shoe sock shirt dress ring crown sword
shield drum bell flute guitar piano song book letter map picture paint brush pencil paper lamp
candle fire stone rock sand mud rain snow wind cloud sun moon star rainbow storm apple pear plum
cherry orange lemon banana grape bread cake pie cookie soup cheese milk honey sugar salt egg rice
corn carrot potato onion bean nut berry ball doll kite toy puzzle game swing slide boat ship train
car truck bus bicycle plane rocket robot clock watch mirror rope ladder net basket bucket cup
plate spoon bowl bottle blanket pillow bed chair table rug nest egg feather leaf root seed shell
pond path fence gate wheel
""".split()
VERBS = """
run jump climb swim fly hide seek find lose build break fix paint draw sing dance play help share
give take carry push pull throw catch kick dig plant grow water pick cook bake eat drink wash
clean sweep open close lock knock ring listen look watch read write count learn teach ask answer
tell whisper shout laugh cry smile hug thank forgive promise wait wonder dream sleep wake travel
sail ride drive follow lead chase race win trade buy sell save spend collect guard rescue heal
visit invite surprise
""".split()
ADJECTIVES = """
big small tiny huge tall short long round flat soft hard smooth rough warm cold hot cool wet dry
clean dirty shiny bright dark quiet loud fast slow happy sad angry scared brave shy kind mean
gentle strong weak wise silly clever lazy busy hungry thirsty tired sleepy lonely lucky curious
careful careless honest proud polite patient old young new broken lost hidden secret magic golden
silver red blue green yellow purple white black brown pink sweet sour salty bitter fresh funny
strange beautiful ugly rich poor
""".split()
NAMES = """
Tom Sam Ben Max Leo Jack Tim Bob Joe Dan Anna Lily Mia Sara Lucy Emma Nora Ella Rose Kate Amy Zoe
Ruby Finn Omar Ali Ravi Mei Yuki Lena Ivan Olga Hugo Rosa Juan Kofi Ada Nina Otto Freya Noah Ines
Tara Kiran
""".split()
TOPICS = [
    "why the sky is blue",
    "how rain is made",
    "why leaves fall in autumn",
    "how bees make honey",
    "what a volcano is",
    "how a seed becomes a plant",
    "why we sleep",
    "how birds fly",
    "what the moon is",
    "why the sea is salty",
    "how bread is made",
    "what a map is for",
    "how a bicycle works",
    "why we brush our teeth",
    "what a friend is",
    "how to say sorry",
    "how to make a sandwich",
    "how to make tea",
    "how to plant a tree",
    "how to tidy a room",
    "what a doctor does",
    "what a farmer does",
    "how fish breathe",
    "why cats purr",
    "why dogs wag their tails",
    "how a boat floats",
    "what ice is",
    "how a clock works",
    "what a library is",
    "how to be polite",
    "why we say thank you",
    "how to share toys",
    "what winter is like",
    "what summer is like",
    "how a letter travels",
    "what a bridge is for",
    "how paper is made",
    "where milk comes from",
    "how wind is made",
    "what a shadow is",
    "why we need water",
    "how to count to ten",
    "what colours are",
    "how to make a paper boat",
    "how to draw a house",
    "how to feed a bird",
    "how to find north",
    "what a compass is",
    "how a kite flies",
    "why stars twinkle",
    "what a desert is",
    "what a forest is",
    "how to cross a road",
    "how to make soup",
    "how to fold a shirt",
    "what music is",
    "what money is",
]
STORY = [
    "Write a short simple story for young children about a {a} {n} who wants to {v}.",
    "Tell a very short story in simple words about {name} and a {a} {n}.",
    "Write a short children's story that uses the words {n}, {n2} and {v}.",
    "Tell a bedtime story about {name}, who finds a {a} {n} near the {n2}.",
    "Write a short fable about a {a} {n} and a {a2} {n2}, with a lesson at the end.",
    "Write a short story with a happy ending. {name} is {a} and likes to {v} with a {n}.",
]
ASK = [
    "Explain in simple words {t}.",
    "Tell a child {t}, in a few short sentences.",
    "In three sentences, explain {t}.",
    "What is a {n}? Answer in simple words.",
    "Describe a {a} {n} in a few simple sentences.",
    "What can you do with a {n}? Give three short ideas.",
    "Write a short dialogue between {name} and {name2} about a {a} {n}.",
    "Write a short poem about a {a} {n}.",
    "Give simple steps to {v} a {n}.",
]

SYSTEM_MESSAGE = "You are a helpful assistant who writes short simple English."
TEMPERATURE = 0.7
TOP_K = 40
TOP_P = 0.92
PREFILL_SLICE = 512
DOCUMENT_CHARACTERS_MIN = 80
MASKED = -1e9


def prompt(random_source):
    """Return one request: a story in 60 % of the cases, else a question."""
    if random_source.random() < 0.6:
        template = random_source.choice(STORY)
    else:
        template = random_source.choice(ASK)
    # The order of these draws is part of the recipe: a seed gives the same prompts only with it.
    return template.format(
        a=random_source.choice(ADJECTIVES),
        a2=random_source.choice(ADJECTIVES),
        n=random_source.choice(NOUNS),
        n2=random_source.choice(NOUNS),
        v=random_source.choice(VERBS),
        name=random_source.choice(NAMES),
        name2=random_source.choice(NAMES),
        t=random_source.choice(TOPICS),
    )


class Llama:
    """Batched decoding over a preallocated key/value cache.

    Prompts are padded on the left to one length, so every row writes the same cache columns.
    """

    def __init__(self, hugging_face_model):
        self.config = hugging_face_model.config
        state = hugging_face_model.state_dict()
        self.weights = {name: value.cuda().bfloat16() for name, value in state.items()}
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights.get("lm_head.weight", self.embedding)
        self.head_dim = self.config.hidden_size // self.config.num_attention_heads
        rope = getattr(self.config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta", getattr(self.config, "rope_theta", 10000.0))
        exponents = torch.arange(0, self.head_dim, 2, device="cuda").float() / self.head_dim
        self.inverse_frequencies = 1.0 / theta**exponents
        print("rope theta", theta, "layers", self.config.num_hidden_layers)

    def start(self, batch, length):
        """Allocate a cache of `length` columns for `batch` rows."""
        shape = (batch, self.config.num_key_value_heads, length, self.head_dim)
        self.keys = [
            torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
            for _ in range(self.config.num_hidden_layers)
        ]
        self.values = [torch.empty_like(key) for key in self.keys]

    def rows(self, part):
        """Return a view of this decoder that holds the cache of the rows in the slice `part`."""
        view = copy.copy(self)
        view.keys = [key[part] for key in self.keys]
        view.values = [value[part] for value in self.values]
        return view

    def step(self, ids, positions, column, mask):
        """Run `ids` (B, T) and return the logits of the last column (B, vocabulary).

        `positions` is (B, T); `column` is the cache column of the first id; `mask` is additive,
        (B, 1, T, column + T).
        """
        x = self.embedding[ids]
        angles = positions[..., None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        cos = angles.cos().bfloat16()
        sin = angles.sin().bfloat16()
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm.weight")
            x = x + self._attention(layer, normed, cos, sin, column, mask)
            normed = self._norm(x, prefix + "post_attention_layernorm.weight")
            x = x + self._mlp(prefix + "mlp.", normed)
        return F.linear(self._norm(x[:, -1], "model.norm.weight"), self.head)

    def _norm(self, x, name):
        size = (self.config.hidden_size,)
        return F.rms_norm(x, size, self.weights[name], self.config.rms_norm_eps)

    def _mlp(self, prefix, x):
        gate = F.silu(F.linear(x, self.weights[prefix + "gate_proj.weight"]))
        up = F.linear(x, self.weights[prefix + "up_proj.weight"])
        return F.linear(gate * up, self.weights[prefix + "down_proj.weight"])

    def _rotate(self, x, cos, sin):
        half = self.head_dim // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def _project(self, x, name, heads):
        batch, length, _ = x.shape
        y = F.linear(x, self.weights[name])
        return y.view(batch, length, heads, self.head_dim).transpose(1, 2)

    def _attention(self, layer, x, cos, sin, column, mask):
        batch, length, _ = x.shape
        heads = self.config.num_attention_heads
        key_heads = self.config.num_key_value_heads
        prefix = f"model.layers.{layer}.self_attn."
        query = self._rotate(self._project(x, prefix + "q_proj.weight", heads), cos, sin)
        key = self._rotate(self._project(x, prefix + "k_proj.weight", key_heads), cos, sin)
        value = self._project(x, prefix + "v_proj.weight", key_heads)
        self.keys[layer][:, :, column : column + length] = key
        self.values[layer][:, :, column : column + length] = value
        keys = self.keys[layer][:, :, : column + length]
        values = self.values[layer][:, :, : column + length]
        if length == 1:
            # The queries of a group become extra rows of one product.
            query = query.view(batch, key_heads, heads // key_heads, self.head_dim)
            scores = (query @ keys.transpose(-1, -2)).float() * self.head_dim**-0.5 + mask
            mixed = (scores.softmax(-1).bfloat16() @ values).view(batch, 1, -1)
        else:
            mixed = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, enable_gqa=True
            )
            mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        return F.linear(mixed, self.weights[prefix + "o_proj.weight"])


def sample(logits):
    """Draw one id a row: temperature, then top-k, then top-p."""
    probabilities, ids = (logits.float() / TEMPERATURE).topk(TOP_K, -1)
    probabilities = probabilities.softmax(-1)
    cumulative = probabilities.cumsum(-1)
    probabilities = probabilities.masked_fill(cumulative - probabilities > TOP_P, 0.0)
    return ids.gather(1, torch.multinomial(probabilities, 1))[:, 0]


def encode(tokenizer, requests):
    """Return the token ids of each request in the writer's chat format."""
    return [
        tokenizer.encode(
            f"<|im_start|>system\n{SYSTEM_MESSAGE}<|im_end|>\n"
            f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n",
            add_special_tokens=False,
        )
        for request in requests
    ]


def prefill(model, ids, padding, padding_mask):
    """Run the prompts in slices, to bound memory; return the logits of each last token."""
    batch, length = ids.shape
    columns = torch.arange(length, device="cuda")
    causal = torch.full((length, length), MASKED, device="cuda").triu(1)
    logits = []
    for first in range(0, batch, PREFILL_SLICE):
        part = slice(first, first + PREFILL_SLICE)
        mask = padding_mask[part, None, None, :length] + causal
        mask = mask.clamp(min=MASKED).bfloat16()
        positions = (columns[None] - padding[part, None]).clamp(min=0)
        logits.append(model.rows(part).step(ids[part], positions, 0, mask))
    return torch.cat(logits)


def answer(model, prompts, new_tokens, end, end_of_text):
    """Sample an answer to each prompt.

    Returns the ids (rows of `new_tokens`, filled up with `end`) and whether each row ended by
    itself.
    """
    batch = len(prompts)
    length = max(map(len, prompts))
    ids = torch.full((batch, length), end_of_text, dtype=torch.long)
    padding = torch.tensor([length - len(tokens) for tokens in prompts])
    for row, tokens in enumerate(prompts):
        ids[row, length - len(tokens) :] = torch.tensor(tokens)
    ids, padding = ids.cuda(), padding.cuda()

    total = length + new_tokens
    model.start(batch, total)
    columns = torch.arange(total, device="cuda")
    padding_mask = torch.zeros(batch, total, device="cuda", dtype=torch.float32)
    padding_mask = padding_mask.masked_fill(columns[None] < padding[:, None], MASKED)
    logits = prefill(model, ids, padding, padding_mask)

    generated = torch.full((batch, new_tokens), end, device="cuda")
    done = torch.zeros(batch, dtype=torch.bool, device="cuda")
    for step in range(new_tokens):
        chosen = sample(logits)
        chosen = torch.where(done, torch.full_like(chosen, end), chosen)
        generated[:, step] = chosen
        done |= (chosen == end) | (chosen == end_of_text)
        # Asking the device whether all rows are done waits for it, so ask rarely.
        if step + 1 == new_tokens or (step % 16 == 0 and bool(done.all())):
            break
        column = length + step
        mask = padding_mask[:, None, None, : column + 1]
        logits = model.step(chosen[:, None], (column - padding)[:, None], column, mask)
    return generated.cpu().tolist(), done.cpu().tolist()


def document(request, text, finished):
    """Return the document of one answer, or None if it is too short or not plain ASCII."""
    if not finished:
        # Cut an unfinished answer at its last full sentence.
        text = text[: text.rfind(".") + 1]
    if len(text) > DOCUMENT_CHARACTERS_MIN and text.isascii():
        return f"<|user|>{request}<|assistant|>{text}\n<|endoftext|>\n"
    return None


def parse_arguments():
    """Return the command line's settings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gguf")
    parser.add_argument("--out")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--batch", type=int, default=6144)
    parser.add_argument("--new", type=int, default=230)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@torch.no_grad()
def main():
    """Write documents until the time is up."""
    arguments = parse_arguments()
    directory, file = os.path.split(arguments.gguf)
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=file)
    model = Llama(
        AutoModelForCausalLM.from_pretrained(directory, gguf_file=file, dtype=torch.bfloat16)
    )
    random_source = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    print("end", end, end_of_text, flush=True)

    documents = tokens = rounds = 0
    start = time.time()
    with open(arguments.out, "w") as out:
        while time.time() - start < arguments.minutes * 60:
            requests = [prompt(random_source) for _ in range(arguments.batch)]
            prompts = encode(tokenizer, requests)
            rows, finished = answer(model, prompts, arguments.new, end, end_of_text)
            for request, row, row_finished in zip(requests, rows, finished):
                length = row.index(end) if end in row else len(row)
                text = tokenizer.decode(row[:length]).strip()
                written = document(request, text, row_finished)
                if written is not None:
                    out.write(written)
                    documents += 1
                    tokens += length
            rounds += 1
            out.flush()
            print(
                f"round {rounds} documents {documents} Mtok {tokens / 1e6:.1f}",
                f"finished {sum(finished) / len(finished):.2f}",
                f"{tokens / (time.time() - start):.0f} tok/s",
                flush=True,
            )
    with open(arguments.out) as out:
        print(out.read(3000))


if __name__ == "__main__":
    main()
