"""The calibration files of a run: thresholds of the entropy router, and statistics of the attention
heads.
"""

import itertools
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, ValidationError, create_model

from dantinox.config import ModelConfig
from dantinox.config.base import Count, NonNegative, Section
from dantinox.config.router_settings import CALIBRATED_THRESHOLDS, Scale
from dantinox.files import UserError, atomic_write, escape_name, read_text
from dantinox.run.directory import RunDirectory
from dantinox.run.manifest import MANIFEST, recorded_file_damage, write_file
from dantinox.run.weights import weights_digest

MAX_ROUTER_BYTES = 1 << 20
# The types of the numbers in `router.json`, which must all be present (`...`).
_NUMBERS: Any = {
    name: (Scale if name.endswith("_scale") else NonNegative, ...) for name in CALIBRATED_THRESHOLDS
}
_Measured = create_model("_Measured", __base__=Section, **_NUMBERS)
_RouterFile = create_model(
    "_RouterFile", version=(Literal[1], ...), weights=(str, ...), measured=(_Measured, ...)
)

MAX_KV_BYTES = 16 << 20
KV_FILE_FORMAT = 2
# Signal → the heads that it is measured of. H: query heads, K: key heads.
HEAD_SIGNALS = {
    "head_entropies": "H", "coverage": "H", "distance": "H", "loss": "K", "length_entropies": "H",
}  # fmt: skip
NonNegativeInt = Annotated[int, Field(ge=0)]
LossIncrease = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
Signal = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]  # the bound keeps sums finite


def save_router_calibration(run: RunDirectory, record: Mapping[str, Any]) -> None:
    """Writes the router calibration of a run.

    Args:
      record: `weights` (the SHA-256 of the weights), `measured` (a value for each of the
        `CALIBRATED_THRESHOLDS`), and any further fields.

    Raises:
      UserError: the file cannot be written, or the manifest is damaged.
    """
    write_file(
        run.path, run.router.name, json.dumps({"version": 1, **record}, allow_nan=False) + "\n"
    )


def load_router_calibration(source: RunDirectory | str | Path) -> dict[str, float] | None:
    """Loads the router calibration of a run or from a file.

    Warns if the weights of the run have changed since the calibration. With a path as `source`, the
    weights are not checked.

    Returns:
      The value of each name in `config.router_settings.CALIBRATED_THRESHOLDS`, or None for a run
      that was not calibrated.

    Raises:
      UserError: the file cannot be read or is invalid, or the manifest lists the file but it is
        missing.
    """
    run = source if isinstance(source, RunDirectory) else None
    path = source.router if isinstance(source, RunDirectory) else Path(source)
    hint = _recalibrate_hint(path, "router")
    if run is not None and not has_calibration(path, "router"):
        return None
    content = _read(path, _RouterFile, MAX_ROUTER_BYTES, hint)
    if run is not None and content.weights != weights_digest(run):
        warnings.warn(f"the calibration {path} was measured on other weights: {hint}", stacklevel=2)
    return content.measured.model_dump()


