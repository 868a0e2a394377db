# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. Layers
#
# *What holds depth together?* Attention mixes positions; something must work on what it brings, and many such steps must stack without
# breaking. We build the feed-forward network, layer norm and the residual connection from numbers that fit on paper, then measure what each
# is good for, and what happens when the norm changes place. At the end you will have built `FeedForward` and `Residual`, which wrap every
# sublayer of the book.
#
# <div class="admonition note">
# <p class="admonition-title">What it takes</p>
# <p>Reading: 30 minutes. Running: about two minutes on a CPU; a GPU does not help. Before: chapter 03 (MultiHeadAttention); from chapter 05 only
# PositionalEncoding, which adds sines of the position to each vector.</p>
# </div>
#
# [Read on the site](https://OWNER.github.io/attention-cell-by-cell/book/07_layers.html) · [Run in Colab](https://colab.research.google.com/github/OWNER/attention-cell-by-cell/blob/main/book/07_layers.ipynb)

# %% [markdown]
# ## One position at a time
#
# The paper's layer has two parts, called *sublayers*: attention, and after it a small network that treats each position for itself (§3.3):
#
# $$\text{FFN}(x) = \max(0,\, x W_1 + b_1)\, W_2 + b_2$$
#
# A linear layer, a maximum with 0 (called *ReLU*), a second linear layer. What is the maximum good for? Let a position hold two numbers, neither
# negative, and ask for them sorted, larger first. Three hidden numbers do it:

# %%
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

torch.set_num_threads(1)  # for models this small a second one only waits

def sort_two(a, b):
    hidden = [max(0, a), max(0, b), max(0, a - b)]
    return hidden[1] + hidden[2], hidden[0] - hidden[2]

for pair in ((3, 5), (5, 2), (4, 4)):
    print(pair, "->", sort_two(*pair))

# %% [markdown]
# The larger is $b + \max(0, a-b)$, the smaller $a - \max(0, a-b)$. Both steps are matrices. **Guess first:** what do the same two matrices give
# without the maximum between them?

# %%
W_1 = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, -1.0]])  # a, b -> hidden
W_2 = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, -1.0]])  # -> output
pairs = torch.tensor([[3.0, 5.0], [5.0, 2.0], [4.0, 4.0]])

by_hand = torch.tensor([sort_two(*pair) for pair in pairs.tolist()])
assert torch.equal((pairs @ W_1).clamp(min=0) @ W_2, by_hand)
print("with the maximum   ", by_hand.int().tolist())
print("without the maximum", (pairs @ W_1 @ W_2).int().tolist())
print("W_1 W_2 =", (W_1 @ W_2).int().tolist())

# %% [markdown]
# The pairs as they came. Two linear layers in a row are one linear layer, here the one that does nothing. The book's version has the paper's shape, and
# a *dropout* between, off by default, which the last section explains.

