"""Damaged and inconsistent checkpoints: changes to a GGUF file and to a folder with safetensors
that an import must reject.

`test_damaged.py` applies these changes to small checkpoints, `damaged_live.py` to a published
checkpoint.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dantinox.interop.gguf.ggml_types import TYPES

SIZES = {
    0: 1,
    1: 1,
    2: 2,
    3: 2,
    4: 4,
    5: 4,
    6: 4,
    7: 1,
    10: 8,
    11: 8,
    12: 8,
}  # bytes of a value in GGUF, by type
FAR = 1 << 63


class EditableGGUF:
    """A GGUF file that can be edited: `values` and `tensors` are lists of (name, bytes after the
    name).
    """

    def __init__(self, content: memoryview) -> None:
        self.content, self.at = content, 4
        self.magic, self.version = b"GGUF", self._number(4)
        tensors, values = self._number(8), self._number(8)
        self.values = [(self._text(), self._value()) for _ in range(values)]
        self.tensors = [(self._text(), self._info()) for _ in range(tensors)]
        self.tensor_count, self.value_count = tensors, values
        self.data = content[-(-self.at // 32) * 32 :]

    def _take(self, size: int) -> bytes:
        self.at += size
        return bytes(self.content[self.at - size : self.at])

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _text(self) -> bytes:
        return self._take(self._number(8))

    def _value(self) -> bytes:
        start = self.at
        kind = self._number(4)
        if kind == 9:
            inner, count = self._number(4), self._number(8)
            if inner == 8:
                for _ in range(count):
                    self._text()
            else:
                self.at += count * SIZES[inner]
        elif kind == 8:
            self._text()
        else:
            self.at += SIZES[kind]
        return bytes(self.content[start : self.at])

    def _info(self) -> bytes:
        start = self.at
        axes = self._number(4)
        self.at += 8 * axes + 12
        return bytes(self.content[start : self.at])

    def index(self, name: str) -> tuple[list, int]:
        for entries in (self.values, self.tensors):
            for place, (other, _) in enumerate(entries):
                if other == name.encode():
                    return entries, place
        raise KeyError(name)

    def get(self, name: str) -> bytes:
        entries, place = self.index(name)
        return entries[place][1]

    def set(self, name: str, content: bytes) -> None:
        try:
            entries, place = self.index(name)
            entries[place] = (name.encode(), content)
        except KeyError:
            self.add(name, content)

    def add(self, name: str, content: bytes) -> None:
        self.values.append((name.encode(), content))
        self.value_count += 1

    def info(self, name: str) -> tuple[list[int], int, int]:
        content = self.get(name)
        axes = struct.unpack_from("<I", content)[0]
        shape = list(struct.unpack_from(f"<{axes}Q", content, 4))
        return shape, *struct.unpack_from("<IQ", content, 4 + 8 * axes)

    def describe(
        self, name: str, shape: list[int], kind: int, offset: int, axes: int | None = None
    ) -> None:
        count = len(shape) if axes is None else axes
        self.set(name, struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset))

    def patch(self, name: str, at: int, content: bytes) -> None:
        """Changes the data of a tensor."""
        offset = self.info(name)[2] + at
        self.data = memoryview(
            bytes(self.data[:offset]) + content + bytes(self.data[offset + len(content) :])
        )

    def chunks(self) -> Iterator[bytes | memoryview]:
        head = self.magic + struct.pack("<IQQ", self.version, self.tensor_count, self.value_count)
        for name, content in (*self.values, *self.tensors):
            head += struct.pack("<Q", len(name)) + name + content
        yield head.ljust(-(-len(head) // 32) * 32, b"\0")
        yield self.data


def text(value: str) -> bytes:
    return struct.pack("<IQ", 8, len(value.encode())) + value.encode()


def texts(values: list[str]) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(text(value)[4:] for value in values)


def integer(value: int) -> bytes:
    return struct.pack("<Iq", 11, value)


def number(value: float) -> bytes:
    return struct.pack("<If", 6, value)


def words(parts: EditableGGUF, name: str) -> list[str]:
    content = parts.get(name)
    found, at = [], 16
    while at < len(content):
        size = struct.unpack_from("<Q", content, at)[0]
        found.append(content[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return found


TOKENS, MERGES, EMBED = "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "token_embd.weight"
NORM, DOWN = "blk.1.attn_norm.weight", "blk.1.ffn_down.weight"
Change = Callable[[EditableGGUF], object]


def _value(name: str, content: bytes) -> Change:
    return lambda parts: parts.set(name, content)


def _attribute(**changes: object) -> Change:
    return lambda parts: [setattr(parts, name, value) for name, value in changes.items()]


def _info(name: str, **changes) -> Change:
    def change(parts: EditableGGUF) -> None:
        shape, kind, offset = parts.info(name)
        given = {"shape": shape, "kind": kind, "offset": offset}
        changed = {
            key: value(given[key]) if callable(value) else value for key, value in changes.items()
        }
        parts.describe(name, **(given | changed))

    return change


def _rename(name: str, other: str) -> Change:
    def change(parts: EditableGGUF) -> None:
        entries, place = parts.index(name)
        entries[place] = (other.encode(), entries[place][1])

    return change


def _without(name: str) -> Change:
    def change(parts: EditableGGUF) -> None:
        entries, place = parts.index(name)
        del entries[place]
        parts.tensor_count, parts.value_count = len(parts.tensors), len(parts.values)

    return change


def _more(name: str, like: str) -> Change:
    """Adds a tensor after all others."""

    def change(parts: EditableGGUF) -> None:
        shape, kind, _ = parts.info(like)
        parts.tensors.append((name.encode(), b""))
        parts.describe(name, shape, kind, -(-len(parts.data) // 32) * 32)
        parts.data = memoryview(bytes(parts.data) + bytes(1 << 20))
        parts.tensor_count += 1

    return change


def _tokens(change: Callable[[list[str]], list[str]], name: str = TOKENS) -> Change:
    return lambda parts: parts.set(name, texts(change(words(parts, name))))


def _scale(word: int) -> Change:
    """Sets the first scale of a quantized matrix, or its first number, to a float16 word."""

    def change(parts: EditableGGUF) -> None:
        kind = next(kind for kind in TYPES.values() if kind.number == parts.info(DOWN)[1])
        size = 4 if kind.decode is None and kind.block.itemsize == 4 else 2
        parts.patch(DOWN, 0,
                    (np.float32(np.nan).tobytes() if word == 0x7E00 else np.float32(np.inf).tobytes()) if size == 4
                    else struct.pack("<H", word))  # fmt: skip

    return change


GGUF: dict[str, Change] = {
    "magic": _attribute(magic=b"GGML"),
    "version 0": _attribute(version=0),
    "version 1": _attribute(version=1),
    "version 4": _attribute(version=4),
    "other byte order": _attribute(version=3 << 24),
    "2^63 tensors": _attribute(tensor_count=FAR),
    "2^64 - 1 tensors": _attribute(tensor_count=2 * FAR - 1),
    "a tensor too many": lambda parts: setattr(parts, "tensor_count", parts.tensor_count + 1),
    "a tensor too few": lambda parts: setattr(parts, "tensor_count", parts.tensor_count - 1),
    "no tensors": _attribute(tensor_count=0),
    "2^63 values": _attribute(value_count=FAR),
    "a value too many": lambda parts: setattr(parts, "value_count", parts.value_count + 1),
    "a value too few": lambda parts: setattr(parts, "value_count", parts.value_count - 1),
    "no values": _attribute(value_count=0),
    "long text": _value("general.architecture", struct.pack("<IQ", 8, 1 << 40) + b"llama"),
    "text of 2^63 bytes": _value("general.architecture", struct.pack("<IQ", 8, FAR) + b"llama"),
    "array of 2^62 texts": lambda parts: parts.set(TOKENS, struct.pack("<IIQ", 9, 8, 1 << 62)
                                                   + parts.get(TOKENS)[16:]),
    "array of one text more": lambda parts: parts.set(
        TOKENS, struct.pack("<IIQ", 9, 8, len(words(parts, TOKENS)) + 1) + parts.get(TOKENS)[16:]
    ),
    "long token": lambda parts: parts.set(
        TOKENS, parts.get(TOKENS)[:16] + struct.pack("<Q", FAR) + parts.get(TOKENS)[24:]
    ),
    "value of an unknown type": _value("llama.block_count", struct.pack("<IQ", 99, 2)),
    "array of arrays": _value("llama.block_count", struct.pack("<IIQIIQ", 9, 9, 1, 9, 4, 0)),
    "array of an unknown type": _value("llama.block_count", struct.pack("<IIQ", 9, 77, 1)),
    "no UTF-8": _value("general.architecture", struct.pack("<IQ", 8, 2) + b"\xff\xfe"),
    "a value twice": lambda parts: parts.add("llama.block_count", integer(2)),
    "unknown type of a tensor": _info(DOWN, kind=99),
    "removed type of a tensor": _info(DOWN, kind=31),
    "tensor of integers": _info(NORM, kind=26),
    "narrower type": _info(DOWN, kind=2),
    "wider type": _info(EMBED, kind=0),
    "no axes": _info(NORM, axes=0, shape=[]),
    "five axes": _info(DOWN, shape=[32, 1, 1, 1, 32]),
    "2^32 - 1 axes": _info(DOWN, axes=(1 << 32) - 1),
    "an axis of 0": _info(DOWN, shape=lambda shape: [shape[0], 0]),
    "an axis of 2^63": _info(DOWN, shape=lambda shape: [shape[0], FAR]),
    "axes whose product overflows": _info(DOWN, shape=[1 << 40, 1 << 40]),
    "transposed": _info("blk.1.attn_k.weight", shape=lambda shape: shape[::-1]),
    "rows less": _info(EMBED, shape=lambda shape: [shape[0], shape[1] - 1]),
    "misaligned": _info(DOWN, offset=lambda offset: offset + 1),
    "outside": _info(DOWN, offset=1 << 40),
    "offset near 2^64": _info(DOWN, offset=2 * FAR - 32),
    "overlap": lambda parts: _info(DOWN, offset=parts.info(EMBED)[2])(parts),
    "a tensor twice": _rename("blk.1.ffn_up.weight", "blk.1.ffn_gate.weight"),
    "a tensor less": _without("blk.1.ffn_norm.weight"),
    "no embeddings": _without(EMBED),
    "an unknown tensor": _more("blk.1.secret.weight", NORM),
    "a tensor of no layer": _more("blk.99.attn_norm.weight", NORM),
    "a tensor with a strange name": _more("blk.1.attn_norm.weight\n\x1b[31m" * 9, NORM),
    "a token less": _tokens(lambda tokens: tokens[:-1]),
    "a token more": _tokens(lambda tokens: [*tokens, "more"]),
    "a token twice": _tokens(lambda tokens: [*tokens[:-1], tokens[-2]]),
    "no tokens": _without(TOKENS),
    "tokens that are numbers": _value(TOKENS, struct.pack("<IIQ4i", 9, 5, 4, 1, 2, 3, 4)),
    "a token type less": _value("tokenizer.ggml.token_type", struct.pack("<IIQ3i", 9, 5, 3, 1, 1,
        1)),
    "merge of an unknown token": _tokens(lambda merges: [*merges[:-1], "noSuchToken Ġthe"], MERGES),
    "merge into an unknown token": _tokens(lambda merges: [*merges[:-1], "a ~"], MERGES),
    "merge without a space": _tokens(lambda merges: [*merges[:-1], "ab"], MERGES),
    "unknown tokenizer": _value("tokenizer.ggml.model", text("rwkv")),
    "unknown pre-tokenizer": _value("tokenizer.ggml.pre", text("none such")),
    "end of text outside": _value("tokenizer.ggml.eos_token_id", integer(1 << 30)),
    "template of 50 MB": _value("tokenizer.chat_template", text("x" * (50 << 20))),
    "text of 70 MB": lambda parts: parts.add("general.description", text("x" * (70 << 20))),
    "alignment 0": _value("general.alignment", integer(0)),
    "alignment 7": _value("general.alignment", integer(7)),
    "alignment 2^40": _value("general.alignment", integer(1 << 40)),
    "part of several files": _value("split.count", integer(3)),
    "an adapter": _value("general.type", text("adapter")),
    "no architecture": _without("general.architecture"),
    "unknown architecture": _value("general.architecture", text("none")),
    "architecture a number": _value("general.architecture", integer(3)),
    "2^31 layers": _value("llama.block_count", integer(1 << 31)),
    "a layer more": lambda parts: parts.set("llama.block_count", integer(1 + _integer(parts,
        "llama.block_count"))),
    "a layer less": lambda parts: parts.set("llama.block_count", integer(_integer(parts,
        "llama.block_count") - 1)),
    "-1 layers": _value("llama.block_count", integer(-1)),
    "no heads": _value("llama.attention.head_count", integer(0)),
    "7 heads": _value("llama.attention.head_count", integer(7)),
    "wide": _value("llama.embedding_length", integer(1 << 62)),
    "narrow feed-forward": _value("llama.feed_forward_length", integer(8)),
    "context a text": _value("llama.context_length", text("many")),
    "context of 2^62": _value("llama.context_length", integer(1 << 62)),
    "epsilon NaN": _value("llama.attention.layer_norm_rms_epsilon", number(float("nan"))),
    "epsilon negative": _value("llama.attention.layer_norm_rms_epsilon", number(-1.0)),
    "rotary base infinite": _value("llama.rope.freq_base", number(float("inf"))),
    "unknown entry of the model": lambda parts: parts.add("llama.attention.secret", integer(1)),
    "scale NaN": _scale(0x7E00),
    "scale infinite": _scale(0x7C00),
}  # fmt: skip
# Where a GGUF file is truncated: after a fraction of its header, after a fraction of its data, or
# some bytes before its end.
CUTS = {"nothing": 0.0, "magic": 1e-9, "start": 0.001, "values": 0.3, "tokens": 0.6, "infos": 0.999}


def _integer(parts: EditableGGUF, name: str) -> int:
    return int.from_bytes(parts.get(name)[4:], "little")


def damaged_gguf(source: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yields the name of each change, and a function that writes the changed file."""
    content = memoryview(np.memmap(source, np.uint8, mode="r"))  # type: ignore[arg-type]
    whole = EditableGGUF(content)

    def write(change: Change) -> Callable[[Path], None]:
        def to(path: Path) -> None:
            parts = EditableGGUF(content)
            change(parts)
            with open(path, "wb") as file:
                file.writelines(parts.chunks())

        return to

    for name, change in GGUF.items():
        yield name, write(change)
    header = len(content) - len(whole.data)
    ends = {f"cut in {name}": int(header * share) for name, share in CUTS.items()}
    ends |= {
        "cut behind the header": header,
        "half of the data": (header + len(content)) // 2,
        "a byte less": len(content) - 1,
    }
    for name, end in ends.items():
        yield name, lambda path, end=end: path.write_bytes(content[:end])


