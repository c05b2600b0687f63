"""`ModelBundle`: model, tokenizer, default settings and calibrations; the base class of `LoadedModel`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Unpack

import jax
from flax import nnx

from dantinox.config import Config, GenerationSection, KVSection, UserError, overlay, with_generation
from dantinox.distributed import shard_model, tensor_mesh
from dantinox.files import quote
from dantinox.generation.cache_plan import fall_back_to_uniform
from dantinox.generation.constraints import Constraint, ConstraintCompiler, Matcher
from dantinox.generation.quantized_weights import HeadOrder, permute_heads, prepare
from dantinox.generation.token_settings import sampling_params, stop_token_ids
from dantinox.model import Transformer
from dantinox.run import KVCalibration
from dantinox.sampling import ProgramOptions, SamplingParams
from dantinox.text import ChatTemplate, Tokenizer

PREPARED = 4  # models in memory besides the run's own, one for every order of heads: budgets by loss have orders of their own


class ModelBundle:
    """A model, its tokenizer and the defaults of its run.

    Attributes:
      model: the transformer as its file holds it, float32 or bfloat16.
      calibration: gives the router's thresholds measured on this model, or None where none were.
      kv_calibration: gives what was measured of the attention heads, from a file or, with None, of this run.
      chat_template: returns the chat template of the run, or None if it has none.
    """

    def __init__(
        self,
        config: Config,
        model: Transformer,
        tokenizer: Tokenizer,
        calibration: Callable[[], Mapping[str, float] | None] = lambda: None,
        kv_calibration: Callable[[str | None], KVCalibration | None] = lambda path: None,
        chat_template: Callable[[], ChatTemplate | None] = lambda: None,
    ):
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.calibration, self.kv_calibration, self.chat_template = calibration, kv_calibration, chat_template
        self._prepared: dict[tuple[str, str, int, HeadOrder | None], Transformer] = {}

    @property
    def parameters(self) -> int:
        """The number of weights, embeddings included."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.model, nnx.Param)))

    def settings(self, given: Mapping[str, object] | Config) -> Config:
        """The run's settings with keys of `generation`, `router` and `kv` (`kv_budget` and so on) laid over them, validated."""
        return given if isinstance(given, Config) else overlay(self.config, given)

    def with_stop_ids(self, config: Config, ids: Iterable[int]) -> Config:
        """The same settings with more tokens that end a text; those of the tokenizer end every text."""
        more = sorted(set(ids).difference(self.tokenizer.stop_ids))
        return with_generation(config, stop_token_ids=(*config.generation.stop_token_ids, *more)) if more else config

    def params(
        self, configs: Sequence[Config], sample_index: Sequence[int] | int = 0, **more: Unpack[ProgramOptions]
    ) -> SamplingParams:
        """The sampling parameters of a batch with these settings; the calibration is read where one of them asks for it.

        Args:
          more: what `SamplingParams.build` takes of the compiled program.
        """
        asked = any(c.generation.strategy == "entropy" and c.router.router_preset == "calibrated" for c in configs)
        measured, size = self.calibration() if asked else None, self.model.config.vocab_size
        return sampling_params(self.tokenizer, configs, sample_index, vocab_size=size, measured=measured, **more)

    def kv(self, config: Config) -> tuple[KVSection, KVCalibration | None]:
        """The settings of the cache, and what was measured on this run's heads where they read it."""
        kv = config.kv
        if not kv.compresses or not kv.reads_calibration:
            return kv, None
        calibration = self.kv_calibration(kv.calibration)
        remedy = f"kv.signal {kv.signal} was not measured on this model (`dantinox calibrate --run_dir … --what kv` does)"
        return fall_back_to_uniform(kv, calibration, remedy), calibration

    def prepared(self, generation: GenerationSection, order: HeadOrder | None = None) -> Transformer:
        """The model as decoding wants it; the `PREPARED` used last, by precision, devices and order of heads, are kept."""
        weights, matmul_dtype, tensor = generation.weights, generation.matmul_dtype, generation.tensor_parallel
        key = weights, matmul_dtype, tensor, order
        made = self._prepared.pop(key, None)
        if made is None:
            mesh = tensor_mesh(self.model.config, tensor) if tensor > 1 else None
            made = prepare(permute_heads(self.model, order), weights, matmul_dtype)
            made = made if mesh is None else shard_model(made, mesh)
        self._prepared[key] = made
        if len(self._prepared) > PREPARED:
            del self._prepared[next(iter(self._prepared))]
        return made

    @cached_property
    def grammars(self) -> ConstraintCompiler:
        """What makes constraints for this vocabulary; it needs the libraries of a server."""
        return ConstraintCompiler(self.tokenizer, self.model.config.vocab_size)

    def matcher(self, constraint: Constraint, section: GenerationSection) -> Matcher:
        """Follows one text that must meet a constraint.

        Raises:
          UserError: the constraint is wrong or too large, or no text of this vocabulary meets it.
        """
        return self.grammars.matcher(constraint.kind, constraint.source, stop_token_ids(self.tokenizer, section))

    def prompt_ids(self, prompt: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of a prompt, after the begin token where the model expects it; an empty prompt is the begin token.

        Args:
          parse_special: names of special tokens in the prompt stand for the tokens; a begin token in front is not doubled.

        Raises:
          UserError: an empty prompt for a tokenizer without one, or text the tokenizer cannot spell.
        """
        ids, bos_id = self.tokenizer.encode(prompt, parse_special=parse_special), self.tokenizer.bos_id
        if ids:
            begins = self.tokenizer.add_bos and bos_id is not None and ids[0] != bos_id
            return [bos_id, *ids] if begins and bos_id is not None else ids
        if bos_id is None:
            raise UserError("the prompt is empty and the tokenizer has no begin token: give at least one character")
        return [bos_id]

    def check_ids(self, ids: Sequence[int]) -> None:
        """Checks the token ids of a prompt.

        Raises:
          UserError: one is not in the vocabulary.
        """
        V = self.model.config.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= V):
            raise UserError(f"tokens of the prompt must be in [0, {V}), got {quote(next(i for i in ids if not 0 <= i < V))}")
