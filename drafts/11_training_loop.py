# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11. The training loop
#
# *How is it trained on a GPU?* Chapter 01's loop of ten lines learns, and it spends a third of its cells on padding, dies of one bad number, forgets everything when it is
# stopped, and knows one device. We mend one thing at a time, and measure first that it is broken. At the end you will have built `train`, a loop that
# runs on any device, can be stopped and resumed to the bit, and shares its work among several GPUs; and you will know why a copy task proves little.
#
# <div class="admonition note">
# <p class="admonition-title">What it takes</p>
# <p>Reading: 35 minutes. Running: about two minutes on a CPU; a GPU helps only with larger models. Before: chapter 09 (the Transformer) and chapter 10 (loss,
# Adam, schedule).</p>
# </div>
#
# [Read on the site](https://OWNER.github.io/attention-cell-by-cell/book/11_training_loop.html) · [Run in Colab](https://colab.research.google.com/github/OWNER/attention-cell-by-cell/blob/main/book/11_training_loop.ipynb)

# %% [markdown]
# ## Ten lines again
#
# Our data are lists of digits, 2 to 10 long, with the same digits as the target: **copy**, the usual first task. Later the target will be the digits in
# **reverse** or in **sorted** order. Ids 0, 1, 2 are `<pad>`, `<bos>` and `<eos>`; the ten digits are 3 to 12.

# %%
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

TASKS = {"copy": list, "reverse": lambda row: row[::-1], "sort": sorted}

def examples(task, count, seed, longest=10):
    draw, pairs = random.Random(f"{task} {seed}"), []
    for _ in range(count):
        row = draw.choices(range(3, 13), k=draw.randint(2, longest))
        pairs.append(([*row, 2], [1, *TASKS[task](row), 2]))
    return pairs

pairs = examples("copy", 4000, seed=0)
for source, target in pairs[:3]:
    print(source, "->", target)

# %% [markdown]
# The loop of chapter 01, with the shift of chapter 10: the decoder reads the target without its last token and predicts it without its first.

# %%
def small_model(seed=0, **options):
    torch.manual_seed(seed)
    sizes = dict(d_model=32, n_heads=4, n_layers=1, d_ff=64, dropout=0.0)
    return Transformer(TransformerConfig(13, 13, **(sizes | options)))

