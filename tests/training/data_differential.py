"""Compares the documents in the batches of random corpora with the same documents alone in a batch.

`python -m tests.training.data_differential 2000` compares 2,000 corpora. The text, the
conversations or the pairs of a corpus are laid out by their store. The tokens, segments and masks
of its rows are compared with the corpus. Then the same program reads each document alone, at the
beginning of a row that ends with padding. The losses, the numbers of targets, the tokens of each
expert, and bits per byte must be equal.
"""

import sys
import time
from collections import Counter
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from dantinox.config import Config, build_config
from dantinox.model import Transformer
from dantinox.model.parameters import abstract_model
from dantinox.text import (
    PADDING,
    Batch,
    BatchOptions,
    ConversationStore,
    Counts,
    LabeledCompletions,
    Preferences,
    SpecialIds,
    TokenStore,
)
from dantinox.text.conversations import DESIRABLE, FIRST_TOKEN, IN_LOSS
from dantinox.training.objective import OBJECTIVES
from dantinox.training.token_losses import MAX_CHUNK_LOGITS, per_token_losses

from .small import random_weights

VOCABULARY, EOS, BOS, PAD = 23, 22, 21, 20  # smaller ids are ordinary tokens
ROWS, LENGTH = 4, 12
BYTES = np.append(1 + np.arange(PAD) % 4, [0, 0, 0])  # of each token
EXPERTS = {"moe.use_moe": True, "moe.n_experts": 4, "moe.top_k_mlp": 2}
LEARNED = {"attention.use_rotary_pos": False, "attention.trainable_pos": True}
KINDS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": LEARNED,
    "sinusoidal": {"attention.use_rotary_pos": False, "attention.absolute_pos": True},
    "none": {"attention.use_rotary_pos": False},
    "sliding window": {"attention.sliding_window": True, "attention.context_window": 3},
    "scaled queries": {
        "attention.rope_scaling": "yarn", "attention.rope_factor": 4,
        "attention.rope_original_context": 2,
        "attention.query_scaling_beta": 0.5,
    },
    "latent": {"attention.kv_lora_rank": 8, "attention.qk_rope_head_dim": 4},
    "rotary, experts": EXPERTS,
    "learned, experts": LEARNED | EXPERTS,
}  # fmt: skip
PAIRS = ("dpo", "ipo", "orpo", "simpo", "kto")
PAIR_KINDS = ("rotary", "learned, experts")
CASES = (
    *((objective, kind) for kind in KINDS for objective in ("next_token", "sft")),
    *((objective, kind) for kind in PAIR_KINDS for objective in PAIRS),
)
# The two readings of a document differ in the order of float32 sums. A loss is of order 1 and
# behind two layers, each with a few sums of at most 64 terms; each sum adds at most some roundings
# to it.
TOLERANCE = 64 * 2.0**-23

Part = tuple[
    tuple[int, ...], tuple[int, ...]
]  # the tokens of a document, or of a part of one, and the mask of its targets


@cache
def config_of(objective: str, kind: str) -> Config:
    """Returns the settings of a tiny model."""
    base = {
        "model.dim": 16, "model.n_heads": 2, "model.num_blocks": 2, "model.max_context": LENGTH,
        "model.dropout_rate": 0,
        "training.objective": objective,
    }  # fmt: skip
    return build_config(
        {}, base | ({"training.init_from": "x"} if objective in PAIRS else {}) | KINDS[kind]
    )


@cache
def model_of(kind: str) -> Transformer:
    """Returns a model with random weights."""
    architecture = config_of("sft", kind).architecture(VOCABULARY)
    return abstract_model(architecture)[0](random_weights(architecture))


@jax.jit
def token_program(model: Transformer, batch: Batch) -> tuple[Any, ...]:
    """Returns the losses and squared log-normalizers of the tokens, the mask, and the tokens of
    each expert.
    """
    nats_N, squares_N, mask_N, aux = per_token_losses(model, batch, None, MAX_CHUNK_LOGITS)
    return *(array.reshape(ROWS, LENGTH) for array in (nats_N, squares_N, mask_N)), getattr(
        aux.get("routing"), "counts_E", 0
    )


