# %% [markdown]
# # Assignment: layers
#
# In six steps you write what stands around attention, the subject of chapters 07 and 08 of *Attention, Cell by Cell*: layer norm, residual connections, the feed-forward layer, an encoder layer and a decoder layer. About 95 minutes, 24 points. Everything runs on a CPU in seconds. `MultiHeadAttention` (chapter 03) and the masks are
# given, in the folded cell below.
#
# **How it works.** Replace `raise NotImplementedError` by your code. Run the test under it: it says nothing if all is well, and otherwise what is likely wrong. Marks are given for other
# inputs than those of the tests, so code that only fits these gets none. Other names inside are allowed, and so is any way that gives the right numbers. Do not rename functions, and leave test cells as they are.
#
# Shapes: `B` sentences, `T` positions of the target, `S` of the source, `d_model` numbers in a vector, `d_ff` in the feed-forward layer.

# %%
import math

import torch
from torch import Tensor, nn

def same(found, expected):
    """Whether two tensors have one shape and, to four decimals, one content."""
    return (isinstance(found, Tensor) and found.shape == expected.shape
            and torch.allclose(found, expected, atol=1e-4, equal_nan=True))

# %% [markdown]
# ## 1. Layer norm
#
# *4 points · ★★ · 15 minutes*
#
# For each vector by itself: subtract the mean of its numbers, divide by their standard deviation, then multiply by `gain` and add `bias` (Ba et al. 2016). The variance is the *mean* of the squares (no division by $d - 1$), and $\varepsilon$ stands under the root, beside the
# variance: $(x - \mu) / \sqrt{\sigma^2 + \varepsilon}$.
#
# `x` is `(..., d_model)`, `gain` and `bias` are `(d_model,)`; return the shape of `x`.