def train1(model, batches, updates, lr):
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=lr), []
    for _, (source, target) in zip(range(updates), batches):
        logits = model(source, target[:, :-1])
        loss = smoothed_cross_entropy(logits, target[:, 1:], smoothing=0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

# %% [markdown]
# ## Batches of similar length
#
# Rows of a batch are padded to the longest. By hand: four rows of 3, 9, 4 and 8 tokens, two in a batch. As they come, the batches are (3, 9) and (4, 8).

# %%
def cells(*batches):
    return sum(len(lengths) * max(lengths) for lengths in batches)

for batches in ([(3, 9), (4, 8)], [(3, 4), (8, 9)]):
    print(batches, "tokens", 3 + 9 + 4 + 8, "cells", cells(*batches))

# %% [markdown]
# Sorted by length, the same rows need 26 cells instead of 34. So the rows are sorted, and cut into batches; to keep the order of training random, the *batches* are
# shuffled, and rows of equal length change places each epoch (one pass through the data).
#
# A second choice hides here. Forty rows of 3 tokens are less work and less evidence than forty rows of 11. The paper counts a batch in tokens, about
# 25,000 (§5.1), and so do we: short rows come in large batches. `TokenBatches` counts the padding, too, since it costs time and memory as well.

# %% tags=["export"]
class TokenBatches:
    """Endless batches of similar length, in a new order every epoch.

    pairs: (source ids, target ids); a target has bos and eos at least.
    max_tokens: the most that rows times the longest source or target of a
    batch may be. Whenever iteration begins anew, so do the batches.
    Raises ValueError for no pairs, a pair too short, or one that is longer
    than max_tokens.
    """

    def __init__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
                 max_tokens: int, *, pad: int = 0, seed: int = 0):
        check_sizes(max_tokens=max_tokens)
        lengths = [(len(target), len(source)) for source, target in pairs]
        short = [(s, t) for t, s in lengths if s < 1 or t < 2]
        if short or not lengths:
            raise ValueError(f"pairs must hold sources of at least 1 token "
                             f"and targets of 2, got {(short or 'none')[:4]}")
        if max(map(max, lengths)) > max_tokens:
            raise ValueError(f"max_tokens must hold the longest row, "
                             f"{max(map(max, lengths))}, got {max_tokens}")
        self.pairs, self.lengths, self.pad = pairs, lengths, pad
        self.max_tokens, self.seed = max_tokens, seed

    def epoch(self, number: int) -> list[list[int]]:
        """Which pairs stand in each batch of an epoch; every pair in one."""
        draw = random.Random(f"{self.seed} {number}")
        order = sorted(range(len(self.pairs)),
                       key=lambda i: (self.lengths[i], draw.random()))
        batches, width = [[]], 0
        for i in order:
            width = max(width, *self.lengths[i])
            if width * (len(batches[-1]) + 1) > self.max_tokens:
                batches.append([])
                width = max(self.lengths[i])
            batches[-1].append(i)
        draw.shuffle(batches)
        return batches

    def rows(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """These pairs, padded on the right: (B, S), (B, T)."""
        return tuple(nn.utils.rnn.pad_sequence(
            [torch.tensor(self.pairs[i][side]) for i in indices],
            batch_first=True, padding_value=self.pad) for side in (0, 1))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in itertools.count():
            yield from map(self.rows, self.epoch(number))


# %%
batches = TokenBatches(pairs, max_tokens=480)
draw, shuffled = random.Random(0), list(range(4000))
draw.shuffle(shuffled)
shuffled = [shuffled[i:i + 40] for i in range(0, 4000, 40)]

def padding(epoch):
    lengths = [[max(batches.lengths[i]) for i in rows] for rows in epoch]
    return 1 - sum(map(sum, lengths)) / cells(*lengths)

bucketed = batches.epoch(0)
for name, epoch in (("shuffled", shuffled), ("similar length", bucketed)):
    print(f"{name:15s} {len(epoch):3d} batches   "
          f"padding {padding(epoch):4.0%} of all cells")
assert padding(shuffled) > 0.3 and padding(bucketed) < 0.01
assert sorted(sum(bucketed, [])) == list(range(4000))

# %% [markdown]
# A third of all cells were padding, and with sorting under 1 % are. Nothing is lost: every pair stands in one batch of the epoch. **Guess first:** do shuffled batches get
# worse with more rows? And at which size does sorting, too, begin to pad?

# %% tags=["hide-input"]
def draw_batches(order, tokens):
    if order == "similar length":
        epoch = TokenBatches(pairs, tokens).epoch(0)
    else:
        rows = max(2, tokens // 8)
        epoch = [sum(shuffled, [])[i:i + rows] for i in range(0, 4000, rows)]
    figure, axes = plt.subplots(1, 3, figsize=(7, 2.6))
    for number, (ax, rows) in enumerate(zip(axes, epoch), start=1):
        lengths = torch.tensor([max(batches.lengths[i]) for i in rows])
        used = torch.arange(12) < lengths[:, None]
        inside = torch.arange(12) < lengths.max()
        picture = used.float() + 0.35 * (inside & ~used)
        ax.imshow(picture, aspect="auto", cmap="Blues", vmin=0, vmax=1.3,
                  interpolation="nearest", extent=(0, 12, len(rows), 0))
        ax.set(xlabel="position", title=f"batch {number}")
        ax.yaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("row of the batch")
    share = padding(epoch)
    figure.suptitle(f"{order}: {share:.0%} of all cells are padding",
                    fontsize=12, fontweight="bold")
    return figure, (f"The first three batches as grids of rows and "
                    f"positions, {order}, about {tokens} tokens each. "
                    f"Padding, in pale, takes {share:.0%} of the cells.")

explore(draw_batches, order=["shuffled", "similar length"],
        tokens=[24, 120, 480, 4000])

# %% [markdown]
# Shuffled batches get worse: with a few rows the longest is often no longer than the others, with forty or more it is nearly always of full length, and a third is
# padding. Sorted batches hardly pad; only at 4,000 tokens, where a batch often spans two lengths, does padding reach 7 %.
#
# Does the clock agree? We time one epoch each, forward and backward.

# %% tags=["nbval-ignore-output"]
model = small_model()

def run_epoch(epoch):
    for rows in epoch:
        source, target = batches.rows(rows)
        logits = model(source, target[:, :-1])
        smoothed_cross_entropy(logits, target[:, 1:]).backward()

times = clock([partial(run_epoch, shuffled[::4]),
               partial(run_epoch, bucketed[::4])], repeats=3)
rows = [sum(map(len, epoch[::4])) for epoch in (shuffled, bucketed)]
ratio = times[0] / rows[0] / (times[1] / rows[1])
print(f"a row takes {ratio:.1f} times as long in shuffled batches")
assert ratio > 1.1

# %% [markdown]
# ## Any device
#
# A tensor lives on a device, and all tensors of a product must live on the same. `model.to(device)` moves weights; each batch has to follow. The rest of the code names no device.

# %% tags=["export"]
def pick_device(device: torch.device | str | None = None) -> torch.device:
    """The device asked for; None: CUDA, or Apple's MPS, or the CPU."""
    if device is None:
        device = ("cuda" if torch.cuda.is_available() else
                  "mps" if torch.backends.mps.is_available() else "cpu")
    return torch.device(device)


# %%
for name in (None, "cpu", "meta"):
    print(name, "->", name and pick_device(name))
assert pick_device("cuda:1").index == 1

# %% [markdown]
# (`meta` is a device without numbers, only shapes. The first line would name the GPU, where there is one.)
#
# ## One update from several batches
#
# The paper's 25,000 tokens need not fit into memory at once. `backward` *adds* to the gradients that are there, so one can run several small batches and step
# once: **accumulation**. But what is to be added? Take two batches with 2 and 8 real tokens, and a mean loss of 4.0 and 1.0.

# %%
tokens, losses = torch.tensor([2, 8]), torch.tensor([4.0, 1.0])
print(f"mean of the two means: {losses.mean():.1f}")
print(f"mean over ten tokens:  {(losses * tokens).sum() / 10:.1f}")

# %% [markdown]
# The mean of means gives a token of the small batch four times the weight. Many loops do just that (divide each mean loss by the number of
# batches). Ours adds up *sums*, and divides by the number of tokens in all batches, which must be known beforehand.
#
# The function below does that. It already allows for several processes, each with its own batches; for now there is one, and `processes()` is 1. `dtype` and `scaler` come in the next section.

# %% tags=["export"]
def processes() -> int:
    """How many processes train together; 1 without torch.distributed."""
    together = torch.distributed.is_available() and (
        torch.distributed.is_initialized())
    return torch.distributed.get_world_size() if together else 1


def summed(*numbers: float, device: torch.device) -> list[float]:
    """Each number's sum over all processes."""
    if processes() == 1:
        return list(numbers)
    total = torch.tensor(numbers, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def add_gradients(model: nn.Module, group: Sequence[tuple[Tensor, Tensor]],
                  loss: Callable[..., Tensor], tokens: int, pad: int,
                  dtype: torch.dtype,
                  scaler: torch.amp.GradScaler) -> Tensor:
    """Backward through the batches of one update; returns their loss.

    The loss is a mean over `tokens`, the real target tokens of the update
    in all processes. Batches need not have one size.
    """
    total = torch.zeros((), device=group[0][0].device)
    for number, (source, target) in enumerate(group, start=1):
        waits = processes() > 1 and number < len(group)
        with model.no_sync() if waits else nullcontext():
            with torch.autocast(source.device.type, dtype,
                                enabled=dtype != torch.float32):
                part = loss(model(source, target[:, :-1]), target[:, 1:],
                            pad=pad, reduction="sum") / tokens
            # DistributedDataParallel takes the mean of the processes
            scaler.scale(part * processes()).backward()
        total += part.detach()
    return total


# %% [markdown]
# One batch of 60 rows, or the same rows in three batches of 50, 8 and 2, each padded for itself. **Guess first:** do the gradients agree to the last bit,
# nearly, or not?

# %%
off = torch.amp.GradScaler("cpu", enabled=False)
plain_loss = partial(smoothed_cross_entropy, smoothing=0.0)

def gradient(model, group, tokens=None):
    model.zero_grad()
    tokens = tokens or sum(int((t[:, 1:] != 0).sum()) for _, t in group)
    add_gradients(model, group, plain_loss, tokens, 0, torch.float32, off)
    return torch.cat([w.grad.flatten() for w in model.parameters()])

by_length = sorted(range(200), key=lambda i: len(pairs[i][0]))[:60]
whole = [batches.rows(by_length)]
parts = [batches.rows(by_length[i:j]) for i, j in ((0, 2), (2, 10), (10, 60))]
model = small_model()
expected, added = gradient(model, whole), gradient(model, parts)
means = torch.stack([gradient(model, [part]) for part in parts]).mean(0)
for name, other in (("sum over all tokens", added), ("mean of means", means)):
    error = (other - expected).norm() / expected.norm()
    print(f"{name:20s} differs by {error:5.0%}   equal: "
          f"{torch.allclose(other, expected, atol=1e-6)}")
assert torch.allclose(added, expected, atol=1e-6)
assert (means - expected).norm() > 0.1 * expected.norm()

# %% [markdown]
# Nearly: sums in another order round differently. The mean of means is another gradient altogether.
#
# ## Fewer bits
#
# By their makers' tables, GPUs multiply 16-bit numbers several times as fast as 32-bit ones. There are two kinds. **float16** spends bits on digits, **bfloat16** on range:

# %%
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    info = torch.finfo(dtype)
    step, tiny = 1 + info.eps, info.smallest_normal * info.eps
    print(f"{str(dtype)[6:]:9s} after 1 comes {step:.7f}   "
          f"smallest {tiny:.0e}   largest {info.max:.0e}")

# %% [markdown]
# Under `torch.autocast` weights stay in float32, and matrix products round their inputs to 16 bits. That is why it is called **mixed precision**: 0.001 added to a weight of 1 is lost in
# bfloat16, so the weights, and Adam's sums, keep their 32.
#
# Range matters for gradients. At the start, the gradient of each wrong logit is about 1/V, over the number of tokens. For the paper's 37,000 tokens and batches of 25,000:

# %%
small = torch.tensor(1 / 37_000 / 25_000)
print("gradient", f"{small:.1e}", "  in bfloat16", f"{small.bfloat16():.1e}",
      "  in float16", small.half().item())
scaled = (small * 2**16).half()
print("times 65,536, in float16, and back in float32:",
      f"{scaled.float() / 2**16:.1e}")
assert small.half() == 0 and small.bfloat16() > 0 and scaled > 0

# %% [markdown]
# In float16 it is 0, and the wrong tokens would never be unlearned. So the loss is multiplied by a large number before `backward`, and the gradients are divided by it after:
# **loss scaling**. If some gradient then overflows, `GradScaler` skips the update and halves the number. bfloat16 has the range of float32 and needs none of it.
#
# `pick_precision` takes bfloat16 where the hardware has it. `including_emulation=False` matters: without it PyTorch says yes to GPUs that only imitate it, slowly (Colab's T4 is one).

# %% tags=["export"]
def pick_precision(precision: str | None,
                   device: torch.device) -> torch.dtype:
    """What products are computed in: "float32", "bfloat16" or "float16".

    None: on CUDA bfloat16 where the hardware has it, else float16;
    float32 on other devices. Raises ValueError for another name.
    """
    if precision not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"precision must be float32, bfloat16, float16 or "
                         f"None, got {precision!r}")
    if precision is None and device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bfloat16" if native else "float16"
    return getattr(torch, precision or "float32")


# %%
model = small_model(d_model=64)
exact = gradient(model, whole)
for dtype in (torch.bfloat16, torch.float16):
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    add_gradients(model, whole, plain_loss, int((whole[0][1][:, 1:] != 0)
                  .sum()), 0, dtype, scaler)
    scale = scaler.get_scale()
    rough = torch.cat([w.grad.flatten() / scale for w in model.parameters()])
    error = (rough - exact).norm() / exact.norm()
    print(f"{str(dtype)[6:]:9s} loss times {scale:6.0f}   gradient off by "
          f"less than 3 %: {bool(error < 0.03)}")
    assert 1e-5 < error < 0.03

# %% [markdown]
# ## Compile, or say why not
#
# `torch.compile` turns a model into fused kernels at its first call. That takes from seconds to minutes, and each new shape might take it again; `dynamic=True`
# asks for one program for all shapes. It pays on a GPU, in trainings much longer than that. It can also fail: no C++ compiler, an operation it does not know. A
# training should then go on, and say why it is slower. We try it on one batch, forward and backward, and give back the random numbers that the trial took.

# %% tags=["export"]
def random_states(device: torch.device) -> dict:
    """Where the random numbers of Python, PyTorch and the device stand."""
    states = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if device.type != "cpu":
        module = getattr(torch, device.type)  # torch.cuda, torch.mps
        states[device.type] = module.get_rng_state(device)
    return states


def restore_random(states: dict, device: torch.device) -> None:
    """Put them back there; a device that the states lack stays as it is."""
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        module = getattr(torch, device.type)
        module.set_rng_state(states[device.type], device)


# %% tags=["export"]
def compiled(model: nn.Module, trial: Callable[[nn.Module], object],
             **options) -> nn.Module:
    """torch.compile(model), or where that fails, model and a line why.

    trial: runs a model forward and backward, which is when compiling
    happens. Its gradients are dropped, its random numbers given back.
    """
    device = next(model.parameters()).device
    states = random_states(device)
    try:
        fast = torch.compile(model, dynamic=True, **options)
        trial(fast)
    except Exception as error:  # whatever a compiler may raise
        reason = " ".join(str(error).split())[:80]
        print(f"not compiled, {type(error).__name__}: {reason}")
        fast = model
    model.zero_grad()
    restore_random(states, device)
    return fast


# %% [markdown]
# A **backend** is what turns the traced program into machine code. We hand in one that fails.

# %%
def no_compiler(graph, inputs):
    raise RuntimeError("no C++ compiler found")

model, before = small_model(), torch.get_rng_state()
trial = lambda model: gradient(model, whole)
fast = compiled(model, trial, backend=no_compiler)
print("the model itself came back:", fast is model)
assert fast is model and torch.equal(torch.get_rng_state(), before)
assert all(weight.grad is None for weight in model.parameters())

# %% [markdown]
# ## One bad batch
#
# Now and then a batch gives a gradient a thousand times too long: a broken row, a rare token. We imitate that: in update 40 the loss counts a
# thousandfold. **Guess first:** Adam divides each step by the size of recent gradients. Does it take a huge step? And how long does it suffer?
#
# **Clipping** scales a gradient whose norm (its length, over all weights) exceeds a limit down to that limit. We look at three losses: as it is, with the bad batch, and
# with the bad batch clipped.

# %%
def train2(model, batches, updates, lr, bad=None, clip=math.inf):
    optimizer = torch.optim.Adam(model.parameters(), lr, (0.9, 0.98), 1e-9)
    losses, norms = [], []
    for update, (source, target) in zip(range(1, updates + 1), batches):
        logits = model(source, target[:, :-1])
        loss = plain_loss(logits, target[:, 1:])
        optimizer.zero_grad()
        (loss * (1000 if update == bad else 1)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms

RUNS = {"no bad batch": {}, "bad batch": dict(bad=40),
        "bad batch, clipped": dict(bad=40, clip=1.0)}
short = TokenBatches(pairs, 300)
curves = {name: train2(small_model(), short, 120, 0.003, **options)
          for name, options in RUNS.items()}
ends = {name: sum(losses[-10:]) / 10
        for name, (losses, _) in curves.items()}
_, norms = curves["bad batch"]
print(f"update 39: norm {norms[38]:.0f}   update 40: over 300:",
      norms[39] > 300)
assert ends["bad batch"] > ends["bad batch, clipped"] + 0.5
assert abs(ends["bad batch, clipped"] - ends["no bad batch"]) < 0.45

# %% tags=["hide-input"]
for name, (losses, _) in curves.items():
    plt.plot(range(1, 121), losses, label=name)
plt.gca().set(xlabel="update", ylabel="loss (nats per token)",
              title="One bad batch costs eighty updates; clipped, nearly none")
plt.legend()
show("Loss over 120 updates. Without a bad batch it falls below 1. With a "
     "bad batch at update 40 it rises to 2.5 and is still near 2 at the "
     "end. With the bad batch clipped it falls nearly as without.")

# %% [markdown]
# No step is huge; Adam sees to that. But its two running means remember. The mean of gradients points the wrong way for some ten updates (β₁ = 0.9), and the loss climbs; the mean of
# squares forgets more slowly (β₂ = 0.98), divides every step by the bad gradient's size, and learning crawls to the end of the picture. Clipped, the bad gradient is one among others.
#
# ## A number that is no number
#
# Worse than long is not a number. What does a single NaN do to the ten lines?

# %%
model = small_model()
weights = torch.cat([w.flatten() for w in model.parameters()])
with torch.no_grad():
    model.output.weight[5, 3] = math.nan  # one of 20,000 weights
train1(model, short, 1, 0.003)
weights = torch.cat([w.detach().flatten() for w in model.parameters()])
share = weights.isnan().float().mean()
print(f"weights that are NaN after one update: {share:.0%}")
assert share > 0.95

# %% [markdown]
# One update, and the model is gone; a loop that then writes its checkpoint has lost that, too. So `train` looks at loss and norm *before* the
# step, and stops with the number of the update. (In float16, an infinite norm is left to the scaler, which skips the step.)
#
# ## What is remembered
#
# A `History` keeps five numbers for each update. It prints as a short table; what moves while you wait is a line that `Progress` writes over and over,
# and only where somebody watches.

# %% tags=["export"]
@dataclass
class History:
    """What a training did: a number for each update, in order."""

    loss: list[float] = field(default_factory=list)  # nats per real token
    rate: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)  # gradient, unclipped
    tokens: list[int] = field(default_factory=list)  # real, of the target
    seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    def table(self, lines: int = 4) -> str:
        """Means of loss and rate over equal parts, and the validation."""
        text, end = ["  updates       loss     rate   validation"], 0
        for line in range(1, lines + 1):
            start, end = end, line * len(self.loss) // lines
            if start < end:
                loss, rate = (sum(numbers[start:end]) / (end - start)
                              for numbers in (self.loss, self.rate))
                value = [f"{value:.3f}" for update, value in self.validation
                         if start < update <= end]
                text.append(f"{start + 1:5d} to {end:5d}   {loss:5.2f}   "
                            f"{rate:.5f}   {(value or ['-'])[-1]}")
        return "\n".join(text)


# %% tags=["export"]
class Progress:
    """A line on how far a training is, where somebody watches.

    In a terminal or a notebook; never if TQDM_DISABLE is set, the variable
    that silences many such bars, nor if `wanted` is False.
    """

    def __init__(self, updates: int, wanted: bool = True):
        watched = sys.stdout.isatty() or "ipykernel" in sys.modules
        silent = os.environ.get("TQDM_DISABLE", "") not in ("", "0")
        self.live, self.updates = wanted and watched and not silent, updates
        self.shown = 0.0

    def __call__(self, history: History) -> None:
        """Write the line over the last one, at most twice a second."""
        done, now = len(history.loss), time.perf_counter()
        last = done >= self.updates
        if not self.live or (now - self.shown < 0.5 and not last):
            return
        self.shown, seconds = now, sum(history.seconds[-20:])
        speed = sum(history.tokens[-20:]) / seconds
        left = (self.updates - done) * seconds / len(history.seconds[-20:])
        print(f"\r{done}/{self.updates}  loss {history.loss[-1]:.3f}  "
              f"{speed:,.0f} tokens/s  {left:,.0f} s left   ",
              end="\n" if last else "", flush=True)


# %%
history = History(loss=[4.0, 3.0, 2.0, 1.0], rate=[0.1, 0.2, 0.2, 0.1],
                  tokens=[9, 9, 9, 9], seconds=[0.01] * 4,
                  validation=[(2, 0.25), (4, 0.75)])
print(history.table(2))

# %% [markdown]
# ## Half a file
#
# A **checkpoint** is a file from which a training can go on. The moment to fear is the writing: if the program dies in it, the old checkpoint is overwritten and the
# new one incomplete. We let the writing die in the middle, twice.

# %%
class PowerCut:
    def __reduce__(self):  # called while it is written
        raise OSError("power cut")

def after_a_crash(write):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        write({"update": 100}, path)
        try:
            write({"update": 200, "weights": torch.ones(9), "x": PowerCut()},
                  path)
        except OSError:
            left = sorted(file.name for file in Path(folder).iterdir())
        try:
            return torch.load(path, weights_only=True), left
        except Exception as error:
            return f"unreadable ({type(error).__name__})", left

print("torch.save:", *after_a_crash(torch.save))

# %% [markdown]
# Neither the new nor the old. The way out is old: write to another file beside it, make sure that it is on the disk, and rename. A rename happens or does not; there is no half.

# %% tags=["export"]
def save_atomically(state: dict, path: Path) -> None:
    """Write beside the file, then rename: never half a file in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk, not on its way there
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


# %%
found, left = after_a_crash(save_atomically)
print("save_atomically:", found, left)
assert found == {"update": 100} and left == ["model.pt"]

# %% [markdown]
# ## Everything the next update depends on
#
# The weights are not all. Adam has its two running means, dropout its random numbers, the batches their position. `save_training` collects them; the schedule is a function of the update's
# number, which is the history's length. Below we will leave out one at a time and see whether it matters.

# %% tags=["export"]
def save_training(path: Path, model: nn.Module,
                  optimizer: torch.optim.Optimizer,
                  scaler: torch.amp.GradScaler, history: History,
                  batches: int, device: torch.device) -> None:
    """Everything that the next update depends on, in one file.

    batches: how many were taken. The schedule needs the number of updates,
    which is the history's length. Of several processes the first writes.
    """
    states = [random_states(device)] * processes()
    if processes() > 1:
        torch.distributed.all_gather_object(states, states[0])
        if torch.distributed.get_rank() > 0:
            return
    save_atomically({
        "model": model.state_dict(), "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(), "history": asdict(history),
        "batches": batches, "random": states}, path)


def load_training(path: Path, model: nn.Module,
                  optimizer: torch.optim.Optimizer,
                  scaler: torch.amp.GradScaler) -> tuple[History, int, dict]:
    """Put it back; returns history, batches taken and random states.

    Raises ValueError for another number of processes, and as
    load_state_dict does.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if len(saved["random"]) != processes():
        raise ValueError(f"checkpoint must be of {processes()} processes, "
                         f"got one of {len(saved['random'])}")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scaler.load_state_dict(saved["scaler"])
    rank = torch.distributed.get_rank() if processes() > 1 else 0
    history, states = History(**saved["history"]), saved["random"][rank]
    return history, saved["batches"], states


# %% [markdown]
# ## The stop button
#
# Ctrl-C, or the notebook's stop button, sends the signal SIGINT, and Python raises `KeyboardInterrupt` wherever it happens to be: in the middle of an optimiser's step, or of writing. Better to take
# note, finish the update, write, and stop then. (A second press stops at once.)

# %% tags=["export"]
@contextmanager
def finish_first() -> Iterator[Callable[[], bool]]:
    """Within it, an interrupt (Ctrl-C) is noted; a second one interrupts.

    Yields a function that says whether one came. In a thread of its own,
    where Python handles no signals, it notes nothing.
    """
    came = []

    def note(number, frame):
        if came:
            raise KeyboardInterrupt
        came.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)


# %%
done = []
try:
    with finish_first() as interrupted:
        for update in range(1, 1000):
            if update == 3:
                signal.raise_signal(signal.SIGINT)  # somebody presses stop
            done.append(update)
            if interrupted():
                raise KeyboardInterrupt(f"stopped after update {update}")
except KeyboardInterrupt as error:
    print(error, done)
assert done == [1, 2, 3]

# %% [markdown]
# ## All of it
#
# `train` puts the pieces together. Read it once from the top: arguments that cannot be, the state, what a checkpoint brings back, and then one update, line by line.

# %% tags=["export"]
def train(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *,
          updates: int, optimizer: torch.optim.Optimizer | None = None,
          schedule: Callable[[int], float] | None = None,
          loss: Callable[..., Tensor] = smoothed_cross_entropy,
          accumulate: int = 1, clip: float | None = None,
          precision: str | None = None, compile: bool = False,
          validate: Callable[[nn.Module], float] | None = None,
          checkpoint: str | Path | None = None, resume: bool = False,
          device: torch.device | str | None = None, every: int = 100,
          progress: bool = True) -> History:
    """Train in place to `updates` updates, counted from 1 (§5).

    batches: yields (source (B, S), target (B, T)), from the beginning
    whenever iterated; `accumulate` of them make an update, whose loss is
    the mean over the real target tokens of all.
    optimizer: None: Adam with the paper's β and ε, at 1e-3.
    schedule: update -> learning rate; None: the optimizer's own.
    loss: called as loss(logits, target, pad=..., reduction="sum").
    clip: the largest norm of the gradient.
    precision, device: as pick_precision and pick_device say.
    validate: model in evaluation mode -> number, without gradients.
    checkpoint: file written every `every` updates, after validation, at
    the end and when interrupted; resume: go on from there if it exists.

    A model in DistributedDataParallel trains in all processes at once;
    `batches` are then each process's own share.
    Raises ValueError for arguments that do not fit, FloatingPointError
    for a loss or gradient that is not finite, before it harms the model,
    KeyboardInterrupt after the update in which an interrupt came.
    """
    check_sizes(updates=updates, accumulate=accumulate, every=every)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be None or above 0, got {clip}")
    if resume and checkpoint is None:
        raise ValueError("checkpoint must be a path to resume, got None")
    if processes() > 1 and not hasattr(model, "no_sync"):
        raise ValueError(f"model must be in DistributedDataParallel to train "
                         f"in {processes()} processes, got {type(model)}")
    device = pick_device(device)
    dtype = pick_precision(precision, device)
    plain = getattr(model.to(device), "module", model)
    weights = list(plain.parameters())
    if optimizer is None:
        optimizer = torch.optim.Adam(weights, lr=1e-3, betas=(0.9, 0.98),
                                     eps=1e-9)
    given = [w for part in optimizer.param_groups for w in part["params"]]
    if not {id(w) for w in given} <= {id(w) for w in weights}:
        raise ValueError("optimizer must be that of the model, got one with "
                         "other parameters")
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    pad = plain.config.pad if hasattr(plain, "config") else 0
    path = None if checkpoint is None else Path(checkpoint)
    parts = plain, optimizer, scaler
    history, taken, states = History(), 0, None
    if resume and path.exists():
        history, taken, states = load_training(path, *parts)
    stream, good = iter(batches), states is not None
    next(itertools.islice(stream, taken, taken), None)  # skip what was taken
    if states:
        restore_random(states, device)  # batches may have drawn from them
    run, show = model, Progress(updates, progress)

    with finish_first() as interrupted:
        while len(history.loss) < updates:
            begin, update = time.perf_counter(), len(history.loss) + 1
            group = list(itertools.islice(stream, accumulate))
            count = sum(int((tgt[:, 1:] != pad).sum()) for _, tgt in group)
            tokens, got, stop = summed(count, len(group), interrupted(),
                                       device=device)
            if got < accumulate * processes():
                raise ValueError(f"batches must hold {accumulate} for each "
                                 f"update, got {len(group)} for "
                                 f"update {update} of {updates}")
            group = [(src.to(device), tgt.to(device)) for src, tgt in group]
            how = loss, max(tokens, 1), pad, dtype, scaler
            for part in optimizer.param_groups if schedule else ():
                part["lr"] = schedule(update)
            model.train()
            if compile:
                run, compile = compiled(model, lambda fast: add_gradients(
                    fast, group[:1], *how)), False
            model.zero_grad()
            total = add_gradients(run, group, *how)
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(weights, clip or math.inf)
            value, norm = torch.stack([total, norm]).tolist()
            [value] = summed(value, device=device)
            if not math.isfinite(value) or not (  # a scaler skips the others
                    math.isfinite(norm) or scaler.is_enabled()):
                raise FloatingPointError(
                    f"update {update} has loss {value} and gradient norm "
                    f"{norm}; the last good checkpoint is "
                    f"{path if good else 'missing'}")
            scaler.step(optimizer)
            scaler.update()
            taken += accumulate
            for name, number in (
                    ("loss", value), ("norm", norm), ("tokens", tokens),
                    ("rate", optimizer.param_groups[0]["lr"]),
                    ("seconds", time.perf_counter() - begin)):
                getattr(history, name).append(number)
            show(history)
            due = update % every == 0 or update == updates
            if validate and due:
                plain.eval()
                with torch.inference_mode():
                    value = float(validate(plain))
                history.validation.append((update, value))
            if path and (due or stop):
                save_training(path, *parts, history, taken, device)
                good = True
            if stop:
                raise KeyboardInterrupt(f"stopped after update {update}")
    plain.eval()
    return history


# %% [markdown]
# With every addition off, it must do what the ten lines do.

# %%
quiet = dict(device="cpu", loss=plain_loss)
one, two = small_model(), small_model()
losses = train1(one, short, 20, 0.003)
history = train(two, short, updates=20, **quiet,
                optimizer=torch.optim.Adam(two.parameters(), lr=0.003))
same = all(map(torch.equal, one.parameters(), two.parameters()))
print("weights equal to the bit:", same)
assert torch.allclose(torch.tensor(losses), torch.tensor(history.loss))
assert all(map(torch.allclose, one.parameters(), two.parameters()))

# %% [markdown]
# ### To the bit
#
# Now with everything on: dropout, accumulation, clipping, a schedule, validation. One training runs through 12 updates. Another is stopped after
# 8, and a new process would go on: new model, other random numbers. **Guess first:** which of the parts may be missing from the file without a trace?

# %%
def learner(seed=0):
    model = small_model(seed, dropout=0.1)
    return model, dict(
        accumulate=2, clip=1.0, every=4, device="cpu",
        schedule=partial(warmup_schedule, d_model=32, warmup=50),
        validate=lambda model: gradient_free_loss(model, whole))

def gradient_free_loss(model, group):
    return sum(plain_loss(model(s, t[:, :-1]), t[:, 1:]) for s, t in group)

def resumed(folder, missing=None):
    path = Path(folder) / "training.pt"
    model, options = learner()
    train(model, short, updates=8, checkpoint=path, **options)
    saved = torch.load(path, weights_only=True)
    if missing == "optimizer":
        saved["optimizer"]["state"] = {}
    elif missing == "batches":
        saved["batches"] = 0
    model, options = learner(seed=99)
    if missing == "random":
        saved["random"] = [random_states(torch.device("cpu"))]
    torch.save(saved, path)
    history = train(model, short, updates=12, checkpoint=path, resume=True,
                    **options)
    return model, history

model, options = learner()
through = train(model, short, updates=12, **options)
with tempfile.TemporaryDirectory() as folder:
    for missing in (None, "optimizer", "random", "batches"):
        other, history = resumed(folder, missing)
        equal = all(map(torch.equal, model.parameters(), other.parameters()))
        print(f"missing {str(missing):10s} weights equal to the bit: {equal}")
        assert equal == (missing is None)
        if equal:
            assert history.loss == through.loss
            assert history.validation == through.validation

# %% [markdown]
# None may. With all parts, the weights agree in every bit: same processor, same number of threads. On a GPU some kernels add in an order that varies from run to run, and two *uninterrupted* runs
# differ, too; so there we ask only that the losses of the ten updates after a resume agree within 1 %.
#
# ### Stopped, and stopped by a NaN
#
# The same with a signal: in update 6 somebody presses stop. And with a loss that turns into NaN in update 7.

# %%
def stop_in(update, batches):  # two batches make an update
    for number, batch in enumerate(batches, start=1):
        if number == 2 * update:
            signal.raise_signal(signal.SIGINT)
        yield batch

def poisoned(logits, target, **options):
    calls.append(1)
    wrong = math.nan if len(calls) == 13 else 1.0
    return smoothed_cross_entropy(logits, target, **options) * wrong

with tempfile.TemporaryDirectory() as folder:
    first, second = (Path(folder) / name for name in ("a.pt", "b.pt"))
    model, options = learner()
    try:
        train(model, stop_in(6, short), updates=12, checkpoint=first,
              **options)
    except KeyboardInterrupt as error:
        print("KeyboardInterrupt:", error)
    other, _ = learner(seed=99)
    history = train(other, short, updates=12, checkpoint=first,
                    resume=True, **options)
    print("resumed, losses equal:", history.loss == through.loss)
    calls, (model, options) = [], learner()
    try:
        train(model, short, updates=12, checkpoint=second, loss=poisoned,
              **options)
    except FloatingPointError as error:
        print("FloatingPointError:", str(error).replace(folder, "..."))
    good = torch.load(second, weights_only=True)["history"]["loss"]
assert history.loss == through.loss and good == through.loss[:4]
assert not any(w.isnan().any() for w in model.parameters())

# %% [markdown]
# A checkpoint from the interrupted update leads to the same end, and the one named after the NaN is whole. So is the model in memory.
#
# ## A task that tells little
#
# Is a model right because it copies? We break ours on purpose, four ways, and train each on copy, reverse and sort (2 to 5 digits):
#
# - **no order**: the encoder gets no positions;
# - **upside down**: the exponent of the positions has the wrong sign (chapter 05);
# - **scrambled**: the encoder's heads are merged without the transpose (chapter 03);
# - **forgetful**: the decoder does not attend to what it has written.
#
# A row counts if *all* its tokens are right when the right prefix is given. Then the model, left alone, writes the same row: each right token makes the next prefix right. **Guess
# first:** which of the faults does copying find?

# %%
class Scrambled(MultiHeadAttention):
    def attend(self, query, key, value, mask=None, **options):
        heads = fused_attention(query, key, value, mask)
        B, H, T, d_v = heads.shape
        return self.output(heads.reshape(B, T, H * d_v)), None

class Silent(MultiHeadAttention):
    def forward(self, x, memory=None, mask=None, **options):
        return torch.zeros_like(x), None

def upside_down(length, d_model):
    angle = torch.arange(length)[:, None] * 10000 ** (
        torch.arange(0, d_model, 2) / d_model)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)

