"""tools.execute: outputs that repeat, cells whose outputs are kept, and errors that leave the file alone."""

import subprocess
import sys

import nbformat
import pytest
from conftest import code, markdown

from tools import execute as module
from tools.execute import execute, name_widgets
from tools.notebooks import ROOT, WIDGET_VIEW, ToolError, read

IGNORE, FULL = "nbval-ignore-output", ("full-run", "nbval-ignore-output")
CLOCK = "import time\nprint(time.time_ns())\nassert True"
SIZE = "import os, time\nprint('full' if os.environ['ATTENTION_FULL_RUN'] else 'quick', time.time_ns())"
WIDGET = """import ipywidgets
from IPython.display import display
slider = ipywidgets.IntSlider(max=1)
stack = ipywidgets.Stack([ipywidgets.HTML('<img alt="first &amp; best">'), ipywidgets.HTML('<img alt="second">')])
ipywidgets.jslink((slider, "value"), (stack, "selected_index"))
lost = ipywidgets.HTML("never shown")
box = ipywidgets.VBox([slider, stack])
display({"text/plain": "two frames", "image/png": "iVBORw0KGgo=",
         "application/vnd.jupyter.widget-view+json": {"version_major": 2, "version_minor": 0, "model_id": box.model_id}}, raw=True)"""


def run(folder, name="01_one", **options):
    warnings = execute(folder / f"{name}.ipynb", **options)
    return read(folder / f"{name}.ipynb"), warnings


def printed(notebook, cell: int) -> str:
    return "".join(output.get("text", "") for output in notebook.cells[cell].outputs)


def test_running_twice_leaves_the_file_as_it_is(book):
    folder = book(**{"01_one": [markdown("# 1"), code("print(1)\n1 + 1"), code(CLOCK, IGNORE), code(WIDGET),
                                code(WIDGET + CLOCK.replace("import", ";import"), IGNORE)]})
    run(folder)
    first = (folder / "01_one.ipynb").read_bytes()
    run(folder)
    assert (folder / "01_one.ipynb").read_bytes() == first


def test_outputs_and_counts_are_stored_and_nothing_of_the_machine(book):
    folder = book(**{"01_one": [code("print(2)\n40 + 2")]})
    path = folder / "01_one.ipynb"
    notebook = nbformat.read(path, 4)
    notebook.metadata["widgets"] = {"old": 1}
    notebook.metadata["kernelspec"] = {"name": "mine", "display_name": "Mine /home/me"}
    notebook.cells[0].metadata.update(execution={"iopub.execute_input": "2026-01-01"}, tags=["export"])
    nbformat.write(notebook, path)
    notebook, _ = run(folder)
    assert notebook.cells[0].execution_count == 1 and printed(notebook, 0) == "2\n"
    assert notebook.cells[0].outputs[1].data["text/plain"] == "42"
    assert notebook.cells[0].metadata == {"tags": ["export"]}
    assert set(notebook.metadata) == {"kernelspec", "language_info", "fingerprint"}
    assert "version" not in notebook.metadata.language_info
    assert notebook.metadata.kernelspec.name == "python3"


def test_progress_bars_are_silent_and_threads_fixed(book):
    folder = book(**{"01_one": [code("import os\nprint(os.environ['TQDM_DISABLE'], os.environ['OMP_NUM_THREADS'], "
                                     "os.listdir())")]})
    notebook, _ = run(folder)
    assert printed(notebook, 0) == "1 2 []\n"


def test_an_output_that_cannot_repeat_is_kept_until_its_code_changes_or_it_is_refreshed(book):
    cells = [code("x = 1"), code(CLOCK, IGNORE), code("x = 2")]
    folder = book(**{"01_one": cells})
    first = printed(run(folder)[0], 1)
    assert printed(run(folder)[0], 1) == first
    assert printed(run(folder, refresh=True)[0], 1) != first

    def edit(cell: int) -> str:
        path = folder / "01_one.ipynb"
        notebook = read(path)
        before = printed(notebook, 1)
        notebook.cells[cell].source += "  # edited"
        nbformat.write(notebook, path)
        return before

    assert edit(2) == printed(run(folder)[0], 1)  # code after it
    assert edit(0) != printed(run(folder)[0], 1)  # code before it