# %% tags=["export"]
class FeedForward(nn.Sequential):
    """Linear, ReLU, dropout, linear: each position for itself (§3.3).

    (B, T, d_model) -> (B, T, d_ff) -> (B, T, d_model)
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0):
        check_sizes(d_model=d_model, d_ff=d_ff)
        super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(),
                         nn.Dropout(dropout), nn.Linear(d_ff, d_model))
        start_as_xavier(self)

# %%
sorter = FeedForward(2, 3)
with torch.no_grad():
    sorter[0].weight.copy_(W_1.T)  # PyTorch stores (out, in)
    sorter[3].weight.copy_(W_2.T)
assert torch.equal(sorter(pairs), by_hand)
print(sorter)

# %% [markdown]
# *Each position for itself* can be tested. Change one of five positions and see who moves; then feed the positions one by one.

# %%
torch.manual_seed(0)
feed_forward, looking = FeedForward(8, 32), MultiHeadAttention(8, 2)
x = torch.randn(1, 5, 8)  # (B, T, d_model)
other = x.clone()
other[:, 2] = torch.randn(8)
for name, layer in (("feed-forward", feed_forward),
                    ("attention", lambda x: looking(x)[0])):
    change = (layer(other) - layer(x)).abs().amax(dim=-1)[0]  # (T,)
    moved = (change > 1e-4).nonzero().flatten().tolist()
    print(f"position 2 changes; {name} moves {moved}")

one_by_one = [feed_forward(x[:, t]) for t in range(5)]
assert torch.allclose(feed_forward(x), torch.stack(one_by_one, 1), atol=1e-6)

# %% [markdown]
# ### Where the parameters are
#
# At the base model's sizes, $d_{model} = 512$ and $d_{ff} = 2048$, which part of a layer holds most of its parameters? (Attention without biases;
# chapter 09 compares counts with the paper.)

# %%
parts = {"attention": MultiHeadAttention(512, 8, bias=False),
         "feed-forward": FeedForward(512, 2048),
         "two layer norms": nn.ModuleList([nn.LayerNorm(512)] * 2)}
counts = {name: sum(len(weights.flatten()) for weights in part.parameters())
          for name, part in parts.items()}
counts["two layer norms"] *= 2  # the list holds one norm twice
total = sum(counts.values())
for name, count in counts.items():
    print(f"{name:16s}{count:9,}   {count / total:6.1%}")
assert total == 3_150_336

# %% [markdown]
# Two thirds are in the part that looks at one position.
#
# ### What attention alone cannot do
#
# In [chapter 03](https://OWNER.github.io/attention-cell-by-cell/book/03_multi_head_attention.html) one head handed on a blend, 0.7 of one digit and
# 0.3 of another, and a readout with a hidden layer told the two apart. Let each position hold such a blend, and compare what sits
# between it and a linear readout: attention, one layer or three, or one feed-forward network. Each layer's output is added to its input. Sequences hold one position or six.
# **Guess first:** how many layers of attention replace the hidden layer?

# %%
def blends(length, batch=64):
    while True:
        digits = torch.rand(batch, length, 10).argsort(dim=-1)[..., :2]
        strong, weak = F.one_hot(digits, 10).unbind(dim=2)  # (B, T, 10) each
        yield 0.7 * strong + 0.3 * weak, digits

class Reader(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers, self.readout = layers, nn.Linear(10, 20)

    def forward(self, x):
        for layer in self.layers:
            found = layer(x)
            x = x + (found[0] if isinstance(found, tuple) else found)
        return self.readout(x).unflatten(-1, (2, 10))  # (B, T, 2, 10)

def readers():
    yield "attention, 1 layer", [MultiHeadAttention(10, 2)]
    yield "attention, 3 layers", [MultiHeadAttention(10, 2) for _ in "123"]
    yield "feed-forward", [FeedForward(10, 40)]

# %%
weak_right = {}
for length in (1, 6):
    torch.manual_seed(0)
    for name, layers in readers():
        reader = Reader(nn.ModuleList(layers))
        fit(reader, blends(length), 250, 0.02)
        x, digits = next(blends(length, batch=1000))
        right = reader(x).argmax(dim=-1) == digits  # (B, T, 2)
        strong, weak = right.float().mean(dim=(0, 1)).tolist()
        weak_right[name, length] = weak
        print(f"positions {length}   {name:20s} strong digit right "
              f"{strong:.1f}, weak {weak:.1f}")
    assert weak > 0.85 > 0.65 > weak_right["attention, 3 layers", length]
assert weak_right["attention, 3 layers", 1] < 0.2

# %% [markdown]
# With one position, none do. Softmax over one key is 1, so each layer is a linear map plus a bias, and so is a stack of them, which sends
# the middle of two inputs to the middle of two outputs:

# %%
x, y = torch.randn(2, 1, 1, 10)
for name, layers in readers():
    stack = Reader(nn.ModuleList(layers))
    middle = (stack(x) + stack(y)) / 2
    off = (stack((x + y) / 2) - middle).abs().max().item()
    print(f"{name:20s} keeps the middle: {off < 1e-5}")
    assert (off < 1e-5) == (name != "feed-forward")

# %% [markdown]
# With six positions attention does better, because its weights depend on what the positions hold, and softmax is not linear. Three layers of it, with half as many
# parameters again as the feed-forward network, still fall short of that network. So "without it everything is linear" is true of one position only.

# %% [markdown]
# ## Layer norm
#
# *Layer norm* (Ba et al., 2016) takes one position's numbers, subtracts their mean and divides by their standard deviation. On paper, for
# (1, 7, 7, 9): the mean is 6, the deviations are −5, 1, 1, 3, their squares have the mean (25 + 1 + 1 + 9) / 4 = 9, whose root is 3.
# **Guess first:** what comes out for ten times that row, plus 100?

# %%
def normalise(row):
    mean = sum(row) / len(row)
    deviations = [value - mean for value in row]
    variance = sum(d * d for d in deviations) / len(row)
    return [d / variance**0.5 for d in deviations]

for row in ([1, 7, 7, 9], [110, 170, 170, 190]):
    print(row, "->", [round(value, 2) for value in normalise(row)])

# %% [markdown]
# The same. Layer norm forgets where a row lay and how large it was, and keeps its shape. Two learnt vectors, gain $g$ and bias $b$, let
# the network choose new ones, and a small $\epsilon$ under the root keeps a constant row from dividing 0 by 0:
#
# $$\text{LayerNorm}(x) = g \odot \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + b$$

# %%
def layer_norm(x, gain, bias, eps=1e-5):
    deviation = x - x.mean(dim=-1, keepdim=True)  # (..., d)
    variance = deviation.square().mean(dim=-1, keepdim=True)  # (..., 1)
    return gain * deviation / (variance + eps).sqrt() + bias

row = torch.tensor([[1.0, 7.0, 7.0, 9.0]])
by_hand = torch.tensor([normalise(row[0].tolist())])
assert torch.allclose(layer_norm(row, 1, 0), by_hand, atol=1e-5)
print(layer_norm(row, 1, 0).numpy().round(2))

# %% [markdown]
# Is it PyTorch's? Ordinary rows prove little; faults in $\epsilon$ show where the variance is about as small. So we test tiny rows, constant
# rows and rows of a single number, too.

# %%
def compare(candidate):
    torch.manual_seed(0)
    worst = {}
    for d in (1, 2, 4, 512):
        theirs = nn.LayerNorm(d)
        nn.init.normal_(theirs.weight)
        nn.init.normal_(theirs.bias)
        for size in (1.0, 3e-3, 1e-5, 0.0):  # typical size of a row's numbers
            x = size * torch.randn(20, d) + 0.5
            ours = candidate(x, theirs.weight, theirs.bias)
            gap = (ours - theirs(x)).abs().nan_to_num(torch.inf).max().item()
            worst[d, size] = gap
    return worst

gaps = compare(layer_norm)
print("cases", len(gaps), "  largest difference below 0.001:",
      max(gaps.values()) < 1e-3)
assert max(gaps.values()) < 1e-3

# %% [markdown]
# ### A mistake that has been copied
#
# Several public implementations divide by `x.std() + eps`. It looks the same and differs twice: PyTorch's `std` divides the squares by
# $n - 1$, not $n$, and $\epsilon$ stands outside the root.

# %%
def mistaken(x, gain, bias, eps=1e-6):
    mean = x.mean(dim=-1, keepdim=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns for d = 1
        std = x.std(dim=-1, keepdim=True)
    return gain * (x - mean) / (std + eps) + bias

torch.manual_seed(0)
for d in (1, 2, 4, 16, 512):
    x = torch.randn(1, d)
    share = mistaken(x, 1, 0).norm() / layer_norm(x, 1, 0).norm()
    print(f"d {d:3d}   mistaken / right {share:.3f}   "
          f"√((d-1)/d) {((d - 1) / d) ** 0.5:.3f}")
gaps = compare(mistaken)
print("caught in", sum(gap > 1e-3 for gap in gaps.values()), "of", len(gaps))
assert all(gap > 1e-3 for (d, size), gap in gaps.items() if size or d == 1)

# %% [markdown]
# At $d = 1$ it gives NaN (0 divided by 0), at 4 it is 0.866 of the right size, at 512 nobody would see it, and the gain could learn the difference. (The three cases not caught are constant rows of several numbers: 0 either way.) In one
# thread ([BERT-pytorch, issue 30](https://github.com/codertimo/BERT-pytorch/issues/30)) somebody printed 1.5 against 1.732 for the row
# (1, 0, 0, 0), exactly 0.866, and the reply was that both do the same thing. (More in
# [annotated-transformer, issue 122](https://github.com/harvardnlp/annotated-transformer/issues/122).) A test of shapes, or of mean 0, passes. Comparing with a
# reference on small rows does not.

# %% [markdown]
# ## Why not batch norm?
#
# *Batch norm* (Ioffe and Szegedy, 2015) takes the mean and variance of each feature over all positions of a batch. The paper uses layer norm and gives no
# reason. Texts often say "because lengths vary". Let us measure: how much does one sentence's output change when only its *company* changes?
#
# We draw sentences from 999 words, frequent and rare as in text, with a random vector for each and zeros for padding. Three norms: over a
# position (layer norm), over all positions of the batch, over its real positions only.

# %%
torch.manual_seed(0)
vectors = torch.randn(1000, 32)
vectors[0] = 0  # padding
frequency = 1 / torch.arange(1, 1000)  # the n-th word: 1/n as often

def batch_norm(x):  # x (N, 32): each feature over all N positions
    return F.batch_norm(x, None, None, training=True)

def norms(tokens):  # (B, T) -> name: (B, T, 32)
    x, real = vectors[tokens], tokens != 0
    over_real = torch.zeros_like(x)
    over_real[real] = batch_norm(x[real])
    return {"layer norm": F.layer_norm(x, (32,)),
            "batch norm, all": batch_norm(x.flatten(0, 1)).view_as(x),
            "batch norm, real": over_real}

def batch_of(*sentences, padding=0):
    padded = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    return F.pad(padded, (0, padding))

def sentence(length):
    return 1 + torch.multinomial(frequency, length, replacement=True)

# %% [markdown]
# **Guess first:** which of the three change when we append padding? Which when other sentences share the batch? And does a larger batch help?

# %%
def changes(batch, reference):  # of the first sentence, in percent
    T = len(first)
    for (name, after), before in zip(norms(batch).items(),
                                     norms(reference).values()):
        gap = (after[0, :T] - before[0, :T]).norm() / before[0, :T].norm()
        yield name, 100 * gap.item()

torch.manual_seed(1)
first, *others = [sentence(length) for length in (12, 5, 9, 7)]
by_padding, by_company = {}, {}
for extra in (0, 4, 8, 16, 32):
    batch = batch_of(first, *others, padding=extra)
    for name, change in changes(batch, batch_of(first, *others)):
        by_padding.setdefault(name, []).append(change)

for size in (1, 3, 7, 15, 63):
    draws = [batch_of(first, *map(sentence, torch.randint(3, 20, (size,))))
             for _ in range(21)]
    found = [dict(changes(b, draws[0])) for b in draws[1:]]
    for name in by_padding:
        mean = sum(change[name] for change in found) / len(found)
        by_company.setdefault(name, []).append(mean)

assert max(by_padding["layer norm"] + by_company["layer norm"]) < 0.01
assert max(by_padding["batch norm, real"]) < 0.01
assert by_padding["batch norm, all"][-1] > 50
for kind in ("batch norm, all", "batch norm, real"):
    assert by_company[kind][0] > 20 > 2.5 * by_company[kind][-1]

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(7, 3.1), sharey=True)
for (color, style), name in zip(LINES, by_padding):
    axes[0].plot((0, 4, 8, 16, 32), by_padding[name], color=color,
                 linestyle=style, marker="o", markersize=4, label=name)
    axes[1].plot((1, 3, 7, 15, 63), by_company[name], color=color,
                 linestyle=style, marker="o", markersize=4)
axes[0].set(xlabel="padding appended (positions)", ylim=(-4, 115),
            ylabel="a real token's output\nchanges by (%)",
            title="Padding moves one of three")
axes[0].legend(fontsize=10)
axes[1].set(xscale="log", xticks=(1, 3, 7, 15, 63), xlabel="other sentences",
            xticklabels=(1, 3, 7, 15, 63), title="Company moves two")
axes[1].minorticks_off()
show("Two panels: by how many percent a sentence's output changes. Left, as "
     "padding is appended: batch norm over all positions changes more and "
     "more; layer norm and batch norm over real positions stay at 0. Right, "
     "as other sentences are exchanged: both batch norms change, less in "
     "large batches; layer norm stays at 0.")

# %% [markdown]
# Changing lengths are not the point: a mask removes padding from the means, and batch norm over real positions does not notice it. *Company* is the point. With
# one other sentence, exchanging it moves a word's output by about a quarter; with 63, by less than a tenth, but never by 0. Layer norm needs no mask, no
# company and nothing remembered.
#
# In use, batch norm replaces the batch's mean and variance by averages kept from training, so company no longer matters; then it computes another function
# than the one trained. How far apart are the two, at four sentences a batch?

# %%
torch.manual_seed(2)
norm, gaps = nn.BatchNorm1d(32, affine=False), []
for step in range(400):
    tokens = batch_of(*map(sentence, torch.randint(3, 20, (4,))))
    real = vectors[tokens[tokens != 0]]  # (N, 32)
    trained = norm.train()(real)
    if step >= 300:  # by now the averages have settled
        used = norm.eval()(real)
        gaps.append(((trained - used).norm() / used.norm()).item())
print(f"training and use differ by {100 * sum(gaps) / len(gaps):.0f} %")
assert 10 < 100 * sum(gaps) / len(gaps) < 60

# %% [markdown]
# PowerNorm (Shen et al., 2020) reports such fluctuation of batch statistics in Transformers on text. Our sentences were drawn at random; on real text we did not measure it.

# %% [markdown]
# ## A way around
#
# Now depth. Three layers in a row, each with the slope 0.5: a gradient that passes back through them is multiplied three times, 0.5 · 0.5 · 0.5 =
# 0.125. Give each layer a way around it, $x + f(x)$ instead of $f(x)$, called a *residual connection* (He et al., 2015), and each slope is
# 1 + 0.5: 1.5³ = 3.375. **Guess first:** what are the two after 48 layers?

# %%
for depth in (3, 48):
    slopes = []
    for around in (0.0, 1.0):
        start = x = torch.tensor(1.0, requires_grad=True)
        for _ in range(depth):
            x = around * x + 0.5 * x
        slopes.append(torch.autograd.grad(x, start)[0].item())
    print(f"{depth:2d} layers   slope without {slopes[0]:.3g}, "
          f"with a way around {slopes[1]:.4g}")
    assert slopes[0] == 0.5**depth

# %% [markdown]
# From too little to too much. A way around keeps the gradient from vanishing and does not keep it in bounds. Something must hold the size, and
# we have it already. Four stacks of `FeedForward`, with and without each of the two:

# %%
def normed(x):
    return F.layer_norm(x, x.shape[-1:])

JOINTS = {"neither": lambda x, f: f(x),
          "way around": lambda x, f: x + f(x),
          "norm": lambda x, f: normed(f(x)),
          "both": lambda x, f: normed(x + f(x))}

def sizes(joint, depth):
    torch.manual_seed(0)
    x = torch.randn(32, 64, requires_grad=True)  # 32 positions
    states = [x]
    for _ in range(depth):
        states.append(JOINTS[joint](states[-1], FeedForward(64, 256)))
    loss = (states[-1] * torch.randn(32, 64)).sum()
    gradients = torch.autograd.grad(loss, states)
    return [torch.stack([s.square().mean().sqrt() for s in tensors]).tolist()
            for tensors in (states, gradients)]

# %% [markdown]
# The picture shows the size (root mean square) of what stands after each layer, and of the gradient that arrives there from the top. **Which stacks would you
# train at depth 48?**

# %% tags=["hide-input"]
def draw(depth, joint):
    signal, gradient = sizes(joint, depth)
    figure, ax = plt.subplots(figsize=(6.4, 3))
    ax.plot(signal, color=LINES[0][0], marker="o", markersize=4,
            label="signal, going up")
    ax.plot(gradient, color=LINES[1][0], linestyle="--", marker="s",
            markersize=4, label="gradient, coming down")
    ax.set(yscale="log", ylim=(1e-14, 1e5), xlim=(-depth / 50, 1.02 * depth),
           xlabel="layers below", ylabel="size (log scale)",
           title=f"{joint}: top signal {signal[-1]:.0e}, "
                 f"bottom gradient {gradient[0]:.0e}")
    ax.title.set_fontsize(11)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(loc="lower center")
    return figure, (f"{joint}, layers: {depth}. At the top the signal, 1 "
                    f"at the start, is {signal[-1]:.0e}; the gradient, 1 at "
                    f"the top, is {gradient[0]:.0e} at the bottom.")

explore(draw, depth=[1, 3, 6, 12, 24, 48], joint=list(JOINTS))

# %%
for joint in JOINTS:
    signal, gradient = sizes(joint, 48)
    print(f"{joint:11s} after 48 layers: signal {signal[-1]:.0e}, "
          f"gradient at the bottom {gradient[0]:.0e}")
    held = 0.2 < signal[-1] < 5 and 0.2 < gradient[0] < 5
    assert held == (joint in ("norm", "both"))

# %% [markdown]
# With neither, nothing is left after 48 layers, up or down; with a way around alone, both grow nearly a thousand times. Both stacks with a norm hold their size. So
# the common answer, "residuals are there because gradients vanish", is half of it: here the norm alone prevents that, too. What does the norm alone not do?
# For that we need attention in the stack, and the final form.

# %% [markdown]
# ## Two places for the norm
#
# The paper puts the norm last: $\text{LayerNorm}(x + \text{Sublayer}(x))$, now called *post-norm* (§3.1). The authors' later code puts it first,
# *pre-norm*: $x + \text{Sublayer}(\text{LayerNorm}(x))$. There the way around is never normalised, and one more norm closes the stack. Texts have shown the one and
# run the other; ours is an option. (Dropout comes below.)

# %% tags=["export"]
class Residual(nn.Module):
    """A sublayer, a way around it, layer norm and dropout (§3.1, §5.4).

    norm_first False, the paper's: norm(x + dropout(sublayer(x)));
    True: x + dropout(sublayer(norm(x))).
    """

    def __init__(self, d_model: int, *, dropout: float = 0.0,
                 norm_first: bool = False):
        super().__init__()
        check_sizes(d_model=d_model)
        self.norm, self.dropout = nn.LayerNorm(d_model), nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor,
                sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x and what comes out: (B, T, d_model)"""
        if self.norm_first:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))

