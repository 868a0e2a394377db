# %% [markdown]
# # Assignment: training
#
# In six steps you write what a training does, the subject of chapters 10 and 11 of *Attention, Cell by Cell*: the shift by one, the smoothed loss over real tokens, the learning rate, a step of Adam, one update from many batches; and you find five bugs in a loop that runs without an error. About 110 minutes, 24 points. Everything runs on
# a CPU in seconds.
#
# **How it works.** Replace `raise NotImplementedError` by your code. Run the test under it: it says nothing if all is well, and otherwise what is likely wrong. Marks are given for other
# inputs than those of the tests, so code that only fits these gets none. Other names inside are allowed, and so is any way that gives the right numbers. Do not rename functions, and leave test cells as they are.
#
# Token ids: 0 is padding, 1 begins a sentence, 2 ends it. `B` sentences, `T` tokens, `V` words in the vocabulary.

# %%
import math

import torch
from torch import Tensor, nn

def same(found, expected, atol=1e-4):
    """Whether two tensors have one shape and, to four decimals, one content."""
    return (isinstance(found, Tensor) and found.shape == expected.shape
            and torch.allclose(found.double(), expected.double(), atol=atol, equal_nan=True))

# %% [markdown]
# ## 1. Shifted by one
#
# *2 points · ★ · 8 minutes*
#
# In training the decoder reads the right words so far and predicts the next: at each position it is given token `t` and asked for token `t + 1`. From rows `(B, T)` that begin with 1 and end with 2, padded on the right, make what it reads and what it is asked for, both `(B, T - 1)`.

# %% tags=["solution:shifted"]
def shifted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """What the decoder reads, and what it is to predict: two of (B, T - 1)."""
    ### BEGIN SOLUTION
    return rows[:, :-1], rows[:, 1:]
    ### END SOLUTION

# %% tags=["test:shifted:2"]
rows = torch.tensor([[1, 7, 8, 9, 2], [1, 5, 2, 0, 0]])
found = shifted(rows)
assert isinstance(found, tuple) and len(found) == 2, "return two things: what is read, what is asked for"
read, asked = found
assert not torch.equal(read, rows), "the last token is not read: nothing comes after it"
assert read.shape == asked.shape == (2, 4), f"both are (B, T - 1) = (2, 4), not {tuple(read.shape)} and {tuple(asked.shape)}"
assert not torch.equal(read, asked), "the decoder is asked for the token that it reads: it would only learn to copy"
assert not torch.equal(read, rows[:, 1:]), "exchanged: it reads the earlier tokens and is asked for the later ones"
assert read.tolist() == [[1, 7, 8, 9], [1, 5, 2, 0]], "it reads from the beginning, 1, on"
assert asked.tolist() == [[7, 8, 9, 2], [5, 2, 0, 0]], "it is asked for everything after the beginning, the end, 2, included"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [torch.tensor([[1, *(draw.randint(3, 90) for _ in range(n)), 2] for _ in range(B)]) for B, n in ((1, 0), (2, 3), (3, 6))]

def probe(case):
    return shifted(case)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# Slices along the second axis: all but the last, all but the first.
#
# </details>

# %% [markdown]
# ## 2. The loss
#
# *4 points · ★★★ · 20 minutes*
#
# Label smoothing: the right word gets $1 - \varepsilon$, and *all* `V` words, the right one too, share $\varepsilon$. The loss at a position is $-\sum_v q_v \log p_v$ in nats, and the loss of a batch is the mean over **real** positions: those whose target is not 0.
#
# `logits` `(B, T, V)`, `target` `(B, T)`; return one number, as a tensor. Use `log_softmax`, not the logarithm of `softmax` (why?), and not `F.cross_entropy`.

# %% tags=["solution:smoothed_loss"]
def smoothed_loss(logits: Tensor, target: Tensor, smoothing: float = 0.1) -> Tensor:
    """Cross-entropy with smoothed targets, mean over real tokens (target != 0), in nats."""
    ### BEGIN SOLUTION
    log_p = logits.log_softmax(dim=-1)
    right = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    losses = -(1 - smoothing) * right - smoothing * log_p.mean(dim=-1)
    real = target != 0
    return losses[real].sum() / real.sum()
    ### END SOLUTION

