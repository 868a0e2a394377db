"""The Transformer of "Attention Is All You Need", as the chapters of Attention, Cell by Cell build it.

Generated from the chapters' exported cells by `make weave`; do not edit. Needs torch and the standard library.
MIT License.
"""

import gzip
import hashlib
import itertools
import math
import operator
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from heapq import heappop, heappush
from http.client import HTTPException
from pathlib import Path
from typing import ClassVar
from urllib.request import urlopen

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
    Raises ValueError if updates < 1, if batches ends early, or if targets
    have other axes than scores.
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
    shapes = q, k, v = [tuple(t.shape) for t in (query, key, value)]
    for fits, expected in (
            (min(map(len, shapes)) >= 2, "at least two axes"),
            (q[-1:] == k[-1:], "the same d_k in query and key"),
            (k[-2:-1] == v[-2:-1], "the same number S of keys and values"),
            (q[:-2] == k[:-2] == v[:-2], "the same axes before these")):
        if not fits:
            raise ValueError(f"query, key and value must have {expected}, "
                             f"got shapes {shapes}")
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be a boolean tensor (True: may "
                         f"look), got {mask.dtype}")
    if mask.dim() not in (2, 4):
        raise ValueError(f"mask must have two axes (T, S) or four "
                         f"(B, H, T, S), got shape {tuple(mask.shape)}")
    scores = (*q[:-1], k[-2])  # (..., T, S)
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


def check_sizes(**sizes: int) -> None:
    """Raise ValueError for a size that is not an int above 0."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} must be an int above 0, got {size!r}")


def check_dropout(**shares: float) -> None:
    """Raise ValueError for a share that is not a number in [0, 1)."""
    for name, share in shares.items():
        if type(share) not in (int, float) or not 0 <= share < 1:
            raise ValueError(f"{name} must be in [0, 1), got {share!r}")


def check_vectors(d_model: int, **vectors: Tensor) -> None:
    """Raise ValueError for what is not (batch, length, d_model) or empty."""
    for name, x in vectors.items():
        if x.dim() != 3 or x.shape[1] == 0 or x.shape[2] != d_model:
            raise ValueError(f"{name} must be (batch, length, d_model "
                             f"{d_model}) and not empty, "
                             f"got {tuple(x.shape)}")


def start_as_xavier(linear: nn.Linear, *sizes: int) -> None:
    """Start a matrix by Xavier's rule (Glorot, 2010), biases at 0.

    sizes: rows of the matrices that it is made of; none: it is one.
    """
    for matrix in linear.weight.data.split(sizes or len(linear.weight)):
        nn.init.xavier_uniform_(matrix)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


class MultiHeadAttention(nn.Module):
    """Heads of attention side by side, mixed by a linear layer (§3.2.2).

    Each head has d_k numbers in queries and keys and d_v in values (None:
    d_model // n_heads). `dropout` is the share of attention weights dropped
    in training. `input` holds the matrices for query, key and value; parts
    of it are used, so hooks on it are not called. ValueError for sizes or
    dropout that make no sense.
    """

    def __init__(self, d_model: int, n_heads: int, *, d_k: int | None = None,
                 d_v: int | None = None, dropout: float = 0.0,
                 bias: bool = True):
        super().__init__()
        check_sizes(d_model=d_model, n_heads=n_heads)
        if None in (d_k, d_v) and d_model % n_heads:
            raise ValueError(f"d_model must be divisible by n_heads, got "
                             f"d_model {d_model} and n_heads {n_heads}")
        check_dropout(dropout=dropout)
        d_k, d_v = (d_model // n_heads if size is None else size
                    for size in (d_k, d_v))
        check_sizes(d_k=d_k, d_v=d_v)
        self.d_model, self.n_heads, self.dropout = d_model, n_heads, dropout
        self.sizes = n_heads * d_k, n_heads * d_k, n_heads * d_v
        self.input = nn.Linear(d_model, sum(self.sizes), bias)
        self.output = nn.Linear(n_heads * d_v, d_model, bias)
        start_as_xavier(self.input, *self.sizes)
        start_as_xavier(self.output)

    def forward(self, x: Tensor, memory: Tensor | None = None,
                mask: Tensor | None = None, *, is_causal: bool = False,
                need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """x (B, T, d_model) looks at memory (B, S, d_model); None: at x.

        Returns output (B, T, d_model), weights (B, H, T, S) or None.
        Raises ValueError for other shapes; masks are as in `attend`.
        """
        if memory is None:
            query, key, value = self._project("x", x, 0, 3)
        elif len(memory) == len(x):
            query, (key, value) = self.queries(x), self.keys_values(memory)
        else:
            raise ValueError(f"memory must have x's batch size {len(x)}, "
                             f"got {len(memory)}")
        return self.attend(query, key, value, mask, is_causal=is_causal,
                           need_weights=need_weights)

    def queries(self, x: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, H, T, d_k)"""
        return self._project("x", x, 0, 1)[0]

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, d_model) -> key (B, H, S, d_k), value (B, H, S, d_v)"""
        return self._project("memory", memory, 1, 3)

    def _project(self, name, x, first, last):
        """x as query, key and value, or the parts from first to last."""
        check_vectors(self.d_model, **{name: x})
        sizes, start = self.sizes[first:last], sum(self.sizes[:first])
        weight, bias = (p if p is None or len(sizes) == 3
                        else p[start:start + sum(sizes)]
                        for p in (self.input.weight, self.input.bias))
        # (B, T, H * d_k) -> (B, T, H, d_k) -> (B, H, T, d_k)
        return tuple(part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
                     for part in F.linear(x, weight, bias).split(sizes, -1))

    def attend(self, query: Tensor, key: Tensor, value: Tensor,
               mask: Tensor | None = None, *, is_causal: bool = False,
               need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """From split heads to output (B, T, d_model), weights or None.

        mask as in `attention`. is_causal: no query sees a later key, where
        the last query stands at the last key (the kernel would align them
        at the first). Who may look at nothing gets output's bias.
        Raises ValueError for other heads, and as `attention`.
        """
        check_inputs(query, key, value, mask)
        _, d_k, d_v = (size // self.n_heads for size in self.sizes)
        heads = *query.shape[1:-2], key.shape[-1], value.shape[-1]
        if heads != (self.n_heads, d_k, d_v):
            raise ValueError(f"n_heads, d_k and d_v must be {self.n_heads}, "
                             f"{d_k} and {d_v}, got {heads}")
        T, S = query.shape[-2], key.shape[-2]
        if is_causal and (need_weights or mask is not None or T != S):
            past = query.new_ones(T, S, dtype=torch.bool).tril(S - T)
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

    Raises ValueError for another number of axes, or what are not ids.
    """
    if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens must be (B, S) of int64 or int32, got "
                         f"{tuple(tokens.shape)} of {tokens.dtype}")
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
        check_dropout(dropout=dropout)
        self.kind, self.dropout = kind, nn.Dropout(dropout)
        table = positional_encoding(max_length, d_model)
        table = table.to(torch.get_default_dtype())
        if kind == "learned":
            self.table = nn.Parameter(torch.randn_like(table) * d_model**-0.5)
        else:
            self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x (B, T, d_model) stands at positions start, start + 1, ...

        Raises ValueError for another shape, or if these do not fit the table
        (which "none" does not ask).
        """
        max_length, d_model = self.table.shape
        check_vectors(d_model, x=x)
        if self.kind == "none":
            return self.dropout(x)
        end = start + x.shape[1]
        if not 0 <= start <= end <= max_length:
            raise ValueError(f"positions must be from 0 and below max_length "
                             f"{max_length}, got {start} to {end - 1}")
        return self.dropout(x + self.table[start:end])


# From chapter 06, Tokens and embeddings

class BytePairEncoding:
    """Text to ids and back by byte-pair encoding (Sennrich et al. 2016).

    Used in §5.1; over bytes as in GPT-2 (Radford et al. 2019). Ids 0, 1, 2
    are pad, bos, eos, ids 3 to 258 bytes; each merge of a pair of ids makes
    one more. Pairs lie within a word and the space before it.
    """

    def __init__(self, merges: Iterable[tuple[int, int]]):
        self.merges = {}
        self.pieces = [b""] * 3 + [bytes([byte]) for byte in range(256)]
        for pair in merges:
            left, right = map(operator.index, pair)  # tensors become ints
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

        Stops earlier if every word is one piece. Raises ValueError for one
        text in place of several, and for n_merges below 0.
        """
        if isinstance(texts, str):
            raise ValueError(f"texts must be several, got {texts[:20]!r}")
        if type(n_merges) is not int or n_merges < 0:
            raise ValueError(f"n_merges must be an int of at least 0, "
                             f"got {n_merges!r}")
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
        """The text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for ids outside the vocabulary.
        """
        ids = list(ids)
        for i in ids:
            if not 0 <= i < len(self.pieces):
                raise ValueError(f"ids must be from 0 to "
                                 f"{len(self.pieces) - 1}, got {i}")
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