# %%
torch.manual_seed(0)
x, feed_forward = 5 * torch.randn(2, 4, 8), FeedForward(8, 16)
post, pre = Residual(8), Residual(8, norm_first=True)
assert torch.allclose(post(x, feed_forward), normed(x + feed_forward(x)))
assert torch.allclose(pre(x, feed_forward), x + feed_forward(normed(x)))
for name, residual in (("post-norm", post), ("pre-norm", pre)):
    y = residual(x, feed_forward)
    print(f"{name:9s} size in {x.std():.1f}, size out {y.std():.1f}")

# %% [markdown]
# A block of the stack: attention, then the feed-forward network, each in its `Residual`. (Chapter 08 gives it its final form.) `Bare` has norms and no way
# around.

# %%
class Bare(nn.Module):
    def forward(self, x, sublayer):
        return normed(sublayer(x))

class Block(nn.Module):
    def __init__(self, kind, d_model=32):
        super().__init__()
        self.looking = MultiHeadAttention(d_model, n_heads=4)
        self.feed_forward = FeedForward(d_model, 2 * d_model)
        self.first, self.second = (
            Bare() if kind == "no way around" else
            Residual(d_model, norm_first=kind == "pre-norm") for _ in "12")

    def forward(self, x):
        x = self.first(x, lambda x: self.looking(x)[0])
        return self.second(x, self.feed_forward)

