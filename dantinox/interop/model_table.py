"""The table of `docs/models.md`: what each family of models can do here, from the tables of the families.

python -m dantinox.interop.model_table docs/models.md      (`make models` does it)
"""

import sys
from pathlib import Path

from dantinox.interop import gguf_families, hf_families
from dantinox.interop.hf_families import Family

BEGIN, END = "<!-- begin of the model table, which `make models` writes -->", "<!-- end of the model table -->"
HEADER = ("family", "HF in", "HF out", "GGUF in", "GGUF out", "LoRA", "compressed cache", "sharded")
YES, NO = "yes", "no"


def model_table() -> str:
    """The table in Markdown, a row per family in the order of their names."""
    lines = [HEADER, ("---",) * len(HEADER)]
    lines += [(f"`{name}`", *_cells(name, hf_families.FAMILIES[name])) for name in sorted(hf_families.FAMILIES)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def lora_support(family: Family) -> str:
    """The projections of a family that can have adapters."""
    if "kv_lora_rank" in family.keys:
        return NO
    if "moe.use_moe" in family.settings:
        return "attention"
    return "all, with experts attention" if family.dense_layers in ("all or none", "parallel") else "all"


def cache_compression(family: Family) -> str:
    """Whether the cache of a family can be compressed."""
    return NO if "kv_lora_rank" in family.keys or family.per_layer_heads else YES


def _cells(name: str, family: Family) -> tuple[str, ...]:
    # Tables of tensors are read in both directions, and every parameter has a rule that says how it is split.
    return (YES, YES, *_gguf(name), lora_support(family), cache_compression(family), YES)


def _gguf(name: str) -> tuple[str, str]:
    """The architecture of a family in GGUF, read and written."""
    rows = [family for family in gguf_families.FAMILIES if family.model_type == name]
    if not rows:
        return NO, NO
    return ", ".join(map(_read_as, rows)), ", ".join(f"`{row.arch}`" for row in rows)


def _read_as(stored: gguf_families.Family) -> str:
    """The architecture of a row, or the first family whose files look like those of this one."""
    alike = (family for family in gguf_families.FAMILIES if (family.arch, family.names) == (stored.arch, stored.names))
    read = next(family for family in alike if family.keys == stored.keys)
    return f"`{stored.arch}`" if read is stored else f"as `{read.model_type}`"


def insert_table(page: str) -> str:
    """A page with the table of today between its marks. Raises a ValueError if it has no marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{model_table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(insert_table(path.read_text(encoding="utf-8")), encoding="utf-8")
