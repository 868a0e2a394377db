"""FeedForward and Residual (chapter 07): equal to their formulas, each position for itself, dropout where it belongs."""

import re

import pytest
import torch
import torch.nn.functional as F
from conftest import numbers
from torch import nn

from book.transformer import FeedForward, Residual


def feed_forward(d_model=6, d_ff=10, **options) -> FeedForward:
    torch.manual_seed(0)
    made = FeedForward(d_model, d_ff, **options)
    for linear in (made[0], made[3]):
        nn.init.normal_(linear.bias)
    return made


def residual(d_model=6, **options) -> Residual:
    """With a gain and a bias that are not 1 and 0: left out, they would be missed."""
    torch.manual_seed(1)
    made = Residual(d_model, **options)
    nn.init.normal_(made.norm.weight)
    nn.init.normal_(made.norm.bias)
    return made


def norm_by_hand(x, gain, bias, eps=1e-5):
    deviation = x - x.mean(dim=-1, keepdim=True)
    variance = deviation.square().sum(dim=-1, keepdim=True) / x.shape[-1]  # n, not n - 1
    return gain * deviation / torch.sqrt(variance + eps) + bias


def test_feed_forward_equals_the_papers_formula():
    layer, x = feed_forward(), numbers(2, 5, 6)
    W_1, b_1, W_2, b_2 = layer[0].weight.T, layer[0].bias, layer[3].weight.T, layer[3].bias
    assert torch.allclose(layer(x), torch.clamp(x @ W_1 + b_1, min=0) @ W_2 + b_2, atol=1e-5)
    assert W_1.shape == (6, 10) and W_2.shape == (10, 6)


def test_feed_forward_treats_each_position_alone():
    layer, x = feed_forward(), numbers(2, 5, 6)
    alone = torch.stack([torch.stack([layer(x[b, t]) for t in range(5)]) for b in range(2)])
    assert torch.allclose(layer(x), alone, atol=1e-6)
    other = x.clone()
    other[:, 3] += 1
    moved = (layer(other) - layer(x)).abs().amax(dim=(0, 2)) > 1e-5
    assert moved.tolist() == [False, False, False, True, False]
    order = torch.tensor([3, 1, 4, 0, 2])
    assert torch.allclose(layer(x[:, order]), layer(x)[:, order], atol=1e-6)


def test_feed_forward_is_not_linear():
    layer, x, y = feed_forward(), numbers(1, 4, 6), numbers(1, 4, 6) ** 2
    assert not torch.allclose(layer((x + y) / 2), (layer(x) + layer(y)) / 2, atol=1e-2)


def test_feed_forward_of_the_base_model_has_the_papers_parameters():
    assert sum(p.numel() for p in FeedForward(512, 2048).parameters()) == 2 * 512 * 2048 + 2048 + 512


def test_both_matrices_of_feed_forward_start_by_xaviers_rule():
    layer = FeedForward(64, 128)
    bound = (6 / (64 + 128)) ** 0.5
    for linear in (layer[0], layer[3]):
        assert 0.98 * bound < linear.weight.abs().max() <= bound and (linear.bias == 0).all()


