"""attention (chapter 02): equation (1), masks, and what wrong input is told."""

import pytest
import torch
import torch.nn.functional as F
from conftest import numbers

from book.transformer import attention, fused_attention


def test_a_case_small_enough_for_paper():
    query, key = torch.tensor([[2.0, 0.0, 0.0, 0.0]]), torch.tensor([[3.0, 0, 0, 0], [0, 1.0, 0, 0]])
    output, weights = attention(query, key, torch.tensor([[10.0], [20.0]]))
    first = torch.tensor(3.0).exp() / (torch.tensor(3.0).exp() + 1)  # scores 6/√4 = 3 and 0
    assert torch.allclose(weights, torch.stack([first, 1 - first])[None])
    assert torch.allclose(output, 10 * first + 20 * (1 - first))


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_it_equals_pytorchs_function_and_its_gradients(shape, masked):
    inputs = [numbers(*shape, n, d, dtype=torch.float64) for n, d in ((4, 8), (6, 8), (6, 5))]
    mask = torch.arange(6) <= torch.arange(4)[:, None] if masked else None
    results = []
    for function in (lambda *x: attention(*x, mask)[0], lambda *x: F.scaled_dot_product_attention(*x, attn_mask=mask)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = function(*leaves)
        output.square().mean().backward()
        results.append([output, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_weights_are_shares_along_the_keys_and_masked_keys_get_exactly_nothing():
    mask = numbers(2, 1, 4, 6) > 0
    mask[..., 0] = True
    _, weights = attention(numbers(2, 3, 4, 8), numbers(2, 3, 6, 8), numbers(2, 3, 6, 5), mask)
    assert torch.allclose(weights.sum(dim=-1), torch.ones(2, 3, 4))
    assert (weights[~mask.expand_as(weights)] == 0).all() and (weights >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_query_that_may_look_at_nothing_gets_zero_with_finite_gradients(dtype):
    query, key, value = (10 * numbers(1, 2, 4, 8, dtype=dtype) for _ in range(3))
    query.requires_grad_()
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    output, weights = attention(query, key, value, mask)
    output.sum().backward()
    assert (output[:, :, 2] == 0).all() and (weights[:, :, 2] == 0).all()
    assert output.isfinite().all() and query.grad.isfinite().all() and (query.grad[:, :, 2] == 0).all()


def test_shuffling_the_tokens_shuffles_the_output():
    x, order = numbers(6, 8), torch.tensor([3, 1, 5, 0, 4, 2])
    assert torch.allclose(attention(x[order], x[order], x[order])[0], attention(x, x, x)[0][order], atol=1e-6)


@pytest.mark.parametrize("mask, message", [
    (torch.ones(4, 6), "mask must be a boolean tensor .* got torch.float32"),
    (torch.ones(4, 6, dtype=torch.uint8), "mask must be a boolean tensor .* got torch.uint8"),
    (torch.ones(6, dtype=torch.bool), r"two axes .* or four .* got shape \(6,\)"),
    (torch.ones(2, 4, 6, dtype=torch.bool), r"got shape \(2, 4, 6\)"),  # would broadcast over the heads where B = H
    (torch.ones(4, 5, dtype=torch.bool), r"broadcast to \(2, 2, 4, 6\), got shape \(4, 5\)"),
    (torch.ones(3, 2, 4, 6, dtype=torch.bool), r"got shape \(3, 2, 4, 6\)")])
def test_a_mask_of_another_form_is_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        attention(numbers(2, 2, 4, 8), numbers(2, 2, 6, 8), numbers(2, 2, 6, 8), mask)


def test_a_mask_may_not_enlarge_the_scores():
    with pytest.raises(ValueError, match="must broadcast to"):
        attention(numbers(4, 8), numbers(6, 8), numbers(6, 8), torch.ones(2, 2, 4, 6, dtype=torch.bool))


@pytest.mark.parametrize("attend", [attention, fused_attention])
@pytest.mark.parametrize("shapes, message", [
    (((8,), (6, 8), (6, 8)), "at least two axes"),
    (((4, 8), (6, 7), (6, 5)), r"same d_k in query and key, got shapes \[\(4, 8\), \(6, 7\), \(6, 5\)\]"),
    (((4, 8), (6, 8), (5, 5)), r"same number S of keys and values, got shapes \[\(4, 8\), \(6, 8\), \(5, 5\)\]"),
    (((2, 2, 4, 8), (2, 2, 6, 8), (2, 2, 7, 5)), r"same number S"),  # a kernel may read past the end of the keys
    (((2, 4, 8), (2, 6, 8), (3, 6, 5)), r"same axes before"), (((2, 4, 8), (3, 6, 8), (3, 6, 5)), r"same axes before these, got shapes \[\(2, 4, 8\), \(3, 6, 8\), \(3, 6, 5\)\]")])
def test_shapes_that_do_not_fit_are_named(attend, shapes, message):
    with pytest.raises(ValueError, match=message):
        attend(*(numbers(*shape) for shape in shapes))


def test_large_numbers_stay_finite_in_half_precision():
    query = torch.full((1, 1, 2, 64), 40.0, dtype=torch.float16)  # dot products of 102,400: too large for float16
    assert attention(query, query, query)[0].isfinite().all()
