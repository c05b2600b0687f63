"""Writes the reference pages of the site from the code: settings, commands, Python API, HTTP,
metrics and files.

`pages()` returns them as Markdown, and `write(folder)` brings a folder up to date. Only
introductions and the descriptions of files are written here; everything else is read from the
declarations that the program itself uses.
"""

import argparse
import inspect
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

import dantinox
from dantinox.cli import COMMANDS, command_parser
from dantinox.config import Config
from dantinox.config.setting_groups import GROUPS
from dantinox.config.setting_records import SettingRecord, section_titles, setting_records

Rows = Iterable[tuple[str, ...]]


def pages() -> dict[str, str]:
    """The path of each page below docs/reference, and its Markdown."""
    found = {
        "settings/index.md": settings_index(),
        "commands/index.md": commands_index(),
        "api.md": api(),
        "http.md": http(),
        "metrics.md": metrics(),
        "files.md": files(),
    }
    found |= {f"settings/{section}.md": settings_page(section) for section in section_titles()}
    return found | {f"commands/{name}.md": command_page(name) for name in COMMANDS}


def write(folder: Path) -> None:
    """Writes the pages that have changed and removes those that no longer exist."""
    made = pages()
    for old in folder.rglob("*.md"):
        if str(old.relative_to(folder)) not in made:
            old.unlink()
    for name, text in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


# --- Markdown


def table(header: tuple[str, ...], rows: Rows) -> str:
    """A Markdown table; a header of empty strings is allowed."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |\n"
        for row in lines
    )


def code(value: object) -> str:
    return f"`{value}`"


def codes(values: Iterable[object]) -> str:
    return ", ".join(map(code, values))


def block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


def sentence(text: str | None) -> str:
    """A description as one sentence: a capital letter and a full stop."""
    text = " ".join((text or "").split())
    if not text:
        return ""
    first = text.split(" ", 1)[0]
    plain = (
        first.rstrip(",").isalpha() and first.islower() and ":" not in text[:20]
    )  # not a name such as top_k or `lr`
    return (text[0].upper() + text[1:] if plain else text) + (
        "" if text.endswith((".", "!", ")")) else "."
    )


def first_paragraph(thing: object) -> str:
    """The first paragraph of a docstring."""
    return " ".join(inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0].split())


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# --- settings


SETTINGS_INTRO = """# Settings

A setting is a key of a section of the YAML file and a command-line flag. Settings of `generation`, `router` and `kv` are also
keyword arguments in Python and fields of a request. Every setting has a default, so a file needs only the settings that differ.
A wrong name, type or value is an error that names the place and the allowed values. Some settings need another one, and a flag
without effect is an error too.

