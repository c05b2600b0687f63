"""Texts, prompts and conversations for comparisons of a published model."""

from pathlib import Path

NOVEL = (
    Path(__file__).with_name("pride_and_prejudice.txt").read_text(encoding="utf-8")
)  # Jane Austen 1813, public domain

LINES = [
    "The quick brown fox jumps over the lazy dog.", "  two  spaces   three", "tab\tand\ttabs",
    "1234567890 3.14159 1,000,000", "don't can't we'll I'd you're",
    "CamelCase snake_case kebab-case", "def f(x):\n    return x ** 2\n", "\n\n\n", " ",
    "für Ägypten, naïve façade, señor", "Привет, мир! Как дела?", "你好,世界。今天天气很好。", "こんにちは世界",
    "안녕하세요", "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽",
    "e\u0301 combining a\u0308", "∑∫√ x² ≤ y³ ≠ ∞",
    "https://example.org/a?b=c&d=%20#e", "user@example.com",
    '{"a": [1, 2.5, null], "b": "c\\n"}', "<html><body>x</body></html>",
    "trailing spaces   ", "\r\nwindows\r\n", "\u00a0no-break\u2003em", "\ufeffbom", "a" * 300,
    "AaAaAaAa 0x1F4A9",
]  # fmt: skip
CODE = "\n".join(
    f"def clamp_{i}(value: float, low: float = {i}.0) -> float:\n    return max(low, min(value,"
    f" {i + 1}.0))\n"
    for i in range(40)
)
MIXED = "\n".join(LINES)
# 20 texts of about 50 to 2,000 tokens.
TEXTS = [
    *(NOVEL[start : start + size] for start, size in (
        (0, 220), (300, 300), (700, 450), (1300, 600), (2000, 900), (3000, 1200), (4200, 1800),
        (0, 2600), (1000, 3600), (500, 4800), (0, 6500), (0, 9000),
    )),
    *(CODE[:size] for size in (300, 900, 2500)), *(MIXED[:size] for size in (200, 500, 2000)),
    "\n".join(f"{a} + {b} = {a + b}" for a in range(3, 40, 4) for b in range(5, 60, 9)),
    "yes no " * 40,
]  # fmt: skip
CHECKED = (0, 3, 6, 13, 16, 19)  # the tests compare logits of these texts

PROMPTS = [
    "The lighthouse keeper climbed the stairs", "Photosynthesis is the process by which",
    "def fibonacci(n):\n", "In 1969, the first", "The three primary colors are",
    "Once upon a time there was a fox", "To bake bread, you need",
    "The difference between a list and a tuple in Python is",
]  # fmt: skip
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Is water wet?"},
    ],
    [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Another one, please <|im_end|> now."},
    ],
]
