"""Chat templates: conversations as tokens, and the mask of the assistant's tokens.

A message is `{"role": …, "content": text}`; what else it holds is handed to the template. The template is Jinja as
transformers runs it; a run keeps its own in `chat_template.jinja`.
"""

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from dantinox.files import UserError, quote, read_text
from dantinox.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TEMPLATE_BYTES = 1 << 20
RENDERER = Path(__file__).with_name("rendering.py")
CPU_SECONDS, MEMORY_BYTES, MAX_CHARACTERS = 5, 1 << 30, 1 << 24  # that a template may take, and write in characters

# Ordinary text, and the end token behind each turn of the assistant.
PLAIN = """\
{{ bos_token }}
{%- for message in messages %}
{{- '\\n\\n' if not loop.first }}{{ message['role']|capitalize + ':\\n' + message['content']|trim }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n\\nAssistant:\\n' }}{% endif %}"""
# The turns of OpenAI's Chat Markup Language, as Qwen and many others have them.
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


# Name → source, and the special tokens that a vocabulary must have.
BUILTIN = {"plain": (PLAIN, ("eos_token",)), "chatml": (CHATML, ("<|im_start|>", "<|im_end|>"))}


class ChatTemplate:
    """A chat template and the tokenizer that it is written for.

    Attributes:
      source: the text of its `chat_template.jinja`.
      name: what messages call it.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, name: str = "the chat template") -> None:
        """Nothing is rendered before it is asked for: a template that is no Jinja is told by the first call."""
        self.source, self.name, self._tokenizer = source, name, tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    @classmethod
    def load(cls, path: str | Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Reads a `chat_template.jinja`.

        Raises:
          UserError: it cannot be read, or is no text.
        """
        return cls(read_text(path, MAX_TEMPLATE_BYTES, "the chat template"), tokenizer, f"the chat template {path}")

    @classmethod
    def from_name(cls, name: str, tokenizer: Tokenizer) -> "ChatTemplate":
        """One of the built-in templates, `plain` or `chatml`, or that of a file.

        Raises:
          UserError: there is no such file, or the vocabulary has no such tokens as a built-in one needs.
        """
        if name not in BUILTIN:
            if not Path(name).exists():
                raise UserError(f"no chat template {quote(name)}: give a file of Jinja, or one of {', '.join(BUILTIN)}")
            return cls.load(name, tokenizer)
        source, needed = BUILTIN[name]
        for special in needed:
            if special not in tokenizer.special_tokens and special not in tokenizer.template_variables:
                raise UserError(f"the chat template {name} needs a vocabulary with {special}: choose another")
        return cls(source, tokenizer, f"the chat template {name}")

    def text(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """The conversation as the template writes it, special tokens by their names; see `encode`."""
        return self._render([(messages, generation_prompt)])[0].replace("\0", "")

    def encode(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> list[int]:
        """Token ids of a conversation, those of transformers' `apply_chat_template`; but no message spells a special token.

        Args:
          generation_prompt: with what stands before an answer of the assistant.

        Raises:
          UserError: messages that are none, or a template that is none, is not safe, refuses them, or takes too much.
        """
        return self._tokenizer.encode_special_ids(self._render([(messages, generation_prompt)])[0])

    def encode_with_loss_mask(self, messages: Sequence[Message], since: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """A conversation, int32 [N], and which of its tokens are the assistant's own, bool [N], from message `since` on.

        The assistant says what its turn adds to the text before it and its generation prompt, up to the special token that
        ends the turn, which is its own too. A token that stands across the beginning is the assistant's.

        Raises:
          UserError: as `encode`; or the template writes a turn otherwise once others follow, so that what is said in
            generation is not what a finished conversation holds.
        """
        roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
        turns = [i for i, role in enumerate(roles) if i >= since and role == "assistant"]
        asked = [(messages[:i], True) for i in turns] + [(messages[: i + 1], False) for i in turns]
        whole, *parts = self._render([(messages, False), *asked])
        ids_N, ends_N = self._tokenizer.encode_specials(whole)
        mask_N = np.zeros(len(ids_N), bool)
        for before, after in zip(parts[: len(turns)], parts[len(turns) :], strict=True):
            if not (after.startswith(before) and whole.startswith(after)):
                raise UserError(
                    f"{self.name} cannot be trained on turn by turn: a turn of the assistant does not continue what its "
                    "generation prompt ends with, or changes when others follow"
                )
            own = np.flatnonzero((ends_N > len(before)) & (ends_N <= len(after)))
            specials = np.flatnonzero(np.isin(ids_N[own], list(self._tokenizer.special_ids)))
            mask_N[own[: specials[-1] + 1] if len(specials) else own] = True
        return ids_N, mask_N

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The special tokens that end a turn of the assistant, the vocabulary's end token among them."""
        ids = set() if self._tokenizer.eos_id is None else {self._tokenizer.eos_id}
        try:
            tokens, mask = self.encode_with_loss_mask([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        except UserError:
            return frozenset(ids)
        return frozenset(ids | (set(tokens[mask][-1:].tolist()) & self._tokenizer.special_ids))

    def _render(self, asked: Sequence[tuple[Sequence[Message], bool]]) -> list[str]:
        """The texts of conversations, whose special tokens a NUL keeps apart from what messages spell."""
        values = [{"messages": self._check_messages(messages), "add_generation_prompt": prompt} for messages, prompt in asked]
        with self._lock:
            found = self._request(values)
        if isinstance(found, dict):
            words = "refuses these messages" if "refusal" in found else "cannot be rendered"
            raise UserError(f"{self.name} {words}: {next(iter(found.values()))}")
        return found

    def _check_messages(self, messages: Sequence[Message]) -> list[Any]:
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise UserError(f"message {number} must be an object with role and content, got {quote(message)}")
            role, content = message.get("role"), message.get("content")
            if role not in ROLES:
                raise UserError(f"the role of message {number} must be one of {', '.join(ROLES)}, got {quote(role)}")
            if not isinstance(content, str):
                raise UserError(f"the content of message {number} must be text, got {quote(content)}")
        return [self._escape(dict(message)) for message in messages]

    def _escape(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._tokenizer.escape_special_tokens(value)
        if isinstance(value, Mapping):
            return {str(name): self._escape(item) for name, item in value.items()}
        return [self._escape(item) for item in value] if isinstance(value, list | tuple) else value

    def _request(self, conversations: Any) -> Any:
        """The answer of the process that renders; one that the template has ended is replaced at the next call."""
        variables = json.dumps(self._tokenizer.template_variables | {"tools": None, "documents": None})
        question = {"template": self.source, "variables": variables, "conversations": conversations}
        try:
            line = json.dumps(question, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"messages must be plain JSON: {error}") from None
        if self._process is None:
            command = [sys.executable, "-P", str(RENDERER), *map(str, (CPU_SECONDS, MEMORY_BYTES, MAX_CHARACTERS))]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
            )
            weakref.finalize(self, _kill, self._process)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(line)
            stdin.flush()
            return json.loads(stdout.readline())
        except (OSError, ValueError):  # the process has ended
            _kill(self._process)
            self._process = None
            return {"error": f"it takes more than {CPU_SECONDS} seconds or {MEMORY_BYTES >> 20} MiB"}


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # closes the pipes
