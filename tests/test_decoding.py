"""Decoding (chapter 12): the cache equals the whole, greedy and beam search stop, are exact, and do not depend on the batch."""

import copy
import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import FEW, SMALL, tokens, transformer
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from book.transformer import (DecoderCache, Transformer, TransformerConfig, beam_search, greedy_decode, length_limits,
                              length_penalty, speaking)

TINY = TransformerConfig(6, 6, d_model=8, n_heads=2, n_layers=1, d_ff=16, dropout=0.0)


def made(config: TransformerConfig = SMALL, seed: int = 0, **changed) -> Transformer:
    """A model whose logits are spread out, so that it prefers some words."""
    model = transformer(config, seed=seed, **changed)
    with torch.no_grad():
        model.output.weight.mul_(4)
    return model


def batch_of(*lengths: int, vocab_size: int = 13) -> torch.Tensor:
    """Rows of these lengths, padded on the right."""
    rows = [tokens(1, n, vocab_size, seed=i)[0] for i, n in enumerate(lengths)]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def real(row: torch.Tensor, pad: int = 0) -> list[int]:
    return row[row != pad].tolist()


# The cache

@FEW
@given(parts=st.lists(st.integers(1, 4), min_size=1, max_size=5), norm_first=st.booleans(), padded=st.booleans(),
       positions=st.sampled_from(["sinusoidal", "learned", "none"]))
def test_a_cache_fed_in_parts_of_any_size_equals_decode(parts, norm_first, padded, positions):
    model = made(norm_first=norm_first, positions=positions)
    src, tgt = batch_of(7, 4 if padded else 7), tokens(2, sum(parts), 17)
    with torch.no_grad():
        memory = model.encode(src)
        cache = DecoderCache(model, *memory)
        found = torch.cat([cache(part) for part in tgt.split(parts, dim=1)], dim=1)
        assert torch.allclose(found, model.decode(tgt, *memory), atol=1e-4)
    assert cache.length == sum(parts)


class AtZero(DecoderCache):
    def __call__(self, new):
        length, self.length = self.length, 0
        logits = super().__call__(new)
        self.length = length + new.shape[1]
        return logits


class Unmasked(DecoderCache):
    def _look_back(self, i, attention, x):
        super()._look_back(i, attention, x)
        return attention.attend(attention.queries(x), *self.past[i])[0]


class Forgetful(DecoderCache):
    def _look_back(self, i, attention, x):
        self.past[i] = tuple(kept[:, :, :0] for kept in self.past[i])
        return super()._look_back(i, attention, x)


class Unpadded(DecoderCache):
    def __init__(self, model, memory, memory_mask):
        super().__init__(model, memory, None)


@pytest.mark.parametrize("wrong", [AtZero, Unmasked, Forgetful, Unpadded])
def test_the_comparison_finds_caches_that_are_wrong(wrong):
    model, tgt = made(), tokens(2, 6, 17)
    with torch.no_grad():
        memory = model.encode(batch_of(7, 4))
        cache = wrong(model, *memory)
        found = torch.cat([cache(part) for part in tgt.split([2, 1, 3], dim=1)], dim=1)
        assert not torch.allclose(found, model.decode(tgt, *memory), atol=1e-3)


@pytest.mark.parametrize("rows", [[1, 0], [0, 0, 1], [1]])
def test_selected_rows_go_on_as_if_they_had_been_written_alone(rows):
    model, tgt, rows = made(), tokens(2, 6, 17), torch.tensor(rows)
    with torch.no_grad():
        memory, mask = model.encode(batch_of(7, 4))
        cache = DecoderCache(model, memory, mask)
        cache(tgt[:, :4])
        cache.select(rows)
        assert torch.allclose(cache(tgt[rows, 4:]), model.decode(tgt[rows], memory[rows], mask[rows])[:, 4:], atol=1e-4)


def test_rows_of_one_source_may_change_places_without_the_memory():
    model, tgt = made(), tokens(2, 6, 17)
    with torch.no_grad():
        memory, mask = model.encode(batch_of(7).repeat(2, 1))
        cache = DecoderCache(model, memory, mask)
        cache(tgt[:, :4])
        kept = cache.memory[0][0]
        cache.select(torch.tensor([1, 0]), same_source=True)
        assert cache.memory[0][0] is kept
        assert torch.allclose(cache(tgt.flip(0)[:, 4:]), model.decode(tgt.flip(0), memory, mask)[:, 4:], atol=1e-4)


