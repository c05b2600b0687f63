"""Log-probabilities in the formats of OpenAI and KoboldCpp."""

from collections.abc import Callable, Sequence
from typing import Any

from dantinox.generation.guides.token_healing import healed_characters
from dantinox.generation.request import GenerationRequest, TokenRecord
from dantinox.serve.protocols.token_text import token_bytes, token_name
from dantinox.text import Tokenizer

MIN_LOGPROB = -9999.0  # replaces −∞, which JSON cannot represent
# The number of last prompt tokens that are enough to determine the text of the next token.
PREFIX_TOKENS = 16

Logprobs = dict[str, Any]  # name → list
# (tokenizer, request, first text of the choice) → function that formats successive records of one
# choice
LogprobsFormatter = Callable[
    [Tokenizer, GenerationRequest, str], Callable[[Sequence[TokenRecord]], Logprobs]
]


class CompletionLogprobs:
    """Formats the log-probabilities of one choice of a completion.

    Each call gets the records that follow those of the previous call.
    """

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, head: str):
        self._tokenizer = tokenizer
        self._offset = 0
        self._detokenizer = tokenizer.detokenizer()
        if not request.echo:
            prefix = request.ids[-PREFIX_TOKENS:]
            self._detokenizer.push(prefix)
            # Tokens that repeat the end of a healed prompt begin before the text of the choice.
            self._offset = len(head) - (
                healed_characters(tokenizer, prefix, request.healed) if request.healed else 0
            )

    def __call__(self, records: Sequence[TokenRecord]) -> Logprobs:
        found: Logprobs = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for record in records:
            name = token_name(self._tokenizer, record["id"])
            logprob = _logprob(record)
            found["tokens"].append(name)
            found["token_logprobs"].append(logprob)
            found["text_offset"].append(max(0, self._offset))
            self._offset += len(self._detokenizer.push([record["id"]]))
            top: dict[str, float] = {}
            # Sorted by probability: of equal names, the most likely is kept.
            for other in record.get("alternatives", ()):
                top.setdefault(token_name(self._tokenizer, other["id"]), _logprob(other))  # type: ignore[arg-type]
            if logprob is not None:
                top[name] = max(logprob, top.get(name, logprob))
            found["top_logprobs"].append(top if logprob is not None else None)
        return found


class ChatLogprobs:
    """Formats the log-probabilities of one choice of a chat."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, head: str):
        self._tokenizer = tokenizer

    def __call__(self, records: Sequence[TokenRecord]) -> Logprobs:
        content = [
            self._entry(record)
            | {"top_logprobs": [self._entry(other) for other in record.get("alternatives", ())]}
            for record in records
        ]
        return {"content": content, "refusal": []}

    def _entry(self, record: TokenRecord) -> dict[str, Any]:
        data = token_bytes(self._tokenizer, record["id"])
        name = token_name(self._tokenizer, record["id"])
        return {
            "token": name,
            "logprob": _logprob(record),
            "bytes": None if data is None else list(data),
        }


def _logprob(record: TokenRecord) -> float | None:
    """Returns ln p under the model, or None for a token without log-probabilities."""
    value = record.get("logprob")
    return value if value is None else max(value, MIN_LOGPROB)
