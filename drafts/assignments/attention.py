# %% [markdown]
# # Assignment: attention
#
# In six steps you write scaled dot-product attention and its masks, the subject of chapters 02 and 04 of *Attention, Cell by Cell*. About 75 minutes, 20 points. Everything runs on
# a CPU in seconds.
#
# **How it works.** Replace `raise NotImplementedError` by your code. Run the test under it: it says nothing if all is well, and otherwise what is likely wrong. Marks are given for other
# inputs than those of the tests, so code that only fits these gets none. Loops, `einsum`, other names inside: all is allowed. Do not rename functions, and leave test cells as they are.
#
# Shapes: `T` queries, `S` keys and values, `d_k` numbers in a query or key, `d_v` in a value; `...` stands for any axes before them (none, a batch, a batch and heads).

# %%
import math

import torch
from torch import Tensor

torch.manual_seed(0)

def same(found, expected):
    """Whether two tensors have one shape and, to four decimals, one content."""
    return (isinstance(found, Tensor) and found.shape == expected.shape
            and torch.allclose(found, expected, atol=1e-4, equal_nan=True))

# %% [markdown]
# ## 1. Dot products
#
# *2 points · ★ · 8 minutes*
#
# How well does each query fit each key? The **score** of a query and a key is the sum of the products of their components. Without them nothing that follows can be computed.
#
# `query` is `(..., T, d_k)`, `key` is `(..., S, d_k)`; return `(..., T, S)`, a row for each query.

# %% tags=["solution:dot_products"]
def dot_products(query: Tensor, key: Tensor) -> Tensor:
    """The dot product of every query with every key: (..., T, S)."""
    ### BEGIN SOLUTION
    return query @ key.transpose(-2, -1)
    ### END SOLUTION

# %% tags=["test:dot_products:2"]
query = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])  # T = 3
key = torch.tensor([[3.0, 4.0], [5.0, 6.0]])                # S = 2
found = dot_products(query, key)
assert isinstance(found, Tensor), f"return a tensor, not {type(found).__name__}"
assert found.shape != (2, 3), (
    "a row for each query, a column for each key: yours is the other way "
    "round, keys times queries")
assert found.shape == (3, 2), f"the shape is (T, S) = (3, 2), not {tuple(found.shape)}"
assert same(found, torch.tensor([[3.0, 5.0], [8.0, 12.0], [7.0, 11.0]])), (
    "the first score is 1·3 + 0·4 = 3: multiply components and add them up, "
    "without a division")
found = dot_products(torch.ones(2, 5, 3, 4), torch.ones(2, 5, 6, 4))
assert found.shape == (2, 5, 3, 6), (
    f"with a batch of 2 and 5 heads the shape is (2, 5, 3, 6), not "
    f"{tuple(found.shape)}: which two axes did you transpose?")
### BEGIN HIDDEN TESTS
def cases(draw):
    rows = [((), 3, 5, 4), ((2,), 4, 4, 3), ((2, 3), 1, 6, 5), ((3, 2), 5, 1, 1)]
    return [tuple(torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(axes) * n * d)])
                  .reshape(*axes, n, d) for n in (T, S)) for axes, T, S, d in rows]

def probe(case):
    return dot_products(*case)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# It is a matrix product. Which axis do the components of queries and keys share, and where must it stand in each factor?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `key.T` turns all axes round, and with a batch that is wrong. `transpose(-2, -1)` exchanges the last two.
#
# </details>

# %% [markdown]
# ## 2. Scores
#
# *2 points · ★ · 8 minutes*
#
# Components of mean 0 and variance 1 give dot products of variance `d_k`: the longer the vectors, the larger the scores, and softmax would give all to one key. So they are divided by
# $\sqrt{d_k}$.
#
# Same shapes as before. You may use your `dot_products`.

# %% tags=["solution:scores"]
def scores(query: Tensor, key: Tensor) -> Tensor:
    """Dot products, scaled to a variance that does not depend on d_k: (..., T, S)."""
    ### BEGIN SOLUTION
    return dot_products(query, key) / math.sqrt(key.shape[-1])
    ### END SOLUTION

