"""The command line: what stands on stdout and what on stderr, one sentence per mistake, and real processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dantinox import cli, files
from dantinox.cli import generate as generating
from dantinox.config import UserError, build_config

ROOT = Path(__file__).resolve().parents[2]
AROUND = "è€😀b\nca"  # what the model of `run_dir` says after "a", again and again
SUMMARY = (
    r"\d+ prompt \+ \d+ new tokens, first token [\d.]+ s, [\d.]+ tok/s, compile [\d.]+ s, seed (\d+|\[.*\])(, cache .*)?\n"
)
KEYS = [
    "index", "prompt", "text", "tokens", "finish_reason", "prompt_tokens", "new_tokens", "seed", "seconds", "compile_seconds",
    "decode_tok_per_s", "cache",
]  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture
def dantinox(capfd):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def run(*argv):
        code = cli.main([str(arg) for arg in argv])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def generate(dantinox, run_dir):
    return lambda *argv: dantinox("generate", "--run_dir", run_dir, *argv)


@pytest.fixture
def copy(run_dir, tmp_path):
    """A run directory to be damaged."""
    return Path(shutil.copytree(run_dir, tmp_path / "copy"))


def assert_one_sentence(outcome, *parts):
    """Exit code 2, nothing on stdout, one line on stderr that holds all the parts."""
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 400, err
    for part in parts:
        assert part in err, err


# Generation


def test_stdout_is_prompt_and_continuation_and_nothing_else(generate):
    code, out, err = generate("--prompt", "a", "--greedy", "--max_new_tokens", 12)
    assert (code, out) == (0, "a" + AROUND[:6] + "\n")
    assert re.fullmatch("1 prompt \\+ 12 new" + SUMMARY[SUMMARY.index(" tokens") :], err)


def test_the_prompt_when_none_is_given(generate):
    _, out, _ = generate("--greedy", "--max_new_tokens", 2)
    assert out.startswith("\n"), "the line break that stands for an empty training.sample_prompt"


def test_a_message_is_answered_through_the_chat_template(dantinox, copy, tmp_path):
    """The template puts the letter that begins the cycle last; only the answer is printed."""
    (copy / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}a")
    answer = ["generate", "--run_dir", copy, "--chat", "--greedy", "--max_new_tokens", 13]
    assert dantinox(*answer, "--prompt", "b")[:2] == (0, AROUND + "\n")
    code, out, err = dantinox(*answer, "--prompt", "b", "--system", "c", "--json")
    record = json.loads(out)
    assert (record["prompt"], record["text"]) == ("b", AROUND) and err.startswith("5 prompt + 13 new tokens")
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
        ("--json_schema", "a.json", '{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}', r"\[[^\[]*\]"),
        ("--grammar", "a.lark", 'start: "no" | "yes" "!"', "no|yes!"),
        ("--grammar", "a.gbnf", 'root ::= "no" | "yes" [.!]\n', "no|yes[.!]"),
    ],
)
def test_a_text_that_has_to_be_something(generate, tmp_path, flag, name, source, continuation):
    if name is not None:
        (tmp_path / name).write_text(source, encoding="utf-8")
    code, out, _ = generate("--prompt", "a", "--n", 3, "--seed", 1, "--json", flag, tmp_path / name if name else source)
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(results) == 3
    for result in results:
        assert result["finish_reason"] == "eos" and re.fullmatch(continuation, result["text"]), result
        if flag == "--json_schema":
            assert all(type(item) is bool for item in json.loads(result["text"]))


@pytest.mark.parametrize(
    ("flag", "name", "content", "parts"),
    [
        ("--json_schema", "a.json", b'{\n"a"}', ["the JSON schema is not valid JSON in line 2"]),
        ("--grammar", "a.lark", b"start: b", ["the Lark grammar cannot be used in line 1", 'unknown name: "b"']),
        ("--grammar", "a.gbnf", b"\xff\xfe", ["cannot read --grammar", "it is not text"]),
        ("--grammar", "a.gbnf", b"#" * 70_000, ["the GBNF grammar must have at most 64 KB"]),
    ],
)
def test_a_wrong_constraint_is_told_before_the_model_is_loaded(generate, tmp_path, monkeypatch, flag, name, content, parts):
    (tmp_path / name).write_bytes(content)
    monkeypatch.setattr("dantinox.generation.load", lambda *_: pytest.fail("the model was loaded"))
    assert_one_sentence(generate(flag, tmp_path / name), *parts)


@pytest.mark.parametrize("flags", [["--greedy"], ["--greedy", "true"], ["--greedy=True"], ["--temperature", "0"]])
def test_greedy_in_every_spelling(generate, flags):
    assert generate("--prompt", "a", "--max_new_tokens", 12, *flags)[1] == "a" + AROUND[:6] + "\n"
    assert generate(*flags, "--prompt", "a", "--max_new_tokens", 12)[1] == "a" + AROUND[:6] + "\n"


def test_false_is_false(generate):
    """`--greedy False` was true once."""
    hot = ["--prompt", "a", "--max_new_tokens", 12, "--temperature", 50, "--seed", 3]
    assert generate(*hot, "--greedy", "False")[1] == generate(*hot)[1] != generate(*hot, "--greedy", "True")[1]


@pytest.mark.parametrize("flags", [["--no_cache"], ["--use_cache", "false"], ["--generation.use_cache", "False"]])
def test_without_a_cache(generate, flags):
    code, out, _ = generate("--prompt", "a", "--greedy", "--max_new_tokens", 12, "--json", *flags)
    record = json.loads(out)
    assert code == 0 and record["text"] == AROUND[:6] and record["cache"] is None


@pytest.mark.parametrize("budget", [("--kv_budget", 0.2), ("--kv_budget_tokens", 8), ("--kv_budget_tokens", 16)])
def test_a_budget_for_a_text_that_fits_anyway_is_exact_and_said_so(generate, budget):
    _, out, err = generate("--prompt", "a", "--greedy", "--max_new_tokens", 12, *budget)
    assert out == "a" + AROUND[:6] + "\n"
    assert re.search(r"cache [\d.]+ MB \(uncompressed: nothing can be evicted from at most 16 tokens\)\n", err)


@pytest.mark.parametrize("stream", ["--stream", "--no_stream"])
def test_streamed_or_not_the_output_is_the_same(generate, stream):
    _, out, err = generate("--prompt", "a", "--greedy", "--max_new_tokens", 25, stream)
    assert out == "a" + (AROUND * 2)[:13] + "\n" and re.fullmatch(SUMMARY, err)


def test_a_seed_is_told_and_gives_the_text_again(generate):
    hot = ["--prompt", "a", "--max_new_tokens", 12, "--temperature", 5, "--top_k", 50, "--top_p", 0.9]
    _, out, err = generate(*hot)
    seed = re.search(r"seed (\d+)", err)[1]
    assert generate(*hot, "--seed", seed)[1] == out
    assert generate(*hot)[1] != out


def test_samples(generate):
    _, out, err = generate("--prompt", "a", "--max_new_tokens", 12, "--temperature", 5, "--n", 3, "--seed", 1, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert len({record["text"] for record in records}) == 3
    assert err.startswith("1 prompt + 36 new tokens")


def test_stop_strings_of_the_shell(generate):
    """Backslash-n is a line break; several strings, in any place."""
    _, out, _ = generate("--stop", r"b\n", "zzz", "--prompt", "a", "--greedy", "--max_new_tokens", 24)
    assert out == "aè€😀\n"
    _, out, _ = generate("--prompt", "a", "--greedy", "--max_new_tokens", 24, "--keep_stop", "--stop", "€")
    assert out == "aè€\n"


def test_json_holds_exactly_what_is_promised(generate):
    _, out, _ = generate("--prompt", "a", "--greedy", "--max_new_tokens", 12, "--json", "--seed", 7)
    record = json.loads(out)
    assert list(record) == KEYS and out.count("\n") == 1
    assert (record["prompt"], record["text"], record["finish_reason"], record["seed"]) == ("a", AROUND[:6], "length", 7)
    assert record["tokens"] == list(AROUND.encode()[:12])
    assert (record["prompt_tokens"], record["new_tokens"]) == (1, 12)
    assert set(record["cache"]) >= {"bytes"} and record["seconds"] > 0


def test_log_probabilities(generate):
    _, out, _ = generate("--prompt", "ab", "--greedy", "--max_new_tokens", 3, "--json", "--logprobs", 2, "--echo")
    record = json.loads(out)
    assert list(record) == [*KEYS, "logprobs"]
    told = record["logprobs"]
    assert len(told["logprobs"]) == len(told["top"]) == 3 and len(told["top"][0]["ids"]) == 2
    assert told["prompt_tokens"] == ["a", "b"] and told["prompt_logprobs"][0] is None


@pytest.mark.exhaustive
def test_what_the_router_did_goes_to_three_places(generate, tmp_path):
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
    code, out, _ = generate("--prompt", "a", *flags, "--show_entropy", "--trace", lines, "--report", page)
    assert code == 0 and "sample 2 of 2, seed 3" in out and "mean entropy" in out
    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert [record["kind"] for record in records] == (["sample"] + ["token"] * 6) * 2
    assert records[0]["router"]["low_entropy"] == 0.2 and records[0]["prompt"] == "a"
    assert all(
        len(record["alternatives"]) == 10 and "attn_entropy" in record for record in records if record["kind"] == "token"
    )
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    plain = generate("--prompt", "a", *flags)[1]
    assert plain == "".join("a" + record["text"] + "\n" for record in records if record["kind"] == "sample")


def test_one_output_that_fails_keeps_no_other_away(generate, tmp_path, monkeypatch):
    """Text, lines and page: what can be written is, and the sentence says what cannot."""
    lines, page = tmp_path / "out.jsonl", tmp_path / "out.html"
    flags = ["--prompt", "a", "--greedy", "--max_new_tokens", "3", "--trace", lines, "--report", page]
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
        assert f"error: cannot write {broken}: No space left on device\n" in err and re.search(SUMMARY, err)
        assert whole.is_file()


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--trace", ""], ["--trace", "file"]),
        (["--trace", "{tmp}"], ["--trace", "{tmp}", "no file"]),
        (["--trace", "{tmp}/link.jsonl"], ["--trace", "link.jsonl", "no file"]),
        (["--report", "{tmp}/is.html"], ["--report", "is.html", "no file"]),
        (["--trace", "{tmp}/absent/x.jsonl"], ["--trace", "no directory"]),
        (["--trace", "{tmp}/x.html", "--report", "{tmp}/./x.html"], ["--trace", "--report", "x.html"]),
    ],
)
def test_where_a_trace_cannot_go_is_told_at_once(generate, tmp_path, flags, parts):
    (tmp_path / "is.html").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "elsewhere")
    outcome = generate("--prompt", "a", *(flag.format(tmp=tmp_path) for flag in flags))
    assert_one_sentence(outcome, *(part.format(tmp=tmp_path) for part in parts))


def test_a_reader_who_leaves_takes_no_trace_along(generate, tmp_path, monkeypatch):
    lines = tmp_path / "out.jsonl"

    def gone(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    monkeypatch.setattr(cli, "_discard_output", lambda: None)
    assert generate("--prompt", "a", "--greedy", "--max_new_tokens", "3", "--json", "--trace", lines)[0] == 0
    assert lines.is_file()


def test_a_chain_can_be_traced_as_well(generate, tmp_path):
    lines = tmp_path / "out.jsonl"
    code, out, _ = generate("--prompt", "a", "--greedy", "--max_new_tokens", "3", "--trace", lines, "--json")
    assert code == 0 and "logprobs" not in json.loads(out), "what was not asked for is not printed"
    tokens = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()][1:]
    assert [token["rank"] for token in tokens] == [0, 0, 0] and "strategy" not in tokens[0]


def test_prompts_from_a_file(generate, tmp_path):
    """Text and JSON lines, each with its own settings; line breaks of Unicode are no ends of lines, blank lines no prompts."""
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
        (["--preset", "kobold", "--sampler_order", "6,0,1,2,3,4,5"], '{"prompt": "a", "preset": "hf"}'),
        (["--max_new_tokens", 9], '{"prompt": "a", "max_generations": 3}'),
    ],
)
def test_a_line_lies_over_the_flags(generate, tmp_path, flags, line):
    """What a line switches off takes its refinements along, though the flags set them."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    code, out, err = generate("--prompt_file", path, "--seed", 1, *flags)
    assert code == 0, err
    assert (json.loads(out)["new_tokens"] == 3) == ("max_generations" in line)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"prompt": 3}', ["a string under the key prompt", "line 2"]),
        ('{"text": "a"}', ["a string under the key prompt", "line 2"]),
        ('{"prompt": "a"', ["must be a JSON object", "line 2"]),
        ('{"prompt": "a", "topp": 1}', ["generation.topp", "did you mean generation.top_p", "line 2"]),
        ('{"prompt": "a", "top_p": 3}', ["generation.top_p", "line 2"]),
        ('{"prompt": "a", "preset": "hf", "top_a": 0.1}', ["generation.top_a cannot be used with generation.preset hf"]),
        ('{"prompt": "a", "xtc_threshold": 0.2}', ["generation.xtc_threshold has no effect", "line 2"]),
        ('{"prompt": "\\ud800"}', ["a lone surrogate"]),
        ('{"prompt": ' + "[" * 99999, ["must be a JSON object", "line 2"]),
    ],
)
def test_a_wrong_line_of_prompts_is_named(generate, tmp_path, line, parts):
    path = tmp_path / "prompts.txt"
    path.write_text("fine\n" + line + "\n")
    assert_one_sentence(generate("--prompt_file", path), *parts)


