"""The smaller tools: addresses, fetched packages, the environment, and that each command has a --help."""

import hashlib
import base64
import io
import os
import shutil
import subprocess
import sys
import tarfile

import nbformat
import pytest
from conftest import code, markdown

from tools import address, vendor
from tools.notebooks import ROOT, ToolError, chapters

OLD = """git clone https://github.com/OWNER/attention-cell-by-cell.git x
[site](https://OWNER.github.io/attention-cell-by-cell/index.html)
[two](https://OWNER.github.io/attention-cell-by-cell/book/02_attention.html#why)
[run](https://colab.research.google.com/github/OWNER/attention-cell-by-cell/blob/main/book/02_attention.ipynb)
fetch("https://raw.githubusercontent.com/OWNER/attention-cell-by-cell/main/book/x.pt")
fetch("https://raw.githubusercontent.com/multi30k/dataset/master/data/")
[paper](https://arxiv.org/abs/1706.03762) [other](https://example.org/book/02.html)
"""


def test_addresses_are_rewritten_wherever_they_stand_and_nothing_else_is():
    new = address.rewrite(OLD, "https://github.com/me/mine", "https://me.example/mine")
    assert new == OLD.replace("https://github.com/OWNER/attention-cell-by-cell", "https://github.com/me/mine").replace(
        "https://OWNER.github.io/attention-cell-by-cell", "https://me.example/mine").replace(
        "/OWNER/attention-cell-by-cell", "/me/mine")
    assert address.rewrite(new, "https://github.com/me/mine", "https://me.example/mine") == new


def test_update_writes_notebooks_and_texts_and_check_only_tells(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "_config.yml").write_text("repository: {url: https://github.com/me/mine}\n"
                                          "sphinx: {config: {html_baseurl: https://me.example/mine/}}\n")
    (tmp_path / "README.md").write_text(OLD)
    (tmp_path / "CITATION.cff").write_text("repository-code: https://old\nurl: https://old\n")
    nbformat.write(nbformat.v4.new_notebook(cells=[markdown(OLD), code(OLD)]), tmp_path / "book" / "01_one.ipynb")
    names = ["01_one.ipynb", "README.md", "CITATION.cff"]
    assert address.update(tmp_path, check=True) == names == address.update(tmp_path)
    assert address.update(tmp_path) == []
    assert "OWNER" not in (tmp_path / "book" / "01_one.ipynb").read_text() + (tmp_path / "README.md").read_text()
    assert (tmp_path / "CITATION.cff").read_text() == "repository-code: https://github.com/me/mine\nurl: https://me.example/mine/\n"


@pytest.mark.parametrize("config", ["", "repository: {}", "sphinx: [", "repository: {url: x}"])
def test_a_configuration_without_addresses_is_told_what_it_lacks(tmp_path, config):
    (tmp_path / "_config.yml").write_text(config)
    with pytest.raises(ToolError, match="_config.yml must have repository: url and sphinx: config: html_baseurl"):
        address.addresses(tmp_path)


def archive(path, **files):
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()