Folder = Callable[[Path], object]


def _json(name: str, **changes) -> Folder:
    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(
            json.dumps({key: value for key, value in found.items() if value is not None})
        )

    return change


def _content(name: str, content: str | bytes) -> Folder:
    return lambda folder: (folder / name).write_bytes(
        content.encode() if isinstance(content, str) else content
    )


ONE = "model.safetensors"


def _header(
    change: Callable[[dict], object], length: Callable[[int], int] = lambda length: length
) -> Folder:
    """Changes the header of the weights file and its stated length. If `change` returns a string,
    this replaces the header.
    """

    def to(folder: Path) -> None:
        content = (folder / ONE).read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        returned = change(header)
        new = returned if isinstance(returned, str) else json.dumps(header)
        data = new.encode().ljust(size, b" ")
        (folder / ONE).write_bytes(
            length(len(data)).to_bytes(8, "little") + data + content[8 + size :]
        )

    return to


ENTRY = "model.layers.1.mlp.down_proj.weight"
OTHER = "model.layers.1.mlp.up_proj.weight"


def _tensor(**changes) -> Folder:
    def change(header: dict) -> None:
        entry = header[ENTRY]
        entry |= {
            key: value(entry[key]) if callable(value) else value for key, value in changes.items()
        }

    return _header(change)


