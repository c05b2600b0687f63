"""The reference of compressed caches against cases computed by hand.

Heads have size 1, with key log(w) and query 1: the attention to a token is w over the sum of all
visible w, whatever the value.
"""

import numpy as np
import pytest

from .kv_reference import HeadReference


def read(head, weights, start=0, value=None):
    """Reads a chunk of tokens at `start`, … with these weights, with one query head."""
    positions = range(start, start + len(weights))
    values = np.array(positions if value is None else value, float)
    keys = np.log(np.array(weights, float))
    return head.prefill(np.ones((len(weights), 1, 1)), keys[:, None], values[:, None], positions)


def decode_token(head, weight, position):
    return head.decode(np.ones((1, 1)), np.log([weight]), np.array([float(position)]), position)


def importances(head):
    return [slot.importance for slot in head.slots]


def test_attention():
    """w = 1, 3 and 4 give 1, then (0·1 + 1·3)/4, then (0·1 + 1·3 + 2·4)/8; a second query head has
    the reverse preference.
    """
    head = HeadReference(8, "h2o")
    keys, values = np.log([[1.0], [3.0], [4.0]]), np.array([[0.0], [1.0], [2.0]])
    q_TGH = np.ones((3, 2, 1)) * [[1.0], [-1.0]]
    out_TGH, kept = head.prefill(q_TGH, keys, values, [0, 1, 2])
    inverse = [0, (1 / 3) / (4 / 3), (1 / 3 + 2 / 4) / (1 + 1 / 3 + 1 / 4)]
    np.testing.assert_allclose(out_TGH[:, :, 0].T, [[0, 3 / 4, 11 / 8], inverse])
    assert kept == [0, 1, 2]
    # The attention to the first token: 1, 1/4 and 3/4, 1/8 and 12/19, halved for the mean of the
    # group.
    assert importances(head)[0] == pytest.approx(1 + (1 / 4 + 3 / 4) / 2 + (1 / 8 + 12 / 19) / 2)


def test_scores_are_divided_by_the_root_of_the_head_size():
    head = HeadReference(8, "h2o")
    q_TGH, keys = (
        np.full((2, 1, 4), 1.0),
        np.log([[1.0] * 4, [3.0] * 4]),
    )  # the dot products are 4·log w, divided by 2: w²
    out_TGH, _ = head.prefill(q_TGH, keys, np.array([[0.0] * 4, [1.0] * 4]), [0, 1])
    np.testing.assert_allclose(out_TGH[1, 0], [9 / 10] * 4)


def test_streaming_keeps_sinks_and_the_latest():
    head = HeadReference(8, "streaming", sinks=2, recent=3)
    assert read(head, [1] * 12)[1] == [0, 1, 6, 7, 8, 9, 10, 11]
    assert decode_token(head, 1, 12)[1] == [0, 1, 7, 8, 9, 10, 11, 12]
    assert [slot.position for slot in head.slots] == [
        0,
        1,
        12,
        7,
        8,
        9,
        10,
        11,
    ], "it replaces the evicted token"


def test_tova_uses_the_last_query():
    head = HeadReference(4, "tova", sinks=1, recent=1)
    weights = [1, 2, 9, 5, 1, 4, 3]
    out_TGH, kept = read(head, weights)
    assert kept == [0, 2, 3, 6], "the first and the last are protected"
    np.testing.assert_allclose(importances(head), np.array([1, 9, 5, 3]) / 25)
    assert out_TGH[6, 0, 0] == pytest.approx(np.dot(weights, range(7)) / 25)
    # 7 replaces 3, the least important except 0, which is protected; 6 is no longer protected.
    head.slots[2].importance = 0.01
    out_TGH, kept = decode_token(head, 12, 7)
    assert kept == [0, 2, 6, 7]
    (
        np.testing.assert_allclose(importances(head), np.array([1, 9, 12, 3]) / 25),
        "all from this query",
    )
    assert out_TGH.shape == (1, 1, 1) and out_TGH[0, 0, 0] == pytest.approx(
        (2 * 9 + 6 * 3 + 7 * 12) / 25
    )


