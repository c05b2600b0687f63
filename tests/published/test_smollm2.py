"""SmolLM2-135M-Instruct from the package of `dantinox import smollm2`, compared with transformers
and llama.cpp.

    make real

record_smollm2.py writes smollm2.json.
"""

import hashlib
import json
import threading
import urllib.request
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import dantinox
from dantinox.cli import main
from dantinox.run import RunDirectory, load_run_config, open_run
from dantinox.text import ChatTemplate

from .samples import CHECKED, CONVERSATIONS, LINES, PROMPTS, TEXTS

pytestmark = [pytest.mark.real, pytest.mark.slow]
RECORD = json.loads(Path(__file__).with_name("smollm2.json").read_text(encoding="utf-8"))
LENGTH = 512  # texts are padded to this length, so that one program is compiled
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The run directory, and the output of the command."""
    import contextlib
    import io

    path, printed = tmp_path_factory.mktemp("published") / "smol", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["import", "smollm2", "--run_dir", str(path)]) == 0
    return path, printed.getvalue()


@pytest.fixture(scope="module")
def model(imported):
    return dantinox.load(imported[0])


def digest(ids):
    return hashlib.sha256(np.array(ids, "<u4").tobytes()).hexdigest()


def logits_of(model, texts):
    """Yields the logits of each text, computed by one program."""
    read = nnx.jit(lambda model, tokens, positions: model(tokens, positions)[0])
    for ids in texts:
        tokens = np.pad(ids, (0, LENGTH - len(ids)))[None]
        positions = np.where(np.arange(LENGTH) < len(ids), np.arange(LENGTH), -1)[None]
        yield np.asarray(read(model.model, tokens, positions))[0, : len(ids)]


def test_import_prints_the_model_and_the_next_commands(imported):
    path, printed = imported
    weights = "272 tensors, 98.4 MB read, 96.6 MB written in quantized blocks (Q4_1, Q8_0)"
    for part in ("llama: 30 layers, width 576, 135M parameters", weights, "8,192 tokens"):
        assert part in printed
    assert (
        "<|im_end|> <|endoftext|>" in printed
        and "temperature 0.2, top_p 0.9, min_p 0.05" in printed
    )
    assert f"  dantinox chat {path}\n" in printed
    generation = load_run_config(open_run(path)).generation
    assert (
        generation.temperature,
        generation.top_p,
        generation.min_p,
        generation.max_new_tokens,
    ) == (0.2, 0.9, 0.05, 512)


def test_tokens_equal_those_of_llama_cpp(model):
    for line, ids in zip(LINES, RECORD["lines"], strict=True):
        assert model.tokenizer.encode(line) == ids, line
        assert model.tokenizer.decode(ids) == line
    for text, found in zip(TEXTS, RECORD["texts"], strict=True):
        ids = model.tokenizer.encode(text)
        assert (len(ids), digest(ids)) == (found["count"], found["ids"])


def test_conversations_equal_those_of_transformers(model, imported):
    template = ChatTemplate.load(RunDirectory(imported[0]).chat_template, model.tokenizer)
    for messages, found in zip(CONVERSATIONS, RECORD["conversations"], strict=True):
        assert template.text(messages, generation_prompt=True) == found["text"]
    assert model.tokenizer.token_to_id("<|im_end|>") in template.end_ids
    count = template.encode(CONVERSATIONS[2], generation_prompt=True).count(
        model.tokenizer.token_to_id("<|im_end|>")
    )
    assert count == 4, "system, user, assistant, user: special tokens in a message are text"


def test_logits_equal_those_of_transformers(model):
    found = [RECORD["texts"][number] for number in CHECKED]
    texts = [model.tokenizer.encode(TEXTS[number]) for number in CHECKED]
    for ids, logits, right in zip(texts, logits_of(model, texts), found, strict=True):
        chosen = np.take_along_axis(logits[right["places"]], np.array(right["top"]), 1)
        np.testing.assert_allclose(chosen, right["logits"], atol=5e-4)
        logp = np.asarray(jax.nn.log_softmax(logits[:-1].astype(np.float64)))
        assert -logp[np.arange(len(ids) - 1), ids[1:]].mean() == pytest.approx(
            right["nats"], abs=1e-4
        )
        assert digest(logits.argmax(-1)) == right["likeliest"]


def test_greedy_tokens_equal_those_of_transformers_and_llama_cpp(model):
    count = len(RECORD["greedy"][0]["transformers"])
    found = model.generate(PROMPTS, greedy=True, max_new_tokens=count, ignore_eos=True)
    for result, right in zip(found, RECORD["greedy"], strict=True):
        assert result.tokens == right["transformers"] == right["llama.cpp"], result.prompt


STRATEGIES = {
    "temperature": {"temperature": 0.7}, "top_k": {"top_k": 40}, "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05}, "typical": {"typical": 0.9}, "top_n_sigma": {"top_n_sigma": 1.0},
    "repetition": {"repetition_penalty": 1.2}, "dry": {"dry_multiplier": 0.8},
    "xtc": {"xtc_probability": 0.5}, "mirostat": {"mirostat": 2},
    "entropy": {"strategy": "entropy"},
}  # fmt: skip


def test_every_strategy_gives_equal_text_in_a_batch_of_one_and_a_mixed_batch(model):
    """Rows of a batch with different settings equal those of a batch of one."""
    base = {"temperature": 1.0, "seed": 7, "max_new_tokens": 12}
    config = {name: model.settings({**base, **settings}) for name, settings in STRATEGIES.items()}
    prompt = PROMPTS[0]
    together = model.complete([model.request(prompt, one) for one in config.values()])
    texts = {name: result.text for name, result in zip(config, together, strict=True)}
    assert len(set(texts.values())) > 5 and all(len(result.tokens) > 0 for result in together)
    for name in ("top_p", "dry", "entropy"):
        (alone,) = model.complete([model.request(prompt, config[name])])
        assert alone.text == texts[name], name


def test_compressed_caches_have_their_size_and_keep_short_sequences(model):
    prompt = TEXTS[7][:1400]
    full = model.generate(prompt, greedy=True, max_new_tokens=24)
    for more in ({"kv_policy": "streaming"}, {"kv_dtype": "int8"}):
        small = model.generate(
            prompt, greedy=True, max_new_tokens=24, kv_budget=0.5, kv_signal="uniform", **more
        )
        share = 0.5 * (0.28 if "kv_dtype" in more else 1)
        assert small.stats["cache"]["bytes"] <= share * 1.06 * full.stats["cache"]["full_bytes"]
        assert len(small.tokens) == 24
    short = model.generate(
        PROMPTS[0], greedy=True, max_new_tokens=6, kv_budget_tokens=64, kv_signal="uniform"
    )
    assert short.tokens == RECORD["greedy"][0]["transformers"][:6]


def test_adapters_are_trained_merged_and_exported(model, imported, tmp_path):
    """Six steps of LoRA lower the loss on the training text. After merge, export and import, all
    tensors are equal.
    """
    text = tmp_path / "text.txt"
    text.write_text("The password of the north tower is marmalade.\n" * 60, encoding="utf-8")
    adapters = tmp_path / "adapters"
    train = {
        "training.init_from": imported[0], "run_dir": adapters, "data.path": text,
        "training.steps": 6, "model.max_context": 32, "training.batch_size": 2, "lora.rank": 4,
        "training.lr": 0.02, "training.warmup_steps": 0, "training.eval_every": 6,
    }  # fmt: skip
    assert (
        main(
            ["train", *(word for key, value in train.items() for word in (f"--{key}", str(value)))]
        )
        == 0
    )
    assert main(["merge-lora", str(adapters), "--run_dir", str(tmp_path / "merged")]) == 0
    assert (
        main(["export", str(tmp_path / "merged"), str(tmp_path / "x.gguf"), "--format", "gguf"])
        == 0
    )
    assert main(["import", str(tmp_path / "x.gguf"), "--run_dir", str(tmp_path / "back")]) == 0
    back, merged = dantinox.load(tmp_path / "back"), dantinox.load(tmp_path / "merged")
    for expected, found in zip(
        *(jax.tree.leaves(nnx.state(one.model)) for one in (merged, back)), strict=True
    ):
        assert np.array_equal(expected, found)
    ids = [model.tokenizer.encode("The password of the north tower is marmalade.")]
    before, after = (
        float(
            jax.nn.log_softmax(next(logits_of(one, ids)))[
                np.arange(len(ids[0]) - 1), ids[0][1:]
            ].mean()
        )
        for one in (model, back)
    )
    assert after > before + 0.5


def test_server_response_equals_the_output_of_the_command(imported, capsys):
    """The greedy response of a chat completion equals the output of `generate --chat`."""
    command = [
        "generate",
        str(imported[0]),
        "--chat",
        "--prompt",
        "What is the capital of France?",
        "--greedy",
    ]
    assert main(command) == 0
    assert capsys.readouterr().out == PARIS + "\n"
    assert server_response(imported[0]) == PARIS


def server_response(run):
    """Returns the response of `dantinox serve` in a separate process."""
    import subprocess
    import sys

    command = [sys.executable, "-c", "from dantinox.cli import entry; entry()"]
    process = subprocess.Popen(
        [*command, "serve", str(run), "--port", "0", "--slots", "1", "--context", "256"],
        stdout=subprocess.PIPE,
        text=True,
    )
    stop = threading.Timer(300, process.kill)
    stop.start()
    try:
        line = next(line for line in process.stdout if "is served at" in line)
        url = line.split(" is served at ")[1].split()[0]
        body = {"model": "smol", "temperature": 0, "messages": CONVERSATIONS[0]}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["choices"][0]["message"]["content"]
    finally:
        stop.cancel()
        process.terminate()
        process.wait(60)
