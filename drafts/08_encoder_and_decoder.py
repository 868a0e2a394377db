# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. Encoder and decoder
#
# *How do the stacks talk?* One stack of layers reads a sentence, another writes one, and the writer may ask the reader. We put an encoder
# layer together on paper and a decoder layer from the same parts, stack both, and walk a batch through. Then we train a small translator and see who asks whom,
# and what is left when the connection is cut. At the end you will have built `EncoderLayer`, `DecoderLayer`, `Encoder` and `Decoder`, equal to PyTorch's.
#
# <div class="admonition note">
# <p class="admonition-title">What it takes</p>
# <p>Reading: 25 minutes. Running: about a minute on a CPU; a GPU does not help. Before: chapters 02 and 03 (attention, heads), 04 (padding and
# causal masks) and 07 (feed-forward layer, layer norm, residual). Tokens and positions (05, 06) are used as they come.</p>
# </div>
#
# [Read on the site](https://OWNER.github.io/attention-cell-by-cell/book/08_encoder_and_decoder.html) · [Run in Colab](https://colab.research.google.com/github/OWNER/attention-cell-by-cell/blob/main/book/08_encoder_and_decoder.ipynb)

# %% [markdown]
# ## Two stacks, one sentence
#
# A translator has the whole **source** sentence before it begins, and writes the **target** sentence word by word. So there are two kinds of work.
# *Reading*: every source word may look at every other, before and after. *Writing*: a position may look at what is written so far, and at the source,
# but not at words still to come.
#
# The **encoder** reads. It is a stack of layers of one form and turns the $S$ source tokens into $S$ vectors, the **memory**. The **decoder** writes. From the
# words so far and the memory it makes, at each of $T$ positions, scores for the next word. We make a small language pair to watch them at it.

# %%
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ARTICLES = {"the": ("le", "la"), "a": ("un", "une")}
SIZES = {"": ("", ""), "small": ("petit", "petite"),
         "big": ("grand", "grande")}
COLOURS = {"": ("", ""), "black": ("noir", "noire"),
           "green": ("vert", "verte"), "white": ("blanc", "blanche"),
           "grey": ("gris", "grise")}
NOUNS = {"cat": ("chat", 0), "dog": ("chien", 0), "horse": ("cheval", 0),
         "mouse": ("souris", 1), "cow": ("vache", 1), "hen": ("poule", 1)}
VERBS = {"sleeps": "dort", "eats": "mange", "sings": "chante",
         "runs": "court"}

# %%
def pair(article, size, colour, noun, verb):
    french, gender = NOUNS[noun]  # 1: feminine
    english = (article, size, noun, colour, verb)  # in the French order
    target = (ARTICLES[article][gender], SIZES[size][gender], french,
              COLOURS[colour][gender], VERBS[verb])
    source = [w for w in (article, size, colour, noun, verb) if w]
    partner = {t: s for t, s in zip(target, english) if t}
    return source, list(partner), partner

pairs = [pair(*words) for words in itertools.product(
    ARTICLES, SIZES, COLOURS, NOUNS, VERBS)]
print(len(pairs), "pairs")
for source, target, _ in pairs[148:150] + pairs[3:4]:
    print(" ".join(source), "->", " ".join(target))

# %% [markdown]
# Three things make it more than a dictionary. A colour stands before the noun in English and behind it in French. Article and adjectives follow the noun's gender,
# which English does not show (*le chat noir*, *la souris noire*). And sentences have three to five words.
#
# As ids: the source has five places, the rest is padding. The decoder is given the target behind a start token, `<bos>`, and at every position must name the *next* word,
# at last `<eos>`, the end. We stack both inputs into one row of $5 + 6$ ids, since `fit` (chapter 01) hands a model one tensor.

# %%
vocabulary = ["<pad>", "<bos>", "<eos>"]
vocabulary += sorted({w for source, target, _ in pairs
                      for w in source + target})
S, T, V = 5, 6, len(vocabulary)

def ids(words, length):
    numbers = [vocabulary.index(word) for word in words]
    return numbers + [0] * (length - len(numbers))

inputs = torch.tensor([ids(source, S) + ids(["<bos>", *target], T)
                       for source, target, _ in pairs])  # (720, S + T)
nexts = torch.tensor([ids([*target, "<eos>"], T)
                      for _, target, _ in pairs])  # (720, T)
torch.manual_seed(0)
unseen, known = torch.randperm(len(pairs)).split([120, 600])
print("given ", [vocabulary[i] for i in inputs[3]])
print("wanted", [vocabulary[i] for i in nexts[3]])

# %% [markdown]
# ## An encoder layer
#
# An encoder layer has two parts, called **sublayers**. *Self-attention*: each position fetches from all. *Feed-forward*: each position works on what it has,
# for itself. Around each of them goes chapter 07's residual: add what came in, then normalise (mean 0, variance 1).
#
# On paper, for two tokens of three numbers. Our attention looks at everything alike, so it gives the mean; our feed-forward layer is a bare ReLU.

# %%
x = torch.tensor([[4.0, 0.0, 2.0], [0.0, 4.0, 2.0]])

def norm(x):
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / centred.square().mean(dim=-1, keepdim=True).sqrt()

attended = x.mean(dim=0)  # the same for both tokens
middle = norm(x + attended)
by_hand = norm(middle + middle.relu())
for name, rows in (("x + attended", x + attended), ("middle", middle),
                   ("out", by_hand)):
    print(f"{name:13s}", rows.double().numpy().round(2).tolist())

# %% [markdown]
# Check the first row: the mean of the tokens is (2, 2, 2), the sum (6, 2, 4), with mean 4. The distances from it are (2, −2, 0), their mean square 8/3; divided by
# its root, 1.63, they give (1.22, −1.22, 0). The second half goes the same way.
#
# The class is that and no more: `MultiHeadAttention`, `FeedForward`, two `Residual`s. Dropout, which zeroes a random share of numbers in training only, has three places: after each
# sublayer (the paper's), and, if wanted, on the attention weights and after the ReLU.

