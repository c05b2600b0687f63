"""`dantinox generate`: output on stdout and stderr, prompts, constraints, traces, and errors in one
sentence.
"""

import json
import re

import numpy as np
import pytest

from dantinox import cli, files
from dantinox.cli import generate as generating
from dantinox.config import UserError
from tests.cli.expected import AROUND, KEYS, SUMMARY, assert_one_sentence
from tests.serve.lora_runs import make_lora_run


def test_stdout_is_prompt_and_continuation_only(generate):
    code, out, err = generate("--prompt", "a", "--greedy", "--max_new_tokens", 12)
    assert (code, out) == (0, "a" + AROUND[:6] + "\n")
    assert re.fullmatch("1 prompt \\+ 12 new" + SUMMARY[SUMMARY.index(" tokens") :], err)


def test_the_default_prompt(generate):
    _, out, _ = generate("--greedy", "--max_new_tokens", 2)
    assert out.startswith("\n"), "the default for an empty training.sample_prompt is a line break"


def test_a_message_is_answered_through_the_chat_template(dantinox, copy, tmp_path):
    """The template ends with the letter after which the model repeats its text; only the answer is
    printed.
    """
    (copy / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}|{% endfor %}a"
    )
    answer = ["generate", "--run_dir", copy, "--chat", "--greedy", "--max_new_tokens", 13]
    assert dantinox(*answer, "--prompt", "b")[:2] == (0, AROUND + "\n")
    code, out, err = dantinox(*answer, "--prompt", "b", "--system", "c", "--json")
    record = json.loads(out)
    assert (record["prompt"], record["text"]) == ("b", AROUND) and err.startswith(
        "5 prompt + 13 new tokens"
    )
    file = tmp_path / "prompts"
    file.write_text("b\nca\n")
    lines = dantinox(*answer, "--prompt_file", file)[1].splitlines()
    assert [json.loads(line)["text"] for line in lines] == [AROUND] * 2
    assert dantinox(*answer, "--prompt", "b", "--stream")[1] == AROUND + "\n"


def test_special_tokens_of_a_prompt_are_text_or_tokens(generate):
    flags = ["--prompt", "<eos>a", "--greedy", "--max_new_tokens", 2]
    assert generate(*flags)[2].startswith("6 prompt"), "the five characters of <eos>, and a"
    code, out, err = generate(*flags, "--parse_special")
    assert (code, out) == (0, "<eos>a" + AROUND[:1] + "\n") and err.startswith("2 prompt")


@pytest.mark.parametrize(
    ("flag", "name", "source", "continuation"),
    [
        ("--regex", None, "[x-z]{3}€", "[x-z]{3}€"),
        (
            "--json_schema",
            "a.json",
            '{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}',
            r"\[[^\[]*\]",
        ),
        (
            "--grammar",
            "a.lark",
            '\ufeffstart: "no" | "yes" "!"',
            "no|yes!",
        ),  # a byte-order mark is no part of the text
        ("--grammar", "a.gbnf", 'root ::= "no" | "yes" [.!]\n', "no|yes[.!]"),
    ],
)
def test_constrained_generation(generate, tmp_path, flag, name, source, continuation):
    if name is not None:
        (tmp_path / name).write_text(source, encoding="utf-8")
    code, out, err = generate(
        "--prompt", "a", "--n", 3, "--seed", 1, "--json", flag, tmp_path / name if name else source
    )
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [result["index"] for result in results] == [0, 1, 2]
    assert f"1 prompt + {sum(result['new_tokens'] for result in results)} new tokens" in err
    for result in results:
        assert result["finish_reason"] == "eos" and re.fullmatch(continuation, result["text"]), (
            result
        )
        if flag == "--json_schema":
            assert all(type(item) is bool for item in json.loads(result["text"]))


