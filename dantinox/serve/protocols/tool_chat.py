"""Conversations of all protocols: rendering with tools, constraints of tool calls, and the parser
of each reply.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dantinox.config import Config, with_generation
from dantinox.files import UserError, quote
from dantinox.generation.guides.constraints import Constraint
from dantinox.generation.guides.guide import Reasoning
from dantinox.generation.request import GenerationRequest
from dantinox.serve.errors import JSON, RequestError
from dantinox.serve.operations.background import run_in_thread
from dantinox.serve.service import Service
from dantinox.text.chat_template import continues_last
from dantinox.text.reply_formats import HARMONY, Delimiters, ReplyFormat
from dantinox.text.reply_parser import ReplyParser, is_reasoning_open, make_parser
from dantinox.text.tool_calls import Part
from dantinox.text.tool_grammars import Tool, tool_grammars

MAX_TOOLS = 128
# OpenAI allows 64 characters and no dot, Anthropic 128.
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
# The most tokens of reasoning for each value of `reasoning_effort`, for templates that do not use
# the variable; None: no limit.
EFFORTS: dict[str, int | None] = {
    "none": 0,
    "minimal": 128,
    "low": 512,
    "medium": 2048,
    "high": None,
    "xhigh": None,
}
HARMONY_REASONING = Delimiters("<|channel|>analysis<|message|>", "<|end|>")
HARMONY_ANSWER = "<|channel|>final<|message|>"  # the text before the answer
# Last messages that clients send as a place for the answer.
EMPTY_ANSWERS = (
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": None},
    {"role": "assistant"},
)


@dataclass(frozen=True)
class Conversation:
    """A conversation to answer, as a protocol has parsed it.

    Attributes:
      messages: messages in OpenAI's format.
      tools: the definitions of the tools in OpenAI's format; empty: none.
      choice: `auto`, `none`, `required` or the name of a tool that must be called.
      parallel: whether the reply may have several tool calls.
      effort: a key of `EFFORTS`; None: the default of the model.
      budget: the most tokens of reasoning; None: as `effort` says.
      variables: further variables of the chat template.
      constraint: the constraint on the answer.
      field_names: the names of `response_format`, `function.name` and `function.parameters` in the
        protocol, if they differ.
      continues: whether the answer continues the last message; None: if `continues_last` says so.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    parallel: bool = True
    effort: str | None = None
    budget: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)
    continues: bool | None = None

    def field_name(self, name: str) -> str:
        """Returns the name of a field in the protocol of the sender."""
        return self.field_names.get(name, name)


class PreparedChat(NamedTuple):
    """A conversation as the engine needs it.

    Attributes:
      ids: the tokens of the prompt.
      end_ids: the tokens that end the reply.
      constraint, reasoning, visible_ids: as in `GenerationRequest`.
      form: the notation of the reply.
      schemas: the parameters of the tools that may be called, by name; None: no tools.
      reasoning_is_open: whether the prompt ends inside the reasoning.
      heals_by_default: whether `token_healing` is on in the settings of the server.
      continues: whether the reply continues the last message.
    """

    ids: list[int]
    end_ids: frozenset[int]
    constraint: Constraint | None
    reasoning: Reasoning | None
    visible_ids: frozenset[int]
    form: ReplyFormat
    schemas: Mapping[str, Mapping[str, Any]] | None
    reasoning_is_open: bool
    heals_by_default: bool
    continues: bool

    @property
    def is_plain(self) -> bool:
        """Whether the whole text of a reply is the answer."""
        return self.schemas is None and not self.form.reasons

    def request(
        self, config: Config, logprobs: int | None = None, lora: str | None = None, salt: str = ""
    ) -> GenerationRequest:
        """Returns the generation request for the reply, with an adapter if `lora` names one."""
        return GenerationRequest(
            tuple(self.ids),
            without_healing(config, self.heals_by_default),
            logprobs,
            constraint=self.constraint,
            reasoning=self.reasoning,
            visible_ids=self.visible_ids,
            lora=lora,
            salt=salt,
        )

    def fields(self) -> "ReplyFields":
        """Returns the empty fields of one reply."""
        if self.is_plain:
            return ReplyFields(None)
        is_open = self.reasoning_is_open
        return ReplyFields(
            make_parser(
                self.form, self.schemas, reasoning_is_open=is_open, continues=self.continues
            )
        )


