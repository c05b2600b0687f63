"""Draws docs/images/packages.svg, from the imports of the code, and docs/images/decode_step.svg.

python docs/plots/architecture.py
"""

import ast
from collections.abc import Mapping
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "dantinox"
IMAGES = ROOT / "docs" / "images"
LEFT_OUT = {"__init__", "__main__"}
Graph = Mapping[str, set[str]]

WIDTH, BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 760, 112, 34, 24, 40
INK, LINE, FILL, GREEN = "#1f2937", "#6b7280", "#eef2ff", "#ecfdf5"


def imports() -> Graph:
    """Package → the packages that its modules import."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            others = {name.split(".")[1] for name in names if name.startswith("dantinox.")}
            modules = {
                name
                for name in others
                if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()
            }
            found.setdefault(own, set()).update(modules - {own})
    return {name: others - LEFT_OUT for name, others in found.items() if name not in LEFT_OUT}


def reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def reduced(graph: Graph) -> Graph:
    """The imports that do not follow from others: `cli` imports `config`, but also `generation`,
    which imports it.
    """
    return {
        name: {
            other
            for other in others
            if not any(other in reachable(graph, via) for via in others - {other})
        }
        for name, others in graph.items()
    }


def rows(graph: Graph) -> list[list[str]]:
    """Packages by their longest chain of imports: the first row imports nothing."""
    depth: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        depth[name] = 1 + max((depth[other] for other in graph[name]), default=-1)
    return [
        sorted(name for name, at in depth.items() if at == row)
        for row in range(max(depth.values()) + 1)
    ]


def svg(height: int, title: str, parts: list[str]) -> str:
    """A picture with a title for screen readers."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img" font-family="system-ui, sans-serif" font-size="13"'
        f' fill="{INK}">\n<title>{escape(title)}</title>\n<rect width="{WIDTH}" height="{height}"'
        ' fill="#ffffff"/>\n<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4"'
        ' markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z"'
        f' fill="{LINE}"/></marker></defs>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def box(
    x: float,
    y: float,
    text: str,
    width: float = BOX_WIDTH,
    height: float = BOX_HEIGHT,
    fill: str = FILL,
) -> str:
    lines = text.split("\n")
    first = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
    spans = "".join(
        f'<tspan x="{x + width / 2:g}" y="{first + 16 * n:g}">{escape(one)}</tspan>'
        for n, one in enumerate(lines)
    )
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}"'
        f' stroke="{LINE}"/><text text-anchor="middle">{spans}</text>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = (y1 + y2) / 2
    curve = f"M{x1:g} {y1:g} C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}"
    return f'<path d="{curve}" fill="none" stroke="{LINE}" marker-end="url(#arrow)"/>'


def packages() -> str:
    """The packages, with an arrow from each to those that it imports."""
    graph = imports()
    levels = rows(graph)[::-1]  # what imports most comes first
    place: dict[str, tuple[float, float]] = {}
    for row, names in enumerate(levels):
        left = (WIDTH - len(names) * BOX_WIDTH - (len(names) - 1) * GAP_X) / 2
        for column, name in enumerate(names):
            place[name] = left + column * (BOX_WIDTH + GAP_X), 16 + row * (BOX_HEIGHT + GAP_Y)
    arrows = [
        arrow(
            place[name][0] + BOX_WIDTH / 2,
            place[name][1] + BOX_HEIGHT,
            place[other][0] + BOX_WIDTH / 2,
            place[other][1],
        )
        for name, others in sorted(reduced(graph).items())
        for other in sorted(others)
    ]
    boxes = [
        box(x, y, name if (PACKAGE / name).is_dir() else f"{name}.py")
        for name, (x, y) in sorted(place.items())
    ]
    height = 32 + len(levels) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    return svg(height, "Packages of DantinoX and their imports", [*arrows, *boxes])


# Stages of a decoding step: text, and whether it is part of the compiled program.
STAGES = (
    ("requests in slots\ntoken ids, settings, seeds", False),
    ("embedding\nof the newest token of each row", True),
    ("layers: attention over the KV cache,\nwhich gets the new key and value; feed-forward", True),
    ("logits of the last position [B, V]", True),
    ("mask of constraints, edits,\npenalties, temperature, truncation", True),
    ("draw, from the seed and the position", True),
    ("tokens, log-probabilities, entropies", True),
    ("stop strings, end tokens, text so far", False),
    ("Delta: text, tokens, finish reason", False),
)
SIDE = "repeated for each\ntoken of a chunk,\nwithout the host"


def decode_step() -> str:
    """One step of decoding, from the slots to the delta of a request."""
    width, height, gap = 340, 46, 22
    left, parts = (WIDTH - width) / 2, []
    compiled = [n for n, (_, inside) in enumerate(STAGES) if inside]
    top, bottom = (
        16 + compiled[0] * (height + gap) - 10,
        16 + compiled[-1] * (height + gap) + height + 10,
    )
    parts.append(
        f'<rect x="{left - 24:g}" y="{top:g}" width="{width + 48}" height="{bottom - top:g}"'
        f' rx="10" fill="#f9fafb" stroke="{LINE}" stroke-dasharray="5 4"/><text x="{left - 36:g}"'
        f' y="{(top + bottom) / 2:g}" text-anchor="end">one compiled program</text>'
    )
    for number, (text, inside) in enumerate(STAGES):
        y = 16 + number * (height + gap)
        parts.append(box(left, y, text, width, height, FILL if inside else GREEN))
        if number:
            parts.append(arrow(WIDTH / 2, y - gap, WIDTH / 2, y))
    first, last = (16 + compiled[n] * (height + gap) + height / 2 for n in (0, -1))
    right = left + width
    parts.append(
        f'<path d="M{right:g} {last:g} C{right + 60:g} {last:g} {right + 60:g} {first:g} {right:g}'
        f' {first:g}" fill="none" stroke="{LINE}" marker-end="url(#arrow)"/>'
    )
    lines = "".join(
        f'<tspan x="{right + 52:g}" dy="{16 if n else 0}">{one}</tspan>'
        for n, one in enumerate(SIDE.split("\n"))
    )
    parts.append(f'<text y="{(first + last) / 2 - 16:g}">{lines}</text>')
    return svg(32 + len(STAGES) * (height + gap) - gap, "One step of decoding", parts)


PICTURES = {"packages.svg": packages, "decode_step.svg": decode_step}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
