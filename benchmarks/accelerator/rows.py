"""The rows of the check in order of their value: what each measures, its time, and the bars of its
figures.

The bars of training are the model FLOPs utilizations that torchtitan, NeMo and Levanter publish for
an H100. The bars of decoding are shares of the memory bandwidth, from the tokens per second that
vLLM, SGLang and a single-kernel decoder reach with a model of a billion parameters.
`docs/scaling.md` names the sources.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ORDER = ("good", "acceptable", "weak", "broken")  # verdicts of a figure, the best first
FAILED = ("failed", "out of memory", "time limit", "killed")
NOT_GOOD = (*ORDER[1:], *FAILED)  # `--again` repeats rows with these verdicts


class Bar(NamedTuple):
    """The verdict of a figure: good and acceptable from these values on, broken beyond the last,
    and weak between.

    If `good` is less than `broken`, smaller figures are better.
    """

    figure: str
    good: float
    acceptable: float
    broken: float

    def judge(self, value: float) -> str:
        """Returns the verdict of a value."""
        if not math.isfinite(value):
            return "broken"
        sign = 1 if self.good >= self.broken else -1
        if sign * value >= sign * self.good:
            return "good"
        if sign * value >= sign * self.acceptable:
            return "acceptable"
        return "broken" if sign * value < sign * self.broken else "weak"


@dataclass(frozen=True)
class Row:
    """One row of the check.

    Attributes:
      measure: module and function, as in `speed:train_small`.
      seconds: the expected time with compilation, measured on an H200 with 16 CPU cores. A trace of
        a row that is not good takes up to 40 seconds more. The times of the last two rows are
        estimates.
      bars: the bars of its figures. A row without bars is only recorded.
      compile: seconds of compilation for an H100 on two CPU cores, recorded with `--compile`; 0:
        not compiled in advance.
    """

    name: str
    what: str
    measure: str
    seconds: int
    bars: tuple[Bar, ...] = ()
    compile: float = 0.0

    @property
    def limit(self) -> float:
        """The most seconds that the process of the row may run."""
        return 30 + 2.5 * self.seconds


MEMORY = Bar("memory_error", 0.1, 0.2, 0.5)  # of the predicted bytes
ROWS = {
    row.name: row
    for row in (
        Row(
            "device", "device copy and matrix product, beside the published rates",
            "speed:device_rates", 10,
            (Bar("copy_share", 0.85, 0.75, 0.5), Bar("product_share", 0.75, 0.6, 0.4)),
        ),
        Row(
            "exactness", "logits, 20 losses and 30 samplers, beside those of a CPU",
            "exactness:against_cpu", 60,
            (Bar("logits_error", 1e-4, 1e-3, 1e-2), Bar("losses_error", 1e-4, 1e-3, 1e-2),
             Bar("equal_tokens", 1, 0.999, 0.99)),
        ),
        Row(
            "seeds", "100 seeded requests alone and in a full engine", "exactness:seeds", 45,
            (Bar("equal_tokens", 1, 1, 1), Bar("equal_bits", 1, 0, 0)),
        ),
        Row(
            "train_124m", "training step of GPT-2 small", "speed:train_small", 45,
            (Bar("mfu", 0.40, 0.33, 0.20), MEMORY),
            compile=22.6,
        ),
        Row(
            "decode_1b", "decoding of a Llama with 1.24 billion parameters in bfloat16, batch 1",
            "speed:decode_one", 45,
            (Bar("bandwidth_share", 0.59, 0.44, 0.26),),
            compile=23.5,
        ),
        Row(
            "train_1b", "training step of a Llama with 1.24 billion parameters",
            "speed:train_large", 40,
            (Bar("mfu", 0.38, 0.26, 0.18), MEMORY),
            compile=10.8,
        ),
        Row("torch_train_124m", "the same step of GPT-2 small in torch", "torch_peer:train", 65),
        Row("torch_decode_1b", "the same decoding in torch", "torch_peer:decode", 50),
        Row(
            "decode_batches", "decoding of batches, as a multiple of batch 1",
            "speed:decode_batches", 45,
            (Bar("times_8", 6.9, 5, 4), Bar("times_64", 37, 25, 20)),
            compile=18.9,
        ),
        Row(
            "engine", "a server's engine with 8 slots, beside `generate` with the same prompts",
            "speed:engine", 60,
            (Bar("engine_share", 0.9, 0.75, 0.6),),
        ),
        Row(
            "low_precision", "int8 and int4 weights and an int4 cache, as a multiple of bfloat16",
            "speed:low_precision", 110,
            (Bar("int8", 1.1, 1, 0.9), Bar("int4", 1, 0.9, 0.8), Bar("int4_cache", 1, 0.9, 0.8)),
            compile=60.3,
        ),
        Row(
            "deterministic",
            "20 + 20 steps beside 40 with `training.deterministic`, and the time of a step without it",
            "exactness:deterministic", 90,
            (Bar("equal_bits", 1, 1, 1), Bar("slowdown", 1.1, 1.5, 3)),
        ),
        Row("profile", "kernels and gaps of a decoding chunk", "speed:decode_profile", 40,
            (Bar("gaps", 0.05, 0.15, 0.5),)),
    )
}  # fmt: skip


def verdict(bars: Sequence[Bar], figures: Mapping[str, float]) -> str:
    """Returns the worst verdict of the figures that have a bar, or `measured` if none has."""
    found = [bar.judge(figures[bar.figure]) for bar in bars if bar.figure in figures]
    return max(found, key=ORDER.index, default="measured")
