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
from dantinox.model.lora import add_adapters, cast_frozen_table
from dantinox.model.moe import BranchedExperts, MixtureOfExperts, unrouted
from dantinox.model.parallelism import GATHERED, SINGLE_DEVICE, Parallelism
from dantinox.model.per_layer import PerLayerEmbedding, PerLayerInput
from dantinox.model.positions import rotary_angles, sinusoidal
from dantinox.platform import get_platform
from dantinox.programs import shared_trace


def _but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Keeps everything but weights that were made whole: neither under their name nor in a form that they have before it."""
    inner = getattr(parameters.get("call_jaxpr"), "eqns", ())
    made = {primitive.name, *(operation.primitive.name for operation in inner)}
    return not made & {"all_gather", "reshape"} and parameters.get("name") != GATHERED


# What is kept for the backward pass; with none, only weights that lie in parts on several devices are made anew.
REMAT = {
    "full": None,
    "dots": jax.checkpoint_policies.save_only_these_names(LINEAR_OUTPUT),
    "none": _but_gathered,
}


def compute_dtype(config: ModelConfig) -> DTypeLike:
    """The dtype of activations: `auto` is what the platform likes."""
    return jnp.dtype(get_platform(config.platform).compute_dtype if config.dtype == "auto" else config.dtype)


def _unchanged(x_BTD: jax.Array) -> jax.Array:
    return x_BTD


class Block(nnx.Module):
    """x + post_norm(attention(norm(x))), then the same with the feed-forward. Either norm may be absent: `norm_placement`.

    With `parallel_blocks`: x + attention(y) + feed_forward(y), where y = norm(x). `residual_multiplier` scales what is added.
    With `per_layer_dim` it then reads its own input, and with `layer_scalar` its output is multiplied by a number.
    `layer` is its number from 0.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        before, after = config.norm_placement != "after", config.norm_placement != "before"
        out_gain = 1 / math.sqrt(2 * config.num_blocks)
        self.dropout_rate, self.multiplier = config.dropout_rate, config.residual_multiplier
        self.norm1 = make_norm(config) if before else _unchanged
        self.post_norm1 = make_norm(config) if after else _unchanged
        attending = Attention if config.latent is None else LatentAttention
        self.attention = attending(config, layer, dtype=dtype, rngs=rngs, out_gain=out_gain)
        self.parallel = config.parallel_blocks
        branched = config.routes(layer) and config.experts is not None and config.experts.branch_norms
        self.norm2 = make_norm(config) if before and not self.parallel and not branched else _unchanged
        self.post_norm2 = make_norm(config) if after else _unchanged
        feeding: Callable = make_feed_forward
        if config.routes(layer):
            feeding = BranchedExperts if branched else MixtureOfExperts
        self.ffn = feeding(config.of_layer(layer), dtype=dtype, rngs=rngs, out_gain=out_gain)
        self.routes, self.experts = config.routes(layer), None if config.experts is None else config.experts.count
        reads_input = config.per_layer_dim > 0
        self.layer_input = PerLayerInput(config, dtype=dtype, rngs=rngs, out_gain=out_gain) if reads_input else None
        self.layer_scalar = nnx.Param(jnp.ones(1, jnp.float32)) if config.layer_scalar else None
        if config.lora is not None:
            add_adapters(self, layer, config, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        angles: Angles,
        memory: Any,
        key: Any,
        input_BTP: jax.Array | None,
        probe: Probe | None,
        parallelism: Parallelism,
    ):
        keys = (None, None) if key is None else jax.random.split(key)
        y_BTD = self.norm1(x_BTD)
        a_BTD, memory, probed = self.attention(y_BTD, positions_BT, angles, memory, probe, parallelism)
        x_BTD = x_BTD + self._scaled(dropout(self.post_norm1(a_BTD), self.dropout_rate, keys[0]))
        fed: Any = self.ffn(y_BTD if self.parallel else self.norm2(x_BTD), parallelism)
        f_BTD, routing = fed if self.routes else (fed, None if self.experts is None else unrouted(self.experts))
        x_BTD = x_BTD + self._scaled(dropout(self.post_norm2(f_BTD), self.dropout_rate, keys[1]))
        if self.layer_input is not None and input_BTP is not None:
            x_BTD = self.layer_input(x_BTD, input_BTP)
        if self.layer_scalar is not None:
            x_BTD = (x_BTD * self.layer_scalar[...]).astype(x_BTD.dtype)
        return x_BTD, memory, (probed, routing)

    def _scaled(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if self.multiplier == 1 else (x_BTD * self.multiplier).astype(x_BTD.dtype)


@shared_trace("probe", "parallelism")
def _apply(block: Block, *args: Any, probe: Probe | None, parallelism: Parallelism) -> tuple[jax.Array, Any, tuple[Any, Any]]:
    """Calls a block. Blocks whose attributes and shapes are equal are traced once, and inlined for each of them."""
    return block(*args, probe, parallelism)  # type: ignore[call-arg]


def output_layer(dim: int, vocab_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> Linear:
    """The projection to float32 logits."""
    return Linear((dim,), (vocab_size,), dtype=dtype, rngs=rngs, out_dtype=jnp.float32)


def stacked(blocks: list[Block]) -> Block:
    """Blocks of one kind as one, whose weights have a first axis for them."""
    graph, _ = nnx.split(blocks[0])
    return nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.state(block) for block in blocks)))