# %% tags=["solution:layer_norm"]
def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Every vector to mean 0 and variance 1, then gain and bias: (..., d_model)."""
    ### BEGIN SOLUTION
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    return centred / (variance + eps).sqrt() * gain + bias
    ### END SOLUTION

# %% tags=["test:layer_norm:4"]
one, zero = torch.ones(4), torch.zeros(4)
x = torch.tensor([[1.0, 2.0, 3.0, 6.0], [10.0, 10.0, 10.0, 14.0], [5.0, 5.0, 5.0, 5.0]])
found = layer_norm(x, one, zero)
assert isinstance(found, Tensor) and found.shape == (3, 4), f"the shape stays, (3, 4), not {tuple(getattr(found, 'shape', ()))}"
assert not found.isnan().any(), "equal numbers have variance 0: what keeps the division finite?"
assert not same(found[:2].mean(dim=0), torch.zeros(4)) or same(found[:2].mean(dim=-1), torch.zeros(2)), "each vector by itself: the mean over d_model, not over positions"
assert same(found.mean(dim=-1), torch.zeros(3)), f"each vector's mean is 0, not {found.mean(dim=-1).tolist()}"
assert not same(found[0].var(), torch.tensor(1.0)), "the variance divides by d_model - 1: PyTorch's var and std do so unless told otherwise"
assert same(found[0], torch.tensor([-1.0690, -0.5345, 0.0, 1.6036])), f"1, 2, 3, 6 becomes -1.0690, -0.5345, 0, 1.6036, not {found[0].tolist()}"
small = layer_norm(0.001 * x[:1], one, zero)
assert not same(small, found[:1]), "tiny numbers are not blown up to variance 1: eps is missing"
outside = 0.001 * (x[:1] - 3) / (0.001 * math.sqrt(3.5) + 1e-5)
assert not same(small, outside), "eps stands outside of the root: it belongs beside the variance, under it"
assert same(small, torch.nn.functional.layer_norm(0.001 * x[:1], (4,))), "with tiny numbers the result differs from PyTorch's: is eps 1e-5 beside the variance?"
found = layer_norm(x, torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 0.0, 0.0, -1.0]))
assert same(found, torch.nn.functional.layer_norm(x, (4,), torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 0.0, 0.0, -1.0]))), "gain and bias come after the division: first times gain, then plus bias"
assert layer_norm(torch.randn(2, 3, 4), one, zero).shape == (2, 3, 4), "any axes before the last: (B, T, d_model)"
### BEGIN HIDDEN TESTS
def cases(draw):
    def random(*shape):
        return torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)
    found = [(s * random(*shape) + m, random(shape[-1]), random(shape[-1]), eps) for shape, s, m, eps in (
        ((3, 5), 1, 0, 1e-5), ((2, 3, 8), 4, 3, 1e-5), ((4, 6), 0.002, 0, 1e-5), ((2, 2, 4), 1, 0, 0.1))]
    return [*found, (torch.full((2, 3), 7.0), torch.ones(3), torch.zeros(3), 1e-5)]

def probe(case):
    return layer_norm(*case)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `mean(dim=-1, keepdim=True)` keeps the axis, so that the subtraction fits each vector.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The variance: `(x - mean).square().mean(dim=-1, keepdim=True)`, or `x.var(dim=-1, keepdim=True, correction=0)`.
#
# </details>

# %% [markdown]
# ## 2. A way around
#
# *3 points · ★ · 10 minutes*
#
# Every sublayer stands in a residual connection: what goes in is added to what comes out. The paper normalises the *sum* (**post-norm**); most later models normalise what goes *into* the sublayer, and leave the way around untouched (**pre-norm**).
#
# `sublayer` and `norm` are functions from `(B, T, d_model)` to the same. Return the connection's output.

# %% tags=["solution:residual"]
def residual(x: Tensor, sublayer, norm, norm_first: bool = False) -> Tensor:
    """Post-norm: norm of the sum. norm_first: the sublayer gets norm(x), the sum is not normalised."""
    ### BEGIN SOLUTION
    return x + sublayer(norm(x)) if norm_first else norm(x + sublayer(x))
    ### END SOLUTION

# %% tags=["test:residual:3"]
x, double, minus = torch.tensor([[[1.0, 5.0]]]), lambda x: 2 * x, lambda x: x - 1  # a sublayer and a "norm" to follow by hand
found = residual(x, double, minus)
assert isinstance(found, Tensor) and found.shape == x.shape, "the shape stays (B, T, d_model)"
assert not same(found, torch.tensor([[[1.0, 9.0]]])), "the way around is missing: x is added to what the sublayer gives"
assert not same(found, x + double(minus(x))), "this is pre-norm; without norm_first the sum is normalised"
assert not same(found, minus(double(x)) + x), "post-norm normalises the sum, not the sublayer's output alone"
assert same(found, torch.tensor([[[2.0, 14.0]]])), f"post-norm: norm(x + sublayer(x)) = 3x - 1 here, not {found.tolist()}"
found = residual(x, double, minus, norm_first=True)
assert not same(found, minus(x) + double(minus(x))), "the way around carries x itself, not the normalised x"
assert not same(found, minus(x + double(minus(x)))), "pre-norm leaves the sum as it is"
assert same(found, torch.tensor([[[1.0, 13.0]]])), f"pre-norm: x + sublayer(norm(x)) = x + 2(x - 1) here, not {found.tolist()}"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [(torch.tensor([draw.gauss(0, 1) for _ in range(12)]).reshape(2, 2, 3), first) for first in (False, True)]

def probe(case):
    x, norm_first = case
    gain = torch.tensor([1.0, -2.0, 0.5])
    return residual(x, lambda x: x.cumsum(dim=1) * gain, lambda x: x / x.norm(dim=-1, keepdim=True), norm_first)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# Two lines, one for each order. Where does `norm` stand, and what is added?
#
# </details>

# %% [markdown]
# ## 3. Feed-forward
#
# *3 points · ★ · 10 minutes*
#
# At each position by itself: to `d_ff` numbers, negative ones to 0 (ReLU), and back to `d_model` (§3.3): $\max(0, x W_1 + b_1) W_2 + b_2$.
#
# Name the two layers `wide` and `narrow`, each an `nn.Linear`: the marks copy weights into them.

# %% tags=["solution:FeedForwardLayer"]
class FeedForwardLayer(nn.Module):
    """Two linear layers with a ReLU between them, at each position: (B, T, d_model)."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        ### BEGIN SOLUTION
        self.wide, self.narrow = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        return self.narrow(self.wide(x).relu())
        ### END SOLUTION

