"""`dantinox eval tasks`: lm-evaluation-harness on a run.

Texts are encoded as the harness encodes them for Hugging Face models. Trailing spaces of a context
are moved to its continuation. Context and continuation are encoded as one text. If the context
alone has n tokens, the tokens after the first n are the continuation. The BOS token precedes every
text if the tokenizer adds one. An empty context becomes the BOS token, or else the EOS token. A
text that is too long for the model's context is truncated at its beginning.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.config import UserError, settings_of
from dantinox.files import first_line, install_command, quote
from dantinox.generation import LoadedModel, load
from dantinox.lab.measure.perplexity import ScoringInput, TokenScores, score_sequences
from dantinox.lab.measure.texts import equal_batches
from dantinox.lab.studies.continuations import NEUTRAL_SETTINGS, ROWS
from dantinox.report.tables import Column, text_table

MIN_LENGTH = 64  # texts are padded to at least this length, and above it to powers of two
NEW_TOKENS = 256  # maximum tokens of an answer if the task does not set it
# Generation settings of tasks: those with the same meaning here, those for the maximum tokens of an
# answer, and others.
SHARED_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
LENGTH_SETTINGS = ("max_gen_toks", "max_new_tokens", "max_tokens")
OTHER_SETTINGS = ("until", "do_sample")


class LMEvalModel:
    """The model interface of the harness: three kinds of requests. Progress lines report how many
    are done.

    An empty context needs a tokenizer with a BOS or an EOS token, to score the first token of a
    text.
    """

    def __init__(
        self,
        run: LoadedModel,
        settings: Mapping[str, Any],
        progress: Callable[[str], None] = lambda line: None,
    ):
        """Prepares the model.

        Args:
          settings: `weights`, `matmul_dtype` and `tensor_parallel` of the section `generation`.
        """
        self.run = run
        self.progress = progress
        self.context = run.model.config.max_context
        config = run.settings(settings)
        self._device = {
            name: settings_of(config)[name]
            for name in ("weights", "matmul_dtype", "tensor_parallel")
        }
        self._model = run.prepared(config.generation)
        self._bos_ids = list(run.tokenizer.ids_before_text)

    @cached_property
    def _empty_context(self) -> list[int]:
        found = [
            token
            for token in (self.run.tokenizer.bos_id, self.run.tokenizer.eos_id)
            if token is not None
        ][:1]
        if not found:
            raise UserError(
                "eval tasks needs a tokenizer with a BOS or an EOS token,"
                " to score the first token of a text"
            )
        return found

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Scores the continuation in each pair (context, continuation).

        Returns:
          ln p of the continuation, and whether each of its tokens is the most likely token at its
          position.
        """
        texts = [self.encode_pair(*pair) for pair in pairs]
        longest = max((text.new for text in texts), default=0)
        if longest > self.context:
            raise UserError(
                f"a continuation has {longest} tokens, but the model's context is {self.context}"
            )
        scores = self.score_all(
            [ScoringInput(text.ids[-(self.context + 1) :], text.new) for text in texts]
        )
        return [(float(np.sum(score.logp)), bool(score.is_top1.all())) for score in scores]

    def encode_pair(self, context: str, continuation: str) -> ScoringInput:
        """Returns the tokens of a context and a continuation, of any length. Those of the
        continuation are scored.
        """
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        context = stripped
        whole = self._encode(context + continuation)
        new = max(1, len(whole) - len(self._encode(context))) if context else len(whole)
        return ScoringInput(
            np.array([*(self._bos_ids if context else self._empty_context), *whole], np.int32), new
        )

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Returns ln p of each text, of any length, in windows that each score as many tokens as
        fit in the context.

        The last window scores the remaining tokens and is filled with earlier tokens as context.
        """
        windows: list[ScoringInput] = []
        owners: list[int] = []
        for number, text in enumerate(texts):
            ids = np.array([*self._empty_context, *self._encode(text)], np.int32)
            for start in range(1, len(ids), self.context):
                end = min(start + self.context, len(ids))
                windows.append(ScoringInput(ids[max(0, end - self.context - 1) : end], end - start))
                owners.append(number)
        sums = np.zeros(len(texts))
        np.add.at(sums, owners, [np.sum(score.logp) for score in self.score_all(windows)])
        return [float(total) for total in sums]

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Returns for each (context, settings of the harness) the continuation up to its stop
        strings, greedy by default.
        """
        prepared = []
        common: dict[str, Any] = {
            **NEUTRAL_SETTINGS,
            "ignore_eos": False,
            "seed": 0,
            **self._device,
        }
        for context, given in requests:
            settings = common | _generation_settings(given, self.context)
            ids = self._bos_ids + self._encode(context) if context else self._empty_context
            prepared.append((ids[-(self.context - settings["max_new_tokens"]) :], settings))
        order = sorted(range(len(prepared)), key=lambda number: -len(prepared[number][0]))
        answers: dict[int, str] = {}
        for positions in equal_batches(len(prepared), ROWS) if prepared else ():
            numbers = [order[position] for position in positions]
            results = self.run.complete(
                [self.run.request(*prepared[number]) for number in numbers], pad=self._padded_length
            )
            answers |= {
                number: result.text for number, result in zip(numbers, results, strict=True)
            }
            self.progress(f"{len(answers)} of {len(prepared)} texts are generated")
        return [answers[number] for number in range(len(prepared))]

    def score_all(self, texts: Sequence[ScoringInput]) -> list[TokenScores]:
        """Returns the scores of texts in order. Texts of similar length share a batch."""
        groups: dict[int, list[int]] = {}
        for number, text in enumerate(texts):
            groups.setdefault(self._padded_length(len(text.ids) - 1), []).append(number)
        scores_by_index: dict[int, TokenScores] = {}
        for _, numbers in sorted(groups.items(), reverse=True):
            for position, scores in score_sequences(
                self._model, [texts[number] for number in numbers]
            ):
                scores_by_index[numbers[position]] = scores
            self.progress(f"{len(scores_by_index)} of {len(texts)} texts are scored")
        return [scores_by_index[number] for number in range(len(texts))]

    def _encode(self, text: str) -> list[int]:
        return self.run.tokenizer.encode(text) if text else []

    def _padded_length(self, length: int) -> int:
        return max(MIN_LENGTH, 1 << (length - 1).bit_length())


