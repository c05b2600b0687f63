"""Rules that split text into words for byte-level BPE, by their names in GGUF
(`tokenizer.ggml.pre`).

The names come from llama.cpp's `src/llama-vocab.cpp` (July 2026). Each rule is the pre-tokenizer of
the `tokenizer.json` that the model's publisher provides. llama.cpp uses its own regular
expressions, which split some texts differently; `tests/interop/tokenizers_live.py` lists the
differences. For names without a known `tokenizer.json` (`afmoe`, `chameleon`, `default`, `jais-2`,
`superbpe`, `ufakzeka`, `youtu`, and all aliases), the rules are llama.cpp's.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

NFC: Mapping[str, Any] = {"type": "NFC"}
BYTE_LEVEL_WORDS = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
BYTE_LEVEL = BYTE_LEVEL_WORDS | {"use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
# The same rule as `BYTE_LEVEL_WORDS`.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
BREAKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + BREAKS
PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + BREAKS
# Words in which upper case is followed by lower case at most once. {0}: an optional ending; {1}: a
# restriction of the letters.
CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}{1}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}{1}]+{0}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}{1}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}{1}]*{0}"
)
HAN_AND_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
HAN_AND_HANGUL = "[一-龥\u0800-一가-\ud7ff]+"
DEEPSEEK_WORDS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
# Cased letters, as listed by DeepSeek.
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
    """Returns the steps that split text by each expression in turn, then write it as byte
    letters.
    """
    return (*map(_split, regexes), BYTE_LEVEL)


def _cased(endings: str, without: str = "") -> str:
    """Returns the expression `CASED_WORDS` with these endings, for letters without those in
    `without`.
    """
    return CASED_WORDS.replace("{0}", endings).replace("{1}", without)


class Rule(NamedTuple):
    """A rule that splits text into words.

    Attributes:
      steps: the pre-tokenizers of a `tokenizer.json`, in order.
      whole_words: whether a word that is itself a token is encoded as this token, without any
        merges (`ignore_merges`).
      normalizer: the normalizer of a `tokenizer.json`.
    """

    steps: tuple[Mapping[str, Any], ...]
    whole_words: bool = False
    normalizer: Mapping[str, Any] | None = None


# Expressions that several rules begin with.
_LLAMA3 = _splits(CONTRACTIONS + "|" + LETTERS + r"|\p{N}{1,3}" + PUNCTUATION)
_QWEN2 = CONTRACTIONS + "|" + LETTERS + r"|\p{N}" + PUNCTUATION
RULES = {
    "gpt-2": Rule((BYTE_LEVEL_WORDS,)),
    "llama-bpe": Rule(_LLAMA3, whole_words=True),
    "dbrx": Rule(_LLAMA3),
    "qwen2": Rule(_splits(_QWEN2), normalizer=NFC),
    "smollm": Rule((DIGITS, BYTE_LEVEL_WORDS)),
    "tekken": Rule(_splits(_cased("") + r"|\p{N}" + PATHS), whole_words=True),
    "gpt-4o": Rule(_splits(_cased(CONTRACTIONS + "?") + r"|\p{N}{1,3}" + PATHS)),
    "stablelm2": Rule(_splits(_QWEN2)),
    "qwen35": Rule(
        _splits(CONTRACTIONS
                + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
                + BREAKS),
        normalizer=NFC,
    ),
    "mpt": Rule((BYTE_LEVEL_WORDS,), normalizer=NFC),
    "command-r": Rule((DIGITS, BYTE_LEVEL_WORDS), normalizer=NFC),
    "deepseek-llm": Rule(
        (
            *map(_split, ("[\r\n]", rf"\s?[{CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
                          r"\s+$", HAN_AND_HANGUL)),
            DIGITS,
            BYTE_LEVEL,
        )
    ),
    "deepseek-coder": Rule(
        (*map(_split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_HANGUL)), DIGITS, BYTE_LEVEL),
    ),
    "deepseek-v3": Rule(_splits(r"\p{N}{1,3}", HAN_AND_KANA, DEEPSEEK_WORDS + r"[\r\n]*" + BREAKS)),
    "spark2_5": Rule(
        (*map(_split, (r"\p{N}{1,3}", HAN_AND_KANA, DEEPSEEK_WORDS + r"|[\r\n]|\s+(?!\S)|\s+")),
         DIGITS, BYTE_LEVEL),
    ),
    "falcon": Rule(
        (
            {"type": "Punctuation", "behavior": "Contiguous"},
            BYTE_LEVEL_WORDS,
            {"type": "Digits", "individual_digits": False},
            _split("[0-9][0-9][0-9]"),
        )
    ),
    "minicpm5": Rule(_splits(r"\p{N}{1,3}", CONTRACTIONS + "|" + LETTERS + r"|\p{N}+"
                             + PUNCTUATION), whole_words=True),
    "poro-chat": Rule(_splits(SENTENCES)),
    "viking": Rule(_splits(SENTENCES, r"\p{N}")),
    "bailingmoe": Rule(
        _splits(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
    ),
    "seed-coder": Rule(_splits(CONTRACTIONS + "|" + LETTERS + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
                               + BREAKS)),
    "ufakzeka": Rule(_splits(LETTERS + r"|\p{N}" + PUNCTUATION)),
    "laguna": Rule((_split(r"(?:\r?\n)+(?!\r?\n)", "MergedWithNext"), *_splits(_QWEN2))),
    "kimi-k2": Rule(_splits(r"[\p{Han}]+|" + _cased(CONTRACTIONS + "?", r"&&[^\p{Han}]")
                            + r"|\p{N}{1,3}" + PUNCTUATION)),
    "tiny_aya": Rule(_splits(r"\d{1,3}(?=(?:\d{3})*\b)", _cased(CONTRACTIONS + "?") + r"|\p{N}{1,3}"
                             + PATHS)),
    "superbpe": Rule(_splits(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "exaone-moe": Rule(
        _splits(
            CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )
    ),
    "jais-2": Rule(
        _splits(
            CONTRACTIONS + "|" + LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
            + "".join(rf"\s{{{count}}}(?!\S)|" for count in ("512", "256", "128", "64", "32", "16",
                "8", "4", "1,2")) + r"\s{1}"
        )
    ),
    "youtu": Rule(_splits(YOUTU, _cased(CONTRACTIONS + "?") + r"|\p{N}" + PATHS), whole_words=True),
    # After the first expression, the first digits of a number are still attached to the text before
    # them. The third expression separates them.
    "afmoe": Rule(
        _splits(r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", THAI_TO_HANGUL, DEEPSEEK_WORDS
                + r"[\r\n]*" + BREAKS)
    ),
    "chameleon": Rule(
        (
            *map(_split, ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                          "([\t\n]|    |  )", r"\p{N}")),
            _split(r"[\p{P}!-/:-@\[-`{-~]"),
            BYTE_LEVEL_WORDS,
        )
    ),
    "default": Rule(_splits(r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}  # fmt: skip
# Aliases of the rules.
ALIASES = {
    name: rule
    for rule, names in {
        "gpt-2": (
            "phi-2 gigachat a.x-4.0 mellum jais trillion granite-docling exaone4 jina-es jina-de"
        ),
        "llama-bpe": (
            "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano glm4 glm5"
        ),
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
# Names for which llama.cpp adds the BOS token to a text, unless the file disables it.
ADDS_BOS = frozenset((
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "tekken", "chameleon",
))  # fmt: skip
# SentencePiece tokens with BPE merges: the space is ▁, and text is not split into words.
UNSPLIT_NAMES = ("gemma4", "sarvam-moe")
