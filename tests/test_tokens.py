"""BytePairEncoding and TokenEmbedding (chapter 06): nothing is lost, ids are a library's, sizes are right, faults are named."""

import math
import random
import time
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from conftest import FEW
from hypothesis import given, settings, strategies
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn

from book.transformer import BytePairEncoding, TokenEmbedding, positional_encoding

TEXTS = ["The owl sleeps by day and hunts by night. The trout sleeps by night and hunts by day.",
         "owl  owls\n\nowlets, the thaw, the throat; zzzz zzzzz", "Zoë, Zoe\u0308: 猫头鹰吃鳟鱼 猫头鹰 🦉🦉 👩\u200d🔬"]
BPE = BytePairEncoding.train(TEXTS, 120)


def byte(character: str) -> int:
    return 3 + ord(character)


def by_definition(texts: list[str], n_merges: int) -> list[tuple[int, int]]:
    """The merges, all pairs counted anew for each."""
    words = Counter(tuple(word) for text in texts for word in BytePairEncoding.words(text))
    merges = []
    while len(merges) < n_merges:
        totals = Counter()
        for word, times in words.items():
            for pair in zip(word, word[1:]):
                totals[pair] += times
        if not totals:
            break
        merges.append(min(totals, key=lambda pair: (-totals[pair], pair)))
        words = Counter({tuple(BytePairEncoding.merge(list(word), merges[-1], 258 + len(merges))): times
                         for word, times in words.items()})
    return merges


