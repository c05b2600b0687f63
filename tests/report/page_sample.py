"""Synthetic trace documents for tests of the page: of any length, with every strategy and
consistent numbers.
"""

import numpy as np

from dantinox.sampling.entropy_router import RULES, RouterConfig

TEXT = (
    "Nel mezzo del cammin di nostra vita\nmi ritrovai per una selva oscura,\nché la diritta via era"
    " smarrita.\n\nAhi quanto a dir qual era è cosa dura\nesta selva selvaggia e aspra e forte\nche"
    " nel pensier rinova la paura!\n\nTant' è amara che poco è più morte;\nma per trattar del ben"
    " ch'i' vi trovai,\ndirò de l'altre cose ch'i' v'ho scorte.\n\nIo non so ben ridir com' i'"
    " v'intrai,\ntant' era pien di sonno a quel punto\nche la verace via abbandonai.\n\n\tλόγος,"
    " «ψυχή» — naïve 🌿 <b>&amp;</b>\n\n"
)
HOSTILE = (
    '</script><script>window.ran = 1</script><!-- <img src=x onerror="window.ran = 1"> \' \u202e'
    " \u2028 \x00"
)
ATTENTION = (
    "attn_entropy",
    "attn_entropy_norm",
    "attn_varentropy",
    "attn_disagreement",
    "attn_agreement",
    "interaction_strength",
)
VOCABULARY = 512
STRATEGY_NAMES = (*RULES, "adaptive")


def router_numbers() -> dict[str, float]:
    config = RouterConfig()
    return {name: float(getattr(config, name)) for name in RouterConfig.__dataclass_fields__}