@pytest.mark.parametrize(
    ("flag", "name", "content", "parts"),
    [
        ("--json_schema", "a.json", b'{\n"a"}', ["the JSON schema is not valid JSON in line 2"]),
        (
            "--grammar",
            "a.lark",
            b"start: b",
            ["the Lark grammar cannot be used in line 1", 'unknown name: "b"'],
        ),
        ("--grammar", "a.gbnf", b"\xff\xfe", ["cannot read --grammar", "it is not text"]),
        ("--grammar", "a.gbnf", b"#" * 270_000, ["the GBNF grammar must have at most 256 KB"]),
    ],
)
def test_an_invalid_constraint_is_reported_before_the_model_loads(
    generate, tmp_path, monkeypatch, flag, name, content, parts
):
    (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(
        "dantinox.generation.api.loaded_model.load_opened",
        lambda *_: pytest.fail("the model was loaded"),
    )
    assert_one_sentence(generate(flag, tmp_path / name), *parts)


@pytest.mark.parametrize(
    "flags", [["--greedy"], ["--greedy", "true"], ["--greedy=True"], ["--temperature", "0"]]
)
def test_greedy_in_every_spelling(generate, flags):
    assert generate("--prompt", "a", "--max_new_tokens", 12, *flags)[1] == "a" + AROUND[:6] + "\n"
    assert generate(*flags, "--prompt", "a", "--max_new_tokens", 12)[1] == "a" + AROUND[:6] + "\n"


HOT = ["--prompt", "a", "--max_new_tokens", 12, "--temperature", 50]


def test_false_is_false(generate):
    """A regression test: `--greedy False` was read as true."""
    hot = [*HOT, "--seed", 3]
    assert (
        generate(*hot, "--greedy", "False")[1]
        == generate(*hot)[1]
        != generate(*hot, "--greedy", "True")[1]
    )


@pytest.mark.parametrize(
    "flags", [["--no_cache"], ["--use_cache", "false"], ["--generation.use_cache", "False"]]
)
def test_without_a_cache(generate, flags):
    code, out, _ = generate("--prompt", "a", "--greedy", "--max_new_tokens", 12, "--json", *flags)
    record = json.loads(out)
    assert code == 0 and record["text"] == AROUND[:6] and record["cache"] is None


@pytest.mark.parametrize(
    "budget", [("--kv_budget", 0.2), ("--kv_budget_tokens", 8), ("--kv_budget_tokens", 16)]
)
def test_a_budget_that_the_text_fits_into_changes_nothing_and_is_reported(generate, budget):
    _, out, err = generate("--prompt", "a", "--greedy", "--max_new_tokens", 12, *budget)
    assert out == "a" + AROUND[:6] + "\n"
    assert re.search(
        r"cache [\d.]+ MB \(uncompressed: nothing can be evicted from at most 16 tokens\)\n", err
    )


@pytest.mark.parametrize("stream", ["--stream", "--no_stream"])
def test_streaming_does_not_change_the_output(generate, stream):
    _, out, err = generate("--prompt", "a", "--greedy", "--max_new_tokens", 25, stream)
    assert out == "a" + (AROUND * 2)[:13] + "\n" and re.fullmatch(SUMMARY, err)


def test_the_reported_seed_reproduces_the_text(generate):
    _, out, err = generate(*HOT)
    seed = re.search(r"seed (\d+)", err)[1]
    assert generate(*HOT, "--seed", seed)[1] == out
    assert generate(*HOT)[1] != out


@pytest.mark.slow
def test_samples(generate):
    _, out, err = generate(
        "--prompt", "a", "--max_new_tokens", 12, "--temperature", 5, "--n", 3, "--seed", 1, "--json"
    )
    records = [json.loads(line) for line in out.splitlines()]
    assert len({record["text"] for record in records}) == 3
    assert err.startswith("1 prompt + 36 new tokens")


def test_beam_search(generate):
    flags = [
        "--prompt",
        "a",
        "--num_beams",
        2,
        "--length_penalty",
        0.5,
        "--early_stopping",
        "never",
        "--max_new_tokens",
        9,
    ]
    code, out, err = generate(*flags)
    assert (code, out) == (0, "a" + AROUND[:3] + "\n") and err.startswith(
        "1 prompt + 9 new tokens, 2 beams, in "
    )
    records = [json.loads(line) for line in generate(*flags, "--n", 2, "--json")[1].splitlines()]
    assert [record["index"] for record in records] == [0, 1] and records[0]["score"] > records[1][
        "score"
    ]


def test_stop_strings_of_the_shell(generate):
    """Backslash-n is a line break; several strings at any place."""
    _, out, _ = generate(
        "--stop", r"b\n", "zzz", "--prompt", "a", "--greedy", "--max_new_tokens", 24
    )
    assert out == "aè€😀\n"
    _, out, _ = generate(
        "--prompt", "a", "--greedy", "--max_new_tokens", 24, "--keep_stop", "--stop", "€"
    )
    assert out == "aè€\n"


def test_the_fields_of_json_output(generate):
    _, out, _ = generate("--prompt", "a", "--greedy", "--max_new_tokens", 12, "--json", "--seed", 7)
    record = json.loads(out)
    assert list(record) == KEYS and out.count("\n") == 1
    assert (record["prompt"], record["text"], record["finish_reason"], record["seed"]) == (
        "a",
        AROUND[:6],
        "length",
        7,
    )
    assert record["tokens"] == list(AROUND.encode()[:12])
    assert (record["prompt_tokens"], record["new_tokens"]) == (1, 12)
    assert set(record["cache"]) >= {"bytes"} and record["seconds"] > 0


def test_log_probabilities(generate):
    _, out, _ = generate(
        "--prompt", "ab", "--greedy", "--max_new_tokens", 3, "--json", "--logprobs", 2, "--echo"
    )
    record = json.loads(out)
    assert list(record) == [*KEYS, "logprobs"]
    reported = record["logprobs"]
    assert (
        len(reported["logprobs"]) == len(reported["top"]) == 3
        and len(reported["top"][0]["ids"]) == 2
    )
    assert reported["prompt_tokens"] == ["a", "b"] and reported["prompt_logprobs"][0] is None


@pytest.mark.slow
def test_router_decisions_are_shown_traced_and_reported(generate, tmp_path):
    lines, page = tmp_path / "out.jsonl", tmp_path / "out.html"
    flags = [
        "--strategy",
        "entropy",
        "--low_entropy",
        "0.2",
        "--max_new_tokens",
        "6",
        "--seed",
        "3",
        "--n",
        "2",
        "--ignore_eos",
    ]
    code, out, _ = generate(
        "--prompt", "a", *flags, "--show_entropy", "--trace", lines, "--report", page
    )
    assert code == 0 and "sample 2 of 2, seed 3" in out and "mean entropy" in out
    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert [record["kind"] for record in records] == (["sample"] + ["token"] * 6) * 2
    assert records[0]["router"]["low_entropy"] == 0.2 and records[0]["prompt"] == "a"
    assert all(
        len(record["alternatives"]) == 10 and "attn_entropy" in record
        for record in records
        if record["kind"] == "token"
    )
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    plain = generate("--prompt", "a", *flags)[1]
    texts = [record["text"] for record in records if record["kind"] == "sample"]
    assert plain == "".join(
        f"--- sample {number} of 2 ---\na{text}\n" for number, text in enumerate(texts, 1)
    )


def test_the_attention_of_each_head_is_traced(generate, tmp_path):
    lines, page = tmp_path / "out.jsonl", tmp_path / "out.html"
    flags = ["--prompt", "a", "--greedy", "--max_new_tokens", "3"]
    code, out, _ = generate(*flags, "--attention_stats", "--trace", lines, "--report", page)
    assert (code, out) == (0, generate(*flags)[1]) and '"heads"' in page.read_text(encoding="utf-8")
    tokens = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()][1:]
    shapes = [{name: np.shape(rows) for name, rows in token["heads"].items()} for token in tokens]
    assert len(tokens) == 3 and {len(shape) for one in shapes for shape in one.values()} == {2}
    assert (
        shapes
        == [dict.fromkeys(("entropy", "varentropy", "agreement", "strength"), shapes[0]["entropy"])]
        * 3
    )
    code, _, err = generate(*flags, "--attention_stats")
    assert (
        code == 2
        and "--attention_stats adds the attention of each head to --trace or --report: give one of them"
        in err
    )
    code, _, err = generate(*flags, "--attention_stats", "--trace", lines, "--kv_budget", "0.5")
    assert (
        code == 2
        and "attention_stats reads all keys: leave kv.budget and kv.budget_tokens out" in err
    )