def test_a_file_without_prompts(generate, tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert_one_sentence(generate("--prompt_file", tmp_path / "empty"), "there is no prompt")
    assert_one_sentence(generate("--prompt_file", tmp_path / "bytes"), "not UTF-8 text")
    assert_one_sentence(generate("--prompt_file", tmp_path / "missing"), "missing", "No such file")
    assert_one_sentence(generate("--prompt_file", tmp_path), "Is a directory")


def test_a_context_too_short_is_one_warning(generate):
    code, out, err = generate("--prompt", "a" * 120, "--greedy", "--max_new_tokens", 20)
    assert code == 0 and out.startswith("a" * 120)
    warning, summary = err.splitlines()
    assert warning == (
        "warning: the context of 128 tokens leaves room for 8 new tokens after a prompt of 120: 12 fewer than requested"
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
        (["--no_cache", "--kv_budget", "0.5"], ["kv.budget has no effect", "generation.use_cache is false"]),
        (["--kv_budget", "0"], ["kv.budget must be a number in (0, 1]", "got 0"]),
        (["--kv_budget", "1.5"], ["kv.budget must be", "got 1.5"]),
        (["--kv_budget", "0.5", "--kv_calibration", "nowhere.json", "--kv_signal", "entropy"], ["nowhere.json"]),
        (["--prompt", "a", "--prompt_file", "b"], ["--prompt_file", "use one of them"]),
        (["--chat"], ["--chat answers a message", "--prompt"]),
        (["--chat", "--prompt", "a"], ["has no chat template", "--chat_template"]),
        (["--chat", "--prompt", "a", "--parse_special"], ["--parse_special", "--chat", "use one of them"]),
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
        (["--strategy", "entropy", "--typical", "0.5"], ["generation.typical cannot be used with generation.strategy entropy"]),
        (["--strategy", "entropy", "--greedy"], ["generation.strategy has no effect", "generation.greedy"]),
        (["--strategy", "entropy", "--router_preset", "calibrated"], ["measured on this model", "dantinox calibrate"]),
        (["--strategy", "entropy", "--clarify_token", "ab"], ["router.clarify_token", "one token", "2 tokens"]),
        (["--strategy", "entropy", "--clarify_token", "999"], ["router.clarify_token", "[0, 259)", "999"]),
        (["--strategy", "entropy", "--candidates", "0"], ["router.candidates", "0"]),
        (["--strategy", "random"], ["generation.strategy", "chain, entropy", "'random'"]),
        (["--show_entropy", "--json"], ["--show_entropy", "--json"]),
        (["--report", "page.pdf"], ["--report", ".html", "page.pdf"]),
        (["--trace", "nowhere/out.jsonl"], ["--trace", "nowhere", "no directory"]),
        (["--regex", "a+", "--json_schema", "a.json"], ["--json_schema and --regex", "use one of them"]),
        (["--regex", "a(b"], ["the regex cannot be used at character 2", "unclosed group"]),
        (["--grammar", "a.txt"], ["--grammar must name a .lark or .gbnf file", "a.txt"]),
        (["--grammar", "nowhere.gbnf"], ["cannot read --grammar nowhere.gbnf", "No such file"]),
        (["--json_schema", "."], ["cannot read --json_schema ."]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(generate, argv, parts):
    assert_one_sentence(generate(*argv), *parts)


def test_no_command_and_an_unknown_one(dantinox):
    assert_one_sentence(dantinox(), "command")
    assert_one_sentence(dantinox("genrate"), "genrate", "generate")
    assert_one_sentence(dantinox("generate"), "--run_dir")


# Run directories that are no good


def test_a_directory_that_is_no_run(dantinox, tmp_path, copy):
    (tmp_path / "empty").mkdir()
    assert_one_sentence(dantinox("generate", "--run_dir", tmp_path / "nowhere"), "no run directory at", "nowhere")
    assert_one_sentence(dantinox("generate", "--run_dir", tmp_path / "empty"), "config.yaml")
    (copy / "model_weights.msgpack").unlink()
    assert_one_sentence(dantinox("generate", "--run_dir", copy), "has no weights yet", "model_weights.msgpack")


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("model_weights.msgpack", b"", ["model_weights.msgpack"]),
        ("model_weights.msgpack", b"\x00 no weights", ["model_weights.msgpack"]),
        ("config.yaml", b"model: {dim: [}", ["config.yaml", "line 1"]),
        ("config.yaml", b"model: {dim: 48, n_heads: 4}", ["config.yaml is damaged: it has 28 bytes", "--accept"]),
        ("config.yaml", b"\xff\xfe\x00", ["config.yaml"]),
        ("config.yaml", b"modle: {dim: 32}", ["modle", "model"]),
        ("tokenizer.json", b"{}", ["tokenizer.json"]),
        ("tokenizer.json", b'{"version": "1.0"', ["tokenizer.json"]),
        ("tokenizer.json", b"\xff", ["tokenizer.json"]),
        ("tokenizer.json", None, ["tokenizer.json"]),
    ],
)
def test_a_damaged_file_is_named(dantinox, copy, name, content, parts):
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content)
    assert_one_sentence(dantinox("generate", "--run_dir", copy), *parts)