@partial(jax.jit, static_argnames="objective")
def pair_program(model: Transformer, batch: Any, objective: str) -> tuple[Any, ...]:
    """Returns the sums over pairs of losses, pairs, metrics and terms of the KL divergence, and the
    tokens of each expert.
    """
    found = OBJECTIVES[objective]
    sums = found.losses(model, batch, config_of(objective, "rotary"), None)
    kl = 0 if found.kl_sums is None else found.kl_sums(model, batch)
    return sums.nats, sums.num_targets, sums.metrics, kl, getattr(sums.routing, "counts_E", 0)


def place_alone(parts: list[tuple[np.ndarray, ...]]) -> Batch:
    """Returns a batch with one document per row, given its inputs, targets and mask. All other
    places are padding.
    """
    tokens, targets, segments = (
        np.full((ROWS, LENGTH), fill, np.int32) for fill in (PAD, PAD, PADDING)
    )
    mask = np.zeros((ROWS, LENGTH), np.float32)
    for row, (inputs, outputs, counted) in enumerate(parts):
        for array, values in ((tokens, inputs), (targets, outputs), (mask, counted), (segments, 0)):
            array[row, : len(inputs)] = values
    return Batch(tokens, targets, segments, mask)


def compare_documents(model: Transformer, batch: Batch, per_batch: int) -> tuple[float, int]:
    """Compares a batch with its documents, of which `per_batch` are read at a time.

    Returns:
      The sum of the losses of the documents alone, and the number of their targets.
    """
    nats, squares, mask, counts = map(np.asarray, token_program(model, batch))
    places = [
        (row, np.flatnonzero(segments == segment))
        for row, segments in enumerate(batch.segments_BT)
        for segment in np.unique(segments[segments != PADDING])
    ]
    total, targets, counts_alone = 0.0, 0, 0
    for start in range(0, len(places), per_batch):
        some = places[start : start + per_batch]
        fields = (batch.tokens_BT, batch.targets_BT, batch.mask_BT)
        alone = place_alone(
            [tuple(array[row, columns] for array in fields) for row, columns in some]
        )
        nats_alone, squares_alone, mask_alone, counts_E = map(
            np.asarray, token_program(model, alone)
        )
        for index, (row, columns) in enumerate(some):
            for packed, apart in ((nats, nats_alone), (squares, squares_alone)):
                np.testing.assert_allclose(
                    packed[row, columns],
                    apart[index, : len(columns)],
                    rtol=TOLERANCE,
                    atol=TOLERANCE,
                )
        total, targets = total + nats_alone.sum(dtype=np.float64), targets + int(mask_alone.sum())
        counts_alone = counts_alone + counts_E
    assert targets == int(mask.sum()) == int(batch.mask_BT.sum())
    np.testing.assert_array_equal(counts, counts_alone)
    np.testing.assert_allclose(nats.sum(dtype=np.float64), total, rtol=TOLERANCE)
    return total, targets


def expected_window(
    stream: np.ndarray, documents: np.ndarray, start: int
) -> tuple[np.ndarray, ...]:
    """Returns tokens, targets, segments and mask of a row of consecutive tokens, which ends with
    padding after the last one.
    """
    size = min(LENGTH, len(stream) - 1 - start)
    tokens, targets, segments = (np.full(LENGTH, fill) for fill in (PAD, PAD, PADDING))
    mask = np.zeros(LENGTH)
    tokens[:size], targets[:size] = (
        stream[start : start + size],
        stream[start + 1 : start + size + 1],
    )
    own, following = documents[start : start + size], documents[start + 1 : start + size + 1]
    segments[:size], mask[:size] = own - own[0], own == following
    return tokens, targets, segments, mask


def check_window(
    row: tuple[np.ndarray, ...], stream: np.ndarray, documents: np.ndarray, at: int | None = None
) -> None:
    """Checks a row of consecutive tokens of a stream, of which `documents` numbers the documents.
    None: they are anywhere.
    """
    tokens = np.append(row[0], row[1][-1])
    starts = (
        [at]
        if at is not None
        else np.flatnonzero(
            (np.lib.stride_tricks.sliding_window_view(stream, LENGTH + 1) == tokens).all(1)
        )
    )
    found = [expected_window(stream, documents, int(start)) for start in starts]
    assert any(
        all((a == b).all() for a, b in zip(row, expected, strict=True)) for expected in found
    )


