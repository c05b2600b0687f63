"""Sweep files: a YAML file with a grid or random choices of settings, validated before the first trial."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dantinox.config.names import REQUEST_SECTIONS
from dantinox.config.packaged import DEFAULT_CONFIG
from dantinox.config.sections import FIELDS, Config
from dantinox.config.yaml_files import (
    allowed_values,
    build_training,
    did_you_mean,
    find_config,
    nearest_key,
    read_yaml,
)
from dantinox.files import UserError, escape_name, quote

SWEEP_KEYS = ("base", "grid", "random", "trials", "seed", "runs_dir")
MOST_TRIALS = 10_000


@dataclass(frozen=True)
class Trial:
    """One training of a sweep. `chosen`: dotted path → value in this trial."""

    name: str
    chosen: dict[str, Any]
    config: Config


@dataclass(frozen=True)
class Sweep:
    """The trials of a sweep in order. `keys`: the settings in which they differ."""

    source: Path
    runs_dir: Path
    keys: tuple[str, ...]
    trials: tuple[Trial, ...]


def load_sweep(path: str | Path) -> Sweep:
    """Reads a sweep: `base` (YAML file, packaged config or sections), and `grid`, or `random` with `trials` and `seed`.

    Raises:
      UserError: the file is not a sweep, or the settings of a trial are wrong, contradict each other or have no effect.
    """
    path = Path(path)
    read, lines = read_yaml(path, SWEEP_KEYS)
    tree: dict[str, Any] = read
    where = {key: f"{path}, line {line}" for key, line in lines.items()}
    for key in tree:
        _require(key in SWEEP_KEYS, f"unknown key {escape_name(key)}: a sweep has {', '.join(SWEEP_KEYS)}", where, key)
    _require(("grid" in tree) != ("random" in tree), "a sweep has either grid or random", where, "random", "grid")
    kind = "grid" if "grid" in tree else "random"
    _require(isinstance(tree[kind], dict) and tree[kind], f"{kind} must hold settings, got {quote(tree[kind])}", where, kind)
    for key, values in tree[kind].items():
        _check_key(key, values, kind, where)
    choices = list(_grid(tree, where) if kind == "grid" else _random(tree, where))
    runs_dir = tree.get("runs_dir")
    _require(runs_dir is None or (isinstance(runs_dir, str) and runs_dir), "runs_dir must be a path", where, "runs_dir")
    build = _base(tree.get("base", DEFAULT_CONFIG), path, where)
    trials = []
    for number, chosen in enumerate(choices, 1):
        name = f"trial_{number:03d}"
        trials.append(Trial(name, chosen, build(chosen, f"{path}, {name}")))
    return Sweep(path, Path(runs_dir or Path("runs") / path.stem), tuple(tree[kind]), tuple(trials))


def _require(holds: Any, sentence: str, where: dict[str, str], *keys: str) -> None:
    """Raises a UserError unless `holds`, with the place of the first of `keys` that was written."""
    if not holds:
        place = next((where[key] for key in keys if key in where), None)
        raise UserError(f"{sentence} ({place})" if place else sentence)


def _check_key(key: str, values: Any, kind: str, where: dict[str, str]) -> None:
    at = f"{kind}.{key}"
    _require(key in FIELDS, f"unknown key {escape_name(key)}{did_you_mean(nearest_key(key))}", where, at)
    _require(key.partition(".")[0] not in (*REQUEST_SECTIONS, "logging"), f"{key} does not affect training", where, at)
    if isinstance(values, dict) and kind == "random":
        _check_range(key, values, where)
        return
    what = "a list of values" if kind == "grid" else "a list of values, or min and max"
    _require(isinstance(values, list) and values, f"{key} must have {what}, got {quote(values)}", where, at)
    twice = next((value for number, value in enumerate(values) if value in values[:number]), None)
    _require(twice is None, f"{key} has {quote(twice)} twice", where, at)


def _check_range(key: str, given: dict[str, Any], where: dict[str, str]) -> None:
    at = f"random.{key}"
    _require(set(given) <= {"min", "max", "log"}, f"{key} may have min, max and log, got {', '.join(given)}", where, at)
    _require(
        any(word in allowed_values(key) for word in ("integer", "number")), f"{key} is not a number: give a list", where, at
    )
    low, high, log = given.get("min"), given.get("max"), given.get("log", False)
    numbers = [x for x in (low, high) if isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)]
    _require(
        len(numbers) == 2 and numbers[0] < numbers[1], f"{key} must have min < max, got {quote(low)}, {quote(high)}", where, at
    )
    _require(isinstance(log, bool), f"log of {key} must be true or false, got {quote(log)}", where, at)
    _require(not log or numbers[0] > 0, f"min of {key} must be > 0 with log: true, got {quote(low)}", where, at)


def _grid(tree: dict[str, Any], where: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yields all combinations; the last key varies fastest."""
    for key in ("trials", "seed"):
        _require(key not in tree, f"{key} has no effect with grid, which tries everything", where, key)
    count = math.prod(map(len, tree["grid"].values()))
    _require(count <= MOST_TRIALS, f"grid must have at most {MOST_TRIALS} combinations, got {count}", where, "grid")
    for values in itertools.product(*tree["grid"].values()):
        yield dict(zip(tree["grid"], values, strict=True))


def _random(tree: dict[str, Any], where: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yields different random choices. A larger `trials` continues the sequence of a smaller one."""
    trials, seed = tree.get("trials", 0), tree.get("seed", 0)
    is_count = isinstance(trials, int) and not isinstance(trials, bool) and 1 <= trials <= MOST_TRIALS
    sentence = f"trials must be an integer in [1, {MOST_TRIALS}] with random, got {quote(tree.get('trials'))}"
    _require(is_count, sentence, where, "trials", "random")
    _require(isinstance(seed, int) and not isinstance(seed, bool), f"seed must be an integer, got {quote(seed)}", where, "seed")
    source, drawn = random.Random(seed), list[dict[str, Any]]()
    while len(drawn) < trials:
        tries = (
            {key: _draw(source.random(), values, "integer" in allowed_values(key)) for key, values in tree["random"].items()}
            for _ in range(1000)
        )
        chosen = next((one for one in tries if one not in drawn), None)
        _require(chosen, f"random has only {len(drawn)} different trials, trials is {trials}", where, "trials")
        drawn.append(chosen or {})
        yield drawn[-1]


def _draw(at: float, values: Any, whole: bool) -> Any:
    """Returns the element of a list, or the number of a range to four digits, at a position in [0, 1)."""
    if isinstance(values, list):
        return values[int(at * len(values))]
    low, high = values["min"], values["max"]
    if whole and not values.get("log"):
        return math.floor(low + at * (high - low + 1))
    found = low * (high / low) ** at if values.get("log") else low + at * (high - low)
    return round(found) if whole else min(max(float(f"{found:.4g}"), low), high)


def _base(base: Any, path: Path, where: dict[str, str]) -> Any:
    """Returns a function that builds the config of a trial from its choices and their place."""
    if isinstance(base, dict):
        return lambda chosen, origin: build_training(base, chosen, {}, f"base of {path}", origin)
    _require(
        isinstance(base, str), f"base must be a YAML file, a packaged config or sections, got {quote(base)}", where, "base"
    )
    file = find_config(base)
    tree, lines = read_yaml(file)
    places = {key: f"{file}, line {line}" for key, line in lines.items()}
    return lambda chosen, origin: build_training(tree, chosen, places, str(file), origin)