def test_half_a_weights_file(dantinox, copy):
    path = copy / "model_weights.msgpack"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert_one_sentence(dantinox("generate", "--run_dir", copy), "model_weights.msgpack")


def test_another_runs_tokenizer(dantinox, copy):
    from dantinox.config import TokenizerSection
    from dantinox.text import train_tokenizer

    characters = train_tokenizer(TokenizerSection(tokenizer_type="char"), lambda: iter(["abc"]))
    (copy / "tokenizer.json").write_text(characters.to_json(), encoding="utf-8")
    assert_one_sentence(dantinox("generate", "--run_dir", copy), "tokenizer.json is damaged", "--accept")
    assert dantinox("verify", copy)[0] == 1
    assert dantinox("verify", copy, "--accept")[0] == 0
    assert_one_sentence(dantinox("generate", "--run_dir", copy), "model_weights.msgpack", "shape")


def test_debug_shows_the_traceback(run_dir):
    from dantinox.config import UserError

    with pytest.raises(UserError, match="top_p"):
        cli.main(["generate", "--run_dir", str(run_dir), "--top_p", "7", "--debug"])


def test_ctrl_c_is_one_word(generate, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(generating, "_prompts", interrupted)
    assert generate() == (130, "", "interrupted\n")


# Real processes


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Where compiled programs are kept for the test's own processes, all of them."""
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def process(environment, *argv, script="generate.py", **options):
    return subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, argv)],
        capture_output="stdout" not in options, env=environment, timeout=120, **options,
    )  # fmt: skip