`dantinox init my.yaml` writes a commented file, and `dantinox train --print_config` prints every setting with its value.
[The schema](../../../configs/schema.json) lets an editor complete and check settings.
"""


# Values for the examples of settings whose default is null or empty, which would show nothing.
EXAMPLE_VALUES: dict[str, object] = {
    "model.depth": 12, "model.kv_heads": 2, "model.head_size": 64, "model.hidden_dim": 1024,
    "model.padded_vocab_size": 50304, "model.final_logit_softcapping": 30.0,
    "moe.shared_hidden_dim": 512, "moe.dense_layers": [0], "moe.dense_hidden_dim": 2048,
    "moe.expansion": 4.0, "attention.rope_local_theta": 10000.0,
    "attention.rope_original_context": 8192, "attention.rope_mscale": 1.0,
    "attention.rope_mscale_all_dim": 1.0, "attention.rope_attention_factor": 1.0,
    "attention.query_scaling_beta": 0.1, "attention.rope_short_factors": [1.0, 1.05],
    "attention.rope_long_factors": [1.0, 4.0], "attention.context_window": 512,
    "attention.query_pre_attn_scalar": 256.0, "attention.attention_multiplier": 0.0156,
    "attention.attn_logit_softcapping": 50.0, "attention.kv_lora_rank": 512,
    "attention.q_lora_rank": 1536, "attention.qk_rope_head_dim": 64, "attention.v_head_dim": 128,
    "attention.latent_norm_epsilon": 1e-6, "attention.global_head_size": 512,
    "attention.global_kv_heads": 4, "attention.layer_types": ["sliding", "full"],
    "attention.rope_layers": [True, True, True, False],
    "tokenizer.tokenizer_path": "tokenizer.json", "data.path": "my_text.txt",
    "data.mixture": [3.0, 1.0], "data.chat_template": "plain", "data.val_path": "validation.txt",
    "data.dataset_config": "sample-10BT",
    "training.preference_beta": 0.2,
    "training.steps": 1000, "training.tokens_per_parameter": 10.0, "training.warmup_steps": 100,
    "training.eval_tokens": 32768, "training.checkpoint_every": 500,
    "training.sample_every": 500, "training.sample_prompt": "def ", "training.patience": 5,
    "training.init_from": "runs/base", "grpo.advantage": "std", "grpo.normalization": "sequence",
    "grpo.clip_low": 0.2, "grpo.clip_high": 0.28, "grpo.ratio": "sequence",
    "grpo.dynamic_sampling": True,
    "grpo.rewards": [{"name": "numeric"}, {"name": "length", "max": 400, "weight": 0.1}],
    "distill.teacher": "runs/teacher", "distill.top_k": 64,
    "lora.rank": 16, "lora.alpha": 32.0, "lora.targets": ["q_proj", "v_proj"],
    "distributed.coordinator": "auto",
    "distributed.processes": 4, "distributed.process": 0, "generation.seed": 1,
    "generation.stop": ["###"],
    "generation.banned_strings": ["testament to"],
    "generation.banned_regexes": ["not just .*, but"], "generation.negative_prompt": "A sad story.",
    "generation.stop_token_ids": ["<|im_end|>"],
    "generation.sampler_order": ["top_k", "temperature", "min_p"],
    "generation.logit_bias": {"e": -1.0}, "generation.sequence_bias": [["New York", -5.0]],
    "generation.allowed_tokens": ["yes", "no"],
    "generation.watermark_keys": [654, 400, 836],
    "generation.banned_tokens": ["!"], "generation.bad_words": ["bad word"], "generation.top_k": 40,
    "generation.top_p": 0.9, "router.low_entropy": 0.1, "router.low_varentropy": 0.1,
    "router.clarify_entropy": 3.0, "router.high_entropy": 5.0, "router.high_varentropy": 5.0,
    "router.entropy_scale": 1.0, "router.varentropy_scale": 1.0, "router.temperature_min": 0.3,
    "router.temperature_max": 1.5, "router.clarify_token": "?",
    "router.resample_temperature_min": 0.7, "router.clarify_text": "Which one do you mean?",
    "router.resample_temperature_min_factor": 0.7, "kv.budget": 0.3, "kv.budget_tokens": 128,
    "kv.layer_ratios": [0.5, 1.0, 2.0], "kv.calibration": "kv_entropy.json",
    "logging.wandb_project": "my_project",
}  # fmt: skip


def settings_index() -> str:
    text = SETTINGS_INTRO
    for section, title in section_titles().items():
        rows = [
            (
                f"[`{record.name}`]({section}.md#{slug(record.key)})",
                code(record.default_text),
                sentence(record.help),
            )
            for record in setting_records()
            if record.section == section
        ]
        text += f"\n## [{section}]({section}.md)\n\n{title}\n\n" + table(
            ("setting", "default", "meaning"), rows
        )
    return text + toctree(section_titles())


def toctree(names: Iterable[str]) -> str:
    return "\n```{toctree}\n:hidden:\n\n" + "".join(f"{name}\n" for name in names) + "```\n"


# Sections whose help texts use words that a page explains.
SECTION_NOTES = {
    "router": (
        "\n[The entropy router](../../entropy.md) explains the formulas. The guide is"
        " [Entropixplained]"
        "(https://southbridge-research.notion.site/Entropixplained-11e5fec70db18022b083d7d7b0e93505).\n"
    ),
    "kv": "\n[Compress the KV cache](../../kv_cache.md) explains budgets and policies.\n",
    "generation": (
        "\n[Sampling steps](../../sampling_steps.md) has the formula of every step, and"
        " [sampling](../../sampling.md) advice.\n"
    ),
}


def settings_page(section: str) -> str:
    """The page of a section: every setting with type, default, prerequisites, help and examples, by
    groups.
    """
    text = f"# {section}\n\n{section_titles()[section]}\n{SECTION_NOTES.get(section, '')}"
    records = [record for record in setting_records() if record.section == section]
    groups = dict.fromkeys(record.group for record in records)
    for group in groups:
        text += (
            f"\n## {GROUPS[group].title}\n"
            if group
            else "\n## Other settings\n"
            if len(groups) > 1
            else ""
        )
        for record in records:
            if record.group == group:
                text += f"\n{'###' if len(groups) > 1 else '##'} {record.key}\n"
                text += f"\n{sentence(record.help)}\n\n" + table(*setting_table(record))
                text += "\n" + block(
                    "yaml", f"{section}:\n  {record.name}: {yaml_value(example(record))}"
                )
    return text


def setting_table(record: SettingRecord) -> tuple[tuple[str, ...], Rows]:
    """The header and the rows of a setting's table."""
    return ("type", record.type), setting_rows(record)


