# %% [markdown]
# # Assignment: positions
#
# In six steps you write the positions of chapter 05 of *Attention, Cell by Cell*: sines and cosines, the shift between them, and rotary positions. About 80 minutes, 21 points. Everything runs on
# a CPU in seconds.
#
# **How it works.** Replace `raise NotImplementedError` by your code. Run the test under it: it says nothing if all is well, and otherwise what is likely wrong. Marks are given for other
# inputs than those of the tests, so code that only fits these gets none. Loops, complex numbers, other names inside: all is allowed. Do not rename functions, and leave test cells as they are.
#
# Shapes: `T` positions, counted from 0; `d_model` numbers in a vector, here always even; pair `i` is the numbers `2i` and `2i + 1`.

# %%
import math

import torch
from torch import Tensor

def same(found, expected, atol=1e-4):
    """Whether two tensors have one shape and, to four decimals, one content."""
    return (isinstance(found, Tensor) and found.shape == expected.shape
            and torch.allclose(found.double(), expected.double(), atol=atol, equal_nan=True))

# %% [markdown]
# ## 1. How fast each pair turns
#
# *2 points · ★ · 8 minutes*
#
# A position is told by hands of clocks. The hand of pair `i` turns by $\omega_i = 10000^{-2i/d_{model}}$ (in radians) from one position to the next: pair 0 by 1, the last by little.
#
# Return the `d_model / 2` rates, in `float64`.

# %% tags=["solution:rates"]
def rates(d_model: int) -> Tensor:
    """What each pair turns by at each step, in radians: (d_model / 2,), float64."""
    ### BEGIN SOLUTION
    return 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    ### END SOLUTION

# %% tags=["test:rates:2"]
found = rates(8)
assert isinstance(found, Tensor) and found.shape == (4,), f"a rate for each pair: (4,), not {tuple(getattr(found, 'shape', ()))}"
assert found.dtype == torch.float64, "in float64: positions in the thousands need the digits"
assert found[0] == 1, "pair 0 turns by 10000 to the power 0, which is 1"
assert not same(found, 10000.0 ** (torch.arange(0, 8, 2) / 8)), "the exponent is negative: hands get slower, not faster"
assert not same(found, 10000.0 ** (-torch.arange(4) / 8.0)), "2i / d_model: the exponent counts numbers, not pairs"
assert not same(found, 10000.0 ** (-torch.arange(4) / 3.0)), "divide by d_model, so that 1/10000 itself is not reached"
assert same(found, torch.tensor([1.0, 0.1, 0.01, 0.001])), f"for d_model 8 the rates are 1, 0.1, 0.01, 0.001, not {found.tolist()}"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [2, 4, 64, 2 * draw.randint(3, 30)]

def probe(case):
    found = rates(case)
    return found, found.log10()  # small ones count as much as large ones
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# `torch.arange(0, d_model, 2, dtype=torch.float64)` is `2i` for all pairs at once.
#
# </details>

# %% [markdown]
# ## 2. The table
#
# *3 points · ★★ · 12 minutes*
#
# Position `t` is written as the sine and the cosine of every hand's angle $t\,\omega_i$: the sine at number `2i`, the cosine at `2i + 1`, side by side (§3.5 of the paper).
#
# Return the table `(length, d_model)`.

# %% tags=["solution:table"]
def table(length: int, d_model: int) -> Tensor:
    """Sinusoidal positions (Vaswani et al. 2017, §3.5): (length, d_model)."""
    ### BEGIN SOLUTION
    angle = torch.arange(length, dtype=torch.float64).unsqueeze(1) * rates(d_model)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
    ### END SOLUTION

# %% tags=["test:table:3"]
found = table(5, 8)
assert isinstance(found, Tensor) and found.shape == (5, 8), f"the table is (length, d_model) = (5, 8), not {tuple(getattr(found, 'shape', ()))}"
assert not same(found[0], torch.tensor([1.0, 0.0] * 4)), "the sine comes first: position 0 is 0, 1, 0, 1, …"
assert not same(found[0], torch.tensor([0.0] * 4 + [1.0] * 4)), "sines and cosines side by side, not all sines and then all cosines"
assert not same(found[0], torch.tensor([math.sin(1), math.cos(1), math.sin(0.1), math.cos(0.1), math.sin(0.01), math.cos(0.01), math.sin(0.001), math.cos(0.001)])), "positions are counted from 0"
assert same(found[0], torch.tensor([0.0, 1.0] * 4)), f"position 0 is 0, 1, 0, 1, …, not {found[0].tolist()}"
assert same(found[3, :4], torch.tensor([math.sin(3), math.cos(3), math.sin(0.3), math.cos(0.3)])), (
    "position 3 begins with sin 3, cos 3, sin 0.3, cos 0.3: sine and cosine of a pair have one rate")
