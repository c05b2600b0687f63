"""Logits in, a token out: edits, penalties, filters, their order, and the draw."""

from dantinox.sampling.chain import SampleInfo, sample
from dantinox.sampling.params import SamplerState, SamplingParams, init_state, update

__all__ = ["SampleInfo", "SamplerState", "SamplingParams", "init_state", "sample", "update"]
