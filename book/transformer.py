"""The Transformer of "Attention Is All You Need", as the chapters of Attention, Cell by Cell build it.

Generated from the chapters' exported cells by `make weave`; do not edit. Needs torch and the standard library.
MIT License.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush

import torch
import torch.nn.functional as F
from torch import Tensor, nn


# From chapter 01, Why attention?

def fit(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]],
        updates: int, lr: float) -> list[float]:
    """Train a model with Adam and cross-entropy; return each update's loss.

    model: maps inputs to scores before softmax, (..., classes)
    batches: yields (inputs, targets); targets are class numbers, (...),
        for example (B,) or (B, T); one batch is taken for each update
    updates: how many    lr: Adam's learning rate
    Returns the mean loss of each batch before its update, in nats.
    Raises ValueError if updates < 1, if batches ends early, or if scores
    and targets do not fit.
    """
    if updates < 1:
        raise ValueError(f"updates must be at least 1, got {updates}")
    model.train()
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=lr), []
    for _, (inputs, targets) in zip(range(updates), batches):
        scores = model(inputs)
        if scores.shape[:-1] != targets.shape:
            raise ValueError(f"targets must be {tuple(scores.shape[:-1])} to "
                             f"fit the scores, got {tuple(targets.shape)}")
        loss = F.cross_entropy(scores.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if len(losses) < updates:
        raise ValueError(f"batches must yield at least {updates}, one for "
                         f"each update, got {len(losses)}")
    return losses


# From chapter 02, Attention

def check_inputs(query: Tensor, key: Tensor, value: Tensor,
                 mask: Tensor | None = None) -> None:
    """Refuse inputs of attention that do not fit one another.

    Raises ValueError unless query and key have the same d_k, key and value
    the same S, and all three the same axes before these; and a mask is
    boolean, has two axes or four, and broadcasts to the scores (..., T, S).
    (Three axes would be ambiguous: batch, or heads?)
    """
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    if min(map(len, shapes)) < 2:
        raise ValueError(f"query, key and value must have at least two axes, "
                         f"got shapes {shapes}")
    if shapes[0][-1] != shapes[1][-1]:
        raise ValueError(f"query and key must have the same d_k, got shapes "
                         f"{shapes[0]} and {shapes[1]}")
    if shapes[1][-2] != shapes[2][-2]:
        raise ValueError(f"key and value must have the same number S, got "
                         f"shapes {shapes[1]} and {shapes[2]}")
    if not shapes[0][:-2] == shapes[1][:-2] == shapes[2][:-2]:
        raise ValueError(f"query, key and value must have the same axes "
                         f"before the last two, got shapes {shapes}")
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be a boolean tensor (True: may "
                         f"look), got {mask.dtype}")
    if mask.dim() not in (2, 4):
        raise ValueError(f"mask must have two axes (T, S) or four "
                         f"(B, H, T, S), got shape {tuple(mask.shape)}")
    scores = (*shapes[0][:-1], shapes[1][-2])  # (..., T, S)
    pairs = zip(reversed(mask.shape), reversed(scores))
    if mask.dim() > len(scores) or any(m not in (1, n) for m, n in pairs):
        raise ValueError(f"mask must broadcast to {scores}, "
                         f"got shape {tuple(mask.shape)}")


def attention(query: Tensor, key: Tensor, value: Tensor,
              mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention (Vaswani et al. 2017, §3.2.1).

    query: (..., T, d_k)    key: (..., S, d_k)    value: (..., S, d_v)
    mask: boolean, True where a query may look at a key; (T, S), or four
    axes that broadcast to the scores. None: everybody may look.

    Returns the output (..., T, d_v) and the weights (..., T, S), whose rows
    add up to 1. A query that may look at nothing gets 0.
    Raises ValueError if shapes do not fit or the mask is not of this form.
    """
    check_inputs(query, key, value, mask)
    scores = query / math.sqrt(key.shape[-1]) @ key.transpose(-2, -1)
    if mask is None:
        weights = scores.softmax(dim=-1)
    else:
        lowest = torch.finfo(scores.dtype).min  # finite: no nan anywhere
        weights = scores.masked_fill(~mask, lowest).softmax(dim=-1)
        weights = weights.masked_fill(~mask, 0.0)  # also rows without a key
    return weights @ value, weights


# From chapter 03, Multi-head attention