def test_a_mask_for_all_rows_can_be_selected_and_one_that_hides_nothing_is_left_out():
    model, tgt = made(), tokens(2, 6, 17)
    with torch.no_grad():
        memory, mask = model.encode(batch_of(7, 7))
        assert DecoderCache(model, memory, mask).memory_mask is None
        mask = mask[:1].clone()
        mask[..., 5:] = False
        cache = DecoderCache(model, memory, mask)
        cache(tgt[:, :4])
        cache.select(torch.tensor([1, 0]))
        expected = model.decode(tgt.flip(0), memory.flip(0), mask)[:, 4:]
        assert torch.allclose(cache(tgt.flip(0)[:, 4:]), expected, atol=1e-4)


def test_keys_of_the_memory_are_computed_once(monkeypatch):
    model, asked = made(), []
    for layer in model.decoder.layers:
        keys_values = layer.cross_attention.keys_values
        monkeypatch.setattr(layer.cross_attention, "keys_values", lambda memory, f=keys_values: (asked.append(1), f(memory))[1])
    greedy_decode(model, batch_of(5, 7), 9)
    assert len(asked) == 2


def test_a_cache_refuses_another_batch_and_more_tokens_than_positions_and_stays_usable():
    model, tgt = made(max_length=8), tokens(2, 9, 17)
    with torch.no_grad():
        memory = model.encode(batch_of(7, 4))
        cache = DecoderCache(model, *memory)
        cache(tgt[:, :4])
        with pytest.raises(ValueError, match=r"tokens must have the memory's batch size 2, got \(1, 1\)"):
            cache(tgt[:1, 4:5])
        with pytest.raises(ValueError, match="positions must be .* below max_length 8, got 4 to 8"):
            cache(tgt[:, 4:])
        assert torch.allclose(cache(tgt[:, 4:5]), model.decode(tgt[:, :5], *memory)[:, 4:], atol=1e-4)


# Greedy decoding

def greedy_by_the_book(model: Transformer, src: torch.Tensor, limit: int) -> list[int]:
    """One sentence, no cache, no batch."""
    c, written = model.config, [model.config.bos]
    with torch.no_grad():
        while len(written) <= limit and written[-1] != c.eos:
            logits = model(src, torch.tensor([written]))[0, -1]
            logits[[c.pad, c.bos]] = -math.inf
            written.append(int(logits.argmax()))
    return written[1:]


SEEDS = range(8)


@pytest.mark.parametrize("ids", [{}, {"pad": 4, "bos": 0, "eos": 5}])
def test_a_batch_gives_what_each_sentence_alone_gives_whatever_the_padding(ids):
    ended = set()
    for seed in SEEDS:
        model = made(seed=seed, tgt_vocab_size=8, **ids)
        lengths, pad = (3, 7, 5), model.config.pad
        src = torch.full((3, 9), pad)
        for row, n in enumerate(lengths):
            src[row, :n] = tokens(1, n, 13, seed)[0].clamp(min=6)
        for limit in (12, None)[:1 + (seed < 2)]:
            for search in (greedy_decode, lambda *inputs: beam_search(*inputs)[0]):
                found = search(model, src, limit)
                for row, n in enumerate(lengths):
                    alone = search(model, src[row:row + 1, :n], limit)[0]
                    assert real(found[row], pad) == real(alone, pad)
                    assert len(alone) <= (limit or n + 50)
        for row, n in enumerate(lengths):
            by_the_book = greedy_by_the_book(model, src[row:row + 1, :n], 12)
            assert real(greedy_decode(model, src, 12)[row], pad) == by_the_book
            ended.add(by_the_book[-1] == model.config.eos)
    assert ended == {True, False}  # both kinds were met


@pytest.mark.parametrize("search", [greedy_decode, lambda *inputs: beam_search(*inputs)[0]])
def test_no_bos_pad_only_behind_the_end_and_the_end_at_most_once(search):
    for seed in SEEDS:
        model = made(seed=seed)
        with torch.no_grad():  # a model that would love to write them
            model.output.weight[:2] = 5 * model.output.weight[2]
        for row in search(model, batch_of(3, 7, 5), 10).tolist():
            written = real(torch.tensor(row))
            assert 1 not in row and row == written + [0] * (len(row) - len(written))
            assert written and 2 not in written[:-1]
            assert written[-1] == 2 or len(written) == 10


def always(word: int) -> Transformer:
    """A model whose likeliest next token is always this one."""
    model = made()
    with torch.no_grad():
        model.output.weight.zero_()
        model.decoder.norm = nn.LayerNorm(12)
        model.decoder.norm.weight.zero_()
        model.decoder.norm.bias.fill_(1.0)
        model.output.weight[word] = 1.0
    return model


