"""What tests share: small books made for the purpose, numbers and layers that repeat."""

from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch
from hypothesis import settings
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from torch import nn

from book.transformer import MultiHeadAttention, Transformer, TransformerConfig

FEW = settings(max_examples=40, deadline=None, database=None, derandomize=True)  # the same at every run, and no files
SMALL = TransformerConfig(13, 17, d_model=12, n_heads=3, n_layers=2, d_ff=20, dropout=0.0)


def markdown(source: str, **metadata):
    return new_markdown_cell(source, metadata=metadata)


def code(source: str, *tags: str, **fields):
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {}, **fields)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers of this shape, the same at every call."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def layer(*sizes: int, dtype: torch.dtype = torch.float32, **options) -> MultiHeadAttention:
    """A MultiHeadAttention that is the same at every call, with biases that are not 0."""
    torch.manual_seed(0)
    made = MultiHeadAttention(*sizes, **options).to(dtype)
    if made.output.bias is not None:
        for linear in (made.input, made.output):
            nn.init.normal_(linear.bias)
    return made


def transformer(config: TransformerConfig = SMALL, dtype: torch.dtype = torch.float32, *, seed: int = 0, **changed) -> Transformer:
    """A model in evaluation mode, its biases and gains drawn at random: with zeros and ones a misplaced one is not seen."""
    torch.manual_seed(seed)
    model = Transformer(replace(config, **changed)).to(dtype).eval()
    for weight in model.parameters():
        if weight.dim() == 1:
            nn.init.normal_(weight)
    return model


def tokens(batch: int, length: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Real tokens, no padding, the same at every call."""
    return torch.randint(3, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def copy_of(ours: MultiHeadAttention) -> nn.MultiheadAttention:
    """PyTorch's layer with our weights."""
    bias = ours.output.bias is not None
    theirs = nn.MultiheadAttention(ours.d_model, ours.n_heads, bias=bias, batch_first=True).to(ours.output.weight.dtype)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.input.weight)
        theirs.out_proj.weight.copy_(ours.output.weight)
        if bias:
            theirs.in_proj_bias.copy_(ours.input.bias)
            theirs.out_proj.bias.copy_(ours.output.bias)
    return theirs


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