def break_model(model, fault):
    places = model.source_positions, model.target_positions
    if fault == "no order":
        places[0].kind = "none"
    if fault == "upside down":
        for place in places:
            place.table = upside_down(*place.table.shape)
    if fault == "scrambled":
        model.encoder.layers[0].self_attention.__class__ = Scrambled
    if fault == "forgetful":
        model.decoder.layers[0].self_attention.__class__ = Silent
    return model

# %%
def right_by_length(model, pairs):
    model.eval()
    right = {}
    for length in range(2, 6):
        rows = [pair for pair in pairs if len(pair[0]) == length + 1]
        source, target = (torch.tensor(side) for side in zip(*rows))
        with torch.inference_mode():
            best = model(source, target[:, :-1]).argmax(dim=-1)
        right[length] = (best == target[:, 1:]).all(dim=1).float().mean()
    return {length: share.item() for length, share in right.items()}

FAULTS = "none", "no order", "upside down", "scrambled", "forgetful"
results = {}
for task, fault in itertools.product(TASKS, FAULTS):
    model = break_model(small_model(), fault)
    train(model, TokenBatches(examples(task, 8000, seed=0, longest=5), 400),
          updates=300, loss=plain_loss, device="cpu",
          schedule=lambda update: 0.008 * min(update / 100,
                                              (100 / update) ** 0.5))
    results[task, fault] = right_by_length(
        model, examples(task, 500, seed=1, longest=5))

