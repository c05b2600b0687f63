"""A deterministic corpus of difficult lines for comparisons of tokenizers."""

import random
from collections.abc import Callable, Iterator, Sequence

GENERIC_SPECIALS = (
    "<s>",
    "</s>",
    "<unk>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<0x0A>",
    "<bos>",
    "[CLS]",
)
TEXT = """
the Hello world tokenization don't I'VE we'll O'Neill's naïve café Ärger ÉCOLE dALL Straße GROẞE ŁÓDŹ Çağrı İstanbul ĲSSEL
Ǆungla đường Tiếng Việt ſubject 'ſ ’s iPhone Привет мир ЭВМ Ελληνικά ΣΊΣΥΦΟΣ Հայերեն ქართული עברית שָׁלוֹם العربية مُحَمَّد فارسی
اردو हिन्दी क्षत्रिय বাংলা ਪੰਜਾਬੀ தமிழ் తెలుగు ಕನ್ನಡ മലയാളം සිංහල ภาษาไทย ລາວ မြန်မာ ខ្មែរ བོད་སྐད አማርኛ ᏣᎳᎩ 日本語 カタカナ ひらがな ｶﾅ
漢字 简体字 𠮷野家 한국어 ㄅㄆㄇ ᄒᆞᆫ글 𝕳𝖊𝖑𝖑𝖔 ﬁne ＡＢＣ ᵃᵇ ªº
"""
WORDS = TEXT.split()
CODE = (
    "def {a}(self, {b}: int = {n}) -> None:",
    "\tif ({a} != NULL && {b}->next <= {n}) {{ return -1; }}",
    "        {a}[{b}] += {n}  # {a}'s",
    "#include <{a}.h>\r\n#define {b} 0x{n}",
    "SELECT {a}, COUNT(*) FROM {b} WHERE id>={n};",
    "<div class=\"{a}\" id='{b}{n}'>&nbsp;</div>",
    "https://example.org/{a}/{b}?q={n}&r=%20#x",
    "$ {a} --{b}={n} | grep -v '^$' > /dev/null 2>&1",
    "{a}::{b}<T>({n}..={n})?;",
    "\\frac{{{a}}}{{{b}}} \\leq {n}^2",
    "//////// {a} //////// {b}\n/",
)
EMOJI = (
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "👨🏽‍🚀",
    "🇮🇹",
    "🇯🇵🇰🇷",
    "1️⃣",
    "❤️‍🔥",
    "🦙",
    "😶‍🌫️",
    "🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "☺️",
    "⌚",
    "🫠",
    "👍🏿",
)
SPACES = (
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\r",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u2028",
    "\u0085",
    "\u1680",
    "\v",
    "\f",
    "\u200b",
    "\u180e",
)
MARKS = (
    "\u0301",
    "\u0308",
    "\u0327",
    "\u0323",
    "\u20d7",
    "\u0e49",
    "\u093c",
    "\u064b",
    "\ufe0f",
    "\u3099",
    "\u0345",
    "\u1ab0",
)
CONTROLS = (
    *map(chr, range(0x20)),
    "\x7f",
    "\x80",
    "\x9f",
    "\ufeff",
    "\u200d",
    "\u200e",
    "\u202e",
    "\u2060",
    "\ufff9",
    "\U000e0001",
)
NUMBERS = ("٣٤٥٦٧", "१२३४", "Ⅻ", "½", "x²", "①②③④", "１２３４５", "一二三", "𝟘𝟙𝟚𝟛", "፩፪")
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~…—–«»“”‘’、。！？（）【】§¶†‰€£¥₿±×÷≤≠∑√∞←↑→⇒■□●☆♪"
INVALID = (
    *(
        b"\xff",
        b"\xc3",
        b"\xe2\x82",
        b"\xf0\x9f\x98",
        b"\x80",
        b"\xbf\xbf",
        b"\xc0\xaf",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
    ),
    *(b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xc3(", b"\xe2(\xa1", b"\xf8\x88\x80\x80\x80"),
)
BLOCKS = ((0x20, 0x17F), (0x180, 0x58F), (0x590, 0xDFF), (0xE00, 0x1FFF), (0x2000, 0x2BFF), (0x2C00,
    0xABFF), (0xAC00, 0xD7FF),
          (0xE000, 0xFFFF), (0x10000, 0x1FFFF), (0x20000, 0x2FFFF))  # fmt: skip


def corpus(
    count: int = 20_000, specials: Sequence[str] = GENERIC_SPECIALS, seed: int = 26
) -> list[bytes]:
    """Returns `count` lines of up to a few hundred bytes, some of which are not UTF-8. Equal
    arguments give equal lines.

    Args:
      specials: the names of special tokens that some lines contain, completely or in part.
    """
    rng = random.Random(seed)
    return [_line(rng, specials) for _ in range(count)]


def _line(rng: random.Random, specials: Sequence[str]) -> bytes:
    if rng.random() < 0.06:  # bytes
        parts = [
            rng.choice(
                (
                    rng.choice(INVALID),
                    rng.randbytes(rng.randint(1, 4)),
                    _fragments(rng, specials).encode(),
                )
            )
            for _ in range(4)
        ]
        return b"".join(parts)
    return _fragments(rng, specials).encode()


def _fragments(rng: random.Random, specials: Sequence[str]) -> str:
    return "".join(rng.choice(KINDS)(rng, specials) for _ in range(rng.choice((1, 1, 1, 2, 3))))


def _words(rng: random.Random, specials: Sequence[str]) -> str:
    words = rng.choices(WORDS, k=rng.randint(1, 8))
    return rng.choice((" ", " ", " ", "", "  ", "\n", ", ", "'", "-", "_")).join(words)


def _cases(rng: random.Random, specials: Sequence[str]) -> str:
    words = (
        rng.choice((str.upper, str.lower, str.title, str.swapcase))(rng.choice(WORDS))
        for _ in range(rng.randint(1, 6))
    )
    return "".join(word + rng.choice(("", " ", "'s", "'LL", "'Re ", "’t", "'d1")) for word in words)


def _code(rng: random.Random, specials: Sequence[str]) -> str:
    names = (
        "x",
        "camelCase",
        "snake_case",
        "HTTPServer",
        "größe",
        "变量",
        "i18n",
        "__init__",
        "aB2cD",
    )
    lines = (
        rng.choice(CODE).format(a=rng.choice(names), b=rng.choice(names), n=rng.randint(0, 99999))
        for _ in range(rng.randint(1, 3))
    )
    return rng.choice(("\n", "\n    ", "\r\n\t", "\n\n")).join(lines)


def _emoji(rng: random.Random, specials: Sequence[str]) -> str:
    return rng.choice(("", " ", "a")).join(rng.choices(EMOJI, k=rng.randint(1, 6)))


def _spaces(rng: random.Random, specials: Sequence[str]) -> str:
    runs = (
        rng.choice(SPACES) * rng.choice((1, 1, 2, 3, 4, 7, 8, 17, 33))
        for _ in range(rng.randint(1, 4))
    )
    return "".join(run + rng.choice(("", "", "x", "\n", "7", ".", "字")) for run in runs)


def _combining(rng: random.Random, specials: Sequence[str]) -> str:
    return "".join(
        rng.choice("aeounAEONüñкそกकا ") + "".join(rng.choices(MARKS, k=rng.randint(0, 3)))
        for _ in range(rng.randint(1, 12))
    )


def _numbers(rng: random.Random, specials: Sequence[str]) -> str:
    def number() -> str:
        value = rng.randint(0, 10 ** rng.randint(1, 20))
        return rng.choice(
            (
                str(value),
                f"{value:,}",
                f"-{value}.{value}",
                f"{value:x}",
                f"{value}e-5",
                rng.choice(NUMBERS),
                f"+{value}%",
            )
        )

    return rng.choice((" ", "", ", ", "  ", "\n", "a")).join(
        number() for _ in range(rng.randint(1, 6))
    )


def _controls(rng: random.Random, specials: Sequence[str]) -> str:
    return "".join(
        rng.choice(CONTROLS) + rng.choice(("", "", "a", " ", "é")) for _ in range(rng.randint(1, 8))
    )


def _punctuation(rng: random.Random, specials: Sequence[str]) -> str:
    return "".join(
        rng.choice(PUNCTUATION) * rng.choice((1, 1, 2, 3, 9)) + rng.choice(("", "", " ", "a", "\n"))
        for _ in range(6)
    )


def _blocks(rng: random.Random, specials: Sequence[str]) -> str:
    first, last = rng.choice(BLOCKS)
    return "".join(
        chr(rng.randint(first, last)) + rng.choice(("", "", " ")) for _ in range(rng.randint(1, 16))
    )


def _specials(rng: random.Random, specials: Sequence[str]) -> str:
    def spelling() -> str:
        name = rng.choice(specials)
        return rng.choice(
            (
                name,
                name,
                name,
                name[:-1],
                name[1:],
                name[:2] + " " + name[2:],
                name.upper(),
                name + name,
                " " + name,
            )
        )

    return "".join(
        spelling() + rng.choice(("", " ", "\n", "a", " user\n", "  "))
        for _ in range(rng.randint(1, 4))
    )


KINDS: tuple[Callable[[random.Random, Sequence[str]], str], ...] = (
    _words, _words, _words, _cases, _cases, _code, _code, _emoji, _spaces, _spaces, _combining,
    _numbers, _numbers, _controls, _punctuation, _blocks, _blocks, _specials,
)  # fmt: skip


def as_text(lines: Sequence[bytes]) -> Iterator[str]:
    """Decodes the lines; bytes that are not UTF-8 become U+FFFD."""
    return (line.decode("utf-8", "replace") for line in lines)
