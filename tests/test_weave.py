"""tools.weave: which code a later chapter gets, and which mistakes it names."""

import json
import subprocess
import sys

import pytest
from conftest import code, markdown

from tools.notebooks import ROOT, ToolError, read, tags
from tools.weave import weave

FIRST = [markdown("# 1. One"), code("import math\nimport torch\nfrom torch import Tensor, nn"),
         code("SCALE = 2.0\n\n\n# why it is there\ndef half(x: Tensor) -> Tensor:\n    return x / SCALE", "export"),
         code("class Layer(nn.Module):\n    def forward(self, x):\n        return half(x) + math.pi", "export"),
         code("def unused():\n    return torch.ones(1)", "export")]
FIGURES = '"""Figures."""\nimport itertools\n\nBLUE = "#00f"\n\ndef draw():\n    return _hidden()\n\ndef _hidden():\n    return BLUE\n'


def recap(path) -> str:
    return "".join(cell.source for cell in read(path).cells if "recap" in tags(cell))


def test_a_recap_holds_what_is_used_and_what_that_uses_and_nothing_else(book):
    folder = book(**{"01_one": FIRST, "02_two": [markdown("# 2. Two"), code("Layer()")]})
    weave(folder)
    text = recap(folder / "02_two.ipynb")
    assert "# From chapter 01, One" in text and "# why it is there" in text
    assert text.index("SCALE = 2.0") < text.index("def half") < text.index("class Layer")
    assert "import math\n\nfrom torch import Tensor, nn" in text
    assert "unused" not in text and "import torch\n" not in text
    assert recap(folder / "01_one.ipynb") == ""


def test_the_recap_stands_before_the_first_code_and_runs_alone(book):
    folder = book(**{"01_one": FIRST, "02_two": [markdown("# 2. Two"), code("%pip install x"), code("Layer()")]})
    weave(folder)
    cells = read(folder / "02_two.ipynb").cells
    assert [tags(cell) for cell in cells] == [[], [], ["recap", "hide-input"], []]
    assert cells[2].source.startswith("#@title ")
    exec(cells[2].source, {})


def test_weaving_twice_changes_nothing_and_check_tells(book):
    folder = book(**{"01_one": FIRST, "02_two": [markdown("# 2. Two"), code("half(2)")]})
    assert weave(folder, check=True) == ["02_two.ipynb", "transformer.py"]
    assert not (folder / "transformer.py").exists()
    assert weave(folder) == ["02_two.ipynb", "transformer.py"]
    assert weave(folder) == [] == weave(folder, check=True)


def test_a_recap_no_longer_needed_goes_and_a_changed_one_must_run_again(book):
    folder = book(**{"01_one": FIRST, "02_two": [markdown("# 2. Two"), code("half(2)")]})
    weave(folder)
    book(**{"01_one": [*FIRST[:2], code("def half(x):\n    return x / 3", "export")]})
    assert "02_two.ipynb" in weave(folder)
    cell = next(cell for cell in read(folder / "02_two.ipynb").cells if "recap" in tags(cell))
    assert "x / 3" in cell.source and cell.execution_count is None
    book(**{"02_two": [markdown("# 2. Two"), cell, code("print(1)")]})
    weave(folder)
    assert recap(folder / "02_two.ipynb") == ""


def test_transformer_py_holds_all_exports_and_can_be_imported(book):
    folder = book(**{"01_one": FIRST, "02_two": [
        markdown("# 2. Two"), code("from collections.abc import Iterator"),
        code("def twice(x) -> Iterator:\n    yield from (half(x), half(x))", "export")]})
    weave(folder)
    text = (folder / "transformer.py").read_text()
    assert text.index("# From chapter 01, One") < text.index("def unused") < text.index("# From chapter 02, Two")
    assert text.index("from collections.abc import Iterator") < text.index("import torch")
    space = {}
    exec(text, space)
    assert list(space["twice"](4)) == [2.0, 2.0]


def test_a_chapter_that_draws_gets_the_figures_whole(book):
    folder = book(**{"01_one": [markdown("# 1. One"), code("print(BLUE)")], "02_two": [markdown("# 2"), code("print(1)")]})
    (folder / "figures.py").write_text(FIGURES)
    weave(folder)
    cells = read(folder / "01_one.ipynb").cells
    assert tags(cells[1])[0] == "figures" and FIGURES.strip() in cells[1].source
    assert len(read(folder / "02_two.ipynb").cells) == 2
    (folder / "figures.py").write_text(FIGURES.replace("#00f", "#00e"))
    assert weave(folder, check=True) == ["01_one.ipynb"]


