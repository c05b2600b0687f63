"""What tests of several rooms use: a run directory to generate from."""

import numpy as np
import pytest

CIRCLE = "aè€😀b\nc"  # thirteen bytes, no two alike: one to four bytes per character


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory):
    """A run whose greedy text goes round and round the bytes of `CIRCLE`; any other byte leads to "a"."""
    from flax import nnx

    from dantinox.config import TokenizerSection, build_config
    from dantinox.model import Transformer
    from dantinox.run import create_run, save_config, save_weights
    from dantinox.text import train_tokenizer

    run = create_run(tmp_path_factory.mktemp("runs") / "circle")
    tokenizer = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
    size = {"dim": 32, "n_heads": 4, "kv_heads": 2, "num_blocks": 2, "hidden_dim": 32, "max_context": 128}
    config = build_config(
        {"model": size | {"weight_tying": False, "dtype": "float32"}, "tokenizer": {"tokenizer_type": "byte"}}
    )
    V = tokenizer.vocab_size
    model = nnx.eval_shape(lambda: Transformer(config.architecture(V), rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)
    tree = _filled(nnx.to_pure_dict(nnx.state(model)), lambda shape: 0.02 * random.standard_normal(shape))
    embed_VD = random.standard_normal((V, 32))
    embed_VD /= np.linalg.norm(embed_VD, axis=1, keepdims=True)
    successor_V = np.full(V, tokenizer.encode("a")[0])
    ids = tokenizer.encode(CIRCLE)
    successor_V[ids] = np.roll(ids, -1)
    head_DV = np.zeros((32, V))
    np.add.at(head_DV.T, successor_V, 2 * embed_VD)
    # Where many lead to one, only the circle's own is listed: "a" is what wins when nothing else does.
    for token in set(range(V)) - set(ids):
        head_DV[:, successor_V[token]] -= 2 * embed_VD[token]
    tree["embed"], tree["head"]["kernel"] = embed_VD, head_DV
    save_config(run, config)
    save_weights(run.weights, tree)
    tokenizer.save(run.tokenizer)
    return run.path


def _filled(tree, draw):
    if isinstance(tree, dict):
        return {key: _filled(value, draw) for key, value in tree.items()}
    return draw(tree.shape) if len(tree.shape) > 1 else np.ones(tree.shape)