async def prepare_chat(service: Service, chat: Conversation) -> PreparedChat:
    """Renders a conversation and returns what its reply needs.

    Raises:
      RequestError: 400, the model has no chat template, or the tools or the reasoning cannot be
        served.
      UserError: the template rejects the messages.
    """
    form = service.reply_format
    tools = _allowed_tools(chat)
    messages = chat.messages
    if len(messages) > 1 and messages[-1] in EMPTY_ANSWERS:
        messages = messages[:-1]
    continues = continues_last(messages) if chat.continues is None else chat.continues
    if continues and (chat.constraint is not None or chat.choice not in ("auto", "none")):
        message = (
            "the answer continues the last message, which is of the assistant, and can have neither"
            " a format nor a tool "
        )
        raise RequestError(
            400,
            message + "that must be called: remove the message or the other field",
            param="messages",
        )
    variables = dict(chat.variables)
    if chat.effort is not None:
        variables |= {"reasoning_effort": chat.effort, "enable_thinking": chat.effort != "none"}
    prompt, end_ids = await service.render(
        messages, [] if chat.choice == "none" else chat.tools, variables, continues=continues
    )
    is_open = is_reasoning_open(form, prompt.text)
    reasoning = _reasoning(service, form, chat, is_open)
    constraint = _reply_constraint(form, chat, is_open)
    schemas = None
    if tools:
        constraint = await run_in_thread(_call_constraint, service, form, chat, tools, is_open)
        schemas = await run_in_thread(_tool_schemas, tools)
    if schemas is not None or form.name == HARMONY:
        end_ids |= form.stop_ids
    visible_ids = form.visible_ids if schemas is not None or form.reasons else frozenset[int]()
    return PreparedChat(
        ids=prompt.ids,
        end_ids=end_ids - visible_ids,
        constraint=constraint,
        reasoning=reasoning,
        visible_ids=visible_ids,
        form=form,
        schemas=schemas,
        reasoning_is_open=is_open,
        heals_by_default=heals_by_default(service),
        continues=continues,
    )


def _allowed_tools(chat: Conversation) -> list[Tool]:
    """Returns the tools that the reply may call.

    Raises:
      RequestError: 400, a tool is wrong, or `choice` contradicts the tools or the constraint.
    """
    tools = [] if chat.choice == "none" else parse_tools(chat)
    if chat.choice not in ("auto", "none", "required"):
        tools = [tool for tool in tools if tool.name == chat.choice]
        if not tools:
            raise RequestError(
                400,
                f"tool_choice names the tool {quote(chat.choice)}, which is not in tools",
                param="tool_choice",
            )
    if chat.choice == "required" and not tools:
        raise RequestError(400, "tool_choice: required needs tools", param="tool_choice")
    if chat.constraint is not None and tools and chat.choice != "auto":
        name = chat.field_name("response_format")
        raise RequestError(
            400, f"a reply that must call a tool cannot also have {name}", param=name
        )
    return tools


def heals_by_default(service: Service) -> bool:
    """Returns whether `token_healing` is on in the settings of the server."""
    return service.engine.settings({}).generation.token_healing


def without_healing(config: Config, by_default: bool) -> Config:
    """Returns the settings of a conversation. The default `token_healing: true` of a server has no
    effect on them.

    Raises:
      RequestError: 400, the request sets `token_healing`.
    """
    if config.generation.token_healing and not by_default:
        message = (
            "token_healing must be false in a conversation and"
            " after a given beginning of the answer"
        )
        raise RequestError(400, message, param="token_healing")
    return with_generation(config, token_healing=False)


