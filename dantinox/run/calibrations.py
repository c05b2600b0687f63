"""Calibration files of a run: router thresholds and signals of the attention heads."""

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
from dantinox.config.router_settings import MEASURED, Scale
from dantinox.files import UserError, atomic_write, escape_name, read_text
from dantinox.run.directory import RunDirectory
from dantinox.run.manifest import MANIFEST, recorded_file_damage, write_file
from dantinox.run.weights import weights_digest

MAX_ROUTER_BYTES = 1 << 20
_NUMBERS: Any = {name: (Scale if name.endswith("_scale") else NonNegative, ...) for name in MEASURED}
_Measured = create_model("_Measured", __base__=Section, **_NUMBERS)
_RouterFile = create_model("_RouterFile", version=(Literal[1], ...), weights=(str, ...), measured=(_Measured, ...))

MAX_KV_BYTES = 16 << 20
KV_FORMAT = 2
HEAD_SIGNALS = {  # H: query heads, K: key heads
    "head_entropies": "H", "coverage": "H", "distance": "H", "loss": "K", "length_entropies": "H",
}  # fmt: skip
Whole = Annotated[int, Field(ge=0)]
LossIncrease = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
Signal = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]  # bits, keys: a sum of them stays a number


def save_router_calibration(run: RunDirectory, record: Mapping[str, Any]) -> None:
    """Writes what was measured for the router: `weights` (their digest), `measured` (the numbers of `MEASURED`), and more."""
    write_file(run.path, run.router.name, json.dumps({"version": 1, **record}, allow_nan=False) + "\n")


def load_router_calibration(source: RunDirectory | str | Path) -> dict[str, float] | None:
    """The numbers of `config.router.MEASURED` in a file, or of a run; None for a run that was not calibrated.

    Warns if the weights of the run have changed since; of a file it is not known which model it is for.

    Raises:
      UserError: the file cannot be read, is lost, or does not hold exactly these numbers.
    """
    run, path = (source, source.router) if isinstance(source, RunDirectory) else (None, Path(source))
    again = _recalibrate_hint(path, "router")
    if run is not None and not has_calibration(path, "router"):
        return None
    found = _read(path, _RouterFile, MAX_ROUTER_BYTES, again)
    if run is not None and found.weights != weights_digest(run):
        warnings.warn(f"the calibration {path} was measured on other weights: {again}", stacklevel=2)
    return found.measured.model_dump()


