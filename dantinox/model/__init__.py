"""The transformer model and its key/value caches."""

from dantinox.model.cache import CacheReport, KVCache, make_cache
from dantinox.model.compressed_cache import Compression
from dantinox.model.transformer import Transformer, compute_dtype

__all__ = ["CacheReport", "Compression", "KVCache", "Transformer", "compute_dtype", "make_cache"]