def parse_tools(chat: Conversation) -> list[Tool]:
    """Returns the tools of a request.

    Raises:
      RequestError: 400 with the wrong field.
    """
    definitions = chat.tools
    if len(definitions) > MAX_TOOLS:
        raise RequestError(
            400,
            f"tools must have at most {MAX_TOOLS} entries, got {len(definitions)}",
            param="tools",
        )
    tools: dict[str, Tool] = {}
    for number, definition in enumerate(definitions):
        where = f"tools.{number}"
        function = definition.get("function")
        if definition.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise RequestError(
                400, f"{where} must be of type function with the field function", param=where
            )
        name = function.get("name")
        parameters = function.get("parameters") or {}
        name_field = f"{where}.{chat.field_name('function.name')}"
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            message = (
                f"{name_field} must have 1 to 128 characters of a-z, A-Z, 0-9, _, - and ., got"
                f" {quote(name)}"
            )
            raise RequestError(400, message, param=name_field)
        if name in tools:
            raise RequestError(400, f"{name_field} {quote(name)} occurs twice", param=name_field)
        kinds = parameters.get("type", "object") if isinstance(parameters, Mapping) else None
        if not (kinds == "object" or (isinstance(kinds, list) and "object" in kinds)):
            schema_field = f"{where}.{chat.field_name('function.parameters')}"
            message = (
                f"{schema_field} must be a JSON schema of type object, got {quote(parameters)}"
            )
            raise RequestError(400, message, param=schema_field)
        tools[name] = Tool(name, parameters, function.get("strict") is True)
    return [*tools.values()]


def _reasoning(
    service: Service, form: ReplyFormat, chat: Conversation, is_open: bool
) -> Reasoning | None:
    """Returns the reasoning of the reply with its budget, or None if the model does not reason."""
    uses_variable = (
        service.options.template is not None
        and "reasoning_effort" in service.options.template.source
    )
    budget = chat.budget
    if budget is None and chat.effort is not None and not uses_variable:
        budget = EFFORTS[chat.effort]
    markers = reasoning_markers(form)
    if markers is None:
        return None
    begin, end = markers
    closing = f"{end}<|start|>assistant{HARMONY_ANSWER}" if form.name == HARMONY else f"\n{end}\n\n"
    return Reasoning(
        begin, end, is_open, budget, tuple(service.tokenizer.encode(closing, parse_special=True))
    )


def reasoning_markers(form: ReplyFormat) -> Delimiters | None:
    """Returns the texts around the reasoning in a notation, or None if its models do not reason."""
    return HARMONY_REASONING if form.name == HARMONY else form.reasoning


@contextmanager
def _valid_schemas() -> Iterator[None]:
    """Converts the errors that invalid schemas of tools cause to a RequestError (400)."""
    try:
        yield
    except UserError as error:
        raise RequestError(400, str(error), param="tools") from None
    except (TypeError, ValueError, AttributeError, RecursionError):
        raise RequestError(
            400, "tools has a schema that is not a valid JSON schema", param="tools"
        ) from None