# %% tags=["nbval-ignore-output"]
means = {key: sum(shares.values()) / 4 for key, shares in results.items()}
print(f"{'rows right':14s}" + "".join(f"{task:>9s}" for task in TASKS))
for fault in FAULTS:
    print(f"{fault:14s}" + "".join(
        f"{means[task, fault]:9.0%}" for task in TASKS))
assert means["copy", "no order"] < 0.5 > means["reverse", "no order"]
assert all(means["copy", fault] > 0.85 for fault in FAULTS[2:])
assert all(means[task, "upside down"] > 0.9 for task in TASKS)
assert means["reverse", "forgetful"] < means["reverse", "none"]
assert means["sort", "no order"] > 0.8

# %% [markdown]
# Copying finds one fault of four; the models with the three others copy nearly every row. Reversing hints at two of these: the
# forgetful and the scrambled model fall some points behind, which a reader without the first line would take for a want of training. Sorting does not miss the order, since a sorted row does not depend on it.
# And no task minds the positions that are upside down; on rows so short they even help (chapter 05 shows where they fail).
#
# So a task, hard or easy, says that a model can learn *this*. Whether it is the right model, only comparing can say: with PyTorch's, weight for weight, as chapter 09 did. (300 updates with one
# seed; the percentages are of 500 rows, recorded on two CPU cores.)