# %% tags=["export"]
class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward layer, each in a Residual (§3.1).

    dropout: after each sublayer. attention_dropout: on weights.
    activation_dropout: after the ReLU. heads: d_k, d_v, bias of
    MultiHeadAttention.
    """

    def __init__(self, d_model: int, n_heads: int, d_ff: int, *,
                 dropout: float = 0.1, attention_dropout: float = 0.0,
                 activation_dropout: float = 0.0, norm_first: bool = False,
                 **heads):
        super().__init__()
        self.self_attention = MultiHeadAttention(
            d_model, n_heads, dropout=attention_dropout, **heads)
        self.feed_forward = FeedForward(d_model, d_ff, activation_dropout)
        self.residuals = nn.ModuleList(
            Residual(d_model, dropout=dropout, norm_first=norm_first)
            for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x and what comes out: (B, S, d_model); mask as in `attention`."""
        x = self.residuals[0](
            x, lambda x: self.self_attention(x, mask=mask)[0])
        return self.residuals[1](x, self.feed_forward)

# %% [markdown]
# We give it the weights of our paper example. Queries of zero make all scores equal; identity matrices leave everything else as it is.

# %%
layer = EncoderLayer(3, n_heads=1, d_ff=3).eval()
with torch.no_grad():
    layer.self_attention.query.weight.zero_()
    for linear in (layer.self_attention.value, layer.self_attention.output,
                   layer.feed_forward[0], layer.feed_forward[3]):
        nn.init.eye_(linear.weight)
    output = layer(x.unsqueeze(0))[0]  # a batch of one
print(output.double().numpy().round(2).tolist())
assert torch.allclose(output, by_hand, atol=1e-4)
print("equal to the example on paper:", True)

# %% [markdown]
# Which of the two sublayers lets tokens mix? We change token 0 and look whose output moves, in either:

# %%
torch.manual_seed(0)
layer = EncoderLayer(16, n_heads=4, d_ff=32).eval()
x = torch.randn(1, S, 16)
other = x.clone()
other[:, 0] = torch.randn(16)
attend = layer.residuals[0], lambda x: layer.self_attention(x)[0]
think = layer.residuals[1], layer.feed_forward
for name, (residual, sublayer) in (("self-attention", attend),
                                   ("feed-forward", think)):
    change = (residual(other, sublayer) - residual(x, sublayer)).abs()
    moved = change.amax(dim=-1)[0] > 1e-5
    print(f"{name:15s}moves tokens", moved.nonzero().flatten().tolist())
    assert moved.sum() == (S if name == "self-attention" else 1)

# %% [markdown]
# ## A decoder layer
#
# Only attention lets tokens mix; the feed-forward layer treats each alone. A decoder layer has one more way to mix.
#
# It has three sublayers. *Causal self-attention*: a position sees itself and what stands before it. Then **cross-attention**: queries come from the decoder's
# positions, keys and values from the memory. The decoder asks, the encoder answers. Then feed-forward. In detail, with three target positions and five source
# positions:

# %%
torch.manual_seed(0)
cross = MultiHeadAttention(16, n_heads=4)
x, memory = torch.randn(1, 3, 16), torch.randn(1, 5, 16)
query = cross.queries(x)  # from the decoder
key, value = cross.keys_values(memory)  # from the encoder
heads, weights = attention(query, key, value)
for name, tensor in (("query", query), ("key", key), ("value", value),
                     ("weights", weights), ("heads", heads)):
    print(f"{name:8s}", tuple(tensor.shape))
merged = cross.output(heads.transpose(1, 2).flatten(2))
assert torch.allclose(merged, cross(x, memory)[0], atol=1e-6)

# %% [markdown]
# $T$ rows of queries and $S$ columns of keys: the weights are (B, H, T, S), and need not be square. What comes out has $T$ rows again: each asker takes home
# a mean of the encoder's values. The way is one-way: nothing of the decoder reaches the memory (in training, gradients do).
#
# Before the class, the layer written out, for any layer that has the parts:

# %%
def decoder_layer_1(layer, x, memory):
    first, second, third = (residual.norm for residual in layer.residuals)
    x = first(x + layer.self_attention(x, is_causal=True)[0])
    x = second(x + layer.cross_attention(x, memory)[0])
    return third(x + layer.feed_forward(x))

# %% tags=["export"]
class DecoderLayer(nn.Module):
    """Causal self-attention, attention to a memory, feed-forward (§3.1).

    Arguments as in EncoderLayer.
    """

    def __init__(self, d_model: int, n_heads: int, d_ff: int, *,
                 dropout: float = 0.1, attention_dropout: float = 0.0,
                 activation_dropout: float = 0.0, norm_first: bool = False,
                 **heads):
        super().__init__()
        self.self_attention, self.cross_attention = (
            MultiHeadAttention(d_model, n_heads, dropout=attention_dropout,
                               **heads) for _ in range(2))
        self.feed_forward = FeedForward(d_model, d_ff, activation_dropout)
        self.residuals = nn.ModuleList(
            Residual(d_model, dropout=dropout, norm_first=norm_first)
            for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None,
                memory_mask: Tensor | None = None) -> Tensor:
        """x (B, T, d_model), memory (B, S, d_model) -> (B, T, d_model)

        No position sees a later one; the masks may forbid more.
        Raises ValueError without a memory.
        """
        if memory is None:  # attention would look at x, later ones too
            raise ValueError("memory must be (B, S, d_model), got None")
        x = self.residuals[0](x, lambda x: self.self_attention(
            x, mask=mask, is_causal=True)[0])
        x = self.residuals[1](x, lambda x: self.cross_attention(
            x, memory, memory_mask)[0])
        return self.residuals[2](x, self.feed_forward)

# %%
layer = DecoderLayer(16, n_heads=4, d_ff=32).eval()
written_out = decoder_layer_1(layer, x, memory)
assert torch.allclose(layer(x, memory), written_out, atol=1e-6)
print("the class equals the layer written out:", True)
try:
    layer(x, None)
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# The error is there for a reason. To `MultiHeadAttention`, no memory means "look at yourself", and without the causal mask: a silent look into the future.
#
# ## The stacks
#
# A stack runs its layers in turn, each with weights of its own. `final_norm` can wait for its section below; here it is off.

