"""Mixture of experts: routing, dispatch, combine, and the balancing losses.

Each token is copied once for each of its experts, and the copies are sorted by expert. Each expert
then multiplies its own contiguous rows. The cost depends on K, not on the number of experts.

Shapes: N tokens, K experts per token, M = N · K rows, E experts, D model, F the width of an expert.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from dantinox.config import ModelConfig
from dantinox.model.layers import (
    PLAIN_ACTIVATIONS,
    Linear,
    RMSNorm,
    gated_activation,
    make_feed_forward,
    make_norm,
    multiply_quantized,
)
from dantinox.model.parallelism import GATHERED, Parallelism
from dantinox.model.ternary import quantize_weights, weight_scales
from dantinox.platform import get_platform

# The rows per tile of a matrix multiplication on a CPU, or all rows if there are fewer.
TILE_TOKENS = 64
# With at most this many rows, and at most as many rows as experts, each row is multiplied
# separately (as in decoding).
MAX_MATVEC_ROWS = 16
# The smallest divisor of scores. The gradient divides by its square, which must not be 0 in
# float32.
MIN_SUM = 1e-18


class Routing(NamedTuple):
    """Statistics of how a batch is distributed over the experts of a layer, or of all layers.

    For all layers, each array has a leading layer axis.

    Attributes:
      balance: the balancing loss, E · Σ over experts of (share of the rows) · (mean score); 1 for a
        uniform distribution (Fedus et al. 2022, eq. 4).
      z: the z-loss, the mean squared log-normalizer of the logits (Zoph et al. 2022, eq. 5).
      counts_E: the number of rows of each expert, int32.

    For a dense layer in a model with experts, all values are zero.
    """

    balance: Array
    z: Array
    counts_E: Array


def zero_routing(E: int) -> Routing:
    """Returns the routing of a dense layer in a model with E experts."""
    return Routing(jnp.zeros(()), jnp.zeros(()), jnp.zeros(E, jnp.int32))


class ExpertRows(NamedTuple):
    """Rows sorted by expert: the expert of each row, and the number of rows of each expert."""

    expert_M: Array
    sizes_E: Array


class Router(nnx.Module):
    """Chooses the experts of each token and their weights, in float32.

    `bias` is added to the scores for the choice of experts, but not for their weights. It has no
    gradient: training raises the bias of experts with fewer rows than the mean (Wang et al. 2024,
    algorithm 1).

    With several groups of experts, a token uses only experts of its best groups (DeepSeek-AI 2024,
    "DeepSeek-V2", section 2.2.2).

    With `branch_norms` the input of the router is norm(x) · scale / √D, where the norm has no scale
    of its own, and the weight of each expert is multiplied by its `expert_scale [E]` (Gemma 4).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        assert config.experts is not None
        self.rule = config.experts
        D, E = config.dim, config.experts.count
        self.kernel = nnx.Param(D**-0.5 * jax.random.normal(rngs.params(), (D, E), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(E, jnp.float32)) if self.rule.bias else None
        self.logit_bias = nnx.Param(jnp.zeros(E, jnp.float32)) if self.rule.logit_bias else None
        self.scale = nnx.Param(jnp.ones(D, jnp.float32)) if self.rule.branch_norms else None
        self.expert_scale = nnx.Param(jnp.ones(E, jnp.float32)) if self.rule.branch_norms else None
        self.norm = RMSNorm(D, config.norm_epsilon, scaled=False)

    def __call__(
        self, x_ND: Array, parallelism: Parallelism, is_token_N: Array | None = None
    ) -> tuple[Array, Array, Routing]:
        """Returns experts `[N, K]`, their weights `[N, K]`, and the routing over all devices that
        share the batch.

        The routing counts only the tokens for which `is_token_N` is true; None: all.
        """
        x_ND = x_ND.astype(jnp.float32)
        if self.scale is not None:
            x_ND = self.norm(x_ND) * self.scale[...] * x_ND.shape[-1] ** -0.5
        logits_NE = jnp.matmul(x_ND, self.kernel[...], precision="highest")
        if self.logit_bias is not None:
            logits_NE = logits_NE + self.logit_bias[...]
        scores_NE = (
            jax.nn.softmax(logits_NE) if self.rule.score == "softmax" else jax.nn.sigmoid(logits_NE)
        )
        selection_NE = scores_NE if self.bias is None else scores_NE + self.bias[...]
        _, experts_NK = lax.top_k(
            self._mask_other_groups(lax.stop_gradient(selection_NE)), self.rule.top_k
        )
        weights_NK = jnp.take_along_axis(scores_NE, experts_NK, axis=1)
        if self.rule.normalize:
            weights_NK = _divide_by_sum(weights_NK)
        if self.rule.scaling != 1:
            weights_NK = self.rule.scaling * weights_NK
        if self.expert_scale is not None:
            weights_NK = weights_NK * self.expert_scale[...][experts_NK]
        is_token_N = jnp.ones(len(x_ND), bool) if is_token_N is None else is_token_N
        return (
            experts_NK,
            weights_NK,
            _routing(logits_NE, scores_NE, experts_NK, is_token_N, parallelism),
        )

    def _mask_other_groups(self, scores_NE: Array) -> Array:
        """Returns the scores, with −∞ for the experts of groups that the token does not use."""
        groups, E = self.rule.groups, self.rule.count
        if groups == 1:
            return scores_NE
        # The score of a group is the sum of its best scores.
        summed = 1 if self.rule.group_score == "max" else 2
        best_NGS, _ = lax.top_k(scores_NE.reshape(-1, groups, E // groups), summed)
        _, chosen_NC = lax.top_k(jnp.sum(best_NGS, axis=2), self.rule.top_groups)
        taken_NG = jnp.any(chosen_NC[:, :, None] == jnp.arange(groups), axis=1)
        return jnp.where(jnp.repeat(taken_NG, E // groups, axis=1), scores_NE, -jnp.inf)


def _routing(
    logits_NE: Array,
    scores_NE: Array,
    experts_NK: Array,
    is_token_N: Array,
    parallelism: Parallelism,
) -> Routing:
    """Returns the routing of the tokens where `is_token_N` is true, over all shards of the
    batch.
    """
    E = scores_NE.shape[1]
    counts_E = parallelism.psum_batch(count_rows(jnp.where(is_token_N[:, None], experts_NK, E), E))
    # On average per device.
    tokens = parallelism.pmean_batch(jnp.sum(is_token_N.astype(jnp.float32)))
    share_N = is_token_N / jnp.where(tokens > 0, tokens, 1)
    mean_share_E = parallelism.pmean_batch(
        jnp.sum(share_N[:, None] * _divide_by_sum(scores_NE), axis=0)
    )
    balance = E * jnp.sum(counts_E / jnp.maximum(jnp.sum(counts_E), 1) * mean_share_E)
    z = parallelism.pmean_batch(jnp.sum(share_N * jnp.square(jax.nn.logsumexp(logits_NE, axis=1))))
    return Routing(balance, z, counts_E)


def _divide_by_sum(scores_NE: Array) -> Array:
    """Returns the scores of each token divided by their sum; if all are 0, they stay 0."""
    return scores_NE / jnp.maximum(jnp.sum(scores_NE, axis=1, keepdims=True), MIN_SUM)


def count_rows(experts: Array, E: int) -> Array:
    """Counts how often each of E experts was chosen, `[E]` int32; indices of E and above are
    ignored.
    """
    return jnp.zeros(E, jnp.int32).at[experts.reshape(-1)].add(1, mode="drop")


class ExpertLinear(nnx.Module):
    """A projection per expert, `kernel [E, I, *shape_out]`, applied to rows sorted by expert.

    The `bias [E, *shape_out]` is not added here; the caller adds it.
    """

    def __init__(
        self, experts: int, size_in: int, shape_out: tuple[int, ...], *, dtype: DTypeLike,
        platform: str, rngs: nnx.Rngs, gain: float = 1.0, bias: bool = False,
    ):  # fmt: skip
        self.shape_out = shape_out
        self.dtype = dtype
        self.platform = platform
        noise = jax.random.normal(rngs.params(), (experts, size_in, *shape_out), jnp.float32)
        self.kernel = nnx.Param(gain * size_in**-0.5 * noise)
        self.bias = nnx.Param(jnp.zeros((experts, *shape_out), jnp.float32)) if bias else None

    def __call__(self, x_MI: Array, rows: ExpertRows) -> Array:
        E, I, *shape_out = self.kernel.shape  # noqa: E741 - E counts the experts on this device
        kernel_EIO = checkpoint_name(
            self.kernel[...].reshape(E, I, -1).astype(self.dtype), GATHERED
        )
        y_MO = grouped_matmul(x_MI.astype(self.dtype), kernel_EIO, rows, self.platform)
        return y_MO.astype(self.dtype).reshape(-1, *shape_out)


class TernaryExpertLinear(ExpertLinear):
    """An `ExpertLinear` with ternary weights and 8-bit inputs (`dantinox.model.ternary`).

    Every expert has its own scales, and gate and up have separate ones.
    """

    def integers(self) -> tuple[Array, Array]:
        """Returns the weights as −1, 0 or 1, and their scales `[E, …]`, broadcast over the
        outputs.
        """
        scales = weight_scales(self.kernel[...], (1, 1) if len(self.shape_out) > 1 else (), lead=1)
        return quantize_weights(self.kernel[...], scales), scales[:, 0]

    def __call__(self, x_MI: Array, rows: ExpertRows) -> Array:
        integers, scales_E = self.integers()
        integers_EIO = checkpoint_name(
            integers.reshape(*integers.shape[:2], -1).astype(self.dtype), GATHERED
        )

        def product(q_MI: Array) -> Array:
            y_MO = grouped_matmul(q_MI.astype(self.dtype), integers_EIO, rows, self.platform)
            return y_MO.reshape(-1, *integers.shape[2:])

        return multiply_quantized(product, x_MI, 1, scales_E[rows.expert_M]).astype(self.dtype)


class FixedTernaryExperts(nnx.Module):
    """A `TernaryExpertLinear` whose weights no longer change, as in
    `dantinox.model.layers.FixedTernaryLinear`.
    """

    def __init__(self, linear: TernaryExpertLinear):
        integers, scales_E = linear.integers()
        self.dtype = linear.dtype
        self.bias = linear.bias
        self.scales = nnx.Param(scales_E)
        self.integers: Any = experts_with_kernel(linear, integers)
        self.integers.dtype = jnp.dtype(jnp.float32)
        self.integers.bias = None

    def __call__(self, x_MI: Array, rows: ExpertRows) -> Array:
        product = partial(self.integers, rows=rows)
        return multiply_quantized(product, x_MI, 1, self.scales[...][rows.expert_M]).astype(
            self.dtype
        )


def experts_with_kernel(like: Any, kernel: jax.Array) -> ExpertLinear:
    """Returns an `ExpertLinear` with this kernel, and with the axes, dtype and bias of a projection
    in another form.
    """

    def abstract_linear() -> ExpertLinear:
        E, I = kernel.shape[:2]  # noqa: E741
        bias = like.bias is not None
        return ExpertLinear(
            E,
            I,
            like.shape_out,
            dtype=like.dtype,
            platform=like.platform,
            rngs=nnx.Rngs(0),
            bias=bias,
        )

    linear: ExpertLinear = nnx.eval_shape(abstract_linear)
    linear.kernel = nnx.Param(kernel)
    linear.bias = like.bias
    return linear


class Experts(nnx.Module):
    """The feed-forward layers of all experts: `gate_up [E, D, 2, F]` or `up [E, D, F]`, and
    `down [E, F, D]`.

    The output lacks the biases of `down`, which are added after the sum over devices that hold
    parts of F.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs, out_gain: float):
        assert config.experts is not None
        E, D, F = config.experts.count, config.dim, config.hidden_dim
        self.gated = config.activation not in PLAIN_ACTIVATIONS
        kind = TernaryExpertLinear if config.projections == "ternary" else ExpertLinear
        linear = partial(
            kind, E, dtype=dtype, platform=config.platform, rngs=rngs, bias=config.mlp_bias
        )
        self.function: Any = (
            gated_activation(config) if self.gated else PLAIN_ACTIVATIONS[config.activation]
        )
        if self.gated:
            self.gate_up = linear(D, (2, F))
        else:
            self.up = linear(D, (F,))
        self.down = linear(F, (D,), gain=out_gain)

    def __call__(self, x_MD: Array, rows: ExpertRows) -> Array:
        if not self.gated:
            return self.down(self.function(self._project(self.up, x_MD, rows)), rows)
        gate_up = self._project(self.gate_up, x_MD, rows)
        return self.down(self.function(gate_up[:, 0], gate_up[:, 1]), rows)

    def _project(self, linear: Any, x_MD: Array, rows: ExpertRows) -> Array:
        y: Array = linear(x_MD, rows)
        return y if linear.bias is None else y + linear.bias[...].astype(y.dtype)[rows.expert_M]


class MixtureOfExperts(nnx.Module):
    """A mixture-of-experts layer: the weighted sum of the outputs of the experts of each token,
    plus shared experts.

    See Shazeer et al. 2017, eq. 1. All tokens use the shared experts.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs, out_gain: float):
        assert config.experts is not None
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, dtype=dtype, rngs=rngs, out_gain=out_gain)
        width = config.experts.shared_dim
        shared = None
        if width:
            shared = make_feed_forward(
                replace(config, hidden_dim=width), dtype=dtype, rngs=rngs, out_gain=out_gain
            )
        self.shared = nnx.data(shared)
        gate = (
            Linear((config.dim,), (1,), dtype=dtype, rngs=rngs)
            if config.experts.shared_gate
            else None
        )
        self.shared_gate = nnx.data(gate)

    def __call__(
        self, x_BTD: Array, parallelism: Parallelism, is_token_BT: Array | None = None
    ) -> tuple[Array, Routing]:
        """Returns the output, and the routing of the tokens for which `is_token_BT` is true; None:
        of all.
        """
        y_BTD, routing = self.routed_experts(x_BTD, x_BTD, parallelism, is_token_BT)
        if self.shared is None:
            return y_BTD, routing
        shared_BTD = self.shared(x_BTD, parallelism)
        if self.shared_gate is not None:
            shared_BTD *= jax.nn.sigmoid(self.shared_gate(x_BTD))
        return y_BTD + shared_BTD, routing

    def routed_experts(
        self, x_BTD: Array, routed_BTD: Array, parallelism: Parallelism, is_token_BT: Array | None
    ) -> tuple[Array, Routing]:
        """Returns the weighted sum of the expert outputs for each token; the router reads
        `routed_BTD`.
        """
        x_ND, routed_ND = (a.reshape(-1, x_BTD.shape[-1]) for a in (x_BTD, routed_BTD))
        is_token_N = (
            None
            if is_token_BT is None
            else jnp.broadcast_to(is_token_BT, x_BTD.shape[:2]).reshape(-1)
        )
        *chosen, routing = self.router(routed_ND, parallelism, is_token_N)  # experts and weights
        x_ND, experts_NK, weights_NK = (
            parallelism.all_gather_tokens(parallelism.copy_to_tp(a)) for a in (x_ND, *chosen)
        )
        y_ND = self._apply_local_experts(x_ND, experts_NK, weights_NK, parallelism)
        y_ND = parallelism.reduce_from_tp(parallelism.reduce_scatter_tokens(y_ND))
        if self.experts.down.bias is not None:
            experts_NK, weights_NK = (parallelism.all_gather_tokens(a) for a in chosen)
            biases_ND = weighted_biases(
                self.experts.down.bias[...], experts_NK, weights_NK, parallelism
            )
            y_ND += parallelism.reduce_scatter_tokens(biases_ND)
        return y_ND.astype(x_BTD.dtype).reshape(x_BTD.shape), routing

    def _apply_local_experts(
        self, x_ND: Array, experts_NK: Array, weights_NK: Array, parallelism: Parallelism
    ) -> Array:
        """Returns the contribution of the experts on this device to each token: float32
        `[N, D]`.
        """
        E_local = self.router.rule.count // parallelism.groups
        expert_M = experts_NK.reshape(-1)
        # Rows of experts on other devices get the index `E_local`, which sorts them to the end.
        if parallelism.groups > 1:
            local_M = expert_M - parallelism.first_expert(E_local)
            expert_M = jnp.where((local_M >= 0) & (local_M < E_local), local_M, E_local)
        order_M = jnp.argsort(expert_M)
        inverse_M = (
            jnp.zeros_like(order_M).at[order_M].set(jnp.arange(len(order_M), dtype=order_M.dtype))
        )
        rows = ExpertRows(expert_M[order_M], count_rows(expert_M, E_local))
        y_MD = self.experts(dispatch(experts_NK.shape[1], x_ND, order_M, inverse_M), rows)
        if parallelism.groups > 1:
            y_MD = jnp.where((rows.expert_M < E_local)[:, None], y_MD, 0)
        y_NKD = combine(y_MD, order_M, inverse_M).reshape(*experts_NK.shape, -1)
        return jnp.einsum(
            "NKD,NK->ND", y_NKD, weights_NK.astype(y_NKD.dtype), preferred_element_type=jnp.float32
        )


class BranchedExperts(MixtureOfExperts):
    """norm(shared(norm(x))) + norm(experts(norm(x))) with four separate norms; the router reads x
    (Gemma 4).
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs, out_gain: float):
        super().__init__(config, dtype=dtype, rngs=rngs, out_gain=out_gain)
        self.shared_norm, self.shared_post_norm = make_norm(config), make_norm(config)
        self.experts_norm, self.experts_post_norm = make_norm(config), make_norm(config)

    def __call__(
        self, x_BTD: Array, parallelism: Parallelism, is_token_BT: Array | None = None
    ) -> tuple[Array, Routing]:
        assert self.shared is not None
        shared_BTD = self.shared_post_norm(self.shared(self.shared_norm(x_BTD), parallelism))
        y_BTD, routing = self.routed_experts(
            self.experts_norm(x_BTD), x_BTD, parallelism, is_token_BT
        )
        return shared_BTD + self.experts_post_norm(y_BTD), routing


def weighted_biases(
    bias_ED: Array, experts_NK: Array, weights_NK: Array, parallelism: Parallelism
) -> Array:
    """Returns, for each token, the weighted sum of the biases of its experts on this device:
    float32 `[N, D]`.
    """
    local_E = jnp.arange(len(bias_ED)) + parallelism.first_expert(len(bias_ED))
    weights_NE = jnp.sum(
        jnp.where(experts_NK[:, :, None] == local_E, weights_NK[:, :, None], 0), axis=1
    )
    return jnp.matmul(weights_NE, bias_ED, precision="highest")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(K: int, x_ND: Array, order_M: Array, inverse_M: Array) -> Array:
    """Copies each token once for each of its experts, sorted by expert: row m is token
    `order_M[m] // K`.

    Its custom gradient is also a gather; the default gradient of a gather is a scatter, which is a
    slow loop on a CPU.
    """
    return x_ND[order_M // K]


dispatch.defvjp(
    lambda K, x_ND, order_M, inverse_M: (x_ND[order_M // K], inverse_M),
    lambda K, inverse_M, d_MD: (
        jnp.sum(d_MD[inverse_M].reshape(-1, K, d_MD.shape[-1]), axis=1),
        None,
        None,
    ),
)


@jax.custom_vjp
def combine(y_MD: Array, order_M: Array, inverse_M: Array) -> Array:
    """Returns the rows to token order, with the inverse of the permutation of `dispatch`."""
    return y_MD[inverse_M]


combine.defvjp(
    lambda y_MD, order_M, inverse_M: (y_MD[inverse_M], order_M),
    lambda order_M, d_MD: (d_MD[order_M], None, None),
)


def grouped_matmul(x_MI: Array, w_EIO: Array, rows: ExpertRows, platform: str) -> Array:
    """Multiplies every row by the weights of its expert, with float32 sums: `[M, O]`."""
    # Rows for other devices use the last expert here; the caller drops them.
    if len(x_MI) <= min(MAX_MATVEC_ROWS, len(w_EIO)):
        chosen = [
            lax.dynamic_index_in_dim(w_EIO, expert, keepdims=False) for expert in rows.expert_M
        ]
        return jnp.stack(
            [
                jnp.matmul(x, w, preferred_element_type=jnp.float32)
                for x, w in zip(x_MI, chosen, strict=True)
            ]
        )
    # On a CPU `ragged_dot` multiplies all rows by all experts.
    if get_platform(platform).name == "cpu":
        return tiled_matmul(x_MI, w_EIO, rows.sizes_E)
    return lax.ragged_dot(x_MI, w_EIO, rows.sizes_E, preferred_element_type=jnp.float32)


@jax.custom_vjp
def tiled_matmul(x_MI: Array, w_EIO: Array, sizes_E: Array) -> Array:
    """Computes `ragged_dot` expert by expert, in tiles of rows.

    The last tile of an expert may extend into the rows of the next expert, which then overwrites
    these rows.
    """
    return _multiply_tiles(x_MI, w_EIO, sizes_E)


def _multiply_tiles(x_MI: Array, w_EIO: Array, sizes_E: Array) -> Array:
    M = len(x_MI)
    O = w_EIO.shape[2]  # noqa: E741
    R = _tile_rows(x_MI)
    padded = jnp.pad(x_MI, ((0, R), (0, 0)))

    def expert(y: Array, part: Any) -> tuple[Array, None]:
        w_IO, start, size = part
        return _multiply_rows(padded, y, w_IO, start, size, R), None

    return lax.scan(expert, jnp.zeros((M + R, O), jnp.float32), (w_EIO, _starts(sizes_E), sizes_E))[
        0
    ][:M]


def _multiply_rows(
    x_padded: Array, y: Array, w_IO: Array, start: Array, size: Array, R: int
) -> Array:
    """Multiplies `size` rows from `start` on by the weights of an expert, and writes the results
    into y.
    """

    def tile(i: Array, y: Array) -> Array:
        first = start + i * R
        rows = lax.dynamic_slice_in_dim(x_padded, first, R)
        return lax.dynamic_update_slice_in_dim(
            y, jnp.matmul(rows, w_IO, preferred_element_type=jnp.float32), first, 0
        )

    return lax.fori_loop(0, -(-size // R), tile, y)


def unpacking_matmul(
    x_MI: Array, packed: Array, outputs: int, sizes_E: Array, unpack: Callable[[Array], Array]
) -> Array:
    """Multiplies every row by the weights of its expert: `[M, outputs]`. Only one expert at a time
    is unpacked.

    Args:
      packed: the packed weights of all experts; the first axis is the expert.
      unpack: converts the packed weights of an expert to `[I, outputs]`.
    """
    M, R = len(x_MI), _tile_rows(x_MI)
    padded = jnp.pad(x_MI, ((0, R), (0, 0)))

    def expert(y: Array, part: Any) -> tuple[Array, None]:
        weights, start, size = part
        return (
            lax.cond(
                size > 0,
                lambda y: _multiply_rows(padded, y, unpack(weights), start, size, R),
                lambda y: y,
                y,
            ),
            None,
        )

    return lax.scan(
        expert, jnp.zeros((M + R, outputs), jnp.float32), (packed, _starts(sizes_E), sizes_E)
    )[0][:M]


def _tiled_matmul_backward(residuals: Any, d_MO: Array):
    x_MI, w_EIO, sizes_E = residuals
    R = _tile_rows(x_MI)
    d_MO = d_MO.astype(w_EIO.dtype)
    d_x = _multiply_tiles(d_MO, w_EIO.swapaxes(1, 2), sizes_E).astype(x_MI.dtype)
    x_padded, d_padded = (jnp.pad(a, ((0, R), (0, 0))) for a in (x_MI, d_MO))

    def expert(_: None, part: Any) -> tuple[None, Array]:
        start, size = part

        def tile(i: Array, d_w: Array) -> Array:
            x_RI, d_RO = (
                lax.dynamic_slice_in_dim(a, start + i * R, R) for a in (x_padded, d_padded)
            )
            valid_R1 = (jnp.arange(R) < size - i * R)[:, None]
            return d_w + jnp.matmul(
                jnp.where(valid_R1, x_RI, 0).T, d_RO, preferred_element_type=jnp.float32
            )

        return None, lax.fori_loop(0, -(-size // R), tile, jnp.zeros(w_EIO.shape[1:], jnp.float32))

    d_w = lax.scan(expert, None, (_starts(sizes_E), sizes_E))[1]
    return d_x, d_w.astype(w_EIO.dtype), None


tiled_matmul.defvjp(
    lambda *operands: (_multiply_tiles(*operands), operands), _tiled_matmul_backward
)


def _tile_rows(x_MI: Array) -> int:
    """Returns the number of rows of a tile."""
    return min(TILE_TOKENS, -(-len(x_MI) // 8) * 8)


def _starts(sizes_E: Array) -> Array:
    """Returns the first row of each expert."""
    return jnp.cumsum(sizes_E) - sizes_E
