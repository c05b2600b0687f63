"""The store of prompts: tokens, records, the order of the prompts and the split into training and
validation.
"""

import json
from collections import Counter

import numpy as np
import pytest

from dantinox.config import UserError, build_config
from dantinox.text import open_store, prepare_data
from dantinox.text.builtin_addition import addition_corpus

from .test_conversations import BYTES, TEMPLATE


@pytest.fixture
def prepare(tmp_path):
    """Returns a function that writes records and returns their store, its settings and its
    directory.
    """
    (tmp_path / "t.jinja").write_text(TEMPLATE)

    def prepare(records, **changes):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        settings = {
            "data.path": str(tmp_path / "a.jsonl"), "data.chat_template": str(tmp_path / "t.jinja"),
            "model.max_context": 12, "tokenizer.tokenizer_type": "byte", "training.batch_size": 3,
            "training.objective": "grpo", "training.init_from": "x",
            "grpo.rewards": ["exact_match"], "generation.max_new_tokens": 4,
        }  # fmt: skip
        config = build_config({}, settings | changes)
        return prepare_data(config, tmp_path / "store")[1], config, tmp_path / "store"

    return prepare


RECORDS = [
    {"prompt": f"{number:02}", "answer": str(number), "tests": [number]} for number in range(20)
]


def test_prompts_end_with_the_beginning_of_the_answer(prepare):
    store, config, folder = prepare(
        [{"prompt": [{"role": "system", "content": "b"}, {"role": "user", "content": "hé"}]}] * 2
    )
    (prompt,) = store.batch(0, np.array([0]))
    assert bytes(prompt.ids) == "sbuhéa".encode() and prompt.text == "hé"
    assert open_store(config, folder, BYTES).batch(0) == store.batch(0)


def test_an_epoch_contains_each_training_prompt_once(prepare):
    store, config, folder = prepare(RECORDS)
    assert (store.windows_per_epoch, store.validation_rows, store.longest, store.left_out) == (
        18,
        2,
        4,
        0,
    )
    steps = [store.batch(step) for step in range(12)]
    for epoch in (steps[:6], steps[6:]):
        assert Counter(prompt.number for prompts in epoch for prompt in prompts) == dict.fromkeys(
            range(18), 1
        )
    assert steps[:6] != steps[6:] and store.batch(3) == steps[3] != store.batch(3, stream=1)
    for prompts in steps:
        for prompt in prompts:
            assert (
                prompt.record == RECORDS[prompt.number]
                and bytes(prompt.ids[1:3]) == prompt.record["prompt"].encode()
            )
    assert open_store(config, folder, BYTES).batch(7, stream=2) == store.batch(7, stream=2)
    assert [[prompt.number for prompt in prompts] for prompts in store.validation(1)] == [
        [18],
        [19],
    ]
    assert (
        len(list(store.validation(1, tokens=8))) == 1
        and len(list(store.validation(1, tokens=9))) == 2
    )


def test_a_mixture_of_prompts_has_its_weights(prepare, tmp_path):
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"prompt": f"b{number}"}) + "\n" for number in range(9))
    )
    mixed = {
        "data.path": [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")],
        "data.mixture": [1, 3],
    }
    store, config, folder = prepare(RECORDS, **mixed)
    prompts = [prompt.record["prompt"] for step in range(8) for prompt in store.batch(step)]
    first, second = (
        [text for text in prompts if text[0] != "b"],
        [text for text in prompts if text[0] == "b"],
    )
    assert (
        len(store.batch(0)) == 3
        and (len(first), len(second)) == (6, 18)
        and store.windows_per_epoch == 18 + 8
    )
    assert len(set(first)) == 6 and set(Counter(second[:16]).values()) == {2}, (
        "each source has its own epochs"
    )
    assert (
        open_store(config, folder, BYTES).batch(7, stream=2)
        == store.batch(7, stream=2)
        != store.batch(7)
    )


def test_prompts_without_space_for_an_answer_are_left_out(prepare):
    store, _, _ = prepare(
        [{"prompt": "x" * (5 + number % 3)} for number in range(9)] + [{"prompt": "val"}]
    )
    assert store.left_out == 3 and store.longest == 8 and store.windows_per_epoch == 6
    assert all(len(prompt.ids) <= 8 for step in range(4) for prompt in store.batch(step))
    with pytest.raises(UserError, match="all training prompts leave fewer than"):
        prepare([{"prompt": "x" * 9}] * 3)
    with pytest.raises(UserError, match=r"lacks the field 'prompt'.*line 2"):
        prepare([{"prompt": "a"}, {"question": "a"}])


def test_missing_records_rebuild_the_store(prepare):
    _, config, folder = prepare(RECORDS)
    records = next(folder.glob("tokens-*.records"))
    records.write_bytes(records.read_bytes()[:-5])
    assert open_store(config, folder, BYTES) is None
    assert prepare(RECORDS)[0].batch(0)[0].record in RECORDS


def test_addition_problems():
    records = [json.loads(line) for line in addition_corpus()]
    assert len({record["prompt"] for record in records}) == len(records) == 8100
    for record in records[::50]:
        a, b = map(int, record["prompt"].removesuffix("=").split("+"))
        assert 10 <= min(a, b) <= max(a, b) <= 99 and record["answer"] == record[
            "completion"
        ] == str(a + b)
    assert (
        records[0]["prompt"]
        == next(map(json.loads, addition_corpus()))["prompt"]
        != json.loads(next(addition_corpus(1)))["prompt"]
    )
