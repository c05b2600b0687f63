"""`Transformer`: the model, from token ids to hidden states and logits."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dantinox.config import ModelConfig
from dantinox.model.attention import Angles, Attention, Probe
from dantinox.model.cache import KVCache, NoCache, RecordingLayer, SharedKeys
from dantinox.model.frozen_weights import Int8Table, dequantize
from dantinox.model.latent_attention import LatentAttention
from dantinox.model.layers import (
    LINEAR_OUTPUT,
    Linear,
    add_bias,
    cast_tensordot,
    dropout,
    make_feed_forward,
    make_norm,
    softcap,
)
from dantinox.model.lora import AdaptedLinear, add_adapters, cast_frozen_table
from dantinox.model.moe import BranchedExperts, MixtureOfExperts, zero_routing
from dantinox.model.packed import PackedTable, look_up
from dantinox.model.parallelism import GATHERED, SINGLE_DEVICE, Parallelism
from dantinox.model.per_layer import PerLayerEmbedding, PerLayerInput
from dantinox.model.positions import rotary_angles, sinusoidal
from dantinox.platform import get_platform
from dantinox.programs import shared_trace


def _save_all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A remat policy that saves everything except gathered weights, both before and after they get
    their checkpoint name.
    """
    inner = getattr(parameters.get("call_jaxpr"), "eqns", ())
    primitives = {primitive.name, *(operation.primitive.name for operation in inner)}
    return not primitives & {"all_gather", "reshape"} and parameters.get("name") != GATHERED


# Policies that decide which values are saved for the backward pass. With "none", all values are
# saved, except weights that were gathered from several devices.
REMAT_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.save_only_these_names(LINEAR_OUTPUT),
    "none": _save_all_but_gathered,
}


def compute_dtype(config: ModelConfig) -> DTypeLike:
    """Returns the dtype of activations; `auto` is the dtype that the platform prefers."""
    return jnp.dtype(
        get_platform(config.platform).compute_dtype if config.dtype == "auto" else config.dtype
    )


def _identity(x_BTD: jax.Array) -> jax.Array:
    return x_BTD


