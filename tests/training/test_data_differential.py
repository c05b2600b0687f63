"""Documents in the batches of random corpora have the losses that they have alone.

`DIFFERENTIAL=2000 pytest -m "slow or not slow" tests/training/test_data_differential.py` compares
2,000 corpora.
"""

import os

import numpy as np
import pytest

from dantinox.text import TokenStore

from . import data_differential as differential

CORPORA = int(os.environ.get("DIFFERENTIAL", 112))
QUICK = [("next_token", "learned, experts"), ("sft", "learned, experts"), ("kto", "rotary")]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: " with ".join(case))
def test_documents_of_a_batch_have_the_losses_that_they_have_alone(case):
    first = differential.CASES.index(case)
    for number in range(6):
        differential.compare(first + number * len(differential.CASES))


@pytest.mark.slow
def test_documents_of_many_corpora_have_the_losses_that_they_have_alone():
    for seed in range(CORPORA):
        differential.compare(seed)


@pytest.mark.parametrize("field", ["segments", "mask"])
def test_a_wrong_batch_is_found(monkeypatch, field):
    """The comparison fails for a store whose rows are one document, and for one that counts all
    targets.
    """
    original = TokenStore._make_batch

    def wrong(self, *args):
        batch = original(self, *args)
        if field == "segments":
            return batch._replace(segments_BT=np.zeros_like(batch.segments_BT))
        return batch._replace(mask_BT=np.ones_like(batch.mask_BT))

    monkeypatch.setattr(TokenStore, "_make_batch", wrong)
    first = differential.CASES.index(QUICK[0])
    with pytest.raises(AssertionError):
        for number in range(6):
            differential.compare(first + number * len(differential.CASES))


def test_a_model_that_reads_other_documents_is_found():
    """The comparison of losses fails if the model sees no segments: the layout alone is right."""
    model = differential.model_of("learned, experts")
    tokens = np.random.default_rng(0).integers(0, differential.PAD, (4, 12)).astype(np.int32)
    targets = np.append(tokens[:, 1:], tokens[:, :1], axis=1)
    segments, mask = (
        np.repeat([[0] * 5 + [1] * 7], 4, axis=0).astype(np.int32),
        np.ones((4, 12), np.float32),
    )
    batch = differential.Batch(tokens, targets, segments, mask)
    differential.compare_documents(model, batch, 4)
    whole, program = batch._replace(segments_BT=np.zeros_like(segments)), differential.token_program
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(
            differential,
            "token_program",
            lambda model, given: program(model, whole if given is batch else given),
        )
        differential.compare_documents(model, batch, 4)
