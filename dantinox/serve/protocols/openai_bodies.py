"""Request bodies of the OpenAI protocol, and their conversion to settings."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BeforeValidator, Field

from dantinox.config import GenerationSection
from dantinox.config.request_overlay import REQUEST_KEYS
from dantinox.files import quote
from dantinox.generation.guides.constraints import Constraint
from dantinox.serve.errors import RequestError
from dantinox.serve.operations.limits import MAX_CHOICES, MAX_PROMPTS, MAX_SALT_LENGTH, MAX_SAMPLES
from dantinox.serve.protocols.bodies import (
    UNSUPPORTED,
    Alternatives,
    Message,
    StrictBody,
    to_tuple,
    warn_unknown,
)
from dantinox.serve.protocols.kobold_bodies import STEPS_OFF
from dantinox.serve.protocols.sampling_options import to_breakers
from dantinox.serve.protocols.tool_chat import Conversation, check_effort
from dantinox.text.chat_template import continues_last

# Field → setting: names of llama.cpp, KoboldCpp and vLLM, then every setting under its own name,
# which takes precedence.
SETTING_NAMES = {
    "typical_p": "typical",
    "tfs": "tail_free",
    "tfs_z": "tail_free",
    "repeat_penalty": "repetition_penalty",
    "mirostat_mode": "mirostat",
    "allowed_token_ids": "allowed_tokens",
    "include_stop_str_in_output": "keep_stop",
} | {name: name for name in REQUEST_KEYS}
# Setting that enables a step → its value without the step (or any negative value), and the settings
# that then have no effect. Many clients send all of them.
STEP_PARAMETERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "xtc_probability": (0, ("xtc_threshold",)),
    "dry_multiplier": (0, ("dry_base", "dry_allowed_length", "dry_range", "dry_breakers")),
    "mirostat": (0, ("mirostat_tau", "mirostat_eta")),
    "smoothing_factor": (0, ("smoothing_curve",)),
    "adaptive_target": (-1, ("adaptive_decay",)),
    "repetition_penalty": (1, ("repetition_range", "repetition_slope")),
    "guidance_scale": (1, ("negative_prompt",)),
}
# Fields that have no effect.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "verbosity", "function_call", "prediction", "guided_decoding_backend",
    "reasoning_format", "reasoning_control",
)  # fmt: skip


def _to_prompts(value: Any) -> list[str | list[int]]:
    """Converts a prompt to a list: it may be a text, a list of texts, token ids, or a list of lists
    of ids.
    """
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
    raise ValueError(
        "must be a string, a list of strings, a list of token ids, or a list"
        " of such lists, none of them empty"
    )


def _to_structured_outputs(value: Any) -> Any:
    """Refuses fields of `structured_outputs` that would change the answer and are not supported."""
    if isinstance(value, dict):
        for name in ("whitespace_pattern", "structural_tag"):
            if value.get(name) is not None:
                raise ValueError(f"must not have {name}, which is not supported by this server")
        return {name: part for name, part in value.items() if part is not None}
    return value


BUDGET_NAMES = AliasChoices("reasoning_budget", "thinking_token_budget")
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class StreamOptions(StrictBody):
    include_usage: bool | None = None


def _schema_constraint(schema: Any) -> Constraint:
    return Constraint("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


# Field that constrains the answer → the constraint for its value.
CONSTRAINTS: dict[str, Callable[[Any], Constraint]] = {
    "guided_json": _schema_constraint,
    "json_schema": _schema_constraint,
    "guided_json_object": lambda value: Constraint("json_object", ""),
    "guided_regex": lambda regex: Constraint("regex", regex),
    "guided_choice": lambda texts: Constraint(
        "lark", "start: " + " | ".join(map(json.dumps, texts))
    ),
    "guided_grammar": lambda grammar: Constraint("lark", grammar),
    "grammar": lambda grammar: Constraint("gbnf", grammar),
}
OFF = (None, "", False)  # values of these fields that constrain nothing
Schema = dict[str, Any] | str
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)
]


class JSONSchema(StrictBody):
    source: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(StrictBody):
    """`response_format`; the schema is in `json_schema`, or in `schema` as llama.cpp's clients send
    it.
    """

    type: str
    json_schema: JSONSchema | None = None
    source: dict[str, Any] | None = Field(None, alias="schema")


class StructuredOutputs(StrictBody):
    """vLLM's object `structured_outputs`; its fields have the meaning of those that begin with
    `guided_`.
    """

    guided_json: Schema | None = Field(None, alias="json")
    guided_json_object: bool | None = Field(None, alias="json_object")
    guided_regex: str | None = Field(None, alias="regex")
    guided_choice: Choices | None = Field(None, alias="choice")
    guided_grammar: str | None = Field(None, alias="grammar")


class ConstraintBody(StrictBody):
    """Fields that constrain the answer.

    Attributes:
      response_format: requires JSON output, which matches the schema if one is given.
      guided_json, json_schema: JSON schema of the answer.
      guided_json_object: true requires a JSON object.
      guided_regex: regular expression of the whole answer.
      guided_choice: texts, one of which is the whole answer.
      guided_grammar: Lark grammar of the answer.
      grammar: GBNF grammar of the answer.
      structured_outputs: `json`, `json_object`, `regex`, `choice` or `grammar`, as the fields above
        with these names.
    """

    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None
    json_schema: Schema | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    structured_outputs: (
        Annotated[StructuredOutputs, BeforeValidator(_to_structured_outputs)] | None
    ) = None

    def constraint(self) -> Constraint | None:
        """Returns the constraint on the answer, or None.

        Raises:
          RequestError: 400, the constraint is invalid, or the body has several.
        """
        found = self._constraints()
        names = list(found)
        if len(names) > 1:
            raise RequestError(
                400,
                f"{names[0]} and {names[1]} both constrain the answer: use one of them",
                param=names[1],
            )
        return found[names[0]] if names else None

    def constraint_field(self) -> str:
        """Returns the name of the field that constrains the answer; without a constraint,
        `response_format`.
        """
        return next(iter(self._constraints()), "response_format")

    def _constraints(self) -> dict[str, Constraint]:
        """Returns field → constraint for each field that constrains the answer."""
        found = (
            {}
            if (constraint := self._format_constraint()) is None
            else {"response_format": constraint}
        )
        for name, make in CONSTRAINTS.items():
            value = getattr(self, name)
            if value not in OFF:
                found[name] = make(value)
        for name, make in CONSTRAINTS.items():
            value = getattr(self.structured_outputs, name, None)
            if value not in OFF:
                found[f"structured_outputs.{name.removeprefix('guided_')}"] = make(value)
        return found

    def _format_constraint(self) -> Constraint | None:
        if self.response_format is None or self.response_format.type == "text":
            return None
        kind = self.response_format.type
        if kind not in ("json_object", "json_schema"):
            message = (
                f"response_format.type must be text, json_object or json_schema, got {quote(kind)}"
            )
            raise RequestError(400, message, param="response_format.type")
        named = self.response_format.json_schema
        source = self.response_format.source if named is None else named.source
        if source is None and kind == "json_schema":
            raise RequestError(
                400, "response_format.json_schema.schema is missing", param="response_format"
            )
        return Constraint("json_object", "") if source is None else _schema_constraint(source)


class Body(ConstraintBody):
    """Fields of completions and chat completions. Every key of `generation` and `router` is an
    additional field.

    Attributes:
      model: name of the served model, or `MODEL:NAME` to select an adapter; another name is an
        error.
      lora: name of the adapter; null uses the model without one.
      stream: send the answer as server-sent events while it is generated.
      stream_options: options of a stream.
      n: number of samples of each prompt.
      best_of: must equal n.
      seed: seed of the sampler, reduced to 32 bits.
      stop: strings that end the answer.
      max_tokens: maximum number of new tokens.
      logit_bias: numbers added to the logits of tokens, named by id or by text.
      dynatemp_range: the temperature varies by this much around its value.
      dry_sequence_breakers: another name of `dry_breakers`, which may also be a string with a JSON
        list.
      cache_salt: only requests with an equal salt share keys in the prefix cache.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED
    ignored: ClassVar[tuple[str, ...]] = IGNORED

    model: str | None = None
    lora: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    best_of: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(to_tuple)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logit_bias: dict[str, Bias] | None = None
    dynatemp_range: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    dry_sequence_breakers: Annotated[tuple[str, ...], BeforeValidator(to_breakers)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_LENGTH)] | None = None

    def settings(self, max_tokens: int | None, base: GenerationSection) -> dict[str, object]:
        """Returns the settings of the request, for `EngineProtocol.settings`; `base` has those of
        the server.
        """
        extra = self.model_extra or {}
        given = {
            name: setting for name, setting in SETTING_NAMES.items() if extra.get(name) is not None
        }
        found: dict[str, Any] = {setting: extra[name] for name, setting in given.items()}
        renamed = {
            "max_new_tokens": max_tokens,
            "n": self.n,
            "seed": None if self.seed is None else self.seed % 2**32,
            "stop": None if self.stop is None else list(self.stop),
            "logit_bias": self.logit_bias,
        }
        found |= {name: value for name, value in renamed.items() if value is not None}
        if self.dry_sequence_breakers is not None and found.get(
            "dry_multiplier", base.dry_multiplier
        ):
            found.setdefault("dry_breakers", list(self.dry_sequence_breakers))
        middle = found.get("temperature", base.temperature)
        # Otherwise, the error is about the temperature.
        if self.dynatemp_range and isinstance(middle, int | float):
            low = max(middle - self.dynatemp_range, 0.0)
            high = middle + self.dynatemp_range
            found = {"dynatemp_low": low, "dynatemp_high": high} | found | {"temperature": 1.0}
        for switch, (off, parameters) in STEP_PARAMETERS.items():
            value = found.get(switch)
            if isinstance(value, int | float) and (value == off or value < 0):
                found = {name: kept for name, kept in found.items() if name not in parameters}
        order = found.get("sampler_order")
        if (
            isinstance(order, list)
            and all(type(code) is int for code in order)
            and "preset" not in found
        ):
            # Numbers are KoboldCpp's codes, as its clients send them.
            found = STEPS_OFF | found | {"preset": "koboldcpp"}
        if found.get("temperature"):
            # A temperature overrides greedy decoding of the server's settings.
            found.setdefault("greedy", False)
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
      reasoning_budget: maximum number of tokens of the reasoning; `thinking_token_budget` is
        another name.
      chat_template_kwargs: further variables of the chat template.
      continue_final_message: true continues the last message, which is of the assistant; false
        begins a new one. By default, a text of the assistant is continued.
      add_generation_prompt: the opposite of `continue_final_message`.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, validation_alias=BUDGET_NAMES
    )
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    def conversation(self) -> Conversation:
        """Returns the conversation to answer.

        Raises:
          RequestError: 400, a field is wrong.
        """
        messages = [message.fields() for message in self.messages]
        continues = self.continue_final_message
        if self.add_generation_prompt is not None:
            if continues is self.add_generation_prompt:
                message = "add_generation_prompt must be the opposite of continue_final_message"
                raise RequestError(400, message, param="add_generation_prompt")
            continues = not self.add_generation_prompt
        if continues and not continues_last(messages):
            message = (
                "continue_final_message needs a last message that"
                " is of the assistant and has a text"
            )
            raise RequestError(400, message, param="continue_final_message")
        return Conversation(
            messages,
            tools=self.tools or (),
            choice=chosen_tool(self.tool_choice),
            parallel=self.parallel_tool_calls is not False,
            effort=check_effort(self.reasoning_effort),
            budget=self.reasoning_budget,
            variables=self.chat_template_kwargs or {},
            constraint=self.constraint(),
            field_names={"response_format": self.constraint_field()},
            continues=continues,
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
    message = (
        f"tool_choice must be auto, none, required or a function with its name, got {quote(choice)}"
    )
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
    warn_unknown(body, *SETTING_NAMES)