def test_a_process_writes_utf8_whatever_the_locale(environment, run_dir, tmp_path):
    """From another folder, the prompt from stdin, no terminal; compiled programs go to the user's cache."""
    done = process(
        environment | {"PYTHONIOENCODING": "ascii"}, "--run_dir", run_dir, "--prompt", "-", "--greedy",
        "--max_new_tokens", 12, input=b"xa", cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout.decode()) == (0, "xa" + AROUND[:6] + "\n")
    assert re.fullmatch(SUMMARY, done.stderr.decode())
    assert any((Path(environment["XDG_CACHE_HOME"]) / "dantinox").rglob("*"))
    assert list(tmp_path.iterdir()) == [], "generating leaves nothing behind"


def test_help_needs_no_jax(environment):
    script = (
        "import sys; sys.argv = ['dantinox', '--help']\ntry:\n import dantinox.cli as c; c.entry()\nexcept SystemExit: pass\n"
    )
    script += "assert not {'jax', 'flax', 'numpy', 'tokenizers'} & set(sys.modules), 'heavy imports'"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert b"generate" in done.stdout and done.stderr == b""


@pytest.mark.skipif(os.name != "posix", reason="pipes of a shell")
@pytest.mark.parametrize("reader", ["head -c 3", "true"])
def test_a_reader_that_goes_away_is_no_error(environment, run_dir, reader):
    command = f"{sys.executable} {ROOT}/generate.py --run_dir {run_dir} --prompt a --greedy --max_new_tokens 100 | {reader}"
    done = subprocess.run(command, shell=True, capture_output=True, env=environment, timeout=120)
    assert "aè".encode().startswith(done.stdout)
    assert done.stderr == b"" or re.fullmatch(SUMMARY, done.stderr.decode()), done.stderr.decode()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_full_disk_is_one_sentence(environment, run_dir):
    with open("/dev/full", "wb") as full:
        done = process(
            environment, "--run_dir", run_dir, "--prompt", "a", "--max_new_tokens", 2, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[-1] == "error: the output: No space left on device"
    assert b"Traceback" not in done.stderr and b"ignored" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_text_is_coming(environment, run_dir, tmp_path):
    """The text so far, one word on stderr, exit code 130."""
    argv = [sys.executable, ROOT / "generate.py", "--run_dir", run_dir, "--prompt", "a", "--max_new_tokens", "100", "--stream"]
    for attempt in range(3):  # Python loses an interrupt that falls into a finalizer
        own = environment | {"XDG_CACHE_HOME": str(tmp_path / str(attempt))}  # behind the prompt is a second of compiling
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=own) as running:
            assert running.stdout.read(1) == b"a"
            running.send_signal(signal.SIGINT)
            _, err = running.communicate(timeout=60)
        if running.returncode != 0:
            break
    assert (running.returncode, err.decode()) == (130, "interrupted\n")