def test_a_full_run_is_recorded_only_on_request_and_then_kept(book):
    folder = book(**{"01_one": [code(SIZE, *FULL)]})
    notebook, warnings = run(folder)
    assert printed(notebook, 0).startswith("quick") and "never recorded in its full form" in warnings[0]
    notebook, warnings = run(folder, full=True)
    recorded = printed(notebook, 0)
    assert recorded.startswith("full") and not warnings
    for refresh in (False, True):
        notebook, warnings = run(folder, refresh=refresh)
        assert printed(notebook, 0) == recorded and not warnings
    notebook.cells[0].source += "\n"
    nbformat.write(notebook, folder / "01_one.ipynb")
    notebook, warnings = run(folder)
    assert printed(notebook, 0) == recorded and "older than the code" in warnings[0]


def test_a_full_run_is_not_made_old_by_woven_code_nor_any_output_by_the_projects_address(book):
    ours = 'x = "https://raw.githubusercontent.com/{}/cells/main/book/x"'
    folder = book(**{"01_one": [code("y = 1", "recap"), code(ours.format("me")), code(CLOCK, IGNORE), code(SIZE, *FULL)]})
    first, _ = run(folder, full=True)
    for cell, source in ((1, ours.format("you")), (0, "y = 2")):
        first.cells[cell].source = source
        nbformat.write(first, folder / "01_one.ipynb")
        notebook, warnings = run(folder)
        assert printed(notebook, 3) == printed(first, 3) and not warnings
        assert (printed(notebook, 2) == printed(first, 2)) == (cell == 1)


def test_widgets_get_ids_that_repeat_and_those_never_shown_are_dropped(book):
    folder = book(**{"01_one": [markdown("# 1"), code(WIDGET)]})
    notebook, _ = run(folder)
    view = next(o.data[WIDGET_VIEW] for o in notebook.cells[1].outputs if WIDGET_VIEW in o.data)
    states = module.widget_states(notebook)
    assert view["model_id"] == "cell-1-0" and set(states) == {f"cell-1-{i}" for i in range(len(states))}
    names = [state["model_name"] for state in states.values()]
    assert names.count("HTMLModel") == 2 and names.count("LinkModel") == 1
    for state in states.values():
        assert set(module.references(state["state"])) <= set(states)
    assert notebook.cells[1].metadata.mystnb.image.alt == "first & best"


def test_name_widgets_leaves_a_notebook_without_widgets_alone():
    notebook = nbformat.v4.new_notebook(cells=[code("1")])
    name_widgets(notebook)
    assert "widgets" not in notebook.metadata


@pytest.mark.parametrize("source, message", [
    ("raise KeyError('x')", r"01_one.ipynb, cell 3: KeyError: 'x'"), ("def f(:", "cell 3: SyntaxError"),
    ("import os; os._exit(1)", "cell 3: Kernel died"), ("import time; time.sleep(9)", "cell 3: A cell timed out")])
def test_a_cell_that_fails_is_named_and_the_file_stays_as_it_was(book, source, message):
    folder = book(**{"01_one": [markdown("# 1"), code("print(1)"), code(source), code("print(2)")]})
    before = (folder / "01_one.ipynb").read_bytes()
    with pytest.raises(ToolError, match=message):
        run(folder, timeout=3)
    assert (folder / "01_one.ipynb").read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["01_one.ipynb"]


def test_a_file_that_is_not_a_notebook_and_a_chapter_that_is_not_there_are_named(book):
    folder = book(**{"01_one": [code("1")]})
    (folder / "02_two.ipynb").write_text("not JSON")
    for chapter, message in (("02", "02_two.ipynb: not a notebook"), ("7", "no chapter '7'")):
        done = subprocess.run([sys.executable, "-m", "tools.execute", chapter, "--book", folder], cwd=ROOT,
                              capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


def test_a_notebook_without_kernel_metadata_runs(book):
    notebook, _ = run(book(**{"01_one": [code("print(3)")]}))
    assert printed(notebook, 0) == "3\n"
