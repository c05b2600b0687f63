"""Invalid config files: each is reported in one sentence with its place, without a traceback or a
hang.
"""

import os
import time

import pytest

from dantinox import cli
from dantinox.config import Config, UserError, build_config, load_config
from tests.error_texts import ERRORS

LAUGHS = 'a: &a ["x", "x"]\n' + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)

# name → (content, words of the error, line of the error or None)
BAD: dict[str, tuple[str | bytes, tuple[str, ...], int | None]] = {
    # names
    "unknown section": ("trainig:\n  lr: 1\n", ("no section trainig", "did you mean training?"), 1),
    "section like nothing": (
        "zzzz:\n  lr: 1\n",
        ("no section zzzz", "the sections are model, moe,"),
        1,
    ),
    "key outside of its section": ("lr: 1\n", ("no section lr", "did you mean training.lr?"), 1),
    "key of two sections outside": (
        "seed: 1\n",
        ("did you mean training.seed or generation.seed?",),
        1,
    ),
    "unknown key": (
        "model:\n  dims: 4\n",
        ("unknown key model.dims", "did you mean model.dim?"),
        2,
    ),
    "key of another section": (
        "model:\n  lr: 1\n",
        ("unknown key model.lr", "did you mean training.lr?"),
        2,
    ),
    "name of other programs": (
        "training:\n  learning_rate: 1\n",
        ("did you mean training.lr?",),
        2,
    ),
    "upper case": (
        "training:\n  LR: 1\n",
        ("unknown key training.LR", "did you mean training.lr?"),
        2,
    ),
    "line break in a section": ('"a\\nb": 1\n', (r"no section a\nb",), 1),
    "line break in a key": ('training:\n  "l\\nr": 1\n', (r"unknown key training.l\nr",), 2),
    "key of 900 letters": (
        "training:\n  " + "a" * 900 + ": 1\n",
        ("unknown key training.aaaa",),
        2,
    ),
    "number as a section": ("1: 2\n", ("a key must be a name, got 1",), 1),
    "number as a key": ("training:\n  1: 2\n", ("a key must be a name, got 1",), 2),
    "null as a key": ("training:\n  ~: 2\n", ("a key must be a name, got null",), 2),
    "list as a key": ("? [a]\n: 1\n", ("a key must be a name, got []",), 1),
    "yes as a key": ("training:\n  yes: 1\n", ("a key must be a name, got true",), 2),
    # types
    "text for a number": (
        "training:\n  lr: fast\n",
        ("training.lr must be a number > 0, got 'fast'",),
        2,
    ),
    "quoted number": (
        'training:\n  lr: "5e-4"\n',
        ("training.lr must be a number > 0, got '5e-4'",),
        2,
    ),
    "bool for a number": (
        "training:\n  lr: yes\n",
        ("training.lr must be a number > 0, got true",),
        2,
    ),
    "bool for an integer": (
        "training:\n  steps: true\n",
        ("an integer in [1, 2^31), or null, got true",),
        2,
    ),
    "number for an integer": (
        "training:\n  steps: 1e3\n",
        ("training.steps must be an integer", "got 1000.0"),
        2,
    ),
    "text for a bool": (
        "moe:\n  use_moe: 'False'\n",
        ("moe.use_moe must be true or false, got 'False'",),
        2,
    ),
    "integer for a bool": (
        "moe:\n  use_moe: 1\n",
        ("moe.use_moe must be true or false, got 1",),
        2,
    ),
    "null for a number": ("training:\n  lr:\n", ("training.lr must be a number > 0, got null",), 2),
    "list for a number": (
        "training:\n  lr: [1, 2]\n",
        ("training.lr must be a number > 0, got [1, 2]",),
        2,
    ),
    "section for a number": (
        "training:\n  lr: {a: 1}\n",
        ("training.lr must be a number > 0, got {'a': 1}",),
        2,
    ),
    "date for a number": (
        "training:\n  lr: 2024-01-01\n",
        ("training.lr must be a number > 0, got",),
        2,
    ),
    "bool for a list": (
        "generation:\n  stop: no\n",
        ("generation.stop must be a list (each text), got false",),
        2,
    ),
    "number in a list": (
        "generation:\n  stop: [a, 1]\n",
        ("generation.stop must be a list (each text), got 1",),
        2,
    ),
    "number in the paths": (
        "data:\n  path: [a, 3]\n",
        ("data.path must be text, or a list (each text), or null",),
        2,
    ),
    "no list of layer kinds": (
        "attention:\n  layer_types: [full, local]\n",
        ("one of sliding, full", "got 'local'"),
        2,
    ),
    "empty list of layer kinds": (
        "attention: {sliding_window: true, context_window: 4,\n  layer_types: []}\n",
        ("at least one of sliding, full, got []",),
        2,
    ),
    "other optimizer": (
        "training:\n  optimizer: adam\n",
        ("must be one of adamw, muon, lion, adafactor, sgd, got 'adam'",),
        2,
    ),
    "off for a name": (
        "training:\n  schedule: off\n",
        ("one of cosine, linear, wsd, constant, got false",),
        2,
    ),
    "number for a section": ("training: 5\n", ("training must be a section of keys, got 5",), 1),
    "list for a section": ("training: [1]\n", ("training must be a section of keys, got [1]",), 1),
    # ranges
    "top_p above 1": (
        "generation:\n  top_p: 1.7\n",
        ("generation.top_p must be a number in [0, 1], or null, got 1.7",),
        2,
    ),
    "no learning rate": ("training:\n  lr: 0\n", ("training.lr must be a number > 0, got 0",), 2),
    "negative temperature": ("generation:\n  temperature: -0.1\n", ("a number ≥ 0, got -0.1",), 2),
    "zero heads": (
        "model:\n  n_heads: 0\n",
        ("model.n_heads must be an integer in [1, 2^31), got 0",),
        2,
    ),
    "negative seed": (
        "training:\n  seed: -1\n",
        ("training.seed must be an integer in [0, 2^32), got -1",),
        2,
    ),
    "all text for validation": (
        "data:\n  val_fraction: 1\n",
        ("data.val_fraction must be a number in (0, 1), got 1",),
        2,
    ),
    "nan": ("training:\n  lr: .nan\n", ("training.lr must be a number > 0, got nan",), 2),
    "nan in an interval": (
        "training:\n  beta1: .nan\n",
        ("training.beta1 must be a number in [0, 1), got nan",),
        2,
    ),
    "inf": ("training:\n  lr: .inf\n", ("training.lr must be a number > 0, got inf",), 2),
    "too large a float": (
        "training:\n  lr: 1e400\n",
        ("training.lr must be a number > 0, got inf",),
        2,
    ),
    "100 digits": (
        "training:\n  steps: " + "9" * 100 + "\n",
        ("training.steps must be an integer", "got 9999"),
        2,
    ),
    "400 digits for a float": (
        "training:\n  lr: " + "9" * 400 + "\n",
        ("training.lr must be a number > 0, got 9999",),
        2,
    ),
    "5000 digits": ("training:\n  steps: " + "9" * 5000 + "\n", ("cannot be read as int",), 2),
    # settings that exclude each other
    "duplicate key": (
        "training:\n  lr: 1\n  lr: 2\n",
        ("the key 'lr' appears twice, in lines 2 and 3",),
        3,
    ),
    "duplicate section": (
        "model:\n  dim: 8\nmodel:\n  dim: 8\n",
        ("the key 'model' appears twice, in lines 1 and 3",),
        3,
    ),
    "both names of a setting": (
        "generation:\n  max_new_tokens: 6\n  max_generations: 5\n",
        ("generation.max_generations is an alias of generation.max_new_tokens: give one of them",),
        3,
    ),
    "both names across sections": (
        "logging:\n  eval_iters: 5\ntraining:\n  eval_every: 6\n",
        ("logging.eval_iters is an alias of training.eval_every",),
        2,
    ),
    "width and heads": (
        "model:\n  dim: 65\n",
        ("model.dim must be a multiple of model.n_heads", "got 65 and 8"),
        2,
    ),
    "groups of heads": (
        "model:\n  kv_heads: 3\n",
        ("model.kv_heads must divide model.n_heads, got 3 and 8",),
        2,
    ),
    "odd rotary heads": ("model:\n  head_size: 7\n", ("model.head_size must be even", "got 7"), 2),
    "two positions": ("attention:\n  trainable_pos: true\n", ("exclude each other",), 2),
    "window without width": (
        "attention:\n  sliding_window: true\n",
        ("attention.context_window must be an integer",),
        None,
    ),
    "accumulation": (
        "training:\n  batch_size: 8\n  grad_accum: 3\n",
        ("must divide training.batch_size, got 3 and 8",),
        3,
    ),
    "warm-up past the end": (
        "training:\n  steps: 10\n  warmup_steps: 100\n",
        ("at most training.steps, got 100 and 10",),
        None,
    ),
    "tokenizer without file": (
        "tokenizer:\n  tokenizer_type: file\n",
        ("tokenizer.tokenizer_path must be set",),
        None,
    ),
    "two names of the corpus": (
        "data:\n  path: a\n  dataset_name: b\n",
        ("data.dataset_name is an alias of data.path: give one of them",),
        3,
    ),
    "empty stop string": (
        "generation:\n  stop: ['']\n",
        ("generation.stop must not hold an empty string",),
        2,
    ),
    "no corpus file": (
        "data:\n  path: []\n",
        ("data.path must name at least one file, got []",),
        2,
    ),
    # invalid paths and text
    "log outside of the run": (
        "logging:\n  log_file: ../x\n",
        ("must be a file name of letters", "got '../x'"),
        2,
    ),
    "log is the parent": (
        "logging:\n  log_file: '..'\n",
        ("must be a file name of letters", "got '..'"),
        2,
    ),
    "log over a folder of the run": (
        "logging:\n  log_file: checkpoints\n",
        ("must differ from each other",),
        2,
    ),
    "log over the weights": (
        "logging:\n  log_file: model_weights.msgpack\n",
        ("must differ from each other",),
        2,
    ),
    "lone surrogate": (
        'training:\n  sample_prompt: "\\ud800"\n',
        ("must be valid Unicode text, got '\\ud800'",),
        2,
    ),
    "NUL in a path": ('data:\n  path: "a\\0b"\n', (r"data.path must be a path, got 'a\x00b'",), 2),
    "empty path": ("data:\n  path: ''\n", ("data.path must be a path, got ''",), 2),
    # YAML
    "tab": ("training:\n\tlr: 1\n", ("not valid YAML: found character '\\t'",), 2),
    "unclosed bracket": ("training: {lr: 1\n", ("not valid YAML: expected ',' or '}'",), 2),
    "bad indent": ("training:\n  lr: 1\n steps: 2\n", ("not valid YAML: expected <block end>",), 3),
    "two colons": (
        "training:\n  lr: 1: 2\n",
        ("not valid YAML: mapping values are not allowed here",),
        2,
    ),
    "two documents": (
        "model:\n---\nmoe:\n",
        ("expected a single document in the stream, but found another",),
        2,
    ),
    "unknown escape": (
        'training:\n  sample_prompt: "\\q"\n',
        ("not valid YAML: found unknown escape character 'q'",),
        2,
    ),
    "NUL": ("training:\n  lr: 1\0\n", ("not valid YAML: the character U+0000",), 2),
    "control character": ("training:\n  lr: \a\n", ("not valid YAML: the character U+0007",), 2),
    "python object": (
        "training: !!python/object:os.system {}\n",
        ("the tag !!python/object:os.system is not allowed",),
        1,
    ),
    "python call": (
        "training:\n  lr: !!python/object/apply:os.system ['id']\n",
        ("the tag !!python/object/apply",),
        2,
    ),
    "foreign tag": ("!mine\ntraining: 1\n", ("the tag !mine is not allowed",), 1),
    "impossible date": (
        "training:\n  lr: 2024-13-45\n",
        ("'2024-13-45' cannot be read as timestamp",),
        2,
    ),
    "tagged nothing": ('training:\n  lr: !!int ""\n', ("'' cannot be read as int",), 2),
    "tagged bool": ("training:\n  lr: !!bool x\n", ("'x' cannot be read as bool",), 2),
    "tagged list": ("training: !!map [a]\n", ("not valid YAML: expected a mapping node",), 1),
    "billion laughs": (LAUGHS, ("an alias (*name) may stand for a single value only",), 2),
    "alias of itself": (
        "training: &a\n  lr: *a\n",
        ("an alias (*name) may stand for a single value only",),
        2,
    ),
    "merge key": ("model: &m\n  dim: 8\nmoe:\n  <<: *m\n", ("an alias (*name)",), 4),
    "unknown alias": ("training:\n  lr: *zz\n", ("not valid YAML: found undefined alias 'zz'",), 2),
    "deep list": ("training:\n  lr: " + "[" * 1000, ("too deep to read",), None),
    "deep mapping": ("a: " + "{a: " * 1000, ("too deep to read",), None),
    "list 100 deep": (
        "training:\n  lr: " + "[" * 100 + "]" * 100 + "\n",
        ("training.lr must be a number > 0, got [[[[",),
        2,
    ),
    # whole files
    "empty": ("", ("is empty: a config needs at least one section",), None),
    "only a comment": ("# nothing\n", ("is empty: a config needs at least one section",), None),
    "null": ("null\n", ("is empty: a config needs at least one section",), None),
    "list": ("- a\n- b\n", ("must hold sections (model, moe,", "got ['a', 'b']"), None),
    "text": ("hello\n", ("must hold sections (model, moe,", "got 'hello'"), None),
    "not UTF-8": (
        b"training:\n  # caf\xe9\n",
        ("is not UTF-8 text: the byte 0xe9 in line 2",),
        None,
    ),
    "UTF-16": (
        "training:\n".encode("utf-16"),
        ("is not UTF-8 text: the byte 0xff in line 1",),
        None,
    ),
    "too large": (b"#" * ((1 << 20) + 1), ("is larger than 1 MiB",), None),
    "a picture": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", ("is not UTF-8 text",), None),
}