# Training: the command's own behaviour; what training does is tested in its room.


def train(environment, *argv):
    command = [sys.executable, ROOT / "train.py", *argv]
    return subprocess.run([str(a) for a in command], capture_output=True, text=True, env=environment, timeout=120, cwd=ROOT)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--config", "nowhere.yaml"], "no config file at nowhere.yaml"),
        (["--lr", "-1"], "training.lr must be a number > 0, got -1 (command line)"),
        (["--seed", "3"], "--seed is a key of two sections: write --training.seed or --generation.seed"),
        (["--data_path", "nowhere.txt"], "no corpus at 'nowhere.txt'"),
        (
            ["--use_moe", "True", "--n_experts", "2", "--top_k_mlp", "3"],
            "moe.top_k_mlp must be at most moe.n_experts, got 3 and 2",
        ),
        (["--resume"], "--resume needs --run_dir"),
    ],
)
def test_a_mistake_in_training(dantinox, tmp_path, flags, says):
    assert_one_sentence(dantinox("train", *flags, *([] if "--resume" in flags else ["--run_dir", tmp_path / "run"])), says)
    assert not (tmp_path / "run").exists()


def test_a_mistake_in_training_as_a_process(environment, tmp_path):
    done = train(environment, "--lr", "-1", "--run_dir", tmp_path / "run")
    assert_one_sentence((done.returncode, done.stdout, done.stderr), "training.lr must be a number > 0, got -1 (command line)")
    assert not (tmp_path / "run").exists()


