"""Draws the pictures of docs/entropy.md and docs/entropy_results.md: entropy and varentropy,
positions of a model, candidates.

A calibration and a distribution are stored beside this file: no model is needed. Any calibrated run
can take their place:

    python docs/plots/entropy.py
    python docs/plots/entropy.py --run_dir runs/dante --into /tmp/pictures
"""

import argparse
import io
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sampling import HERE, INK, SHOWN, STYLE, Distribution, bars, measured, plt, write

from dantinox.lab.measure.calibrate_router import RouterCalibration
from dantinox.lab.measure.calibrate_router_view import PRESETS, draw_calibration
from dantinox.lab.measure.explain_view import ACCENT, AFTER, BEFORE

STORED = HERE / "router.json"
PICTURES = HERE.parent / "images" / "entropy"
# What a page needs of a calibration; the rest of the file belongs to its run.
KEPT = ("tokens", "vocab_size", "measured", "quantiles", "density", "shares")


def metrics(p_V: np.ndarray) -> tuple[float, float]:
    """Entropy and varentropy in bits and bits²."""
    p_V = p_V[p_V > 0]
    bits_V = -np.log2(p_V)
    H = float(p_V @ bits_V)
    return H, float(p_V @ (bits_V - H) ** 2)


def likely_token_with_tail(H: float, size: int) -> np.ndarray:
    """One likely token and equal others, with this entropy."""
    low, high = 1 / size, 1.0
    for _ in range(60):
        p = (low + high) / 2
        p_V = np.array([p] + [(1 - p) / (size - 1)] * (size - 1))
        low, high = (p, high) if metrics(p_V)[0] > H else (low, p)
    return p_V


def draw_shapes() -> Any:
    """Distributions of 256 tokens that H and V tell apart."""
    shapes = {
        "one token of 0.99": np.array([0.99] + [0.01 / 7] * 7),
        "two equal tokens": np.full(2, 0.5),
        "eight equal tokens": np.full(8, 0.125),
        "one likely token, heavy tail": likely_token_with_tail(3.0, 256),
    }
    figure, panels = plt.subplots(
        1, len(shapes), figsize=(6.8, 1.7), dpi=200, layout="constrained", sharey=True
    )
    for axes, (name, p_V) in zip(panels, shapes.items(), strict=True):
        H, V = metrics(p_V)
        shown_V = np.zeros(SHOWN)
        shown_V[: len(p_V)] = p_V[:SHOWN]
        axes.bar(np.arange(SHOWN), shown_V, color=AFTER, width=0.8)
        axes.set_title(name)
        axes.text(
            0.97,
            0.95,
            f"H = {H:.2f}\nV = {V:.2f}",
            transform=axes.transAxes,
            ha="right",
            va="top",
            fontsize=8,
        )
        axes.set_xticks([])
        axes.set_ylim(0, 1)
    more = len(shapes["one likely token, heavy tail"]) - SHOWN
    panels[-1].text(
        0.97, 0.1, f"… and {more} more", transform=panels[-1].transAxes, ha="right", va="bottom"
    )
    panels[0].set_ylabel("probability")
    figure.supxlabel("tokens, the most likely first", fontsize=6.5)
    return figure


def draw_candidates(d: Distribution, record: dict[str, Any], count: int = 10_000) -> Any:
    """What `adaptive` makes of a distribution, without attention: what the candidates are drawn
    from, and the best of them.
    """
    import jax
    import jax.numpy as jnp

    from dantinox.config.router_settings import RouterSection
    from dantinox.sampling import process_logits
    from dantinox.sampling.best_of_n import best_candidate, best_of_n
    from dantinox.sampling.entropy_router import (
        ADAPTIVE,
        Metrics,
        RouterConfig,
        logit_metrics,
        route,
    )

    figure, panels = plt.subplots(
        1, len(PRESETS), figsize=(6.8, 2.0), dpi=200, layout="constrained", sharey=True
    )
    order = d.ranked(SHOWN)
    raw_V = jnp.asarray(d.logits, jnp.float32)
    row = Metrics(*logit_metrics(raw_V))
    keys = jax.random.split(jax.random.key(1), count)
    for axes, preset in zip(panels, PRESETS, strict=True):
        section = RouterSection.model_validate({"router_preset": preset, "use_attention": False})
        config = RouterConfig.build(section, record["measured"])
        set_to, n = route(row, config), int(config.candidates)
        assert set_to.strategy == ADAPTIVE, "choose a --prompt that both presets call adaptive"
        T, p, k, m = (number.item() for number in set_to[1:])
        steps = [
            {"name": "temperature", "t": T},
            {"name": "top_k", "k": k},
            {"name": "top_p", "p": p},
            {"name": "min_p", "p": m},
        ]
        drawn_V = jnp.asarray(process_logits(raw_V[None], steps, [d.prompt_ids], [d.output_ids])[0])
        best_V = np.asarray(jax.nn.softmax(best_of_n(drawn_V, raw_V, n)))
        wins = jax.jit(
            jax.vmap(
                lambda key, x_V=drawn_V, n=n: best_candidate(x_V, raw_V, key, row, n, draws=n).token
            )
        )(keys)
        share_V = np.bincount(np.asarray(wins), minlength=len(best_V)) / count
        places = bars(axes, d, 1.0, best_V)
        axes.step(
            places,
            np.asarray(jax.nn.softmax(drawn_V))[order],
            where="mid",
            color=ACCENT,
            linewidth=0.9,
        )
        won = share_V[order] > 0
        axes.plot(
            places[won],
            share_V[order][won],
            "o",
            color=INK,
            markerfacecolor="white",
            markersize=2.6,
            markeredgewidth=0.7,
        )
        axes.set_title(f"{preset}: temperature {T:.2f}")
        boxes = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (BEFORE, AFTER)]
        names = [
            "model",
            f"best of {n} candidates, closed form",
            "drawn from",
            f"{count:,} times, by drawing {n}",
        ]
        axes.legend([*boxes, *axes.lines[-2:]], names, loc="upper right")
    panels[-1].set_ylabel("")
    return figure


def save_small(path: Path, picture: bytes) -> None:
    """A PNG of 256 colors."""
    with Image.open(io.BytesIO(picture)) as image:
        image.convert("RGB").quantize(
            256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
        ).save(path, optimize=True)


def main() -> None:
    a = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("--run_dir", type=Path, help="take calibration and distribution from this run")
    a.add_argument(
        "--prompt", default="Nel mezzo del cammin di nostra ", help="the text before the next token"
    )
    a.add_argument("--into", type=Path, default=PICTURES, help="where the pictures go")
    a.add_argument(
        "--store", action="store_true", help=f"with --run_dir: keep both as {STORED.name}"
    )
    o = a.parse_args()
    record = json.loads(
        (o.run_dir / "router.json" if o.run_dir else STORED).read_text(encoding="utf-8")
    )
    d = measured(o.run_dir, o.prompt, "") if o.run_dir else Distribution(**record["next_token"])
    if o.store:
        kept = {name: record[name] for name in KEPT} | {"next_token": asdict(d)}
        STORED.write_text(json.dumps(kept, ensure_ascii=False) + "\n", encoding="utf-8")
    o.into.mkdir(parents=True, exist_ok=True)
    known = {field.name: record.get(field.name) for field in fields(RouterCalibration)}
    save_small(o.into / "quadrants.png", draw_calibration(RouterCalibration(**known)))
    with plt.rc_context(STYLE):
        write(draw_shapes(), o.into / "shapes.png")
        write(draw_candidates(d, record), o.into / "candidates.png")


if __name__ == "__main__":
    main()
