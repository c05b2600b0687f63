"""How byte-level BPE vocabularies split text into words, by the names that GGUF has for it (`tokenizer.ggml.pre`).

The names are those of llama.cpp's `src/llama-vocab.cpp` (of July 2026). A rule is the pre-tokenizer of the publisher's
`tokenizer.json`. llama.cpp has regular expressions of its own for the same, which split some texts otherwise:
`tests/interop/tokenizers_live.py` lists where. Rules whose publisher's file is not known (`afmoe`, `chameleon`, `default`,
`jais-2`, `superbpe`, `ufakzeka`, `youtu`, and all aliases) are those of llama.cpp.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

NFC: Mapping[str, Any] = {"type": "NFC"}
WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = WORDS | {"use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # as `WORDS` splits
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
BREAKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + BREAKS
PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + BREAKS
# Words that change from capitals to small letters at most once; {0} may follow, {1} restricts the letters.
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}{1}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}{1}]+{0}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}{1}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}{1}]*{0}"
)
HAN_AND_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
HAN_AND_HANGUL = "[一-龥\u0800-一가-\ud7ff]+"
PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
# Cased letters as DeepSeek lists them.
CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3"
    "ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
SENTENCES = " ?[^(\\s|.,!?…。，、।۔،)]+"
THAI_TO_HANGUL = "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
YOUTU = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f︰-﹏]+|[ㄅ-ㄯ]+|" + HAN_AND_KANA


def _split(regex: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}


def _splits(*regexes: str) -> tuple[dict[str, Any], ...]:
    return (*map(_split, regexes), BYTES)


def _cased(endings: str, without: str = "") -> str:
    return CASED.replace("{0}", endings).replace("{1}", without)


class Rule(NamedTuple):
    """How a text becomes words.

    Attributes:
      steps: pre-tokenizers of a `tokenizer.json`, one after the other.
      whole_words: whether a word with a token of its own becomes that token whatever the merges say (`ignore_merges`).
      normalizer: the normalizer of a `tokenizer.json`.
    """

    steps: tuple[Mapping[str, Any], ...]
    whole_words: bool = False
    normalizer: Mapping[str, Any] | None = None


_LLAMA3 = _splits(ENDINGS + "|" + LETTERS + r"|\p{N}{1,3}" + REST)
_QWEN2 = ENDINGS + "|" + LETTERS + r"|\p{N}" + REST
RULES = {
    "gpt-2": Rule((WORDS,)),
    "llama-bpe": Rule(_LLAMA3, whole_words=True),
    "dbrx": Rule(_LLAMA3),
    "qwen2": Rule(_splits(_QWEN2), normalizer=NFC),
    "smollm": Rule((DIGITS, WORDS)),
    "tekken": Rule(_splits(_cased("") + r"|\p{N}" + PATHS), whole_words=True),
    "gpt-4o": Rule(_splits(_cased(ENDINGS + "?") + r"|\p{N}{1,3}" + PATHS)),
    "stablelm2": Rule(_splits(_QWEN2)),
    "qwen35": Rule(
        _splits(ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + BREAKS), normalizer=NFC
    ),
    "mpt": Rule((WORDS,), normalizer=NFC),
    "command-r": Rule((DIGITS, WORDS), normalizer=NFC),
    "deepseek-llm": Rule(
        (
            *map(_split, ("[\r\n]", rf"\s?[{CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", HAN_AND_HANGUL)),
            *(DIGITS, BYTES),
        )
    ),
    "deepseek-coder": Rule(
        (*map(_split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_HANGUL)), DIGITS, BYTES),
    ),
    "deepseek-v3": Rule(_splits(r"\p{N}{1,3}", HAN_AND_KANA, PUNCTUATED + r"[\r\n]*" + BREAKS)),
    "spark2_5": Rule(
        (*map(_split, (r"\p{N}{1,3}", HAN_AND_KANA, PUNCTUATED + r"|[\r\n]|\s+(?!\S)|\s+")), DIGITS, BYTES),
    ),
    "falcon": Rule(
        (
            *({"type": "Punctuation", "behavior": "Contiguous"}, WORDS),
            *({"type": "Digits", "individual_digits": False}, _split("[0-9][0-9][0-9]")),
        )
    ),
    "minicpm5": Rule(_splits(r"\p{N}{1,3}", ENDINGS + "|" + LETTERS + r"|\p{N}+" + REST), whole_words=True),
    "poro-chat": Rule(_splits(SENTENCES)),
    "viking": Rule(_splits(SENTENCES, r"\p{N}")),
    "bailingmoe": Rule(
        _splits(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
    ),
    "seed-coder": Rule(_splits(ENDINGS + "|" + LETTERS + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + BREAKS)),
    "ufakzeka": Rule(_splits(LETTERS + r"|\p{N}" + REST)),
    "laguna": Rule((_split(r"(?:\r?\n)+(?!\r?\n)", "MergedWithNext"), *_splits(_QWEN2))),
    "kimi-k2": Rule(_splits(r"[\p{Han}]+|" + _cased(ENDINGS + "?", r"&&[^\p{Han}]") + r"|\p{N}{1,3}" + REST)),
    "tiny_aya": Rule(_splits(r"\d{1,3}(?=(?:\d{3})*\b)", _cased(ENDINGS + "?") + r"|\p{N}{1,3}" + PATHS)),
    "superbpe": Rule(_splits(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "exaone-moe": Rule(
        _splits(
            ENDINGS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )
    ),
    "jais-2": Rule(
        _splits(
            ENDINGS + "|" + LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
            + "".join(rf"\s{{{count}}}(?!\S)|" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")) + r"\s{1}"
        )
    ),
    "youtu": Rule(_splits(YOUTU, _cased(ENDINGS + "?") + r"|\p{N}" + PATHS), whole_words=True),
    # The first expression joins a number's first digits with the text before them, and the third one separates them again.
    "afmoe": Rule(
        _splits(r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", THAI_TO_HANGUL, PUNCTUATED + r"[\r\n]*" + BREAKS)
    ),
    "chameleon": Rule(
        (
            *map(_split, ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\t\n]|    |  )", r"\p{N}")),
            *(_split(r"[\p{P}!-/:-@\[-`{-~]"), WORDS),
        )
    ),
    "default": Rule(_splits(r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}  # fmt: skip
# Further names of the rules.
ALIASES = {
    name: rule
    for rule, names in {
        "gpt-2": "phi-2 gigachat a.x-4.0 mellum jais trillion granite-docling exaone4 jina-es jina-de",
        "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano glm4 glm5",
        "dbrx": "smaug-bpe chatglm-bpe",
        "qwen2": "deepseek-r1-qwen",
        "stablelm2": "kormo f2llmv2 hunyuan solar-open grok-2 megrez",
        "smollm": "starcoder refact codeshell exaone minerva-7b mellum2",
        "mpt": "olmo",
        "gpt-4o": "llama4 kanana2 talkie minimax-m2",
        "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
        "poro-chat": "bloom gpt3-finnish",
        "bailingmoe": "bailingmoe2 llada-moe",
        "tiny_aya": "cohere2moe",
    }.items()
    for name in names.split()
}
# Names with which readers begin a text by the begin token, unless the file says otherwise.
BEGIN_BY_NAME = frozenset((
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
    "chameleon",
))  # fmt: skip
# SentencePiece's pieces with the merges of BPE: the space is ▁, and text is not split.
UNSPLIT = ("gemma4", "sarvam-moe")