assert same(table(5, 8), table(9, 8)[:5]), "a longer table begins with the shorter one"
assert same(found.square().sum(dim=1), torch.full((5,), 4.0)), "sin² + cos² = 1 for each of the 4 pairs"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [(1, 2), (7, 4), (30, 16), (draw.randint(50, 90), 2 * draw.randint(2, 20)), (3000, 6)]

def probe(case):
    found = table(*case)
    return found[-40:], found.shape[0]
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Angles: positions as a column `(length, 1)` times rates `(d_model / 2,)` gives `(length, d_model / 2)`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `torch.stack([a, b], dim=-1)` makes pairs `(…, 2)`; flattening the last two axes puts them side by side. Or fill `found[:, 0::2]` and `found[:, 1::2]`.
#
# </details>

# %% [markdown]
# ## 3. A step is a turn
#
# *4 points · ★★★ · 15 minutes*
#
# Moving by `k` positions turns every hand by $k\,\omega_i$, wherever one starts. So there is one matrix $M_k$ with $PE(t + k) = M_k\,PE(t)$ for *all* t: that is why the paper hoped that a model could learn to look by relative position.
#
# Return $M_k$, `(d_model, d_model)`. `k` may be negative.

# %% tags=["solution:shift"]
def shift(k: int, d_model: int) -> Tensor:
    """The matrix that moves every position by k: table(n, d)[t + k] = shift(k, d) @ table(n, d)[t]."""
    ### BEGIN SOLUTION
    angle = k * rates(d_model)
    matrix = torch.zeros(d_model, d_model, dtype=torch.float64)
    even = torch.arange(0, d_model, 2)
    matrix[even, even] = matrix[even + 1, even + 1] = angle.cos()
    matrix[even, even + 1], matrix[even + 1, even] = angle.sin(), -angle.sin()
    return matrix
    ### END SOLUTION

# %% tags=["test:shift:4"]
found, positions = shift(3, 8), table(20, 8).double()
assert isinstance(found, Tensor) and found.shape == (8, 8), f"a matrix (d_model, d_model) = (8, 8), not {tuple(getattr(found, 'shape', ()))}"
found = found.double()
assert same(shift(0, 8), torch.eye(8)), "moving by 0 changes nothing: the identity"
assert not same(positions[:-3], positions[3:] @ found.T), "it moves backwards: the two sines have each other's sign"
assert not same(positions[3:], positions[:-3] @ found), "it is right when it multiplies from the right; M_k @ PE(t) needs the transposed one"
assert same(positions[3:4], positions[:1] @ found.T), "M_3 @ PE(0) is not PE(3)"
assert same(positions[3:], positions[:-3] @ found.T), "it is right for position 0 only: the same matrix must do for all positions, so it may not contain one"
assert same(found @ found.T, torch.eye(8)), "a turn keeps lengths: M times its transposed is the identity"
assert same(shift(-3, 8).double() @ found, torch.eye(8)), "moving by 3 and by -3 is no move at all"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [(1, 2), (5, 4), (-4, 6), (draw.randint(10, 90), 2 * draw.randint(2, 10)), (1000, 4)]

def probe(case):
    return shift(*case)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For one pair: $\sin(a + b) = \sin a \cos b + \cos a \sin b$ and $\cos(a + b) = \cos a \cos b - \sin a \sin b$. Which 2 × 2 matrix takes $(\sin a, \cos a)$ there?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The large matrix has such blocks along its diagonal and zeros elsewhere: `torch.block_diag(*blocks)`.
#
# </details>

# %% [markdown]
# ## 4. How alike are two positions?
#
# *2 points · ★ · 8 minutes*
#
# The dot product of two rows of the table depends on their distance only. Return it as a function of the distances, without making a table: $\sum_i \cos(k\,\omega_i)$.

