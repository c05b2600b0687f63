"""Text in, text out: stopping, streaming, samples, log-probabilities, seeds, the context."""

import json
import shutil
import warnings

import numpy as np
import pytest

import dantinox
from dantinox.config import UserError
from dantinox.generation import LoadedModel
from dantinox.generation.api.loaded_model import results_in_order
from dantinox.generation.static_batch import clamp_to_context
from dantinox.text import Tokenizer
from tests.error_texts import ERRORS

from . import builder

CIRCLE = "aè€😀b\nc"  # the cycle of bytes of the model of `run_dir`
AROUND = "è€😀b\nca" * 9  # its greedy text after "a"


@pytest.fixture(scope="module")
def run():
    return builder.circle()


@pytest.fixture(scope="module")
def ending():
    return builder.circle(end=True)


def greedy(run, prompt="a", **settings):
    return run.generate(prompt, greedy=True, **{"max_new_tokens": 40} | settings)


def test_text_continues_the_prompt(run):
    result = greedy(run)
    assert result.prompt == "a"
    assert result.text == AROUND[:21] + "\ufffd", "forty bytes end inside a character"
    assert result.tokens == list(AROUND.encode()[:40])
    assert result.finish_reason == "length"
    assert result.stats["prompt_tokens"] == 1 and result.stats["new_tokens"] == 40


def test_the_end_token_ends_a_row_and_is_not_text(ending):
    result = greedy(ending)
    assert (result.text, result.finish_reason) == ("è€😀b\nc", "eos")
    assert result.tokens == [*"è€😀b\nc".encode(), ending.tokenizer.eos_id]


def test_ignore_eos_continues(ending):
    result = greedy(ending, ignore_eos=True)
    assert len(result.tokens) == 40 and result.finish_reason == "length"
    assert ending.tokenizer.eos_id in result.tokens, "it is generated like any other token"
    assert result.text.startswith("è€😀b\nc")


def test_min_tokens_delays_the_end(ending):
    for least in (0, 12, 13, 30):
        result = greedy(ending, min_tokens=least)
        assert ending.tokenizer.eos_id not in result.tokens[:least]
        assert (result.tokens == greedy(ending).tokens) == (least <= 12), (
            "twelve tokens of text, then the end"
        )


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["b"], "è€😀"),
        (["\nc"], "è€😀b"),
        (["😀"], "è€"),
        (["€😀b"], "è"),
        (["zz", "ca", "b\n"], "è€😀"),
        (["è"], ""),
        (["never"], AROUND[:21] + "\ufffd"),
    ],
)
def test_stop_strings(run, stop, text):
    result = greedy(run, stop=stop)
    reason = "length" if stop == ["never"] else "stop"
    assert (result.text, result.finish_reason) == (text, reason)
    assert "".join(run.stream("a", greedy=True, max_new_tokens=40, stop=stop)) == text
    kept = greedy(run, stop=stop, keep_stop=True)
    found = next((s for s in stop if kept.text.endswith(s)), "")
    assert kept.text == text + found and bool(found) == (reason == "stop")
    assert len(result.tokens) == len((text + found).encode()) or reason == "length", (
        "no token after the stop"
    )


@pytest.mark.parametrize("tokens", [["c"], [ord("c")], [str(ord("c"))]], ids=str)
def test_stop_token_ids(run, tokens):
    """With `ignore_eos`, the batch has as many end tokens as without stop tokens, and so the same
    programs.
    """
    settings = {"stop_token_ids": tokens, "ignore_eos": True}
    result = greedy(run, **settings)
    assert (result.text, result.finish_reason, result.tokens[-1]) == ("è€😀b\n", "stop", ord("c"))
    assert greedy(run, keep_stop=True, **settings).text == "è€😀b\nc"
    assert greedy(run, min_tokens=13, **settings).tokens[:12] != list(AROUND.encode()[:12]), (
        "the stop token is not part of the text"
    )


def test_stop_tokens_are_not_end_tokens(ending):
    result = greedy(ending, stop_token_ids=["\n"], ignore_eos=True)
    assert (result.text, result.finish_reason) == ("è€😀b", "stop")


def test_a_stop_string_before_min_tokens_is_text(run):
    assert greedy(run, stop=["b"], min_tokens=12).text == "è€😀b\ncaè€😀"
    assert greedy(run, stop=["b"], min_tokens=10).text == "è€😀", "b is the tenth token"


def test_a_stop_string_does_not_match_the_prompt(run):
    assert greedy(run, "a", stop=["aè"]).text == "è€😀b\nc"


