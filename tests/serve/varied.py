"""An engine without a model that reports realistic token records:
`python -m tests.serve.varied PORT PAUSE`.
"""

import itertools
import math
import sys
import unicodedata

import numpy as np

from dantinox.config import TokenizerSection
from dantinox.serve.app import make_app
from dantinox.serve.options import Options
from dantinox.text import ChatTemplate, train_tokenizer
from tests.report.page_sample import TEXT, logits_of, router_numbers, select_strategy

from .fakes import FakeEngine, fake_run

PLAIN = (
    unicodedata.normalize("NFD", TEXT[: TEXT.index("\t")]).encode("ascii", "ignore").decode()
)  # every token decodes to text
WORDS = train_tokenizer(
    TokenizerSection(tokenizer_type="bpe", vocab_size=480), lambda: iter([PLAIN])
)
CLEAN = np.array(
    [
        i
        for i in range(WORDS.vocab_size)
        if WORDS.token_text(i).isprintable() or WORDS.token_text(i) == "\n"
    ]
)
CLEAN = np.array(
    [i for i in CLEAN if "\ufffd" not in WORDS.token_text(i) and i not in WORDS.special_ids]
)


class VariedEngine(FakeEngine):
    """Continues a prompt with a poem, from a position that the prompt's length determines, and
    reports consistent metrics.
    """

    name = "varied"

    def __init__(self, pause: float = 0.0, context: int = 1024, **settings):
        super().__init__(fake_run(context, WORDS, **settings), PLAIN, pause)

    def _token_ids(self, ask, sample, room):
        every = self.run.tokenizer.encode(self.says)
        self.routed = ask.config.generation.strategy == "entropy"
        begin = (len(ask.ids) + sample) % len(every)
        return list(itertools.islice(itertools.cycle(every), begin, begin + room))

    def _record(self, token, logprobs, first=False):
        record = {"id": int(token), "text": self.run.tokenizer.decode([token])}
        if logprobs is None or first:
            return record
        number = int(self.counters["records"])
        self.counters["records"] += 1
        rng = np.random.default_rng(number)
        logits = logits_of(rng, float(0.5 + 0.45 * math.sin(number / 9)))[: len(CLEAN)]
        order = CLEAN[rng.permutation(len(CLEAN))]
        rank = min(int(rng.geometric(0.75)) - 1, 5)
        real = int(np.flatnonzero(order == token)[0])
        order[[rank, real]] = order[[real, rank]]
        logp = np.sort(logits)[::-1] - np.log(np.sum(np.exp(logits)))
        p = np.exp(logp)
        H = float(-np.sum(p * np.log2(p)))
        V = float(np.sum(p * (np.log2(p) + H) ** 2))
        name = select_strategy(H, V, router_numbers())
        T = (
            {"greedy": 0.0, "clarify": 1.1, "explore": 1.2, "resample": 2.1, "adaptive": 0.7}[name]
            if self.routed
            else 1.0
        )
        keep = max(rank + 1, 1 if T == 0 else int(rng.integers(2, 24)))
        after = logp[:keep] / (T or 1)
        after = after - np.log(np.sum(np.exp(after)))
        sampled = [*map(float, after), *[None] * len(order)]
        spelt = self.run.tokenizer.token_text
        found = record | {"entropy": H, "varentropy": V}
        if self.routed:
            found |= {
                "attn_entropy": float(rng.gamma(20, 0.1)),
                "attn_entropy_norm": float(rng.beta(4, 4)),
                "attn_varentropy": float(rng.gamma(2, 0.4)), "attn_disagreement": 0.4,
                "attn_agreement": 0.6, "interaction_strength": float(rng.gamma(3, 0.5)),
                "temperature": T, "top_p": 0.9, "top_k": 27, "min_p": 0.0, "strategy": name,
                "forced": False,
            }  # fmt: skip
        return found | {
            "survivors": keep, "rank": rank, "logprob": float(logp[rank]),
            "logprob_sampled": sampled[rank],
            "alternatives": [
                {"id": int(order[i]), "text": spelt(int(order[i])), "logprob": float(logp[i]),
                 "logprob_sampled": sampled[i]}
                for i in range(logprobs)
            ],
        }  # fmt: skip


def app(engine: FakeEngine, **options):
    """Returns an application with this engine and a chat template."""
    return make_app(
        engine, Options(template=ChatTemplate.from_name("plain", engine.run.tokenizer), **options)
    )


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(
        app(VariedEngine(pause=float(sys.argv[2]))), port=int(sys.argv[1]), log_level="warning"
    )
