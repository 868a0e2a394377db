"""MultiHeadAttention (chapter 03): equal to PyTorch's, one result on both paths, and what wrong input is told."""

import itertools

import pytest
import torch
from conftest import FEW, copy_of, layer, numbers
from hypothesis import given
from hypothesis import strategies as st

from book.transformer import MultiHeadAttention, attention, fused_attention


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("bias, cross, masked, need_weights", itertools.product([True, False], repeat=4))
def test_outputs_weights_and_gradients_equal_pytorchs(dtype, tolerance, bias, cross, masked, need_weights):
    ours = layer(12, 3, bias=bias, dtype=dtype)
    theirs = copy_of(ours)
    x = numbers(2, 5, 12, dtype=dtype).requires_grad_()
    memory = numbers(2, 7, 12, dtype=dtype).requires_grad_() if cross else x
    mask = (torch.arange(memory.shape[1]) <= torch.arange(5)[:, None]) if masked else None
    output, weights = ours(x, memory if cross else None, mask, need_weights=need_weights)
    expected, expected_weights = theirs(x, memory, memory, attn_mask=None if mask is None else ~mask,  # True there: drop
                                        need_weights=True, average_attn_weights=False)
    assert torch.allclose(output, expected, atol=tolerance)
    assert (weights is None) != need_weights
    if need_weights:
        assert torch.allclose(weights, expected_weights, atol=tolerance)
    ours_of = torch.autograd.grad(output.square().mean(), [x, *ours.parameters()])
    theirs_of = torch.autograd.grad(expected.square().mean(), [x, theirs.in_proj_weight, *(
        [theirs.in_proj_bias] if bias else []), *theirs.out_proj.parameters()])
    for mine, theirs_ in zip(ours_of, theirs_of, strict=True):
        assert torch.allclose(mine, theirs_, atol=tolerance * theirs_.abs().max().clamp(min=1).item())


def test_each_head_sees_its_own_slice_and_merging_keeps_them_apart():
    """A loop over heads; a merge without the transpose has the same shapes and fails here."""
    ours, x = layer(12, 3), numbers(2, 5, 12)
    heads = [attention(*(part[..., 4 * h:4 * h + 4] for part in ours.input(x).split(12, dim=-1)))[0] for h in range(3)]
    assert torch.allclose(ours(x)[0], ours.output(torch.cat(heads, dim=-1)), atol=1e-6)


MASKS = [None, "rows", "keys", "nothing", "causal", "per head"]


def make_mask(kind, T, S):
    generator = torch.Generator().manual_seed(T * S)
    return {None: None, "rows": torch.rand(T, S, generator=generator) > 0.5,
            "keys": torch.rand(2, 1, 1, S, generator=generator) > 0.5, "nothing": torch.zeros(T, S, dtype=torch.bool),
            "causal": torch.ones(T, S, dtype=torch.bool).tril(S - T),
            "per head": torch.rand(2, 3, T, S, generator=generator) > 0.5}[kind]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("T, S, is_causal", [(4, 4, False), (4, 4, True), (2, 5, True), (5, 2, True), (1, 6, True)])
@pytest.mark.parametrize("sizes", [{}, {"d_k": 3, "d_v": 5}])
def test_the_fused_and_the_explicit_path_agree_also_on_empty_rows(kind, T, S, is_causal, sizes):
    ours = layer(12, 3, **sizes)
    mask, results = make_mask(kind, T, S), []
    for need_weights in (False, True):
        x, memory = numbers(2, T, 12).requires_grad_(), numbers(2, S, 12).requires_grad_()
        output, weights = ours(x, memory, mask, is_causal=is_causal, need_weights=need_weights)
        gradients = torch.autograd.grad(output.sin().sum(), [x, memory])
        results.append([output, *gradients])
    for fused, explicit in zip(*results):
        assert fused.isfinite().all() and torch.allclose(fused, explicit, atol=1e-5)
    allowed = torch.ones(2, 3, T, S, dtype=torch.bool) if mask is None else mask.expand(2, 3, T, S)
    if is_causal:  # aligned at the end: the last query sees every key
        allowed = allowed & torch.ones(T, S, dtype=torch.bool).tril(S - T)
    assert weights.shape == (2, 3, T, S) and (weights[~allowed] == 0).all()
    blind = ~allowed.any(dim=-1).any(dim=1)
    assert torch.allclose(output[blind], ours.output.bias.expand_as(output[blind]), atol=1e-6)


SIZES = st.integers(1, 5)


