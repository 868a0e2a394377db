# %% [markdown]
# # Assignment: decoding
#
# In six steps you write how a trained model speaks, the subject of chapter 12 of *Attention, Cell by Cell*: greedy decoding, sampling, beam search with a length penalty, and a cache of keys and values. About 105 minutes, 24 points. Everything runs on
# a CPU in seconds.
#
# **How it works.** Replace `raise NotImplementedError` by your code. Run the test under it: it says nothing if all is well, and otherwise what is likely wrong. Marks are given for other
# inputs than those of the tests, so code that only fits these gets none. Other names inside are allowed, and so is any way that gives the right result. Do not rename functions, and leave test cells as they are.
#
# A **model** here is a function: from a list of token ids so far (it begins with 1) to a tensor `(V,)` of logits for the next. Id 0 is padding, which is never written, 1 begins a sentence and is never written again, 2 ends it.

# %%
import math

import torch
from torch import Tensor

PAD, BEGIN, END = 0, 1, 2

def same(found, expected):
    """Whether two tensors have one shape and, to four decimals, one content."""
    return (isinstance(found, Tensor) and found.shape == expected.shape
            and torch.allclose(found, expected, atol=1e-4, equal_nan=True))

def from_table(table, V=6):
    """A model from {what was written so far: {next word: probability}}; elsewhere it ends."""
    def model(ids):
        p = torch.full((V,), 1e-9)
        for word, share in table.get(tuple(ids[1:]), {END: 1.0}).items():
            p[word] = share
        return p.log()
    return model

# %% [markdown]
# ## 1. Greedy
#
# *3 points · ★ · 12 minutes*
#
# Take the likeliest word, append it, ask again; stop when it is the end (2), or when `limit` words have been written. Never write 0 or 1, however likely.
#
# Return the list of ids written, without the 1 at the beginning; the 2 at the end, if it came, is part of it.

# %% tags=["solution:greedy"]
def greedy(model, limit: int) -> list[int]:
    """The likeliest next word, again and again; at most `limit` ids, the end among them."""
    ### BEGIN SOLUTION
    ids = [BEGIN]
    while len(ids) <= limit:
        logits = model(ids).clone()
        logits[[PAD, BEGIN]] = -math.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == END:
            break
    return ids[1:]
    ### END SOLUTION

# %% tags=["test:greedy:3"]
short = from_table({(): {3: 0.6, 4: 0.4}, (3,): {5: 0.7, END: 0.3}, (3, 5): {END: 0.9, 4: 0.1}})
found = greedy(short, 10)
assert isinstance(found, list), f"return a list of ids, not {type(found).__name__}"
assert found != [1, 3, 5, 2], "the beginning, 1, is not part of what was written"
assert found != [3, 5], "the end, 2, is part of what was written"
assert found[:3] == [3, 5, 2], f"the likeliest words are 3, 5, 2, not {found[:3]}"
assert found == [3, 5, 2], "it goes on after the end"
endless = from_table({(3,) * n: {3: 1.0} for n in range(50)})
assert greedy(endless, 4) == [3] * 4, f"with a limit of 4 exactly four ids are written, not {len(greedy(endless, 4))}"
assert greedy(short, 2) == [3, 5], "the limit counts the end, too: with 2 there is no room for it"
tempting = from_table({(): {PAD: 0.5, BEGIN: 0.3, 4: 0.2}})
assert greedy(tempting, 5) == [4, 2], "0 and 1 are never written, however likely"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [(draw.randint(0, 9999), draw.choice((5, 9)), limit, bias) for limit in (1, 3, 8, 20) for bias in (0.0, 2.0)]

def probe(case):
    seed, V, limit, bias = case
    def model(ids):
        draw = torch.Generator().manual_seed(seed * 1009 + hash(tuple(ids)) % 100_003)
        logits = torch.randn(V, generator=draw)
        logits[END] += bias
        return logits
    return [int(i) for i in greedy(model, limit)]
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# Set the logits of 0 and 1 to minus infinity before `argmax`, on a copy.
#
# </details>

# %% [markdown]
# ## 2. Which words may be drawn?
#
# *4 points · ★★ · 18 minutes*
#
# To sample, logits are reshaped first. Divide by the **temperature**. **Top-p** then keeps the smallest set of likeliest words whose probabilities reach `p` together: in order of probability, a word is dropped if those *before* it have reached `p` already. So the likeliest always stays.
#
# Return the probabilities `(V,)` to draw from: 0 for dropped words, and the others adding up to 1.