# %% tags=["export"]
class Encoder(nn.Module):
    """EncoderLayers, one after the other; sizes and options are theirs.

    final_norm: a layer norm at the end. None: where norm_first, since what
    goes past every norm must meet one in the end.
    """

    layer = EncoderLayer

    def __init__(self, n_layers: int, d_model: int, n_heads: int, d_ff: int,
                 *, final_norm: bool | None = None, **options):
        super().__init__()
        check_sizes(n_layers=n_layers)
        self.layers = nn.ModuleList(
            self.layer(d_model, n_heads, d_ff, **options)
            for _ in range(n_layers))
        if final_norm is None:
            final_norm = options.get("norm_first", False)
        self.norm = nn.LayerNorm(d_model) if final_norm else nn.Identity()

    def forward(self, x: Tensor, *more: Tensor | None,
                **named: Tensor | None) -> Tensor:
        """As a layer's forward."""
        for layer in self.layers:
            x = layer(x, *more, **named)
        return self.norm(x)

# %% tags=["export"]
class Decoder(Encoder):
    """DecoderLayers, one after the other; arguments as in Encoder."""

    layer = DecoderLayer

# %% [markdown]
# **Guess first:** encoder and decoder have three layers each. What does the *first* decoder layer read: the output of the first encoder layer, of the last, or
# of its own counterpart? We listen at every cross-attention.

# %%
torch.manual_seed(0)
encoder, decoder = Encoder(3, 16, 4, 32).eval(), Decoder(3, 16, 4, 32).eval()
source, x, read = torch.randn(1, S, 16), torch.randn(1, T, 16), []
for layer in decoder.layers:
    layer.cross_attention.register_forward_pre_hook(
        lambda module, arguments: read.append(arguments[1]))

rows, steps = source, []
for layer in encoder.layers:
    rows = layer(rows)
    steps.append(rows)  # what each encoder layer gives
memory = encoder(source)
output = decoder(x, memory)
for number, seen in enumerate(read, start=1):
    same = [torch.equal(seen, step) for step in steps]
    print(f"decoder layer {number} reads encoder layer "
          f"{same.index(True) + 1}")
    assert seen is memory and same == [False, False, True]

# %% [markdown]
# All three read the last one's: the very same tensor. So the encoder runs once for a sentence, however long the decoder then writes, and the keys and values of the memory can be kept (chapter 12).
# Pairing the layers, first with first, would give something else:

# %%
paired = x
for layer, step in zip(decoder.layers, steps):
    paired = layer(paired, step)
difference = (paired - output).abs().max()
print("paired layers give another output:", bool(difference > 0.1))
assert difference > 0.1

# %% [markdown]
# ## A walk through the whole
#
# Around the stacks go embeddings with positions (chapters 05 and 06) below, and a linear layer on top that scores the $V$ words of the vocabulary. Chapter 09 builds this
# with care; the short form is enough to train. `cut`, for later, hands the decoder zeros in place of the memory.

# %%
class Translator(nn.Module):
    def __init__(self, width=32, cut=False, **options):
        super().__init__()
        sizes = (2, width, 4, 4 * width)  # layers, d_model, heads, d_ff
        self.source, self.target = (
            nn.Sequential(TokenEmbedding(V, width), PositionalEncoding(width))
            for _ in range(2))
        self.encoder = Encoder(*sizes, dropout=0.0, **options)
        self.decoder = Decoder(*sizes, dropout=0.0, **options)
        self.output = nn.Linear(width, V)
        self.cut = cut

    def forward(self, inputs):
        source, target = inputs.split([S, T], dim=1)
        mask = padding_mask(source)  # (B, 1, 1, S)
        memory = self.encoder(self.source(source), mask)
        if self.cut:
            memory = torch.zeros_like(memory)
        return self.output(self.decoder(
            self.target(target), memory, memory_mask=mask))

# %% [markdown]
# To look inside we note what every module gives; of attention layers, the weights.

# %%
def record(model, inputs):
    found, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            handles.append(module.register_forward_pre_hook(
                lambda _, arguments, options: (
                    arguments, {**options, "need_weights": True}),
                with_kwargs=True))
        handles.append(module.register_forward_hook(
            lambda _, arguments, output, name=name: found.update({
                name: output[1] if type(output) is tuple else output})))
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return found

torch.manual_seed(0)
translator = Translator()
texts = [" ".join(source) for source, _, _ in pairs]
batch = [texts.index("the small black mouse sleeps"),
         texts.index("a cow eats")]
found = record(translator, inputs[batch])
for name in ("encoder", "decoder.layers.0.cross_attention", "output"):
    print(f"{name:33s}", tuple(found[name].shape))

# %% [markdown]
# Press Play, or move the slider, and follow two sentences (B = 2) from the ids to the scores. **Where do the lengths S and T meet, and where does the memory
# enter?** (Each box of a layer has its residual and norm inside. d_model is 32, d_ff 128, H 4.)

# %% tags=["hide-input"]
shapes = {name: tuple(value.shape) for name, value in found.items()}
STATIONS = [  # name, column, height, shape, its letters, what happens
    ("source tokens", 0, 0, (2, S), "B, S",
     "Two sentences, padded to the same length"),
    ("source vectors", 0, 1, shapes["source"], "B, S, d_model",
     "A vector for each token, its place added"),
    ("self-attention", 0, 2, shapes["encoder.layers.0.self_attention"],
     "B, H, S, S", "Weights: every source token looks at all of them"),
    ("feed-forward", 0, 3, shapes["encoder.layers.0.feed_forward.0"],
     "B, S, d_ff", "Each position for itself; inside, it is wider"),
    ("encoder layer 2", 0, 4, shapes["encoder.layers.1"], "B, S, d_model",
     "The same again, with weights of its own"),
    ("memory", 0, 5, shapes["encoder"], "B, S, d_model",
     "What the last layer gives; the encoder has done its work"),
    ("target tokens", 1, 0, (2, T), "B, T",
     "The start token and the words so far"),
    ("target vectors", 1, 1, shapes["target"], "B, T, d_model",
     "A vector for each token, its place added"),
    ("causal self-attention", 1, 2,
     shapes["decoder.layers.0.self_attention"], "B, H, T, T",
     "Weights: each looks at itself and at those before"),
    ("cross-attention", 1, 3, shapes["decoder.layers.0.cross_attention"],
     "B, H, T, S", "Weights: T positions ask the memory, S answer"),
    ("feed-forward", 1, 4, shapes["decoder.layers.0.feed_forward.0"],
     "B, T, d_ff", "Each position for itself; inside, it is wider"),
    ("decoder layer 2", 1, 5, shapes["decoder.layers.1"], "B, T, d_model",
     "The same again, and it reads the same memory"),
    ("scores", 1, 6, shapes["output"], "B, T, V",
     "At each position, a score for every possible next word")]

