"""The Python API for text: `load` reads a run directory; `generate`, `stream` and `chat` continue
text.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack, overload

import jax
import numpy as np

from dantinox.config import Config, UserError, with_generation
from dantinox.config.request_settings import RequestSettings
from dantinox.distributed import tensor_mesh, weight_shardings
from dantinox.files import quote
from dantinox.generation.api.attention_stats import attention_stats as read_attention
from dantinox.generation.api.attention_stats import check_settings as check_attention_settings
from dantinox.generation.api.beam_search import BeamRun
from dantinox.generation.api.embedder import embed_texts, embedding_ids
from dantinox.generation.api.memory_groups import DividedRun, divide, fitting_rows
from dantinox.generation.api.offline_run import BatchRun
from dantinox.generation.api.result import Result
from dantinox.generation.decode.adapter_slots import check_name, unknown_adapter
from dantinox.generation.decode.request_features import feature_names
from dantinox.generation.guides.constraints import Constraint
from dantinox.generation.guides.guide import Reasoning
from dantinox.generation.model_bundle import ModelBundle
from dantinox.generation.request import GenerationRequest
from dantinox.generation.static_batch import padded_length
from dantinox.generation.token_settings import with_default_seed
from dantinox.html_repr import html_table
from dantinox.model import Transformer
from dantinox.model.parameters import abstract_model
from dantinox.platform import use_compilation_cache
from dantinox.report.tables import human_count
from dantinox.run import (
    KVCalibration,
    RunDirectory,
    find_chat_template,
    has_calibration,
    load_kv_calibration,
    load_router_calibration,
    load_run_config,
    open_run,
    packed_arrays,
    weights_digest,
)
from dantinox.run.adapters import load_run_weights
from dantinox.run.peft_folder import load_lora
from dantinox.sampling import LogitProcessor
from dantinox.sampling import params as sampling
from dantinox.sampling.logit_processor import check_logit_processor
from dantinox.sampling.params import ScoreFn
from dantinox.text import ChatTemplate, Tokenizer
from dantinox.text.chat_template import continues_last

# Requests in one batch must agree in these settings, see `batch_key`.
PER_BATCH_SETTINGS = (
    "use_cache",
    "weights",
    "matmul_dtype",
    "matmul_kernel",
    "tensor_parallel",
    "n",
    "num_beams",
    *sampling.BATCH_SETTINGS,
)
DRAFT_SETTINGS = ("speculation", "draft_run", "draft_tokens", "ngram_size")
# Bytes; on a CPU, `jax.device_put` does not copy a NumPy array with this alignment, but aliases it.
ALIAS_ALIGNMENT = 64


class GenerateOptions(RequestSettings, total=False):
    """The keyword arguments of `LoadedModel.generate` besides `n`."""

    logprobs: int | None
    echo: bool
    score_fn: ScoreFn | None
    show_candidates: bool
    constraint: Constraint | None
    logit_processor: LogitProcessor | None
    lora: str | None
    attention_stats: bool


class LoadedModel(ModelBundle):
    """A trained model with its tokenizer and the defaults of its run, ready to generate text.

    Attributes:
      config: the settings of the run, a `Config`. A request may override the sections `generation`,
        `router` and `kv`.
      model: the `Transformer`, with the weights as they are stored: float32 or bfloat16.
      tokenizer: the `Tokenizer` of the run.
      parameters: the number of weights, including embeddings.
      calibration, kv_calibration, chat_template: functions that read files of the run, see
        `ModelBundle`.

    Example:
      >>> model = dantinox.load("runs/quickstart")
      >>> model.tokenizer.vocab_size, model.model.config.max_context
      (259, 128)
    """

    def __repr__(self) -> str:
        model = self.model.config
        return (
            f"LoadedModel({model.num_blocks} layers, dim {model.dim}, vocabulary"
            f" {model.vocab_size}, context {model.max_context}, {model.dtype})"
        )

    def _repr_html_(self) -> str:
        model = self.model.config
        rows = {
            "layers": (
                f"{model.num_blocks}, width {model.dim}, {model.n_heads} heads of {model.head_size}"
            ),
            "parameters": human_count(self.parameters),
            "vocabulary": f"{self.tokenizer.vocab_size:,} tokens",
            "context": f"{model.max_context:,} tokens",
            "compute dtype": jax.numpy.dtype(self.model.dtype).name,
            "chat template": "no" if self.chat_template() is None else "yes",
        }
        return html_table("LoadedModel", rows)

    @overload
    def generate(
        self, prompt: str, *, n: None = None, **options: Unpack[GenerateOptions]
    ) -> Result: ...
    @overload
    def generate(
        self, prompt: str, *, n: int, **options: Unpack[GenerateOptions]
    ) -> Result | list[Result]: ...
    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        n: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Result]: ...
    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        n: int | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        score_fn: ScoreFn | None = None,
        show_candidates: bool = False,
        constraint: Constraint | None = None,
        logit_processor: LogitProcessor | None = None,
        lora: str | None = None,
        attention_stats: bool = False,
        **settings: object,
    ) -> Result | list[Result]:
        """Continues a prompt, or several prompts in one batch.

        Args:
          prompt: a string, or a list of strings. An empty prompt stands for the BOS token.
          n: samples per prompt, in [1, 4096]; None: `generation.n` of the run.
          logprobs: the number of alternatives to report per token, in [0, vocabulary], with
            log-probabilities in nats; None reports nothing.
          echo: with `logprobs`, also report the tokens of the prompt.
          score_fn: a JAX function `(ids [N], logprobs [N], metrics) -> scores [N]` of the token ids
            of the candidates, their ln p under the model, and the metrics of the row
            (`dantinox.sampling.entropy_router.Metrics`). The entropy router scores all candidates
            that it draws and keeps the best. For example, `dantinox.sampling.best_of_n.guide_score`
            is the score of the entropix guide.
          show_candidates: with `logprobs`, report the candidates of the entropy router; the text
            stays the same.
          constraint: a schema, regex or grammar that every text satisfies. A complete text has the
            finish reason `eos`; a text that `max_new_tokens` truncates is a prefix of a valid text.
          logit_processor: `(logits [V], history) -> logits [V]`, a JAX function that edits the
            float32 logits of every token before all sampling steps; `history` is a
            `dantinox.sampling.TokenHistory`. It is compiled into the program once for each function
            object, so define it once.
          lora: the name of an adapter that `load` or `load_lora` has loaded; None: the base model.
          attention_stats: set `attention` of each result: entropy, varentropy, agreement and
            strength of every head for every token. The model reads each text once more for them, so
            the cache must not be compressed.
          settings: settings of the sections `generation`, `router` and `kv` (`kv_budget` and so
            on), which override the settings of the run. `dantinox settings --section generation`
            lists them.

        Returns:
          A `Result` for one prompt, or a list in the order of the prompts. With `n` above 1 it is
          always a list, with the samples of a prompt next to each other.

        Raises:
          UserError: a setting is unknown or out of range, or a prompt is not a string or does not
            fit into the context.

        Example:
          >>> model = dantinox.load("runs/quickstart")
          >>> result = model.generate("def ", max_new_tokens=8, temperature=0.8, seed=1)
          >>> result.seed, result.finish_reason, len(result.tokens)
          (1, 'length', 8)
          >>> results = model.generate(["def ", "class "], max_new_tokens=4, greedy=True)
          >>> [result.prompt for result in results]
          ['def ', 'class ']
        """
        if n is not None:
            settings["n"] = n
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompts, Sequence) or not all(isinstance(text, str) for text in prompts):
            raise UserError(f"prompt must be a string or a list of strings, got {quote(prompt)}")
        config = self.settings(settings)
        given: dict[str, Any] = {
            "logprobs": logprobs,
            "echo": echo,
            "show_candidates": show_candidates,
            "score_fn": score_fn,
            "constraint": constraint,
            "logit_processor": logit_processor,
            "lora": lora,
        }
        if attention_stats:
            check_attention_settings(config)
        requests = [self.request(text, config, **given) for text in prompts]
        results = self.complete(requests)
        if attention_stats:
            request_of = [request for request in requests for _ in range(config.generation.n)]
            results = [self.with_attention(*pair) for pair in zip(results, request_of, strict=True)]
        return results[0] if isinstance(prompt, str) and len(results) == 1 else results

    def with_attention(self, result: Result, request: GenerationRequest) -> Result:
        """Returns a result of a request with its `attention`, see `generate`.

        Raises:
          UserError: the request compresses the cache or divides the model among devices.
        """
        ids = [*request.ids, *result.tokens]
        return replace(
            result,
            attention=read_attention(self, ids, len(result.tokens), request.config, request.lora),
        )

    def stream(
        self,
        prompt: str,
        *,
        constraint: Constraint | None = None,
        logit_processor: LogitProcessor | None = None,
        lora: str | None = None,
        **settings: Unpack[RequestSettings],
    ) -> Iterator[str]:
        """Yields the continuation of one prompt in parts while it is generated.

        The parts add up to the text that `generate` returns.

        Args:
          prompt: a string.
          constraint, logit_processor, lora: as for `generate`.
          settings: as for `generate`; `n` must be 1.

        Raises:
          UserError: as for `generate`.

        Example:
          >>> model = dantinox.load("runs/quickstart")
          >>> parts = list(model.stream("def ", max_new_tokens=8, seed=1))
          >>> "".join(parts) == model.generate("def ", max_new_tokens=8, seed=1).text
          True
        """
        request = self.request(
            prompt, settings, constraint=constraint, logit_processor=logit_processor, lora=lora
        )
        n = request.config.generation.n
        if n != 1:
            raise UserError(f"n must be 1 in a stream, got {n}: use generate for several samples")
        (run,) = self.start([request], stream=True)
        # `parts` yields pairs (row, part); the batch has a single row.
        return (part.text for _, part in run.parts())

    def chat(
        self,
        messages: str | Sequence[Mapping[str, object]],
        *,
        template: ChatTemplate | None = None,
        logprobs: int | None = None,
        constraint: Constraint | None = None,
        logit_processor: LogitProcessor | None = None,
        lora: str | None = None,
        **settings: Unpack[RequestSettings],
    ) -> Result:
        """Answers a conversation, formatted by the model's chat template.

        Args:
          messages: a user message as a string, or a list of `{"role": …, "content": text}` with the
            roles of `dantinox.text.chat_template.ROLES`. If the last message is the assistant's,
            the answer continues it.
          template: formats the conversation; None: the template of the run.
          logprobs, constraint, logit_processor, lora: as for `generate`.
          settings: keys of the sections `generation`, `router` and `kv`, except `n`. They override
            the settings of the run.

        Returns:
          The answer, without the token that ends the message.

        Raises:
          UserError: the model has no chat template, the template rejects the messages, or a setting
            is invalid.

        Example:
          >>> model = dantinox.load("runs/quickstart")
          >>> answer = model.chat("What is the capital of France?", max_new_tokens=8, seed=1)
          >>> messages = [{"role": "user", "content": "Hi"}]
          >>> messages.append({"role": "assistant", "content": answer.text})
          >>> messages += [{"role": "user", "content": "And of Italy?"}]
          >>> model.chat(messages, max_new_tokens=8).finish_reason in ("eos", "stop", "length")
          True
        """
        template, ids = self.chat_prompt(messages, template)
        if settings.get("token_healing"):
            raise UserError(
                "token_healing must be false in a chat, whose template ends the prompt",
                key="generation.token_healing",
            )
        config = self.with_stop_ids(
            with_generation(self.settings(settings), token_healing=False), template.end_ids
        )
        if config.generation.n != 1:
            raise UserError(
                f"n must be 1 in a chat, got {config.generation.n}: use"
                " request and complete for several samples"
            )
        given: dict[str, Any] = {
            "constraint": constraint,
            "logit_processor": logit_processor,
            "lora": lora,
        }
        return self.complete([self.request(ids, config, logprobs=logprobs, **given)])[0]

    def chat_prompt(
        self, messages: str | Sequence[Mapping[str, object]], template: ChatTemplate | None = None
    ) -> tuple[ChatTemplate, list[int]]:
        """Returns the chat template and the token ids of a conversation, up to the beginning of the
        answer.

        If the last message is the assistant's, the ids end with its content.

        Raises:
          UserError: the model has no chat template, or the template rejects the messages.
        """
        template = template or self.chat_template()
        if template is None:
            raise UserError(
                "this model has no chat template: use generate, or pass a ChatTemplate as template"
            )
        conversation = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        )
        return template, template.prompt(conversation, continues=continues_last(conversation)).ids

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: str = "mean",
        **settings: Unpack[RequestSettings],
    ) -> np.ndarray:
        """Returns the embeddings of texts: the pooled hidden states of the model, divided by their
        L2 norm.

        Args:
          texts: a string, or a list of strings of at most `max_context` tokens each.
          pooling: `mean` over the tokens of a text, or `last`, the state of its last token.
          settings: as for `generate`; only those of the weights (`weights`, `matmul_dtype`,
            `matmul_kernel`) have an effect.

        Returns:
          float32 `[N, D]`, one row per text; `[1, D]` for a string. The cosine similarity of two
          texts is the dot product of their rows.

        Raises:
          UserError: a text is empty, too long or cannot be encoded, or an argument is invalid.

        Example:
          >>> model = dantinox.load("runs/quickstart")
          >>> vectors = model.embed(["def f(): pass", "import os"])
          >>> vectors.shape, bool(abs(vectors[0] @ vectors[0] - 1) < 1e-6)
          ((2, 32), True)
        """
        given = [texts] if isinstance(texts, str) else texts
        if not isinstance(given, Sequence) or not all(isinstance(text, str) for text in given):
            raise UserError(f"texts must be a string or a list of strings, got {quote(texts)}")
        return embed_texts(
            self, [embedding_ids(self, text) for text in given], pooling, self.settings(settings)
        )

    def complete(
        self, requests: Sequence[GenerationRequest], pad: Callable[[int], int] = padded_length
    ) -> list[Result]:
        """Decodes requests and returns their results.

        Args:
          requests: prompts with their settings, as returned by `request`.
          pad: as for `start`.

        Returns:
          The results in the order of the requests; the samples of a request are consecutive.

        Raises:
          UserError: `requests` is empty, or a prompt does not fit into the context.

        Example:
          >>> model = dantinox.load("runs/quickstart")
          >>> prompts = {"def ": 4, "class ": 8}
          >>> requests = [model.request(p, {"max_new_tokens": n}) for p, n in prompts.items()]
          >>> [len(result.tokens) for result in model.complete(requests)]
          [4, 8]
        """
        runs = self.start(requests, pad=pad)
        for run in runs:
            for _ in run.parts():
                pass
        return results_in_order(runs)

    def request(
        self,
        prompt: str | Sequence[int],
        settings: Mapping[str, object] | Config,
        *,
        logprobs: int | None = None,
        echo: bool = False,
        score_fn: ScoreFn | None = None,
        show_candidates: bool = False,
        constraint: Constraint | None = None,
        logit_processor: LogitProcessor | None = None,
        reasoning: Reasoning | None = None,
        visible_ids: frozenset[int] = frozenset(),
        lora: str | None = None,
        negative_ids: Sequence[int] | None = None,
    ) -> GenerationRequest:
        """Returns a request, the argument of `complete` and `start`: a prompt with validated
        settings.

        Args:
          prompt: a string, or token ids in [0, vocabulary).
          settings: settings by name, as for `generate`, or a complete `Config`.
          logprobs, echo, score_fn, show_candidates, constraint, logit_processor, lora: as for
            `generate`.
          reasoning: the reasoning in the output, with its budget, see `GenerationRequest`.
          visible_ids: the special tokens whose names appear in the text.
          negative_ids: the token ids of the negative prompt, for guidance; None: those of
            `generation.negative_prompt`.

        Raises:
          UserError: as for `generate`.

        Example:
          >>> model = dantinox.load("runs/quickstart")
          >>> model.request("ab", {"temperature": 0.5}).ids
          (257, 97, 98)
        """
        if logprobs is not None and not 0 <= logprobs <= self.tokenizer.vocab_size:
            raise UserError(
                f"logprobs must be an integer in [0, {self.tokenizer.vocab_size}], got {logprobs}"
            )
        if echo and logprobs is None:
            raise UserError("echo reports log-probabilities of the prompt: set logprobs too")
        if show_candidates and logprobs is None:
            raise UserError(
                "show_candidates needs the log-probabilities of each token: set logprobs too"
            )
        if isinstance(prompt, str):
            text = prompt
            ids: Sequence[int] = self.prompt_ids(prompt)
        else:
            text = self.tokenizer.decode(prompt)
            ids = prompt
        config = self.settings(settings)
        section = config.generation
        if negative_ids is not None and (section.guidance_scale == 1 or section.negative_prompt):
            raise UserError(
                "negative_ids need a generation.guidance_scale other than 1, and no"
                " generation.negative_prompt"
            )
        if lora is not None and lora not in self.loras:
            raise unknown_adapter(lora, self.loras)
        if lora is not None and section.tensor_parallel > 1:
            raise UserError(
                f"lora needs generation.tensor_parallel: 1, got {section.tensor_parallel}"
            )
        return GenerationRequest(
            ids=tuple(ids),
            config=config,
            logprobs=logprobs,
            echo=echo,
            constraint=constraint,
            reasoning=reasoning,
            visible_ids=visible_ids,
            prompt=text,
            score_fn=score_fn,
            show_candidates=show_candidates,
            logit_processor=logit_processor,
            lora=lora,
            negative_ids=None if negative_ids is None else tuple(negative_ids),
        )

    def load_lora(self, name: str, path: str | Path) -> None:
        """Loads an adapter, which requests can then select by its name. An adapter with this name
        is replaced.

        Args:
          name: 1 to 64 letters, digits, dots, hyphens and underscores, the first a letter or digit.
          path: a run with adapters that was trained on this model, or a folder that PEFT wrote.

        Raises:
          UserError: the name is invalid, a file is missing or damaged, or the adapter does not fit
            the model.
        """
        check_name(name)
        # `load_opened` replaces this function by one that compares the adapter with the base run.
        self.loras[name] = self.read_lora(path)

    def start(
        self,
        requests: Sequence[GenerationRequest],
        *,
        stream: bool = False,
        pad: Callable[[int], int] = padded_length,
        steps: int | None = None,
        slots: int | None = None,
    ) -> "list[BatchRun | BeamRun | DividedRun]":
        """Groups requests into batches that are ready to be decoded.

        Requests share a batch if they can share a compiled program: they must have the same order
        of sampling steps, cache settings, number of samples and precision, and ask for the same
        reports (log-probabilities, echo, candidates); see `batch_key`.

        Args:
          requests: prompts with their settings, as returned by `request`.
          stream: decode in short chunks, so that the text appears smoothly; otherwise in chunks of
            the length that decodes fastest.
          pad: function from the length of a prompt, or of a prompt with its continuation, to the
            padded length. Each padded length needs a compiled program.
          steps: decode steps in a chunk, each one token per row; each chunk is collected before the
            next is dispatched. None: `stream` decides.
          slots: the cache slots per row, at least the tokens of each prompt with its continuation;
            must be None with beam search. None: the padded length of the longest row.

        Returns:
          The batches. `BatchRun.parts` decodes a batch and yields its text; afterwards
          `BatchRun.results` holds the results. Without `steps` and `slots`, a batch that needs more
          memory than is free is a `DividedRun`: its parts are decoded one after the other.

        Raises:
          UserError: `requests` is empty, a prompt does not fit into the context, not even one row
            fits into memory, or `stream` is set with beam search.
        """
        if not requests:
            raise UserError("at least one prompt is required")
        if stream and any(request.config.generation.num_beams > 1 for request in requests):
            raise UserError(
                "generation.num_beams must be 1 in a stream: beam"
                " search knows its text only at the end"
            )
        random_seed = secrets.randbits(32)
        seeded = [
            replace(request, config=with_default_seed(request.config, random_seed))
            for request in requests
        ]
        healed = [self.heal(request) for request in seeded]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, request in enumerate(healed):
            groups.setdefault(batch_key(request), []).append(number)

        def start_part(
            members: list[GenerationRequest], numbers: list[int], samples: range | None = None
        ) -> "BatchRun | BeamRun":
            """Starts a batch; `samples`: which of the `n` samples of each member, None: all."""
            if members[0].config.generation.num_beams > 1:
                return BeamRun(self, members, numbers, pad=pad)
            return BatchRun(
                self,
                members,
                numbers,
                stream=stream,
                pad=pad,
                steps=steps,
                slots=slots,
                samples=samples,
            )

        def start_group(numbers: list[int]) -> "BatchRun | BeamRun | DividedRun":
            members = [healed[number] for number in numbers]
            # The most rows in a batch. None: the group is not divided, because the caller has set
            # `steps` or `slots`, or because the free memory is unknown.
            rows = (
                None if steps is not None or slots is not None else fitting_rows(self, members, pad)
            )
            parts = [] if rows is None else divide(members, numbers, rows)
            if len(parts) <= 1:
                return start_part(members, numbers)
            # Each sample of each request of a part is a result, numbered as its request.
            result_numbers = [
                number for _, part, samples in parts for number in part for _ in samples
            ]
            return DividedRun([partial(start_part, *part) for part in parts], result_numbers)

        return [start_group(numbers) for numbers in groups.values()]


def batch_key(request: GenerationRequest) -> tuple[Any, ...]:
    """Returns what the requests of a batch must have in common, because its compiled program
    contains it.

    Raises:
      UserError: the logit processor is not a function, or cannot be hashed.
    """
    if request.logit_processor is not None:
        check_logit_processor(request.logit_processor)
    config = request.config
    return (
        *(getattr(config.generation, name) for name in (*PER_BATCH_SETTINGS, *DRAFT_SETTINGS)),
        config.router.use_attention,
        config.kv,
        request.logprobs,
        request.echo,
        request.score_fn,
        request.show_candidates,
        request.guided,  # whether tokens may be masked, for example by a constraint
        feature_names(config),
        request.logit_processor,
    )


def results_in_order(runs: Sequence[BatchRun | BeamRun | DividedRun]) -> list[Result]:
    """Returns the results of finished batches in the order of the requests; the samples of a
    request are consecutive.
    """
    numbered = [pair for run in runs for pair in zip(run.numbers, run.results, strict=True)]
    return [result for _, result in sorted(numbered, key=lambda pair: pair[0])]


def load(
    run_dir: str | Path, tensor: int | None = None, loras: Mapping[str, str | Path] | None = None
) -> LoadedModel:
    """Loads the model of a run directory.

    Args:
      run_dir: a run directory, written by `launch`, `import_checkpoint` or the command line.
      tensor: number of devices to shard the weights over; None: `generation.tensor_parallel` of the
        run.
      loras: adapters by name, each the path of a run with adapters that was trained on this run, or
        of a folder that PEFT wrote. They are not merged: `generate` selects one with `lora`.

    Returns:
      The model with its tokenizer and the defaults of the run.

    Raises:
      UserError: a file is missing or damaged, or the weights do not match the settings or the
        tokenizer.

    Example:
      >>> model = dantinox.load("runs/quickstart")
      >>> result = model.generate("def ", max_new_tokens=8, seed=1)
      >>> isinstance(result.text, str)
      True
    """
    run = open_run(run_dir, check=False)
    return load_opened(run, load_run_config(run), tensor, loras)


def load_opened(
    run: RunDirectory,
    config: Config,
    tensor: int | None = None,
    loras: Mapping[str, str | Path] | None = None,
) -> LoadedModel:
    """Compares the files of an open run with its manifest and loads its model.

    Args:
      run: the run directory, as returned by `open_run`.
      config: the settings of the run, as returned by `load_run_config`.
      tensor, loras: as for `load`.

    Raises:
      UserError: as for `load`.
    """
    use_compilation_cache()
    run.check(run.tokenizer, run.tokenizer_config, run.weights_or_adapter)
    tokenizer = Tokenizer.load(run.tokenizer)
    model = load_model(
        config, tokenizer.vocab_size, run, tensor or config.generation.tensor_parallel
    )

    def kv_calibration(path: str | None) -> KVCalibration | None:
        """Reads the file at a path, or that of the run; None if the run has not been calibrated."""
        if path is None and not has_calibration(run.kv, "kv"):
            return None
        return load_kv_calibration(
            run.kv if path is None else Path(path),
            model.config,
            weights_digest(run),
            tokenizer.fingerprint,
        )

    def chat_template() -> ChatTemplate | None:
        path = find_chat_template(run)
        return None if path is None else ChatTemplate.load(path, tokenizer)

    loaded = LoadedModel(
        config,
        model,
        tokenizer,
        calibration=partial(load_router_calibration, run),
        kv_calibration=kv_calibration,
        chat_template=chat_template,
        load_run=load,  # for draft models
    )
    loaded.read_lora = partial(load_lora, base=run, model=model.config)
    for name, path in (loras or {}).items():
        loaded.load_lora(name, path)
    return loaded


def load_model(config: Config, vocab_size: int, run: RunDirectory, tensor: int = 1) -> Transformer:
    """Returns the transformer of a run with its weights; each weight is moved to its devices when
    it is read.
    """
    # Override two settings of the run: its attention kernel was chosen for the training machine,
    # and decoding needs separate layers.
    model = replace(config.architecture(vocab_size), kernel="auto", scan_layers=False)
    # The int8 or int4 arrays of the file. Sharding them, or merging adapters into them, converts
    # them to floats, so that the model has no packed arrays in these cases.
    packed = packed_arrays(run.weights) if tensor == 1 and config.lora.rank is None else {}
    try:
        build, shapes = abstract_model(model, packed)
    except ValueError as error:  # its message is the rest of this sentence
        raise UserError(f"the weights {run.weights} {error}") from None
    shardings = weight_shardings(tensor_mesh(model, tensor), shapes) if tensor > 1 else {}

    def place(path: str, array: np.ndarray) -> jax.Array:
        """Moves an array to its devices. The result is never an alias of the memory-mapped file,
        which would keep the whole file in memory.
        """
        would_alias = array.ctypes.data % ALIAS_ALIGNMENT == 0
        copied: jax.Array = jax.device_put(
            np.array(array) if would_alias else array, shardings.get(path)
        )
        return copied

    return build(load_run_weights(run, config, shapes, vocab_size, place))
