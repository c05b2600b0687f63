"""Measures how costs grow with the size of the work: training data, prompts, batches, clients,
logs, runs and checkpoints.

Each row has three sizes. Each size is measured in a process of its own: it prepares its input,
measures the CPU seconds of its processes during the work, and reads its peak resident memory. The
cost per unit at the largest size, divided by that at the middle size, is about 1 for a cost that
grows in proportion. Attention makes that of `prompts` larger.

    python benchmarks/growth.py [ROW …]
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from common import SMALL, Parser, random_run, temporary_folder

SYLLABLES = ("st", "pr", "l", "m", "qu", "v", "th"), ("a", "e", "io", "u"), ("n", "rd", "ss", "t")
WORDS = ["".join(parts) for parts in itertools.product(*SYLLABLES)]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}{% generation"
    " %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{%"
    " endfor %}"
)
LETTERS = "abcdefghij "
Work = Callable[[], str | None]  # may return a note


class Row(NamedTuple):
    """What is measured.

    Attributes:
      unit: what the costs are divided by.
      prepare: creates the input of a size, and returns the work.
      sizes, smoke: numbers of units, and those of `--smoke`.
    """

    unit: str
    prepare: Callable[[int], Work]
    sizes: tuple[int, int, int]
    smoke: tuple[int, int, int]


# Training data


def write_lines(path: Path, count: int, line: Callable[[random.Random], str]) -> None:
    """Writes `count` lines, of which each thousand repeats the first thousand."""
    chance = random.Random(0)
    lines = [line(chance) + "\n" for _ in range(min(count, 1000))]
    with path.open("w", encoding="utf-8") as file:
        for begin in range(0, count, 1000):
            file.writelines(lines[: count - begin])


def sentence(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def chat_line(chance: random.Random) -> str:
    turns = [
        {"role": role, "content": sentence(chance, 20)}
        for role in ("user", "assistant", "user", "assistant")
    ]
    return json.dumps({"messages": turns})


def token_store(
    name: str, line: Callable[[random.Random], str], lines: int, **training: str
) -> Work:
    """The tokens of a file: bytes, or with `objective`, those of a BPE tokenizer of 4,096
    entries.
    """
    from dantinox.config import TokenizerSection, build_config
    from dantinox.text import train_tokenizer
    from dantinox.text.build_store import prepare_data

    folder = temporary_folder()
    chance = random.Random(1)
    write_lines(folder / name, lines, line)
    text = "\n".join(sentence(chance, 12) for _ in range(2000))
    section = TokenizerSection(tokenizer_type="bpe" if training else "byte")
    tokenizer = train_tokenizer(section, lambda: iter([text]))
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    small = {"steps": 1, "warmup_steps": 0, "batch_size": 1}
    config = build_config(
        {
            "model": {"max_context": 256},
            "data": {"path": str(folder / name)},
            "training": small | training,
        }
    )

    def work() -> str:
        store = prepare_data(config, folder / "tokens", tokenizer, chat_template=str(template))[1]
        return f"{store.train.tokens + store.val.tokens:,} tokens"

    return work


def texts(kilobytes: int) -> Work:
    return token_store(
        "text.txt", lambda chance: sentence(chance, 25)[:99].ljust(99, "."), 10 * kilobytes
    )


def records(count: int) -> Work:
    return token_store(
        "records.jsonl", lambda chance: json.dumps({"text": sentence(chance, 90)}), count
    )


def conversations(count: int) -> Work:
    return token_store("chats.jsonl", chat_line, count, objective="sft")


# Generation


def generation(prompts: int, length: int, new: int) -> Work:
    import dantinox

    size = SMALL | {
        "dim": 128,
        "num_blocks": 4,
        "hidden_dim": 384,
        "max_context": 1 + length + new,
    }  # BOS is a token
    model = dantinox.load(random_run(size=size))
    texts = ["".join(random.Random(number).choices(LETTERS, k=length)) for number in range(prompts)]

    def work() -> None:
        model.generate(texts, max_new_tokens=new, seed=0, ignore_eos=True)

    work()  # compiles
    return work


def sampler_chain(vocabulary: int) -> Work:
    """The KoboldAI chain for 200 tokens."""
    import jax
    import jax.numpy as jnp
    import sampling

    from dantinox.sampling import SamplingParams, init_state, sample

    params = SamplingParams.build(sampling.CHAIN | {"seed": 0}, batch=1)
    text_BT = jnp.asarray(sampling.text(1, vocabulary))
    x_BV = jnp.asarray(sampling.logits(1, vocabulary))
    held = [
        init_state(params, text_BT, jnp.ones(text_BT.shape, bool), vocabulary, sampling.TEXT + 512)
    ]
    step = jax.jit(
        lambda x_BV, params, state: sample(x_BV, params, state)[:2], donate_argnames="state"
    )

    def work(tokens: int = 200) -> None:
        for _ in range(tokens):
            token_B, held[0] = step(x_BV, params, held[0])
        token_B.block_until_ready()

    work(1)
    return work


# Server


def clients(count: int) -> Work:
    """Clients that connect at once from four addresses and stream eight tokens each. The server
    admits 1,000 connections.
    """
    import httpx
    import serve

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    options = argparse.Namespace(slots=32, clients=[count])
    server = serve.running_server(options, random_run())
    url = httpx.URL(server.__enter__().url)

    async def send(number: int) -> bool:
        body = {
            "model": "run",
            "prompt": "abc",
            "max_tokens": 8,
            "seed": number,
            "stream": True,
            "ignore_eos": True,
        }
        content = json.dumps(body).encode()
        head = (
            f"POST {url.path}/completions HTTP/1.1\r\nhost: {url.host}:{url.port}\r\ncontent-type:"
            " application/json\r\n"
        )
        try:
            reader, writer = await asyncio.open_connection(
                url.host, url.port, local_addr=(f"127.0.0.{2 + number % 4}", 0)
            )
            writer.write(
                f"{head}connection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode()
                + content
            )
            answer = await reader.read()
            while part := await reader.read(1 << 16):
                answer += part
            writer.close()
        except OSError:
            return False
        return answer.startswith(b"HTTP/1.1 200") and b"[DONE]" in answer

    async def send_all(numbers: range) -> int:
        return sum(await asyncio.gather(*(send(number) for number in numbers)))

    asyncio.run(send_all(range(8)))

    def work() -> str:
        begun = time.perf_counter()
        answered = asyncio.run(send_all(range(count)))
        seconds = time.perf_counter() - begun
        server.__exit__(None, None, None)
        return f"{answered:,} answered in {seconds:.1f} s"

    return work


# Logs, runs and checkpoints


def logs(run_dir: Path, rows: int) -> None:
    """Writes the two logs of a run: a row for each step, and an evaluation at every tenth step."""
    from dantinox.report.metric_files import COLUMNS, HEADER

    with (
        (run_dir / "metrics.jsonl").open("w") as events,
        (run_dir / "training_log.csv").open("w") as evaluations,
    ):
        evaluations.write(HEADER + "\n")
        for step in range(1, rows + 1):
            row = {
                "step": step,
                "train_loss": 2 + 8 / step,
                "ms_per_step": 12.345,
                "lr": 1e-3,
                "grad_norm": 0.51234,
            }
            row |= {"tokens": step * 4096, "tokens_per_s": 331_800.5}
            events.write(json.dumps({"kind": "interval"} | row) + "\n")
            if step % 10 == 0:
                row |= {"val_loss": 2.1 + 8 / step}
                events.write(json.dumps({"kind": "evaluation"} | row) + "\n")
                evaluations.write(
                    ",".join(repr(row[name]) if name in row else "" for name in COLUMNS) + "\n"
                )


def command(*words: str) -> None:
    """Runs a command of `dantinox` in this process, without its output."""
    from dantinox.cli import main

    with redirect_stdout(StringIO()):
        if main(words):
            raise SystemExit(f"{words} failed")


def plotted_log(rows: int) -> Work:
    run_dir = random_run()
    logs(run_dir, rows)
    return partial(command, "plot", str(run_dir), "--out", str(run_dir / "loss.png"))


def described_log(rows: int) -> Work:
    run_dir = random_run()
    logs(run_dir, rows)
    return partial(command, "info", "--run_dir", str(run_dir))


def resumed_log(rows: int) -> Work:
    from dantinox.report.metric_files import MetricsLog

    run_dir = random_run()
    logs(run_dir, rows)
    return partial(
        MetricsLog(run_dir / "training_log.csv", run_dir / "metrics.jsonl").truncate, rows // 2
    )


def runs(count: int) -> Work:
    folder = temporary_folder()
    run_dir = random_run()
    logs(run_dir, 1000)
    (run_dir / "weights.safetensors").unlink(missing_ok=True)
    for number in range(count):
        shutil.copytree(run_dir, folder / f"run{number}")
    return partial(command, "runs", str(folder))


def checkpoints(count: int) -> Work:
    """A training that writes and keeps a checkpoint after each step."""
    from dantinox.config import build_config
    from dantinox.training import launch

    folder = temporary_folder()
    write_lines(folder / "text.txt", 1000, lambda chance: sentence(chance, 10))
    settings = {
        "model": SMALL | {"max_context": 32},
        "tokenizer": {"tokenizer_type": "byte"},
        "data": {"path": str(folder / "text.txt")},
        "training": {"warmup_steps": 0, "batch_size": 2, "eval_every": 1000, "checkpoint_every": 1},
        "logging": {"plot": False},
    }

    def work(steps: int = count) -> None:
        training = settings["training"] | {"steps": steps, "keep_last": steps}
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            launch(
                build_config(settings | {"training": training}), run_dir=folder / f"{steps} steps"
            )

    work(2)  # compiles
    return work


LOG_SIZES = (10_000, 100_000, 1_000_000), (100, 200, 400)
ROWS = {
    "texts": Row("kB", texts, (3_000, 30_000, 150_000), (10, 20, 40)),
    "records": Row("record", records, (10_000, 100_000, 1_000_000), (100, 200, 400)),
    "conversations": Row("conversation", conversations, (1_000, 10_000, 100_000), (20, 40, 80)),
    "prompts": Row(
        "token", lambda tokens: generation(1, tokens, 8), (512, 2_048, 8_192), (64, 128, 256)
    ),
    "batches": Row("row", lambda rows: generation(rows, 32, 32), (8, 64, 512), (1, 2, 4)),
    "vocabularies": Row("entry", sampler_chain, (32_000, 128_000, 256_000), (1_000, 2_000, 4_000)),
    "clients": Row("client", clients, (500, 1_000, 2_000), (4, 8, 16)),
    "plot": Row("log row", plotted_log, *LOG_SIZES),
    "info": Row("log row", described_log, *LOG_SIZES),
    "resume": Row("log row", resumed_log, *LOG_SIZES),
    "runs": Row("run", runs, (50, 250, 500), (2, 4, 8)),
    "checkpoints": Row("checkpoint", checkpoints, (50, 100, 200), (3, 4, 5)),
}


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its children, also of those that still run
    (under Linux).
    """
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    for file in Path("/proc/self/task").glob("*/children"):
        for child in file.read_text().split():
            ticks = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15]
            total += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return total


