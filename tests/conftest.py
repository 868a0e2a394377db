"""What tests share: small books made for the purpose, and numbers that repeat."""

from pathlib import Path

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook


def markdown(source: str, **metadata):
    return new_markdown_cell(source, metadata=metadata)


def code(source: str, *tags: str, **fields):
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {}, **fields)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers of this shape, the same at every call."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def book(tmp_path: Path):
    """A function that writes chapters from lists of cells: book(**{"01_one": [cells]}) -> the folder."""
    def make(**cells_of) -> Path:
        for name, cells in cells_of.items():
            notebook = new_notebook(cells=cells)
            for i, cell in enumerate(notebook.cells):
                cell.id = f"cell-{i}"
            nbformat.write(notebook, tmp_path / f"{name}.ipynb")
        return tmp_path
    return make


MEASURED: list[str] = []  # a line for each chapter, printed at the end


def pytest_terminal_summary(terminalreporter):
    if MEASURED:
        terminalreporter.section("chapters")
        for line in MEASURED:
            terminalreporter.write_line(line)
