"""Runs the code blocks of README.md and docs/*.md.

    python docs/check_code.py [PAGE…]

Python blocks are executed, and so are the commands of `sh` blocks, in this process and in a
temporary directory for each page. Every run that a page names stands there as a copy of one tiny
run; trainings are reduced to a few steps of a tiny model. Commands that need a network, a large
model, a server or minutes are only parsed: `PARSED_ONLY` lists them with the reason. YAML blocks
are read as settings, JSON blocks are parsed. A YAML block that begins with a comment `# name.yaml`
becomes that file.
"""

import contextlib
import gc
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
# Compiling takes most of the time: programs are not optimized, and are kept for the next time.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)
gc.set_threshold(100_000, 50, 50)  # tracing makes many objects
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / "docs" / "_build" / "programs"))
os.environ["MPLBACKEND"] = "Agg"

import yaml  # noqa: E402

from dantinox.cli import main, parser_of  # noqa: E402
from dantinox.cli.common import choose_run, given_settings  # noqa: E402
from dantinox.config import Config, UserError, overlay  # noqa: E402
from dantinox.config.flag_values import overrides  # noqa: E402
from dantinox.config.inherited_settings import build_training, load_training  # noqa: E402
from dantinox.config.sections import SECTIONS  # noqa: E402
from dantinox.config.sweep_file import load_sweep  # noqa: E402
from dantinox.serve.operations.api_keys import read_keys  # noqa: E402
from dantinox.serve.pool.model_specs import read_models  # noqa: E402

# The beginning of a command, or a pattern in a Python block → why it is only parsed.
PARSED_ONLY = {
    r"dantinox import (smollm2|HuggingFaceTB/|1bitLLM/)": "needs a network",
    r"dantinox serve": "starts a server",
    r"from openai import": "needs a server",
    r"from anthropic import": "needs a server",
    r"dantinox eval tasks .*--include_path": "needs lm-evaluation-harness",
    r"dantinox eval tasks runs/(base|better)": "needs two runs",
    r"dantinox eval (sampling|kv|ruler)": "takes minutes",
    r"dantinox sweep(?!.*--dry_run)": "takes minutes",
    r"dantinox speedrun": "takes minutes",
    r"dantinox eval tasks runs/quickstart": "answers 1,800 questions",
    r"dantinox train --config (distill|my_distillation.yaml|my_samples.yaml|my_dpo.yaml --objective)": (
        "repeats a training"
    ),
    r"dantinox train --config quickstart --(lr|nan_policy)": "repeats a training",
    r"dantinox find-lr": "repeats a training",
    r"dantinox train .*--config speedrun": (
        "takes minutes; model.depth excludes the sizes of a tiny model"
    ),
    r"dantinox train .*--dry_run": "measures steps; a tutorial runs it",
    r"dantinox plan .*--topology": "needs the compilers of the target",
    r"dantinox train .*llama_1b": "a large model",
    r"dantinox doctor": "measures the machine",
}
# Commands of other programs → why they are not run; their arguments are checked where that is
# possible.
OTHER_PROGRAMS = {
    "pip": "installs packages",
    "curl": "needs a server",
    "lm_eval": "needs a server",
    "gcloud": "needs a cloud",
    "make": "takes minutes",
    "docker": "needs Docker",
    "jupyter": "opens a browser",
    "git": "needs a network",
    "cd": "changes the directory",
    "rm": "deletes files",
}

TINY_MODEL = {
    "model.dim": 16, "model.n_heads": 2, "model.kv_heads": 1, "model.num_blocks": 1,
    "model.max_context": 256,
    "tokenizer.vocab_size": 300,
}  # fmt: skip
TINY_TRAINING = {
    "training.steps": 3, "training.batch_size": 2, "training.grad_accum": 1,
    "training.eval_every": 3, "training.eval_tokens": 512, "training.warmup_steps": 1,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}assistant: {% endif %}"
)


