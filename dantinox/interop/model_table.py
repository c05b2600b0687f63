"""Writes the table of model families in `docs/models.md`, from the tables of `hf_families` and
`gguf_families`.

python -m dantinox.interop.model_table docs/models.md      (or `make models`)
"""

import sys
from pathlib import Path

from dantinox.interop.gguf import gguf_families
from dantinox.interop.hf import hf_families
from dantinox.interop.hf.hf_family import Family

BEGIN, END = (
    "<!-- begin of the model table, which `make models` writes -->",
    "<!-- end of the model table -->",
)
HEADER = ("family", "HF in", "HF out", "GGUF in", "GGUF out", "LoRA", "compressed cache", "sharded")
YES, NO = "yes", "no"


def model_table() -> str:
    """Returns the table in Markdown, with one row per family, sorted by name."""
    lines = [HEADER, ("---",) * len(HEADER)]
    lines += [
        (f"`{name}`", *_cells(name, hf_families.FAMILIES[name]))
        for name in sorted(hf_families.FAMILIES)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def lora_support(family: Family) -> str:
    """Returns the projections of a family that can have adapters."""
    if "kv_lora_rank" in family.keys or family.settings.get("model.projections") == "ternary":
        return NO
    if "moe.use_moe" in family.settings:
        return "attention"
    return (
        "all, with experts attention"
        if family.dense_layers in ("all or none", "parallel")
        else "all"
    )


def cache_compression(family: Family) -> str:
    """Returns whether the KV cache of a family can be compressed."""
    return NO if "kv_lora_rank" in family.keys or family.per_layer_heads else YES


def _cells(name: str, family: Family) -> tuple[str, ...]:
    """Returns the cells of a family's row, after its name."""
    # The three constant cells: import and export use the same tensor tables, and every parameter
    # has a sharding rule.
    return (YES, YES, *_gguf(name), lora_support(family), cache_compression(family), YES)


def _gguf(name: str) -> tuple[str, str]:
    """Returns the GGUF architectures from which a family is imported, and to which it is
    exported.
    """
    rows = [family for family in gguf_families.FAMILIES if family.model_type == name]
    if not rows:
        return NO, NO
    return ", ".join(map(_read_as, rows)), ", ".join(f"`{row.arch}`" for row in rows)


def _read_as(stored: gguf_families.Family) -> str:
    """Returns a family's architecture, or "as" and another family if its files look like those of
    that other family.
    """
    imported = next(
        family
        for family in gguf_families.FAMILIES
        if (family.arch, family.names.keys(), family.keys)
        == (stored.arch, stored.names.keys(), stored.keys)
    )
    return f"`{stored.arch}`" if imported is stored else f"as `{imported.model_type}`"


def insert_table(page: str) -> str:
    """Replaces the table between the `BEGIN` and `END` comments of a page; raises a ValueError if a
    comment is missing.
    """
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{model_table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(insert_table(path.read_text(encoding="utf-8")), encoding="utf-8")