class TokenEmbedding(nn.Embedding):
    """Ids (B, T) to vectors (B, T, d_model), times √d_model (§3.4).

    Starts from N(0, 1/√d_model): what comes out starts with variance 1.
    name: what error messages call the ids.
    """

    def __init__(self, vocab_size: int, d_model: int, name: str = "tokens"):
        check_sizes(vocab_size=vocab_size, d_model=d_model)
        super().__init__(vocab_size, d_model)
        self.name = name
        nn.init.normal_(self.weight, std=d_model**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Raises ValueError for tokens that are not (B, T) with T at least 1,
        int64 or int32, and, on the CPU only (a GPU would stall), for ids out
        of range.
        """
        if tokens.dim() != 2 or tokens.shape[1] == 0 or (
                tokens.dtype not in (torch.int64, torch.int32)):
            raise ValueError(f"{self.name} must be (B, T), T at least 1, of "
                             f"int64 or int32, got {tuple(tokens.shape)} of "
                             f"{tokens.dtype}")
        if tokens.device.type == "cpu" and tokens.numel():
            low, high = tokens.aminmax()
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(f"{self.name} must be ids from 0 to "
                                 f"{self.num_embeddings - 1}, got {low} "
                                 f"to {high}")
        return super().forward(tokens) * math.sqrt(self.embedding_dim)


# From chapter 07, Layers

class FeedForward(nn.Sequential):
    """Linear, ReLU, dropout, linear: each position for itself (§3.3).

    dropout: the share of hidden numbers set to 0 in training. ValueError
    for sizes or dropout that make no sense.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0):
        check_sizes(d_model=d_model, d_ff=d_ff)
        check_dropout(dropout=dropout)
        super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(),
                         nn.Dropout(dropout), nn.Linear(d_ff, d_model))
        start_as_xavier(self[0])
        start_as_xavier(self[3])

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model); ValueError for another width"""
        if x.shape[-1] != self[0].in_features:
            raise ValueError(f"x must be (..., d_model "
                             f"{self[0].in_features}), got {tuple(x.shape)}")
        return super().forward(x)


class Residual(nn.Module):
    """A sublayer, a way around it, layer norm and dropout (§3.1, §5.4).

    norm_first False, the paper's: norm(x + dropout(sublayer(x)));
    True: x + dropout(sublayer(norm(x))). dropout: the share of the
    sublayer's output set to 0 in training. ValueError for a size or
    dropout that makes no sense.
    """

    def __init__(self, d_model: int, *, dropout: float = 0.0,
                 norm_first: bool = False):
        super().__init__()
        check_sizes(d_model=d_model)
        check_dropout(dropout=dropout)
        self.norm, self.dropout = nn.LayerNorm(d_model), nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor,
                sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x and what comes out: (B, T, d_model); ValueError for others"""
        check_vectors(len(self.norm.weight), x=x)
        y = self.dropout(sublayer(self.norm(x) if self.norm_first else x))
        if y.shape != x.shape:
            raise ValueError(f"sublayer must give {tuple(x.shape)}, "
                             f"got {tuple(y.shape)}")
        return x + y if self.norm_first else self.norm(x + y)


# From chapter 08, Encoder and decoder