def measure(name: str, size: int) -> dict[str, Any]:
    work = ROWS[name].prepare(size)
    cpu_before = cpu_seconds()
    begun = time.perf_counter()
    note = work()
    used = cpu_seconds() - cpu_before
    seconds = time.perf_counter() - begun
    peak = max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {"cpu_seconds": used, "seconds": seconds, "megabytes": peak * 1024 / 1e6, "note": note}


def main() -> None:
    parser = Parser(__doc__, smoke={})
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"one of {', '.join(ROWS)} (default: all)"
    )
    parser.add_argument("--size", type=int, help="measure one row at this size, and print JSON")
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"there is no row {unknown[0]}: the rows are {', '.join(ROWS)}")
    if options.size is not None:
        print(json.dumps(measure(options.rows[0], options.size)))
        return
    print("| row | size | CPU seconds | per unit | seconds | peak memory | |")
    print("|---|---|---|---|---|---|---|")
    for name in options.rows or ROWS:
        row = ROWS[name]
        costs = []
        for size in row.smoke if options.smoke else row.sizes:
            done = subprocess.run(
                [sys.executable, __file__, name, "--size", str(size)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout.splitlines()[-1])
            costs.append(found["cpu_seconds"] / size)
            ratio = f"{costs[2] / costs[1]:.2f} × the middle size" if len(costs) == 3 else ""
            notes = ", ".join(filter(None, (found["note"], ratio)))
            print(
                f"| {name} | {size:,} | {found['cpu_seconds']:.2f} | {1e6 * costs[-1]:,.1f} µs per"
                f" {row.unit} | {found['seconds']:.2f} | {found['megabytes']:,.0f} MB | {notes} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
