"""The sampling steps as pure functions of one row, `f(logits_V, numbers…) -> logits_V`, in float32.

The table of all steps is `dantinox.config.sampling_steps.STEPS`. Steps that read earlier tokens are
in `dantinox.sampling.history`.

A removed token is -inf, and a kept logit is bitwise unchanged. A mask never removes all tokens of a
row: the first token in canonical order (descending logit, ties by ascending id) survives. A
disabled step returns the row itself, by `jnp.where`.

A row may also be a window with the largest logits of a longer row. `rest` then holds sums over the
other tokens.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from dantinox.config.generation_settings import GREEDY_BELOW
from dantinox.sampling.selection import first_argmax, nth_true, ordered_keys, row_sum, threshold_key

Number = Array | float
# A choice that is given as a string is compiled into the program. If it is given as a boolean
# array, True means the second option.
Ties = Literal["first", "all"] | Array
Rule = Literal["inclusive", "exclusive"] | Array
EntropyRule = Literal["renormalized", "cumulative"] | Array
LARGEST = float(jnp.finfo(jnp.float32).max)
# The constants of adaptive-p in llama.cpp.
ADAPTIVE_PEAK, ADAPTIVE_SHARPNESS, ADAPTIVE_WIDTH = 5.0, 10.0, 0.3
# The lower bound of x − max x; a sum of 2²⁴ squares of x − max x is then finite.
MIN_SHIFTED_LOGIT = -1e15


class Rest(NamedTuple):
    """Sums over the tokens of a row outside its window, with d = x − M and M the largest logit of
    the row.

    Attributes:
      mass, moment, mass_squares: Σ e^d, Σ d·e^d and Σ e^2d.
      tokens, total, squares: the number of tokens, Σ d and Σ d².
      least: the smallest d; 0 if there are no tokens.
    """

    mass: Number = 0.0
    moment: Number = 0.0
    mass_squares: Number = 0.0
    tokens: Number = 0.0
    total: Number = 0.0
    squares: Number = 0.0
    least: Number = 0.0


EMPTY_REST = Rest()


def sanitize(logits_V: Array) -> tuple[Array, Array]:
    """Returns float32 logits without NaN and +inf, and whether the row contained any.

    NaN becomes -inf. If a row contains +inf, these logits become 0 and all other tokens are
    removed.
    """
    x_V = logits_V.astype(jnp.float32)
    x_V = jnp.where(jnp.isnan(x_V), -jnp.inf, x_V)
    infinite_V = x_V == jnp.inf
    some = infinite_V.any()
    x_V = jnp.where(some, jnp.where(infinite_V, 0.0, -jnp.inf), x_V)
    return x_V, some | jnp.isnan(logits_V).any()


def keep_only(logits_V: Array, keep_V: Array) -> Array:
    """Removes all tokens outside the mask. If none would remain, the first token in canonical order
    stays.
    """
    keep_V = keep_V & (logits_V > -jnp.inf)
    first_V = jnp.arange(logits_V.shape[0]) == first_argmax(logits_V)
    return jnp.where(keep_V | (first_V & ~keep_V.any()), logits_V, -jnp.inf)


def clip_finite(changed_V: Array, logits_V: Array) -> Array:
    """Clips changed logits to finite floats, so that an extreme setting neither removes a token nor
    produces NaN.
    """
    return jnp.where(logits_V == -jnp.inf, -jnp.inf, jnp.clip(changed_V, -LARGEST, LARGEST))


def logit_bias(logits_V: Array, bias_V: Array) -> Array:
    """Returns x + bias; a bias of -inf bans the token, a bias of 0 does not change it."""
    banned_V = bias_V == -jnp.inf
    moved_V = jnp.where(
        (bias_V == 0) | banned_V, logits_V, clip_finite(logits_V + bias_V, logits_V)
    )
    return keep_only(moved_V, ~banned_V)


def allowed_tokens(logits_V: Array, ids_S: Array) -> Array:
    """Removes all tokens except `ids_S`. Ids outside the vocabulary are ignored."""
    V = logits_V.shape[0]
    allowed_V = jnp.zeros(V, bool).at[jnp.where(ids_S < 0, V, ids_S)].set(True, mode="drop")
    return keep_only(logits_V, allowed_V)


def temperature(logits_V: Array, t: Number) -> Array:
    """Returns x / t. Off: t = 1. Below 1e-5 only the most likely token remains."""
    t = jnp.asarray(t, jnp.float32)
    scaled_V = clip_finite(logits_V / jnp.maximum(t, GREEDY_BELOW), logits_V)
    changed_V = jnp.where(
        t < GREEDY_BELOW, keep_only(logits_V, jnp.zeros(logits_V.shape, bool)), scaled_V
    )
    return jnp.where(t == 1, logits_V, changed_V)


def dynamic_temperature(
    logits_V: Array, low: Number, high: Number, exponent: Number = 1.0
) -> Array:
    """Returns x / T with T = low + (high − low)·(H / ln n)^exponent, over n remaining tokens with
    entropy H (KoboldCpp).

    Off: low = high = 1.
    """
    n = jnp.sum(logits_V > -jnp.inf)
    share = jnp.clip(entropy(logits_V) / jnp.log(jnp.maximum(n, 2).astype(jnp.float32)), 0, 1)
    t = low + (jnp.asarray(high) - low) * share**exponent
    return jnp.where(n <= 1, logits_V, temperature(logits_V, t))


def smoothing(logits_V: Array, factor: Number, curve: Number = 1.0) -> Array:
    """Returns M − k·f·d² + s·f·d³ with d = x − M, k = (3 − c)/2, s = (c − 1)/2: quadratic and cubic
    smoothing.

    M is the largest logit, f the factor and c the curve. Off: factor = 0.
    """
    M = finite_max(logits_V)
    d_V = jnp.maximum(logits_V - M, -1e12)  # its cube stays finite
    factor = jnp.asarray(factor)
    curve = jnp.asarray(curve)
    smooth_V = M - (3 - curve) / 2 * factor * d_V**2 + (curve - 1) / 2 * factor * d_V**3
    return jnp.where(factor == 0, logits_V, clip_finite(smooth_V, logits_V))


def top_k(logits_V: Array, k: Number, ties: Ties = "first") -> Array:
    """Keeps the first k tokens in canonical order (Fan et al. 2018). Off: k ≤ 0.

    With `ties` set to `all`, tokens with the same logit as the last kept token are kept too.
    """
    k = jnp.asarray(k, jnp.int32)
    return jnp.where(
        (k <= 0) | (k >= logits_V.shape[0]),
        logits_V,
        keep_only(logits_V, _first_k(logits_V, k, ties)),
    )


def top_p(
    logits_V: Array,
    p: Number,
    rule: Rule = "inclusive",
    ties: Ties = "first",
    rest: Rest = EMPTY_REST,
) -> Array:
    """Keeps the smallest set of most likely tokens with mass p (Holtzman et al. 2020). Off: p ≥ 1.

    Args:
      p: the mass in [0, 1]; 0 keeps only the first token.
      rule: `inclusive` keeps a token if the mass strictly before it is below p, so the token that
        crosses p stays; `exclusive` keeps a token if the mass up to and including it is at most p.
        The first token always stays.
      ties: `all` also keeps every token with the same logit as the last kept token.
      rest: sums over the tokens outside the window.
    """
    p = jnp.asarray(p, jnp.float32)
    keep_V = nucleus(logits_V, jnp.exp(logits_V - finite_max(logits_V)), p, rule, ties, rest.mass)
    return jnp.where(p >= 1, logits_V, keep_only(logits_V, keep_V))


def nucleus(
    scores_V: Array,
    weights_V: Array,
    p: Array,
    rule: Rule = "inclusive",
    ties: Ties = "first",
    outside_weight: Number = 0.0,
) -> Array:
    """Returns the mask of the first tokens with mass p, at least one, in descending order of
    `scores_V`.

    Equal scores must have equal weights. Let `above` be the mass of the tokens with a higher score
    than the threshold. Among the tokens at the threshold, the j-th is kept if `above + j·weight`
    passes the comparison with p times the total.

    Args:
      scores_V: the order of the tokens.
      weights_V: their masses, not normalized.
      p, rule, ties: as in `top_p`.
      outside_weight: total weight of tokens that are not in the row.
    """
    keys_V = ordered_keys(scores_V)
    target = p * (jnp.sum(weights_V) + outside_weight)
    exclusive = rule == "exclusive" if isinstance(rule, str) else rule

    def below(mass: Array, target: Array) -> Array:
        return jnp.where(exclusive, mass <= target, mass < target)

    edge = threshold_key(keys_V, weights_V, lambda mass: ~below(mass, target))
    above = jnp.sum(jnp.where(keys_V > edge, weights_V, 0))
    weight = jnp.max(jnp.where(keys_V == edge, weights_V, 0))
    # The quotient may round across an integer, so the exact comparison is made for the neighboring
    # integers too.
    guess = jnp.floor((target - above) / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny))
    base = jnp.clip(guess, 1, 2.0**30).astype(jnp.int32) - 1
    counted = base + jnp.arange(4) + exclusive
    keep = base + jnp.sum(below(above + counted * weight, target))
    keep = jnp.maximum(keep, ~(keys_V > edge).any())  # p = 0, or the first token alone exceeds p
    edge = jnp.minimum(edge, jnp.max(keys_V))
    return _above_threshold(keys_V, edge, keep, ties)


def min_p(logits_V: Array, p: Number) -> Array:
    """Keeps x ≥ max x + ln p: tokens at least p times as likely as the most likely one (Nguyen et
    al. 2024). Off: p = 0.
    """
    p = jnp.asarray(p, jnp.float32)
    keep_V = logits_V >= finite_max(logits_V) + jnp.log(p)
    return jnp.where(p <= 0, logits_V, keep_only(logits_V, keep_V))


def top_a(logits_V: Array, a: Number, rest: Rest = EMPTY_REST) -> Array:
    """Keeps tokens with P ≥ a·max(P)² (KoboldAI). Off: a = 0."""
    P_V = _softmax(logits_V, rest)
    minimum = a * jnp.max(P_V) ** 2
    return jnp.where(jnp.asarray(a) <= 0, logits_V, keep_only(logits_V, minimum <= P_V))


def tail_free(logits_V: Array, z: Number, size: Number | None = None) -> Array:
    """Removes the tail where the curve of sorted probabilities becomes flat (Bricken 2019). Off: z
    = 1.

    With w = |second differences of sorted P| / their sum and v = [0, cumulative sum of w, 1], ranks
    with v ≤ z stay. A row in which all second differences are 0 does not change. This is the only
    step that sorts the row.

    Args:
      z: the threshold in [0, 1].
      size: vocabulary size, if the row is padded with removed tokens. None: the length of the row.
    """
    V = logits_V.shape[0]
    size = jnp.asarray(V if size is None else size)
    z = jnp.asarray(z, jnp.float32)
    # The two zeros represent removed tokens that are not in a window.
    P_V = jnp.pad(jnp.sort(_softmax(logits_V), descending=True), (0, 2))
    rank_V = jnp.arange(V + 2)
    bend_V = jnp.abs(jnp.pad(jnp.diff(P_V, 2), (1, 1)))
    bend_V = jnp.where(rank_V < size - 1, bend_V, 0)
    bend = jnp.sum(bend_V)
    v_V = jnp.cumsum(bend_V / jnp.where(bend > 0, bend, 1))
    v_V = jnp.where((rank_V == size - 1) & (rank_V > 0), 1, v_V)
    n = jnp.sum((v_V <= z) & (rank_V < size))
    is_flat = (bend == 0) & (size > 2)
    return jnp.where((z >= 1) | is_flat, logits_V, keep_only(logits_V, _first_k(logits_V, n)))


def typical(logits_V: Array, p: Number, ties: Ties = "first", rest: Rest = EMPTY_REST) -> Array:
    """Keeps the smallest set with mass p of tokens whose surprise is closest to the entropy. Off: p
    = 1.

    Source: Meister et al. 2023, equation 9.
    """
    p = jnp.asarray(p, jnp.float32)
    logP_V, lnZ = _log_softmax(logits_V, rest)
    keep_V = nucleus(
        -jnp.abs(logP_V + entropy(logits_V, rest)),
        jnp.exp(logP_V),
        p,
        ties=ties,
        outside_weight=rest.mass * jnp.exp(-lnZ),
    )
    return jnp.where(p >= 1, logits_V, keep_only(logits_V, keep_V))


def epsilon_cutoff(logits_V: Array, eps: Number, rest: Rest = EMPTY_REST) -> Array:
    """Keeps tokens with P ≥ ε (Hewitt et al. 2022, section 4). Off: ε = 0."""
    return jnp.where(
        jnp.asarray(eps) <= 0, logits_V, keep_only(logits_V, _softmax(logits_V, rest) >= eps)
    )


def eta_cutoff(logits_V: Array, eps: Number, rest: Rest = EMPTY_REST) -> Array:
    """Keeps tokens with P ≥ min(ε, √ε·exp(−H)), where H is the entropy (Hewitt et al. 2022,
    equation 4). Off: ε = 0.
    """
    minimum = jnp.minimum(eps, jnp.sqrt(eps) * jnp.exp(-entropy(logits_V, rest)))
    return jnp.where(
        jnp.asarray(eps) <= 0, logits_V, keep_only(logits_V, _softmax(logits_V, rest) >= minimum)
    )


def top_n_sigma(logits_V: Array, n: Number, rest: Rest = EMPTY_REST) -> Array:
    """Keeps logits x ≥ max x − n·σ, with σ the standard deviation of the remaining logits (Tang et
    al. 2024). Off: n ≤ 0.
    """
    alive_V = logits_V > -jnp.inf
    count = jnp.maximum(jnp.sum(alive_V) + rest.tokens, 1)
    down_V = jnp.where(alive_V, jnp.maximum(logits_V - finite_max(logits_V), MIN_SHIFTED_LOGIT), 0)
    mean = (jnp.sum(down_V) + rest.total) / count
    outside = rest.squares - 2 * mean * rest.total + rest.tokens * mean**2
    sigma = jnp.sqrt((jnp.sum(jnp.where(alive_V, (down_V - mean) ** 2, 0)) + outside) / count)
    return jnp.where(jnp.asarray(n) <= 0, logits_V, keep_only(logits_V, down_V >= -n * sigma))


def min_k(logits_V: Array, tau: Number, rest: Rest = EMPTY_REST) -> Array:
    """Keeps the first k tokens, up to the steepest fall of the sorted logits l₁ ≥ l₂ ≥ … (Ding et
    al. 2026). Off: τ < 0.

    k is the larger of argmaxᵢ (lᵢ − lᵢ₊₁)/i, the first of equal ones, and ⌊τ/(l₁ − lₙ)⌋, a minimum
    for flat rows. A window that may lack the steepest fall of the row keeps all its tokens.
    """
    N = logits_V.shape[0]
    tau = jnp.asarray(tau, jnp.float32)
    rank_V = jnp.arange(1.0, N)
    alive_V = logits_V > -jnp.inf
    down_V = jnp.maximum(logits_V - finite_max(logits_V), MIN_SHIFTED_LOGIT)
    d_V = jnp.sort(jnp.where(alive_V, down_V, -jnp.inf), descending=True)
    falls_V = jnp.where(d_V[1:] > -jnp.inf, (d_V[:-1] - d_V[1:]) / rank_V, -1.0)
    steepest = jnp.max(falls_V, initial=-1.0)  # -1: there is one token
    cliff = jnp.where(
        steepest < 0, 1, jnp.min(jnp.where(falls_V == steepest, rank_V, N), initial=N)
    )
    # A fall behind the window is at most that from its last token to the least likely token, at the
    # rank of the last token.
    last = jnp.min(jnp.where(alive_V, down_V, 0))
    least = jnp.minimum(last, rest.least)
    is_outside = (least < last) & ((last - least) / jnp.maximum(jnp.sum(alive_V), 1) >= steepest)
    # If all logits are equal, the quotient τ/0 is infinite, or 0 for τ = 0.
    flat = jnp.where(
        least < 0,
        jnp.floor(tau / -jnp.minimum(least, -jnp.finfo(jnp.float32).tiny)),
        jnp.where(tau > 0, N, 0),
    )
    k = jnp.clip(jnp.maximum(cliff, jnp.where(is_outside, N, flat)), 1, N).astype(jnp.int32)
    return jnp.where(tau < 0, logits_V, keep_only(logits_V, _first_k(logits_V, k)))


def p_less(logits_V: Array, rest: Rest = EMPTY_REST) -> Array:
    """Keeps tokens with P ≥ Σ P², the probability that two draws are equal (Tan et al. 2025)."""
    weights_V, mass, squares = _weights_and_squares(logits_V, rest)
    return keep_only(logits_V, weights_V * mass >= squares)


def p_less_norm(logits_V: Array, size: Number | None = None, rest: Rest = EMPTY_REST) -> Array:
    """Keeps tokens with P ≥ (V·Σ P² − 1)/(V − 1), where V is the size of the vocabulary (Tan et al.
    2025, p-less-norm).
    """
    V = jnp.asarray(logits_V.shape[0] if size is None else size, jnp.float32)
    weights_V, mass, squares = _weights_and_squares(logits_V, rest)
    bound = (V * squares - mass**2) / jnp.maximum(V - 1, 1)
    return keep_only(logits_V, weights_V * mass >= bound)


def _weights_and_squares(logits_V: Array, rest: Rest) -> tuple[Array, Array, Array]:
    """Returns w = e^(x − M), Σ w and Σ w². For equal logits, all products of these numbers are
    exact.
    """
    weights_V = jnp.exp(logits_V - finite_max(logits_V))
    return weights_V, row_sum(weights_V) + rest.mass, row_sum(weights_V**2) + rest.mass_squares


def top_h(
    logits_V: Array, alpha: Number, rule: EntropyRule = "renormalized", rest: Rest = EMPTY_REST
) -> Array:
    """Keeps the largest set of first tokens whose entropy is at most α times that of the row. Off:
    α ≥ 1.

    Source: Potraghloo et al. 2025, whose greedy algorithm adds tokens in order.

    Args:
      alpha: the fraction of the entropy in [0, 1]; 0 keeps only the first token.
      rule: `renormalized` takes the entropy of the distribution of the kept tokens, which grows
        with every token; `cumulative` takes their part of the entropy of the row, Σ −P ln P, as
        Transformers does.
      rest: sums over the tokens outside the window.
    """
    alpha = jnp.asarray(alpha, jnp.float32)
    cumulative = rule == "cumulative" if isinstance(rule, str) else rule
    d_V = jnp.maximum(logits_V - finite_max(logits_V), MIN_SHIFTED_LOGIT)
    weights_V = jnp.exp(d_V)
    mass = row_sum(weights_V) + rest.mass
    bound = alpha * entropy(logits_V, rest)
    bits = logits_V.shape[0].bit_length()

    def exceeds(kept_mass: Array, kept_moment: Array) -> Array:
        """Whether the entropy of kept tokens exceeds the bound, for Σ w and Σ −w·d of these
        tokens.
        """
        whole = (kept_moment + kept_mass * jnp.log(mass)) / mass
        share = jnp.maximum(kept_mass, jnp.finfo(jnp.float32).tiny)
        part = jnp.log(share) + kept_moment / share
        return (kept_mass > 0) & (jnp.where(cumulative, whole, part) > bound)

    keys_V = ordered_keys(logits_V)
    sums_2V = jnp.stack([weights_V, -weights_V * d_V])
    edge = threshold_key(keys_V, sums_2V, lambda sums: exceeds(sums[0], sums[1]))
    above_2 = jnp.sum(jnp.where(keys_V > edge, sums_2V, 0), axis=1)
    equal_2 = jnp.max(jnp.where(keys_V == edge, sums_2V, 0), axis=1)

    def try_bit(i: Array, count: Array) -> Array:
        more = count | (1 << (bits - 1 - i))
        return jnp.where(exceeds(*(above_2 + more * equal_2)), count, more)

    count = lax.fori_loop(0, bits, try_bit, jnp.int32(0))  # the tokens at the edge that are kept
    first = jnp.max(keys_V)
    keep_V = _above_threshold(
        keys_V, jnp.minimum(edge, first), jnp.maximum(count, edge >= first), "first"
    )
    return jnp.where(alpha >= 1, logits_V, keep_only(logits_V, keep_V))


def skew(logits_V: Array, skew: Number) -> Array:
    """Raises the cumulative probability of the sorted tokens to the power e^s: P'ᵢ = cᵢ^e − cᵢ₋₁^e
    (ExLlamaV2). Off: s = 0.

    Above 0, unlikely tokens become more likely. The results are ln P'. The step sorts the row.
    """
    V = logits_V.shape[0]
    power = jnp.exp(jnp.asarray(skew, jnp.float32))
    negative_V, order_V = lax.sort((-logits_V, jnp.arange(V)), num_keys=1, is_stable=True)
    logP_V = _log_softmax(-negative_V)[0]
    P_V = jnp.exp(logP_V)
    # The logarithm of the cumulative probability c, from the sum of the smaller part of the tokens.
    after_V = jnp.append(jnp.cumsum(P_V[::-1])[::-1][1:], 0.0)
    logc_V = jnp.where(
        after_V < 0.5, jnp.log1p(-jnp.minimum(after_V, 0.5)), jnp.log(jnp.cumsum(P_V))
    )
    # cᵢ^e − cᵢ₋₁^e = cᵢ^e·(1 − (1 − r)^e) with r = Pᵢ/cᵢ, which needs no difference of similar
    # numbers. r is 1 for the first token and at most 1/2 for the others.
    logr_V = jnp.minimum(logP_V - logc_V, -jnp.log(2.0))
    others_V = jnp.log(-jnp.expm1(power * jnp.log1p(-jnp.exp(logr_V))))
    factor_V = jnp.where(logr_V < -60, jnp.log(power) + logr_V, others_V).at[0].set(0)
    skewed_V = jnp.zeros(V).at[order_V].set(power * logc_V + factor_V, unique_indices=True)
    return jnp.where(jnp.asarray(skew) == 0, logits_V, clip_finite(skewed_V, logits_V))


def adaptive_p(logits_V: Array, target: Number, average: Number) -> Array:
    """Replaces logits by 5 − 10·d²/(1 + d), where d = |P − a|/0.3 is the distance from a = 2·target
    − average (llama.cpp).

    Source: adaptive-p, MrJackSpade and ddh0 2026 (llama.cpp #17927). Off: target < 0.

    Args:
      target: the average probability of a drawn token to aim at, in [0, 1].
      average: the weighted average of the probabilities P of the drawn tokens; a is limited to [0,
        1].
    """
    adapted = jnp.clip(2 * jnp.asarray(target) - average, 0, 1)
    d_V = jnp.abs(_softmax(logits_V) - adapted) / ADAPTIVE_WIDTH
    changed_V = ADAPTIVE_PEAK - ADAPTIVE_SHARPNESS * d_V**2 / (1 + d_V)
    return jnp.where(
        jnp.asarray(target) < 0, logits_V, jnp.where(logits_V == -jnp.inf, -jnp.inf, changed_V)
    )


def xtc(
    logits_V: Array,
    threshold: Number,
    probability: Number,
    u: Number,
    protected_V: Array | None = None,
) -> Array:
    """Excludes top choices: if u < probability, removes all tokens with P ≥ threshold except the
    least likely of them.

    Off: probability = 0, or a threshold above 0.5, because two tokens cannot both have a
    probability above 0.5.

    Args:
      threshold: minimum probability of a top choice.
      probability: probability that the step acts.
      u: a uniform number in [0, 1) that decides whether the step acts.
      protected_V: mask of tokens, such as end of text and newline; if one of them would be removed,
        the step does nothing.
    """
    ids_V = jnp.arange(logits_V.shape[0])
    top_V = (_softmax(logits_V) >= threshold) & (logits_V > -jnp.inf)
    lowest = jnp.min(jnp.where(top_V, logits_V, jnp.inf))
    last = jnp.max(jnp.where(top_V & (logits_V == lowest), ids_V, -1))
    drop_V = top_V & (ids_V != last)
    act = (jnp.asarray(u) < probability) & (jnp.asarray(threshold) <= 0.5)
    if protected_V is not None:
        act &= ~(drop_V & protected_V).any()
    return jnp.where(act, keep_only(logits_V, ~drop_V), logits_V)


def mirostat_v2(logits_V: Array, mu: Number, rest: Rest = EMPTY_REST) -> Array:
    """Keeps tokens with surprise −log2 P ≤ μ bits (Basu et al. 2021; llama.cpp's second
    version).
    """
    return keep_only(logits_V, _log_softmax(logits_V, rest)[0] >= -jnp.asarray(mu) * jnp.log(2.0))


def mirostat_v1(logits_V: Array, mu: Number, m: int = 100, size: Number | None = None) -> Array:
    """Keeps the first k tokens, with k from a Zipf law fitted to the first `m` ranks (Basu et al.
    2021, algorithm 1).

    Args:
      mu: the bound μ in bits.
      m: the number of ranks for the fit (static).
      size: as in `tail_free`.
    """
    V = logits_V.shape[0]
    log_size = jnp.log(jnp.asarray(V if size is None else size, jnp.float32))
    # Without the barrier, XLA turns this into a full sort.
    x_m = lax.optimization_barrier(lax.top_k(logits_V, min(m, V))[0])
    both_m = x_m[1:] > -jnp.inf
    rank_m = jnp.arange(x_m.shape[0] - 1, dtype=jnp.float32)
    t_m = jnp.where(both_m, jnp.log((rank_m + 2) / (rank_m + 1)), 0)
    b_m = jnp.where(both_m, x_m[:-1] - x_m[1:], 0)
    squares = jnp.sum(t_m**2)
    s = jnp.sum(t_m * b_m) / jnp.where(squares > 0, squares, 1)
    e = s - 1
    tiny = jnp.abs(e) < 1e-6
    ratio = jnp.where(tiny, 1 / log_size, e / -jnp.expm1(-jnp.where(tiny, 1.0, e) * log_size))
    k = jnp.exp((jnp.asarray(mu) * jnp.log(2.0) + jnp.log(ratio)) / jnp.where(s > 0, s, 1))
    n = jnp.clip(jnp.nan_to_num(jnp.floor(k), nan=V), 1, V).astype(jnp.int32)
    return jnp.where(s <= 0, logits_V, keep_only(logits_V, _first_k(logits_V, n)))


def mirostat_update(mu: Number, surprise: Number, tau: Number, eta: Number) -> Array:
    """Returns μ after a draw: μ − η(S − τ), with S the surprise of the drawn token before the
    truncation, in bits.
    """
    return jnp.asarray(mu) - eta * (jnp.asarray(surprise) - tau)


def finite_max(logits_V: Array) -> Array:
    """Returns the largest logit, or 0 for a row without tokens, where -inf − -inf would be NaN."""
    largest = jnp.max(logits_V)
    return jnp.where(largest == -jnp.inf, 0.0, largest)


def log_mass(logits_V: Array, rest: Rest = EMPTY_REST) -> Array:
    """Returns ln Σ e^x, including tokens outside the window; about −87 for a row without tokens."""
    return finite_max(logits_V) + _log_softmax(logits_V, rest)[1]


def _log_softmax(logits_V: Array, rest: Rest = EMPTY_REST) -> tuple[Array, Array]:
    """Returns ln P, which is -inf for removed tokens even if all are removed, and ln Σ e^(x −
    M).
    """
    shifted_V = logits_V - finite_max(logits_V)
    lnZ = jnp.log(jnp.maximum(row_sum(jnp.exp(shifted_V)) + rest.mass, jnp.finfo(jnp.float32).tiny))
    return shifted_V - lnZ, lnZ


def _softmax(logits_V: Array, rest: Rest = EMPTY_REST) -> Array:
    """Returns P; all 0 for a row without tokens."""
    weights_V = jnp.exp(logits_V - finite_max(logits_V))
    return weights_V / jnp.maximum(row_sum(weights_V) + rest.mass, jnp.finfo(jnp.float32).tiny)


def entropy(logits_V: Array, rest: Rest = EMPTY_REST) -> Array:
    """Returns −Σ P ln P in nats, with 0·ln 0 = 0."""
    logP_V, lnZ = _log_softmax(logits_V, rest)
    P_V = jnp.exp(logP_V)
    return -row_sum(jnp.where(P_V > 0, P_V * logP_V, 0)) - (
        rest.moment - rest.mass * lnZ
    ) * jnp.exp(-lnZ)


def _first_k(logits_V: Array, k: Array, ties: Ties = "first") -> Array:
    """Returns the mask of the first k tokens in canonical order.

    The counts are float32, which is exact up to 2²⁴ tokens, because XLA adds integers four times
    slower on a CPU.
    """
    keys_V = ordered_keys(logits_V)
    edge = threshold_key(keys_V, jnp.ones(keys_V.shape, jnp.float32), lambda count: count >= k)
    return _above_threshold(keys_V, edge, k - jnp.sum(keys_V > edge), ties)


def _above_threshold(keys_V: Array, edge: Array, count: Array, ties: Ties) -> Array:
    """Returns the mask of the keys above `edge` and of the first `count` keys, by id, that equal
    `edge`.

    With `ties` set to `all`, all keys that equal `edge` are kept if count > 0.
    """
    at_V = keys_V == edge
    all_ties = ties == "all" if isinstance(ties, str) else ties
    return (keys_V > edge) | (
        at_V & jnp.where(all_ties, count > 0, jnp.arange(keys_V.shape[0]) <= nth_true(at_V, count))
    )
