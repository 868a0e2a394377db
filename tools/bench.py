"""Compare our layers, loop, batches and decoding with the plain ways: time in one process, in turn, as ratios of medians; and memory."""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

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


def kept(forward: Callable, parameters: set[int]) -> float:
    """The megabytes that `forward` keeps for the backward pass: each storage once, none of the parameters' (by address)."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # holds the graph, so that no address is used twice
    del result
    return sum(storages.values()) / 1e6


def multi_head_attention(repeats: int) -> None:
    """Forward and backward, self-attention, d_model 512, 8 heads."""
    from book.transformer import MultiHeadAttention
    ours, theirs = MultiHeadAttention(512, 8), nn.MultiheadAttention(512, 8, batch_first=True)
    for batch, length in ((32, 128), (8, 512)):
        x = torch.randn(batch, length, 512, requires_grad=True)
        found = ratio(lambda: ours(x)[0].sum().backward(),
                      lambda: theirs(x, x, x, need_weights=False)[0].sum().backward(), repeats)
        print(f"MultiHeadAttention / nn.MultiheadAttention, (B {batch}, T {length}): time {found:.2f} (at most 1.05)", flush=True)


class Theirs(nn.Module):
    """nn.Transformer between the embeddings and the output of a Transformer of ours, which it shares."""

    def __init__(self, ours: nn.Module):
        super().__init__()
        c = self.config = ours.config
        self.source, self.target, self.output = ours.source, ours.target, ours.output
        self.source_positions, self.target_positions = ours.source_positions, ours.target_positions
        self.stacks = nn.Transformer(c.d_model, c.n_heads, c.n_layers, c.n_layers, c.d_ff, dropout=c.dropout, batch_first=True)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        pad = src == self.config.pad
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        return self.output(self.stacks(
            self.source_positions(self.source(src)), self.target_positions(self.target(tgt)), tgt_mask=causal, tgt_is_causal=True,
            src_key_padding_mask=pad, memory_key_padding_mask=pad))


def transformer(repeats: int) -> None:
    """Forward and backward of the whole model in training, a fifth of the source padded, with biases and final norms as PyTorch has them.

    At dropout 0 both compute the same function. PyTorch's one dropout also acts on attention weights and after the ReLU; ours
    only where it is told to, by default where the paper has it.
    """
    from book.transformer import Transformer, TransformerConfig
    alike = {"bias": True, "final_norm": True}
    everywhere = {"attention_dropout": 0.1, "activation_dropout": 0.1}
    for name, config, batch, length, limit in (
            ("small", TransformerConfig(1000, 1000, d_model=128, n_heads=4, n_layers=2, d_ff=256, **alike), 64, 32, 0.95),
            ("base", TransformerConfig(8000, 8000, **alike), 8, 64, 0.98)):
        print(f"Transformer / nn.Transformer, {name} (time at most {limit}, kept for the backward pass at most as much)")
        for what, options in (("dropout 0", {"dropout": 0.0}), ("dropout 0.1, each where its defaults have it", {}),
                              ("dropout 0.1, both where PyTorch has it", everywhere)):
            ours = Transformer(replace(config, **options))
            theirs = Theirs(ours)
            src, tgt = torch.randint(3, config.src_vocab_size, (2, batch, length))
            src[: batch // 2, -(2 * length) // 5:] = config.pad

            def step(model: nn.Module) -> None:
                model.zero_grad()
                model(src, tgt).logsumexp(dim=-1).mean().backward()
            found = ratio(lambda: step(ours), lambda: step(theirs), repeats)
            parameters = {p.untyped_storage().data_ptr() for model in (ours, theirs) for p in model.parameters()}
            mine, other = (kept(lambda: model(src, tgt), parameters) for model in (ours, theirs))
            print(f"  {what}: time {found:.2f}, kept {mine:.1f} / {other:.1f} MB", flush=True)


def training(repeats: int) -> None:
    """Ten updates of `train` around our model, and of a plain loop around nn.Transformer, on the same batches."""
    from book.transformer import Transformer, TransformerConfig, smoothed_cross_entropy, train
    ours = Transformer(TransformerConfig(1000, 1000, d_model=128, n_heads=4, n_layers=2, d_ff=256, dropout=0.0, bias=True, final_norm=True))
    theirs = Theirs(ours)
    batches = [tuple(torch.randint(3, 1000, (2, 64, 32))) for _ in range(10)]

    def plain() -> None:
        optimizer = torch.optim.Adam(theirs.parameters(), betas=(0.9, 0.98), eps=1e-9)
        for source, target in batches:
            optimizer.zero_grad()
            smoothed_cross_entropy(theirs(source, target[:, :-1]), target[:, 1:]).backward()
            optimizer.step()
    found = ratio(lambda: train(ours, batches, updates=10, device="cpu", progress=False), plain, repeats)
    print(f"train / a plain loop around nn.Transformer, small: time {found:.2f} (at most 1.0)", flush=True)


def bucketing(repeats: int) -> None:
    """One epoch, forward and backward, in batches of similar length and in shuffled ones of as many rows."""
    from book.transformer import TokenBatches, Transformer, TransformerConfig, smoothed_cross_entropy
    lengths = torch.randint(3, 40, (2000,)).tolist()
    pairs = [([5] * length, [1, *[5] * length, 2]) for length in lengths]
    batches = TokenBatches(pairs, 2000)
    similar = batches.epoch(0)
    order, rows = torch.randperm(len(pairs)).tolist(), len(pairs) // len(similar)
    shuffled = [order[i:i + rows] for i in range(0, len(order), rows)]
    model = Transformer(TransformerConfig(1000, 1000, d_model=128, n_heads=4, n_layers=2, d_ff=256))

    def padding(epoch: list[list[int]]) -> float:
        cells = sum(len(batch) * max(lengths[i] for i in batch) for batch in epoch)
        return 1 - sum(lengths) / cells

    def run_epoch(epoch: list[list[int]]) -> None:
        for batch in epoch:
            source, target = batches.rows(batch)
            smoothed_cross_entropy(model(source, target[:, :-1]), target[:, 1:]).backward()
    found = ratio(lambda: run_epoch(similar), lambda: run_epoch(shuffled), max(1, repeats // 10))
    print(f"batches of similar length / shuffled: time {found:.2f}, padding {padding(similar):.0%} / {padding(shuffled):.0%} of the cells",
          flush=True)


def decoding(repeats: int) -> None:
    """Greedy decoding of 8 sentences by a model of chapter 14's sizes, with keys and values kept and with everything computed again."""
    from book.transformer import Transformer, TransformerConfig, greedy_decode
    model = Transformer(TransformerConfig(10_000, 10_000, d_model=128, n_heads=4, n_layers=4, d_ff=256)).eval()
    config, src = model.config, torch.randint(3, 10_000, (8, 20))
    never = [config.pad, config.bos, config.eos]
    model.output.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, torch.tensor(never), -torch.inf))

    @torch.inference_mode()
    def again(length: int) -> torch.Tensor:
        memory, written = model.encode(src), torch.full((len(src), 1), config.bos)
        for _ in range(length):
            written = torch.cat([written, model.decode(written, *memory)[:, -1:].argmax(dim=-1)], dim=1)
        return written[:, 1:]
    for length in (16, 64, 256):
        assert torch.equal(greedy_decode(model, src, length), again(length))
        found = 1 / ratio(lambda: greedy_decode(model, src, length), lambda: again(length), max(1, repeats // 5))
        print(f"greedy decoding, {length} new tokens: with the cache {found:.1f} times as fast{' (at least 3)' * (length == 64)}", flush=True)


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {THREADS} threads; time of ours over theirs, ratios of medians")
    multi_head_attention(arguments.repeats)
    transformer(arguments.repeats)
    for compare in (training, bucketing, decoding):
        compare(arguments.repeats)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30, help="calls of each (default 30)")
    command(run, parser)