# %% tags=["test:FeedForwardLayer:3"]
torch.manual_seed(0)
layer, x = FeedForwardLayer(4, 6), torch.randn(2, 3, 4)
assert {name for name, _ in layer.named_parameters()} == {f"{n}.{k}" for n in ("wide", "narrow") for k in ("weight", "bias")}, "the parameters are those of wide and narrow, each with a bias"
assert layer.wide.weight.shape == (6, 4) and layer.narrow.weight.shape == (4, 6), "wide goes from d_model to d_ff, narrow back"
found = layer(x)
assert found.shape == x.shape, f"the shape stays (2, 3, 4), not {tuple(found.shape)}"
assert not same(found, layer.narrow(layer.wide(x))), "without the ReLU two linear layers are one"
assert not same(found, layer.narrow(layer.wide(x)).relu()), "the ReLU stands between the layers, not after them"
assert not same(found, layer.narrow(layer.wide(x).relu()) + x), "the way around is not part of this layer"
assert same(found, layer.narrow(layer.wide(x).relu())), "not max(0, x W1 + b1) W2 + b2"
### BEGIN HIDDEN TESTS
def cases(draw):
    def random(*shape):
        return torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)
    return [(random(2, 3, d), random(f, d), random(f), random(d, f), random(d)) for d, f in ((3, 5), (4, 2), (6, 24))]

def probe(case):
    x, *weights = case
    layer = FeedForwardLayer(x.shape[-1], len(weights[1]))
    with torch.no_grad():
        for part, weight in zip((layer.wide.weight, layer.wide.bias, layer.narrow.weight, layer.narrow.bias), weights):
            part.copy_(weight)
        return layer.eval()(x)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# `nn.Linear(d_in, d_out)` acts on the last axis, whatever stands before it.
#
# </details>

# %% [markdown]
# ## 4. An encoder layer
#
# *4 points · ★★ · 18 minutes*
#
# Self-attention in a residual connection, then a feed-forward layer in another, each with its own norm, post-norm as in the paper. `attention` is a `MultiHeadAttention(d_model, n_heads)` (it returns two things), norms are `nn.LayerNorm(d_model)`.
#
# Name the parts `attention`, `feed_forward` (your class), `norm_1`, `norm_2`. `x` is `(B, S, d_model)`, `mask` is `(B, 1, 1, S)` or `None`.