def setting_rows(record: SettingRecord) -> Rows:
    yield "default", code(record.default_text)
    if record.prerequisites:
        yield (
            "has an effect if",
            "; ".join(
                re.sub(r"\b\w+\.\w+\b", r"`\g<0>`", condition) for condition in record.prerequisites
            ),
        )
    yield "flag", flag_example(record)
    if record.aliases:
        yield "other names", codes(record.aliases)


def example(record: SettingRecord) -> object:
    """A value to show: the default, or a typical one where the default is null or empty."""
    return EXAMPLE_VALUES.get(record.key, record.default)


def yaml_value(value: object) -> str:
    """A value as YAML writes it on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1000)
    return text.removesuffix("...\n").strip()


def flag_example(record: SettingRecord) -> str:
    value = example(record)
    is_list = isinstance(value, list) and not any(isinstance(one, list | dict) for one in value)
    words = " ".join(map(flag_word, value if is_list else [value]))
    unique = [one.flag for one in setting_records()].count(record.flag) == 1
    names = [record.flag] if unique else []
    return " or ".join(code(f"{name} {words}".strip()) for name in (*names, f"--{record.key}"))


def flag_word(value: object) -> str:
    """A value as a word of a shell."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shlex.quote(
        text.replace("\\", "\\\\").replace("\n", "\\n")
    )  # as flags of `generation` read them


# --- commands


COMMANDS_INTRO = """# Commands

`dantinox COMMAND --help` prints the arguments of a command. A command exits with 0 when it succeeds, with 2 after an error in
its input and with 130 after Ctrl-C. `--debug` shows the traceback of an error. In a checkout, `python train.py` is
`dantinox train`, and `python generate.py` is `dantinox generate`.

"""
EXAMPLES = {
    "train": "dantinox train --config quickstart --run_dir runs/quickstart",
    "find-lr": "dantinox find-lr --config quickstart --plot rates.png",
    "sweep": "dantinox sweep lr.yaml --dry_run",
    "speedrun": "dantinox speedrun --depth 4 --run_dir runs/speedrun",
    "init": "dantinox init my.yaml",
    "merge-lora": "dantinox merge-lora runs/lora --run_dir runs/merged",
    "generate": 'dantinox generate runs/quickstart --prompt "def " --top_p 0.9 --seed 1',
    "chat": "dantinox chat runs/smol",
    "serve": "dantinox serve runs/quickstart --port 8000",
    "import": "dantinox import smollm2 --run_dir runs/smol",
    "export": "dantinox export runs/smol smol.gguf --type q8_0",
    "explain": 'dantinox explain runs/quickstart --prompt "def " --temperature 0.8 --top_k 40',
    "calibrate": "dantinox calibrate runs/quickstart --what router",
    "eval": "dantinox eval ppl --run_dir runs/quickstart --data_path my_text.txt",
    "runs": "dantinox runs runs --sort best --where state=finished",
    "info": "dantinox info runs/quickstart",
    "verify": "dantinox verify runs/quickstart",
    "plan": "dantinox plan --config llama_1b --topology gpu:h100",
    "plot": "dantinox plot runs/first runs/second --by tokens --out losses.png",
    "profile": "dantinox profile runs/quickstart --generate",
    "doctor": "dantinox doctor",
    "settings": "dantinox settings temperature",
    "completion": "dantinox completion bash > ~/.local/share/bash-completion/completions/dantinox",
}


