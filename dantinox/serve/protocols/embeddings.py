"""Embeddings and rankings: `/v1/embeddings` as in OpenAI's API, and `/v1/rerank` as in the APIs of
Jina, Cohere and vLLM.
"""

import base64
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox.generation.api.embedder import embedding_ids
from dantinox.serve.errors import JSON, RequestError, http_error
from dantinox.serve.operations.background import run_in_thread
from dantinox.serve.operations.limits import MAX_EMBEDDINGS
from dantinox.serve.operations.request_record import current_record
from dantinox.serve.protocols.bodies import StrictBody, parse_body, warn_unknown
from dantinox.serve.protocols.token_text import prompt_ids
from dantinox.serve.service import Service


def _is_ids(value: Any) -> bool:
    """Returns whether a value is a list of at least one token id. JSON's true and false, which are
    ints in Python, are none.
    """
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _to_inputs(value: Any) -> list[str | list[int]]:
    """Converts an input to a list: it may be a text, a list of texts, token ids, or a list of lists
    of ids.
    """
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if (
        isinstance(value, list)
        and value
        and all(isinstance(item, str) or _is_ids(item) for item in value)
    ):
        if len(value) > MAX_EMBEDDINGS:
            raise ValueError(f"must have at most {MAX_EMBEDDINGS:,} texts")
        return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids, or a list"
        " of such lists, none of them empty"
    )


def _to_document(value: Any) -> Any:
    """Returns the text of a document, which is a string or an object with the field `text`."""
    return value.get("text") if isinstance(value, dict) else value


Inputs = Annotated[list[Any], BeforeValidator(_to_inputs)]
Dimensions = Annotated[int, Field(ge=1)]


class EmbeddingBody(StrictBody):
    """The body of `/v1/embeddings`.

    Attributes:
      model: name of the served model; another name is an error.
      input: a string, a list of strings, token ids, or a list of lists of ids.
      encoding_format: `float`, or `base64` for the bytes of little-endian float32 numbers.
      dimensions: keep only the first numbers of each embedding, and normalize them again.
      user: has no effect.
    """

    model: str | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    user: str | None = None


class RerankBody(StrictBody):
    """The body of `/v1/rerank`.

    Attributes:
      model: name of the served model; another name is an error.
      query: the text that the documents are compared with.
      documents: the texts to rank, as strings or as objects with the field `text`.
      top_n: number of results; null returns all documents.
      return_documents: also return the text of each document.
    """

    # field -> its accepted values, which have no effect
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rank_fields": (["text"],)}

    model: str | None = None
    query: str
    documents: Annotated[
        list[Annotated[str, BeforeValidator(_to_document)]],
        Field(min_length=1, max_length=MAX_EMBEDDINGS),
    ]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None


def routes(service: Service) -> list[Route]:
    """Returns the routes of this protocol."""

    async def embeddings(request: Request) -> Response:
        """Returns the embeddings of texts."""
        body = await parse_body(request, EmbeddingBody)
        warn_unknown(body)
        service.check_model(body.model)
        vectors_ND, tokens = await embed(service, body.input, "input", body.dimensions)
        usage: dict[str, JSON] = {"prompt_tokens": tokens, "total_tokens": tokens}
        fields: dict[str, JSON] = {"object": "list", "model": service.engine.name, "usage": usage}
        entry = b'{"object": "embedding", "index": %d, "embedding": %s}'
        rows = await run_in_thread(
            encode_vectors, vectors_ND, body.encoding_format == "base64", entry
        )
        return response_with_rows(fields, "data", rows)

    async def rerank(request: Request) -> Response:
        """Returns documents in the order of their similarity to a query."""
        body = await parse_body(request, RerankBody)
        warn_unknown(body)
        service.check_model(body.model)
        vectors_ND, tokens = await embed(service, [body.query, *body.documents], "documents")
        scores = [float(score) for score in vectors_ND[1:] @ vectors_ND[0]]
        # The sort is stable.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results: list[JSON] = []
        for index in order:
            result: dict[str, JSON] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents:
                result["document"] = {"text": body.documents[index]}
            results.append(result)
        usage: dict[str, JSON] = {"prompt_tokens": tokens, "total_tokens": tokens}
        fields: dict[str, JSON] = {
            "id": f"rerank-{secrets.token_hex(12)}",
            "model": service.engine.name,
        }
        return JSONResponse(fields | {"results": results, "usage": usage})

    # KoboldCpp has its embeddings, in OpenAI's format, also under its own path.
    embedding_paths = ("/v1/embeddings", "/api/extra/embeddings")
    rerank_paths = ("/v1/rerank", "/v2/rerank", "/rerank")
    return [
        *(Route(path, embeddings, methods=["POST"]) for path in embedding_paths),
        *(Route(path, rerank, methods=["POST"]) for path in rerank_paths),
    ]


