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
# # 15. Looking inside
#
# *What did the heads learn?* Maps of attention look like explanations. We take two trained translators, chapter 13's of numbers and chapter 14's of sentences, look at every head, then stop believing our eyes: we count, remove heads, exchange words. At the end you will have built
# `without_heads`, a number for sharpness, and a test of what weights explain.
#
# <div class="admonition note">
# <p class="admonition-title">What it takes</p>
# <p>Reading: 30 minutes. Running: about two minutes on a CPU; a GPU helps little. Before: chapters 02 (attention), 03 (heads), 09
# (record_attention) and 13 (the number words). The part on sentences fetches 5 MB of weights; without them the rest runs.</p>
# </div>
#
# [Read on the site](https://OWNER.github.io/attention-cell-by-cell/book/15_looking_inside.html) · [Run in Colab](https://colab.research.google.com/github/OWNER/attention-cell-by-cell/blob/main/book/15_looking_inside.ipynb)

# %% [markdown]
# ## The model to open
#
# We train [chapter 13](https://OWNER.github.io/attention-cell-by-cell/book/13_translating_numbers.html)'s again: its recipe, its numbers, its seed. Two short rules spell the numbers below a million, so that nothing has to be installed. English has a blank before each
# hyphen, as there, so that *forty* and *-seven* are two pieces.

# %%
import copy
import os
import random
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

ENGLISH = ("_ one two three four five six seven eight nine ten eleven twelve "
           "thirteen fourteen fifteen sixteen seventeen eighteen nineteen "
           "twenty thirty forty fifty sixty seventy eighty ninety").split()
GERMAN = ("_ ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf "
          "dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn "
          "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig "
          "neunzig").split()

