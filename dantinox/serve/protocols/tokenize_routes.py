"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM, llama.cpp and lm-evaluation-harness
define them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox.serve.errors import JSON, RequestError
from dantinox.serve.operations.background import run_sized
from dantinox.serve.protocols.bodies import UNSUPPORTED, Message, StrictBody, parse_body
from dantinox.serve.protocols.token_text import prompt_ids, token_bytes, token_name
from dantinox.serve.service import Service
from dantinox.text import Tokenizer

ENCODED_AT_ONCE = 1000  # entries of a list in one call of the JSON encoder


class TokenizeBody(StrictBody):
    """The body of `/tokenize`.

    Attributes:
      model: name of the served model; another name is an error.
      prompt: text to encode; either this or messages.
      content: text to encode, as llama.cpp's clients send it: without a BOS token unless
        add_special is true.
      add_special: with content, add the BOS token.
      parse_special: with content, false makes the names of special tokens ordinary text.
      with_pieces: with content, return objects with `id` and `piece`; the piece is a list of bytes
        if it is not valid UTF-8.
      messages: conversation to format with the chat template and encode.
      tools: the tools of the conversation.
      add_special_tokens: false leaves out the BOS token.
      return_token_strs: also return the text of each token.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    """The body of `/detokenize`.

    Attributes:
      model: name of the served model; another name is an error.
      tokens: token ids to decode.
    """

    model: str | None = None
    tokens: list[int]


def _piece(tokenizer: Tokenizer, token: int) -> JSON:
    """Returns the text of a token, the name of a special token, or the bytes of an incomplete UTF-8
    sequence.
    """
    data = token_bytes(tokenizer, token)
    try:
        return token_name(tokenizer, token) if data is None else data.decode()
    except UnicodeDecodeError:
        return [*(data or b"")]


def _tokenize_content(
    tokenizer: Tokenizer, body: TokenizeBody, ids: list[int], context: int
) -> str:
    """Returns the JSON of the response to a request for the tokens `ids`."""
    tokens: list[JSON] = [*ids]
    if body.with_pieces:
        tokens = [{"id": token, "piece": _piece(tokenizer, token)} for token in ids]
    names = "null"
    if body.return_token_strs:
        names = _encode_list([token_name(tokenizer, token) for token in ids])
    encoded = _encode_list(tokens)
    return (
        f'{{"count":{len(ids)},"max_model_len":{context},"tokens":{encoded},"token_strs":{names}}}'
    )


def _encode_list(items: Sequence[JSON]) -> str:
    """Returns the JSON of a list, encoded in blocks, because the encoder of one long list would
    block all threads.
    """
    blocks = (
        items[start : start + ENCODED_AT_ONCE] for start in range(0, len(items), ENCODED_AT_ONCE)
    )
    parts = (json.dumps(block, ensure_ascii=False, separators=(",", ":"))[1:-1] for block in blocks)
    return f"[{','.join(parts)}]"


def routes(service: Service) -> list[Route]:
    """Returns the routes of this protocol."""
    tokenizer = service.tokenizer

    async def tokenize(request: Request) -> Response:
        """Returns the token ids of a prompt or a conversation."""
        body = await parse_body(request, TokenizeBody)
        service.check_model(body.model)
        if sum(given is not None for given in (body.prompt, body.content, body.messages)) != 1:
            raise RequestError(400, "the body must have either prompt or messages", param="prompt")
        if body.content is not None:
            parse_special = body.parse_special is not False
            ids = await run_sized(
                len(body.content), tokenizer.encode, body.content, parse_special=parse_special
            )
            if body.add_special:
                ids = [*tokenizer.ids_before_text, *ids]
        elif body.messages is not None:
            rendered, _ = await service.render(
                [message.fields() for message in body.messages], body.tools or ()
            )
            ids = rendered.ids
        elif body.prompt in tokenizer.special_tokens:
            # This is the name of a special token: clients look up the EOS id this way.
            ids = [tokenizer.special_tokens[body.prompt]]
        elif not body.prompt:
            ids = []
        else:
            (ids,) = await prompt_ids(service.model, [body.prompt])
            if body.add_special_tokens is False and tokenizer.add_bos:
                ids = ids[1:]
        content = await run_sized(
            len(ids), _tokenize_content, tokenizer, body, ids, service.context
        )
        return Response(content, media_type="application/json")

    async def detokenize(request: Request) -> Response:
        """Returns the text of token ids."""
        body = await parse_body(request, DetokenizeBody)
        service.check_model(body.model)
        (ids,) = await prompt_ids(service.model, [body.tokens], "tokens")
        text = await run_sized(len(ids), tokenizer.decode, ids)
        return JSONResponse({"prompt": text, "content": text})  # `content` as in llama.cpp

    async def info(request: Request) -> Response:
        """Describes the tokenizer and the chat template."""
        template = service.options.template
        known: dict[str, JSON] = {
            "tokenizer_class": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
        }
        known |= {"model_max_length": service.context, "add_bos_token": tokenizer.add_bos}
        known |= {"chat_template": None if template is None else template.source}
        for role in ("bos_token", "eos_token", "pad_token"):
            known[role] = tokenizer.template_variables.get(role)
        return JSONResponse(known)

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", info),
    ]
