"""Run chapters in a clean kernel, one at a time, and store their outputs in a form that repeats.

Outputs of cells tagged nbval-ignore-output are kept while the code up to them is unchanged (--refresh renews them);
outputs of cells tagged full-run are kept always, until --full records them anew.
"""

import argparse
import asyncio
import copy
import hashlib
import html
import os
import re
import sys
import tempfile
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from tools.address import RAW
from tools.notebooks import BOOK, ROOT, WIDGET_STATE, WIDGET_VIEW, ToolError, chapters, command, is_generated, read, tags, write

THREADS = 2
FULL = "ATTENTION_FULL_RUN"  # set to 1, it makes full-run cells take their full size
DATA = "ATTENTION_DATA"  # names the folder of chapter 14's sentences
WEIGHTS = "ATTENTION_WEIGHTS"  # names the folder of what chapter 14 learnt


def data_folder() -> str:
    """Where chapter 14's sentences are: in the folder that the variable names, or where `make data` puts them; else empty."""
    for folder in (os.environ.get(DATA, ""), ROOT / "data" / "multi30k"):
        if folder and (Path(folder) / "train.de.gz").exists():
            return str(Path(folder).resolve())
    return ""


def environment(full: bool = False) -> dict[str, str]:
    """The variables chapters run under: a fixed number of threads, no progress bars, nothing that a day changes."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(THREADS))
    return threads | {"OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1", "PYTHONHASHSEED": "0",
                      "PYTHONWARNINGS": "", "PYDEVD_DISABLE_FILE_VALIDATION": "1", FULL: "1" if full else "",
                      DATA: data_folder(), WEIGHTS: str(BOOK / "weights")}


def hashed(cell: NotebookNode) -> bytes:
    """A code cell as fingerprints see it: without the project's address, which a fork changes."""
    return RAW.sub("", cell.source).encode() + b"\0"


def fingerprints(notebook: NotebookNode) -> dict[str, str]:
    """For each code cell's id, a hash of all code up to and including it, wherever the project is published.

    For full-run cells without the woven code: hours of recording are not made old by a word in an earlier chapter (the weekly run
    records them anew).
    """
    everything, own, result = hashlib.sha256(), hashlib.sha256(), {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            everything.update(hashed(cell))
            if not is_generated(cell):
                own.update(hashed(cell))
            result[cell.id] = (own if "full-run" in tags(cell) else everything).hexdigest()[:16]
    return result


def last_fingerprint(notebook: NotebookNode) -> str:
    """A hash of all code."""
    code = b"".join(hashed(cell) for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code).hexdigest()[:16]


def widget_states(notebook: NotebookNode) -> dict[str, NotebookNode]:
    return notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})


def references(state: NotebookNode) -> list[str]:
    """The ids of the widgets that a widget's state refers to, in a stable order."""
    found = []

    def visit(value) -> None:
        if isinstance(value, str) and value.startswith("IPY_MODEL_"):
            found.append(value.removeprefix("IPY_MODEL_"))
        elif isinstance(value, dict):
            for key in sorted(value):
                visit(value[key])
        elif isinstance(value, list):
            for item in value:
                visit(item)

    visit(state)
    return found


def replace_ids(value, ids: dict[str, str]):
    """A copy of a widget's state with other ids in it."""
    if isinstance(value, str):
        return "IPY_MODEL_" + ids[value[10:]] if value.startswith("IPY_MODEL_") and value[10:] in ids else value
    if isinstance(value, dict):
        return {key: replace_ids(item, ids) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_ids(item, ids) for item in value]
    return value


def name_widgets(notebook: NotebookNode) -> None:
    """Give widgets ids made of their cell's id and a number, and drop those that no output shows."""
    states, named = widget_states(notebook), {}
    for cell in notebook.cells:
        ids: dict[str, str] = {}

        def add(model_id: str) -> None:
            if model_id in states and model_id not in ids:
                ids[model_id] = f"{cell.id}-{len(ids)}"
                for child in references(states[model_id]["state"]):
                    add(child)

        views = [output.data[WIDGET_VIEW] for output in cell.get("outputs", []) if WIDGET_VIEW in output.get("data", {})]
        for view in views:
            add(view["model_id"])
        for model_id, model in states.items():  # links show nothing, but belong to what they link
            if model_id not in ids and "Link" in model["model_name"] and set(references(model["state"])) & set(ids):
                add(model_id)
        for view in views:
            view["model_id"] = ids.get(view["model_id"], view["model_id"])
        named |= {ids[old]: replace_ids(states[old], ids) for old in ids}
    store_widgets(notebook, named)


def store_widgets(notebook: NotebookNode, states: dict) -> None:
    notebook.metadata.pop("widgets", None)
    if states:
        notebook.metadata["widgets"] = {WIDGET_STATE: {"state": states, "version_major": 2, "version_minor": 0}}