@pytest.mark.parametrize("uses", [
    "def f():\n    return half(1)\n\nf()", "[half(x) for x in range(3)]", "print(f'{half(2):.2f}')",
    "class A:\n    x = half(3)\n    def g(self, y=half(1)): return y", "def f(x: half): return x",
    "@half\ndef f(): pass", "(lambda: half(2))()", "def outer():\n    def inner():\n        return half\n    return inner",
    "if True:\n    print(half(1))", "try:\n    half(1)\nexcept Exception as error:\n    print(error)"])
def test_a_use_is_seen_wherever_it_stands(book, uses):
    folder = book(**{"01_one": FIRST, "02_two": [markdown("# 2. Two"), code(uses)]})
    weave(folder)
    assert "def half" in recap(folder / "02_two.ipynb")


@pytest.mark.parametrize("uses", [
    "half = 3\nprint(half)", "def f(half):\n    return half\n\nf(1)", "[half for half in range(3)]",
    "import math as half\nhalf.pi", "x = 'half'  # half", "class A:\n    def half(self): return 1\n\nA().half()"])
def test_a_name_of_the_chapters_own_is_not_taken_for_an_export(book, uses):
    folder = book(**{"01_one": FIRST, "02_two": [markdown("# 2. Two"), code(uses)]})
    weave(folder)
    assert recap(folder / "02_two.ipynb") == ""


BROKEN = {
    "exported twice": ([code("def half(x):\n    return x", "export")], "'half' is exported twice, first by 01_one.ipynb"),
    "used before it is defined": ([code("print(later)"), code("later = 1")], "'later' is used before it is defined"),
    "its own value": ([code("later = later + 1")], "'later' is used before it is defined"),
    "grown from nothing": ([code("later += 1")], "'later' is used before it is defined"),
    "defined nowhere": ([code("def f():\n    return nowhere")], "'nowhere' is defined nowhere"),
    "an import of another chapter": ([code("nn.Linear(1, 1)")], "'nn' is defined nowhere"),
    "export uses what is not exported": ([code("secret = 1"), code("def f():\n    return secret", "export")],
                                         "'secret' is used by exported code but not exported"),
    "export uses a later export": ([code("def f():\n    return g()", "export"), code("def g():\n    return 1", "export")],
                                   "'g' is used before it is defined"),
    "export prints": ([code("print('hello')", "export")], "an exported cell may hold definitions only"),
    "export needs more than torch": ([code("import numpy as np"), code("def f():\n    return np.ones(1)", "export")],
                                     "exported code may import torch and the standard library only"),
    "two meanings of a name": ([code("from math import pi as Tensor"), code("def f(x: Tensor): return x", "export")],
                               "'Tensor' is 'from math import pi as Tensor' here but 'from torch import Tensor' in 01_one"),
    "syntax error in an exported cell": ([code("def f(:\n    pass", "export")], "syntax error in line 1"),
    "an import made something else": ([code("import random"), code("random = 3"),
                                       code("def f():\n    return random", "export")], "'random' is used by exported code but not"),
    "an earlier import exported": ([code("nn = 3", "export")], "'nn' is exported, but earlier exported code has 'from torch import nn'"),
    "an import of an earlier export": ([code("from math import pi as half"), code("def f():\n    return half(1)", "export")],
                                       "but exported by 01_one.ipynb"),
    "export changes what it defined": ([code("D = {}", "export"), code("D['a'] = 1", "export")], "may hold definitions only"),
    "export of a promise": ([code("K: int", "export")], "may hold definitions only"),
    "two statements in a line": ([code("A = 1; B = 2", "export")], "may hold one statement a line"),
    "export imports inside": ([code("def f():\n    import numpy\n    return numpy", "export")], "'f' imports inside"),
    "export needs a dotted import": ([code("import torch.nn.functional"), code("def f():\n    return torch.nn", "export")],
                                     "needs a name of its own in exported code"),
    "an export redefined": ([code("def g():\n    return 1", "export"), code("g = 2")], "'g' is exported above"),
    "a recap's name redefined": ([code("SCALE = 5\nprint(half(1))")], "'SCALE' means something else in the recap"),
    "a recap's import redefined": ([code("import cmath as math\nprint(Layer())")], "'math' means something else in the recap"),
    "what only the second look at syntax finds": ([code("def f():\n    nonlocal x\n    x = 1")], "syntax error"),
    "full run not ignored": ([code("x = 1", "full-run")], "needs the tag nbval-ignore-output too"),
    "full run's result used": ([code("x = 1", "full-run", "nbval-ignore-output"), code("y = x + 1")],
                               "'x' comes from the full-run cell 2; tag this cell full-run"),
}


