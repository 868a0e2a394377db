# %% [markdown]
# # Assignment: heads
#
# In six steps you write multi-head attention, the subject of chapter 03 of *Attention, Cell by Cell*: cutting vectors into heads, joining them again, and the layer around it. About 90 minutes,
# 22 points. Everything runs on a CPU in seconds. `attention` (chapter 02) is given, in the folded cell below.
#
# **How it works.** Replace `raise NotImplementedError` by your code. Run the test under it: it says nothing if all is well, and otherwise what is likely wrong. Marks are given for other
# inputs than those of the tests, so code that only fits these gets none. Loops, `einsum`, other names inside: all is allowed. Do not rename functions, and leave test cells as they are.
#
# Shapes: `B` sentences, `T` queries, `S` keys, `H` heads, `d_model` numbers in a vector, `d_k = d_model / H` in a head's query, key or value.

# %%
import math

import torch
from torch import Tensor, nn

def same(found, expected):
    """Whether two tensors have one shape and, to four decimals, one content."""
    return (isinstance(found, Tensor) and found.shape == expected.shape
            and torch.allclose(found, expected, atol=1e-4, equal_nan=True))

def marked(B, T, d_model):
    """Vectors in which each number says where it stands: 100 b + 10 t + i / 10."""
    b, t, i = (torch.arange(n, dtype=torch.float32) for n in (B, T, d_model))
    return 100 * b[:, None, None] + 10 * t[None, :, None] + i / 10

# %% [markdown]
# ## 1. Cut into heads
#
# *3 points · ★★ · 12 minutes*
#
# Each head works with its own part of the numbers. Head 0 gets the first `d_model / H` of every vector, head 1 the next, and so on. Sentences and positions must not be mixed up: this is the step that goes
# wrong most often, and a training may not even notice.
#
# `x` is `(B, T, d_model)`; return `(B, H, T, d_k)`. If `d_model` is not divisible by `n_heads`, raise `ValueError`.

