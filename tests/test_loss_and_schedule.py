"""smoothed_cross_entropy and warmup_schedule (chapter 10): PyTorch's loss, real tokens only, the paper's rate, wrong input."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from book.transformer import smoothed_cross_entropy, warmup_schedule

V = 11
SMOOTHINGS = (0.0, 0.1, 0.4)


def batch(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (*shape, V) that want a gradient, and real tokens of this shape: no padding."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*shape, V, generator=generator, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), torch.randint(1, V, shape, generator=generator)


def padded(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Four sentences of 7, 5, 2 and 1 real tokens, padding (0) on the right."""
    logits, target = batch(4, 7, seed=seed)
    return logits, target.masked_fill(torch.arange(7) >= torch.tensor([[7], [5], [2], [1]]), 0)


def by_hand(logits: torch.Tensor, right: int, smoothing: float) -> torch.Tensor:
    """The definition, for one position: V classes share the smoothing, the right one among them."""
    target = torch.full((V,), smoothing / V, dtype=torch.float64)
    target[right] += 1 - smoothing
    return -(target * (logits - logits.exp().sum().log())).sum()


# The loss

@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(5,), (4, 7), (2, 3, 4)])
def test_value_and_gradient_are_torchs(shape, reduction, smoothing):
    logits, target = batch(*shape)
    target.view(-1)[::3] = 0
    ours = smoothed_cross_entropy(logits, target, smoothing, reduction=reduction)
    theirs = F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=0, label_smoothing=smoothing,
                             reduction=reduction)
    torch.testing.assert_close(ours, theirs.view(ours.shape))
    torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (ours, theirs)))


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_every_position_is_the_definition_with_v_classes(smoothing):
    logits, target = padded()
    losses = smoothed_cross_entropy(logits, target, smoothing, reduction="none")
    for place in torch.cartesian_prod(torch.arange(4), torch.arange(7)).tolist():
        right = target[*place].item()
        expected = by_hand(logits[*place], right, smoothing) if right else torch.zeros(()).double()
        torch.testing.assert_close(losses[*place], expected)


@pytest.mark.parametrize("classes", [V - 1, V - 2])
def test_the_definition_with_fewer_classes_is_another_number(classes):
    logits, target = batch(6)
    share = torch.full((6, V), 0.1 / classes, dtype=torch.float64)
    if classes == V - 2:
        share[:, 0] = 0
    share.scatter_(1, target[:, None], 0.9)
    torch.testing.assert_close(share.sum(dim=1), torch.ones(6).double())
    other = -(share * logits.log_softmax(dim=-1)).sum(dim=-1).mean()
    assert (smoothed_cross_entropy(logits, target) - other).abs() > 1e-3


def test_the_defaults_are_the_papers_smoothing_and_the_mean_without_id_0():
    logits, target = padded()
    torch.testing.assert_close(smoothed_cross_entropy(logits, target),
                               smoothed_cross_entropy(logits, target, 0.1, 0, "mean"))
    assert smoothed_cross_entropy(logits, target) != smoothed_cross_entropy(logits, target, 0.0)


def test_the_gradient_is_shares_minus_target():
    logits, target = batch(6)
    gradient, = torch.autograd.grad(smoothed_cross_entropy(logits, target, 0.2, reduction="sum"), logits)
    expected = logits.softmax(dim=-1) - 0.8 * F.one_hot(target, V) - 0.2 / V
    torch.testing.assert_close(gradient, expected)


# Real tokens

def test_padding_changes_neither_the_mean_nor_the_sum():
    logits, target = padded()
    wide = F.pad(logits, (0, 0, 0, 5), value=3.0), F.pad(target, (0, 5))
    for reduction in ("mean", "sum"):
        torch.testing.assert_close(smoothed_cross_entropy(*wide, reduction=reduction),
                                   smoothed_cross_entropy(logits, target, reduction=reduction))
    naive = [F.cross_entropy(z.flatten(0, -2), t.flatten(), label_smoothing=0.1) for z, t in (wide, (logits, target))]
    assert (naive[0] - naive[1]).abs() > 0.1  # the fault that this finds


