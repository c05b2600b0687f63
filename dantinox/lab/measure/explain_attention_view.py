"""Table and map of the attention weights of one head, for `dantinox explain --attention`."""

from collections.abc import Iterator

from dantinox.lab.measure.explain_attention import HeadWeights
from dantinox.report.heat_map import HeatMap
from dantinox.report.tables import clip_cells, percent, side_by_side, wrap_lines

LABEL_CELLS = 14  # of a token in the map
SINK = "sink"


def head_lines(found: HeadWeights, count: int, width: int) -> Iterator[str]:
    """Yields a table of the `count` keys with the largest weights for the last token."""
    last = found.weights[-1]
    keys = sorted(range(len(last)), key=lambda key: -last[key])[:count]
    columns = [
        ["position", *map(str, keys)],
        ["token", *(found.tokens[key] for key in keys)],
        ["weight", *(percent(last[key], 2) for key in keys)],
    ]
    yield from wrap_lines(
        [f"{_name(found)}: the largest weights of the last token of the prompt"], width, ""
    )
    yield from side_by_side(columns, front=2)
    if found.sink is not None:
        yield f"weight of the sink: {percent(found.sink[-1], 2)}"


def head_map(found: HeadWeights) -> HeatMap:
    """Returns the map of all weights, with a row per query and a column per key.

    The first column is that of the sink, if the model has one.
    """
    labels = [
        f"{clip_cells(token, LABEL_CELLS)} {position}"
        for position, token in enumerate(found.tokens)
    ]
    shares = [
        [weight if first <= key <= query else None for key, weight in enumerate(row)]
        for query, (first, row) in enumerate(zip(found.visible_from, found.weights, strict=True))
    ]
    caption = (
        f"{_name(found).capitalize()}. Each row is a query, the token that attends. Each column "
        "is a key, the token that it attends to. A cell is the attention weight in percent."
    )
    if found.sink is not None:
        shares = [[sink, *row] for sink, row in zip(found.sink, shares, strict=True)]
        caption += " The first column is the learned sink, which has a weight but no token."
    columns = labels if found.sink is None else [SINK, *labels]
    return HeatMap(labels, columns, shares, caption)


def _name(found: HeadWeights) -> str:
    return f"attention of layer {found.layer}, query head {found.head} (key head {found.key_head})"