def pieces(rng: np.random.Generator, count: int) -> list[str]:
    """Splits text into parts of words with a leading space, as tokenizers do; some pieces are parts
    of a character.
    """
    found: list[str] = []
    text = TEXT * (1 + 4 * count // len(TEXT))
    at = 0
    while len(found) < count:
        end = at + 1 if text[at] in "\n\t" else at + int(rng.integers(2, 6))
        stop = min((i for i in range(at + 1, end) if text[i] in " \n\t"), default=end)
        if any(ord(letter) > 0xFFFF for letter in text[at:stop]):
            found.append("")
        found.append(text[at:stop])
        at = stop
    return found[:count]


def logits_of(rng: np.random.Generator, hard: float) -> np.ndarray:
    """Draws logits of one of five shapes: certain, one likely token with a tail, many equal, flat
    with a tail, in between.

    Args:
      hard: 0 to 1; a higher value makes the certain shapes rarer.
    """
    weights = np.array([0.5 * (1 - hard) ** 2, 0.25, 0.12 * hard**2, 0.3 * hard, 0.4])
    kind = rng.choice(5, p=weights / weights.sum())
    logits = rng.normal(0, (1, 2.5, 0.02, 1.5, 2)[kind], VOCABULARY)
    logits[0] += (16, 6, 0, 2.5, 5)[kind]
    if kind == 2:
        logits[12:] -= 14
    if kind == 4:
        logits[20:] -= 6
    return logits


def select_strategy(H: float, V: float, router: dict[str, float]) -> str:
    values = {"entropy": H, "varentropy": V}
    for name, rule in RULES.items():
        if all(
            (values[m] < router[t]) if r == "<" else (values[m] > router[t]) for m, r, t in rule
        ):
            return name
    return "adaptive"


def token(
    rng: np.random.Generator,
    text: str,
    hard: float,
    words: list[str],
    router: dict[str, float],
    alternatives: int,
) -> dict:
    logits = logits_of(rng, hard)
    logp = logits - np.log(np.sum(np.exp(logits)))
    p = np.exp(logp)
    H = float(-np.sum(p * np.log2(p)))
    V = float(np.sum(p * (np.log2(p) + H) ** 2))
    name = select_strategy(H, V, router)
    T = {
        "greedy": 0.0,
        "clarify": 1.1,
        "explore": 1.2,
        "resample": 2.1,
        "adaptive": 0.666 * (1 + 0.3 * (H + V) / 2),
    }[name]
    order = np.argsort(-logp)
    keep = order[:1] if T == 0 else order[: int(rng.integers(1, 28))]
    sampled = np.full(VOCABULARY, -np.inf)
    sharp = logp[keep] / (T or 1)
    sampled[keep] = sharp - np.log(np.sum(np.exp(sharp - sharp.max()))) - sharp.max()
    rank = int(rng.choice(len(keep), p=np.exp(sampled[keep]) / np.sum(np.exp(sampled[keep]))))
    forced = name == "clarify" and bool(rng.random() < 0.3)
    rank = 40 if forced else rank
    chosen = int(order[rank])
    ids = {int(i): words[int(i)] for i in order[:alternatives]} | (
        {chosen: text} if rank < alternatives else {}
    )
    after = {i: None if np.isinf(sampled[i]) else float(sampled[i]) for i in [*ids, chosen]}
    agreement = float(rng.beta(4, 3 + 4 * hard))
    return {
        "id": chosen, "text": text, "entropy": H, "varentropy": V,
        "attn_entropy": float(rng.gamma(20, 0.05 + 0.2 * hard)),
        "attn_entropy_norm": float(rng.beta(4, 4)), "attn_varentropy": float(rng.gamma(2, 0.4)),
        "attn_disagreement": 1 - agreement, "attn_agreement": agreement,
        "interaction_strength": float(rng.gamma(3, 0.5)), "strategy": name, "temperature": float(T),
        "top_p": 0.9, "top_k": 2**30 if name == "resample" else 27, "min_p": 0.0, "forced": forced,
        "survivors": len(keep), "rank": rank, "logprob": float(logp[chosen]),
        "logprob_sampled": after[chosen],
        "alternatives": [
            {"id": i, "text": word, "logprob": float(logp[i]), "logprob_sampled": after[i]} for i,
            word in ids.items()
        ],
    }  # fmt: skip


ROUTED = ("strategy", "temperature", "top_p", "top_k", "min_p", "forced")


def candidates_of(
    rng: np.random.Generator, token: dict, words: list[str], count: int
) -> list[dict]:
    """Returns the candidates of an adaptive token, including the chosen one."""
    ids = (
        [token["id"], *map(int, rng.integers(0, VOCABULARY, count - 1))]
        if token["strategy"] == "adaptive"
        else []
    )
    logprobs = [token["logprob"] - k for k in range(len(ids))]
    texts = [token["text"] if i == token["id"] else words[i] for i in ids]
    drawn = [
        {"id": i, "text": text, "logprob": p, "score": p + 0.25}
        for i, text, p in zip(ids, texts, logprobs, strict=True)
    ]
    return drawn[::-1]


def trace(
    count: int = 40,
    *,
    seed: int = 7,
    alternatives: int = 10,
    candidates: int = 0,
    attention: bool = True,
    routed: bool = True,
) -> dict:
    """Returns a document of `count` tokens."""
    rng = np.random.default_rng(seed)
    router = router_numbers()
    texts = pieces(rng, count)
    words = pieces(rng, VOCABULARY)
    waves = 0.5 + 0.35 * np.sin(np.arange(count) / 90) * np.sin(np.arange(count) / 37)
    hard = [
        min(1, wave + 0.25) if text[:1] in " \n" else 0.5 * wave
        for wave, text in zip(waves, texts, strict=True)
    ]
    tokens = [
        token(rng, text, share, words, router, alternatives)
        for text, share in zip(texts, hard, strict=True)
    ]
    if candidates:
        for one in tokens:
            one["candidates"] = candidates_of(rng, one, words, candidates)
    left_out = (() if attention else ATTENTION) + (() if routed else ROUTED)
    return {
        "prompt": "Così nel mio parlar ", "text": "".join(texts), "seed": seed,
        "finish_reason": "length", "strategy": "entropy" if routed else "chain",
        "settings": {"max_new_tokens": count, "stop": ["\n\n\n"]},
        "router": router if routed else None,
        "stats": {
            "prompt_tokens": 6, "new_tokens": count, "seconds": 11.532,
            "first_token_seconds": 0.0213, "compile_seconds": 3.2, "decode_tok_per_s": 173.4,
        },
        "vocab_size": VOCABULARY,
        "tokens": [{name: value for name,
                    value in one.items() if name not in left_out} for one in tokens],
    }  # fmt: skip