def _twice(header: dict) -> str:
    return json.dumps(header)[:-1] + f', "{ENTRY}": {json.dumps(header[ENTRY])}}}'


def _first_number(word: bytes) -> Folder:
    def change(folder: Path) -> None:
        content = (folder / ONE).read_bytes()
        size = int.from_bytes(content[:8], "little")
        entry = json.loads(content[8 : 8 + size])[ENTRY]
        start, width = (
            8 + size + entry["data_offsets"][0],
            {"F32": 4, "BF16": 2, "F16": 2}[entry["dtype"]],
        )
        (folder / ONE).write_bytes(content[:start] + word[-width:] + content[start + width :])

    return change


def _cut(end: Callable[[int], int]) -> Folder:
    def change(folder: Path) -> None:
        content = (folder / ONE).read_bytes()
        (folder / ONE).write_bytes(content[: end(len(content))])

    return change


def _index(places: Callable[[list[str]], object]) -> Folder:
    """Writes an index, and renames the weights to the file that it may list."""

    def change(folder: Path) -> None:
        content = (folder / ONE).read_bytes()
        names = [
            name
            for name in json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            if name != "__metadata__"
        ]
        (folder / ONE).rename(folder / "a.safetensors")
        (folder / f"{ONE}.index.json").write_text(json.dumps({"weight_map": places(names)}))

    return change


