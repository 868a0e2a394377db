"""Masks (chapter 04): their tables, what they hide and what they must not touch, and rows that may look at nothing."""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import copy_of, layer, numbers

from book.transformer import MultiHeadAttention, attention, causal_mask, padding_mask

TOKENS = torch.tensor([[5, 3, 8, 4, 7], [6, 9, 0, 0, 0], [2, 0, 0, 0, 0]])


def moves(model, x: torch.Tensor) -> torch.Tensor:
    """(T outputs, S changes): True where the output moves when that input is replaced."""
    with torch.no_grad():
        before, columns = model(x), []
        for s in range(x.shape[1]):
            other = x.clone()
            other[:, s] = numbers(*x[:, s].shape) + 3
            columns.append(~((model(other) - before).abs().amax(dim=-1).amax(dim=0) < 1e-5))  # nan counts as moved
    return torch.stack(columns, dim=1)


def test_padding_mask_has_four_axes_and_is_true_where_a_token_is_real():
    mask = padding_mask(TOKENS)
    assert mask.shape == (3, 1, 1, 5) and mask.dtype == torch.bool
    assert mask[:, 0, 0].tolist() == [[token != 0 for token in row] for row in TOKENS.tolist()]


def test_padding_mask_knows_another_id_of_padding():
    assert padding_mask(torch.tensor([[0, 7, 1]]), pad=7).flatten().tolist() == [True, False, True]


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5), ()])
def test_tokens_with_another_number_of_axes_are_refused(shape):
    with pytest.raises(ValueError, match=re.escape(f"tokens must be (B, S) of int64 or int32, got {shape} of torch.int64")):
        padding_mask(torch.ones(shape, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_or_vectors_in_place_of_tokens_are_refused(dtype):
    with pytest.raises(ValueError, match=f"tokens must be .* got .* of {dtype}"):
        padding_mask(torch.ones(2, 3, dtype=dtype))


@pytest.mark.parametrize("T, S", [(1, None), (4, None), (4, 4), (1, 6), (2, 5), (5, 6)])
def test_causal_mask_is_true_at_and_before_a_query_that_stands_at_the_end(T, S):
    mask, keys = causal_mask(T, S), S or T
    assert mask.shape == (T, keys) and mask.dtype == torch.bool
    assert mask.tolist() == [[s <= t + keys - T for s in range(keys)] for t in range(T)]


def test_fewer_queries_than_keys_get_the_last_rows_of_the_whole():
    whole = causal_mask(6)
    for T in range(1, 7):
        assert torch.equal(causal_mask(T, 6), whole[-T:])
    assert causal_mask(1, 6).all()


@pytest.mark.parametrize("T, S", [(0, None), (0, 3), (3, 2), (-1, 4)])
def test_lengths_that_cannot_be_are_named(T, S):
    with pytest.raises(ValueError, match=f"T must be from 1 to S, got T {T} and S {T if S is None else S}"):
        causal_mask(T, S)


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_masks_are_made_where_they_are_asked_for(device):
    assert causal_mask(3, device=device).device.type == "meta"
    assert padding_mask(torch.ones(2, 3, dtype=torch.long, device=device)).device.type == "meta"
    assert causal_mask(3).device.type == "cpu"


def test_both_together_allow_what_is_real_and_not_later():
    both = padding_mask(TOKENS) & causal_mask(5)
    assert both.shape == (3, 1, 5, 5)
    for b, t, s in itertools.product(range(3), range(5), range(5)):
        assert both[b, 0, t, s] == (s <= t and TOKENS[b, s].item() != 0)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("extra", [1, 4, 30])
def test_appended_padding_changes_no_output_and_no_gradient_of_a_real_token(extra, causal, need_weights):
    ours, vectors, results = layer(12, 3), numbers(10, 12), []
    alone = torch.tensor([[5, 3, 8, 4], [6, 9, 1, 2]])
    for tokens in (alone, F.pad(alone, (0, extra))):
        table = vectors.clone().requires_grad_()
        output, _ = ours(table[tokens], mask=padding_mask(tokens), is_causal=causal, need_weights=need_weights)
        gradient, = torch.autograd.grad(output[:, :4].sin().sum(), table)
        results.append((output[:, :4], gradient))
    for without, padded in zip(*results):
        assert torch.allclose(without, padded, atol=1e-5)


def test_a_sentence_in_a_batch_gets_what_it_gets_alone():
    ours, vectors = layer(12, 3), numbers(10, 12)
    together, _ = ours(vectors[TOKENS], mask=padding_mask(TOKENS))
    for row, output in zip(TOKENS, together):
        ids = row[row != 0]
        assert torch.allclose(output[:len(ids)], ours(vectors[ids].unsqueeze(0))[0][0], atol=1e-5)


def test_cross_attention_sees_no_padding_of_its_source():
    ours, x, vectors = layer(12, 3), numbers(3, 4, 12), numbers(10, 12)
    before, weights = ours(x, vectors[TOKENS], padding_mask(TOKENS), need_weights=True)
    vectors[0] += 5  # padding's vector
    assert torch.equal(before, ours(x, vectors[TOKENS], padding_mask(TOKENS), need_weights=True)[0])
    assert (weights[~padding_mask(TOKENS).expand_as(weights)] == 0).all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_an_output_moves_with_its_own_and_earlier_inputs_and_no_others(need_weights):
    ours, x = layer(12, 3), numbers(2, 6, 12)
    moved = moves(lambda x: ours(x, mask=causal_mask(6), need_weights=need_weights)[0], x)
    assert torch.equal(moved, causal_mask(6))


@pytest.mark.parametrize("wrong", [~causal_mask(6), torch.ones(6, 6).bool().tril(1), torch.ones(6, 6).bool(),
                                   torch.ones(6, 6).bool().tril(-1), torch.zeros(6, 6).bool()],
                         ids=["inverted", "one too far", "none", "one too few", "nothing"])
def test_the_check_of_who_moves_whom_catches_a_wrong_mask(wrong):
    ours = layer(12, 3)
    assert not torch.equal(moves(lambda x: ours(x, mask=wrong)[0], numbers(2, 6, 12)), causal_mask(6))


@pytest.mark.parametrize("need_weights", [False, True])
def test_one_pass_equals_passes_over_all_prefixes(need_weights):
    ours, x = layer(12, 3), numbers(2, 6, 12)
    whole, _ = ours(x, mask=causal_mask(6), need_weights=need_weights)
    for t in range(1, 7):
        assert torch.allclose(whole[:, t - 1], ours(x[:, :t])[0][:, -1], atol=1e-5)


def test_is_causal_is_the_causal_mask_alone_and_together_with_padding():
    ours, x, padding = layer(12, 3), numbers(3, 5, 12), padding_mask(TOKENS)
    assert torch.allclose(ours(x, is_causal=True)[0], ours(x, mask=causal_mask(5))[0], atol=1e-5)
    assert torch.allclose(ours(x, mask=padding, is_causal=True)[0], ours(x, mask=padding & causal_mask(5))[0], atol=1e-5)


@pytest.mark.parametrize("new", [1, 2, 5])
def test_new_tokens_that_ask_a_cache_get_the_last_rows(new):
    ours, x = layer(12, 3), numbers(2, 6, 12)
    query, (key, value) = ours.queries(x[:, -new:]), ours.keys_values(x)
    last, _ = ours.attend(query, key, value, causal_mask(new, 6))
    assert torch.allclose(last, ours(x, mask=causal_mask(6))[0][:, -new:], atol=1e-5)
    start, _ = ours.attend(query, key, value, torch.ones(new, 6, dtype=torch.bool).tril())
    assert not torch.allclose(start, last, atol=1e-2)


def test_true_means_may_look_as_in_pytorchs_function():
    query, key, value = numbers(3, 2, 5, 4), numbers(3, 2, 5, 4) + 1, numbers(3, 2, 5, 4) - 1
    mask = padding_mask(TOKENS) & causal_mask(5)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert torch.allclose(attention(query, key, value, mask)[0], expected, atol=1e-5)
    inverted = F.scaled_dot_product_attention(query, key, value, attn_mask=~mask)
    assert not torch.allclose(inverted.nan_to_num(), expected, atol=1e-2)


@pytest.mark.parametrize("need_weights", [False, True])
def test_true_means_the_opposite_in_pytorchs_layer(need_weights):
    ours, x = layer(12, 3), numbers(3, 5, 12)
    theirs = copy_of(ours)
    output, _ = ours(x, mask=padding_mask(TOKENS) & causal_mask(5), need_weights=need_weights)
    expected, _ = theirs(x, x, x, attn_mask=~causal_mask(5), key_padding_mask=TOKENS == 0)
    assert torch.allclose(output, expected, atol=1e-5)
    upside_down, _ = theirs(x, x, x, attn_mask=causal_mask(5))
    assert not torch.allclose(upside_down.nan_to_num(), expected, atol=1e-2)


def test_a_boolean_mask_equals_the_papers_minus_infinity():
    query, key, value = numbers(3, 2, 5, 4), numbers(3, 2, 5, 4) + 1, numbers(3, 2, 5, 4) - 1
    mask = padding_mask(TOKENS) & causal_mask(5)
    scores = query @ key.transpose(-2, -1) / 2
    papers = (scores + torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)).softmax(dim=-1)
    output, weights = attention(query, key, value, mask)
    assert torch.allclose(weights, papers, atol=1e-6) and torch.allclose(output, papers @ value, atol=1e-5)


EMPTY = {"a sentence of padding only": padding_mask(torch.tensor([[5, 3, 8, 4], [0, 0, 0, 0]])),
         "padding on the left, causal": padding_mask(torch.tensor([[5, 3, 8, 4], [0, 0, 6, 9]])) & causal_mask(4),
         "padding as a query, too": padding_mask(torch.tensor([[5, 3, 0, 0], [6, 0, 0, 0]])).mT
         & padding_mask(torch.tensor([[5, 3, 0, 0], [6, 0, 0, 0]])),
         "one row": torch.ones(4, 4).bool() & (torch.arange(4) != 1).unsqueeze(1),
         "everything": torch.zeros(4, 4, dtype=torch.bool)}


@pytest.mark.parametrize("mask", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_query_with_nothing_to_look_at_gets_the_output_bias_and_finite_gradients(mask, dtype, need_weights):
    ours, x = layer(12, 3, dtype=dtype), numbers(2, 4, 12, dtype=dtype).requires_grad_()
    output, weights = ours(x, mask=mask, need_weights=need_weights)
    empty = ~mask.expand(2, 1, 4, 4).any(dim=-1)[:, 0]  # (B, T)
    assert empty.any() and (output[empty] == ours.output.bias).all()
    if need_weights:
        assert (weights[~mask.expand_as(weights)] == 0).all()
    gradients = torch.autograd.grad(output.sum(), [x, *ours.parameters()])
    assert output.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_gives_zero_where_there_is_nothing_to_look_at(dtype):
    query, key, value = (numbers(2, 3, 4, 8, dtype=dtype).requires_grad_() for _ in range(3))
    mask = EMPTY["one row"]
    output, weights = attention(query, key, value, mask)
    assert (output[:, :, 1] == 0).all() and (weights[:, :, 1] == 0).all() and weights.isfinite().all()
    gradients = torch.autograd.grad(output.sum(), [query, key, value])
    assert all(gradient.isfinite().all() for gradient in gradients) and (gradients[0][:, :, 1] == 0).all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_empty_rows_do_not_spoil_what_comes_after_two_layers(need_weights):
    ours, x, mask = layer(12, 3), numbers(2, 4, 12).requires_grad_(), EMPTY["padding as a query, too"]
    first, _ = ours(x, mask=mask, need_weights=need_weights)
    second, _ = ours(first, mask=mask, need_weights=need_weights)
    second[:, 0].sum().backward()
    assert second.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("heads", [2, 3])
def test_a_mask_of_three_axes_is_refused_also_where_it_would_broadcast(heads):
    mask = (padding_mask(TOKENS[:2]) & causal_mask(5))[:, 0]  # (B, T, S), and B = H in one of the two
    with pytest.raises(ValueError, match=r"two axes .* or four .* got shape \(2, 5, 5\)"):
        layer(12, heads)(numbers(2, 5, 12), mask=mask)


def test_causal_mask_stands_on_the_device_that_is_asked_for():
    assert causal_mask(3, 5, device="meta").device.type == "meta"