def _read(path: Path, schema: Any, limit: int, hint: str) -> Any:
    """Reads and validates a calibration file. Error messages end with `hint`, the command that
    recreates the file.
    """
    try:
        content = schema.model_validate_json(read_text(path, limit, "the calibration"))
    except UserError as error:
        raise UserError(f"{error}: {hint}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = escape_name(": ".join(map(str, first["loc"])))
        if first["type"] == "missing":
            wrong = f"lacks {where}"
        else:
            wrong = (
                f"is invalid ({where}: {first['msg']})" if where else f"is invalid ({first['msg']})"
            )
        raise UserError(f"the calibration {path} {wrong}: {hint}") from None
    if problem := recorded_file_damage(path):
        raise UserError(f"the calibration {problem}: {hint}")
    return content


class _Method(Section):
    """How the heads were measured."""

    model_config = ConfigDict(extra="ignore")
    n_sequences: NonNegativeInt | None = None
    n_sample_positions: NonNegativeInt | None = None
    method: str | None = None


class HeadCalibrationFile(Section):
    """The content of a file with statistics of attention heads. Unknown keys are ignored.

    Format 1 has only the fields up to `calibration`.

    Attributes:
      n_layer, n_head, n_head_kv: the numbers of layers, of query heads per layer and of key heads
        per layer.
      head_entropies: attention entropy of each query head in bits, by names such as `L0_H1`.
      n_ctx: tokens per sequence.
      lengths: for each measured query position, the mean number of tokens up to this query.
      length_entropies: attention entropy of each query head at each of `lengths`.
      coverage: the smallest number of keys that hold 95 % of a query head's attention, as a mean.
      distance: mean attention distance of a query head in tokens. Attention to the first tokens
        (attention sinks) is ignored.
      loss: for each key head (`L0_K1`), the increase of the loss in nats per token if the head
        keeps only n cache slots, for each n of `loss_slots`.
      split_half_correlation: the correlation between the heads' entropies in odd sequences and
        those in even sequences.
      tokenizer, weights: the SHA-256 (hex) of the tokenizer and of the weights.
    """

    model_config = ConfigDict(extra="ignore")
    format_version: Literal[1, 2]
    n_layer: Count
    n_head: Count
    n_head_kv: Count
    head_entropies: dict[str, Signal]
    model: str | None = None
    n_ctx: Count | None = None
    calibration: _Method | None = None
    lengths: list[NonNegative] | None = None
    length_entropies: dict[str, list[Signal]] | None = None
    coverage: dict[str, Signal] | None = None
    distance: dict[str, Signal] | None = None
    loss: dict[str, list[LossIncrease]] | None = None
    loss_slots: list[Count] | None = None
    split_half_correlation: Annotated[float, Field(ge=-1, le=1)] | None = None
    tokens: NonNegativeInt | None = None
    sequences: NonNegativeInt | None = None
    seed: NonNegativeInt | None = None
    tokenizer: str | None = None
    weights: str | None = None


@dataclass(frozen=True, eq=False)
class KVCalibration:
    """Statistics of the attention heads that can decide how many cache slots each head gets.

    There are L layers with N query heads and K key heads each. A statistic is also called a signal,
    after the setting `kv.signal` that selects it. It is None if it was not measured.

    Attributes:
      entropy_LN: mean attention entropy of each query head, in bits.
      coverage_LN: smallest number of keys that hold 95 % of a query head's attention, as a mean.
      loss_LKC: increase of the loss in nats per token if a single key head is limited to
        `loss_slots[c]` cache slots.
      loss_slots: the C measured limits, increasing. The last limit is so large that nothing is
        evicted.
      path: the file, for messages.
      distance_LN: mean attention distance of each query head in tokens. Attention to the first
        tokens is ignored.
    """

    entropy_LN: np.ndarray
    coverage_LN: np.ndarray | None = None
    loss_LKC: np.ndarray | None = None
    loss_slots: tuple[int, ...] = ()
    path: Path = Path("kv_entropy.json")
    distance_LN: np.ndarray | None = None

    def signal(self, name: str) -> np.ndarray:
        """Returns `entropy`, `coverage` or `distance` of the query heads `[L, N]`, or `loss` of the
        key heads `[L, K, C]`.

        Raises:
          UserError: this signal was not measured.
        """
        measured = {
            "entropy": self.entropy_LN,
            "coverage": self.coverage_LN,
            "distance": self.distance_LN,
        }
        found = (measured | {"loss": self.loss_LKC})[name]
        if found is None:
            raise UserError(
                f"the calibration {self.path} holds no {name}:"
                f" {_recalibrate_hint(self.path, 'kv')}, or set another kv.signal"
            )
        return found

    def missing_signal(self, name: str) -> str:
        """Returns the error message if this signal was not measured, else ""."""
        try:
            self.signal(name)
        except UserError as error:
            return str(error)
        return ""


def save_kv_calibration(path: str | Path, record: Mapping[str, Any]) -> None:
    """Writes statistics of attention heads.

    Args:
      path: the file. If its directory is a run, the file is also recorded in the manifest.
      record: the fields of `HeadCalibrationFile` in format 2, without `format_version`.

    Raises:
      UserError: the file cannot be written, or the manifest is damaged.
    """
    path = Path(path)
    content = json.dumps({"format_version": KV_FILE_FORMAT, **record}, allow_nan=False) + "\n"
    if (path.parent / MANIFEST).exists():
        write_file(path.parent, path.name, content)
    else:
        atomic_write(path, content)


def load_kv_calibration(
    path: str | Path, config: ModelConfig, weights: str | None, tokenizer: str | None = None
) -> KVCalibration:
    """Loads the signals from a file; for arguments and errors see `read_kv_calibration`."""
    found = read_kv_calibration(path, config, weights, tokenizer)

    def by_layer(name: str, *columns: int) -> np.ndarray | None:
        """Returns a signal as an array `[layers, heads, *columns]`, or None if it was not
        measured.
        """
        if name not in found:
            return None
        return np.array(list(found[name].values()), np.float64).reshape(
            config.num_blocks, -1, *columns
        )

    entropy_LN = by_layer("head_entropies")
    slots = tuple(found.get("loss_slots", ()))
    assert entropy_LN is not None  # the file must contain it
    return KVCalibration(
        entropy_LN=entropy_LN,
        coverage_LN=by_layer("coverage"),
        loss_LKC=by_layer("loss", len(slots)),
        loss_slots=slots,
        path=Path(path),
        distance_LN=by_layer("distance"),
    )


def read_kv_calibration(
    path: str | Path, config: ModelConfig, weights: str | None, tokenizer: str | None = None
) -> dict[str, Any]:
    """Reads a file with statistics of attention heads, in format 1 or 2.

    Args:
      config: the model that the file must match in layers and heads.
      weights: the expected SHA-256 of the weights, compared only if the file contains a SHA-256.
        None: not compared.
      tokenizer: the expected SHA-256 of the tokenizer, compared in the same way.

    Returns:
      The fields of `HeadCalibrationFile` that are not null, with the heads in order.

    Raises:
      UserError: the file cannot be read, is invalid, or is for another model, other weights or
        another tokenizer.
    """
    path = Path(path)
    hint = _recalibrate_hint(path, "kv")
    file = _read(path, HeadCalibrationFile, MAX_KV_BYTES, hint)
    theirs = f"{file.n_layer} layers with {file.n_head} query heads and {file.n_head_kv} key heads"
    ours = (
        f"{config.num_blocks} layers with {config.n_heads} query heads and {config.kv_heads}"
        " key heads"
    )
    if theirs != ours:
        raise UserError(
            f"the calibration {path} is for another model: it has {theirs}, this model has {ours}"
        )
    for what, expected, stored in (
        ("other weights", weights, file.weights),
        ("another tokenizer", tokenizer, file.tokenizer),
    ):
        if expected is not None and stored is not None and expected != stored:
            raise UserError(f"the calibration {path} was measured on {what}: {hint}")
    found: dict[str, Any] = file.model_dump(exclude_none=True)
    for key, letter in HEAD_SIGNALS.items():
        if key in found:
            names = head_names(
                file.n_layer, file.n_head if letter == "H" else file.n_head_kv, letter
            )
            values = found[key]
            missing = [name for name in names if name not in values]
            if missing:
                raise UserError(
                    f"the calibration {path} lacks {missing[0]} in {key}, a head of this model:"
                    f" {hint}"
                )
            surplus = values.keys() - set(names)
            if surplus:
                name = escape_name(min(surplus))
                raise UserError(
                    f"the calibration {path} holds {name} in {key}, which this model does not have:"
                    f" {hint}"
                )
            found[key] = {name: values[name] for name in names}  # in the order of the heads
    for name, axis in (("length_entropies", "lengths"), ("loss", "loss_slots")):
        count = len(found.get(axis, []))
        for head, values in found.get(name, {}).items():
            if len(values) != count:
                raise UserError(
                    f"the calibration {path} has {len(values)} numbers for {head} in {name},"
                    f" expected {count}"
                )
    slots = found.get("loss_slots", [1])
    if not slots or any(slot >= next_slot for slot, next_slot in itertools.pairwise(slots)):
        raise UserError(f"the calibration {path} has loss_slots that do not increase: {hint}")
    return found


def head_names(layers: int, heads: int, letter: str) -> list[str]:
    """Returns the names of all heads: `L0_H0`, `L0_H1` … for query heads (`letter` H), `L0_K0` …
    for key heads (K).
    """
    return [f"L{layer}_{letter}{head}" for layer in range(layers) for head in range(heads)]


def has_calibration(path: Path, what: str) -> bool:
    """Returns whether a calibration file of a run exists.

    Args:
      path: the file.
      what: `router` or `kv`.

    Raises:
      UserError: the manifest lists the file, but it is missing. Without this error, the run would
        silently generate different tokens.
    """
    if path.exists():
        return True
    if problem := recorded_file_damage(path):
        raise UserError(f"the calibration {problem}: {_recalibrate_hint(path, what)}")
    return False


def _recalibrate_hint(path: Path, what: str) -> str:
    """Returns the hint to repeat a calibration with `dantinox calibrate`. It names the run
    directory if `path` is in one.
    """
    folder = RunDirectory(path.parent)
    run = path.parent if path.absolute() in (folder.kv, folder.router) else "RUN"
    return f"run `dantinox calibrate --run_dir {run} --what {what}` again"
