"""Compare the speed of our layers with PyTorch's: in one process, in turn, as ratios of medians."""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from tools.execute import THREADS
from tools.notebooks import command


def ratio(ours: Callable, theirs: Callable, repeats: int) -> float:
    """The median time of `ours` over that of `theirs`, called in turn, in an order that changes each time."""
    taken: dict[Callable, list[float]] = {ours: [], theirs: []}
    for turn in range(repeats + 2):
        for function in ((ours, theirs), (theirs, ours))[turn % 2]:
            begin = time.perf_counter()
            function()
            if turn >= 2:  # the first turns warm up
                taken[function].append(time.perf_counter() - begin)
    medians = [sorted(times)[len(times) // 2] for times in taken.values()]
    return medians[0] / medians[1]


def multi_head_attention(repeats: int) -> None:
    """Forward and backward, self-attention, d_model 512, 8 heads."""
    from book.transformer import MultiHeadAttention
    ours, theirs = MultiHeadAttention(512, 8), nn.MultiheadAttention(512, 8, batch_first=True)
    for batch, length in ((32, 128), (8, 512)):
        x = torch.randn(batch, length, 512, requires_grad=True)
        found = ratio(lambda: ours(x)[0].sum().backward(),
                      lambda: theirs(x, x, x, need_weights=False)[0].sum().backward(), repeats)
        print(f"MultiHeadAttention / nn.MultiheadAttention, (B {batch}, T {length}): {found:.2f}", flush=True)


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    print(f"torch {torch.__version__}, {THREADS} threads; time of ours over theirs, at most 1.05 wanted")
    multi_head_attention(arguments.repeats)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30, help="calls of each (default 30)")
    command(run, parser)
