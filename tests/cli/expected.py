"""Outputs that several tests of the command line expect."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AROUND = "è€😀b\nca"  # the model of `run_dir` repeats this text after "a"
SUMMARY = (
    r"\d+ prompt \+ \d+ new tokens in [\d.]+ s: compile [\d.]+ s, first token [\d.]+ s, then [\d.]+"
    r" s \([\d.]+ tok/s\), "
    r"seed (\d+|\[.*\])(, cache .*)?\n"
)
KEYS = [
    "index", "prompt", "text", "tokens", "finish_reason", "prompt_tokens", "new_tokens",
    "draft_tokens", "accepted_draft_tokens", "seed", "seconds", "compile_seconds",
    "decode_tok_per_s", "cache",
]  # fmt: skip


def assert_one_sentence(outcome, *parts):
    """Asserts the exit code 2, nothing on stdout, and one line on stderr that contains all
    parts.
    """
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 400, err
    for part in parts:
        assert part in err, err
