"""Compiles the training and decoding programs of the rows for a chip that this machine does not
have.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shapes import SHAPES, Shapes, llama_config, training_config

Programs = Iterable[
    tuple[Any, Any, Any]
]  # figures, traced program and compiler options, as in `dantinox.lab.measure.plan`


def training(topology: Any, config: Any) -> Programs:
    """Yields the program of a step."""
    from dantinox.distributed import make_layout
    from dantinox.lab.measure.plan import training_programs
    from dantinox.training.step import TrainStep

    model = config.trained_architecture(config.tokenizer.vocab_size, topology.platform)
    programs = training_programs(
        config, model, TrainStep, make_layout(config, model, topology.devices)
    )
    return (planned for planned in programs if planned[0].name == "train")


def decoding(topology: Any, shapes: Shapes, batches: Sequence[int], **changes: Any) -> Programs:
    """Yields the programs of prefill and decoding for each batch."""
    from dantinox.lab.measure.plan import generation_programs

    for batch in batches:
        settings = {"generation__greedy": True, "generation__weights": "bfloat16"} | changes
        config = llama_config(shapes, **settings)
        model = config.architecture(config.tokenizer.vocab_size, topology.platform)
        yield from generation_programs(topology, config, model, batch, shapes.prompt, shapes.new)


# Row → its programs. The other rows have no program that is compiled without the device.
ROWS: dict[str, Callable[[Any, Shapes], list[Programs]]] = {
    "train_124m": lambda topology, shapes: [
        training(topology, training_config(
            "gpt2_124m", shapes.small_rows, shapes.changes
            | {"model.gradient_checkpointing": recompute}
        ))
        for recompute in (False, True)
    ],
    "decode_1b": lambda topology, shapes: [
        decoding(topology, shapes, (1,)),
        decoding(
            topology, shapes, (1,), generation__greedy=False, generation__temperature=0.8,
            generation__top_k=50, generation__top_p=0.95, generation__min_p=0.02,
        ),
    ],
    "train_1b": lambda topology, shapes: [
        training(topology, training_config(
            "llama_1b", shapes.large_rows, shapes.changes | shapes.large
            | {"model.gradient_checkpointing": True}
        ))
    ],
    "decode_batches": lambda topology, shapes: [decoding(topology, shapes, shapes.batches)],
    "low_precision": lambda topology, shapes: [
        decoding(topology, shapes, (1, shapes.batches[0]), generation__weights="int8"),
        decoding(topology, shapes, (1, shapes.batches[0]), generation__weights="int4"),
        decoding(topology, shapes, (1, shapes.batches[0]), kv__dtype="int4"),
    ],
}  # fmt: skip


def compile_rows(name: str, rows: Sequence[str], smoke: bool) -> None:
    """Compiles the programs of rows for a topology such as `gpu:h100`; prints the seconds and the
    largest memory of each.
    """
    from dantinox.config import UserError
    from dantinox.lab.measure.topology import find_topology
    from dantinox.programs import memory_usage

    try:
        topology = find_topology(name)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    memory = topology.memory or 0
    size = next(key for key, shapes in SHAPES.items() if key != "smoke" and memory >= shapes.memory)
    shapes = SHAPES["smoke" if smoke else size]
    for row in [row for row in ROWS if not rows or row in rows]:
        begin, largest = time.perf_counter(), 0
        with topology.emulated():
            for programs in ROWS[row](topology, shapes):
                for _, traced, options in programs:
                    largest = max(largest, memory_usage(topology.compile(traced, options)).peak)
        seconds = time.perf_counter() - begin
        print(f"{row:18}{seconds:6.1f} s, {largest / 1e9:.1f} GB of {memory / 1e9:.0f}", flush=True)
