"""Requests with different settings: how they are read from a file, and which of them share a
batch.
"""

import json
from types import SimpleNamespace

import pytest

from dantinox.config import Config, UserError
from dantinox.generation.api import loaded_model as run
from dantinox.generation.api.prompt_file import read_prompts
from dantinox.generation.request import GenerationRequest


@pytest.fixture
def batches(monkeypatch):
    """Returns a function that gives the request numbers of each batch; nothing is decoded."""
    monkeypatch.setattr(run, "BatchRun", lambda model, requests, numbers, **_: numbers)

    def of(settings, base=None):
        model = SimpleNamespace(config=Config().architecture(259))
        loaded = run.LoadedModel(base or Config(), model, None)
        return loaded.start([GenerationRequest((1,), loaded.settings(given)) for given in settings])

    return of


@pytest.mark.filterwarnings("ignore:all heads get the same share of the cache")
def test_requests_with_another_cache_form_another_batch(batches):
    small = {"kv_budget": 0.2}
    assert batches([small, {}, {**small, "top_k": 3}, {"kv_budget": 0.5}, {"kv_dtype": "int8"},
                    small]) == [
        [0, 2, 5], [1], [3], [4],
    ]  # fmt: skip
    assert batches([small, {**small, "kv_policy": "tova"}, {**small, "kv_sinks": 0}]) == [
        [0],
        [1],
        [2],
    ]
    base = Config(kv={"budget": 0.2, "pool": 5})
    assert batches([{}, {"kv_budget": None}, {"kv_budget": 0.2}, {"kv_pool": 7}], base) == [
        [0, 2],
        [1],
        [3],
    ]


def test_keys_of_kv_in_a_file_override_flags_and_run(tmp_path):
    base = Config(kv={"budget": 0.5, "policy": "tova"})
    lines = [
        "a",
        {"kv_budget_tokens": 64},
        {"kv_budget": None},
        {"use_cache": False},
        {"kv_policy": "snapkv+ema", "kv_pool": 5},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text(
        "\n".join(x if isinstance(x, str) else json.dumps({"prompt": "b", **x}) for x in lines)
    )
    requests = read_prompts(path, {"kv_budget": 0.2}, base)
    own = [config.kv.model_dump(exclude_defaults=True) for _, config in requests]
    assert own == [
        {"budget": 0.2, "policy": "tova"}, {"budget_tokens": 64, "policy": "tova"}, {}, {},
        {"budget": 0.2, "pool": 5},
    ]  # fmt: skip


def test_a_wrong_key_of_kv_is_named_with_its_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('a\n{"prompt": "b", "kv_budgets": 0.2}\n')
    with pytest.raises(UserError) as error:
        read_prompts(path, {}, Config())
    assert str(error.value) == f"unknown key kv_budgets, did you mean kv_budget? ({path}, line 2)"