def test_it_stops_when_all_have_ended():
    for search in (greedy_decode, lambda *inputs: beam_search(*inputs, beam=1)[0]):
        assert search(always(2), batch_of(3, 7)).tolist() == [[2], [2]]


def test_the_default_limit_is_the_real_input_length_plus_50_and_positions_bound_it():
    src = batch_of(3, 7)
    assert length_limits(always(5), src).tolist() == [53, 57]
    for found in (greedy_decode(always(5), src), beam_search(always(5), src, beam=1)[0]):
        assert (found != 0).sum(dim=1).tolist() == [53, 57] and found.shape == (2, 57)
    short = made(max_length=8)
    assert length_limits(short, src).tolist() == length_limits(short, src, 99).tolist() == [8, 8]
    assert greedy_decode(short, src).shape[1] <= 8


@pytest.mark.parametrize("search", [greedy_decode, beam_search])
def test_modes_are_restored_also_after_an_error_and_there_is_no_graph(search):
    model = made(dropout=0.5).train()
    model.encoder.eval()
    modes = [module.training for module in model.modules()]
    same = search(model, batch_of(3, 7), 9), search(model, batch_of(3, 7), 9)
    with pytest.raises(ValueError, match="src must be ids from 0 to 12, got 13"):
        search(model, torch.full((1, 3), 13))
    assert modes == [module.training for module in model.modules()] and True in modes and False in modes
    one, other = (found if isinstance(found, tuple) else (found,) for found in same)
    for mine, again in zip(one, other, strict=True):  # no dropout while speaking
        assert torch.equal(mine, again) and not mine.requires_grad and not mine.is_inference()
    assert torch.is_grad_enabled()
    model(batch_of(3, 7), one[0]).sum().backward()  # what was written can be trained on


def test_speaking_restores_after_an_error_within():
    model = made().train()
    with pytest.raises(RuntimeError, match="stop"), speaking(model):
        assert not any(module.training for module in model.modules()) and torch.is_inference_mode_enabled()
        raise RuntimeError("stop")
    assert all(module.training for module in model.modules()) and not torch.is_inference_mode_enabled()


def test_a_batch_of_none_gives_none():
    empty = torch.zeros(0, 5, dtype=torch.long)
    assert greedy_decode(made(), empty).shape == (0, 0)
    found, scores = beam_search(made(), empty)
    assert found.shape == (0, 0) and scores.shape == (0,)


# Beam search

def best_of_all(model: Transformer, src: torch.Tensor, limit: int, alpha: float) -> tuple[float, list[int]]:
    """Every sentence is tried."""
    c, best, live = model.config, (-math.inf, []), [([], 0.0)]
    with torch.no_grad():
        for length in range(1, limit + 1):
            inputs = torch.tensor([[c.bos, *ids] for ids, _ in live])
            logp = model(src.expand(len(live), -1), inputs)[:, -1].log_softmax(dim=-1).tolist()
            grown = [([*ids, v], total + logp[i][v]) for i, (ids, total) in enumerate(live)
                     for v in range(c.tgt_vocab_size) if v not in (c.pad, c.bos)]
            over = [one for one in grown if one[0][-1] == c.eos or length == limit]
            best = max([best] + [(total / ((5 + length) / 6) ** alpha, ids) for ids, total in over])
            live = [one for one in grown if one[0][-1] != c.eos]
    return best


def agree(search, beam: int, alpha: float) -> int:
    count = 0
    for seed in range(50):
        model, src = made(TINY, seed), tokens(1, 4, 6, seed)
        score, ids = best_of_all(model, src, 4, alpha)
        found, found_score = search(model, src, 4, beam=beam, alpha=alpha)
        count += real(found[0]) == ids and abs(found_score.item() - score) < 1e-3
    return count


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5, -0.5])
def test_a_beam_that_holds_all_prefixes_finds_the_best_of_all(alpha):
    assert agree(beam_search, 27, alpha) == 50


def test_the_comparison_finds_searches_that_are_narrow_or_penalise_wrongly():
    assert agree(beam_search, 1, 0.6) < 45
    assert agree(lambda *inputs, beam, alpha: beam_search(*inputs, beam=beam, alpha=0.0), 27, 1.5) < 50


def test_beam_1_equals_greedy():
    src = batch_of(3, 7, 5)
    for seed, alpha in itertools.product(SEEDS, (0.0, 0.6)):
        model = made(seed=seed)
        for limit in (1, 2, 15):
            assert torch.equal(beam_search(model, src, limit, 1, alpha)[0], greedy_decode(model, src, limit))


