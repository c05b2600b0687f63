"""`model.depth` derives sizes, batch, steps and learning rate; settings that are given win; a saved
config has the numbers.
"""

import math
from pathlib import Path

import pytest
import yaml

from dantinox import cli
from dantinox.config import Config, UserError, build_config, dump_config, load_config
from dantinox.config.depth import model_of_depth
from dantinox.config.inherited_settings import build_training
from dantinox.config.model_size import block_parameters
from dantinox.config.sections import flatten_config
from dantinox.model.parameters import abstract_model
from dantinox.run import RunDirectory, save_config


def documented_rows():
    """Returns the rows of the table in the docstring: column → cell."""
    lines = [
        line.strip(" |").split(" | ")
        for line in (model_of_depth.__doc__ or "").splitlines()
        if line.strip().startswith("|")
    ]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def weights_of_layers(dim, hidden, layers):
    """Counts by hand: queries, keys, values, output; gate, up and down."""
    return layers * (4 * dim * dim + 3 * dim * hidden)


@pytest.mark.parametrize("row", documented_rows(), ids=lambda row: f"depth {row['depth']}")
def test_the_documented_numbers_are_those_of_the_config(row):
    depth = int(row["depth"])
    config = build_config({}, {"model.depth": depth})
    m, t = config.model, config.training
    assert [m.num_blocks, m.dim, m.n_heads, m.hidden_dim, t.batch_size, t.steps] == [
        int(row[name]) for name in ("depth", "dim", "heads", "hidden_dim", "batch_size", "steps")
    ]
    weights = weights_of_layers(64 * depth, m.hidden_dim, depth)
    assert f"{weights / 1e6:.{1 if weights < 1e7 else 0}f} M" == row["weights of layers"]
    assert f"{20 * weights / 1e6:.0f} M" == row["tokens"]
    assert (m.qk_norm, m.depth, m.max_context, t.optimizer, t.muon_lr) == (
        True,
        None,
        256,
        "muon",
        0.02,
    )
    assert t.lr == float(row["lr"]) == pytest.approx(4e-3 * (m.dim / 128) ** -0.5, rel=5e-3)
    tokens = t.steps * t.batch_size * m.max_context
    assert 20 * weights <= tokens < 20 * weights + t.batch_size * m.max_context
    assert abs(math.log2(t.batch_size * 256 / math.sqrt(8 * 20 * weights))) <= 0.5, (
        "the nearest power of two"
    )
    assert t.batch_size // t.grad_accum * 256 <= 32768 and t.batch_size % t.grad_accum == 0