# %% tags=["test:smoothed_loss:4"]
torch.manual_seed(0)
logits, target = 2 * torch.randn(2, 4, 6), torch.tensor([[3, 4, 5, 2], [5, 2, 0, 0]])
theirs = torch.nn.functional.cross_entropy
flat, goal = logits.flatten(0, 1), target.flatten()
plain = smoothed_loss(logits, target, 0.0)
assert isinstance(plain, Tensor) and plain.dim() == 0, "one number, as a tensor"
assert not same(plain, theirs(flat, goal)), "padding counts: positions whose target is 0 must not"
assert not same(plain, theirs(flat, goal, ignore_index=0, reduction="sum")), "a sum: the loss is the mean over real tokens"
assert not same(plain, theirs(flat, goal, ignore_index=0, reduction="sum") / 8), "divided by all positions: only the 6 real ones count"
rows = torch.stack([theirs(l, t, ignore_index=0) for l, t in zip(logits, target)]).mean()
assert not same(plain, rows), "a mean of the sentences' means gives the words of short sentences more weight"
assert same(plain, theirs(flat, goal, ignore_index=0)), f"without smoothing the loss is {theirs(flat, goal, ignore_index=0):.4f} here, not {plain:.4f}"
found = smoothed_loss(logits, target, 0.1)
others = ((1 - 0.1) * theirs(flat, goal, ignore_index=0)
          + 0.1 * (-(flat.log_softmax(-1).sum(-1) - flat.log_softmax(-1).gather(1, goal[:, None])[:, 0]) / 5)[goal != 0].mean())
