"""Chapter 14's data, translate and average_weights: checked files, one clear line for each fault, order kept, a mean of weights."""

import gzip
import hashlib
from http.client import IncompleteRead

import pytest
import torch

from book import transformer
from book.transformer import (BytePairEncoding, Transformer, TransformerConfig, average_weights, beam_search, fetch, multi30k,
                              translate)

CAPTIONS = "Ein Hund.\nZwei\u2028Katzen.\n"


@pytest.fixture
def served(tmp_path):
    """A file to download: its address and sum."""
    data = gzip.compress(CAPTIONS.encode())
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "val.de.gz").write_bytes(data)
    return (tmp_path / "net" / "val.de.gz").as_uri(), hashlib.sha256(data).hexdigest()


def test_a_file_is_downloaded_once_and_then_read_from_the_folder(served, tmp_path):
    address, digest = served
    path = fetch(address, tmp_path / "data" / "val.de.gz", digest)
    assert fetch("file:///nowhere", str(path), digest) == path
    assert gzip.decompress(path.read_bytes()).decode() == CAPTIONS
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["val.de.gz"]


@pytest.mark.parametrize("address", ["file:///nowhere", "no address", ""])
def test_a_download_that_fails_says_what_to_do_in_one_line(address, tmp_path):
    with pytest.raises(OSError, match="^cannot get val.de.gz .* or put it into the folder .*$"):
        fetch(address, tmp_path / "new" / "val.de.gz", "0" * 64)
    assert not (tmp_path / "new").exists()


def test_a_download_that_ends_early_says_so(tmp_path, monkeypatch):
    class Cut:
        def read(self):
            raise IncompleteRead(b"half", 100)
    monkeypatch.setattr(transformer, "urlopen", lambda address, timeout: Cut())
    with pytest.raises(OSError, match="cannot get val.de.gz .*IncompleteRead"):
        fetch("https://example.org/val.de.gz", tmp_path / "val.de.gz", "0" * 64)
    assert not list(tmp_path.iterdir())


def test_a_wrong_file_is_refused_on_the_way_and_in_the_folder(served, tmp_path):
    with pytest.raises(OSError, match="val.de.gz is not the file we know .* try again later"):
        fetch(served[0], tmp_path / "data" / "val.de.gz", "0" * 64)
    assert not (tmp_path / "data").exists()
    (tmp_path / "val.de.gz").write_bytes(b"cut short")
    with pytest.raises(OSError, match="delete it and run again"):
        fetch(*served[:1], tmp_path / "val.de.gz", served[1])
    assert (tmp_path / "val.de.gz").read_bytes() == b"cut short"


def test_sentences_are_one_a_line_whatever_else_ends_a_line(served, tmp_path, monkeypatch):
    monkeypatch.setattr(transformer, "MULTI30K_SUMS", ["val.de", served[1]])
    monkeypatch.setattr(transformer, "MULTI30K", served[0].removesuffix("val.de.gz"))
    monkeypatch.setenv("ATTENTION_DATA", str(tmp_path / "data"))
    assert multi30k("val", "de") == ["Ein Hund.", "Zwei\u2028Katzen."]
    assert multi30k("val", "de", tmp_path / "net") == multi30k("val", "de")


def test_an_unknown_part_or_language_is_refused(tmp_path):
    with pytest.raises(ValueError, match="part and language must be one of .* got 'val.fr'"):
        multi30k("val", "fr", tmp_path)


def model_and_pieces():
    pieces = BytePairEncoding.train(["A dog.", "Two cats."], 4)
    torch.manual_seed(0)
    size = len(pieces.pieces)
    return Transformer(TransformerConfig(size, size, d_model=8, n_heads=2, n_layers=1, d_ff=8, dropout=0.5)), pieces


def test_translations_keep_their_order_whatever_the_batches():
    model, pieces = model_and_pieces()
    asked = ["A dog.", "", "Two cats sleep.", "A"]
    alone = [translate(model, pieces, [sentence])[0] for sentence in asked]
    assert translate(model, pieces, asked, size=2) == translate(model, pieces, asked) == alone
    assert translate(model, pieces, []) == []


def test_translate_takes_another_decoder():
    model, pieces = model_and_pieces()
    assert translate(model, pieces, ["A dog."], lambda model, src: beam_search(model, src, beam=1)[0]) == \
        translate(model, pieces, ["A dog."])


@pytest.mark.parametrize("arguments, message", [(("A dog.",), "sentences must be several"), ((["A"], None, 0), "size")])
def test_translate_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        translate(*model_and_pieces(), *arguments)


def test_the_average_is_that_of_each_weight_in_float32():
    mean = average_weights([{"a": torch.tensor([1.0, 3.0]).half()}, {"a": torch.tensor([2.0, 5.0]).half()}])
    assert mean["a"].dtype == torch.float32 and mean["a"].tolist() == [1.5, 4.0]


@pytest.mark.parametrize("states", [[], [{"a": torch.ones(1)}, {"b": torch.ones(1)}]])
def test_the_average_of_what_does_not_fit_is_refused(states):
    with pytest.raises(ValueError, match="states must be several with the same names"):
        average_weights(states)