# %% [markdown]
# We send eight random positions up an untrained stack and compare them with each other after each block, by the cosine of the angle between two: 1 means that
# two positions point the same way. **How many blocks until the positions cannot be told apart?** Try each kind.

# %%
KINDS = "no way around", "post-norm", "pre-norm"

def cosines(x):  # (B, T, d_model) -> (B, T, T)
    directions = F.normalize(x, dim=-1)
    return directions @ directions.mT

def likeness(x):  # the mean over pairs of different positions
    T = x.shape[1]
    return cosines(x)[:, ~torch.eye(T, dtype=torch.bool)].mean().item()

def climb(kind, blocks=24):
    torch.manual_seed(0)
    states = [torch.randn(64, 8, 32)]  # 64 sequences of 8 positions
    with torch.no_grad():
        for _ in range(blocks):
            states.append(Block(kind)(states[-1]))
    return states

states = {kind: climb(kind) for kind in KINDS}

# %% tags=["hide-input"]
def draw_alike(blocks, kind):
    x = states[kind][blocks]
    mean = likeness(x)
    figure, ax = plt.subplots(figsize=(4.6, 3.8))
    heatmap(cosines(x)[0], range(8), range(8), ax=ax, annotate=False,
            signed=True)
    ax.set(xlabel="position", ylabel="position",
           title=f"{kind}, blocks: {blocks}\nmean cosine {mean:.2f}")
    return figure, (f"Cosines between 8 positions, {kind}, blocks: {blocks}. "
                    f"The mean over pairs is {mean:.2f}.")

