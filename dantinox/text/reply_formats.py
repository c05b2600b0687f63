"""The notations in which model families write reasoning and tool calls, and how a chat template
reveals its notation.

Sources: the chat templates of the families, and the prompt formats that their authors document
(Llama 3.1 and 4, Mistral's tokenizer v3 to v13, Gemma 4, OpenAI harmony, Hermes function calling,
Qwen3-Coder, Granite 3).
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dantinox.files import UserError, quote
from dantinox.text.chat_template import ChatTemplate
from dantinox.text.tokenizer import Tokenizer
from dantinox.text.tool_calls import (
    CallReader,
    JSONCalls,
    NamedCalls,
    Schema,
    WholeCalls,
    parse_gemma,
    parse_python,
    parse_xml,
)

Schemas = Mapping[str, Schema]  # the parameters of each tool by name


class Delimiters(NamedTuple):
    """The texts around the reasoning of a reply."""

    begin: str
    end: str


class ToolFormat(NamedTuple):
    """A notation of tool calls.

    Attributes:
      begin_markers: texts that begin a section of calls.
      end: the text that ends a section; "": the end of the reply.
      reader: creates the reader of a section.
      opening: a character that begins a section if it is the first of the reply; it belongs to the
        section.
      bare_call: the beginning of a call of the tool `{}`. It begins a section if the model leaves
        out the marker, and belongs to the section.
      specials: further special tokens that occur in a section.
      stops: special tokens that end a reply with calls.
      in_template: a pattern of the source of the chat templates with this notation.
    """

    begin_markers: tuple[str, ...]
    end: str
    reader: Callable[[Schemas], CallReader]
    in_template: str
    opening: str = ""
    bare_call: str = ""
    specials: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()


GEMMA_QUOTE = '<|"|>'
FUNCTION_GEMMA_QUOTE = "<escape>"
HARMONY = "harmony"
HARMONY_SPECIALS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
DEFAULT_TOOL_FORMAT = "hermes"

# Name → notation. The first whose pattern occurs in the template is used, otherwise
# `DEFAULT_TOOL_FORMAT`.
TOOL_FORMATS: dict[str, ToolFormat] = {
    HARMONY: ToolFormat(
        ("<|channel|>commentary to=functions.", "<|channel|>analysis to=functions."),
        "",
        lambda schemas: JSONCalls(""),
        r"<\|channel\|>.*<\|message\|>",
        specials=HARMONY_SPECIALS,
        stops=("<|call|>", "<|return|>"),
    ),
    "gemma": ToolFormat(
        ("<|tool_call>",),
        "<tool_call|>",
        lambda schemas: WholeCalls("<tool_call|>", parse_gemma(GEMMA_QUOTE)),
        r"<\|tool_call>",
        specials=(GEMMA_QUOTE,),
        stops=("<|tool_response>",),
    ),
    "functiongemma": ToolFormat(
        ("<start_function_call>",),
        "<end_function_call>",
        lambda schemas: WholeCalls("<end_function_call>", parse_gemma(FUNCTION_GEMMA_QUOTE)),
        r"<start_function_call>",
        specials=(FUNCTION_GEMMA_QUOTE,),
        stops=("<start_function_response>",),
    ),
    "mistral_args": ToolFormat(
        ("[TOOL_CALLS]",),
        "",
        lambda schemas: NamedCalls("[ARGS]", "[TOOL_CALLS]"),
        r"\[ARGS\]",
        specials=("[ARGS]", "[CALL_ID]"),
    ),
    "mistral": ToolFormat(("[TOOL_CALLS]",), "", lambda schemas: JSONCalls(""), r"\[TOOL_CALLS\]"),
    "qwen_xml": ToolFormat(
        ("<tool_call>",),
        "</tool_call>",
        lambda schemas: WholeCalls("</tool_call>", parse_xml(schemas)),
        r"<function=",
        bare_call="<function={}>",
    ),
    "pythonic": ToolFormat(
        ("<|python_start|>",),
        "<|python_end|>",
        lambda schemas: WholeCalls("<|python_end|>", parse_python),
        r"<\|python_start\|>|\[func_name1\(",
        opening="[",
        stops=("<|eom|>", "<|eom_id|>"),
    ),
    "llama": ToolFormat(
        ("<|python_tag|>",),
        "",
        lambda schemas: JSONCalls(""),
        r"<\|python_tag\|>|\"parameters\": dictionary of argument",
        opening="{",
        stops=("<|eom_id|>",),
    ),
    "granite": ToolFormat(
        ("<|tool_call|>",), "", lambda schemas: JSONCalls(""), r"<\|tool_call\|>"
    ),
    "hermes": ToolFormat(
        ("<tool_call>",), "</tool_call>", lambda schemas: JSONCalls("</tool_call>"), r"<tool_call>"
    ),
}

# The first pair whose end occurs in the template is used.
REASONING = (
    Delimiters("<|channel>thought", "<channel|>"),
    Delimiters("[THINK]", "[/THINK]"),
    Delimiters("<seed:think>", "</seed:think>"),
    Delimiters("<think>", "</think>"),
)


class ReplyFormat(NamedTuple):
    """The notation of a model's replies.

    Attributes:
      name: the name of the notation of tool calls.
      tools: the notation of tool calls.
      reasoning: the texts around the reasoning; None if the template has none. Harmony uses
        channels instead.
      visible_ids: special tokens that are part of the notation, so that they must appear in the
        text.
      stop_ids: special tokens that end a reply with calls.
    """

    name: str
    tools: ToolFormat
    reasoning: Delimiters | None
    visible_ids: frozenset[int]
    stop_ids: frozenset[int]

    @property
    def reasons(self) -> bool:
        """Whether a reply may contain reasoning."""
        return self.reasoning is not None or self.name == HARMONY


def find_tool_format(source: str) -> str | None:
    """Returns the name of the notation of tool calls that the source of a chat template contains,
    or None.
    """
    return next(
        (
            name
            for name, one in TOOL_FORMATS.items()
            if re.search(one.in_template, source, re.DOTALL)
        ),
        None,
    )


def reply_format(
    template: ChatTemplate | None, tokenizer: Tokenizer, tool_format: str = "auto"
) -> ReplyFormat:
    """Returns the notation that a model uses.

    Args:
      template: the chat template, whose source reveals the notation.
      tool_format: a name of `TOOL_FORMATS`, or `auto`.

    Raises:
      UserError: there is no such notation.
    """
    source = "" if template is None else template.source
    name = (
        (find_tool_format(source) or DEFAULT_TOOL_FORMAT) if tool_format == "auto" else tool_format
    )
    if name not in TOOL_FORMATS:
        raise UserError(
            f"the tool format must be auto or one of {', '.join(TOOL_FORMATS)}, got"
            f" {quote(tool_format)}"
        )
    tools = TOOL_FORMATS[name]
    reasoning = (
        None if name == HARMONY else next((pair for pair in REASONING if pair.end in source), None)
    )
    markers = [*tools.begin_markers, tools.end, *tools.specials, *(reasoning or ())]
    special = tokenizer.special_tokens
    visible = frozenset(
        index for token, index in special.items() if any(token in marker for marker in markers)
    )
    return ReplyFormat(
        name,
        tools,
        reasoning,
        visible,
        frozenset(special[token] for token in tools.stops if token in special),
    )
