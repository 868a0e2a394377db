"""Positions (chapter 05): the paper's formula, evaluated again number by number; who is given which; what wrong input is told."""

import math

import pytest
import torch
from conftest import numbers

from book.transformer import PositionalEncoding, positional_encoding


def by_math(position: int, column: int, d_model: int) -> float:
    """One number of the encoding (§3.5), by Python's own sine and cosine, in float64."""
    angle = position / 10000.0 ** ((column - column % 2) / d_model)
    return math.cos(angle) if column % 2 else math.sin(angle)


def expected(positions, d_model: int) -> torch.Tensor:
    return torch.tensor([[by_math(position, column, d_model) for column in range(d_model)] for position in positions],
                        dtype=torch.float64)


@pytest.mark.parametrize("d_model", [1, 2, 3, 4, 7, 16])
def test_every_number_up_to_position_10000_is_the_formulas(d_model):
    table = positional_encoding(10_001, d_model)
    assert table.dtype == torch.float64 and table.shape == (10_001, d_model)
    assert (table - expected(range(10_001), d_model)).abs().max() < 1e-9
    assert (table.float() - expected(range(10_001), d_model)).abs().max() < 1e-6


@pytest.mark.parametrize("d_model", [511, 512])
def test_the_papers_width_is_right_far_out(d_model):
    positions = [0, 1, 2, 511, 4096, 9_999, 10_000]
    table = positional_encoding(10_001, d_model)
    assert (table[positions] - expected(positions, d_model)).abs().max() < 1e-9


def angles(length, d_model, dtype=torch.float64, sign=1, half=False):
    position, even = torch.arange(length).to(dtype)[:, None], torch.arange(0, d_model, 2).to(dtype)
    return position / 10000 ** (sign * even / d_model / (2 if half else 1))


def interleaved(angle):
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).double()


WRONG = {"angles in float32": interleaved(angles(10_001, 16, torch.float32)),
         "exponent inverted": interleaved(angles(10_001, 16, sign=-1)),
         "exponent halved": interleaved(angles(10_001, 16, half=True)),
         "positions from 1": interleaved(angles(10_002, 16))[1:],
         "sine and cosine exchanged": interleaved(angles(10_001, 16)).unflatten(1, (-1, 2)).flip(-1).flatten(1),
         "sines first, then cosines": torch.cat([angles(10_001, 16).sin(), angles(10_001, 16).cos()], dim=1)}


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_refuses_known_mistakes(name):
    assert (WRONG[name] - expected(range(10_001), 16)).abs().max() > 1e-6


def test_the_default_table_holds_1024_positions():
    assert PositionalEncoding(4).table.shape == (1024, 4)


def test_a_step_is_one_rotation_for_all_positions():
    table = positional_encoding(10_001, 8)
    turn = 25 / 10000 ** (torch.arange(0, 8, 2).double() / 8)
    sin, cos = table[:-25].unflatten(1, (4, 2)).unbind(-1)
    ahead = torch.stack([sin * turn.cos() + cos * turn.sin(), cos * turn.cos() - sin * turn.sin()], dim=-1).flatten(1)
    assert torch.allclose(ahead, table[25:], atol=1e-9)


@pytest.mark.parametrize("arguments, message", [
    ((0, 4), "length must be an int above 0, got 0"), ((4, 0), "d_model must be an int above 0, got 0"),
    ((-3, 4), "length must be an int above 0, got -3"), ((4, 2.5), "d_model must be an int above 0, got 2.5")])
def test_sizes_that_cannot_be_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        positional_encoding(*arguments)


@pytest.mark.parametrize("d_model", [6, 7, 1])
def test_the_module_adds_the_formula_to_every_row_of_a_batch_alike(d_model):
    """Added along the batch axis instead, batch 5 and length 5 have the same shapes and fail here."""
    x = numbers(5, 5, d_model)
    added = PositionalEncoding(d_model)(x) - x
    for row in added:
        assert (row.double() - expected(range(5), d_model)).abs().max() < 1e-6


@pytest.mark.parametrize("kind", PositionalEncoding.KINDS)
def test_starting_later_equals_a_slice_of_the_whole(kind):
    encode, x = PositionalEncoding(6, max_length=9, kind=kind), numbers(2, 9, 6)
    whole = encode(x)
    for start in range(9):
        assert torch.equal(encode(x[:, start:], start=start), whole[:, start:])
        assert torch.equal(encode(x[:, start:start + 1], start), whole[:, start:start + 1])


