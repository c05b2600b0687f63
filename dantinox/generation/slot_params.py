"""The settings of a request as arrays: `RowParams` and the `ProgramKey` of its decode program.

All requests of a server share its programs, so a list in the settings of a request is padded to a
fixed size.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from dantinox.config import Config, GenerationSection, UserError
from dantinox.config.generation_settings import section_order
from dantinox.config.sampling_steps import EDIT_STEPS
from dantinox.files import quote
from dantinox.generation.decode.request_features import feature_names
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.plan_stepper import check_steps, row_width
from dantinox.generation.running_batch import NO_ID, pad_end_ids
from dantinox.generation.token_settings import end_ids, with_default_seed
from dantinox.sampling import LogitProcessor, ProgramOptions, SamplingParams
from dantinox.sampling.params import CHOICE_SETTINGS, next_power_of_two
from dantinox.sampling.step_subsets import ALL_STEPS, smallest_subset

MAX_ALTERNATIVES = 20  # the most alternatives reported per token
CACHED_SETTINGS = 64  # different request settings whose parameter arrays are cached
# Limits for the lists in the settings of a request. Lists are padded to these sizes, so that all
# requests share the same programs.
MAX_ENTRIES = 1024
MAX_SEQUENCES = 256
MAX_SEQUENCE_LENGTH = 16  # tokens
MAX_END_IDS = 32
MAX_ENTRIES_BY_SETTING = {
    "stop_ids": MAX_END_IDS,
    "protected_ids": MAX_END_IDS,
    "dry_breakers": 8192,
    "watermark_keys": 32,
}


class ProgramKey(NamedTuple):
    """The key of a decode program; requests with the same key are decoded together.

    All requests without the router share one program, which reads the order of the sampling steps
    and the rules for ties and top_p from arrays. With the router, different rules need different
    programs, and so do requests with a clarify text. Requests with different `features` have
    different programs too (`request_features`).
    """

    strategy: str
    choices: tuple[tuple[str, str], ...] = ()
    attends: bool = False
    features: tuple[str, ...] = ()
    inserts_text: bool = False


class RowParams(NamedTuple):
    """The settings of a request as arrays: sampling parameters with a batch of one and padded
    lists, and end ids.

    Attributes:
      width: the most tokens per step.
      subset: the index of the smallest program for these settings, see `sampling.step_subsets`.
      config: the settings, without those that the row reads elsewhere.
    """

    program: ProgramKey
    params: SamplingParams
    end_ids_1E: np.ndarray
    width: int
    subset: int
    config: Config


T = TypeVar("T")


class CacheKey(Generic[T]):
    """A hashable wrapper of a value; two keys are equal if the `repr` of their `parts` is equal."""

    def __init__(self, value: T, *parts: object):
        self.value = value
        self.text = repr(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheKey) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


class ServedSettings:
    """The settings of a server, with which the settings of its requests must agree. Any thread may
    call its methods.
    """

    def __init__(
        self, model: ModelBundle, config: Config, logit_processor: LogitProcessor | None = None
    ):
        """Creates the cache of `row_params`; `config` holds the settings of the server, whose
        requests share a processor.
        """
        self._bundle = model
        self._config = config
        self._architecture = model.model.config
        self._logit_processor = logit_processor
        # Clients repeat their settings, so the arrays are cached: creating them takes about 10 ms
        # while a program is running.
        self._cached_row_params = lru_cache(CACHED_SETTINGS)(self._row_params)

    def program_key(self, config: Config) -> ProgramKey:
        """Returns the key of the program that decodes with these settings.

        Raises:
          UserError: a setting of weights or caches, or of the watermark of the server, differs from
            that of the server.
        """
        served = _fixed_settings(self._config)
        for key, requested in _fixed_settings(config).items():
            if requested != served[key]:
                message = f"{key} is {quote(served[key])} in this server, got {quote(requested)}"
                raise UserError(message, key=key, value=requested)
        section = config.generation
        beams = section.num_beams
        if beams > 1:
            message = (
                f"generation.num_beams must be 1 in a server, got {beams}:"
                " beam search runs offline only"
            )
            raise UserError(message, key="generation.num_beams", value=beams)
        check_steps(self._config.generation, section)
        self._check_watermark(section)
        features = feature_names(config)
        if section.strategy == "chain":
            return ProgramKey("chain", features=features)
        return ProgramKey(
            section.strategy,
            choices=tuple((key, getattr(section, key)) for key in CHOICE_SETTINGS),
            attends=config.router.use_attention,
            features=features,
            inserts_text=config.router.clarify_text is not None,
        )

    def _check_watermark(self, requested: GenerationSection) -> None:
        """Checks that a request keeps the watermark of the server. The message must not contain its
        keys.
        """
        served = self._config.generation
        if not served.watermark_keys:
            return
        for key in ("watermark_keys", "watermark_ngram"):
            if getattr(requested, key) != getattr(served, key):
                raise UserError(
                    f"generation.{key} is set by this server and cannot be changed",
                    key=f"generation.{key}",
                )

    def row_params(self, config: Config) -> RowParams:
        """Returns the settings of a request as arrays.

        Raises:
          UserError: as in `program_key`, or a list in the settings is too long for a server or has
            an invalid token.
        """
        # These settings affect no array, except that of the seed.
        unread = {
            "seed": 0,
            "n": 1,
            "max_new_tokens": 0,
            "stop": (),
            "banned_strings": (),
            "banned_regexes": (),
        }
        generation = config.generation.model_copy(update=unread)
        reduced = config.model_copy(update={"generation": generation})
        # The key has the values of the sections as dicts, because the `repr` of a section is slow.
        cached = self._cached_row_params(
            CacheKey(reduced, vars(generation), vars(config.router), vars(config.kv))
        )
        seed: dict[str, Any] = {"seed": np.asarray([config.generation.seed or 0], np.uint32)}
        return cached._replace(params=replace(cached.params, **seed))

    def _row_params(self, key: "CacheKey[Config]") -> RowParams:
        config = key.value
        program = self.program_key(config)
        section = config.generation
        ends = end_ids(self._bundle.tokenizer, section)
        if len(ends) > MAX_END_IDS:
            raise UserError(
                f"generation.stop_token_ids and the EOS tokens must be at most {MAX_END_IDS} in a"
                f" server, got {len(ends)}",
                key="generation.stop_token_ids",
            )
        options: ProgramOptions = {"logit_processor": self._logit_processor}
        if section.strategy == "chain":
            options["dynamic_order"] = True
        else:
            options["extra_steps"] = (*EDIT_STEPS, *section_order(section))
        params = self._bundle.params([with_default_seed(config, 0)], **options)
        V = self._architecture.vocab_size
        tables = {
            name: _padded_table(name, table, params.tables, V)
            for name, table in params.tables.items()
        }
        changes: dict[str, Any] = {
            "tables": tables,
            "report": min(MAX_ALTERNATIVES, V),
            "report_rows": np.zeros(1, bool),
        }
        return RowParams(
            program,
            jax.device_get(replace(params, **changes)),
            end_ids_1E=pad_end_ids([ends], MAX_END_IDS),
            width=row_width(section),
            subset=smallest_subset(section) if self._logit_processor is None else ALL_STEPS,
            config=config,
        )


def _fixed_settings(config: Config) -> dict[str, Any]:
    """Returns the settings of weights and caches by name, in which all requests of a server
    agree.
    """
    names = ("weights", "matmul_dtype", "matmul_kernel", "tensor_parallel", "use_cache")
    generation = {f"generation.{name}": getattr(config.generation, name) for name in names}
    return generation | {
        f"kv.{name}": getattr(config.kv, name) for name in type(config.kv).model_fields
    }


def _padded_table(
    name: str, table: jax.Array, tables: dict[str, jax.Array], vocab_size: int
) -> Any:
    """Pads a list of a sampling step to the maximum number of entries per request."""
    if table.dtype == bool:  # a flag, not a list
        return table
    key = name.removesuffix("_before").removesuffix("_by")
    if f"{key}_before" in tables:
        limit = MAX_SEQUENCES
        unit = f"entries of {MAX_SEQUENCE_LENGTH} tokens"
    else:
        limit = min(MAX_ENTRIES_BY_SETTING.get(key, MAX_ENTRIES), next_power_of_two(vocab_size))
        unit = "entries"
    padding_sizes = [
        limit - table.shape[1],
        *(MAX_SEQUENCE_LENGTH - size for size in table.shape[2:]),
    ]
    if min(padding_sizes) < 0:
        raise UserError(
            f"generation.{key} must have at most {limit} {unit} in a server",
            key=f"generation.{key}",
        )
    # The tokens before the last token of a sequence are right-aligned, so they are padded on the
    # left.
    padding = [(0, 0), (0, padding_sizes[0]), *((before, 0) for before in padding_sizes[1:])]
    # Use NumPy, because jax would compile an operation for every length of a list.
    return np.pad(np.asarray(table), padding, constant_values=0 if name.endswith("_by") else NO_ID)