def _read(path: Path, kind: Any, limit: int, again: str) -> Any:
    """What a file holds, checked; `again` says in errors how to make another."""
    try:
        found = kind.model_validate_json(read_text(path, limit, "the calibration"))
    except UserError as error:
        raise UserError(f"{error}: {again}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = escape_name(": ".join(map(str, first["loc"])))
        wrong = f"lacks {where}" if first["type"] == "missing" else f"is no good ({where}{': ' * bool(where)}{first['msg']})"
        raise UserError(f"the calibration {path} {wrong}: {again}") from None
    if problem := recorded_file_damage(path):
        raise UserError(f"the calibration {problem}: {again}")
    return found


class _Method(Section):
    """How the heads were measured."""

    model_config = ConfigDict(extra="ignore")
    n_sequences: Whole | None = None
    n_sample_positions: Whole | None = None
    method: str | None = None


class HeadCalibrationFile(Section):
    """What is read of a file about attention heads, whose format 1 ends with `calibration`; other keys are passed over.

    Attributes:
      head_entropies: of a query head's attention in bits, by names like `L0_H1`.
      lengths: tokens up to the query rows, means over the sequences, and `length_entropies`, the entropies there.
      coverage: keys that hold 95 % of a query head's attention.
      distance: mean distance in tokens of a query head's attention, without the first tokens of the text.
      loss: what eviction costs a key head (`L0_K1`) in nats per token, a number for each of `loss_slots`.
      split_half_correlation: of the heads' entropies in odd and in even sequences.
      tokenizer, weights: SHA-256.
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
    tokens: Whole | None = None
    sequences: Whole | None = None
    seed: Whole | None = None
    tokenizer: str | None = None
    weights: str | None = None


@dataclass(frozen=True, eq=False)
class KVCalibration:
    """What a head's share of the slots can go by, for N query heads and K key heads in each of L layers.

    Attributes:
      entropy_LN: mean entropy of a query head's attention, in bits.
      coverage_LN: mean number of keys that hold 95 % of its mass, or None where it was not measured.
      loss_LKC: by how many nats per token the loss is higher if a key head alone keeps so many slots, or None where it was
        not measured.
      loss_slots: how many, C growing numbers; with the last one nothing is lost.
      path: the file, for messages.
      distance_LN: how many tokens back a query head attends in the mean, the first tokens of the text left out, or None where
        it was not measured.
    """

    entropy_LN: np.ndarray
    coverage_LN: np.ndarray | None = None
    loss_LKC: np.ndarray | None = None
    loss_slots: tuple[int, ...] = ()
    path: Path = Path("kv_entropy.json")
    distance_LN: np.ndarray | None = None

    def signal(self, name: str) -> np.ndarray:
        """`entropy`, `coverage` or `distance` of the query heads `[L, N]`, or `loss` of the key heads `[L, K, C]`.

        Raises:
          UserError: it was not measured.
        """
        measured = {"entropy": self.entropy_LN, "coverage": self.coverage_LN, "distance": self.distance_LN}
        found = (measured | {"loss": self.loss_LKC})[name]
        if found is None:
            raise UserError(
                f"the calibration {self.path} holds no {name}: {_recalibrate_hint(self.path, 'kv')}, or set another kv.signal"
            )
        return found

    def missing_signal(self, name: str) -> str:
        """The sentence where a signal was not measured, else nothing."""
        try:
            self.signal(name)
        except UserError as error:
            return str(error)
        return ""


def save_kv_calibration(path: str | Path, record: Mapping[str, Any]) -> None:
    """Writes what was measured on the attention heads, the keys of format 2."""
    path, content = Path(path), json.dumps({"format_version": KV_FORMAT, **record}, allow_nan=False) + "\n"
    if (path.parent / MANIFEST).exists():
        write_file(path.parent, path.name, content)
    else:
        atomic_write(path, content)


def load_kv_calibration(
    path: str | Path, config: ModelConfig, weights: str | None, tokenizer: str | None = None
) -> KVCalibration:
    """The signals in a file; arguments and errors are those of `read_kv_calibration`."""
    found = read_kv_calibration(path, config, weights, tokenizer)

    def grid(name: str, *more: int) -> np.ndarray | None:
        return np.array(list(found[name].values()), np.float64).reshape(config.num_blocks, -1, *more) if name in found else None

    entropy_LN, slots = grid("head_entropies"), tuple(found.get("loss_slots", ()))
    assert entropy_LN is not None
    return KVCalibration(entropy_LN, grid("coverage"), grid("loss", len(slots)), slots, Path(path), grid("distance"))


def read_kv_calibration(
    path: str | Path, config: ModelConfig, weights: str | None, tokenizer: str | None = None
) -> dict[str, Any]:
    """What a file of format 1 or 2 holds, without what is derived from it; heads in their order, absent what is null.

    Args:
      config: the model that it must be of.
      weights: SHA-256 of the weights that it must have been measured on, if it says on which; None: any.
      tokenizer: the same of the tokenizer.

    Raises:
      UserError: the file cannot be read, holds something else, or is of another model or other weights.
    """
    path = Path(path)
    again = _recalibrate_hint(path, "kv")
    file = _read(path, HeadCalibrationFile, MAX_KV_BYTES, again)
    theirs, ours = (file.n_layer, file.n_head, file.n_head_kv), (config.num_blocks, config.n_heads, config.kv_heads)
    if theirs != ours:
        counted = [f"{L} layers with {N} query heads and {K} key heads" for L, N, K in (theirs, ours)]
        raise UserError(f"the calibration {path} is of another model: it has {counted[0]}, this model has {counted[1]}")
    for what, own, other in (("other weights", weights, file.weights), ("another tokenizer", tokenizer, file.tokenizer)):
        if None not in (own, other) and own != other:
            raise UserError(f"the calibration {path} was measured on {what}: {again}")
    found: dict[str, Any] = file.model_dump(exclude_none=True)
    for key, letter in HEAD_SIGNALS.items():
        if key in found:
            names, values = head_names(file.n_layer, file.n_head if letter == "H" else file.n_head_kv, letter), found[key]
            if missing := [name for name in names if name not in values]:
                raise UserError(f"the calibration {path} lacks {missing[0]} in {key}, which this model has: {again}")
            if surplus := values.keys() - set(names):
                name = escape_name(min(surplus))
                raise UserError(f"the calibration {path} holds {name} in {key}, which this model has not: {again}")
            found[key] = {name: values[name] for name in names}
    for name, by in (("length_entropies", "lengths"), ("loss", "loss_slots")):
        count = len(found.get(by, []))
        for head, values in found.get(name, {}).items():
            if len(values) != count:
                raise UserError(f"the calibration {path} has {len(values)} numbers for {head} in {name}, not {count}")
    slots = found.get("loss_slots", [1])
    if not slots or any(a >= b for a, b in itertools.pairwise(slots)):
        raise UserError(f"the calibration {path} has loss_slots that do not grow: {again}")
    return found


def head_names(layers: int, heads: int, letter: str) -> list[str]:
    """`L0_H0`, `L0_H1` … for query heads, `L0_K0` … for key heads."""
    return [f"L{layer}_{letter}{head}" for layer in range(layers) for head in range(heads)]


def has_calibration(path: Path, what: str) -> bool:
    """Whether there is a file of a run's calibration; `what` is router or kv.

    Raises:
      UserError: there is none, and the run was calibrated: without it other tokens would come, and nobody would know.
    """
    if path.exists():
        return True
    if problem := recorded_file_damage(path):
        raise UserError(f"the calibration {problem}: {_recalibrate_hint(path, what)}")
    return False


def _recalibrate_hint(path: Path, what: str) -> str:
    """How to make a calibration anew; the file may lie in its run or anywhere."""
    run = path.parent if path.absolute() in (RunDirectory(path.parent).kv, RunDirectory(path.parent).router) else "RUN"
    return f"run `dantinox calibrate --run_dir {run} --what {what}` again"