def test_held_back_text_comes_at_the_end(run):
    """Generation ends while the last characters could still become a stop string; they belong to
    the text.
    """
    assert greedy(run, max_new_tokens=12, stop=["\ncX"]).text == "è€😀b\nc"
    assert "".join(run.stream("a", greedy=True, max_new_tokens=12, stop=["\ncX"])) == "è€😀b\nc"


def test_the_end_token_inside_a_possible_stop_string(ending):
    result = greedy(ending, stop=["cX"])
    assert (result.text, result.finish_reason) == ("è€😀b\nc", "eos")


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_streamed_text_equals_the_text(run, temperature):
    """At a high temperature, text is rarely valid UTF-8. Streaming replaces incomplete characters
    at the same positions.
    """
    settings = {"temperature": temperature, "seed": 5, "max_new_tokens": 40}
    pieces = list(run.stream("a", **settings))
    assert "".join(pieces) == run.generate("a", **settings).text
    assert all(pieces), "there are no empty pieces"
    if temperature == 0:
        assert "\ufffd" not in "".join(pieces[:-1]) and len(pieces) > 2
        assert set("".join(pieces[:-1])) <= set(CIRCLE), "pieces have no incomplete characters"


def test_a_stream_is_one_sample(run):
    with pytest.raises(UserError, match=ERRORS["n_must_be_1_in_a"]):
        run.stream("a", n=4)


def test_a_stream_closed_early_has_no_effect(run):
    stream = run.stream("a", greedy=True, max_new_tokens=40)
    assert next(stream)
    stream.close()
    assert greedy(run).text.startswith("è€")


def test_finished_rows_do_not_affect_others(ending):
    """Rows end with the EOS token, a stop string, or at their limit. Each row has the same text as
    alone.
    """
    count = len("è€😀b\nc".encode()) + 1
    requests = [
        ("a", {"greedy": True, "max_new_tokens": 40}),
        ("€", {"greedy": True, "stop": ["b"], "max_new_tokens": 40}),
        ("Nel mezzo", {"temperature": 3.0, "seed": 2, "max_new_tokens": 40, "ignore_eos": True}),
        ("c", {"greedy": True, "ignore_eos": True, "max_new_tokens": 2}),
        ("a", {"greedy": True, "max_new_tokens": count}),
        ("a", {"greedy": True, "max_new_tokens": count - 1}),
        ("b", {"greedy": True, "max_new_tokens": 0}),
    ]
    (batch,) = ending.start([ending.request(*request) for request in requests])
    texts = [""] * len(requests)
    for row, part in batch.parts():
        texts[row] += part.text
    assert [result.text for result in batch.results] == texts
    hot = ending.generate("Nel mezzo", **requests[2][1])
    assert texts[:3] == ["è€😀b\nc", "😀", hot.text] and texts[4:] == ["è€😀b\nc", "è€😀b\nc", ""]
    assert batch.results[2].tokens == hot.tokens and len(hot.tokens) == 40
    reasons = ["eos", "stop", "length", "length", "eos", "length", "length"]
    assert [result.finish_reason for result in batch.results] == reasons
    assert [len(result.tokens) for result in batch.results] == [13, 5, 40, 2, count, count - 1, 0]


def test_samples_are_distinct_and_repeatable(run):
    settings = {"temperature": 3.0, "seed": 4, "max_new_tokens": 40}
    samples = run.generate(["a", "€"], n=2, **settings)
    assert [sample.prompt for sample in samples] == ["a", "a", "€", "€"]
    assert len({sample.text for sample in samples}) == 4
    assert [sample.seed for sample in samples] == [4] * 4
    for number, prompt in enumerate(("a", "€")):
        assert samples[2 * number].tokens == run.generate(prompt, **settings).tokens, (
            "alone, it is the first sample"
        )
    again = run.generate(["€", "a"], n=2, **settings)
    assert [sample.tokens for sample in again] == [
        sample.tokens for sample in samples[2:] + samples[:2]
    ]


def test_a_seed_is_drawn_reported_and_repeatable(run):
    first, second = (run.generate("a", temperature=3.0, max_new_tokens=40) for _ in range(2))
    assert first.seed != second.seed and first.text != second.text
    assert run.generate("a", temperature=3.0, max_new_tokens=40, seed=first.seed).text == first.text


REPORTED = {
    "logprobs": 3,
    "echo": True,
    "greedy": True,
    "max_new_tokens": 12,
}  # the same in all tests, as are the lengths


