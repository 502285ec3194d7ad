"""Train a byte-level BPE tokenizer of 4096 entries and write the text as a stream of its tokens.

Usage: prepare_tokens.py --out DIR text1.txt [text2.txt ...]

Writes DIR/tokenizer.json, DIR/tokenizer_config.json, DIR/generation_config.json and
DIR/tokens.bin (little-endian uint16). A document is '<|user|>QUESTION<|assistant|>ANSWER' or
plain text; documents are separated by a line <|endoftext|>.
"""

import argparse
import json
import os
import random

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = [
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<|im_end|>",
    "<|im_system|>",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|im_' + m['role'] + '|>' }}{{ m['role'] }}<|im_middle|>{{ m['content'] }}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
TOKENIZER_CONFIG = dict(
    tokenizer_class="PreTrainedTokenizerFast",
    bos_token="[BOS]",
    eos_token="[EOS]",
    pad_token="[PAD]",
    model_max_length=2048,
    clean_up_tokenization_spaces=False,
    chat_template=TEMPLATE,
    additional_special_tokens=SPECIAL[3:],
)
GENERATION_CONFIG = dict(bos_token_id=0, eos_token_id=[1, 6], pad_token_id=2, do_sample=False)
VOCABULARY_SIZE = 4096
TOKENIZER_DOCUMENTS = 60000
BATCH_DOCUMENTS = 20000


def documents(files):
    """Yield each document of the files, without the line ends around it."""
    for file in files:
        with open(file, encoding="utf-8") as source:
            text = source.read()
        for document in text.split("<|endoftext|>"):
            document = document.strip("\n")
            if document:
                yield document


def plain_text(document):
    """Return the part of a document that the tokenizer is trained on: the answer, or all."""
    if document.startswith("<|user|>"):
        return document.split("<|assistant|>")[-1]
    return document


def with_marks(document):
    """Return a document with the special tokens that the model sees."""
    if not document.startswith("<|user|>"):
        return f"[BOS]{document}[EOS]"
    question, answer = document[len("<|user|>") :].split("<|assistant|>", 1)
    return (
        f"[BOS]<|im_user|>user<|im_middle|>{question}<|im_end|>"
        f"<|im_assistant|>assistant<|im_middle|>{answer}<|im_end|>[EOS]"
    )


def train_tokenizer(texts):
    """Return a byte-level BPE tokenizer in which every byte is covered."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer, texts):
    """Return the tokens of all texts, one after the other, as one uint16 array."""
    parts = []
    for first in range(0, len(texts), BATCH_DOCUMENTS):
        batch = [with_marks(text) for text in texts[first : first + BATCH_DOCUMENTS]]
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            parts.append(np.array(encoding.ids, dtype=np.uint16))
    return np.concatenate(parts)


def write_json(directory, name, value):
    """Write `value` as directory/name."""
    with open(os.path.join(directory, name), "w") as file:
        json.dump(value, file, indent=1)


def main():
    """Train the tokenizer, then write the tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    os.makedirs(arguments.out, exist_ok=True)

    texts = list(documents(arguments.files))
    # The order matters twice: the tokenizer sees the first documents, validation is the end.
    random.Random(0).shuffle(texts)
    tokenizer = train_tokenizer(plain_text(text) for text in texts[:TOKENIZER_DOCUMENTS])
    tokenizer.save(os.path.join(arguments.out, "tokenizer.json"))
    write_json(arguments.out, "tokenizer_config.json", TOKENIZER_CONFIG)
    write_json(arguments.out, "generation_config.json", GENERATION_CONFIG)

    ids = token_stream(tokenizer, texts)
    ids.tofile(os.path.join(arguments.out, "tokens.bin"))
    characters = sum(len(with_marks(text)) for text in texts)
    print(
        f"documents {len(texts)} tokens {len(ids) / 1e6} M",
        f"characters a token {characters / len(ids)}",
    )


if __name__ == "__main__":
    main()