explore(draw_alike, blocks=[0, 1, 2, 3, 6, 12, 24], kind=list(KINDS))

# %% [markdown]
# With norms but no way around, three blocks make all positions one: each attention replaces a position by a mean over all, and means of means are alike (Dong et al., 2021,
# prove such a collapse for attention alone). So the norm holds the size, and the way around holds *who is who*. Post-norm holds it for longer but
# divides the old part away again and again; at 12 blocks its positions are one, too. Pre-norm lets each block add a smaller share; 24 blocks blur the positions,
# and do not merge them.
#
# (All this is before training, on random input.)

# %%
means = {kind: {blocks: likeness(states[kind][blocks])
                for blocks in (3, 6, 12, 24)} for kind in KINDS}
for kind, mean in means.items():
    print(f"{kind:13s}", {n: f"{cosine:.1f}" for n, cosine in mean.items()})
assert means["no way around"][3] > 0.98 and means["post-norm"][12] > 0.95
assert means["post-norm"][3] < 0.7 and means["pre-norm"][24] < 0.95

# %% [markdown]
# ### The gradient before the first step
#
# Now a task: sort six digits. The stack gets digits plus sines of their positions, and position $t$ must name the digit that comes $t$-th.

# %%
def sequences(batch=32, length=6):
    while True:
        digits = torch.randint(10, (batch, length))
        yield digits, digits.sort(dim=-1).values

