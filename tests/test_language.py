"""Names and phrases that the code and the documentation do not use, and what they use instead.

`IDENTIFIERS` and `FILE_NAMES` hold names, `PHRASES` regular expressions that ignore case. A name is
a whole Python identifier. The changelog is exempt, because it lists former names.
"""

import io
import re
import shutil
import subprocess
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT_FILES = {".py", ".md", ".ipynb", ".yaml", ".toml", ".html", ".js", ".css", ".cfg", ""}
EXEMPT = {"CHANGELOG.md", "tests/test_language.py", "LICENSE"}

# Folder → former identifier → today's. An empty folder stands for the whole repository.
IDENTIFIERS: dict[str, dict[str, str]] = {
    "": {
        "Ask": "GenerationRequest", "Gain": "ChoiceDelta", "TextChances": "CompletionLogprobs",
        "ChatChances": "ChatLogprobs", "be_gone_within": "force_exit_after",
        "_heat": "_temperature_settings", "_steered": "_mirostat_version", "Lane": "ProgramKey",
        "Way": "RowParams", "Kept": "PrefixMatch", "Gained": "SlotOutput", "Flight": "PendingChunk",
        "Spelt": "CacheKey", "_seated": "_insert_row", "_begun": "_init_row",
        "told": "a verb that names the effect", "_told": "a verb that names the effect",
        "_weighed": "matvec", "_together": "matmul", "Sharing": "Parallelism", "Fresh": "NoCache",
        "begins": "is_prefill", "Front": "StorePrefix", "Parted": "SegmentedStore",
        "meet": "barrier", "from_first": "broadcast_from_rank0", "agreed": "all_reduce_max",
        "is_first": "is_rank0", "StopTogether": "StopSync", "spares": "skip_inactive_steps",
        "since_row": "loss_since_eval", "since_line": "loss_since_log",
        "passed_over": "skipped_batches", "leave_alone": "abort_on_peer_loss",
        "_ran_to_the_end": "run_until_done", "spoken": "encode_with_loss_mask",
        "idle_among": "inactive_settings", "MAKES_ROOM": "SUPERSEDES",
        "_beside": "_staged_directory", "Leaving": "ExportBundle", "answer_for": "record_files",
        "Examinee": "LMEvalModel",
    },
    "dantinox/serve": {"Answer": "ResponseStream", "Piece": "Delta", "_problem": "event_stream"},
    "dantinox/generation": {
        "kept": "match_prefix", "Seen": "StepLogits", "_look": "forward_step",
        "_choose": "sample_step", "_read": "prefill_chunk", "products": "matmul_dtype",
    },
    "dantinox/model": {"sent": "dispatch", "returned": "combine", "products": "matmul_dtype"},
    "dantinox/config": {"products": "matmul_dtype"},
}  # fmt: skip
FILE_NAMES = {
    "serve/ask.py": "requests.py", "serve/own.py": "native.py",
    "serve/spelling.py": "token_text.py", "serve/tokens.py": "tokenize_routes.py",
    "generation/words.py": "token_settings.py",
    "generation/stopping.py": "stop_strings.py",
    "training/rehearsal.py": "dry_run.py", "training/stopping.py": "signals.py",
    "text/turns.py": "conversation_store.py", "text/pieces.py": "token_pieces.py",
    "text/packed.py": "compressed_files.py", "config/needs.py": "prerequisites.py",
}  # fmt: skip
PHRASES = {
    r"models of others": "pretrained models",
    r"text that has to be something": "constrained generation",
    r"numbers that are none": "NaN and Inf",
    r"what is learnt,? and from where": "objectives and initialization",
    r"one need not have": "hardware you do not have",
    r"need not be there": "hardware you do not have",
    r"\bdearest\b": "most expensive",
    r"makes of the token behind": "changes the next-token distribution",
    r"let the learning rate climb": "run a learning-rate range test",
    r"wants text that no token": "no token can satisfy the constraint",
    r"\bhalf a character": "an incomplete UTF-8 sequence",
    r"\bcan say its architecture": "no Transformers class represents this architecture",
    r"\bmanieth\b": "n-th",
    r"\bgives? its slots? free": "frees its slots",
    r"\bin (the )?company\b": "in a mixed batch",
    r"nobody would send": "fuzzed requests",
    r"\b(the|this) house\b": "the package layout",
    r"\b(this|each|one|the|no|every|what) rooms?\b(?! for)": "package or module",
    r"\bis told in one line": "prints one warning",
    r"\bnarrow weights\b": "quantized (int8) or bfloat16 weights",
    r"\bmatrix products\b": "matrix multiplications",
    r"\ba text takes\b": "a sequence, a request",
    r"\bwho closes\b": "closing the connection",
    r"\ba model of others\b": "a pretrained model",
    r"\bare gone on from\b": "are continued",
    r"\bis taken for right\b": "is accepted",
    r"\bspells nothing\b": "has no text",
    r"\bforetold\b": "estimated",
    r"\banew\b": "again",
    r"\bwhat a training can be told\b": "settings of a training run",
    r"\bcannot be told from\b": "does not differ from",
}


