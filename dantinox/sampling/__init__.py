"""Logits in, a token out: edits, penalties, filters, their order, and the draw."""

from dantinox.sampling.chain import SampleInfo, sample
from dantinox.sampling.params import SamplerState, SamplingParams, init_state, update
from dantinox.sampling.pipeline import kobold_order, process_logits

__all__ = [
    "SampleInfo",
    "SamplerState",
    "SamplingParams",
    "init_state",
    "kobold_order",
    "process_logits",
    "sample",
    "update",
]