def sentence(path, overrides=None) -> str:
    started = time.process_time()
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    assert time.process_time() - started < 5
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert len(text) < 300 + len(str(path))
    assert str(path) in text or "command line" in text
    return text


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_file_is_one_sentence(tmp_path, name, capfd):
    content, says, line = BAD[name]
    path = tmp_path / "c.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = sentence(path)
    for part in says:
        assert part in text
    if line is not None:
        assert f"({path}, line {line})" in text
    assert cli.main(["train", "--config", str(path)]) == 2
    assert capfd.readouterr() == ("", f"error: {text}\n")


def test_paths_that_are_not_files(tmp_path):
    assert sentence(tmp_path) == f"no config file at {tmp_path}: it is a directory"
    assert sentence(tmp_path / "no.yaml") == f"no config file at {tmp_path / 'no.yaml'}"
    os.mkfifo(tmp_path / "pipe")
    assert sentence(tmp_path / "pipe") == f"no config file at {tmp_path / 'pipe'}"
    (tmp_path / "loop").symlink_to("loop")
    assert sentence(tmp_path / "loop") == f"no config file at {tmp_path / 'loop'}"
    with pytest.raises(UserError, match=ERRORS["no_config_file_at"]):
        load_config("a\0b")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model:\n")
    path.chmod(0)
    assert sentence(path) == f"cannot read the config file {path}: Permission denied"