def test_a_package_is_unpacked_only_if_it_is_the_one_expected(tmp_path):
    checksum = archive(tmp_path / "a.tgz", **{"x.js": "1", "fonts/a": "2", "fonts/b": "3"})
    members = {"package/x.js": "site/x.js", "package/fonts/": "site/fonts/"}
    vendor.unpack(tmp_path / "a.tgz", "a@1", checksum, members, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").rglob("*") if p.is_file()) == ["a", "b", "x.js"]
    with pytest.raises(ToolError, match="a@1: the archive's sha512 is .* expected AAAA"):
        vendor.unpack(tmp_path / "a.tgz", "a@1", "AAAA", members, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(ToolError, match="a@1 holds no package/gone.js"):
        vendor.unpack(tmp_path / "a.tgz", "a@1", checksum, {"package/gone.js": "x"}, tmp_path / "out")


def test_without_node_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(vendor.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(vendor.subprocess, "run", lambda *_, **__: None)
    with pytest.raises(ToolError, match="npm not found.*install Node.js"):
        vendor.find_npm()


def set_up(tmp_path, **variables):
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    return subprocess.run(["sh", "tools/environment.sh", "requirements-book.txt"], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | variables)


def test_without_python_or_with_an_old_one_one_line_says_what_to_install(tmp_path):
    done = set_up(tmp_path / "a", PYTHON="no-such-python")
    assert done.returncode == 1 and done.stderr.startswith("Python not found: install Python 3.11") and done.stderr.count("\n") == 1
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\necho a shim that talks >&2\nexit 1\n')
    old.chmod(0o755)
    done = set_up(tmp_path / "b", PYTHON=str(old))
    assert done.returncode == 1 and done.stderr.startswith("Python 3.11 or newer is needed") and done.stderr.count("\n") == 1
    done = set_up(tmp_path / "c", PYTHON="true")
    assert done.returncode == 1 and done.stderr.startswith("true -m venv .venv failed") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", sorted(path.stem for path in (ROOT / "tools").glob("*.py")
                                        if "__main__" in path.read_text()))
def test_each_command_has_a_help(verb):
    done = subprocess.run([sys.executable, "-m", f"tools.{verb}", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout


def test_chapters_are_chosen_by_number_name_or_path(tmp_path):
    for name in ("01_one", "02_two"):
        (tmp_path / f"{name}.ipynb").touch()
    (tmp_path / "notes.ipynb").touch()
    names = [[path.stem for path in chapters(tmp_path, numbers)] for numbers in (
        None, ["2"], ["02"], ["02_two"], ["book/02_two.ipynb"], ["1", "02"])]
    assert names == [["01_one", "02_two"], *[["02_two"]] * 4, ["01_one", "02_two"]]
    with pytest.raises(ToolError, match="no chapter '3'.*there are 01_one, 02_two"):
        chapters(tmp_path, ["3"])
    with pytest.raises(ToolError, match="no chapters .* in .*/nowhere"):
        chapters(tmp_path / "nowhere")


def test_the_measurement_on_a_gpu_runs_in_small_on_a_cpu_and_without_a_gpu_says_so(monkeypatch):
    import torch

    from book import transformer
    from tools import gpu
    fused, asked = transformer.fused_attention, []
    monkeypatch.setattr(torch, "compile", lambda model: asked.append(1) or model)
    found = gpu.base(transformer.TransformerConfig(50, 50, 16, 2, 1, 32), torch.device("cpu"), 4, 8, 64, 1)
    assert [row["attention"] for row in found] == ["fused", "fused, compiled", "explicit"] and asked == [1]
    assert all(row["target tokens a second"] > 0 and 0 < row["share of peak"] < 1 for row in found)
    assert transformer.fused_attention is fused
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ToolError, match="no CUDA device"):
        gpu.run(None)


def test_the_measurement_of_sentences_says_where_data_are_missing(monkeypatch):
    from tools import gpu
    monkeypatch.setattr(gpu, "environment", lambda: {gpu.DATA: ""})
    assert gpu.sentences() == {"missing": "data: run make data, or set ATTENTION_DATA"}


def test_data_are_fetched_by_their_sums_and_a_fault_is_one_line(monkeypatch, tmp_path, capsys):
    from book import transformer
    from tools import data
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "val.de.gz").write_bytes(b"x")
    monkeypatch.setattr(transformer, "MULTI30K", (tmp_path / "net").as_uri() + "/")
    monkeypatch.setattr(transformer, "MULTI30K_SUMS", ["val.de", hashlib.sha256(b"x").hexdigest()])
    monkeypatch.setattr(data, "ROOT", tmp_path)
    data.run(None)
    assert (tmp_path / "data" / "multi30k" / "val.de.gz").read_bytes() == b"x"
    assert capsys.readouterr().out == "data/multi30k: complete\n"
    transformer.MULTI30K_SUMS += ["val.en", "0" * 64]
    with pytest.raises(ToolError, match="cannot get val.en.gz"):
        data.run(None)


def test_chapter_13_has_the_one_cell_that_the_measurement_looks_for():
    from tools.gpu import TRAINING
    chapter, = chapters(ROOT / "book", ["13"])
    assert sum(TRAINING in cell.source for cell in nbformat.read(chapter, 4).cells if cell.cell_type == "code") == 1
