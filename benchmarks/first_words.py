"""Compares the texts that a chat model generates with its default settings and with llama.cpp's
default sampler chain.

    python benchmarks/first_words.py RUN [--peer MODEL.gguf] [--router] [--prompts 40] [--seeds 3] [--new 200]

RUN is a run directory, as `dantinox import smollm2` writes it. Half of the prompts are questions in
the model's chat template, as in `chat` and the server. The other half are plain text, as in
`generate`. For every seed, each prompt is continued by `--new` tokens; special tokens are banned.
The generators are

* `defaults`: DantinoX with the run's own generation settings;
* `llama.cpp`, if `--peer` is given (needs llama-cpp-python): llama.cpp with its default chain,
  which is top_k 40, top_p 0.95, min_p 0.05, temperature 0.8;
* `llamacpp`: DantinoX with the same chain;
* if `--router` is given, DantinoX with each variant of the entropy router in `ROUTER` (calibrate
  the run first).

The columns are the mean log-probability of a token in nats under the float32 model; distinct-1, -2
and -3; and the percentage of texts that contain a loop, which is a sequence of 1 to 50 tokens that
occurs at least 4 times in a row. 95 % intervals are bootstrapped over prompts.
"""

import itertools
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
from common import Parser, random_run

import dantinox
from dantinox.generation import LoadedModel
from dantinox.lab.measure.perplexity import ScoringInput, score_sequences
from dantinox.lab.studies.statistics import TEXT_MEASURES, mean_interval
from dantinox.run import find_chat_template, open_run
from dantinox.text import ChatTemplate

QUESTIONS = [
    "What is the capital of France?", "Write a short story about a fox.", "How do I boil an egg?",
    "Explain photosynthesis.", "Give me three tips for sleeping better.",
    "Who wrote Romeo and Juliet?", "What is a prime number?", "Describe the sea.",
    "Write a poem about autumn.", "How does a bicycle stay upright?", "What should I cook tonight?",
    "Name five animals.", "Why is the sky blue?", "Write an email to ask for a day off.",
    "What is machine learning?", "Tell me about Ancient Rome.", "How can I learn Spanish?",
    "Describe a female warrior.", "What does a lawyer do?", "Write a Python function that adds.",
]  # fmt: skip
OPENINGS = [
    "The lighthouse keeper climbed the stairs", "Photosynthesis is the process by which",
    "def fibonacci(n):\n", "In 1969, the first", "The three primary colors are",
    "Once upon a time there was a fox", "To bake bread, you need",
    "The difference between a list and a tuple in Python is", "She opened the letter and",
    "The history of the bicycle", "Water boils at", "My favourite book is",
    "The city of Rome was founded", "A healthy breakfast consists of", "The old man and his dog",
    "In mathematics, a function", "The train left the station", "Climate change is",
    "He had never seen such", "The best way to learn a language",
]  # fmt: skip
PEER_CHAIN = {"temp": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0}
OUR_CHAIN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
CALIBRATED = {"strategy": "entropy", "router_preset": "calibrated"}
ROUTER: dict[str, dict[str, object]] = {
    "temperature 0.7": {"temperature": 0.7, "top_p": 1.0, "min_p": 0.0},
    "router, guide": {"strategy": "entropy", "router_preset": "guide"},
    "router, calibrated": CALIBRATED,
    "router, 1 candidate": {**CALIBRATED, "candidates": 1},
    "router, 1 candidate, T 1": {
        **CALIBRATED,
        "candidates": 1,
        "base_temperature": 1.0,
        "base_top_p": 0.95,
    },
    "router, DRY 0.8": {**CALIBRATED, "dry_multiplier": 0.8},
    "router, repetition 1.1": {**CALIBRATED, "repetition_penalty": 1.1},
    "defaults, DRY 0.8": {"dry_multiplier": 0.8},
}
LONGEST_LOOP = 50  # tokens
REPEATS = 4
COLUMNS = ("log p", "distinct_1", "distinct_2", "distinct_3", "loops")


