"""Compares sampling steps with llama.cpp's samplers: `python -m tests.sampling.llama_cpp_live`
(needs the package xllamacpp).

The samplers are called through ctypes, because the shared library of xllamacpp exports llama.cpp's
C interface. Adaptive-p runs over random sequences, in which llama.cpp draws the tokens. Its float32
has an error of about 1e-5 there, so both programs are compared with float64. The filters must keep
the same tokens.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.sampling import process_logits

from .recent_references import AdaptiveState
from .recent_references import adaptive_p as reference

SEQUENCES, LENGTH, ROWS = 20, 50, 60
TOLERANCE = 1e-6


class TokenData(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float))


class TokenDataArray(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(TokenData)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


class Sampler:
    """A sampler of llama.cpp, by the end of the name of its constructor."""

    library: ctypes.CDLL

    def __init__(self, name: str, *arguments: Any):
        create = getattr(self.library, f"llama_sampler_init_{name}")
        create.restype = ctypes.c_void_p
        self._sampler = ctypes.c_void_p(create(*arguments))

    def apply(self, logits_V: np.ndarray) -> tuple[dict[int, tuple[float, float]], int]:
        """Returns the logit and the probability of each token that is left, and the drawn token."""
        V = len(logits_V)
        data = (TokenData * V)(*((i, x, 0.0) for i, x in enumerate(logits_V.tolist())))
        array = TokenDataArray(ctypes.cast(data, ctypes.POINTER(TokenData)), V, -1, False)
        self.library.llama_sampler_apply(self._sampler, ctypes.byref(array))
        left = {array.data[i].id: (array.data[i].logit, array.data[i].p) for i in range(array.size)}
        return left, array.data[array.selected].id if array.selected >= 0 else -1

    def accept(self, token: int) -> None:
        self.library.llama_sampler_accept(self._sampler, ctypes.c_int32(token))

    def close(self) -> None:
        self.library.llama_sampler_free(self._sampler)


def softmax(logits_V: np.ndarray) -> np.ndarray:
    weights_V = np.exp(np.float64(logits_V) - np.max(logits_V))
    return weights_V / weights_V.sum()


def random_logits(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(0, rng.choice([0.3, 2, 6]), int(rng.integers(2, 300))).astype(np.float32)


def adaptive_p(rng: np.random.Generator) -> list[float]:
    """Runs a random sequence; returns the largest differences of a probability.

    They are those of DantinoX and of llama.cpp to float64, and of DantinoX to llama.cpp.
    """
    target, decay = (
        float(np.float32(rng.uniform(0, 1))),
        float(np.float32(rng.choice([0.0, 0.5, 0.9, 0.99]))),
    )
    sampler = Sampler(
        "adaptive_p", ctypes.c_float(target), ctypes.c_float(decay), ctypes.c_uint32(7)
    )
    state, differences = AdaptiveState(target, decay), []
    for _ in range(LENGTH):
        logits_V = random_logits(rng)
        left, token = sampler.apply(logits_V)
        peer_V = np.array([left[i][1] for i in range(len(logits_V))])
        step = {"name": "adaptive_p", "target": target, "average": state.average}
        own_V = softmax(np.asarray(process_logits(logits_V[None], [step]))[0])
        exact_V = reference(logits_V, target, state.average)
        differences.append(
            [np.abs(a - b).max() for a, b in ((own_V, exact_V), (peer_V, exact_V), (own_V, peer_V))]
        )
        sampler.accept(token)
        state.accept(softmax(logits_V)[token])
    sampler.close()
    return [float(x) for x in np.max(differences, axis=0)]


def filters(rng: np.random.Generator) -> dict[str, tuple[Sampler, dict[str, Any]]]:
    """Returns samplers of llama.cpp with the equivalent step."""
    p, k, n = (
        float(np.float32(rng.uniform(0.05, 0.95))),
        int(rng.integers(1, 40)),
        float(np.float32(rng.uniform(0.2, 3))),
    )
    number, one = ctypes.c_float, ctypes.c_size_t(1)
    return {
        "top_k": (Sampler("top_k", ctypes.c_int32(k)), {"name": "top_k", "k": k}),
        "top_p": (Sampler("top_p", number(p), one), {"name": "top_p", "p": p}),
        "min_p": (
            Sampler("min_p", number(p / 4), one),
            {"name": "min_p", "p": float(np.float32(p / 4))},
        ),
        "typical": (Sampler("typical", number(p), one), {"name": "typical", "p": p}),
        "top_n_sigma": (Sampler("top_n_sigma", number(n)), {"name": "top_n_sigma", "n": n}),
    }


def main() -> int:
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.origin is not None, (
        "xllamacpp is not installed: pip install xllamacpp"
    )
    (path,) = Path(spec.origin).parent.glob("xllamacpp*.so")
    Sampler.library = ctypes.CDLL(str(path))
    rng, failed = np.random.default_rng(0), 0
    own, peer, between = np.max([adaptive_p(rng) for _ in range(SEQUENCES)], axis=0)
    print(
        f"adaptive_p, {SEQUENCES} sequences of {LENGTH} tokens, largest"
        " difference of a probability to float64:"
    )
    print(f"  DantinoX {own:.1e}, llama.cpp {peer:.1e}; between the two {between:.1e}")
    failed += between > TOLERANCE + own + peer or own > max(TOLERANCE, peer)
    same: dict[str, list[bool]] = {}
    for _ in range(ROWS):
        logits_V = random_logits(rng)
        for name, (sampler, step) in filters(rng).items():
            kept = np.flatnonzero(np.asarray(process_logits(logits_V[None], [step]))[0] > -np.inf)
            left = {
                token for token, (logit, _) in sampler.apply(logits_V)[0].items() if logit > -np.inf
            }
            same.setdefault(name, []).append(set(kept.tolist()) == left)
            sampler.close()
    for name, equal in same.items():
        print(f"{name}: the same tokens in {sum(equal)} of {len(equal)} rows")
        failed += not all(equal)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