def fused_attention(query: Tensor, key: Tensor, value: Tensor,
                    mask: Tensor | None = None, dropout: float = 0.0,
                    is_causal: bool = False) -> Tensor:
    """What `attention` gives, from one fused kernel, without the weights.

    Shapes as in `attention`; `dropout` is the share of weights dropped.
    is_causal: no query sees a later key; T = S, and no mask beside it.
    Raises ValueError as `attention` does, and for is_causal otherwise.
    (No second derivatives: not every kernel has them.)
    """
    check_inputs(query, key, value, mask)
    if is_causal and (mask is not None or query.shape[-2] != key.shape[-2]):
        raise ValueError(f"is_causal needs as many keys as queries and no "
                         f"mask, got {query.shape[-2]} queries, "
                         f"{key.shape[-2]} keys, mask {mask is not None}")
    if mask is None:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=is_causal)
    blind = ~mask.any(dim=-1, keepdim=True)  # may look at nothing
    output = F.scaled_dot_product_attention(
        query, key, value, mask | blind, dropout_p=dropout)
    if mask.device.type == "cpu" and not blind.any():
        return output  # spares a copy; on a GPU the question would stall
    return output.masked_fill(blind, 0.0)


def check_sizes(**sizes: int | None) -> None:
    """Raise ValueError for a size that is neither None nor at least 1."""
    for name, size in sizes.items():
        if size is not None and not (isinstance(size, int) and size > 0):
            raise ValueError(f"{name} must be at least 1, got {size!r}")


def start_as_xavier(module: nn.Module) -> None:
    """Start all matrices by Xavier's rule (Glorot, 2010), biases at 0."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)


class MultiHeadAttention(nn.Module):
    """Heads of attention side by side, mixed by a linear layer (§3.2.2).

    Each head has d_k numbers in queries and keys and d_v in values (None:
    d_model // n_heads). `dropout` is the share of attention weights dropped
    in training. ValueError for sizes or dropout that make no sense.
    """

    def __init__(self, d_model: int, n_heads: int, *, d_k: int | None = None,
                 d_v: int | None = None, dropout: float = 0.0,
                 bias: bool = True):
        super().__init__()
        check_sizes(d_model=d_model, n_heads=n_heads, d_k=d_k, d_v=d_v)
        if None in (d_k, d_v) and d_model % n_heads:
            raise ValueError(f"d_model must be divisible by n_heads, got "
                             f"d_model {d_model} and n_heads {n_heads}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        d_k, d_v = d_k or d_model // n_heads, d_v or d_model // n_heads
        self.d_model, self.n_heads, self.dropout = d_model, n_heads, dropout
        self.query = nn.Linear(d_model, n_heads * d_k, bias)
        self.key = nn.Linear(d_model, n_heads * d_k, bias)
        self.value = nn.Linear(d_model, n_heads * d_v, bias)
        self.output = nn.Linear(n_heads * d_v, d_model, bias)
        start_as_xavier(self)

    def forward(self, x: Tensor, memory: Tensor | None = None,
                mask: Tensor | None = None, *, is_causal: bool = False,
                need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """x (B, T, d_model) looks at memory (B, S, d_model); None: at x.

        Returns output (B, T, d_model), weights (B, H, T, S) or None.
        Raises ValueError for other shapes; masks are as in `attend`.
        """
        query = self.queries(x)
        key, value = self.keys_values(x if memory is None else memory)
        if len(key) != len(query):
            raise ValueError(f"memory must have x's batch size {len(query)}, "
                             f"got {len(key)}")
        return self.attend(query, key, value, mask, is_causal=is_causal,
                           need_weights=need_weights)

    def queries(self, x: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, H, T, d_k)"""
        return self._split(self.query, x, "x")

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, d_model) -> key (B, H, S, d_k), value (B, H, S, d_v)"""
        return (self._split(self.key, memory, "memory"),
                self._split(self.value, memory, "memory"))

    def _split(self, layer, x, name):
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"{name} must be (batch, length, d_model "
                             f"{self.d_model}), got {tuple(x.shape)}")
        # (B, T, H * d_k) -> (B, T, H, d_k) -> (B, H, T, d_k)
        return layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor,
               mask: Tensor | None = None, *, is_causal: bool = False,
               need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """From split heads to output (B, T, d_model), weights or None.

        mask as in `attention`. is_causal: no query sees a later key, where
        the last query stands at the last key. Who may look at nothing gets
        output's bias. Raises ValueError as `attention` does.
        """
        check_inputs(query, key, value, mask)
        T, S = query.shape[-2], key.shape[-2]
        if is_causal and (need_weights or mask is not None or T != S):
            past = torch.ones(T, S, dtype=torch.bool, device=query.device)
            past = past.tril(S - T)  # the kernel would align at the start
            mask, is_causal = past if mask is None else mask & past, False
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            heads, weights = attention(query, key, value, mask)
            if dropout:
                heads = F.dropout(weights, dropout) @ value
        else:
            heads, weights = fused_attention(
                query, key, value, mask, dropout, is_causal), None
        # (B, H, T, d_v) -> (B, T, H, d_v) -> (B, T, H * d_v)
        return self.output(heads.transpose(1, 2).flatten(2)), weights


# From chapter 04, Masks

def padding_mask(tokens: Tensor, pad: int = 0) -> Tensor:
    """True where a token is real: tokens (B, S) -> mask (B, 1, 1, S).

    Raises ValueError for another number of axes.
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be (B, S), got {tuple(tokens.shape)}")
    return (tokens != pad)[:, None, None, :]


