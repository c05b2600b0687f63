"""Compares the batches of epochs and windows with loops in plain Python."""

import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dantinox.config import UserError
from dantinox.text import Batch, BatchOptions, SpecialIds, TokenStore
from dantinox.text.batch_rows import best_fit
from tests.error_texts import ERRORS

EOS, PAD = 1, 2


def make(
    tokens: int | list[int],
    batch: int = 3,
    length: int = 4,
    seed: int = 0,
    val: list[int] | None = None,
    **more,
) -> TokenStore:
    train = np.arange(tokens) if isinstance(tokens, int) else np.array(tokens)
    val = np.arange(10) if val is None else np.array(val)
    batches = BatchOptions(batch, length, seed, more.pop("mixture", ()))
    special = SpecialIds(more.pop("eos_id", None), more.pop("bos_id", None), more.pop("pad_id", 0))
    return TokenStore(train, val, batches, special, **more)


def naive(inputs: list[int]) -> tuple[list[int], list[float]]:
    """Segments and mask of one window, token by token."""
    segments, mask, document = [], [], 0
    for token in inputs:
        segments.append(document)
        mask.append(0.0 if token == EOS else 1.0)
        document += token == EOS
    return segments, mask


@given(
    extra=st.integers(0, 40),
    batch=st.integers(1, 4),
    length=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
    e=st.integers(0, 3),
)
def test_an_epoch_contains_every_window_once(
    extra: int, batch: int, length: int, seed: int, e: int
) -> None:
    tokens = batch * length + 1 + extra
    store = make(tokens, batch, length, seed)
    windows = store.windows_per_epoch
    first, last = e * windows, (e + 1) * windows
    rows = [
        row for step in range(last // batch + 1) for row in store.batch(step).tokens_BT.tolist()
    ][first:last]
    targets = sorted(token + 1 for row in rows for token in row)
    # Each token is its position, so tokens are consecutive and unique. The omitted edges are
    # shorter than two windows.
    assert targets == list(range(targets[0], targets[0] + windows * length))
    assert all(row == list(range(row[0], row[0] + length)) for row in rows)
    assert windows == max(1, (tokens - length) // length) and tokens - 1 - windows * length <= max(
        0, 2 * length - 2
    )


def test_epochs_cover_every_target_with_uniform_offsets() -> None:
    store = make(4 * 25 + 3, batch=1, length=4)
    windows = store.windows_per_epoch
    starts = [
        min(store.batch(e * windows + i).tokens_BT[0, 0] for i in range(windows))
        for e in range(300)
    ]
    counts = np.bincount(starts, minlength=6)
    slack = 103 - 1 - 4 * windows
    assert len(counts) == slack + 1 and counts.min() > 300 / (slack + 1) * 0.5
    seen = {int(t) for step in range(100 * windows) for t in store.batch(step).targets_BT[0]}
    assert seen == set(range(1, 103))


def test_epochs_and_seeds_have_different_orders() -> None:
    order = {
        (seed, e): tuple(
            make(400, 1, 4, seed).batch(e * 99 + i).tokens_BT[0, 0] // 4 for i in range(99)
        )
        for seed in (0, 1)
        for e in (0, 1)
    }
    assert len(set(order.values())) == 4 and all(
        len(set(o)) == 99 and list(o) != sorted(o) for o in order.values()
    )


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox 4x64-10 (Salmon et al. 2011) in plain Python."""
    c, k, low = [counter, 0, 0, 0], list(key), 2**64 - 1
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(b >> 64) ^ c[1] ^ k[0], b & low, (a >> 64) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + 0x9E3779B97F4A7C15) & low, (k[1] + 0xBB67AE8584CAA73B) & low]
    return c


def test_the_order_matches_plain_python() -> None:
    """The order must not depend on NumPy, because a resumed run with another NumPy version must get
    the same data.
    """
    store = make(41, batch=2, length=4, seed=7)
    for epoch in (0, 1):
        words = [word for counter in (1, 2, 3) for word in philox(counter, (7, epoch))]
        offset = words[0] % (41 - 1 - 9 * 4 + 1)
        order = sorted(range(9), key=lambda i: words[1 + i])
        rows = [int(row[0]) for step in range(9) for row in store.batch(step).tokens_BT]
        assert rows[9 * epoch :][:9] == [offset + 4 * i for i in order]


@given(step=st.integers(0, 10**15))
def test_a_batch_depends_only_on_seed_and_step(step: int) -> None:
    store, other = make(50, seed=3), make(50, seed=3)
    other.batch(step + 1)
    for a, b in zip(store.batch(step), other.batch(step), strict=True):
        assert np.array_equal(a, b)


def test_threads_can_read_batches_concurrently() -> None:
    store = make(200, batch=5)
    expected = [make(200, batch=5).batch(step).tokens_BT for step in range(300)]
    wrong: list[int] = []

    def ask(steps: range) -> None:
        wrong.extend(
            step
            for step in steps
            if not np.array_equal(store.batch(step).tokens_BT, expected[step])
        )

    threads = [threading.Thread(target=ask, args=(range(i, 300, 2 + i),)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []


@given(st.lists(st.integers(0, 4), min_size=30, max_size=60), st.integers(0, 20))
def test_segments_and_mask(tokens: list[int], step: int) -> None:
    batch = make(tokens, eos_id=EOS).batch(step)
    for inputs, targets, segments, mask in zip(*(array.tolist() for array in batch), strict=True):
        assert (segments, mask) == naive(inputs)
        assert inputs[1:] == targets[:-1]


def test_a_document_ends_with_its_end_token() -> None:
    batch = make([5, 6, EOS, 7, EOS, 8, 9], batch=1, length=6, eos_id=EOS).batch(0)
    assert batch.tokens_BT.tolist() == [[5, 6, EOS, 7, EOS, 8]]
    assert batch.targets_BT.tolist() == [[6, EOS, 7, EOS, 8, 9]]
    assert batch.segments_BT.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert batch.mask_BT.tolist() == [[1, 1, 0, 1, 0, 1]]


def test_without_an_end_token_there_is_one_document() -> None:
    batch = make(50).batch(0)
    assert not batch.segments_BT.any() and batch.mask_BT.all()


def test_types_and_layout() -> None:
    for batch in [
        make(50, eos_id=EOS).batch(0),
        make(50).batch(2),
        next(make(50, eos_id=EOS).validation(2)),
    ]:
        assert isinstance(batch, Batch) and len({array.shape for array in batch}) == 1
        assert [array.dtype for array in batch] == [np.int32, np.int32, np.int32, np.float32]
        assert all(array.flags.c_contiguous for array in batch)


def test_uint32_tokens_on_disk(tmp_path) -> None:
    for dtype in ("<u2", "<u4"):
        tokens = np.arange(65_500, 65_536, dtype=dtype)
        tokens.tofile(tmp_path / "t.bin")
        mapped = np.memmap(tmp_path / "t.bin", dtype, mode="r")
        store = TokenStore(mapped, mapped[:9], BatchOptions(2, 4, seed=0))
        assert (
            type(store.batch(0).tokens_BT) is np.ndarray
            and store.batch(0).tokens_BT.min() >= 65_500
        )
        assert np.concatenate([b.targets_BT.ravel() for b in store.validation(1)])[
            :8
        ].tolist() == list(range(65_501, 65_509))


@given(
    val=st.lists(st.integers(0, 5), min_size=2, max_size=60),
    batch=st.integers(1, 4),
    limit=st.none() | st.integers(1, 70),
)
def test_validation_yields_every_target_once(val: list[int], batch: int, limit: int | None) -> None:
    store = make(50, val=val, eos_id=EOS, pad_id=PAD)
    batches = list(store.validation(batch, limit))
    count = min(len(val) - 1, limit or len(val))
    assert len(batches) == -(-count // (4 * batch)) and {b.tokens_BT.shape for b in batches} == {
        (batch, 4)
    }
    inputs, targets, mask = (np.concatenate([b[i].ravel() for b in batches]) for i in (0, 1, 3))
    assert inputs[:count].tolist() == val[:count] and targets[:count].tolist() == val[1 : count + 1]
    assert set(inputs[count:].tolist()) | set(targets[count:].tolist()) <= {PAD}
    assert store.validation_rows == len(list(store.validation(1)))
    assert mask.tolist() == [float(token != EOS) for token in val[:count]] + [0.0] * (
        len(mask) - count
    )
    rows = [
        (row, segments)
        for one in batches
        for row, segments in zip(one.tokens_BT, one.segments_BT, strict=True)
    ]
    for number, (row, segments) in enumerate(rows):
        size = max(0, min(4, count - 4 * number))
        assert segments.tolist() == naive(row[:size].tolist())[0] + [-1] * (4 - size)


def test_too_little_text_names_both_numbers() -> None:
    assert make(13).windows_per_epoch == 2
    with pytest.raises(UserError, match=ERRORS["has_12_tokens_fewer_than"]):
        make(12)
    with pytest.raises(UserError, match=ERRORS["validation_text_has_1_tokens"]):
        make(50, val=[3])


def test_a_batch_takes_microseconds() -> None:
    store = make(list(range(1, 1000)) * 100, batch=12, length=64, eos_id=EOS)
    store.batch(0)
    times = []
    for step in range(200):
        start = time.perf_counter()
        store.batch(step)
        times.append(time.perf_counter() - start)
    assert np.median(times) < 0.3e-3


def piecewise(documents: list[list[int]]) -> list[tuple[int, int]]:
    """All (input, target) pairs inside documents, without pairs across documents."""
    return sorted((a, b) for document in documents for a, b in itertools.pairwise(document))


@given(
    st.lists(st.integers(0, 12), min_size=6, max_size=25),
    st.integers(2, 6),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 0]),
)
def test_packed_rows_contain_every_target_once_and_split_no_document_that_fits(
    sizes, length, seed, ended
) -> None:
    ids, documents = iter(range(10, 10_000)), []
    for size in sizes:
        documents.append([next(ids) for _ in range(size)] + [EOS])
    documents[-1] = documents[-1] if ended else [*documents[-1][:-1], next(ids)]
    flat = [token for document in documents for token in document]
    if len(flat) <= length:
        return
    if max(map(len, documents)) < 2:
        with pytest.raises(UserError, match=ERRORS["found_no_document_with_at"]):
            make(flat, 1, length, seed, eos_id=EOS, packing=True)
        return
    store = make(flat, 1, length, seed, eos_id=EOS, pad_id=PAD, packing=True)
    for epoch in (0, 1):
        seen, rows = [], []
        for step in range(epoch * store.windows_per_epoch, (epoch + 1) * store.windows_per_epoch):
            batch = store.batch(step)
            tokens, targets, segments, mask = (array[0].tolist() for array in batch)
            rows.append(tokens)
            counted = [i for i in range(length) if mask[i]]
            seen += [(tokens[i], targets[i]) for i in counted]
            whole = [d for d in documents if d[0] in tokens and len(d) <= length + 1]
            assert all(
                d[:-1] == tokens[tokens.index(d[0]) :][: len(d) - 1] for d in whole if len(d) > 1
            )
            by_document = {
                next(n for n, d in enumerate(documents) if tokens[i] in d): segments[i]
                for i in counted
            }
            assert len(set(by_document.values())) == len(by_document), (
                "no two documents see each other"
            )
        assert sorted(seen) == piecewise(documents)
    assert (
        -(-sum(len(d) for d in documents if len(d) > 1) // (length + 1)) <= store.windows_per_epoch
    )


@given(
    sizes=st.lists(st.integers(1, 9), min_size=5, max_size=15),
    length=st.integers(2, 8),
    packing=st.booleans(),
    ended=st.booleans(),
)
def test_the_first_token_after_bos_is_a_target_if_bos_is_eos(sizes, length, packing, ended) -> None:
    """Compares with the documents: each target of a document is in the loss, except for its BOS
    token.
    """
    ids = iter(range(10, 10_000))
    documents = [[EOS, *(next(ids) for _ in range(size)), EOS] for size in sizes]
    documents[-1] = documents[-1] if ended else documents[-1][:-1]
    flat = [token for document in documents for token in document]
    store = make(flat, 1, length, val=flat, eos_id=EOS, bos_id=EOS, pad_id=PAD, packing=packing)
    for batches, complete in (
        ([store.batch(step) for step in range(store.windows_per_epoch)], packing),
        (store.validation(2), True),
    ):
        seen = []
        for batch in batches:
            for tokens, targets, segments, mask in zip(
                *(array.tolist() for array in batch), strict=True
            ):
                counted = [i for i in range(length) if mask[i]]
                seen += [(tokens[i], targets[i]) for i in counted]
                letters = {
                    i: next(
                        n for n, d in enumerate(documents) if {tokens[i], targets[i]} & {*d} - {EOS}
                    )
                    for i in counted
                }
                assert (
                    len({(letters[i], segments[i]) for i in counted})
                    == len({*letters.values()})
                    == len({segments[i] for i in counted})
                )
        assert (
            sorted(seen) == piecewise(documents) if complete else {*seen} <= {*piecewise(documents)}
        )


def test_best_fit_fills_rows_longest_first() -> None:
    assert best_fit(np.array([3, 5, 2, 4, 1]), 6).tolist() == [2, 0, 1, 1, 0]


def test_a_mixture_has_exact_shares_and_separate_epochs() -> None:
    """Each token is its position. Tokens 0 to 199 belong to the first source, all others to the
    second.
    """
    store = make(1000, 10, 4, mixture=[(200, 3.0), (800, 1.0)])
    rows = np.concatenate([store.batch(step).tokens_BT[:, 0] for step in range(400)])
    assert store.windows_per_epoch == 49 + 199
    for start in range(0, 4000, 1000):
        assert np.count_nonzero(rows[start : start + 1000] < 200) == 750
    first, second = rows[rows < 200], rows[rows >= 200]
    for source, count, alone in ((first, 49, make(200, 1, 4)), (second, 199, None)):
        for epoch in range(2):
            taken = source[epoch * count : (epoch + 1) * count]
            assert len(set(taken.tolist())) == count and np.ptp(np.sort(taken)) == 4 * (count - 1)
        if alone:  # the order equals that of the source alone
            assert source[:80].tolist() == [
                int(alone.batch(step).tokens_BT[0, 0]) for step in range(80)
            ]
    assert np.abs(np.diff(np.flatnonzero(rows[:1000] >= 200))).max() < 40, "sources come mixed"
    again = make(1000, 10, 4, mixture=[(200, 3.0), (800, 1.0)])
    assert all(np.array_equal(a, b) for a, b in zip(store.batch(77), again.batch(77), strict=True))


def test_a_source_that_is_too_short_is_refused() -> None:
    with pytest.raises(UserError, match=ERRORS["a_source_of_the_mixture"]):
        make(100, 1, 4, mixture=[(96, 1.0), (4, 1.0)])


@pytest.mark.parametrize(
    "weights",
    [
        [5000, 1],
        [1.0, 0.0007],
        [3, 1],
        [1, 1, 1],
        [0.7, 0.2, 0.1],
        [20, *[2] * 10],
        [0.3, 0.123457, 7],
        [1 / 3, 1e7 / 7],
    ],
)
def test_counts_of_a_mixture_differ_from_the_weights_by_less_than_one_row(
    weights: list[float],
) -> None:
    """For every number of rows, so also for every row between two calls of `batch` and after a
    resume.
    """
    size, shares = 100_000, np.array(weights) / sum(weights)
    store = make(size * len(weights), 20_000, 4, mixture=[(size, weight) for weight in weights])
    sources = np.concatenate([store.batch(step).tokens_BT[:, 0] for step in (0, 1)]) // size
    for source, share in enumerate(shares):
        counts = np.cumsum(sources == source)
        assert (
            np.abs(counts - share * np.arange(1, len(counts) + 1)).max() < 1 + 1e-6
        )  # float64 of `share` times 40,000
    later = make(size * len(weights), 7, 4, mixture=[(size, weight) for weight in weights])
    rows = np.concatenate([later.batch(step).tokens_BT for step in (4100, 4101)])
    assert np.array_equal(rows, store.batch(1).tokens_BT[8700:8714])