def test_an_output_that_fails_does_not_prevent_the_others(generate, tmp_path, monkeypatch):
    """Of text, trace and report, those that can be written are written, and the error names the
    other.
    """
    lines, page = tmp_path / "out.jsonl", tmp_path / "out.html"
    flags = [
        "--prompt",
        "a",
        "--greedy",
        "--max_new_tokens",
        "3",
        "--trace",
        lines,
        "--report",
        page,
    ]
    write = files.atomic_write
    for broken, whole in ((lines, page), (page, lines)):
        whole.unlink(missing_ok=True)

        def fails(path, data, broken=broken):
            if path == broken:
                raise UserError(f"cannot write {path}: No space left on device")
            write(path, data)

        monkeypatch.setattr(generating, "atomic_write", fails)
        code, out, err = generate(*flags)
        assert (code, out) == (2, "aè\ufffd\n")
        assert f"error: cannot write {broken}: No space left on device\n" in err and re.search(
            SUMMARY, err
        )
        assert whole.is_file()


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--trace", ""], ["--trace", "file"]),
        (["--trace", "{tmp}"], ["--trace", "{tmp}", "not a regular file"]),
        (["--trace", "{tmp}/link.jsonl"], ["--trace", "link.jsonl", "not a regular file"]),
        (["--report", "{tmp}/is.html"], ["--report", "is.html", "not a regular file"]),
        (["--trace", "{tmp}/absent/x.jsonl"], ["--trace", "no directory"]),
        (
            ["--trace", "{tmp}/x.html", "--report", "{tmp}/./x.html"],
            ["--trace", "--report", "x.html"],
        ),
    ],
)
def test_an_output_that_cannot_be_written_is_reported_before_generation(
    generate, tmp_path, flags, parts
):
    (tmp_path / "is.html").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "elsewhere")
    outcome = generate("--prompt", "a", *(flag.format(tmp=tmp_path) for flag in flags))
    assert_one_sentence(outcome, *(part.format(tmp=tmp_path) for part in parts))


