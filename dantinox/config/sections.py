"""`Config`, which has all sections (most are declared in `*_settings.py`), and the table of every
setting.

`Config` has one frozen section per YAML section. Flags, error messages, the JSON schema and the
sampling parameters are derived from `Config`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from dantinox.config.architecture import resolve_architecture
from dantinox.config.attention_settings import AttentionSection
from dantinox.config.base import (
    Conflict,
    Count,
    FileName,
    Positive,
    Section,
    as_tuple,
    field,
)
from dantinox.config.depth import resolve_depth
from dantinox.config.distill_settings import DistillSection, distill_conflicts
from dantinox.config.distributed_settings import DistributedSection, distributed_conflicts
from dantinox.config.generation_settings import GenerationSection, generation_conflicts
from dantinox.config.grpo_settings import GRPOSection, grpo_conflicts
from dantinox.config.kv_settings import KVSection, kv_conflicts
from dantinox.config.lora_settings import LoraSection, lora_config, lora_conflicts
from dantinox.config.model_config import ModelConfig, Platform, uneven_keys
from dantinox.config.model_conflicts import model_conflicts
from dantinox.config.model_settings import ModelSection
from dantinox.config.moe_settings import MoESection
from dantinox.config.preference_defaults import PREFERENCE_OBJECTIVES
from dantinox.config.prerequisites import Condition, Needs, differs, inactive_settings, one_of
from dantinox.config.router_settings import RouterSection, router_conflicts
from dantinox.config.sampling_steps import step_prerequisites
from dantinox.config.training_settings import TrainingSection
from dantinox.files import UserError

# Names of the files that every run directory may contain.
RUN_FILES = (
    "config.yaml", "tokenizer.json", "model_weights.msgpack", "metrics.jsonl", "router.json",
    "kv_entropy.json", "manifest.txt", "chat_template.jinja", "tokenizer_config.json",
    "origin.json", "rewards.html",
)  # fmt: skip

# The suffixes of files with one JSON record per line, in upper or lower case.
RECORD_SUFFIXES = (".jsonl", ".jsonlines", ".ndjson")
# A name with any other suffix, or a built-in corpus, has no JSON Lines. Another name may be a
# folder or a dataset.
PLAIN_FILE = re.compile(r"\.\w+$|^builtin:")


class TokenizerSection(Section):
    """Type and vocabulary of the tokenizer."""

    tokenizer_type: Literal["char", "byte", "bpe", "file"] = field(
        "bpe",
        "characters, bytes, byte-level BPE trained on the corpus, or"
        " a tokenizer.json at tokenizer_path",
    )
    vocab_size: Annotated[
        int, Field(ge=260, le=1_000_000), Needs(("tokenizer.tokenizer_type", "bpe"))
    ] = field(4096, "size of a trained BPE vocabulary, including its three special tokens")
    tokenizer_path: Annotated[str | None, Needs(("tokenizer.tokenizer_type", "file"))] = field(
        None, "path of a tokenizer.json"
    )
    byte_fallback: Annotated[bool, Needs(("tokenizer.tokenizer_type", "char"))] = field(
        False, "char: encode unknown characters as bytes instead of raising an error"
    )


def may_hold_records(corpus: str | Iterable[str] | None) -> bool:
    """Whether a corpus may contain JSON Lines, judged by the names of its files."""
    paths = (corpus,) if isinstance(corpus, str) else corpus or ()
    for path in paths:
        # The suffix may be followed by .gz.
        has_record_suffix = any(suffix in path.lower() for suffix in RECORD_SUFFIXES)
        if has_record_suffix or not PLAIN_FILE.search(path):
            return True
    return False


# `distill.data` → the objective with the same data.
DISTILLED_DATA = {
    "text": "next_token",
    "conversations": "sft",
    "samples": "grpo",
}

is_list = Condition("is a list", lambda paths: isinstance(paths, tuple))
has_records = Condition("may contain JSON Lines", may_hold_records)
NEEDS_HUB = Needs(("data.dataset_source", "huggingface"))
# The objectives that read conversations instead of plain text. With distill, `distill.data`
# decides. With any other objective, `distill.data` is inactive and counts as its default `text`.
READS_CONVERSATIONS = one_of("sft", *PREFERENCE_OBJECTIVES, "grpo")
NEEDS_CONVERSATIONS = Needs(
    ("training.objective", READS_CONVERSATIONS), ("distill.data", differs("text"))
)
# Two prerequisites, which must both be met.
NEEDS_TEXT = (
    Needs(("training.objective", one_of("next_token", "distill"))),
    Needs(("distill.data", "text")),
)


class DataSection(Section):
    """The corpus and its validation part."""

    # Unlike with `as_tuple`, one string stays a string: a mixture needs a path that is a list.
    path: Annotated[
        str | tuple[str, ...] | None,
        BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v),
    ] = field(
        None,
        "text file, folder, glob, .jsonl[.gz|.zst], builtin:python, builtin:recall,"
        " builtin:instructions, or a list of these",
    )
    mixture: Annotated[
        tuple[Positive, ...] | None, BeforeValidator(as_tuple), Needs(("data.path", is_list))
    ] = field(None, "relative sampling weight of each entry of a path that is a list")
    chat_template: Annotated[str | None, NEEDS_CONVERSATIONS] = field(
        None,
        "conversations: a Jinja file, plain, bare or chatml (null: that of training.init_from or"
        " the teacher, else plain)",
    )
    packing: Annotated[Literal["windows", "best_fit"], *NEEDS_TEXT] = field(
        "windows",
        "windows: windows of consecutive tokens; best_fit: rows of whole documents, split only if"
        " they are longer than a row",
    )
    val_path: str | None = field(None, "separate validation text (null: the end of the corpus)")
    val_fraction: Annotated[float, Field(gt=0, lt=1), Needs(("data.val_path", None))] = field(
        0.1, "fraction of the text held out for validation"
    )
    text_field: Annotated[
        str,
        Needs(("data.path", has_records), ("data.val_path", has_records)),
        *NEEDS_TEXT,
    ] = field("text", "field of a JSON Lines record that holds the text")
    on_bad_file: Literal["error", "skip"] = field(
        "error",
        "a file that is not UTF-8 text or JSON Lines, or that cannot be"
        " read: stop, or skip it with a warning",
    )
    dataset_source: Literal["local", "huggingface"] = field(
        "local", "read path as local files or as Hugging Face datasets (needs the extra `hf`)"
    )
    dataset_split: Annotated[str, NEEDS_HUB] = field("train", "huggingface: split of the dataset")
    dataset_config: Annotated[str | None, NEEDS_HUB] = field(
        None, "huggingface: configuration of the dataset (null: its default)"
    )
    streaming: Annotated[bool, NEEDS_HUB] = field(
        False, "huggingface: stream the dataset instead of storing a copy in the library's cache"
    )


class LoggingSection(Section):
    """Console lines, log files and trackers."""

    log_every: Count = field(10, "steps between console lines and rows of metrics.jsonl")
    log_file: FileName = field(
        "training_log.csv", "file name of the evaluation log in the run directory"
    )
    summary_file: FileName = field(
        "model_summary.json", "file name of the model summary in the run directory"
    )
    plot: bool = field(
        True, "plot the losses or rewards into the folder plots at the end (needs the extra `plot`)"
    )
    tensorboard: bool = field(
        False, "write TensorBoard event files to tensorboard/ (needs the extra `logs`)"
    )
    wandb: bool = field(
        False,
        "log to Weights & Biases, or to wandb/ if WANDB_MODE=offline (needs the extra `logs`)",
    )
    wandb_project: Annotated[str | None, Needs(("logging.wandb", True))] = field(
        None, "Weights & Biases project (null: WANDB_PROJECT, or the default of the account)"
    )


# Validation context with which `Config` skips its checks, because the caller runs them.
UNCHECKED = "unchecked"


class Config(Section):
    """All settings of a run, one frozen section per section of the YAML file.

    `dantinox settings` prints the type, range and default of every setting.

    Attributes:
      model, moe, attention: the architecture.
      tokenizer, data: the vocabulary and the corpus.
      training, grpo, distill, lora, distributed, logging: the training run.
      generation, router, kv: generation defaults, which a request may override.

    Raises:
      UserError: a setting contradicts another one or has no effect.
      pydantic.ValidationError: a setting has a wrong name, type or range. For these errors
        `load_config` raises a UserError.

    Example:
      >>> config = dantinox.Config()
      >>> config.training.lr, config.generation.top_p
      (0.0003, None)
      >>> changed = dantinox.load_config("quickstart", {"model.dim": 64})
      >>> changed.model.dim
      64
    """

    model: ModelSection = ModelSection()
    moe: MoESection = MoESection()
    attention: AttentionSection = AttentionSection()
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    grpo: GRPOSection = GRPOSection()
    distill: DistillSection = DistillSection()
    lora: LoraSection = LoraSection()
    distributed: DistributedSection = DistributedSection()
    generation: GenerationSection = GenerationSection()
    router: RouterSection = RouterSection()
    kv: KVSection = KVSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="before")
    @classmethod
    def _resolve_depth(cls, given: Any) -> Any:
        section_types: dict[str, Any] = {
            name: field.annotation for name, field in cls.model_fields.items()
        }
        return resolve_depth(given, section_types) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _sections_agree(self, info: ValidationInfo) -> "Config":
        if info.context != UNCHECKED:
            inactive = [
                (key, f"has no effect {reason}") for key, reason in find_inactive(self).items()
            ]
            for key, problem in (*inactive, *self.conflicts()):
                raise UserError(f"{key} {problem}", key=key)
        return self

    def conflicts(self) -> Iterator[Conflict]:
        """Yields an error for each contradiction among the settings of all sections."""
        training = self.training
        if training.batch_size % training.grad_accum:
            got = f"got {training.grad_accum} and {training.batch_size}"
            yield "training.grad_accum", f"must divide training.batch_size, {got}"
        steps = training.steps
        warmup_steps = training.warmup_steps
        if steps is not None and warmup_steps is not None and warmup_steps > steps:
            yield (
                "training.warmup_steps",
                f"must be at most training.steps, got {warmup_steps} and {steps}",
            )
        # `resolve_depth` replaces it only if num_blocks is not given.
        if self.model.depth is not None:
            layers = f"got {self.model.depth} and {self.model.num_blocks}"
            yield (
                "model.depth",
                (
                    "and model.num_blocks both set the number of layers: leave one of them out,"
                    f" {layers}"
                ),
            )
        yield from distributed_conflicts(self.distributed)
        # ORPO, which includes supervised fine-tuning, can start from random weights.
        needs_start = (
            training.objective in (*PREFERENCE_OBJECTIVES, "grpo") and training.objective != "orpo"
        )
        if needs_start and training.init_from is None:
            yield (
                "training.objective",
                f"{training.objective} needs training.init_from, the run with the starting weights",
            )
        if self.tokenizer.tokenizer_type == "file" and self.tokenizer.tokenizer_path is None:
            yield "tokenizer.tokenizer_path", "must be set with tokenizer.tokenizer_type: file"
        yield from self._file_conflicts()
        yield from self._budget_conflicts()
        yield from grpo_conflicts(self.grpo, training.objective, self.generation)
        yield from model_conflicts(self.model, self.moe, self.attention)
        yield from distill_conflicts(self.distill, training.objective)
        yield from lora_conflicts(
            self.lora, training.init_from, self.model, self.moe, self.attention
        )
        yield from generation_conflicts(self.generation)
        yield from router_conflicts(self.router)
        yield from kv_conflicts(self.kv)

    def _file_conflicts(self) -> Iterator[Conflict]:
        """Yields an error for each contradiction among the paths of the corpus, and among the names
        of the logs.
        """
        data = self.data
        log = self.logging
        if (
            data.mixture is not None
            and isinstance(data.path, tuple)
            and len(data.mixture) != len(data.path)
        ):
            got = f"got {len(data.mixture)} for {len(data.path)}"
            yield "data.mixture", f"must have one number per entry of data.path, {got}"
        if data.path == ():
            yield "data.path", "must name at least one file, got []"
        names = (log.log_file, log.summary_file, *RUN_FILES)
        if len(set(names)) < len(names):
            others = (
                f"each other and from the other files of a run ({', '.join(RUN_FILES[:3])}"
                " and so on)"
            )
            got = f"got {log.log_file} and {log.summary_file}"
            yield "logging.log_file", f"and logging.summary_file must differ from {others}, {got}"

    def _budget_conflicts(self) -> Iterator[Conflict]:
        """Yields an error for each setting of `attention` with which a KV cache cannot be
        compressed.
        """
        if not self.kv.compresses:
            return
        key = "kv.budget" if self.kv.budget is not None else "kv.budget_tokens"
        if self.attention.kv_lora_rank is not None:
            yield (
                key,
                (
                    "must be null with attention.kv_lora_rank: all heads share one latent per"
                    " token, so no head can drop it alone"
                ),
            )
        uneven = uneven_keys(self.attention)
        if uneven is not None:
            yield (
                key,
                (
                    f"must be null with {uneven}: the budget needs"
                    " layers whose keys have the same shape"
                ),
            )

    @property
    def data_objective(self) -> str:
        """The objective whose data the training reads: distillation reads those of next_token, sft
        or grpo.
        """
        objective = self.training.objective
        return DISTILLED_DATA[self.distill.data] if objective == "distill" else objective

    @property
    def tokenizer_run(self) -> str | None:
        """The path of the run whose tokenizer and chat template a new run has:
        `training.init_from`, else the teacher.
        """
        return self.training.init_from or (
            self.distill.teacher if self.training.objective == "distill" else None
        )

    def architecture(self, vocab_size: int, platform: Platform = "auto") -> ModelConfig:
        """Returns the resolved architecture for a vocabulary of `vocab_size` tokens.

        Args:
          vocab_size: number of tokens in the vocabulary, at least 1.
          platform: the compilation target, a platform of `dantinox.platform`; auto: this machine.

        Raises:
          UserError: `model.padded_vocab_size` is less than `vocab_size`.
        """
        return resolve_architecture(self.model, self.moe, self.attention, vocab_size, platform)

    def trained_architecture(self, vocab_size: int, platform: Platform = "auto") -> ModelConfig:
        """Returns `architecture` with the adapters that the section `lora` defines, if any."""
        return replace(
            self.architecture(vocab_size, platform),
            lora=lora_config(self.lora, self.model, self.moe),
        )


# The table of settings: section → its class, and dotted path → field, (section, name), default,
# prerequisites.
SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in Config.model_fields.items()
}
FIELDS: dict[str, FieldInfo] = {
    f"{section}.{name}": field
    for section, kind in SECTIONS.items()
    for name, field in kind.model_fields.items()
}
PARTS = {key: tuple(key.split(".")) for key in FIELDS}
DEFAULTS = {key: field.default for key, field in FIELDS.items()}
NEEDS = {
    key: (
        *SECTIONS[key.partition(".")[0]].needs,
        *step_prerequisites(key.removeprefix("generation.")),
        *(mark for mark in field.metadata if isinstance(mark, Needs)),
    )
    for key, field in FIELDS.items()
}


def flatten_config(config: Config, changed: bool = False) -> dict[str, object]:
    """Returns dotted path → value of every setting. With `changed`, it returns only settings that
    differ from their default.
    """
    # Every request calls this function, and `vars` of a section is faster than `getattr` for each
    # setting.
    sections = {section: vars(getattr(config, section)) for section in SECTIONS}
    values = {key: sections[section][name] for key, (section, name) in PARTS.items()}
    return {key: value for key, value in values.items() if not changed or value != DEFAULTS[key]}


def find_inactive(config: Config) -> dict[str, str]:
    """Returns the settings that differ from their default and have no effect: dotted path → reason
    (`while … is …`).
    """
    return inactive_settings(flatten_config(config), DEFAULTS, NEEDS)


def reset_settings(config: Config, keys: Iterable[str]) -> Config:
    """Returns a copy of the config in which the settings `keys` have their default."""
    defaults: dict[str, dict[str, Any]] = {}
    for key in keys:
        section, _, name = key.partition(".")
        defaults.setdefault(section, {})[name] = DEFAULTS[key]
    changed = {
        name: getattr(config, name).model_copy(update=values) for name, values in defaults.items()
    }
    return config.model_copy(update=changed)
