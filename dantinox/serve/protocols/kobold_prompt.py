"""Prompts of the KoboldAI protocol: placeholders, tokenization, truncation to the context, stop
sequences.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache

from dantinox.config import UserError
from dantinox.generation import LoadedModel
from dantinox.serve.errors import RequestError
from dantinox.text import ChatTemplate, Tokenizer

# Smallest `max_context_length`, and smallest number of prompt tokens kept after a long memory.
MIN_TOKENS = 16
PLACEHOLDER = re.compile(r"\n?\{\{\[(INPUT|OUTPUT|SYSTEM|INPUT_END|OUTPUT_END|SYSTEM_END)\]\}\}\n?")
# The tags of a model without a chat template, as in KoboldCpp.
DEFAULT_TAGS = {
    "INPUT": "\n### Instruction:\n",
    "OUTPUT": "\n### Response:\n",
    "SYSTEM": "\n### Instruction:\n",
}
MARKERS = ("first-5dd0a1", "second-5dd0a1", "third-5dd0a1")  # texts that no template contains


class Placeholders:
    """Replaces instruction placeholders such as `{{[INPUT]}}` with tags of a chat template or with
    KoboldCpp's default tags.

    Placeholders for the end of a turn become empty, because the tag of the next turn also ends the
    previous turn.
    """

    def __init__(self, template: ChatTemplate | None):
        self._template = template
        self._tags = cache(self._read_tags)

    def fill(self, text: str, at_start: bool) -> str:
        """Returns the text with its placeholders replaced.

        Args:
          text: text with placeholders.
          at_start: whether the text starts the prompt, so that there is no previous turn to end.

        Raises:
          UserError: the template cannot format a conversation with these roles.
        """
        if "{{[" not in text:
            return text

        def tag(found: re.Match[str]) -> str:
            is_initial_turn = at_start and not text[: found.start()].strip() and found[1] == "INPUT"
            return self._tags().get("FIRST" if is_initial_turn else found[1], "")

        return PLACEHOLDER.sub(tag, text)

    def fill_all(
        self, memory: str, prompt: str, stops: Sequence[str]
    ) -> tuple[frozenset[int], str, str, tuple[str, ...]]:
        """Replaces the placeholders in all texts.

        Returns:
          The token ids that end a turn (none if the texts have no placeholders), memory, prompt and
          stop strings.
        """
        has_placeholder = any(map(PLACEHOLDER.search, (memory, prompt, *stops)))
        ends = self._template.end_ids if self._template and has_placeholder else frozenset()
        prompt = self.fill(prompt, not memory.strip())
        filled = [self.fill(stop, False).strip() for stop in stops]
        return ends, self.fill(memory, True), prompt, tuple(stop for stop in filled if stop)

    def _read_tags(self) -> Mapping[str, str]:
        template = self._template
        if template is None:
            return DEFAULT_TAGS | {"FIRST": DEFAULT_TAGS["INPUT"]}
        roles = ("user", "assistant", "user")
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, MARKERS, strict=True)
        ]
        parts = re.split("|".join(MARKERS), template.text(messages, generation_prompt=True))
        if len(parts) != 4:
            raise UserError(
                f"{template.name} changes the text of messages:"
                " instruction placeholders cannot be replaced"
            )
        first, _, turn, answer = parts
        return {"FIRST": first, "INPUT": turn, "OUTPUT": answer, "SYSTEM": _system_tag(template)}


def _system_tag(template: ChatTemplate) -> str:
    """Returns the text before a system message; "" for a template without this role."""
    messages = [{"role": "system", "content": MARKERS[0]}, {"role": "user", "content": MARKERS[1]}]
    try:
        before, found, _ = template.text(messages).partition(MARKERS[0])
    except UserError:
        return ""
    return before if found else ""


def fit_to_context(
    run: LoadedModel, memory: str, prompt: str, new: int, context: int
) -> tuple[list[int], int]:
    """Returns the token ids to continue, and the number of new tokens.

    The requested number of new tokens is reserved first, but a long text keeps at least half of the
    context, because some clients request more tokens than the context has. If the text is too long,
    the beginning of the prompt is dropped, not the memory.

    Args:
      run: the loaded model.
      memory: text before the prompt that is never truncated.
      prompt: text to continue.
      new: requested number of new tokens.
      context: maximum length of all tokens together.

    Raises:
      UserError: the text is empty, or the vocabulary cannot encode it.
      RequestError: 400, the memory alone is too long.
    """
    tokenizer = run.tokenizer
    # Names of special tokens become these tokens, as in KoboldCpp.
    memory_ids = tokenizer.encode(memory, parse_special=True)
    prompt_ids = tokenizer.encode(prompt, parse_special=True)
    if not memory_ids and not prompt_ids:
        memory_ids = run.prompt_ids("")
    elif (memory_ids or prompt_ids)[0] not in tokenizer.ids_before_text:
        memory_ids = [*tokenizer.ids_before_text, *memory_ids]
    min_prompt = min(len(prompt_ids), MIN_TOKENS)
    if len(memory_ids) + min_prompt >= context:
        message = (
            f"the memory has {len(memory_ids):,} tokens and the context is {context:,}:"
            " shorten the memory"
        )
        raise RequestError(400, message, param="memory")
    max_text = min(max(context - new, context // 2), context - 1)
    ids = memory_ids
    if prompt_ids:
        max_prompt = max(max_text - len(memory_ids), min_prompt)
        ids = memory_ids + prompt_ids[-max_prompt:]
    return ids, min(new, context - len(ids))


def split_stops(tokenizer: Tokenizer, stops: Sequence[str]) -> tuple[list[str], list[int]]:
    """Splits stop strings into texts and token ids. A string that starts with a special token's
    name becomes the token's id.
    """
    texts: list[str] = []
    ids: list[int] = []
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    for stop in stops:
        name = next((name for name in names if stop.lstrip().startswith(name)), None)
        if name is None:
            texts.append(stop)
        else:
            ids.append(tokenizer.special_tokens[name])
    return texts, ids