assert not same(found, others), "the rest is shared by all V words, the right one too, not by the V - 1 others"
assert same(found, theirs(flat, goal, ignore_index=0, label_smoothing=0.1)), "with smoothing 0.1 the loss differs from PyTorch's"
assert smoothed_loss(1000 * logits, target).isfinite(), "logits in the thousands give infinity: use log_softmax"
### BEGIN HIDDEN TESTS
def cases(draw):
    found = []
    for B, T, V, smoothing in ((1, 1, 3, 0.1), (2, 5, 7, 0.1), (3, 4, 11, 0.0), (2, 6, 5, 0.5)):
        logits = torch.tensor([draw.gauss(0, 3) for _ in range(B * T * V)]).reshape(B, T, V)
        target = torch.tensor([draw.randint(1, V - 1) for _ in range(B * T)]).reshape(B, T)
        target[-1, (T + 1) // 2:] = 0
        found.append((logits, target, smoothing))
    return found

def probe(case):
    logits, target, smoothing = case
    logits = logits.clone().requires_grad_()
    loss = smoothed_loss(logits, target, smoothing)
    loss.backward()
    return loss, logits.grad
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `log_p.gather(-1, target.unsqueeze(-1))` picks the right word's log probability at each position. The share of all words is `log_p.mean(dim=-1)`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `losses[target != 0].mean()` is the mean over real positions.
#
# </details>

# %% [markdown]
# ## 3. The learning rate
#
# *2 points · ★ · 10 minutes*
#
# Equation (3) of the paper: $d_{model}^{-0.5} \cdot \min(n^{-0.5},\ n \cdot warmup^{-1.5})$ for update `n`, counted **from 1**. Return it; for an `n` below 1 raise `ValueError`.

# %% tags=["solution:rate"]
def rate(n: int, d_model: int = 512, warmup: int = 4000) -> float:
    """The learning rate of update n, the first being 1 (§5.3)."""
    ### BEGIN SOLUTION
    if n < 1:
        raise ValueError(f"updates are counted from 1, got {n}")
    return d_model**-0.5 * min(n**-0.5, n * warmup**-1.5)
    ### END SOLUTION

# %% tags=["test:rate:2"]
assert rate(1) > 0, "the first update has a rate above 0, else it is wasted"
assert abs(rate(1) - 2 * 512**-0.5 * 4000**-1.5) > 1e-9, "one update too far: the first is n = 1, without adding 1"
assert abs(rate(1) - 512**-0.5 * 4000**-1.5) < 1e-12, f"the first rate is d_model^-0.5 · warmup^-1.5 = 1.747e-07, not {rate(1):.3e}"
assert abs(rate(4000) - 1 / math.sqrt(512 * 4000)) < 1e-9, f"at the peak both parts are equal, 6.988e-04, not {rate(4000):.3e}"
assert rate(3999) < rate(4000) > rate(4001), "it rises until warmup and falls after it: min, not max"
assert abs(rate(16000) - rate(4000) / 2) < 1e-9, "four times as many updates halve the rate: 1 / √n"
assert abs(rate(100, 128, 100) - 1 / math.sqrt(128 * 100)) < 1e-9, "d_model and warmup are not used"
for wrong in (0, -3):
    try:
        rate(wrong)
    except ValueError:
        continue
    except Exception as error:
        raise AssertionError(f"for n = {wrong} raise ValueError, not {type(error).__name__}") from None
    raise AssertionError(f"for n = {wrong} raise ValueError")
### BEGIN HIDDEN TESTS
def cases(draw):
    return [(1, 512, 4000), (0, 512, 4000), (1024, 1024, 4000), *((draw.randint(1, 9000), draw.choice((64, 128, 300)), draw.randint(50, 5000)) for _ in range(6))]

def probe(case):
    try:
        found = rate(*case)
    except ValueError:
        return "ValueError"
    return 1e4 * found
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# `n**-0.5` in Python is $1/\sqrt{n}$.
#
# </details>

# %% [markdown]
# ## 4. A step of Adam
#
# *4 points · ★★★ · 20 minutes*
#
# Adam (Kingma and Ba 2015) keeps two running means for each weight, of the gradient, $m$, and of its square, $v$; both start at 0 and are too small at first, which is corrected:
#
# $$m \leftarrow \beta_1 m + (1 - \beta_1) g \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \qquad \hat m = \frac{m}{1 - \beta_1^n} \qquad \hat v = \frac{v}{1 - \beta_2^n} \qquad w \leftarrow w - \eta \frac{\hat m}{\sqrt{\hat v} + \varepsilon}$$
#
# Given `w`, its gradient `g`, `m`, `v` and the number `n` of this step, from 1, return the new `w`, `m`, `v`. Leave the ones that you were given unchanged.

# %% tags=["solution:adam_step"]
def adam_step(w: Tensor, g: Tensor, m: Tensor, v: Tensor, n: int, lr: float = 1e-3,
              beta1: float = 0.9, beta2: float = 0.98, eps: float = 1e-9) -> tuple[Tensor, Tensor, Tensor]:
    """The weights and both running means after step n, counted from 1."""
    ### BEGIN SOLUTION
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    return w - lr * (m / (1 - beta1**n)) / ((v / (1 - beta2**n)).sqrt() + eps), m, v
    ### END SOLUTION

# %% tags=["test:adam_step:4"]
w, g, zero = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, -4.0, 0.0]), torch.zeros(3)
found = adam_step(w, g, zero, zero, 1, lr=0.1)
assert isinstance(found, tuple) and len(found) == 3, "return three things: w, m, v"
assert torch.equal(w, torch.tensor([1.0, -2.0, 3.0])) and not zero.any(), "what was given has changed: make new tensors (no -=, no mul_)"
assert not found[0].isnan().any(), "a gradient of 0 gives nan: eps keeps the division finite"
assert same(found[1], 0.1 * g) and same(found[2], 0.02 * g * g), "the running means after step 1 are 0.1 g and 0.02 g²; return them uncorrected"
assert not same(found[0], w + 0.1 * g.sign()), "against the gradient, not along it"
uncorrected = w - 0.1 * 0.1 * g / ((0.02 * g * g).sqrt() + 1e-9)
assert not same(found[0], uncorrected), "the correction for the start at 0 is missing"
assert same(found[0], w - 0.1 * g.sign()), f"the first step is lr for every weight whose gradient is not 0, whatever its size: {(w - 0.1 * g.sign()).tolist()}, not {found[0].tolist()}"
torch.manual_seed(0)
mine = start = torch.randn(5)
theirs = nn.Parameter(start.clone())
optimizer, m, v = torch.optim.Adam([theirs], lr=0.01, betas=(0.9, 0.98), eps=1e-9), torch.zeros(5), torch.zeros(5)
for n in range(1, 6):
    theirs.grad = torch.randn(5)
    optimizer.step()
    mine, m, v = adam_step(mine, theirs.grad, m, v, n, lr=0.01)