def _two_shards(folder: Path) -> None:
    _index(
        lambda names: {name: "ab"[place % 2] + ".safetensors" for place, name in enumerate(names)}
    )(folder)
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())


FOLDERS: dict[str, Folder] = {
    "header of 0 bytes": _header(lambda header: None, lambda length: 0),
    "header longer than the file": _header(lambda header: None, lambda length: 1 << 40),
    "header of 2^63 bytes": _header(lambda header: None, lambda length: FAR),
    "header of 2^64 - 1 bytes": _header(lambda header: None, lambda length: 2 * FAR - 1),
    "header 8 bytes longer": _header(lambda header: None, lambda length: length + 8),
    "header 8 bytes shorter": _header(lambda header: None, lambda length: length - 8 * 20),
    "header no JSON": _header(lambda header: json.dumps(header)[:-9]),
    "header an array": _header(lambda header: "[]"),
    "header empty": _header(lambda header: "{}"),
    "header of 100,000 levels": _header(lambda header: '{"a":' * 100_000),
    "array of 100,000 levels": _header(lambda header: '{"a":' + "[" * 100_000),
    "metadata of numbers": _header(lambda header: header.update(__metadata__={"format": 3})),
    "a tensor twice": _header(_twice),
    "unknown dtype": _tensor(dtype="F8"),
    "wider dtype": _tensor(dtype="F64"),
    "narrower dtype": _tensor(dtype="U8"),
    "integers": lambda folder: _tensor(dtype=lambda dtype: {"F32": "I32", "BF16": "I16",
                                                            "F16": "I16"}[dtype])(folder),
    "shape a number": _tensor(shape=7),
    "shape of fractions": _tensor(shape=[1.5, 2]),
    "negative shape": _tensor(shape=lambda shape: [-shape[0], -shape[1]]),
    "shape of 2^40": _tensor(shape=[1 << 40, 1 << 40]),
    "transposed": _tensor(shape=lambda shape: shape[::-1]),
    "flat": _tensor(shape=lambda shape: [shape[0] * shape[1]]),
    "offsets outside": _tensor(data_offsets=lambda offsets: [offsets[0], offsets[1] + (1 << 40)]),
    "offsets reversed": _tensor(data_offsets=lambda offsets: offsets[::-1]),
    "offsets shifted": _tensor(data_offsets=lambda offsets: [offsets[0] + 4, offsets[1] + 4]),
    "overlap": _header(lambda header: header[ENTRY].update(data_offsets=header[OTHER]["data_offsets"])),
    "a tensor less": _header(lambda header: header.pop(ENTRY) and None),
    "a tensor under another name": _header(lambda header: header.update({"model.more": header.pop(ENTRY)})),
    "a tensor of no layer": _header(lambda header: header.update({ENTRY.replace(".1.",
        ".99."): header.pop(ENTRY)})),
    "a strange name": _header(lambda header: header.update({"a\n\x1b[31m" * 99: header.pop(ENTRY)})),
    "NaN": _first_number(np.float32(np.nan).tobytes()),
    "Inf": _first_number(np.float32(-np.inf).tobytes()),
    "nothing": _cut(lambda size: 0),
    "4 bytes": _cut(lambda size: 4),
    "half a header": _cut(lambda size: 200),
    "half of the data": _cut(lambda size: size // 2),
    "a byte less": _cut(lambda size: size - 1),
    "bytes behind the end": lambda folder: (folder / ONE).write_bytes((folder / ONE).read_bytes()
        + b"more"),
    "no weights": lambda folder: (folder / ONE).unlink(),
    "a pickle": lambda folder: (folder / ONE).rename(folder / "pytorch_model.bin"),
    "index of no file": _index(lambda names: dict.fromkeys(names, "b.safetensors")),
    "index of a file above": _index(lambda names: dict.fromkeys(names, "../a.safetensors")),
    "index of an absolute path": _index(lambda names: dict.fromkeys(names,
        "/etc/passwd.safetensors")),
    "index of numbers": _index(lambda names: dict.fromkeys(names, 3)),
    "index a list": _index(lambda names: names),
    "index empty": _index(lambda names: {}),
    "index of a tensor too many": _index(lambda names: dict.fromkeys([*names, "model.more"],
        "a.safetensors")),
    "shards that overlap": _two_shards,
    "config no JSON": _content("config.json", "{"),
    "config an array": _content("config.json", "[]"),
    "config of 100,000 levels": _content("config.json", '{"a":' * 100_000),
    "config no UTF-8": _content("config.json", b"\xff\xfe{}"),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "unknown family": _json("config.json", model_type="none"),
    "other class": _json("config.json", architectures=["LlamaForSequenceClassification"]),
    "10^9 layers": _json("config.json", num_hidden_layers=10**9),
    "4,000 layers": _json("config.json", num_hidden_layers=4000),
    "a layer more": lambda folder: _json(
        "config.json",
        num_hidden_layers=json.loads((folder / "config.json").read_text())["num_hidden_layers"] + 1
    )(folder),
    "layers a text": _json("config.json", num_hidden_layers="2"),
    "width 2^40": _json("config.json", hidden_size=1 << 40),
    "width 10^4000": _json("config.json", hidden_size=10**4000),
    "no width": _json("config.json", hidden_size=0),
    "heads 2^31": _json("config.json", num_attention_heads=1 << 31),
    "no heads": _json("config.json", num_attention_heads=0),
    "7 heads": _json("config.json", num_attention_heads=7),
    "vocabulary of 2^50": _json("config.json", vocab_size=1 << 50),
    "vocabulary of 3": _json("config.json", vocab_size=3),
    "vocabulary of -1": _json("config.json", vocab_size=-1),
    "context of 10^30": _json("config.json", max_position_embeddings=10**30),
    "context negative": _json("config.json", max_position_embeddings=-5),
    "epsilon NaN": _json("config.json", rms_norm_eps=float("nan")),
    "rope an array": _json("config.json", rope_parameters=[1], rope_scaling=None),
    "unknown key": _json("config.json", secret_attention=True),
    "unknown quantization": _json("config.json", quantization_config={"quant_method": "none"}),
    "quantization that is not there": _json("config.json",
                                            quantization_config={"quant_method": "gptq",
                                                "bits": 4}),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "tokenizer no JSON": _content("tokenizer.json", "{"),
    "tokenizer of nothing": _content("tokenizer.json", "{}"),
    "tokenizer of 100,000 levels": _content("tokenizer.json", '{"a":' * 100_000),
    "tokenizer settings an array": _content("tokenizer_config.json", "[]"),
    "generation settings no JSON": _content("generation_config.json", "}"),
    "template of 50 MB": _content("chat_template.jinja", "x" * (50 << 20)),
    "template of a lone surrogate": _json("tokenizer_config.json", chat_template="\ud800"),
    "config of a lone surrogate": _json("config.json", _name_or_path="\udfff"),
    "tokenizer with a lone surrogate": lambda folder: (folder / "tokenizer.json").write_text(
        (folder / "tokenizer.json").read_text().replace('"version"', '"\\ud800": 1, "version"', 1)
    ),
    "template no UTF-8": _content("chat_template.jinja", b"\xff"),
}  # fmt: skip


def is_one_sentence(message: str) -> bool:
    return (
        bool(message)
        and not re.search(r"[\n\x00-\x1f]|Traceback|Error\(", message)
        and len(message) < 700
    )
