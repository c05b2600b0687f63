"""Embeddings and rankings: `/v1/embeddings` as in OpenAI's API, and `/v1/rerank` as in the APIs of Jina, Cohere and vLLM."""

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


def _to_inputs(value: Any) -> list[str | list[int]]:
    """Converts an input to a list: it may be a text, a list of texts, token ids, or a list of lists of ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) or (isinstance(item, list) and item and set(map(type, item)) == {int}) for item in value):
            if len(value) > MAX_EMBEDDINGS:
                raise ValueError(f"must have at most {MAX_EMBEDDINGS:,} texts")
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists, none of them empty")


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

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rank_fields": (["text"],)}

    model: str | None = None
    query: str
    documents: Annotated[list[Annotated[str, BeforeValidator(_to_document)]], Field(min_length=1, max_length=MAX_EMBEDDINGS)]
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
        known: dict[str, JSON] = {"object": "list", "model": service.engine.name, "usage": usage}
        entry = b'{"object": "embedding", "index": %d, "embedding": %s}'
        rows = await run_in_thread(encode_vectors, vectors_ND, body.encoding_format == "base64", entry)
        return response_with_rows(known, "data", rows)

    async def rerank(request: Request) -> Response:
        """Returns documents in the order of their similarity to a query."""
        body = await parse_body(request, RerankBody)
        warn_unknown(body)
        service.check_model(body.model)
        vectors_ND, tokens = await embed(service, [body.query, *body.documents], "documents")
        scores = [float(score) for score in vectors_ND[1:] @ vectors_ND[0]]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]  # the sort is stable
        results: list[JSON] = []
        for index in order:
            result: dict[str, JSON] = {"index": index, "relevance_score": scores[index]}
            results.append(result | ({"document": {"text": body.documents[index]}} if body.return_documents else {}))
        usage: dict[str, JSON] = {"prompt_tokens": tokens, "total_tokens": tokens}
        known: dict[str, JSON] = {"id": f"rerank-{secrets.token_hex(12)}", "model": service.engine.name}
        return JSONResponse(known | {"results": results, "usage": usage})

    ranks = [Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")]
    # KoboldCpp has its embeddings, in OpenAI's format, also under its own path.
    return [*(Route(path, embeddings, methods=["POST"]) for path in ("/v1/embeddings", "/api/extra/embeddings")), *ranks]


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
      truncate: drop the end of a text that is longer than the context, but not the special tokens after it.

    Raises:
      RequestError: 400, a text is empty or too long, or has too few dimensions.
      RateLimited: the API key has too few tokens left.
      UserError, Busy, Unavailable: as `EngineProtocol.embed`.
    """
    dim, context = service.model.model.config.dim, service.context
    if dimensions is not None and dimensions > dim:
        raise RequestError(400, f"dimensions must be in [1, {dim}], got {dimensions}", param="dimensions")
    ids = await prompt_ids(service.model, inputs, param, embedding_ids)
    if truncate:
        after = service.tokenizer.ids_after_text
        ends = [after if isinstance(text, str) else () for text in inputs]
        ids = [row if len(row) <= context else [*row[: context - len(end)], *end] for row, end in zip(ids, ends, strict=True)]
    longest = max(map(len, ids))
    if longest > context:
        raise http_error("context", context, longest, param=param)
    record = current_record()
    tokens = sum(map(len, ids))
    with record.tokens(tokens):
        vectors_ND = await service.engine.embed(ids, service.options.pooling)
        record.processed_tokens += tokens
    if dimensions is not None and dimensions < dim:
        vectors_ND = vectors_ND[:, :dimensions]
        vectors_ND = vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return vectors_ND, sum(map(len, ids))


def encode_vectors(vectors_ND: np.ndarray, as_base64: bool = False, entry: bytes | None = None) -> list[bytes]:
    """Returns the JSON of each vector, as a list of numbers or as the base64 text of its float32 bytes.

    Every vector is encoded separately, because the encoder of a large list would block all threads until it ends.

    Args:
      entry: a format of the index and the JSON of the vector; None: the JSON of the vector alone.
    """
    rows = []
    for index, vector_D in enumerate(vectors_ND):
        value = base64.b64encode(vector_D.astype("<f4").tobytes()).decode() if as_base64 else vector_D.tolist()
        row = json.dumps(value).encode()
        rows.append(row if entry is None else entry % (index, row))
    return rows


def response_with_rows(known: Mapping[str, JSON], name: str, rows: Sequence[bytes]) -> Response:
    """Returns the JSON of an object with the field `name`, a list of rows that are JSON already."""
    head = json.dumps(known).encode()[:-1]
    return Response(b'%s, "%s": [%s]}' % (head, name.encode(), b", ".join(rows)), media_type="application/json")