# %% tags=["solution:EncoderBlock"]
class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward, each with a way around and a norm (§3.1)."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int):
        super().__init__()
        ### BEGIN SOLUTION
        self.attention = MultiHeadAttention(d_model, n_heads)
        self.feed_forward = FeedForwardLayer(d_model, d_ff)
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        ### END SOLUTION

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, S, d_model) -> (B, S, d_model)"""
        ### BEGIN SOLUTION
        x = residual(x, lambda x: self.attention(x, mask=mask)[0], self.norm_1)
        return residual(x, self.feed_forward, self.norm_2)
        ### END SOLUTION

# %% tags=["test:EncoderBlock:4"]
torch.manual_seed(0)
block, x = EncoderBlock(8, 2, 16).eval(), torch.randn(2, 5, 8)
assert {name for name, _ in block.named_children()} == {"attention", "feed_forward", "norm_1", "norm_2"}, f"the parts are attention, feed_forward, norm_1, norm_2, not {[n for n, _ in block.named_children()]}"
with torch.no_grad():  # else both norms would start alike, and mixing them up would not show
    for part in (block.norm_1.weight, block.norm_2.weight, block.norm_2.bias):
        part.add_(torch.randn(8))
mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None]
found, a = block(x, mask), block.attention(x, mask=mask)[0]
assert found.shape == x.shape, f"the shape stays (2, 5, 8), not {tuple(found.shape)}"
middle = block.norm_1(x + a)
assert not same(found, block.norm_2(block.feed_forward(middle))), "the way around the feed-forward layer is missing"
assert not same(found, block.norm_2(block.norm_1(a) + block.feed_forward(block.norm_1(a)))), "the way around attention is missing"
assert not same(found, block.norm_2(x + block.feed_forward(middle))), "the second way around carries what the first gave, not x"
plain = block.norm_1(x + block.attention(x)[0])
assert not same(found, block.norm_2(plain + block.feed_forward(plain))), "the mask does not reach attention"
once = block.norm_1(middle + block.feed_forward(middle))
assert not same(found, once), "norm_1 is used twice: each connection has its own"
assert same(found, block.norm_2(middle + block.feed_forward(middle))), "not norm(x + attention(x)), then the same with feed-forward"
other = x.clone()
other[1, 3:] = 100.0
assert same(block(other, mask)[1, :3], found[1, :3]), "what stands at padding changes the output of real positions"
### BEGIN HIDDEN TESTS
def cases(draw):
    def random(*shape):
        return torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)
    mask = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])[:, None, None]
    return [(draw.randint(0, 9999), random(2, 4, 8), m) for m in (None, mask)]

def probe(case):
    seed, x, mask = case
    block = EncoderBlock(8, 2, 12).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(block.named_parameters()):
            weight.copy_(torch.randn(weight.shape, generator=draw) / 2)
        return block(x, mask)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# `residual` wants a function of one argument: `lambda x: self.attention(x, mask=mask)[0]`.
#
# </details>

# %% [markdown]
# ## 5. A decoder layer
#
# *4 points · ★★★ · 20 minutes*
#
# Three connections: causal self-attention (no position sees a later one), attention to the encoder's `memory`, feed-forward. Name the parts `self_attention`, `cross_attention`, `feed_forward`, `norm_1`, `norm_2`, `norm_3`.
#
# `x` is `(B, T, d_model)`, `memory` `(B, S, d_model)`, `memory_mask` `(B, 1, 1, S)` or `None`. `causal_mask(T)` is given.

# %% tags=["solution:DecoderBlock"]
class DecoderBlock(nn.Module):
    """Causal self-attention, attention to a memory, feed-forward (§3.1)."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int):
        super().__init__()
        ### BEGIN SOLUTION
        self.self_attention, self.cross_attention = (MultiHeadAttention(d_model, n_heads) for _ in range(2))
        self.feed_forward = FeedForwardLayer(d_model, d_ff)
        self.norm_1, self.norm_2, self.norm_3 = (nn.LayerNorm(d_model) for _ in range(3))
        ### END SOLUTION

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        """x (B, T, d_model), memory (B, S, d_model) -> (B, T, d_model)"""
        ### BEGIN SOLUTION
        past = causal_mask(x.shape[1])
        x = residual(x, lambda x: self.self_attention(x, mask=past)[0], self.norm_1)
        x = residual(x, lambda x: self.cross_attention(x, memory, memory_mask)[0], self.norm_2)
        return residual(x, self.feed_forward, self.norm_3)
        ### END SOLUTION

# %% tags=["test:DecoderBlock:4"]
torch.manual_seed(0)
block, x, memory = DecoderBlock(8, 2, 16).eval(), torch.randn(2, 4, 8), torch.randn(2, 5, 8)
assert {name for name, _ in block.named_children()} == {"self_attention", "cross_attention", "feed_forward", "norm_1", "norm_2", "norm_3"}, f"the parts are named otherwise: {[n for n, _ in block.named_children()]}"
with torch.no_grad():
    for norm in (block.norm_1, block.norm_2, block.norm_3):
        norm.weight.add_(torch.randn(8))
mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None]
found = block(x, memory, mask)
assert found.shape == x.shape, f"the shape is that of x, (2, 4, 8), not {tuple(found.shape)}"
later = x.clone()
later[:, 3] = torch.randn(2, 8)
assert same(block(later, memory, mask)[:, :3], found[:, :3]), "a later word changes earlier outputs: the causal mask is missing, or the wrong way round"
assert not same(block(later, memory, mask)[:, 3], found[:, 3]), "a position does not see itself"
earlier = x.clone()
earlier[:, 0] = torch.randn(2, 8)
assert not same(block(earlier, memory, mask)[:, 3], found[:, 3]), "the last position does not see the first"
assert not same(block(x, memory + torch.randn(8), mask), found), "the memory has no effect: cross-attention looks at x"
hidden = memory.clone()
hidden[1, 3:] = 100.0
assert same(block(x, hidden, mask), found), "padding of the memory changes the output: the memory's mask does not reach cross-attention"
y = block.norm_1(x + block.self_attention(x, mask=causal_mask(4))[0])
swapped = block.norm_2(y + block.self_attention(y, memory, mask)[0])
assert not same(found, block.norm_3(swapped + block.feed_forward(swapped))), "both attentions use the same weights"
y = block.norm_2(y + block.cross_attention(y, memory, mask)[0])
assert same(found, block.norm_3(y + block.feed_forward(y))), "not self-attention, cross-attention, feed-forward in this order, each with its own norm after the sum"
### BEGIN HIDDEN TESTS
def cases(draw):
    def random(*shape):
        return torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)
    mask = torch.tensor([[True] * 3, [True] + [False] * 2])[:, None, None]
    return [(draw.randint(0, 9999), random(2, T, 8), random(2, 3, 8), m) for T, m in ((4, None), (1, mask), (5, mask))]

