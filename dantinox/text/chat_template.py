"""Chat templates: turn conversations into tokens, with a loss mask of the assistant's tokens.

A message is `{"role": …, "content": text}`; other fields, such as `tool_calls`, are passed to the
template. The template is Jinja in the dialect of Transformers. A run stores its template in
`chat_template.jinja`.
"""

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from dantinox.files import UserError, quote, read_text
from dantinox.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TEMPLATE_BYTES = 1 << 20
RENDERER = Path(__file__).with_name("template_process.py")
# The limits of one conversation: seconds of CPU time, bytes of memory, characters of output.
CPU_SECONDS = 5
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 24
REQUEST_BYTES = 1 << 18  # of all conversations in a request; a larger one is sent alone

_JSON = json.JSONEncoder(allow_nan=False)
# Marks the end of the last message in a rendered conversation. Random, so that no text
# contains it by chance.
END_MARK = "4b1e3a9c5d0f8b27"
RESERVED_VARIABLES = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
}

# Ordinary text, with the EOS token after each turn of the assistant.
PLAIN = """\
{{ bos_token }}
{%- for message in messages %}
{{- '\\n\\n' if not loop.first }}{{ message['role']|capitalize + ':\\n' + message['content'] }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n\\nAssistant:\\n' }}{% endif %}"""
# Only the contents, with the EOS token after each turn of the assistant: for a model that continues
# text.
BARE = """\
{{ bos_token }}
{%- for message in messages %}{{ message['content'] }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}"""
# OpenAI's Chat Markup Language, as used by Qwen and many others.
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


# Name → source, and what the vocabulary must have: special tokens, or variables that name them.
BUILTIN = {
    "plain": (PLAIN, ("eos_token",)),
    "bare": (BARE, ("eos_token",)),
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>")),
}


class MaskedConversation(NamedTuple):
    """A conversation to encode with a loss mask; see `ChatTemplate.encode_with_loss_mask`."""

    messages: Sequence[Message]
    in_loss: Sequence[bool] | None = None
    tools: Tools | None = None
    variables: Mapping[str, Any] | None = None


class Rendering(NamedTuple):
    """What to render of a conversation.

    Attributes:
      messages: the conversation.
      cuts: one pair for each text to render: how many messages it has, from the first on, and
        whether the start of an assistant turn follows them.
      tools, variables: as in `ChatTemplate.prompt`.
    """

    messages: Sequence[Message]
    cuts: Sequence[tuple[int, bool]]
    tools: Tools | None = None
    variables: Mapping[str, Any] | None = None


class ChatPrompt(NamedTuple):
    """A rendered conversation: its token ids, and its text with special tokens by name."""

    ids: list[int]
    text: str


def continues_last(messages: Sequence[Message]) -> bool:
    """Returns whether the last message is a text of the assistant without tool calls, which the
    answer then continues.
    """
    last = messages[-1] if messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant" or last.get("tool_calls"):
        return False
    return isinstance(content := last.get("content"), str) and content != ""


def check_message(number: int, message: Any) -> None:
    """Raises UserError unless a message is an object with a role of `ROLES` and a text as its
    content.
    """
    if not isinstance(message, Mapping):
        raise UserError(
            f"message {number} must be an object with role and content, got {quote(message)}"
        )
    role = message.get("role")
    content = message.get("content")
    if role not in ROLES:
        raise UserError(
            f"the role of message {number} must be one of {', '.join(ROLES)}, got {quote(role)}"
        )
    if not isinstance(content, str):
        raise UserError(f"the content of message {number} must be text, got {quote(content)}")


