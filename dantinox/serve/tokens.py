"""Text to token ids and back, as the clients of vLLM and lm-evaluation-harness ask for it."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox.serve.guard import Refused, json_body
from dantinox.serve.openai import Renderer, check_model
from dantinox.serve.openai_bodies import DetokenizeBody, TokenizeBody, read
from dantinox.serve.options import Options
from dantinox.serve.response_stream import EngineProtocol
from dantinox.serve.spelling import name_of, prompt_ids


def routes(engine: EngineProtocol, options: Options) -> list[Route]:
    """`/tokenize`, `/detokenize` and `/tokenizer_info`."""
    renderer, tokenizer = Renderer(options.template), engine.run.tokenizer

    async def tokenize(request: Request) -> Response:
        body = read(TokenizeBody, await json_body(request))
        check_model(engine, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refused(400, "give prompt, a text, or messages", param="prompt")
        if body.messages is not None:
            ids, _ = await renderer.encode(body.messages)
        elif body.prompt in tokenizer.special_tokens:  # its own name and nothing else: how a client finds the end token
            ids = [tokenizer.special_tokens[body.prompt]]
        elif not body.prompt:
            ids = []
        else:
            (ids,) = await prompt_ids(engine.run, [body.prompt])
            if body.add_special_tokens is False and tokenizer.add_bos:
                ids = ids[1:]
        names = [name_of(tokenizer, token) for token in ids] if body.return_token_strs else None
        found = {"count": len(ids), "max_model_len": engine.status().context, "tokens": ids, "token_strs": names}
        return JSONResponse(found)

    async def detokenize(request: Request) -> Response:
        body = read(DetokenizeBody, await json_body(request))
        check_model(engine, body.model)
        (ids,) = await prompt_ids(engine.run, [body.tokens])
        return JSONResponse({"prompt": tokenizer.decode(ids)})

    async def about(request: Request) -> Response:
        known: dict[str, Any] = {"tokenizer_class": tokenizer.kind, "vocab_size": tokenizer.vocab_size}
        known |= {"model_max_length": engine.status().context, "add_bos_token": tokenizer.add_bos}
        known |= {"chat_template": None if options.template is None else options.template.source}
        for role in ("bos_token", "eos_token", "pad_token"):
            known[role] = tokenizer.template_variables.get(role)
        return JSONResponse(known)

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", about),
    ]
