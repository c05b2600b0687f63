"""Measures how often a chat model solves short tasks with each sampling method.
`dantinox eval sampling` has tuned the methods.

    python benchmarks/instruction_tasks.py RUN RUN/evaluation/sampling.csv [--prompts 40] [--seeds 4]

There are four kinds of tasks, generated from a fixed seed and checked by code: a sum of two
numbers, the city that a sentence names, a JSON object with two given keys and values, and a list of
three items, one per line, each after a dash. All methods answer the same prompts with the same
seeds. Prints the percentages of solved tasks with 95 % intervals, bootstrapped over prompts. The
last two columns are the mean over the four kinds, and the difference between this mean and that of
min_p.
"""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import Parser, random_run, temporary_folder

import dantinox
from dantinox.lab.studies.continuations import NEUTRAL_SETTINGS
from dantinox.lab.studies.sampling_study import CONTROL, METHODS
from dantinox.lab.studies.statistics import mean_interval
from dantinox.run import find_chat_template, open_run
from dantinox.text import ChatTemplate

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack"]
CITIES = [
    "Paris",
    "London",
    "Berlin",
    "Madrid",
    "Rome",
    "Vienna",
    "Lisbon",
    "Dublin",
    "Prague",
    "Oslo",
]
THINGS = [
    "fruits",
    "animals",
    "colours",
    "countries",
    "vegetables",
    "tools",
    "sports",
    "birds",
    "rivers",
    "planets",
]
NEW = 64


class Task(NamedTuple):
    question: str
    solved: Callable[[str], bool]


def arithmetic(random: np.random.Generator) -> Task:
    a, b = (int(n) for n in random.integers(2, 20, 2))

    def solved(text: str) -> bool:
        numbers = re.findall(r"\d+", text)
        return bool(numbers) and int(numbers[-1][:9]) == a + b

    return Task(f"What is {a} + {b}? Answer with the number only.", solved)


def extraction(random: np.random.Generator) -> Task:
    name, city, other = (
        str(random.choice(NAMES)),
        *map(str, random.choice(CITIES, 2, replace=False)),
    )
    text = f"{name} was born in {other} and now lives in {city}."
    return Task(
        f"{text} In which city does {name} live now? Answer with one word.",
        lambda answer: city in answer and other not in answer,
    )


def json_object(random: np.random.Generator) -> Task:
    name, age = str(random.choice(NAMES)), int(random.integers(18, 90))

    def solved(text: str) -> bool:
        found = re.search(r"\{[^{}]*\}", text)
        try:
            return found is not None and json.loads(found[0]) == {"name": name, "age": age}
        except ValueError:
            return False

    example = '{"name": "Zoe", "age": 7}'
    return Task(
        f"{name} is {age} years old. Write this as JSON, in the form {example}."
        " Write only the JSON.",
        solved,
    )


def dashes(random: np.random.Generator) -> Task:
    def solved(text: str) -> bool:
        return [line.strip()[:1] for line in text.strip().splitlines() if line.strip()] == ["-"] * 3

    return Task(
        f'List three {random.choice(THINGS)}, one per line, and begin each line with "- ". Write'
        " nothing else.",
        solved,
    )


TASKS = {"arithmetic": arithmetic, "extraction": extraction, "JSON": json_object, "list": dashes}


def main() -> None:
    parser = Parser(__doc__, smoke={"prompts": 2, "seeds": 1})
    parser.add_argument("run", nargs="?")
    parser.add_argument("tuned", type=Path, nargs="?")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    if options.smoke:
        options.run, options.tuned = (
            random_run(chat_template="plain"),
            temporary_folder() / "sampling.csv",
        )
        options.tuned.write_text(
            "method,setting\nmin_p,min_p=0.1\ntemperature,temperature=0.7\n", encoding="utf-8"
        )
    parser.require(run=options.run, tuned=options.tuned)
    run = dantinox.load(options.run)
    template = ChatTemplate.load(find_chat_template(open_run(options.run)), run.tokenizer)
    random = np.random.default_rng(0)
    tasks = {name: [make(random) for _ in range(options.prompts)] for name, make in TASKS.items()}
    with options.tuned.open(newline="") as lines:
        tuned = {
            row["method"]: row["setting"]
            for row in csv.DictReader(lines)
            if row["method"] in METHODS
        }
    print(
        "| method | "
        + " | ".join([*TASKS, "mean", "minus min_p"])
        + " |\n"
        + "|---" * (len(TASKS) + 3)
        + "|",
        flush=True,
    )
    means: dict[str, np.ndarray] = {}
    for name in sorted(set(tuned) - {CONTROL}, key=lambda name: (name != "min_p", name)):
        values = dict(pair.split("=") for pair in tuned[name].split())
        settings = {
            **NEUTRAL_SETTINGS,
            "ignore_eos": False,
            "max_new_tokens": NEW,
            **METHODS[name].settings,
        }
        settings |= {key: json.loads(value) for key, value in values.items()}
        found = []
        for of_task in tasks.values():
            solved = np.zeros((options.seeds, options.prompts))
            for seed in range(options.seeds):
                requests = [
                    run.request(
                        template.encode(
                            [{"role": "user", "content": task.question}], generation_prompt=True
                        ),
                        {**settings, "seed": 1000 * seed + number},
                    )
                    for number, task in enumerate(of_task)
                ]
                answers = [result.text for result in run.complete(requests)]
                solved[seed] = [
                    task.solved(answer) for task, answer in zip(of_task, answers, strict=True)
                ]
            found.append(100 * solved.mean(0))
        means[name] = np.mean(found, axis=0)
        cells = [
            mean_interval(values) for values in (*found, means[name], means[name] - means["min_p"])
        ]
        print(
            f"| {name} |"
            f" {' | '.join(f'{value:.1f} ({low:.1f} to {high:.1f})' for value, low, high in cells)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