def probe(case):
    seed, x, memory, mask = case
    block = DecoderBlock(8, 2, 12).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(block.named_parameters()):
            weight.copy_(torch.randn(weight.shape, generator=draw) / 2)
        return block(x, memory, mask)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# `MultiHeadAttention(x, memory, mask)`: queries from `x`, keys and values from `memory`. In cross-attention every target position may see the whole source.
#
# </details>

# %% [markdown]
# ## 6. What does a layer pass on?
#
# *2 points · ★★ · 10 minutes*
#
# In pre-norm the way around is never normalised, so the numbers grow from layer to layer. Return the standard deviation of the stream after each of `n` pre-norm connections around `sublayer`, beginning with that of `x`: a list of `n + 1` numbers. Use your `residual`, with `norm`.

# %% tags=["solution:growth"]
def growth(x: Tensor, sublayer, norm, n: int) -> list[float]:
    """Standard deviations of the stream before and after each of n pre-norm connections."""
    ### BEGIN SOLUTION
    found = [x.std().item()]
    for _ in range(n):
        x = residual(x, sublayer, norm, norm_first=True)
        found.append(x.std().item())
    return found
    ### END SOLUTION

# %% tags=["test:growth:2"]
torch.manual_seed(0)
norm, x = nn.LayerNorm(64), torch.randn(4, 8, 64)
found = growth(x, lambda x: x.flip(-1), norm, 9)
assert isinstance(found, list) and len(found) == 10, f"n + 1 numbers, the first for x itself: 10, not {len(found) if hasattr(found, '__len__') else found}"
assert all(isinstance(number, float) for number in found), "plain numbers: tensor.item()"
assert abs(found[0] - x.std().item()) < 1e-4, "the first number is that of x"
assert not all(abs(number - 1) < 0.05 for number in found), "they stay at 1: that is post-norm, or the normalised stream was passed on"
assert found[-1] > 2.5, "nine connections later the stream is several times as large: does each start from what the one before gave?"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [(torch.tensor([draw.gauss(0, 1) for _ in range(48)]).reshape(2, 4, 6), n) for n in (0, 1, 5)]

def probe(case):
    x, n = case
    return torch.tensor(growth(x, lambda x: x.roll(1, -1) + 0.5, nn.LayerNorm(6), n))
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# `x = residual(x, sublayer, norm, norm_first=True)` again and again.
#
# </details>

# %% [markdown]
# ## 7. In words
#
# *4 points · ★★ · 12 minutes*
#
# In post-norm, the gradient of the loss passes a norm at each layer; in pre-norm there is a way on which it passes none. In at most 120 words: what does that mean for the first layers at the beginning of training, why does post-norm need a warm-up of the learning rate more, and why do pre-norm models have one more norm at the very end?

# %% [markdown] tags=["written:pre_and_post:4"]
# *Your answer here.*
#
# === BEGIN MARK SCHEME ===
# 1 point: post-norm rescales the way around at every layer, so what reaches the first layers depends on all norms above (it shrinks, or is uneven between layers).
# 1 point: in pre-norm the sum of gradients has an unchanged term all the way down.
# 1 point: at the start of post-norm training the gradients near the output are large (or Adam's estimates are poor), large steps spoil the weights; small ones at first avoid it. (Naming a measurement of chapter 07 or 10 counts.)
# 1 point: in pre-norm the stream itself was never normalised and has grown; the output layer would see its size.
# === END MARK SCHEME ===

# %% [markdown]
# ## 8. For the curious (no marks)
#
# Stack 12 of your encoder blocks, and 12 pre-norm ones. Send a random `x` through, take the sum of squares of the output as loss and draw the norm of each layer's gradient. Then train both with a learning rate that is too high for one of them.