def commands_index() -> str:
    rows = [(f"[`{name}`]({name}.md)", text) for name, (_, _, text) in COMMANDS.items()]
    return COMMANDS_INTRO + table(("command", "purpose"), rows) + toctree(COMMANDS)


@cache
def parser_of(name: str) -> argparse.ArgumentParser:
    """The complete parser of one command."""
    return command_parser(name)


def subcommands(name: str) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands of a command, as those of `eval`."""
    found = [
        action.choices
        for action in parser_of(name)._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return dict(found[0]) if found else {}


def own_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of a command that are not settings."""
    return [
        action
        for action in parser._actions
        if not action.dest.startswith(("config:", "ambiguous:"))
        and action.help is not argparse.SUPPRESS
    ]


def command_page(name: str) -> str:
    """The page of a command: usage, an example, its own arguments, and the settings that are flags
    of it.
    """
    own = own_arguments(parser_of(name))
    text = (
        f"# dantinox {name}\n\n{COMMANDS[name][2]}\n\n## Usage\n\n{block('text', usage(name, own))}"
    )
    text += f"\n## Example\n\n{block('sh', EXAMPLES[name])}\n## Arguments\n\n"
    text += table(("argument", "meaning"), [(spelling(action), meaning(action)) for action in own])
    for kind, parser in subcommands(name).items():
        text += f"\n## {name} {kind}\n\n{parser.description}\n\n"
        text += table(
            ("argument", "meaning"),
            [(spelling(action), meaning(action)) for action in own_arguments(parser)],
        )
    settings = [action for action in parser_of(name)._actions if action.dest.startswith("config:")]
    if settings:
        text += (
            "\n## Settings\n\nThese settings are flags too. Their pages list types, ranges and"
            " defaults.\n\n"
        )
        text += table(("section", "flags"), settings_flags(settings))
    return text


def settings_flags(actions: Iterable[argparse.Action]) -> Rows:
    by_section: dict[str, list[str]] = {}
    for action in actions:
        key = action.dest.removeprefix("config:")
        by_section.setdefault(key.partition(".")[0], []).extend(action.option_strings)
    for section, names in by_section.items():
        yield f"[{section}](../settings/{section}.md)", codes(names)


def usage(name: str, own: Iterable[argparse.Action]) -> str:
    words = [spelling(action).split(", ")[0].strip("`") for action in own]
    words = [
        word if action.required else f"[{word}]" for word, action in zip(words, own, strict=True)
    ]
    settings = any(action.dest.startswith("config:") for action in parser_of(name)._actions)
    lines, indent = [f"dantinox {name}"], " " * len(f"dantinox {name} ")
    for word in [*words, *(["[settings]"] if settings else [])]:
        if len(lines[-1]) + len(word) + 1 > 100:
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


def spelling(action: argparse.Action) -> str:
    """The flags of an argument with the name of their value."""
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    )
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return code(value or action.dest)
    if action.nargs != 0 and not value:
        value = action.dest.upper()
    many = " …" if action.nargs in ("+", "*") else ""
    value = f"[{value}]" if action.nargs == "?" and action.option_strings else value
    return ", ".join(
        code(f"{flag} {value}{many}".strip() if action.nargs != 0 else flag)
        for flag in action.option_strings
    )


def meaning(action: argparse.Action) -> str:
    text = sentence((action.help or "").replace("%%", "%"))
    if action.choices and action.metavar:
        text += f" One of {codes(action.choices)}."
    return text.replace("<", "\\<").replace("*", "\\*")


# --- Python


API_INTRO = """# Python API

`import dantinox` imports nothing else: each of these names is loaded when it is first used. Everything outside of this page is
internal and may change.

"""
# The classes that the public functions return or accept.
RESULTS = {
    "LoadedModel": ("dantinox.generation.api.loaded_model", "what `dantinox.load` returns"),
    "GenerationRequest": ("dantinox.generation.request", "what `LoadedModel.request` returns"),
    "Result": ("dantinox.generation.api.result", "what `LoadedModel.generate` returns"),
    "RunDirectory": ("dantinox.run.directory", "what `dantinox.launch` returns"),
    "Imported": ("dantinox.interop.checkpoints", "what `dantinox.import_checkpoint` returns"),
}