def test_the_documentation_has_the_same_table():
    assert [row["depth"] for row in documented_rows()] == ["2", "4", "8", "12", "20"]
    page = (
        (Path(__file__).parents[2] / "docs" / "speedrun.md")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    start = next(number for number, line in enumerate(page) if line.startswith("| depth |"))
    table = [
        line.strip()
        for line in (model_of_depth.__doc__ or "").splitlines()
        if line.strip().startswith("|")
    ]
    assert page[start : start + len(table)] == table


@pytest.mark.parametrize("depth", [2, 4, 12])
def test_the_counted_weights_are_those_of_the_model(depth):
    model = build_config({}, {"model.depth": depth}).architecture(300)
    shapes = abstract_model(model)[1]
    kernels = sum(
        leaf.size
        for name, leaf in shapes.items()
        if name.startswith("blocks/") and name.endswith("kernel")
    )
    assert (
        block_parameters(model) == kernels == weights_of_layers(64 * depth, model.hidden_dim, depth)
    )


def test_given_settings_win_and_the_others_follow_from_them():
    given = {
        "model.dim": 192,
        "model.hidden_dim": 256,
        "training.optimizer": "adamw",
        "training.batch_size": 48,
    }
    config = build_config({"model": {"depth": 3}, "training": {"tokens_per_parameter": 2.0}}, given)
    m, t = config.model, config.training
    assert (m.num_blocks, m.dim, m.n_heads, m.hidden_dim, t.batch_size) == (3, 192, 6, 256, 48)
    assert t.steps == math.ceil(2 * weights_of_layers(192, 256, 3) / (48 * 256))
    assert t.lr == pytest.approx(6e-4 * (192 / 768) ** -0.5) and t.tokens_per_parameter is None
    with pytest.warns(
        UserWarning, match=r"tokens_per_parameter has no effect while training\.steps is 5"
    ):
        config = build_config(
            {"model": {"depth": 2}, "training": {"tokens_per_parameter": 2.0}},
            {"training.steps": 5},
        )
    assert config.training.steps == 5, "a flag wins over the file"
    exact = {
        "model.depth": 2,
        "model.head_size": 16,
        "model.qk_norm": False,
        "training.lr": 0.5,
        "training.steps": 7,
    }
    config = build_config({}, exact)
    assert (
        config.model.n_heads,
        config.model.qk_norm,
        config.training.lr,
        config.training.steps,
    ) == (8, False, 0.5, 7)
    lion = build_config(
        {}, {"model.depth": 2, "training.optimizer": "lion", "training.epochs": 3.0}
    )
    assert (lion.training.lr, lion.training.steps, lion.training.epochs) == (3e-4, None, 3.0)
    latent = build_config(
        {}, {"model.depth": 2, "attention.kv_lora_rank": 16, "moe.expansion": 2.0}
    )
    assert (latent.model.qk_norm, latent.model.hidden_dim, latent.architecture(9).hidden_dim) == (
        False,
        None,
        256,
    )


def test_experts_of_a_token_count():
    experts = build_config(
        {}, {"model.depth": 2, "moe.use_moe": True, "training.tokens_per_parameter": 1.0}
    )
    weights = 2 * (4 * 128**2 + 2 * 3 * 128 * 352 + 4 * 128)  # two of four experts, and the router
    assert experts.training.steps == math.ceil(weights / (experts.training.batch_size * 256))


def test_a_saved_config_has_numbers_only(tmp_path):
    config = build_config({"model": {"depth": 4}, "training": {"tokens_per_parameter": 0.5}})
    tree = yaml.safe_load(dump_config(config))
    assert (tree["model"]["depth"], tree["training"]["tokens_per_parameter"]) == (None, None)
    assert (tree["model"]["dim"], tree["training"]["steps"]) == (256, config.training.steps)
    (tmp_path / "c.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "c.yaml") == config
    for given in (
        {"model": {"depth": 4}},
        {"model": Config.model_fields["model"].annotation(depth=4)},
    ):
        assert Config(**given) == build_config(
            given if isinstance(given["model"], dict) else {}, {"model.depth": 4}
        )
    assert flatten_config(Config()) == flatten_config(build_config({})), (
        "without a depth nothing changes"
    )


ERRORS = {
    "model.depth and model.num_blocks both set the number of layers: leave one of them out, got 4 and 6": {
        "model.num_blocks": 6
    },
    "training.tokens_per_parameter has no effect while training.steps is 9": {
        "training.steps": 9, "training.tokens_per_parameter": 1.0,
    },
    "training.epochs has no effect while training.steps is 784": {
        "training.epochs": 2.0, "training.tokens_per_parameter": 1.0,
    },
    "model.depth must be an integer in [1, 4096], or null, got 0": {"model.depth": 0},
    "model.kv_heads must divide model.n_heads, got 3 and 4": {"model.kv_heads": 3},
    "model.dim must be an integer in [1, 2^31), got 'a'": {"model.dim": "a"},
    "unknown key model.dimm, did you mean model.dim?": {"model.dimm": 3},
}  # fmt: skip


@pytest.mark.parametrize("sentence", ERRORS)
def test_errors(sentence):
    with pytest.raises(UserError) as error:
        build_config({}, {"model.depth": 4} | ERRORS[sentence])
    assert str(error.value) == f"{sentence} (command line)"


@pytest.mark.parametrize("batch_size", [2**31 - 1, 2**31 - 2])
def test_a_huge_batch_is_divided_at_once(batch_size):
    """The first number is a prime: only batches of one row divide it."""
    t = build_config({}, {"model.depth": 2, "training.batch_size": batch_size}).training
    rows = batch_size // t.grad_accum
    most = 32768 // build_config({}, {"model.depth": 2}).model.max_context
    assert rows == max(n for n in range(1, most + 1) if batch_size % n == 0)


def test_a_huge_ratio_is_one_sentence():
    with pytest.raises(UserError, match="must be an integer in") as caught:
        build_config({}, {"model.depth": 2, "training.tokens_per_parameter": 1e300})
    assert len(str(caught.value)) < 300


def test_a_ratio_without_a_depth_has_no_effect():
    with pytest.raises(
        UserError, match=r"tokens_per_parameter has no effect while model\.depth is null"
    ):
        build_config({}, {"training.tokens_per_parameter": 3.0})


def test_fine_tuning_keeps_the_size_of_the_starting_run(tmp_path):
    base = build_config({}, {"model.depth": 2})
    (tmp_path / "base").mkdir()
    save_config(RunDirectory(tmp_path / "base"), base)
    start = {"training.init_from": str(tmp_path / "base")}
    assert build_training({}, start).model == base.model
    with pytest.raises(
        UserError, match=r"model\.depth and model\.num_blocks both set the number of layers"
    ):
        build_training({}, start | {"model.depth": 2})


def test_the_flag_shows_the_numbers(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("model: {depth: 8}\n")
    assert (
        cli.main(["train", "--config", str(tmp_path / "c.yaml"), "--depth", "2", "--print_config"])
        == 0
    )
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["model"]["dim"], shown["model"]["depth"], shown["training"]["lr"]) == (
        128,
        None,
        0.00399,
    )
