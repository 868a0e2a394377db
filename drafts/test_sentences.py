"""Chapter 14's data, translate and average_weights: checked files, one clear line for each fault, order kept, a mean of weights."""

import gzip
import hashlib

import pytest
import torch

from book import transformer
from book.transformer import (BytePairEncoding, Transformer, TransformerConfig, average_weights, beam_search, fetch_multi30k,
                              multi30k, translate)

CAPTIONS = "Ein Hund.\nZwei\u2028Katzen.\n"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A folder to download from, with one file whose sum is the one expected; returns its address."""
    data = gzip.compress(CAPTIONS.encode())
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "val.de.gz").write_bytes(data)
    monkeypatch.setattr(transformer, "MULTI30K_SUMS", ["val.de", hashlib.sha256(data).hexdigest(), "val.en", "0" * 64])
    return f"{(tmp_path / 'net').as_uri()}/"


def test_a_file_is_downloaded_once_and_then_read_from_the_folder(served, tmp_path):
    path = fetch_multi30k("val.de", tmp_path / "data", served)
    assert fetch_multi30k("val.de", tmp_path / "data", "file:///nowhere/") == path
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["val.de.gz"]
    assert multi30k("val", "de", tmp_path / "data") == ["Ein Hund.", "Zwei\u2028Katzen."]


def test_the_variable_names_the_folder(served, tmp_path, monkeypatch):
    fetch_multi30k("val.de", tmp_path / "data", served)
    monkeypatch.setenv("ATTENTION_DATA", str(tmp_path / "data"))
    assert len(multi30k("val", "de")) == 2


def test_a_download_that_fails_says_what_to_do_in_one_line(tmp_path):
    with pytest.raises(OSError, match="cannot get val.de.gz .* or set ATTENTION_DATA to a folder that has it$"):
        fetch_multi30k("val.de", tmp_path, "file:///nowhere/")


def test_a_wrong_file_is_refused_on_the_way_and_in_the_folder(served, tmp_path):
    (tmp_path / "net" / "val.en.gz").write_bytes(b"other")
    with pytest.raises(OSError, match="val.en.gz is not the file we know .* try again later"):
        fetch_multi30k("val.en", tmp_path / "data", served)
    assert not (tmp_path / "data" / "val.en.gz").exists()
    (tmp_path / "val.de.gz").write_bytes(b"cut short")
    with pytest.raises(OSError, match="delete val.de.gz and run again"):
        fetch_multi30k("val.de", tmp_path, served)


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="name must be one of .* got 'val.fr'"):
        fetch_multi30k("val.fr", tmp_path)


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