# %% tags=["hide-input"]
def arrow(ax, start, end, color):
    ax.annotate("", end, start, arrowprops={
        "arrowstyle": "-|>", "lw": 1.8, "color": color, "shrinkA": 0,
        "shrinkB": 0})

def draw(station):
    figure, ax = plt.subplots(figsize=(7, 5.4))
    middles, half, colors = (1.6, 6.6), 1.5, ("encoder", "decoder")
    for column, top in ((0, 3.42), (1, 4.42)):  # layer 1
        ax.add_patch(plt.Rectangle(
            (middles[column] - 1.75, 1.58), 3.5, top - 1.58, fill=False,
            ls="--", lw=1.2, ec=COLORS["neutral"]))
        side = (-1.98, 1.98)[column]
        ax.text(middles[column] + side, (1.58 + top) / 2, "layer 1",
                rotation=90, ha="center", va="center", fontsize=9.5)
    for number, (name, column, height, *_) in enumerate(STATIONS):
        color, here = COLORS[colors[column]], number == station
        ax.add_patch(plt.Rectangle(
            (middles[column] - half, height - 0.27), 2 * half, 0.54, lw=2,
            ec=color, fc=color if here else "white"))
        ax.text(middles[column], height, name, ha="center", va="center",
                fontsize=10, weight="bold" if here else "normal")
        if height < (5, 6)[column]:
            arrow(ax, (middles[column], height + 0.29),
                  (middles[column], height + 0.71), COLORS["neutral"])
    for height in (3, 5):  # the memory goes to both decoder layers
        ax.plot([3.12, 4.1, 4.1], [5, 5, height], lw=1.8, ls="-",
                color=COLORS["encoder"])
        arrow(ax, (4.1, height), (5.08, height), COLORS["encoder"])
    name, column, height, shape, letters, what = STATIONS[station]
    ax.text(0, 7.45, f"{name}: ({letters}) = {shape}", fontsize=12,
            weight="bold")
    ax.text(0, 6.95, what, fontsize=10.5)
    ax.set(xlim=(-0.65, 8.85), ylim=(-0.4, 7.8))
    ax.axis("off")
    return figure, (f"Data flow of encoder and decoder, station "
                    f"{station + 1} of {len(STATIONS)}: the "
                    f"{colors[column]}'s {name}, shape ({letters}) = "
                    f"{shape}. {what}.")

explore(draw, play="station",
        station={i + 1: i for i in range(len(STATIONS))})

# %% [markdown]
# Two columns that never touch, but for one line: the memory enters every decoder layer through its cross-attention. There, and only there, S and T meet in one
# shape, (B, H, T, S). Layers keep the width: what goes in at 32 comes out at 32, so they stack.
#
# ## What may a position see?
#
# Pull at one input and see which outputs move. **Guess first:** what will the two tables look like: moved target positions against changed target tokens, and
# against changed rows of the memory?

# %%
def moved(decoder, *inputs):
    before, tables = decoder(*inputs), []
    for which, changing in enumerate(inputs):  # x, then the memory
        columns = []
        for place in range(changing.shape[1]):
            pulled = [tensor.clone() for tensor in inputs]
            pulled[which][:, place] += torch.randn(16)
            change = (decoder(*pulled) - before).abs().amax(dim=-1)[0]
            columns.append(change > 1e-5)  # (T,)
        tables.append(torch.stack(columns, dim=1))  # a row for each output
    return tables

with torch.no_grad():
    by_target, by_memory = moved(decoder, x, memory)
assert torch.equal(by_target, causal_mask(T)) and by_memory.all()
print("outputs moved by target tokens:", int(by_target.sum()), "of", T * T)
print("outputs moved by memory rows:  ", int(by_memory.sum()), "of", T * S)

# %% tags=["hide-input"]
english, french, _ = pairs[batch[0]]
given = ["<bos>", *french]
figure, axes = plt.subplots(1, 2, figsize=(7, 3.5))
for ax, table, tokens in ((axes[0], by_target, given),
                          (axes[1], by_memory, english)):
    heatmap(table.float(), given, tokens, ax=ax, annotate=False)
    ax.set(ylabel="output at")
    ax.tick_params(axis="x", rotation=90)
axes[0].set(xlabel="changed target token", title="Nothing from later on")
axes[1].set(xlabel="changed memory row", title="Everything from the source")
show("Two tables of which outputs move (dark). Left, by changed target "
     "tokens: a lower triangle, the diagonal included; no output moves when "
     "a later token changes. Right, by changed memory rows: all cells.")

# %% [markdown]
# A triangle and a full table. The causal mask applies to the decoder's self-attention only; the source is complete before the first word is written, and no mask hides
# any of it.
#
# Unless it is padding. We lengthen the source by three vectors of noise, and mask them in the encoder's self-attention and in cross-attention, in one of the two, or nowhere.

# %%
torch.manual_seed(1)
noisy = torch.cat([source, 5 * torch.randn(1, 3, 16)], dim=1)
mask = padding_mask(torch.tensor([[7, 7, 7, 7, 7, 0, 0, 0]]))
runs = {"in both": (mask, mask), "in the encoder only": (mask, None),
        "in cross-attention only": (None, mask), "nowhere": (None, None)}
with torch.no_grad():
    for name, (encoder_mask, memory_mask) in runs.items():
        memory = encoder(noisy, encoder_mask)
        padded = decoder(x, memory, memory_mask=memory_mask)
        change = (padded - output).abs().max().item()
        print(f"mask {name:25s}as without padding: {change < 1e-5}")
        assert change < 1e-5 if name == "in both" else change > 0.01

# %% [markdown]
# With the mask in both places padding changes nothing; with one missing it does. In the encoder real tokens would take up noise, and in the memory padded positions hold vectors like any other.
#
# ## Who asks, who answers
#
# Untrained weights say little. So we train the translator (post-norm, as in the paper) on 600 of the pairs, for 200 updates, and keep 120 pairs unseen.
# A sentence counts as right if the best-scored next word is right at *every* position.