class Block(NamedTuple):
    """A code block: its page, the line it begins in, its language and its text."""

    page: Path
    line: int
    language: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```([^\n]*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 2
        body = re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE)
        if not match[2].startswith("{"):  # a directive of the site
            yield Block(page, line, match[2].strip(), body)


def commands_of(text: str) -> Iterator[str]:
    """The commands of a shell block, one string each, without comments."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


# --- what the examples find in their directory


def words(count: int) -> str:
    """English text of that many lines, from the sources of the standard library."""
    source = Path(json.__file__).read_text(encoding="utf-8").splitlines() * 50
    return "\n".join(source[:count]) + "\n"


def conversations(count: int) -> str:
    record = {
        "messages": [
            {"role": "user", "content": "What is 1 + 1?"},
            {"role": "assistant", "content": "2"},
        ]
    }
    return (json.dumps(record) + "\n") * count


def make_material(folder: Path) -> None:
    """Files and checkpoints that pages name, and the run that stands for all runs."""
    preference = {"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"}
    files = {
        "my_text.txt": words(2000),
        "letters.txt": words(2000),
        "tinyshakespeare.txt": words(2000),
        "corpus/a.txt": words(1000),
        "prompt.txt": "def ",
        "question.txt": "What is 1 + 1?\n",
        "prompts.jsonl": 'def \n{"prompt": "import ", "temperature": 0.7, "min_p": 0.05}\n',
        "conversations.jsonl": conversations(60),
        "problems.jsonl": (json.dumps({"prompt": "1 + 1 = ", "completion": "2"}) + "\n") * 60,
        "preferences.jsonl": (json.dumps(preference) + "\n") * 60,
        "book.json": json.dumps(
            {"type": "object", "properties": {"title": {"type": "string", "maxLength": 20}}}
        ),
        "sum.gbnf": 'root ::= [0-9]+ "\\n"\n',
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    call(["init", str(folder / "my.yaml")])
    run = folder / "runs" / "tiny"
    call(
        [
            "train",
            "--config",
            "quickstart",
            "--run_dir",
            str(run),
            "--data_path",
            str(folder / "my_text.txt"),
        ]
    )
    (run / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    call(["calibrate", str(run), "--what", "router"])
    call(["export", str(run), str(folder / "path" / "to" / "Llama-3.2-1B")])
    for name in (
        "model.gguf",
        "model-Q4_K_M.gguf",
    ):  # the rows of the tiny run are too short for blocks of 4 bits
        call(["export", str(run), str(folder / name)])


def furnish(folder: Path, material: Path, text: str) -> None:
    """Copies the material into a page's directory, and the tiny run under every name of a run in
    the text.
    """
    shutil.copytree(material, folder, dirs_exist_ok=True)
    for name in set(re.findall(r"runs/([\w.-]+(?:/(?:base|sft|grpo))?)", text)):
        if not (folder / "runs" / name).exists():
            shutil.copytree(material / "runs" / "tiny", folder / "runs" / name)


# --- running


def call(argv: list[str], stdin: bytes = b"") -> bytes:
    """Runs a command of DantinoX in this process; the bytes of its standard output.

    Raises:
      RuntimeError: it did not exit with 0; with its standard error.
    """
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
    )
    given = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    before = sys.stdin
    try:
        sys.stdin = given
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            code = main(reduced(argv))
    except SystemExit as end:  # --help
        code = end.code or 0
    finally:
        sys.stdin = before
    if code != 0:
        raise RuntimeError(f"exit code {code}: {err.buffer.getvalue().decode()}")
    return out.buffer.getvalue()


def reduced(argv: list[str]) -> list[str]:
    """The arguments of a command, with the flags that make a training tiny; a run that it makes is
    removed first.

    The first head replaces that of `explain --attention`, because the tiny run has one layer.
    """
    if argv[0] == "explain" and "--attention" in argv:
        argv = [*argv, "--attention", "0:0"]
    if argv[0] == "init":
        Path(argv[1]).unlink(missing_ok=True)
    if (
        argv[0] in ("train", "import", "merge-lora")
        and "--resume" not in argv
        and "--run_dir" in argv
    ):
        shutil.rmtree(argv[argv.index("--run_dir") + 1], ignore_errors=True)
    if argv[0] not in ("train", "find-lr") or "--resume" in argv or "--print_config" in argv:
        return argv
    config = settings_of(argv)
    changes: dict[str, Any] = dict(TINY_TRAINING)
    if config.training.init_from is None:
        changes |= TINY_MODEL
        if config.tokenizer.tokenizer_type != "bpe" or config.tokenizer_run is not None:
            del changes["tokenizer.vocab_size"]
    if argv[0] == "find-lr":
        changes = {key: value for key, value in changes.items() if not key.startswith("training.")}
        return [*argv, "--tries", "10", "--batch_size", "2", *flags(changes)]
    return [*argv, *flags(changes)]


def flags(changes: dict[str, Any]) -> list[str]:
    return [word for key, value in changes.items() for word in (f"--{key}", str(value))]


def settings_of(argv: list[str]) -> Config:
    """The settings of a command, validated as the command does it.

    Raises:
      UserError: the arguments or the settings are wrong.
    """
    options = parser_of([argv[0]]).parse(argv)
    choose_run(options)
    if argv[0] in ("generate", "chat", "serve", "explain"):
        return overlay(Config(), given_settings(options))
    if argv[0] in ("train", "find-lr", "plan"):
        given = overrides(options)
        run = getattr(options, "run_dir", None)
        saved = run / "config.yaml" if getattr(options, "resume", False) and run else None
        if options.config is None and saved is None and "training.init_from" in given:
            return build_training({}, given)
        return load_training(options.config or saved or "quickstart", given)
    if argv[0] == "sweep":
        load_sweep(options.file)
    return Config()


class Checker:
    """Runs the blocks of pages.

    Attributes:
      counts: how many blocks and commands were executed, and parsed, by kind and reason.
      problems: what failed, with its place.
    """

    def __init__(self, material: Path):
        self._material = material
        self._seen: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def page(self, page: Path) -> None:
        found = list(blocks_of(page))
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            furnish(Path(folder), self._material, page.read_text(encoding="utf-8"))
            names: dict[str, Any] = {"__name__": "__main__"}
            for block in found:  # the files first, which commands above them may use
                if block.language == "yaml" and (name := re.match(r"# (\S+\.yaml)\n", block.text)):
                    Path(name[1]).write_text(block.text, encoding="utf-8")
            for block in found:
                self._block(block, names)

    def _block(self, block: Block, names: dict[str, Any]) -> None:
        parts = (
            list(commands_of(block.text))
            if block.language == "sh" and not block.text.startswith("#!")
            else [block.text]
        )
        for part in parts:
            started = time.process_time()
            try:
                kind = self._part(block.language, part, names)
            except (Exception, SystemExit) as error:
                where = f"{block.page.relative_to(ROOT)}, line {block.line}"
                last = traceback.extract_tb(error.__traceback__)[-1]
                first = part.strip().splitlines()[0]
                at = f"{Path(last.filename).name}:{last.lineno}"
                self.problems.append(
                    f"{where}: {first}\n    {type(error).__name__}: {error} ({at})"
                )
                continue
            self.counts[kind] += 1
            if os.environ.get("VERBOSE"):
                print(
                    f"{time.process_time() - started:6.1f} s  {kind:30} "
                    f" {part.strip().splitlines()[0][:90]}"
                )

    def _part(self, language: str, text: str, names: dict[str, Any]) -> str:
        """Runs or parses a block or a command; what was done with it."""
        if language == "sh":
            return "script" if text.startswith("#!") else self._command(text)
        if language == "python":
            reason = next(
                (why for pattern, why in PARSED_ONLY.items() if re.search(pattern, text)), None
            )
            program = compile(text, "block", "exec")
            if reason is None:
                for made in re.findall(
                    r'(?:import_checkpoint\([^)]*, |run_dir=)"(runs/[\w.-]+)"', text
                ):
                    shutil.rmtree(made, ignore_errors=True)
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    exec(program, names)
            return f"python: {reason}" if reason else "python executed"
        if language == "yaml":
            read_yaml(text)
            return "yaml"
        if language in ("json", "jsonl"):
            for line in [text] if text.lstrip().startswith("{\n") else text.splitlines():
                json.loads(line)
            return "json"
        return "text"

    def _command(self, text: str) -> str:
        left, _, right = text.partition(" | ") if text.startswith("printf ") else ("", "", text)
        words = shlex.split(right, comments=True)
        abbreviated = "…" in words
        words = [word for word in words if word != "…"]
        stdin = (
            subprocess.run(left, shell=True, capture_output=True, check=True).stdout
            if left
            else b"Hello\n"
        )
        target = None
        for sign in ("<", ">"):
            if sign in words:
                at = words.index(sign)
                stdin = Path(words[at + 1]).read_bytes() if sign == "<" else stdin
                target = Path(words[at + 1].replace("~", "home")) if sign == ">" else target
                del words[at : at + 2]
        program, argv = as_dantinox(words)
        if program in OTHER_PROGRAMS:
            check_other(program, argv)
            return f"not run: {OTHER_PROGRAMS[program]}"
        if program != "dantinox":
            raise UserError(f"{program} is not a known program")
        plain = shlex.join(["dantinox", *argv])
        reason = next(
            (why for pattern, why in PARSED_ONLY.items() if re.match(pattern, plain)), None
        )
        reason = "is abbreviated" if abbreviated else reason
        if reason is not None:
            settings_of(argv)
            return f"parsed: {reason}"
        if plain in self._seen and "--resume" not in argv:
            return "repeated"
        self._seen.add(plain)
        output = call(argv, stdin)
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(
                output.replace(b"\0", b" ")
            )  # the tiny run may generate NUL, which is not text
        return "executed"


def as_dantinox(words: list[str]) -> tuple[str, list[str]]:
    """The program and its arguments; `python train.py` is `dantinox train`."""
    while words and re.fullmatch(r"\w+=\S*", words[0]):  # variables of the environment
        words = words[1:]
    if words[:1] == ["python"] and words[1] in ("train.py", "generate.py"):
        return "dantinox", [words[1].removesuffix(".py"), *words[2:]]
    if words[:1] == ["python"]:
        file = ROOT / (words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1])
        if not file.exists():
            raise UserError(f"{file.relative_to(ROOT)} does not exist")
        return "make", []  # a benchmark
    return words[0], words[1:]


def check_other(program: str, argv: list[str]) -> None:
    """Checks what is known of the arguments of another program: extras of pip, targets of make,
    JSON bodies of curl.
    """
    if program == "pip":
        import tomllib

        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        for name in re.findall(r"\[([\w,-]+)\]", " ".join(argv)):
            if unknown := set(name.split(",")) - set(extras):
                raise UserError(f"there is no extra {', '.join(unknown)}")
    if program == "make":
        targets = re.findall(
            r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
        for name in argv:
            if "=" not in name and name not in targets:
                raise UserError(f"there is no target {name}")
    if program == "curl":
        check_request(argv)


def check_request(argv: list[str]) -> None:
    """Checks a request to the server: its path exists, and its body is valid."""
    from reference import endpoints

    from dantinox.serve.protocols.bodies import validate_body

    path = next(re.sub(r"^\w+://[^/]+", "", word) for word in argv if word.startswith("http"))
    bodies = {path: body for _, _, path, _, body in endpoints()}
    if path not in bodies:
        raise UserError(f"the server has no path {path}")
    if "-d" in argv:
        validate_body(bodies[path], json.loads(argv[argv.index("-d") + 1]))


def read_yaml(text: str) -> None:
    """Reads a YAML block as what it is: settings, a sweep, or something of another program."""
    tree = yaml.safe_load(text)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder) / "block.yaml"
        if set(tree) <= set(SECTIONS):
            file.write_text(text, encoding="utf-8")
            load_training(file)
        elif "grid" in tree or "random" in tree:
            file.write_text(
                yaml.safe_dump({key: value for key, value in tree.items() if key != "base"}),
                encoding="utf-8",
            )
            load_sweep(file)
        elif "keys" in tree or "models" in tree:
            file.write_text(text, encoding="utf-8")
            (read_keys if "keys" in tree else read_models)(file)


def main_of(pages: list[str]) -> int:
    started = time.process_time()
    chosen = [ROOT / page for page in pages] or [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder) / "material"
        material.mkdir()
        with contextlib.chdir(material):
            make_material(material)
        checker = Checker(material)
        for page in chosen:
            checker.page(page)
    counts = checker.counts
    print("\n".join(checker.problems), end="\n" if checker.problems else "")
    executed, parsed = (
        counts["executed"],
        sum(n for kind, n in counts.items() if kind.startswith("parsed")),
    )
    others = sum(n for kind, n in counts.items() if kind.startswith("not run"))
    skipped = sum(n for kind, n in counts.items() if kind.startswith("python: "))
    print(
        f"code: {executed} commands executed, {counts['repeated']} repeated, {parsed} parsed,"
        f" {others} of other programs; {counts['python executed']} Python blocks executed,"
        f" {skipped} parsed; {counts['yaml']} YAML, {counts['json']} JSON; {len(checker.problems)}"
        f" problems, {time.process_time() - started:.0f} CPU seconds"
    )
    return 1 if checker.problems else 0


if __name__ == "__main__":
    sys.exit(main_of(sys.argv[1:]))
