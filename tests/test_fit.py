"""fit (chapter 01): it learns, it says what it did, and it refuses what it cannot do."""

import itertools

import pytest
import torch
from torch import nn

from book.transformer import fit


def batches(shape=(16,), classes=3):
    generator = torch.Generator().manual_seed(0)
    while True:
        targets = torch.randint(classes, shape, generator=generator)
        yield nn.functional.one_hot(targets, classes).float(), targets


@pytest.mark.parametrize("shape", [(16,), (4, 5)])
def test_it_lowers_the_loss_and_returns_one_loss_for_each_update(shape):
    torch.manual_seed(0)
    losses = fit(nn.Linear(3, 3), batches(shape), 60, lr=0.1)
    assert len(losses) == 60 and all(isinstance(loss, float) for loss in losses)
    assert losses[-1] < 0.3 * losses[0]


def test_the_first_loss_is_that_of_the_untrained_model():
    model = nn.Linear(3, 3)
    inputs, targets = next(batches())
    expected = nn.functional.cross_entropy(model(inputs), targets).item()
    assert fit(model, batches(), 1, lr=0.1) == [pytest.approx(expected)]


def test_it_takes_no_batch_more_than_it_needs():
    stream = batches()
    counted = itertools.count()
    fit(nn.Linear(3, 3), ((next(counted), next(stream))[1] for _ in itertools.repeat(None)), 5, lr=0.1)
    assert next(counted) == 5


def test_no_updates_and_too_few_batches_are_errors():
    with pytest.raises(ValueError, match="updates must be at least 1, got 0"):
        fit(nn.Linear(3, 3), batches(), 0, lr=0.1)
    with pytest.raises(ValueError, match="at least 5.* got 2"):
        fit(nn.Linear(3, 3), itertools.islice(batches(), 2), 5, lr=0.1)
