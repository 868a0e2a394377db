# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12. Decoding
#
# *How does it speak?* A Transformer gives a score to every possible next word. It does not write a sentence; somebody has to choose, word after word.
# We start with a short loop and mend what is wrong with it: it does not stop, it computes everything again at each word, and the likeliest
# word may lead away from the likeliest sentence. At the end you will have built `DecoderCache`, `greedy_decode` and `beam_search`.
#
# <div class="admonition note">
# <p class="admonition-title">What it takes</p>
# <p>Reading: 30 minutes. Running: about a minute on a CPU; a GPU does not help. Before: chapters 03 and 04 (heads, masks) and 09 (the model). From
# chapter 10 only what teacher forcing is: in training, the decoder is given the right words so far.</p>
# </div>
#
# [Read on the site](https://OWNER.github.io/attention-cell-by-cell/book/12_decoding.html) · [Run in Colab](https://colab.research.google.com/github/OWNER/attention-cell-by-cell/blob/main/book/12_decoding.ipynb)

# %% [markdown]
# ## Telling the time
#
# To judge how a model speaks we need something that may be said in several ways, and we want to know how often each is said. So we invent the
# speakers. They read a 24-hour clock, in steps of five minutes, and each way of telling a time has a fixed share.

# %%
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ONES = ("one two three four five six seven eight nine ten eleven twelve "
        "thirteen fourteen fifteen sixteen seventeen eighteen nineteen")
TENS = ("twenty", "thirty", "forty", "fifty")

