"""The transformer and the caches its decoding reads."""

from dantinox.model.cache import KVCache, make_cache
from dantinox.model.transformer import Transformer, compute_dtype

__all__ = ["KVCache", "Transformer", "compute_dtype", "make_cache"]