# %%
def batches(size=64):
    while True:
        chosen = known[torch.randint(len(known), (size,))]
        yield inputs[chosen], nexts[chosen]

def share_right(model, chosen):
    with torch.no_grad():
        right = model.eval()(inputs[chosen]).argmax(dim=-1) == nexts[chosen]
    return right.all(dim=-1).float().mean().item()

def train(seed):
    torch.manual_seed(seed)
    model = Translator()
    fit(model, batches(), 200, 0.003)
    return model

translator = train(seed=0)
share = share_right(translator, unseen)
print("unseen sentences right, more than 95 %:", share > 0.95)
assert share > 0.95

# %% [markdown]
# It translates sentences it never saw. Now to its cross-attention. Each French word here has one English partner. For every head we count how often, over the
# unseen sentences, the position that is about to say a word looks most at that word's partner.

# %%
def partners_found(layer):
    weights = found[f"decoder.layers.{layer}.cross_attention"]
    hits = torch.zeros(weights.shape[1])  # (H,)
    for row, sentence in enumerate(unseen.tolist()):
        source, target, partner = pairs[sentence]
        for place, word in enumerate(target):
            looked_at = weights[row, :, place].argmax(dim=-1)  # (H,)
            hits += looked_at == source.index(partner[word])
    return hits / sum(len(pairs[i][1]) for i in unseen.tolist())

found = record(translator, inputs[unseen])
shares = torch.stack([partners_found(layer) for layer in (0, 1)])  # (2, H)
layer, head = divmod(shares.argmax().item(), shares.shape[1])
print("the best head looks most at the partner, in more than 80 % of words:",
      bool(shares.max() > 0.8))
print("it is in decoder layer", layer + 1)
assert shares.max() > 0.8

# %% tags=["hide-input"]
def words_of(sentence):
    source, target, _ = pairs[sentence]
    given = ["<bos>", *target]
    return source, [f"{a} → {b}" for a, b in zip(given, [*target, "<eos>"])]

def weights_for(sentence, layer, head):
    weights = record(translator, inputs[sentence:sentence + 1])[
        f"decoder.layers.{layer}.cross_attention"][0, head]
    english, askers = words_of(sentence)
    return weights[:len(askers), :len(english)]  # without padding: (T, S)

english, askers = words_of(batch[0])
weights = weights_for(batch[0], layer, head)
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.7),
                                     width_ratios=(1, 1.15))
for row, name in enumerate(askers):
    left.text(0, -row, name, ha="right", va="center", fontsize=10,
              bbox={"fc": "white", "ec": COLORS["decoder"], "lw": 1.5})
for column, name in enumerate(english):
    left.text(1.4, -column - 0.5, name, ha="left", va="center", fontsize=10,
              bbox={"fc": "white", "ec": COLORS["encoder"], "lw": 1.5})
for row, column in (weights > 0.1).nonzero().tolist():
    left.plot([0.1, 1.3], [-row, -column - 0.5], ls="-", alpha=0.8,
              lw=5 * weights[row, column], color=COLORS["query"])
left.text(-0.1, 0.75, "the decoder asks", ha="right", fontsize=10)
left.text(1.5, 0.75, "the encoder answers", ha="center", fontsize=10)
left.set(xlim=(-1.5, 2.6), ylim=(-5.6, 1.1))
left.axis("off")
heatmap(weights, askers, english, ax=right)
right.set(ylabel="given → says (T = 6)", xlabel="source (S = 5)")
right.tick_params(axis="x", rotation=90)
figure.suptitle("Saying “souris” it asks “mouse”, saying “noire” it asks "
                "“black”", x=0, ha="left", fontsize=12, fontweight="bold")
noun, colour = english.index("mouse"), english.index("black")
assert weights[2].argmax() == noun and weights[3].argmax() == colour
show("Cross-attention of one head, as lines between six decoder positions "
     "and five source words, and as a heat map of 6 rows and 5 columns. The "
     "position that is about to say souris looks most at mouse, and the one "
     "about to say noire at black, so the lines cross.")

# %% [markdown]
# A row is a query: the decoder's position that has been *given* one word and is about to say the next. A column is a key: a source word. Nobody told this head
# that *souris* is *mouse*; it learnt to fetch what the next word needs, and the lines cross where the languages differ in order.
#
# Move **layer** and **head** below. **Do all heads ask the partner, and in which layer is the asking sharper?**

# %% tags=["hide-input"]
def draw_head(sentence, layer, head):
    english, askers = words_of(sentence)
    weights = weights_for(sentence, layer - 1, head - 1)
    figure, ax = plt.subplots(figsize=(6, 4.2))
    heatmap(weights, askers, english, ax=ax)
    mean = weights.amax(dim=-1).mean()
    ax.set(ylabel="given → says", xlabel="source")
    ax.tick_params(axis="x", labelsize=9.5)
    figure.suptitle(f"Layer {layer}, head {head}: largest weight in a row "
                    f"{mean:.2f} on average", x=0, ha="left", fontsize=11,
                    fontweight="bold")
    told = "; ".join(f"{asker} looks most at {english[row.argmax()]} "
                     f"({row.max():.2f})" for asker, row in
                     zip(askers, weights))
    return figure, f"Cross-attention, layer {layer}, head {head}. {told}."

explore(draw_head, layer=[1, 2], head=[1, 2, 3, 4],
        sentence={texts[i]: i for i in batch})

# %% [markdown]
# They differ. Some rows have one dark cell at the partner, others spread, and in the first layer more than in the second:

# %%
sharp = []
for layer in (0, 1):
    weights = found[f"decoder.layers.{layer}.cross_attention"]
    real = nexts[unseen] != 0  # (120, T): positions that are not padding
    sharp.append(weights.amax(dim=-1).transpose(1, 2)[real].mean().item())
print("layer 2 is sharper on average:", sharp[1] > sharp[0])
assert sharp[1] > sharp[0]

# %% [markdown]
# That is this model after this training. In a larger one, chapter 15 looks.
#
# ### Which stack knows the gender?
#
# English does not show that a mouse is feminine, and *la* needs it before the noun is written. **Guess first:** has the encoder put the gender into its vector for *the*, where
# the decoder fetches it? Or does the decoder look at the noun itself?
#
# We ask by surgery on the memory. Take all 120 *cat* sentences and the same with *mouse*. Put the mouse's row for the article into the cat's memory, or its row for the noun, or both,
# and see which article comes out. We do it with three models, trained alike from three random starts.

