"""Attention kernels: XLA, chunked, cuDNN (GPU) and splash (TPU), and the choice between them.

A kernel is a function `(q_BTKGH, k_BTKH, v_BTKH, segments_BT, window, softmax) -> out_BTKGH` of
tokens at consecutive positions. Code that needs the scores uses plain XLA attention
(`attention.attention`), which computes all scores at once.
"""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dantinox.config import UserError
from dantinox.model.chunked_attention import QUERY_BLOCK, chunked_attention
from dantinox.model.layers import PLAIN_SOFTMAX, Softmax
from dantinox.platform import get_platform

Kernel = Callable[..., Array]
LANES = 128  # the number of lanes of a TPU; splash needs lengths that are multiples of it


def cudnn_attention(
    q_BTKGH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segments_BT: Array | None,
    window: int | None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Array:
    """Runs the fused attention of cuDNN, with a plain softmax.

    Documents are separated by an additive bias `[B, 1, T, T]` in the dtype of the queries.
    """
    B, T, K, G, H = q_BTKGH.shape
    mask = (
        None
        if segments_BT is None
        else (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
    )
    keys_on_each_side = None if window is None else (window - 1, 0)
    out_BTNH = jax.nn.dot_product_attention(
        q_BTKGH.reshape(B, T, K * G, H),
        k_BTKH,
        v_BTKH,
        mask=mask,
        is_causal=True,
        local_window_size=keys_on_each_side,
        implementation="cudnn",
    )
    return out_BTNH.reshape(q_BTKGH.shape)


def splash_attention(
    q_BTKGH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segments_BT: Array | None,
    window: int | None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Array:
    """Runs splash attention, the Pallas kernel of JAX for TPUs, which skips fully masked blocks."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    B, T, K, G, H = q_BTKGH.shape
    q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4) * H**-0.5
    k_BKTH = k_BTKH.swapaxes(1, 2)
    v_BKTH = v_BTKH.swapaxes(1, 2)
    kernel = _splash(T, G, window, softmax.cap)
    segments_BT = jnp.zeros((B, T), jnp.int32) if segments_BT is None else segments_BT

    def row(q_KGTH: Array, k_KTH: Array, v_KTH: Array, segments_T: Array) -> Array:
        documents = splash.SegmentIds(q=segments_T, kv=segments_T)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=documents))(
            q_KGTH, k_KTH, v_KTH
        )

    return jax.vmap(row)(q_BKGTH, k_BKTH, v_BKTH, segments_BT).transpose(0, 3, 1, 2, 4)


@lru_cache(maxsize=16)
def _splash(length: int, heads: int, window: int | None, cap: float | None) -> Callable:
    """Returns the splash kernel for the query heads of one key head."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = length, length
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mqa_single_device(
            masks.MultiHeadMask([mask] * heads), attn_logits_soft_cap=cap
        )


KERNELS: dict[str, Kernel] = {
    "chunked": chunked_attention,
    "cudnn": cudnn_attention,
    "splash": splash_attention,
}


def kernel_for(
    name: str,
    platform: str,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    softmax: Softmax = PLAIN_SOFTMAX,
    value_size: int | None = None,
) -> Kernel | None:
    """Returns the kernel for queries `[B, T, K, G, H]` of a dtype; None: use plain XLA attention.

    Args:
      name: the kernel. `auto` uses the kernel of the platform if it supports the queries. Otherwise
        it uses the chunked kernel for sequences longer than one block, and plain XLA attention for
        shorter sequences.
      softmax: the softmax options that the kernel must support.
      value_size: the head size of the values, if it differs from H.

    Raises:
      UserError: the named kernel does not support these queries.
    """
    T = shape[1]
    H = shape[-1]
    other_values = value_size is not None and value_size != H

    def unsupported_reason(kernel: str) -> str:
        return _unsupported_reason(kernel, platform, T, H, dtype, softmax, other_values)

    if name == "auto":
        if T <= QUERY_BLOCK:
            return None
        preferred = get_platform(platform).attention_kernel
        return (
            chunked_attention
            if preferred is None or unsupported_reason(preferred)
            else KERNELS[preferred]
        )
    if reason := unsupported_reason(name):
        raise UserError(f"attention.kernel {name} {reason}")
    return KERNELS.get(name)  # `xla` is not in the table


def _unsupported_reason(
    name: str,
    platform: str,
    length: int,
    head_size: int,
    dtype: DTypeLike,
    softmax: Softmax,
    other_values: bool,
) -> str:
    """Returns why a kernel does not support queries of this length, head size and dtype on a
    platform; "" if it does.
    """
    needed = {"cudnn": "gpu", "splash": "tpu"}.get(name)
    if needed and get_platform(platform).name != needed:
        return (
            f"needs a {needed.upper()}, but the platform is a {get_platform(platform).name.upper()}"
        )
    if name == "cudnn" and (head_size % 8 or head_size > 128 or jnp.dtype(dtype) == jnp.float32):
        got = f"{jnp.dtype(dtype).name} and {head_size}"
        return f"needs bfloat16 and a head size of at most 128 that is a multiple of 8, got {got}"
    if name == "cudnn" and softmax.cap is not None:
        return "does not support capped scores (attention.attn_logit_softcapping)"
    if name in ("cudnn", "splash") and softmax.sinks_KG is not None:
        return "does not support sinks (attention.sink_logits)"
    if name in ("cudnn", "splash") and other_values:
        return "needs keys and values of the same size (attention.v_head_dim)"
    if name == "splash" and length % LANES:
        return f"needs lengths that are multiples of {LANES}, got {length}"
    return ""