class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward layer, each in a Residual (§3.1).

    dropout: after each sublayer. attention_dropout: on weights.
    activation_dropout: after the ReLU. heads: d_k, d_v, bias of
    MultiHeadAttention.
    """

    attentions = ("self_attention",)

    def __init__(self, d_model: int, n_heads: int, d_ff: int, *,
                 dropout: float = 0.1, attention_dropout: float = 0.0,
                 activation_dropout: float = 0.0, norm_first: bool = False,
                 **heads):
        super().__init__()
        check_dropout(attention_dropout=attention_dropout,
                      activation_dropout=activation_dropout)
        for name in self.attentions:
            self.add_module(name, MultiHeadAttention(
                d_model, n_heads, dropout=attention_dropout, **heads))
        self.feed_forward = FeedForward(d_model, d_ff, activation_dropout)
        self.residuals = nn.ModuleList(
            Residual(d_model, dropout=dropout, norm_first=norm_first)
            for _ in (*self.attentions, "feed_forward"))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x and what comes out: (B, S, d_model); mask as in `attention`."""
        x = self.residuals[0](
            x, lambda x: self.self_attention(x, mask=mask)[0])
        return self.residuals[1](x, self.feed_forward)


class DecoderLayer(EncoderLayer):
    """Causal self-attention, attention to a memory, feed-forward (§3.1).

    Arguments as in EncoderLayer.
    """

    attentions = ("self_attention", "cross_attention")

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
        """x (B, length, d_model) through all layers, its shape unchanged.

        What else is given, memory and masks, goes to each layer.
        """
        for layer in self.layers:
            x = layer(x, *more, **named)
        return self.norm(x)


class Decoder(Encoder):
    """DecoderLayers, one after the other; arguments as in Encoder."""

    layer = DecoderLayer


# From chapter 09, The Transformer

@dataclass(frozen=True)
class TransformerConfig:
    """The sizes and options of a Transformer.

    dropout: after sublayers and embeddings; attention_dropout: on weights;
    activation_dropout: after the ReLU; bias: in attention's projections.
    positions: "sinusoidal", "learned" or "none". tie_embeddings: "decoder"
    makes target embedding and output one matrix, "all" the source's, too.
    Raises ValueError that names a value that cannot be.
    """

    TIES: ClassVar = ("none", "decoder", "all")
    src_vocab_size: int
    tgt_vocab_size: int
    d_model: int = 512
    n_heads: int = 8
    n_layers: int = 6
    d_ff: int = 2048
    d_k: int | None = None  # None: d_model // n_heads
    d_v: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    bias: bool = False
    norm_first: bool = False
    final_norm: bool | None = None  # None: as norm_first
    positions: str = "sinusoidal"
    tie_embeddings: str = "none"
    max_length: int = 1024
    pad: int = 0
    bos: int = 1
    eos: int = 2

    def __post_init__(self):
        own = vars(self)

        def expect(fits, name, what):
            if not fits:
                raise ValueError(f"{name} must be {what}, got {own[name]!r}")

        check_sizes(**{name: own[name] for name in (
            "src_vocab_size", "tgt_vocab_size", "d_model", "n_heads",
            "n_layers", "d_ff", "max_length", "d_k", "d_v")
            if own[name] is not None or name not in ("d_k", "d_v")})
        check_dropout(**{name: own[name] for name in (
            "dropout", "attention_dropout", "activation_dropout")})
        for name, kinds in (("bias", bool), ("norm_first", bool),
                            ("final_norm", bool | None)):
            expect(isinstance(own[name], kinds), name, "a bool")
        expect(None not in (self.d_k, self.d_v)
               or self.d_model % self.n_heads == 0,
               "n_heads", f"a divisor of d_model {self.d_model}")
        for name, kinds in (("positions", PositionalEncoding.KINDS),
                            ("tie_embeddings", self.TIES)):
            expect(own[name] in kinds, name, f"one of {kinds}")
        expect(self.tie_embeddings != "all"
               or self.tgt_vocab_size == self.src_vocab_size,
               "tgt_vocab_size",
               f"src_vocab_size {self.src_vocab_size} to share a matrix")
        V = min(self.src_vocab_size, self.tgt_vocab_size)
        for name in ("pad", "bos", "eos"):
            expect(type(own[name]) is int and 0 <= own[name] < V, name,
                   f"an id below {V}")
        expect(len({self.pad, self.bos, self.eos}) == 3, "pad",
               f"one of three ids, with bos {self.bos} and eos {self.eos}")

    @classmethod
    def base(cls, vocab_size: int) -> "TransformerConfig":
        """The paper's base model (Table 3): one vocabulary, one matrix."""
        return cls(vocab_size, vocab_size, tie_embeddings="all")

    @classmethod
    def big(cls, vocab_size: int) -> "TransformerConfig":
        """The paper's big model (Table 3)."""
        return cls(vocab_size, vocab_size, d_model=1024, n_heads=16,
                   d_ff=4096, dropout=0.3, tie_embeddings="all")


