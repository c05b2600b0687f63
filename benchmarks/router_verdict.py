"""Compares the entropy router with a learned policy, min-p and others at equal diversity.

    python benchmarks/router_verdict.py OUT --run RUN --text TEXT [--stages …]

The tasks have answers that a program checks. `OUT` collects the results; a stage that was stopped
continues where it stopped. `TEXT` is the text of the cloze tasks. docs/router_verdict.md has the
method. The stages:

* `train`: trains the model of verdict/small.yaml on solved tasks and writes it to `RUN`.
* `check`: compares the tokens of this script with those of the library.
* `pilot`: measures the difficulty of the tasks, the thresholds of the preset `calibrated`, the mean
  and the standard deviation of the metrics, the target diversity, and the exchange rate between
  diversity and score.
* `run`: tunes every method with the same number of answers to the kinds of `TRAINING`, and answers
  the kinds of `UNSEEN`.
* `table`: prints the results with 95 % intervals.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import Parser, temporary_folder
from verdict.decoding import (
    FIXED,
    POLICY,
    RANDOM,
    ROUTER,
    Control,
    Decoder,
    Numbers,
    no_router,
    stack_controls,
)
from verdict.tasks import (
    KINDS,
    LIMITS,
    TRAINING,
    UNSEEN,
    Difficulty,
    Prompt,
    draw_prompts,
    read_source,
    solved_tasks,
)

from dantinox.config.router_settings import KEEP_ALL, STRATEGIES, RouterSection
from dantinox.lab.studies.continuations import NEUTRAL_SETTINGS
from dantinox.lab.studies.statistics import Interval, ngrams, percentile_interval
from dantinox.sampling.entropy_router import RouterConfig
from dantinox.training.policy_loss import group_advantages

STAGES = ("train", "check", "pilot", "run", "table")
HELD_OUT = slice(0.9, 1.0)  # of the text: cloze tasks; the rest trains the small model
FACTORS = (0.7, 1.0, 1.4)  # of the tuned base temperature, in the test
# More factors for methods that do not reach the diversity of `temperature` with these, and by how
# much the diversities of a method must extend beyond it.
LARGER, SMALLER, MARGIN = (2.0, 2.8, 4.0), (0.5, 0.35, 0.25), 0.03
PILOT_TEMPERATURES = (0.4, 0.7, 1.0)
SIGMA = 0.4  # standard deviation of the perturbed parameters
FIRST_TEST_SEED = 705_032_704  # above those of the tuning
RATE = 1.0  # step size of the parameters
PULL = 2.0  # how strongly ln of the base temperature follows the difference to the target diversity
CALIBRATION_TOKENS = 4096
CHECKED = ("addition", "record")  # the kinds whose tokens are compared with the library's
RESAMPLES = 5000
COMPARISONS = 12  # of which the strict intervals take account: six for each of two models
PAIRS = (
    ("learned", "min_p"), ("calibrated", "min_p"), ("random", "min_p"),
    ("learned", "calibrated"), ("learned", "random"), ("calibrated", "random"),
)  # fmt: skip


class Method(NamedTuple):
    """A method: its base temperature and its other parameters, before tuning; parameters have no
    bounds.
    """

    temperature: float
    parameters: tuple[float, ...]


def logit(p: float) -> float:
    return float(np.log(p / (1 - p)))


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


BASES = (logit(0.9), float(np.log(27)), logit(0.03))  # top_p, top_k and min_p of the router
METHODS = {
    "temperature": Method(0.7, ()),
    "top_p": Method(1.0, (logit(0.9),)),
    "min_p": Method(1.0, (logit(0.1),)),
    "guide": Method(0.666, BASES),
    "calibrated": Method(0.666, BASES),
    "random": Method(
        0.666, BASES
    ),  # after `calibrated`, which gives it the shares of the strategies
    "learned": Method(
        1.0, (*[0.0] * 12, logit(0.1))
    ),  # the weights of the metrics are 0: it begins as min_p
}


def make_control(
    name: str,
    temperature: float,
    parameters: Sequence[float],
    measured: dict[str, float],
    shares: Sequence[float] | None,
) -> Control:
    """Returns the control of a row.

    Args:
      measured: the calibrated thresholds.
      shares: the probabilities of the strategies of `random`.
    """
    router, equal_S = no_router()
    numbers = {"temperature": temperature, "top_k": KEEP_ALL, "top_p": 1.0, "min_p": 0.0}
    policy_27 = np.zeros((2, 7), np.float32)
    kind = FIXED
    if name in ("top_p", "min_p"):
        numbers[name] = sigmoid(parameters[0])
    if name in ("guide", "calibrated", "random"):
        kind = RANDOM if name == "random" else ROUTER
        section = RouterSection.model_validate(
            {"router_preset": "guide" if name == "guide" else "calibrated"}
        )
        top_p, top_k, min_p = (
            sigmoid(parameters[0]),
            max(1.0, float(np.exp(parameters[1]))),
            sigmoid(parameters[2]),
        )
        router = RouterConfig.build(
            section, measured, temperature=temperature, top_p=top_p, min_p=min_p
        )
        router = RouterConfig(
            **(vars(router) | {"base_temperature": temperature, "base_top_k": min(top_k, KEEP_ALL)})
        )
    if name == "learned":
        kind = POLICY
        policy_27[0] = *parameters[:6], np.log(temperature)
        policy_27[1] = parameters[6:]
    fixed = {
        key: np.int32(value) if key == "top_k" else np.float32(value)
        for key, value in numbers.items()
    }
    shares_S = equal_S if shares is None else np.asarray(shares, np.float32)
    return Control(np.int32(kind), Numbers(**fixed), router, shares_S, policy_27)


class Answer(NamedTuple):
    """An answer: its text, whether it is right, and its pairs of adjacent tokens, with marks at its
    ends.
    """

    text: str
    solved: bool
    pairs: frozenset[tuple[int, ...]]


def distance(a: Answer, b: Answer) -> float:
    """Returns 1 − |A ∩ B| / |A ∪ B| (Jaccard 1912) of the pairs of tokens: 0 for equal answers."""
    return 1 - len(a.pairs & b.pairs) / len(a.pairs | b.pairs)


def mean_distance(answers: Sequence[Answer]) -> float:
    return float(np.mean([distance(a, b) for a, b in combinations(answers, 2)]))


class Group(NamedTuple):
    """Prompts of one kind that are answered together, with their prefilled cache."""

    kind: str
    prompts: list[Prompt]
    prefilled: Any


class Bench:
    """The model, the prompts of all stages, and what the pilot measured."""

    def __init__(self, o: Any):
        import dantinox
        from dantinox.generation import prepare

        self.o, self.out = o, Path(o.out)
        self.run = dantinox.load(o.run)
        self.tokenizer = self.run.tokenizer
        text = Path(o.text).read_text(encoding="utf-8")
        self.source = read_source(text, HELD_OUT, difficulty(o))
        self.model = prepare(self.run.model, "float32")
        tokens = [self.tokenizer.token_text(token) for token in range(self.model.config.vocab_size)]
        special = self.tokenizer.special_ids
        self.ends_V = np.array(
            ["\n" in text or token in special for token, text in enumerate(tokens)]
        )
        used: set[str] = set()
        self.prompts: dict[tuple[str, str], list[list[Prompt]]] = {}
        sizes = {
            "pilot": (KINDS, 1, o.pilot_prompts),
            "tuning": (TRAINING, o.pool, o.tuning_prompts),
        }
        sizes["test"] = UNSEEN, o.prompts // o.chunk, o.chunk
        for seed, (stage, (kinds, groups, count)) in enumerate(sizes.items(), 1):
            random = np.random.default_rng(seed)
            for kind in kinds:
                self.prompts[stage, kind] = [
                    draw_prompts(kind, count, random, self.source, used) for _ in range(groups)
                ]
        longest = max(
            len(self.ids(p)) for groups in self.prompts.values() for group in groups for p in group
        )
        self.length = -(-longest // 16) * 16
        self.decoder = Decoder(self.model, self.ends_V, self.length + 48)
        self.groups: dict[tuple[str, str, int], Group] = {}
        self.words = self.model.config.vocab_size > 1000
        self.pilot: dict[str, Any] = {}
        if (self.out / "pilot.json").exists():
            self.pilot = json.loads((self.out / "pilot.json").read_text())
            self.decoder.scaling = tuple(np.float32(numbers) for numbers in self.pilot["scaling"])

    def ids(self, prompt: Prompt) -> list[int]:
        return [*self.tokenizer.ids_before_text, *self.tokenizer.encode(prompt.text)]

    def group(self, stage: str, kind: str, number: int) -> Group:
        """Returns a group of prompts, which is prefilled at the first call."""
        key = stage, kind, number
        if key not in self.groups:
            prompts = self.prompts[stage, kind][number]
            prefilled = self.decoder.prefill([self.ids(prompt) for prompt in prompts], self.length)
            self.groups[key] = Group(kind, prompts, prefilled)
        return self.groups[key]

    def limit(self, kind: str) -> int:
        return LIMITS[kind][0 if self.words else 1]

    def answer(
        self, group: Group, controls: list[Control], first_seed: int
    ) -> tuple[list[list[Answer]], Any]:
        """Answers every prompt with R / P rows. Returns the answers per prompt, and the `Decoded`
        rows.
        """
        seeds_R = first_seed + np.arange(len(controls))
        found = self.decoder.decode(
            group.prefilled, stack_controls(controls), seeds_R, self.limit(group.kind)
        )
        rows = len(controls) // len(group.prompts)
        answers: list[list[Answer]] = [[] for _ in group.prompts]
        for row, (tokens_N, count) in enumerate(zip(found.tokens_RN, found.count_R, strict=True)):
            ids = tokens_N[:count].tolist()
            text = self.tokenizer.decode(ids).split("\n")[0].strip()
            marked = [-2, *ids[:-1], -1] if self.ends_V[ids[-1]] else [-2, *ids]
            solved = group.prompts[row // rows].solved(text)
            answers[row // rows].append(Answer(text, solved, frozenset(ngrams(marked, 2))))
        return answers, found


# --- the stages


def difficulty(o: Any) -> Difficulty:
    return Difficulty(*(getattr(o, name) for name in Difficulty._fields))


def train(o: Any) -> None:
    """Trains the small model on solved tasks; their cloze text is the first 90 % of the text."""
    from dantinox.config.inherited_settings import load_training
    from dantinox.training import launch

    source = read_source(Path(o.text).read_text(encoding="utf-8"), slice(0.0, 0.9), difficulty(o))
    folder = temporary_folder()
    tasks = solved_tasks(o.tasks, np.random.default_rng(0), source, KINDS)
    (folder / "tasks.txt").write_text("".join(tasks), encoding="utf-8")
    changes = {"data.path": str(folder / "tasks.txt"), "training.max_minutes": o.minutes}
    if o.smoke:
        changes |= {
            "training.steps": 2,
            "model.dim": 32,
            "model.num_blocks": 1,
            "training.eval_every": 2,
        }
    launch(load_training(Path(__file__).parent / "verdict" / "small.yaml", changes), run_dir=o.run)


def pilot(bench: Bench) -> None:
    """Measures what the plan needs, on prompts that no other stage uses."""
    found: dict[str, Any] = {"measured": calibrate(bench)}
    scores: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    distances: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    metrics = []
    for temperature in PILOT_TEMPERATURES:
        for kind in KINDS:
            group = bench.group("pilot", kind, 0)
            control = make_control("temperature", temperature, (), found["measured"], None)
            answers, decoded = bench.answer(
                group, [control] * (len(group.prompts) * bench.o.seeds), 1
            )
            scores[kind][f"{temperature:g}"] = mean_solved(answers)
            distances[kind][f"{temperature:g}"] = float(
                np.mean([mean_distance(of_prompt) for of_prompt in answers])
            )
            if temperature == 0.7 and kind in TRAINING:
                valid_RN = np.arange(decoded.tokens_RN.shape[1]) < decoded.count_R[:, None]
                metrics.append(decoded.metrics_RN6[valid_RN])
            if temperature == 0.7:
                print(
                    kind,
                    repr(group.prompts[0].text),
                    [answer.text for answer in answers[0]],
                    flush=True,
                )
    metrics_M6 = np.concatenate(metrics)
    found["scaling"] = metrics_M6.mean(0).tolist(), np.maximum(metrics_M6.std(0), 1e-6).tolist()
    score, diversity = (
        {t: float(np.mean([of_kind[kind][t] for kind in TRAINING])) for t in scores["addition"]}
        for of_kind in (scores, distances)
    )
    gained = max(diversity["1"] - diversity["0.4"], 1e-6)
    found |= {"scores": scores, "distances": distances, "target": diversity["0.7"]}
    found["rate"] = max(0.0, (score["0.4"] - score["1"]) / gained)
    (bench.out / "pilot.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1), flush=True)


def mean_solved(answers: Sequence[Sequence[Answer]]) -> float:
    return float(np.mean([[answer.solved for answer in of_prompt] for of_prompt in answers]))


def check(bench: Bench) -> None:
    """Prints the share of prompts that this script and the library answer with the same tokens.

    The program exits if it is below 0.9. Another program may round differently, but this seldom
    changes a token.
    """
    guide = {"strategy": "entropy", "candidates": 1}
    min_p = Method(1.0, (logit(0.1),))
    cases = {
        "greedy": ({"greedy": True}, make_control("temperature", 0.0, (), {}, None)),
        "min_p": ({"min_p": 0.1}, make_control("min_p", *min_p, {}, None)),
        "guide": (guide, make_control("guide", *METHODS["guide"], {}, None)),
    }
    for name, (settings, control) in cases.items():
        equal = []
        for kind in CHECKED:
            group, limit = bench.group("pilot", kind, 0), bench.limit(kind)
            _, decoded = bench.answer(group, [control] * len(group.prompts), 7)
            fixed = {**NEUTRAL_SETTINGS, "max_new_tokens": limit, "weights": "float32", **settings}
            requests = [
                bench.run.request(bench.ids(prompt), {**fixed, "seed": 7 + row})
                for row, prompt in enumerate(group.prompts)
            ]
            results = bench.run.complete(requests)
            for result, tokens_N, count in zip(
                results, decoded.tokens_RN, decoded.count_R, strict=True
            ):
                equal.append(result.tokens[:count] == tokens_N[:count].tolist())
        print(
            f"{name}: {np.mean(equal):.0%} of the rows have the same tokens as the library",
            flush=True,
        )
        if np.mean(equal) < 0.9:
            sys.exit("the tokens of this script differ from those of the library")


def calibrate(bench: Bench) -> dict[str, float]:
    """Returns the thresholds that `dantinox calibrate` measures, on solved tasks to tune on."""
    from dantinox.lab.measure.calibrate_router import (
        CONTEXT,
        cut_windows,
        measure_entropy,
        thresholds,
    )

    tasks = solved_tasks(CALIBRATION_TOKENS // 4, np.random.default_rng(4), bench.source, TRAINING)
    ids = np.asarray(bench.tokenizer.encode("".join(tasks))[:CALIBRATION_TOKENS], np.int32)
    window = min(128, bench.model.config.max_context)
    text = cut_windows(ids, window, min(CONTEXT, window // 4), bench.tokenizer.eos_id)
    H_NT, V_NT = measure_entropy(bench.model, text)
    return thresholds(H_NT[text.counted_NT].astype(float), V_NT[text.counted_NT].astype(float))


def tune(bench: Bench, name: str, seed: int, shares: Sequence[float] | None) -> dict[str, Any]:
    """Tunes the parameters of a method by a policy gradient, at the target diversity.

    Every row has its own parameters, the current ones plus σ ε with ε from a normal distribution;
    half of the ε are the others' negatives. The reward of a row is 1 if its answer is right, plus
    the exchange rate times its mean distance from the other answers to its prompt. With the
    advantages A over the mean of the prompt, the gradient is the mean of A ε / σ (Sehnke et al.
    2010, parameter-exploring policy gradients). The base temperature follows the diversity instead.
    The result is the mean over the second half of the updates.
    """
    o, pilot, method = bench.o, bench.pilot, METHODS[name]
    center, ln_T = np.array(method.parameters), float(np.log(method.temperature))
    random, path, history = np.random.default_rng((seed, 0)), [], []
    counts_S = np.zeros(len(STRATEGIES))
    for update in range(o.updates):
        gradients, solved, distances = [], [], []
        for kind in TRAINING:
            group = bench.group("tuning", kind, update % o.pool)
            half = random.standard_normal((len(group.prompts), o.group // 2, len(center)))
            noise_PND = np.concatenate([half, -half], axis=1)
            parameters = (center + SIGMA * noise_PND).reshape(half.shape[0] * o.group, len(center))
            controls = [
                make_control(name, np.exp(ln_T), row, pilot["measured"], shares)
                for row in parameters
            ]
            first_seed = 10_000_000 * (seed + 1) + 10_000 * update + 1000 * [*TRAINING].index(kind)
            answers, decoded = bench.answer(group, controls, first_seed)
            far_PN = np.array([distances_from_others(of_prompt) for of_prompt in answers])
            solved_PN = np.array(
                [[answer.solved for answer in of_prompt] for of_prompt in answers], float
            )
            advantages_PN = group_advantages(solved_PN + pilot["rate"] * far_PN, "mean")
            gradients.append((advantages_PN[..., None] * noise_PND).mean((0, 1)) / SIGMA)
            solved.append(solved_PN.mean())
            distances.append(far_PN.mean())
            if 2 * update >= o.updates:
                valid_RN = np.arange(decoded.tokens_RN.shape[1]) < decoded.count_R[:, None]
                counts_S += np.bincount(decoded.strategy_RN[valid_RN], minlength=len(STRATEGIES))
        center = center + RATE * np.mean(gradients, axis=0)
        ln_T = float(
            np.clip(ln_T + PULL * (pilot["target"] - np.mean(distances)), np.log(0.05), np.log(10))
        )
        path.append([ln_T, *center])
        history.append([round(float(np.mean(values)), 4) for values in (solved, distances)])
    ln_T, *parameters = np.mean(path[len(path) // 2 :], axis=0).tolist()
    shares_S = (counts_S / counts_S.sum()).tolist()
    return {
        "temperature": float(np.exp(ln_T)),
        "parameters": parameters,
        "history": history,
        "strategies": shares_S,
    }


def distances_from_others(answers: Sequence[Answer]) -> list[float]:
    """Returns for each answer the mean distance from the others."""
    far_NN = np.array([[distance(a, b) for b in answers] for a in answers])
    return (far_NN.sum(1) / (len(answers) - 1)).tolist()


def run(bench: Bench) -> None:
    """Tunes and tests all methods for each tuning seed; writes `tuned.jsonl` and
    `answers.jsonl`.
    """
    for seed in range(bench.o.tuning_seeds):
        tuned = {
            row["method"]: row
            for row in read_rows(bench.out / "tuned.jsonl")
            if row["tuning"] == seed
        }
        for name in METHODS:
            if name not in tuned:
                began = time.perf_counter()
                shares = tuned["calibrated"]["strategies"] if name == "random" else None
                row = {
                    "tuning": seed,
                    "method": name,
                    **tune(bench, name, seed, shares),
                    "shares": shares,
                }
                row["seconds"] = round(time.perf_counter() - began, 1)
                append(bench.out / "tuned.jsonl", row)
                tuned[name] = row
        test(bench, seed, tuned)


def test(bench: Bench, seed: int, tuned: dict[str, Any]) -> None:
    """Answers the unseen kinds with all methods and factors. A stop leaves complete chunks.

    The diversities of the first chunk determine which methods need more factors.
    """
    o, path = bench.o, bench.out / "answers.jsonl"
    first: list[Any] = []
    for chunk in range(o.prompts // o.chunk):
        lines = [
            row["rows"] for row in read_rows(path) if (row["tuning"], row["chunk"]) == (seed, chunk)
        ]
        known = [row for rows in lines for row in rows]
        while True:
            began, done = time.perf_counter(), {(row["method"], row["factor"]) for row in known}
            wanted = [("greedy", 1.0), *((name, factor) for name in METHODS for factor in FACTORS)]
            wanted = [*wanted, *more_factors(first or known)] if known else wanted
            missing = [case for case in wanted if case not in done]
            if not missing:
                break
            rows = [
                answer_case(bench, seed, tuned, chunk, kind, *case)
                for kind in UNSEEN
                for case in missing
            ]
            known += rows
            seconds = round(time.perf_counter() - began, 1)
            append(
                path,
                {
                    "tuning": seed,
                    "chunk": chunk,
                    "seconds": seconds,
                    "cases": missing,
                    "rows": rows,
                },
            )
        first = first or known


def more_factors(rows: Sequence[Any]) -> list[tuple[str, float]]:
    """Returns the further factors that methods need, from the results of a chunk.

    A method needs all factors of `rows` that it has beyond `FACTORS`, and the next one if its
    diversities do not extend from below that of `temperature` to above it.
    """
    found: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        found.setdefault((row["method"], row["factor"]), []).append(
            float(np.mean(row["diversity"]))
        )
    mean = {case: float(np.mean(values)) for case, values in found.items()}
    target, wanted = mean["temperature", 1.0], []
    for name in METHODS:
        tried = {factor: value for (method, factor), value in mean.items() if method == name}
        wanted += [(name, factor) for factor in tried if factor not in FACTORS]
        if max(tried.values()) < target + MARGIN:
            wanted += [(name, factor) for factor in LARGER if factor not in tried][:1]
        if min(tried.values()) > target - MARGIN:
            wanted += [(name, factor) for factor in SMALLER if factor not in tried][:1]
    return wanted


def answer_case(
    bench: Bench, seed: int, tuned: dict[str, Any], chunk: int, kind: str, name: str, factor: float
) -> dict[str, Any]:
    """Returns the results of a method at a factor on a chunk of prompts of one kind."""
    group = bench.group("test", kind, chunk)
    best = tuned.get(name, {"temperature": 0.0, "parameters": (), "shares": None})
    method = "temperature" if name == "greedy" else name
    settings = (
        factor * best["temperature"],
        best["parameters"],
        bench.pilot["measured"],
        best["shares"],
    )
    controls = [make_control(method, *settings)] * (len(group.prompts) * bench.o.seeds)
    first_seed = FIRST_TEST_SEED + 1_000_000 * seed + 10_000 * chunk + 1000 * [*UNSEEN].index(kind)
    answers, decoded = bench.answer(group, controls, first_seed)
    right = [{answer.text for answer in of_prompt if answer.solved} for of_prompt in answers]
    return {
        "kind": kind, "method": name, "factor": factor,
        "solved": [[int(answer.solved) for answer in of_prompt] for of_prompt in answers],
        "diversity": [round(mean_distance(of_prompt), 4) for of_prompt in answers],
        "distinct_right": [len(texts) for texts in right],
        "answers": [[answer.text for answer in of_prompt] for of_prompt in answers],
        "mean_tokens": float(decoded.count_R.mean()),
    }  # fmt: skip


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(
        time.strftime("%H:%M:%S"),
        {key: row[key] for key in row if key not in ("rows", "history", "strategies")},
        flush=True,
    )


def read_rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- the table


class Results(NamedTuple):
    """Means over the answers to a prompt: `[T, M, F, K, P]`, NaN for factors that a method has not.

    T tuning seeds, M methods, F factors in ascending order, K kinds, P prompts.
    """

    solved: np.ndarray
    diversity: np.ndarray
    distinct_right: np.ndarray


def read_results(path: Path) -> tuple[Results, list[float], float]:
    """Reads the chunks that all tuning seeds have.

    Returns:
      The results, the factors, and the share that greedy decoding solves.
    """
    found: dict[tuple[int, int], list[Any]] = {}
    for line in read_rows(path):
        found.setdefault((line["tuning"], line["chunk"]), []).extend(line["rows"])
    seeds = sorted({seed for seed, _ in found})
    chunks = [c for c in sorted({c for _, c in found}) if all((seed, c) in found for seed in seeds)]
    factors = sorted({row["factor"] for rows in found.values() for row in rows})
    cells: dict[tuple[Any, ...], dict[int, Any]] = {}
    for seed in seeds:
        for chunk in chunks:
            for row in found[seed, chunk]:
                cells.setdefault((seed, row["method"], row["factor"], row["kind"]), {})[chunk] = row
    prompts = [
        len(cells[seeds[0], "greedy", 1.0, next(iter(UNSEEN))][chunk]["solved"]) for chunk in chunks
    ]

    def values(measure: str, *key: Any) -> np.ndarray:
        rows = cells.get(key, {})
        if any(chunk not in rows for chunk in chunks):
            return np.full(sum(prompts), np.nan)
        parts = [np.array(rows[chunk][measure], float) for chunk in chunks]
        return np.concatenate([part.mean(1) if part.ndim == 2 else part for part in parts])

    arrays = [
        np.array(
            [
                [[[values(measure, t, m, f, k) for k in UNSEEN] for f in factors] for m in METHODS]
                for t in seeds
            ]
        )
        for measure in Results._fields
    ]
    greedy = [values("solved", seeds[0], "greedy", 1.0, kind) for kind in UNSEEN]
    return Results(*arrays), factors, float(np.mean(greedy))


def resamples(results: Results) -> Iterator[Results]:
    """Yields the results, then bootstrap resamples of the prompts of each kind and the tuning
    seeds.
    """
    yield results
    random = np.random.default_rng(0)
    T, _, _, K, P = results.solved.shape
    for _ in range(RESAMPLES):
        seeds_T, prompts_KP = random.integers(T, size=T), random.integers(P, size=(K, P))
        yield Results(
            *(array[seeds_T][..., np.arange(K)[:, None], prompts_KP] for array in results)
        )


def at_equal_diversity(results: Results, middle: int) -> dict[str, np.ndarray]:
    """Returns measures at the diversity of `temperature` with its tuned base temperature.

    They are means over the tuning seeds. Between two factors, measures are interpolated linearly
    over the mean diversity. Outside of the diversities of a method, they are those of its nearest
    factor.

    Args:
      middle: the index of factor 1.

    Returns:
      `solved` and `distinct_right` `[M]`, `by_kind` `[M, K]` (solved), `reached` `[M]` (diversity).
    """
    diversity_TMF = results.diversity.mean((-1, -2))
    target_T = diversity_TMF[:, [*METHODS].index("temperature"), middle]
    weights_TMF = np.zeros(diversity_TMF.shape)
    for t, m in np.ndindex(*diversity_TMF.shape[:2]):
        order = [f for f in np.argsort(diversity_TMF[t, m]) if not np.isnan(diversity_TMF[t, m, f])]
        reached = diversity_TMF[t, m][order]
        for number, f in enumerate(order):
            weights_TMF[t, m, f] = np.interp(target_T[t], reached, np.eye(len(order))[number])
    means = {name: np.nan_to_num(values.mean(-1)) for name, values in results._asdict().items()}
    at_target = {
        name: np.einsum("tmf,tmfk->mk", weights_TMF, x) / len(target_T) for name, x in means.items()
    }
    return {
        "solved": at_target["solved"].mean(1), "by_kind": at_target["solved"],
        "distinct_right": at_target["distinct_right"].mean(1),
        "reached": at_target["diversity"].mean(1),
    }  # fmt: skip


def table(out: Path) -> None:
    results, factors, greedy = read_results(out / "answers.jsonl")
    samples = [at_equal_diversity(sample, factors.index(1.0)) for sample in resamples(results)]
    first = samples[0]
    T, _, _, K, P = results.solved.shape
    print(
        f"{T} tuning seeds, {P} prompts of each of {K} kinds; greedy decoding solves"
        f" {100 * greedy:.1f} %\n"
    )
    names = [*METHODS]

    def interval(measure: str, name: str, minus: str | None = None, scale: float = 100) -> Interval:
        m = names.index(name)
        values = [s[measure][m] - (s[measure][names.index(minus)] if minus else 0) for s in samples]
        return percentile_interval(scale * np.array(values))

    def text(found: Interval, digits: int = 1) -> str:
        return (
            f"{found.value:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})".replace(
                "-", "−"
            )
        )

    print(
        "| method | solved, % | minus min_p | different right answers | diversity | "
        + " | ".join(UNSEEN)
        + " |"
    )
    print("|---" * (5 + len(UNSEEN)) + "|")
    for m, name in enumerate(names):
        kinds = " | ".join(f"{100 * value:.1f}" for value in first["by_kind"][m])
        versus = "0" if name == "min_p" else text(interval("solved", name, "min_p"))
        right = text(interval("distinct_right", name, scale=1), 2)
        print(
            f"| {name} | {text(interval('solved', name))} | {versus} | {right} |"
            f" {first['reached'][m]:.3f} | {kinds} |"
        )
    print(
        "\n| first | second | difference, points | strict interval | different right answers"
        " |\n|---|---|---|---|---|"
    )
    for a, b in PAIRS:
        differences = 100 * np.array(
            [s["solved"][names.index(a)] - s["solved"][names.index(b)] for s in samples[1:]]
        )
        low, high = np.quantile(differences, [0.025 / COMPARISONS, 1 - 0.025 / COMPARISONS])
        strict = f"{low:.1f} to {high:.1f}".replace("-", "−")
        right = text(interval("distinct_right", a, b, scale=1), 2)
        print(f"| {a} | {b} | {text(interval('solved', a, b))} | {strict} | {right} |")
    diversity_MF = results.diversity.mean((0, -1, -2))
    solved_MF = results.solved.mean((0, -1, -2))
    print(
        "\n| method | "
        + " | ".join(f"factor {factor:g}: diversity, solved %" for factor in factors)
        + " |"
    )
    print("|---" * (1 + len(factors)) + "|")
    for m, name in enumerate(names):
        pairs = zip(diversity_MF[m], solved_MF[m], strict=True)
        cells = ["" if np.isnan(d) else f"{d:.3f}, {100 * s:.1f}" for d, s in pairs]
        print(f"| {name} | {' | '.join(cells)} |")


def parse() -> Any:
    smoke = {
        "prompts": 2, "chunk": 2, "pilot_prompts": 2, "tuning_prompts": 2, "pool": 1, "group": 4,
        "updates": 2, "tuning_seeds": 2, "seeds": 2, "shots": 1, "tasks": 300,
        "stages": list(STAGES),
    }  # fmt: skip
    a = Parser(__doc__, smoke=smoke)
    a.add_argument("out", nargs="?", help="the folder of the results")
    a.add_argument("--run", help="the run directory of the model")
    a.add_argument("--text", help="a text file in UTF-8")
    a.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES[1:])
    a.add_argument("--prompts", type=int, default=96, help="test prompts of each kind")
    a.add_argument("--chunk", type=int, default=8, help="prompts that are answered together")
    a.add_argument("--pilot_prompts", type=int, default=8)
    a.add_argument(
        "--tuning_prompts", type=int, default=5, help="prompts of each kind in an update"
    )
    a.add_argument("--pool", type=int, default=4, help="updates after which the prompts repeat")
    a.add_argument("--group", type=int, default=8, help="answers to a prompt in an update; even")
    a.add_argument("--updates", type=int, default=40)
    a.add_argument("--tuning_seeds", type=int, default=5)
    a.add_argument("--seeds", type=int, default=5, help="answers to a test prompt")
    a.add_argument("--shots", type=int, default=4, help="examples in a prompt")
    a.add_argument("--largest", type=int, default=19, help="the largest summand of a sum")
    a.add_argument("--movers", type=int, default=2, help="people who move: 1 or 2")
    a.add_argument(
        "--any_age", type=int, choices=(0, 1), default=0, help="1: a person may have any age"
    )
    a.add_argument("--listed", type=int, default=1, help="words to list")
    a.add_argument("--digits", type=int, default=2, help="digits to sort")
    a.add_argument("--total", type=int, default=10, help="the largest number to split")
    a.add_argument(
        "--hint", type=int, default=0, help="letters that a cloze task shows of the word"
    )
    a.add_argument("--tasks", type=int, default=200_000, help="solved tasks to train on")
    a.add_argument("--minutes", type=float, default=8, help="training time")
    o = a.parse_args()
    if o.smoke:
        folder = temporary_folder()
        o.out, o.run, o.text = (
            folder / "out",
            folder / "run",
            Path(__file__).parent.parent / "README.md",
        )
    a.require(out=o.out, run=o.run, text=o.text)
    return o


def main() -> None:
    o = parse()
    Path(o.out).mkdir(parents=True, exist_ok=True)
    if "train" in o.stages:
        train(o)
    for stage in (check, pilot, run):
        if stage.__name__ in o.stages:
            stage(Bench(o))
    if "table" in o.stages:
        table(Path(o.out))


if __name__ == "__main__":
    main()