def test_the_whole_table_may_be_used_and_not_one_position_more():
    encode = PositionalEncoding(6, max_length=9)
    assert (encode(torch.zeros(1, 9, 6))[0].double() - expected(range(9), 6)).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
@pytest.mark.parametrize("length, start, got", [(10, 0, "got 0 to 9"), (4, 6, "got 6 to 9"), (1, 9, "got 9 to 9"),
                                                (2, -1, "got -1 to 0")])
def test_positions_that_the_table_lacks_are_named(kind, length, start, got):
    with pytest.raises(ValueError, match=f"max_length 9, {got}"):
        PositionalEncoding(6, max_length=9, kind=kind)(torch.zeros(2, length, 6), start)


@pytest.mark.parametrize("kind", PositionalEncoding.KINDS)
@pytest.mark.parametrize("shape", [(6, 6), (2, 3, 1), (2, 3, 5), (2, 0, 6), (1, 2, 3, 6)])
def test_another_shape_is_refused_not_broadcast(kind, shape):
    with pytest.raises(ValueError, match=r"x must be \(batch, length, d_model 6\) and not empty, got"):
        PositionalEncoding(6, kind=kind)(torch.zeros(shape))


@pytest.mark.parametrize("options, message", [
    ({"kind": "rotary"}, "kind must be one of .*'rotary'"), ({"max_length": 0}, "max_length must be an int above 0, got 0"),
    ({"d_model": 0}, "d_model must be an int above 0, got 0"), ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1")])
def test_options_that_cannot_be_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PositionalEncoding(**{"d_model": 6} | options)


def test_sines_are_not_stored_and_a_learned_table_is():
    assert PositionalEncoding(6).state_dict() == {} == PositionalEncoding(6, kind="none").state_dict()
    learned = PositionalEncoding(6, max_length=9, kind="learned")
    assert {name: t.shape for name, t in learned.state_dict().items()} == {"table": (9, 6)}
    other = PositionalEncoding(6, max_length=9, kind="learned")
    assert not torch.equal(other.table, learned.table)
    other.load_state_dict(learned.state_dict())
    assert torch.equal(other(numbers(2, 4, 6)), learned(numbers(2, 4, 6)))


def test_only_the_learned_table_is_trained_and_only_where_it_was_used():
    assert not [*PositionalEncoding(6).parameters(), *PositionalEncoding(6, kind="none").parameters()]
    learned = PositionalEncoding(6, max_length=9, kind="learned")
    learned(numbers(2, 4, 6), start=2).sum().backward()
    used = learned.table.grad.abs().sum(dim=1) > 0
    assert used.tolist() == [False] * 2 + [True] * 4 + [False] * 3


def test_the_learned_table_starts_with_variance_1_over_d_model():
    table = PositionalEncoding(64, kind="learned").table
    assert abs(table.square().mean().item() * 64 - 1) < 0.05


def test_the_table_follows_the_module_to_another_type():
    encode = PositionalEncoding(6).to(torch.float64)
    assert encode(numbers(1, 3, 6, dtype=torch.float64)).dtype == torch.float64
    assert encode.to(torch.bfloat16)(numbers(1, 3, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_table_is_of_the_default_type(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        encode = PositionalEncoding(6)
        assert encode(torch.zeros(1, 3, 6)).dtype == dtype == encode.table.dtype
        assert torch.equal(encode.table, positional_encoding(1024, 6).to(dtype))
    finally:
        torch.set_default_dtype(before)


def test_kind_none_adds_nothing_at_any_length():
    x = numbers(2, 9, 6)
    assert torch.equal(PositionalEncoding(6, max_length=4, kind="none")(x), x)


@pytest.mark.parametrize("kind", PositionalEncoding.KINDS)
def test_dropout_acts_on_the_sum_in_training_only(kind):
    torch.manual_seed(0)
    encode, x = PositionalEncoding(64, dropout=0.5, kind=kind), numbers(2, 50, 64) + 3
    encode.eval()
    whole = encode(x)
    assert torch.equal(whole, encode(x))
    encode.train()
    dropped = encode(x)
    gone = dropped == 0
    assert 0.4 < gone.double().mean() < 0.6
    assert torch.allclose(dropped[~gone], 2 * whole[~gone])
