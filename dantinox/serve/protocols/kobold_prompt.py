"""Prompts of the KoboldAI protocol: placeholders, tokenization, truncation to the context, stop sequences."""

import re
from collections.abc import Mapping, Sequence
from functools import cache

from dantinox.config import UserError
from dantinox.generation import LoadedModel
from dantinox.serve.errors import RequestError
from dantinox.text import ChatTemplate, Tokenizer

LEAST = 16  # tokens of a context, and of a prompt that a long memory leaves of it
PLACE = re.compile(r"\n?\{\{\[(INPUT|OUTPUT|SYSTEM|INPUT_END|OUTPUT_END|SYSTEM_END)\]\}\}\n?")
# What a model without a template is asked with, as by KoboldCpp.
PLAIN = {"INPUT": "\n### Instruction:\n", "OUTPUT": "\n### Response:\n", "SYSTEM": "\n### Instruction:\n"}
SAID = ("first-5dd0a1", "second-5dd0a1", "third-5dd0a1")  # no template writes these by itself


class Tags:
    """What stands for the places of instructions: those of a chat template, else KoboldCpp's own.

    A place for the end of a turn is empty, as what begins the next turn ends the one before.
    """

    def __init__(self, template: ChatTemplate | None):
        self._template = template
        self._found = cache(self._read)

    def fill(self, text: str, begins: bool) -> str:
        """The text with its places filled in.

        Args:
          begins: nothing stands before it, so that its first place ends no turn.

        Raises:
          UserError: the template writes no such conversation.
        """
        if "{{[" not in text:
            return text

        def filled(place: re.Match[str]) -> str:
            first = begins and not text[: place.start()].strip() and place[1] == "INPUT"
            return self._found().get("FIRST" if first else place[1], "")

        return PLACE.sub(filled, text)

    def fill_all(self, memory: str, prompt: str, stops: Sequence[str]) -> tuple[frozenset[int], str, str, tuple[str, ...]]:
        """The tokens that end a turn, where some text has a place; memory, prompt and stops with their places filled in."""
        has_place = any(map(PLACE.search, (memory, prompt, *stops)))
        ends = self._template.end_ids if self._template and has_place else frozenset()
        prompt = self.fill(prompt, not memory.strip())
        return ends, self.fill(memory, True), prompt, tuple(filter(None, (self.fill(stop, False).strip() for stop in stops)))

    def _read(self) -> Mapping[str, str]:
        if self._template is None:
            return PLAIN | {"FIRST": PLAIN["INPUT"]}
        roles = ("user", "assistant", "user")
        said = [{"role": role, "content": text} for role, text in zip(roles, SAID, strict=True)]
        parts = re.split("|".join(SAID), self._template.text(said, generation_prompt=True))
        if len(parts) != 4:
            raise UserError(f"{self._template.name} changes what is said: the places for instructions cannot be filled")
        first, _, turn, answer = parts
        return {"FIRST": first, "INPUT": turn, "OUTPUT": answer, "SYSTEM": self._system()}

    def _system(self) -> str:
        assert self._template is not None
        said = [{"role": role, "content": text} for role, text in zip(("system", "user"), SAID, strict=False)]
        try:
            before, found, _ = self._template.text(said).partition(SAID[0])
        except UserError:  # a template without this role
            return ""
        return before if found else ""


def fitted(run: LoadedModel, memory: str, prompt: str, new: int, context: int) -> tuple[list[int], int]:
    """The tokens to be continued, and how many may be new.

    What is asked to be new has its room; but half of the context is the text's, if it is so long, so that a client that asks
    for more than there is still gets what it asked about. Of a text that is too long the memory stays and the front of the
    prompt goes.

    Args:
      new: tokens that were asked for.
      context: tokens that both may have together.

    Raises:
      UserError: nothing is to be continued, or the vocabulary cannot spell it.
      RequestError: 400, the memory alone is too long.
    """
    tokenizer = run.tokenizer
    kept, dropped = (tokenizer.encode(text, parse_special=True) for text in (memory, prompt))  # as KoboldCpp does
    if not kept and not dropped:
        kept = run.prompt_ids("")
    elif tokenizer.add_bos and tokenizer.bos_id is not None and (kept or dropped)[0] != tokenizer.bos_id:
        kept = [tokenizer.bos_id, *kept]
    least = min(len(dropped), LEAST)
    if len(kept) + least >= context:
        message = f"the memory has {len(kept):,} tokens and the context is {context:,}: shorten the memory"
        raise RequestError(400, message, param="memory")
    room = min(max(context - new, context // 2), context - 1)
    ids = kept + dropped[-max(room - len(kept), least) :] if dropped else kept
    return ids, min(new, context - len(ids))


def split_stops(tokenizer: Tokenizer, stops: Sequence[str]) -> tuple[list[str], list[int]]:
    """Stops as texts, and as tokens those that begin with the name of a special one, which is in no text."""
    texts, ids = [], []
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    for stop in stops:
        name = next((name for name in names if stop.lstrip().startswith(name)), None)
        if name is None:
            texts.append(stop)
        else:
            ids.append(tokenizer.special_tokens[name])
    return texts, ids