# %%
cats = [i for i, text in enumerate(texts) if "cat" in text]
mice = [texts.index(texts[i].replace("cat", "mouse")) for i in cats]
noun = torch.tensor([pairs[i][0].index("cat") for i in cats])
noun = F.one_hot(noun, S).bool()  # (120, S): where the noun stands
article = F.one_hot(torch.zeros(len(cats), dtype=torch.long), S).bool()
feminine = torch.tensor([vocabulary.index(w) for w in ("la", "une")])

@torch.no_grad()
def share_feminine(model, grafted):
    mask = padding_mask(inputs[cats, :S])
    cat, mouse = (model.encoder(model.source(inputs[chosen, :S]), mask)
                  for chosen in (cats, mice))
    memory = torch.where(grafted.unsqueeze(-1), mouse, cat)
    start = model.target(inputs[cats, S:S + 1])  # <bos> alone
    rows = model.decoder(start, memory, memory_mask=mask)
    said = model.output(rows)[:, 0].argmax(dim=-1)  # (120,)
    return torch.isin(said, feminine).float().mean().item()

# %% tags=["nbval-ignore-output"]
grafts = {"article": article, "noun": noun, "both": article | noun}
shares = {name: [] for name in grafts}
for seed in (0, 2, 4):
    model = translator if seed == 0 else train(seed)
    print(f"model {seed}: feminine article by graft of", end="")
    for name, grafted in grafts.items():
        shares[name].append(share_feminine(model.eval(), grafted))
        print(f"   {name} {shares[name][-1]:4.0%}", end="")
    print()
assert min(shares["both"]) > 0.9
assert max(shares["article"]) > 0.6 and max(shares["noun"]) > 0.6
assert min(shares["article"]) < 0.4 and min(shares["noun"]) < 0.4

# %% [markdown]
# Three models, three answers. In the last one the encoder has done the work: the vector for *the* carries the gender. In the second the decoder looks at the noun. In the first neither row
# suffices alone. Both together do in all three. (We picked these of five starts, since they differ most; the others lay between. And a memory of two sentences is nothing the
# decoder was trained on: the shares say where it looks, not more.)
#
# So the two stacks divide the work, but the architecture does not say how. What one trained model does need not be what the next does.
#
# ## Cut the connection
#
# What is left of a decoder that hears nothing of the source? First the trained one: hand it zeros for the memory, and compare its scores for all 720 sources
# behind the same target words.

# %%
def spread(model):
    rows = inputs.clone()
    rows[:, S:] = inputs[batch[0], S:]  # every source, one target
    scores = model(rows)
    return (scores - scores[0]).abs().max().item()

with torch.no_grad():
    whole = spread(translator)
    translator.cut = True
    print(f"connected: scores depend on the source: {whole > 1}")
    print(f"cut: scores depend on the source: {spread(translator) > 1e-4}")
    assert whole > 1 and spread(translator) < 1e-4
    translator.cut = False

# %% [markdown]
# Not any more. Such a decoder can still know which word tends to follow which: it is a **language model**.
#
# How good can it be? Without the source it gives each sentence one probability, and these add up to at most 1. So over all 720 sentences the mean cost is at least
# $\ln 720$ nats, spread over six places. **Guess first:** how near does a model come that is trained cut from the start?

# %%
def loss_on_all(model):
    with torch.no_grad():
        scores = model.eval()(inputs)
    return F.cross_entropy(scores.flatten(0, 1), nexts.flatten()).item()

torch.manual_seed(0)
language_model = Translator(cut=True)
fit(language_model, batches(), 120, 0.003)
floor, loss = math.log(len(pairs)) / T, loss_on_all(language_model)
print(f"no model without the source can be below {floor:.2f} nats a place")
print("the cut model is within a tenth of it:", 0 <= loss - floor < 0.1)
print("the connected one is below 0.05:", loss_on_all(translator) < 0.05)
assert 0 <= loss - floor < 0.1 and loss_on_all(translator) < 0.05

# %% [markdown]
# Near the floor: it knows what the French sentences look like, and not which one is wanted. All that the source contributes comes through cross-attention. A stack of causal self-attention and
# feed-forward layers alone is a *decoder-only* model; chapter 18 builds one.
#
# ## Does the order of sublayers matter?
#
# Self-attention, cross-attention, feed-forward: six orders are possible. With the same weights they give different outputs, but does one *learn* better? We
# train a decoder of each order, with one seed, 80 updates.

# %%
class Reordered(DecoderLayer):
    def forward(self, x, memory, mask=None, memory_mask=None):
        sublayers = {
            "self": lambda x: self.self_attention(
                x, mask=mask, is_causal=True)[0],
            "cross": lambda x: self.cross_attention(
                x, memory, memory_mask)[0],
            "feed": self.feed_forward}
        for residual, name in zip(self.residuals, self.order):
            x = residual(x, sublayers[name])
        return x

class ReorderedDecoder(Decoder):
    layer = Reordered

def train_in(order):
    torch.manual_seed(0)
    model = Translator()
    model.decoder = ReorderedDecoder(2, 32, 4, 128, dropout=0.0)
    for layer in model.decoder.layers:
        layer.order = order
    with torch.no_grad():
        start = model(inputs[batch])
    fit(model, batches(), 80, 0.003)
    return start, share_right(model, unseen)

# %%
results = {order: train_in(order)
           for order in itertools.permutations(("self", "cross", "feed"))}
first, _ = results["self", "cross", "feed"]
for order, (start, share) in results.items():
    differs = (start - first).abs().max().item() > 0.1
    print(f"{', '.join(order):18s}differs at the start: {differs!s:6}"
          f"more than 90 % right: {share > 0.9}")
    assert share > 0.9

# %% [markdown]
# All six learn it (the first is the paper's). On a task this easy that is no proof that order never matters; it says that nothing breaks. There is a reason to expect little: in a stack, *self, feed,
# self, feed* and *feed, self, feed, self* are the same chain but for its ends. Press, Smith and Levy (2020) trained language models with many orders of sublayers, and found some that
# do better than the usual one.
#
# ## The norm at the end
#
# In the paper's layers (post-norm) the last thing that happens is a norm. With `norm_first=True` (pre-norm) a norm stands before each sublayer only, and $x$ itself goes past
# all of them. **Guess first:** how large are the numbers after 24 layers, in either?