class Transformer(nn.Module):
    """The encoder-decoder of "Attention Is All You Need" (§3).

    Token ids in, logits out; padding stands on the right.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        c, sizes = config, (config.n_layers, config.d_model, config.n_heads,
                            config.d_ff)
        options = {name: getattr(c, name) for name in (
            "d_k", "d_v", "dropout", "attention_dropout",
            "activation_dropout", "bias", "norm_first", "final_norm")}
        self.encoder = Encoder(*sizes, **options)
        self.decoder = Decoder(*sizes, **options)
        self.source = TokenEmbedding(c.src_vocab_size, c.d_model, "src")
        self.target = TokenEmbedding(c.tgt_vocab_size, c.d_model, "tgt")
        self.output = nn.Linear(c.d_model, c.tgt_vocab_size, bias=False)
        if c.tie_embeddings == "all":
            self.source.weight = self.target.weight
        if c.tie_embeddings != "none":
            self.output.weight = self.target.weight
        self.source_positions, self.target_positions = (
            PositionalEncoding(c.d_model, dropout=c.dropout, kind=c.positions,
                               max_length=c.max_length)
            for _ in range(2))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """src (B, S), tgt (B, T) -> logits (B, T, V) of each next token

        Raises ValueError for another batch size, and as the parts do.
        """
        if src.shape[:1] != tgt.shape[:1]:
            raise ValueError(f"src and tgt must have one batch size, got "
                             f"{tuple(src.shape)} and {tuple(tgt.shape)}")
        return self.decode(tgt, *self.encode(src))

    def encode(self, src: Tensor) -> tuple[Tensor, Tensor]:
        """src (B, S) -> memory (B, S, d_model), its mask (B, 1, 1, S)"""
        x = self.source_positions(self.source(src))
        mask = padding_mask(src, self.config.pad)
        return self.encoder(x, mask), mask

    def decode(self, tgt: Tensor, memory: Tensor,
               memory_mask: Tensor | None) -> Tensor:
        """tgt (B, T) and what `encode` gave -> logits (B, T, V)

        Padding on the right of tgt needs no mask: no real token sees it.
        Raises ValueError for a mask (B, S), since it could pass as (T, S).
        """
        if memory_mask is not None and memory_mask.dim() != 4:
            raise ValueError(f"memory_mask must be (B, 1, 1, S), "
                             f"got {tuple(memory_mask.shape)}")
        x = self.target_positions(self.target(tgt))
        return self.output(self.decoder(x, memory, None, memory_mask))


@contextmanager
def record_attention(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The last call's weights in it: layer name -> (B, H, T, S).

    Takes the explicit path, which is slower, and compiles nothing. Weights
    are detached and, in training, those before dropout.
    """
    def ask(layer, inputs, options):
        return inputs, options | {"need_weights": True}

    weights = {}
    with ExitStack() as hooks:  # which removes them at the end
        for name, layer in model.named_modules():
            def note(layer, inputs, output, name=name):
                weights[name] = output[1].detach()

            if isinstance(layer, MultiHeadAttention):
                hooks.enter_context(layer.register_forward_pre_hook(
                    ask, with_kwargs=True))
                hooks.enter_context(layer.register_forward_hook(note))
        hooks.enter_context(torch.compiler.set_stance("force_eager"))
        yield weights  # compiled code would not know of the hooks


# From chapter 10, Loss and schedule

def smoothed_cross_entropy(logits: Tensor, target: Tensor,
                           smoothing: float = 0.1, pad: int = 0,
                           reduction: str = "mean") -> Tensor:
    """Cross-entropy with smoothed targets, in nats (§5.4).

    logits: (..., V)    target: (...), token ids; those equal to pad are
    left out. The right token gets 1 - smoothing, and all V share the rest.
    reduction: "mean" over real tokens (0 if there are none), "sum", or
    "none": (...), 0 at padding.
    Computed in float32 at least. Raises ValueError for what does not fit.
    """
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"target must be {tuple(logits.shape[:-1])} to fit "
                         f"the logits, got {tuple(target.shape)}")
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target must be int64 or int32, "
                         f"got {target.dtype}")
    check_dropout(smoothing=smoothing)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be mean, sum or none, "
                         f"got {reduction!r}")
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    V = logits.shape[-1]
    loss = F.cross_entropy(
        logits.reshape(-1, V), target.reshape(-1).long(),
        ignore_index=pad, label_smoothing=smoothing,
        reduction="none" if reduction == "none" else "sum")
    if reduction == "none":
        return loss.reshape(target.shape)
    count = (target != pad).sum().clamp(min=1)
    return loss / count if reduction == "mean" else loss


def warmup_schedule(update: int, d_model: int, warmup: int = 4000) -> float:
    """The learning rate of an update, counted from 1 (§5.3, equation 3).

    Grows in a straight line for `warmup` updates, then falls as
    1/√update; the peak, at update == warmup, is 1/√(d_model · warmup).
    Raises ValueError for numbers below 1.
    """
    check_sizes(update=update, d_model=d_model, warmup=warmup)
    return d_model**-0.5 * min(update**-0.5, update * warmup**-1.5)


# From chapter 11, The training loop

