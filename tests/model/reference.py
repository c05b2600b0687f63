"""A decoder-only transformer in NumPy float64: one sequence, one head, one query at a time.

Written from the formulas of the papers and deliberately slow. `weights` is the state of the model
as nested dicts of arrays.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dantinox.config import ModelConfig, RopeScaling

Array = np.ndarray
Weights = dict[Any, Any]


def float64(weights: Any) -> Any:
    """Converts every array of the nested dicts to float64."""
    if isinstance(weights, dict):
        return {name: float64(part) for name, part in weights.items()}
    return np.asarray(weights, np.float64)


def normalize(kind: str, x_D: Array, weights: Weights, epsilon: float) -> Array:
    """LayerNorm (Ba et al. 2016, eq. 3) or RMSNorm (Zhang & Sennrich 2019, eq. 4) of one vector."""
    size, scale, bias = (
        len(x_D),
        weights.get("scale", np.ones(1)).reshape(-1),
        weights.get("bias", 0),
    )
    if kind == "layernorm":
        mean = sum(x_D) / size
        variance = sum((x_D - mean) ** 2) / size
        return (x_D - mean) / math.sqrt(variance + epsilon) * scale + bias
    return (
        x_D / math.sqrt(sum(x_D**2) / size + epsilon) * (scale + (kind == "zero-centered rmsnorm"))
    )


def frequency(i: int, size: int, theta: float, scaling: RopeScaling | None) -> float:
    """Returns the frequency of the i-th pair of a head, scaled by the formulas of
    `modeling_rope_utils` of transformers.
    """
    plain = theta ** (-2 * i / size)
    if scaling is None or scaling.kind == "linear":
        return plain / (1 if scaling is None else scaling.factor)
    if scaling.kind == "proportional":
        return plain / scaling.factor if i + 1 <= scaling.share * size / 2 else 0.0
    old = scaling.original_context
    if scaling.kind == "longrope":
        return plain / scaling.factors[i]
    if scaling.kind == "llama3":
        wave = 2 * math.pi / plain
        if wave < old / scaling.high_freq_factor:
            return plain
        if wave > old / scaling.low_freq_factor:
            return plain / scaling.factor
        smooth = (old / wave - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return (1 - smooth) * plain / scaling.factor + smooth * plain
    low, high = (
        size * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = min(max((i - low) / (high - low if high != low else 0.001), 0), 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def mscale(scaling: RopeScaling, weight: float) -> float:
    """`yarn_get_mscale` of DeepSeek-V2."""
    return 0.1 * weight * math.log(scaling.factor) + 1


def rotary(x_H: Array, position: int, theta: float, scaling: RopeScaling | None = None) -> Array:
    """RoPE (Su et al. 2021, eq. 13): rotates each x_i + j·x_{i+H/2} by position · frequency."""
    half = len(x_H) // 2
    z = np.array([complex(x_H[i], x_H[i + half]) for i in range(half)])
    z = z * np.array(
        [np.exp(1j * position * frequency(i, len(x_H), theta, scaling)) for i in range(half)]
    )
    if scaling is not None and scaling.kind == "yarn":
        gain = mscale(scaling, 1)
        if scaling.mscale and scaling.mscale_all_dim:
            gain = mscale(scaling, scaling.mscale) / mscale(scaling, scaling.mscale_all_dim)
        z = z * (gain if scaling.attention_factor is None else scaling.attention_factor)
    if scaling is not None and scaling.kind == "longrope":
        longer = math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context))
        z = z * (longer if scaling.attention_factor is None else scaling.attention_factor)
    return np.concatenate([z.real, z.imag])


def sinusoid(position: int, dim: int) -> Array:
    """PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(…) (Vaswani et al. 2017, section
    3.5).
    """
    out = np.zeros(dim)
    for i in range(dim // 2):
        out[2 * i] = math.sin(position / 10000 ** (2 * i / dim))
        out[2 * i + 1] = math.cos(position / 10000 ** (2 * i / dim))
    return out


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    """The tanh form (Hendrycks & Gimpel 2016, section 2)."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def eight_bits(config: ModelConfig, x: Array) -> Array:
    """Returns the inputs of a token as a projection reads them: with ternary weights, multiples of
    max |x| / 127.

    Float32 rounds like this only if no input is near the middle between two multiples, so the tests
    choose such weights.
    """
    if config.projections == "float":
        return x
    step = max(np.abs(x).max(), 1e-5) / 127
    assert np.abs(x / step - np.floor(x / step) - 0.5).min() > 1e-4, (
        "an input is near the middle: choose another seed"
    )
    return np.clip(np.rint(x / step), -128, 127) * step