def stack(kind, depth=6):
    last = nn.LayerNorm(32) if kind == "pre-norm" else nn.Identity()
    return nn.Sequential(nn.Embedding(10, 32), PositionalEncoding(32),
                         *(Block(kind) for _ in range(depth)), last,
                         nn.Linear(32, 10))

def loss_of(model, digits, target):
    return F.cross_entropy(model(digits).flatten(0, 1), target.flatten())

torch.manual_seed(0)
digits, target = next(sequences())
print(digits[0].tolist(), "->", target[0].tolist())

# %% [markdown]
# How large is the gradient of the loss in each block, before any training? We take the last matrix of each feed-forward network, and the mean of eight
# random starts. **Move the depth: in which kind does the top block's gradient shrink when blocks are added, and in which does it not?**

# %%
def gradients(kind, depth):
    sizes = torch.zeros(depth)
    for seed in range(8):
        torch.manual_seed(seed)
        model = stack(kind, depth)
        loss_of(model, *next(sequences())).backward()
        blocks = [part for part in model if isinstance(part, Block)]
        sizes += torch.stack([block.feed_forward[3].weight.grad.norm()
                              for block in blocks]) / 8
    return sizes.tolist()

DEPTHS = 2, 6, 12, 24, 48
measured = {(depth, kind): gradients(kind, depth)
            for depth in DEPTHS for kind in KINDS[1:]}

# %% tags=["hide-input"]
def draw_gradients(depth, kind):
    sizes = measured[depth, kind]
    figure, ax = plt.subplots(figsize=(6.4, 2.8))
    color = LINES[1 if kind == "post-norm" else 0][0]
    ax.plot(range(1, depth + 1), sizes, color=color, linestyle="-",
            marker="o", markersize=4)
    ax.set(yscale="log", ylim=(0.02, 1), xlim=(1 - depth / 50, depth * 1.02),
           xlabel="block (1: bottom)", ylabel="gradient (norm, log scale)",
           title=f"{kind}, {depth} blocks: "
                 f"bottom {sizes[0]:.2f}, top {sizes[-1]:.2f}")
    ax.xaxis.get_major_locator().set_params(integer=True)
    return figure, (f"{kind}, {depth} blocks: size of the gradient, from "
                    f"{sizes[0]:.2f} in the bottom block to {sizes[-1]:.2f} "
                    f"in the top one.")

explore(draw_gradients, depth=list(DEPTHS), kind=list(KINDS[1:]))

# %%
print(f"gradient in the top block at {DEPTHS} blocks")
tops = {kind: [measured[depth, kind][-1] for depth in DEPTHS]
        for kind in KINDS[1:]}
for kind, top in tops.items():
    print(f"{kind:9s}", [f"{size:.2f}" for size in top])
assert min(tops["post-norm"]) > 0.2 and max(tops["post-norm"]) < 0.6
assert tops["pre-norm"] == sorted(tops["pre-norm"], reverse=True)
assert tops["pre-norm"][0] > 3 * tops["pre-norm"][-1]

# %% [markdown]
# In post-norm the top block's gradient stays between 0.2 and 0.6 however many blocks lie below; in pre-norm it shrinks with every step of the slider. Xiong et al. (2020) derive this pattern and
# conclude: large steps right at the start are dangerous for post-norm, so it needs a *warm-up*, a learning rate that starts near 0 and grows, and pre-norm can do without.
#
# One caution: Adam divides each gradient by its own typical size, so a large gradient alone makes no large step. We had better train.
#
# ## With and without warm-up
#
# Six blocks, as in the paper, 150 updates of Adam. Warm-up here is a straight line from 0 to the full rate over the first 50 updates. (Chapter 10 builds the paper's schedule.)

# %%
def learn(model, rate, warmup, updates=150):
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for update, batch in zip(range(1, updates + 1), sequences()):
        optimizer.param_groups[0]["lr"] = rate * min(1, update / warmup)
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        optimizer.step()

def judge(model):  # share of digits right; how alike the positions end up
    digits, target = next(sequences(batch=1000))
    with torch.no_grad():
        right = model(digits).argmax(dim=-1) == target
        return right.float().mean().item(), likeness(model[:-2](digits))

torch.manual_seed(0)
_, target = next(sequences(batch=1000))
usual = (target == target.mode(dim=0).values).float().mean()
print(f"naming each place's most frequent digit: {usual:.1f} right")

# %% [markdown]
# Two kinds, with and without warm-up, three rates, three seeds each. **Guess first:** is there a rate at which post-norm needs the warm-up and pre-norm
# does not? One at which neither does? One at which pre-norm gains from it, too?