def test_the_trace_is_written_when_the_reader_closes_the_pipe(generate, tmp_path, monkeypatch):
    lines = tmp_path / "out.jsonl"

    def gone(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    monkeypatch.setattr(cli, "_discard_output", lambda: None)
    assert (
        generate("--prompt", "a", "--greedy", "--max_new_tokens", "3", "--json", "--trace", lines)[
            0
        ]
        == 0
    )
    assert lines.is_file()


def test_a_trace_without_the_router(generate, tmp_path):
    lines = tmp_path / "out.jsonl"
    code, out, _ = generate(
        "--prompt", "a", "--greedy", "--max_new_tokens", "3", "--trace", lines, "--json"
    )
    assert code == 0 and "logprobs" not in json.loads(out), (
        "log-probabilities that were not requested are not printed"
    )
    tokens = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()][1:]
    assert [token["rank"] for token in tokens] == [0, 0, 0] and "strategy" not in tokens[0]


def test_prompts_from_a_file(generate, tmp_path):
    """Text and JSON lines, each with its own settings. Unicode line breaks do not end a line, and
    blank lines are skipped.
    """
    path = tmp_path / "prompts.txt"
    lines = [
        "\ufeffa",
        '{"prompt": "a", "max_new_tokens": 5}',
        "",
        '{"prompt": "x\u2028y", "greedy": false, "seed": 9}\r',
        "q\x0cr",
        '{"prompt": "a", "stop": ["😀"]}',
    ]
    path.write_bytes("\n".join(lines).encode())
    code, out, err = generate("--prompt_file", path, "--greedy", "--max_new_tokens", 12)
    records = [json.loads(line) for line in out.split("\n") if line]
    assert code == 0 and re.fullmatch(SUMMARY, err)
    assert [record["prompt"] for record in records] == ["a", "a", "x\u2028y", "q\x0cr", "a"]
    assert [record["new_tokens"] for record in records][:4] == [12, 5, 12, 12]
    assert [record["text"] for record in records][:2] == [AROUND[:6], "è€"]
    assert records[4]["text"] == "è€" and records[4]["finish_reason"] == "stop"
    assert records[2]["seed"] == 9


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--mirostat", 2, "--mirostat_tau", 3], '{"prompt": "a", "mirostat": 0}'),
        (["--top_k", 5, "--ties", "all"], '{"prompt": "a", "top_k": 0}'),
        (
            ["--preset", "kobold", "--sampler_order", "6,0,1,2,3,4,5"],
            '{"prompt": "a", "preset": "hf"}',
        ),
        ([], '{"prompt": "a", "max_generations": 3}'),
    ],
)
def test_the_settings_of_a_line_override_the_flags(generate, tmp_path, flags, line):
    """A line that switches a step off also removes the settings of flags that refine it."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    code, out, err = generate("--prompt_file", path, "--seed", 1, "--max_new_tokens", 12, *flags)
    assert code == 0, err
    assert (json.loads(out)["new_tokens"] == 3) == ("max_generations" in line)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"prompt": 3}', ["a string under the key prompt", "line 2"]),
        ('{"text": "a"}', ["a string under the key prompt", "line 2"]),
        ('{"prompt": "a"', ["must be a JSON object", "line 2"]),
        (
            '{"prompt": "a", "topp": 1}',
            ["generation.topp", "did you mean generation.top_p", "line 2"],
        ),
        ('{"prompt": "a", "top_p": 3}', ["generation.top_p", "line 2"]),
        (
            '{"prompt": "a", "preset": "hf", "top_a": 0.1}',
            ["generation.top_a cannot be used with generation.preset hf"],
        ),
        (
            '{"prompt": "a", "xtc_threshold": 0.2}',
            ["generation.xtc_threshold has no effect", "line 2"],
        ),
        ('{"prompt": "\\ud800"}', ["a lone surrogate"]),
        ('{"prompt": ' + "[" * 99999, ["must be a JSON object", "line 2"]),
    ],
)
def test_an_invalid_line_of_prompts_is_reported(generate, tmp_path, line, parts):
    path = tmp_path / "prompts.txt"
    path.write_text("fine\n" + line + "\n")
    assert_one_sentence(generate("--prompt_file", path), *parts)


def test_files_without_prompts(generate, tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert_one_sentence(
        generate("--prompt_file", tmp_path / "empty"), "at least one prompt is required"
    )
    assert_one_sentence(generate("--prompt_file", tmp_path / "bytes"), "not UTF-8 text")
    assert_one_sentence(generate("--prompt_file", tmp_path / "missing"), "missing", "No such file")
    assert_one_sentence(generate("--prompt_file", tmp_path), "Is a directory")


def test_a_context_that_is_too_short_is_one_warning(generate):
    code, out, err = generate("--prompt", "a" * 120, "--greedy", "--max_new_tokens", 20)
    assert code == 0 and out.startswith("a" * 120)
    warning, summary = err.splitlines()
    assert (
        warning
        == "warning: the context of 128 tokens leaves room for 8 new tokens after a prompt of 120:"
        " 12 fewer than requested"
    )
    assert re.fullmatch(SUMMARY, summary + "\n")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--topp", "0.9"], ["unknown flag --topp", "top_p"]),
        (["--temprature=1"], ["unknown flag --temprature", "temperature"]),
        (["more"], ["both name a run: more and"]),
        (["--top_p", "1.7"], ["generation.top_p", "[0, 1]", "1.7"]),
        (["--top_p", "x"], ["generation.top_p", "'x'"]),
        (["--top_k", "1.5"], ["generation.top_k", "integer"]),
        (["--temperature", "-1"], ["generation.temperature", "-1"]),
        (["--temperature", "nan"], ["generation.temperature"]),
        (["--max_new_tokens", "-3"], ["generation.max_new_tokens", "-3"]),
        (["--max_new_tokens"], ["max_new_tokens", "expected one argument"]),
        (["--n", "0"], ["generation.n", "0"]),
        (["--seed", "-1"], ["generation.seed", "-1"]),
        (["--seed", "4294967296"], ["generation.seed"]),
        (["--greedy", "maybe"], ["generation.greedy", "true or false", "'maybe'"]),
        (["--weights", "int3"], ["generation.weights", "int8"]),
        (["--stop", ""], ["generation.stop"]),
        (["--max_new_tokens", "3", "--max_generations", "4"], ["max_generations", "an alias"]),
        (["--no_cache", "--use_cache", "true"], ["--no_cache", "contradict"]),
        (["--no_cache", "--kv_budget", "0.5"], ["kv.budget has no effect",
                                                "generation.use_cache is false"]),
        (["--kv_budget", "0"], ["kv.budget must be a number in (0, 1]", "got 0"]),
        (["--kv_budget", "1.5"], ["kv.budget must be", "got 1.5"]),
        (["--kv_budget", "0.5", "--kv_calibration", "nowhere.json", "--kv_signal", "entropy"],
         ["nowhere.json"]),
        (["--prompt", "a", "--prompt_file", "b"], ["--prompt_file", "use one of them"]),
        (["--chat"], ["--chat answers a message", "--prompt"]),
        (["--chat", "--prompt", "a"], ["has no chat template", "--chat_template"]),
        (["--chat", "--prompt", "a", "--parse_special"], ["--parse_special", "--chat",
                                                          "use one of the flags"]),
        (["--prompt", "a", "--system", "b"], ["--system needs --chat"]),
        (["--prompt", "a", "--chat_template", "plain"], ["--chat_template needs --chat"]),
        (["--logprobs", "3"], ["--logprobs needs --json"]),
        (["--json", "--logprobs", "-3"], ["--logprobs", "-3"]),
        (["--json", "--logprobs", "260"], ["logprobs", "260"]),
        (["--json", "--echo"], ["echo", "logprobs"]),
        (["--stream", "--json"], ["--stream", "--json"]),
        (["--stream", "--n", "2", "--max_new_tokens", "5"], ["--stream", "--n 1"]),
        (["--prompt", "a" * 128], ["128", "context", "shorten"]),
        (["--prompt", "\udcff"], ["lone surrogate"]),
        (["--training.lr", "1"], ["unknown flag --training.lr"]),
        (["--low_entropy", "1"], ["router.low_entropy has no effect", "generation.strategy"]),
        (["--strategy", "entropy", "--typical", "0.5"],
         ["generation.typical cannot be used with generation.strategy entropy"]),
        (["--strategy", "entropy", "--greedy"], ["generation.strategy has no effect",
                                                 "generation.greedy"]),
        (["--strategy", "entropy", "--router_preset", "calibrated"], ["measured on this model",
            "dantinox calibrate"]),
        (["--strategy", "entropy", "--clarify_token", "ab"], ["router.clarify_token", "one token",
            "2 tokens"]),
        (["--strategy", "entropy", "--clarify_token", "999"], ["router.clarify_token", "[0, 259)",
            "999"]),
        (["--strategy", "entropy", "--clarify_text", "x" * 257], ["router.clarify_text",
            "at most 256 tokens", "257"]),
        (["--strategy", "entropy", "--clarify_text", "a", "--clarify_token", "1"],
         ["router.clarify_text", "null"]),
        (["--clarify_text", "a"],
         ["router.clarify_text has no effect while generation.strategy is chain"]),
        (["--strategy", "entropy", "--candidates", "0"], ["router.candidates", "0"]),
        (["--strategy", "random"], ["generation.strategy", "chain, entropy", "'random'"]),
        (["--show_entropy", "--json"], ["--show_entropy", "--json"]),
        (["--report", "page.pdf"], ["--report", ".html", "page.pdf"]),
        (["--trace", "nowhere/out.jsonl"], ["--trace", "nowhere", "no directory"]),
        (["--regex", "a+", "--json_schema", "a.json"], ["--json_schema and --regex",
                                                        "use one of them"]),
        (["--regex", "a(b"], ["the regex cannot be used at character 2", "unclosed group"]),
        (["--grammar", "a.txt"], ["--grammar must name a .lark or .gbnf file", "a.txt"]),
        (["--grammar", "nowhere.gbnf"], ["cannot read --grammar nowhere.gbnf", "No such file"]),
        (["--json_schema", "."], ["cannot read --json_schema ."]),
        (["--stop", "---"], ["the value --- must be written as FLAG=---"]),
        (["--stop", "a", "-----"], ["the value ----- must be written as FLAG=-----"]),
    ],
)  # fmt: skip
def test_an_error_is_one_sentence(generate, argv, parts):
    assert_one_sentence(generate(*argv), *parts)


def test_no_command_and_an_unknown_one(dantinox):
    code, out, err = dantinox()
    assert (
        code == 2
        and out.startswith("usage: dantinox COMMAND")
        and "\n  generate " in out
        and err == ""
    )
    assert_one_sentence(dantinox("genrate"), "unknown command genrate, did you mean generate?")
    assert_one_sentence(
        dantinox("xyzzy"), "unknown command xyzzy: dantinox --help lists the commands"
    )
    assert_one_sentence(
        dantinox("train", "--config", "quikstart"),
        "no config file at quikstart, did you mean quickstart?",
    )
    assert_one_sentence(dantinox("train", "--num_hidden_layers", "3"), "did you mean --num_blocks?")
    assert_one_sentence(
        dantinox("speedrun", "--pric", "1"), "unknown flag --pric, did you mean --price?"
    )
    assert_one_sentence(
        dantinox("eval", "ppl", "--token", "4"), "unknown flag --token, did you mean --tokens?"
    )
    assert_one_sentence(dantinox("generate"), "--run_dir")


@pytest.mark.slow
def test_an_adapter_gives_the_tokens_of_the_merged_model(generate, dantinox, run_dir, tmp_path):
    tuned = make_lora_run(tmp_path / "tuned", run_dir, 1)
    flags = ["--prompt", "hello", "--greedy", "--max_new_tokens", 12, "--json"]
    base, adapted, merged = (json.loads(run(*flags, *more)[1]) for run, more in (
        (generate, []), (generate, ["--lora", tuned]),
        (lambda *argv: dantinox("generate", tuned, *argv), []),
    ))  # fmt: skip
    assert adapted["text"] == merged["text"] != base["text"]
    assert adapted["tokens"] == merged["tokens"] and len(adapted["tokens"]) == 12


def test_an_adapter_that_does_not_fit_is_one_sentence(generate, run_dir, ending_run_dir, tmp_path):
    for path, words in (
        (tmp_path / "nothing", "it must be a run with adapters or a PEFT folder"),
        (ending_run_dir, "is a run without adapters"),
        (
            make_lora_run(tmp_path / "other", run_dir, 1, digest="0" * 64),
            "were trained on the weights",
        ),
    ):
        assert_one_sentence(generate("--prompt", "hello", "--lora", path), words)


def test_samples_are_numbered(generate):
    _, out, _ = generate("--prompt", "a", "--greedy", "--max_new_tokens", 12, "--n", 2)
    assert out == "".join(f"--- sample {number} of 2 ---\na{AROUND[:6]}\n" for number in (1, 2))


TIMES = ("seconds", "compile_seconds", "decode_tok_per_s")


def answers(path):
    """Returns the records of a file without the times."""
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMES}
        for line in path.read_text().splitlines()
    ]


@pytest.fixture
def prompt_file(tmp_path, monkeypatch):
    """A file of five prompts, of which two are decoded together."""
    monkeypatch.setattr(generating, "PROMPTS_TOGETHER", 2)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{letter}\n" for letter in "abcba"))
    return path


def test_answers_are_written_when_their_batch_ends(generate, prompt_file, tmp_path, monkeypatch):
    """The process ends before the third batch; the file then has the answers of two batches."""
    out, parts, written = tmp_path / "out.jsonl", generating._parts, []

    def watched(*args):
        for part in parts(*args):
            written.append(out.read_text().count("\n"))
            yield part

    monkeypatch.setattr(generating, "_parts", watched)
    assert generate("--prompt_file", prompt_file, "--out", out, "--max_new_tokens", 3, "--n", 2)[
        :2
    ] == (0, "")
    assert written == [0, 4, 8] and len(answers(out)) == 10


@pytest.mark.parametrize("kept", [0, 1, 4, 5, 10])
@pytest.mark.parametrize("rest", ["", '{"index": 0, "pro'])
def test_a_resumed_file_equals_that_of_an_uninterrupted_run(
    generate, prompt_file, tmp_path, kept, rest
):
    """The random seed of the first run applies to the answers that are added."""
    out = tmp_path / "out.jsonl"
    flags = [
        "--prompt_file",
        prompt_file,
        "--out",
        out,
        "--max_new_tokens",
        3,
        "--n",
        2,
        "--temperature",
        50,
    ]
    assert generate(*flags, *(["--seed", 7] if kept == 0 else []))[0] == 0
    whole = answers(out)
    assert [record["prompt"] for record in whole] == list("aabbccbbaa")
    assert whole[0]["tokens"] != whole[1]["tokens"], "two samples of 50 times the temperature"
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:kept]) + rest)
    assert generate(*flags, "--resume", *(["--seed", 7] if kept == 0 else []))[0] == 0
    assert (
        answers(out) == whole and out.read_text().splitlines(keepends=True)[:kept] == lines[:kept]
    )


@pytest.mark.parametrize(
    ("content", "flags", "parts"),
    [
        ("{}\n", [], ["out.jsonl exists already", "--resume"]),
        ("{}\n", ["--resume"], ["out.jsonl, line 1, is no answer to these prompts"]),
        (
            '{"prompt": "a", "index": 0, "seed": 3}\n',
            ["--resume", "--seed", 4],
            ["line 1, is no answer", "seed"],
        ),
        ("[]\n", ["--resume"], ["line 1, is not a JSON object"]),
        ("a\n", ["--resume"], ["line 1, is not JSON"]),
        ('{"prompt": "a", "index": 0, "seed": 3}\n' * 2, ["--resume"], ["line 2, is no answer"]),
        ('{"prompt": "a", "index": 0}\n', ["--resume"], ["line 1, is no answer"]),
        (None, ["--resume", "--trace", "x.jsonl"], ["--resume", "--trace"]),
    ],
)
def test_files_that_cannot_be_continued(generate, prompt_file, tmp_path, content, flags, parts):
    out = tmp_path / "out.jsonl"
    if content is not None:
        out.write_text(content)
    assert_one_sentence(generate("--prompt_file", prompt_file, "--out", out, *flags), *parts)
    assert content is None or out.read_text() == content


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--trace", "prompts.jsonl"], ["--prompt_file", "--trace", "prompts.jsonl"]),
        (["--out", "new.jsonl", "--trace", "./new.jsonl"], ["--out", "--trace", "new.jsonl"]),
        (
            ["--json_schema", "a.html", "--report", "a.html"],
            ["--json_schema", "--report", "a.html"],
        ),
        (["--resume", "--out", "prompts.jsonl"], ["--prompt_file", "--out", "prompts.jsonl"]),
    ],
)
def test_an_output_does_not_replace_an_input_or_another_output(
    generate, prompt_file, tmp_path, flags, parts
):
    """The current directory is `tmp_path`, which has the file of prompts."""
    (tmp_path / "a.html").write_text("{}")
    before = prompt_file.read_text()
    assert_one_sentence(
        generate("--prompt_file", prompt_file, "--max_new_tokens", 2, *flags), *parts
    )
    assert prompt_file.read_text() == before


def test_out_and_resume_need_each_other(generate, tmp_path):
    assert_one_sentence(
        generate("--prompt", "a", "--out", tmp_path / "x"), "--out", "give --prompt_file"
    )
    assert_one_sentence(generate("--prompt", "a", "--resume"), "--resume", "give --out")
