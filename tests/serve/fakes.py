"""An engine without a model, for tests of the protocols: it repeats a text, one token per delta, as
a real engine would.
"""

import asyncio
import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Core

from dantinox.config import TokenizerSection, UserError, build_config, overlay
from dantinox.generation import LoadedModel
from dantinox.generation.guides.stop_strings import StopFinder
from dantinox.generation.prefix.prefix_cache import PrefixStatus
from dantinox.generation.request import Delta, RequestStats
from dantinox.serve.errors import Busy, Unavailable
from dantinox.serve.response_stream import ResponseStream, Status
from dantinox.text import Tokenizer, train_tokenizer

# Prompts without a BOS token, so that a prompt has one token per byte.
BYTES = Tokenizer(
    train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(())).to_json(),
    roles={"add_bos_token": False},
)
SAYS = "once upon a time there was a fox; "


def fake_run(context: int = 256, tokenizer=BYTES, **settings) -> LoadedModel:
    """Returns a loaded model without weights: it has only a context length and a vocabulary
    size.
    """
    config = build_config({"generation": settings} if settings else {})
    model = SimpleNamespace(
        config=SimpleNamespace(max_context=context, vocab_size=tokenizer.vocab_size, dim=8),
        dtype="float32",
    )
    return _FakeModel(config, model, tokenizer)


class _FakeModel(LoadedModel):
    parameters, weight_bytes, weight_format = 1_200_000, 4_800_000, "float32"


class FakeEngine:
    """Answers every request with the text `says`; sample s starts at character s.

    Attributes:
      asked: the requests that were submitted.
      embedded: the token ids and the pooling of each request for embeddings.
      state: `ready`, or another state set by a test.
      full: whether the queue is full.
      pause: seconds between tokens.
      fails: an error that ends the next response after its second token.
      prefixes: the blocks of the prefix cache.
    """

    name = "fake"

    def __init__(self, run: LoadedModel | None = None, says: str = SAYS, pause: float = 0.0):
        self.run, self.says, self.pause = run or fake_run(), says, pause
        self.asked, self.embedded, self.cancelled, self.tasks = [], [], [], set()
        self.state, self.full, self.fails = "ready", False, None
        self.counters: Counter[str] = Counter()
        self.loras: dict[str, object] = {}
        self.prefixes = PrefixStatus()

    def settings(self, given):
        config = overlay(self.run.config, given)
        if config.kv != self.run.config.kv:
            raise UserError("kv.budget is set when the server starts")
        return config

    async def load_lora(self, name, path):
        if name in self.loras:
            raise UserError(
                f"the adapter {name} is already loaded: unload it first, or use another name"
            )
        self.loras[name] = path

    def unload_lora(self, name):
        del self.loras[name]

    def submit(self, ask):
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}")
        if self.full:
            raise Busy(2.0)
        context = self.run.model.config.max_context
        if len(ask.ids) >= context:
            raise UserError(
                f"the prompt has {len(ask.ids)} tokens and fills the model's context of {context}:"
                " shorten it"
            )
        self.asked.append(ask)
        answer = ResponseStream(
            ask, RequestStats(len(ask.ids)), lambda: self.cancelled.append(answer)
        )
        task = asyncio.get_running_loop().create_task(self._answer(ask, answer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return answer

    async def embed(self, ids, pooling):
        """Returns vectors that depend on the counts of the tokens, normalized."""
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}")
        if self.full:
            raise Busy(2.0)
        self.embedded.append((ids, pooling))
        dim = self.run.model.config.dim
        counts_ND = np.array(
            [[1 + sum(token % dim == d for token in row) for d in range(dim)] for row in ids],
            np.float32,
        )
        return counts_ND / np.linalg.norm(counts_ND, axis=1, keepdims=True)

    @property
    def context(self):
        return self.run.model.config.max_context

    def status(self):
        return Status(
            self.state,
            "testing",
            8,
            len(self.tasks),
            0,
            16,
            self.context,
            self.counters,
            self.prefixes,
        )

    async def save_prefixes(self):
        if self.prefixes.capacity == 0:
            raise UserError(
                "the prefix cache of this server is not saved: start it with --cache_dir"
            )
        return self.prefixes.used

    async def _answer(self, ask, answer):
        try:
            await self._generate(ask, answer)
        except (
            Exception
        ) as error:  # otherwise a client would wait forever for the end of the response
            answer.end(error)
            raise

    async def _generate(self, ask, answer):
        generation, now = ask.config.generation, asyncio.get_running_loop().time
        began = now()
        if ask.echo:
            answer.prompt.extend(
                self._record(token, ask.logprobs, first=n == 0) for n, token in enumerate(ask.ids)
            )
        room = min(generation.max_new_tokens, self.run.model.config.max_context - len(ask.ids))
        for sample in range(generation.n):
            stops, speech = (
                StopFinder(generation.stop, generation.keep_stop),
                self.run.tokenizer.detokenizer(),
            )
            ids = self._token_ids(ask, sample, room)
            for number, token in enumerate(ids):
                await asyncio.sleep(self.pause)
                if answer in self.cancelled:
                    answer.push(Delta(sample, "", [], "cancelled"))
                    break
                if self.fails is not None and number >= 2:
                    answer.end(self.fails)
                    return
                text = stops.push(speech.push([token]))
                reason = (
                    "stop" if stops.matched_stop else "length" if number == len(ids) - 1 else None
                )
                text += stops.push(speech.flush()) + stops.flush() if reason == "length" else ""
                answer.stats.new_tokens += 1
                answer.stats.first_token_seconds = answer.stats.first_token_seconds or now() - began
                answer.push(
                    Delta(
                        sample,
                        text,
                        [self._record(token, ask.logprobs)],
                        reason,
                        stops.matched_stop,
                    )
                )
                if reason:
                    break
            else:
                if not ids:
                    answer.push(Delta(sample, "", [], "length"))
        answer.stats.seconds = now() - began
        answer.end()

    def _token_ids(self, ask, sample, room):
        return list(
            itertools.islice(
                itertools.cycle(self.run.tokenizer.encode(self.says)), sample, sample + room
            )
        )

    def _record(self, token, logprobs, first=False):
        record = {"id": int(token), "text": self.run.tokenizer.token_text(token)}
        if logprobs is None or first:
            return record
        spelt, chance = self.run.tokenizer.token_text, math.log(0.5)
        others = [
            {"id": i, "text": spelt(i), "logprob": chance - i, "logprob_sampled": chance - i}
            for i in range(logprobs)
        ]
        return record | {
            "entropy": 1.5, "varentropy": 0.25, "survivors": 40, "rank": 0,
            "logprob": math.log(0.5), "logprob_sampled": math.log(0.6), "alternatives": others,
        }  # fmt: skip


def fim_tokenizer() -> Tokenizer:
    """A tokenizer of single characters with the fill-in-the-middle tokens of StarCoder."""
    core = Core(
        models.BPE({letter: number for number, letter in enumerate("abcd \n;onceuptimhrwsfx")}, [])
    )
    core.decoder = decoders.Fuse()
    names = ("<|endoftext|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>")
    core.add_special_tokens([AddedToken(name, special=True) for name in names])
    return Tokenizer(core.to_str())