# %% tags=["solution:split_heads"]
def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """(B, T, d_model) -> (B, H, T, d_k); ValueError if it cannot be cut evenly."""
    ### BEGIN SOLUTION
    if x.shape[-1] % n_heads:
        raise ValueError(f"d_model {x.shape[-1]} is not divisible by {n_heads}")
    B, T, d_model = x.shape
    return x.reshape(B, T, n_heads, d_model // n_heads).transpose(1, 2)
    ### END SOLUTION

# %% tags=["test:split_heads:3"]
x = marked(2, 3, 8)
found = split_heads(x, 4)
assert isinstance(found, Tensor), f"return a tensor, not {type(found).__name__}"
assert found.shape != (2, 3, 4, 2), "heads stand before positions: (B, H, T, d_k). One transposition is missing"
assert found.shape == (2, 4, 3, 2), f"the shape is (B, H, T, d_k) = (2, 4, 3, 2), not {tuple(found.shape)}"
assert not same(found, x.reshape(2, 4, 3, 2)), (
    "the shape is right, the content is not: a reshape straight to "
    "(B, H, T, d_k) gives a head the numbers of several positions")
assert not same(found, x.reshape(2, 3, 2, 4).permute(0, 3, 1, 2)), (
    "head 0 got every fourth number; it gets the first d_k neighbours")
assert same(found[1, 2, 0], torch.tensor([100.4, 100.5])), (
    f"sentence 1, head 2, position 0 holds the numbers 4 and 5 of its vector, not {found[1, 2, 0].tolist()}")
assert same(found, torch.stack([x[:, :, 2 * h:2 * h + 2] for h in range(4)], dim=1)), "some numbers stand elsewhere"
try:
    split_heads(marked(1, 2, 8), 3)
except ValueError:
    pass
except Exception as error:
    raise AssertionError(f"8 numbers cannot be cut into 3 heads: raise ValueError, not {type(error).__name__}") from None
else:
    raise AssertionError("8 numbers cannot be cut into 3 heads: raise ValueError")
### BEGIN HIDDEN TESTS
def cases(draw):
    sizes = [(1, 1, 6, 2), (2, 5, 12, 3), (3, 4, 4, 4), (2, 2, 10, 1), (1, 3, 10, 4)]
    return [(torch.tensor([draw.gauss(0, 1) for _ in range(B * T * d)]).reshape(B, T, d), H) for B, T, d, H in sizes]

def probe(case):
    x, H = case
    if x.shape[-1] % H:
        try:
            split_heads(x, H)
        except ValueError:
            return "ValueError"
        return "no error"
    return split_heads(x, H)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First make the last axis two: `(B, T, H, d_k)`. That keeps neighbours together. Then exchange two axes.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `reshape` only cuts the row of numbers anew; it never moves one past another. `transpose` does.
#
# </details>

# %% [markdown]
# ## 2. Join them again
#
# *2 points · ★ · 8 minutes*
#
# The way back: `(B, H, T, d_k)` to `(B, T, H · d_k)`, the heads of a position side by side.

# %% tags=["solution:join_heads"]
def join_heads(heads: Tensor) -> Tensor:
    """(B, H, T, d_k) -> (B, T, H * d_k)"""
    ### BEGIN SOLUTION
    return heads.transpose(1, 2).flatten(2)
    ### END SOLUTION

# %% tags=["test:join_heads:2"]
x = marked(2, 3, 8)
heads = torch.stack([x[:, :, 2 * h:2 * h + 2] for h in range(4)], dim=1)  # (2, 4, 3, 2)
found = join_heads(heads)
assert isinstance(found, Tensor) and found.shape == (2, 3, 8), f"the shape is (B, T, H · d_k) = (2, 3, 8), not {tuple(getattr(found, 'shape', ()))}"
assert not same(found, heads.reshape(2, 3, 8)), "without a transposition a row holds one head at several positions, not one position's heads"
assert not same(found, heads.permute(0, 2, 3, 1).reshape(2, 3, 8)), "the heads are shuffled like cards: all of head 0 comes first, then head 1"
assert same(found, x), "what was cut and joined again is what it was"
### BEGIN HIDDEN TESTS
def cases(draw):
    sizes = [(1, 1, 1, 3), (2, 3, 4, 2), (3, 2, 5, 1), (1, 4, 4, 4)]
    return [torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(size))]).reshape(size) for size in sizes]

def probe(case):
    return join_heads(case)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# The two steps of exercise 1, undone in the other order. After a `transpose`, `view` complains; `reshape` and `flatten` copy.
#
# </details>

# %% [markdown]
# ## 3. Self-attention with heads
#
# *3 points · ★★ · 15 minutes*
#
# Project `x` to queries, keys and values, cut them into heads, let every head attend by itself, join the heads and mix them with a last matrix. Matrices multiply from the right, as in the paper:
# `x @ w_query`.
#
# `x` is `(B, T, d_model)`, each of the four matrices `(d_model, d_model)`; return the output `(B, T, d_model)` and the weights `(B, H, T, T)`.

# %% tags=["solution:self_attention"]
def self_attention(x: Tensor, w_query: Tensor, w_key: Tensor, w_value: Tensor,
                   w_output: Tensor, n_heads: int) -> tuple[Tensor, Tensor]:
    """Multi-head self-attention: output (B, T, d_model), weights (B, H, T, T)."""
    ### BEGIN SOLUTION
    query, key, value = (split_heads(x @ w, n_heads) for w in (w_query, w_key, w_value))
    heads, weights = attention(query, key, value)
    return join_heads(heads) @ w_output, weights
    ### END SOLUTION

# %% tags=["test:self_attention:3"]
torch.manual_seed(0)
x, (w_q, w_k, w_v, w_o) = torch.randn(2, 3, 8), torch.randn(4, 8, 8).unbind()
found = self_attention(x, w_q, w_k, w_v, w_o, 4)
assert isinstance(found, tuple) and len(found) == 2, "return two things: output, weights"
output, weights = found
assert weights.shape == (2, 4, 3, 3), f"weights for each head: (B, H, T, T) = (2, 4, 3, 3), not {tuple(weights.shape)}"
assert output.shape == x.shape, f"the output has the shape of x, (2, 3, 8), not {tuple(output.shape)}"
byhand = torch.cat([attention(x @ w_q[:, s], x @ w_k[:, s], x @ w_v[:, s])[0]
                    for s in (slice(h, h + 2) for h in (0, 2, 4, 6))], dim=-1)
