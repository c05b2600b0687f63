"""`Job`, a request that the engine has accepted, and `Output`, what a step of the engine
returns.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from dantinox.generation.decode.prompt_scope import NO_SCOPE
from dantinox.generation.request import GenerationRequest, RequestStats
from dantinox.generation.sample_text import SampleText, TextPart
from dantinox.generation.slot_params import RowParams
from dantinox.sampling import StepInfo
from dantinox.sampling.step_subsets import ALL_STEPS


class RequestFailed(Exception):
    """An internal error ended the request; the log has the details."""


class Output(NamedTuple):
    """New output of one sample. If `ended` is true, this output marks the end of the request.

    Attributes:
      parts: new text, one part per token if the request asks for log-probabilities.
      ids: the new tokens; `steps` has one entry for each, if the request asks for them.
      finish_reason: `eos`, `stop`, `loop`, `length` or `cancelled` in the last output of the
        sample.
      stop_string: the stop string that ended the sample, or None.
      ended: whether the request has ended; `error` is set if it failed.
    """

    job: "Job"
    sample: int = 0
    parts: Sequence[TextPart] = ()
    ids: Sequence[int] = ()
    steps: StepInfo | None = None
    finish_reason: str | None = None
    stop_string: str | None = None
    ended: bool = False
    error: Exception | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


class Job:
    """A request that the engine has accepted.

    Attributes:
      limit: the most new tokens of each sample.
      texts: the text of each sample.
      samples: the number of continuations; `rows` maps slots to samples.
      prompt_steps: with `echo`, the `PromptEcho.steps` of the prompt.
      prompts: the prompts of the rows of each sample, see `ModelBundle.prompts`.
      followers: for the slot of each sample, the slots of its other rows; `slots` counts them too.
      scope: what its keys depend on besides its tokens.
      subset: the sampling steps of its rows, see `sampling.step_subsets`.
      prepared: whether its parameters and constraints are ready.
    """

    def __init__(self, request: GenerationRequest, limit: int):
        self.request = request
        self.limit = limit
        self.samples = request.config.generation.n
        self.slots = self.samples * request.rows_per_sample
        self.prompts: Sequence[Sequence[int]] = ()
        self.followers: dict[int, list[int]] = {}
        self.stats = RequestStats(len(request.ids))
        self.params: RowParams | None = None
        self.texts: list[SampleText] = []
        self.rows: dict[int, int] = {}  # slot → sample
        self.prompt_steps: StepInfo | None = None
        self.scope = NO_SCOPE
        self.subset = ALL_STEPS
        self.prepared = False
        self.cancelled = False
        # An error in the preparation of the request or in its prefix match.
        self.error: Exception | None = None
        self._start_time = time.monotonic()

    def seconds(self) -> float:
        """Returns the seconds since the request was accepted."""
        return time.monotonic() - self._start_time

    def text_of(self, slot: int) -> SampleText:
        """Returns the text of the sample whose row is in a slot."""
        return self.texts[self.rows[slot]]

    @property
    def running(self) -> list[int]:
        """The indices of the samples that have not ended."""
        if not self.texts:  # the job is not prepared
            return [*range(self.samples)]
        return [number for number, text in enumerate(self.texts) if text.finish_reason is None]