# %% tags=["solution:alike"]
def alike(distance: Tensor, d_model: int) -> Tensor:
    """The dot product of two positions so far apart: the shape of distance."""
    ### BEGIN SOLUTION
    return (distance.double().unsqueeze(-1) * rates(d_model)).cos().sum(dim=-1)
    ### END SOLUTION

# %% tags=["test:alike:2"]
positions, distance = table(30, 8).double(), torch.arange(30)
found = alike(distance, 8)
assert isinstance(found, Tensor) and found.shape == (30,), f"a number for each distance: (30,), not {tuple(getattr(found, 'shape', ()))}"
assert found[0] != 8, "a row with itself gives d_model / 2 = 4, one for each pair"
assert not same(found * 4, positions @ positions[0]), "a sum over pairs, not a mean"
assert same(found, positions @ positions[0]), "not the dot products of the table's rows with row 0"
assert same(found[:20], positions[7:27] @ positions[7]), "not those with row 7: only the distance may count"
assert same(alike(-distance, 8), found), "three to the left is as alike as three to the right"
assert alike(torch.ones(2, 5), 8).shape == (2, 5), "distances may have any shape"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [(torch.arange(12), 2), (torch.tensor([[draw.randint(-50, 50) for _ in range(4)] for _ in range(3)]), 16), (torch.tensor(7), 6)]

def probe(case):
    return alike(*case)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# `distance.unsqueeze(-1) * rates(d_model)` has the pairs on a new last axis.
#
# </details>

# %% [markdown]
# ## 5. Rotary positions
#
# *4 points · ★★★ · 15 minutes*
#
# Instead of adding a position to a vector one can *turn* it: pair `i` of the query at position `t` by the angle $t\,\omega_i$ (Su et al. 2021). With $(a, b)$ the pair, it becomes $(a \cos - b \sin,\ a \sin + b \cos)$.
#
# `x` is `(..., T, d)`; its first row stands at position `start`. Return the same shape and dtype.

# %% tags=["solution:turn"]
def turn(x: Tensor, start: int = 0) -> Tensor:
    """Rotary positions: each pair of the row at position t turned by t times its rate."""
    ### BEGIN SOLUTION
    T, d = x.shape[-2:]
    angle = (start + torch.arange(T, dtype=torch.float64)).unsqueeze(1) * rates(d)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    ### END SOLUTION

# %% tags=["test:turn:4"]
x = torch.tensor([1.0, 0.0]).repeat(4, 2)  # (T, d) = (4, 4): both pairs are (1, 0)
found = turn(x)
assert isinstance(found, Tensor) and found.shape == x.shape, f"the shape stays, (4, 4), not {tuple(getattr(found, 'shape', ()))}"
assert found.dtype == x.dtype, f"the dtype stays, {x.dtype}, not {found.dtype}"
assert same(found[0], x[0]), "position 0 is not turned"
assert not same(found[1, :2], torch.tensor([math.cos(1), -math.sin(1)])), "it turns the wrong way: (1, 0) becomes (cos, sin)"
assert same(found[1, :2], torch.tensor([math.cos(1), math.sin(1)])), "at position 1 the first pair (1, 0) becomes (cos 1, sin 1): are 0 and 1 the pair, or 0 and d / 2?"
assert same(found[3, 2:], torch.tensor([math.cos(0.03), math.sin(0.03)])), "the second pair turns by 0.01 a position for d = 4"
torch.manual_seed(0)
q, k = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8)
assert turn(q).shape == q.shape, "axes before the last two stay as they are: (B, H, T, d)"
assert same(turn(q).norm(dim=-1), q.norm(dim=-1)), "a turn keeps lengths"
near, far = turn(q) @ turn(k).transpose(-2, -1), turn(q, 100) @ turn(k, 100).transpose(-2, -1)
assert same(turn(q[..., 2:, :], 2), turn(q)[..., 2:, :]), "with start=2 the first row stands at position 2"
assert same(near, far, atol=1e-3), "scores may depend on the distance of query and key only, and do not change when both move by 100"
### BEGIN HIDDEN TESTS
def cases(draw):
    def random(*shape):
        return torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)
    return [(random(3, 2), 0), (random(5, 6), 3), (random(2, 3, 4, 8), draw.randint(1, 30)), (random(2, 1, 4), 500)]

