"""The files of a store: their content for every kind of corpus and tokenizer, and builds that are interrupted."""

import json
from pathlib import Path

import pytest

from dantinox.text import prepare_data

from .stores import cases, content_digest, use_small_blocks

# The digests of the stores in release 1.0.0rc1. A run with these tokens continues with the same batches.
DIGESTS = json.loads(Path(__file__).with_name("stores.json").read_text())


@pytest.mark.parametrize("blocks", ["small", "default"])
def test_the_files_of_a_store_do_not_change(tmp_path, monkeypatch, blocks):
    if blocks == "small":
        use_small_blocks(monkeypatch)
    found = {}
    for name, tokenizer, config in cases(tmp_path):
        prepare_data(config, tmp_path / "store" / name, tokenizer)
        found[name] = content_digest(tmp_path / "store" / name)
    assert found == DIGESTS