# %% tags=["test:scores:2"]
found = scores(torch.full((3, 16), 2.0), torch.ones(5, 16))
assert isinstance(found, Tensor) and found.shape == (3, 5), "the shape is (T, S) = (3, 5), as before"
assert not same(found, torch.full((3, 5), 32.0)), "these are the dot products: the division is missing"
assert not same(found, torch.full((3, 5), 2.0)), "divided by d_k = 16: the root of d_k is 4"
assert not same(found, torch.full((3, 5), 128.0)), "multiplied by the root: divide by it"
assert not same(found, torch.full((3, 5), 32 / math.sqrt(5))), "divided by the root of S, the number of keys: it is that of d_k"
assert not same(found, torch.full((3, 5), 32 / math.sqrt(3))), "divided by the root of T, the number of queries: it is that of d_k"
assert same(found, torch.full((3, 5), 8.0)), "32 / √16 = 8 for every pair"
many = scores(torch.randn(200, 400), torch.randn(200, 400))
assert 0.9 < many.std() < 1.1, f"scores of random vectors have a spread of about 1, yours {many.std():.2f}"
### BEGIN HIDDEN TESTS
def cases(draw):
    rows = [((), 3, 5, 4), ((2,), 4, 7, 9), ((2, 3), 6, 2, 5)]
    return [tuple(torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(axes) * n * d)])
                  .reshape(*axes, n, d) for n in (T, S)) for axes, T, S, d in rows]

def probe(case):
    return scores(*case)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# `d_k` is the size of the last axis of a query or key: `key.shape[-1]`.
#
# </details>

# %% [markdown]
# ## 3. Weights
#
# *3 points · ★★ · 12 minutes*
#
# Softmax makes scores into shares: exponentials, divided by their sum. The weights of *one query over all keys* add up to 1. Write it with `exp` and `sum`, not with PyTorch's `softmax`
# (nobody will stop you; but you would miss the trap): in float32 `exp(89)` is infinite, and scores may well be 1,000.
#
# `scores_` is `(..., T, S)`; return weights of the same shape.

