"""Train chapter 14's model, English to German, over as many sittings as it takes; a line every epoch goes to runs/multi30k/log.jsonl.

    OMP_NUM_THREADS=2 .venv/bin/python recipe.py          (again: goes on where it stopped)
The chapter's full-run cell does the same with the same code and settings.
"""

import gzip
import json
import os
import sys
import time
from pathlib import Path

import sacrebleu
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from book.transformer import (BytePairEncoding, TokenBatches, Transformer, TransformerConfig, greedy_decode, save_atomically,
                              smoothed_cross_entropy, train)

DATA = Path(os.environ.get("ATTENTION_DATA", "data/multi30k"))
RUNS = Path(os.environ.get("ATTENTION_RUNS", "runs")) / "multi30k"

SEED, VOCABULARY, MAX_TOKENS = 1, 10_000, 4096
EPOCHS, KEPT = 60, 20  # of the last 20 epochs the weights are kept
NORM_FIRST = False
PEAK, WARMUP, COOL = 4e-3, 1600, 0.2  # COOL: the share of updates at the end in which the rate falls to 0

SHOWN = 4, 8, 25  # validation sentences whose translation is kept after each epoch


def lines(name):
    with gzip.open(DATA / f"{name}.gz", "rt", encoding="utf-8") as file:
        return file.read().split("\n")[:-1]


def rate(update, updates):
    """Up in a straight line, down as 1/sqrt(update), and in the last fifth down to 0."""
    plain = PEAK * min(update / WARMUP, (WARMUP / update) ** 0.5)
    return plain * min(1.0, (updates - update + 1) / (COOL * updates))


def pad_rows(rows):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def translate(model, bpe, sentences, decode=greedy_decode, size=100):
    """Sentences to sentences, in batches of similar length, in the order given."""
    ids = [bpe.encode(sentence) + [model.config.eos] for sentence in sentences]
    order, said = sorted(range(len(ids)), key=lambda i: len(ids[i])), {}
    device = next(model.parameters()).device
    for start in range(0, len(order), size):
        some = order[start:start + size]
        for i, row in zip(some, decode(model, pad_rows([ids[i] for i in some]).to(device)).tolist()):
            said[i] = bpe.decode(t for t in row if t > model.config.eos)
    return [said[i] for i in range(len(ids))]


class Watch:
    """What `train` calls after each epoch: validation loss, now and then BLEU, three translations, the last epochs' weights."""

    def __init__(self, bpe, pairs, english, german, folder, epochs, kept, epoch):
        batches = TokenBatches(pairs, MAX_TOKENS)
        self.batches = [batches.rows(rows) for rows in batches.epoch(0)]
        self.bpe, self.english, self.german = bpe, english[:200], german[:200]
        self.folder, self.epochs, self.kept, self.epoch = folder, epochs, kept, epoch

    def __call__(self, model):
        device = next(model.parameters()).device
        total = count = 0
        for source, target in self.batches:
            source, target = source.to(device), target.to(device)
            total += smoothed_cross_entropy(model(source, target[:, :-1]), target[:, 1:], smoothing=0.0, reduction="sum").item()
            count += int((target[:, 1:] != 0).sum())
        self.epoch += 1
        line = {"epoch": self.epoch, "loss": round(total / count, 4)}
        if self.epoch <= 10 or self.epoch % 5 == 0:
            said = translate(model, self.bpe, self.english)
            line["bleu"] = round(sacrebleu.corpus_bleu(said, [self.german]).score, 2)
        line["said"] = translate(model, self.bpe, [self.english[i % len(self.english)] for i in SHOWN])
        line["time"] = time.strftime("%Y-%m-%d %H:%M:%S")
        if self.epoch > self.epochs - self.kept:
            half = {name: weight.half() for name, weight in model.state_dict().items()}
            save_atomically(half, self.folder / f"epoch{self.epoch:03d}.pt")
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return total / count


def main():
    RUNS.mkdir(parents=True, exist_ok=True)
    english, german = lines("train.en"), lines("train.de")
    bpe = BytePairEncoding.train(english + german, VOCABULARY - 259)

    def encoded(sources, targets):
        return [(bpe.encode(s) + [2], [1, *bpe.encode(t), 2]) for s, t in zip(sources, targets)]

    pairs = encoded(english, german)
    batches = TokenBatches(pairs, MAX_TOKENS, seed=SEED)
    every = len(batches.epoch(0))
    updates = EPOCHS * every
    torch.manual_seed(SEED)
    V = len(bpe.pieces)
    model = Transformer(TransformerConfig(V, V, d_model=128, n_heads=4, n_layers=4, d_ff=256, dropout=0.3, tie_embeddings="all",
                                          norm_first=NORM_FIRST))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {every} updates an epoch, {updates} in all", flush=True)
    val = lines("val.en"), lines("val.de")
    checkpoint = RUNS / "checkpoint.pt"
    done = len(torch.load(checkpoint)["history"]["loss"]) // every if checkpoint.exists() else 0
    watch = Watch(bpe, encoded(*val), *val, RUNS, EPOCHS, KEPT, done)
    history = train(model, batches, updates=updates, schedule=lambda n: rate(n, updates), validate=watch,
                    clip=1.0, checkpoint=checkpoint, resume=True, every=every)
    print(f"{sum(history.seconds) / 60:.0f} minutes of updates")


if __name__ == "__main__":
    main()