def test_feed_forward_drops_hidden_numbers_in_training_only():
    layer, x = feed_forward(dropout=0.5), numbers(2, 5, 6)
    torch.manual_seed(0)
    assert not torch.allclose(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    bias = layer[3].bias.expand(2, 5, 6)
    layer.train()[2].p = 1.0
    assert torch.allclose(layer(x), bias)  # all hidden numbers dropped, the output's bias not


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_residual_is_the_papers_post_norm_by_default(dtype, tolerance):
    layer, sublayer, x = residual().to(dtype), feed_forward().to(dtype), 3 * numbers(2, 5, 6, dtype=dtype) + 1
    expected = norm_by_hand(x + sublayer(x), layer.norm.weight, layer.norm.bias)
    assert torch.allclose(layer(x, sublayer), expected, atol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_residual_with_norm_first_is_pre_norm(dtype, tolerance):
    layer, sublayer = residual(norm_first=True).to(dtype), feed_forward().to(dtype)
    x = 3 * numbers(2, 5, 6, dtype=dtype) + 1
    expected = x + sublayer(norm_by_hand(x, layer.norm.weight, layer.norm.bias))
    assert torch.allclose(layer(x, sublayer), expected, atol=tolerance)


def test_the_two_orders_differ():
    sublayer, x = feed_forward(), 3 * numbers(2, 5, 6)
    assert not torch.allclose(residual()(x, sublayer), residual(norm_first=True)(x, sublayer), atol=0.1)


@pytest.mark.parametrize("d_model", [1, 2, 4, 512])
@pytest.mark.parametrize("size", [1.0, 3e-3, 1e-5, 1e-8, 0.0])
def test_the_norm_equals_the_formula_also_for_tiny_variances_and_constant_rows(d_model, size):
    """eps outside the root, or n - 1 in the variance, fails here; std() gives NaN at d_model 1."""
    layer = residual(d_model).double()
    x = (0.5 + size * numbers(20, 3, d_model, dtype=torch.float64)).requires_grad_()
    output = layer(x, torch.zeros_like)
    expected = norm_by_hand(x, layer.norm.weight, layer.norm.bias)
    assert torch.allclose(output, expected, atol=1e-9)
    single = residual(d_model)(x.float(), torch.zeros_like)
    assert torch.allclose(single, expected.float(), atol=1e-2)
    gradient, = torch.autograd.grad(output.sin().sum(), x)
    assert output.isfinite().all() and gradient.isfinite().all()


def test_a_mistaken_norm_would_be_caught():
    x = 3e-3 * numbers(20, 3, 4)
    right = norm_by_hand(x, 1, 0)
    assert torch.allclose(F.layer_norm(x, (4,)), right, atol=1e-5)
    for mistaken in ((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
                     (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=0) + 1e-5)):
        assert not torch.allclose(mistaken, right, atol=1e-2)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_way_around_is_never_dropped(norm_first):
    layer, x = residual(dropout=0.9, norm_first=norm_first).train(), numbers(2, 5, 6)
    expected = x if norm_first else layer.norm(x)
    assert torch.equal(layer(x, torch.zeros_like), expected)
    layer.dropout.p = 1.0
    assert torch.equal(layer(x, torch.ones_like), expected)


def test_dropout_acts_on_what_the_sublayer_gives_and_keeps_its_mean():
    layer, x = residual(dropout=0.25, norm_first=True), torch.zeros(100, 40, 6)
    added = layer(x, torch.ones_like)
    kept = added != 0
    assert torch.allclose(added[kept], torch.tensor(4 / 3)) and abs(kept.float().mean() - 0.75) < 0.02
    assert abs(added.mean() - 1) < 0.02


@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout_in_post_norm_comes_before_the_sum_and_the_norm(norm_first):
    layer, x, sublayer = residual(dropout=0.5, norm_first=norm_first), numbers(2, 5, 6), feed_forward()
    torch.manual_seed(2)
    output = layer(x, sublayer)
    torch.manual_seed(2)
    if norm_first:
        expected = x + F.dropout(sublayer(layer.norm(x)), 0.5)
    else:
        expected = layer.norm(x + F.dropout(sublayer(x), 0.5))
    assert torch.allclose(output, expected, atol=1e-6)


@pytest.mark.parametrize("norm_first", [False, True])
def test_nothing_is_dropped_in_evaluation_or_at_dropout_0(norm_first):
    x, sublayer = numbers(2, 5, 6), feed_forward()
    exact = residual(norm_first=norm_first)(x, sublayer)
    assert torch.equal(residual(dropout=0.5, norm_first=norm_first).eval()(x, sublayer), exact)
    assert not torch.allclose(residual(dropout=0.5, norm_first=norm_first).train()(x, sublayer), exact)


def test_gradients_reach_x_around_a_sublayer_that_passes_none():
    x = numbers(2, 5, 6).requires_grad_()
    for norm_first in (False, True):
        output = residual(norm_first=norm_first)(x, lambda y: feed_forward()(y).detach())
        gradient, = torch.autograd.grad((output * numbers(2, 5, 6)).sum(), x)
        assert gradient.abs().min() > 0


@pytest.mark.parametrize("sizes, message", [
    ((0, 4), "d_model must be an int above 0, got 0"), ((4, -1), "d_ff must be an int above 0, got -1"),
    ((4, 2.5), "d_ff must be an int above 0, got 2.5")])
def test_feed_forward_names_wrong_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        FeedForward(*sizes)


@pytest.mark.parametrize("d_model", [0, -3, 2.5])
def test_residual_names_wrong_sizes(d_model):
    with pytest.raises(ValueError, match=f"d_model must be an int above 0, got {d_model}"):
        Residual(d_model)


@pytest.mark.parametrize("dropout", [1.0, 1.5, -0.1, float("nan")])
def test_impossible_dropout_is_refused(dropout):
    for make in (lambda: FeedForward(4, 8, dropout), lambda: Residual(4, dropout=dropout)):
        with pytest.raises(ValueError, match=f"dropout must be in .*got {dropout}"):
            make()


@pytest.mark.parametrize("shape", [(2, 5, 7), (5, 6), (2, 0, 6)])
def test_residual_names_x_of_another_shape_before_the_sublayer_sees_it(shape):
    for norm_first in (False, True):
        with pytest.raises(ValueError, match=rf"x must be \(batch, length, d_model 6\) .*got \({shape[0]}, "):
            residual(norm_first=norm_first)(torch.zeros(shape), pytest.fail)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 1), (1, 5, 6), (6,)])
def test_a_sublayers_output_is_not_broadcast(norm_first, shape):
    with pytest.raises(ValueError, match=re.escape(f"sublayer must give (2, 5, 6), got {shape}")):
        residual(norm_first=norm_first)(numbers(2, 5, 6), lambda x: torch.ones(shape))


def test_feed_forward_names_x_of_another_width():
    with pytest.raises(ValueError, match=r"x must be \(\.\.\., d_model 6\), got \(2, 7\)"):
        feed_forward()(torch.zeros(2, 7))