def test_the_score_is_the_log_probability_over_the_penalty():
    src = batch_of(3, 7, 5)
    for seed, alpha in itertools.product(SEEDS, (0.0, 0.6, 2.0)):
        model = made(seed=seed)
        found, scores = beam_search(model, src, 12, 3, alpha)
        inputs = F.pad(found, (1, 0), value=1)[:, :-1]
        with torch.no_grad():
            logp = model(src, inputs).log_softmax(dim=-1).gather(-1, found.unsqueeze(-1)).squeeze(-1)
        total, length = logp.masked_fill(found == 0, 0).sum(dim=1), (found != 0).sum(dim=1)
        assert torch.allclose(scores, total / ((5 + length) / 6) ** alpha, atol=1e-3)
        assert torch.allclose(scores, total / length_penalty(length, alpha), atol=1e-3)


class Table(DecoderCache):
    """Probabilities of the next word after these words; after others, the end."""

    NEXT = {(): {2: 0.4, 3: 0.45, 4: 0.15}, (3,): {3: 0.5, 4: 0.5}}

    def __init__(self, model, memory, mask):
        super().__init__(model, memory, mask)
        self.told = torch.empty(len(memory), 0, dtype=torch.long)

    def __call__(self, new):
        self.told = torch.cat([self.told, new], dim=1)
        rows = [self.NEXT.get(tuple(ids[1:]), {2: 1.0}) for ids in self.told.tolist()]
        return torch.tensor([[[row.get(v, 0.0) for v in range(6)]] for row in rows]).log()

    def select(self, rows, **how):
        self.told = self.told[rows]


def test_an_early_end_is_kept_and_wins_where_it_is_best(monkeypatch):
    monkeypatch.setattr("book.transformer.DecoderCache", Table)
    model, src = made(TINY), batch_of(3, vocab_size=6)
    assert len(real(greedy_decode(model, src, 6)[0])) == 3
    found, score = beam_search(model, src, 6, beam=2, alpha=0.0)
    assert real(found[0]) == [2] and math.isclose(score.item(), math.log(0.4), abs_tol=1e-5)
    found, _ = beam_search(model, src, 6, beam=2, alpha=3.0)  # long ones are forgiven more
    assert len(real(found[0])) == 3


class Sure(Table):
    """One sentence, 3 4 5 3 4 5 and the end, and at each place a small chance of everything else."""

    def __call__(self, new):
        self.told = torch.cat([self.told, new], dim=1)
        right = [3, 4, 5, 3, 4, 5, 2]
        logits = torch.zeros(len(self.told), 1, 6)
        logits[:, :, right[min(self.told.shape[1] - 1, 6)]] = 9.0
        return logits


@pytest.mark.parametrize("beam", [2, 4, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_hopeless_ends_do_not_end_the_search_of_a_model_that_is_sure(monkeypatch, beam, alpha):
    monkeypatch.setattr("book.transformer.DecoderCache", Sure)
    found, _ = beam_search(made(TINY), batch_of(3, vocab_size=6), 12, beam=beam, alpha=alpha)
    assert real(found[0]) == [3, 4, 5, 3, 4, 5, 2]


def test_a_beam_wider_than_the_vocabulary_and_of_a_vocabulary_of_one_word_work():
    assert real(beam_search(made(TINY), batch_of(3, vocab_size=6), 1, beam=40)[0][0])
    one_word = made(TINY, src_vocab_size=4, tgt_vocab_size=4)
    found, score = beam_search(one_word, torch.tensor([[3, 2]]), 3, beam=5)
    assert 1 <= len(real(found[0])) <= 3 and score.isfinite().all()


@pytest.mark.parametrize("arguments, message", [
    ({"beam": 0}, "beam must be an int above 0, got 0"), ({"beam": 1.5}, "beam must be an int above 0, got 1.5"),
    ({"max_length": 0}, "max_length must be an int above 0, got 0"), ({"max_length": -3}, "max_length must be an int above 0, got -3"),
    *(({"alpha": value}, f"alpha must be from -10 to 10, got {value}") for value in (math.nan, math.inf, 300.0, -50.0))])
def test_arguments_that_cannot_be_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        beam_search(made(), batch_of(3), **arguments)
    if "max_length" in arguments:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            greedy_decode(made(), batch_of(3), **arguments)


def test_logits_that_are_not_finite_are_named_and_half_precision_works():
    broken = copy.deepcopy(made())
    with torch.no_grad():
        broken.output.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="the model's logits must be finite"):
        beam_search(broken, batch_of(3))
    with pytest.raises(ValueError, match="the model's logits must be finite"):
        greedy_decode(broken, batch_of(3))
    found, scores = beam_search(made().to(torch.bfloat16), batch_of(3, 7), 9)
    assert scores.dtype == torch.float32 and scores.isfinite().all() and len(found) == 2
