"""Fill-in-the-middle prompts: a code model continues them with the text between a prefix and a
suffix.

The order of the parts and the names of the tokens follow the documentation of each model family.
Most use PSM (prefix, suffix, middle; Bavarian et al. 2022): PREFIX prefix SUFFIX suffix MIDDLE.
Families with SPM place the suffix first.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dantinox.files import UserError
from dantinox.text.tokenizer import Tokenizer


class FimFormat(NamedTuple):
    """The format of a family of models.

    Attributes:
      models: examples of the family.
      prefix, suffix, middle: names of the tokens before the prefix, before the suffix, and before
        the answer; None: no token.
      suffix_first: whether the suffix precedes the prefix.
      bare_suffix: whether the suffix is encoded without the space that a SentencePiece tokenizer
        adds before a text.
      ends: names of tokens that end an answer, in addition to the EOS tokens.
    """

    models: str
    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False
    bare_suffix: bool = False
    ends: tuple[str, ...] = ()


FIM_FORMATS = (
    FimFormat(
        "Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 4",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    FimFormat(
        "StarCoder, StarCoder2, Granite Code, Stable Code",
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ends=("<fim_pad>", "<file_sep>", "<repo_name>", "<filename>"),
    ),
    FimFormat("SantaCoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",)),
    FimFormat("CodeLlama", "▁<PRE>", "▁<SUF>", "▁<MID>", bare_suffix=True, ends=("▁<EOT>",)),
    FimFormat("CodeLlama", "<PRE>", "<SUF>", "<MID>", bare_suffix=True, ends=("<EOT>",)),
    FimFormat(
        "DeepSeek-Coder", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>",)
    ),
    FimFormat("DeepSeek-Coder", "<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>", ends=("<|EOT|>",)),
    FimFormat("CodeGeeX4, GLM-4", "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    FimFormat("Codestral", "[PREFIX]", "[SUFFIX]", None, suffix_first=True, bare_suffix=True),
    FimFormat(
        "Seed-Coder", "<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True
    ),
)


def fim_format(tokenizer: Tokenizer) -> FimFormat | None:
    """Returns the first format whose tokens the vocabulary has, or None."""

    def has(form: FimFormat) -> bool:
        names = [name for name in (form.prefix, form.suffix, form.middle) if name is not None]
        return all(tokenizer.token_to_id(name) is not None for name in names)

    return next(filter(has, FIM_FORMATS), None)


def fim_ids(tokenizer: Tokenizer, prefix: str | Sequence[int], suffix: str) -> list[int]:
    """Returns the token ids of a prompt that asks for the text between a prefix and a suffix.

    Args:
      prefix: the text before the gap, or its token ids.
      suffix: the text after the gap. Names of special tokens in either text are ordinary text.

    Raises:
      UserError: the vocabulary has no fill-in-the-middle tokens, or cannot represent a character.
    """
    form = fim_format(tokenizer)
    if form is None:
        raise UserError(
            "this model cannot fill in the middle of a text: its vocabulary has no"
            " fill-in-the-middle tokens"
        )
    prefix_ids = tokenizer.encode(prefix) if isinstance(prefix, str) else list(prefix)
    suffix_ids = (
        _encode_without_space(tokenizer, suffix) if form.bare_suffix else tokenizer.encode(suffix)
    )
    before = [tokenizer.token_to_id(form.prefix), *prefix_ids]
    after = [tokenizer.token_to_id(form.suffix), *suffix_ids]
    middle = [] if form.middle is None else [tokenizer.token_to_id(form.middle)]
    ids = [*after, *before, *middle] if form.suffix_first else [*before, *after, *middle]
    return [token for token in ids if token is not None]


def fim_end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the tokens of the vocabulary that end an answer of its format, such as those for the
    next file.
    """
    form = fim_format(tokenizer)
    names = () if form is None else (form.prefix, form.suffix, form.middle, *form.ends)
    return frozenset(token for name in names if (token := tokenizer.token_to_id(name)) is not None)


def _encode_without_space(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text as it would be encoded in the middle of another one, without a space in
    front.
    """
    mark = "\N{WHITE SMILING FACE}"  # no vocabulary merges this character with the following ones
    try:
        marked = tokenizer.encode(mark + text)
        alone = tokenizer.encode(mark)
    except UserError:  # the mark, or a character of the text, is not in the vocabulary
        return tokenizer.encode(text)
    return marked[len(alone) :] if marked[: len(alone)] == alone else tokenizer.encode(text)