assert same(mine, theirs.detach(), atol=1e-5), "after five steps the weights differ from torch.optim.Adam's: does the correction use n?"
tiny = adam_step(w, 1e-3 * g, zero, zero, 1, lr=0.1, eps=1e-2)[0]
assert same(tiny[1], torch.tensor(-2 + 0.1 * 4e-3 / (4e-3 + 1e-2))), "eps stands beside the root, not under it"
### BEGIN HIDDEN TESTS
def cases(draw):
    def random(n):
        return torch.tensor([draw.gauss(0, 1) for _ in range(n)])
    return [(random(4), random(4), random(4), random(4).abs() + 0.01, n, lr, 0.9, beta2, eps)
            for n, lr, beta2, eps in ((1, 0.1, 0.98, 1e-9), (7, 0.3, 0.999, 1e-8), (400, 0.1, 0.98, 0.1))]

def probe(case):
    w, g, m, v, *rest = case
    return adam_step(w.clone(), g.clone(), m.clone(), v.clone(), *rest)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# Five formulas, five lines. `beta1**n` uses the step's number, which is 1 in the first.
#
# </details>

# %% [markdown]
# ## 5. One update from many batches
#
# *4 points · ★★★ · 20 minutes*
#
# Where a batch does not fit into memory, its parts go through one after the other and their gradients add up (**accumulation**). The result must be that of one large batch: the mean over *all* real tokens, however unequal the parts are.
#
# `parts` is a list of `(source, rows)`; `model(source, read)` gives logits. Use `shifted` and `smoothed_loss` (smoothing 0.1). Leave the gradient in `weight.grad` of each parameter, without what stood there before; take no optimizer step. Return the loss of the whole, a float.