def tidy(notebook: NotebookNode) -> None:
    """Take out of a notebook whatever the machine, the day or the editor left in it, and set the pictures' alt text."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    language = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "pygments_lexer": "ipython3"}
    kept = {key: value for key, value in notebook.metadata.items() if key in ("widgets", "accelerator", "colab")}
    notebook.metadata.clear()
    notebook.metadata.update(kept, kernelspec=kernel, language_info=language)
    notebook.metadata["fingerprint"] = last_fingerprint(notebook)  # of the code that gave these outputs
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        for key in set(cell.metadata) - {"tags", "cellView", "jupyter", "mystnb", "fingerprint", "claims"}:
            del cell.metadata[key]
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            alt = alt_text(notebook, output)
            if alt:
                cell.metadata["mystnb"] = {"image": {"alt": alt}}


def alt_text(notebook: NotebookNode, output: NotebookNode) -> str | None:
    """What an output's picture shows: as `show` said it, or as a widget's first frame does."""
    if WIDGET_VIEW in output.get("data", {}):
        states, open_ids = widget_states(notebook), [output.data[WIDGET_VIEW]["model_id"]]
        while open_ids:
            model = states.get(open_ids.pop(0), {"model_name": "", "state": {}})
            alt = model["model_name"] == "HTMLModel" and re.search(r'<img [^>]*alt="([^"]*)"', model["state"]["value"])
            if alt:
                return html.unescape(alt[1])
            open_ids = references(model["state"]) + open_ids
        return None
    return output.get("metadata", {}).get("image/png", {}).get("alt")


def keep(old: NotebookNode, new: NotebookNode, full: bool, refresh: bool) -> list[str]:
    """Put back outputs of `old` that are not to be renewed; returns warnings about stale ones."""
    before = {cell.id: cell for cell in old.cells if cell.cell_type == "code"}
    old_prints, new_prints = fingerprints(old), fingerprints(new)
    states, warnings = dict(widget_states(new)), []
    for number, cell in enumerate(new.cells, start=1):
        if "nbval-ignore-output" not in tags(cell):
            cell.metadata.pop("fingerprint", None)
            continue
        previous = before.get(cell.id)
        recorded = previous.metadata.get("fingerprint") if previous and previous.outputs else None
        unchanged = recorded == new_prints[cell.id]
        if "full-run" in tags(cell):
            keeping = recorded and not full
            if keeping and not unchanged:
                warnings.append(f"cell {number}: the recorded full run is older than the code; record it with --full")
            if not keeping and not full:
                cell.metadata.pop("fingerprint", None)
                warnings.append(f"cell {number}: never recorded in its full form; record it with --full")
                continue
        else:
            keeping = recorded and unchanged and not refresh
        cell.metadata["fingerprint"] = recorded if keeping else new_prints[cell.id]
        if keeping:
            cell.outputs = copy.deepcopy(previous.outputs)
            states = {key: value for key, value in states.items() if not key.startswith(cell.id + "-")}
            states |= {key: value for key, value in widget_states(old).items() if key.startswith(cell.id + "-")}
    store_widgets(new, states)
    return warnings


def execute(path: Path, *, full: bool = False, refresh: bool = False, timeout: int = 600, progress=None) -> list[str]:
    """Run one chapter and store its outputs; returns warnings.

    Raises ToolError, and leaves the file as it was, if a cell fails, taking the chapter's and the cell's number.
    """
    notebook = read(path)
    old = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata.pop("widgets", None)
    total = len(notebook.cells)
    running = [0]

    def on_start(cell, cell_index, **_) -> None:
        running[0] = cell_index + 1
        if progress:
            progress(f"{path.stem}: cell {cell_index + 1} of {total}")

    variables = environment(full)
    saved = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        with tempfile.TemporaryDirectory() as empty:
            NotebookClient(notebook, kernel_name="python3", timeout=None if full else timeout, record_timing=False,
                           coalesce_streams=True, extra_arguments=["--log-level=50"], resources={"metadata": {"path": empty}},
                           on_cell_start=on_start).execute()
    except CellExecutionError as error:
        said = (str(error.evalue).strip() or error.traceback.strip()).splitlines()
        raise ToolError(f"{path.name}, cell {running[0]}: {error.ename}: {said[0] if error.evalue else said[-1]}") from None
    except (CellTimeoutError, DeadKernelError) as error:
        raise ToolError(f"{path.name}, cell {running[0]}: {str(error).splitlines()[0]}") from None
    except (AssertionError, asyncio.CancelledError, KeyboardInterrupt):  # what nbclient makes of Ctrl-C
        raise ToolError(f"{path.name}: stopped in cell {running[0]}; the file is as it was") from None
    finally:
        for key, value in saved.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    name_widgets(notebook)
    warnings = keep(old, notebook, full, refresh)
    tidy(notebook)
    write(path, notebook)
    return warnings


def run(arguments: argparse.Namespace) -> None:
    live = sys.stderr.isatty()
    for path in chapters(arguments.book, arguments.chapters):
        def progress(text: str) -> None:
            if live:
                print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        warnings = execute(path, full=arguments.full, refresh=arguments.refresh, progress=progress)
        progress("")
        print(f"{path.stem}: stored", flush=True)
        for warning in warnings:
            print(f"{path.stem}, {warning}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="numbers, names or paths; none: all")
    parser.add_argument("--full", action="store_true", help="record full-run cells in their full form")
    parser.add_argument("--refresh", action="store_true", help="renew outputs that cannot repeat (timings)")
    parser.add_argument("--book", type=Path, default=BOOK, help="the folder of the chapters")
    command(run, parser)