def test_h2o_sums_over_all_queries():
    head = HeadReference(3, "h2o", sinks=0, recent=1)
    _, kept = read(head, [1, 1, 2, 4])
    sums = [1 + 1 / 2 + 1 / 4 + 1 / 8, 1 / 2 + 1 / 4 + 1 / 8, 2 / 4 + 2 / 8, 4 / 8]
    assert kept == [0, 1, 3]
    np.testing.assert_allclose(importances(head), [sums[0], sums[1], sums[3]])
    decode_token(head, 2, 4)  # replaces 3, which has only .5 and is no longer protected
    assert [slot.position for slot in head.slots] == [0, 1, 4]
    np.testing.assert_allclose(importances(head), [sums[0] + 1 / 4, sums[1] + 1 / 4, 2 / 4])


def test_snapkv_uses_the_last_queries_and_pools():
    weights = [1, 1, 1, 6, 1, 1, 2, 1, 1, 1]
    last, before = np.array(weights) / 16, np.array([*weights[:9], 0]) / 15
    sums = last + before
    head = HeadReference(6, "snapkv+ema", sinks=0, recent=1, window=2, pool=1)
    assert read(head, weights)[1] == [0, 1, 2, 3, 6, 9], "ties keep the earlier token"
    np.testing.assert_allclose(importances(head), sums[[0, 1, 2, 3, 6, 9]])
    head = HeadReference(6, "snapkv+ema", sinks=0, recent=1, window=2, pool=3)
    assert read(head, weights)[1] == [2, 3, 4, 5, 6, 9]
    np.testing.assert_allclose(importances(head), sums[[2, 3, 4, 5, 6, 9]])


def test_snapkv_decays():
    head = HeadReference(8, "snapkv+ema", window=1, pool=1, decay=0.5)
    read(head, [1, 3])
    np.testing.assert_allclose(importances(head), [1 / 4, 3 / 4])
    decode_token(head, 4, 2)
    np.testing.assert_allclose(importances(head), [1 / 8 + 1 / 8, 3 / 8 + 3 / 8, 4 / 8])
    read(head, [4, 4], start=3)  # after two tokens a quarter remains
    np.testing.assert_allclose(
        importances(head), [1 / 16 + 1 / 16, 3 / 16 + 3 / 16, 1 / 8 + 4 / 16, 4 / 16, 4 / 16]
    )


def test_pooling_goes_by_order_of_cached_tokens():
    head = HeadReference(4, "snapkv+ema", sinks=1, recent=1, window=1, pool=3, decay=0.0)
    read(head, [1, 1, 1, 1, 7, 1, 1, 1])
    assert head.positions == [0, 3, 4, 7]
    # 0, 3, 4, 7, 8, 9 receive 1, 1, 7, 1, 1, 20: both 3 and 7 are next to 4, and 8 is next to 9.
    assert read(head, [1, 20], start=8)[1] == [0, 3, 8, 9]
    np.testing.assert_allclose(importances(head), np.array([1, 1, 1, 20]) / 31)


def test_newer_tokens_rank_higher():
    """g = 0.5: an importance consists of two queries, so 2 / age is added to 16, 8, 4, 2, 1 parts
    of 31.
    """
    for recency, kept in ((False, [0, 1, 4]), (True, [0, 3, 4])):
        head = HeadReference(
            3, "snapkv+ema", sinks=0, recent=1, window=1, pool=1, decay=0.5, recency=recency
        )
        assert read(head, [16, 8, 4, 2, 1])[1] == kept


def test_a_prompt_that_fits_is_kept_whole():
    for policy in ("snapkv+ema", "streaming", "tova", "h2o"):
        assert read(HeadReference(5, policy, recent=1), [5, 1, 4, 2, 3])[1] == [0, 1, 2, 3, 4]