@cache
def tracked_files() -> list[str]:
    """Paths of the text files of the repository, relative to its root."""
    git = shutil.which("git")
    listed = (
        subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
        if git
        else None
    )
    if listed is not None and listed.returncode == 0:
        paths = [name for name in listed.stdout.decode().split("\0") if name]
    else:  # an unpacked archive, or no git
        paths = [
            str(path.relative_to(ROOT))
            for top in ("dantinox", "docs", "tests", "benchmarks")
            for path in (ROOT / top).rglob("*")
        ]
    return [
        name
        for name in paths
        if Path(name).suffix in TEXT_FILES and name not in EXEMPT and (ROOT / name).is_file()
    ]


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8", errors="replace")


def identifiers_of(source: str) -> dict[str, int]:
    """Every identifier of a Python source, with the line of its first use."""
    found: dict[str, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            found.setdefault(token.string, token.start[0])
    return found


def test_former_identifiers_are_not_used():
    found = []
    for name in tracked_files():
        renamed = {}
        for folder, names in IDENTIFIERS.items():
            renamed |= names if name.endswith(".py") and name.startswith(folder) else {}
        if renamed and re.search(
            rf"\b({'|'.join(renamed)})\b", text_of(name)
        ):  # perhaps in a comment
            used = identifiers_of(text_of(name))
            found += [
                f"{name}:{used[old]}: {old} → {new}" for old, new in renamed.items() if old in used
            ]
    assert found == []


def test_former_file_names_are_not_used():
    names = tracked_files()
    assert [f"{old} → {new}" for old, new in FILE_NAMES.items() if f"dantinox/{old}" in names] == []


def words_of(phrase: str) -> list[str]:
    """Returns words that each text with the phrase has. This is much faster to check than the
    pattern.
    """
    return re.findall(r"[a-z]+", re.sub(r"\\b|\([^)]*\)\??|\w\?", " ", phrase))


def find_phrase(phrase: str, text: str) -> list[int]:
    """Returns the lines of a text in lower case at which a phrase begins, also if it goes on in the
    next line.
    """
    if not all(word in text for word in words_of(phrase)):
        return []
    pattern = phrase.replace(" ", r"\s+(?:#\s+)?")
    return [text.count("\n", 0, match.start()) + 1 for match in re.finditer(pattern, text)]


def test_phrases_are_not_used():
    found = []
    for name in tracked_files():
        text = text_of(name).lower()
        found += [
            f"{name}:{line}: use: {new}"
            for old, new in PHRASES.items()
            for line in find_phrase(old, text)
        ]
    assert found == []


def test_file_names_differ_across_packages():
    """Editor tabs show file names only."""
    packages: dict[str, list[str]] = {}
    for name in tracked_files():
        if (
            name.startswith("dantinox/")
            and name.endswith(".py")
            and Path(name).name not in ("__init__.py", "__main__.py")
        ):
            packages.setdefault(Path(name).name, []).append(name)
    same = {name: paths for name, paths in packages.items() if len(paths) > 1}
    assert not same, same


def test_the_search_finds_names_and_phrases():
    assert identifiers_of("class Lane:\n    told = 1  # Way\n") == {
        "class": 1,
        "Lane": 1,
        "told": 2,
    }
    assert find_phrase(r"\banew\b", "it begins\nanew, anew.") == [2, 2]
    assert find_phrase(r"\b(the|this) house\b", "the room\n# of the\n# house") == [2]
    assert find_phrase(r"\bgives? its slots? free", "it gives its slot free") == [1]
    assert words_of(r"what is learnt,? and from where") == [
        "what",
        "is",
        "learnt",
        "and",
        "from",
        "where",
    ]
    assert words_of(r"\b(this|no) rooms?\b(?! for)") == ["room"]
