"""Small corpora of every kind, and the stores that are built from them."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dantinox.config import Config, TokenizerSection, build_config
from dantinox.text import Tokenizer, build_store, conversations, corpus, train_tokenizer
from dantinox.text.token_pieces import byte_letters

WORDS = [
    "Nel",
    "mezzo",
    "del",
    "cammin",
    "di",
    "nostra",
    "vita",
    "é",
    "ß",
    "猫",
    "<eos>",
    "😀",
    "mi",
    "ritrovai",
    "x",
]
SEPARATORS = (" ", " ", " ", "\n", "\n\n", "  ", "\t", ".\r\n")
MERGES = "n e|e l|m e|z z|me zz|mezz o|Ġ d|Ġ m|Ġm i|c a|ca m|i t|v it|vit a|Ã ©|Ċ n|r i"


def text_of(random_: random.Random, words: int) -> str:
    return "".join(random_.choice(WORDS) + random_.choice(SEPARATORS) for _ in range(words))


def write_corpora(folder: Path) -> None:
    """Writes texts, JSON Lines, conversations, preferences, labeled completions and prompts."""
    chance = random.Random(1)
    for name, words in (("one.txt", 300), ("two.md", 5), ("three.txt", 120)):
        (folder / name).write_text(text_of(chance, words), encoding="utf-8", newline="")
    texts = [text_of(chance, chance.choice((1, 2, 3, 8, 60))) for _ in range(50)]
    lines = [
        json.dumps({"text": text, "n": [1, {"a": "b"}]}, ensure_ascii=number % 2 == 0)
        for number, text in enumerate(texts)
    ]
    (folder / "records.jsonl").write_text(
        "\n".join([*lines[:7], "", '{"text": ""}', *lines[7:]]), encoding="utf-8"
    )
    (folder / "more.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts[9:2:-1])
    )
    records: dict[str, list[dict]] = {"sft": [], "dpo": [], "kto": [], "grpo": []}
    for number in range(14):
        turns = [
            {"role": ("user", "assistant")[i % 2], "content": text_of(chance, 3)}
            for i in range(2 * (1 + number % 3))
        ]
        turns = [{"role": "system", "content": "Kurz."}] * (number % 2) + turns
        turns[-1] |= {"weight": 1}
        records["sft"].append({"messages": turns})
        prompt = text_of(chance, 4)
        records["dpo"].append(
            {"prompt": prompt, "chosen": text_of(chance, 2), "rejected": text_of(chance, 5)}
        )
        records["kto"].append(
            {"prompt": f"{number // 2}", "completion": text_of(chance, 2), "label": number % 3 > 0}
        )
        records["grpo"].append({"prompt": prompt, "answer": number})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    records["sft"].insert(
        3,
        {
            "messages": [*turns, {"role": "tool", "content": "7"}, *turns[:1], turns[1]],
            "tools": [tool],
        },
    )
    for name, made in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made))


def tokenizers() -> dict[str, Tokenizer]:
    """Returns a tokenizer of every kind whose tokens do not depend on the version of the tokenizers
    library.
    """
    made = {"byte": train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))}
    letters = "".join(sorted(set(" ".join(WORDS) + "".join(SEPARATORS) + "Kurz.0123456789")))
    char = TokenizerSection(tokenizer_type="char", byte_fallback=True)
    made["char"] = train_tokenizer(char, lambda: iter([letters]))
    merges = [tuple(pair.split()) for pair in MERGES.split("|")]
    vocab = {
        piece: number
        for number, piece in enumerate([*byte_letters(), *("".join(pair) for pair in merges)])
    }
    for kind in ("bpe", "other"):
        core = Core(models.BPE(vocab=vocab, merges=merges))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        if kind == "other":
            core.normalizer = normalizers.Lowercase()
        core.add_special_tokens(["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"])
        made[kind] = Tokenizer(core.to_str())
        assert made[kind].kind == kind
    return made


TEXTS = {
    "folder": {"data.path": "texts"},
    "records": {"data.path": "records.jsonl", "data.val_fraction": 0.3},
    "one": {"data.path": "one.txt"},
    "list": {"data.path": ["records.jsonl", "one.txt", "more.jsonl"]},
    "mixture": {
        "data.path": ["one.txt", "records.jsonl", "three.txt"],
        "data.mixture": [1, 2, 1],
        "data.val_fraction": 0.2,
    },
    "val_path": {
        "data.path": ["more.jsonl", "three.txt"],
        "data.mixture": [1, 1],
        "data.val_path": "records.jsonl",
    },
}
CONVERSATIONS = {
    "sft": {"data.path": "sft.jsonl", "data.val_fraction": 0.2},
    "dpo": {"data.path": "dpo.jsonl"},
    "kto": {"data.path": "kto.jsonl", "data.val_fraction": 0.3},
    "grpo": {
        "data.path": "grpo.jsonl",
        "generation.max_new_tokens": 8,
        "grpo.rewards": ["exact_match"],
    },
    "sft mixture": {
        "data.path": ["sft.jsonl", "sft.jsonl"],
        "data.mixture": [1, 3],
        "data.chat_template": "chatml",
    },
    "sft val_path": {
        "data.path": "sft.jsonl",
        "data.val_path": "sft.jsonl",
        "data.chat_template": "chatml",
    },
}


def cases(folder: Path) -> Iterator[tuple[str, Tokenizer, Config]]:
    """Yields a name, a tokenizer and the settings of each store."""
    (folder / "texts").mkdir()
    write_corpora(folder)
    for name in ("one.txt", "two.md", "three.txt"):
        (folder / "texts" / name).write_bytes((folder / name).read_bytes())
    for kind, tokenizer in tokenizers().items():
        for name, given in (TEXTS | CONVERSATIONS).items():
            if given.get("data.chat_template") == "chatml" and kind in ("byte", "char"):
                continue
            paths = {key: given[key] for key in ("data.path", "data.val_path") if key in given}
            at = {
                key: (
                    [str(folder / p) for p in path]
                    if isinstance(path, list)
                    else str(folder / path)
                )
                for key, path in paths.items()
            }
            base = {
                "tokenizer.tokenizer_type": "byte",
                "model.max_context": 256,
                "training.batch_size": 1,
            }
            if name in CONVERSATIONS:
                base["training.objective"] = name.split()[0]
            if name in ("dpo", "kto", "grpo"):
                base["training.init_from"] = "x"
            if name in TEXTS:
                base["model.max_context"] = 8
            yield f"{name}, {kind}", tokenizer, build_config({}, base | given | at)


def use_small_blocks(patch: pytest.MonkeyPatch) -> None:
    """Makes the blocks of reading and encoding so small that small corpora have many of them."""
    patch.setattr(build_store, "CHUNK_CHARACTERS", 50)
    patch.setattr(build_store, "BATCH_CHARACTERS", 300)
    patch.setattr(corpus, "BLOCK_BYTES", 90)
    patch.setattr(build_store, "BATCH_EXAMPLES", 3)
    patch.setattr(conversations, "BATCH_EXAMPLES", 3)


def content_digest(directory: Path) -> str:
    """Returns the SHA-256 of all files of a store; of the header, only what does not depend on
    versions of libraries.
    """
    header = json.loads((directory / "tokens.json").read_text())
    parts = [
        json.dumps(
            {
                key: header[key]
                for key in sorted(header)
                if key not in ("tokenizer", "options", "sources")
            }
        )
    ]
    for key in ("file", "marks", "records"):
        if key in header:
            parts.append(hashlib.sha256((directory / header[key]).read_bytes()).hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
