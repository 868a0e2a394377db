"""Reading and writing chapters; shared by the commands."""

import argparse
import ast
import hashlib
import json
import os
import re
import sys
import warnings
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
GENERATED = ("recap", "figures")  # tags of the cells that weave writes
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


class ToolError(Exception):
    """Something a person has to mend; its text is the one line they see."""


def chapters(book: Path = BOOK, numbers: list[str] | None = None) -> list[Path]:
    """The chapters NN_name.ipynb in order; with `numbers` ("02", "02_attention", a path), only those.

    Raises ToolError if there are none, for a number that fits no chapter, and for two chapters of one number.
    """
    paths = sorted(path for path in book.glob("*.ipynb") if re.match(r"\d\d_", path.name))
    if not paths:
        raise ToolError(f"no chapters (NN_name.ipynb) in {book}")
    for first, second in zip(paths, paths[1:]):
        if first.name[:2] == second.name[:2]:
            raise ToolError(f"two chapters have the number {first.name[:2]}: {first.name} and {second.name}")
    if not numbers:
        return paths
    chosen = []
    for number in numbers:
        fits = [path for path in paths if Path(number).stem in (path.stem, path.name[:2], path.name[:2].lstrip("0"))]
        if not fits:
            raise ToolError(f"no chapter {number!r} in {book}; there are {', '.join(path.stem for path in paths)}")
        chosen += fits
    return sorted(set(chosen))


def read(path: Path) -> NotebookNode:
    """The notebook at `path`. Raises ToolError if it is not one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ids that are missing or doubled; we mend them
            notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
        notebook.nbformat_minor = 5  # the first with ids for cells; some editors still write an older one
        name_cells(notebook)
        nbformat.validate(notebook)
    except FileNotFoundError:
        raise ToolError(f"{path}: no such file") from None
    except Exception as error:
        raise ToolError(f"{path.name}: not a notebook ({str(error).splitlines()[0][:200]})") from None
    return notebook


def name_cells(notebook: NotebookNode) -> None:
    """Give an id that repeats to every cell that has none, and mend doubled ids."""
    seen: set[str] = set()
    for i, cell in enumerate(notebook.cells):
        if not cell.get("id") or cell.id in seen:
            cell.id = hashlib.sha256(f"{i} {cell.source}".encode()).hexdigest()[:8]
        seen.add(cell.id)


def parse(source: str, where: str) -> tuple[ast.Module, str]:
    """A cell's code as a tree, and as the plain Python that IPython makes of it. Raises ToolError naming `where`."""
    try:
        plain = TransformerManager().transform_cell(source)
        return ast.parse(plain), plain
    except SyntaxError as error:
        raise ToolError(f"{where}: syntax error in line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{where}: cannot be read as Python: {error}") from None


def write(path: Path, notebook: NotebookNode) -> bool:
    """Write the notebook whole or not at all; returns whether the file changed."""
    text = nbformat.writes(notebook).rstrip("\n") + "\n"
    return write_text(path, text)


def write_text(path: Path, text: str) -> bool:
    """Write the text whole or not at all; returns whether the file changed."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
    return True


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def is_generated(cell: NotebookNode) -> bool:
    return any(tag in GENERATED for tag in tags(cell))


def title(notebook: NotebookNode) -> str:
    """The text of the first heading, without its number; empty if there is none."""
    for cell in notebook.cells:
        found = cell.cell_type == "markdown" and re.search(r"^# +(?:\d+\. +)?(.+)$", cell.source, re.MULTILINE)
        if found:
            return found[1].strip()
    return ""


def outputs_text(outputs: list[NotebookNode]) -> str:
    """Everything that the outputs say as text."""
    return "\n".join(json.dumps(o) if o.output_type == "error" else o.get("text", o.get("data", {}).get("text/plain", ""))
                     for o in outputs)


def command(run, parser: argparse.ArgumentParser) -> None:
    """Run a command's `run(arguments)`; a ToolError becomes one line on stderr and exit status 1."""
    try:
        status = run(parser.parse_args())
    except ToolError as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{Path(sys.argv[0]).stem}: stopped")
    sys.exit(status or 0)