GOOD = {
    "byte-order mark": (b"\xef\xbb\xbftraining:\n  lr: 1\n", 1.0),
    "Windows line ends": (b"training:\r\n  lr: 5e-4\r\n", 5e-4),
    "no decimal point": (b"training:\n  lr: 5e-4\n", 5e-4),
    "capital E": (b"training:\n  lr: 5E-4\n", 5e-4),
    "integer for a float": (b"training:\n  lr: 2\n", 2.0),
    "inline section": (b"training: {lr: 0.5}\n", 0.5),
    "alias of one value": (b"training:\n  muon_lr: &x 0.25\n  lr: *x\n", 0.25),
    "an empty section": (b"model:\ntraining:\n  lr: 3.0\n", 3.0),
    "umlauts": ("training:\n  sample_prompt: Größe\n  lr: 3.0\n".encode(), 3.0),
}


@pytest.mark.parametrize("name", GOOD)
def test_every_spelling_of_a_valid_file(tmp_path, name):
    content, lr = GOOD[name]
    (tmp_path / "c.yaml").write_bytes(content)
    assert load_config(tmp_path / "c.yaml").training.lr == lr


def test_yes_and_no_are_yaml_booleans(tmp_path):
    (tmp_path / "c.yaml").write_text("generation:\n  greedy: yes\n  use_cache: Off\n")
    config = load_config(tmp_path / "c.yaml")
    assert (config.generation.greedy, config.generation.use_cache) == (True, False)