# %% tags=["hide-input"]
def draw_results(task, fault):
    figure, ax = plt.subplots(figsize=(6, 2.8))
    for offset, name in ((-0.2, "none"), (0.2, fault)):
        shares = results[task, name]
        ax.bar([length + offset for length in shares],
               [100 * share for share in shares.values()], width=0.38,
               color=LINES[0][0] if name == "none" else LINES[1][0],
               hatch=None if offset < 0 else "//", edgecolor="white",
               label="right model" if offset < 0 else fault)
    ax.set(xlabel="digits in the row", ylabel="rows right (%)",
           ylim=(0, 100), title=f"{task}, {fault}: "
           f"{100 * means[task, fault]:.0f} % of rows right")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    shares = ", ".join(f"{length} digits {100 * share:.0f} %"
                       for length, share in results[task, fault].items())
    return figure, (f"Rows right by their number of digits, task {task}, "
                    f"fault {fault}: {shares}.")

explore(draw_results, task=list(TASKS), fault=FAULTS[1:])

# %% [markdown]
# Rows of two digits hide every fault but the missing order; what the others lose, they lose on longer rows. A task of short rows proves even less.
#
# ## Fast compared with what?
#
# Tokens per second say nothing alone. A yardstick: how many multiplications and additions a second (FLOP/s) does this machine reach in one large
# matrix product, the thing it does best? `FlopCounterMode` counts those of a forward and backward pass, and the quotient is the **share of the peak**. **Guess first:** is ours nearer 80 %, 40 % or 10 %?

