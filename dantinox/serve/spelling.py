"""Tokens as clients see them: a name for each, its bytes, and ids of prompts."""

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from dantinox.config import UserError
from dantinox.files import shown
from dantinox.generation import LoadedModel
from dantinox.serve.guard import Refused
from dantinox.text import Tokenizer

LONG = 2_000  # characters that are encoded beside the loop, so that others go on


@lru_cache(maxsize=2)
def _special_names(tokenizer: Tokenizer) -> dict[int, str]:
    return {token: name for name, token in tokenizer.special_tokens.items()}


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; the name of a special one; `bytes:\\xe2` of bytes that are no text by themselves."""
    special = _special_names(tokenizer).get(token)
    if special is not None:
        return special
    data = bytes_of(tokenizer, token)
    if data is None:
        return tokenizer.spelt(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes | None:
    """What a token adds inside of a text; None of special tokens, and where that depends on its neighbours."""
    if tokenizer.pieces is None or token in tokenizer.special_ids or not 0 <= token < tokenizer.vocab_size:
        return None
    return tokenizer.pieces.inner[token]


async def prompt_ids(run: LoadedModel, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Token ids of prompts, which are texts or ids already.

    Raises:
      UserError: a text that the vocabulary cannot spell.
      Refused: 400, an id that is none of the vocabulary.
    """
    size = run.tokenizer.vocab_size
    for prompt in prompts:
        wrong = [token for token in prompt if not 0 <= token < size] if isinstance(prompt, list) else []
        if wrong:
            raise Refused(400, f"prompt must hold token ids in [0, {size}), got {shown(wrong[0])}", param="prompt")

    def encoded() -> list[list[int]]:
        return [run.prompt_ids(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    try:
        return await asyncio.to_thread(encoded) if sum(map(len, prompts)) > LONG else encoded()
    except UserError as error:
        raise Refused(400, str(error), param="prompt") from None
