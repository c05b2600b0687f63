"""`builtin:addition`: sums of two numbers of two digits, such as `37+58=`, as a small task for
training with rewards.

Each record has the prompt, the answer as a number, and the answer as the completion of a
conversation. So the same problems serve fine-tuning (`sft`) and training with rewards (`grpo`).
Every problem occurs once, so training and validation problems are disjoint.
"""

import json
import random
from collections.abc import Iterator

NUMBERS = range(10, 100)


def addition_corpus(seed: int = 0) -> Iterator[bytes]:
    """Yields all 8,100 problems as records of JSON Lines in a random order, which `seed`
    determines.
    """
    rng = random.Random(seed)
    for _, a, b in sorted((rng.random(), a, b) for a in NUMBERS for b in NUMBERS):
        record = {"prompt": f"{a}+{b}=", "completion": str(a + b), "answer": str(a + b)}
        yield json.dumps(record).encode() + b"\n"