# %%
RATES, SEEDS = (0.003, 0.01, 0.03), (0, 1, 2)
shares, likenesses = {}, {}
for kind, warmup, rate in [(k, w, r) for k in KINDS[1:] for w in (1, 50)
                           for r in RATES]:
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = stack(kind)
        learn(model, rate, warmup)
        right, alike = judge(model)
        shares.setdefault((kind, warmup, rate), []).append(right)
        likenesses.setdefault((kind, warmup, rate), []).append(alike)

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(7, 3.2), sharey=True)
for ax, kind, title in zip(axes, KINDS[1:], (
        "Post-norm: saved at 0.01", "Pre-norm: helped at 0.03")):
    for warmup, marker, shift, (color, _), name in (
            (1, "o", -0.1, LINES[1], "without"),
            (50, "s", 0.1, LINES[0], "with warm-up")):
        for place, rate in enumerate(RATES):
            ax.plot([place + shift] * len(SEEDS),
                    [100 * s for s in shares[kind, warmup, rate]], marker,
                    color=color, linestyle="none", alpha=0.7, markersize=8,
                    label=name if place == 0 else None)
    ax.axhline(100 * usual, color="#777777", linewidth=1, linestyle=":")
    ax.set(xticks=range(3), xticklabels=RATES, xlim=(-0.5, 2.5),
           ylim=(0, 104), xlabel="learning rate", title=title)
axes[0].set_ylabel("digits right after\n150 updates (%)")
axes[0].text(-0.45, 100 * usual + 2, "knows only the place", fontsize=9,
             color="#555555")
axes[1].legend(loc="lower left")
show("Share of digits right, three seeds each, against the learning rate. "
     "Post-norm: high at 0.003 with and without warm-up; at 0.01 high with "
     "it and near guessing without; near guessing at 0.03. Pre-norm: high at "
     "0.003 and 0.01 with and without; at 0.03 lower without than with it.")

# %% tags=["nbval-ignore-output"]
def told(kind, rate, name, results):
    without, with_it = ([f"{value:.2f}" for value in results[kind, w, rate]]
                        for w in (1, 50))
    print(f"{kind:9s} rate {rate:<5}  {name} without", *without,
          "  with", *with_it)

for kind in KINDS[1:]:
    for rate in RATES:
        told(kind, rate, "right:", shares)

def mean(*run):
    return sum(shares[run]) / len(SEEDS)

for kind in KINDS[1:]:
    assert min(shares[kind, 1, 0.003] + shares[kind, 50, 0.003]) > 0.75
assert max(shares["post-norm", 1, 0.01]) < 0.4
assert min(shares["post-norm", 50, 0.01]) > 0.5
assert min(shares["pre-norm", 1, 0.01]) > 0.75
assert mean("pre-norm", 50, 0.03) - mean("pre-norm", 1, 0.03) > 0.05
assert max(mean("post-norm", warmup, 0.03) for warmup in (1, 50)) < 0.5

# %% [markdown]
# All three exist. At 0.003 a warm-up makes little difference to either kind. At 0.01 post-norm fails without it in
# all three seeds, below what the place alone would give, and with it learns to sort; pre-norm does not need it. At 0.03 pre-norm gains from it, and post-norm
# fails either way.
#
# What did the failed stacks lose? **Guess first**, then look at how alike their positions are after the last block:

# %% tags=["nbval-ignore-output"]
for kind in KINDS[1:]:
    torch.manual_seed(0)
    print(f"{kind:9s} untrained     cosine: {judge(stack(kind))[1]:.2f}")
    told(kind, 0.01, "cosine:", likenesses)
assert min(likenesses["post-norm", 1, 0.01]) > 0.95
assert max(likenesses["post-norm", 50, 0.01]) < 0.7
assert max(likenesses["pre-norm", 1, 0.01]) < 0.7

# %% [markdown]
# Who is who. The stacks that learn pull their positions apart. In the three that fail all six positions have become one vector, and one vector names one digit. It is the
# picture of 24 untrained post-norm blocks again, now after training. That this is *why* they fail, rather than a sign of it, we did not show.
#
# So "pre-norm needs no warm-up" is true at some rates. What pre-norm bought here is a wider range of them, for six small blocks, one
# task and 150 updates. tensor2tensor, the authors' library, later made pre-norm its default, with a *longer* warm-up (8000 updates in place of 4000);
# Takase et al. (2022) found post-norm as good or better in translators of six layers, and unstable in deeper ones.

# %% [markdown]
# ## Dropout
#
# *Dropout* (Srivastava et al., 2014) sets each number to 0 with probability $p$ in training and divides the others by $1 - p$. **Guess first:** what does
# that do to the mean?

# %%
torch.manual_seed(0)
def drop(x, p):
    kept = torch.rand_like(x) >= p
    return x * kept / (1 - p)

print([f"{value:.2f}" for value in drop(torch.ones(8), 0.25).tolist()])
many = drop(torch.ones(20_000, 8), 0.25)
print(f"mean over many draws {many.mean():.2f}")
layer = nn.Dropout(0.25)
values = layer(torch.ones(1000)).unique()
assert torch.allclose(values, torch.tensor([0, 4 / 3]))  # as ours
assert torch.equal(layer.eval()(many), many)
print("in evaluation nothing changes")

# %% [markdown]
# Three of four survive and are made a third larger: the mean stays. So in use, where nothing is dropped, the next layer meets numbers of the size it was trained on.
#
# `Residual` drops from the *sublayer's output, before the sum* (§5.4 of the paper, $p = 0.1$ in the base model). The way around is never dropped. We check with two sublayers
# whose output we know:

# %%
torch.manual_seed(0)
x = torch.randn(1, 4, 8)
residual = Residual(8, dropout=0.5, norm_first=True)
silent = residual(x, torch.zeros_like)
added = residual(x, torch.ones_like) - x
print("a sublayer of zeros changes x:", not torch.equal(silent, x))
values = sorted({round(value, 1) for value in added.flatten().tolist()})
print("a sublayer of ones adds one of", [abs(value) for value in values])
used = residual.eval()(x, torch.ones_like) - x
assert torch.equal(silent, x) and torch.allclose(used, torch.ones(1))