class ChatTemplate:
    """A chat template with its tokenizer.

    Attributes:
      source: the Jinja source.
      name: its name in error messages.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, name: str = "the chat template") -> None:
        """Stores the template. The first call that renders reports syntax errors."""
        self.source = source
        self.name = name
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    @classmethod
    def load(cls, path: str | Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Reads a Jinja file.

        Raises:
          UserError: the file cannot be read, or is not text.
        """
        return cls(
            read_text(path, MAX_TEMPLATE_BYTES, "the chat template"),
            tokenizer,
            f"the chat template {path}",
        )

    @classmethod
    def from_name(cls, name: str, tokenizer: Tokenizer) -> "ChatTemplate":
        """Returns a built-in template, `plain`, `bare` or `chatml`, or reads a file.

        Raises:
          UserError: there is no such file, or the vocabulary lacks special tokens that a built-in
            template needs.
        """
        if name not in BUILTIN:
            if not Path(name).exists():
                raise UserError(
                    f"no chat template {quote(name)}: name a Jinja file or one of"
                    f" {', '.join(BUILTIN)}"
                )
            return cls.load(name, tokenizer)
        source, needed = BUILTIN[name]
        for special in needed:
            if (
                special not in tokenizer.special_tokens
                and special not in tokenizer.template_variables
            ):
                raise UserError(
                    f"the chat template {name} needs a vocabulary with {special}:"
                    " choose another template"
                )
        return cls(source, tokenizer, f"the chat template {name}")

    def text(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """Renders a conversation to text, with special tokens by name; see `encode`."""
        # The NULs escape names of special tokens, see `_render`.
        return self._render_one(messages, generation_prompt).replace("\0", "")

    def encode(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> list[int]:
        """Returns the token ids of a conversation, like `apply_chat_template` of Transformers.

        Unlike in Transformers, text in a message never becomes a special token.

        Args:
          messages: the conversation.
          generation_prompt: whether to append the start of an assistant turn.

        Raises:
          UserError: the messages are invalid, or the template is invalid, unsafe, refuses the
            messages, or exceeds its limits.
        """
        return self._tokenizer.encode_special_ids(self._render_one(messages, generation_prompt))

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> ChatPrompt:
        """Returns the prompt for the next assistant turn, or for the rest of the last message.

        Args:
          messages: the conversation.
          tools: the tools that the assistant may call, in OpenAI's format; a template that does not
            render tools ignores them.
          variables: further variables of the template, such as `enable_thinking`.
          continues: end the prompt with the content of the last message, which the answer
            continues.

        Raises:
          UserError: as in `encode`, or a variable has a name that the template cannot use or that
            is reserved, or the template does not write the content of the last message.
        """
        if continues:
            messages = [
                *messages[:-1],
                {**messages[-1], "content": messages[-1]["content"] + END_MARK},
            ]
        rendered = self._render_one(messages, not continues, tools, variables)
        if continues:
            rendered, found, _ = rendered.rpartition(END_MARK)
            if not found:
                raise UserError(
                    f"{self.name} does not write the last message, so that it cannot be continued"
                )
        return ChatPrompt(self._tokenizer.encode_special_ids(rendered), rendered.replace("\0", ""))

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the template writes the tools of a request into the prompt."""
        parameters = {"type": "object", "properties": {"value": {"type": "string"}}}
        tool = {
            "type": "function",
            "function": {"name": "probe_tool", "description": "none", "parameters": parameters},
        }
        try:
            return "probe_tool" in self.prompt([{"role": "user", "content": "a"}], [tool]).text
        except UserError:
            return False

    def encode_with_loss_mask(
        self,
        messages: Sequence[Message],
        in_loss: Sequence[bool] | None = None,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids of a conversation, int32 [N], and the mask of the assistant's
        tokens, bool [N].

        The tokens of an assistant turn begin after its generation prompt and end with the special
        token that ends the turn. A token that crosses the start of the turn counts as part of it.

        Args:
          messages: the conversation.
          in_loss: for each message, whether it is in the mask if it is an assistant message. None:
            all are.
          tools, variables: as in `prompt`.

        Raises:
          UserError: as in `prompt`; or the template renders a turn differently if other turns
            follow. Training and generation would then see different tokens.
        """
        result = self.encode_with_loss_masks(
            [MaskedConversation(messages, in_loss, tools, variables)]
        )[0]
        if isinstance(result, UserError):
            raise result
        return result

    def encode_with_loss_masks(
        self, conversations: Sequence[MaskedConversation]
    ) -> list[tuple[np.ndarray, np.ndarray] | UserError]:
        """Returns the result of `encode_with_loss_mask` for each of several conversations, or the
        error that it raises.
        """
        turns = [_turns_in_loss(conversation) for conversation in conversations]
        cuts = [
            _cuts_around(len(one.messages), own)
            for one, own in zip(conversations, turns, strict=True)
        ]
        results: list[tuple[np.ndarray, np.ndarray] | UserError] = []
        for result, own_cuts, own_turns in zip(
            self._render_and_encode(conversations, cuts), cuts, turns, strict=True
        ):
            if isinstance(result, UserError):
                results.append(result)
            else:
                texts, tokens = result  # tokens: their ids and their ends
                results.append(
                    self._mask_turns(dict(zip(own_cuts, texts, strict=True)), own_turns, *tokens)
                )
        return results

    def encode_prompts(
        self, conversations: Sequence[MaskedConversation]
    ) -> list[np.ndarray | UserError]:
        """Returns the token ids of `prompt` for each of several conversations, int32, or the error
        that it raises.
        """
        cuts = [[(len(conversation.messages), True)] for conversation in conversations]
        results = self._render_and_encode(conversations, cuts)
        # A result is (texts, (ids, ends)).
        return [result if isinstance(result, UserError) else result[1][0] for result in results]

    def _render_and_encode(
        self,
        conversations: Sequence[MaskedConversation],
        cuts: Sequence[Sequence[tuple[int, bool]]],
    ) -> list[tuple[list[str], tuple[np.ndarray, np.ndarray]] | UserError]:
        """Returns for each conversation its texts, one for each of its `cuts`, and the result of
        `encode_specials` for the first text; or an error.
        """
        rendered = self._render(
            [
                Rendering(c.messages, its, c.tools, c.variables)
                for c, its in zip(conversations, cuts, strict=True)
            ]
        )
        # In order, without the conversations that have an error.
        encoded = iter(
            self._encode_texts([texts[0] for texts in rendered if not isinstance(texts, UserError)])
        )
        results: list[tuple[list[str], tuple[np.ndarray, np.ndarray]] | UserError] = []
        for texts in rendered:
            if isinstance(texts, UserError):
                results.append(texts)
            else:
                tokens = next(encoded)
                results.append(tokens if isinstance(tokens, UserError) else (texts, tokens))
        return results

    def _encode_texts(
        self, texts: Sequence[str]
    ) -> Sequence[tuple[np.ndarray, np.ndarray] | UserError]:
        """Returns the result of `encode_specials` for each text, or its error."""
        try:
            return self._tokenizer.encode_specials_batch(texts)
        except UserError as error:
            return (
                [error]
                if len(texts) == 1
                else [result for text in texts for result in self._encode_texts([text])]
            )

    def _mask_turns(
        self,
        texts: Mapping[tuple[int, bool], str],
        turns: Sequence[int],
        ids_N: np.ndarray,
        ends_N: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray] | UserError:
        """Returns the tokens of a rendered conversation and the mask of some turns.

        Args:
          texts: the rendered texts by `Rendering.cuts`, that of the whole conversation first.
          turns: the indices of the messages in the mask.
          ids_N, ends_N: the token ids of the whole conversation, and where the text of each token
            ends in its rendered text, in characters with the NULs; see `encode_specials`.
        """
        full_text = next(iter(texts.values()))
        mask_N = np.zeros(len(ids_N), bool)
        for turn in turns:
            before = texts[turn, True]
            after = texts[turn + 1, False]
            if not (after.startswith(before) and full_text.startswith(after)):
                return UserError(
                    f"{self.name} does not support training on single turns: a turn of the"
                    " assistant does not continue its generation"
                    " prompt, or changes if other turns follow"
                )
            turn_tokens = np.flatnonzero((ends_N > len(before)) & (ends_N <= len(after)))
            # The turn ends with its last special token, if any, without a line break after it.
            specials = np.flatnonzero(self._tokenizer.is_special_V[ids_N[turn_tokens]])
            mask_N[turn_tokens[: specials[-1] + 1] if len(specials) else turn_tokens] = True
        return ids_N, mask_N

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The special tokens that end a turn of the assistant, including the EOS token of the
        vocabulary.
        """
        ids = set() if self._tokenizer.eos_id is None else {self._tokenizer.eos_id}
        try:
            tokens, mask = self.encode_with_loss_mask(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            )
        except UserError:
            return frozenset(ids)
        # The last token of the turn, if the turn has any and it is special.
        return frozenset(ids | (set(tokens[mask][-1:].tolist()) & self._tokenizer.special_ids))

    def _render_one(
        self,
        messages: Sequence[Message],
        generation_prompt: bool,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        texts = self._render(
            [Rendering(messages, [(len(messages), generation_prompt)], tools, variables)]
        )[0]
        if isinstance(texts, UserError):
            raise texts
        return texts[0]

    def _render(self, conversations: Sequence[Rendering]) -> list[list[str] | UserError]:
        """Renders several conversations. Returns the texts of each one, or its error.

        Special token names inside messages and variables are escaped by a NUL.
        """
        results: list[list[str] | UserError | None] = []  # None: the process renders it
        # The first request stays empty if its first conversation exceeds the limit.
        requests: list[list[bytes]] = [[]]
        size = 0
        for conversation in conversations:
            try:
                values = self._to_json(conversation)
            except UserError as error:
                results.append(error)
                continue
            results.append(None)
            if size + len(values) > REQUEST_BYTES:
                requests.append([])
                size = 0
            requests[-1].append(values)
            size += len(values)
        with self._lock:
            responses = iter(
                [response for request in requests if request for response in self._request(request)]
            )
        return [
            self._check_response(next(responses)) if result is None else result
            for result in results
        ]

    def _to_json(self, conversation: Rendering) -> bytes:
        messages, cuts, tools, variables = conversation
        for name in variables or {}:
            if not name.isidentifier() or name.startswith("_") or name in RESERVED_VARIABLES:
                raise UserError(
                    f"a variable of the chat template must not have the name {quote(name)}"
                )
        try:
            values = self._escape(
                {**(variables or {}), **({"tools": list(tools)} if tools else {})}
            )
            request = {"cuts": cuts, "messages": self._check_messages(messages), "values": values}
            return _JSON.encode(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"messages must be plain JSON: {error}") from None

    def _check_response(self, response: Any) -> list[str] | UserError:
        if isinstance(response, list):
            return response
        # The response is {"refusal": text} or {"error": text}.
        problem = "refuses these messages" if "refusal" in response else "cannot be rendered"
        return UserError(f"{self.name} {problem}: {next(iter(response.values()))}")

    def _check_messages(self, messages: Sequence[Message]) -> list[Any]:
        for number, message in enumerate(messages):
            check_message(number, message)
        return [self._escape(dict(message)) for message in messages]

    def _escape(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._tokenizer.escape_special_tokens(value)
        if isinstance(value, Mapping):
            return {self._escape(str(name)): self._escape(item) for name, item in value.items()}
        return [self._escape(item) for item in value] if isinstance(value, list | tuple) else value

    def _request(self, conversations: Sequence[bytes]) -> list[Any]:
        """Sends conversations to the rendering process and returns its response to each of them.

        If the process dies, each of several conversations is sent again separately, to a new
        process.
        """
        # A string, so that the process can find the compiled template by its source and variables.
        variables = json.dumps(
            self._tokenizer.template_variables | {"tools": None, "documents": None}
        )
        shared = json.dumps({"template": self.source, "variables": variables}).encode()
        # Inserts a key before the closing brace, because the conversations are JSON already.
        line = shared[:-1] + b', "conversations": [' + b", ".join(conversations) + b"]}\n"
        # A process that was ended from outside since the last request is no error of this request.
        if self._process is not None and self._process.poll() is not None:
            _kill(self._process)
            self._process = None
        if self._process is None:
            command = [
                sys.executable,
                "-P",  # keeps the folder of the program out of `sys.path`
                str(RENDERER),
                *map(str, (CPU_SECONDS, MEMORY_BYTES, MAX_CHARACTERS)),
            ]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            weakref.finalize(self, _kill, self._process)
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None and stdout is not None  # both are pipes
        try:
            stdin.write(line)
            stdin.flush()
            responses: list[Any] = json.loads(stdout.readline())
            return responses
        except (OSError, ValueError):  # the process has died
            _kill(self._process)
            self._process = None
        if len(conversations) > 1:
            return [
                response
                for conversation in conversations
                for response in self._request([conversation])
            ]
        return [{"error": f"it needs more than {CPU_SECONDS} seconds or {MEMORY_BYTES >> 20} MiB"}]


def _turns_in_loss(conversation: MaskedConversation) -> list[int]:
    """Returns the indices of the assistant messages in the loss."""
    messages, in_loss = conversation[:2]
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    return [
        i for i, role in enumerate(roles) if role == "assistant" and (in_loss is None or in_loss[i])
    ]


def _cuts_around(messages: int, turns: Sequence[int]) -> list[tuple[int, bool]]:
    """Returns the `Rendering.cuts` of a conversation: the whole one first, then the start and the
    end of each turn.
    """
    cuts = [(messages, False)]
    cuts += [(turn, True) for turn in turns]
    cuts += [(turn + 1, False) for turn in turns]
    return list(dict.fromkeys(cuts))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the rendering process."""
    process.kill()
    process.communicate()  # closes the pipes