def ternary(config: ModelConfig, kernel: Array) -> Array:
    """Returns the weights of a projection: with ternary weights, −1, 0 or 1 times their mean
    absolute value.
    """
    if config.projections == "float":
        return kernel
    scale = max(np.abs(kernel).mean(), 1e-5)
    assert np.abs(np.abs(kernel / scale) - 0.5).min() > 1e-5, (
        "a weight is near the middle: choose another seed"
    )
    return np.clip(np.rint(kernel / scale), -1, 1) * scale


def feed_forward(config: ModelConfig, x_D: Array, weights: Weights) -> Array:
    """Gated (Shazeer 2020; with a clamp, gpt-oss) or plain feed-forward, with biases if there are
    any.
    """
    kind, x_D = config.activation, eight_bits(config, x_D)
    if "up" in weights:
        up_F = x_D @ ternary(config, weights["up"]["kernel"]) + weights["up"].get("bias", 0)
        out_F = gelu(up_F) if kind == "gelu" else np.maximum(up_F, 0) ** 2
    else:
        bias_2F = weights["gate_up"].get("bias", (0, 0))
        gate_F = x_D @ ternary(config, weights["gate_up"]["kernel"][:, 0, :]) + bias_2F[0]
        up_F = x_D @ ternary(config, weights["gate_up"]["kernel"][:, 1, :]) + bias_2F[1]
        if kind == "clamped_swiglu":
            gate_F, up_F = (
                np.minimum(gate_F, config.swiglu_limit),
                np.clip(up_F, -config.swiglu_limit, config.swiglu_limit),
            )
            gate_F, up_F = gate_F * sigmoid(config.swiglu_alpha * gate_F), up_F + 1
        elif kind == "swiglu":
            gate_F = gate_F * sigmoid(gate_F)
        else:
            gate_F = gelu(gate_F) if kind == "geglu" else np.maximum(gate_F, 0) ** 2
        out_F = gate_F * up_F
    if config.sub_norms:
        out_F = normalize(rms_kind(config), out_F, weights["down_norm"], config.norm_epsilon)
    return eight_bits(config, out_F) @ ternary(config, weights["down"]["kernel"]) + weights[
        "down"
    ].get("bias", 0)