def librarys(bpe: BytePairEncoding) -> Tokenizer:
    """A tokenizer of the `tokenizers` library with the same merges, ids and words."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [value for value in range(256) if value not in printable]
    letter = {value: chr(value) for value in printable} | {value: chr(256 + i) for i, value in enumerate(rest)}
    names = ["".join(letter[value] for value in piece) for piece in bpe.pieces]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names) if i > 2},
                                     merges=[(names[left], names[right]) for left, right in bpe.merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r" ?\S+|\s+?(?= \S)|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return tokenizer


@settings(FEW, max_examples=500)
@given(strategies.text() | strategies.text(alphabet="ow l\n\tthe 猫🦉\u0308", max_size=60))
def test_any_text_comes_back(text):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert all(3 <= i < len(BPE.pieces) for i in ids)


@settings(FEW, max_examples=200)
@given(strategies.text() | strategies.text(alphabet="ab \n\t\u3000", max_size=30))
def test_words_drop_nothing_and_a_word_keeps_the_space_before_it(text):
    words = [bytes(i - 3 for i in word).decode() for word in BytePairEncoding.words(text)]
    assert "".join(words) == text and "" not in words
    for word in words:
        assert word.isspace() or not any(character.isspace() for character in word.removeprefix(" "))
    for before, word in zip(words, words[1:]):  # no word leaves its space to the one before
        assert not (before.endswith(" ") and not word[0].isspace())


@settings(FEW, max_examples=200)
@given(strategies.lists(strategies.integers(0, 258 + 120)))
def test_any_ids_become_text(ids):
    ids = [i for i in ids if i < len(BPE.pieces)]
    assert BPE.decode(ids) == b"".join(BPE.pieces[i] for i in ids).decode(errors="replace")


@pytest.mark.parametrize("merges", [0, 10, 120])
def test_ids_are_the_librarys_on_1000_strings(merges):
    ours = BytePairEncoding(list(BPE.merges)[:merges])
    theirs, generator = librarys(ours), random.Random(0)
    # without \x1c to \x1f, which are spaces to Python and none to the library
    parts = [*" ".join(TEXTS).split(), *" .,\n\towlz", "  ", " the", " owl", "\u3000", "\xa0", "\x00", "🦉", "猫", "\u0308"]
    for _ in range(1000):
        text = "".join(generator.choices(parts, k=generator.randint(0, 30)))
        assert ours.encode(text) == theirs.encode(text).ids, repr(text)


def test_of_equally_common_pairs_the_lowest_ids_merge_first():
    merges = list(BytePairEncoding.train(["cd ab"], 1).merges)
    assert merges == [(byte(" "), byte("a"))]
    assert list(BytePairEncoding.train(["cd", "ab"], 2).merges) == [(byte("a"), byte("b")), (byte("c"), byte("d"))]
    assert list(BytePairEncoding.train(["ac", "ab"], 1).merges) == [(byte("a"), byte("b"))]
    assert list(BytePairEncoding.train(["cd", "ab", "cd"], 1).merges) == [(byte("c"), byte("d"))]


def test_encode_applies_the_earliest_merge_first():
    a, b, c = map(byte, "abc")
    assert BytePairEncoding([(b, c), (a, b)]).encode("abc") == [a, 259]
    assert BytePairEncoding([(a, b), (b, c)]).encode("abc") == [259, c]
    assert BytePairEncoding([(b, c), (a, b), (a, 259)]).encode("abc") == [261]


def test_pairs_that_overlap_merge_from_left_to_right():
    z = byte("z")
    bpe = BytePairEncoding([(z, z)])
    assert bpe.encode("zzz") == [259, z] and bpe.encode("zzzz") == [259, 259]


def test_a_text_encodes_as_its_words_do_in_training():
    text = "owl owls howl growl owl"
    bpe = BytePairEncoding.train([text], 1000)
    assert [len(bpe.encode(word)) for word in ("owl", " owls", " howl", " growl", " owl")] == [1] * 5


@settings(FEW, max_examples=100)
@given(strategies.lists(strategies.text(alphabet="abz ö\n", max_size=40), max_size=4), strategies.integers(0, 40))
def test_training_with_running_counts_finds_the_merges_of_the_definition(texts, n_merges):
    assert list(BytePairEncoding.train(texts, n_merges).merges) == by_definition(texts, n_merges)


def test_training_on_real_text_finds_the_merges_of_the_definition():
    assert list(BPE.merges) == by_definition(TEXTS, 120)


def test_fewer_merges_are_the_first_of_more():
    assert list(BytePairEncoding.train(TEXTS, 30).merges) == list(BPE.merges)[:30]


def test_training_stops_when_no_pair_is_left():
    bpe = BytePairEncoding.train(["owl owl"], 100)
    assert len(bpe.merges) == 3 and bpe.encode("owl owl") == [260, 261]
    assert not BytePairEncoding.train([], 5).merges and not BytePairEncoding.train([""], 5).merges


def test_no_piece_spans_two_words():
    bpe = BytePairEncoding.train(["of the of the of the"], 100)
    assert all(b" " not in piece[1:] for piece in bpe.pieces)


def test_training_takes_seconds_on_20000_words():
    generator = random.Random(0)
    syllables = ["".join(generator.choices("etaoinshrdlucm", k=generator.randint(1, 3))) for _ in range(800)]
    words = {"".join(generator.choices(syllables, k=3)) for _ in range(21_000)}
    began = time.process_time()
    bpe = BytePairEncoding.train([" ".join(sorted(words))], 1000)
    assert len(bpe.merges) == 1000
    assert time.process_time() - began < 30


def test_pad_bos_and_eos_come_first_then_bytes_then_merges():
    assert BPE.pieces[:3] == [b""] * 3 and BPE.pieces[3:259] == [bytes([value]) for value in range(256)]
    assert BPE.decode([1, *BPE.encode("owl"), 2, 0, 0]) == "owl"
    assert len(BPE.pieces) == 259 + len(BPE.merges)
    assert [BPE.pieces[i] for i in BPE.merges.values()] == [BPE.pieces[a] + BPE.pieces[b] for a, b in BPE.merges]


def test_merges_stored_as_lists_make_the_same_tokenizer():
    again = BytePairEncoding([list(pair) for pair in BPE.merges])
    assert again.merges == BPE.merges and again.pieces == BPE.pieces


def test_half_a_character_becomes_the_replacement_sign():
    owl = BytePairEncoding([]).encode("🦉")
    assert len(owl) == 4
    assert BytePairEncoding([]).decode(owl[:2]) == "\ufffd"
    assert BytePairEncoding([]).decode([*owl, owl[0], byte("x")]) == "🦉\ufffdx"


def test_ids_in_a_tensor_are_decoded_too():
    assert BPE.decode(torch.tensor(BPE.encode("an owl"))) == "an owl"


def test_ids_that_there_are_not_are_named():
    for wrong in (-1, len(BPE.pieces)):
        with pytest.raises(ValueError, match=f"ids must be from 0 to {len(BPE.pieces) - 1}, got {wrong}"):
            BPE.decode([5, wrong])


@pytest.mark.parametrize("merges", [[(5, 259)], [(5, 6), (5, 6)], [(1, 5)], [(-1, 5)], [(5, 6), (260, 5)]])
def test_merges_that_make_no_sense_are_named(merges):
    with pytest.raises(ValueError, match=r"merges must be different pairs .* got \("):
        BytePairEncoding(merges)


def test_one_text_in_place_of_several_and_negative_numbers_are_named():
    with pytest.raises(ValueError, match="texts must be several, got 'an owl'"):
        BytePairEncoding.train("an owl", 5)
    for wrong in (-1, 1.5, math.nan, True, None):
        with pytest.raises(ValueError, match=f"n_merges must be an int of at least 0, got {wrong}"):
            BytePairEncoding.train(["an owl"], wrong)


def test_merges_may_be_tensors_and_may_not_be_fractions():
    merges = [(5, 6), (259, 7)]
    assert BytePairEncoding(torch.tensor(merges)).merges == BytePairEncoding(merges).merges
    with pytest.raises(TypeError, match="float"):
        BytePairEncoding([(5.0, 6.0)])


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(ValueError, match="surrogates"):
        BPE.encode("\ud800")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_embedding_is_a_row_times_the_root_of_d_model(dtype):
    torch.manual_seed(0)
    layer, tokens = TokenEmbedding(11, 6), torch.tensor([[3, 0, 3], [10, 1, 2]], dtype=dtype)
    expected = F.one_hot(tokens.long(), 11).float() @ layer.weight * math.sqrt(6)
    assert layer(tokens).shape == (2, 3, 6) and torch.allclose(layer(tokens), expected, atol=1e-6)


@pytest.mark.parametrize("d_model", [16, 128, 512])
def test_what_comes_out_starts_with_variance_1_next_to_sines_of_a_half(d_model):
    torch.manual_seed(0)
    layer = TokenEmbedding(2000, d_model)
    assert layer(torch.arange(2000).unsqueeze(0)).var().item() == pytest.approx(1, abs=0.05)
    assert positional_encoding(100, d_model).square().mean().item() == pytest.approx(0.5)


@pytest.mark.parametrize("d_model", [16, 128, 512])
def test_as_output_layer_it_starts_near_log_V_and_the_default_start_does_not(d_model):
    torch.manual_seed(0)
    h, target = torch.randn(1000, d_model), torch.randint(500, (1000,))
    losses = [F.cross_entropy(h @ layer.weight.T, target).item()
              for layer in (TokenEmbedding(500, d_model), nn.Embedding(500, d_model))]
    assert losses[0] == pytest.approx(math.log(500) + 0.5, abs=0.2)
    assert losses[1] > 1.5 * math.log(500)


def test_only_rows_of_ids_that_occurred_get_a_gradient():
    layer = TokenEmbedding(6, 4)
    layer(torch.tensor([[2, 5, 2]])).sum().backward()
    assert layer.weight.grad.tolist() == [[0.0] * 4, [0.0] * 4, [4.0] * 4, [0.0] * 4, [0.0] * 4, [2.0] * 4]


@pytest.mark.parametrize("tokens, message", [
    (torch.tensor([[5, 11]]), "tokens must be ids from 0 to 10, got 5 to 11"), (torch.tensor([[-1, 5]]), "got -1 to 5"),
    (torch.tensor([[1.0]]), r"of int64 or int32, got \(1, 1\) of torch.float32"), (torch.tensor([[True]]), "of torch.bool"),
    (torch.tensor([[1]], dtype=torch.int16), "of torch.int16"),
    (torch.tensor([1, 2]), r"must be \(B, T\), .* got \(2,\)"), (torch.zeros(1, 2, 3).long(), r"got \(1, 2, 3\)"),
    (torch.zeros(2, 0).long(), r"T at least 1, .*got \(2, 0\)")])
def test_wrong_tokens_are_named(tokens, message):
    with pytest.raises(ValueError, match=message):
        TokenEmbedding(11, 4)(tokens)
    with pytest.raises(ValueError, match="^src must be "):
        TokenEmbedding(11, 4, name="src")(tokens)


@pytest.mark.parametrize("sizes, message", [((0, 4), "vocab_size must be an int above 0, got 0"),
                                            ((4, -2), "d_model must be an int above 0, got -2")])
def test_wrong_sizes_of_an_embedding_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        TokenEmbedding(*sizes)


def test_a_shared_matrix_is_one_storage_and_counts_once_and_a_copy_does_not():
    def parts(share):
        source, target, output = TokenEmbedding(20, 8), TokenEmbedding(20, 8), nn.Linear(8, 20, bias=False)
        for layer in (source, output):
            if share:
                layer.weight = target.weight
            else:
                layer.weight.data.copy_(target.weight.data)
        model = nn.ModuleList([source, target, output])
        return model, len({layer.weight.data_ptr() for layer in model}), sum(p.numel() for p in model.parameters())

    tokens, target = torch.randint(20, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    for share, storages, count in ((True, 1, 160), (False, 3, 480)):
        model, found_storages, found_count = parts(share)
        assert (found_storages, found_count) == (storages, count)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        logits = model[2](model[0](tokens) + model[1](tokens))
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        optimizer.step()
        assert torch.equal(model[1].weight, model[2].weight) == share
        assert len(model.state_dict()) == 3
        fresh = parts(share)[0]
        fresh.load_state_dict(model.state_dict())  # loading keeps what is shared shared
        assert len({layer.weight.data_ptr() for layer in fresh}) == storages
