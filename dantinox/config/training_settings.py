"""The `training` section: objective, optimizer, evaluation and checkpoints."""

from typing import Annotated, Literal

from pydantic import Field

from dantinox.config.base import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    Section,
    Seed,
    field,
)
from dantinox.config.preference_defaults import PREFERENCE_OBJECTIVES
from dantinox.config.prerequisites import Needs, differs, is_set, nonzero, one_of


class TrainingSection(Section):
    """Objective, optimizer, evaluation and checkpoints."""

    objective: Literal[
        "next_token", "sft", "dpo", "ipo", "kto", "orpo", "simpo", "grpo", "distill"
    ] = field(
        "next_token",
        "next_token: predict every token; sft: assistant turns of conversations; dpo, ipo, orpo,"
        " simpo: prefer chosen over rejected answers; kto: answers labeled desirable or"
        " undesirable; grpo: maximize rewards of sampled answers; distill: imitate a teacher",
        group="objective",
    )
    preference_beta: Annotated[
        Positive | None, Needs(("training.objective", one_of(*PREFERENCE_OBJECTIVES)))
    ] = field(
        None,
        "dpo, ipo (τ), kto: factor β on the log-probability ratio of the trained to the starting"
        " weights; simpo: factor β on the mean log-probability of a token; orpo: weight λ of the"
        " odds ratio (null: 0.1, simpo: 2)",
        group="objective",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), Needs(("training.objective", "dpo"))] = (
        field(
            0.0,
            "dpo: assumed probability that chosen and rejected answers are swapped",
            group="objective",
        )
    )
    simpo_margin: Annotated[NonNegative, Needs(("training.objective", "simpo"))] = field(
        0.5,
        "simpo: target margin γ by which the reward of the chosen"
        " answer exceeds that of the rejected one",
        group="objective",
    )
    kto_desirable_weight: Annotated[Positive, Needs(("training.objective", "kto"))] = field(
        1.0,
        "kto: weight of the losses of desirable answers",
        group="objective",
    )
    kto_undesirable_weight: Annotated[Positive, Needs(("training.objective", "kto"))] = field(
        1.0,
        "kto: weight of the losses of undesirable answers",
        group="objective",
    )
    steps: Count | None = field(
        None, "optimizer steps (null: computed from epochs)", group="batches"
    )
    epochs: Annotated[Positive, Needs(("training.steps", None))] = field(
        1.0, "passes over the training text if steps is null", group="batches"
    )
    tokens_per_parameter: Annotated[
        Positive | None, Needs(("training.steps", None)), Needs(("model.depth", is_set))
    ] = field(
        None,
        "with model.depth: training tokens per weight in the layers, which"
        " set batch_size and steps (null: 20)",
        group="batches",
    )
    max_minutes: Annotated[
        Positive | None,
        Needs(("training.objective", differs("grpo"))),
        Needs(("distill.data", differs("samples"))),
    ] = field(
        None,
        "reduce the steps of a new run so that they take at most this many minutes, without"
        " evaluations; the time of a step is measured before the first one (null: no limit)",
        group="batches",
    )
    batch_size: Count = field(
        32,
        "examples (grpo: prompts) per optimizer step, over all accumulation steps",
        group="batches",
    )
    grad_accum: Count = field(
        1,
        "accumulation steps per optimizer step, to save memory; must divide batch_size",
        group="batches",
    )
    seed: Seed = field(42, "seed of weights, data order and dropout", group="batches")
    optimizer: Literal["adamw", "muon", "lion", "adafactor", "sgd"] = field(
        "adamw",
        "optimizer; muon trains hidden matrices with Muon and all other weights with AdamW",
        group="optimizer",
    )
    lr: Positive = field(
        3e-4, "peak learning rate (muon: of all weights except hidden matrices)", group="optimizer"
    )
    muon_lr: Annotated[Positive, Needs(("training.optimizer", "muon"))] = field(
        0.02,
        "peak learning rate of the matrices that Muon trains",
        group="optimizer",
    )
    muon_steps: Annotated[Literal[3, 5], Needs(("training.optimizer", "muon"))] = field(
        3,
        "polynomials that orthogonalize an update of Muon; 5 are more accurate and slower",
        group="optimizer",
    )
    muon_normalize: Annotated[bool, Needs(("training.optimizer", "muon"))] = field(
        False,
        "divide the update of each neuron by a moving average of its size (NorMuon)",
        group="optimizer",
    )
    min_lr_ratio: Annotated[Fraction, Needs(("training.schedule", differs("constant")))] = field(
        0.1,
        "final learning rate as a fraction of the peak",
        group="optimizer",
    )
    warmup_steps: CountOrZero | None = field(
        None,
        "steps of linear warm-up from zero (null: a tenth of the steps, at most 100)",
        group="optimizer",
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = field(
        "cosine", "learning-rate schedule after the warm-up", group="optimizer"
    )
    decay_fraction: Annotated[Fraction, Needs(("training.schedule", "wsd"))] = field(
        0.2,
        "wsd: fraction of the steps in the final decay",
        group="optimizer",
    )
    weight_decay: NonNegative = field(
        0.1, "decoupled weight decay, of matrices only", group="optimizer"
    )
    cautious_decay: Annotated[bool, Needs(("training.weight_decay", nonzero))] = field(
        False,
        "decay only the weights that the update also moves toward zero",
        group="optimizer",
    )
    beta1: Annotated[
        float, Field(ge=0, lt=1), Needs(("training.optimizer", differs("adafactor")))
    ] = field(
        0.9,
        "AdamW, Lion: decay of the first moment; sgd: Nesterov momentum",
        group="optimizer",
    )
    beta2: Annotated[
        float, Field(ge=0, lt=1), Needs(("training.optimizer", one_of("adamw", "muon", "lion")))
    ] = field(
        0.95,
        "AdamW: decay of the second moment; Lion: decay of its momentum",
        group="optimizer",
    )
    ema: Annotated[float, Field(ge=0, lt=1)] = field(
        0.0,
        "decay of a moving average of the weights, which is"
        " evaluated, sampled and exported (0: none)",
        group="optimizer",
    )
    grad_clip: NonNegative = field(
        1.0, "maximum global gradient norm (0: no clipping)", group="optimizer"
    )
    z_loss: Annotated[
        NonNegative, Needs(("training.objective", one_of("next_token", "sft", "distill")))
    ] = field(
        0.0,
        "weight of the penalty on the squared log-normalizer",
        group="objective",
    )
    eval_every: Count = field(250, "steps between evaluations", group="evaluation")
    eval_tokens: Count | None = field(
        None, "validation tokens per evaluation (null: all)", group="evaluation"
    )
    checkpoint_every: Count | None = field(
        None, "steps between checkpoints (null: at each evaluation)", group="evaluation"
    )
    sample_every: Count | None = field(
        None, "steps between text samples (null: none)", group="evaluation"
    )
    sample_prompt: Annotated[str, Needs(("training.sample_every", is_set))] = field(
        "",
        "prompt of the samples (empty: a line break)",
        group="evaluation",
    )
    keep_last: Count = field(
        2,
        "number of latest checkpoints to keep, at least 2, in addition to the best one",
        group="evaluation",
    )
    patience: Count | None = field(
        None,
        "stop after this many evaluations without a better loss (null: never)",
        group="evaluation",
    )
    init_from: str | None = field(
        None,
        "run directory that provides the starting weights (null: random weights)",
        group="objective",
    )
    nan_policy: Literal["stop", "skip", "rewind"] = field(
        "stop",
        "on a NaN or Inf in loss or gradient: stop, skip the update, or"
        " rewind to a checkpoint and skip past it",
        group="optimizer",
    )
    deterministic: bool = field(
        False,
        "make training on a GPU bitwise reproducible, but slower (on CPU and TPU it always is)",
        group="batches",
    )