# %% tags=["solution:weights"]
def weights(scores_: Tensor) -> Tensor:
    """Shares of the keys for each query: (..., T, S), rows add up to 1."""
    ### BEGIN SOLUTION
    exponentials = (scores_ - scores_.amax(dim=-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(dim=-1, keepdim=True)
    ### END SOLUTION

# %% tags=["test:weights:3"]
some = torch.tensor([[0.0, 1.0, 2.0], [3.0, 3.0, 3.0]])
found = weights(some)
assert isinstance(found, Tensor) and found.shape == (2, 3), "the shape stays (T, S) = (2, 3)"
assert not same(found.sum(dim=0), torch.ones(3)), (
    "weights add up to 1 over queries, not over keys: which dim did the sum get?")
assert not same(found.sum(), torch.tensor(1.0)), "all weights together add up to 1: each row must, by itself"
assert same(found.sum(dim=-1), torch.ones(2)), f"rows add up to {found.sum(dim=-1).tolist()}, not to 1: divide by the sum of the exponentials"
assert same(found[1], torch.full((3,), 1 / 3)), "equal scores have equal weights"
assert same(found[0], torch.tensor([0.0900, 0.2447, 0.6652])), "the weights of scores 0, 1, 2 are 0.0900, 0.2447, 0.6652"
large = weights(torch.tensor([[1000.0, 1001.0]]))
assert not large.isnan().any(), (
    "scores of 1,000 give nan: exp of it is infinite. What may be subtracted "
    "from all scores of a row without changing the weights?")
assert same(large, torch.tensor([[0.2689, 0.7311]])), "1,000 and 1,001 have the weights of 0 and 1"
assert same(weights(torch.tensor([[-1000.0, -1001.0]])), torch.tensor([[0.7311, 0.2689]])), (
    "scores of -1,000: all exponentials are 0. Subtract something else")
mixed = weights(torch.tensor([[1000.0, 999.0], [-1000.0, -1001.0]]))
assert same(mixed, torch.tensor([[0.7311, 0.2689], [0.7311, 0.2689]])), (
    "with rows of very different size one turns into nan or 0: subtract each row's own largest score")
### BEGIN HIDDEN TESTS
def cases(draw):
    shapes = [(3, 5), (2, 4, 6), (2, 3, 4, 4), (1, 1)]
    found = [torch.tensor([draw.gauss(0, 2) for _ in range(math.prod(shape))]).reshape(shape) for shape in shapes]
    offsets = torch.tensor([[0.0], [3000.0], [-3000.0]])
    return [*found, found[0] + offsets]

def probe(case):
    return weights(case)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `sum(dim=-1, keepdim=True)` adds over the keys and keeps the axis, so that the division fits.
#
# </details>
# <details><summary>Hint 2</summary>
#
# $e^{a - m} / \sum e^{b - m} = e^a / \sum e^b$ for any $m$. Which $m$ makes the largest exponential 1?
#
# </details>

# %% [markdown]
# ## 4. Attention
#
# *3 points · ★★ · 10 minutes*
#
# Put it together: each query receives the mean of the values, weighted by how well their keys fit.
#
# `query` `(..., T, d_k)`, `key` `(..., S, d_k)`, `value` `(..., S, d_v)`; return the output `(..., T, d_v)` **and** the weights `(..., T, S)`, in this order.

# %% tags=["solution:attend"]
def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention: output (..., T, d_v), weights (..., T, S)."""
    ### BEGIN SOLUTION
    shares = weights(scores(query, key))
    return shares @ value, shares
    ### END SOLUTION

# %% tags=["test:attend:3"]
query, key = torch.tensor([[8.0, 0.0], [0.0, 0.0]]), torch.tensor([[8.0, 0.0], [0.0, 8.0], [-8.0, 0.0]])
value = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]])
found = attend(query, key, value)
assert isinstance(found, tuple) and len(found) == 2, "return two things: output, weights"
assert found[0].shape != (2, 3), "the output comes first, then the weights"
assert found[0].shape == (2, 4), f"the output is (T, d_v) = (2, 4), not {tuple(found[0].shape)}: whose vectors are averaged?"
assert same(found[1].sum(dim=-1), torch.ones(2)), "each query's weights add up to 1"
assert same(found[0][1], value.mean(dim=0)), "a query of zeros fits all keys alike: it receives the plain mean of the values"
assert same(found[0][0], value[0]), "the first query fits the first key: it receives the first value"
torch.manual_seed(1)
query, key, value = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 6)
expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
unscaled = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=1.0)
assert not same(attend(query, key, value)[0], unscaled), "the scores are not divided by the root of d_k"
assert same(attend(query, key, value)[0], expected), "for random vectors the output differs from PyTorch's"
### BEGIN HIDDEN TESTS
def cases(draw):
    rows = [((), 3, 5, 4, 2), ((2,), 4, 4, 9, 3), ((2, 3), 6, 2, 5, 5)]
    return [tuple(torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(axes) * n * d)]).reshape(*axes, n, d)
                  for n, d in ((T, d_k), (S, d_k), (S, d_v))) for axes, T, S, d_k, d_v in rows]

def probe(case):
    return attend(*case)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# A weighted mean of the rows of `value`, for each query: `(T, S) @ (S, d_v)`.
#
# </details>

# %% [markdown]
# ## 5. A mask
#
# *4 points · ★★★ · 15 minutes*
#
# Some keys must not be looked at: padding, or words that have not been written yet. A mask says so: boolean, **True where a query may look**. Forbidden keys get weight 0, and those that are
# left share 1 among them. A query that may look at nothing gets weights of 0, not `nan`; its gradients must not be `nan`, either, or one empty row spoils a whole training.
#
# `scores_` `(..., T, S)`, `mask` boolean and broadcasting to it; return weights `(..., T, S)`.

# %% tags=["solution:masked_weights"]
def masked_weights(scores_: Tensor, mask: Tensor) -> Tensor:
    """Shares among the keys where mask is True: (..., T, S); all 0 where it is True nowhere."""
    ### BEGIN SOLUTION
    lowest = torch.finfo(scores_.dtype).min
    return weights(scores_.masked_fill(~mask, lowest)).masked_fill(~mask, 0.0)
    ### END SOLUTION

# %% tags=["test:masked_weights:4"]
some, mask = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]), torch.tensor([[True, True, False], [True, True, True]])
found = masked_weights(some, mask)
assert isinstance(found, Tensor) and found.shape == (2, 3), "the shape stays (T, S) = (2, 3)"
assert not same(found[0], torch.tensor([0.0, 0.0, 1.0])), "the mask is upside down: True means may look"
assert found[0, 2] == 0, f"a forbidden key has weight exactly 0, not {found[0, 2].item():.4f}: a score of 0 is not a weight of 0"
assert same(found[0].sum(), torch.tensor(1.0)), (
    f"the weights that are left add up to {found[0].sum().item():.2f}, not to 1: the mask came after the softmax")
assert same(found, torch.tensor([[0.2689, 0.7311, 0.0], [0.6652, 0.2447, 0.0900]])), "expected [[0.2689, 0.7311, 0], [0.6652, 0.2447, 0.0900]]"
some = torch.tensor([[-1000.0, -2000.0]])
assert same(masked_weights(some, torch.tensor([[True, False]])), torch.tensor([[1.0, 0.0]])), (
    "with scores of -1,000 a forbidden key still wins: what you put in its place is not low enough")
some = torch.randn(2, 3, requires_grad=True)
found = masked_weights(some, torch.tensor([[True, True, True], [False, False, False]]))
assert not found.isnan().any(), "a query that may look at nothing gives nan: minus infinity everywhere is 0 / 0"
assert same(found[1].detach(), torch.zeros(3)), "a query that may look at nothing gets weights of 0"
found[0, 0].backward()
assert not some.grad.isnan().any(), "the weights are right, but the gradient is nan: replacing nan afterwards does not mend it"
### BEGIN HIDDEN TESTS
def cases(draw):
    found = []
    for shape, of_mask in (((3, 5), (3, 5)), ((2, 2, 4, 6), (2, 1, 1, 6)), ((2, 4, 4), (4, 4)), ((3, 3), (3, 3))):
        scores_ = torch.tensor([draw.gauss(0, 3) for _ in range(math.prod(shape))]).reshape(shape)
        mask = torch.tensor([draw.random() < 0.6 for _ in range(math.prod(of_mask))]).reshape(of_mask)
        mask[..., 0] = True
        found.append((scores_, mask))
    empty = found[0][1].clone()
    empty[1] = False
    return [*found, (found[0][0], empty), (found[3][0] - 5000, found[3][1])]

def probe(case):
    scores_, mask = case
    scores_ = scores_.clone().requires_grad_()
    found = masked_weights(scores_, mask)
    (found * torch.arange(found.shape[-1])).sum().backward()
    return found, scores_.grad
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Before the softmax, put a very low number in place of forbidden scores: `masked_fill(~mask, …)`. `torch.finfo(scores_.dtype).min` is the lowest that is not infinite.
#
# </details>
# <details><summary>Hint 2</summary>
#
# With a finite number an empty row becomes equal shares. Set forbidden weights to 0 once more, after the softmax.
#
# </details>

# %% [markdown]
# ## 6. No look ahead
#
# *2 points · ★★ · 8 minutes*
#
# A decoder's query may look at its own position and those before. When `T` new queries meet `S` keys, old and new, they stand at the *end*: the last query sees every key.
#
# Return a boolean mask `(T, S)`, for `1 ≤ T ≤ S`.

# %% tags=["solution:look_back"]
def look_back(T: int, S: int) -> Tensor:
    """True where one of the last T positions may look at one of S: (T, S)."""
    ### BEGIN SOLUTION
    return torch.ones(T, S, dtype=torch.bool).tril(S - T)
    ### END SOLUTION

# %% tags=["test:look_back:2"]
found = look_back(3, 3)
assert isinstance(found, Tensor) and found.dtype == torch.bool, "the mask is boolean"
assert found.shape == (3, 3), f"the shape is (T, S) = (3, 3), not {tuple(found.shape)}"
assert found.diagonal().all(), "a position may look at itself"
assert not found[0, 2], "the first query sees the third key, which comes later: the mask is the other way round"
assert found.tolist() == [[True, False, False], [True, True, False], [True, True, True]], "for T = S it is the lower triangle"
found = look_back(2, 4)
assert found.shape == (2, 4), f"the shape is (T, S) = (2, 4), not {tuple(found.shape)}"
assert found[1].all(), "with 2 queries and 4 keys the last query sees every key: queries stand at the end, not at the beginning"
assert found.tolist() == [[True, True, True, False], [True] * 4], "the first of 2 queries sees 3 of 4 keys"
### BEGIN HIDDEN TESTS
def cases(draw):
    sizes = [(1, 1), (1, 6), (5, 5), *((T, T + draw.randint(1, 4)) for T in (2, 3, 4))]
    return sizes

def probe(case):
    return look_back(*case)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# `tril(n)` keeps the lower triangle and `n` diagonals above it. For which `n` is the last row full?
#
# </details>

# %% [markdown]
# ## 7. In words
#
# *4 points · ★★ · 12 minutes*
#
# A colleague trains a model whose padding mask is applied *after* the softmax: forbidden weights are set to 0 and nothing else is done. The loss falls nearly as before. In at most 120 words: what is
# wrong with the output of a sentence that is mostly padding, and which test would you write to find the fault?

# %% [markdown] tags=["written:mask_after_softmax:4"]
# *Your answer here.*
#
# === BEGIN MARK SCHEME ===
# 1 point: forbidden keys still take a part of the softmax's sum, so the weights that are left add up to less than 1.
# 1 point: the more padding, the smaller the output: it depends on how long the other sentences of the batch are (and on the scores at padding).
# 2 points: a test that would find it: pad a sentence further and compare the outputs (1), with a tolerance and a case with more than a little padding; or: the weights of each row add up to 1 (1).
# === END MARK SCHEME ===

# %% [markdown]
# ## 8. For the curious (no marks)
#
# Multiply all scores by a number from 0.1 to 10 before the softmax. Draw the mean entropy of the weights, $-\sum_s w_s \log w_s$, against it, for `d_k` of 4 and 256, with and without the division
# by the root. What does the division make independent of what?

# %%
# your experiment