def causal_mask(T: int, S: int | None = None,
                device: torch.device | str | None = None) -> Tensor:
    """True where a query may look, at itself and before: (T, S); None: T.

    Aligned at the end: the last query sees every key, as when T new tokens
    ask S cached and new ones. Raises ValueError unless 1 <= T <= S.
    """
    S = T if S is None else S
    if not 1 <= T <= S:
        raise ValueError(f"T must be from 1 to S, got T {T} and S {S}")
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


# From chapter 05, Positional encoding

def positional_encoding(length: int, d_model: int) -> Tensor:
    """Sines and cosines of positions, (length, d_model), in float64 (§3.5).

    Entry 2i is sin(position / 10000^(2i/d_model)), entry 2i + 1 its cosine.
    Raises ValueError for sizes below 1.
    """
    check_sizes(length=length, d_model=d_model)
    position = torch.arange(length, dtype=torch.float64).unsqueeze(1)
    even = torch.arange(0, d_model, 2, dtype=torch.float64)
    angle = position / 10000 ** (even / d_model)  # (length, pairs)
    pairs = torch.stack([angle.sin(), angle.cos()], dim=-1)
    return pairs.flatten(1)[:, :d_model]  # an odd d_model drops a cosine


class PositionalEncoding(nn.Module):
    """Adds to each vector where it stands, then drops out (§3.5, §5.4).

    kind: "sinusoidal", "learned" (a table that is trained) or "none".
    Raises ValueError for another kind, sizes below 1, a dropout not in
    [0, 1).
    """

    KINDS = ("sinusoidal", "learned", "none")

    def __init__(self, d_model: int, *, dropout: float = 0.0,
                 max_length: int = 1024, kind: str = "sinusoidal"):
        super().__init__()
        check_sizes(d_model=d_model, max_length=max_length)
        if kind not in self.KINDS:
            raise ValueError(f"kind must be one of {self.KINDS}, "
                             f"got {kind!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.kind, self.dropout = kind, nn.Dropout(dropout)
        table = positional_encoding(max_length, d_model).float()
        if kind == "learned":
            self.table = nn.Parameter(torch.randn_like(table) * d_model**-0.5)
        else:
            self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x (B, T, d_model) stands at positions start, start + 1, ...

        Raises ValueError for another shape, or if these do not fit the table.
        """
        max_length, d_model = self.table.shape
        if x.dim() != 3 or x.shape[-1] != d_model:
            raise ValueError(f"x must be (batch, length, d_model {d_model}), "
                             f"got {tuple(x.shape)}")
        if self.kind == "none":
            return self.dropout(x)
        end = start + x.shape[1]
        if not 0 <= start <= end <= max_length:
            raise ValueError(f"positions must be from 0 and below max_length "
                             f"{max_length}, got {start} to {end - 1}")
        return self.dropout(x + self.table[start:end])


# From chapter 06, Tokens and embeddings

class BytePairEncoding:
    """Text to ids and back, over bytes (§5.1; Sennrich et al. 2016).

    Ids 0, 1, 2 are pad, bos, eos, ids 3 to 258 bytes; each merge of a pair
    of ids makes one more. Pairs lie within a word and the space before it.
    """

    def __init__(self, merges: Iterable[tuple[int, int]]):
        self.merges = {}
        self.pieces = [b""] * 3 + [bytes([byte]) for byte in range(256)]
        for left, right in merges:
            new, known = len(self.pieces), range(3, len(self.pieces))
            if left not in known or right not in known or \
                    (left, right) in self.merges:
                raise ValueError(f"merges must be different pairs of ids, at "
                                 f"this point from 3 to {new - 1}, got "
                                 f"{(left, right)}")
            self.merges[left, right] = new
            self.pieces.append(self.pieces[left] + self.pieces[right])

    @staticmethod
    def words(text: str) -> list[list[int]]:
        """The ids of the bytes of each word."""
        return [[3 + byte for byte in word.encode()]
                for word in re.findall(r" ?\S+|\s+?(?= \S)|\s+", text)]

    @staticmethod
    def merge(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
        """ids with `new` for each `pair`, from left to right."""
        merged = []
        for i in ids:
            if merged and (merged[-1], i) == pair:
                merged[-1] = new
            else:
                merged.append(i)
        return merged

    @classmethod
    def train(cls, texts: Iterable[str], n_merges: int) -> "BytePairEncoding":
        """Merge the commonest pair, of equals the lowest, n_merges times.

        Fewer, if every word is one piece before. Raises ValueError for one
        text in place of several, and for n_merges below 0.
        """
        if isinstance(texts, str):
            raise ValueError(f"texts must be several, got one: "
                             f"{texts[:20]!r}")
        if n_merges < 0:
            raise ValueError(f"n_merges must be at least 0, got {n_merges}")
        counts = Counter(tuple(w) for text in texts for w in cls.words(text))
        words, times = [list(word) for word in counts], [*counts.values()]
        totals, places, changed = Counter(), defaultdict(set), set()
        heap, merges = [], []

        def tally(i, sign):
            for pair in zip(words[i], words[i][1:]):
                totals[pair] += sign * times[i]
                places[pair].add(i)
                changed.add(pair)

        for i in range(len(words)):
            tally(i, 1)
        while len(merges) < n_merges:
            for pair in changed:
                heappush(heap, (-totals[pair], pair))
            changed.clear()
            while heap and heap[0][0] != -totals[heap[0][1]]:
                heappop(heap)  # its total has changed since
            if not heap or heap[0][0] == 0:
                break
            _, pair = heappop(heap)
            for i in places.pop(pair):
                tally(i, -1)
                words[i] = cls.merge(words[i], pair, 259 + len(merges))
                tally(i, 1)
            merges.append(pair)
        return cls(merges)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without bos and eos."""
        ids = []
        for word in self.words(text):
            while pairs := self.merges.keys() & zip(word, word[1:]):
                pair = min(pairs, key=self.merges.get)  # the earliest merge
                word = self.merge(word, pair, self.merges[pair])
            ids += word
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD.

        Raises ValueError for ids that there are not.
        """
        ids = list(ids)
        for i in ids:
            if not 0 <= i < len(self.pieces):
                raise ValueError(f"ids must be below the vocabulary's size "
                                 f"{len(self.pieces)}, got {i}")
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


class TokenEmbedding(nn.Embedding):
    """Ids (B, T) to vectors (B, T, d_model), times √d_model (§3.4).

    Starts from N(0, 1/√d_model): what comes out starts with variance 1.
    """

    def __init__(self, vocab_size: int, d_model: int):
        check_sizes(vocab_size=vocab_size, d_model=d_model)
        super().__init__(vocab_size, d_model)
        nn.init.normal_(self.weight, std=d_model**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Raises ValueError for tokens that are not (B, T) of whole numbers,
        and, on the CPU only (a GPU would stall), for ids out of range.
        """
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must be (B, T) with T at least 1, "
                             f"got {tuple(tokens.shape)}")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens must be int64, got {tokens.dtype}")
        if tokens.device.type == "cpu" and tokens.numel():
            low, high = tokens.aminmax()
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(
                    f"tokens must be ids below vocab_size "
                    f"{self.num_embeddings}, got {low} to {high}")
        return super().forward(tokens) * math.sqrt(self.embedding_dim)
