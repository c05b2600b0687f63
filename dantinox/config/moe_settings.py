"""The `moe` section: mixture of experts, and the width of the feed-forward layer."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from dantinox.config.base import Count, CountOrZero, NonNegative, Positive, Section, as_tuple, field
from dantinox.config.prerequisites import Needs, differs, nonempty

# The values of settings that `ExpertsConfig` has too.
ScoreFunction = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]

NEEDS_MOE = Needs(("moe.use_moe", True))
NEEDS_SHARED_EXPERTS = Needs(("moe.shared_experts", differs(0)))
NEEDS_EXPERT_GROUPS = Needs(("moe.n_groups", differs(1)))


class MoESection(Section):
    """Mixture of experts, and the width of the feed-forward layer."""

    use_moe: bool = field(
        False, "replace the dense feed-forward layer with experts", group="experts"
    )
    n_experts: Annotated[Count, NEEDS_MOE] = field(
        4, "experts per layer, each as wide as the feed-forward layer", group="experts"
    )
    top_k_mlp: Annotated[Count, NEEDS_MOE] = field(2, "experts per token", group="experts")
    shared_experts: Annotated[CountOrZero, NEEDS_MOE] = field(
        0, "experts that process every token, combined into one layer", group="experts"
    )
    shared_hidden_dim: Annotated[Count | None, NEEDS_MOE, NEEDS_SHARED_EXPERTS] = field(
        None,
        "width of the shared expert layer (null: shared_experts times the width of an expert)",
        group="experts",
    )
    shared_gate: Annotated[bool, NEEDS_MOE, NEEDS_SHARED_EXPERTS] = field(
        False,
        "multiply the output of the shared expert layer by sigmoid(w x)",
        group="experts",
    )
    branch_norms: Annotated[
        bool, NEEDS_MOE, NEEDS_SHARED_EXPERTS, Needs(("model.norm_placement", "both"))
    ] = field(
        False,
        "give experts and the shared layer separate norms, and the router a norm and learned scales"
        " on the residual stream",
        group="experts",
    )
    dense_layers: Annotated[tuple[CountOrZero, ...], BeforeValidator(as_tuple), NEEDS_MOE] = field(
        (),
        "indices of layers, from 0, that have a dense feed-forward layer instead of experts",
        group="experts",
    )
    dense_hidden_dim: Annotated[Count | None, NEEDS_MOE, Needs(("moe.dense_layers", nonempty))] = (
        field(
            None,
            "feed-forward width of dense_layers (null: the width of an expert)",
            group="experts",
        )
    )
    expansion: Positive | None = field(
        None,
        "feed-forward width as a multiple of dim (null: see model.hidden_dim)",
        group="experts",
    )
    score_function: Annotated[ScoreFunction, NEEDS_MOE] = field(
        "softmax",
        "function that turns router logits into scores",
        group="routing",
    )
    norm_topk_prob: Annotated[bool, NEEDS_MOE] = field(
        True, "scale the weights of a token's experts so that they sum to 1", group="routing"
    )
    routed_scaling: Annotated[Positive, NEEDS_MOE] = field(
        1.0, "factor on the weights of a token's experts", group="routing"
    )
    router_bias: Annotated[bool, NEEDS_MOE] = field(
        False, "add a bias to the router's logits", group="routing"
    )
    choice_bias: Annotated[bool, NEEDS_MOE] = field(
        False,
        "add a bias to the scores when experts are chosen, but not to their weights; only"
        " bias_update_rate changes it",
        group="routing",
    )
    n_groups: Annotated[Count, NEEDS_MOE] = field(
        1, "groups of experts; a token's experts come from top_k_groups of them", group="routing"
    )
    top_k_groups: Annotated[Count, NEEDS_MOE, NEEDS_EXPERT_GROUPS] = field(
        1, "groups per token", group="routing"
    )
    group_score: Annotated[GroupScore, NEEDS_MOE, NEEDS_EXPERT_GROUPS] = field(
        "max",
        "score of a group: the best expert (max), or the sum of the best two (top2)",
        group="routing",
    )
    alpha_balance: Annotated[NonNegative, NEEDS_MOE] = field(
        0.01, "weight of the load-balance loss, averaged over layers", group="routing"
    )
    router_z_loss: Annotated[NonNegative, NEEDS_MOE] = field(
        0.0,
        "weight of the router z-loss (squared log-normalizer of the scores), averaged over layers",
        group="routing",
    )
    bias_update_rate: Annotated[NonNegative, NEEDS_MOE] = field(
        0.0,
        "balance without a loss: step by which choice_bias rises"
        " for experts with few tokens (0: off)",
        group="routing",
    )
