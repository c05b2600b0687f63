"""The masks of a batch change on the host, and an earlier copy on the device keeps its values."""

import numpy as np

from dantinox.generation.decode.allowed_tokens import AllowedTokens

ALL, ONE = 2**32 - 1, np.uint32([1 << 3, 0])


def masks(allowed):
    return np.asarray(allowed.params()["allowed_bits"]).tolist()


def test_rows_change_and_are_reset():
    allowed = AllowedTokens(3, 40)
    assert masks(allowed) == [[ALL, ALL]] * 3
    allowed.set(1, ONE)
    assert masks(allowed) == [[ALL, ALL], [8, 0], [ALL, ALL]]
    allowed.set(2, ONE)
    allowed.set(1, None)
    assert masks(allowed) == [[ALL, ALL], [ALL, ALL], [8, 0]]
    allowed.set(2, None)
    assert masks(allowed) == [[ALL, ALL]] * 3


def test_a_chunk_that_is_being_computed_keeps_its_masks():
    allowed = AllowedTokens(2, 64)
    before = allowed.params()["allowed_bits"]
    allowed.set(0, ONE)
    after = allowed.params()["allowed_bits"]
    allowed.set(0, None)
    assert np.asarray(before).tolist() == [[ALL, ALL]] * 2
    assert np.asarray(after).tolist() == [[8, 0], [ALL, ALL]]


def test_masks_are_copied_to_the_device_only_after_a_change():
    allowed = AllowedTokens(2, 64)
    first = allowed.params()["allowed_bits"]
    allowed.set(1, None)
    assert allowed.params()["allowed_bits"] is first