async def embed(
    service: Service,
    inputs: Sequence[str | list[int]],
    param: str,
    dimensions: int | None = None,
    truncate: bool = False,
) -> tuple[np.ndarray, int]:
    """Returns the embeddings of texts, given as text or token ids, and their number of tokens.

    Args:
      param: the field of the inputs, for error messages.
      dimensions: keep only the first numbers of each embedding, and normalize them again.
      truncate: drop the end of a text that is longer than the context, but not the special tokens
        after it.

    Raises:
      RequestError: 400, a text is empty or too long, or has too few dimensions.
      RateLimited: the API key has too few tokens left.
      UserError, Busy, Unavailable: as `EngineProtocol.embed`.
    """
    dim = service.model.model.config.dim
    context = service.context
    if dimensions is not None and dimensions > dim:
        raise RequestError(
            400, f"dimensions must be in [1, {dim}], got {dimensions}", param="dimensions"
        )
    ids = await prompt_ids(service.model, inputs, param, embedding_ids)
    if truncate:
        # A text keeps the special tokens that the tokenizer adds after it. An input that is given
        # as ids has none of these.
        after_text = service.tokenizer.ids_after_text
        endings = [after_text if isinstance(text, str) else () for text in inputs]
        ids = [_truncate(row, ending, context) for row, ending in zip(ids, endings, strict=True)]
    longest = max(map(len, ids))
    if longest > context:
        raise http_error("context", context, longest, param=param)
    record = current_record()
    tokens = sum(map(len, ids))
    with record.tokens(tokens):  # reserved in the limit of the API key, then settled
        vectors_ND = await service.engine.embed(ids, service.options.pooling)
        record.processed_tokens += tokens
    if dimensions is not None and dimensions < dim:
        vectors_ND = vectors_ND[:, :dimensions]
        vectors_ND = vectors_ND / np.maximum(
            np.linalg.norm(vectors_ND, axis=1, keepdims=True), np.finfo(np.float32).tiny
        )
    return vectors_ND, tokens


def _truncate(ids: list[int], ending: Sequence[int], length: int) -> list[int]:
    """Returns at most `length` ids. If some are dropped, the last ones are replaced by `ending`."""
    return ids if len(ids) <= length else [*ids[: length - len(ending)], *ending]


def encode_vectors(
    vectors_ND: np.ndarray, as_base64: bool = False, entry: bytes | None = None
) -> list[bytes]:
    """Returns the JSON of each vector, as a list of numbers or as the base64 text of its float32
    bytes.

    Every vector is encoded separately, because the encoder of a large list would block all threads
    until it ends.

    Args:
      entry: a %-format for two values, the index and the JSON of the vector. None: the result is
        the JSON of the vector alone.
    """
    rows = []
    for index, vector_D in enumerate(vectors_ND):
        value = (
            base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
            if as_base64
            else vector_D.tolist()
        )
        row = json.dumps(value).encode()
        rows.append(row if entry is None else entry % (index, row))
    return rows


def response_with_rows(fields: Mapping[str, JSON], name: str, rows: Sequence[bytes]) -> Response:
    """Returns the JSON of an object with the fields `fields` and the field `name`, a list of rows
    that are JSON already.
    """
    head = json.dumps(fields).encode()[:-1]  # without the closing brace
    return Response(
        b'%s, "%s": [%s]}' % (head, name.encode(), b", ".join(rows)), media_type="application/json"
    )
