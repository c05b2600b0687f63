"""The features that the settings of a request choose. To add one, write its module and add it to
`FEATURES`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dantinox.config import Config
from dantinox.generation.decode.features import Feature, Features
from dantinox.generation.decode.guidance import has_guidance, row_pairs


class RequestFeature(NamedTuple):
    """A feature that requests may use.

    Attributes:
      name: requests with different names of features have different programs.
      is_on: whether a request with these settings uses it.
      of_rows: returns the feature of each row of a sample, given the places of its rows in the
        batch: first the main row, then those that follow it. Rows that follow may be missing.
    """

    name: str
    is_on: Callable[[Config], bool]
    of_rows: Callable[[Config, Sequence[int]], Sequence[Feature]]


FEATURES = (RequestFeature("guidance", has_guidance, row_pairs),)


def feature_names(config: Config) -> tuple[str, ...]:
    """Returns the names of the features that a request with these settings uses."""
    return tuple(feature.name for feature in FEATURES if feature.is_on(config))


def row_features(config: Config, rows: Sequence[int]) -> list[Features]:
    """Returns the features of each row of a sample, given the places of its rows in the batch."""
    columns = [feature.of_rows(config, rows) for feature in FEATURES if feature.is_on(config)]
    return [tuple(column[number] for column in columns) for number in range(len(rows))]