# %%
@cache
def english(n):
    if n > 999:
        link = "" if n % 1000 == 0 else ", " if n % 1000 > 99 else " and "
        return english(n // 1000) + " thousand" + link + english(n % 1000)
    if n > 99:
        link = " and " if n % 100 else ""
        return ENGLISH[n // 100] + " hundred" + link + english(n % 100)
    if n > 19:
        return ENGLISH[18 + n // 10] + (
            " -" + ENGLISH[n % 10] if n % 10 else "")
    return ENGLISH[n] if n else ""

@cache
def german(n, last=True):  # last: nothing follows, so a one is "eins"
    if n > 999:
        return german(n // 1000, False) + "tausend" + german(n % 1000)
    if n > 99:
        return GERMAN[n // 100] + "hundert" + german(n % 100, last)
    if n > 19:
        unit = GERMAN[n % 10] + "und" if n % 10 else ""
        return unit + GERMAN[18 + n // 10]
    return (GERMAN[n] if n else "") + "s" * (n == 1 and last)

print(english(654_321), german(654_321), sep="\n")

# %% [markdown]
# Numbers, pieces and batches are chapter 13's: 20,000 numbers to learn from, and two times 1,000 that the model never sees, `unseen` and `watched`.

# %%
drawn = random.Random(13).sample(range(1, 1_000_000), 22_000)
unseen, watched, seen = drawn[:1000], drawn[1000:2000], drawn[2000:]
source = BytePairEncoding.train([english(n) for n in seen[:1000]], 200)
target = BytePairEncoding.train([german(n) for n in seen[:1000]], 80)

@cache
def pair(n):
    return ([*source.encode(english(n)), 2],
            [1, *target.encode(german(n)), 2])

class MixedBatches(TokenBatches):
    def epoch(self, number, size=128):  # all lengths in every batch
        order = list(range(len(self.pairs)))
        random.Random(f"{self.seed} {number}").shuffle(order)
        return [order[i:i + size] for i in range(0, len(order), size)]

def rows(numbers):  # -> (B, S), (B, T), padded
    return TokenBatches([pair(n) for n in numbers], 1 << 20).rows(
        list(range(len(numbers))))

# %%
def new_model(seed=0):
    torch.manual_seed(seed)
    return Transformer(TransformerConfig(
        len(source.pieces), len(target.pieces), d_model=128, n_heads=4,
        n_layers=2, d_ff=256, dropout=0.1)).eval()

def rate(update):
    return 2e-3 * min(update / 100, (261 - update) / 160)

model, untrained = new_model(), new_model(seed=1)
train(model, MixedBatches([pair(n) for n in seen], 1 << 20), updates=260,
      schedule=rate, progress=False)
model.cpu()  # wherever it was trained
print("trained for 260 updates")

# %% [markdown]
# We shall ask hundreds of times how many numbers come out right. Greedy decoding writes the right pieces exactly if each piece, *given the right ones before it*, is the likeliest. One pass through the model tells that for all pieces at once.  (Nearly: other pieces may spell the same letters.)

# %%
@torch.inference_mode()
def judge(model, src, tgt):  # -> right (B, T), log probability (B, T)
    logits = model(src, tgt[:, :-1])
    logits[:, :, :2] = -1e9  # decoding never writes pad or bos
    wanted, real = tgt[:, 1:], tgt[:, 1:] != 0
    chances = logits.log_softmax(dim=-1)
    chances = chances.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
    return (logits.argmax(dim=-1) == wanted) | ~real, chances * real

def exact(model, src, tgt):
    return judge(model, src, tgt)[0].all(dim=1).double().mean().item()

test = rows(unseen[:500])
said = greedy_decode(model, test[0]).tolist()
letters = sum(target.decode(t for t in row if t > 2) == german(n)
              for row, n in zip(said, unseen)) / 500
pieces = exact(model, *test)
print("exact match over 98 %:", letters > 0.98)
print("the same in one pass, to half a percent:",
      abs(letters - pieces) < 0.005)
assert letters > 0.98 and abs(letters - pieces) < 0.005

# %% [markdown]
# ## Every head of every layer
#
# This model attends in six places: two encoder layers look at the source; two decoder layers look at the German so far, and across at the source. Each has four heads: 24 maps for one number.

# %%
def layers(model):  # a name to read -> the module's name
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            stack, _, number, kind = name.split(".")
            kind = kind.removesuffix("_attention")
            found[f"{stack} {int(number) + 1} {kind}"] = name
    return found

def record(model, batches):  # name to read -> [(B, H, T, S), ...]
    maps = defaultdict(list)
    for src, tgt in batches:
        with torch.inference_mode(), record_attention(model) as weights:
            model(src, tgt[:, :-1])
        for layer, name in layers(model).items():
            maps[layer].append(weights[name])
    return maps

print(list(layers(model)))

# %% [markdown]
# Rows are queries, columns keys. In the decoder a row is named by the piece that is *written* there: the query that writes the first piece stands at `<bos>`. In its self-attention the columns are the pieces read so far. **In which of the six places could you draw the map without seeing it?** Move through the layers at one number, then change the number.

# %% tags=["hide-input"]
def named(pieces, ids):
    return [{0: "", 1: "<bos>", 2: "<eos>"}.get(i)
            or pieces.decode([i]).strip() for i in ids]

def draw_heads(maps, layer, src, tgt, title, height):  # maps (4, T, S)
    read, written = src, tgt[1:]
    queries = read if "encoder" in layer else written
    keys = tgt[:-1] if "decoder" in layer and "self" in layer else read
    figure, axes = plt.subplots(2, 2, figsize=(5.8, height), sharex=True,
                                sharey=True, layout="none")
    figure.subplots_adjust(0.22, 1.12 / height, 0.98, 1 - 0.5 / height,
                           0.05, 0.66 / height)
    steps = (maps * 10).round() / 10  # few colours keep the pictures small
    for head, ax in enumerate(axes.flat):
        ax.imshow(steps[head], cmap=WEIGHTS, vmin=0, vmax=1, aspect="auto",
                  interpolation="nearest")
        ax.set_title(head + 1, fontsize=9, fontweight="normal", pad=3)
        ax.set_xticks(range(len(keys)), keys, rotation=90, fontsize=9)
        ax.set_yticks(range(len(queries)), queries, fontsize=9)
        ax.tick_params(length=0)
    figure.suptitle(f"{title}, heads 1 to 4", x=0.01, ha="left",
                    fontsize=10, fontweight="bold")
    best = [", ".join(keys[k] for k in head.argmax(dim=-1).tolist())
            for head in maps]
    return figure, (f"{title}. Rows {', '.join(queries)} look most at: "
                    + "; ".join(f"head {i + 1}: {text}"
                                for i, text in enumerate(best)))

def draw_number(number, layer):
    maps = record(model, [rows([number])])[layer][0][0]
    src, tgt = pair(number)
    return draw_heads(maps, layer, named(source, src), named(target, tgt),
                      f"{number:,}: {layer}", height=5.2)

SHOWN = [47, 13_900, 654_321, 101_047]
explore(draw_number, number={f"{n:,}": n for n in SHOWN},
        layer=list(layers(model)))

# %% [markdown]
# Only in *decoder 2 cross*: most rows have their dark cell at the word that they translate, in some heads nearly all. In the first cross-attention some cells are as dark and stand elsewhere; the encoder's maps are smears. The decoder's own maps are sharp: in *decoder 1 self* a head or two look at `<bos>` until the thousands are written, then at the piece that ends them, a guess to be tested.

# %% [markdown]
# ## How many keys, effectively?
#
# *Sharp* should be a number. The **entropy** of a row of weights is $-\sum_s w_s \log w_s$. It is 0 if one key has everything, and $\log n$ if $n$ keys share alike. So its exponential counts: as many keys as would, sharing alike, have this entropy.

# %%
def effective(weights):  # (..., S) -> (...)
    return torch.special.entr(weights).sum(dim=-1).exp()

for row in ([1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4,
            [0.7, 0.1, 0.1, 0.1]):
    print(row, f"  {effective(torch.tensor(row)):.2f} keys")

# %% [markdown]
# To average over numbers without padding we take those of six parts, such as 654,321: all have twelve source pieces and six target pieces, and place 4 is always the unit of the thousands. **Guess first:** which are sharper before training, and does training sharpen all?

# %%
sixes = [n for n in unseen
         if len(pair(n)[0]) == 12 and len(pair(n)[1]) == 8][:300]
number_rows = [rows(sixes)]  # one batch, nothing padded
print(len(sixes), "numbers;", " ".join(named(source, pair(654_321)[0])))
print(" ".join(named(target, pair(654_321)[1])))
assert len(sixes) == 300 and not (rows(sixes)[0] == 0).any()

def sharpness(model, batches):  # -> layer -> (H,) keys, keys allowed
    result = {}
    for layer, maps in record(model, batches).items():
        own = "decoder" in layer and "self" in layer
        keys = torch.cat([effective(m)[:, :, own:].transpose(0, 1)
                          .flatten(1) for m in maps], dim=1)  # (H, rows)
        allowed = [k for m in maps for k in (  # own: the first has no choice
            range(2, m.shape[-1] + 1) if own
            else [m.shape[-1]] * m.shape[-2])]
        result[layer] = keys.mean(dim=1), sum(allowed) / len(allowed)
    return result

# %% tags=["hide-input"]
def draw_sharpness(before, after, title):
    figure, ax = plt.subplots(figsize=(7.2, 0.4 * len(after) + 1.3))
    for y, layer in enumerate(after):
        ax.barh(y, after[layer][1], color="#EEEEEE", height=0.8)
        for dy, marker, color, keys in (
                (-0.18, "D", COLORS["neutral"], before[layer][0]),
                (0.18, "o", COLORS["query"], after[layer][0])):
            ax.plot(keys, [y + dy] * len(keys), marker, color=color,
                    markersize=5, linestyle="", alpha=0.8)
    ax.plot([], [], "D", color=COLORS["neutral"], label="a head, untrained")
    ax.plot([], [], "o", color=COLORS["query"], label="a head, trained")
    ax.barh(0, 0, color="#DDDDDD", label="keys allowed")
    ax.set_yticks(range(len(after)), list(after))
    ax.invert_yaxis()
    ax.set(xlabel="keys looked at, effectively (mean over rows)", title=title,
           xlim=(0, None))
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure

before = sharpness(untrained, number_rows)
after = sharpness(model, number_rows)
assert all((after[k][0].mean() < before[k][0].mean()) for k in after)
assert (after["encoder 1 self"][0].min() > 2.5
        and after["decoder 2 cross"][0].max() < 4)
ratio = {k: (before[k][0].mean() / after[k][0].mean()).item() for k in after}
assert set(sorted(ratio, key=ratio.get)[-2:]) == {"decoder 1 cross",
                                                  "decoder 2 cross"}
draw_sharpness(before, after, "Training sharpens the decoder most")
show("For each of six attention layers, how many keys its four heads look at "
     "effectively. Grey bars: twelve keys allowed, four and a half in the "
     "decoder's self-attention. Untrained heads look at most of them, "
     "trained ones at fewer: at about one in the decoder's self-attention, "
     "at one to three in cross-attention, at more in the encoder.")

# %% [markdown]
# The decoder's self-attention may look at few keys, so its counts are low before training; compare with the grey bar, not with other rows. Before training the first layers are the sharper ones: their scores spread more (a table below). Training sharpens all six, the cross-attention most: from about ten keys to one, two or three. The encoder stays broad.

# %% [markdown]
# ## What does each head do?
#
# A picture suggests a role: *looks at the word that it translates*. So we write down a handful of roles, each a rule: which key each query should look at most. All numbers in `sixes` have the same places, so a role is a list of key places, one for each query. `-1` says that the role is silent about that query.
#
# *Own word* is that of the piece being written, *just written* that of the piece before, *written next* that of the piece after. The *halves* are the thousands and the rest; *start of half* is the guess from the widget.

# %%
OWN = [0, 4, 3, 6, 10, 9]  # place of the word that each piece needs
ROLES = {
    "encoder self": {
        "itself": range(12), "previous": range(-1, 11),
        "next": [*range(1, 12), -1], "<eos>": [11] * 12,
        "thousand": [5] * 12,
        "same in other half": [6, 7, 8, 9, 10, -1, 0, 1, 2, 3, 4, -1],
        "unit and ten": [-1, -1, -1, 4, 3, -1, -1, -1, -1, 10, 9, -1]},
    "decoder self": {
        "itself": [-1, *range(1, 7)], "previous": range(-1, 6),
        "start of half": [-1, 0, 0, 3, 3, 3, -1], "<bos>": [-1] + [0] * 6},
    "decoder cross": {
        "own word": [*OWN, 11], "just written": [-1, *OWN],
        "written next": [*OWN[1:], 11, -1], "<eos>": [11] * 7,
        "thousand": [5] * 7}}

def hits(looked, role):  # looked (B, T): the place looked at most
    places = torch.tensor(list(role))
    known = places >= 0
    return (looked == places)[:, known].double().mean().item()

# %% [markdown]
# With four to seven roles to choose from, one will fit a little by luck. So the role is found on 150 of the numbers, and its share of hits counted on the *other* 150; choosing and counting on the same numbers would be fishing. The same search on the untrained model shows what luck finds. **Guess first:** of the 24 heads, how many hold a role in more than six looks of ten?

# %%
def find_roles(model):  # -> (layer, head) -> role, share of hits
    found = {}
    for layer, [maps] in record(model, number_rows).items():
        stack, _, kind = layer.split()
        looked = maps.argmax(dim=-1)  # (B, H, T)
        for head in range(4):
            first, second = looked[:, head].split(150)
            roles = ROLES[f"{stack} {kind}"]
            best = max(roles, key=lambda name: hits(first, roles[name]))
            found[layer, head] = best, hits(second, roles[best])
    return found

found, by_luck = find_roles(model), find_roles(untrained)
HEADS = list(found)
held = [head for head in HEADS if found[head][1] > 0.6]
print("hold a role in over 60 % of looks: at least 4:", len(held) >= 4,
      "  untrained:", sum(share > 0.6 for _, share in by_luck.values()))
across = [found["decoder 2 cross", head] for head in range(4)]
print("decoder 2 cross:", {role for role, _ in across})
assert all(role == "own word" and share > 0.5 for role, share in across)
assert max(share for role, share in (found["decoder 1 self", head]
                                     for head in range(4))
           if role == "start of half") > 0.8
assert max(found[h][1] for h in HEADS if "encoder" in h[0]) < 0.6
assert max(share for _, share in by_luck.values()) < 0.6 and len(held) >= 4

# %% tags=["hide-input"]
def chance(layer, role):  # hits of one who looks anywhere it may
    stack, _, kind = layer.split()
    places = enumerate(ROLES[f"{stack} {kind}"][role])
    shares = [1 / (q + 1 if (stack, kind) == ("decoder", "self") else 12)
              for q, place in places if place >= 0]
    return sum(shares) / len(shares)

figure, ax = plt.subplots(figsize=(7.6, 6.4))
for y, head in enumerate(HEADS):
    role, share = found[head]
    color = (COLORS["encoder"] if "encoder" in head[0] else
             COLORS["key"] if "cross" in head[0] else COLORS["decoder"])
    ax.barh(y, share, color=color, alpha=0.75)
    ax.text(max(share, by_luck[head][1]) + 0.025, y, role, va="center",
            fontsize=9)
    ax.plot(by_luck[head][1], y, "D", color="black", markersize=4)
    ax.plot(chance(head[0], role), y, "|", color="white", markersize=9,
            markeredgewidth=2)
ax.plot([], [], "D", color="black", linestyle="", markersize=4,
        label="best role of the untrained head")
ax.plot([], [], "|", color="#777777", markersize=9, markeredgewidth=2,
        linestyle="", label="chance (white line)")
ax.set_yticks(range(24), [f"{layer}, head {head + 1}"
                          for layer, head in HEADS], fontsize=9)
ax.invert_yaxis()
ax.set(xlim=(0, 1.25), xlabel="share of looks that go where the role says, "
       "on the other 150 numbers")
ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
ax.set_title("Cross-attention of layer 2 holds a role, no encoder head does")
figure.legend(loc="outside lower center", fontsize=9, ncols=2)
show("A bar for each of 24 heads: the share of looks that go where the best "
     "of a handful of roles says. The four heads of decoder 2 cross hold the "
     "role own word in most looks. Encoder heads stay below 60 percent. "
     "Diamonds: untrained heads, all below 60 percent. White lines: chance.")

# %% [markdown]
# Eight or nine of 24, in the run shown. All four heads of the last cross-attention do one job: they look mostly at the word of the piece being written. At least one head of *decoder 1 self* looks at the start of the half, from which the decoder could tell whether *tausend* is still to come. 
#
# No encoder head follows a rule of ours in six looks of ten: by this list they fit none. That does not mean that they do nothing.
#
# In `sixes` place and kind are one, though: *place 4* and *the unit of the thousands* cannot be told apart.

# %% [markdown]
# ## Removing a head
#
# A head hands over `d_v` numbers, which the matrix `output` mixes with those of the others. A hook, before that matrix, sets them to 0, and the head is gone:

# %%
@contextmanager
def without_heads(model, heads, instead=None):
    # instead: layer -> (H, d_v), what to put there; None: zeros
    gone = defaultdict(list)  # layer -> its heads to remove
    for layer, head in heads:
        gone[layer].append(head)
    with ExitStack() as hooks:
        for layer, some in gone.items():
            attention = model.get_submodule(layers(model)[layer])

            def empty(output, inputs, layer=layer, some=some,
                      n_heads=attention.n_heads):
                # (B, T, H * d_v) -> (B, T, H, d_v)
                parts = inputs[0].unflatten(-1, (n_heads, -1)).clone()
                parts[:, :, some] = instead[layer][some] if instead else 0.0
                return parts.flatten(2)

            hooks.enter_context(
                attention.output.register_forward_pre_hook(empty))
        yield

# %% [markdown]
# Columns 32 to 63 of that matrix belong to head 2, counted from 1. Setting these to 0 must do the same.

# %%
cut = copy.deepcopy(model)
name = layers(model)["decoder 2 cross"]
cut.get_submodule(name).output.weight.data[:, 32:64] = 0.0
with without_heads(model, [("decoder 2 cross", 1)]):
    hooked = judge(model, *test)[1]
print("the same:", torch.allclose(hooked, judge(cut, *test)[1], atol=1e-4))
assert torch.allclose(hooked, judge(cut, *test)[1], atol=1e-4)
assert not torch.allclose(hooked, judge(model, *test)[1], atol=1e-4)

# %% [markdown]
# **Guess first:** remove one head, for each of the 24. How many of 500 unseen numbers does the most expensive head cost: fifteen, fifty, or all?

# %%
def cost(heads, instead=None):  # share of numbers no longer right
    with without_heads(model, heads, instead):
        return whole - exact(model, *test)

whole = exact(model, *test)
single = {head: cost([head]) for head in HEADS}
print("cost more than 20 of 100 numbers:",
      sum(c > 0.2 for c in single.values()), "of 24 heads")
print("at least 20 heads cost fewer than 2 of 100:",
      sum(c < 0.02 for c in single.values()) >= 20)
assert max(single.values()) < 0.2
assert sum(c < 0.02 for c in single.values()) >= 20

# %% [markdown]
# Fewer, in the run shown: about five of 500, and most heads cost none. (With two other seeds the dearest cost up to eleven in a hundred.) No head is needed much, whatever it looks at. **Guess again:** take away all four heads of a layer at once. What do the six layers cost?

# %% tags=["hide-input"]
together = {layer: cost([(layer, head) for head in range(4)])
            for layer in layers(model)}
table = torch.tensor([[*(single[layer, head] for head in range(4)),
                       together[layer]] for layer in together])
figure, ax = plt.subplots(figsize=(6.4, 3.6))
heatmap(table.clamp(min=0), list(together),
        [*(f"head {i}" for i in range(1, 5)), "all four"], ax=ax)
ax.axvline(4, color="black", linewidth=1.5)
ax.tick_params(axis="x", rotation=0)
ax.set(xlabel="removed (share of numbers lost)", ylabel="", aspect="auto",
       title="Single heads are cheap, a whole cross-attention is not")
assert together["decoder 2 cross"] > 0.8
assert together["decoder 1 cross"] > 0.3 > 0.1 > together["encoder 2 self"]
assert max(single["decoder 2 cross", head] for head in range(4)) < 0.1
show("A table of six layers. Single heads cost next to nothing. All four "
     "heads of decoder 2 cross together cost nearly all numbers, those of "
     "decoder 1 cross many; those of an encoder layer few.")

# %% [markdown]
# The four heads of *decoder 2 cross* cost next to nothing each, and nearly everything together: four clerks with one job. Each can be spared as long as others are there. The first cross-attention does the same, though its heads look less alike. The cost of a single head says how replaceable it is, not what it does.
#
# And the encoder? Its attention can be removed whole:

# %%
encoder = [head for head in HEADS if "encoder" in head[0]]
own = [head for head in HEADS if "self" in head[0]]
for text, heads in (("encoder without attention", encoder),
                    ("no self-attention anywhere", own)):
    left = whole - cost(heads)
    print(f"{text:27s} still over 85 % right: {left > 0.85}")
assert cost(encoder) < 0.15 and cost(own) > 0.3

# %% [markdown]
# Number words translate nearly one by one: *-four* needs no neighbour to become *vier*, and its position says where it stands. The encoder's eight heads are worth a few numbers in a hundred. Take the decoder's self-attention as well, and more than three numbers in ten are lost. 
#
# ### Zero, or the mean?
#
# Zero is a choice. The layers behind a head have never met a zero there; they may err because it is strange, not because something is missing. **Mean ablation** puts the head's mean over other numbers there instead: what it says on average, without what it says about this one.

# %%
def average_parts(model, src, tgt):  # layer -> (H, d_v)
    means, real = {}, {"encoder": src != 0, "decoder": tgt[:, :-1] != 0}
    with ExitStack() as hooks, torch.inference_mode():
        for layer, name in layers(model).items():
            def note(output, inputs, layer=layer):
                kept = inputs[0][real[layer.split()[0]]]  # (pieces, H * d_v)
                means[layer] = kept.mean(dim=0).unflatten(-1, (4, -1))

            hooks.enter_context(model.get_submodule(
                name).output.register_forward_pre_hook(note))
        model(src, tgt[:, :-1])
    return means

means = average_parts(model, *rows(watched))
differ = {head: cost([head], means) - single[head] for head in HEADS}
print("single heads: mean and zero differ by less than 5 in 100:",
      max(map(abs, differ.values())) < 0.05)
last = [("decoder 2 cross", head) for head in range(4)]
print("decoder 2 cross as its mean, over 80 % lost:",
      cost(last, means) > 0.8)
assert max(map(abs, differ.values())) < 0.05 and cost(last, means) > 0.8

# %% [markdown]
# Here the two agree for single heads and for the last cross-attention. Where they do not, both are to be reported.

# %% [markdown]
# ### How many can go together?
#
# Two ways to remove many: in the order of their *single* costs; or step by step, each time the head that costs least *now*, with the others gone. We choose on 50 watched numbers, by the log probability of the right pieces, and report on the unseen ones. **Guess first:** how many of the 24 can go before one number in ten is lost, in each way?

# %%
few = rows(watched[:50])

def harm(heads):
    with without_heads(model, heads):
        return -judge(model, *few)[1].sum().item()

order, gone = sorted(HEADS, key=lambda head: harm([head])), []
while len(gone) < 24:
    rest = [head for head in HEADS if head not in gone]
    gone.append(min(rest, key=lambda head: harm([*gone, head])))
curves = {"by single cost": order, "cheapest now": gone}
curves = {name: [1 - cost(heads[:k]) / whole for k in range(25)]
          for name, heads in curves.items()}
can_go = {name: next(k for k, share in enumerate(curve) if share <= 0.9) - 1
          for name, curve in curves.items()}
print("cheapest now: 10 or more can go:", can_go["cheapest now"] >= 10)
print("fewer by single cost:",
      can_go["by single cost"] < can_go["cheapest now"])
assert can_go["cheapest now"] >= 10
assert can_go["by single cost"] < can_go["cheapest now"]
assert gone[-1][0] == "decoder 2 cross"

# %% tags=["hide-input"]
figure, (ax, grid) = plt.subplots(1, 2, figsize=(8, 3.5),
                                  width_ratios=[1.15, 1])
for (name, curve), (color, style) in zip(curves.items(), LINES[1::-1]):
    ax.plot(range(25), [100 * share for share in curve], label=name,
            color=color, linestyle=style)
ax.axhline(90, color=COLORS["neutral"], linestyle=":", linewidth=1)
ax.set(xlabel="heads removed", ylabel="numbers still right (%)",
       ylim=(0, 103), xlim=(0, 24))
figure.legend(*ax.get_legend_handles_labels(), fontsize=9, ncols=2,
              loc="outside lower left")
turns = torch.tensor([[gone.index((layer, head)) + 1 for head in range(4)]
                      for layer in layers(model)])
heatmap(turns / 24, list(layers(model)), [1, 2, 3, 4], ax=grid,
        annotate=False)
for (y, x), turn in zip(torch.cartesian_prod(torch.arange(6),
                                             torch.arange(4)).tolist(),
                        turns.flatten().tolist()):
    grid.text(x + 0.5, y + 0.5, turn, ha="center", va="center", fontsize=9,
              color="white" if turn > 14 else "black")
grid.set(xlabel="head", ylabel="", aspect="auto")
grid.set_title("When each goes\n(cheapest now)", fontsize=10)
figure.suptitle("Ten heads or more can go together, if well chosen", x=0.01,
                ha="left", fontsize=12, fontweight="bold")
show("Left: numbers still right against heads removed. Chosen step by step, "
     "ten heads or more go before a tenth of the numbers is lost; chosen by "
     "single cost, fewer. Right: the turn at which each head goes; the last "
     "to go are mostly heads of the decoder's cross-attention.")

# %% [markdown]
# Step by step ten or more can go together (16 in the run shown); by single cost fewer (5), since two clerks with one job are both cheap as long as the other is there. That curve even rises again: taking more away mends a little of what broke. The last to go is a head that reads the source.
#
# Michel et al. (2019) removed heads from large trained translators: most can go alone without a noticeable loss; together, a smaller part; and the attention across to the source needs its heads most. Voita et al. (2019) could remove most together, training the rest further; what stayed longest had a role that one can name.

# %% [markdown]
# ## Attention is not an explanation
#
# It is tempting to read a map as a reason: *it wrote this piece because it looked there*. A reason can be tested. **Exchange** a word of the source for another of its kind (*four* for *seven*), leave the German so far as it is, and see whether the model would write another piece.

# %%
src, tgt = number_rows[0]
torch.manual_seed(0)

def exchanged(place):  # the source with another word of its kind there
    kind = src[:, place].unique()
    at = torch.searchsorted(kind, src[:, place].contiguous())
    other = (at + torch.randint(1, len(kind), at.shape)) % len(kind)
    changed = src.clone()
    changed[:, place] = kind[other]
    return changed

DIGITS = sorted(OWN)  # 0, 3, 4, 6, 9, 10: the words that say which digit
matters = torch.zeros(300, 6, 12, dtype=torch.bool)  # (B, piece, place)
for place in DIGITS:
    matters[:, :, place] = ~judge(model, exchanged(place), tgt)[0][:, :6]
is_own = torch.zeros(6, 12, dtype=torch.bool)
is_own[range(6), OWN] = True
print(f"own word exchanged: {matters[:, is_own].double().mean():.0%} of "
      f"pieces change; another digit: "
      f"{matters[:, ~is_own].double().mean():.0%}")
assert matters[:, is_own].double().mean() > 0.99
assert matters[:, ~is_own].double().mean() < 0.005

# %% [markdown]
# Each piece depends on its own word, and on no other digit. `hundred`, `and`, `thousand,` and `<eos>` have no other word of their kind. Those we **hide**: the decoder may not look there in either layer, as if the place were padding.

# %%
@torch.inference_mode()
def written_without(place):  # hidden from the cross-attention
    memory, mask = model.encode(src)
    mask = mask.expand(len(src), 1, 1, 12).clone()
    mask[..., place] = False
    return model.decode(tgt[:, :-1], memory, mask)

OTHERS = [place for place in range(12) if place not in DIGITS]
for place in OTHERS:
    said = written_without(place).argmax(dim=-1)
    matters[:, :, place] = (said != tgt[:, 1:])[:, :6]
many = matters.sum(dim=-1).double().mean().item()
print("words that a piece depends on: from 1 to 1.5 in the mean:",
      1 <= many + 0.01 <= 1.5)
all_six = written_without(OTHERS).argmax(dim=-1) != tgt[:, 1:]
print("all six hidden at once, over a third of pieces change:",
      bool(all_six[:, :6].double().mean() > 1 / 3))
assert 0.99 < many < 1.5

# %% [markdown]
# So we know on which words each piece depends (one at a time: of two that can replace one another neither would show), and can ask the maps. A **strong look** is a weight above one half; it is **idle** if nothing depends on the word looked at. **Guess first:** of the strong looks in the first and the second cross-attention, how many are idle?

# %% tags=["nbval-ignore-output"]
maps, idle = record(model, number_rows), {}
for layer in ("decoder 1 cross", "decoder 2 cross"):
    strong = maps[layer][0][:, :, :6] > 0.5  # (B, H, 6, 12)
    needed = strong & matters.unsqueeze(1)
    to_own = (strong & is_own).sum() / strong.sum()
    idle[layer] = 1 - needed.sum() / strong.sum()
    print(f"{layer}: own word {to_own:.0%}, others that matter "
          f"{1 - idle[layer] - to_own:.0%}, idle {idle[layer]:.0%}")
assert idle["decoder 1 cross"] > 0.1
assert idle["decoder 2 cross"] < min(0.2, idle["decoder 1 cross"])

# %% [markdown]
# In the run shown more than nine in ten of the second layer's strong looks go to a word that matters; in the first more than a third are idle. Here is the number with the heaviest idle weight of all 300, whole: the mean maps of both layers, beside what each word does to each piece.

# %% tags=["hide-input"]
idle_most = (maps["decoder 1 cross"][0][:, :, :6].mean(dim=1)
             * ~(matters | is_own)).amax(dim=(1, 2))  # (B,)
here = int((idle_most * matters[:, is_own].all(dim=1)).argmax())
keys = named(source, src[here].tolist())
written = named(target, tgt[here, 1:7].tolist())
lost = torch.zeros(6, 12)
before_p = judge(model, src, tgt)[1].exp()[here, :6]
for place in range(12):
    if place in DIGITS:
        after_p = judge(model, exchanged(place), tgt)[1].exp()[here, :6]
    else:
        after_p = written_without(place).softmax(dim=-1)[here, range(6),
                                                         tgt[here, 1:7]]
    lost[:, place] = before_p - after_p
figure, axes = plt.subplots(1, 3, figsize=(8, 3.2), sharey=True)
panels = (("weights, decoder 1", maps["decoder 1 cross"][0][here, :, :6]
           .mean(dim=0)),
          ("weights, decoder 2", maps["decoder 2 cross"][0][here, :, :6]
           .mean(dim=0)), ("probability lost", lost))
for ax, (title, values) in zip(axes, panels):
    heatmap(values.clamp(min=0), written, keys, ax=ax, annotate=False)
    ax.set(xlabel="source word", ylabel="", aspect="auto")
    ax.set_title(title, fontsize=10)
    ax.tick_params(axis="x", rotation=90, labelsize=9)
    ax.tick_params(axis="y", labelsize=9)
axes[0].set_ylabel("piece written")
figure.suptitle("Layer 1 looks most at a word that is hardly needed", x=0.01,
                ha="left", fontsize=12, fontweight="bold")
show("Three maps for one number, rows are the pieces written, columns the "
     "source words. The weights of the first cross-attention are spread over "
     "several words; those of the second, and the loss of probability when a "
     "word is exchanged or hidden, are dark at the own word.")

# %% [markdown]
# In the run shown, the row of the second hundreds is darkest at `thousand,` in the first layer. Hide `thousand,` and the piece is written as before, a little less surely; exchange the digit, and it is not. The picture on the left would have been told as a reason; the one on the right is a reason, measured.
#
# A weight says which *position* is read; what stands there has passed through the encoder, and a later layer may ignore what an earlier one fetched.
#
# ### Other weights, same words
#
# If a head's weights are the reason, other weights should give other words. A query of 0 has the same score with every key, so its weights are all alike. We take the query away from a head and let it look evenly at everything.

# %%
def looking_evenly(model, heads):  # a copy in which these ask nothing
    even = copy.deepcopy(model)
    for layer, head in heads:
        attention = even.get_submodule(layers(model)[layer])
        d_k = attention.sizes[0] // attention.n_heads
        for matrix in attention.input.parameters():  # queries stand first
            matrix.data[head * d_k:(head + 1) * d_k] = 0.0
    return even

def same_words(heads):
    even = looking_evenly(model, heads)
    return exact(even, src, tgt) / exact(model, src, tgt)

even = record(looking_evenly(model, [("decoder 2 cross", 2)]), number_rows)
assert torch.allclose(even["decoder 2 cross"][0][:, 2],
                      torch.tensor(1 / 12))
alone = sum(same_words([head]) > 0.95 for head in HEADS)
print("one head evenly: the same for over 95 %, for at least 20 of 24:",
      alone >= 20)
print("all four of decoder 2 cross: the same for over half:",
      same_words(last) > 0.5)
assert alone >= 20 and same_words(last) < 0.5

# %% [markdown]
# Nearly every head alone can look evenly, sharp or not, and the numbers come out as before: no wonder, since it could be removed. All four of *decoder 2 cross* together cannot: there the weights are needed.
#
# There is a dispute on this. Jain and Wallace (2019) found, in recurrent text classifiers, that weights go only weakly with other measures of importance, and that very different weights often give the same answer: *attention is not explanation*.
#
# Wiegreffe and Pinter (2019) answer that weights put in by hand are not weights that a model would learn, that such claims need controls, and that it depends on what one calls an explanation.
#
# ### Weights on nothing
#
# A known trap (Kobayashi et al. 2020): a head with much weight on `<eos>` may fetch nothing there, because that value is nearly 0. Weight times the length of what the value becomes in the output is the better measure.

# %%
@torch.inference_mode()
def end_share(model, batches):  # cross -> share of weight, of w x length
    shares = {}
    for layer, maps in record(model, batches).items():
        if "cross" not in layer:
            continue
        attention = model.get_submodule(layers(model)[layer])
        # (d_model, H * d_v) -> (d_model, H, d_v)
        output = attention.output.weight.unflatten(1, (4, -1))
        pairs = []
        for (src, _), weights in zip(batches, maps):
            value = attention.keys_values(model.encode(src)[0])[1]
            length = torch.einsum("bhsv,dhv->bhsd", value, output).norm(
                dim=-1).unsqueeze(2)  # (B, H, S) -> (B, H, 1, S)
            fetched = weights * length
            fetched = fetched / fetched.sum(dim=-1, keepdim=True)
            pairs.append(torch.stack([m[..., -1].mean(dim=(0, 2))
                                      for m in (weights, fetched)]))
        shares[layer] = torch.stack(pairs).mean(dim=0)  # (2, H)
    return shares

ends = end_share(model, number_rows)
apart = max((share[0] - share[1]).abs().max() for share in ends.values())
print("share of <eos>, with and without length, differ by less than 0.1:",
      bool(apart < 0.1))
assert apart < 0.1

# %% [markdown]
# In the numbers model the two shares differ by less than a tenth of all weight.

# %% [markdown]
# ## Were the scores of variance 1?
#
# Chapter 02 divided by $\sqrt{d_k}$ because queries and keys of independent components, with mean 0 and variance 1, have dot products of variance $d_k$. After training this need not hold. We measure, for each layer, the mean of the components (its typical size), their variance in q and in k, how strongly they correlate (mean $|r|$ of all pairs), and the standard deviation of the scores $q \cdot k / \sqrt{d_k}$.
#
# Next to it what **strangers** give, a q and a k drawn from anywhere in the data, hardly ever of one number; **shuffled**, strangers with the components of k in another order, which keeps all but the match of their directions; and `assumed`, what independent components of mean 0 with these mean squares would give. **Guess first:** does training keep the scores near 1, and if not, what breaks: the variances, the independence of q from k, or that of their components?

# %%
def queries_and_keys(model, batches):  # layer -> [(q, k), ...]
    found = defaultdict(list)
    with ExitStack() as hooks, torch.inference_mode():
        for layer, name in layers(model).items():
            def keep(attention, inputs, layer=layer):
                x, memory = inputs[0], inputs[1] if "cross" in layer else None
                memory = x if memory is None else memory
                found[layer].append((attention.queries(x),
                                     attention.keys_values(memory)[0]))

            hooks.enter_context(model.get_submodule(
                name).register_forward_pre_hook(keep))
        for src, tgt in batches:
            model(src, tgt[:, :-1])
    return found

def correlation(x):  # (H, N, d_k): mean |r| of different components
    other = ~torch.eye(x.shape[-1], dtype=torch.bool)
    return torch.stack([torch.corrcoef(head.T)[other].abs().mean()
                        for head in x]).mean().item()

# %%
def score_facts(model, batches):
    facts = {}
    for layer, pairs in queries_and_keys(model, batches).items():
        # each (B, H, T, d_k) -> (H, B * T, d_k), all batches together
        q, k = (torch.cat([x.transpose(0, 1).flatten(1, 2) for x in side], 1)
                for side in zip(*pairs))
        d_k, own = q.shape[-1], "decoder" in layer and "self" in layer
        scores = [q @ k.transpose(-2, -1) / d_k**0.5 for q, k in pairs]
        if own:  # only those that the mask allows
            scores = [s[:, :, causal_mask(s.shape[-1])] for s in scores]
        draw = torch.Generator().manual_seed(0)
        some = [torch.randint(x.shape[1], (5000,), generator=draw)
                for x in (q, k)]
        strangers = (q[:, some[0]] * k[:, some[1]]).sum(-1) / d_k**0.5
        mixed = k[..., torch.randperm(d_k, generator=draw)]
        mixed = (q[:, some[0]] * mixed[:, some[1]]).sum(-1) / d_k**0.5
        squares = q.square().mean(dim=1), k.square().mean(dim=1)  # (H, d_k)
        means = torch.cat([q.mean(dim=1), k.mean(dim=1)])
        facts[layer] = {
            "mean": means.square().mean().sqrt().item(),
            "var q": q.var(dim=1).mean().item(),
            "var k": k.var(dim=1).mean().item(),
            "|r|": (correlation(q) + correlation(k)) / 2,
            "scores": torch.cat([s.flatten() for s in scores]).std().item(),
            "strangers": strangers.std().item(),
            "shuffled": mixed.std().item(),
            "assumed": (squares[0] * squares[1]).mean().sqrt().item()}
    return facts

# %% tags=["nbval-ignore-output"]
def print_table(facts):
    print(" " * 15, *(f"{c:>9s}" for c in next(iter(facts.values()))))
    for layer, row in facts.items():
        print(f"{layer:15s}", *(f"{v:9.2f}" for v in row.values()))

facts = {"untrained": score_facts(untrained, number_rows),
         "trained": score_facts(model, number_rows)}
for name, found_facts in facts.items():
    print(name)
    print_table(found_facts)
new, old = facts["trained"].values(), facts["untrained"].values()
assert all(0.4 < f["scores"] / f["assumed"] < 1.35 for f in old)
assert all(f["scores"] > 1.3 * f["assumed"] for f in new)
assert all(abs(f["strangers"] / f["scores"] - 1) < 0.3 for f in new)
assert all(f["shuffled"] < 0.85 * f["strangers"] for f in new)
assert all(0.3 < f[v] < 4 for f in new for v in ("var q", "var k"))

# %% tags=["hide-input"]
def draw_scores(facts, title):
    figure, axes = plt.subplots(1, 2, figsize=(8, 0.3 * len(
        facts["trained"]) + 1.5), sharey=True, sharex=True)
    for ax, (name, rows) in zip(axes, facts.items()):
        y = range(len(rows))
        ax.barh(y, [f["scores"] for f in rows.values()], height=0.6,
                color=COLORS["query"], alpha=0.6, label="measured")
        ax.plot([f["assumed"] for f in rows.values()], y, "D",
                color="black", linestyle="", markersize=6,
                label="assumed: independent components")
        ax.plot([f["strangers"] for f in rows.values()], y, "|",
                color=COLORS["key"], markersize=13, markeredgewidth=2.5,
                linestyle="", label="strangers")
        ax.axvline(1, color=COLORS["neutral"], linestyle=":", linewidth=1)
        ax.set_yticks(y, list(rows))
        ax.set(title=name, xlabel="standard deviation of scores")
        if max(f["scores"] for f in facts["trained"].values()) > 10:
            ax.set(xscale="log", xlim=(0.4, 50), xticks=[1, 3, 10, 30],
                   xticklabels=[1, 3, 10, 30])
            ax.minorticks_off()
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=9,
                  loc="outside lower center", ncols=3)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure

draw_scores(facts, "Trained scores are larger than independence predicts")
show("Two panels of bars over six layers: the standard deviation of scores. "
     "Untrained it is near 1 and where independence puts it. Trained it is "
     "larger than independence predicts, in every layer, also for queries "
     "and keys of different numbers.")

# %% [markdown]
# Before training the scores spread about as the assumption says, near 1 (0.85 to 1.6), though none of its parts holds: means are not 0, components correlate, and deeper layers have variances well below 1. But q's components and k's have nothing to do with one another, and so it cancels.
#
# After training the *variances* of this model are still within a factor of four of 1. What broke is not the independence of q from k as such: strangers have scores nearly as large. It is that of the components. Those of q vary together, and those of k vary together *in the same way* (put k's components in another order, and most of the excess is gone): training turned them towards one another. So scores grow beyond what variances allow, and softmax gets sharper. The root keeps the start mild; it does not bind the end.

# %% [markdown]
# ## The same questions to a translator of sentences
#
# The model of chapter 14 has four layers in each stack and learnt from 29,000 real captions. Its averaged weights are stored in half precision, with the byte-pair merges and a line on where they come from.

# %% [markdown]
# A file of weights is a pickle, and a pickle can run code when it is opened. `weights_only=True` opens tensors, numbers and texts, and nothing else (chapter 09).

# %%
BOOK = (
  "https://raw.githubusercontent.com/OWNER/attention-cell-by-cell/main/book/")
WEIGHTS_SUM = (
    "0000000000000000000000000000000000000000000000000000000000000000")
folder = os.environ.get("ATTENTION_WEIGHTS") or "weights"
try:
    path = fetch(BOOK + "weights/translator.pt",
                 Path(folder, "translator.pt"), WEIGHTS_SUM)
    saved = torch.load(path, weights_only=True)
    config = TransformerConfig(**saved["config"])
    torch.manual_seed(1)
    translator, fresh = (Transformer(config).eval() for _ in range(2))
    with torch.no_grad():
        for name, weight in translator.named_parameters():
            weight.copy_(saved["weights"][name])
    bpe = BytePairEncoding(saved["merges"])
    print(saved["provenance"])
except OSError as error:
    translator = None
    print("No sentences:", error)

# %% [markdown]
# Forty captions of our own, in the style of those it learnt from. We ask about the model's *own* translations, right or wrong: it is the model that we want to understand.

# %%
CAPTIONS = """Two men play football.|A man plays the guitar.
A dog runs on the beach.|A woman holds a baby.|Two girls laugh.
A man rides a bike.|A child plays with a ball.|A woman reads a book.
A girl eats an apple.|A cat sleeps on a chair.|A boy jumps into the water.
Two children play in the snow.|A man with a hat rides a horse.
Three women sit on a bench.|A brown dog catches a ball.
A girl in a blue dress dances.|Two people walk along the street.
A man cooks in the kitchen.|A child sits under a tree.
Some people wait for the bus.|A man in a black shirt sings.
The boy throws a ball.|A white horse stands in a field.
A young man climbs a rock.|An old woman sells flowers.
Four boys swim in a lake.|A woman takes a picture.
A little girl climbs a ladder.|Two dogs run through the grass.
A man sleeps on a sofa.|People stand in front of a shop.
A woman wearing a hat smiles.|A boy in a yellow shirt runs.
The man drives a small car.|A group of men build a house.
A baby drinks milk.|Two women talk at a table.|A man paints a wall.
A dog jumps over a fence.|A woman sits by the window."""
captions = CAPTIONS.replace("\n", "|").split("|")
assert len(set(captions)) == 40

# %% tags=["nbval-ignore-output"]
if translator:
    sentence_rows = []
    for caption in captions:
        ids = torch.tensor([bpe.encode(caption) + [config.eos]])
        out = greedy_decode(translator, ids)
        begin = torch.full((1, 1), config.bos)
        sentence_rows.append((ids, torch.cat([begin, out], dim=1)))
    assert all(out[0, 0] == 1 for _, out in sentence_rows)
    for caption, (_, out) in list(zip(captions, sentence_rows))[:8]:
        print(f"{caption:32s}{bpe.decode(i for i in out[0] if i > 2)}")

# %% [markdown]
# All heads of a layer, for three short ones. **In which layers does cross-attention show which word becomes which, and which layer would you remove first?**

# %% tags=["hide-input"]
if translator:
    short = sorted(range(8), key=lambda i: sum(
        ids.shape[1] for ids in sentence_rows[i]))[:3]
    sentence_maps = record(translator, sentence_rows)

    def draw_caption(sentence, layer):
        src, tgt = (named(bpe, ids[0].tolist())
                    for ids in sentence_rows[sentence])
        return draw_heads(sentence_maps[layer][sentence][0], layer, src, tgt,
                          layer, height=3.2)

    explore(draw_caption, sentence={captions[i]: i for i in short},
            layer=list(layers(translator)))

# %% [markdown]
# In the last two: *decoder 3 cross* and *decoder 4 cross* have dark cells at the word translated, while *decoder 1 cross* spreads its looks and would be our first to go.
#
# Over all forty: how sharp, and what is needed? For removal we count the captions that would be translated otherwise than by the whole model, and how much log probability, in nats, a caption's translation loses. **Guess first:** a model of 48 heads; how many of 40 translations does a head change, in the mean?

# %% tags=["hide-input"]
if translator:
    before_s = sharpness(fresh, sentence_rows)
    after_s = sharpness(translator, sentence_rows)
    keys = {layer: after_s[layer][0].mean() for layer in after_s}
    assert keys["decoder 1 cross"] > keys["decoder 4 cross"]
    assert keys["encoder 1 self"] < keys["decoder 1 cross"]
    draw_sharpness(before_s, after_s, "Sentences: cross-attention is sharper "
                   "in later layers")
    show("For each of twelve attention layers of the sentence model, how "
         "many keys its four heads look at effectively, before and after "
         "training, with the number of keys allowed as a grey bar. After it "
         "cross-attention is sharper in layer 4 than in layer 1; encoder "
         "layer 1 is among the sharpest.")

# %% [markdown]
# Cross-attention sharpens from layer to layer. And the encoder, broad in the numbers model, has some of the sharpest heads here.

# %% tags=["nbval-ignore-output"]
if translator:
    both = [nn.utils.rnn.pad_sequence([row[side][0] for row in sentence_rows],
                                      batch_first=True) for side in (0, 1)]
    assert exact(translator, *both) > 0.95  # its own words

    def changes(heads):
        with without_heads(translator, heads):
            right, chances = judge(translator, *both)
        return (~right.all(dim=1)).sum().item(), chances.sum().item() / 40

    likely, table_s = changes([])[1], {}
    print("translations changed, of 40:", "heads 1 to 4, all four,",
          "nats lost with all four", sep="   ")
    for layer in layers(translator):
        ones = [changes([(layer, head)])[0] for head in range(4)]
        every, chances = changes([(layer, head) for head in range(4)])
        print(f"{layer:16s}", *(f"{n:4d}" for n in ones), f"{every:8d}",
              f"{likely - chances:10.1f}")
        table_s[layer] = ones, every, likely - chances
    encoders = [(layer, head) for layer in table_s if "encoder" in layer
                for head in range(4)]
    without = changes(encoders)[0]
    print(f"encoder without attention: {without} of 40")
    dearest = max(table_s, key=lambda layer: table_s[layer][2])
    cheapest = min(table_s, key=lambda layer: table_s[layer][1])
    mean = sum(sum(ones) for ones, _, _ in table_s.values()) / 48
    print(f"cheapest: {cheapest}; most expensive: {dearest}; one head "
          f"changes {mean:.0f} of 40 in the mean")
    assert cheapest != "decoder 1 cross" and without > 20
    assert dearest == "decoder 4 cross" and table_s[dearest][1] > 20
    assert table_s[dearest][1] > 1.5 * max(table_s[dearest][0]) and mean > 1

# %% [markdown]
# As in the numbers model the last cross-attention is the most expensive: without it more than half of the translations change, many more than without any one of its heads. But a single head is no longer free: the last line says how many translations it changes in the mean. 
#
# And *decoder 1 cross*, our first to go, is not the cheapest: broad is not idle. The encoder's attention, which the numbers hardly missed, is needed here: without it most translations change.
#
# And the two measurements from above, on this model: `<eos>`, with and without the lengths of values, and the spread of the scores.

# %% tags=["hide-input", "nbval-ignore-output"]
if translator:
    for layer, share in end_share(translator, sentence_rows).items():
        print(f"{layer}: share of <eos>, heads 1 to 4: weight",
              *(f"{s:.2f}" for s in share[0].tolist()), "  times length",
              *(f"{s:.2f}" for s in share[1].tolist()))
    less = torch.stack([share[1] < share[0] for share in
                        end_share(translator, sentence_rows).values()])
    assert less.double().mean() > 0.6
    facts_s = {"untrained": score_facts(fresh, sentence_rows),
               "trained": score_facts(translator, sentence_rows)}
    assert all(f["scores"] > 1.1 * f["assumed"]
               for f in facts_s["trained"].values())
    spread = [f[v] for f in facts_s["trained"].values()
              for v in ("var q", "var k")]
    print(f"trained, variances of q and k: from {min(spread):.2f} "
          f"to {max(spread):.1f}")
    draw_scores(facts_s, "Sentences: larger than independence predicts, too")
    show("Two panels of bars over the twelve layers of the sentence model: "
         "the standard deviation of scores, before and after training, with "
         "what independent components would give, and queries and keys of "
         "different sentences.")

# %% [markdown]
# Counted with lengths, `<eos>` has less in most heads than its weight says, in some about half: the trap, in part. The scores, trained, spread more than independence predicts in every layer, and among strangers, too. But here the variances moved as well (last line): in self-attention some grew, in cross-attention q grew and k shrank, which can cancel (question 2 below).

# %% [markdown]
# ## What you built
#
# - `effective`: sharpness as a number of keys. A search for roles that is found on one half and counted on the other, next to an untrained model.
# - `without_heads`, with zero or mean, and `looking_evenly`. Heads with one job hide each other: free alone, expensive together.
# - A test of explanations: exchange the word. And an answer to chapter 02: after training scores spread more than variances explain, because q and k vary in the same directions; in the sentence model the variances moved, too.
#
# ## Check yourself
#
# **1.** A head's row of weights is 0.5, 0.5, 0, 0 for each number, but which two keys it is changes. What is the effective number of keys of the row, and of the *mean* row over many numbers? Which did we report?
#
# <details><summary>Answer</summary>
#
# 2 for each row, up to 4 for the mean row. We took the count of each row first, then the mean. A mean map looks broader than the head is.
#
# </details>
#
# **2.** All keys of a layer are made twice as long, all its queries half as long. What changes in the scores, and what in the table above?
#
# <details><summary>Answer</summary>
#
# The scores stay. In the table the variance of k is four times as large, that of q a quarter, and the mean changes, too; the columns from $|r|$ on stay. Variances of q and k alone say little.
#
# </details>

# %%
twice = copy.deepcopy(model)
name = layers(model)["decoder 2 cross"]
matrix = twice.get_submodule(name).input.weight.data  # queries, keys, values
matrix[:128] /= 2
matrix[128:256] *= 2
a, b = (score_facts(m, number_rows)["decoder 2 cross"]
        for m in (model, twice))
print("2. var k:", f"{b['var k'] / a['var k']:.2f} times", "  scores:",
      f"{b['scores'] / a['scores']:.2f} times")
assert abs(b["scores"] / a["scores"] - 1) < 1e-3

# %% [markdown]
# ## Where to read on
#
# - Michel, Levy, Neubig, *Are Sixteen Heads Really Better than One?*, NeurIPS 2019, [arXiv 1905.10650](https://arxiv.org/abs/1905.10650): heads removed alone, and together by an estimate of their importance.
# - Voita, Talbot, Moiseev, Sennrich, Titov, *Analyzing Multi-Head Self-Attention: Specialized Heads Do the Heavy Lifting, the Rest Can Be Pruned*, ACL 2019, [arXiv 1905.09418](https://arxiv.org/abs/1905.09418): roles, and pruning with training.
# - Clark, Khandelwal, Levy, Manning, *What Does BERT Look At?*, BlackboxNLP 2019, [arXiv 1906.04341](https://arxiv.org/abs/1906.04341): roles counted against annotated sentences; weight on separators.
# - Jain, Wallace, *Attention is not Explanation*, NAACL 2019, [arXiv 1902.10186](https://arxiv.org/abs/1902.10186), and Wiegreffe, Pinter, *Attention is not not Explanation*, EMNLP 2019, [arXiv 1908.04626](https://arxiv.org/abs/1908.04626): the dispute.
# - Kobayashi, Kuribayashi, Yokoi, Inui, *Attention is Not Only a Weight*, EMNLP 2020, [arXiv 2004.10102](https://arxiv.org/abs/2004.10102): weights times lengths.
#
# Next, chapter 16: what the paper itself measured.