@FEW
@given(data=st.data(), B=st.integers(1, 3), H=st.integers(1, 3), T=SIZES, S=SIZES, d_k=SIZES, d_v=SIZES, causal=st.booleans())
def test_for_any_shape_and_mask_both_paths_give_what_loops_over_pairs_give(data, B, H, T, S, d_k, d_v, causal):
    shape = data.draw(st.sampled_from([(T, S), (1, S), (B, 1, 1, S), (B, 1, T, S), (B, H, T, S), (1, H, T, 1)]))
    size = torch.Size(shape).numel()
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size))).view(shape)
    ours, x, memory = layer(6, H, d_k=d_k, d_v=d_v), numbers(B, T, 6), numbers(B, S, 6)
    query, (key, value) = ours.queries(x), ours.keys_values(memory)
    heads = torch.zeros(B, T, H, d_v)
    allowed = mask.expand(B, H, T, S).tolist()
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        seen = [s for s in range(S) if allowed[b][h][t][s] and (not causal or s <= t + S - T)]
        if seen:
            weights = (key[b, h, seen] @ query[b, h, t] / d_k**0.5).softmax(dim=0)
            heads[b, t, h] = weights @ value[b, h, seen]
    expected = ours.output(heads.flatten(2))
    for need_weights in (False, True):
        output, _ = ours(x, memory, mask, is_causal=causal, need_weights=need_weights)
        assert torch.allclose(output, expected, atol=1e-5)


@FEW
@given(shape=st.lists(st.integers(1, 4), max_size=5))
def test_of_all_shapes_a_mask_may_have_those_documented_are_accepted_and_no_others(shape):
    B, H, T, S = 2, 2, 3, 4
    fits = len(shape) in (2, 4) and all(m in (1, n) for m, n in zip(reversed(shape), (S, T, H, B)))
    for need_weights in (False, True):
        try:
            layer(6, H)(numbers(B, T, 6), numbers(B, S, 6), torch.ones(shape, dtype=torch.bool), need_weights=need_weights)
            assert fits
        except ValueError as error:
            assert not fits and "mask must" in str(error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("need_weights", [False, True])
def test_low_precision_stays_finite_with_empty_rows(dtype, need_weights):
    ours, x = layer(12, 3, dtype=dtype), numbers(2, 4, 12, dtype=dtype).requires_grad_()
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[1] = False
    output, _ = ours(x, mask=mask, need_weights=need_weights)
    output.sum().backward()
    assert output.isfinite().all() and x.grad.isfinite().all()


def test_the_future_does_not_change_the_past():
    ours, x = layer(12, 3), numbers(1, 6, 12)
    other = x.clone()
    other[:, 4] += 1
    before, after = ours(x, is_causal=True)[0], ours(other, is_causal=True)[0]
    assert torch.equal(before[:, :4], after[:, :4]) and not torch.allclose(before[:, 4:], after[:, 4:])


def test_the_steps_compose_to_the_whole():
    ours, x = layer(12, 3), numbers(2, 5, 12)
    assert torch.equal(ours(x)[0], ours.attend(ours.queries(x), *ours.keys_values(x))[0])
    assert ours.queries(x).shape == (2, 3, 5, 4)


def test_each_of_the_three_matrices_starts_by_xaviers_rule_for_its_own_size():
    ours = MultiHeadAttention(64, 4, d_k=8, d_v=32)
    for matrix, rows in zip(ours.input.weight.split(ours.sizes), (32, 32, 128)):
        bound = (6 / (64 + rows)) ** 0.5
        assert 0.98 * bound < matrix.abs().max() <= bound
    assert (ours.input.bias == 0).all() and (ours.output.bias == 0).all()


def test_looking_at_itself_is_looking_at_the_same_memory():
    ours, x = layer(12, 3, d_k=3, d_v=5), numbers(2, 5, 12)
    assert torch.allclose(ours(x)[0], ours(x, x)[0], atol=1e-6)


def test_the_number_of_heads_does_not_change_the_number_of_parameters():
    counts = {sum(p.numel() for p in MultiHeadAttention(24, heads).parameters()) for heads in (1, 2, 3, 8)}
    assert counts == {4 * (24 * 24 + 24)}


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_drops_weights_in_training_only_and_keeps_the_mean(need_weights):
    ours, x = layer(12, 3, dropout=0.5), numbers(1, 4, 12)
    with torch.no_grad():
        ours.eval()
        exact = ours(x, need_weights=need_weights)[0]
        assert torch.equal(exact, ours(x, need_weights=need_weights)[0])
        ours.train()
        runs = torch.stack([ours(x, need_weights=need_weights)[0] for _ in range(4000)])
    assert runs.std(dim=0).min() > 0.01
    assert (runs.mean(dim=0) - exact).abs().max() < 0.1


@pytest.mark.parametrize("masked", [False, True])
def test_the_explicit_path_drops_weights_not_heads_and_scales_up_the_rest(masked):
    ours, x, mask = layer(12, 3, dropout=0.5), numbers(2, 4, 12), torch.ones(4, 4, dtype=torch.bool).tril() if masked else None
    torch.manual_seed(3)
    output, weights = ours(x, mask=mask, need_weights=True)
    value = ours.keys_values(x)[1]
    torch.manual_seed(3)
    heads = torch.nn.functional.dropout(weights, 0.5) @ value
    assert torch.allclose(output, ours.output(heads.transpose(1, 2).flatten(2)), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"mask": torch.ones(4, 4, dtype=torch.bool).tril()}, {"is_causal": True}])