# %% tags=["nbval-ignore-output"]
def throughput(model, group, updates=3):
    device = pick_device()
    dtype = pick_precision(None, device)
    model.to(device)
    group = [(s.to(device), t.to(device)) for s, t in group]
    with FlopCounterMode(display=False) as counter:
        gradient_on(model, group, dtype)
    square = torch.randn(1024, 1024, device=device, dtype=dtype)
    seconds, product = clock([lambda: gradient_on(model, group, dtype),
                              lambda: square @ square], repeats=updates)
    peak = 2 * 1024**3 / product
    tokens = sum(int((t[:, 1:] != 0).sum()) for _, t in group)
    return tokens / seconds, counter.get_total_flops() / seconds / peak

def gradient_on(model, group, dtype):
    scaler = torch.amp.GradScaler(group[0][0].device.type, enabled=False)
    add_gradients(model, group, plain_loss, 1000, 0, dtype, scaler)

shares = {}
for d_model in (32, 256):
    model = small_model(d_model=d_model, d_ff=4 * d_model)
    speed, shares[d_model] = throughput(model, [batches.rows(bucketed[-1])])
    print(f"d_model {d_model:3d}   {speed:7,.0f} target tokens/s   "
          f"share of the peak {shares[d_model]:.0%}")
assert 0 < shares[32] < shares[256] < 1