def mixture(config: ModelConfig, x_D: Array, weights: Weights) -> Array:
    """Computes the experts of one token one by one (Shazeer et al. 2017, eq. 1), and the shared
    ones.

    With `branch_norms` x is the common input of the norms and of the router (Gemma 4 in
    transformers).
    """
    rule, experts = config.experts, weights["experts"]

    def norm(x_D: Array, name: str) -> Array:
        return (
            normalize(rms_kind(config), x_D, weights[name], config.norm_epsilon)
            if rule.branch_norms
            else x_D
        )

    read_D = x_D
    if rule.branch_norms:
        read_D = (
            normalize("rmsnorm", x_D, {}, config.norm_epsilon)
            * weights["router"]["scale"]
            / math.sqrt(config.dim)
        )
    logits_E = read_D @ weights["router"]["kernel"] + weights["router"].get("logit_bias", 0)
    scores_E = (
        np.exp(logits_E) / np.exp(logits_E).sum() if rule.score == "softmax" else sigmoid(logits_E)
    )
    chosen_by_E = scores_E + (weights["router"]["bias"] if rule.bias else 0)
    members = [
        range(g, g + rule.count // rule.groups)
        for g in range(0, rule.count, rule.count // rule.groups)
    ]
    best = 1 if rule.group_score == "max" else 2
    members.sort(
        key=lambda group: -sum(sorted((chosen_by_E[e] for e in group), reverse=True)[:best])
    )
    allowed = [e for group in members[: rule.top_groups] for e in group]
    chosen = sorted(allowed, key=lambda e: -chosen_by_E[e])[: rule.top_k]
    whole = (sum(scores_E[e] for e in chosen) if rule.normalize else 1) / rule.scaling
    shared_D, out_D = np.zeros_like(x_D), np.zeros_like(x_D)
    if rule.shared_dim:
        shared_D = norm(
            feed_forward(config, norm(x_D, "shared_norm"), weights["shared"]), "shared_post_norm"
        )
    if rule.shared_gate:
        shared_D = shared_D * sigmoid(x_D @ weights["shared_gate"]["kernel"])
    for e in chosen:
        expert = {
            name: {leaf: array[e] for leaf, array in part.items()} for name, part in experts.items()
        }
        weight = (
            scores_E[e] / whole * (weights["router"]["expert_scale"][e] if rule.branch_norms else 1)
        )
        out_D = out_D + weight * feed_forward(config, norm(x_D, "experts_norm"), expert)
    return shared_D + (norm(out_D, "experts_post_norm") if rule.branch_norms else out_D)


def attends_to(query: int, key: int, positions: Array, segments: Array, window: int | None) -> bool:
    """Returns whether token `query` attends to token `key`."""
    if segments[query] != segments[key] or positions[key] > positions[query]:
        return False
    return window is None or positions[query] - positions[key] <= window - 1


def projected(
    config: ModelConfig, layer: int, x_TD: Array, weights: Weights, positions: Array, keys: dict
) -> tuple[Array, Array, Array]:
    """Returns queries `[T, K, G, H]`, and keys and values `[T, K, H]` of a layer, such that scores
    are q · k.

    `keys`: the newest keys and values of layers with a window (True) and without, for layers that
    have none.
    """
    _, groups, H, _ = weights["out"]["kernel"].shape
    matrices = [
        ternary(config, part)
        for part in np.split(weights["qkv"]["kernel"], [groups, groups + 1], axis=2)
        if part.size
    ]
    read_TD = np.array([eight_bits(config, x_D) for x_D in x_TD])
    made_TKPH = np.einsum("TD,DKPH->TKPH", read_TD, np.concatenate(matrices, axis=2)) + weights[
        "qkv"
    ].get("bias", 0)
    q_TKGH = norm_and_rotate(
        config, layer, made_TKPH[:, :, :groups], weights.get("q_norm", {}), positions
    )
    sliding = config.windows[layer] is not None
    if layer < config.num_blocks - config.kv_shared_layers:
        v_TKH = made_TKPH[:, :, groups + (not config.k_eq_v or sliding)]
        if config.v_norm:
            v_TKH = v_TKH / np.sqrt((v_TKH**2).mean(-1, keepdims=True) + config.norm_epsilon)
        keys[sliding] = (
            norm_and_rotate(
                config, layer, made_TKPH[:, :, groups], weights.get("k_norm", {}), positions
            ),
            v_TKH,
        )
    q_TKGH = q_TKGH / math.sqrt(config.query_pre_attn_scalar or H)
    if config.query_scaling_beta is not None:
        longer = [
            math.floor(position / config.rope_scaling.original_context) for position in positions
        ]
        gain_T = np.array([1 + config.query_scaling_beta * math.log(1 + n) for n in longer])
        q_TKGH = q_TKGH * gain_T[:, None, None, None]
    return q_TKGH, *keys[sliding]


def attention(
    config: ModelConfig,
    layer: int,
    x_TD: Array,
    weights: Weights,
    positions: Array,
    segments: Array,
    keys: dict,
) -> tuple[Array, Array, Array]:
    """Returns the attention of one layer, the scores `[N, S]` of the last query before the softmax,
    and its mask `[S]`.
    """
    T, (K, groups, H, _) = len(x_TD), weights["out"]["kernel"].shape
    heads_TKGH, last_NS = np.zeros((T, K, groups, H)), np.zeros((config.n_heads, T))
    sees_TS = np.array(
        [
            [attends_to(t, s, positions, segments, config.windows[layer]) for s in range(T)]
            for t in range(T)
        ]
    )
    q_TKGH, k_TKH, v_TKH = projected(config, layer, x_TD, weights, positions, keys)
    for head in range(config.n_heads):
        pair, group = head // groups, head % groups
        q_TH, k_TH, v_TH = q_TKGH[:, pair, group], k_TKH[:, pair], v_TKH[:, pair]
        for t in range(T):
            scores_S = k_TH @ q_TH[t]
            if config.softcap is not None:
                scores_S = config.softcap * np.tanh(scores_S / config.softcap)
            weight_S = np.where(sees_TS[t], np.exp(scores_S), 0)
            sink = np.exp(weights["sinks"][pair, group]) if config.sink_logits else 0
            head_H = weight_S @ v_TH / (weight_S.sum() + sink)
            if config.no_sink:
                bias_KGH = weights["gate"].get(
                    "bias", np.zeros_like(weights["out"]["kernel"][..., 0])
                )
                gate_DH = ternary(config, weights["gate"]["kernel"])[:, pair, group]
                head_H = head_H * sigmoid(
                    eight_bits(config, x_TD[t]) @ gate_DH + bias_KGH[pair, group]
                )
            heads_TKGH[t, pair, group] = head_H
        last_NS[head] = scores_S
    heads_TI = heads_TKGH.reshape(T, -1)
    if config.sub_norms:
        heads_TI = [
            normalize(rms_kind(config), row, weights["out_norm"], config.norm_epsilon)
            for row in heads_TI
        ]
    heads_TI = np.array([eight_bits(config, row) for row in heads_TI])
    out_ID = ternary(config, weights["out"]["kernel"]).reshape(heads_TI.shape[1], -1)
    return heads_TI @ out_ID + weights["out"].get("bias", 0), last_NS, sees_TS[-1]


def norm_and_rotate(
    config: ModelConfig, layer: int, x: Array, norm: Weights, positions: Array
) -> Array:
    """Normalizes and rotates queries or keys `[T, …, H]`."""
    if config.qk_norm and not config.qk_norm_after_rope:
        x = normalize_heads(config, x, norm)
    if config.position == "rope" and layer not in config.unrotated:
        heads = x.reshape(len(x), -1, x.shape[-1])
        rows = zip(heads, positions, strict=True)
        x = np.array([[rotate_head(config, layer, h, p) for h in row] for row, p in rows]).reshape(
            x.shape
        )
    return normalize_heads(config, x, norm) if config.qk_norm and config.qk_norm_after_rope else x


def rms_kind(config: ModelConfig) -> str:
    return "zero-centered rmsnorm" if config.norm_zero_centered else "rmsnorm"


def normalize_heads(config: ModelConfig, x: Array, weights: Weights) -> Array:
    """Normalizes queries or keys `[T, …, H]`, per head or over all heads of a token."""
    rows = x.reshape(len(x), -1) if config.qk_norm_scope == "layer" else x.reshape(-1, x.shape[-1])
    return np.array(
        [normalize(rms_kind(config), row, weights, config.norm_epsilon) for row in rows]
    ).reshape(x.shape)


def rotate_head(config: ModelConfig, layer: int, x_H: Array, position: int) -> Array:
    """Rotates the first part of a head as its layer does."""
    R = int(len(x_H) * config.partial_rotary_factor)
    local = config.rope_local_theta is not None and config.windows[layer] is not None
    how = (config.rope_local_theta, None) if local else (config.rope_theta, config.rope_scaling)
    return np.concatenate([rotary(x_H[:R], position, *how), x_H[R:]])


def latent_attention(
    config: ModelConfig,
    layer: int,
    x_TD: Array,
    weights: Weights,
    positions: Array,
    segments: Array,
    keys: dict,
) -> tuple[Array, Array, Array]:
    """Computes the same for a layer over latents, with expanded keys and values (DeepSeek-AI 2024,
    eq. 9 to 19).
    """
    T, R, H, N = len(x_TD), config.latent.rank, config.head_size, config.n_heads
    out_TD, last_NS = np.zeros_like(x_TD), np.zeros((N, T))
    sees_TS = np.array(
        [
            [attends_to(t, s, positions, segments, config.windows[layer]) for s in range(T)]
            for t in range(T)
        ]
    )

    def rotate_all(x_TP: Array) -> Array:
        rows = zip(x_TP, positions, strict=True)
        return np.array([rotary(x, p, config.rope_theta, config.rope_scaling) for x, p in rows])

    def norm(x_TD: Array, name: str) -> Array:
        return np.array(
            [
                normalize(rms_kind(config), x, weights[name], config.latent.norm_epsilon)
                for x in x_TD
            ]
        )

    kv_TC = x_TD @ weights["kv_a"]["kernel"]
    latent_TR, shared_TP = norm(kv_TC[:, :R], "kv_norm"), rotate_all(kv_TC[:, R:])
    from_TD = (
        x_TD
        if config.latent.query_rank is None
        else norm(x_TD @ weights["q_a"]["kernel"], "q_norm")
    )
    for head in range(N):
        q_TQ, kv_TC = (
            from_TD @ weights["q"]["kernel"][:, head],
            latent_TR @ weights["kv_b"]["kernel"][:, head],
        )
        q_TQ = np.concatenate([q_TQ[:, :H], rotate_all(q_TQ[:, H:])], axis=1)
        k_TQ, v_TV = np.concatenate([kv_TC[:, :H], shared_TP], axis=1), kv_TC[:, H:]
        for t in range(T):
            scaling = config.rope_scaling
            sharper = (
                mscale(scaling, scaling.mscale_all_dim) ** 2
                if scaling and scaling.mscale_all_dim
                else 1
            )
            scores_S = k_TQ @ q_TQ[t] / math.sqrt(q_TQ.shape[1]) * sharper
            if config.softcap is not None:
                scores_S = config.softcap * np.tanh(scores_S / config.softcap)
            weight_S = np.where(sees_TS[t], np.exp(scores_S), 0)
            head_V = (
                weight_S
                @ v_TV
                / (weight_S.sum() + (np.exp(weights["sinks"][head]) if config.sink_logits else 0))
            )
            if config.no_sink:
                head_V = head_V * sigmoid(x_TD[t] @ weights["gate"]["kernel"][:, head])
            out_TD[t] += head_V @ weights["out"]["kernel"][head]
        last_NS[head] = scores_S
    return out_TD, last_NS, sees_TS[-1]


def per_layer_inputs(config: ModelConfig, weights: Weights, tokens: Array, x_TD: Array) -> Array:
    """Returns the inputs `[T, L, P]` of all layers (`project_per_layer_inputs` of Gemma 4 in
    transformers).
    """
    P = config.per_layer_dim
    made_TLP = np.einsum("TD,DLP->TLP", x_TD, weights["projection"]["kernel"]) / math.sqrt(
        config.dim
    )
    rows = [
        normalize(rms_kind(config), row, weights["norm"], config.norm_epsilon)
        for row in made_TLP.reshape(-1, P)
    ]
    return (np.reshape(rows, made_TLP.shape) + weights["embed"][tokens] * math.sqrt(P)) / math.sqrt(
        2
    )


def forward(
    config: ModelConfig,
    weights: Weights,
    tokens: Array,
    positions: Array | None = None,
    segments: Array | None = None,
    attend: Callable[..., tuple[Array, Any, Any]] | None = None,
) -> tuple[Array, list[tuple[Array, Array]]]:
    """Returns logits `[T, V]` of one sequence, and per layer the scores `[N, T]` and the mask `[T]`
    of the last query.

    `positions` default to 0, 1, 2 …; with `segments`, attention stays inside runs of equal numbers.
    `attend` replaces `attention` and has the same arguments.
    """
    T = len(tokens)
    positions = np.arange(T) if positions is None else positions
    segments = np.zeros(T, int) if segments is None else segments

    kind = rms_kind(config) if config.norm == "rmsnorm" else config.norm

    def norm(x_TD: Array, part: Weights) -> Array:
        return np.array([normalize(kind, x_D, part, config.norm_epsilon) for x_D in x_TD])

    before, after = config.norm_placement != "after", config.norm_placement != "before"
    x_TD = (
        weights["embed"][tokens]
        * (math.sqrt(config.dim) if config.scale_embeddings else 1)
        * config.embedding_multiplier
    )
    if config.position == "learned":
        x_TD = x_TD + weights["position_embed"][positions]
    if config.position == "sinusoidal":
        x_TD = x_TD + np.array([sinusoid(p, config.dim) for p in positions])
    if config.norm_embeddings:
        x_TD = norm(x_TD, weights.get("norm_embed", {}))
    probed, keys = [], {}
    attend = attend or (attention if config.latent is None else latent_attention)
    inputs_TLP = (
        per_layer_inputs(config, weights["per_layer"], tokens, x_TD)
        if config.per_layer_dim
        else None
    )
    for layer in range(config.num_blocks):
        block = weights["blocks"][layer]
        read_TD = norm(x_TD, block.get("norm1", {})) if before else x_TD
        a_TD, *seen = attend(config, layer, read_TD, block["attention"], positions, segments, keys)
        probed.append(tuple(seen))
        x_TD = x_TD + config.residual_multiplier * (
            norm(a_TD, block.get("post_norm1", {})) if after else a_TD
        )
        normed_TD = norm(x_TD, block.get("norm2", {})) if before else x_TD
        normed_TD = read_TD if config.parallel_blocks else normed_TD
        if config.experts is None or layer in config.experts.dense_layers:
            f_TD = np.array([feed_forward(config, x_D, block["ffn"]) for x_D in normed_TD])
        else:
            read_TD = x_TD if config.experts.branch_norms else normed_TD
            f_TD = np.array([mixture(config, x_D, block["ffn"]) for x_D in read_TD])
        x_TD = x_TD + config.residual_multiplier * (
            norm(f_TD, block.get("post_norm2", {})) if after else f_TD
        )
        if config.per_layer_dim:
            read, gate_TP = block["layer_input"], x_TD @ block["layer_input"]["gate"]["kernel"]
            gate_TP = gelu(gate_TP) if config.activation == "geglu" else gate_TP * sigmoid(gate_TP)
            x_TD = x_TD + norm(
                (gate_TP * inputs_TLP[:, layer]) @ read["out"]["kernel"], read["norm"]
            )
        if config.layer_scalar:
            x_TD = x_TD * block["layer_scalar"]
    x_TD = norm(x_TD, weights.get("norm_f", {}))
    head_DV = weights["embed"].T if config.weight_tying else weights["head"]["kernel"]
    logits_TV, cap = (
        x_TD @ head_DV + (weights["head_bias"] if config.head_bias else 0),
        config.final_softcap,
    )
    logits_TV = logits_TV / config.logits_scaling
    return logits_TV if cap is None else cap * np.tanh(logits_TV / cap), probed