def test_the_fused_path_drops_weights_with_every_kind_of_mask(options):
    ours, x = layer(12, 3, dropout=0.5), numbers(1, 4, 12)
    with torch.no_grad():
        exact = ours.eval()(x, **options)[0]
        runs = torch.stack([ours.train()(x, **options)[0] for _ in range(2000)])
    spread = runs.std(dim=0)
    assert spread.min() > 0.01
    assert ((runs.mean(dim=0) - exact).abs() < 5 * spread / 2000**0.5).all()


@pytest.mark.parametrize("arguments, options, message", [
    ((10, 3), {}, "d_model 10 and n_heads 3"), ((10, 3), {"d_k": 2}, "divisible by n_heads"),
    ((0, 1), {}, "d_model must be an int above 0, got 0"), ((8, 0), {}, "n_heads must be an int above 0, got 0"),
    ((8, 2), {"d_v": -1}, "d_v must be an int above 0, got -1"), ((8, 2), {"dropout": 1.0}, r"dropout must .* got 1.0"),
    ((8, 2), {"d_k": 0}, "d_k must be an int above 0, got 0"), ((8, None), {}, "n_heads must be an int above 0, got None"),
    ((8, True), {}, "n_heads must be an int above 0, got True"), ((8, 2), {"dropout": None}, "dropout must .* got None"),
    ((8, 2), {"dropout": "0.1"}, "dropout must .* got '0.1'")])
def test_wrong_sizes_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(*arguments, **options)


@pytest.mark.parametrize("shapes, message", [
    (((5, 12),), r"x must be .*12\) .*got \(5, 12\)"), (((2, 5, 11),), r"x must be .*got \(2, 5, 11\)"),
    (((2, 5, 12), (2, 5, 13)), r"memory must be .*got \(2, 5, 13\)"), (((2, 5, 12), (3, 5, 12)), "memory must have")])
def test_inputs_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(ValueError, match=message):
        layer(12, 3)(*(numbers(*shape) for shape in shapes))


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_mask_of_three_axes_is_refused_on_both_paths(need_weights):
    with pytest.raises(ValueError, match="two axes"):
        layer(12, 2)(numbers(2, 5, 12), mask=torch.ones(2, 5, 5, dtype=torch.bool), need_weights=need_weights)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("keys, values", [(8, 9), (9, 8)])
def test_a_cache_with_more_keys_than_values_or_fewer_is_refused_on_both_paths(need_weights, keys, values):
    query, key, value = numbers(2, 3, 1, 4), numbers(2, 3, keys, 4), numbers(2, 3, values, 4)
    with pytest.raises(ValueError, match="same number S"):
        layer(12, 3).attend(query, key, value, need_weights=need_weights)


@pytest.mark.parametrize("keys, mask", [(5, torch.ones(5, 5, dtype=torch.bool)), (6, None)])
def test_the_kernels_own_causal_mask_is_refused_where_it_would_leak(keys, mask):
    with pytest.raises(ValueError, match=f"5 queries, {keys} keys"):
        fused_attention(numbers(1, 1, 5, 4), numbers(1, 1, keys, 4), numbers(1, 1, keys, 4), mask, is_causal=True)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("shapes", [((2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 6, 6)), ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4)),
                                    ((2, 3, 5, 6), (2, 3, 6, 6), (2, 3, 6, 4)), ((5, 4), (6, 4), (6, 6))])
def test_heads_of_another_layer_are_refused(need_weights, shapes):
    ours = layer(12, 3, d_k=4, d_v=6)
    ours.attend(numbers(2, 3, 5, 4), numbers(2, 3, 6, 4), numbers(2, 3, 6, 6), need_weights=need_weights)
    with pytest.raises(ValueError, match="n_heads, d_k and d_v must be 3, 4 and 6, got"):
        ours.attend(*(numbers(*shape) for shape in shapes), need_weights=need_weights)


def test_a_layer_without_head_sizes_given_uses_an_equal_share():
    ours = MultiHeadAttention(12, 2, d_k=7, d_v=3)
    assert ours.sizes == (14, 14, 6) and ours.input.out_features == 34 and ours.output.in_features == 6