TINY = [
    "--dim", 16, "--n_heads", 2, "--num_blocks", 1, "--max_context", 16, "--tokenizer_type", "byte", "--batch_size", 2,
    "--steps", 4, "--eval_every", 2, "--warmup_steps", 1, "--sample_every", 4, "--max_new_tokens", 5,
]  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Nel mezzo del cammin di nostra vita\n" * 40)
    return path


@pytest.mark.parametrize(
    "name", ["quickstart", "dante", "recall", "shakespeare_char", "gpt2_124m", "llama_1b", "llama_8b", "moe_2b"]
)
def test_every_config_is_parsed_and_built(dantinox, name):
    """Built from shapes alone; a billion parameters take no memory."""
    import jax
    from flax import nnx

    from dantinox.config import load_config
    from dantinox.model import Transformer

    path = ROOT / "configs" / f"{name}.yaml"
    assert "$schema=schema.json" in path.read_text().splitlines()[0]
    config = load_config(path)
    vocab_size = config.tokenizer.vocab_size if config.tokenizer.tokenizer_type == "bpe" else 68
    model = nnx.eval_shape(lambda: Transformer(config.architecture(vocab_size), rngs=nnx.Rngs(0)))
    millions = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) / 1e6
    assert 0.5 < millions < 8100
    assert all(line.split("#")[1].strip() for line in path.read_text().splitlines() if line.startswith("  ")), "a comment a key"


