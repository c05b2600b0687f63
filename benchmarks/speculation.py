"""Measures how much faster decoding is with drafts than without them, on the same requests with the
same texts.

    python benchmarks/speculation.py RUN [--new 200] [--rounds 5] [--draft_tokens 5] [--ngram_size 3] [--batch 1]

RUN is a run directory with a chat template, as `dantinox import smollm2` writes it. The tasks are

* `copy`: print a piece of code again, print it again with a different name, and quote a paragraph
  before answering;
* `new`: stories, poems and explanations at temperature 1, in which little repeats;
* `noise`: the same at temperature 3, in which nothing repeats.

Each request is decoded without and with drafts in turn, `--rounds` times after one for compilation.
For each request and mode, the shortest time of decoding counts, without prefill. The columns are
tokens per second without and with drafts, their ratio, the number of draft tokens, the share of
them that was accepted, and the number of requests whose tokens differ.
"""

import json
from pathlib import Path

import numpy as np
from common import Parser, random_run, use_threads

CODE = """```python
class Counter:
    def __init__(self, start=0):
        self.value = start

    def increment(self, step=1):
        self.value += step
        return self.value

    def decrement(self, step=1):
        self.value -= step
        return self.value

    def reset(self):
        self.value = 0
        return self.value
```"""
PARAGRAPH = (
    "The lighthouse was built in 1874 on a reef that is covered by the sea at high tide. Its lamp"
    " burned colza oil until 1903, when it was replaced by a vapor burner. The keepers lived in the"
    " tower for two months at a time and were relieved by boat when the weather allowed it. Since"
    " 1981 the light has been automatic."
)
TASKS = {
    "copy": [
        f"Repeat this code exactly as it is:\n{CODE}",
        f"Rename the class `Counter` to `Meter` in this code and print the whole class:\n{CODE}",
        f"Repeat this text word for word:\n{PARAGRAPH}",
        f"Quote the whole text, then summarize it in one sentence:\n{PARAGRAPH}",
    ],
    "new": [
        "Write a short story about a fox who learns to paint.",
        "Write a poem about autumn in the mountains.",
        "Explain how a bicycle stays upright.",
        "Describe a market in a harbour town early in the morning.",
    ],
}
TASKS["noise"] = TASKS["new"]
SAMPLING = {
    "copy": {"greedy": True},
    "new": {"temperature": 1.0, "top_p": 0.95},
    "noise": {"temperature": 3.0},
}


def decode(
    model, prompt: str, settings: dict, batch: int
) -> tuple[list[list[int]], float, int, int]:
    """Returns the tokens, the seconds per token of decoding, and the numbers of draft tokens and of
    accepted ones.
    """
    template, ids = model.chat_prompt(prompt)
    config = model.with_stop_ids(model.settings(settings), template.end_ids)
    requests = []
    for seed in range(batch):
        generation = config.generation.model_copy(update={"seed": seed})
        requests.append(model.request(ids, config.model_copy(update={"generation": generation})))
    (run,) = model.start(requests)
    for _ in run.parts():
        pass
    stats = [result.stats for result in run.results]
    drafts = (sum(one[key] for one in stats) for key in ("draft_tokens", "accepted_draft_tokens"))
    return (
        [result.tokens for result in run.results],
        1 / max(stats[0]["decode_tok_per_s"], 1e-9),
        *drafts,
    )


def main() -> None:
    a = Parser(__doc__, smoke={"new": 12, "rounds": 1, "draft_tokens": 3})
    a.add_argument("run", nargs="?", type=Path)
    a.add_argument("--new", type=int, default=200)
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--draft_tokens", type=int, default=5)
    a.add_argument("--ngram_size", type=int, default=3)
    a.add_argument(
        "--weights", choices=("auto", "float32", "bfloat16", "int8", "int4"), default="auto"
    )
    a.add_argument(
        "--batch",
        type=int,
        default=1,
        help="requests in a batch: copies of one request with different seeds",
    )
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS])
    o = a.parse_args()
    use_threads(o.threads)
    import dantinox

    if o.smoke:
        o.run = random_run(chat_template="plain")
    a.require(run=o.run)
    model = dantinox.load(o.run)
    modes = {
        "off": {"speculation": "off"},
        "ngram": {
            "speculation": "ngram",
            "draft_tokens": o.draft_tokens,
            "ngram_size": o.ngram_size,
        },
    }

    for task in o.tasks:
        times = {mode: [] for mode in modes}
        counts = []  # decoded tokens of each request
        drafted = 0
        accepted = 0
        different = 0
        for prompt in TASKS[task]:
            base = {
                "max_new_tokens": o.new,
                "weights": o.weights,
                "ignore_eos": task != "copy",
                **SAMPLING[task],
            }
            found: dict[str, list] = {mode: [] for mode in modes}
            for _ in range(o.rounds + 1):
                for mode, settings in modes.items():
                    found[mode].append(decode(model, prompt, base | settings, o.batch))
            tokens, _, verified, matched = found["ngram"][0]
            different += sum(x != y for x, y in zip(found["off"][0][0], tokens, strict=True))
            count = sum(map(len, tokens)) - len(tokens)
            counts.append(count)
            drafted += verified
            accepted += matched
            for mode in modes:
                times[mode].append(count * min(seconds for _, seconds, *_ in found[mode][1:]))
        rates = {mode: sum(counts) / sum(times[mode]) for mode in modes}
        ratios = [off / ngram for off, ngram in zip(times["off"], times["ngram"], strict=True)]
        print(json.dumps({
            "task": task, "batch": o.batch, "weights": o.weights, "draft_tokens": o.draft_tokens,
            "ngram_size": o.ngram_size, "off_tok_per_s": round(rates["off"], 1),
            "ngram_tok_per_s": round(rates["ngram"], 1),
            "ratio": round(rates["ngram"] / rates["off"], 3),
            "ratios": np.round(ratios, 2).tolist(), "tokens": sum(counts), "drafted": drafted,
            "accepted": round(accepted / max(drafted, 1), 2), "different": different,
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