class TokenBatches:
    """Endless batches of similar length, in a new order every epoch.

    pairs: (source ids, target ids); a target has bos and eos at least.
    max_tokens: the most that rows times the longest source or target of a
    batch may be. Whenever iteration begins anew, so do the batches.
    Raises ValueError for no pairs, a pair too short, or one that is longer
    than max_tokens.
    """

    def __init__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
                 max_tokens: int, *, pad: int = 0, seed: int = 0):
        check_sizes(max_tokens=max_tokens)
        lengths = [(len(target), len(source)) for source, target in pairs]
        short = [(s, t) for t, s in lengths if s < 1 or t < 2]
        if short or not lengths:
            raise ValueError(f"pairs must hold sources of at least 1 token "
                             f"and targets of 2, got {(short or 'none')[:4]}")
        if max(map(max, lengths)) > max_tokens:
            raise ValueError(f"max_tokens must hold the longest row, "
                             f"{max(map(max, lengths))}, got {max_tokens}")
        self.pairs, self.lengths, self.pad = pairs, lengths, pad
        self.max_tokens, self.seed = max_tokens, seed

    def epoch(self, number: int) -> list[list[int]]:
        """Which pairs stand in each batch of an epoch; every pair in one."""
        draw = random.Random(f"{self.seed} {number}")
        order = sorted(range(len(self.pairs)),
                       key=lambda i: (self.lengths[i], draw.random()))
        batches, width = [[]], 0
        for i in order:
            width = max(width, *self.lengths[i])
            if width * (len(batches[-1]) + 1) > self.max_tokens:
                batches.append([])
                width = max(self.lengths[i])
            batches[-1].append(i)
        draw.shuffle(batches)
        return batches

    def rows(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """These pairs, padded on the right: (B, S), (B, T)."""
        return tuple(nn.utils.rnn.pad_sequence(
            [torch.tensor(self.pairs[i][side]) for i in indices],
            batch_first=True, padding_value=self.pad) for side in (0, 1))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in itertools.count():
            yield from map(self.rows, self.epoch(number))


def pick_device(device: torch.device | str | None = None) -> torch.device:
    """The device asked for; None: CUDA, or Apple's MPS, or the CPU."""
    if device is None:
        device = ("cuda" if torch.cuda.is_available() else
                  "mps" if torch.backends.mps.is_available() else "cpu")
    return torch.device(device)


def processes() -> int:
    """How many processes train together; 1 without torch.distributed."""
    together = torch.distributed.is_available() and (
        torch.distributed.is_initialized())
    return torch.distributed.get_world_size() if together else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return torch.distributed.get_rank() if processes() > 1 else 0


def summed(*numbers: float, device: torch.device) -> list[float]:
    """Each number's sum over all processes."""
    if processes() == 1:
        return list(numbers)
    total = torch.tensor(numbers, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def add_gradients(model: nn.Module, group: Sequence[tuple[Tensor, Tensor]],
                  loss: Callable[..., Tensor], tokens: int, pad: int,
                  dtype: torch.dtype,
                  scaler: torch.amp.GradScaler) -> Tensor:
    """Backward through the batches of one update; returns their loss.

    The loss is a mean over `tokens`, the real target tokens of the update
    in all processes. Batches need not have one size.
    """
    total = torch.zeros((), device=group[0][0].device)
    for number, (source, target) in enumerate(group, start=1):
        waits = processes() > 1 and number < len(group)
        with model.no_sync() if waits else nullcontext():
            with torch.autocast(source.device.type, dtype,
                                enabled=dtype != torch.float32):
                part = loss(model(source, target[:, :-1]), target[:, 1:],
                            pad=pad, reduction="sum") / max(tokens, 1)
            # DistributedDataParallel takes the mean of the processes
            scaler.scale(part * processes()).backward()
        total += part.detach()
    return total


def pick_precision(precision: str | None,
                   device: torch.device) -> torch.dtype:
    """What products are computed in: "float32", "bfloat16" or "float16".

    None: on CUDA bfloat16 where the hardware has it, else float16;
    float32 on other devices. Raises ValueError for another name.
    """
    if precision not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"precision must be float32, bfloat16, float16 or "
                         f"None, got {precision!r}")
    if precision is None and device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bfloat16" if native else "float16"
    return getattr(torch, precision or "float32")


@dataclass
class History:
    """What a training did: a number for each update, in order."""

    loss: list[float] = field(default_factory=list)  # nats per real token
    rate: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)  # gradient, unclipped
    tokens: list[int] = field(default_factory=list)  # real, of the target
    seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    def add(self, **numbers: float) -> None:
        """One more update: a number for each list."""
        for name, number in numbers.items():
            getattr(self, name).append(number)

    def table(self, lines: int = 4) -> str:
        """Means of loss and rate over equal parts, and the validation."""
        text, end = ["  updates       loss     rate   validation"], 0
        for line in range(1, lines + 1):
            start, end = end, line * len(self.loss) // lines
            if start < end:
                loss, rate = (sum(numbers[start:end]) / (end - start)
                              for numbers in (self.loss, self.rate))
                value = [f"{value:.3f}" for update, value in self.validation
                         if start < update <= end]
                text.append(f"{start + 1:5d} to {end:5d}   {loss:5.2f}   "
                            f"{rate:.5f}   {(value or ['-'])[-1]}")
        return "\n".join(text)


class Training:
    """What the next update depends on, besides its batches.

    optimizer, precision, device: as in train; the model is moved there.
    taken: batches. saved: where all this was last written or read.
    Raises ValueError for a model or optimizer that does not fit.
    """

    def __init__(self, model: nn.Module,
                 optimizer: torch.optim.Optimizer | None = None,
                 precision: str | None = None,
                 device: torch.device | str | None = None):
        if processes() > 1 and not hasattr(model, "no_sync"):
            raise ValueError(f"model must be in DistributedDataParallel to "
                             f"train in {processes()} processes, "
                             f"got {type(model)}")
        self.device = pick_device(device)
        self.dtype = pick_precision(precision, self.device)
        model.to(self.device)
        self.model = model.module if hasattr(model, "no_sync") else model
        self.pad = getattr(getattr(self.model, "config", None), "pad", 0)
        self.optimizer = optimizer or torch.optim.Adam(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
        self.weights = [weight for group in self.optimizer.param_groups
                        for weight in group["params"]]
        if not set(self.weights) <= set(self.model.parameters()):
            raise ValueError("optimizer must be that of the model, got one "
                             "with other parameters")
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.dtype == torch.float16)
        self.history, self.taken, self.saved = History(), 0, None

    @property
    def update(self) -> int:
        """The number of the next update; the first is 1."""
        return len(self.history.loss) + 1


def take(training: Training, stream: Iterator[tuple[Tensor, Tensor]],
         count: int) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """The batches of one update, and the real tokens of all processes.

    Raises ValueError, in all processes, where the batches of one end.
    """
    group = list(itertools.islice(stream, count))
    tokens = sum(int((target[:, 1:] != training.pad).sum())
                 for _, target in group)
    tokens, got = summed(tokens, len(group), device=training.device)
    if got < count * processes():
        raise ValueError(f"batches must hold {count * processes()} for each "
                         f"update, got {got} for update {training.update}")
    training.taken += count
    return [(source.to(training.device), target.to(training.device))
            for source, target in group], tokens


def step(training: Training, loss: Tensor, rate: float | None = None,
         clip: float | None = None) -> tuple[float, float, float]:
    """Clip, look at loss and norm, step; returns loss, norm and rate.

    rate: None: the optimizer's own. The norm is that before clipping.
    Raises, before the weights change, ValueError for a rate that is none,
    FloatingPointError if loss or norm is not finite; in float16 the norm is
    left to the scaler, which skips the step and halves its scale, until
    that is 1. A skipped update counts.
    """
    scaler, groups = training.scaler, training.optimizer.param_groups
    if rate is not None and not 0 <= rate < math.inf:
        raise ValueError(f"schedule must give a rate that is finite and at "
                         f"least 0, got {rate} for update {training.update}")
    for group in groups:
        group["lr"] = group["lr"] if rate is None else rate
    scaler.unscale_(training.optimizer)
    norm = nn.utils.clip_grad_norm_(  # a finite limit: inf / inf is nan
        training.weights, clip or torch.finfo().max)
    value, norm = torch.stack([loss, norm]).tolist()
    [value] = summed(value, device=training.device)
    skips = scaler.is_enabled() and scaler.get_scale() > 1
    if not math.isfinite(value) or not (math.isfinite(norm) or skips):
        raise FloatingPointError(
            f"update {training.update} has loss {value} and gradient norm "
            f"{norm}; the last good checkpoint is "
            f"{training.saved or 'missing'}")
    scaler.step(training.optimizer)
    scaler.update()
    return value, norm, groups[0]["lr"]