def check_report(info, model, prompt, tokens):
    """Compares log-probabilities with a float64 softmax over the logits of one pass without a
    cache.
    """
    ids, start = [*prompt.encode(), *tokens], len(prompt.encode())
    plain = np.stack([*map(builder.log_softmax, builder.all_logits(model, ids)[:-1])])
    said, tolerance = (
        plain[np.arange(len(ids) - 1), ids[1:]],
        {
            "rtol": 0,
            "atol": builder.LOGPROB_TOLERANCE,
        },
    )
    assert info["prompt_logprobs"][0] is None
    np.testing.assert_allclose(info["prompt_logprobs"][1:], said[: start - 1], **tolerance)
    np.testing.assert_allclose(info["logprobs"], said[start - 1 :], **tolerance)
    for row, top in zip(plain[start - 1 :], info["top"], strict=True):
        np.testing.assert_allclose(top["logprobs"], np.sort(row)[::-1][:3], **tolerance)
        assert top["ids"][0] == int(np.argmax(row))
    assert info["sampled_logprobs"] == [0.0] * len(tokens)
    assert info["prompt_tokens"] == list(prompt) and len(info["tokens"]) == len(tokens)


def test_log_probabilities_of_text_and_prompt(run):
    prompt = "Nel mezzo del cammin di nostra vita a"
    result = run.generate(prompt, **REPORTED)
    check_report(result.info, run.model, prompt, result.tokens)
    assert result.tokens == list(AROUND.encode()[:12])
    json.dumps(result.to_dict())


def test_a_prompt_alone_can_be_scored(run):
    """Log-probabilities of a prompt without new tokens."""
    prompt = "x" * 50
    result = run.generate(prompt, **REPORTED | {"max_new_tokens": 0})
    assert result.text == "" and result.tokens == []
    check_report(result.info, run.model, prompt, [])


@pytest.mark.slow
def test_a_prompt_that_fills_the_context_can_be_scored(run):
    prompt = "x" * 128
    check_report(
        run.generate(prompt, **REPORTED | {"max_new_tokens": 0}).info, run.model, prompt, []
    )


def test_log_probabilities_end_where_the_text_ends(ending):
    prompt = "x" * 39 + "a"
    for settings, count in (({}, 12), ({"stop": ["b"]}, 10)):
        result = ending.generate(prompt, **REPORTED | settings)
        assert (
            len(result.info["logprobs"]) == len(result.info["top"]) == len(result.tokens) == count
        )