# %% tags=["solution:nucleus"]
def nucleus(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """Probabilities after temperature and top-p, (V,); dropped words have 0."""
    ### BEGIN SOLUTION
    p, place = (logits / temperature).softmax(dim=-1).sort(descending=True)
    keep = p.cumsum(dim=-1) - p < top_p
    keep[0] = True
    found = torch.zeros_like(p).scatter(-1, place, p * keep)
    return found / found.sum()
    ### END SOLUTION

# %% tags=["test:nucleus:4"]
logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
found = nucleus(logits)
assert isinstance(found, Tensor) and found.shape == (4,), "probabilities (V,), in the order of the logits"
assert same(found, torch.tensor([0.15, 0.5, 0.05, 0.3])), "with temperature 1 and top_p 1 nothing changes"
found = nucleus(logits, temperature=0.5)
assert not same(found, (logits * 0.5).softmax(-1)), "multiplied by the temperature: a low one makes the distribution sharper"
assert same(found, (logits * 2).softmax(-1)), "logits are divided by the temperature, before the softmax"
found = nucleus(logits, top_p=0.7)
assert not same(found, torch.tensor([0.0, 1.0, 0.0, 0.0])), "the word with which p is reached is kept: 0.5 alone is less than 0.7"
assert not same(found, torch.tensor([0.0, 0.5, 0.0, 0.3])), "what is left adds up to 1: divide by its sum"
assert not same(found, torch.tensor([0.625, 0.375, 0.0, 0.0])), "the probabilities are in sorted order: put them back to their words"
assert same(found, torch.tensor([0.0, 0.625, 0.0, 0.375])), f"top_p 0.7 keeps 0.5 and 0.3, as 0.625 and 0.375; yours is {found.tolist()}"
assert same(nucleus(logits, top_p=0.01), torch.tensor([0.0, 1.0, 0.0, 0.0])), "the likeliest word always stays"
assert same(nucleus(logits, temperature=2.0, top_p=0.6), torch.tensor([0.0, 0.5635, 0.0, 0.4365])), "first the temperature, then top-p on the new probabilities"
assert same(logits, torch.tensor([0.15, 0.5, 0.05, 0.3]).log()), "the logits that were given have changed"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [(torch.tensor([draw.gauss(0, 2) for _ in range(draw.randint(3, 12))]), t, p)
            for t, p in ((1.0, 1.0), (0.7, 0.9), (1.5, 0.5), (1.0, 0.05), (3.0, 0.95), (0.3, 0.8))]

def probe(case):
    logits, temperature, top_p = case
    return nucleus(logits.clone(), temperature, top_p)
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `p.sort(descending=True)` gives sorted values and their places; `p.cumsum(-1) - p` is what the words before each have together.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `torch.zeros_like(p).scatter(-1, place, values)` puts sorted values back.
#
# </details>

# %% [markdown]
# ## 3. How good is a sentence?
#
# *2 points · ★ · 8 minutes*
#
# The log probability of a sentence is the sum over its words, each given those before it. Longer ones have less, so the paper divides by $((5 + n) / 6)^\alpha$, with $n$ the number of words, the end among them (Wu et al. 2016).
#
# Return the score of `ids`, which do not begin with 1, in nats.

# %% tags=["solution:score"]
def score(model, ids: list[int], alpha: float = 0.6) -> float:
    """Log probability of a sentence over its length penalty."""
    ### BEGIN SOLUTION
    total = sum(model([BEGIN, *ids[:n]]).log_softmax(dim=-1)[word].item() for n, word in enumerate(ids))
    return total / ((5 + len(ids)) / 6) ** alpha
    ### END SOLUTION

# %% tags=["test:score:2"]
found = score(short, [3, 5, 2], alpha=0.0)
assert isinstance(found, float), "return a float: tensor.item()"
assert abs(found - 0.6 * 0.7 * 0.9) > 1e-3, "this is the probability: its logarithm is asked for"
assert abs(found - math.log(0.6 * 0.7)) > 1e-3, "the end counts, too"
assert abs(found - math.log(0.6 * 0.7 * 0.9)) < 1e-3, f"log(0.6 · 0.7 · 0.9) = {math.log(0.6 * 0.7 * 0.9):.4f}, not {found:.4f}: is every word given all before it?"
found, total = score(short, [3, 5, 2], alpha=1.0), math.log(0.6 * 0.7 * 0.9)
assert abs(found - total / 3) > 1e-3, "divided by the length; the penalty is ((5 + n) / 6) ** alpha"
assert abs(found - total * 8 / 6) > 1e-3, "multiplied by the penalty: divide"
assert abs(found - total / (8 / 6)) < 1e-3, f"with alpha 1 and three words the penalty is 8 / 6: {total * 6 / 8:.4f}, not {found:.4f}"
raw = lambda ids: torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0])
assert abs(score(raw, [4], alpha=0.0) - raw([]).log_softmax(-1)[4].item()) < 1e-4, "a model gives logits, not log probabilities: log_softmax"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [(draw.randint(0, 9999), [draw.randint(3, 6) for _ in range(n)] + [END], alpha) for n, alpha in ((0, 0.6), (1, 0.0), (4, 0.6), (7, 1.3))]

