"""Checks whether a constraint allows a whole text, and generates texts that it allows."""

from dantinox.config import TokenizerSection
from dantinox.generation.guides.constraints import ConstraintCompiler
from dantinox.text import train_tokenizer

BYTES = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
COMPILER = ConstraintCompiler(BYTES)


def allows(matcher, text):
    """Whether a matcher at its start allows exactly this text."""
    ids = list(text.encode())
    matcher = matcher.copy()._matcher
    if matcher.validate_tokens(ids) < len(ids):
        return False
    assert matcher.consume_tokens(ids)
    return matcher.is_accepting()


def random_text(matcher, draw, longest=200):
    """Returns a random text that a matcher at its start allows, or None if it does not end soon."""
    matcher, found = matcher.copy(), bytearray()
    while not matcher.done and len(found) < longest:
        bits = matcher.mask()
        tokens = [token for token in range(256) if bits[token // 32] >> (token % 32) & 1]
        ends = any(bits[token // 32] >> (token % 32) & 1 for token in BYTES.stop_ids)
        if ends and (not tokens or draw.random() < 0.4):
            return found.decode()
        token = draw.choice(
            [token for token in tokens if token in b'"]}) '] or tokens
            if draw.random() < 0.3
            else tokens
        )
        matcher.consume(token)
        found.append(token)
    return found.decode() if matcher.done else None