def number(n):  # from 1 to 59, as a list of words
    ones, tens = n % 10 if n > 19 else n, TENS[n // 10 - 2] if n > 19 else ""
    return tens.split() + ONES.split()[ones - 1:ones] * (ones > 0)

print(number(7), number(20), number(45))


# %%
def ways(hour, minute):
    day = ("at night", "in the morning", "in the afternoon",
           "in the evening")[hour // 6].split()
    here, next_hour = (number((h - 1) % 12 + 1) for h in (hour, hour + 1))
    if minute == 0:
        return {" ".join(number(hour) + ["hundred"]): 0.4,
                " ".join(here + ["o'clock"] + day): 0.6}
    plain = number(hour) + ["oh"] * (minute < 10) + number(minute)
    away = minute if minute <= 30 else 60 - minute
    away = {15: ["quarter"], 30: ["half"]}.get(away) or number(away)
    joins = {"to": 0.26, "of": 0.20, "till": 0.14}
    if minute <= 30:
        joins = {"past": 0.6} if minute == 30 else {"past": .33, "after": .27}
        next_hour = here
    return {" ".join(plain): 0.4} | {
        " ".join(away + [join] + next_hour + day): share
        for join, share in joins.items()}

for hour, minute in ((16, 45), (16, 20), (16, 30)):
    print(f"{hour}:{minute}")
    for sentence, share in ways(hour, minute).items():
        print(f"   {share:.2f}  {sentence}")

# %% [markdown]
# Four in ten speakers read the digits; six in ten count minutes from an hour and add the part of the day. Hours run from 1 to 23, which makes 276
# times. The model gets the digits as tokens and 36 times are kept from it.

# %%
times = list(itertools.product(range(1, 24), range(0, 60, 5)))
truth = list(itertools.starmap(ways, times))
digits = ["<pad>", "<bos>", "<eos>", *"0123456789:"]
words = ["<pad>", "<bos>", "<eos>", *sorted(
    {word for told in truth for way in told for word in way.split()})]

def rows(lists):
    return nn.utils.rnn.pad_sequence(
        [torch.tensor(ids) for ids in lists], batch_first=True)

src = rows([[*map(digits.index, f"{hour}:{minute:02d}"), 2]
            for hour, minute in times])
said = [(i, share, [1, *map(words.index, way.split()), 2])
        for i, told in enumerate(truth) for way, share in told.items()]
which = torch.tensor([i for i, _, _ in said])  # whose way this is
share = torch.tensor([share for _, share, _ in said])
tgt = rows([ids for _, _, ids in said])
torch.manual_seed(0)
unseen, seen = torch.randperm(len(times)).split([36, 240])
print("src", tuple(src.shape), "  tgt", tuple(tgt.shape),
      "  words", len(words))
example = times.index((16, 45))
print(src[example].tolist(), [digits[i] for i in src[example]])
assert not {example, times.index((16, 20))} & set(unseen.tolist())

# %% [markdown]
# The training loop is short: at each update 40 times with all their ways, each way's loss weighted by its share. The rate climbs for 30 updates and
# then falls to nearly 0. No model can get below the entropy of the shares, the mean of $-\log$ share: what the speakers leave open.

# %%
torch.manual_seed(0)
model = Transformer(TransformerConfig(
    len(digits), len(words), d_model=48, n_heads=4, n_layers=2, d_ff=96,
    dropout=0.0, tie_embeddings="decoder"))
untrained = Transformer(model.config).eval()
optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
updates, losses = 340, []
for update in range(1, updates + 1):
    optimizer.param_groups[0]["lr"] = 5e-3 * min(
        update / 30, 1, 2 * (1 - update / updates) + 0.02)
    batch = torch.isin(which, seen[torch.randperm(len(seen))[:40]])
    logits = model(src[which[batch]], tgt[batch, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), tgt[batch, 1:],
                           ignore_index=0, reduction="none").sum(dim=1)
    loss = (loss * share[batch]).sum() / 40  # nats for a sentence
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
entropy = -(share * share.log()).sum().item() / len(times)
last = sum(losses[-10:]) / 10
model.eval()
print(f"first loss above 10 nats: {losses[0] > 10}")
print(f"the speakers leave open {entropy:.2f} nats; "
      f"the last losses are within 0.2 of it: {last - entropy < 0.2}")
assert last - entropy < 0.2


# %% [markdown]
# ## The loop
#
# To speak: begin with `<bos>`, ask for the scores of the next word, take the largest, append it, ask again. (Chapter 09 did that in passing.)

# %%
def text(ids):
    return " ".join(words[i] for i in ids)

@torch.no_grad()
def loop_1(model, src, steps):
    memory, written = model.encode(src), torch.tensor([[1]])
    for _ in range(steps):
        new = model.decode(written, *memory)[:, -1:].argmax(dim=-1)
        written = torch.cat([written, new], dim=1)
    return written

one = src[example:example + 1]
for name, speaker in (("untrained", untrained), ("trained", model)):
    print(f"{name}: {text(loop_1(speaker, one, 10)[0])}")

# %% [markdown]
# The untrained model babbles; the loop is right all the same. The trained one tells the time, ends, and is asked to go on: nothing in training said what comes after `<eos>`. So a row must **stop** at `<eos>`, and in a batch,
# where rows end at different times, the others must go on while the finished ones write `<pad>`. A limit is needed, too, for models that never end.
#
# The other fault costs time. At each word, `decode` computes every earlier position again.

# %% [markdown]
# ## What need not be computed again
#
# **Guess first:** a word is appended. Which of the earlier positions' vectors change, in which of the layers?

# %%
layers = {}
handles = [layer.register_forward_hook(
    lambda layer, inputs, output, i=i:
    layers.setdefault(i, []).append(output))
    for i, layer in enumerate(model.decoder.layers)]
with torch.no_grad():
    memory, mask = model.encode(one)
    for length in range(4, 7):
        model.decode(tgt[which == example][:1, :length], memory, mask)
for handle in handles:
    handle.remove()
for i, outputs in layers.items():
    for before, after in itertools.pairwise(outputs):
        same = torch.allclose(before, after[:, :-1], atol=1e-5)
        print(f"layer {i + 1}, {before.shape[1]} words, then "
              f"{after.shape[1]}: earlier vectors the same: {same}")
        assert same

# %% [markdown]
# None, in no layer. No position sees a later one, so what stood stays as it was. The new position needs from the old ones only what it looks at: their
# keys and values. Keep these, and one row is left to compute. For one attention layer, by hand, with the steps of chapter 03:

# %%
layer = model.decoder.layers[0].self_attention
torch.manual_seed(0)
x = torch.randn(1, 5, 48)
with torch.no_grad():
    key, value = layer.keys_values(x[:, :4])  # kept from before
    new_key, new_value = layer.keys_values(x[:, 4:])  # of the new word
    key = torch.cat([key, new_key], dim=2)  # (1, H, 5, d_k)
    value = torch.cat([value, new_value], dim=2)
    row, _ = layer.attend(layer.queries(x[:, 4:]), key, value)
    full, _ = layer(x, is_causal=True)
print("kept keys", tuple(key.shape), "  new row", tuple(row.shape))
assert torch.allclose(row, full[:, 4:], atol=1e-5)
print("equal to the last row of the whole:", True)


# %% [markdown]
# No mask is needed: the newest may look at everything there is. **Cross-attention** is easier: its keys and values come from the memory, which does not
# change while we write, so they are computed once. The class keeps both, for every layer, and runs the layers' own residuals and feed-forward parts.

# %% tags=["export"]
class DecoderCache:
    """A decoder that keeps keys and values, so that a new token is one row.

    Made from what `encode` gave. Called with the next tokens (B, n), returns
    their logits (B, n, V): the last n that `decode` of all so far would give.
    Raises ValueError for another batch size, and as `decode` does.
    """

    def __init__(self, model: Transformer, memory: Tensor,
                 memory_mask: Tensor | None = None):
        self.model, self.memory_mask, self.length = model, memory_mask, 0
        self.memory = [layer.cross_attention.keys_values(memory)
                       for layer in model.decoder.layers]
        self.past = [None] * len(self.memory)  # (key, value) of each layer

    def __call__(self, tokens: Tensor) -> Tensor:
        batch, model = len(self.memory[0][0]), self.model
        if len(tokens) != batch:
            raise ValueError(f"tokens must have the memory's batch size "
                             f"{batch}, got {tuple(tokens.shape)}")
        x = model.target_positions(model.target(tokens), start=self.length)
        for i, layer in enumerate(model.decoder.layers):
            ask = layer.cross_attention
            x = layer.residuals[0](x, lambda x: self._look_back(
                i, layer.self_attention, x))
            x = layer.residuals[1](x, lambda x: ask.attend(
                ask.queries(x), *self.memory[i], self.memory_mask)[0])
            x = layer.residuals[2](x, layer.feed_forward)
        self.length += tokens.shape[1]
        return model.output(model.decoder.norm(x))

    def _look_back(self, i, attention, x):
        """x (B, n, d_model) looks at itself and at all that came before."""
        new = attention.keys_values(x)  # key, value: (B, H, n, d_k)
        if self.past[i] is not None:
            new = tuple(torch.cat(pair, dim=2)
                        for pair in zip(self.past[i], new))
        self.past[i] = new  # (B, H, length + n, d_k)
        return attention.attend(attention.queries(x), *new,
                                is_causal=x.shape[1] > 1)[0]

    def select(self, rows: Tensor, *, same_source: bool = False) -> None:
        """Go on with these rows, in this order; a row may come twice.

        same_source: each new row has the source of the one in its place, so
        that the memory can stay where it is.
        """
        self.past = [pair and tuple(kept[rows] for kept in pair)
                     for pair in self.past]
        if not same_source:
            self.memory = [tuple(kept[rows] for kept in pair)
                           for pair in self.memory]
            if self.memory_mask is not None:
                self.memory_mask = self.memory_mask[rows]


# %% [markdown]
# Two details are easily wrong. The new tokens do not stand at position 0, so `start` tells the positional encoding where they do. And *several* new tokens may
# come at once; the first of them must not see the second, so `is_causal` is needed again, aligned at the end (chapter 03). `select` is for later.
# Equal to the uncached result, in steps of 3, 1, 2 and 1 tokens, for a padded batch, and each fault found:

# %%
class Careless(DecoderCache):
    def __call__(self, tokens):
        length, self.length = self.length, 0  # every word at position 0
        logits = super().__call__(tokens)
        self.length = length + tokens.shape[1]
        return logits

class Unmasked(DecoderCache):
    def _look_back(self, i, attention, x):
        super()._look_back(i, attention, x)  # keeps the keys
        return attention.attend(attention.queries(x), *self.past[i])[0]

some = list(map(times.index, [(9, 40), (16, 45), (7, 25)]))
written = torch.stack([tgt[which == i][1, :7] for i in some])
with torch.no_grad():
    memory, mask = model.encode(src[some])
    whole = model.decode(written, memory, mask)
    for kind in (DecoderCache, Careless, Unmasked):
        cache = kind(model, memory, mask)
        parts = torch.cat([cache(part) for part in written.split(
            [3, 1, 2, 1], dim=1)], dim=1)
        same = torch.allclose(parts, whole, atol=1e-4)
        print(f"{kind.__name__:13s} equal to decode: {same}")
        assert same == (kind is DecoderCache)

# %% [markdown]
# ### What it saves
#
# We measure the time of *one* new token, with $n - 1$ tokens before it, with `clock`. The model has $d_{model} = 128$ and two layers, and writes eight
# sentences at once. **Guess first:** with the cache, how does the time grow from 16 tokens to 512?

# %% tags=["nbval-ignore-output"]
torch.manual_seed(0)
wide = Transformer(TransformerConfig(50, 50, 128, 4, 2, 512)).eval()
source, target = torch.randint(3, 50, (8, 20)), torch.randint(3, 50, (8, 512))
lengths, functions = (16, 32, 64, 128, 256, 512), []

def one_more(n):
    cache = DecoderCache(wide, *memory)
    cache(target[:, :n - 1])
    kept = list(cache.past)

    def step():
        cache.past, cache.length = list(kept), n - 1
        return cache(target[:, n - 1:n])
    return step

with torch.no_grad():
    memory = wide.encode(source)
    for n in lengths:
        functions += [one_more(n),
                      lambda n=n: wide.decode(target[:, :n], *memory)[:, -1:]]
        assert torch.allclose(functions[-1](), functions[-2](), atol=1e-4)
    taken = clock(functions, repeats=5)
cached, uncached = taken[::2], taken[1::2]
for n, fast, slow in zip(lengths, cached, uncached):
    print(f"{n:4d} tokens   with {1000 * fast:5.1f} ms   "
          f"without {1000 * slow:6.1f} ms   ratio {slow / fast:5.1f}")
assert uncached[-1] > 4 * cached[-1] and uncached[3] > 2 * cached[3]
assert uncached[-1] / uncached[0] > 2 * cached[-1] / cached[0]

# %% tags=["hide-input", "nbval-ignore-output"]
plt.plot(lengths, [1000 * t for t in uncached], "o--", color=LINES[1][0],
         label="without a cache")
plt.plot(lengths, [1000 * t for t in cached], "o-", color=LINES[0][0],
         label="with the cache")
ax = plt.gca()
ax.set_xscale("log", base=2)
ax.set(xticks=lengths, xticklabels=lengths, yscale="log",
       xlabel="tokens so far, the new one among them",
       ylabel="time of a new token (ms)",
       title="Without a cache a word costs as much as all before it")
ax.legend()
assert uncached[-1] > cached[-1]
show("Time of one new token against the number of tokens, both axes "
     "logarithmic. Without a cache it grows nearly in proportion to the "
     "length; with the cache it grows far less, and at 512 tokens "
     "it is less than a quarter.")

# %% [markdown]
# Without a cache the time grows with the length. A sentence of $n$ words costs $1 + 2 + \dots + n$ rows, about $n^2/2$; with the cache, $n$. In short sentences the cached step costs nearly the same wherever it stands: starting the
# operations takes most of the time, so at 16 tokens there is little to gain. In long ones, looking at what is kept (and copying it, since `cat` makes a new tensor) begins to show.
#
# What the cache costs is memory. For each sentence, layer and token it keeps a key and a value:

# %%
base = TransformerConfig.base(37_000)
numbers = 2 * base.n_layers * base.d_model
print(f"base model: {numbers:,} numbers for a token; 256 tokens of "
      f"32 sentences in float32: {numbers * 256 * 32 * 4 / 2**20:.0f} MiB")


# %% [markdown]
# ## Greedy decoding
#
# Two helpers first. `speaking` switches dropout off and builds no graph, and puts every module back as it was, after an error, too. `length_limits`: the paper lets the
# output be at most 50 tokens longer than the input (§6.1). We count *real* input tokens, so that padding, which depends on the company in the batch, changes nothing.

# %% tags=["export"]
@contextmanager
def speaking(model: nn.Module) -> Iterator[None]:
    """Within it: evaluation mode, and no graph. After it: all as before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


# %% tags=["export"]
def length_limits(model: Transformer, src: Tensor,
                  max_length: int | None = None) -> Tensor:
    """How many tokens may be written for each row of src (B, S): (B,).

    None: its real tokens + 50 (§6.1). Never more than the model has
    positions. Raises ValueError for max_length below 1.
    """
    limits = (src != model.config.pad).sum(dim=1) + 50
    if max_length is not None:
        check_sizes(max_length=max_length)
        limits = torch.full_like(limits, max_length)
    return limits.clamp(max=model.config.max_length)


# %% [markdown]
# Then the loop in its final form. `<pad>` and `<bos>` are never written, whatever the model thinks of them.

# %% tags=["export"]
def greedy_decode(model: Transformer, src: Tensor,
                  max_length: int | None = None) -> Tensor:
    """The likeliest next token, again and again: src (B, S) -> (B, L).

    Without bos; after eos, pad. max_length: tokens written at most, eos
    among them, as in `length_limits`. Raises ValueError as `encode` does.
    """
    c, written = model.config, []
    with speaking(model):
        cache = DecoderCache(model, *model.encode(src))
        limits = length_limits(model, src, max_length)
        new = torch.full_like(src[:, :1], c.bos)
        done = torch.zeros_like(new, dtype=torch.bool)  # (B, 1)
        while not done.all():
            logits = cache(new)[:, -1]
            logits[:, [c.pad, c.bos]] = -math.inf
            new = logits.argmax(dim=-1, keepdim=True).masked_fill(done, c.pad)
            written.append(new)
            full = (limits <= len(written)).unsqueeze(1)
            done = done | (new == c.eos) | full
    return torch.cat([src[:, :0], *written], dim=1)


# %%
told = greedy_decode(model, src)
print("shape", tuple(told.shape))
for i in some:
    print(f"{times[i][0]:2d}:{times[i][1]}   {text(told[i])}")
for i in range(0, len(times), 7):
    alone = greedy_decode(model, src[i:i + 1, :int((src[i] != 0).sum())])
    width = alone.shape[1]
    assert torch.equal(alone[0], told[i, :width])
    assert (told[i, width:] == 0).all()
print("alone and unpadded, the same:", True)
print("still in training mode:", model.train().training, "->", end=" ")
greedy_decode(model, one)
print(model.training)
assert model.training and not greedy_decode(model, one).requires_grad
_ = model.eval()


# %% [markdown]
# Are these the sentences that most speakers would say? We know the shares.

# %%
def report(told, chosen=range(len(times))):
    found = [truth[i].get(text(t for t in told[i] if t > 2)) for i in chosen]
    right = sum(share is not None for share in found)
    top = sum(share == max(truth[i].values())
              for i, share in zip(chosen, found))
    return right, top

right, top = report(told)
print(f"of 276: a right way for at least 260: {right >= 260}")
print(f"        the commonest way for fewer than 90: {top < 90}")
assert right >= 260 and top < 90


# %% [markdown]
# Nearly every sentence is a right way to tell the time, and most are *not* the commonest. For 16:45 the commonest is *sixteen forty five*, with a share of 0.40. On paper:
#
# | first word | share | then | share of the sentence |
# |---|---|---|---|
# | quarter | 0.60 | to, 0.43 | 0.26 |
# | | | of, 0.33 | 0.20 |
# | | | till, 0.23 | 0.14 |
# | sixteen | 0.40 | forty, 1.00 | 0.40 |
#
# Greedy takes *quarter*, since three ways begin with it and share its 0.60, and then no continuation can reach 0.40. A product may be largest where its first factor is not.

# %% [markdown]
# ## Sampling
#
# Instead of the largest one may **draw** a word, each with its probability. The result then is a random sentence, and if the model has learnt the shares, sentences
# come in these shares. Three knobs change what is drawn from:
#
# - **Temperature** $\tau$ divides the logits before the softmax: below 1 the large grow larger, above 1 all come closer.
# - **Top-k** keeps the $k$ likeliest words.
# - **Top-p** keeps the likeliest words until they hold the share $p$ together: few where the model is sure, many where it is not.

# %%
def reshaped(logits, temperature=1.0, top_k=None, top_p=None):
    logits = logits / temperature
    if top_k is not None:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if top_p is not None:
        ordered, place = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        late = ordered.cumsum(dim=-1) - ordered >= top_p  # never the first
        late = torch.zeros_like(late).scatter(-1, place, late)
        logits = logits.masked_fill(late, -math.inf)
    return logits

by_hand = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
for how in ({}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 2},
            {"top_p": 0.9}):
    p = reshaped(by_hand, **how).softmax(dim=-1)
    print(f"{str(how):22s}", [f"{share:.2f}" for share in p.tolist()])

# %% [markdown]
# Check the second row: squares, 0.25, 0.09, 0.0225, 0.0025, divided by their sum. Below, the model's next word after *quarter*, at 16:45.
# **Which knob removes the words that never follow without changing the proportion of those that do?** And what does a high temperature do to the many words that are each nearly impossible?

# %% tags=["hide-input"]
with torch.no_grad():
    after = torch.tensor([[1, words.index("quarter")]])
    next_logits = model.decode(after, *model.encode(one))[0, -1]
    next_logits[:2] = -math.inf
possible = ["to", "of", "till"]
CUTS = {"all words": {}, "top-k 3": {"top_k": 3}, "top-p 0.9": {"top_p": 0.9},
        "top-p 0.6": {"top_p": 0.6}}

def draw_knobs(temperature, keep):
    p = reshaped(next_logits, temperature, **CUTS[keep]).softmax(dim=-1)
    shares = [p[words.index(word)].item() for word in possible]
    rest = max(0.0, 1 - sum(shares))
    names, true = [*possible, "the other\nwords"], [0.43, 0.33, 0.23, 0]
    figure, ax = plt.subplots(figsize=(6, 2.8))
    ax.bar(names, [*shares, rest],
           color=[COLORS["decoder"]] * 3 + [COLORS["neutral"]])
    for x, value in enumerate([*shares, rest]):
        ax.text(x, max(value, true[x]) + 0.02, f"{value:.2f}",
                ha="center", fontsize=10)
        ax.plot([x - 0.4, x + 0.4], [true[x]] * 2, "k:", lw=2,
                label=None if x else "the speakers' share")
    ax.set(ylim=(0, 1.12), ylabel="probability",
           title=f"Temperature {temperature}, {keep}: "
                 f"{100 * rest:.0f} % on other words")
    ax.legend(loc="upper right")
    return figure, (f"Next word after quarter at 16:45, temperature "
                    f"{temperature}, {keep}: " + ", ".join(
                        f"{name} {value:.2f}" for name, value in zip(
                            possible, shares)) + f", others {rest:.2f}.")

explore(draw_knobs, temperature=[0.3, 0.6, 1.0, 1.5, 2.0, 3.0],
        keep=list(CUTS))


# %% [markdown]
# Top-k 3 does, here, because three is the right number; top-p finds it by itself at moderate temperatures, and 0.6 cuts into the right words. A low temperature pushes everything onto *to*. A high one lifts forty words that are nearly
# impossible, each by a little, and together they take a large share. **Guess first:** at temperature 1.5, with a sentence of about six words, how many of the sentences sampled are right ways to tell the time?

# %%
def sample(model, src, limit=20, **how):
    written = []
    with speaking(model):
        cache = DecoderCache(model, *model.encode(src))
        new, done = torch.full_like(src[:, :1], 1), torch.zeros(len(src), 1)
        while not done.all() and len(written) < limit:
            logits = cache(new)[:, -1]
            logits[:, :2] = -math.inf
            p = reshaped(logits, **how).softmax(dim=-1)
            new = p.multinomial(1).masked_fill(done.bool(), 0)
            written.append(new)
            done = done.logical_or(new == 2)
    return torch.cat(written, dim=1)

torch.manual_seed(0)
known, results = seen.tolist() * 5, {}
for temperature, cut in itertools.product((0.5, 1.0, 1.5), (None, 0.9)):
    drawn = sample(model, src[known], temperature=temperature, top_p=cut)
    shares = [truth[i].get(text(t for t in row if t > 2))
              for i, row in zip(known, drawn.tolist())]
    right = [s for s in shares if s is not None]
    results[temperature, cut] = len(right) / len(known)
    plain = sum(s == 0.4 for s in right) / len(right)
    print(f"temperature {temperature}   top-p {cut or 'off':3}   right "
          f"{results[temperature, cut]:.1f}   of these, digits read "
          f"{plain:.1f}")
assert results[1.0, None] > 0.9 > results[1.5, None]
assert results[1.5, 0.9] > results[1.5, None] + 0.05


# %% [markdown]
# At 1.5 one in five is wrong. At temperature 1 nearly all are right, and four in ten of these read the digits, as the speakers do: of our ways to decode, only sampling says things as often as they were said. Errors multiply along the sentence, which a high temperature brings out and top-p
# mostly holds back. At 0.5 every probability is squared before it is shared out, so 0.4 against 0.6 becomes 0.16 against 0.36, and the digits are read in three of ten.

# %% [markdown]
# ## Beam search
#
# Back to the likeliest *sentence*. All sentences cannot be tried: 40 words in 8 places make more than $10^{12}$. **Beam search** keeps, at each length, the few most probable
# beginnings, the **live prefixes**; their number is the *beam*. Each is continued by every word, and of all these the best are kept. An `<eos>` takes a sentence out of the race, but not out of memory. For one sentence, with lists:

# %%
@torch.no_grad()
def search_1(model, src, beam, limit=10):
    memory, mask = model.encode(src)
    live, ended, steps = [((1,), 0.0)], [], []  # words, log probability
    for _ in range(limit):
        n = len(live)
        logp = model.decode(torch.tensor([ids for ids, _ in live]),
                            memory.expand(n, -1, -1),
                            mask.expand(n, -1, -1, -1))[:, -1].log_softmax(-1)
        grown = [((*ids, v), total + logp[i, v].item())
                 for i, (ids, total) in enumerate(live)
                 for v in range(2, len(words))]
        grown.sort(key=lambda one: -one[1])
        live = []
        for candidate in grown:
            if len(live) < beam:
                (ended if candidate[0][-1] == 2 else live).append(candidate)
        steps.append((grown[:8], live, list(ended)))
        if len(ended) >= beam:
            break
    return ended, steps

for beam in (1, 2, 4):
    print(f"beam {beam}")
    for ids, total in search_1(model, one, beam)[0]:
        print(f"   {math.exp(total):.1f}  {text(ids[1:-1])}")

# %% [markdown]
# A rule is hidden in the inner loop: an ending counts as long as the beam is not full, that is, if it is at least as likely as the last prefix that stays live. With a beam of 1 this is greedy decoding.
#
# Move **step**, or press Play. **At which step does the sentence with the share 0.40 get lost with beam 1, and what do the other places of a beam of 4 hold at that moment?**

# %% tags=["hide-input"]
searches = {beam: search_1(model, one, beam)[1] for beam in (1, 2, 4)}

def spread(steps):  # all nodes of a tree: (state, probability), and places
    nodes = {}
    for number, (grown, live, ended) in enumerate(steps, start=1):
        kept = {ids for ids, _ in live}
        out = {ids for ids, _ in ended}
        for ids, total in grown:
            state = "live" if ids in kept else "end" if ids in out else "cut"
            if state != "cut" or math.exp(total) > 0.03:
                if math.exp(total) > 0.01:
                    nodes[ids] = state, math.exp(total)
    parents = {ids[:-1] for ids in nodes}
    leaves = sorted(ids for ids in nodes if ids not in parents)
    leaves.sort(key=lambda ids: [-nodes[ids[:n]][1]
                                 for n in range(2, len(ids) + 1)])
    place = {ids: float(-i) for i, ids in enumerate(leaves)}
    for ids in sorted(nodes, key=len, reverse=True):
        if ids not in place:
            below = [place[kid] for kid in nodes if kid[:-1] == ids]
            place[ids] = max(below)
    place[(1,)] = 0.0
    return nodes, place

def draw_tree(beam, step):
    steps = searches[beam]
    nodes, place = spread(steps)
    figure, ax = plt.subplots(figsize=(8, 3.2))
    colors = {"live": LINES[0][0], "end": "#00704F", "cut": "#777777"}
    ax.text(0, 0, "<bos>", ha="center", va="center", fontsize=10)
    for ids, (state, p) in nodes.items():
        x, y, up = len(ids) - 1, place[ids], place[ids[:-1]]
        if x > step:
            continue
        ax.plot([x - 0.56, x - 0.42], [up, y], color=colors[state],
                ls="--" if state == "cut" else "-", lw=1.5)
        ax.text(x, y, f"{words[ids[-1]]}\n{p:.2f}", ha="center", va="center",
                fontsize=9.2, color=colors[state],
                weight="bold" if state == "end" else None)
    now = min(step, len(steps))
    _, live, ended = steps[now - 1]
    over = len(steps) <= step
    ax.set(xlim=(-0.4, 7.5), ylim=(-4.6, 0.6), xticks=range(1, 8),
           yticks=[], xlabel="words written (dashed: cut off; bold: ended; "
           "below 0.01: not drawn)",
           title=f"Beam {beam}, step {step}: {len(ended)} ended"
                 + (", search over" if over else ""))
    ax.spines["left"].set_visible(False)
    best = "; ".join(f"{text(ids[1:])} {math.exp(p):.2f}"
                     for ids, p in live if math.exp(p) > 0.01)
    done = "; ".join(f"{text(ids[1:-1])} {math.exp(p):.2f}"
                     for ids, p in ended)
    return figure, (f"Beam {beam}, step {step}. Live: {best or 'none'}. "
                    f"Ended: {done or 'none'}.")

explore(draw_tree, play="step", beam=[1, 2, 4], step=list(range(1, 8)))


# %% [markdown]
# With beam 1 it is lost at the first step, when *sixteen* is cut off. A beam of 2 keeps *sixteen* at the first step and *quarter* beside it. With 4, two places at step 1 hold words without a chance (below 0.01, not drawn); at step 2 all four right beginnings are live, and all four ways are found.
#
# The lists show what the picture leaves out: when few prefixes are good, hopeless ends (0.0) get a place and count as ended. With a beam of 2 one of them ended the search. The answer was found all the same, but "as many ends as the beam is wide" is a rule of thumb, not a proof.

# %% [markdown]
# ### Long sentences
#
# Each further word multiplies by a number below 1, so the sum of log probabilities favours short sentences. The paper (§6.1) divides it by the **length penalty** of Wu et al. (2016), $((5 + \text{length})/6)^\alpha$ with $\alpha = 0.6$.
#

# %% tags=["export"]
def length_penalty(length: int | Tensor, alpha: float) -> float | Tensor:
    """What a sentence's log probability is divided by (§6.1; Wu, 2016).

    length counts eos. alpha 0: by 1; alpha 1: nearly by the length.
    """
    return ((5 + length) / 6) ** alpha


# %% [markdown]
# **Guess first:** for 16:20 the speakers say *sixteen twenty* (0.40) or *twenty past four in the afternoon* (0.33). Both lengths count `<eos>`. Which one wins at $\alpha = 0.6$?

# %%
for alpha in (0.0, 0.3, 0.6, 1.0):
    scores = []
    for way, p in list(ways(16, 20).items())[:2]:
        length = len(way.split()) + 1
        scores.append(math.log(p) / length_penalty(length, alpha))
    winner = "digits" if scores[0] > scores[1] else "past"
    print(f"alpha {alpha}   digits {scores[0]:.2f}   past {scores[1]:.2f}"
          f"   wins: {winner}")


# %% [markdown]
# The longer, less probable one. Dividing a negative number makes it larger, and the longer sentence is divided by more: $1.33^{0.6} = 1.19$ against $2^{0.6} = 1.52$. So with $\alpha > 0$ the answer is no longer the most probable sentence. It is a setting, chosen on
# texts kept aside, not a law; the paper chose beam and $\alpha$ on the development set (§6.1).
#
# ### For a batch
#
# The final form does the same with tensors. The $B$ sentences with `beam` prefixes each are $B \cdot$ `beam` rows for the cache. After each step the rows that go on are not the rows
# that were: a prefix may go on twice, another not at all. `select` reorders what is kept. At first each sentence has one prefix, so the other places start with a score of $-\infty$. Ends that count, and at the limit also prefixes, compete by score.

# %% tags=["export"]
def beam_search(model: Transformer, src: Tensor,
                max_length: int | None = None, beam: int = 4,
                alpha: float = 0.6) -> tuple[Tensor, Tensor]:
    """The best sentence that a search with `beam` live prefixes finds.

    src (B, S) -> tokens (B, L), as from `greedy_decode`, and scores (B,):
    log probability in nats / length_penalty (§6.1). An end counts if it is
    as likely as the last prefix that stays live. A search is over when
    `beam` ends have counted, no live prefix can win, or max_length is full.
    Raises ValueError for a beam below 1, an alpha or logits not finite.
    """
    check_sizes(beam=beam)
    if not math.isfinite(alpha):
        raise ValueError(f"alpha must be finite, got {alpha}")
    c, B, V = model.config, len(src), model.config.tgt_vocab_size
    with speaking(model):
        cache = DecoderCache(model, *model.encode(src))
        limits = length_limits(model, src, max_length)
        row = torch.arange(B, device=src.device).unsqueeze(1)  # (B, 1)
        cache.select(row.expand(B, beam).flatten())
        live = src.new_full((B, beam, 1), c.bos)
        score = torch.full((B, beam), -math.inf, device=src.device)
        score[:, 0] = 0.0  # at first there is one prefix, <bos>
        best = torch.full((B,), -math.inf, device=src.device)
        written = src.new_full((B, max(limits.tolist(), default=0)), c.pad)
        ended = torch.zeros_like(limits)
        searching = torch.ones_like(limits, dtype=torch.bool)
        for length in range(1, written.shape[1] + 1):
            logits = cache(live[:, :, -1:].flatten(0, 1))[:, -1].float()
            # (B * beam, V) -> (B, beam, V)
            total = logits.log_softmax(dim=-1).unflatten(0, (B, beam))
            total = total + score.unsqueeze(-1)
            total[..., [c.pad, c.bos]] = -math.inf
            ending = total[..., c.eos].clone()  # (B, beam)
            total[..., c.eos] = -math.inf
            score, index = total.flatten(1).topk(beam)  # (B, beam)
            parent = index // V
            grown = torch.cat([live[row, parent],
                               (index % V).unsqueeze(-1)], dim=-1)
            # what may be the answer: ends that count, and all at the limit
            counts = ending.isfinite() & (ending >= score[:, -1:])
            full = limits == length
            value, place = torch.cat([
                ending.masked_fill(~counts, -math.inf),
                score.masked_fill(~full.unsqueeze(1), -math.inf)],
                dim=1).div(length_penalty(length, alpha)).max(dim=1)
            text = torch.cat([F.pad(live, (0, 1), value=c.eos), grown], dim=1)
            text = text[row[:, 0], place, 1:]  # (B, length)
            better = searching & (value > best)
            best = torch.where(better, value, best)
            written[:, :length] = torch.where(better.unsqueeze(1), text,
                                              written[:, :length])
            ended += counts.sum(dim=1)
            reach = score[:, 0] / length_penalty(
                limits if alpha > 0 else length, alpha)
            searching &= ~full & (ended < beam) & (reach > best)
            if not searching.any():
                break
            cache.select((row * beam + parent).flatten(), same_source=True)
            live = grown
    if not best.isfinite().all():
        raise ValueError("the model's logits must be finite, got others")
    used = (written != c.pad).any(dim=0).sum()
    return written[:, :used].clone(), best.clone()


# %% [markdown]
# The search for a sentence ends when `beam` ends have counted, or earlier, when nothing can change: a live prefix's score can rise only by a larger penalty, so its log probability over the penalty at the limit bounds what it may reach.
# First the obvious checks: equal to the lists; beam 1 equal to greedy; and a sentence gets what it gets alone and unpadded.

# %%
for beam in (1, 2, 4):
    for alpha in (0.0, 0.6):
        ended, _ = search_1(model, one, beam)
        by_lists = max((total / length_penalty(len(ids) - 1, alpha), ids[1:])
                       for ids, total in ended)
        found, score = beam_search(model, one, beam=beam, alpha=alpha)
        print(f"beam {beam}   alpha {alpha}   {text(found[0])}")
        assert found[0].tolist() == list(by_lists[1])
        assert abs(score.item() - by_lists[0]) < 1e-3
assert torch.equal(beam_search(model, src, beam=1)[0], told)
found, scores = beam_search(model, src)
for i in range(0, len(times), 7):
    alone, score = beam_search(model, src[i:i + 1, :int((src[i] != 0).sum())])
    assert torch.equal(alone[0], found[i, :alone.shape[1]])
    assert torch.allclose(score, scores[i], atol=1e-3)
print("beam 1 is greedy; a sentence alone is as in the batch:", True)


# %% [markdown]
# Then the one that counts: **is the best found the best there is?** With a vocabulary of six, three of them special, one can try every sentence of up to four tokens. We take 50 untrained models with logits
# enlarged, so that they have opinions. A beam of 27 holds every live prefix ($3^3$), and must find the best; a beam of 2 need not.

# %%
@torch.no_grad()
def best_of_all(model, src, limit, alpha):
    best = (-math.inf, None)
    live = [((1,), 0.0)]
    for length in range(1, limit + 1):
        prefixes = torch.tensor([ids for ids, _ in live])
        logits = model(src.expand(len(live), -1), prefixes)[:, -1]
        logp = logits.log_softmax(dim=-1).tolist()
        grown = [((*ids, v), total + logp[i][v])
                 for i, (ids, total) in enumerate(live) for v in range(2, 6)]
        over = [one for one in grown if one[0][-1] == 2 or length == limit]
        best = max([best] + [(total / length_penalty(length, alpha), ids[1:])
                             for ids, total in over])
        live = [one for one in grown if one[0][-1] != 2]
    return best

def compare(beam, alpha):
    agree = 0
    for seed in range(50):
        torch.manual_seed(seed)
        tiny = Transformer(TransformerConfig(6, 6, 8, 2, 1, 16)).eval()
        tiny.output.weight.data *= 4
        tiny_src = torch.randint(3, 6, (1, 4))
        score, ids = best_of_all(tiny, tiny_src, 4, alpha)
        found, found_score = beam_search(tiny, tiny_src, 4, beam, alpha)
        agree += (found[0][found[0] != 0].tolist() == list(ids)
                  and abs(found_score.item() - score) < 1e-3)
    return agree

exact = {alpha: compare(27, alpha) for alpha in (0.0, 0.6)}
few = compare(2, 0.6)
print("beam 27, the best of all found:", exact)
print("beam 2, found in fewer than 50 and more than 25:", 25 < few < 50)
assert set(exact.values()) == {50} and 25 < few < 50

# %% [markdown]
# ## Does a better search speak better?
#
# For all 276 times, $\alpha$ 0 and 0.6, and separately the 36 that were never seen. **Guess first:** a wider beam finds more probable sentences. Does it also tell the time right more often?

# %%
counts = {}
for beam, alpha in ((1, 0.0), (2, 0.0), (4, 0.0), (8, 0.0), (4, 0.6)):
    found, _ = beam_search(model, src, beam=beam, alpha=alpha)
    _, top = report(found, seen.tolist())
    right, _ = report(found, unseen.tolist())
    counts[beam, alpha] = top, right
    length = (found > 2).sum(dim=1).double().mean().item()
    print(f"beam {beam}   alpha {alpha}   words {length:.0f}   "
          f"seen, commonest way above 70 %: {top > 0.7 * 240!s:5}   "
          f"unseen, right above 80 %: {right > 0.8 * 36}")
spread_of = [right for _, right in counts.values()]
print("most to fewest right on the unseen, differ by at most 4 of 36:",
      max(spread_of) - min(spread_of) <= 4)
assert max(spread_of) - min(spread_of) <= 4
assert counts[4, 0.0][0] > 2 * counts[1, 0.0][0]

# %% [markdown]
# A beam of 4 finds the commonest way far more often than greedy. (With $\alpha = 0.6$ the longer ways win more often, as for 16:20.) On unseen times it is right as often as greedy, within a few of 36: mostly it exchanges one right way for another, and what the model has not learnt, no beam finds. Search can mend errors of *search*, not of the *model*.
#
# For translators trained on real text both kinds exist. Stahlberg and Byrne (2019) searched a translation model exhaustively and found that for more than half of the sentences its most probable output was the empty one. A
# wider beam is not always a better one; chapter 14 measures it on real sentences.

# %% [markdown]
# ## What you built
#
# - `DecoderCache`: keys and values kept for self- and cross-attention, equal to the uncached result, and measured: at 512 tokens a new one costs less than a quarter.
# - `greedy_decode`: batched, stops, independent of padding; and sampling with three knobs, the only one that keeps the speakers' shares.
# - `beam_search` with the paper's length penalty: equal to the best of all sentences on 50 models when the beam holds all prefixes.
#
# ## Check yourself
#
# **1.** A colleague's cache gives the right result for single tokens and a wrong one for two at a time. Where do you look?
#
# <details><summary>Answer</summary>
#
# At the mask of the new tokens: among themselves they need the causal one, aligned at the end. A single token needs none.
#
# </details>
#
# **2.** What does top-k 1 do? Temperature close to 0? A beam of 1?
#
# <details><summary>Answer</summary>
#
# All three are greedy decoding, the first two by drawing from one word.
#
# </details>
#
# **3.** A batch holds 10 sentences, the beam is 4. How many rows does the cache have, and how often are keys of the memory computed?
#
# <details><summary>Answer</summary>
#
# 40 rows; once for each sentence and layer, before the rows are repeated.
#
# </details>
#
# **4.** A first word has probability 0.5, and every sentence that begins with it has less than 0.2. May a beam of 2 lose the best sentence, which has 0.21?
#
# <details><summary>Answer</summary>
#
# Yes: at length 2, two prefixes that begin with the first word may have 0.25 each. They stand before it, and it is cut off.
#
# </details>
#
# Two of the answers, checked:

# %%
for how in ({"top_k": 1}, {"temperature": 1e-3}):
    same = torch.equal(sample(model, src[some], **how),
                       greedy_decode(model, src[some]))
    print(f"{how}   the same as greedy: {same}")
    assert same
cache = DecoderCache(model, *model.encode(src[:10]))
cache.select(torch.arange(10).repeat_interleave(4))
print("rows of the kept keys:", len(cache.memory[0][0]))

# %% [markdown]
# ## Where to read on
#
# - Vaswani et al., *Attention Is All You Need*, NeurIPS 2017, [arXiv 1706.03762](https://arxiv.org/abs/1706.03762): §6.1 (beam 4, α 0.6, input length + 50).
# - Wu et al., *Google's Neural Machine Translation System*, 2016, [arXiv 1609.08144](https://arxiv.org/abs/1609.08144): §7 (beam search, length penalty).
# - Holtzman et al., *The Curious Case of Neural Text Degeneration*, ICLR 2020, [arXiv 1904.09751](https://arxiv.org/abs/1904.09751): top-p, and why the likeliest text is not the best.
# - Stahlberg, Byrne, *On NMT Search Errors and Model Errors: Cat Got Your Tongue?*, EMNLP 2019, [arXiv 1908.10090](https://arxiv.org/abs/1908.10090): exhaustive search.
# - Shazeer, *Fast Transformer Decoding: One Write-Head is All You Need*, 2019, [arXiv 1911.02150](https://arxiv.org/abs/1911.02150): making the cache smaller.
# - Next, chapter 13: a language task, with what was built here.
