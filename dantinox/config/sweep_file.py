"""Sweep files: YAML files with a grid or random choices of settings. All trials are validated
before the first one runs.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dantinox.config.inherited_settings import build_training
from dantinox.config.names import REQUEST_SECTIONS
from dantinox.config.packaged import DEFAULT_CONFIG
from dantinox.config.sections import FIELDS, Config
from dantinox.config.yaml_files import allowed_values, did_you_mean, find_config, nearest_key
from dantinox.config.yaml_text import read_yaml
from dantinox.files import UserError, escape_name, quote

SWEEP_KEYS = ("base", "grid", "random", "trials", "seed", "runs_dir")
MAX_TRIALS = 10_000
MAX_ATTEMPTS = 1000  # random choices in a row that all occurred before; there are then no others


@dataclass(frozen=True)
class Trial:
    """One training run of a sweep. `chosen` maps dotted paths to the values of this trial."""

    name: str
    chosen: dict[str, Any]
    config: Config


@dataclass(frozen=True)
class Sweep:
    """A sweep with its trials in order. `keys` are the settings that differ between trials."""

    source: Path
    runs_dir: Path
    keys: tuple[str, ...]
    trials: tuple[Trial, ...]


def load_sweep(path: str | Path) -> Sweep:
    """Reads a sweep file.

    Its keys are `base` (a YAML file, a packaged config or sections), `runs_dir`, and either `grid`,
    or `random` with `trials` and `seed`.

    Raises:
      UserError: the file is not a sweep, or the settings of a trial are wrong, contradict each
        other or have no effect.
    """
    path = Path(path)
    content, lines = read_yaml(path, SWEEP_KEYS)
    tree: dict[str, Any] = content  # the types of the values are checked below
    where = {key: f"{path}, line {line}" for key, line in lines.items()}
    for key in tree:
        _require(
            key in SWEEP_KEYS,
            f"unknown key {escape_name(key)}: a sweep has {', '.join(SWEEP_KEYS)}",
            where,
            key,
        )
    _require(
        ("grid" in tree) != ("random" in tree),
        "a sweep has either grid or random",
        where,
        "random",
        "grid",
    )
    kind = "grid" if "grid" in tree else "random"
    _require(
        isinstance(tree[kind], dict) and tree[kind],
        f"{kind} must hold settings, got {quote(tree[kind])}",
        where,
        kind,
    )
    for key, values in tree[kind].items():
        _check_key(key, values, kind, where)
    choices = list(_grid(tree, where) if kind == "grid" else _random(tree, where))
    runs_dir = tree.get("runs_dir")
    _require(
        runs_dir is None or (isinstance(runs_dir, str) and runs_dir and "\0" not in runs_dir),
        f"runs_dir must be a path, got {quote(runs_dir)}",
        where,
        "runs_dir",
    )
    build = _base(tree.get("base", DEFAULT_CONFIG), path, where)
    trials = []
    for number, chosen in enumerate(choices, 1):
        name = f"trial_{number:03d}"
        trials.append(Trial(name, chosen, build(chosen, f"{path}, {name}")))
    return Sweep(path, Path(runs_dir or Path("runs") / path.stem), tuple(tree[kind]), tuple(trials))


def _require(condition: Any, sentence: str, where: dict[str, str], *keys: str) -> None:
    """Raises a UserError unless `condition` is true. The error names the line of the first of
    `keys` that the file contains.
    """
    if not condition:
        place = next((where[key] for key in keys if key in where), None)
        raise UserError(f"{sentence} ({place})" if place else sentence)


def _check_key(key: str, values: Any, kind: str, where: dict[str, str]) -> None:
    """Checks the values of one setting in a `grid` or `random`."""
    path = f"{kind}.{key}"
    _require(
        key in FIELDS,
        f"unknown key {escape_name(key)}{did_you_mean(nearest_key(key))}",
        where,
        path,
    )
    _require(
        key.partition(".")[0] not in (*REQUEST_SECTIONS, "logging"),
        f"{key} does not affect training",
        where,
        path,
    )
    if isinstance(values, dict) and kind == "random":
        _check_range(key, values, where)
        return
    expected = "a list of values" if kind == "grid" else "a list of values, or min and max"
    _require(
        isinstance(values, list) and values,
        f"{key} must have {expected}, got {quote(values)}",
        where,
        path,
    )
    duplicate = next(
        (value for number, value in enumerate(values) if value in values[:number]), None
    )
    _require(duplicate is None, f"{key} lists {quote(duplicate)} twice", where, path)


def _check_range(key: str, interval: dict[str, Any], where: dict[str, str]) -> None:
    """Checks the values `min`, `max` and `log` of one setting in `random`."""
    path = f"random.{key}"
    _require(
        set(interval) <= {"min", "max", "log"},
        f"{key} may have min, max and log, got {', '.join(interval)}",
        where,
        path,
    )
    _require(
        any(word in allowed_values(key) for word in ("integer", "number")),
        f"{key} is not a number: give a list",
        where,
        path,
    )
    low = interval.get("min")
    high = interval.get("max")
    log = interval.get("log", False)
    numbers = [
        x
        for x in (low, high)
        if isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
    ]
    _require(
        len(numbers) == 2 and numbers[0] < numbers[1],
        f"{key} must have min < max, got {quote(low)}, {quote(high)}",
        where,
        path,
    )
    _require(
        isinstance(log, bool), f"log of {key} must be true or false, got {quote(log)}", where, path
    )
    _require(
        not log or numbers[0] > 0,
        f"min of {key} must be > 0 with log: true, got {quote(low)}",
        where,
        path,
    )


def _grid(tree: dict[str, Any], where: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yields all combinations of the grid; the last key varies fastest."""
    for key in ("trials", "seed"):
        _require(
            key not in tree,
            f"{key} has no effect with grid, which tries every combination",
            where,
            key,
        )
    count = math.prod(map(len, tree["grid"].values()))
    _require(
        count <= MAX_TRIALS,
        f"grid must have at most {MAX_TRIALS} combinations, got {count}",
        where,
        "grid",
    )
    for values in itertools.product(*tree["grid"].values()):
        yield dict(zip(tree["grid"], values, strict=True))