@pytest.mark.parametrize("cells, message", BROKEN.values(), ids=BROKEN)
def test_a_mistake_is_named_with_chapter_and_cell_and_nothing_is_written(book, cells, message):
    folder = book(**{"01_one": FIRST, "02_two": [markdown("# 2. Two"), *cells]})
    with pytest.raises(ToolError, match=r"02_two\.ipynb, cell \d: ") as raised:
        weave(folder)
    assert message in str(raised.value)
    assert not (folder / "transformer.py").exists()


@pytest.mark.parametrize("source", [
    "rows = 3\nwidth = (rows * 3\n         % 4)", 'text = """Dear\n!reader\n%s"""', "names = !ls\nlen?", "%%bash\necho hello",
    "%timeit half(1)", "async def f():\n    pass", "half(2); half(3)"])
def test_what_ipython_understands_is_understood(book, source):
    weave(book(**{"01_one": FIRST, "02_two": [markdown("# 2. Two"), code(source)]}))


def test_strange_ends_of_lines_within_a_text_stay_in_it(book):
    folder = book(**{"01_one": [markdown("# 1"), code('TEXT = "a\x0cb\u2028c"\n\ndef f():\n    return TEXT', "export")],
                     "02_two": [markdown("# 2"), code("f()")]})
    weave(folder)
    space = {}
    exec(recap(folder / "02_two.ipynb"), space)
    assert space["f"]() == "a\x0cb\u2028c"


def test_an_export_named_like_a_builtin_is_the_export(book):
    folder = book(**{"01_one": [markdown("# 1"), code("def sum(x):\n    return 42", "export")],
                     "02_two": [markdown("# 2"), code("sum([1])")]})
    weave(folder)
    assert "return 42" in recap(folder / "02_two.ipynb")


def test_a_notebook_of_an_older_format_stays_one_and_of_two_recaps_one_goes(book):
    folder = book(**{"01_one": FIRST, "02_two": [markdown("# 2"), code("half(1)")]})
    weave(folder)
    notebook = read(folder / "02_two.ipynb")
    notebook.cells.insert(3, notebook.cells[1].copy())
    for cell in notebook.cells:
        del cell["id"]
    notebook.nbformat_minor = 0
    (folder / "02_two.ipynb").write_text(json.dumps(notebook))
    assert weave(folder) == ["02_two.ipynb"]
    assert [tags(cell)[:1] for cell in read(folder / "02_two.ipynb").cells] == [[], ["recap"], []]
    assert weave(folder) == []


def test_a_full_runs_result_may_be_used_by_full_runs_or_after_it_is_made_anew(book):
    both = "full-run", "nbval-ignore-output"
    folder = book(**{"01_one": [markdown("# 1"), code("x = 1", *both), code("print(x)", *both), code("x = 2"),
                                code("print(x)")]})
    weave(folder)


def test_a_file_that_is_not_a_notebook_is_named(book):
    folder = book(**{"01_one": FIRST})
    (folder / "02_two.ipynb").write_text("{")
    with pytest.raises(ToolError, match="02_two.ipynb: not a notebook"):
        weave(folder)


def test_two_chapters_of_one_number_are_refused(book):
    with pytest.raises(ToolError, match="two chapters have the number 01"):
        weave(book(**{"01_one": FIRST, "01_two": FIRST}))


def test_the_command_prints_one_line_for_a_mistake_and_fails(book):
    folder = book(**{"01_one": [markdown("# 1"), code("nowhere")]})
    done = subprocess.run([sys.executable, "-m", "tools.weave", "--book", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "weave: 01_one.ipynb, cell 2: 'nowhere' is defined nowhere\n"


def test_the_books_own_chapters_are_woven():
    assert not (stale := weave(check=True)), f"{stale} are stale; run make weave"