assert not same(output, byhand), "these are the heads, joined: the last matrix, which mixes them, is missing"
one = attention(x @ w_q, x @ w_k, x @ w_v)[0] @ w_o
assert not same(output, one), "this is one wide head: cut before you attend"
assert not same(output, attention(x, x, x)[0]), "queries, keys and values are projections of x, not x"
assert same(output, byhand @ w_o), "the output differs from that of four heads computed one by one"
### BEGIN HIDDEN TESTS
def cases(draw):
    def random(*shape):
        return torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)
    return [(random(B, T, d), *(random(d, d) / d**0.5 for _ in range(4)), H)
            for B, T, d, H in ((1, 4, 6, 2), (2, 3, 12, 4), (3, 1, 4, 1), (2, 5, 6, 6))]

def probe(case):
    return self_attention(*case)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# `attention` takes any axes before the last two, so all sentences and heads go in at once, `(B, H, T, d_k)`.
#
# </details>

# %% [markdown]
# ## 4. How many parameters?
#
# *2 points · ★ · 8 minutes*
#
# A layer has matrices for queries, keys and values and one for the output, each with a bias or all without. Each head has `d_k` numbers in queries and keys and `d_v` in values; `None` means `d_model // n_heads`.
#
# Return the number of parameters. What does more heads cost, at `d_k = None`?