def probe(case):
    seed, ids, alpha = case
    def model(ids):
        draw = torch.Generator().manual_seed(seed * 1009 + hash(tuple(ids)) % 100_003)
        return 3 * torch.randn(7, generator=draw)
    return float(score(model, ids, alpha))
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# Word `n` is judged by `model([BEGIN] + ids[:n])`.
#
# </details>

# %% [markdown]
# ## 4. Beam search
#
# *5 points · ★★★ · 30 minutes*
#
# Keep the `beam` best unfinished sentences by log probability. At each step, from each, every word may follow. Those that end are **kept as finished**, with their score (exercise 3), and take no place in the beam; of all others the `beam` best go on. When `limit` ids have been written, unfinished ones compete, too, as they are. Search on until the limit or until nothing is unfinished (no early stop).
#
# Return the ids of the sentence with the best score. 0 and 1 are never written.

# %% tags=["solution:beam_search"]
def beam_search(model, limit: int, beam: int = 4, alpha: float = 0.6) -> list[int]:
    """The best sentence that a search with `beam` unfinished ones finds."""
    ### BEGIN SOLUTION
    live, finished = [(0.0, [])], []
    for _ in range(limit):
        grown = []
        for total, ids in live:
            log_p = model([BEGIN, *ids]).log_softmax(dim=-1).tolist()
            for word in range(2, len(log_p)):
                entry = (total + log_p[word], [*ids, word])
                (finished if word == END else grown).append(entry)
        live = sorted(grown, key=lambda entry: entry[0], reverse=True)[:beam]
    return max(finished + live, key=lambda entry: entry[0] / ((5 + len(entry[1])) / 6) ** alpha)[1]
    ### END SOLUTION

# %% tags=["test:beam_search:5"]
tricky = from_table({(): {3: 0.6, 4: 0.4}, (3,): {3: 0.35, 4: 0.35, 5: 0.3}, (4,): {5: 1.0}, (4, 5): {END: 1.0},
                     (3, 3): {END: 1.0}, (3, 4): {END: 1.0}, (3, 5): {END: 1.0}})
