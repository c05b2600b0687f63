"""The same shapes in torch and transformers, eager and compiled, on the GPU or the CPU."""

import time
from collections.abc import Callable
from typing import Any

import torch
from shapes import SHAPES, Measured, Shapes
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, StaticCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def shapes_of(smoke: bool) -> Shapes:
    """Returns the shapes for the first GPU, as `shapes.shapes_of` does without JAX."""
    if smoke:
        return SHAPES["smoke"]
    memory = torch.cuda.get_device_properties(0).total_memory if DEVICE == "cuda" else 0
    return next(
        shapes for name, shapes in SHAPES.items() if name != "smoke" and memory >= shapes.memory
    )


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], repeats: int) -> float:
    """Returns the mean time of a call, after two calls that are not counted."""
    for _ in range(2):
        call()
    synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - begin) / repeats


def train(options: Any) -> Measured:
    """Measures a step of GPT-2 small under autocast with bfloat16."""
    shapes = shapes_of(options.smoke)
    small = (
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 512}
        if options.smoke
        else {"vocab_size": 50304}
    )
    length = 64 if options.smoke else 1024
    model = GPT2LMHeadModel(
        GPT2Config(**small, n_positions=length, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    ids = torch.randint(0, small["vocab_size"], (shapes.small_rows, length), device=DEVICE)

    def step(forward: Any) -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Measured(both(model, step, shapes.small_rows * length, shapes.steps // 2 or 1))


def both(model: Any, step: Callable[[Any], None], tokens: int, repeats: int) -> dict[str, Any]:
    """Measures a step with a model as it is, and compiled."""
    figures: dict[str, Any] = {
        "eager_tokens_per_s": tokens / seconds_of(lambda: step(model), repeats)
    }
    begin = time.perf_counter()
    try:
        compiled = torch.compile(model)
        step(compiled)
        synchronize()
        figures["first_s"] = time.perf_counter() - begin
        figures["compiled_tokens_per_s"] = tokens / seconds_of(lambda: step(compiled), repeats)
    except Exception as error:  # torch has no compiler here
        figures["compiled"] = f"failed: {str(error).strip().splitlines()[0][:100]}"
    return figures


def decode(options: Any) -> Measured:
    """Measures decoding steps of the Llama of the check with a static cache, in bfloat16, at batch
    1.
    """
    shapes = shapes_of(options.smoke)
    size = {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "num_hidden_layers": 2,
        "vocab_size": 512,
    } if options.smoke else {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
    }  # fmt: skip
    config = LlamaConfig(**size, tie_word_embeddings=True, max_position_embeddings=shapes.context)
    model = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    cache = StaticCache(config=config, max_cache_len=shapes.context)
    token = torch.ones((1, 1), dtype=torch.long, device=DEVICE)
    place = torch.full((1,), shapes.prompt, dtype=torch.long, device=DEVICE)

    @torch.no_grad()
    def step(forward: Any) -> None:
        logits = forward(
            input_ids=token, past_key_values=cache, cache_position=place, use_cache=True
        ).logits
        token.copy_(logits[:, -1:].argmax(-1))

    return Measured(both(model, step, 1, shapes.new // 4 or 1))