def loops(ids: Sequence[int]) -> bool:
    """Returns whether some sequence of 1 to 50 tokens occurs at least 4 times in a row.

    With a period of p tokens, a loop is a span of (REPEATS − 1) · p tokens that each equal the
    token p positions earlier.
    """
    text = np.asarray(ids)
    for period in range(1, min(LONGEST_LOOP, len(text) // REPEATS) + 1):
        differs = np.flatnonzero(np.concatenate([[True], text[period:] != text[:-period], [True]]))
        if np.diff(differs).max() - 1 >= (REPEATS - 1) * period:
            return True
    return False


def generate_samples(
    run: LoadedModel,
    prompts: Sequence[Sequence[int]],
    settings: Mapping[str, object],
    seeds: int,
    new: int,
):
    """Returns continuations `[seeds][prompts][new]` as token ids."""
    fixed = {
        **settings,
        "ignore_eos": True,
        "max_new_tokens": new,
        "banned_tokens": sorted(run.tokenizer.special_ids),
    }
    for seed in range(seeds):
        requests = [
            run.request(ids, {**fixed, "seed": 1000 * seed + n}) for n, ids in enumerate(prompts)
        ]
        yield [result.tokens for result in run.complete(requests)]


def generate_with_llamacpp(
    path: str, prompts: Sequence[Sequence[int]], banned: Sequence[int], seeds: int, new: int
):
    """Returns continuations by llama.cpp, `[seeds][prompts][new]`."""
    import llama_cpp

    peer = llama_cpp.Llama(path, n_ctx=512, n_threads=2, verbose=False)

    def ban(_, scores):
        scores[banned] = -np.inf
        return scores

    processors = llama_cpp.LogitsProcessorList([ban])
    for seed in range(seeds):
        found = []
        for number, ids in enumerate(prompts):
            peer.set_seed(1000 * seed + number)
            peer.reset()
            tokens = peer.generate(list(ids), **PEER_CHAIN, logits_processor=processors)
            found.append(list(itertools.islice(tokens, new)))
        yield found


def measure_samples(run: LoadedModel, prompts, samples) -> dict[str, np.ndarray]:
    """Returns every measure per prompt, averaged over its samples."""
    logp = []
    found = {}
    for texts in samples:
        pairs = [
            ScoringInput(np.array([*ids, *text], np.int32), len(text))
            for ids, text in zip(prompts, texts, strict=True)
        ]
        logp.append([scores.logp.mean() for _, scores in score_sequences(run.model, pairs)])
    found["log p"] = np.mean(logp, axis=0)
    of_text = {name: TEXT_MEASURES[name] for name in COLUMNS if name in TEXT_MEASURES} | {
        "loops": lambda ids: 100.0 * loops(ids)
    }
    for name, measure in of_text.items():
        found[name] = np.mean([[measure(ids) for ids in texts] for texts in samples], axis=0)
    return found


def main() -> None:
    parser = Parser(__doc__, smoke={"prompts": 2, "seeds": 1, "new": 16})
    parser.add_argument("run", nargs="?")
    parser.add_argument("--peer", metavar="MODEL.gguf")
    parser.add_argument("--router", action="store_true")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--new", type=int, default=200)
    options = parser.parse_args()
    options.run = options.run or (random_run(chat_template="plain") if options.smoke else None)
    parser.require(run=options.run)
    run = dantinox.load(options.run)
    template = ChatTemplate.load(find_chat_template(open_run(options.run)), run.tokenizer)
    half = options.prompts // 2
    chats = [
        template.encode([{"role": "user", "content": text}], generation_prompt=True)
        for text in QUESTIONS[:half]
    ]
    prompts = chats + [run.prompt_ids(text) for text in OPENINGS[: options.prompts - half]]
    settings = {
        "defaults": {},
        "llamacpp": {"preset": "llamacpp", **OUR_CHAIN},
        **(ROUTER if options.router else {}),
    }
    generators = {
        name: generate_samples(run, prompts, one, options.seeds, options.new)
        for name, one in settings.items()
    }
    if options.peer:
        special = sorted(run.tokenizer.special_ids)
        generators = {
            "llama.cpp": generate_with_llamacpp(
                options.peer, prompts, special, options.seeds, options.new
            ),
            **generators,
        }
    print(f"| | {' | '.join(COLUMNS)} |")
    print("|---" * 6 + "|", flush=True)
    for name, generator in generators.items():
        start = time.perf_counter()
        samples = list(generator)  # consuming the generator runs the generation
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
        found = measure_samples(run, prompts, samples)
        cells = [mean_interval(values) for values in found.values()]
        print(
            f"| {name} |"
            f" {' | '.join(f'{v:.3f} ({low:.3f} to {high:.3f})' for v, low, high in cells)} |",
            flush=True,
        )
        print(
            repr(run.tokenizer.decode(samples[0][17 if half > 17 else 0])[:400]),
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main()