def save_atomically(state: dict, path: Path) -> None:
    """Write beside the file, then rename: never half a file in its place."""
    path = path.resolve()  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk, not on its way there
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def random_states(device: torch.device) -> dict:
    """Where the random numbers of Python, PyTorch and the device stand."""
    states = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if device.type != "cpu":
        module = getattr(torch, device.type)  # torch.cuda, torch.mps
        states[device.type] = module.get_rng_state(device)
    return states


def restore_random(states: dict, device: torch.device) -> None:
    """Put them back there; a device that the states lack stays as it is."""
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        module = getattr(torch, device.type)
        module.set_rng_state(states[device.type], device)


def save_training(training: Training, path: Path) -> None:
    """Everything that the next update depends on, in one file.

    Of several processes each gives its random numbers; the first writes.
    Raises FloatingPointError, and writes nothing, if a weight is not finite.
    """
    if not all(weight.isfinite().all() for weight in training.weights):
        raise FloatingPointError(
            f"update {training.update - 1} left weights that are not finite; "
            f"the last good checkpoint is {training.saved or 'missing'}")
    states = [random_states(training.device)] * processes()
    if processes() > 1:
        torch.distributed.all_gather_object(states, states[0])
    if rank() == 0:
        save_atomically({
            "model": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "scaler": training.scaler.state_dict(),
            "history": asdict(training.history),
            "batches": training.taken, "random": states}, path)
    training.saved = path


