"""Tokenizers, chat templates, tool calls, corpora, and the token store with its batches. No module
here imports jax.
"""

from dantinox.text.build_store import (
    Progress,
    corpus_changed,
    open_store,
    prepare_data,
    vocabulary_size,
)
from dantinox.text.chat_template import ChatTemplate
from dantinox.text.conversation_store import ConversationStore, LabeledCompletions, Preferences
from dantinox.text.corpus import Corpus
from dantinox.text.prompt_store import Prompt, PromptStore
from dantinox.text.store_writer import has_partial
from dantinox.text.token_store import PADDING, Batch, BatchOptions, Counts, SpecialIds, TokenStore
from dantinox.text.tokenizer import Tokenizer
from dantinox.text.tokenizer_training import train_tokenizer

__all__ = [
    "PADDING",
    "Batch",
    "BatchOptions",
    "ChatTemplate",
    "ConversationStore",
    "Corpus",
    "Counts",
    "LabeledCompletions",
    "Preferences",
    "Progress",
    "Prompt",
    "PromptStore",
    "SpecialIds",
    "TokenStore",
    "Tokenizer",
    "corpus_changed",
    "has_partial",
    "open_store",
    "prepare_data",
    "train_tokenizer",
    "vocabulary_size",
]