def _random(tree: dict[str, Any], where: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yields distinct random choices. A larger `trials` extends the sequence without changing its
    beginning.
    """
    trials = tree.get("trials", 0)
    seed = tree.get("seed", 0)
    is_count = (
        isinstance(trials, int) and not isinstance(trials, bool) and 1 <= trials <= MAX_TRIALS
    )
    sentence = (
        f"trials must be an integer in [1, {MAX_TRIALS}] with random, got"
        f" {quote(tree.get('trials'))}"
    )
    _require(is_count, sentence, where, "trials", "random")
    _require(
        isinstance(seed, int) and not isinstance(seed, bool),
        f"seed must be an integer, got {quote(seed)}",
        where,
        "seed",
    )
    source = random.Random(seed)
    drawn = list[dict[str, Any]]()
    attempts = 0  # since the last new choice
    while len(drawn) < trials:
        chosen = {
            key: _draw(source.random(), values, "integer" in allowed_values(key))
            for key, values in tree["random"].items()
        }
        if chosen not in drawn:
            drawn.append(chosen)
            attempts = 0
            yield chosen
            continue
        attempts += 1
        sentence = f"random has only {len(drawn)} different trials, but trials is {trials}"
        _require(attempts < MAX_ATTEMPTS, sentence, where, "trials")


def _draw(position: float, values: Any, is_integer: bool) -> Any:
    """Maps a position in [0, 1) to an element of a list, or to a number of a range.

    Numbers that are not integers are rounded to four significant digits.
    """
    if isinstance(values, list):
        return values[int(position * len(values))]
    low, high = values["min"], values["max"]
    if is_integer and not values.get("log"):
        return math.floor(low + position * (high - low + 1))
    number = low + position * (high - low)
    if values.get("log"):
        number = low * (high / low) ** position
    if is_integer:
        return round(number)
    return min(max(float(f"{number:.4g}"), low), high)  # rounding can leave the range


def _base(base: Any, path: Path, where: dict[str, str]) -> Any:
    """Returns a function (choices, their source for error messages) → config of a trial."""
    if isinstance(base, dict):
        return lambda chosen, origin: build_training(base, chosen, {}, f"base of {path}", origin)
    _require(
        isinstance(base, str),
        f"base must be a YAML file, a packaged config or sections, got {quote(base)}",
        where,
        "base",
    )
    file = find_config(base)
    tree, lines = read_yaml(file)
    places = {key: f"{file}, line {line}" for key, line in lines.items()}
    return lambda chosen, origin: build_training(tree, chosen, places, str(file), origin)
