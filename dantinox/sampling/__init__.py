"""Sampling: turns the logits of a decoding step into a token."""

from dantinox.config.generation_settings import kobold_order
from dantinox.sampling.chain import SampleInfo, edit_logits, sample, trace
from dantinox.sampling.logit_processor import LogitProcessor, TokenHistory
from dantinox.sampling.named_steps import process_logits
from dantinox.sampling.params import ProgramOptions, SamplingParams
from dantinox.sampling.state import SamplerState, init_state, update
from dantinox.sampling.step_info import StepInfo
from dantinox.sampling.watermark import Detection, detect

__all__ = [
    "Detection",
    "LogitProcessor",
    "ProgramOptions",
    "SampleInfo",
    "SamplerState",
    "SamplingParams",
    "StepInfo",
    "TokenHistory",
    "detect",
    "edit_logits",
    "init_state",
    "kobold_order",
    "process_logits",
    "sample",
    "trace",
    "update",
]
