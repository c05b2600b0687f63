"""Request bodies of the OpenAI protocol, and their conversion to settings."""

import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BeforeValidator, Field

from dantinox.config.request_overlay import REQUEST_KEYS
from dantinox.files import escape_name, quote
from dantinox.generation.constraints import Constraint
from dantinox.serve.errors import RequestError
from dantinox.serve.limits import MAX_PROMPTS, MAX_SALT_LENGTH, MAX_SAMPLES
from dantinox.serve.protocols.bodies import UNSUPPORTED, Alternatives, Message, StrictBody
from dantinox.serve.protocols.tool_chat import Conversation, check_effort

SETTING_NAMES = {name: name for name in REQUEST_KEYS} | {"typical_p": "typical"}  # field → setting
# Fields that have no effect.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity", "function_call"}

log = logging.getLogger("dantinox.serve")


def _to_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _to_prompts(value: Any) -> list[str | list[int]]:
    """Converts a prompt to a list: it may be a text, a list of texts, token ids, or a list of lists of ids."""
    if value is None or isinstance(value, str):
        return [value or ""]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) or (isinstance(item, list) and item) for item in value):
            ids = [token for item in value if isinstance(item, list) for token in item]
            if all(type(token) is int for token in ids):
                if len(value) > MAX_PROMPTS:
                    raise ValueError(f"must have at most {MAX_PROMPTS} prompts")
                return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists, none of them empty")


BUDGET_NAMES = AliasChoices("reasoning_budget", "thinking_token_budget")
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class StreamOptions(StrictBody):
    include_usage: bool | None = None


class JSONSchema(StrictBody):
    source: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(StrictBody):
    type: str
    json_schema: JSONSchema | None = None


class ConstraintBody(StrictBody):
    """Fields that constrain the answer.

    Attributes:
      response_format: requires JSON output, which matches the schema if one is given.
      guided_json: JSON schema of the answer.
      guided_regex: regular expression of the whole answer.
      guided_grammar: Lark grammar of the answer.
      grammar: GBNF grammar of the answer.
    """

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    grammar: str | None = None

    def constraint(self) -> Constraint | None:
        """Returns the constraint on the answer, or None.

        Raises:
          RequestError: 400, the constraint is invalid, or the body has several.
        """
        guided = self.guided_json
        found = {
            "response_format": self._format_constraint(),
            "guided_json": Constraint("json_schema", guided if isinstance(guided, str) else json.dumps(guided))
            if guided not in (None, "")
            else None,
            "guided_regex": self.guided_regex and Constraint("regex", self.guided_regex),
            "guided_grammar": self.guided_grammar and Constraint("lark", self.guided_grammar),
            "grammar": self.grammar and Constraint("gbnf", self.grammar),
        }
        names = [name for name, constraint in found.items() if constraint]
        if len(names) > 1:
            raise RequestError(400, f"{names[0]} and {names[1]} both constrain the answer: use one of them", param=names[1])
        return next((constraint for constraint in found.values() if isinstance(constraint, Constraint)), None)

    def constraint_field(self) -> str:
        """Returns the name of the field that constrains the answer."""
        return next((name for name in ConstraintBody.model_fields if getattr(self, name) not in (None, "")), "response_format")

    def _format_constraint(self) -> Constraint | None:
        if self.response_format is None or self.response_format.type == "text":
            return None
        kind, schema = self.response_format.type, self.response_format.json_schema
        if kind == "json_object":
            return Constraint("json_object", "")
        if kind != "json_schema":
            message = f"response_format.type must be text, json_object or json_schema, got {quote(kind)}"
            raise RequestError(400, message, param="response_format.type")
        if schema is None or schema.source is None:
            raise RequestError(400, "response_format.json_schema.schema is missing", param="response_format")
        return Constraint("json_schema", json.dumps(schema.source))