def api() -> str:
    rows, sections = [], ""
    for name, module in dantinox.PUBLIC.items():
        thing = getattr(import_module(module), name)
        rows.append((f"[`dantinox.{name}`](#{slug(name)})", first_paragraph(thing)))
        kind = (
            "autoexception"
            if name.endswith("Error")
            else "autoclass"
            if inspect.isclass(thing)
            else "autofunction"
        )
        sections += api_section(name, f"dantinox.{name}", kind, documented_members(thing))
    rows.append(("`dantinox.__version__`", "The version of the package, as a string."))
    for name, (module, why) in RESULTS.items():
        thing = getattr(import_module(module), name)
        rows.append((f"[`{name}`](#{slug(name)})", f"{first_paragraph(thing)} It is {why}."))
        sections += api_section(name, f"{module}.{name}", "autoclass", documented_members(thing))
    return API_INTRO + table(("name", "purpose"), rows) + sections


def api_section(name: str, path: str, directive: str, members: list[str]) -> str:
    options = (
        f"   :members: {', '.join(members)}\n"
        if directive == "autoclass" and members
        else "   :no-members:\n"
    )
    if directive == "autofunction":
        options = ""
    return f"\n## {name}\n\n" + block("{eval-rst}", f".. {directive}:: {path}\n{options}")


def documented_members(thing: object) -> list[str]:
    """The public methods and properties of a class that have a docstring of their own, in the order
    of the source.
    """
    if not inspect.isclass(thing):
        return []
    own = [base for base in reversed(thing.__mro__) if base.__module__.startswith("dantinox.")]
    names = dict.fromkeys(
        name for base in own for name, value in vars(base).items() if is_documented(name, value)
    )
    return [name for name in names if not name.startswith("model_")]


def is_documented(name: str, value: object) -> bool:
    function = getattr(value, "__func__", value)
    is_member = (
        inspect.isfunction(function) or isinstance(value, property) or hasattr(value, "attrname")
    )
    return is_member and not name.startswith("_") and bool(function.__doc__)


# --- the server


HTTP_INTRO = """# HTTP API

`dantinox serve` answers these paths. [Serving](../serving.md) explains the server, and
[fields of requests](../serving_fields.md) other programs' names, and fields without effect. Every
path except `/health` and the files of the web page needs a key, if the server has keys. Bodies are JSON objects. A field that
is null or absent has the value of the run's settings.

"""


class _Anything:
    """Stands for a model and a tokenizer while routes are listed; no route uses them before its
    first request.
    """

    def __getattr__(self, name: str) -> "_Anything":
        return _Anything()

    def __call__(self, *args: object, **options: object) -> "_Anything":
        return _Anything()


class _Engine:
    """Stands for an engine: it has the default settings."""

    name = "model"
    context = 1024
    run = _Anything()

    def settings(self, given: Mapping[str, object]) -> Config:
        return Config()

    def status(self) -> Any:
        from dantinox.serve.response_stream import Status

        return Status(
            state="ready",
            doing="",
            slots=8,
            busy=0,
            queued=0,
            queue=64,
            context=self.context,
            counters={},
        )


def http() -> str:
    text = HTTP_INTRO
    found = list(endpoints())
    for title in dict.fromkeys(title for title, *_ in found):
        rows = [
            (", ".join(methods), code(path), purpose)
            for own, methods, path, purpose, _ in found
            if own == title
        ]
        text += f"## {title}\n\n" + table(("method", "path", "purpose"), rows) + "\n"
        bodies: dict[Any, list[str]] = {}
        for own, _, path, _, body in found:
            if own == title and body is not None:
                bodies.setdefault(body, []).append(path)
        for body, paths in bodies.items():
            text += (
                f"### Fields of {codes(paths)}\n\n"
                + table(("field", "type", "meaning"), field_rows(body))
                + "\n"
            )
    return text


