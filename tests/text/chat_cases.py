"""Chat templates like those of known models, small vocabularies for them, and Transformers' tokens
for conversations.

`python tests/text/chat_cases.py` rewrites chat_expected.json; it needs transformers.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

EXPECTED = Path(__file__).with_name("chat_expected.json")
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if system_message %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
CHATML = """\
{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""
USER = {"role": "user", "content": "hello there, how are you?"}
CONVERSATIONS = [
    [USER, {"role": "assistant", "content": "hello <you>"}],
    [
        USER,
        {"role": "assistant", "content": " I am\nwell "},
        {"role": "user", "content": "\n\nthere? é"},
    ],
    [{"role": "system", "content": "are\tyou"}, USER, {"role": "assistant", "content": ""}, USER],
]


def _vocabulary(letters, words):
    """Returns the symbols and merges of a BPE vocabulary in which each of `words` is one symbol."""
    symbols, merges = list(letters), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in symbols:
                symbols.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    return {symbol: index for index, symbol in enumerate(symbols)}, merges


def byte_level(specials):
    """Like Llama 3 and Qwen: byte-level BPE."""
    words = ("hello", "Ġhello", "Ġthere", "Ġyou", "user", "assistant", "ĊĊ", "Ġhow", "Ġare")
    vocab, merges = _vocabulary(sorted(pre_tokenizers.ByteLevel.alphabet()), words)
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    core.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    return core


def sentence_pieces(specials):
    """Like Gemma: spaces are a symbol, and unknown characters become bytes."""
    letters = [
        *specials,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *map(chr, range(33, 127)),
        "\n",
    ]
    vocab, merges = _vocabulary(letters, ("hello", "▁there", "▁you", "user", "model", "\n\n"))
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    return core


def mistral(specials):
    """Like Mistral: a text gets a space before its first symbol, and special tokens absorb the
    space after them.
    """
    core = sentence_pieces(specials)
    core.normalizer = None
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.add_special_tokens([AddedToken(name, normalized=False, rstrip=True) for name in specials])
    return core


# Maps a name to (template, tokenizer.json, BOS token, EOS token).
CASES = {
    "llama3": (
        LLAMA3,
        byte_level(
            ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
        ).to_str(),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "chatml": (CHATML, byte_level(["<|im_start|>", "<|im_end|>"]).to_str(), None, "<|im_end|>"),
    "gemma": (
        GEMMA,
        sentence_pieces(["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]).to_str(),
        "<bos>",
        "<eos>",
    ),
    "prefixed": (
        CHATML,
        mistral(["<s>", "<|im_start|>", "<|im_end|>"]).to_str(),
        "<s>",
        "<|im_end|>",
    ),
}


def main():
    from transformers import PreTrainedTokenizerFast

    found = {}
    for name, (template, content, begin, end) in CASES.items():
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(content),
            bos_token=begin,
            eos_token=end,
            chat_template=template,
        )
        for number, messages in enumerate(CONVERSATIONS):
            for prompt in (False, True):
                try:
                    ids = tokenizer.apply_chat_template(
                        messages, add_generation_prompt=prompt, return_dict=False
                    )
                except Exception:
                    ids = None
                found[f"{name} {number} {prompt}"] = ids
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(ids)}" for key, ids in found.items())
    EXPECTED.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