assert greedy(tricky, 5)[0] == 3, "your greedy does not begin with the likeliest word"
assert isinstance(beam_search(tricky, 5, 2), list), "return a list of ids"
assert beam_search(tricky, 5, 1, 0.0)[0] == 3, "a beam of 1 is greedy decoding"
found = beam_search(tricky, 5, 2, 0.0)
assert found[:1] != [1], "the beginning, 1, is not part of what was written"
assert found == [4, 5, 2], f"with a beam of 2 the better sentence 4, 5, 2 (0.4) beats 3, 3, 2 (0.21); yours is {found}"
early = from_table({(): {END: 0.4, 3: 0.6}, (3,): {4: 0.5, 5: 0.5}, (3, 4): {4: 0.5, 5: 0.5}, (3, 5): {4: 0.5, 5: 0.5}})
assert beam_search(early, 3, 2, 0.0) == [2], "a sentence that ended early and is the best was forgotten: keep finished ones"
crowd = from_table({(): {END: 0.5, 3: 0.3, 4: 0.2}, (3,): {5: 1.0}, (4,): {5: 1.0}, (3, 5): {END: 0.1, 3: 0.9}, (4, 5): {END: 1.0}})
assert beam_search(crowd, 6, 2, 8.0) == [4, 5, 2] or beam_search(crowd, 6, 2, 8.0)[0] == 3, "a finished sentence took a place in the beam"
lengths = from_table({(): {3: 0.5, END: 0.5}, (3,): {4: 0.9, END: 0.1}, (3, 4): {END: 0.9, 5: 0.1}})
assert beam_search(lengths, 5, 3, 0.0) == [2], "with alpha 0 the most probable sentence wins, the empty one"
assert beam_search(lengths, 5, 3, 2.0) == [3, 4, 2], "with alpha 2 longer ones are forgiven more: is the score divided by the penalty at its own length?"
assert beam_search(endless, 3, 2) == [3, 3, 3], "at the limit unfinished sentences compete as they are"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [(draw.randint(0, 9999), limit, beam, alpha) for limit, beam, alpha in (
        (3, 1, 0.0), (4, 2, 0.0), (4, 3, 0.6), (3, 64, 0.6), (6, 2, 1.5), (5, 4, 0.6), (6, 3, 0.0), (2, 9, 0.6))]

def probe(case):
    seed, limit, beam, alpha = case
    def model(ids):
        draw = torch.Generator().manual_seed(seed * 1009 + hash(tuple(ids)) % 100_003)
        logits = 2 * torch.randn(6, generator=draw)
        logits[END] += 0.7
        return logits
    return [int(i) for i in beam_search(model, limit, beam, alpha)]
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two lists of pairs (log probability, ids): `live`, which begins with `(0.0, [])`, and `finished`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# In the loop choose by the plain sum of log probabilities. The penalty comes in once, at the end, with each sentence's own length.
#
# </details>

# %% [markdown]
# ## 5. A cache
#
# *4 points · ★★★ · 25 minutes*
#
# A decoder that writes word after word computes keys and values of the old ones again each time. Keep them. `CachedAttention` gets the vectors of the *new* words only, `(n, d)`, adds their keys and values to those kept, and returns what causal attention over all words so far gives for the new ones: `(n, d)`. The first word stands at position 0; its vector plus `position(t)` is what is projected.
#
# One head; matrices multiply from the right; scores are divided by the root of `d`. `position(t)` gives the vector of position `t`.

# %% tags=["solution:CachedAttention"]
class CachedAttention:
    """Causal self-attention that is fed new words only: call with (n, d), get (n, d)."""

    def __init__(self, w_query: Tensor, w_key: Tensor, w_value: Tensor, position):
        self.w_query, self.w_key, self.w_value, self.position = w_query, w_key, w_value, position
        ### BEGIN SOLUTION
        self.keys, self.values = w_key.new_zeros(0, w_key.shape[1]), w_value.new_zeros(0, w_value.shape[1])
        ### END SOLUTION

    def __call__(self, x: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        old, n = len(self.keys), len(x)
        x = x + torch.stack([self.position(old + i) for i in range(n)])
        self.keys = torch.cat([self.keys, x @ self.w_key])
        self.values = torch.cat([self.values, x @ self.w_value])
        scores = x @ self.w_query @ self.keys.T / math.sqrt(self.keys.shape[1])
        past = torch.ones(n, old + n, dtype=torch.bool).tril(old)
        return scores.masked_fill(~past, -math.inf).softmax(dim=-1) @ self.values
        ### END SOLUTION

# %% tags=["test:CachedAttention:4"]
torch.manual_seed(0)
w_q, w_k, w_v = torch.randn(3, 4, 4).unbind()
x = torch.randn(6, 4)
position = lambda t: torch.tensor([math.sin(t), math.cos(t), math.sin(t / 10), math.cos(t / 10)])

def whole(x, at=None, causal=True):
    x = x + torch.stack([position(t) for t in (range(len(x)) if at is None else at)])
    scores = x @ w_q @ (x @ w_k).T / 2
    if causal:
        scores = scores.masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1) @ (x @ w_v)