# %% tags=["solution:count_parameters"]
def count_parameters(d_model: int, n_heads: int, d_k: int | None = None,
                     d_v: int | None = None, bias: bool = True) -> int:
    """Numbers that a multi-head attention layer learns."""
    ### BEGIN SOLUTION
    d_k, d_v = (d_model // n_heads if d is None else d for d in (d_k, d_v))
    width = n_heads * (2 * d_k + d_v)
    return d_model * width + n_heads * d_v * d_model + bias * (width + d_model)
    ### END SOLUTION

# %% tags=["test:count_parameters:2"]
found = count_parameters(512, 8, bias=False)
assert found != 3 * 512 * 512, "the matrix that mixes the heads is missing"
assert found != 4 * 512 * 512 * 8, "the matrices are cut into heads, not given to each head whole"
assert found == 4 * 512 * 512, f"the paper's layer has four matrices of 512 · 512 numbers, 1,048,576, not {found}"
assert count_parameters(512, 8) == 4 * (512 * 512 + 512), "each of the four has a bias of 512 numbers"
assert count_parameters(512, 16) == count_parameters(512, 8), "with d_k = d_model / H more heads cost nothing"
assert count_parameters(512, 8, d_k=16, bias=False) == 2 * 512 * 128 + 2 * 512 * 512, "d_k is the size of queries and keys only"
assert count_parameters(6, 2, d_k=5, d_v=4) == 6 * 28 + 28 + 8 * 6 + 6, "d_k 5 and d_v 4: heads need not add up to d_model"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [(16, 4, None, None, True), (12, 3, None, 2, False),
            *((draw.randint(2, 9) * 6, draw.choice((1, 2, 3, 6)), draw.randint(1, 9), draw.randint(1, 9), draw.random() < 0.5)
              for _ in range(5))]

def probe(case):
    return int(count_parameters(*case))
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# Queries: `d_model` rows, `n_heads · d_k` columns. The output matrix takes `n_heads · d_v` numbers and gives `d_model`.
#
# </details>

# %% [markdown]
# ## 5. A layer
#
# *5 points · ★★★ · 25 minutes*
#
# Now as a module. `forward(x, memory=None, mask=None)`: queries come from `x`; keys and values from `memory`, or from `x` where it is `None`. The mask is boolean, `True` where a query may look, `(T, S)` or `(B, H or 1, T or 1, S)`.
#
# Name the four parts `query`, `key`, `value` and `output`, each an `nn.Linear(d_model, d_model)`: the marks copy weights into them. Return output `(B, T, d_model)` and weights `(B, H, T, S)`.

# %% tags=["solution:MultiHead"]
class MultiHead(nn.Module):
    """Multi-head attention of x to a memory, or to itself."""

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        ### BEGIN SOLUTION
        self.n_heads = n_heads
        self.query, self.key, self.value, self.output = (nn.Linear(d_model, d_model) for _ in range(4))
        ### END SOLUTION

    def forward(self, x: Tensor, memory: Tensor | None = None,
                mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (B, T, d_model), memory (B, S, d_model) -> (B, T, d_model), (B, H, T, S)"""
        ### BEGIN SOLUTION
        memory = x if memory is None else memory
        heads, weights = attention(split_heads(self.query(x), self.n_heads), split_heads(self.key(memory), self.n_heads),
                                   split_heads(self.value(memory), self.n_heads), mask)
        return self.output(join_heads(heads)), weights
        ### END SOLUTION

# %% tags=["test:MultiHead:5"]
torch.manual_seed(0)
layer, theirs = MultiHead(8, 2), nn.MultiheadAttention(8, 2, batch_first=True)
names = {name for name, _ in layer.named_parameters()}
expected_names = {f"{part}.{kind}" for part in ("query", "key", "value", "output") for kind in ("weight", "bias")}
assert names == expected_names, f"the parameters are those of query, key, value and output, not {sorted(names)}"
with torch.no_grad():
    for i, part in enumerate((layer.query, layer.key, layer.value)):
        part.weight.copy_(theirs.in_proj_weight[8 * i:8 * i + 8])
        part.bias.copy_(torch.randn(8))
        theirs.in_proj_bias[8 * i:8 * i + 8] = part.bias
    layer.output.weight.copy_(theirs.out_proj.weight)
    layer.output.bias.copy_(theirs.out_proj.bias.normal_())
x, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
output, weights = layer(x)
assert output.shape == x.shape and weights.shape == (2, 2, 3, 3), "without memory: output like x, weights (B, H, T, T)"
assert same(output, theirs(x, x, x)[0]), "self-attention differs from nn.MultiheadAttention with the same weights"
output, weights = layer(x, memory)
assert weights.shape == (2, 2, 3, 5), f"weights are (B, H, T, S) = (2, 2, 3, 5), not {tuple(weights.shape)}: keys come from memory, queries from x"
assert not same(output, theirs(x, memory, x[:, [0, 1, 2, 0, 1]])[0]), "values come from memory, too, as keys do"
assert same(output, theirs(x, memory, memory)[0]), "attention to a memory differs from nn.MultiheadAttention with the same weights"
mask = torch.tensor([[True, True, False, False, False], [True, True, True, False, False], [True] * 5])
output, weights = layer(x, memory, mask)
assert (weights[..., 0, 2:] == 0).all(), "keys where the mask is False have weight 0; does the mask reach attention?"
assert same(output, theirs(x, memory, memory, attn_mask=~mask)[0]), "the masked output differs from nn.MultiheadAttention's"
padding = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None]
assert same(layer(x, memory, padding)[0], theirs(x, memory, memory, key_padding_mask=~padding[:, 0, 0])[0]), "a padding mask (B, 1, 1, S) is not used as it should be"
### BEGIN HIDDEN TESTS
def cases(draw):
    def random(*shape):
        return torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)
    found = []
    for B, T, S, d, H in ((1, 3, 4, 6, 2), (2, 2, 5, 8, 4), (2, 4, 4, 4, 1)):
        weights = [(random(d, d) / d**0.5, random(d)) for _ in range(4)]
        mask = torch.tensor([draw.random() < 0.7 for _ in range(T * S)]).reshape(T, S)
        found += [(d, H, weights, random(B, T, d), memory, m) for memory, m in (
            (None, None), (random(B, S, d), None), (random(B, S, d), mask))]
    return found

def probe(case):
    d_model, n_heads, weights, x, memory, mask = case
    layer = MultiHead(d_model, n_heads)
    with torch.no_grad():
        for part, (weight, bias) in zip((layer.query, layer.key, layer.value, layer.output), weights):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
        return layer(x, memory, mask)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `self.query(x)` multiplies and adds the bias. Then it is exercise 3, with two sources.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `if memory:` fails on a tensor; `memory is None` asks what you mean.
#
# </details>

# %% [markdown]
# ## 6. A head less
#
# *3 points · ★★ · 12 minutes*
#
# What does one head contribute? Since the heads stand side by side before the last matrix, the output is a sum: one part for each head, and the bias. Return the parts, `(B, H, T, d_model)`, given the heads' outputs and the last layer; bias left out.

# %% tags=["solution:parts_of_heads"]
def parts_of_heads(heads: Tensor, output: nn.Linear) -> Tensor:
    """What each head adds to the layer's output: (B, H, T, d_k) -> (B, H, T, d_model)."""
    ### BEGIN SOLUTION
    matrices = output.weight.unflatten(1, (heads.shape[1], -1))  # (d_model, H, d_k)
    return torch.einsum("bhtk,dhk->bhtd", heads, matrices)
    ### END SOLUTION

# %% tags=["test:parts_of_heads:3"]
torch.manual_seed(0)
heads, last = torch.randn(2, 4, 3, 2), nn.Linear(8, 8)
joined = last(heads.transpose(1, 2).flatten(2))
found = parts_of_heads(heads, last)
assert isinstance(found, Tensor) and found.shape == (2, 4, 3, 8), f"a vector of d_model for each head: (B, H, T, d_model) = (2, 4, 3, 8), not {tuple(getattr(found, 'shape', ()))}"
assert not same(found.sum(dim=1), joined + 3 * last.bias), "the bias came in with each head: leave it out"
assert not same(found.sum(dim=1), joined), "the bias is in one of the parts: leave it out"
assert same(found.sum(dim=1), joined - last.bias), "the parts do not add up to the layer's output less its bias: which columns of the matrix are a head's? (nn.Linear multiplies by the transposed weight)"
alone = torch.zeros_like(heads)
alone[:, 1] = heads[:, 1]
assert same(found[:, 1], last(alone.transpose(1, 2).flatten(2)) - last.bias), "head 1's part is not what the layer gives with all other heads at 0"
### BEGIN HIDDEN TESTS
def cases(draw):
    def random(*shape):
        return torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)
    return [(random(B, H, T, k), random(d, H * k), random(d)) for B, H, T, k, d in ((1, 2, 3, 2, 4), (2, 3, 2, 1, 5), (1, 1, 4, 3, 3))]

def probe(case):
    heads, weight, bias = case
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
        return parts_of_heads(heads, layer)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# `nn.Linear` computes `x @ weight.T + bias`, so head `h` meets the columns `h · d_k` to `(h + 1) · d_k` of `weight`.
#
# </details>

# %% [markdown]
# ## 7. In words
#
# *4 points · ★★ · 10 minutes*
#
# Somebody cuts into heads with `x.reshape(B, H, T, d_k)` and joins with `heads.reshape(B, T, d_model)`. Training on the copy task works. In at most 120 words: what does a "head" of that layer see, why does the copy task not notice, and on what task or by what test would it show?

# %% [markdown] tags=["written:reshape_heads:4"]
# *Your answer here.*
#
# === BEGIN MARK SCHEME ===
# 1 point: a "head" holds the numbers of several positions (of T / H neighbouring positions), so rows of its weights are not positions.
# 1 point: copying needs no particular order among positions that a learned projection could not undo; the layer is still a flexible function of x (any answer that sees that the loss only measures the task).
# 2 points: a test or task that shows it: equality with nn.MultiheadAttention with copied weights, or with heads computed one by one; a causal or padding mask that now hides the wrong things (future leaks); another length T in testing than in training. (One named: 1; with what would be seen: 2.)
# === END MARK SCHEME ===

# %% [markdown]
# ## 8. For the curious (no marks)
#
# Take two layers, one with 1 head of 16 numbers and one with 16 heads of 1. Which of them can look at two places at once for one query, and which can tell 20 kinds of keys apart? Make up a task for each that only it can learn.