class Transformer(nnx.Module):
    """A decoder-only transformer, built from its `ModelConfig` alone.

    Its layers are `blocks`, or with `scan_layers` the stacks `rolled`: layer i is the (i // period)-th of stack i mod period.
    Weights are float32; activations have the compute dtype; logits are float32.

    Attributes:
      parallelism: the communication between devices, set by the code that knows their mesh.
    """

    parallelism: Parallelism = SINGLE_DEVICE

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, V = config.dim, config.vocab_size
        self.config, self.dtype = config, compute_dtype(config)
        self.embed = nnx.Param(0.02 * jax.random.normal(rngs.params(), (V, D), jnp.float32))
        learned = config.position == "learned"
        self.position_embed = (
            nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.max_context, D), jnp.float32)) if learned else None
        )
        self.per_layer = nnx.data(PerLayerEmbedding(config, dtype=self.dtype, rngs=rngs) if config.per_layer_dim else None)
        self.norm_embed = make_norm(config) if config.norm_embeddings else None
        blocks = [Block(config, layer, dtype=self.dtype, rngs=rngs) for layer in range(config.num_blocks)]
        self.blocks = nnx.List([] if config.scan_layers else blocks)
        if config.scan_layers:
            self.rolled = nnx.List([stacked(blocks[kind :: config.period]) for kind in range(config.period)])
        self.norm_f = make_norm(config)
        untied = None if config.weight_tying else output_layer(D, V, dtype=self.dtype, rngs=rngs)
        self.head = nnx.data(untied)
        self.head_bias = nnx.Param(jnp.zeros(V, jnp.float32)) if config.head_bias else None
        per_layer = None if self.per_layer is None else self.per_layer.embed
        for table in (self.embed, self.position_embed, per_layer, None if untied is None else untied.kernel):
            if table is not None:
                cast_frozen_table(table, config.lora)

    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array, **kwargs: Any) -> tuple[jax.Array, KVCache | None, dict]:
        """`hidden` and `logits` in a row: (logits `[B, T, V]`, cache, aux)."""
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
        """The normalised residual stream after the last layer.

        Args:
          tokens_BT: token ids, int32.
          positions_BT: position of each token, int32; −1 marks padding, which must stand after a row's tokens.
          cache: keys and values of the tokens before these; without one, attention sees these tokens only.
          segments_BT: document numbers; attention never crosses documents (without a cache only).
          rngs: with a `dropout` stream, dropout is on; None switches it off.
          probe: called per layer as `probe(scores_BNS, valid_BS)` for the newest query of each row, before the softmax.

        Returns:
          `(x_BTD, cache, aux)`; `aux["probe"]` is a tuple with what the probe returned in each layer, `aux["routing"]` the
          `Routing` of all layers where there are experts.
        """
        if cache is not None and segments_BT is not None:
            raise ValueError("segments_BT has no effect with a cache: its rows hold one document each")
        if self.config.scan_layers and (cache is not None or probe is not None):
            raise ValueError("a model with scan_layers reads whole texts and nothing else: decode with its layers apart")
        fresh = NoCache(segments_BT, self.config.kernel, self.config.platform, parallelism=self.parallelism)
        L = self.config.num_blocks
        layers: tuple[Any, ...] = cache.layers if cache is not None else (fresh,) * L
        keys = [None if rngs is None or self.config.dropout_rate == 0 else rngs.dropout() for _ in range(L + 1)]
        embedded_BTD = self._embed(tokens_BT, positions_BT)
        x_BTD = self.parallelism.scale_replicated(dropout(embedded_BTD, self.config.dropout_rate, keys[-1]))
        inputs: Any = (None,) * L
        if self.per_layer is not None:
            inputs = self.parallelism.scale_replicated(self.per_layer(tokens_BT, embedded_BTD, self.parallelism))
        angles = self._angles(positions_BT)
        if self.config.scan_layers:
            x_BTD, routing = self._through_rolled(x_BTD, (positions_BT, angles, fresh), keys[:L], inputs)
            return self.norm_f(x_BTD), None, {} if routing is None else {"routing": routing}
        memories: list[Any] = []
        shared: dict[int, SharedKeys] = {}  # the keys and values that later layers read, by the layer that made them
        probed, routings = [], []
        sources = [self.config.kv_source(layer) for layer in range(L)]
        for layer, block in enumerate(self.blocks):
            memory, source = layers[layer], sources[layer]
            if source is not None:
                memory = shared[source]
            elif layer in sources:
                memory = RecordingLayer(memory)
            run: Callable = partial(self._through, block, probe, share_trace=cache is not None)
            if self._recomputes:
                run = jax.checkpoint(run, policy=REMAT[self.config.remat])
            x_BTD, memory, (seen, routing) = run(x_BTD, positions_BT, angles[layer], memory, keys[layer], inputs[layer])
            if layer in sources:
                memory, shared[layer] = memory
            memories.append(memory)
            probed.append(seen)
            routings.append(routing)
        aux = {} if probe is None else {"probe": tuple(probed)}
        if self.config.experts is not None:
            aux["routing"] = jax.tree.map(lambda *parts: jnp.stack(parts), *routings)
        return self.norm_f(x_BTD), None if cache is None else replace(cache, layers=tuple(memories)), aux

    def _angles(self, positions_BT: jax.Array) -> list[Angles]:
        """The rotary angles of each layer; layers that rotate alike have the same arrays."""
        config = self.config
        kinds = [(config.of_layer(i).rotated_size, config.rotation(i)) for i in range(config.num_blocks)]
        made = {(R, r): None if r is None else rotary_angles(positions_BT, R, *r) for R, r in kinds}
        return [made[kind] for kind in kinds]

    @property
    def _recomputes(self) -> bool:
        return self.config.remat != "none" or self.parallelism.gathers

    def _through(
        self, block: Block, probe: Probe | None, *args: Any, share_trace: bool = False
    ) -> tuple[jax.Array, Any, tuple[Any, Any]]:
        """A layer's output, computed with its full weights.

        With `share_trace` equal layers are traced once. The backward pass would then lose the source lines of its operations.
        """
        whole = self.parallelism.gather_weights(block)
        if share_trace:
            return _apply(whole, *args, probe=probe, parallelism=self.parallelism)
        output: tuple[jax.Array, Any, tuple[Any, Any]] = whole(*args, probe, self.parallelism)
        return output

    def _through_rolled(self, x_BTD: jax.Array, seen: tuple[Any, ...], keys: list[Any], inputs: Any) -> tuple[jax.Array, Any]:
        """The residual stream behind all layers, a period of them in a turn of the loop, and their routing.

        `seen`: positions, the angles of each layer, memory. `inputs`: the per-layer input of each layer.
        """
        period, (positions_BT, angles, fresh) = self.config.period, seen
        graphs, states = zip(*(nnx.split(block) for block in self.rolled), strict=True)
        stacked_keys = [None if keys[0] is None else jnp.stack(keys[kind::period]) for kind in range(period)]
        stacked_inputs = [None if self.per_layer is None else inputs[kind::period] for kind in range(period)]

        def turn(x_BTD: jax.Array, part: Any) -> tuple[jax.Array, list[Any]]:
            routings = []
            for graph, turned, state, key, input_BTP in zip(graphs, angles[:period], *part, strict=True):
                block = nnx.merge(graph, state)
                x_BTD, _, (_, routing) = self._through(block, None, x_BTD, positions_BT, turned, fresh, key, input_BTP)
                routings.append(routing)
            return x_BTD, routings

        if self._recomputes:
            turn = jax.checkpoint(turn, policy=REMAT[self.config.remat], prevent_cse=False)
        x_BTD, routings = jax.lax.scan(turn, x_BTD, (list(states), stacked_keys, stacked_inputs))
        if self.config.experts is None:
            return x_BTD, None
        return x_BTD, jax.tree.map(lambda *kinds: jnp.stack(kinds, axis=1).reshape(-1, *kinds[0].shape[1:]), *routings)

    def logits(self, x_BTD: jax.Array, rounded_DV: jax.Array | None = None) -> jax.Array:
        """Scores of the next token, float32 `[..., V]`; `rounded_DV`: the `output_weights` in the compute dtype."""
        if self.head is not None and rounded_DV is None:
            logits = self.head(x_BTD)
        else:
            logits = cast_tensordot(x_BTD, self.output_weights(), 1, self.dtype, jnp.float32, rounded_DV)
        logits = add_bias(self.parallelism.all_gather(logits), self.head_bias)
        if self.config.logits_scaling != 1:
            logits = logits / self.config.logits_scaling
        return logits if self.config.final_softcap is None else softcap(logits, self.config.final_softcap)

    def output_weights(self) -> jax.Array:
        """The weights `[D, V]` that logits are made with."""
        return self.embed[...].T if self.head is None else self.head.kernel[...]

    def _embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        x_BTD = self.embed[...][tokens_BT]
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
