"""Log-probabilities in the formats of OpenAI and KoboldCpp."""

from collections.abc import Callable, Sequence
from typing import Any

from dantinox.generation.request import GenerationRequest, TokenRecord
from dantinox.serve.protocols.token_text import token_bytes, token_name
from dantinox.text import Tokenizer

LEAST = -9999.0  # in the place of −∞, which JSON cannot write
CONTEXT = 16  # tokens of a prompt that are enough to know the text of the next one

Logprobs = dict[str, Any]  # lists by their names
# (tokenizer, request, the text that the choice begins with) → formats the records of one choice, call after call
MakeLogprobs = Callable[[Tokenizer, GenerationRequest, str], Callable[[Sequence[TokenRecord]], Logprobs]]


class CompletionLogprobs:
    """The log-probabilities of one choice of a completion; each call goes on where the last one ended."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, head: str):
        self._tokenizer, self._offset = tokenizer, 0
        self._detokenizer = tokenizer.detokenizer()
        if not request.echo:
            self._detokenizer.push(request.ids[-CONTEXT:])
            self._offset = len(head)

    def __call__(self, records: Sequence[TokenRecord]) -> Logprobs:
        found: Logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for record in records:
            name, own = token_name(self._tokenizer, record["id"]), _logprob(record)
            found["tokens"].append(name)
            found["token_logprobs"].append(own)
            found["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.push([record["id"]]))
            top: dict[str, float] = {}
            for other in record.get("alternatives", ()):  # the likeliest first: of two with the same name it stays
                top.setdefault(token_name(self._tokenizer, other["id"]), _logprob(other))  # type: ignore[arg-type]
            if own is not None:
                top[name] = max(own, top.get(name, own))
            found["top_logprobs"].append(top if own is not None else None)
        return found


class ChatLogprobs:
    """The log-probabilities of one choice of a chat."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, head: str):
        self._tokenizer = tokenizer

    def __call__(self, records: Sequence[TokenRecord]) -> Logprobs:
        content = [
            self._entry(record) | {"top_logprobs": [self._entry(other) for other in record.get("alternatives", ())]}
            for record in records
        ]
        return {"content": content, "refusal": []}

    def _entry(self, record: TokenRecord) -> dict[str, Any]:
        data = token_bytes(self._tokenizer, record["id"])
        name = token_name(self._tokenizer, record["id"])
        return {"token": name, "logprob": _logprob(record), "bytes": None if data is None else list(data)}


def _logprob(record: TokenRecord) -> float | None:
    """ln p of the model; None where nothing was reported."""
    value = record.get("logprob")
    return value if value is None else max(value, LEAST)