def probe(case):
    return turn(*case)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `x[..., 0::2]` are the first numbers of all pairs, `x[..., 1::2]` the second.
#
# </details>
# <details><summary>Hint 2</summary>
#
# With complex numbers it is one product: `torch.view_as_complex` of the pairs, times `torch.polar(ones, angle)`.
#
# </details>

# %% [markdown]
# ## 6. Who sees the order?
#
# *2 points · ★★ · 10 minutes*
#
# A function `f` takes `(T, d)` and gives `(T, d)`. It is **equivariant** if, when the rows come in another order, the outputs are the same, in that order. Self-attention without positions is. Return whether `f` is,
# tried on some random inputs and orders (a tolerance of 1e-4). Do not let an order that changes nothing deceive you.

# %% tags=["solution:is_equivariant"]
def is_equivariant(f, T: int = 6, d: int = 8) -> bool:
    """Whether f(x[order]) equals f(x)[order] for random x (T, d) and orders."""
    ### BEGIN SOLUTION
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        x, order = torch.randn(T, d, generator=draw), torch.randperm(T, generator=draw)
        order = order.roll(1) if torch.equal(order, torch.arange(T)) else order
        if not torch.allclose(f(x[order]), f(x)[order], atol=1e-4):
            return False
    return True
    ### END SOLUTION

# %% tags=["test:is_equivariant:2"]
def attends(x):
    return torch.softmax(x @ x.T, dim=-1) @ x

assert isinstance(is_equivariant(attends), bool), "return True or False"
assert is_equivariant(attends), "self-attention without positions is equivariant: compare f(x[order]) with f(x)[order]"
assert not is_equivariant(lambda x: attends(x + table(len(x), 8).float())), "with positions added it is not"
assert not is_equivariant(lambda x: x.cumsum(dim=0)), "a running sum is not"
assert not is_equivariant(lambda x: torch.cat([x[:1], x[:1], x[2:]])), "copying row 0 into row 1 is not: did your order leave the first rows in place?"
assert is_equivariant(lambda x: x - x.mean(dim=0)), "subtracting the mean of all rows is: every row is treated alike"
assert not is_equivariant(lambda x: x.flip(0).clone()), "turning the order round is not: the outputs must be those of f(x), in the new order"
### BEGIN HIDDEN TESTS
def cases(draw):
    return ["square", "last", "sorted", "swapped", "mean", "noise"]

def probe(case):
    def swapped(x):
        x = x.clone()
        x[[4, 5]] = x[[5, 4]]
        return x
    functions = {"square": lambda x: x * x, "last": lambda x: x[-1:].expand(len(x), -1), "swapped": swapped,
                 "sorted": lambda x: x.sort(dim=0).values, "mean": lambda x: x.mean(dim=0, keepdim=True).expand(len(x), -1),
                 "noise": lambda x: x + 0.01 * torch.arange(len(x)).unsqueeze(1)}
    return bool(is_equivariant(functions[case]))
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# `order = torch.randperm(T)`; `x[order]` are the rows in that order. Several orders are better than one.
#
# </details>

# %% [markdown]
# ## 7. In words
#
# *4 points · ★★ · 12 minutes*
#
# A model with *learned* positions was trained on texts of up to 128 words. Now it is given 200. Another has sines, a third rotary positions; neither was trained on more than 128 words, either. In at most 120 words: what happens in each of the three, and why does a formula for position 150 not by itself make a model understand
# position 150?

# %% [markdown] tags=["written:longer_texts:4"]
# *Your answer here.*
#
# === BEGIN MARK SCHEME ===
# 1 point: learned: there is no row 129 (an error), or, if the table is longer, rows that were never trained.
# 1 point: sines: there is a vector, but combinations of slow hands that training never showed; measured quality falls.
# 1 point: rotary: distances up to 127 were seen, longer ones not; short-distance behaviour survives, long distances are new.
# 1 point: the layers behind must have learned what to do with the vector (or angle); a formula defines the input, not the answer to it.
# === END MARK SCHEME ===

# %% [markdown]
# ## 8. For the curious (no marks)
#
# Draw `alike` for distances up to 500 at `d_model` 8, 64 and 512. Then take another base than 10,000. What does the base decide, and what would a base of 2 do to positions 0 and 1,000?