def endpoints() -> Iterator[tuple[str, list[str], str, str, Any]]:
    """Protocol, methods, path, purpose and request body of every route of the server."""
    from dantinox.serve import app
    from dantinox.serve.operations.metrics import Metrics
    from dantinox.serve.options import Options
    from dantinox.serve.service import Service

    engine: Any = _Engine()
    options = Options()
    metrics = Metrics(engine, options)
    service = Service(engine, options, metrics)
    groups = [("Server", app.server_routes(engine, metrics, options))]
    groups += [(protocol.title, protocol.routes(service)) for protocol in app.PROTOCOLS]
    for title, routes in groups:
        for route in routes:
            methods = sorted((route.methods or set()) - {"HEAD"})
            yield (
                title,
                methods,
                route.path,
                first_paragraph(route.endpoint),
                body_of(route.endpoint),
            )


def body_of(endpoint: Any, depth: int = 3) -> Any:
    """The class of the body that an endpoint parses: the second argument of its `parse_body`."""
    if not inspect.isfunction(endpoint) or depth == 0:
        return None
    function = inspect.unwrap(endpoint)
    names = re.findall(r"parse_body\(request, (\w+)", inspect.getsource(function))
    if names:
        return function.__globals__[names[0]]
    inner = inspect.getclosurevars(function).nonlocals.values()
    return next((found for one in inner if (found := body_of(one, depth - 1)) is not None), None)


def field_rows(body: Any) -> Rows:
    described = attributes_of(body)
    for name, field in body.model_fields.items():
        schema = body.model_json_schema(mode="validation")
        alias = field.validation_alias
        names = [str(choice) for choice in getattr(alias, "choices", [alias or name])]
        shown = schema["properties"].get(names[0], {})
        required = " (required)" if field.is_required() else ""
        yield (
            codes(names) + required,
            in_words(shown, schema.get("$defs", {})),
            described.get(name, ""),
        )


