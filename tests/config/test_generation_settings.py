"""Sampling settings: orders, presets, conflicts, and lists of tokens from YAML, flags and JSON."""

from pathlib import Path
from typing import Literal, get_type_hints

import pytest

from dantinox.config import (
    Config,
    GenerationSection,
    KVSection,
    UserError,
    build_config,
    dump_config,
    load_config,
    overlay,
)
from dantinox.config.flag_values import overrides
from dantinox.config.flags import Parser, add_config_flags
from dantinox.config.generation_settings import (
    PRESETS,
    ROUTED_STEPS,
    active_steps,
    kobold_order,
    step_order,
)
from dantinox.config.router_settings import RouterSection, router_bases
from dantinox.config.sampling_steps import SETTINGS, STEPS
from tests.error_texts import ERRORS

BAN = -float("inf")


SWITCHES = {key for step in STEPS.values() for key in step.on}
REFINES = [key for key in SETTINGS if key not in SWITCHES]


def section(**values):
    return build_config(
        {}, {f"generation.{key}": value for key, value in values.items()}, origin=""
    ).generation


def given(*argv):
    parser = Parser()
    add_config_flags(parser, ("generation",))
    return build_config({}, overrides(parser.parse(list(argv)))).generation


REFUSED = {
    "a step the preset lacks": (
        {"preset": "hf", "top_a": 0.2},
        "generation.top_a cannot be used with generation.preset hf",
    ),
    "two of them": (
        {"preset": "vllm", "dry_multiplier": 1, "xtc_probability": 1},
        (
            "generation.dry_multiplier and generation.xtc_probability cannot be used with"
            " generation.preset vllm"
        ),
    ),
    "mirostat in hf": (
        {"preset": "hf", "mirostat": 2},
        "generation.mirostat cannot be used with generation.preset hf",
    ),
    "a step the list lacks": (
        {"sampler_order": ["top_k"], "top_p": 0.5},
        "top_p cannot be used with generation.sampler_order",
    ),
    "an unknown preset": ({"preset": "ooba"}, "generation.preset must be one of default, hf, vllm"),
    "codes without kobold": (
        {"sampler_order": [6, 0, 1, 2, 3, 4, 5]},
        "may hold codes only with generation.preset kobold or koboldcpp, got default",
    ),
    "too few codes": (
        {"preset": "kobold", "sampler_order": [0, 1]},
        "must be a permutation of 0…5 or 0…6, got [0, 1]",
    ),
    "a code twice": (
        {"preset": "kobold", "sampler_order": [0, 0, 1, 2, 3, 4, 5]},
        "must be a permutation",
    ),
    "a negative code": (
        {"preset": "kobold", "sampler_order": [-1, 0, 1, 2, 3, 4, 5]},
        "must be a permutation",
    ),
    "an unknown step": (
        {"sampler_order": ["top_k", "topp"]},
        "names among encoder_repetition_penalty",
    ),
    "codes and names": ({"sampler_order": ["top_k", 3]}, "names among encoder_repetition_penalty"),
    "a step twice": (
        {"sampler_order": ["top_k", "top_k"]},
        "must name each step once, got top_k, top_k",
    ),
    "an edit in the order": (
        {"sampler_order": ["logit_bias"]},
        "names among encoder_repetition_penalty",
    ),
    "names in a preset": (
        {"preset": "hf", "sampler_order": ["top_k"]},
        "with step names excludes generation.preset hf",
    ),
    "mirostat before others": ({"sampler_order": ["mirostat", "top_k"]}, "must have mirostat last"),
    "adaptive_p before mirostat": (
        {"sampler_order": ["adaptive_p", "mirostat"]},
        "must have adaptive_p last",
    ),
    "adaptive_p before others": (
        {"sampler_order": ["adaptive_p", "top_k"]},
        "must have adaptive_p last",
    ),
    "adaptive_p and mirostat": (
        {"adaptive_target": 0.3, "mirostat": 2},
        "generation.adaptive_target must be negative with generation.mirostat, got 0.3",
    ),
    "adaptive_p in vllm": (
        {"preset": "vllm", "adaptive_target": 0},
        "cannot be used with generation.preset vllm",
    ),
    "p_less left out of an order": (
        {"sampler_order": ["top_k"], "p_less": "norm"},
        "generation.p_less cannot be used with",
    ),
    "the watermark in an order": ({"sampler_order": ["top_k", "synthid"]}, "names among"),
    "a negative key": ({"watermark_keys": [-1]}, "generation.watermark_keys must be a list"),
    "33 keys": ({"watermark_keys": list(range(33))}, "generation.watermark_keys must be a list"),
    "n-grams of one": (
        {"watermark_keys": [1], "watermark_ngram": 1},
        "generation.watermark_ngram must be an integer in [2, 16]",
    ),
    "target above one": ({"adaptive_target": 1.1}, "generation.adaptive_target must be"),
    "skew": ({"skew": 11}, "generation.skew must be a number in [-10, 10]"),
    "an order that is none": (
        {"sampler_order": 3.5},
        "generation.sampler_order must be a list (each an integer, or text), or null",
    ),
    "low above high": (
        {"dynatemp_low": 2, "dynatemp_high": 1.5},
        "dynatemp_low must be at most generation.dynatemp_high, got 2",
    ),
    "two temperatures": (
        {"temperature": 0.5, "dynatemp_high": 2},
        "must be 1 with generation.dynatemp_low and dynatemp_high, got 0.5",
    ),
    "a slope without a range": (
        {"repetition_penalty": 1.2, "repetition_slope": 1},
        "generation.repetition_slope has no effect while generation.repetition_range is 0",
    ),
    "ties of nothing": (
        {"ties": "all"},
        (
            "no effect while generation.top_k is null and generation.top_p is null and"
            " generation.typical is 1.0"
        ),
    ),
    "mirostat 3": ({"mirostat": 3}, "generation.mirostat must be one of 0, 1, 2, got 3"),
    "xtc above one": (
        {"xtc_probability": 1, "xtc_threshold": 1.6},
        "generation.xtc_threshold must be a number in [0, 1]",
    ),
    "a step of a sequence alone": (
        {"sequence_bias": ["ab"]},
        "generation.sequence_bias must be a list (each text, or a list",
    ),
    "a step that is no pair": ({"sequence_bias": [1]}, "generation.sequence_bias must be a list"),
    "a bias that is no pair": ({"logit_bias": [1]}, "generation.logit_bias must be a mapping"),
    "a sequence of nothing": (
        {"sequence_bias": [[[], 1.0]]},
        "generation.sequence_bias must be a list",
    ),
    "an empty sequence": ({"sequence_bias": {"": 1.0}}, "generation.sequence_bias must be a list"),
    "infinite sigma": (
        {"top_n_sigma": float("inf")},
        "generation.top_n_sigma must be a number, got inf",
    ),
    "infinite penalty": (
        {"presence_penalty": BAN},
        "generation.presence_penalty must be a number, got -inf",
    ),
    "curve above three": (
        {"smoothing_factor": 1, "smoothing_curve": 3.5},
        "generation.smoothing_curve must be a number in [1, 3]",
    ),
    "a DRY base below one": (
        {"dry_multiplier": 1, "dry_base": 0.5},
        "generation.dry_base must be a number ≥ 1",
    ),
    "a length of zero": (
        {"dry_multiplier": 1, "dry_allowed_length": 0},
        "generation.dry_allowed_length must be an integer in [1,",
    ),
    "an empty breaker": (
        {"dry_multiplier": 1, "dry_breakers": [""]},
        "generation.dry_breakers must not hold an empty string",
    ),
    "a watermark key twice": (
        {"watermark_keys": [5, 6, 5]},
        "generation.watermark_keys must hold different numbers, got 5 twice",
    ),
    "a bias that is text": (
        {"logit_bias": {"a": "x"}},
        "generation.logit_bias must be a mapping (each a number), got 'x'",
    ),
    "a bias of +inf": (
        {"logit_bias": {"a": -BAN}},
        "generation.logit_bias must be a mapping (each a number), got inf",
    ),
    "a bias without a token": ({"logit_bias": 3}, "generation.logit_bias must be a mapping"),
    "a negative id": (
        {"banned_tokens": [-1]},
        "generation.banned_tokens must be a list (each an integer in [0, 2^31), or text)",
    ),
    "a fraction as id": ({"allowed_tokens": [1.5]}, "generation.allowed_tokens must be a list"),
    "an empty word": (
        {"bad_words": [""]},
        "generation.bad_words must be a list (each text, or a list",
    ),
    "a word of no tokens": ({"bad_words": [[]]}, "generation.bad_words must be a list"),
    "words that are a number": ({"bad_words": 7}, "generation.bad_words must be a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_conflicting_settings_are_one_sentence(name):
    values, words = REFUSED[name]
    with pytest.raises(UserError) as error:
        section(**values)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("key", REFINES)
def test_settings_of_an_inactive_step_are_refused(key):
    other = {
        "dynatemp_exponent": 2.0, "smoothing_curve": 1.5, "top_p_rule": "exclusive", "ties": "all",
        "xtc_threshold": 0.3, "mirostat_tau": 3.0, "mirostat_eta": 0.2, "repetition_range": 5,
        "repetition_slope": 1.0, "repetition_scope": "output", "top_h_rule": "cumulative",
        "adaptive_decay": 0.5, "watermark_ngram": 4, "presence_scope": "all", "dry_base": 2.0,
        "dry_allowed_length": 3, "dry_range": 9, "dry_breakers": [4],
    }  # fmt: skip
    with pytest.raises(UserError, match=rf"generation\.{key} has no effect while generation\."):
        section(**{key: other[key]})


def test_steps_are_off_by_default_and_presets_order_known_steps():
    assert active_steps(GenerationSection()) == frozenset()
    for order in PRESETS.values():
        assert len(set(order)) == len(order) and set(order) <= set(PRESETS["default"])
    everything = section(
        top_k=-1,
        top_p=1,
        top_n_sigma=-2,
        no_repeat_ngram=0,
        xtc_probability=0,
        typical=1,
        tail_free=1,
        temperature=1,
    )
    assert active_steps(everything) == frozenset(), "all steps are off"


def test_kobold_orders():
    codes = ("repetition_penalty", "top_k", "top_a", "top_p", "tail_free", "typical", "temperature")
    assert (
        step_order("kobold", None)
        == codes
        == kobold_order([6, 0, 1, 2, 3, 4, 5])
        == kobold_order([0, 1, 2, 3, 4, 5])
    )
    assert step_order("kobold", (5, 4, 3, 2, 1, 0)) == (codes[0], *reversed(codes[1:]))
    assert step_order("koboldcpp", None) == (
        "dry", "repetition_penalty", "presence_frequency_penalty", "top_k", "top_a", "tail_free",
        "typical", "top_p", "min_p",
        "dynamic_temperature",
        "temperature", "smoothing", "top_n_sigma", "xtc", "mirostat_v1", "mirostat_v2",
        "adaptive_p",
    )  # fmt: skip
    assert step_order("default", ("p_less", "adaptive_p")) == (
        "p_less",
        "p_less_norm",
        "adaptive_p",
    )
    assert step_order("default", ("mirostat", "adaptive_p")) == (
        "mirostat_v1",
        "mirostat_v2",
        "adaptive_p",
    )
    assert step_order("default", ("top_p", "mirostat")) == ("top_p", "mirostat_v1", "mirostat_v2")
    for wrong in ([True, 0, 2, 3, 4, 5, 6], ["6", 0, 1, 2, 3, 4, 5]):
        with pytest.raises(ValueError, match=ERRORS["permutation"]):
            kobold_order(wrong)


def test_flags_of_lists_and_orders():
    assert given("--sampler_order", "6,0,1,2,3,4,5", "--preset", "kobold").sampler_order == (
        6,
        0,
        1,
        2,
        3,
        4,
        5,
    )
    assert given("--sampler_order", "top_k,min_p", "temperature").sampler_order == (
        "top_k",
        "min_p",
        "temperature",
    )
    assert given("--logit_bias", "17=-inf", "e=2", "==1").logit_bias == {
        "17": BAN,
        "e": 2.0,
        "=": 1.0,
    }
    assert given("--banned_tokens", r"\n", "12").banned_tokens == ("\n", "12")
    assert given("--sequence_bias", r"a b=-1.5", r"\n=-inf").sequence_bias == (
        ("a b", -1.5),
        ("\n", BAN),
    )
    assert given("--bad_words", "a b", "c").bad_words == ("a b", "c")
    assert given("--bad_words", "a b").bad_words == ("a b",)
    assert given("--mirostat", "2").mirostat == 2 and given("--preset", "hf").preset == "hf"
    assert given("--dry_multiplier", "0.8", "--dry_breakers", r"\n", ":").dry_breakers == (
        "\n",
        ":",
    )
    for argv in (
        ["--logit_bias", "17"],
        ["--logit_bias", "17=x"],
        ["--sampler_order", "7"],
        ["--mirostat", "two"],
    ):
        with pytest.raises(UserError, match=argv[0].lstrip("-")):
            given(*argv)


def test_biases_are_unchanged_by_yaml(tmp_path):
    config = Config(
        generation=section(
            logit_bias={"17": None, "e": -3},
            bad_words=["a", [1, 2]],
            sampler_order="top_k",
            sequence_bias=[["ab", None], [[1, 2], 3]],
        )
    )
    (tmp_path / "c.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "c.yaml") == config
    assert config.generation.logit_bias == {"17": BAN, "e": -3.0}


AS_FLAGS = {
    "dynatemp_low": (["0.5"], 0.5),
    "dynatemp_high": (["1.5"], 1.5),
    "smoothing_factor": (["0.3"], 0.3),
    "top_k": (["-1"], -1),
    "top_p": (["0.9"], 0.9),
    "min_p": (["0.1"], 0.1),
    "top_a": (["2"], 2.0),
    "tail_free": (["0.9"], 0.9),
    "typical": (["0"], 0.0),
    "epsilon_cutoff": (["3e-4"], 3e-4),
    "eta_cutoff": (["0.1"], 0.1),
    "top_n_sigma": (["-1"], -1.0),
    "mirostat": (["1"], 1),
    "xtc_probability": (["1"], 1.0),
    "min_k": (["3"], 3.0),
    "p_less": (["norm"], "norm"),
    "top_h": (["0.4"], 0.4),
    "skew": (["-0.5"], -0.5),
    "adaptive_target": (["0.4"], 0.4),
    "watermark_keys": (["3", "17"], (3, 17)),
    "encoder_repetition_penalty": (["1.1"], 1.1),
    "repetition_penalty": (["1.1"], 1.1),
    "presence_penalty": (["-0.5"], -0.5),
    "frequency_penalty": (["-2"], -2.0),
    "no_repeat_ngram": (["3"], 3),
    "dry_multiplier": (["0.8"], 0.8),
    "preset": (["hf"], "hf"),
    "logit_bias": (["a=-1.5"], {"a": -1.5}),
    "allowed_tokens": (["a", "3"], ("a", "3")),
    "banned_tokens": (["3"], ("3",)),
    "bad_words": (["a b"], ("a b",)),
    "sequence_bias": (["a b=2"], (("a b", 2.0),)),
    "stop_token_ids": (["3"], ("3",)),
    "min_tokens": (["4"], 4),
    "sampler_order": (["top_k"], ("top_k",)),
}


@pytest.mark.parametrize("key", AS_FLAGS)
def test_every_step_has_a_flag(key):
    texts, value = AS_FLAGS[key]
    wants = {"dynatemp_low": ["--dynatemp_high", "1.5"]}.get(key, [])
    assert getattr(given(f"--{key}", *texts, *wants), key) == value


DRAFT_SETTINGS = "speculation", "draft_run", "draft_tokens", "ngram_size"


def test_the_table_of_flags_is_complete():
    refining = {*REFINES, "temperature"}
    others = {
        "max_new_tokens",
        "strategy",
        "greedy",
        "stop",
        "keep_stop",
        "ignore_eos",
        "json_whitespace",
        "banned_strings",
        "banned_regexes",
        "token_healing",
        "loop_stop",
        "loop_temperature_factor",
        "loop_max_period",
        "loop_min_repeats",
        "loop_min_tokens",
        "n",
        "seed",
        "use_cache",
        "weights",
        "matmul_dtype",
        "matmul_kernel",
        "tensor_parallel",
        "guidance_scale",
        "negative_prompt",
        "num_beams",
        "length_penalty",
        "early_stopping",
        *DRAFT_SETTINGS,
    }
    assert {*AS_FLAGS} == {*GenerationSection.model_fields} - refining - others


def overlaid(base, given, origin=""):
    return overlay(Config(generation=base), given, origin).generation


def test_overlay_replaces_values():
    """An alias, an order of names that replaces a Kobold preset, and a key with a lone
    surrogate.
    """
    base = section(mirostat=2, mirostat_tau=3.0)
    assert overlaid(base, {"mirostat": 0, "max_generations": 7}) == section(max_new_tokens=7)
    with pytest.raises(UserError, match=ERRORS["an_alias_of"]):
        overlaid(base, {"max_generations": 7, "max_new_tokens": 7})
    kobold = section(preset="kobold", sampler_order=[5, 4, 3, 2, 1, 0], top_k=9)
    assert overlaid(kobold, {"sampler_order": ["top_k"]}) == section(
        sampler_order=["top_k"], top_k=9
    )
    assert overlaid(kobold, {"sampler_order": [0, 1, 2, 3, 4, 5]}).preset == "kobold"
    with pytest.raises(UserError, match=ERRORS["with_step_names_excludes"]):
        overlaid(kobold, {"sampler_order": ["top_k"], "preset": "hf"})
    with pytest.raises(UserError, match=ERRORS["which_has_no_such_step"]):
        overlaid(section(top_a=0.3), {"preset": "hf"})
    with pytest.raises(UserError, match=ERRORS["valid_unicode_text_got_ud800"]):
        overlaid(base, {"\ud800": 1}, "line 3")


def test_overlay_switches_between_router_and_chain():
    """Settings of both sections by name; another strategy resets the settings that only the old one
    uses.
    """
    base = build_config({"generation": {"greedy": True, "top_p": 0.8}})
    routed = overlay(base, {"strategy": "entropy", "low_entropy": 0.3, "temperature": 0.9})
    assert (routed.generation.greedy, routed.generation.top_p, routed.generation.temperature) == (
        False,
        0.8,
        0.9,
    )
    assert routed.router == RouterSection(low_entropy=0.3)
    assert overlay(routed, {"seed": 3}).router.low_entropy == 0.3
    own = overlay(
        routed, {"clarify_token": 3, "clarify_cooldown": 5, "adaptive_top_k_agreement": 1}
    )
    assert overlay(own, {"clarify_token": None, "use_attention": False}).router == RouterSection(
        low_entropy=0.3, use_attention=False
    )
    spelt = overlay(routed, {"temperature": 1, "min_p": 0})
    assert (spelt.router.base_temperature, spelt.router.base_min_p) == (1.0, 0.0)
    for key, own, new in (
        ("temperature", 0.9, 0.5),
        ("top_p", 0.8, 0.5),
        ("top_k", 7, 9),
        ("min_p", 0.2, 0.1),
    ):
        asked = overlay(routed, {key: own})
        rebased = overlay(asked, {f"base_{key}": new})
        assert (
            router_bases(**{name: getattr(asked.generation, name) for name in ROUTED_STEPS})[
                f"base_{key}"
            ]
            == own
        )
        assert f"base_{key}" not in router_bases(
            **{name: getattr(rebased.generation, name) for name in ROUTED_STEPS}
        )
        assert getattr(rebased.router, f"base_{key}") == new, (
            "a given value replaces the base value of the run"
        )
        assert overlay(rebased, {key: own}).router == routed.router
    chain = overlay(routed, {"strategy": "chain"})
    assert (chain.router, chain.generation.temperature) == (RouterSection(), 0.9)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"low_entropy": 0.3},
            "router.low_entropy has no effect while generation.strategy is chain",
        ),
        (
            {"strategy": "entropy", "typical": 0.5},
            "generation.typical cannot be used with generation.strategy entropy",
        ),
        (
            {"strategy": "entropy", "mirostat": 2},
            "generation.mirostat cannot be used with generation.strategy entropy",
        ),
        (
            {"strategy": "entropy", "preset": "hf"},
            "generation.preset has no effect while generation.strategy is entropy",
        ),
        (
            {"strategy": "entropy", "sampler_order": ["top_k"]},
            "generation.sampler_order has no effect while generation.strategy is entropy",
        ),
        (
            {"strategy": "entropy", "top_k": 5, "ties": "all"},
            "generation.ties has no effect while generation.strategy is entropy",
        ),
        (
            {"strategy": "entropy", "greedy": True},
            "generation.strategy has no effect while generation.greedy is true",
        ),
        (
            {"strategy": "entropy", "temperature": 0},
            "generation.strategy has no effect while generation.temperature is 0.0",
        ),
        ({"strategy": "entropie"}, "generation.strategy must be one of chain, entropy"),
        ({"strategy": "entropy", "low_entrpy": 0.3}, "did you mean router.low_entropy?"),
        ({"strategy": "entropy", "low_entropy": -1}, "router.low_entropy must be"),
        (
            {"strategy": "entropy", "clarify_cooldown": 3},
            (
                "router.clarify_cooldown has no effect while router.clarify_token is null and"
                " router.clarify_text is null"
            ),
        ),
        (
            {"strategy": "entropy", "use_attention": False, "adaptive_top_k_agreement": 1},
            "router.adaptive_top_k_agreement has no effect while router.use_attention is false",
        ),
        ({"strategy": "entropy", "candidates": 0}, "router.candidates must be an integer"),
        (
            {"strategy": "entropy", "temperature": 0.7, "base_temperature": 0.5},
            "router.base_temperature has no effect while generation.temperature is 0.7",
        ),
        (
            {"strategy": "entropy", "adaptive_top_k_min": 200},
            "router.adaptive_top_k_min must be at most",
        ),
    ],
)
def test_settings_that_a_strategy_excludes_are_one_sentence(given, words):
    with pytest.raises(UserError) as error:
        overlay(Config(), given)
    assert words in str(error.value)


