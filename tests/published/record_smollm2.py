"""Records the results of transformers and llama.cpp for the file of `dantinox import smollm2`, for
test_smollm2.py.

    python -m tests.published.record_smollm2 MODEL.gguf FLOAT32.gguf

MODEL.gguf is the published file, FLOAT32.gguf its export with `dantinox export --format gguf`. It
needs torch, transformers, gguf and llama-cpp-python. Token ids are those of llama.cpp:
transformers' reader of GGUF does not split digits.
"""

import hashlib
import itertools
import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import torch
import transformers

from .samples import CONVERSATIONS, LINES, PROMPTS, TEXTS

NEW, TOP, PLACES = 100, 5, 8


def main(published: Path, float32: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(published.parent), gguf_file=published.name, dtype=torch.float32
    ).eval()
    peer = llama_cpp.Llama(str(float32), n_ctx=4096, verbose=False, n_threads=2)

    def encode(text: str) -> list[int]:
        return peer.tokenize(text.encode(), add_bos=False, special=False)

    with torch.no_grad():
        found = {
            "versions": {
                name.__name__: name.__version__ for name in (transformers, torch, llama_cpp)
            },
            "lines": [encode(line) for line in LINES],
            "texts": [describe_text(model, encode(text)) for text in TEXTS],
            "greedy": [continue_greedily(model, peer, encode(prompt)) for prompt in PROMPTS],
            "conversations": [render_conversation(peer, messages) for messages in CONVERSATIONS],
        }
    Path(__file__).with_name("smollm2.json").write_text(
        json.dumps(found, indent=1) + "\n", encoding="utf-8"
    )


def describe_text(model, ids: list[int]) -> dict:
    """Returns a text's tokens and mean loss, its most likely next tokens, and the largest logits at
    some positions.
    """
    logits = model(torch.tensor([ids])).logits[0].numpy()
    places = np.unique(np.linspace(0, len(ids) - 1, PLACES).astype(int))
    top = np.argsort(-logits[places], axis=1)[:, :TOP]
    nats = -torch.log_softmax(torch.from_numpy(logits[:-1]), -1)[range(len(ids) - 1), ids[1:]]
    return {
        "ids": hashlib.sha256(np.array(ids, "<u4").tobytes()).hexdigest(),
        "count": len(ids),
        "nats": float(nats.double().mean()),
        "likeliest": hashlib.sha256(logits.argmax(-1).astype("<u4").tobytes()).hexdigest(),
        "places": places.tolist(),
        "top": top.tolist(),
        "logits": np.round(np.take_along_axis(logits[places], top, 1).astype(float), 5).tolist(),
    }


def continue_greedily(model, peer, ids: list[int]) -> dict:
    """Returns the greedy tokens of both libraries. Stop tokens do not end the generation."""
    tokens = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=NEW, eos_token_id=-1, pad_token_id=0
    )
    peer.reset()
    peer_tokens = list(itertools.islice(peer.generate(ids, temp=0.0, repeat_penalty=1.0), NEW))
    return {"transformers": tokens[0, len(ids) :].tolist(), "llama.cpp": peer_tokens}


def render_conversation(peer, messages: list[dict]) -> dict:
    """Returns a conversation rendered by transformers' Jinja environment."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = peer.metadata["tokenizer.chat_template"]
    texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True)
    return {"text": texts[0]}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