def test_random_depends_on_position_and_head():
    def hashed(position, head):
        return (7 * position + 3 * head) % 10

    # The hashes of 0 … 9 in head 0 are 0741852963, in head 1 3074185296.
    for head, kept, later in (
        (0, [0, 1, 4, 7, 9], [0, 1, 4, 7, 10]),
        (1, [0, 2, 5, 8, 9], [0, 2, 5, 8, 10]),
    ):
        reference = HeadReference(5, "random", head, sinks=1, recent=1, importance=hashed)
        assert read(reference, [1] * 10)[1] == kept
        assert importances(reference) == [hashed(position, head) for position in kept]
        assert decode_token(reference, 1, 10)[1] == later


def test_at_most_half_of_the_slots_are_recent():
    head = HeadReference(6, "tova", sinks=1, recent=16)
    assert read(head, [1, 9, 8, 1, 1, 1, 1, 1])[1] == [0, 1, 2, 5, 6, 7]


def test_a_sliding_window():
    head = HeadReference(4, "tova", sinks=4, recent=2, span=4)
    out_TGH, kept = read(head, [1, 1, 1, 1, 1, 1])
    assert out_TGH[:, 0, 0].tolist() == pytest.approx([0, 0.5, 1, 1.5, 2.5, 3.5])
    assert kept == [3, 4, 5], "tokens before the window are evicted, also sinks"
    assert decode_token(head, 1, 6)[1] == [3, 4, 5, 6]
    out_TGH, kept = decode_token(head, 1, 7)
    assert kept == [4, 5, 6, 7] and [slot.position for slot in head.slots] == [7, 4, 5, 6]
    assert out_TGH[0, 0, 0] == pytest.approx(5.5)


def test_a_compressed_sliding_window():
    """Three slots under a window of five: tokens before the window go first, then the least
    important.
    """
    head = HeadReference(3, "h2o", sinks=0, recent=1, span=5)
    assert read(head, [9, 8, 1, 1])[1] == [0, 1, 3]
    assert decode_token(head, 1, 4)[1] == [0, 1, 4]
    assert decode_token(head, 1, 5)[1] == [1, 4, 5]
    assert head.slots[0].position == 5


def test_ties_go_to_the_first_slot():
    head = HeadReference(4, "random", sinks=0, recent=1, importance=lambda position, head: 1.0)
    read(head, [1] * 4)
    for position, order in ((4, [4, 1, 2, 3]), (5, [5, 1, 2, 3]), (6, [6, 1, 2, 3])):
        decode_token(head, 1, position)
        assert [slot.position for slot in head.slots] == order


def test_padding_and_finished_rows():
    head, other = HeadReference(4, "h2o", recent=1), HeadReference(4, "h2o", recent=1)
    q_TGH, keys, values = (
        np.ones((5, 1, 1)),
        np.log([[2.0], [9.0], [3.0], [9.0], [4.0]]),
        np.arange(5.0)[:, None],
    )
    out_TGH, kept = head.prefill(q_TGH, keys, values, [0, -1, 1, -1, 2])
    alone_TGH, _ = other.prefill(q_TGH[::2], keys[::2], values[::2], [0, 1, 2])
    np.testing.assert_array_equal(out_TGH[::2], alone_TGH)
    np.testing.assert_array_equal(out_TGH[1::2], 0)
    assert kept == [0, 1, 2] and importances(head) == importances(other)
    assert head.decode(q_TGH[0], keys[0], values[0], -1)[1] == kept
    assert head.prefill(q_TGH, keys, values, [-1] * 5)[1] == kept
    assert importances(head) == importances(other)


def test_closest_decision_is_reported():
    head = HeadReference(3, "tova", sinks=0, recent=1)
    read(head, [4, 5, 6, 1])
    assert head.positions == [1, 2, 3] and head.closest == pytest.approx(1 / 5)
