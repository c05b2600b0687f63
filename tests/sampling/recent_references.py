"""The samplers of 2025 and 2026 in float64 NumPy, written from the papers, one loop per definition.

A filter takes logits [V] and returns the ids that it keeps. Other functions return the
probabilities [V] after the step.
"""

import numpy as np


def softmax(x_V):
    x_V = np.asarray(x_V, np.float64)
    weights_V = np.exp(x_V - x_V.max())
    return weights_V / weights_V.sum()


def canonical(x_V):
    """Ids of the remaining tokens by descending logit, equal logits by ascending id."""
    return [
        i
        for i in np.lexsort((np.arange(len(x_V)), -np.asarray(x_V, np.float64)))
        if x_V[i] > -np.inf
    ]


def entropy(P_N):
    P_N = np.asarray(P_N)[np.asarray(P_N) > 0]
    return -float(np.sum(P_N * np.log(P_N)))


def min_k(x_V, tau):
    """Ding et al. 2026: the weighted relative decay, its argmax, and the fallback for flat rows."""
    order = canonical(x_V)
    l_N = np.asarray(x_V, np.float64)[order]
    spread = l_N[0] - l_N[-1]
    if spread == 0:
        kept = len(l_N) if tau > 0 else 1
    else:
        decay = [(l_N[i - 1] - l_N[i]) / spread / i for i in range(1, len(l_N))]
        kept = max(1 + int(np.argmax(decay)), int(min(np.floor(tau / spread), len(l_N))))
    return order[:kept]


def p_less(x_V):
    """Tan et al. 2025: tokens at least as likely as Σ P², the probability that a drawn token is a
    second draw.
    """
    P_V = softmax(x_V)
    return [i for i in canonical(x_V) if P_V[i] >= np.sum(P_V**2) * (1 - 1e-14)]


def p_less_norm(x_V):
    """Tan et al. 2025: Σ P² less the mean probability of two different tokens, Σ_{u≠v} P(u)·P(v)/(V
    − 1).
    """
    P_V = softmax(x_V)
    V, equal = len(P_V), np.sum(P_V**2)
    bound = equal - (1 - equal) / max(V - 1, 1)
    return [i for i in canonical(x_V) if P_V[i] >= bound - 1e-15]


def top_h(x_V, alpha, rule="renormalized"):
    """Potraghloo et al. 2025: adds tokens in order until the entropy exceeds α·H."""
    P_V, kept = softmax(x_V), []
    for token in canonical(x_V):
        added = [*kept, token]
        total = P_V[added].sum() if rule == "renormalized" else 1
        found = entropy(P_V[added] / total)
        if kept and found > alpha * entropy(P_V) * (1 + 1e-12):
            break
        kept = added
    return kept


def skew(x_V, skew):
    """The cumulative probability in canonical order to the power e^s."""
    order = canonical(x_V)
    c_N = np.append(0.0, np.cumsum(softmax(x_V)[order]))
    c_N[-1] = 1.0
    out_V = np.zeros(len(x_V))
    out_V[order] = np.diff(c_N ** np.exp(skew))
    return out_V


def adaptive_p(x_V, target, average):
    """`llama_sampler_adaptive_p_apply` of llama.cpp, with a peak of 5, a sharpness of 10 and a
    width of 0.3.
    """
    P_V = softmax(x_V)
    adapted = min(max(2 * target - average, 0.0), 1.0)
    out_V = np.full(len(P_V), -np.inf)
    for i, p in enumerate(P_V):
        if x_V[i] > -np.inf:
            distance = abs((p - adapted) / 0.3)
            out_V[i] = 5 - 10 * distance * distance / (1 + distance)
    return softmax(out_V)


class AdaptiveState:
    """The state of llama.cpp's adaptive-p: `_init`, `_accept`."""

    def __init__(self, target, decay):
        self.decay, self.weighted_sum, self.total_weight = (
            decay,
            target / (1 - decay),
            1 / (1 - decay),
        )

    @property
    def average(self):
        return self.weighted_sum / self.total_weight

    def accept(self, probability):
        self.weighted_sum = probability + self.decay * self.weighted_sum
        self.total_weight = 1 + self.decay * self.total_weight


def encoder_repetition_penalty(x_V, penalty, prompt=()):
    x_V = np.array(x_V, np.float64)
    for token in set(prompt):
        x_V[token] = x_V[token] * penalty if x_V[token] > 0 else x_V[token] / penalty
    return softmax(x_V)


def hashed(numbers, start=1):
    """The 64-bit linear congruential generator of SynthID-Text, in exact integers."""
    for number in numbers:
        start = ((start + int(number)) * 6364136223846793005 + 1) % 2**64
    return start


def synthid(x_V, layer_keys, table, ngram=5, output=()):
    """Dathathri et al. 2024: a two-candidate tournament per key, in expectation over its draws."""
    contexts = [
        tuple(([0] * (ngram - 1) + list(output[:n]))[-(ngram - 1) :])
        for n in range(len(output) + 1)
    ]
    P_V = softmax(x_V)
    if contexts[-1] in contexts[:-1][-1024:]:
        return P_V
    for key in layer_keys:
        g_V = np.array(
            [table[hashed([*contexts[-1], token, key]) % len(table)] for token in range(len(P_V))],
            float,
        )
        # A token wins against another draw: surely if only it has a one, with probability 1/2 if
        # both are equal.
        beats = 0.5 * (1 + g_V[:, None] - g_V[None, :])
        P_V = 2 * P_V * (beats @ P_V)
    return P_V
