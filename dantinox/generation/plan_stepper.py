"""`plan_stepper`: chooses how a batch decodes, from the settings, and how a row decodes in it."""

from dantinox.config import Config, GenerationSection, UserError
from dantinox.generation.decode.drafts import plan_drafts
from dantinox.generation.decode.features import Constants
from dantinox.generation.decode.generate_toks import Stepper
from dantinox.generation.decode.split_model import split_model
from dantinox.generation.decode.uncached import UncachedStepper
from dantinox.generation.model_bundle import ModelBundle
from dantinox.model import Transformer


def plan_stepper(
    config: Config,
    bundle: ModelBundle,
    model: Transformer,
    rows: int,
    slots: int,
    *,
    constrained: bool = False,
) -> tuple[Stepper, Constants]:
    """Returns the stepper of a batch and its constants.

    Args:
      model: the prepared model of `bundle`.
      rows, slots: the size of the cache.
      constrained: whether the tokens that a row may get next depend on all tokens before them. Then
        there are no drafts.

    Raises:
      UserError: as in `ModelBundle.draft_model`.
    """
    if not config.generation.use_cache:
        return UncachedStepper(), {}
    if not constrained:
        draft_model = bundle.draft_model(config.generation)
        stepper = plan_drafts(config, model, rows, slots, draft_model)
        if stepper is not None:
            return stepper, {} if draft_model is None else {"draft_model": split_model(draft_model)}
    return Stepper(), {}


def row_width(section: GenerationSection) -> int:
    """Returns the most tokens per step of a row with these settings."""
    return 1 if section.speculation == "off" else section.draft_tokens + 1


def check_steps(served: GenerationSection, requested: GenerationSection) -> None:
    """Checks that the stepper of a server serves a request: its drafts must be a part of those that
    the programs can verify.

    Raises:
      UserError: the settings of the request need other programs.
    """
    if requested.speculation == "off":
        return
    for name in ("speculation", "ngram_size" if requested.speculation == "ngram" else "draft_run"):
        if getattr(requested, name) != getattr(served, name):
            message = f"is {getattr(served, name)} in this server, got {getattr(requested, name)}"
            raise UserError(f"generation.{name} {message}", key=f"generation.{name}")
    if requested.draft_tokens > served.draft_tokens:
        message = (
            f"must be at most {served.draft_tokens} in this server, got {requested.draft_tokens}"
        )
        raise UserError(f"generation.draft_tokens {message}", key="generation.draft_tokens")
