"""The table of models in docs/models.md is current and agrees with the settings of a checkpoint of
each family.
"""

import json
from pathlib import Path

import pytest

from dantinox.config import UserError, build_config
from dantinox.distributed.rules import find_rule, name_in_layer
from dantinox.interop.hf.hf_config import hf_config_to_settings
from dantinox.interop.hf.hf_families import FAMILIES
from dantinox.interop.model_table import BEGIN, HEADER, insert_table, model_table
from dantinox.model.parameters import abstract_model
from tests.error_texts import ERRORS

SYMBOLS = 67
CHECKPOINTS = Path(__file__).parent / "checkpoints"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ROWS = {cells[0].strip("`"): dict(zip(HEADER, cells, strict=True)) for cells in (
    [cell.strip() for cell in line.strip("|").split("|")] for line in model_table().splitlines()[2:]
)}  # fmt: skip


def test_page_has_the_current_table():
    page = PAGE.read_text(encoding="utf-8")
    assert insert_table(page) == page, "run `make models`"
    with pytest.raises(ValueError, match=ERRORS["unpack"]):
        insert_table(page.replace(BEGIN, ""))


def test_table_has_a_row_for_each_family():
    assert ROWS.keys() == FAMILIES.keys()
    assert ROWS["mistral"]["GGUF in"] == "as `llama`" and ROWS["mistral"]["GGUF out"] == "`llama`"


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_and_compressed_caches_match_the_settings(family):
    config = json.loads((CHECKPOINTS / family / "config.json").read_text())
    settings = hf_config_to_settings(config, 64)

    def is_rejected(**sections) -> bool:
        try:
            build_config(settings | sections)
        except UserError:
            return True
        return False

    attention, all_of_it = {"targets": ["q_proj"]}, {"targets": ["q_proj", "down_proj"]}
    start = {"training": {"init_from": "x"}}
    has = ["attention"] * (not is_rejected(lora={"rank": 2} | attention, **start))
    has += ["all"] * (not is_rejected(lora={"rank": 2} | all_of_it, **start))
    assert ROWS[family]["LoRA"].split(",")[0] == (has or ["no"])[-1]
    assert ROWS[family]["compressed cache"] == ("no" if is_rejected(kv={"budget": 0.5}) else "yes")
    lora = {"lora": {"rank": 2}} if has else {}
    model = build_config(settings | lora | (start if has else {})).trained_architecture(
        SYMBOLS, "cpu"
    )
    for name, leaf in abstract_model(model)[
        1
    ].items():  # a parameter without a rule cannot be sharded
        assert find_rule(name_in_layer(name)[0], len(leaf.shape)), name