@pytest.mark.parametrize("given", [{"greedy": True}, {"temperature": 0}])
def test_greedy_overrides_the_router_of_a_run_with_a_warning(given):
    run = build_config(
        {"generation": {"strategy": "entropy", "top_p": 0.8}, "router": {"low_entropy": 0.3}}
    )
    (key, value), *_ = given.items()
    with pytest.warns(UserWarning) as reported:
        config = overlay(run, given)
    assert [str(line.message) for line in reported] == [
        "generation.strategy and router.low_entropy have no effect while "
        f"generation.{key} is {'true' if value is True else '0.0'} (the run's settings)"
    ]
    assert config.generation == section(**given, top_p=0.8) and config.router == RouterSection()
    assert overlay(run, {"seed": 1}).router.low_entropy == 0.3, (
        "the next request uses the router again"
    )


def test_layers_of_settings():
    """Flags override the run, and a line of a prompt file overrides both."""
    run = build_config(
        {
            "generation": {"dry_multiplier": 0.8, "dry_base": 2.0, "preset": "koboldcpp"},
            "kv": {"budget": 0.5},
        }
    )
    with pytest.warns(UserWarning, match=ERRORS["generation_dry_base_has_no_effect"]):
        config = overlay(
            run, {"dry_multiplier": 0}, "line 3", {"kv_budget_tokens": 64, "preset": "default"}
        )
    assert (config.generation, config.kv) == (GenerationSection(), KVSection(budget_tokens=64))
    with pytest.raises(UserError, match=ERRORS["generation_xtc_threshold_has_no_effect"]):
        overlay(run, {"xtc_threshold": 0.3, "preset": "default"}, "line 3")
    assert overlay(run, {"xtc_threshold": 0.1, "preset": "default"}).generation.dry_base == 2.0, (
        "a default has no prerequisites"
    )


def test_request_settings_has_every_setting_of_a_request():
    """The typed keyword arguments are the settings that `overlay` accepts, without `n`, which
    affects the return type.
    """
    from dantinox.config import generated_files, request_settings
    from dantinox.config.request_overlay import REQUEST_KEYS
    from dantinox.config.request_settings import RequestSettings

    written = Path(request_settings.__file__).read_text(encoding="utf-8")
    assert written == generated_files.request_settings(), "run `make schema`"
    assert RequestSettings.__annotations__.keys() == {name for name in REQUEST_KEYS if name != "n"}
    types = get_type_hints(RequestSettings)
    assert (
        types["top_k"] == int | None
        and types["ties"] == Literal["first", "all"]
        and types["min_p"] is float
    )