def _tool_schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Returns the merged schema of each tool by its name."""
    with _valid_schemas():
        return {tool.name: tool.merged_schema for tool in tools}


def _reply_constraint(form: ReplyFormat, chat: Conversation, is_open: bool) -> Constraint | None:
    """Returns the constraint on a reply without tools: that of its answer, which may follow
    reasoning.
    """
    answer_markers: tuple[str, ...] = ()
    if form.name == HARMONY:
        answer_markers = (HARMONY_ANSWER,)
    elif form.reasoning is not None and is_open:
        answer_markers = (form.reasoning.end,)
    if chat.constraint is None or not answer_markers:
        return chat.constraint
    return Constraint(chat.constraint.kind, chat.constraint.source, after=answer_markers)


def _call_constraint(
    service: Service, form: ReplyFormat, chat: Conversation, tools: Sequence[Tool], is_open: bool
) -> Constraint | None:
    """Returns the constraint on the tool calls of a reply; None for a vocabulary that cannot be
    constrained.
    """
    if chat.constraint is not None:
        name = chat.field_name("response_format")
        raise RequestError(
            400, f"{name} cannot be combined with tools: set tool_choice to none", param=name
        )
    if service.tokenizer.token_pieces is None:  # llguidance does not support this vocabulary
        if chat.choice != "auto":
            raise RequestError(
                400,
                "tool_choice must be auto or none for the vocabulary of this model",
                param="tool_choice",
            )
        return None
    parallel = chat.parallel and chat.choice in ("auto", "required")
    needs_reasoning = form.reasons and not is_open
    with _valid_schemas():
        grammars = tool_grammars(
            form, tools, service.tokenizer, parallel=parallel, optional_reasoning=needs_reasoning
        )
    if chat.choice == "auto":
        return Constraint(
            "tools",
            grammars.section,
            after=form.tools.begin_markers,
            opening=form.tools.opening,
            repeats=parallel,
        )
    after: tuple[str, ...] = ()
    if is_open and form.reasoning is not None and form.name != HARMONY:
        after = (form.reasoning.end,)
    return Constraint("tools", grammars.whole, after=after)


# --- replies


class ReplyFields:
    """Collects the parts of one reply.

    Attributes:
      content, reasoning: the answer and the reasoning so far.
      calls: the tool calls so far, in OpenAI's format.
    """

    def __init__(self, parser: ReplyParser | None):
        """`parser` is None if the whole text is the answer."""
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self._parser = parser

    def push(self, text: str, finish_reason: str | None) -> list[dict[str, JSON]]:
        """Adds text and returns the deltas of a streamed chat completion; the finish reason marks
        the end of the reply.
        """
        return [self.add(part) for part in self.parts(text, finish_reason)]

    def parts(self, text: str, finish_reason: str | None) -> list[Part]:
        """Returns the parts that new text makes known."""
        if self._parser is None:
            return [Part("content", text)] if text else []
        parts = [*self._parser.push(text)]
        if finish_reason is not None:
            parts += self._parser.finish()
        return parts

    def reason(self, finish_reason: str | None) -> str | None:
        """Returns the finish reason in OpenAI's format: `tool_calls` if the reply has ended with
        tool calls.
        """
        return "tool_calls" if finish_reason == "stop" and self.calls else finish_reason

    def message(self) -> dict[str, JSON]:
        """Returns the reply as a message of the assistant in OpenAI's format."""
        message: dict[str, JSON] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [*self.calls]
        return message

    def add(self, part: Part) -> dict[str, JSON]:
        """Adds a part and returns the delta of a streamed chat completion."""
        if part.kind == "content":
            self.content += part.text
            return {"content": part.text}
        if part.kind == "reasoning":
            self.reasoning += part.text
            return {"reasoning_content": part.text}
        if part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            call: dict[str, Any] = {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": function,
            }
            self.calls.append(call)
            return {
                "tool_calls": [{"index": len(self.calls) - 1, **call, "function": dict(function)}]
            }
        self.calls[-1]["function"]["arguments"] += part.text
        return {
            "tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": part.text}}]
        }


def check_budget(budget: Any, name: str) -> int | None:
    """Returns a number of tokens of reasoning, or raises RequestError (400) if it is none; `name`
    is its field.
    """
    if budget is None:
        return None
    if type(budget) is not int or budget < 0:
        raise RequestError(
            400, f"{name} must be an integer of at least 0, got {quote(budget)}", param=name
        )
    return budget


def check_effort(effort: Any, name: str = "reasoning_effort") -> str | None:
    """Returns a reasoning effort, or raises RequestError (400) if it is unknown."""
    if effort is None:
        return None
    if not isinstance(effort, str) or effort not in EFFORTS:
        message = f"{name} must be one of {', '.join(EFFORTS)}, got {quote(effort)}"
        raise RequestError(400, message, param=name)
    return effort