def in_words(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON Schema in words: `integer in [0, 20]`."""
    if "anyOf" in schema:
        options = (
            in_words(one, definitions) for one in schema["anyOf"] if one.get("type") != "null"
        )
        return " or ".join(dict.fromkeys(options))
    if "$ref" in schema:
        inner = definitions[schema["$ref"].rpartition("/")[2]]
        return "object with " + codes(inner["properties"])
    if "enum" in schema:
        return codes(schema["enum"])
    kind = schema.get("type", "any value")
    if kind == "array":
        return (
            "list of " + in_words(schema["items"], definitions) if schema.get("items") else "list"
        )
    low, high = (
        schema.get("minimum", schema.get("exclusiveMinimum")),
        schema.get("maximum", schema.get("exclusiveMaximum")),
    )
    if kind in ("integer", "number") and low is not None and high is not None and abs(high) < 2**31:
        return f"{kind} in [{low}, {high}]"
    if kind in ("integer", "number") and low in (0, 1):
        return f"{kind} ≥ {low}"
    return str(kind)


def attributes_of(kind: Any) -> dict[str, str]:
    """Name → description of the section `Attributes:` in the docstrings of a class and its
    bases.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, section = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition(
            "Attributes:\n"
        )
        for names, text in re.findall(r"^  (\w[\w, ]*): (.*(?:\n    .*)*)", section, re.MULTILINE):
            found |= {name.strip(): sentence(text) for name in names.split(",")}
    return found


METRICS_INTRO = """# Metrics

`GET /metrics` returns these values in the format of Prometheus. They belong to one server process and start at zero.

"""


def metrics() -> str:
    return METRICS_INTRO + table(("metric", "type", "labels", "meaning"), metric_rows())


def metric_rows() -> Rows:
    from dantinox.serve.operations.metrics import Metrics

    engine: Any = _Engine()
    found = Metrics(engine)
    labels = {
        metric._name: metric._labelnames
        for metric in vars(found).values()
        if hasattr(metric, "_labelnames")
    }
    for family in found.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        names = labels.get(family.name) or getattr(family, "_labelnames", ())
        yield code(name), family.type, codes(names) or "", sentence(family.documentation)


# --- files


COLUMN_HELP = {
    "step": "optimizer steps so far",
    "train_loss": "mean training loss since the evaluation before, in nats per token",
    "val_loss": "validation loss, in nats per token; empty for grpo",
    "ms_per_step": "milliseconds per step, without evaluations",
    "lr": "learning rate of the step",
    "grad_norm": "global norm of the gradient before clipping",
    "bits_per_byte": "validation loss in bits per byte of text",
    "tokens": "tokens that were trained on so far",
    "tokens_per_s": "training tokens per second",
    "memory_gb": "memory in use, in GB: of the device on a GPU or TPU, of the process on a CPU",
    "mfu": (
        "model FLOPs utilization, a share of the chip's published rate; empty for an unknown chip"
    ),
    "muon_lr": "learning rate of Muon's matrices; empty for other optimizers",
    "reward": (
        "mean reward of the sampled answers since the evaluation before;"
        " empty for other objectives than grpo"
    ),
    "val_reward": (
        "mean reward of the answers to the validation prompts; empty for other objectives than grpo"
    ),
}
FILES_INTRO = """# Files

A run directory holds everything about a model. Nothing in it refers to its own path, so you can copy or move it. Some files
have the formats of other programs: YAML, `tokenizer.json` of Hugging Face's tokenizers, safetensors of PEFT.

## Run directory

"""
# What `RunDirectory` and its training write, and what it is.
RUN_FILES = {
    "config.yaml": "All settings of the run, as YAML.",
    "tokenizer.json": "The tokenizer, in the format of Hugging Face's tokenizers.",
    "tokenizer_config.json": (
        "JSON: whether a prompt begins with the BOS token, and the tokens that end a text."
    ),
    "chat_template.jinja": "The Jinja template that formats a conversation.",
    "origin.json": "JSON, of an imported model: what its checkpoint declared, for a later export.",
    "model_weights.msgpack": (
        "The weights with the lowest validation loss (with"
        " `training.ema`: their average), as msgpack."
    ),
    "adapter/": (
        "`adapter_model.safetensors` and `adapter_config.json` of PEFT, instead"
        " of the weights, for a run of LoRA."
    ),
    "checkpoints/": (
        "The latest checkpoints and the best one: a directory per step,"
        " written by Orbax, with a manifest."
    ),
    "data/": "The encoded tokens, memory-mapped during training.",
    "manifest.txt": (
        "JSON: SHA-256 and size of every file, versions, settings; the"
        " last line is the SHA-256 of the rest."
    ),
    "training_log.csv": "One row per evaluation; `logging.log_file` names it.",
    "metrics.jsonl": (
        "JSON Lines: a row every `logging.log_every` steps and a row per event, named by `kind`."
    ),
    "model_summary.json": (
        "JSON: architecture, parameters and sizes; `logging.summary_file` names it."
    ),
    "samples/": (
        "Texts that the model generated during training, one file per step"
        " (`training.sample_every`)."
    ),
    "rewards.html": (
        "Of a run with rewards: the curve of the rewards, and the answers"
        " in `samples/` with their rewards."
    ),
    "plots/": "`loss.png` or `reward.png`, and what `dantinox plot` draws.",
    "router.json": "JSON: the thresholds that `dantinox calibrate --what router` measured.",
    "kv_entropy.json": (
        "JSON: the signals of each attention head that `dantinox calibrate --what kv` measured."
    ),
    "evaluation/": (
        "CSV, Markdown and plots of `dantinox eval sampling`, `eval kv` and `eval ruler`."
    ),
    "tensorboard/": "Event files of TensorBoard, with `logging.tensorboard`.",
    "wandb/": "What Weights & Biases writes, with `logging.wandb`.",
    ".lock": "Locked by the process that works on the run.",
}
OTHER_FILES = """
## Trace

`dantinox generate --trace FILE.jsonl` writes JSON Lines: one line for each sample and one for each of its tokens.
[The entropy router](../entropy.md) describes how to read them.

"""


def files() -> str:
    from dantinox.report.metric_files import COLUMNS
    from dantinox.report.trace_file import LISTS

    text = FILES_INTRO + table(
        ("file", "contents"), [(code(name), what) for name, what in RUN_FILES.items()]
    )
    text += "\n## Columns of training_log.csv\n\n" + table(
        ("column", "meaning"), [(code(c), sentence(COLUMN_HELP[c])) for c in COLUMNS]
    )
    text += OTHER_FILES + table(
        ("list of a token", "values of an entry"),
        [(code(name), codes(of)) for name, of in LISTS.items()],
    )
    trace = inspect.cleandoc(import_module("dantinox.report.trace_file").__doc__ or "").split(
        "\n\n", 1
    )[1]
    return text + "\n" + trace.replace("\n    {", "\n\n    {", 1) + "\n"