def find_parts(batch: Batch, known: Counter[Part]) -> Counter[Part]:
    """Returns the documents in packed rows. Each must be one of `known`.

    The last token of a document is the last target if the document ends with the row, else it is
    also an input.
    """
    found: Counter[Part] = Counter()
    for tokens, targets, segments, mask in zip(*batch, strict=True):
        for segment in np.unique(segments[segments != PADDING]):
            at = segments == segment
            inputs, counted = tuple(tokens[at].tolist()), tuple(mask[at].astype(int).tolist())
            ends_within = inputs, counted[:-1]
            ends_with_row = (*inputs, int(targets[-1])), counted
            assert (ends_within in known and not counted[-1]) or (ends_with_row in known and at[-1])
            found[ends_within if ends_within in known else ends_with_row] += 1
    return found


def check_epoch(store: TokenStore, known: Counter[Part]) -> list[Batch]:
    """Checks that the first epoch has each document once, and returns its batches. No document may
    begin with another one.
    """
    found, batches = Counter(), []
    for step in range(-(-store.windows_per_epoch // ROWS)):
        batches.append(store.batch(step))
        rows = min(ROWS, store.windows_per_epoch - step * ROWS)
        found += find_parts(Batch(*(array[:rows] for array in batches[-1])), known)
    assert found == known
    return batches


def compare_text(rng: np.random.Generator, kind: str) -> None:
    """Compares a random corpus of texts, perhaps a mixture, with windows of tokens or packed
    documents.
    """
    bos, packing = [None, BOS, EOS][rng.integers(3)], bool(rng.integers(2))
    shortest, longest = int(rng.integers(1, 4)), int(rng.choice([4, 9, 30]))

    def draw() -> list[int]:
        text = rng.integers(0, PAD, rng.integers(shortest, longest + 1)).tolist()
        return [*([] if bos is None else [bos]), *text, EOS]

    sources: list[list[list[int]]] = []
    for _ in range(rng.integers(1, 4)):
        sources.append([])
        while (
            sum(map(len, sources[-1])) < (ROWS + 4) * LENGTH
        ):  # enough for a batch if the last document is split
            sources[-1].append(draw())
    val = [draw() for _ in range(rng.integers(1, 12))]
    if rng.integers(2):  # the last document is split between training and validation
        document = sources[-1].pop()
        cut = int(rng.integers(1, len(document)))
        sources[-1].append(document[:cut])
        val.insert(0, document[cut:])
    training = [document for source in sources for document in source]
    streams = [np.concatenate(part).astype(np.uint16) for part in (training, val)]
    documents = [
        np.repeat(np.arange(len(part)), [len(document) for document in part])
        for part in (training, val)
    ]
    mixture = (
        [(sum(map(len, source)), float(rng.integers(1, 4))) for source in sources]
        if len(sources) > 1
        else []
    )
    store = TokenStore(
        *streams,
        BatchOptions(ROWS, LENGTH, int(rng.integers(1 << 30)), mixture),
        SpecialIds(EOS, bos, PAD),
        packing=packing,
    )
    if packing:
        chunks = [
            document[i : i + LENGTH + 1]
            for document in training
            for i in range(0, max(1, len(document) - 1), LENGTH)
        ]
        known = Counter(
            (tuple(chunk), (1,) * (len(chunk) - 1)) for chunk in chunks if len(chunk) > 1
        )
        batches = (
            [store.batch(step) for step in range(2)] if mixture else check_epoch(store, known)[:2]
        )
        for batch in batches:
            find_parts(batch, known)
    else:
        batches = [store.batch(int(step)) for step in rng.integers(0, 1000, 2)]
        for row in (row for batch in batches for row in zip(*batch, strict=True)):
            check_window(row, streams[0], documents[0])
    model, per_batch = model_of(kind), int(rng.choice([1, ROWS]))
    for batch in batches:
        compare_documents(model, batch, per_batch)
    nats = targets = 0.0
    nats_packed, bytes_packed = 0.0, 0
    for number, batch in enumerate(store.validation(ROWS)):
        for index, row in enumerate(zip(*batch, strict=True)):
            start = (number * ROWS + index) * LENGTH
            if start < len(streams[1]) - 1:
                check_window(row, streams[1], documents[1], start)
            else:
                assert (row[2] == PADDING).all() and not row[3].any()
        alone, count = compare_documents(model, batch, per_batch)
        nats, targets = nats + alone, targets + count
        nats_packed += np.asarray(token_program(model, batch)[0]).sum(dtype=np.float64)
        bytes_packed += int(BYTES[batch.targets_BT[batch.mask_BT > 0]].sum())
    assert targets == sum(len(document) - 1 for document in val), (
        "all tokens but the first of each document are targets"
    )
    assert bytes_packed == sum(int(BYTES[document[1:]].sum()) for document in val)
    if bytes_packed:
        np.testing.assert_allclose(nats_packed / bytes_packed, nats / bytes_packed, rtol=TOLERANCE)


def draw_conversation(rng: np.random.Generator, longest: int) -> tuple[list[int], list[int]]:
    """Returns the tokens of a conversation and their marks: at least one token after the first is
    in the loss.
    """
    size = int(rng.integers(2, longest + 1))
    marks = rng.integers(0, 2, size) * IN_LOSS
    marks[int(rng.integers(1, size))] = IN_LOSS
    marks[0] = FIRST_TOKEN
    return rng.integers(0, VOCABULARY, size).tolist(), marks.tolist()


def make_store(
    rng: np.random.Generator,
    parts: list[list[tuple[list[int], list[int]]]],
    mixture: Any = (),
    **options: Any,
) -> ConversationStore:
    """Returns a store of training and validation conversations."""
    ids, marks = (
        np.array([x for part in parts for one in part for x in one[k]], d)
        for k, d in ((0, np.uint16), (1, np.uint8))
    )
    counts = [Counts(sum(len(one[0]) for one in part), len(part), 0, 0) for part in parts]
    return ConversationStore(
        ids,
        marks,
        (counts[0], counts[1]),
        BatchOptions(ROWS, LENGTH, int(rng.integers(1 << 30)), mixture),
        pad_id=PAD,
        **options,
    )


def part_of(conversation: tuple[list[int], list[int]], longest: int | None = None) -> Part:
    tokens, marks = conversation
    return tuple(tokens[:longest]), tuple(int(mark == IN_LOSS) for mark in marks[1:longest])


def compare_conversations(rng: np.random.Generator, kind: str) -> None:
    """Compares random conversations, packed into rows."""
    longest, beginnings = int(rng.choice([4, 9, LENGTH + 3])), set()

    def draw(longest: int) -> tuple[list[int], list[int]]:
        while True:
            conversation = draw_conversation(rng, longest)
            beginning = tuple(conversation[0][:2])
            if beginning not in beginnings:
                beginnings.add(beginning)
                return conversation

    # At least one conversation of each part is not too long.
    parts = [[*(draw(longest) for _ in range(rng.integers(4, 20))), draw(LENGTH)] for _ in range(2)]
    sources = [parts[0], [draw(9) for _ in range(5)]] if rng.integers(2) else [parts[0]]
    training = [one for source in sources for one in source]
    sizes = [(sum(len(one[0]) for one in source), float(rng.integers(1, 4))) for source in sources]
    store = make_store(rng, [training, parts[1]], mixture=sizes if len(sources) > 1 else ())
    known, known_val = (
        Counter(part_of(c) for c in part if len(c[0]) <= LENGTH + 1)
        for part in (training, parts[1])
    )
    batches = (
        [store.batch(step) for step in range(2)]
        if len(sources) > 1
        else check_epoch(store, known)[:2]
    )
    for batch in batches:
        find_parts(batch, known)
    found: Counter[Part] = Counter()
    for batch in store.validation(ROWS):
        found += find_parts(batch, known_val)
        batches.append(batch)
    assert found == known_val
    for batch in batches:
        compare_documents(model_of(kind), batch, int(rng.choice([1, ROWS])))


def compare_pairs(rng: np.random.Generator, kind: str, objective: str) -> None:
    """Compares random pairs of conversations with each pair alone in a batch."""
    is_kto = objective == "kto"
    longest = LENGTH + 1 if is_kto else int(rng.choice([5, LENGTH + 3]))
    parts = [
        [draw_conversation(rng, longest) for _ in range(2 * int(rng.integers(2, 9)))]
        for _ in range(2)
    ]
    for part in parts:
        part += [
            draw_conversation(rng, LENGTH) for _ in range(2)
        ]  # at least one pair is not too long
        for tokens, marks in part[::2] if is_kto else ():
            marks[0] |= int(rng.integers(2)) * DESIRABLE
            assert len(tokens) <= LENGTH + 1
    store = make_store(rng, parts, form="label" if is_kto else "pair")
    store.reference = rng.normal(-9, 1, store.reference.shape).astype(np.float32)
    pairs = [both for part in parts for both in zip(part[::2], part[1::2], strict=True)]
    known = {tuple(part_of(one) for one in both): index for index, both in enumerate(pairs)}
    model = model_of(kind)
    for batch in [store.batch(int(rng.integers(0, 50))), *store.validation(ROWS)]:
        if is_kto:
            batch = batch._replace(kl_P=np.full_like(batch.kl_P, 0.25))
        check_pairs(batch, known, pairs, store)
        whole = list(map(np.asarray, pair_program(model, batch, objective)))
        alone = []
        for index in range(ROWS):
            own = type(batch)(
                *(
                    np.where(_only(index, array), array, fill)
                    for array, fill in zip(batch, FILL, strict=False)
                )
            )
            alone.append(list(map(np.asarray, pair_program(model, own, objective))))
        sums = [np.sum([one[field] for one in alone], axis=0) for field in range(len(whole))]
        scale = np.sum([np.abs(one[0]) for one in alone])
        for given, expected in zip(whole[:4], sums[:4], strict=True):
            np.testing.assert_allclose(
                given, expected, rtol=TOLERANCE, atol=TOLERANCE * (1 + scale)
            )
        assert whole[1] == sum(
            bool((mask > 0).any()) for mask in (batch.mask_P2T[:, 0] if is_kto else batch.mask_P2T)
        )
        np.testing.assert_array_equal(whole[4], sums[4])


FILL = (
    PAD,
    PAD,
    PADDING,
    0,
    0,
    False,
    0.25,
)  # padding in the fields of `LabeledCompletions`, of which `Preferences` has five


def _only(index: int, array: np.ndarray) -> np.ndarray:
    return (np.arange(len(array)) == index).reshape(-1, *[1] * (array.ndim - 1))


def check_pairs(
    batch: Preferences | LabeledCompletions, known: dict, pairs: list, store: ConversationStore
) -> None:
    """Checks the rows of pairs, their references and labels."""
    for number in range(ROWS):
        rows = Batch(*(array[number] for array in batch[:4]))
        if (rows.segments_BT == PADDING).all():
            assert not rows.mask_BT.any()
            continue
        both = []
        for tokens, targets, segments, mask in zip(*rows, strict=True):
            size = int((segments == 0).sum())
            assert (segments == np.where(np.arange(LENGTH) < size, 0, PADDING)).all()
            ends = [(tuple(tokens[:size].tolist()), tuple(mask[: size - 1].astype(int).tolist()))]
            if size == LENGTH:
                ends.append(
                    ((*tokens.tolist(), int(targets[-1])), tuple(mask.astype(int).tolist()))
                )
            both.append(ends)
        indices = [
            known[first, second]
            for first in both[0]
            for second in both[1]
            if (first, second) in known
        ]
        (index,) = indices
        np.testing.assert_array_equal(batch.reference_P2[number], store.reference[index])
        if isinstance(batch, LabeledCompletions):
            assert bool(batch.desirable_P[number]) == bool(pairs[index][0][1][0] & DESIRABLE)


def compare(seed: int) -> None:
    """Compares a random corpus. The seed determines the objective, the kind of model and the
    corpus.
    """
    objective, kind = CASES[seed % len(CASES)]
    rng = np.random.default_rng(seed)
    if objective == "next_token":
        compare_text(rng, kind)
    elif objective == "sft":
        compare_conversations(rng, kind)
    else:
        compare_pairs(rng, kind, objective)


if __name__ == "__main__":
    count, failed, started = int(sys.argv[1]), 0, time.monotonic()
    for seed in range(count):
        try:
            compare(seed)
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}, {' with '.join(CASES[seed % len(CASES)])}: {error}", flush=True)
        if seed % 100 == 99:
            print(
                f"{seed + 1} corpora, {failed} differ, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    sys.exit(failed > 0)
