"""Text in, text out: `load` a run directory; `generate` or `stream` makes token ids of a prompt and text of what follows."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax

from dantinox.config import Config, GenerationSection, KVSection, UserError, overlay
from dantinox.distributed import shared_over, tensor_mesh, weight_places
from dantinox.generation.batch import Batch, Request
from dantinox.generation.cache_plan import head_order, measured_or_uniform, plan_cache
from dantinox.generation.constraints import Constraint, Grammars
from dantinox.generation.loop import bucket
from dantinox.generation.result import Result
from dantinox.generation.token_settings import sampling_params, seeded
from dantinox.generation.weights import HeadOrder, prepare, with_head_order
from dantinox.model import Transformer
from dantinox.model.parameters import blueprint
from dantinox.run import (
    KVCalibration,
    RunDirectory,
    has_calibration,
    load_kv_calibration,
    load_router_calibration,
    load_run_config,
    open_run,
    weights_digest,
)
from dantinox.run.adapters import run_weights
from dantinox.sampling import SamplingParams
from dantinox.sampling import params as sampling
from dantinox.sampling.params import ScoreFn
from dantinox.text import Tokenizer

PREPARED = 4  # models in memory besides the run's own, one for every order of heads: budgets by loss have orders of their own
# The same for all rows of a batch, with router.use_attention and all of kv.
SHARED = ("use_cache", "weights", "products", "tensor_parallel", "n", *sampling.SHARED)


class LoadedModel:
    """A trained model with its tokenizer and the defaults of its run.

    Attributes:
      model: the transformer as its file holds it, float32 or bfloat16.
      calibration: gives the router's thresholds measured on this model, or None where none were.
      kv_calibration: gives what was measured of the attention heads, from a file or, with None, of this run.
    """

    def __init__(
        self,
        config: Config,
        model: Transformer,
        tokenizer: Tokenizer,
        calibration: Callable[[], Mapping[str, float] | None] = lambda: None,
        kv_calibration: Callable[[str | None], KVCalibration | None] = lambda path: None,
    ):
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.calibration, self.kv_calibration = calibration, kv_calibration
        self._prepared: dict[tuple[str, str, int, HeadOrder | None], Transformer] = {}

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        logprobs: int | None = None,
        echo: bool = False,
        score_fn: ScoreFn | None = None,
        show_candidates: bool = False,
        constraint: Constraint | None = None,
        **settings: Any,
    ) -> Any:
        """Continues a prompt, or several in one batch.

        Args:
          logprobs: report log-probabilities and this many alternatives per token.
          echo: with `logprobs`, report the prompt's tokens too.
          score_fn: `(candidates [N], ln p [N], metrics) -> scores [N]`: the entropy router's candidates are really drawn, and
            the one that scores highest is taken (`dantinox.sampling.best_of_n.guide_score` is the guide's own score).
          show_candidates: with `logprobs`, report the candidates of the entropy router too; the text stays the same.
          constraint: what every text has to be: the tokens that would lead away from it are never drawn, and a text that is
            complete ends, with `eos`; one that `max_new_tokens` cuts off is only the beginning of one.
          settings: keys of the sections `generation`, `router` and `kv` (`kv_budget` and so on); they win over the run's own.

        Returns:
          A `Result` for one prompt, else a list in the order of the prompts; with `n` above 1 always a list, the samples
          of a prompt together.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        report: dict[str, Any] = {"logprobs": logprobs, "echo": echo, "score_fn": score_fn, "show_candidates": show_candidates}
        batches = self.start([(text, settings) for text in prompts], **report, constraint=constraint)
        for batch in batches:
            for _ in batch.pieces():
                pass
        results = in_order(batches)
        return results[0] if isinstance(prompt, str) and len(results) == 1 else results

    def stream(self, prompt: str, *, constraint: Constraint | None = None, **settings: Any) -> Iterator[str]:
        """The continuation of one prompt in pieces, which together are exactly the text of `generate`."""
        if (n := self.settings(settings).generation.n) != 1:
            raise UserError(f"a stream is one sample: give n=1, got {n}, or use generate")
        (batch,) = self.start([(prompt, settings)], constraint=constraint)
        return (piece.text for piece in batch.pieces(stream=True))

    def settings(self, given: Mapping[str, Any] | Config) -> Config:
        """The run's settings with keys of `generation`, `router` and `kv` (`kv_budget` and so on) laid over them, validated."""
        return given if isinstance(given, Config) else overlay(self.config, given)

    def params(self, configs: Sequence[Config], sample_index: Sequence[int] | int = 0, **more: Any) -> SamplingParams:
        """The sampling parameters of a batch with these settings; the calibration is read where one of them asks for it.

        Args:
          more: `score_fn` and `show_candidates`, as of `generate`; `also`, as of `SamplingParams.build`.
        """
        asked = any(c.generation.strategy == "entropy" and c.router.router_preset == "calibrated" for c in configs)
        measured, size = self.calibration() if asked else None, self.model.config.vocab_size
        return sampling_params(self.tokenizer, configs, sample_index, measured, vocab_size=size, **more)

    def start(
        self,
        requests: Sequence[tuple[str | Sequence[int], Mapping[str, Any] | Config]],
        *,
        logprobs: int | None = None,
        echo: bool = False,
        score_fn: ScoreFn | None = None,
        show_candidates: bool = False,
        pad: Callable[[int], int] = bucket,
        constraint: Constraint | None = None,
    ) -> list[Batch]:
        """Requests (prompt as text or as token ids, settings), each with its own numbers, in batches ready to be decoded.

        One batch, but for requests that differ in what a program is made for: order of the steps, caches, samples, precision.

        Args:
          pad: the length that a prompt, and the text with its continuation, are padded to: each makes a program.
          constraint: as of `generate`, for every sample of every request.
        """
        if not requests:
            raise UserError("there is no prompt to continue")
        if logprobs is not None and not 0 <= logprobs <= self.tokenizer.vocab_size:
            raise UserError(f"logprobs must be an integer in [0, {self.tokenizer.vocab_size}], got {logprobs}")
        if echo and logprobs is None:
            raise UserError("echo reports log-probabilities of the prompt: give logprobs too")
        if show_candidates and logprobs is None:
            raise UserError("show_candidates reports with each token's log-probabilities: give logprobs too")
        fresh = secrets.randbits(32)
        configs = [seeded(self.settings(given), fresh) for _, given in requests]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, config in enumerate(configs):
            shared = [getattr(config.generation, name) for name in SHARED]
            groups.setdefault((*shared, config.router.use_attention, config.kv), []).append(number)
        params = partial(self.params, score_fn=score_fn, show_candidates=show_candidates)
        matcher = None if constraint is None else partial(self.grammars.matcher, constraint.kind, constraint.source)
        batches = []
        for numbers in groups.values():
            config = configs[numbers[0]]
            kv, calibration = self.kv(config)
            batches.append(
                Batch(
                    self.prepared(config.generation, head_order(self.model.config, kv, calibration)),
                    self.tokenizer,
                    [self._request(number, requests[number][0]) for number in numbers],
                    [configs[number] for number in numbers],
                    params,
                    partial(plan_cache, self.model.config, kv, calibration=calibration),
                    logprobs,
                    echo,
                    pad,
                    matcher,
                )
            )
        return batches

    @cached_property
    def grammars(self) -> Grammars:
        """What makes constraints for this vocabulary; it needs the libraries of a server."""
        return Grammars(self.tokenizer, self.model.config.vocab_size)

    def kv(self, config: Config) -> tuple[KVSection, KVCalibration | None]:
        """The settings of the cache, and what was measured on this run's heads where they read it."""
        kv = config.kv
        if not kv.compresses or not kv.reads_calibration:
            return kv, None
        calibration = self.kv_calibration(kv.calibration)
        remedy = f"kv.signal {kv.signal} was not measured on this model (`dantinox calibrate --run_dir … --what kv` does)"
        return measured_or_uniform(kv, calibration, remedy), calibration

    def prepared(self, generation: GenerationSection, order: HeadOrder | None = None) -> Transformer:
        """The model as decoding wants it; the `PREPARED` used last, by precision, devices and order of heads, are kept."""
        weights, products, tensor = generation.weights, generation.products, generation.tensor_parallel
        key = weights, products, tensor, order
        made = self._prepared.pop(key, None)
        if made is None:
            mesh = tensor_mesh(self.model.config, tensor) if tensor > 1 else None
            made = prepare(with_head_order(self.model, order), weights, products)
            made = made if mesh is None else shared_over(made, mesh)
        self._prepared[key] = made
        if len(self._prepared) > PREPARED:
            del self._prepared[next(iter(self._prepared))]
        return made

    def _request(self, number: int, prompt: str | Sequence[int]) -> Request:
        if isinstance(prompt, str):
            return Request(number, prompt, self.prompt_ids(prompt))
        return Request(number, self.tokenizer.decode(prompt), list(prompt))

    def prompt_ids(self, prompt: str) -> list[int]:
        """Token ids of a prompt, behind the begin token where the model wants that; an empty one is the begin token.

        Raises:
          UserError: an empty prompt for a tokenizer without one, or text the tokenizer cannot spell.
        """
        ids, bos_id = self.tokenizer.encode(prompt), self.tokenizer.bos_id
        if ids:
            return [bos_id, *ids] if self.tokenizer.add_bos and bos_id is not None else ids
        if bos_id is None:
            raise UserError("the prompt is empty and the tokenizer has no begin token: give at least one character")
        return [bos_id]


def in_order(batches: Sequence[Batch]) -> list[Result]:
    """The results of finished batches in the order of the requests, the samples of each together."""
    numbered = [pair for batch in batches for pair in zip(batch.numbers, batch.results, strict=True)]
    return [result for _, result in sorted(numbered, key=lambda pair: pair[0])]


def load(run_dir: str | Path, tensor: int | None = None) -> LoadedModel:
    """Loads a run directory to generate from.

    Args:
      tensor: devices to put the weights on, part by part; None: as `generation.tensor_parallel` of the run says.

    Raises:
      UserError: a file is missing or damaged, or the weights do not fit the settings or the tokenizer.
    """
    run = open_run(run_dir)
    config = load_run_config(run)
    tokenizer = Tokenizer.load(run.tokenizer)
    model = load_model(config, tokenizer.vocab_size, run, tensor or config.generation.tensor_parallel)

    def kv_calibration(path: str | None) -> KVCalibration | None:
        if path is None and not has_calibration(run.kv, "kv"):
            return None
        return load_kv_calibration(
            run.kv if path is None else Path(path), model.config, weights_digest(run), tokenizer.fingerprint
        )

    return LoadedModel(config, model, tokenizer, partial(load_router_calibration, run), kv_calibration)


def load_model(config: Config, vocab_size: int, run: RunDirectory, tensor: int = 1) -> Transformer:
    """The transformer of a run's config with its weights, each placed on its devices as it is read."""
    # The kernel is a matter of the machine that trained, and decoding wants the layers apart.
    model = replace(config.architecture(vocab_size), kernel="auto", scan_layers=False)
    build, shapes = blueprint(model)
    where = weight_places(tensor_mesh(model, tensor), shapes) if tensor > 1 else {}
    place = lambda path, array: jax.device_put(array, where.get(path))  # noqa: E731
    return build(run_weights(run, config, shapes, vocab_size, place))
