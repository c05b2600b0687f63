"""Settings of compressed caches: conflicts, flags, files, and requests that override a run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.cli import evaluate, generate, measure
from dantinox.cli.common import given_settings
from dantinox.config import (
    Config,
    KVSection,
    UserError,
    build_config,
    dump_config,
    load_config,
    overlay,
    settings_of,
)
from dantinox.config.flag_values import overrides
from dantinox.config.flags import Parser, add_config_flags
from dantinox.config.sections import RUN_FILES, find_inactive
from tests.error_texts import ERRORS

OFF = "has no effect while kv.budget is null and kv.budget_tokens is null"
# For each setting a value that is not the default.
OTHER = {
    "budget": 0.2, "budget_tokens": 64, "policy": "tova", "signal": "entropy", "dtype": "int8",
    "sinks": 0, "recent": 8, "window": 8, "pool": 5, "decay": "entropy", "scale_min": 0.5,
    "scale_max": 4.0, "grouping": "mean", "calibration": "k.json",
    "layer_ratios": (1.0, 2.5),
}  # fmt: skip


@st.composite
def sections(draw):
    """Draws a valid section, in which every setting has an effect."""
    tree = {"dtype": draw(st.sampled_from(["auto", "float32", "bfloat16", "int8", "int4", "int2"]))}
    budget = draw(st.sampled_from([None, "budget", "budget_tokens"]))
    if budget is None:
        return KVSection.model_validate(tree)
    tree[budget] = draw(st.floats(1e-6, 1) if budget == "budget" else st.integers(1, 2**31 - 1))
    tree["policy"] = draw(
        st.sampled_from(
            ["snapkv+ema", "expected_attention", "kvzip", "streaming", "tova", "h2o", "random"]
        )
    )
    tree["signal"] = draw(st.sampled_from(["uniform", "entropy", "coverage", "distance", "loss"]))
    tree["layer_ratios"] = draw(st.none() | st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=4))
    tree |= {"sinks": draw(st.integers(0, 99)), "recent": draw(st.integers(1, 99))}
    if tree["policy"] == "snapkv+ema":
        tree |= {"window": draw(st.integers(1, 99)), "pool": draw(st.integers(0, 9)) * 2 + 1}
        tree["decay"] = draw(st.floats(0, 1) | st.just("entropy"))
    if tree["signal"] in ("entropy", "coverage", "distance"):
        tree |= {"scale_min": draw(st.floats(0.01, 1)), "scale_max": draw(st.floats(1, 100))}
    if tree["signal"] in ("entropy", "coverage", "distance") or tree.get("decay") == "entropy":
        tree["grouping"] = draw(st.sampled_from(["max", "mean", "min"]))
    if tree["signal"] != "uniform" or tree.get("decay") == "entropy":
        tree["calibration"] = draw(st.none() | st.just("a/kv.json"))
    return KVSection.model_validate(tree)


def given_flags(*argv, command=None):
    parser = Parser(prog="x")
    (command or add_config_flags)(parser)
    return parser.parse(list(argv))


@pytest.mark.parametrize("key", OTHER)
def test_every_setting_except_budgets_and_dtype_needs_a_budget(key):
    assert OTHER.keys() == KVSection.model_fields.keys()
    tree = {"kv": {key: OTHER[key]}}
    if key in ("budget", "budget_tokens", "dtype"):
        assert getattr(build_config(tree).kv, key) == OTHER[key]
        return
    with pytest.warns(UserWarning) as reported:
        assert build_config(tree, where={f"kv.{key}": "x.yaml, line 2"}).kv == KVSection(
            **{key: OTHER[key]}
        )
    assert [str(line.message) for line in reported] == [f"kv.{key} {OFF} (x.yaml, line 2)"]
    with pytest.raises(UserError) as error:
        build_config({}, {f"kv.{key}": OTHER[key]})
    assert str(error.value) == f"kv.{key} {OFF} (command line)"
    default = KVSection.model_fields[key].default
    assert build_config({"kv": {key: default}}).kv == KVSection(), "a default has no prerequisites"


@pytest.mark.parametrize(
    ("kv", "sentence"),
    [
        (
            {"budget": 0.2, "budget_tokens": 64},
            "kv.budget and kv.budget_tokens exclude each other: give one, got 0.2 and 64",
        ),
        *(
            (
                {"budget": 0.2, "policy": policy, key: OTHER[key]},
                f"kv.{key} has no effect while kv.policy is {policy}",
            )
            for policy in ("streaming", "tova", "h2o", "random")
            for key in ("window", "pool", "decay")
        ),
        *(
            (
                {"budget_tokens": 64, "signal": signal, key: OTHER[key]},
                f"kv.{key} has no effect while kv.signal is {signal}"
                + " and kv.decay is 0.98" * (key == "grouping"),
            )
            for signal in ("uniform", "loss")
            for key in ("scale_min", "scale_max", "grouping")
        ),
        (
            {"budget": 0.2, "signal": "uniform", "calibration": "k.json"},
            "kv.calibration has no effect while kv.signal is uniform and kv.decay is 0.98",
        ),
        ({"budget": 0.2, "pool": 4}, "kv.pool must be odd, got 4"),
        ({"budget": 0}, "kv.budget must be a number in (0, 1], or null, got 0"),
        ({"budget": 1.5}, "kv.budget must be a number in (0, 1], or null, got 1.5"),
        ({"budget": float("nan")}, "kv.budget must be a number in (0, 1], or null, got nan"),
        ({"budget": "0.2"}, "kv.budget must be a number in (0, 1], or null, got '0.2'"),
        ({"budget_tokens": 0}, "kv.budget_tokens must be an integer in [1, 2^31), or null, got 0"),
        (
            {"budget_tokens": 1.5},
            "kv.budget_tokens must be an integer in [1, 2^31), or null, got 1.5",
        ),
        (
            {"policy": "snapkv"},
            (
                "kv.policy must be one of snapkv+ema, expected_attention, kvzip, streaming, tova,"
                " h2o, random, got 'snapkv'"
            ),
        ),
        (
            {"signal": None},
            "kv.signal must be one of uniform, entropy, coverage, distance, loss, got null",
        ),
        (
            {"dtype": "int3"},
            "kv.dtype must be one of auto, float32, bfloat16, int8, int4, int2, got 'int3'",
        ),
        (
            {"budget": 0.2, "layer_ratios": []},
            "kv.layer_ratios must have one number for each layer, got []",
        ),
        ({"sinks": -1}, "kv.sinks must be an integer in [0, 2^31), got -1"),
        ({"recent": 0}, "kv.recent must be an integer in [1, 2^31), got 0"),
        ({"decay": 1.1}, "kv.decay must be a number in [0, 1], or entropy, got 1.1"),
        ({"decay": "ema"}, "kv.decay must be a number in [0, 1], or entropy, got 'ema'"),
        ({"scale_min": 0}, "kv.scale_min must be a number in (0, 1], got 0"),
        ({"scale_max": 0.5}, "kv.scale_max must be a number ≥ 1, got 0.5"),
        ({"scale_max": float("inf")}, "kv.scale_max must be a number ≥ 1, got inf"),
        ({"grouping": "sum"}, "kv.grouping must be one of max, mean, min, got 'sum'"),
        ({"calibration": ""}, "kv.calibration must be a path, got ''"),
        ({"budgets": 0.2}, "unknown key kv.budgets, did you mean kv.budget?"),
        ({"kv_policy": "tova"}, "unknown key kv.kv_policy, did you mean kv.policy?"),
    ],
)
def test_refused_settings_are_one_sentence(kv, sentence):
    with pytest.raises(UserError) as error:
        build_config({}, {f"kv.{key}": value for key, value in kv.items()}, origin="")
    assert str(error.value) == sentence


@pytest.mark.parametrize("key", ["budget", "budget_tokens", "dtype"])
def test_settings_of_the_cache_need_a_cache(key):
    with pytest.raises(
        UserError, match=rf"^kv\.{key} has no effect while generation\.use_cache is false$"
    ):
        build_config({}, {f"kv.{key}": OTHER[key], "generation.use_cache": False}, origin="")
    assert build_config({"kv": {}, "generation": {"use_cache": False}}).kv == KVSection()


def test_signal_and_decay_read_the_calibration():
    for own in ({"signal": "coverage"}, {"decay": "entropy"}):
        kv = build_config({"kv": {"budget": 0.2, "calibration": "k.json", **own}}).kv
        assert kv.compresses and kv.reads_calibration
    assert (
        not KVSection(budget=0.2, signal="uniform").reads_calibration
        and KVSection(budget=0.2).reads_calibration
    )
    assert not KVSection().compresses
    assert not KVSection(decay="entropy").reads_calibration, (
        "without a budget nothing is compressed"
    )


def test_inactive_settings_of_a_run_become_active_with_their_prerequisite():
    """Runs from the time when `uniform` was the default keep it."""
    with pytest.warns(UserWarning, match=ERRORS["kv_signal_has_no_effect"]):
        base = build_config({"kv": {"signal": "uniform"}})
    assert overlay(base, {}).kv == KVSection()
    assert overlay(base, {"kv_budget": 0.2}).kv == KVSection(budget=0.2, signal="uniform")
    assert overlay(base, {"kv_budget": 0.2, "kv_signal": "loss"}).kv == KVSection(budget=0.2)


def test_a_log_cannot_have_the_name_of_the_calibration_file():
    assert "kv_entropy.json" in RUN_FILES
    with pytest.raises(UserError, match=ERRORS["must_differ_from_each_other"]):
        build_config({"logging": {"log_file": "kv_entropy.json"}})


@settings(max_examples=25, deadline=None)
@given(sections())
def test_valid_sections_are_unchanged_by_files_and_requests(tmp_path_factory, kv):
    config = build_config({"kv": kv.model_dump()})
    assert config.kv == kv
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


@settings(max_examples=30, deadline=None)
@given(sections(), sections(), st.floats(0.01, 1), st.integers(1, 4096))
def test_properties_of_overlay(base, other, share, tokens):
    config = Config(kv=base)
    assert overlay(config, {}) == config
    assert overlay(config, settings_of(Config(kv=other))).kv == other, (
        "a complete request replaces every setting"
    )
    kept = {"dtype": base.dtype}
    assert (
        overlay(config, {"kv_budget": None}).kv
        == overlay(config, {"kv_budget_tokens": None}).kv
        == KVSection(**kept)
    )
    assert overlay(config, {"use_cache": False}).kv == KVSection(), (
        "no setting of the cache has an effect without a cache"
    )
    for key, value in (("budget", share), ("budget_tokens", tokens)):
        laid = overlay(config, {f"kv_{key}": value}).kv
        assert laid == base.model_copy(update={"budget": None, "budget_tokens": None, key: value})
    for policy in ("streaming", "tova", "h2o", "random"):
        laid = overlay(config, {"kv_budget": share, "kv_policy": policy}).kv
        assert (laid.window, laid.pool, laid.decay, laid.sinks) == (32, 7, 0.98, base.sinks)
    laid = overlay(config, {"kv_budget": share, "kv_signal": "uniform"}).kv
    assert (laid.scale_min, laid.scale_max) == (0.3, 2.5)
    assert (laid.grouping, laid.calibration) == (
        (base.grouping, base.calibration) if base.decay == "entropy" else ("max", None)
    )
    assert find_inactive(Config(kv=laid)) == {}


def test_settings_that_become_inactive_indirectly_are_reset():
    """The policy makes the decay inactive, and this makes the calibration file inactive."""
    base = Config(
        kv={
            "budget": 0.2,
            "signal": "uniform",
            "decay": "entropy",
            "grouping": "min",
            "calibration": "k.json",
        }
    )
    assert overlay(base, {"kv_policy": "h2o"}).kv == KVSection(
        budget=0.2, signal="uniform", policy="h2o"
    )


def test_overlay_keeps_the_other_sections():
    base = build_config(
        {
            "generation": {"strategy": "entropy", "seed": 3},
            "router": {"low_entropy": 0.3},
            "kv": {"budget": 1},
        }
    )
    laid = overlay(base, {"kv_budget": 0.2, "seed": 4})
    assert (laid.generation.seed, laid.router, laid.kv) == (4, base.router, KVSection(budget=0.2))
    assert overlay(laid, {"strategy": "chain"}).kv == laid.kv


@pytest.mark.parametrize(
    ("own", "given", "sentence"),
    [
        ({}, {"kv_policy": "tova"}, f"kv.policy {OFF}"),
        ({"budget": 0.2}, {"kv_budget": None, "kv_policy": "tova"}, f"kv.policy {OFF}"),
        (
            {"budget": 0.2, "policy": "tova"},
            {"kv_pool": 5},
            "kv.pool has no effect while kv.policy is tova",
        ),
        (
            {"budget": 0.2},
            {"kv_budget": 0.1, "kv_budget_tokens": 9},
            "kv.budget and kv.budget_tokens exclude each other",
        ),
        (
            {},
            {"use_cache": False, "kv_budget": 0.2},
            "kv.budget has no effect while generation.use_cache is false",
        ),
        ({}, {"kv_budget": 2}, "kv.budget must be a number in (0, 1], or null, got 2"),
        ({}, {"kv_budgets": 0.2}, "unknown key kv_budgets, did you mean kv_budget?"),
        ({}, {"kv.budget": 0.2}, "unknown key kv.budget, did you mean kv_budget?"),
        ({}, {"budget": 0.2}, "unknown key budget, did you mean kv_budget?"),
        ({}, {"policy": "tova"}, "unknown key policy, did you mean kv_policy?"),
        ({}, {"kv_heads": 3}, "unknown key generation.kv_heads, did you mean model.kv_heads?"),
    ],
)
def test_an_invalid_overlay_is_one_sentence(own, given, sentence):
    with pytest.raises(UserError) as error:
        overlay(Config(kv=own), given, "p.jsonl, line 2")
    assert str(error.value).startswith(sentence) and str(error.value).endswith(" (p.jsonl, line 2)")


def test_requests_and_flags_use_the_same_names():
    names = settings_of(Config())
    assert {f"kv_{key}" for key in OTHER} < names.keys() and not OTHER.keys() & names.keys()
    assert len(names) == sum(
        len(dict(section)) for section in (Config().generation, Config().router, Config().kv)
    )
    options = given_flags("--kv_budget", "0.2", "--kv.policy", "tova", "--max_generations", "3")
    assert given_settings(options) == {"kv_budget": 0.2, "kv_policy": "tova", "max_generations": 3}


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        ("--kv_budget 0.2", "budget", 0.2),
        ("--kv.budget 0.2", "budget", 0.2),
        ("--kv_budget 1", "budget", 1.0),
        ("--kv_budget null", "budget", None),
        ("--kv_budget_tokens 256", "budget_tokens", 256),
        ("--kv_budget .2 --kv_policy tova", "policy", "tova"),
        ("--kv_budget .2 --kv_signal entropy", "signal", "entropy"),
        ("--kv_dtype int8", "dtype", "int8"),
        ("--dtype bfloat16", "dtype", "auto"),  # the dtype of the model
        ("--kv_budget .2 --kv_layer_ratios 1 1 2.5", "layer_ratios", (1.0, 1.0, 2.5)),
        ("--kv_budget .2 --kv_layer_ratios [1,1,2.5]", "layer_ratios", (1.0, 1.0, 2.5)),
        ("--kv_budget .2 --kv_decay entropy", "decay", "entropy"),
        ("--kv_budget .2 --kv_decay 0.5", "decay", 0.5),
        ("--kv_budget .2 --kv_decay 0", "decay", 0.0),
        ("--kv_budget .2 --kv_signal loss --kv_calibration 7", "calibration", "7"),
        ("--kv_budget .2 --kv_signal loss --kv_calibration null", "calibration", None),
    ],
)
def test_flags(argv, key, value):
    read = getattr(build_config({}, overrides(given_flags(*argv.split()))).kv, key)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--budget 0.2", "unknown flag --budget, did you mean --kv_budget?"),
        ("--kv_budgets 0.2", "unknown flag --kv_budgets, did you mean --kv_budget?"),
        ("--kv-budget 0.2", "unknown flag --kv-budget, did you mean --kv_budget?"),
        ("--kv.polcy tova", "unknown flag --kv.polcy, did you mean --kv.policy?"),
        ("--kv.kv_pool 5", "unknown flag --kv.kv_pool, did you mean --kv.pool?"),
        ("--kv_cache_dtype int8", "unknown flag --kv_cache_dtype, did you mean --kv_dtype?"),
        (
            "--kv_decay null",
            "kv.decay must be a number in [0, 1], or entropy, got null (command line)",
        ),
        ("--kv_pool 5", f"kv.pool {OFF} (command line)"),
    ],
)
def test_invalid_flags(argv, sentence):
    with pytest.raises(UserError) as error:
        build_config({}, overrides(given_flags(*argv.split())))
    assert str(error.value) == sentence


def test_generate_has_cache_flags_and_explain_has_none():
    options = given_flags(
        "--run_dir", "r", "--kv_budget", "0.2", command=generate.add_generate_flags
    )
    assert given_settings(options) == {"kv_budget": 0.2}
    with pytest.raises(UserError, match=ERRORS["unknown_flag_kv_budget"]):
        given_flags("--run_dir", "r", "--kv_budget", "0.2", command=measure.add_explain_flags)


@pytest.mark.parametrize(
    "tree",
    [{"kv_budget": 0.2}, {"generation": {"kv_budget": 0.2}}, {"generation": {"budgets": 0.2}}],
)
def test_a_misplaced_setting_is_reported_with_its_section(tree):
    with pytest.raises(UserError, match=ERRORS["did_you_mean_kv_budget"]):
        build_config(tree)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            "--what router --sequences 5",
            "--sequences has no effect with --what router: it is a flag of --what kv",
        ),
        (
            "--what router --no_loss",
            "--no_loss has no effect with --what router: it is a flag of --what kv",
        ),
        (
            "--what router --output o",
            "--output has no effect with --what router: it is a flag of --what kv",
        ),
        (
            "--what router --from_results o",
            "--from_results has no effect with --what router: it is a flag of --what kv",
        ),
        (
            "--what kv --tokens 5",
            "--tokens has no effect with --what kv: it is a flag of --what router",
        ),
        (
            "--what kv --from_results o --no_loss",
            "--from_results measures nothing: leave --no_loss out",
        ),
        (
            "--what kv --from_results o --sequences 0",
            "--from_results measures nothing: leave --sequences out",
        ),
        (
            "--what kv --from_results o --length 64",
            "--from_results measures nothing: leave --length out",
        ),
        (
            "--what kv --from_results o --data_path t",
            "--from_results measures nothing: leave --data_path out",
        ),
        ("--what router --tokens 5 --data_path t --json --plot p.png", ""),
        ("--what kv --sequences 5 --no_loss --output o --data_path t --json --plot p.png", ""),
        ("--what kv --from_results o --output p --json --plot p.png", ""),
    ],
)
def test_flags_of_calibrate_depend_on_what_is_calibrated(argv, sentence):
    options = given_flags("--run_dir", "r", *argv.split(), command=measure.add_calibrate_flags)
    if not sentence:
        measure.calibration_flags(options)
        return
    with pytest.raises(UserError) as error:
        measure.calibration_flags(options)
    assert str(error.value) == sentence


def test_eval_has_all_evaluations():
    for what in ("sampling", "kv"):
        assert given_flags(what, "--run_dir", "r", command=evaluate.add_evaluate_flags).what == what
    with pytest.raises(UserError, match=ERRORS["choose_from"]):
        given_flags("cache", "--run_dir", "r", command=evaluate.add_evaluate_flags)