expected = whole(x)
cache = CachedAttention(w_q, w_k, w_v, position)
first = cache(x[:1])
assert isinstance(first, Tensor) and first.shape == (1, 4), "for n new words the result is (n, d)"
assert same(first, expected[:1]), "the first word by itself is wrong already: position 0, projected, attends to itself"
second = cache(x[1:2])
assert second.shape == (1, 4), "only the new words' results are returned"
assert not same(second, whole(x[1:2])), "the second word sees only itself: the keys and values of the first were not kept"
assert not same(second, whole(x[:2], at=[0, 0])[1:]), "the second word stands at position 1, not 0: count those that are kept"
assert same(second, expected[1:2]), "the second word's result is not that of attention over both"
third = cache(x[2:5])
assert not same(third[-1:], expected[4:5]) or same(third[0], expected[2]), "several new words at once: among themselves they need the causal mask"
assert same(third, expected[2:5]), "three words at once give other results than one after the other: mask and positions of the new ones, aligned at the end"
assert same(cache(x[5:]), expected[5:]), "after several at once the next one is wrong: were all of them kept?"
again = CachedAttention(w_q, w_k, w_v, position)
assert same(again(x), expected), "a new cache begins empty, and all words at once give what they give one by one"
### BEGIN HIDDEN TESTS
def cases(draw):
    def random(*shape):
        return torch.tensor([draw.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)
    return [([random(d, d) for _ in range(3)], random(sum(parts), d), parts) for d, parts in (
        (3, [1, 1, 1]), (4, [2, 3]), (5, [1, 4, 1, 2]), (2, [6]))]

def probe(case):
    matrices, x, parts = case
    cache = CachedAttention(*matrices, lambda t: torch.arange(x.shape[1]) * 0.1 * t)
    return [cache(part) for part in x.split(parts)]
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many words came before? `len(self.keys)`. That is the position of the first new one.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Of `n` queries and `old + n` keys, query `i` sees the first `old + i + 1`: `torch.ones(n, old + n, dtype=torch.bool).tril(old)`.
#
# </details>

# %% [markdown]
# ## 6. What does it save?
#
# *2 points · ★★ · 8 minutes*
#
# Count rows that are projected to keys while a sentence of `n` words is written, word after word: without a cache each step projects all words so far, with it only the new one. Return both counts. How does their ratio grow?

# %% tags=["solution:projections"]
def projections(n: int) -> tuple[int, int]:
    """Rows projected to keys in writing n words: without a cache, with it."""
    ### BEGIN SOLUTION
    return n * (n + 1) // 2, n
    ### END SOLUTION

# %% tags=["test:projections:2"]
found = projections(4)
assert isinstance(found, tuple) and len(found) == 2, "return two numbers: without, with"
assert found[0] != 16, "step t projects t words, not n: 1 + 2 + 3 + 4"
assert tuple(found) != (4, 10), "exchanged: first without a cache, then with it"
assert tuple(found) == (10, 4), f"for four words: 1 + 2 + 3 + 4 = 10, and 4, not {found}"
assert all(isinstance(number, int) for number in projections(7)), "whole numbers"
### BEGIN HIDDEN TESTS
def cases(draw):
    return [1, 2, draw.randint(10, 99), draw.randint(500, 5000)]

def probe(case):
    return [int(number) for number in projections(case)]
### END HIDDEN TESTS

# %% [markdown]
# <details><summary>Hint</summary>
#
# $1 + 2 + \dots + n$ has a formula; a loop is as good.
#
# </details>

# %% [markdown]
# ## 7. In words
#
# *4 points · ★★ · 12 minutes*
#
# A team raises the beam from 4 to 100. The average log probability of its translations rises, and BLEU falls; many outputs have become very short. In at most 120 words: how can a better search give worse translations, what does the length penalty change, and whose fault is it, the search's or the model's?

# %% [markdown] tags=["written:wide_beams:4"]
# *Your answer here.*
#
# === BEGIN MARK SCHEME ===
# 1 point: the search finds what it is asked for, more probable outputs; the most probable need not be the best.
# 1 point: every word costs log probability, so short (even empty) sentences win when the search is wide enough to find them.
# 1 point: the penalty divides by a power of the length and so favours longer ones; it is a correction chosen on validation data, not part of the model.
# 1 point: it is the model's (its probabilities of short outputs are too high); a narrow beam hides that.
# === END MARK SCHEME ===

# %% [markdown]
# ## 8. For the curious (no marks)
#
# Make a model of random logits in which the end is a little more likely than other words. For beams of 1, 2, 4, …, 256 and three values of alpha, measure the mean length of what the search finds.
