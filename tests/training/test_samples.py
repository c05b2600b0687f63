"""Text samples: their errors are raised before the first step."""

import pytest

from dantinox.config import Config, TokenizerSection, UserError, build_config
from dantinox.generation import load
from dantinox.text import Tokenizer, train_tokenizer
from dantinox.training.starting_point import resume_config
from dantinox.training.text_samples import make_sampler
from tests.error_texts import ERRORS


def letters(text: str) -> Tokenizer:
    return train_tokenizer(TokenizerSection(tokenizer_type="char"), lambda: iter([text]))


def settings(base: Config | None = None, **changed) -> Config:
    tree = {} if base is None else base.model_dump()
    return build_config(
        tree,
        {"training.sample_every": 5} | {key.replace("__", "."): v for key, v in changed.items()},
    )


def test_no_sampler_without_sample_every():
    assert make_sampler(build_config({}), letters("abc")) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"training__sample_prompt": "é"},
            r"training\.sample_prompt: the character 'é' \(U\+00E9\) at position 0 .* not in",
        ),
        (
            {"training__sample_prompt": "abc", "model__max_context": 3},
            "must have fewer tokens than model.max_context = 3, got 4",
        ),
        (
            {"generation__allowed_tokens": [999]},
            r"generation\.allowed_tokens must hold token ids in \[0, 6\), got 999",
        ),
        ({"generation__banned_tokens": ["é"]}, "generation.banned_tokens: the character 'é'"),
    ],
)
def test_errors_of_samples_are_raised_before_training(changed, message):
    with pytest.raises(UserError, match=message):
        make_sampler(settings(**changed), letters("abc"))


def test_vocabulary_without_a_line_break_starts_from_its_bos_token():
    assert make_sampler(settings(), letters("abc")) is not None
    tree = letters("abc").to_json().replace("<bos>", "<other>")
    with pytest.raises(UserError, match=ERRORS["must_be_set_the_vocabulary"]):
        make_sampler(settings(), Tokenizer(tree))


@pytest.mark.slow
def test_samples_need_no_draft_model(run_dir):
    model = load(run_dir)
    drafts = {"generation.speculation": "draft", "generation.draft_run": str(run_dir)}
    config = build_config(model.config.model_dump(), drafts | {"training.sample_every": 5})
    sampler = make_sampler(config, model.tokenizer)
    assert sampler is not None and sampler(model.model)


@pytest.mark.slow
def test_samples_need_no_calibration(run_dir):
    """There is no calibration during training, so samples use the preset `guide`."""
    run = load(run_dir)
    own = {"strategy": "entropy", "temperature": 5.0, "max_new_tokens": 6, "n": 2}
    given = {f"generation__{key}": value for key, value in own.items()}
    config = settings(
        run.config, training__sample_prompt="a", router__router_preset="calibrated", **given
    )
    guide = run.generate("a", **own | {"router_preset": "guide", "n": 1}, seed=config.training.seed)
    assert make_sampler(config, run.tokenizer)(run.model) == "a" + guide.text


@pytest.mark.slow
def test_samples_ignore_the_cache_budget_of_the_run(run_dir):
    run = load(run_dir)
    config = settings(
        run.config, training__sample_prompt="a", kv__budget=0.2, generation__max_new_tokens=40
    )
    assert (
        make_sampler(config, run.tokenizer)(run.model)
        == "a" + run.generate("a", max_new_tokens=40, seed=42).text
    )


def test_sample_prompt_may_change_on_resume():
    assert (
        resume_config(settings(), settings(training__sample_prompt="a")).training.sample_prompt
        == "a"
    )
