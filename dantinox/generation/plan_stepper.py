"""`plan_stepper`: chooses how a batch decodes, from the settings."""

from dantinox.config import Config
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