# %%
depths, sizes = range(25), {}
for norm_first in (False, True):
    torch.manual_seed(0)
    deep = Encoder(24, 64, 4, 256, norm_first=norm_first).eval()
    x = torch.randn(8, 20, 64)
    with torch.no_grad():
        sizes[norm_first] = [x.std().item()]
        for layer in deep.layers:
            x = layer(x)
            sizes[norm_first].append(x.std().item())
        print(f"norm_first {norm_first!s:5}   after 24 layers "
              f"{x.std():.1f}, after the stack {deep.norm(x).std():.1f}")
assert max(sizes[False]) < 1.1 and sizes[True][24] > 3

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(7, 3))
for norm_first, (color, style) in zip((False, True), LINES):
    ax.plot(depths, sizes[norm_first], color=color, linestyle=style,
            label=("post-norm", "pre-norm")[norm_first])
ax.set(xlabel="layers passed", ylabel="standard deviation", ylim=(0, None),
       title="Pre-norm: what goes past every norm grows")
ax.legend()
show("Standard deviation of the numbers against layers passed, at the start "
     "of training. Post-norm stays at 1. Pre-norm grows steadily from 1 to "
     "more than 3 after 24 layers.")

# %% [markdown]
# Post-norm stays at 1. Pre-norm grows, since every layer adds to a sum that nobody shrinks. So a pre-norm stack needs one more norm at the very end, before others read it, and `final_norm=None` adds it there
# and only there.
#
# `nn.Transformer` adds one also to post-norm stacks ([pytorch issue 24930](https://github.com/pytorch/pytorch/issues/24930)). What does a norm after a norm do?

# %%
theirs = nn.Transformer(16, 4, 2, 2, 32, batch_first=True)
print("norm_first:", theirs.encoder.layers[0].norm_first,
      "  final norm:", type(theirs.encoder.norm).__name__)
torch.manual_seed(0)
twice = Encoder(2, 16, 4, 32, final_norm=True).eval()
last = twice.layers[-1].residuals[1].norm
for moment in ("at the start", "with other gains"):
    with torch.no_grad():
        once = last(source)
        change = (once - twice.norm(once)).abs().max()
        print(f"{moment:17s}the second norm changes something:",
              bool(change > 1e-3))
        assert (change > 1e-3) == (moment == "with other gains")
        nn.init.uniform_(last.weight, 0.5, 2.0)

# %% [markdown]
# At the start nothing: what has mean 0 and variance 1 keeps them. When training has moved the gains (each number's factor, chapter 07) it does. The paper has none; for comparisons with `nn.Transformer` we set `final_norm=True`.
#
# ## Is it PyTorch's?
#
# PyTorch packs query, key and value into one matrix and has other names. This function lists, under PyTorch's names, whatever `read` takes from each of our parameters: its value, or its gradient.

# %%
def in_torchs_names(ours, read):
    found = {}
    parts = {"linear1": ours.feed_forward[0], "linear2": ours.feed_forward[3],
             "self_attn.out_proj": ours.self_attention.output}
    packed = {"self_attn": ours.self_attention}
    if isinstance(ours, DecoderLayer):
        packed["multihead_attn"] = ours.cross_attention
        parts["multihead_attn.out_proj"] = ours.cross_attention.output
    for number, residual in enumerate(ours.residuals, start=1):
        parts[f"norm{number}"] = residual.norm
    for kind in ("weight", "bias"):
        for name, part in parts.items():
            found[f"{name}.{kind}"] = read(getattr(part, kind))
        for name, part in packed.items():
            found[f"{name}.in_proj_{kind}"] = torch.cat([
                read(getattr(linear, kind))
                for linear in (part.query, part.key, part.value)])
    return found

def stack_in_torchs_names(ours, read):
    found = {f"norm.{name}": read(parameter)
             for name, parameter in ours.norm.named_parameters()}
    for number, layer in enumerate(ours.layers):
        for name, value in in_torchs_names(layer, read).items():
            found[f"layers.{number}.{name}"] = value
    return found

# %% [markdown]
# `load_state_dict` refuses a name that is missing or left over, so nothing can be forgotten. PyTorch has one `dropout` argument, which also drops inside attention and after the ReLU; at 0
# the difference vanishes, and training mode can be compared, too. `enable_nested_tensor=False` switches off a shortcut that zeroes padded rows.

# %%
def both(decoding, stacked, norm_first):
    layers = ((EncoderLayer, nn.TransformerEncoderLayer),
              (DecoderLayer, nn.TransformerDecoderLayer))[decoding]
    ours = layers[0](16, 4, 32, dropout=0.0, norm_first=norm_first)
    theirs = layers[1](16, 4, 32, dropout=0.0, norm_first=norm_first,
                       batch_first=True)
    if stacked:
        ours = (Encoder, Decoder)[decoding](
            3, 16, 4, 32, dropout=0.0, norm_first=norm_first)
        norm = nn.LayerNorm(16) if norm_first else None
        theirs = (nn.TransformerDecoder(theirs, 3, norm) if decoding else
                  nn.TransformerEncoder(theirs, 3, norm,
                                        enable_nested_tensor=False))
    for parameter in ours.parameters():  # biases and gains, too
        nn.init.normal_(parameter, std=0.3)
    names = stack_in_torchs_names if stacked else in_torchs_names
    theirs.load_state_dict(names(ours, Tensor.detach))
    return ours, theirs, names

# %% [markdown]
# Then the same input through both, with a causal mask and padding (for PyTorch inverted: `True` means *drop* there), a mean of squares as loss, and the largest
# difference anywhere, in the output and in all gradients, as a share of the largest value.