def _generation_settings(given: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Converts generation settings of the harness to settings of this package."""
    unknown = next(
        (
            name
            for name in given
            if name not in {*SHARED_SETTINGS, *LENGTH_SETTINGS, *OTHER_SETTINGS}
        ),
        None,
    )
    if unknown is not None:
        raise UserError(f"a task uses the generation setting {unknown}, which is not supported")
    until = given.get("until") or []
    found: dict[str, Any] = {
        "stop": [until] if isinstance(until, str) else [text for text in until if text]
    }
    lengths = [given[name] for name in LENGTH_SETTINGS if given.get(name) is not None]
    wanted = min(lengths[0] if lengths else NEW_TOKENS, context // 2)
    if not given.get("do_sample", False):
        return found | {"max_new_tokens": wanted, "greedy": True}
    return (
        found
        | {"max_new_tokens": wanted}
        | {name: value for name, value in given.items() if name in SHARED_SETTINGS}
    )


@dataclass(frozen=True)
class TaskScore:
    """One metric of a task or a group: its value, its standard error if there is one, and its
    number of samples.
    """

    task: str
    metric: str
    filter: str
    value: float
    error: float | None
    shots: int | None
    samples: int | None


@dataclass(frozen=True)
class TaskStudy:
    """The results of `eval tasks`. `versions` has the version of each task; `harness` is the
    version of the library.
    """

    scores: list[TaskScore]
    versions: dict[str, Any]
    harness: str


def evaluate_tasks(
    run_dir: str | Path,
    tasks: str,
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    shots: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> TaskStudy:
    """Evaluates a run's model on tasks of lm-evaluation-harness.

    Args:
      tasks: names separated by commas: tasks, groups, tags, or YAML files.
      include_path: a folder of additional tasks. A task may contain code, which the harness runs.
      limit: maximum samples of each task.
      shots: examples before each question (default: the setting of each task).
      settings: those of `LMEvalModel`.

    Raises:
      UserError: the library is not installed, or it cannot load or run a task.
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks must name at least one task")
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include_path must be a folder of tasks, got {include_path}")
    if limit == 0:
        raise UserError("--limit must be at least 1, got 0")
    try:
        import lm_eval
        from lm_eval.api.model import LM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        missing = f"eval tasks needs lm-evaluation-harness ({first_line(error)})"
        raise UserError(f"{missing}: {install_command('lm-eval')}") from None

    model = _harness_model(
        LM, LMEvalModel(load(run_dir, settings.get("tensor_parallel")), settings, progress)
    )
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the harness prints its progress
            manager = TaskManager(include_path=None if include_path is None else str(include_path))
            found = lm_eval.simple_evaluate(
                model,
                tasks=names,
                num_fewshot=shots,
                limit=limit,
                task_manager=manager,
                log_samples=False,
            )
    except UserError:
        raise
    except Exception as error:  # from a task, a data set, the network or the library
        raise UserError(
            f"lm-evaluation-harness cannot run {', '.join(names)}: {first_line(error)}"
        ) from error
    return TaskStudy(
        list(parse_scores(found)), dict(found.get("versions", {})), str(lm_eval.__version__)
    )


def _harness_model(base: Any, model: LMEvalModel) -> Any:
    """Returns a model of the class `base`, `LM` of the harness, whose requests contain their
    arguments.
    """

    class Model(base):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return model.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return model.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any]) -> list[str]:
            return model.generate_until([request.args for request in requests])

    return Model()


def parse_scores(found: Mapping[str, Any]) -> Iterator[TaskScore]:
    """Yields the numbers in the harness's results. Keys are `metric,filter`; standard errors are
    `metric_stderr,filter`.
    """
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, comma, name = key.partition(",")
            if (
                not comma
                or metric.endswith("_stderr")
                or isinstance(value, str | bool)
                or not isinstance(value, int | float)
            ):
                continue
            error = values.get(f"{metric}_stderr,{name}")
            shots = found.get("n-shot", {}).get(task)
            yield TaskScore(
                task=task,
                metric=metric,
                filter=name,
                value=float(value),
                error=float(error) if isinstance(error, int | float) else None,
                shots=shots if isinstance(shots, int) else None,
                samples=found.get("n-samples", {}).get(task, {}).get("effective"),
            )


def _format_number(number: float | None) -> str | None:
    """Formats a number with four decimals, or four significant digits if it is large, as a
    perplexity can be.
    """
    if number is None:
        return None
    return f"{number:.4f}" if abs(number) < 1e4 else f"{number:.4g}"


def task_lines(study: TaskStudy, width: int) -> Iterator[str]:
    """Yields the scores as the lines of a table."""
    columns = [
        Column("task", "task", lambda score: score.task),
        Column(
            "metric",
            "metric",
            lambda score: (
                score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
            ),
        ),
        Column("value", "value", lambda score: _format_number(score.value)),
        Column("error", "± standard error", lambda score: _format_number(score.error)),
        Column("shots", "shots", lambda score: score.shots, "d"),
        Column("samples", "samples", lambda score: score.samples, "d"),
    ]
    if not study.scores:
        raise UserError(f"the tasks returned no number: {quote(study.versions)}")
    yield from text_table(columns, study.scores, width)
