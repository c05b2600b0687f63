"""Text and bytes of tokens for clients, and validation of token ids in prompts."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from dantinox.config import UserError
from dantinox.files import quote
from dantinox.generation import LoadedModel
from dantinox.generation.request import GenerationRequest
from dantinox.serve.errors import RequestError
from dantinox.serve.operations.background import run_in_thread, run_sized
from dantinox.text import Tokenizer


@lru_cache(maxsize=2)
def _special_names(tokenizer: Tokenizer) -> dict[int, str]:
    return {token: name for name, token in tokenizer.special_tokens.items()}


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text of a token, the name of a special token, or `bytes:\\xe2` for an incomplete
    UTF-8 sequence.
    """
    special = _special_names(tokenizer).get(token)
    if special is not None:
        return special
    data = token_bytes(tokenizer, token)
    if data is None:
        return tokenizer.token_text(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes | None:
    """Returns the bytes of a token within a text; None for a special token, or if the bytes depend
    on adjacent tokens.
    """
    if (
        tokenizer.token_pieces is None
        or token in tokenizer.special_ids
        or not 0 <= token < tokenizer.vocab_size
    ):
        return None
    return tokenizer.token_pieces.inner[token]


def check_ids(tokenizer: Tokenizer, ids: Sequence[int], name: str) -> None:
    """Raises RequestError (400) for an id that is not in the vocabulary; `name` is the field."""
    size = tokenizer.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < size):
        wrong = next(token for token in ids if not 0 <= token < size)
        raise RequestError(
            400, f"{name} must have token ids in [0, {size}), got {quote(wrong)}", param=name
        )


async def healed(
    model: LoadedModel, requests: Sequence[GenerationRequest]
) -> list[GenerationRequest]:
    """Returns requests with `token_healing` applied to their prompts."""
    if not any(request.config.generation.token_healing for request in requests):
        return [*requests]
    return await run_in_thread(lambda: [model.heal(request) for request in requests])


async def prompt_ids(
    model: LoadedModel,
    prompts: Sequence[str | list[int]],
    name: str = "prompt",
    encode_text: Callable[[LoadedModel, str], list[int]] = LoadedModel.prompt_ids,
) -> list[list[int]]:
    """Returns the token ids of prompts, each given as text or ids; `name` is their field.

    Raises:
      RequestError: 400, a text cannot be encoded, or an id is not in the vocabulary.
    """

    def encode() -> list[list[int]]:
        for prompt in prompts:
            if isinstance(prompt, list):
                check_ids(model.tokenizer, prompt, name)
        return [
            encode_text(model, prompt) if isinstance(prompt, str) else prompt for prompt in prompts
        ]

    try:
        return await run_sized(sum(map(len, prompts)), encode)
    except UserError as error:
        raise RequestError(400, str(error), param=name) from None
