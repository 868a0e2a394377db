"""Measure on a CUDA device what the book leaves open without one, and print it as JSON: speed of base, chapters 13 and 14."""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch.utils.flop_counter import FlopCounterMode

from tools.execute import DATA, environment
from tools.notebooks import BOOK, ToolError, command, read

SIZES = {"rows": 384, "length": 64, "square": 8192, "updates": 20}  # 25,000 tokens of source and target each, as in the paper (§5.1)
TRAINING = "history = taught("  # how chapter 13's training cell is known


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(function, repeats: int) -> float:
    """The median time of a call, after two that warm up."""
    taken = []
    for _ in range(repeats + 2):
        synchronise()
        begin = time.perf_counter()
        function()
        synchronise()
        taken.append(time.perf_counter() - begin)
    return median(taken[2:])


def base(config, device: torch.device, rows: int, length: int, square: int, updates: int) -> list[dict]:
    """An update of this configuration in bfloat16: tokens a second, share of the peak and memory, with and without compile and fusing."""
    from book import transformer as book
    source, target = (torch.randint(3, config.src_vocab_size, (rows, length), device=device) for _ in range(2))
    matrix = torch.randn(square, square, device=device, dtype=torch.bfloat16)
    peak = 2 * square**3 / seconds(lambda: matrix @ matrix, updates)  # what one large product reaches
    fused, found, flops = book.fused_attention, [], 0

    def explicit(query, key, value, mask=None, dropout=0.0, is_causal=False):
        if is_causal:
            mask = book.causal_mask(query.shape[-2], device=query.device)
        return book.attention(query, key, value, mask)[0]
    for name, compiling, kernel in (("fused", False, fused), ("fused, compiled", True, fused), ("explicit", False, explicit)):
        torch.manual_seed(0)
        model = book.Transformer(config).to(device)
        run = torch.compile(model) if compiling else model
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=device.type == "cuda")

        def update() -> None:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = book.smoothed_cross_entropy(run(source, target[:, :-1]), target[:, 1:])
            loss.backward()
            optimizer.step()
        book.fused_attention = kernel
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            if not flops:
                with FlopCounterMode(display=False) as counter:
                    update()
                flops = counter.get_total_flops()
            taken = seconds(update, updates)
        finally:
            book.fused_attention = fused
        found.append({"attention": name, "target tokens a second": round(rows * (length - 1) / taken), "share of peak": round(
            flops / taken / peak, 3), "memory in GB": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else None})
    return found


def run_notebook(notebook) -> None:
    """In an empty folder."""
    from nbclient import NotebookClient
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": folder}}).execute()


def numbers() -> dict:
    """Chapter 13 up to its training, as it stands there: seconds of the updates, and exact match on 1,000 numbers never seen."""
    from nbformat.v4 import new_code_cell
    notebook = read(next(BOOK.glob("13_*.ipynb")))
    ends = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and TRAINING in cell.source]
    if len(ends) != 1:
        raise ToolError(f"chapter 13 must hold one cell with {TRAINING!r}, got {len(ends)}")
    notebook.cells = notebook.cells[:ends[0] + 1] + [new_code_cell(
        "import json\nprint(json.dumps({'seconds': sum(history.seconds), 'exact match': exact(model, unseen)}))")]
    run_notebook(notebook)
    return json.loads(notebook.cells[-1].outputs[0].text)


def sentences() -> dict:
    """Chapter 14 whole, as it stands there: what it writes into results.json; or one line where its data are missing."""
    data = environment()[DATA]
    if not data:
        return {"missing": f"data: run make data, or set {DATA}"}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {DATA: data, "ATTENTION_RUNS": folder}
        run_notebook(read(next(BOOK.glob("14_*.ipynb"))))
        return json.loads((Path(folder) / "multi30k" / "results.json").read_text())


def run(arguments: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise ToolError("no CUDA device: choose a machine with a GPU")
    from book.transformer import TransformerConfig
    os.environ["TQDM_DISABLE"] = "1"
    print(json.dumps({
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "base, bfloat16": base(TransformerConfig.base(37_000), torch.device("cuda"), **SIZES),
        "numbers to 99 %": numbers(), "sentences": sentences()}, indent=1))


if __name__ == "__main__":
    command(run, argparse.ArgumentParser(description=__doc__.splitlines()[0]))