# %% tags=["solution:accumulate"]
def accumulate(model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> float:
    """Gradients as of one batch made of all parts; returns its loss."""
    ### BEGIN SOLUTION
    model.zero_grad()
    tokens = sum(int((shifted(rows)[1] != 0).sum()) for _, rows in parts)
    total = 0.0
    for source, rows in parts:
        read, asked = shifted(rows)
        share = int((asked != 0).sum()) / tokens
        loss = smoothed_loss(model(source, read), asked) * share
        loss.backward()
        total += loss.item()
    return total
    ### END SOLUTION

# %% tags=["test:accumulate:4"]
class Toy(nn.Module):
    """Logits from the word read and the mean of the source's words."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.out = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, source, read):
        return self.out((self.words(read) + self.words(source).mean(dim=1, keepdim=True)).tanh())

source = torch.tensor([[3, 4], [5, 6], [7, 8], [4, 3]])
rows = torch.tensor([[1, 4, 5, 6, 7, 2], [1, 3, 2, 0, 0, 0], [1, 8, 8, 2, 0, 0], [1, 2, 0, 0, 0, 0]])
parts = [(source[:1], rows[:1]), (source[1:], rows[1:])]
whole, model = Toy(), Toy()
expected = torch.nn.functional.cross_entropy(whole(source, rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1)
expected.backward()
found = accumulate(model, parts)
gradient, right = model.words.weight.grad, whole.words.weight.grad
assert isinstance(found, float), "return the loss as a float: tensor.item()"
assert gradient is not None, "no gradient: call backward"
means = Toy()
for s, r in parts:
    torch.nn.functional.cross_entropy(means(s, r[:, :-1]).flatten(0, 1), r[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1).backward()
assert not same(gradient, means.words.weight.grad), "the parts' means are added: the gradient is too large, by the number of parts"
assert not same(gradient, means.words.weight.grad / 2), "a mean of the parts' means: a part with 5 real tokens counts as much as one with 6 of another length; weigh by real tokens"
assert same(gradient, right), "the gradient is not that of one batch with all sentences"
assert abs(found - expected.item()) < 1e-4, f"the loss is that of one batch, {expected.item():.4f}, not {found:.4f}"
accumulate(model, parts)
assert not same(model.words.weight.grad, 2 * right), "a second call adds to the gradient of the first: begin with zero_grad"
assert same(model.words.weight.grad, right), "a second call gives another gradient"
assert same(Toy().words.weight, model.words.weight.detach()), "the weights have changed: no optimizer step here"
### BEGIN HIDDEN TESTS
def cases(draw):
    def row(n, width):
        return [1, *(draw.randint(3, 8) for _ in range(n)), 2] + [0] * (width - n - 2)
    found = []
    for sizes in ([[4], [1, 0, 2]], [[3, 3], [5]], [[2]], [[1], [2], [6, 0, 0, 0]]):
        found.append((draw.randint(0, 99), [(torch.tensor([[draw.randint(3, 8) for _ in range(3)] for _ in lengths]),
                                             torch.tensor([row(n, max(lengths) + 2) for n in lengths])) for lengths in sizes]))
    return found

def probe(case):
    class Small(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.words, self.out = nn.Embedding(9, 5), nn.Linear(5, 9)

        def forward(self, source, read):
            return self.out((self.words(read) + self.words(source).mean(dim=1, keepdim=True)).tanh())
    seed, parts = case
    model = Small(seed)
    model.out.bias.grad = torch.full((9,), 7.0)  # what stood there before
    loss = accumulate(model, parts)
    return float(loss), model.words.weight.grad, model.out.bias.grad
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The loss of a part is a mean over its own tokens. What must it be multiplied by, to be that part's share of the mean over all?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Count the real tokens of all parts first; then each part's loss times (its tokens / all tokens).
#
# </details>

# %% [markdown]
# ## 6. Five bugs
#
# *4 points · ★★★ · 20 minutes*
#
# This loop runs without an error, and its loss even falls. It has **five** bugs. Mend them; the marks compare your loop with a right one.
#
# It should train `model` on the batches, one update each with the loss over real tokens and the rate of update `n` from `schedule(n)`, clip the gradient's norm to 1, and measure, *after* training, without dropout and without gradients, the loss on `held_out`. It returns the list of training losses (floats) and the held-out loss.

# %% tags=["solution:loop"]
def loop(model, batches, held_out, schedule):
    """Train on the batches in order; the losses of the updates, and that on held_out at the end."""
    ### BEGIN SOLUTION
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9)
    losses = []
    model.train()
    for n, (source, rows) in enumerate(batches, start=1):
        for group in optimizer.param_groups:
            group["lr"] = schedule(n)
        read, asked = shifted(rows)
        loss = smoothed_loss(model(source, read), asked)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        source, rows = held_out
        read, asked = shifted(rows)
        return losses, smoothed_loss(model(source, read), asked).item()
    ### END SOLUTION

# %% [markdown]
# The loop with its bugs. Copy it into the cell above and mend it there.
#
# ```python
# def loop(model, batches, held_out, schedule):
#     optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9)
#     losses = []
#     model.train()
#     for n, (source, rows) in enumerate(batches):
#         for group in optimizer.param_groups:
#             group["lr"] = schedule(max(n, 1))
#         loss = nn.functional.cross_entropy(model(source, rows).flatten(0, 1), rows.flatten(), ignore_index=0, label_smoothing=0.1)
#         loss.backward()
#         optimizer.step()
#         nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#         losses.append(loss.item())
#     with torch.no_grad():
#         source, rows = held_out
#         read, asked = shifted(rows)
#         return losses, smoothed_loss(model(source, read), asked).item()
# ```

# %% tags=["test:loop:4"]
class Dropping(Toy):
    """A Toy with dropout that draws nothing: in training it halves what it lets through."""

    def forward(self, source, read):
        return super().forward(source, read) * (0.5 if self.training else 1.0)

batches, held_out, asked_for = [(source, rows), (source[:2] + 1, rows[:2]), (source[2:] - 1, rows[2:])], (source[1:3], rows[1:3]), []
model = Dropping()
losses, last = loop(model, batches, held_out, lambda n: asked_for.append(n) or 0.05)
assert len(losses) == 3 and all(isinstance(loss, float) for loss in losses), "a float for each update"
assert asked_for == [1, 2, 3], f"updates are counted from 1: the schedule was asked for {asked_for}"
first = torch.nn.functional.cross_entropy(0.5 * Toy()(source, rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1).item()
copying = torch.nn.functional.cross_entropy(0.5 * Toy()(source, rows).flatten(0, 1), rows.flatten(), ignore_index=0, label_smoothing=0.1).item()
assert abs(losses[0] - copying) > 1e-4, "the model is asked for the words that it reads: shift by one"
assert abs(losses[0] - first) < 1e-4, f"the first loss is {first:.4f}, not {losses[0]:.4f}"
assert not model.training, "the held-out loss is measured in evaluation mode: model.eval()"
right, optimizer = Dropping(), None
optimizer = torch.optim.Adam(right.parameters(), lr=0.05, betas=(0.9, 0.98), eps=1e-9)
for s, r in batches:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(right(s, r[:, :-1]).flatten(0, 1), r[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1).backward()
    nn.utils.clip_grad_norm_(right.parameters(), 1.0)
    optimizer.step()
assert same(model.out.bias.detach(), right.out.bias.detach()), "the weights after three updates are not the right ones: do gradients of earlier updates stay? Is the norm clipped before the step?"
right.eval()
expected = torch.nn.functional.cross_entropy(right(held_out[0], held_out[1][:, :-1]).flatten(0, 1), held_out[1][:, 1:].flatten(), ignore_index=0, label_smoothing=0.1).item()
assert abs(last - expected) < 1e-3, f"the held-out loss is {expected:.4f}, not {last:.4f}"
### BEGIN HIDDEN TESTS
def cases(draw):
    def batch():
        return (torch.tensor([[draw.randint(3, 8) for _ in range(3)] for _ in range(3)]),
                torch.tensor([[1, *(draw.randint(3, 8) for _ in range(n)), 2] + [0] * (4 - n) for n in (4, 1, 2)]))
    return [(draw.randint(0, 99), [batch() for _ in range(k)], batch(), scale) for k, scale in ((1, 1), (4, 1), (3, 8))]

def probe(case):
    class Small(nn.Module):
        def __init__(self, seed, scale):
            super().__init__()
            torch.manual_seed(seed)
            self.words, self.out, self.scale = nn.Embedding(9, 5), nn.Linear(5, 9), scale

        def forward(self, source, read):
            found = self.out((self.words(read) + self.words(source).mean(dim=1, keepdim=True)).tanh())
            return found * self.scale * (0.5 if self.training else 1.0)
    seed, batches, held_out, scale = case
    model = Small(seed, scale)
    losses, last = loop(model, batches, held_out, lambda n: 0.03 / n)
    return [float(loss) for loss in losses], float(last), model.words.weight, model.out.bias
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Read it line by line with these questions: Which number has the first update? What is read and what is asked for? Which gradients does `backward` add to? What does clipping change, and when is it used? In which mode is the model at the end?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `enumerate(…, start=1)`; `shifted`; `zero_grad`; clip before `step`; `eval`.
#
# </details>

# %% [markdown]
# ## 7. In words
#
# *4 points · ★★ · 12 minutes*
#
# Two runs of the same model end with a validation loss of 2.10 (smoothing 0.1 in the measured loss, too) and 1.95 (measured without smoothing). In at most 120 words: can you say which model is better? What would you compute, on what, and what would perplexity, accuracy and BLEU each add?

# %% [markdown] tags=["written:which_is_better:4"]
# *Your answer here.*
#
# === BEGIN MARK SCHEME ===
# 1 point: no: the two losses measure different things; a smoothed loss cannot fall to 0 and is larger for the same model.
# 1 point: measure both the same way, on the same validation data, over real tokens, in evaluation mode.
# 1 point: perplexity is exp of the unsmoothed loss, so it says nothing new; smoothing in training makes it worse while accuracy may rise.
# 1 point: BLEU needs decoding and looks at whole sentences; a difference may be luck: several seeds.
# === END MARK SCHEME ===

# %% [markdown]
# ## 8. For the curious (no marks)
#
# Train `Toy` on random rows with a constant rate, and with the warm-up. At which rate does each begin to fail? Plot the size of Adam's first ten steps with and without the correction.