def test_older_names_are_accepted(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "generation:\n  max_generations: 7\nlogging:\n  eval_iters: 9\n"
    )
    config = load_config(tmp_path / "c.yaml")
    assert (config.generation.max_new_tokens, config.training.eval_every) == (7, 9)


def test_the_command_line_has_priority_and_is_named_in_errors(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("training:\n  lr: fast\n")
    assert load_config(path, {"training.lr": 0.5}).training.lr == 0.5
    assert (
        sentence(path, {"training.lr": "slow"})
        == "training.lr must be a number > 0, got 'slow' (command line)"
    )


def test_a_conflict_is_reported_at_the_setting_that_was_written(tmp_path):
    (tmp_path / "c.yaml").write_text("model:\n  kv_heads: 3\n")
    assert "line 2" in sentence(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("model: {}\n")
    assert "(command line)" in sentence(tmp_path / "c.yaml", {"model.kv_heads": 3})


def test_defaults_are_a_valid_config():
    assert Config().training.seed == 42


EARLIER = """
model: {dim: 64, n_heads: 4, head_size: 16, num_blocks: 2, max_context: 32}
moe: {use_moe: false, n_experts: 8, top_k_mlp: 3, expansion: 4}
attention: {use_rotary_pos: true, trainable_pos: false, sliding_window: False, context_window: 32, no_sink: true}
tokenizer: {tokenizer_type: char, vocab_size: 5000, tokenizer_path: "configs/vocab.json"}
data: {dataset_source: local, dataset_name: data/text.txt, streaming: false}
training: {lr: 0.0005, batch_size: 64, grad_accum: 16, seed: 42, optimizer: adamw, epochs: 200}
generation: {use_cache: true, top_p: 0.9, top_k: 50, seed: 42, greedy: true, max_generations: 99, temperature: 1.0}
logging: {eval_iters: 20, log_file: training_log.csv, summary_file: model_summary.json}
"""


def test_a_file_of_the_first_version_loads_with_warnings_about_unused_settings(tmp_path):
    path = tmp_path / "default_config.yaml"
    path.write_text(EARLIER)
    with pytest.warns(UserWarning) as reported:
        config = load_config(path)
    assert [str(line.message) for line in reported] == [
        (
            f"moe.n_experts and moe.top_k_mlp have no effect while moe.use_moe is false ({path},"
            " line 3)"
        ),
        (
            "attention.context_window has no effect while attention.sliding_window is false"
            f" ({path}, line 4)"
        ),
        (
            "tokenizer.vocab_size and tokenizer.tokenizer_path have no effect while"
            f" tokenizer.tokenizer_type is char ({path}, line 5)"
        ),
    ]
    assert (config.data.path, config.training.eval_every, config.generation.max_new_tokens) == (
        "data/text.txt",
        20,
        99,
    )
    assert config.architecture(65).hidden_dim == 256 and config.architecture(65).windows == (
        None,
        None,
    )
    path.write_text(
        EARLIER.replace("streaming: false", "streaming: true").replace(
            "source: local", "source: huggingface"
        )
    )
    with pytest.warns(UserWarning):
        assert load_config(path).data.streaming


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"generation.top_p": 1.5}, "generation.top_p", 1.5),
        ({"generation.topp": 0.5}, "generation.topp", 0.5),
        ({"training.grad_accum": 3}, "training.grad_accum", 3),
        ({"training.muon_lr": 0.5}, "training.muon_lr", 0.5),
        ({"data.path": ""}, "data.path", ""),
    ],
    ids=["range", "name", "contradiction", "inactive", "path"],
)
def test_an_error_has_its_setting_and_value(given, key, value):
    with pytest.raises(UserError) as caught:
        build_config({}, given)
    assert (caught.value.key, caught.value.value) == (key, value) and key in str(caught.value)
    assert UserError("about no setting").key is None and UserError("about no setting").value is None