def test_padding_gets_no_gradient_and_loss_0_and_real_tokens_do():
    logits, target = padded()
    losses = smoothed_cross_entropy(logits, target, reduction="none")
    gradient, = torch.autograd.grad(smoothed_cross_entropy(logits, target), logits)
    assert (losses[target == 0] == 0).all() and (gradient[target == 0] == 0).all()
    assert (losses[target != 0] > 0).all() and (gradient[target != 0] != 0).any(dim=-1).all()


def test_the_mean_is_over_tokens_and_not_over_sentences():
    logits, target = padded()
    losses = smoothed_cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(smoothed_cross_entropy(logits, target), losses.sum() / 15)
    sentences = (losses.sum(dim=1) / (target != 0).sum(dim=1)).mean()
    assert (sentences - smoothed_cross_entropy(logits, target)).abs() > 0.01


def test_sums_of_parts_over_all_tokens_give_the_gradient_of_the_whole_and_means_of_means_do_not():
    logits, target = padded()
    parts = [(logits[:1], target[:1]), (logits[1:], target[1:])]
    whole, = torch.autograd.grad(smoothed_cross_entropy(logits, target), logits)
    sums, = torch.autograd.grad(sum(smoothed_cross_entropy(*part, reduction="sum") for part in parts) / 15, logits)
    means, = torch.autograd.grad(sum(smoothed_cross_entropy(*part) for part in parts) / 2, logits)
    torch.testing.assert_close(sums, whole)
    assert (means - whole).norm() > 0.05 * whole.norm()


def test_another_id_can_be_padding():
    logits, target = padded()
    moved = torch.where(target == 0, 7, torch.where(target == 7, 0, target))
    swapped = logits[..., [7, *range(1, 7), 0, *range(8, V)]]
    torch.testing.assert_close(smoothed_cross_entropy(swapped, moved, pad=7), smoothed_cross_entropy(logits, target))


def test_a_batch_without_a_real_token_is_0_with_gradient_0():
    logits, _ = batch(2, 3)
    for reduction in ("mean", "sum"):
        loss = smoothed_cross_entropy(logits, torch.zeros(2, 3, dtype=torch.long), reduction=reduction)
        assert loss == 0 and (torch.autograd.grad(loss, logits)[0] == 0).all()


# Extremes

@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_extreme_logits_stay_finite(smoothing):
    logits = torch.zeros(2, V).index_fill_(1, torch.tensor([3]), 1e4).requires_grad_()
    loss = smoothed_cross_entropy(logits, torch.tensor([3, 4]), smoothing)
    assert loss.isfinite() and torch.autograd.grad(loss, logits)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_summed_in_float32(dtype):
    logits, target = batch(64, 64, dtype=dtype)
    loss = smoothed_cross_entropy(logits, target, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, smoothed_cross_entropy(logits.float(), target, reduction="sum"))
    assert torch.autograd.grad(loss, logits)[0].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_is_kept(dtype):
    assert smoothed_cross_entropy(*batch(3, dtype=dtype)).dtype == dtype


def test_tensors_that_are_not_contiguous_are_fine():
    logits, target = padded()
    for reduction in ("mean", "none"):
        turned = smoothed_cross_entropy(logits.transpose(0, 1), target.T, reduction=reduction)
        straight = smoothed_cross_entropy(logits, target, reduction=reduction)
        torch.testing.assert_close(turned, straight.T if reduction == "none" else straight)


def test_inputs_are_left_as_they_were():
    logits, target = padded()
    before = logits.detach().clone(), target.clone()
    smoothed_cross_entropy(logits, target).backward()
    assert torch.equal(logits, before[0]) and torch.equal(target, before[1])


# What the chapter claims of smoothing

