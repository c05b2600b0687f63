"""`ModelBundle`: model, tokenizer, default settings and calibrations; the base class of
`LoadedModel`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Unpack

import jax
import numpy as np
from flax import nnx

from dantinox.config import (
    Config,
    GenerationSection,
    KVSection,
    UserError,
    overlay,
    with_generation,
)
from dantinox.config.engine_options import EngineOptions
from dantinox.distributed import shard_model, tensor_mesh
from dantinox.files import quote
from dantinox.generation.decode.adapter_slots import AdapterRows, AdapterSlots
from dantinox.generation.decode.cache_plan import fall_back_to_uniform
from dantinox.generation.decode.features import Constants, Features
from dantinox.generation.decode.prepared_model import (
    HeadOrder,
    permute_heads,
    prepare,
    weight_bytes,
)
from dantinox.generation.decode.prompt_scope import PromptScopes
from dantinox.generation.decode.request_features import row_features
from dantinox.generation.guides.bans import TextBan, compile_regexes, find_banned_strings
from dantinox.generation.guides.constraints import Constraint, ConstraintCompiler, Matcher
from dantinox.generation.guides.guide import (
    RESTART_BEFORE,
    AfterTrigger,
    Gap,
    Guide,
    Reasoning,
    ReasoningBudget,
    WholeText,
)
from dantinox.generation.guides.token_healing import HealedPrefix, PieceIndex
from dantinox.generation.request import GenerationRequest
from dantinox.generation.token_settings import sampling_params, stop_token_ids
from dantinox.model import Transformer
from dantinox.model.packed import packed_kinds, parameter_count, unpack_modules
from dantinox.run import KVCalibration
from dantinox.run.peft_folder import LoraAdapter, load_lora
from dantinox.sampling import ProgramOptions, SamplingParams
from dantinox.text import ChatTemplate, Tokenizer

# How many prepared models are kept in memory, besides the model of the run. Each order of heads
# needs its own prepared model, and with `kv.signal: loss` each budget has a different order.
MAX_PREPARED = 4


class ModelBundle:
    """A model, its tokenizer and the defaults of its run.

    Attributes:
      model: the transformer as stored in its file, float32 or bfloat16.
      calibration: returns the router thresholds measured on this model, or None.
      kv_calibration: returns the measurements of the attention heads from the file at a path; None:
        the file of this run.
      chat_template: returns the chat template of this run, or None.
      load_run: loads the model of another run directory, such as that of a draft model.
      loras: the adapters that requests may use, by name.
      read_lora: reads an adapter of this model from a run with adapters or a PEFT folder, as
        `load_lora` does.
    """

    def __init__(
        self,
        config: Config,
        model: Transformer,
        tokenizer: Tokenizer,
        calibration: Callable[[], Mapping[str, float] | None] = lambda: None,
        kv_calibration: Callable[[str | None], KVCalibration | None] = lambda path: None,
        chat_template: Callable[[], ChatTemplate | None] = lambda: None,
        load_run: Callable[[str], "ModelBundle"] | None = None,
    ):
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.calibration = calibration
        self.kv_calibration = kv_calibration
        self.chat_template = chat_template
        self._load_run = load_run
        self._draft_runs = dict[str, ModelBundle]()
        self.loras: dict[str, LoraAdapter] = {}
        # The slots of the last offline batch, and their key.
        self._adapter_slots: tuple[object, AdapterSlots] | None = None
        self.read_lora: Callable[..., LoraAdapter] = partial(
            load_lora, base=None, model=model.config
        )
        self._prepared: dict[tuple[tuple[str, ...], int, HeadOrder | None], Transformer] = {}

    @cached_property
    def parameters(self) -> int:
        """The number of weights, embeddings included."""
        return parameter_count(self.model)

    def replace_model(self, other: "ModelBundle") -> None:
        """Uses the weights of another model with the same architecture and tokenizer from now
        on.
        """
        self.model = other.model
        self._prepared = other._prepared

    @cached_property
    def weight_bytes(self) -> int:
        """The bytes of the weights in memory, as they are stored."""
        return weight_bytes(self.model)

    @cached_property
    def weight_format(self) -> str:
        """The block format of most packed weights, such as `Q4_K`, or the dtype of the embedding if
        no weights are packed.
        """
        return next(iter(packed_kinds(self.model)), None) or str(self.model.embed[...].dtype)

    def settings(self, overrides: Mapping[str, object] | Config) -> Config:
        """Returns the settings of the run with validated overrides of `generation`, `router` and
        `kv`, such as `kv_budget`.
        """
        return overrides if isinstance(overrides, Config) else overlay(self.config, overrides)

    def with_stop_ids(self, config: Config, ids: Iterable[int]) -> Config:
        """Returns the settings with more ids that end a sequence, in addition to the EOS tokens of
        the tokenizer.

        With `ignore_eos`, the settings are returned as they are.
        """
        if config.generation.ignore_eos:
            return config
        extra = sorted(set(ids).difference(self.tokenizer.stop_ids))
        return (
            with_generation(config, stop_token_ids=(*config.generation.stop_token_ids, *extra))
            if extra
            else config
        )

    def params(
        self,
        configs: Sequence[Config],
        sample_index: Sequence[int] | int = 0,
        **more: Unpack[ProgramOptions],
    ) -> SamplingParams:
        """Returns the sampling parameters of a batch with one `Config` per row; reads the
        calibration if a row needs it.

        Args:
          more: options of the compiled program, passed to `SamplingParams.build`.
        """
        reads_calibration = any(
            c.generation.strategy == "entropy" and c.router.router_preset == "calibrated"
            for c in configs
        )
        measured = self.calibration() if reads_calibration else None
        size = self.model.config.vocab_size
        return sampling_params(
            self.tokenizer, configs, sample_index, vocab_size=size, measured=measured, **more
        )

    def kv(self, config: Config) -> tuple[KVSection, KVCalibration | None]:
        """Returns the settings of the cache, and the measurements of the heads if the settings use
        them.
        """
        kv = config.kv
        if not kv.compresses or not kv.reads_calibration:
            return kv, None
        calibration = self.kv_calibration(kv.calibration)
        remedy = (
            f"kv.signal {kv.signal} was not measured on this model (run `dantinox calibrate"
            " --run_dir … --what kv`)"
        )
        return fall_back_to_uniform(kv, calibration, remedy), calibration

    def prepared(
        self, generation: GenerationSection, order: HeadOrder | None = None
    ) -> Transformer:
        """Returns the model for decoding; caches the last `MAX_PREPARED` models by precision,
        devices and order of heads.
        """
        tensor = generation.tensor_parallel
        kernel = generation.matmul_kernel
        if tensor > 1 and kernel == "native":
            raise UserError("generation.matmul_kernel: native needs generation.tensor_parallel: 1")
        precision = generation.weights, generation.matmul_dtype, "xla" if tensor > 1 else kernel
        key = precision, tensor, order
        prepared = self._prepared.pop(key, None)
        if prepared is None and tensor > 1:
            mesh = tensor_mesh(self.model.config, tensor)
            model = nnx.clone(permute_heads(self.model, order))
            unpack_modules(model)  # packed weights cannot be sharded
            prepared = shard_model(prepare(model, *precision), mesh)
        elif prepared is None:
            prepared = prepare(permute_heads(self.model, order), *precision)
        self._prepared[key] = prepared  # as the newest entry
        if len(self._prepared) > MAX_PREPARED:
            del self._prepared[next(iter(self._prepared))]
        return prepared

    def batch_features(
        self, rows: Sequence[GenerationRequest], main_rows: int, order: HeadOrder | None = None
    ) -> tuple[Features, Constants]:
        """Returns the features of the rows of a batch, and their constants.

        Args:
          rows: the request of each row. Row r + k · `main_rows`, for k ≥ 1, follows row r.
          order: the order of the key heads of the prepared model.

        Raises:
          UserError: no adapter has the name that a request has.
        """
        # For each main row its features and those of the rows that follow it; then all rows in the
        # order of the batch.
        by_main_row = [
            row_features(rows[row].config, range(row, len(rows), main_rows))
            for row in range(main_rows)
        ]
        in_order = [features for column in zip(*by_main_row, strict=True) for features in column]
        features: Features = jax.tree.map(lambda *parts: np.concatenate(parts), *in_order)
        adapted, constants = self.adapter_features([row.lora for row in rows], order)
        return (*features, *adapted), constants

    def adapter_features(
        self, names: Sequence[str | None], order: HeadOrder | None = None
    ) -> tuple[Features, Constants]:
        """Returns the feature of the rows of a batch, given the names of their adapters, and its
        constants.

        If no row has an adapter, both are empty.

        Args:
          order: the order of the key heads of the prepared model.

        Raises:
          UserError: no adapter has one of the names.
        """
        if not any(names):
            return (), {}
        key = order, tuple((name, adapter.digest) for name, adapter in self.loras.items())
        if self._adapter_slots is None or self._adapter_slots[0] != key:
            self._adapter_slots = (
                key,
                AdapterSlots(self.model.config, self.loras, order, rows=len(names)),
            )
        _, slots = self._adapter_slots
        numbers = np.asarray([slots.get(name).number for name in names], np.int32)
        return (AdapterRows(jax.device_put(numbers)),), {"adapters": slots.stacks}

    def prompt_scopes(
        self, options: EngineOptions, order: HeadOrder | None, rows: int
    ) -> PromptScopes:
        """Returns the scopes of a server: its adapters, and room for those that are loaded later.

        Args:
          order: the order of the key heads of the prepared model.
          rows: the rows of the batch.

        Raises:
          UserError: as in `AdapterSlots`.
        """
        if not (self.loras or options.max_loras):
            return PromptScopes()
        room = options.max_loras, options.max_lora_rank
        return PromptScopes(AdapterSlots(self.model.config, self.loras, order, *room, rows))

    def draft_model(self, generation: GenerationSection) -> Transformer | None:
        """Returns the draft model for decoding; None if the settings use none.

        Raises:
          UserError: the run of the draft model cannot be loaded, or has a different tokenizer or a
            shorter context.
        """
        path = generation.draft_run
        if generation.speculation != "draft" or path is None:
            return None
        if path not in self._draft_runs:
            if self._load_run is None:
                raise UserError(
                    "generation.speculation: draft needs a model with a run directory",
                    key="generation.speculation",
                )
            bundle = self._load_run(path)
            self._check_draft_run(path, bundle)
            self._draft_runs[path] = bundle
        return self._draft_runs[path].prepared(
            generation.model_copy(update={"weights": "auto", "tensor_parallel": 1})
        )

    def _check_draft_run(self, path: str, draft: "ModelBundle") -> None:
        key = "generation.draft_run"
        if draft.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise UserError(
                f"{key} {path} must have the same tokenizer as the model, but has a different one",
                key=key,
            )
        context = draft.model.config.max_context
        least = self.model.config.max_context
        if context < least:
            raise UserError(
                f"{key} {path} must have a context of at least {least} tokens, got {context}",
                key=key,
            )

    @cached_property
    def grammars(self) -> ConstraintCompiler:
        """The compiler of constraints for this vocabulary; needs the `serve` extra."""
        return ConstraintCompiler(self.tokenizer, self.model.config.vocab_size)

    def matcher(self, constraint: Constraint, section: GenerationSection) -> Matcher:
        """Returns a matcher for a constraint, at the start of a sequence.

        Raises:
          UserError: the constraint is invalid or too large, or no sequence of this vocabulary
            satisfies it.
        """
        ends = stop_token_ids(self.tokenizer, section)
        return self.grammars.matcher(
            constraint.kind, constraint.source, ends, section.json_whitespace
        )

    def guides(self, request: GenerationRequest) -> list[list[Guide]]:
        """Returns the guides of each sample of a request.

        Raises:
          UserError: as in `matcher`.
        """
        section = request.config.generation
        vocab_size = self.model.config.vocab_size
        constraint = request.constraint
        reasoning = request.reasoning
        if constraint is not None and request.config.router.clarify_text is not None:
            message = (
                "router.clarify_text cannot be combined with a constraint"
                " on the output: remove one of them"
            )
            raise UserError(message, key="router.clarify_text")
        regexes = compile_regexes(section.banned_regexes) if section.banned_regexes else []
        matcher = None if constraint is None else self.matcher(constraint, section)
        gap = (
            None
            if constraint is None or reasoning is None
            else self._gap(request, reasoning, constraint.after)
        )

        def make_guides() -> list[Guide]:
            guides: list[Guide] = []
            if section.banned_strings or regexes:
                strings = find_banned_strings(tuple(section.banned_strings))
                guides.append(TextBan(strings, regexes, vocab_size, section.max_new_tokens))
            constrained: Guide | None = None
            if constraint is not None and matcher is not None:
                if constraint.after or constraint.opening:
                    constrained = AfterTrigger(matcher, constraint, vocab_size, reasoning, gap)
                else:
                    constrained = WholeText(matcher.copy())
            if request.healed:  # before the ban, which sees only the response
                guides.insert(
                    0, HealedPrefix(self.piece_index, request.healed, vocab_size, constrained)
                )
            elif constrained is not None:
                guides.append(constrained)
            if reasoning is not None and reasoning.budget is not None:
                guides.append(ReasoningBudget(reasoning, reasoning.budget, vocab_size))
            if request.begun:
                self._push_beginning(
                    request, [guide for guide in guides if not isinstance(guide, TextBan)]
                )
            return guides

        return [make_guides() for _ in range(section.n)]

    @cached_property
    def piece_index(self) -> PieceIndex:
        """The tokens of the vocabulary in the order of their bytes; needs a tokenizer whose tokens
        have fixed texts.
        """
        return PieceIndex(self.tokenizer)

    def heal(self, request: GenerationRequest) -> GenerationRequest:
        """Returns a request with `generation.token_healing` applied to its prompt.

        Raises:
          UserError: the text of a token depends on its neighbors.
        """
        if request.healed is not None or not request.config.generation.token_healing:
            return request
        count = (
            self.piece_index.healed_count(request.ids)
            if request.config.generation.max_new_tokens > 0
            else 0
        )
        length = len(request.ids) - count
        return replace(request, ids=request.ids[:length], healed=request.ids[length:])

    def _gap(self, request: GenerationRequest, reasoning: Reasoning, markers: Sequence[str]) -> Gap:
        """Returns the text of `reasoning.closing` after the last of the markers in it."""
        detokenizer = self.tokenizer.detokenizer(request.visible_ids)
        texts = [detokenizer.push([token]) for token in reasoning.closing]
        closing = "".join(texts)
        ends = [closing.rfind(marker) + len(marker) for marker in markers if marker in closing]
        start = max(ends, default=len(closing))
        ids: dict[tuple[int, str], None] = {}  # a set that keeps the order
        position = 0
        for token, text in zip(reasoning.closing, texts, strict=True):
            if text and position >= start:
                ids[token, text] = None
            position += len(text)
        return Gap(closing[start:], tuple(ids))

    def _push_beginning(self, request: GenerationRequest, guides: list[Guide]) -> None:
        """Advances guides by the tokens of the output that the prompt contains.

        Raises:
          UserError: the constraint does not allow them.
        """
        stream = self.tokenizer.detokenizer(request.visible_ids)
        stream.push(request.ids[: -request.begun])
        for token in request.ids[-request.begun :]:
            text = stream.push([token])
            try:
                allowed = all(
                    not guide.done and guide.push(token, text) != RESTART_BEFORE for guide in guides
                )
            except ValueError:  # the constraint does not allow the token
                allowed = False
            if not allowed:
                raise UserError(
                    "the beginning of the answer does not satisfy"
                    " its constraint: change one of them"
                )

    def prompt_ids(self, prompt: str, *, parse_special: bool = False) -> list[int]:
        """Returns the token ids of a prompt, with a leading BOS token if the tokenizer adds one.

        An empty prompt becomes the BOS token alone.

        Args:
          parse_special: encode the names of special tokens in the text as these tokens. A BOS token
            at the start is not duplicated.

        Raises:
          UserError: the prompt is empty and the tokenizer has no BOS token, or the tokenizer cannot
            encode the text.
        """
        ids = self.tokenizer.encode(prompt, parse_special=parse_special)
        before = self.tokenizer.ids_before_text
        if ids:
            return ids if before == (ids[0],) else [*before, *ids]
        if self.tokenizer.bos_id is None:
            raise UserError(
                "the prompt is empty and the tokenizer has no BOS"
                " token: enter at least one character"
            )
        return [self.tokenizer.bos_id]

    def prompts(self, request: GenerationRequest, context: int) -> list[tuple[int, ...]]:
        """Returns the prompts of the rows of each sample of a request: its prompt, and with
        guidance the negative prompt.

        Raises:
          UserError: the negative prompt fills the context, or as in `prompt_ids` and `check_ids`.
        """
        self.check_ids(request.ids)
        if request.rows_per_sample == 1:
            return [request.ids]
        text = request.config.generation.negative_prompt
        ids = request.negative_ids
        if ids is None:
            ids = tuple(self.prompt_ids(text)) if text else request.ids[-1:]
        self.check_ids(ids)
        if not 1 <= len(ids) < context:
            message = (
                f"generation.negative_prompt has {len(ids)} tokens and must have from 1 to"
                f" {context - 1}"
            )
            raise UserError(message, key="generation.negative_prompt")
        return [request.ids, ids]

    def check_ids(self, ids: Sequence[int]) -> None:
        """Checks the token ids of a prompt.

        Raises:
          UserError: an id is not in the vocabulary.
        """
        V = self.model.config.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= V):
            wrong = next(token for token in ids if not 0 <= token < V)
            raise UserError(f"tokens of the prompt must be in [0, {V}), got {quote(wrong)}")
