"""Measures the peak memory of importing a random Llama of about 2 GB in bfloat16 shards.

    python benchmarks/import_memory.py [--gigabytes 2] [--folder DIR]

Memory that is mapped from a file does not count, since the kernel can drop it at any time.
Therefore the anonymous memory is measured: the import runs in a separate process, which samples
RssAnon in /proc/self/status every 2 ms. The value before the import is subtracted.
"""

import json
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from common import Parser

from dantinox.config import TokenizerSection
from dantinox.interop.hf import hf_folder
from dantinox.interop.source import LazyArrays, Tensor
from dantinox.text import train_tokenizer

SHARD = 256 << 20


def anonymous() -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) << 10


def write_llama(folder: Path, gigabytes: float) -> None:
    """Writes a Llama with small random weights in several files."""
    D, F, V = 2048, 5632, 32000
    layer = 2 * (4 * D * D + 3 * D * F)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": D,
        "intermediate_size": F, "vocab_size": V,
        "num_hidden_layers": max(1, round((gigabytes * 1e9 - 4 * V * D) / layer)),
        "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    shapes = {"model.embed_tokens": (V, D), "lm_head": (V, D), "model.norm": (D,)}
    for layer in range(config["num_hidden_layers"]):
        inside = {f"self_attn.{name}_proj": (D, D) for name in "qkvo"} | {
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
        }
        inside |= {
            "mlp.down_proj": (D, F),
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    kinds = {f"{name}.weight": Tensor(shape, "bfloat16") for name, shape in shapes.items()}
    noise = (0.02 * np.random.default_rng(0).standard_normal(1 << 20)).astype(ml_dtypes.bfloat16)
    hf_folder.SHARD_BYTES = SHARD
    hf_folder.write_tensors(
        folder, LazyArrays(kinds, lambda name: np.resize(noise, kinds[name].shape)), kinds
    )


def measure_import(source: Path, run_dir: Path, found) -> None:
    """Runs the import. Puts three values into the queue `found`: the anonymous memory before it,
    the peak, and the seconds.
    """
    from dantinox.interop.checkpoints import import_run
    from dantinox.interop.hf.hf_folder import open_folder

    base = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    import_run(open_folder(source), run_dir)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    found.put((base, peak, seconds))


def main() -> None:
    parser = Parser(__doc__, smoke={"gigabytes": 0.2})
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        source = Path(temporary) / "llama"
        run_dir = Path(temporary) / "run"
        source.mkdir()
        write_llama(source, options.gigabytes)
        sizes = [path.stat().st_size for path in source.glob("*.safetensors")]
        context = multiprocessing.get_context("spawn")
        found = context.Queue()
        process = context.Process(target=measure_import, args=(source, run_dir, found))
        process.start()
        base, peak, seconds = found.get(timeout=600)
        process.join()
    print(f"{sum(sizes) / 1e9:.2f} GB in {len(sizes)} files of at most {max(sizes) / 1e6:.0f} MB")
    print(
        f"anonymous memory: {base / 1e6:.0f} MB before, {peak / 1e6:.0f} MB at the peak,"
        f" {(peak - base) / 1e6:.0f} MB more"
    )
    print(
        f"{(peak - base) / max(sizes):.2f} of the largest file; {seconds:.1f} s,"
        f" {sum(sizes) / 1e9 / seconds:.2f} GB/s"
    )


if __name__ == "__main__":
    main()