def test_a_config_of_the_package_is_found_by_its_name_anywhere(dantinox, tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for chosen in ([], ["--config", "quickstart"], ["--config", ROOT / "configs/quickstart.yaml"]):
        assert "data:\n  path: builtin:python\n" in dantinox("train", *chosen, "--print_config")[1]
    (tmp_path / "dante").write_text("model: {dim: 8, n_heads: 1}")  # a file goes before
    assert "  dim: 8\n" in dantinox("train", "--config", "dante", "--print_config")[1]
    says = "no config file at quick: use a file, or a packaged config (dante, gpt2_124m, llama_1b, llama_8b, lora, moe_2b, "
    assert_one_sentence(dantinox("train", "--config", "quick"), says)


def test_a_config_to_start_from(dantinox, tmp_path, monkeypatch):
    from dantinox.config import load_config
    from dantinox.config.sections import flatten_config

    monkeypatch.chdir(tmp_path)
    assert dantinox("init", "new.yaml") == (0, "", "")
    changed = {"data.path": "builtin:python", "training.sample_every": 250}
    small = ("model.dim", "model.n_heads", "model.kv_heads", "model.num_blocks", "model.max_context", "tokenizer.vocab_size",
             "training.batch_size")  # fmt: skip
    changed |= {key: flatten_config(load_config("quickstart"))[key] for key in small}  # as no accelerator is here
    assert load_config("new.yaml") == build_config({}, changed)
    lines = (tmp_path / "new.yaml").read_text(encoding="utf-8").splitlines()
    assert "#   dantinox train --config new.yaml --run_dir runs/first" in lines and max(map(len, lines)) < 160
    assert all(" # " in line for line in lines if line.startswith("  "))
    code, out, _ = dantinox("train", "--config", "new.yaml", "--dry_run", *TINY)
    assert code == 0 and "4 steps of 2 × 16 tokens" in out
    assert_one_sentence(dantinox("init", "new.yaml"), "new.yaml already exists")
    assert_one_sentence(dantinox("init", "gone/new.yaml"), "cannot write gone/new.yaml")


def test_what_no_sample_can_start_from_is_said_before_the_training(dantinox, tmp_path, text):
    run = tmp_path / "run"
    argv = ["train", "--config", ROOT / "configs/quickstart.yaml", "--data_path", text, "--run_dir", run, *TINY]
    code, out, err = dantinox(*argv, "--tokenizer_type", "char", "--sample_prompt", "é")
    assert (code, out) == (2, "") and "error: training.sample_prompt: the character 'é'" in err and not run.exists()


def test_a_token_that_is_none_is_told_before_the_training(dantinox, tmp_path, text):
    run = tmp_path / "run"
    argv = ["train", "--config", ROOT / "configs/quickstart.yaml", "--data_path", text, "--run_dir", run, *TINY]
    code, out, err = dantinox(*argv, "--allowed_tokens", 999_999)
    assert (code, out) == (2, "") and "error: generation.allowed_tokens must hold token ids in [0, 259), got 999999" in err
    assert not run.exists(), "the corrected command can be given again"


def test_train_then_generate_then_resume(dantinox, tmp_path, text):
    run = tmp_path / "run"
    code, out, err = dantinox(
        "train", "--config", ROOT / "configs/quickstart.yaml", "--data_path", text, "--run_dir", run, *TINY
    )
    assert (code, out) == (0, "") and "finished at step 4" in err
    names = {
        "config.yaml",
        "tokenizer.json",
        "model_weights.msgpack",
        "training_log.csv",
        "metrics.jsonl",
        "model_summary.json",
    }
    assert names <= {path.name for path in run.iterdir()} and (run / "samples" / "step_4.txt").is_file()
    code, out, _ = dantinox("generate", "--run_dir", run, "--prompt", "Nel", "--max_new_tokens", 4, "--greedy")
    assert code == 0 and out.startswith("Nel")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = dantinox("train", "--run_dir", run, "--resume")
    assert (code, out) == (0, "") and "this run is finished" in err
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}, "nothing has changed"
    assert_one_sentence(dantinox("train", "--data_path", text, "--run_dir", run), "is not empty: add --resume")
    text.write_text("another text")
    code, _, err = dantinox("train", "--run_dir", run, "--resume")
    assert code == 0 and "the corpus has changed since this run began: the run continues with its saved tokens\n" in err
    text.unlink()
    code, _, err = dantinox("train", "--run_dir", run, "--resume", "--steps", 5, "--sample_prompt", "è")
    assert code == 0 and "resumed from step 4" in err and "finished at step 5" in err and "corpus" not in err
    assert (run / "samples" / "step_5.txt").read_text(encoding="utf-8").startswith("è")
    code, _, err = dantinox("train", "--run_dir", run, "--resume", "--lr", 1)
    assert code == 2 and "training.lr cannot change when a run is resumed: the run has 0.004, got 1" in err
    code, out, _ = dantinox("info", run)
    assert code == 0 and "val loss" in out and "weights int8" in out and "perplexity" in out