# %% [markdown]
# The small model leaves most of the machine idle: its products are too small, and what lies between them (layer norms, masks, Python) takes the time. Where, exactly? A **profiler** notes every operation.

# %% tags=["nbval-ignore-output"]
@contextmanager
def no_messages():  # the profiler's own, which go around Python
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)

model = small_model()
source, target = batches.rows(bucketed[-1])
group = [(source, target)]
gradient_on(model, group, torch.float32)  # the first call is slower
with no_messages(), profile(activities=[ProfilerActivity.CPU]) as profiler:
    gradient_on(model, group, torch.float32)
events = sorted(profiler.key_averages(), reverse=True,
                key=lambda event: event.self_cpu_time_total)
total = sum(event.self_cpu_time_total for event in events)
for event in events[:5]:
    print(f"{event.self_cpu_time_total / total:4.0%} in "
          f"{event.count:4d} calls of {event.key[:50]}")
products = sum(event.self_cpu_time_total for event in events
               if event.key in ("aten::mm", "aten::bmm", "aten::addmm"))
print(f"matrix products together {products / total:.0%}")
assert products < 0.6 * total

# %% [markdown]
# ### Memory
#
# Training holds, for each weight, the weight, its gradient and Adam's two means: 16 bytes, whatever the batch. Then come the **activations**, all that the forward pass keeps for the backward pass.
# A hook sees each tensor that is kept; on the device `meta` no number is ever computed, so that even the paper's base model fits into a chapter.

