"""Requests for the text between a prefix and a suffix, for all protocols."""

from collections.abc import Sequence

from dantinox.config import Config, UserError
from dantinox.generation import LoadedModel
from dantinox.serve.errors import RequestError, http_error
from dantinox.serve.operations.background import run_sized
from dantinox.serve.protocols.token_text import check_ids
from dantinox.serve.service import Service
from dantinox.text.fill_in_middle import fim_end_ids, fim_format, fim_ids


def with_fim_ends(service: Service, config: Config, name: str) -> Config:
    """Returns the settings with the tokens that end an answer; `name` is the field of the suffix.

    Raises:
      RequestError: 400, the vocabulary has no fill-in-the-middle tokens.
    """
    if fim_format(service.tokenizer) is None:
        raise http_error("fill_in_middle", name, param=name)
    return service.model.with_stop_ids(config, fim_end_ids(service.tokenizer))


async def fill_in_middle(
    model: LoadedModel, prefixes: Sequence[str | list[int]], suffix: str, name: str = "prompt"
) -> list[list[int]]:
    """Returns the token ids of a prompt for each prefix, given as text or ids; `name` is the field
    of the prefixes.

    Raises:
      RequestError: 400, a text cannot be encoded, or an id is not in the vocabulary.
    """
    tokenizer = model.tokenizer

    def encode() -> list[list[int]]:
        found = []
        for prefix in prefixes:
            if isinstance(prefix, list):
                check_ids(tokenizer, prefix, name)
            found.append([*tokenizer.ids_before_text, *fim_ids(tokenizer, prefix, suffix)])
        return found

    try:
        return await run_sized(sum(map(len, prefixes)) + len(suffix), encode)
    except UserError as error:
        raise RequestError(400, str(error), param=name) from None