def test_dry_run_and_print_config_leave_nothing_behind(dantinox, tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ["--config", ROOT / "configs/quickstart.yaml", "--data_path", text]
    code, out, err = dantinox("train", *config, "--dry_run", *TINY)
    assert code == 0 and "4 steps of 2 × 16 tokens" in out and "estimated peak" in out and "first row" in out
    assert re.search(r"about \S+ for 4 steps at \S+ m?s a step, evaluations not counted\n$", out)
    assert err.startswith("warning: tokenizer.vocab_size has no effect while tokenizer.tokenizer_type is byte (")
    assert err.count("\n") == 1
    code, out, err = dantinox("train", *config, "--print_config", "--training.lr", "5e-4", "--use_moe", "False")
    assert (code, err) == (0, "") and "lr: 0.0005" in out and "use_moe: false" in out
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_doctor(dantinox, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        code, out, err = dantinox("doctor")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert (code, err) == (0, "") and "jax " in out and "device 0: " in out and "GFLOP/s" in out
    assert out.endswith(f"compiled programs are cached in {tmp_path / 'dantinox' / 'jax'}\n")


def test_plot_draws_runs_and_says_where(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from dantinox.report import MetricsLog
    from dantinox.run import create_run, save_config

    for name in ("a", "b"):
        run = create_run(tmp_path / name)
        save_config(run, build_config({}))
        MetricsLog(run.path / "training_log.csv", run.metrics).evaluation({"step": 5, "val_loss": 2.0})
    runs, out = [str(tmp_path / name) for name in ("a", "b")], tmp_path / "ab.png"
    assert cli.main(["plot", runs[0]]) == 0 and (tmp_path / "a" / "plots" / "loss_by_step.png").is_file()
    assert cli.main(["plot", *runs, "--by", "time", "--out", str(out)]) == 0 and out.is_file()
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    for wrong, message in (
        (runs, "several runs"),
        ([str(tmp_path)], "not a run directory"),
        ([runs[0], "--out=x.svg"], ".png"),
    ):
        assert cli.main(["plot", *wrong]) == 2 and message in capsys.readouterr().err