# %% [markdown]
# Where does the paper put dropout, and where does it not?
#
# | place | published setting | in this book |
# |---|---|---|
# | each sublayer's output, before the sum | yes (§5.4) | `Residual(dropout=...)` |
# | embedding plus position | yes (§5.4) | `PositionalEncoding(dropout=...)` |
# | attention weights | not in the paper; 0.1 in a later default of the authors' code | `MultiHeadAttention(dropout=...)`, 0 by default |
# | hidden numbers of the feed-forward network | the same | `FeedForward(dropout=...)`, 0 by default |
#
# One layer as the paper trains it:

# %%
torch.manual_seed(0)
looking, feed_forward = MultiHeadAttention(32, 4), FeedForward(32, 64)
around = nn.ModuleList(Residual(32, dropout=0.1) for _ in range(2))

def layer(x):
    x = around[0](x, lambda x: looking(x)[0])
    return around[1](x, feed_forward)

x = torch.randn(1, 5, 32)
print("in training twice the same:", torch.equal(layer(x), layer(x)))
around.eval()
print("in evaluation twice the same:", torch.equal(layer(x), layer(x)))
assert torch.equal(layer(x), layer(x))

# %% [markdown]
# ## What you built
#
# - `FeedForward`: two linear layers with a maximum between, each position for itself, two thirds of a layer's parameters.
# - Layer norm by hand, equal to PyTorch's down to constant rows, and a test that catches the copied mistake.
# - `Residual`, post-norm or pre-norm, and what each held together in a stack: the sizes, the gradients, and who is who.
#
# ## Check yourself
#
# **1.** Chapter 03's `MultiHeadAttention(512, 8)` has biases. Which share of the layer is the feed-forward network then?
#
# <details><summary>Answer</summary>
#
# Attention has 1,050,624 parameters in place of 1,048,576, so 2,099,712 of 3,152,384: still 66.6 %.
#
# </details>
#
# **2.** The row (0, 0, 0, 4) comes out of a public layer norm with 1.5 in the last place. What went wrong?
#
# <details><summary>Answer</summary>
#
# The mean is 1, the deviations −1, −1, −1, 3, their mean square 12 / 4 = 3, so 3 / √3 = 1.73. With 12 / 3 = 4 it is 3 / 2 = 1.5: divided by $n - 1$.
#
# </details>
#
# **3.** Batch norm over real positions only ignores padding. Why would a translator that writes one sentence at a time still have to change something?
#
# <details><summary>Answer</summary>
#
# It has no company: the statistics would come from one sentence, or at the first word from one position, whose variance is 0. It needs averages kept from training, and with them
# computes another function than the one that was trained.
#
# </details>
#
# **4.** A pre-norm stack of `Residual`s ends without a norm. What grows?
#
# <details><summary>Answer</summary>
#
# The sum on the way around: each sublayer adds to it, and nothing divides it. The last cell measures it.
#
# </details>
#
# **5.** In training mode, with dropout 0.1, how much of `x` itself is dropped on the way around a `Residual`?
#
# <details><summary>Answer</summary>
#
# Nothing. Only what the sublayer adds is.
#
# </details>
#
# The first, second and fourth answer, checked:

# %%
count = sum(p.numel() for p in MultiHeadAttention(512, 8).parameters())
share = 2_099_712 / (count + 2_099_712 + 2_048)
print(f"feed-forward {share:.1%}")
row = torch.tensor([0.0, 0.0, 0.0, 4.0])
print(f"right {layer_norm(row, 1, 0)[-1]:.2f}, "
      f"mistaken {mistaken(row, 1, 0)[-1]:.2f}")
for kind in KINDS[1:]:
    grown = [states[kind][blocks].std().item() for blocks in (0, 6, 24)]
    print(f"{kind:9s} size after 0, 6, 24 blocks:",
          [f"{size:.1f}" for size in grown])

# %% [markdown]
# ## Where to read on
#
# - Vaswani et al., *Attention Is All You Need*, NeurIPS 2017, [arXiv 1706.03762](https://arxiv.org/abs/1706.03762): §3.1 (residual, norm), §3.3
#   (feed-forward), §5.4 (dropout).
# - Ba, Kiros, Hinton, *Layer Normalization*, [arXiv 1607.06450](https://arxiv.org/abs/1607.06450).
# - He et al., *Deep Residual Learning for Image Recognition*, CVPR 2016, [arXiv 1512.03385](https://arxiv.org/abs/1512.03385).
# - Xiong et al., *On Layer Normalization in the Transformer Architecture*, ICML 2020, [arXiv 2002.04745](https://arxiv.org/abs/2002.04745): the gradients
#   of both orders. Takase et al., *On Layer Normalizations and Residual Connections in Transformers*, [arXiv 2206.00330](https://arxiv.org/abs/2206.00330): when post-norm is better.
# - Dong, Cordonnier, Loukas, *Attention Is Not All You Need*, ICML 2021, [arXiv 2103.03404](https://arxiv.org/abs/2103.03404): positions that become alike.
# - Shen et al., *PowerNorm*, ICML 2020, [arXiv 2003.07845](https://arxiv.org/abs/2003.07845): batch statistics in Transformers.
# - Next, chapter 08: two stacks of such layers, and how they talk.