def test_a_full_context_limits_the_text_with_a_warning(run):
    with pytest.warns(UserWarning) as caught:
        result = greedy(run, "a" * 100, max_new_tokens=40)
    assert [str(w.message) for w in caught] == [
        "the context of 128 tokens leaves room for 28 new tokens after a"
        " prompt of 100: 12 fewer than requested"
    ]
    assert len(result.tokens) == 28 and result.finish_reason == "length"
    assert result.text == greedy(run, "a" * 99, max_new_tokens=28).text, (
        "the last position of the context is used"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(greedy(run, "a" * 100, max_new_tokens=28).tokens) == 28
        assert greedy(run, "a" * 200, max_new_tokens=0).tokens == [], (
            "zero new tokens give no warning"
        )
    with pytest.raises(UserError, match=ERRORS["the_prompt_has_128_tokens"]):
        greedy(run, "a" * 128)


def test_an_empty_prompt_begins_with_the_begin_token(run):
    result = greedy(run, "", max_new_tokens=5)
    assert result.stats["prompt_tokens"] == 1 and len(result.tokens) == 5
    bare = json.loads(run.tokenizer.to_json())
    bare["added_tokens"] = [token for token in bare["added_tokens"] if token["content"] != "<bos>"]
    without = LoadedModel(run.config, run.model, Tokenizer(json.dumps(bare)))
    with pytest.raises(UserError, match=ERRORS["the_prompt_is_empty_and"]):
        without.generate("")


def test_arguments_override_the_settings_of_the_run(run):
    config = run.config.model_copy(
        update={
            "generation": run.config.generation.model_copy(
                update={"greedy": True, "max_new_tokens": 3, "stop": ("€",)}
            )
        }
    )
    own = LoadedModel(config, run.model, run.tokenizer)
    assert len(own.generate("a").tokens) == 3
    assert own.generate("a", max_new_tokens=12).text == "è"
    assert own.generate("a", max_new_tokens=12, stop=[]).text == "è€😀b\nc"
    assert own.generate("a", max_generations=12, stop=[]).text == "è€😀b\nc", "the older name"


def test_zero_new_tokens(run):
    result = greedy(run, max_new_tokens=0)
    assert (result.text, result.tokens, result.finish_reason) == ("", [], "length")
    assert list(run.stream("a", max_new_tokens=0)) == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"top_q": 1}, "top_q"),
        ({"temperature": -1}, "generation.temperature"),
        ({"temperature": float("nan")}, "generation.temperature"),
        ({"top_p": 2.0}, "generation.top_p"),
        ({"stop": [""]}, "generation.stop must not hold an empty string"),
        ({"n": 0}, "generation.n"),
        ({"weights": "int3"}, "generation.weights"),
        ({"logprobs": 260}, r"logprobs must be an integer in \[0, 259\], got 260"),
        ({"logprobs": -1}, "logprobs must be an integer"),
        ({"echo": True}, "echo reports log-probabilities"),
    ],
)
def test_wrong_settings(run, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        run.generate("a", **settings)


@pytest.mark.slow
def test_requests_with_another_program_form_another_batch(run):
    requests = [
        ("a", {"n": 1}), ("b", {"n": 2}), ("c", {"preset": "kobold", "top_a": 0.1}),
        ("d", {"seed": 4, "top_k": 3}),
        ("e", {"sampler_order": ["top_p", "top_k"], "top_k": 4}),
    ]  # fmt: skip
    settings = {"max_new_tokens": 3, "temperature": 1.0, "seed": 1}
    batches = run.start([run.request(prompt, settings | given) for prompt, given in requests])
    assert [batch.numbers for batch in batches] == [[0, 3], [1, 1], [2], [4]]
    for batch in batches:
        list(batch.parts())
    results = results_in_order(batches)
    assert [result.prompt for result in results] == ["a", "b", "b", "c", "d", "e"]
    for number, given in ((0, requests[0][1]), (4, requests[3][1])):
        assert (
            results[number].tokens
            == run.generate(results[number].prompt, **settings | given).tokens
        )


def test_an_empty_list_of_prompts_is_an_error(run):
    with pytest.raises(UserError, match=ERRORS["at_least_one_prompt_is"]):
        run.generate([])


def test_a_prompt_that_is_too_long_is_rejected_first(run):
    with pytest.raises(UserError, match=ERRORS["the_prompt_has_200_tokens"]):
        run.generate(["a", "x" * 200])


def test_a_space_before_the_first_new_word_stays(run):
    """If words include their leading space, decoding drops the space at the start of a text, but
    not of a continuation.
    """
    words = {f"▁w{n}": n for n in range(256)}
    tree = {
        "version": "1.0",
        "added_tokens": [
            {"id": 256 + n, "content": name, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False,
             "normalized": False} for n, name in enumerate(["<pad>", "<s>", "</s>"])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
                          "split": True},
        "post_processor": None,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
                    "split": True},
        "model": {"type": "WordLevel", "vocab": words | {"<pad>": 256, "<s>": 257, "</s>": 258},
                  "unk_token": "w0"},
    }  # fmt: skip
    own = LoadedModel(run.config, run.model, Tokenizer(json.dumps(tree)))
    result = own.generate("w97", greedy=True, max_new_tokens=3)
    assert result.text == " w195 w168 w226"
    assert "".join(own.stream("w97", greedy=True, max_new_tokens=3)) == result.text
    assert own.generate("", greedy=True, max_new_tokens=1).text.startswith("w"), (
        "this is the start of the text"
    )


def test_chat_formats_messages_and_stops_where_the_template_says(run_dir, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run_dir, copied)
    with pytest.raises(UserError, match=ERRORS["this_model_has_no_chat"]):
        dantinox.load(copied).chat("a")
    (copied / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}", "utf-8"
    )
    model = dantinox.load(copied)
    model.model = builder.circle().model
    settings = {"greedy": True, "max_new_tokens": 40}
    assert model.chat("a", **settings).text == model.generate("ua", **settings).text
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert model.chat(messages, **settings).text == model.generate("uaabuc", **settings).text
    assert (
        model.chat(messages[:2], **settings).text == model.generate("uaab", **settings).text
    )  # continues the last message
    (logprob,) = model.chat(messages, greedy=True, max_new_tokens=1, logprobs=0).info["logprobs"]
    assert -1 < logprob < 0
    with pytest.raises(UserError, match=ERRORS["n_must_be_1_in"]):
        model.chat("a", n=2)


def test_the_warning_about_the_context_names_the_row_that_loses_most():
    with pytest.warns(
        UserWarning,
        match="leaves room for 3 new tokens after a prompt of 7: 5 fewer than requested",
    ):
        limits = clamp_to_context(np.array([2, 7, 9]), np.array([9, 8, 2]), 10)
    assert limits.tolist() == [8, 3, 1]
