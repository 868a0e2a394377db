"""The chapters: what they store, what they say, and that each runs alone and gives what it stores."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from conftest import MEASURED, code, markdown

from tools.address import update
from tools.check import RULES, code_cells, problems, written
from tools.execute import DATA, environment, execute
from tools.notebooks import ROOT, chapters, read, tags

CHAPTERS = chapters()


def run_alone(path: Path, folder: Path) -> subprocess.CompletedProcess:
    """Run a copy of the chapter in an empty folder and compare every stored output."""
    folder.mkdir()
    shutil.copy(path, folder)
    return subprocess.run([sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=300",
                           "-p", "no:cacheprovider", "-q", "--color=no", "--rootdir", folder, path.name], cwd=folder,
                          env=os.environ | environment() | {"PYTHONPATH": ""}, capture_output=True, text=True)


@pytest.mark.chapters
@pytest.mark.parametrize("path", CHAPTERS, ids=[path.stem for path in CHAPTERS])
def test_a_chapter_alone_in_an_empty_folder_gives_the_outputs_it_stores(path, tmp_path):
    notebook = read(path)
    if not environment()[DATA] and any(DATA in cell.source for cell in notebook.cells):
        pytest.skip(f"{path.stem} needs data: run make data, or set {DATA}")
    ignored = sum("nbval-ignore-output" in tags(cell) for _, cell in written(notebook))
    begin = time.perf_counter()
    done = run_alone(path, tmp_path / "alone")
    seconds = time.perf_counter() - begin
    MEASURED.append(f"{path.stem}: {seconds:.0f} s; {ignored} of {len(written(notebook))} cells "
                    f"({ignored / len(written(notebook)):.0%}) not compared")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"{len(code_cells(notebook))} passed" in done.stdout
    assert [entry.name for entry in (tmp_path / "alone").iterdir() if entry.name != "__pycache__"] == [path.name]


@pytest.mark.parametrize("path", CHAPTERS, ids=[path.stem for path in CHAPTERS])
def test_a_chapter_has_none_of_the_faults_that_check_knows(path):
    assert not (found := problems(path)), "\n".join(found)


def test_addresses_in_chapters_and_texts_are_those_of_the_configuration():
    assert not (old := update(check=True)), f"old addresses in {old}; run make weave"


def test_all_chapters_stand_in_the_table_of_contents_in_order():
    listed = [line.split("book/")[1].strip() for line in (ROOT / "_toc.yml").read_text().splitlines() if "book/0" in line
              or "book/1" in line]
    assert listed == [path.stem for path in CHAPTERS]


# That these checks can fail: each meets an example it must refuse.

ALONE = {"a changed output": ("print(1)", lambda cell: cell.outputs[0].update(text="2\n"), "mismatch"),
         "a missing output": ("print(1)", lambda cell: cell.outputs.clear(), "Unexpected output"),
         "another figure": ("display({'text/plain': 'Figure: a'}, raw=True)",
                            lambda cell: cell.outputs[0].data.update({"text/plain": "Figure: b"}), "mismatch"),
         "the book's own files": ("import os\nprint(1)", lambda cell: cell.update(
             source="import os\nos.stat('transformer.py')\nprint(1)"), "FileNotFoundError"),
         "a warning": ("print(1)", lambda cell: cell.update(
             source="import warnings\nwarnings.warn('old')\nprint(1)"), "Unexpected output fields")}


@pytest.mark.parametrize("source, change, message", ALONE.values(), ids=ALONE)
def test_running_alone_catches(book, tmp_path, source, change, message):
    path = book(**{"01_one": [code(source)]}) / "01_one.ipynb"
    execute(path)
    assert run_alone(path, tmp_path / "right").returncode == 0
    notebook = read(path)
    change(notebook.cells[0])
    nbformat.write(notebook, path)
    done = run_alone(path, tmp_path / "wrong")
    assert done.returncode == 1 and message in done.stdout


OPENING = "# 1. One\n\n<p class=\"admonition-title\">What it takes</p>\n\n" + "word " * 1600
CLOSING = "## What you built\n\n## Check yourself\n\n## Where to read on"
PNG = nbformat.v4.new_output("display_data", data={"image/png": "iVBORw0KGgo="})
VIEW = nbformat.v4.new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {"model_id": "x"}})
STDERR = nbformat.v4.new_output("stream", name="stderr", text="UserWarning: old")
FAILED = nbformat.v4.new_output("error", ename="KeyError", evalue="x", traceback=[])


def says(text):
    return nbformat.v4.new_output("stream", name="stdout", text=text)


FAULTS = {
    "never run": ([code("1")], "cell 2 was never executed"),
    "run out of order": ([code("1", execution_count=7)], "cell 2 was executed out of order (7, expected 1)"),
    "error stored": ([code("1", execution_count=1, outputs=[FAILED])], "cell 2 stores an error: KeyError"),
    "warning stored": ([code("1", execution_count=1, outputs=[STDERR])], "cell 2 stores a warning"),
    "too many ignored": ([code("assert 1", "nbval-ignore-output", execution_count=1)], "1 of 1 code cells ignore"),
    "ignored, nothing asserted": ([code("1", "nbval-ignore-output", execution_count=1)], "asserts nothing"),
    "ignored, code changed since": ([code("assert 1", "nbval-ignore-output", execution_count=1)], "from other code"),
    "path": ([code("1", execution_count=1, outputs=[says("in /home/me/x.py")])], "prints a path: /home/me/x.py"),
    "address": ([code("1", execution_count=1, outputs=[says("<A at 0x7f12345678>")])], "prints a memory address"),
    "date": ([code("1", execution_count=1, outputs=[says("2026-01-31")])], "prints a date: 2026-01-31"),
    "no alt text": ([code("1", execution_count=1, outputs=[PNG])], "needs an alt text that says what it shows, got ''"),
    "two pictures": ([code("1", execution_count=1, outputs=[PNG, PNG])], "stores 2 pictures"),
    "widget without state": ([code("1", execution_count=1, outputs=[VIEW])], "the widget's state is not in the file"),
    "widget without picture": ([code("1", execution_count=1, outputs=[VIEW])], "no picture to stand in"),
    "image": ([markdown("![x](y.png)")], "an image: '![x]('"),
    "directive": ([markdown("```{note}\nx\n```")], "a MyST directive"),
    "colon fence": ([markdown(":::note\nx\n:::")], "a colon fence"),
    "role": ([markdown("see {ref}`x`")], "a MyST role"),
    "target": ([markdown("(here)=\n## Here")], "a MyST comment or target"),
    "bracket": ([markdown(r"\[x\]")], "a LaTeX bracket"),
    "blank in code": ([markdown("the piece ` owl`")], "a blank at an end of inline code"),
    "HTML": ([markdown("a <span>b</span>")], "an HTML tag other than"),
    "open details": ([markdown("<details><summary>a</summary>")], "does not close each <details>"),
    "second title": ([markdown("# 2. Two")], "the first cell must hold the chapter's one title"),
    "skipped heading": ([markdown("#### deep")], "the heading 'deep' skips a level"),
    "too long": ([markdown("word " * 2000)], "words; a chapter has 1500 to 3000"),
    "wide code": ([code("x = 1  # " + "x" * 80, execution_count=1)], "has a line of 89 characters"),
    "no docstring": ([code("def f(): pass", "export", execution_count=1)], "exported f has no docstring"),
    "no type hints": ([code('def f(x):\n    """F."""', "export", execution_count=1)], "without type hints"),
    "assert": ([code('def f():\n    """F."""\n    assert 1', "export", execution_count=1)], "checks with assert"),
}


@pytest.mark.parametrize("cells, message", FAULTS.values(), ids=FAULTS)
def test_check_catches(book, cells, message):
    folder = book(**{"01_one": [markdown(OPENING), *cells, markdown(CLOSING)]})
    assert any(message in problem for problem in problems(folder / "01_one.ipynb"))


def test_check_catches_code_that_changed_since_its_outputs_were_stored(book):
    path = book(**{"01_one": [markdown(OPENING), code("print(1)"), markdown(CLOSING)]}) / "01_one.ipynb"
    execute(path)
    assert problems(path) == []
    notebook = read(path)
    notebook.cells[1].source = "print(2)"
    nbformat.write(notebook, path)
    assert problems(path) == ["the code has changed since its outputs were stored: run make execute"]


def test_check_catches_a_chapter_without_its_sections_or_its_requirements(book):
    folder = book(**{"01_one": [markdown("# 1. One\n\n" + "word " * 1600)]})
    found = problems(folder / "01_one.ipynb")
    assert len(found) == 2 and "must end with" in found[0] and "what the chapter takes" in found[1]


def test_check_lets_pass_what_is_right(book):
    fine = [markdown("Maths $a < b$, code `{ref}` and `<b>`, [a link](https://x.org).\n\n```python\n![x](y)\n```\n\n"
                     "<details><summary>Why?</summary>\n\nBecause.\n\n</details>"),
            code('def f(x: int) -> int:\n    """F."""\n    return x', "export", execution_count=1),
            code("print('a/b 0x12')", execution_count=2, outputs=[says("a/b 0x12")])]
    folder = book(**{"01_one": [markdown(OPENING), *fine, markdown(CLOSING)]})
    assert problems(folder / "01_one.ipynb") == []