@settings(deadline=None)
@given(size=st.integers(2, 50_000), smoothing=st.floats(0.01, 0.9))
def test_the_loss_is_lowest_at_the_lead_that_the_chapter_gives(size, smoothing):
    best = math.log(1 + size * (1 - smoothing) / smoothing)
    logits = torch.zeros(3, size, dtype=torch.float64)
    logits[:, 1] = best + torch.tensor([-0.1, 0.0, 0.1])
    losses = smoothed_cross_entropy(logits, torch.ones(3, dtype=torch.long), smoothing, reduction="none")
    assert losses[1] < losses[0] and losses[1] < losses[2]
    right, other = 1 - smoothing + smoothing / size, smoothing / size
    entropy = -right * math.log(right) - (size - 1) * other * math.log(other)
    assert losses[1].item() == pytest.approx(entropy)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_equal_logits_cost_log_v_whatever_the_smoothing(smoothing):
    loss = smoothed_cross_entropy(torch.zeros(2, 3, V), torch.ones(2, 3, dtype=torch.long), smoothing)
    assert loss.item() == pytest.approx(math.log(V))


def test_ids_of_32_bits_give_the_same():
    logits, target = torch.randn(2, 3, V), torch.tensor([[1, 2, 0], [3, 1, 2]])
    assert smoothed_cross_entropy(logits, target.int()) == smoothed_cross_entropy(logits, target)


# Wrong input

@pytest.mark.parametrize("changed, message", [
    ({"target": torch.ones(2, 4, dtype=torch.long)}, "target must be (2, 3) to fit the logits, got (2, 4)"),
    ({"target": torch.ones(6, dtype=torch.long)}, "target must be (2, 3) to fit the logits, got (6,)"),
    ({"target": torch.ones(2, 3, 1, dtype=torch.long)}, "target must be (2, 3) to fit the logits, got (2, 3, 1)"),
    *(({"target": torch.ones(2, 3, dtype=dtype)}, f"target must be int64 or int32, got {dtype}")
      for dtype in (torch.float32, torch.bool)),
    *(({"smoothing": value}, f"smoothing must be in [0, 1), got {value}") for value in (-0.1, 1.0, 1.5, math.nan)),
    *(({"reduction": value}, f"reduction must be mean, sum or none, got {value!r}") for value in ("avg", None))])
def test_what_does_not_fit_is_named(changed, message):
    arguments = {"logits": torch.zeros(2, 3, V), "target": torch.ones(2, 3, dtype=torch.long)} | changed
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        smoothed_cross_entropy(**arguments)


# The schedule

def test_the_papers_base_model_peaks_at_7e_4_at_update_4000():
    rates = [warmup_schedule(update, 512) for update in range(1, 10_001)]
    assert max(rates) == rates[3999] == pytest.approx(6.99e-4, rel=1e-3)


def test_update_n_uses_the_formula_at_n():
    assert warmup_schedule(1, 512, 4000) == pytest.approx(512**-0.5 * 4000**-1.5)  # neither 0 nor that of update 2
    assert warmup_schedule(1, 4, 1) == 0.5


@given(d_model=st.integers(1, 4096), warmup=st.integers(1, 20_000), update=st.integers(1, 200_000))
def test_it_is_equation_3(d_model, warmup, update):
    expected = 1 / math.sqrt(d_model) * min(1 / math.sqrt(update), update / warmup**1.5)
    assert warmup_schedule(update, d_model, warmup) == pytest.approx(expected)


@given(d_model=st.integers(1, 4096), warmup=st.integers(1, 20_000), update=st.integers(1, 200_000))
def test_it_grows_in_a_straight_line_then_falls_as_the_root_and_peaks_at_the_warmup(d_model, warmup, update):
    rate, peak = warmup_schedule(update, d_model, warmup), (d_model * warmup) ** -0.5
    shape = update / warmup if update <= warmup else math.sqrt(warmup / update)
    assert rate == pytest.approx(peak * shape) and 0 < rate <= peak * (1 + 1e-9)


def test_a_shorter_warmup_has_a_higher_peak_and_the_same_end():
    assert warmup_schedule(1000, 512, 1000) == pytest.approx(2 * warmup_schedule(4000, 512, 4000))
    assert warmup_schedule(9000, 512, 1000) == warmup_schedule(9000, 512, 4000)


@pytest.mark.parametrize("name", ["update", "d_model", "warmup"])
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_numbers_below_1_are_errors_that_name_them(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an int above 0, got {re.escape(repr(value))}"):
        warmup_schedule(**{"update": 1, "d_model": 512, "warmup": 4000} | {name: value})
