"""GGUF metadata keys, and a reader that checks every metadata value of an architecture."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dantinox.files import UserError, escape_name, quote
from dantinox.interop.gguf.gguf_file import GGUFFile, StoredTensor

# Maps metadata keys, without the architecture prefix, to keys of `config.json`.
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Keys whose values are tensor dimensions, or parts of a dimension.
AXIS_KEYS = (
    "embedding_length", "feed_forward_length", "expert_feed_forward_length", "expert_count",
    "expert_used_count", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "rope.dimension_count",
)  # fmt: skip
# Keys that do not change the model.
IGNORED_KEYS = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "expert_weights_norm"}
# Granite 4 files have the sizes of Mamba layers and experts even if the model has none.
MAMBA_KEYS = {
    f"ssm.{size}"
    for size in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
}
IGNORED_KEYS_OF = {
    "granite": (
        MAMBA_KEYS | {"expert_count", "expert_used_count", "expert_shared_feed_forward_length"}
    ),
    "granitemoe": MAMBA_KEYS,
}
MAX_NUMBER = 1e30  # a larger number in the metadata is an error
# Tensors of divisors of the rotary frequencies: those of longrope, and those of any other scaling.
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
LLAMA3 = "rope_freqs.weight"


class Metadata:
    """The metadata of a file's architecture. The object records which keys were read."""

    def __init__(self, file: GGUFFile) -> None:
        self.name = str(file.path)
        self.entries = file.metadata
        self.arch = self.entries.get("general.architecture")
        self.used: set[str] = set()

    def __call__(self, key: str, default: Any = None, kind: type[Any] = int) -> Any:
        """Returns a value of type `kind`; numbers must be positive. A per-layer list of equal
        values becomes one value.

        Raises:
          UserError: the value has another type, or it is absent and there is no `default`.
        """
        self.used.add(key)
        value: Any = self.entries.get(f"{self.arch}.{key}")
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        # llama.cpp also treats a zero as absent.
        absent = value is None or (kind is not bool and value == 0)
        if absent and default is not None:
            return default
        if type(value) is not kind or (kind in (int, float) and not 0 < value < MAX_NUMBER):
            found = "nothing" if value is None else quote(value)
            raise UserError(
                f"{self.name} must have {self.arch}.{key} as a {TYPE_NAMES[kind]}, got {found}"
            )
        return shortest_decimal(np.float32(value)) if kind is float else value

    def has(self, key: str) -> bool:
        """Returns whether the file has a key; the key counts as read only after its value was
        read.
        """
        return f"{self.arch}.{key}" in self.entries

    def check_sizes(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Raises a `UserError` if a size is larger than every tensor; runs before anything of that
        size is allocated.
        """
        largest = max((max(stored.shape) for stored in tensors.values()), default=0)
        limits = {"block_count": len(tensors)} | dict.fromkeys(AXIS_KEYS, largest)
        for key, limit in limits.items():
            values = self.entries.get(f"{self.arch}.{key}")
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, int) and value > limit:
                    raise UserError(
                        f"{self.name} has {self.arch}.{key}: {quote(value)}, but its tensors allow"
                        f" at most {limit}"
                    )

    def check_all_used(self) -> None:
        """Raises a `UserError` for the first key with the architecture prefix that was neither read
        nor ignored.
        """
        for key, value in self.entries.items():
            arch, _, rest = key.partition(".")
            known = self.used | IGNORED_KEYS | IGNORED_KEYS_OF.get(arch, set())
            if arch == self.arch and rest not in known:
                raise UserError(
                    f"{self.name} has {escape_name(key)}: {quote(value)}, which is not supported"
                )


TYPE_NAMES = {int: "positive integer", float: "positive number", str: "string", bool: "boolean"}


def shortest_decimal(number: Any) -> float:
    """Returns the shortest decimal number that rounds to a NumPy number, for example 0.1 for the
    float32 0.100000001…
    """
    return float(str(number))


def key_type(key: str) -> type:
    """Returns the type of the values of a size key."""
    return float if key.endswith("epsilon") else int