class Body(ConstraintBody):
    """Fields of completions and chat completions. Every key of `generation` and `router` is an additional field.

    Attributes:
      model: name of the served model, or `MODEL:NAME` to select an adapter; another name is an error.
      lora: name of the adapter; null uses the model without one.
      stream: send the answer as server-sent events while it is generated.
      stream_options: options of a stream.
      n: number of samples of each prompt.
      best_of: must equal n.
      seed: seed of the sampler, reduced to 32 bits.
      stop: strings that end the answer.
      max_tokens: maximum number of new tokens.
      logit_bias: numbers added to the logits of tokens, named by id or by text.
      cache_salt: only requests with an equal salt share keys in the prefix cache.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    model: str | None = None
    lora: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    best_of: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_to_tuple)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logit_bias: dict[str, Bias] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_LENGTH)] | None = None

    def settings(self, max_tokens: int | None) -> dict[str, object]:
        """Returns the settings of the request, for `EngineProtocol.settings`."""
        extra = self.model_extra or {}
        found = {SETTING_NAMES[name]: value for name, value in extra.items() if name in SETTING_NAMES and value is not None}
        renamed = {
            "max_new_tokens": max_tokens,
            "n": self.n,
            "seed": None if self.seed is None else self.seed % 2**32,
            "stop": None if self.stop is None else list(self.stop),
            "logit_bias": self.logit_bias,
        }
        found |= {name: value for name, value in renamed.items() if value is not None}
        if found.get("temperature"):
            found.setdefault("greedy", False)  # a temperature overrides greedy decoding of the server's settings
        return found


class CompletionBody(Body):
    """The body of `/v1/completions`.

    Attributes:
      prompt: a string, a list of strings, token ids, or a list of lists of ids.
      suffix: text after the answer; needs a model with fill-in-the-middle tokens.
      logprobs: number of alternatives reported with each token; null reports none.
      echo: begin the answer with the prompt.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"tools": ([],)} | {
        name: allowed for name, allowed in UNSUPPORTED.items() if name != "suffix"
    }

    prompt: Annotated[list[Any], BeforeValidator(_to_prompts)] = Field([""])
    suffix: str | None = None
    logprobs: Alternatives | None = None
    echo: bool | None = None


class ChatBody(Body):
    """The body of `/v1/chat/completions`.

    Attributes:
      messages: the conversation, each message with `role` and `content`.
      max_completion_tokens: maximum number of new tokens; overrides max_tokens.
      logprobs: report log-probabilities.
      top_logprobs: number of alternatives reported with each token; needs logprobs.
      tools: the tools that the model may call.
      tool_choice: `auto`, `none`, `required`, or the tool that must be called.
      parallel_tool_calls: whether an answer may have several tool calls.
      reasoning_effort: `none`, `minimal`, `low`, `medium` or `high`.
      reasoning_budget: maximum number of tokens of the reasoning; `thinking_token_budget` is another name.
      chat_template_kwargs: further variables of the chat template.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(None, validation_alias=BUDGET_NAMES)
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    def conversation(self) -> Conversation:
        """Returns the conversation to answer.

        Raises:
          RequestError: 400, a field is wrong.
        """
        return Conversation(
            [message.fields() for message in self.messages],
            self.tools or (),
            chosen_tool(self.tool_choice),
            self.parallel_tool_calls is not False,
            check_effort(self.reasoning_effort),
            self.reasoning_budget,
            self.chat_template_kwargs or {},
            self.constraint(),
            {"response_format": self.constraint_field()},
        )


def chosen_tool(choice: str | dict[str, Any] | None) -> str:
    """Returns `tool_choice` as in `Conversation.choice`.

    Raises:
      RequestError: 400, the field is wrong.
    """
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if choice.get("type", "function") == "function" and isinstance(name, str):
            return name
    elif choice in (None, "auto", "none", "required"):
        return choice or "auto"
    message = f"tool_choice must be auto, none, required or a function with its name, got {quote(choice)}"
    raise RequestError(400, message, param="tool_choice")


def check_combination(body: Body) -> None:
    """Raises RequestError for fields that contradict each other."""
    if body.stream_options is not None and not body.stream:
        raise RequestError(400, "stream_options needs stream: true", param="stream_options")
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of must equal n, got {quote(body.best_of)}"
        raise RequestError(400, message, param="best_of", code="unsupported")
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise RequestError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    for name in (body.model_extra or {}).keys() - SETTING_NAMES.keys() - IGNORED - UNSUPPORTED.keys():
        log.warning("a request has the unknown field %s, which has no effect", escape_name(name))