# %%
def differences(decoding, stacked, norm_first, training, dtype):
    torch.manual_seed(0)
    ours, theirs, names = both(decoding, stacked, norm_first)
    ours.to(dtype).train(training), theirs.to(dtype).train(training)
    x, memory = torch.randn(2, 2, 5, 16, dtype=dtype)
    pad = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()
    real = ~pad[:, None, None]  # (B, 1, 1, S)
    if decoding:
        one = ours(x, memory, memory_mask=real)
        other = theirs(x, memory, tgt_mask=~causal_mask(5),
                       memory_key_padding_mask=pad)
    else:
        one, other = ours(x, real), theirs(x, src_key_padding_mask=pad)
    one.square().mean().backward()
    other.square().mean().backward()
    mine = names(ours, lambda parameter: parameter.grad)
    results = [(one, other)] + [(mine[name], parameter.grad) for
                                name, parameter in theirs.named_parameters()]
    largest = max(b.abs().max() for _, b in results[1:])
    yield (one - other).abs().max() / other.abs().max()
    yield from ((a - b).abs().max() / largest for a, b in results[1:])

# %%
for decoding, stacked, norm_first in itertools.product((0, 1), repeat=3):
    close = []
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        close += [d.item() < limit for training in (False, True) for d in
                  differences(decoding, stacked, norm_first, training, dtype)]
    print(f"{('encoder', 'decoder')[decoding]} "
          f"{('layer', 'stack')[stacked]}, "
          f"{('post', 'pre')[norm_first]}-norm: {sum(close):3d} of "
          f"{len(close):3d} tensors equal")
    assert all(close)

# %% [markdown]
# Equal: layers and stacks, post-norm and pre-norm, in training and evaluation mode, outputs and all gradients, within $10^{-5}$ of the largest value in float32 and $10^{-10}$ in float64. And the
# check can fail: compared with the wrong order of norms, it does.

# %%
torch.manual_seed(0)
ours, theirs, _ = both(decoding=0, stacked=0, norm_first=False)
theirs.norm_first = True
difference = (ours(source) - theirs(source)).abs().max()
print("other order of norms: differs by more than 0.1:",
      bool(difference > 0.1))
assert difference > 0.1

# %% [markdown]
# ## What a layer weighs
#
# At the paper's base sizes ($d_{model} = 512$, 8 heads, $d_{ff} = 2048$), without biases in attention. **Guess first:** does attention or the feed-forward layer hold
# more of an encoder layer's parameters?

# %%
def count(module):
    return sum(parameter.numel() for parameter in module.parameters())

for kind, expected in ((EncoderLayer, 3_150_336), (DecoderLayer, 4_199_936)):
    layer = kind(512, 8, 2048, bias=False)
    parts = {name: count(part) for name, part in layer.named_children()}
    assert count(layer) == sum(parts.values()) == expected
    print(f"{kind.__name__}: {count(layer):,}")
    for name, parameters in parts.items():
        print(f"  {name:16s}{parameters:10,}   {parameters / expected:.0%}")
print(f"six of each: {6 * (3_150_336 + 4_199_936):,}")

# %% [markdown]
# The feed-forward layer holds two thirds of an encoder layer. Attention is four matrices of 512 × 512, and a decoder layer has it twice. The norms (`residuals`) are next to nothing. Six of each
# layer make 44,101,632; the paper's 65 million come with the embeddings, in chapter 09.
#
# ## What you built
#
# - `EncoderLayer` and `DecoderLayer`, first by hand, and their stacks `Encoder` and `Decoder`, equal to PyTorch's in outputs and gradients.
# - The map of who may see what: no decoder position sees a later one, all see the whole source except padding, and all layers read one memory.
# - A translator whose cross-attention finds partners across a change of order; cut from the source, it is a language model.
#
# ## Check yourself
#
# **1.** The source has 9 tokens, the target 4, the model 8 heads. What are the shapes of the three kinds of attention weights for a batch of 2?
#
# <details><summary>Answer</summary>
#
# Encoder self-attention (2, 8, 9, 9), decoder self-attention (2, 8, 4, 4), cross-attention (2, 8, 4, 9): askers first, answerers second.
#
# </details>
#
# **2.** Somebody puts a causal mask on the cross-attention, too. What does the translator lose?
#
# <details><summary>Answer</summary>
#
# Position $t$ could read the memory only up to source token $t$ (or a number shifted by $S - T$). But the memory's row there was written by an encoder that saw everything, so it may still hear of later words at second hand. It loses direct access,
# not all knowledge.
#
# </details>
#
# **3.** The encoder's output is wanted for a post-norm stack of 6 layers, then for a pre-norm one. Where is its last norm?
#
# <details><summary>Answer</summary>
#
# Post-norm: in the sixth layer's last residual. Pre-norm: after all layers, the stack's own `norm`.
#
# </details>
#
# **4.** Do source and target need to have the same width $d_{model}$?
#
# <details><summary>Answer</summary>
#
# In our classes yes: the key and value matrices are `d_model` wide. In principle no: they could map a memory of any width to the heads' sizes. The lengths never need to agree.
#
# </details>
#
# **5.** A colleague reorders the rows of the memory (and its mask) before the decoder reads it. What changes?
#
# <details><summary>Answer</summary>
#
# Nothing: cross-attention is a weighted mean, whatever the order of its keys (chapter 02). The order of the source was written into the vectors by the positions.
#
# </details>
#
# The last two, checked:

# %%
torch.manual_seed(0)
memory, x = encoder(source), torch.randn(1, T, 16)
shuffled = memory[:, torch.randperm(S)]
same = torch.allclose(decoder(x, memory), decoder(x, shuffled), atol=1e-5)
print("reordered memory, same output:", same)
try:
    decoder(x, torch.randn(1, S, 12))
except ValueError as error:
    print("ValueError:", error)
assert same

# %% [markdown]
# ## Where to read on
#
# - Vaswani et al., *Attention Is All You Need*, NeurIPS 2017, [arXiv 1706.03762](https://arxiv.org/abs/1706.03762): §3.1 (the stacks) and §3.2.3 (the three uses of attention).
# - Xiong et al., *On Layer Normalization in the Transformer Architecture*, ICML 2020, [arXiv 2002.04745](https://arxiv.org/abs/2002.04745): post-norm and pre-norm, and the norm at the end.
# - Press, Smith, Levy, *Improving Transformer Models by Reordering their Sublayers*, ACL 2020, [arXiv 1911.03864](https://arxiv.org/abs/1911.03864): other orders.
# - Next, [chapter 09](https://OWNER.github.io/attention-cell-by-cell/book/09_transformer.html): the whole model, and whether its numbers are the paper's.
