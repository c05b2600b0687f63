"""Tools in conversations: the fields of messages that templates expect, and a default prompt for
templates without tools.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dantinox.files import UserError, quote
from dantinox.text.chat_template import (
    ChatPrompt,
    ChatTemplate,
    MaskedConversation,
    Message,
    Tools,
    check_message,
)

# The prompt of Hermes, shortened: https://github.com/NousResearch/Hermes-Function-Calling describes
# the notation.
DEFAULT_PROMPT = """\
You can call functions. Their signatures are between <tools> and </tools>, one JSON object per line:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as a JSON object between <tool_call> and </tool_call>, in this form:
<tool_call>
{{"name": "function_name", "arguments": {{"parameter": "value"}}}}
</tool_call>
The results of your calls come in the next message, between <tool_response> and </tool_response>."""


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages in the form that templates expect: arguments as objects, and reasoning under
    both of its names.

    Raises:
      UserError: a message is not an object with a role and a text, or the arguments of a tool call
        are not a JSON object.
    """
    return [_template_message(number, message) for number, message in enumerate(messages)]


def _template_message(number: int, message: Message) -> dict[str, Any]:
    if isinstance(message, Mapping):
        message = {**message, "content": message.get("content") or ""}
    check_message(number, message)
    converted = {name: value for name, value in message.items() if value is not None}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        # `thinking` is the name in gpt-oss's template.
        converted |= {"reasoning_content": reasoning, "thinking": reasoning}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise UserError(f"messages.{number}.tool_calls must be a list, got {quote(calls)}")
        converted["tool_calls"] = [
            _template_call(f"messages.{number}.tool_calls.{i}", call)
            for i, call in enumerate(calls)
        ]
    return converted


def _template_call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(
            f"{where} must be an object with a function that has a name, got {quote(call)}"
        )
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise UserError(
                f"{where}.function.arguments must be a JSON object, got"
                f" {quote(function['arguments'])}"
            ) from None
    if not isinstance(arguments, dict):
        raise UserError(
            f"{where}.function.arguments must be a JSON object, got {quote(function['arguments'])}"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def with_tool_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Tools | None, *, in_system_message: bool = True
) -> list[dict[str, Any]]:
    """Returns a conversation without tool fields, for a template that does not support them.

    The tools become a part of the system message (`DEFAULT_PROMPT`), or of the first message; tool
    calls become a part of the assistant's text, and the results of consecutive calls one user
    message.

    Args:
      messages: the result of `template_messages`.
      tools: the tools of the request; None or empty: only the messages are converted.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if plain and plain[-1].get("responses"):
                plain[-1]["content"] += f"\n{content}"
            else:
                plain.append({"role": "user", "content": content, "responses": True})
            continue
        for call in message.get("tool_calls", ()):
            function = call["function"]
            written = json.dumps(
                {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False
            )
            content += "\n" * bool(content) + f"<tool_call>\n{written}\n</tool_call>"
        plain.append({"role": message["role"], "content": content})
    if tools:
        written = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        prompt = DEFAULT_PROMPT.format(tools=written)
        if plain and plain[0]["role"] in ("system", "developer"):
            plain[0]["content"] += f"\n\n{prompt}"
        elif in_system_message:
            plain.insert(0, {"role": "system", "content": prompt})
        elif plain:
            plain[0]["content"] = f"{prompt}\n\n{plain[0]['content']}"
    return [{"role": message["role"], "content": message["content"]} for message in plain]


def uses_tools(messages: Sequence[Message]) -> bool:
    """Whether a conversation has tool calls or their results."""
    return any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)


def encode_with_loss_masks(
    template: ChatTemplate, conversations: Sequence[MaskedConversation]
) -> list[tuple[np.ndarray, np.ndarray] | UserError]:
    """Returns the result of `ChatTemplate.encode_with_loss_masks` for conversations with tools,
    with any template.

    The tokens are those that `chat_prompt` gives in generation. Errors are also those of
    `template_messages`.

    Args:
      conversations: conversations with messages and tools as in `chat_prompt`, each with `in_loss`.
    """
    return _with_tools(template, conversations, template.encode_with_loss_masks)


def encode_prompts(
    template: ChatTemplate, conversations: Sequence[MaskedConversation]
) -> list[np.ndarray | UserError]:
    """Returns the token ids of `chat_prompt` for each of several conversations, or the error that
    it raises.
    """
    return _with_tools(template, conversations, template.encode_prompts)


def _with_tools(
    template: ChatTemplate,
    conversations: Sequence[MaskedConversation],
    encode: Callable[[Sequence[MaskedConversation]], list[Any]],
) -> list[Any]:
    """Returns the results of `encode` for conversations with tools, with any template."""
    results: list[Any] = [None] * len(conversations)
    chosen: dict[int, MaskedConversation] = {}
    again: dict[
        int, MaskedConversation
    ] = {}  # the same with the tools in the first message instead of a system message
    for index, conversation in enumerate(conversations):
        try:
            converted = conversation._replace(messages=template_messages(conversation.messages))
        except UserError as error:
            results[index] = error
            continue
        if template.renders_tools or not (conversation.tools or uses_tools(converted.messages)):
            chosen[index] = converted
        else:
            chosen[index] = _without_tools(converted, in_system_message=True)
            again[index] = _without_tools(converted, in_system_message=False)

    def fill(inputs: Mapping[int, MaskedConversation]) -> None:
        for index, result in zip(inputs, encode(list(inputs.values())), strict=True):
            results[index] = result

    fill(chosen)
    # Filled as in `chat_prompt`.
    fill({i: other for i, other in again.items() if isinstance(results[i], UserError)})
    return results


def _without_tools(conversation: MaskedConversation, in_system_message: bool) -> MaskedConversation:
    """Returns a conversation with the tools in a prompt; see `with_tool_prompt`."""
    messages, in_loss, tools, _ = conversation
    plain = with_tool_prompt(messages, tools, in_system_message=in_system_message)
    if in_loss is None:
        return conversation._replace(messages=plain, tools=None)
    flags = iter(
        [
            is_in
            for message, is_in in zip(messages, in_loss, strict=True)
            if message["role"] == "assistant"
        ]
    )
    return conversation._replace(
        messages=plain,
        in_loss=[message["role"] == "assistant" and next(flags) for message in plain],
        tools=None,
    )


def chat_prompt(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    continues: bool = False,
) -> ChatPrompt:
    """Renders a conversation with tools, with any template.

    Args:
      messages: messages in OpenAI's format, with `tool_calls` and the role `tool`.
      tools: the tools in OpenAI's format.
      variables: further variables of the template.
      continues: end the prompt with the content of the last message, which the answer continues.

    Raises:
      UserError: as in `ChatTemplate.prompt` and `template_messages`.
    """
    converted = template_messages(messages)
    if template.renders_tools or not (tools or uses_tools(converted)):
        return template.prompt(converted, tools, variables, continues=continues)
    try:
        return template.prompt(
            with_tool_prompt(converted, tools), None, variables, continues=continues
        )
    except UserError:
        # The template accepts no system message, or another one in the conversation is wrong.
        plain = with_tool_prompt(converted, tools, in_system_message=False)
        return template.prompt(plain, None, variables, continues=continues)