class Block(nnx.Module):
    """A transformer block: x + post_norm(attention(norm(x))), then the same form with the
    feed-forward layer.

    `norm_placement` may omit either norm. With `parallel_blocks` the block is x + attention(y) +
    feed_forward(y), where y = norm(x). `residual_multiplier` scales the terms that are added to x.
    With `per_layer_dim` the block also adds its per-layer input, and with `layer_scalar` its output
    is multiplied by a learned number. `layer` is the index of the layer, from 0.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        has_norm = config.norm_placement != "after"
        has_post_norm = config.norm_placement != "before"
        out_gain = 1 / math.sqrt(2 * config.num_blocks)
        self.dropout_rate = config.dropout_rate
        self.multiplier = config.residual_multiplier
        self.norm1 = make_norm(config) if has_norm else _identity
        self.post_norm1 = make_norm(config) if has_post_norm else _identity
        attention_type = Attention if config.latent is None else LatentAttention
        self.attention = attention_type(config, layer, dtype=dtype, rngs=rngs, out_gain=out_gain)
        self.parallel = config.parallel_blocks
        branched = (
            config.routes(layer) and config.experts is not None and config.experts.branch_norms
        )
        self.norm2 = (
            make_norm(config) if has_norm and not self.parallel and not branched else _identity
        )
        self.post_norm2 = make_norm(config) if has_post_norm else _identity
        ffn_type: Callable = make_feed_forward
        if config.routes(layer):
            ffn_type = BranchedExperts if branched else MixtureOfExperts
        self.ffn = ffn_type(config.of_layer(layer), dtype=dtype, rngs=rngs, out_gain=out_gain)
        self.routes = config.routes(layer)
        self.experts = None if config.experts is None else config.experts.count
        reads_input = config.per_layer_dim > 0
        self.layer_input = (
            PerLayerInput(config, dtype=dtype, rngs=rngs, out_gain=out_gain)
            if reads_input
            else None
        )
        self.layer_scalar = nnx.Param(jnp.ones(1, jnp.float32)) if config.layer_scalar else None
        if config.lora is not None:
            add_adapters(self, layer, config, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        angles: Angles,
        layer_cache: Any,
        key: Any,
        input_BTP: jax.Array | None,
        probe: Probe | None,
        parallelism: Parallelism,
    ):
        keys = (None, None) if key is None else jax.random.split(key)
        y_BTD = self.norm1(x_BTD)
        a_BTD, layer_cache, probed = self.attention(
            y_BTD, positions_BT, angles, layer_cache, probe, parallelism
        )
        x_BTD = x_BTD + self._scale_residual(
            dropout(self.post_norm1(a_BTD), self.dropout_rate, keys[0])
        )
        y_BTD = y_BTD if self.parallel else self.norm2(x_BTD)
        routing: Any = None if self.experts is None else zero_routing(self.experts)
        if self.routes:
            f_BTD, routing = self.ffn(y_BTD, parallelism, positions_BT >= 0)
        else:
            f_BTD = self.ffn(y_BTD, parallelism)
        x_BTD = x_BTD + self._scale_residual(
            dropout(self.post_norm2(f_BTD), self.dropout_rate, keys[1])
        )
        if self.layer_input is not None and input_BTP is not None:
            x_BTD = self.layer_input(x_BTD, input_BTP)
        if self.layer_scalar is not None:
            x_BTD = (x_BTD * self.layer_scalar[...]).astype(x_BTD.dtype)
        return x_BTD, layer_cache, (probed, routing)

    def _scale_residual(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if self.multiplier == 1 else (x_BTD * self.multiplier).astype(x_BTD.dtype)


@shared_trace("probe", "parallelism")
def _apply(
    block: Block, *args: Any, probe: Probe | None, parallelism: Parallelism
) -> tuple[jax.Array, Any, tuple[Any, Any]]:
    """Calls a block. Blocks with equal attributes and shapes share one trace, which is inlined for
    each block.
    """
    return block(*args, probe, parallelism)  # type: ignore[call-arg]


def make_output_layer(dim: int, vocab_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> Linear:
    """Returns the projection to float32 logits."""
    return Linear((dim,), (vocab_size,), dtype=dtype, rngs=rngs, out_dtype=jnp.float32)


def stack_blocks(blocks: list[Block]) -> Block:
    """Stacks blocks of one kind into one block, whose weights have a leading layer axis."""
    graph, _ = nnx.split(blocks[0])
    return nnx.merge(
        graph,
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.state(block) for block in blocks)),
    )


class Transformer(nnx.Module):
    """A decoder-only transformer, built from its `ModelConfig` alone.

    Its layers are in `blocks`. With `scan_layers` they are in the stacks `rolled`: layer i has
    index i // p in stack i mod p, where p is `config.period`, the number of layers after which the
    kinds of layers repeat. Weights and logits are float32; activations have the compute dtype.

    Attributes:
      parallelism: the collectives; code that places the model on a mesh sets it.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> shape = {"model.dim": 32, "model.num_blocks": 2}
      >>> config = dantinox.load_config("quickstart", shape).architecture(vocab_size=100)
      >>> model = dantinox.Transformer(config, rngs=nnx.Rngs(0))
      >>> tokens_BT = jnp.array([[1, 2, 3]])
      >>> positions_BT = jnp.array([[0, 1, 2]])
      >>> logits_BTV, cache, aux = model(tokens_BT, positions_BT)
      >>> logits_BTV.shape
      (1, 3, 100)
    """

    parallelism: Parallelism = SINGLE_DEVICE

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, V = config.dim, config.vocab_size
        self.config = config
        self.dtype = compute_dtype(config)
        self.embed: Any = nnx.Param(0.02 * jax.random.normal(rngs.params(), (V, D), jnp.float32))
        learned = config.position == "learned"
        self.position_embed = (
            nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.max_context, D), jnp.float32))
            if learned
            else None
        )
        self.per_layer = nnx.data(
            PerLayerEmbedding(config, dtype=self.dtype, rngs=rngs) if config.per_layer_dim else None
        )
        self.norm_embed = make_norm(config) if config.norm_embeddings else None
        blocks = [
            Block(config, layer, dtype=self.dtype, rngs=rngs) for layer in range(config.num_blocks)
        ]
        self.blocks = nnx.List([] if config.scan_layers else blocks)
        if config.scan_layers:
            self.rolled = nnx.List(
                [stack_blocks(blocks[kind :: config.period]) for kind in range(config.period)]
            )
        self.norm_f = make_norm(config)
        untied = (
            None if config.weight_tying else make_output_layer(D, V, dtype=self.dtype, rngs=rngs)
        )
        self.head: Any = nnx.data(untied)
        self.head_bias = nnx.Param(jnp.zeros(V, jnp.float32)) if config.head_bias else None
        per_layer = None if self.per_layer is None else self.per_layer.embed
        for table in (
            self.embed,
            self.position_embed,
            per_layer,
            None if untied is None else untied.kernel,
        ):
            if table is not None:
                cast_frozen_table(table, config.lora)
        if config.lora is not None and config.lora.held == "nf4":
            self.embed = nnx.data(Int8Table(self.embed[...], self.dtype))
            if untied is not None:
                self.head = nnx.data(
                    AdaptedLinear(untied, {}, replace(config.lora, held="int8"), rngs=rngs)
                )

    def __call__(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, **kwargs: Any
    ) -> tuple[jax.Array, KVCache | None, dict]:
        """Runs `hidden` and `logits`, and returns (logits `[B, T, V]`, cache, aux)."""
        x_BTD, cache, aux = self.hidden(tokens_BT, positions_BT, **kwargs)
        return self.logits(x_BTD), cache, aux

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        *,
        cache: KVCache | None = None,
        segments_BT: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        probe: Probe | None = None,
    ) -> tuple[jax.Array, KVCache | None, dict[str, Any]]:
        """Returns the normalized residual stream after the last layer.

        Args:
          tokens_BT: token ids, int32.
          positions_BT: the position of each token, int32; −1 marks padding, which must follow the
            tokens of a row.
          cache: keys and values of the earlier tokens; None: attention reads only the tokens of
            this call.
          segments_BT: document numbers; attention never crosses documents. Must be None with a
            cache.
          rngs: dropout is on if it has a `dropout` stream; None: off.
          probe: called per layer as `probe(scores_BNS, valid_BS)` for the newest query of each row,
            before the softmax.

        Returns:
          `(x_BTD, cache, aux)`; `aux["probe"]` is a tuple with the result of the probe in each
          layer, and `aux["routing"]` is the `Routing` of all layers, if the model has experts.
        """
        if cache is not None and segments_BT is not None:
            raise ValueError(
                "segments_BT must be None with a cache: each row of a cache holds one document"
            )
        if self.config.scan_layers and (cache is not None or probe is not None):
            raise ValueError(
                "a model with scan_layers supports neither a cache nor a probe: use separate layers"
                " (scan_layers=False)"
            )
        no_cache = NoCache(
            segments_BT, self.config.kernel, self.config.platform, parallelism=self.parallelism
        )
        L = self.config.num_blocks
        layers: tuple[Any, ...] = cache.layers if cache is not None else (no_cache,) * L
        keys = [
            None if rngs is None or self.config.dropout_rate == 0 else rngs.dropout()
            for _ in range(L + 1)
        ]
        embedded_BTD = self._embed(tokens_BT, positions_BT)
        x_BTD = self.parallelism.scale_replicated(
            dropout(embedded_BTD, self.config.dropout_rate, keys[-1])
        )
        inputs: Any = (None,) * L
        if self.per_layer is not None:
            inputs = self.parallelism.scale_replicated(
                self.per_layer(tokens_BT, embedded_BTD, self.parallelism)
            )
        angles = self._angles(positions_BT)
        if self.config.scan_layers:
            x_BTD, routing = self._run_stacked(
                x_BTD, (positions_BT, angles, no_cache), keys[:L], inputs
            )
            return self.norm_f(x_BTD), None, {} if routing is None else {"routing": routing}
        layer_inputs = [
            (positions_BT, angles[layer], layers[layer], keys[layer], inputs[layer])
            for layer in range(L)
        ]
        x_BTD, layer_caches, outputs = self._run_separate(
            x_BTD, layer_inputs, probe, share_trace=cache is not None
        )
        probed, routings = zip(*outputs, strict=True)
        aux: dict[str, Any] = {} if probe is None else {"probe": probed}
        if self.config.experts is not None:
            aux["routing"] = jax.tree.map(lambda *parts: jnp.stack(parts), *routings)
        return (
            self.norm_f(x_BTD),
            None if cache is None else replace(cache, layers=tuple(layer_caches)),
            aux,
        )

    def _run_separate(
        self,
        x_BTD: jax.Array,
        layer_inputs: list[tuple[Any, ...]],
        probe: Probe | None,
        share_trace: bool,
    ) -> tuple[jax.Array, list[Any], list[tuple[Any, Any]]]:
        """Returns the residual stream after all layers, their caches and (probe result, routing).

        Args:
          layer_inputs: for each layer: positions, rotary angles, cache, dropout key, per-layer
            input.
        """
        layer_caches: list[Any] = []
        outputs: list[tuple[Any, Any]] = []
        shared: dict[
            int, SharedKeys
        ] = {}  # keys and values that later layers read too, by the index of the source layer
        sources = [self.config.kv_source(layer) for layer in range(len(self.blocks))]
        for layer, block in enumerate(self.blocks):
            positions_BT, angles, layer_cache, key, input_BTP = layer_inputs[layer]
            source = sources[layer]
            if source is not None:
                layer_cache = shared[source]
            elif layer in sources:
                layer_cache = RecordingLayer(layer_cache)
            run: Callable = partial(self._run_block, block, probe, share_trace=share_trace)
            if self._rematerializes:
                run = jax.checkpoint(run, policy=REMAT_POLICIES[self.config.remat])
            x_BTD, layer_cache, output = run(
                x_BTD, positions_BT, angles, layer_cache, key, input_BTP
            )
            if layer in sources:
                layer_cache, shared[layer] = layer_cache
            layer_caches.append(layer_cache)
            outputs.append(output)
        return x_BTD, layer_caches, outputs

    def _angles(self, positions_BT: jax.Array) -> list[Angles]:
        """Returns the rotary angles of each layer; layers with the same rotation share the
        arrays.
        """
        config = self.config
        kinds = [
            (config.of_layer(i).rotated_size, config.rotation(i)) for i in range(config.num_blocks)
        ]
        angles_of = {
            (R, r): None if r is None else rotary_angles(positions_BT, R, *r) for R, r in kinds
        }
        return [angles_of[kind] for kind in kinds]

    @property
    def _rematerializes(self) -> bool:
        return self.config.remat != "none" or self.parallelism.gathers

    def _run_block(
        self, block: Block, probe: Probe | None, *args: Any, share_trace: bool = False
    ) -> tuple[jax.Array, Any, tuple[Any, Any]]:
        """Computes the output of a layer with its full weights.

        With `share_trace` equal layers are traced once. Training does not use it, because the
        operations of the backward pass would lose their source lines.
        """
        gathered = self.parallelism.gather_weights(block)
        if share_trace:
            return _apply(gathered, *args, probe=probe, parallelism=self.parallelism)
        output: tuple[jax.Array, Any, tuple[Any, Any]] = gathered(*args, probe, self.parallelism)
        return output

    def _run_stacked(
        self, x_BTD: jax.Array, common: tuple[Any, ...], keys: list[Any], inputs: Any
    ) -> tuple[jax.Array, Any]:
        """Returns the residual stream after all layers, and their routing; each loop iteration runs
        one period of layers.

        Args:
          common: the positions, the rotary angles of each layer, and the layer cache.
          inputs: the per-layer inputs of all layers.
        """
        period = self.config.period
        positions_BT, angles, no_cache = common
        graphs, states = zip(*(nnx.split(block) for block in self.rolled), strict=True)
        stacked_keys = [
            None if keys[0] is None else jnp.stack(keys[kind::period]) for kind in range(period)
        ]
        stacked_inputs = [
            None if self.per_layer is None else inputs[kind::period] for kind in range(period)
        ]

        def period_step(x_BTD: jax.Array, part: Any) -> tuple[jax.Array, list[Any]]:
            routings = []
            for graph, layer_angles, state, key, input_BTP in zip(
                graphs, angles[:period], *part, strict=True
            ):
                block = nnx.merge(graph, state)
                x_BTD, _, (_, routing) = self._run_block(
                    block, None, x_BTD, positions_BT, layer_angles, no_cache, key, input_BTP
                )
                routings.append(routing)
            return x_BTD, routings

        if self._rematerializes:
            period_step = jax.checkpoint(
                period_step, policy=REMAT_POLICIES[self.config.remat], prevent_cse=False
            )
        x_BTD, routings = jax.lax.scan(
            period_step, x_BTD, (list(states), stacked_keys, stacked_inputs)
        )
        if self.config.experts is None:
            return x_BTD, None
        return x_BTD, jax.tree.map(
            lambda *kinds: jnp.stack(kinds, axis=1).reshape(-1, *kinds[0].shape[1:]), *routings
        )

    def logits(self, x_BTD: jax.Array, cast_weights_DV: jax.Array | None = None) -> jax.Array:
        """Returns the logits of the next token, float32 `[..., V]`.

        Args:
          cast_weights_DV: the `output_weights` in the compute dtype, for callers that compute
            logits many times.
        """
        if (
            self.head is None
            and isinstance(self.embed, (PackedTable, Int8Table))
            and cast_weights_DV is None
        ):
            logits = self.embed.project(x_BTD)
        elif self.head is not None and cast_weights_DV is None:
            logits = self.head(x_BTD)
        else:
            logits = cast_tensordot(
                x_BTD, self.output_weights(), 1, self.dtype, jnp.float32, cast_weights_DV
            )
        logits = add_bias(self.parallelism.all_gather(logits), self.head_bias)
        if self.config.logits_scaling != 1:
            logits = logits / self.config.logits_scaling
        return (
            logits
            if self.config.final_softcap is None
            else softcap(logits, self.config.final_softcap)
        )

    def output_weights(self) -> jax.Array:
        """Returns the weights `[D, V]` of the output layer, or the transposed embedding if it is
        tied.
        """
        if isinstance(self.head, AdaptedLinear):
            return dequantize(self.head.matrix(), self.head.shape_in)
        if self.head is not None:
            return self.head.kernel[...]
        table_VD = self.embed.dequantize() if isinstance(self.embed, Int8Table) else self.embed[...]
        return table_VD.T

    def _embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        x_BTD = look_up(self.embed, tokens_BT)
        if self.config.scale_embeddings:
            x_BTD = x_BTD.astype(self.dtype) * jnp.asarray(math.sqrt(self.config.dim), self.dtype)
        if self.config.embedding_multiplier != 1:
            x_BTD = (self.config.embedding_multiplier * x_BTD).astype(x_BTD.dtype)
        if self.position_embed is not None:
            x_BTD = x_BTD + self.position_embed[...][jnp.clip(positions_BT, 0)]
        elif self.config.position == "sinusoidal":
            x_BTD = x_BTD + sinusoidal(positions_BT, self.config.dim)
        x_BTD = self.parallelism.all_gather(x_BTD.astype(self.dtype))
        return x_BTD if self.norm_embed is None else self.norm_embed(x_BTD)
