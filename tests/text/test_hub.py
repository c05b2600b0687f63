"""Hugging Face datasets in a folder give the same tokens as the same texts in JSON Lines files."""

import json
import sys
from types import SimpleNamespace

import pytest

from dantinox.config import UserError, build_config
from dantinox.text import corpus_changed, open_store, prepare_data, vocabulary_size
from tests.error_texts import ERRORS

TEXTS = [f"documento {i}: nel mezzo del cammin\ndi nostra vita {i * i}\n" for i in range(40)]


def settings(path, **changes):
    base = {
        "data.path": str(path),
        "data.text_field": "body",
        "tokenizer.tokenizer_type": "char",
        "model.max_context": 8,
    }
    return build_config({}, base | {"training.batch_size": 2} | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("sets") / "corpus"
    folder.mkdir()
    datasets.Dataset.from_dict({"body": TEXTS, "id": list(range(40))}).to_parquet(
        folder / "train.parquet"
    )
    datasets.Dataset.from_dict({"body": TEXTS[::2], "id": list(range(20))}).to_parquet(
        folder / "test.parquet"
    )
    return folder


@pytest.mark.parametrize(
    ("streaming", "split", "texts"), [(False, "train", TEXTS), (True, "test", TEXTS[::2])]
)
def test_tokens_of_a_dataset_equal_those_of_its_texts(
    folder, tmp_path, monkeypatch, streaming, split, texts
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    hub = {
        "data.dataset_source": "huggingface",
        "data.streaming": streaming,
        "data.dataset_split": split,
    }
    config = settings(
        folder, **{key: value for key, value in hub.items() if value not in (False, "train")}
    )
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"body": text}) + "\n" for text in texts)
    )
    tokenizer, store = prepare_data(config, tmp_path / "a")
    other, expected = prepare_data(settings(tmp_path / "texts.jsonl"), tmp_path / "b")
    assert (
        tokenizer.fingerprint == other.fingerprint
        and vocabulary_size(config) == tokenizer.vocab_size
    )
    assert (store.training_ids == expected.training_ids).all() and (
        store.validation_ids == expected.validation_ids
    ).all()
    assert not list((tmp_path / "a").glob(".dataset*")), "nothing but the tokens stays"
    assert (
        not corpus_changed(config, tmp_path / "a")
        and open_store(config, tmp_path / "a", tokenizer) is not None
    )


def test_a_null_in_the_text_column_is_reported_with_its_row(tmp_path, monkeypatch):
    rows = [{"body": text} for text in [*TEXTS[:5], None, *TEXTS[5:]]]
    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *args, **options: rows)
    )
    with pytest.raises(
        UserError, match=r"no text in 'body' .*: row 5 \(counted from 0\) has null; it has body"
    ):
        prepare_data(
            settings(tmp_path / "set", **{"data.dataset_source": "huggingface"}), tmp_path / "x"
        )


def test_conversations_keep_all_fields(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    messages = [
        [{"role": "user", "content": f"a{i}"}, {"role": "assistant", "content": "b"}]
        for i in range(4)
    ]
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict({"messages": messages, "id": list(range(4))}).to_parquet(
        tmp_path / "set" / "train.parquet"
    )
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": said}) + "\n" for said in messages)
    )
    changes = {
        "tokenizer.tokenizer_type": "byte",
        "training.objective": "sft",
        "model.max_context": 40,
        "data.text_field": "text",
    }
    _, store = prepare_data(
        settings(tmp_path / "set", **changes | {"data.dataset_source": "huggingface"}),
        tmp_path / "x",
    )
    _, expected = prepare_data(settings(tmp_path / "a.jsonl", **changes), tmp_path / "y")
    assert store.name == expected.name


def test_errors_are_one_sentence(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub = {"data.dataset_source": "huggingface"}
    cases = {
        r"has no text in 'id' .*it has body, id": settings(
            folder, **hub | {"data.text_field": "id"}
        ),
        r"cannot read the dataset .*: .*none": settings(
            folder, **hub | {"data.dataset_split": "none"}
        ),
        r"cannot read the dataset .*: .*gone": settings(tmp_path / "gone", **hub),
    }
    for message, config in cases.items():
        with pytest.raises(UserError, match=message) as caught:
            prepare_data(config, tmp_path / "store")
        assert "\n" not in str(caught.value) and not list((tmp_path / "store").glob(".dataset*"))


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=ERRORS["the_dataset_somebody_corpus_needs"]):
        prepare_data(
            settings("somebody/corpus", **{"data.dataset_source": "huggingface"}), tmp_path
        )