def load_training(training: Training, path: Path,
                  stream: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Put it back, and skip the batches that were taken.

    Raises ValueError, before anything changes, for what is no checkpoint,
    or is one of another model or number of processes.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        theirs, count = saved["model"], len(saved["random"])
    except Exception as error:  # whatever a reader may raise
        raise ValueError(f"checkpoint must be a whole file that train "
                         f"wrote, got {path}") from error
    if count != processes():
        raise ValueError(f"checkpoint must be of {processes()} processes, "
                         f"got one of {count}")
    ours = training.model.state_dict()
    other = [name for name in {**ours, **theirs}
             if name not in ours or name not in theirs
             or ours[name].shape != theirs[name].shape]
    if other:
        raise ValueError(f"checkpoint must be of this model, got one that "
                         f"differs in {other[0]}")
    for name in ("optimizer", "model", "scaler"):
        if saved[name]:  # only in float16 has a scaler something to keep
            getattr(training, name).load_state_dict(saved[name])
    training.history = History(**saved["history"])
    training.taken, training.saved = saved["batches"], path
    next(itertools.islice(stream, training.taken, training.taken), None)
    # last, since the batches skipped may have drawn random numbers
    restore_random(saved["random"][rank()], training.device)


@contextmanager
def finish_first() -> Iterator[Callable[[], bool]]:
    """Within it, an interrupt (Ctrl-C) is noted; a second one interrupts.

    Yields a function that says whether one came; if one did, it interrupts
    at the end. Where interrupts are ignored, or in a thread of its own,
    where Python handles no signals, it notes nothing.
    """
    came = []

    def note(number, frame):
        if came:
            raise KeyboardInterrupt
        came.append(number)

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def compiled(model: nn.Module, trial: Callable[[nn.Module], object],
             **options) -> nn.Module:
    """torch.compile(model), or where that fails, model and a line why.

    trial: runs a model forward and backward, which is when compiling
    happens. Its gradients are dropped, its random numbers given back.
    """
    device = next(model.parameters()).device
    states = random_states(device)
    try:
        fast = torch.compile(model, dynamic=True, **options)
        trial(fast)
    except Exception as error:  # whatever a compiler may raise
        reason = " ".join(str(error).split())[:80]
        print(f"not compiled, {type(error).__name__}: {reason}")
        fast = model
    model.zero_grad()
    restore_random(states, device)
    return fast


class Progress:
    """A line on how far a training is, where somebody watches.

    In a terminal or a notebook; never if TQDM_DISABLE is set, the variable
    that silences many such bars, nor if `wanted` is False.
    """

    def __init__(self, updates: int, wanted: bool = True):
        watched = sys.stdout.isatty() or "ipykernel" in sys.modules
        silent = os.environ.get("TQDM_DISABLE", "") not in ("", "0")
        self.live, self.updates = wanted and watched and not silent, updates
        self.shown = 0.0

    def __call__(self, history: History) -> None:
        """Write the line over the last one, at most twice a second."""
        done, now = len(history.loss), time.perf_counter()
        last = done >= self.updates
        if not self.live or (now - self.shown < 0.5 and not last):
            return
        self.shown, seconds = now, sum(history.seconds[-20:])
        speed = sum(history.tokens[-20:]) / seconds
        left = (self.updates - done) * seconds / len(history.seconds[-20:])
        print(f"\r{done}/{self.updates}  loss {history.loss[-1]:.3f}  "
              f"{speed:,.0f} tokens/s  {left:,.0f} s left   ",
              end="\n" if last else "", flush=True)


def train(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *,
          updates: int, optimizer: torch.optim.Optimizer | None = None,
          schedule: Callable[[int], float] | None = None,
          loss: Callable[..., Tensor] = smoothed_cross_entropy,
          accumulate: int = 1, clip: float | None = None,
          precision: str | None = None, compile: bool = False,
          validate: Callable[[nn.Module], float] | None = None,
          checkpoint: str | Path | None = None, resume: bool = False,
          device: torch.device | str | None = None, every: int = 100,
          progress: bool = True) -> History:
    """Train in place to `updates` updates, counted from 1 (§5).

    batches: yields (source (B, S), target (B, T)), the same whenever
    iterated; `accumulate` of them make an update, whose loss is the mean
    over the real target tokens of all.
    optimizer: None: Adam with the paper's β and ε, at 1e-3.
    schedule: update -> learning rate; None: the optimizer's own.
    loss: called as loss(logits, target, pad=..., reduction="sum").
    clip: the largest norm of the gradient.
    precision, device: as pick_precision and pick_device say.
    validate: model in evaluation mode -> number, without gradients; the
    random numbers that it draws do not change the training.
    checkpoint: file written every `every` updates, after validation, at
    the end and when interrupted; resume: go on from there if it exists.

    A model in DistributedDataParallel trains in all processes at once;
    `batches` are then each process's own share.
    Raises ValueError for arguments that do not fit, FloatingPointError
    for a loss or gradient that is not finite, before it harms the model,
    KeyboardInterrupt after the update in which an interrupt came.
    """
    check_sizes(updates=updates, accumulate=accumulate, every=every)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be None or above 0, got {clip}")
    if resume and checkpoint is None:
        raise ValueError("checkpoint must be a path to resume, got None")
    training = Training(model, optimizer, precision, device)
    path = None if checkpoint is None else Path(checkpoint)
    if path:  # what cannot be written is found now, not hours later
        if path.is_dir():
            raise ValueError(f"checkpoint must be a file, got folder {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
    stream = iter(batches)
    if resume and path.exists():
        load_training(training, path, stream)
        if training.update > updates + 1:
            raise ValueError(f"updates must be at least the checkpoint's "
                             f"{training.update - 1}, got {updates}")
    plain, history = training.model, training.history
    run, show = model, Progress(updates, progress)

    with finish_first() as interrupted:
        for update in range(training.update, updates + 1):
            begin = time.perf_counter()
            group, tokens = take(training, stream, accumulate)
            backward = partial(add_gradients, loss=loss, tokens=tokens,
                               pad=training.pad, dtype=training.dtype,
                               scaler=training.scaler)
            model.train()
            if compile:  # once, now that there is a batch to try it on
                run, compile = compiled(
                    model, lambda fast: backward(fast, group[:1])), False
            model.zero_grad()
            total = backward(run, group)
            rate = schedule(update) if schedule else None
            value, norm, rate = step(training, total, rate, clip)
            history.add(loss=value, norm=norm, rate=rate, tokens=tokens,
                        seconds=time.perf_counter() - begin)
            show(history)
            due = update % every == 0 or update == updates
            if validate and due:
                plain.eval()
                states = random_states(training.device)
                with torch.inference_mode():
                    history.validation.append((update,
                                               float(validate(plain))))
                restore_random(states, training.device)
            [stop] = summed(int(interrupted()), device=training.device)
            if path and (due or stop):
                save_training(training, path)
            if stop:
                raise KeyboardInterrupt(f"stopped after update {update}")
    plain.eval()
    return history


# From chapter 12, Decoding

class DecoderCache:
    """A decoder that keeps keys and values, so that a new token is one row.

    Made from what `encode` gave. Called with the next tokens (B, n), returns
    their logits (B, n, V): the last n that `decode` of all so far would give.
    Raises ValueError for another batch size, and as `decode` does.
    """

    def __init__(self, model: Transformer, memory: Tensor,
                 memory_mask: Tensor | None):
        if memory_mask is not None and memory_mask.dim() != 4:
            raise ValueError(f"memory_mask must be (B, 1, 1, S), "
                             f"got {tuple(memory_mask.shape)}")
        if memory_mask is not None:  # one that hides nothing only costs time
            memory_mask = None if memory_mask.all() else memory_mask.expand(
                len(memory), -1, -1, -1)  # a row each, for select
        self.model, self.memory_mask, self.length = model, memory_mask, 0
        self.memory = [tuple(part.contiguous() for part in
                             layer.cross_attention.keys_values(memory))
                       for layer in model.decoder.layers]
        self.past = [(key[:, :, :0], value[:, :, :0])  # of no word yet
                     for key, value in self.memory]

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
        self.past[i] = tuple(  # (B, H, length + n, d_k)
            torch.cat([past, part.contiguous()], dim=2)  # faster so
            for past, part in zip(self.past[i], new))
        return attention.attend(attention.queries(x), *self.past[i],
                                is_causal=x.shape[1] > 1)[0]

    def select(self, rows: Tensor, *, same_source: bool = False) -> None:
        """Go on with these rows, in this order; a row may come twice.

        same_source: each new row has the source of the one in its place, so
        that the memory can stay where it is.
        """
        self.past = [(key[rows], value[rows]) for key, value in self.past]
        if not same_source:
            self.memory = [(key[rows], value[rows])
                           for key, value in self.memory]
            if self.memory_mask is not None:
                self.memory_mask = self.memory_mask[rows]


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


def greedy_decode(model: Transformer, src: Tensor,
                  max_length: int | None = None) -> Tensor:
    """The likeliest next token, again and again: src (B, S) -> (B, L).

    Without bos; after eos, pad. max_length: tokens written at most, eos
    among them, as in `length_limits`. Raises ValueError as `encode` does,
    and where no word is possible.
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
            value, new = logits.max(dim=-1, keepdim=True)
            if not (value.isfinite() | done).all():
                raise ValueError("the model's logits must be finite, "
                                 "got others")
            new = new.masked_fill(done, c.pad)
            written.append(new)
            full = (limits <= len(written)).unsqueeze(1)
            done = done | (new == c.eos) | full
    # a batch of none writes nothing, and src[:, :0] is that
    return torch.cat([src[:, :0], *written], dim=1)


def length_penalty(length: int | Tensor, alpha: float) -> float | Tensor:
    """What a sentence's log probability is divided by (§6.1; Wu, 2016).

    length counts eos. alpha 0: by 1; alpha 1: nearly by the length.
    """
    return ((5 + length) / 6) ** alpha


def beam_search(model: Transformer, src: Tensor,
                max_length: int | None = None, beam: int = 4,
                alpha: float = 0.6) -> tuple[Tensor, Tensor]:
    """The best sentence that a search with `beam` live prefixes finds.

    src (B, S) -> tokens (B, L), as from `greedy_decode`, and scores (B,):
    log probability in nats / length_penalty (§6.1). An end counts if it is
    as likely as the last prefix that stays live. A search is over when
    max_length is full, no live prefix can win, or `beam` ends have counted
    and the best is ahead of every live prefix. Raises ValueError for a beam
    below 1, an alpha beyond ±10, or if no sentence's score is finite.
    """
    check_sizes(beam=beam)
    if not -10 <= alpha <= 10:
        raise ValueError(f"alpha must be from -10 to 10, got {alpha}")
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
            ending = total[..., c.eos].clone()  # (B, beam)
            total[..., [c.pad, c.bos, c.eos]] = -math.inf
            # (B, beam, V) -> (B, beam * V) -> the best (B, beam)
            score, index = total.flatten(1).topk(beam)
            parent, word = index // V, index % V
            grown = torch.cat([live[row, parent], word.unsqueeze(-1)], dim=-1)
            # what may be the answer: ends that count, and all at the limit
            counts = ending.isfinite() & (ending >= score[:, -1:])
            full = limits == length
            over = torch.cat([
                ending.masked_fill(~counts, -math.inf),
                score.masked_fill(~full.unsqueeze(1), -math.inf)], dim=1)
            value, place = over.max(dim=1)  # of (B, 2 * beam)
            value = value / length_penalty(length, alpha)
            ends = torch.cat([F.pad(live, (0, 1), value=c.eos), grown], dim=1)
            ends = ends[row[:, 0], place, 1:]  # (B, length)
            better = searching & (value > best)
            best = torch.where(better, value, best)
            written[:, :length] = torch.where(better.unsqueeze(1), ends,
                                              written[:, :length])
            ended += counts.sum(dim=1)
            now = score[:, 0] / length_penalty(length, alpha)
            most = score[:, 0] / length_penalty(
                limits if alpha > 0 else length, alpha)
            searching &= ~full & (most > best) & (
                (ended < beam) | (now > best))
            if not searching.any():
                break
            cache.select((row * beam + parent).flatten(), same_source=True)
            live = grown
    if not best.isfinite().all():
        raise ValueError("the model's logits must be finite, got others")
    used = (written != c.pad).any(dim=0).sum()
    return written[:, :used].clone(), best.clone()


# From chapter 14, Translating sentences

MULTI30K = ("https://raw.githubusercontent.com/multi30k/dataset/master/"
            "data/task1/raw/")


MULTI30K_SUMS = """
train.en
d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f
train.de
726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6
val.en
14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28
val.de
f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a
test_2016_flickr.en
611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9
test_2016_flickr.de
9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8
test_2017_flickr.en
76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074
test_2017_flickr.de
a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee
test_2017_mscoco.en
aab300bfb4427697987e02cd0aacd44bfe8aa50456231b6474c08038bbed2b58
test_2017_mscoco.de
799e4854c25d601cb6cb6be29eabe5667734c61ace2f495e03e429031a0bc338
""".split()  # name, SHA-256 sum, name, ...


def fetch(address: str, path: str | Path, sha256: str) -> Path:
    """The file at path, downloaded from the address if it is not there.

    sha256: its sum, as 64 hexadecimal digits. Raises OSError, saying what to
    do, if the file cannot be had or is another; then nothing is stored.
    """
    path = Path(path)
    here = path.exists()
    try:
        data = path.read_bytes() if here else urlopen(
            address, timeout=30).read()
    except (OSError, HTTPException, ValueError) as error:
        raise OSError(f"cannot get {path.name} ({error}): try again later, "
                      f"or put it into the folder {path.parent}") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        what = "delete it" if here else "try again later"
        raise OSError(f"{path.name} is not the file we know (wrong SHA-256 "
                      f"sum): {what} and run again")
    if not here:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_bytes(data)
        path.with_suffix(".new").replace(path)  # never half a file
    return path


def multi30k(part: str, language: str,
             folder: str | Path | None = None) -> list[str]:
    """The sentences of a part of Multi30k (Elliott et al. 2016), in order.

    part: "train", "val", "test_2016_flickr", "test_2017_flickr" or
    "test_2017_mscoco". language: "en" or "de". folder: where the files are,
    or are put; None: the one that ATTENTION_DATA names, or else
    "data/multi30k". Licence of the data: CC BY-NC-SA 4.0.
    Raises ValueError for another part or language, OSError as `fetch` does.
    """
    name, sums = f"{part}.{language}", dict(zip(MULTI30K_SUMS[::2],
                                                MULTI30K_SUMS[1::2]))
    if name not in sums:
        raise ValueError(f"part and language must be one of {list(sums)}, "
                         f"got {name!r}")
    folder = folder or os.environ.get("ATTENTION_DATA") or "data/multi30k"
    path = fetch(f"{MULTI30K}{name}.gz", Path(folder, f"{name}.gz"),
                 sums[name])
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return file.read().removesuffix("\n").split("\n")


def translate(model: Transformer, bpe: BytePairEncoding,
              sentences: Sequence[str],
              decode: Callable[..., Tensor] = greedy_decode,
              size: int = 100) -> list[str]:
    """Sentences to sentences, in their order, `size` in a batch.

    decode: model and src (B, S) -> tokens (B, L), as `greedy_decode`.
    Raises ValueError for one sentence in place of several, size below 1.
    """
    if isinstance(sentences, str):
        raise ValueError(f"sentences must be several, got one: "
                         f"{sentences[:20]!r}")
    check_sizes(size=size)
    c, device = model.config, next(model.parameters()).device
    ids = [bpe.encode(sentence) + [c.eos] for sentence in sentences]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    said = {}
    for start in range(0, len(order), size):
        some = order[start:start + size]
        src = nn.utils.rnn.pad_sequence(
            [torch.tensor(ids[i]) for i in some], batch_first=True,
            padding_value=c.pad).to(device)
        for i, row in zip(some, decode(model, src).tolist()):
            said[i] = bpe.decode(
                t for t in row if t not in (c.pad, c.bos, c.eos))
    return [said[i] for i in range(len(ids))]


def average_weights(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several state_dicts of one model, in float32 (§6.1).

    Raises ValueError for none, or for names that differ.
    """
    names = {frozenset(state) for state in states}
    if len(names) != 1:
        raise ValueError(f"states must be several with the same names, got "
                         f"{len(states)} with {len(names)} sets of names")
    return {name: torch.stack([state[name].float() for state in states])
            .mean(dim=0) for name in states[0]}