# %%
def kept(model, rows, length):
    sizes = {}
    def note(tensor):
        storage = tensor.untyped_storage()
        sizes[id(storage)] = storage, storage.nbytes()
        return tensor
    tokens = torch.ones(rows, length, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        plain_loss(model(tokens, tokens), tokens)
    held = {id(w.untyped_storage()) for w in model.parameters()}
    return sum(size for key, (_, size) in sizes.items() if key not in held)

with torch.device("meta"):
    base = Transformer(TransformerConfig.base(37_000))
weights = 16 * sum(w.numel() for w in base.parameters())
print(f"weights, gradients, Adam: {weights / 1e9:.1f} GB")
for rows in (10, 100, 800):
    print(f"{rows * 31:6,d} tokens of source and target each:   "
          f"activations {kept(base, rows, 31) / 1e9:4.1f} GB")
assert 12e9 < kept(base, 800, 31) < 18e9 and 0.9e9 < weights < 1.1e9

# %% [markdown]
# Activations grow with the tokens, weights do not. For the paper's 25,000 tokens, 15 GB of activations stand against 1 GB of all else, which is as much as Colab's T4 has. That is what accumulation is for:
# eight batches of 3,100 tokens give the same gradient in an eighth of the memory. (Counted from tensors kept, without the workspace of kernels; on CUDA, `torch.cuda.max_memory_allocated()` tells what was really held.)
#
# ## More than one GPU
#
# Several processes, one for each GPU, each with its own batches and a copy of the model: `DistributedDataParallel` averages the gradients during `backward`, so that all copies take the same step.
# PyTorch's `torchrun` starts the processes. Here, too, the mean of means lurks: process 0 may hold 4 tokens and process 1 forty. So `train` first sums the tokens
# over all processes (`summed`), divides by that, and multiplies by the number of processes, which takes the averaging back.
#
# We start two processes on this machine, with **gloo**, the exchange between CPUs (between GPUs it is NCCL). They need the code as a file; a notebook's cells stand in `In`.

# %%
EXPORTS = ("#@title Recap", "class TokenBatches", "@dataclass\nclass History",
           "def pick_", "def processes", "def random_states", "def compiled",
           "class Progress", "def save_", "@contextmanager\ndef finish",
           "def train(")
code = "\n\n".join(["import itertools, math, os, random, signal, sys",
                    "import threading, time",
                    *dict.fromkeys(cell for cell in In
                                   if "from contextlib import" in cell
                                   and cell.startswith("import itertools")
                                   or cell.startswith(EXPORTS))])
SCRIPT = code + '''
import json
from torch.distributed import get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel

init_process_group("gloo")
PAIRS = [([5, 2], [1, 5, 2]), ([6, 7, 8, 9, 10, 2], [1, 6, 7, 8, 9, 10, 2])]
mine = TokenBatches(PAIRS[get_rank():][:1], 99)    # 2 tokens, or 6
torch.manual_seed(0)
model = Transformer(TransformerConfig(13, 13, d_model=32, n_heads=4,
                                      n_layers=1, d_ff=64, dropout=0.0))
history = train(DistributedDataParallel(model), mine, updates=5,
                device="cpu", accumulate=2)
if get_rank() == 0:
    print(json.dumps([history.tokens, history.loss, history.norm]))
torch.distributed.destroy_process_group()
'''

# %%
def torchrun(script):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script)
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             "--nproc-per-node=2", path], capture_output=True, text=True,
            timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])

tokens, losses, norms = torchrun(SCRIPT)
both = [([5, 2], [1, 5, 2]), ([6, 7, 8, 9, 10, 2], [1, 6, 7, 8, 9, 10, 2])]
alone = train(small_model(), TokenBatches(both, 99), updates=5, device="cpu")
for name, here, there in (("loss", alone.loss, losses),
                          ("norm", alone.norm, norms)):
    same = torch.allclose(torch.tensor(here), torch.tensor(there), rtol=1e-4)
    print(f"{name} in two processes equals one process with both: {same}")
    assert same
print("tokens of an update, all processes:", tokens[0])
assert tokens == [16] * 5

# %% [markdown]
# Five updates, each on 2 and 6 tokens, twice; and loss and norm of the gradient are those of one process that holds both rows. On a machine with eight GPUs the script differs in
# two lines: `init_process_group("nccl")`, and `train(..., device=f"cuda:{rank}")`. The first process writes the checkpoint, with the random states of all; a stop signal to one is passed on, so that
# all stop after the same update.
#
# ## In Colab
#
# *Runtime, Change runtime type* offers a T4 without charge; other GPUs cost. Then `train` needs no change:
#
# - `device=None` finds the GPU. Expect little for the models of this chapter: they leave even a CPU idle.
# - `precision=None` takes float16 with loss scaling on a T4, bfloat16 on newer ones (L4, A100).
# - `compile=True` pays in trainings of many minutes; chapter 14 measures it where there is a GPU.
# - `checkpoint=` on a mounted drive matters most: Colab ends sessions. `resume=True` goes on.
#
# The figures on this page are from two CPU cores. What a GPU gives is measured by the project's `make gpu`, not here.
#
# ## What you built
#
# - `TokenBatches`, batches of similar length counted in tokens: a third of the work saved on our data.
# - `train`, equal to ten lines when its additions are off, equal to itself to the bit after a stop, and refusing to take a step that is not a number.
# - A table of faults that copying does not find.
#
# ## Check yourself
#
# **1.** Four batches are accumulated. Somebody calls the schedule once for each batch instead of once for each update. What happens to a warm-up of 4,000?
#
# <details><summary>Answer</summary>
#
# It is over after 1,000 updates, and the rate then falls as if four times as many updates had been made.
#
# </details>
#
# **2.** Clipping comes before dividing by the loss scale of 65,536. What does a limit of 1.0 then do?
#
# <details><summary>Answer</summary>
#
# It clips nearly every update: norms are 65,536 times too large. After the division a gradient of norm 1/65,536 remains. Adam would hide it, since it looks at ratios. Hence `unscale_` before `clip_grad_norm_`.
#
# </details>
#
# **3.** Two processes hold 2 and 6 tokens, and each divides its loss by its own number. By what factor is a token of the first favoured?
#
# <details><summary>Answer</summary>
#
# By three: its weight is 1/2 · 1/2 = 1/4 instead of 1/8, the others' 1/2 · 1/6 = 1/12 instead of 1/8.
#
# </details>
#
# **4.** A checkpoint is written only every 1,000 updates, and the update after it ends in a NaN. Why may the checkpoint still be the last good one, but not in a loop without the check?
#
# <details><summary>Answer</summary>
#
# Loss and norm are looked at before each step, so no broken step precedes a checkpoint. Without the check, weights may be NaN long before anybody prints the loss, and the file would hold them.
#
# </details>
#
# ## Where to read on
#
# - Vaswani et al., *Attention Is All You Need*, NeurIPS 2017, [arXiv 1706.03762](https://arxiv.org/abs/1706.03762): §5 (batches, hardware, optimiser).
# - Micikevicius et al., *Mixed Precision Training*, ICLR 2018, [arXiv 1710.03740](https://arxiv.org/abs/1710.03740): float16, loss scaling, float32 weights.
# - Pascanu, Mikolov, Bengio, *On the difficulty of training recurrent neural networks*, ICML 2013, [arXiv 1211.5063](https://arxiv.org/abs/1211.5063): clipping the norm.
# - Next, [chapter 12](https://OWNER.github.io/attention-cell-by-cell/book/12_decoding.html): how the trained model writes.
