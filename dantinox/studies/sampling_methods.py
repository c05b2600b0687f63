"""The ways of choosing tokens that `dantinox eval sampling` compares, and how much it does to compare them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dantinox.config import UserError
from dantinox.studies.statistics import chosen


class Knob(NamedTuple):
    """A number that is tuned, from its least to its most diverse value.

    Positions between them, 0 to 1, are equal ratios of the value, or of what it lacks to 1 where `of_rest` is set.
    """

    name: str
    least: float
    most: float
    of_rest: bool = False
    whole: bool = False

    def at(self, position: float) -> float:
        """The value at a position, to three digits or as a whole number."""
        least, most = (1 - x if self.of_rest else x for x in (self.least, self.most))
        value = least * (most / least) ** position
        return round(value) if self.whole else float(f"{1 - value if self.of_rest else value:.3g}")


class Method(NamedTuple):
    """A way to choose tokens: the settings that make it, and its scale, a knob or several in a row; greedy has none."""

    settings: Mapping[str, Any]
    scale: tuple[Knob, ...]

    def tuned(self, position: float) -> dict[str, float]:
        """The values of its knobs at a position of the scale, of which each knob has an equal part.

        Those passed have their most diverse value; those not yet reached are left out, as their least is the default.
        """
        parts = [position * len(self.scale) - i for i in range(len(self.scale))]
        return {knob.name: knob.at(min(part, 1.0)) for knob, part in zip(self.scale, parts, strict=True) if part >= 0}


# For the router: fewer candidates than the guide's 12 at its base temperature, and behind the last one a higher temperature.
# Temperature alone may not reach real text: the best of 12 draws leans to the likely however flat they are drawn from.
FEWER_CANDIDATES = (Knob("candidates", 12, 1, whole=True), Knob("base_temperature", 0.666, 4.0))
CALIBRATED = {"strategy": "entropy", "router_preset": "calibrated"}
# Truncations run at temperature 1, the router on its presets.
METHODS = {
    "greedy": Method({"greedy": True}, ()),
    "temperature": Method({}, (Knob("temperature", 0.4, 1.6),)),
    "top_p": Method({}, (Knob("top_p", 0.5, 0.995, of_rest=True),)),
    "min_p": Method({}, (Knob("min_p", 0.5, 0.002),)),
    "typical": Method({}, (Knob("typical", 0.5, 0.995, of_rest=True),)),
    "top_n_sigma": Method({}, (Knob("top_n_sigma", 0.2, 4.0),)),
    "router_guide": Method({"strategy": "entropy", "router_preset": "guide"}, FEWER_CANDIDATES),
    "router_calibrated": Method(CALIBRATED, FEWER_CANDIDATES),
    "router_no_attention": Method({**CALIBRATED, "use_attention": False}, FEWER_CANDIDATES),
    "router_random": Method(CALIBRATED, FEWER_CANDIDATES),
}
CONTROL, PATTERN = "router_random", "router_calibrated"  # the control draws strategies as often as its pattern takes them
COMPARED = [(router, other) for router in ("router_guide", PATTERN, "router_no_attention") for other in ("min_p", CONTROL)]
RULER = {f"temperature {t:g}": t for t in (0.3, 0.5, 0.65, 0.8, 0.95, 1.1, 1.3)}  # close enough for straight lines between them


@dataclass(frozen=True)
class Effort:
    """How much is done: prompts to test on (and as many to tune on), continuations of each, their tokens, settings tried."""

    prompts: int = 96
    seeds: int = 5
    tokens: int = 192
    trials: int = 5

    def __post_init__(self) -> None:
        for name, least, most in (("prompts", 2, 1 << 20), ("seeds", 2, 1000), ("tokens", 8, 1 << 20), ("trials", 1, 50)):
            if not least <= getattr(self, name) <= most:
                raise UserError(f"--{name} must be in [{least}, {most}], got {getattr(self, name)}")


QUICK = Effort(prompts=40, seeds=3, tokens=128, trials=3)


def chosen_methods(names: Sequence[str] | None) -> list[str]:
    """The methods of these names, in their usual order; None: all.

    Raises:
      UserError: an unknown name, or the control without its pattern.
    """
    found = chosen(names, METHODS, "sampling method")
    if CONTROL in found and PATTERN not in found:
        raise UserError(f"{CONTROL} draws strategies as often as {PATTERN} takes them: name both in --methods")
    return found
