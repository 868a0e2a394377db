"""The training loop (chapter 11): batches, one update from many, checkpoints, resume to the bit, stopping, several processes."""

import itertools
import math
import os
import random
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import FEW
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from book.transformer import (History, Progress, TokenBatches, Transformer, TransformerConfig, add_gradients, compiled, finish_first,
                              pick_device, pick_precision, processes, random_states, restore_random, save_atomically,
                              smoothed_cross_entropy, train, warmup_schedule)
from tools.notebooks import ROOT


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As in the processes that these tests start: with another number of threads sums differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PLAIN = partial(smoothed_cross_entropy, smoothing=0.0)
OFF = torch.amp.GradScaler("cpu", enabled=False)


def pairs(count: int = 200, longest: int = 8, seed: int = 0) -> list:
    draw = random.Random(seed)
    rows = [draw.choices(range(3, 13), k=draw.randint(1, longest)) for _ in range(count)]
    return [([*row, 2], [1, *row[::-1], 2]) for row in rows]


def made(seed: int = 0, **options) -> Transformer:
    torch.manual_seed(seed)
    sizes = dict(d_model=16, n_heads=2, n_layers=1, d_ff=32, dropout=0.0)
    return Transformer(TransformerConfig(13, 13, **(sizes | options)))


BATCHES = TokenBatches(pairs(), 100)


def trained(updates: int = 6, seed: int = 0, batches=BATCHES, dropout: float = 0.1, **options) -> tuple[Transformer, History]:
    model = made(seed, dropout=dropout)
    return model, train(model, batches, updates=updates, **(dict(device="cpu", progress=False) | options))


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def numbers(history: History) -> tuple:
    return history.loss, history.norm, history.rate, history.tokens, history.validation


HEAD = """
import json, os, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from book.transformer import *
from test_training import *
"""


def child(code: str, *arguments, launcher=()) -> subprocess.Popen:
    """A process of its own that runs this code, which may use what this file defines."""
    script = Path(arguments[0]).with_suffix(".py") if launcher else None
    if script:
        script.write_text(HEAD + code)
    return subprocess.Popen([sys.executable, *launcher, *([script] if script else ["-c", HEAD + code]), *map(str, arguments)],
                            cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# Batches

@FEW
@given(st.integers(1, 60), st.integers(10, 80), st.integers(0, 3))
def test_every_pair_stands_in_one_batch_of_an_epoch_and_no_batch_is_too_large(count, max_tokens, epoch):
    batches = TokenBatches(pairs(count), max_tokens)
    rows = batches.epoch(epoch)
    assert sorted(sum(rows, [])) == list(range(count))
    for source, target in map(batches.rows, rows):
        assert len(source) == len(target) and max(source.numel(), target.numel()) <= max_tokens
        assert (source[:, 0] != 0).all() and (target[:, 0] == 1).all()
        assert ((source == 2).sum(1) == 1).all() and ((target == 2).sum(1) == 1).all()  # the end is always there


def test_batches_begin_anew_differ_between_epochs_and_seeds_and_touch_no_global_random_numbers():
    batches, before, states = TokenBatches(pairs(), 60), torch.get_rng_state(), random.getstate()
    first, again = (list(itertools.islice(batches, 30)) for _ in range(2))
    assert all(torch.equal(a, b) for one, two in zip(first, again) for a, b in zip(one, two))
    assert batches.epoch(0) != batches.epoch(1) != TokenBatches(pairs(), 60, seed=1).epoch(1)
    assert torch.equal(before, torch.get_rng_state()) and states == random.getstate()


def test_batches_are_of_similar_length_and_padded_with_pad_on_the_right():
    batches = TokenBatches([([5, 2], [1, 5, 2]), ([5, 6, 2], [1, 5, 6, 2])], 20, pad=9)
    source, target = batches.rows([0, 1])
    assert source.tolist() == [[5, 2, 9], [5, 6, 2]] and target.tolist() == [[1, 5, 2, 9], [1, 5, 6, 2]]
    many = TokenBatches(pairs(2000), 200)
    padding = sum(int((target == 0).sum()) for _, target in map(many.rows, many.epoch(0)))
    assert padding < 0.02 * sum(len(target) for _, target in many.pairs)


@pytest.mark.parametrize("given_pairs, size, message", [
    ([], 9, "pairs must hold"), ([([], [1, 2])], 9, "pairs must hold"), ([([5, 2], [1])], 9, "pairs must hold"),
    (pairs(), 3, "max_tokens must hold the longest row, 10, got 3"), (pairs(), 0, "max_tokens must be an int above 0, got 0"),
    (pairs(), 9.5, "max_tokens must be an int above 0")])
def test_batches_that_cannot_be_are_refused(given_pairs, size, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TokenBatches(given_pairs, size)


# One update

def gradient(model: nn.Module, group: list, **options) -> torch.Tensor:
    model.zero_grad()
    tokens = sum(int((target[:, 1:] != 0).sum()) for _, target in group)
    add_gradients(model, group, PLAIN, tokens, 0, **(dict(dtype=torch.float32, scaler=OFF) | options))
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


UNEQUAL = ((0, 1), (1, 4), (4, 20))


def test_unequal_batches_accumulated_give_the_gradient_of_one_large_batch():
    order = sorted(range(200), key=lambda i: len(pairs()[i][0]))[::10]
    whole, parts = [BATCHES.rows(order)], [BATCHES.rows(order[i:j]) for i, j in UNEQUAL]
    model = made()
    expected = gradient(model, whole)
    assert torch.allclose(gradient(model, parts), expected, atol=1e-6)
    means = torch.stack([gradient(model, [part]) for part in parts]).mean(0)
    assert (means - expected).norm() > 0.1 * expected.norm()  # what the check can see


def test_training_on_accumulated_batches_equals_training_on_one_large():
    order = list(range(40))
    parts = [BATCHES.rows(order[i:j]) for i, j in ((0, 5), (5, 40))]
    small, one = trained(3, batches=parts * 3, accumulate=2, dropout=0.0)
    large, other = trained(3, batches=[BATCHES.rows(order)] * 3, dropout=0.0)
    assert one.tokens == other.tokens == [sum(len(target) - 1 for _, target in pairs()[:40])] * 3
    assert one.loss == pytest.approx(other.loss, rel=1e-4)
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(small.parameters(), large.parameters()))


def test_with_everything_off_it_is_the_plain_loop():
    model, history = trained(5, dropout=0.0, loss=PLAIN)
    plain, losses = made(), []
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    for source, target in itertools.islice(BATCHES, 5):
        loss = PLAIN(plain(source, target[:, :-1]), target[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert history.loss == pytest.approx(losses, rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(model.parameters(), plain.parameters()))


def test_padding_is_that_of_the_configuration():
    rows = [([5, 2], [1, 5, 2]), ([5, 6, 7, 2], [1, 7, 6, 5, 2])]
    moved = [tuple([{0: 12, 12: 0}.get(i, i) for i in side] for side in pair) for pair in rows]
    usual, zero = made(), made(pad=12)
    with torch.no_grad():
        for name in ("source", "target", "output"):
            weight = getattr(zero, name).weight
            weight.copy_(getattr(usual, name).weight[[12, *range(1, 12), 0]])
    histories = [train(model, TokenBatches(data, 99, pad=pad), updates=2, device="cpu", progress=False)
                 for model, data, pad in ((usual, rows, 0), (zero, moved, 12))]
    assert histories[0].tokens == histories[1].tokens == [6, 6]
    assert histories[0].loss == pytest.approx(histories[1].loss, rel=1e-5)


def test_the_schedule_is_asked_once_for_each_update_and_from_1():
    asked = []
    _, history = trained(4, accumulate=3, schedule=lambda update: asked.append(update) or 0.1 / update)
    assert sorted(set(asked)) == [1, 2, 3, 4] and history.rate == [0.1, 0.05, 0.1 / 3, 0.025]


def test_the_first_update_uses_the_schedules_first_rate():
    model, start = made(), made()
    train(model, BATCHES, updates=1, device="cpu", progress=False, schedule=lambda update: 0.25 if update == 1 else 0.0,
          optimizer=torch.optim.SGD(model.parameters(), lr=9.0), loss=PLAIN)
    expected = gradient(start, [next(iter(BATCHES))])
    moved = torch.cat([(a - b).flatten() for a, b in zip(start.parameters(), model.parameters())])
    assert torch.allclose(moved, 0.25 * expected, atol=1e-6)


def test_without_a_schedule_each_group_keeps_its_rate():
    model = made()
    first, *rest = model.parameters()
    optimizer = torch.optim.Adam([{"params": [first], "lr": 0.0}, {"params": rest, "lr": 0.01}])
    before = first.clone()
    train(model, BATCHES, updates=2, optimizer=optimizer, device="cpu", progress=False)
    assert torch.equal(first, before) and [group["lr"] for group in optimizer.param_groups] == [0.0, 0.01]


@pytest.mark.parametrize("clip, scale", [(None, 1.0), (1e9, 1.0), (0.01, None)])
def test_clipping_bounds_the_norm_and_only_that(clip, scale):
    model, start = made(), made()
    history = train(model, BATCHES, updates=1, device="cpu", progress=False, clip=clip, loss=PLAIN,
                    optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    expected = gradient(start, [next(iter(BATCHES))])
    moved = torch.cat([(a - b).flatten() for a, b in zip(start.parameters(), model.parameters())])
    assert history.norm == pytest.approx([expected.norm().item()], rel=1e-4)  # the norm before clipping
    assert torch.allclose(moved, expected * (scale or 0.01 / expected.norm()), atol=1e-6)


# Precision, device, compiling

def test_bfloat16_and_scaled_float16_give_nearly_the_same_gradient():
    group, model = [next(iter(BATCHES))], made()
    exact = gradient(model, group)
    for dtype in (torch.bfloat16, torch.float16):
        scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
        rough = gradient(model, group, dtype=dtype, scaler=scaler) / scaler.get_scale()
        assert 0 < (rough - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_training_in_16_bits_learns_and_leaves_weights_in_32(precision):
    model, history = trained(12, precision=precision, clip=1.0)
    assert history.loss[-1] < history.loss[0] and max(history.norm) < 10  # unscaled before it is clipped
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_an_overflow_in_float16_skips_the_update_and_goes_on():
    losses = []

    def once_too_large(logits, target, **options):
        losses.append(1)
        return PLAIN(logits, target, **options) * (1e4 if len(losses) == 2 else 1)

    _, history = trained(4, precision="float16", loss=once_too_large)
    assert not math.isfinite(history.norm[1]) and all(map(math.isfinite, history.norm[2:]))


def test_precision_is_bfloat16_only_where_the_hardware_has_it(monkeypatch):
    cuda = torch.device("cuda")
    for native, expected in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                            lambda including_emulation=True, native=native: native or including_emulation)
        assert pick_precision(None, cuda) == expected and pick_precision("float32", cuda) == torch.float32
    assert pick_precision(None, torch.device("cpu")) == torch.float32


def test_device_is_cuda_then_mps_then_cpu(monkeypatch):
    for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert pick_device() == torch.device(expected)
    assert pick_device("cuda:1") == torch.device("cuda", 1)


def test_where_compiling_fails_training_goes_on_says_why_and_gives_the_same(monkeypatch, capsys):
    def broken(model, **options):
        raise RuntimeError("no C++\ncompiler")

    plain, expected = trained(4)
    monkeypatch.setattr(torch, "compile", broken)
    model, history = trained(4, compile=True)
    assert capsys.readouterr().out == "not compiled, RuntimeError: no C++ compiler\n"
    assert equal(model, plain) and numbers(history) == numbers(expected)


def test_a_compiled_model_trains_to_the_same_and_the_trial_leaves_no_trace(monkeypatch):
    calls = []

    class Fast(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *inputs):
            calls.append(1)
            return self.inner(*inputs)

    plain, expected = trained(4)
    monkeypatch.setattr(torch, "compile", lambda model, **options: Fast(model))
    model, history = trained(4, compile=True)
    assert len(calls) == 5 and equal(model, plain) and numbers(history) == numbers(expected)


@pytest.mark.filterwarnings("default")  # the compiler warns of itself
def test_torch_compile_itself_takes_the_model(capsys):
    model, (source, target) = made(), next(iter(BATCHES))
    fast = compiled(model, lambda m: m(source, target).sum().backward(), backend="eager")
    assert capsys.readouterr().out == "" and fast is not model
    assert torch.allclose(fast(source, target), model(source, target), atol=1e-6)


# What is remembered and shown

def test_history_holds_a_number_for_each_update_and_validation_when_due():
    seen = []

    def validate(model):
        assert not model.training and torch.is_inference_mode_enabled()
        seen.append(model)
        return 0.5

    model, history = trained(7, every=3, validate=validate)
    assert all(len(getattr(history, name)) == 7 for name in ("loss", "rate", "norm", "tokens", "seconds"))
    assert history.validation == [(3, 0.5), (6, 0.5), (7, 0.5)] and seen == [model] * 3 and not model.training
    assert [type(history.loss[0]), type(history.tokens[0])] == [float, int]


def test_the_table_is_short_and_covers_every_update():
    history = History(loss=[4.0, 2.0, 1.0], rate=[0.1] * 3, validation=[(3, 0.25)])
    assert history.table(2).splitlines()[1:] == ["    1 to     1    4.00   0.10000   -",
                                                 "    2 to     3    1.50   0.10000   0.250"]
    assert len(history.table(99).splitlines()) == 4 and len(History().table().splitlines()) == 1


def test_progress_is_silent_unless_somebody_watches(monkeypatch, capsys):
    history = History(loss=[1.0], tokens=[10], seconds=[0.1])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    Progress(1)(history)
    monkeypatch.setenv("TQDM_DISABLE", "")
    Progress(1, wanted=False)(history)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Progress(1)(history)
    assert capsys.readouterr().out == "\r1/1  loss 1.000  100 tokens/s  0 s left   \n"


# Checkpoints

def test_a_crash_in_the_middle_of_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "model.pt"
    save_atomically({"update": 1}, path)

    def half(state, file):
        file.write(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        save_atomically({"update": 2}, path)
    assert torch.load(path, weights_only=True) == {"update": 1}
    assert [file.name for file in path.parent.iterdir()] == ["model.pt"]


def test_a_process_killed_in_the_middle_of_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.pt"
    save_atomically({"update": 1}, path)
    killed = child("""
class Kill:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)

save_atomically({"weights": torch.ones(99), "last": Kill()}, Path(sys.argv[1]))""", path)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert torch.load(path, weights_only=True) == {"update": 1}
    save_atomically({"update": 2}, path)  # and what it left behind is no obstacle
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


EVERYTHING = dict(accumulate=2, clip=1.0, every=3, schedule=partial(warmup_schedule, d_model=16, warmup=20),
                  validate=lambda model: float(model(*next(iter(BATCHES))).sum()))


@pytest.fixture(scope="module")
def through():
    return trained(9, **EVERYTHING)


@pytest.mark.parametrize("options", [{}, {"precision": "bfloat16"}, {"precision": "float16"}])
def test_resumed_is_equal_to_the_bit_with_dropout_accumulation_and_schedule(tmp_path, options):
    model, expected = trained(9, **EVERYTHING | options)
    checkpoint = tmp_path / "training.pt"
    trained(6, checkpoint=checkpoint, **EVERYTHING | options)
    random.seed(5)
    resumed, history = trained(9, seed=99, checkpoint=checkpoint, resume=True, **EVERYTHING | options)
    assert equal(resumed, model) and numbers(history) == numbers(expected) and len(history.seconds) == 9


@pytest.mark.parametrize("name", ["optimizer", "random", "batches"])
def test_each_part_of_the_checkpoint_matters(tmp_path, through, name):
    checkpoint = tmp_path / "training.pt"
    trained(6, checkpoint=checkpoint, **EVERYTHING)
    saved = torch.load(checkpoint, weights_only=True)
    torch.manual_seed(1)
    without = {"optimizer": saved["optimizer"] | {"state": {}}, "batches": 0, "random": [random_states(torch.device("cpu"))]}
    saved[name] = without[name]
    torch.save(saved, checkpoint)
    resumed, _ = trained(9, checkpoint=checkpoint, resume=True, **EVERYTHING)
    assert not equal(resumed, through[0])


def test_batches_that_draw_from_torchs_or_pythons_numbers_resume_too(tmp_path):
    class Drawn:
        def __iter__(self):
            while True:
                row = torch.randint(3, 13, (4, random.randint(2, 5)))
                ends = torch.full((4, 1), 2)
                yield torch.cat([row, ends], 1), torch.cat([ends - 1, row, ends], 1)

    random.seed(3)
    model, expected = trained(6, batches=Drawn(), every=2)
    random.seed(3)
    trained(4, batches=Drawn(), every=2, checkpoint=tmp_path / "a.pt")
    resumed, history = trained(6, seed=99, batches=Drawn(), every=2, checkpoint=tmp_path / "a.pt", resume=True)
    assert equal(resumed, model) and history.loss == expected.loss


def test_resume_without_a_file_begins_and_with_a_finished_one_does_nothing(tmp_path):
    checkpoint = tmp_path / "a.pt"
    model, expected = trained(3, checkpoint=checkpoint, resume=True)
    again, history = trained(3, seed=9, checkpoint=checkpoint, resume=True)
    assert equal(again, model) and numbers(history) == numbers(expected)


def test_the_checkpoint_is_plain_data_and_its_weights_load_alone(tmp_path):
    model, _ = trained(2, checkpoint=tmp_path / "a.pt")
    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    assert set(saved) == {"model", "optimizer", "scaler", "history", "batches", "random"} and saved["batches"] == 2
    other = made(9)
    other.load_state_dict(saved["model"])
    assert equal(other, model)


def test_a_checkpoint_of_float32_goes_on_in_float16_and_back(tmp_path):
    trained(2, checkpoint=tmp_path / "a.pt")
    for updates, precision in ((4, "float16"), (6, "float32"), (8, "bfloat16")):
        _, history = trained(updates, checkpoint=tmp_path / "a.pt", resume=True, precision=precision)
        assert len(history.loss) == updates


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(tmp_path):
    trained(3, checkpoint=tmp_path / "a.pt")
    for other in (made(5, d_ff=64), made(5, norm_first=True)):
        before = [weight.clone() for weight in other.state_dict().values()]
        with pytest.raises(ValueError, match="checkpoint must be of this model, got one that differs in "):
            train(other, BATCHES, updates=5, checkpoint=tmp_path / "a.pt", resume=True, device="cpu", progress=False)
        assert all(map(torch.equal, before, other.state_dict().values()))


@pytest.mark.parametrize("kind", ["empty", "half", "text", "weights", "list"])
def test_what_is_no_checkpoint_is_refused_and_kept(tmp_path, kind):
    path = tmp_path / "a.pt"
    trained(1, checkpoint=path)
    whole = path.read_bytes()
    if kind in ("weights", "list"):
        torch.save(made().state_dict() if kind == "weights" else [1], path)
    else:
        path.write_bytes({"empty": b"", "half": whole[:len(whole) // 2], "text": b"hello"}[kind])
    kept = path.read_bytes()
    with pytest.raises(ValueError, match=f"checkpoint must be a whole file that train wrote, got {re.escape(str(path))}"):
        trained(3, checkpoint=path, resume=True)
    assert path.read_bytes() == kept


def test_a_checkpoint_with_more_updates_than_asked_for_is_refused(tmp_path):
    trained(3, checkpoint=tmp_path / "a.pt")
    with pytest.raises(ValueError, match="updates must be at least the checkpoint's 3, got 2"):
        trained(2, checkpoint=tmp_path / "a.pt", resume=True)


def test_a_checkpoint_that_cannot_be_written_is_found_before_the_first_update(tmp_path):
    (tmp_path / "file").write_text("")
    for bad, error in ((tmp_path, ValueError), ("", ValueError), (tmp_path / "file" / "a.pt", OSError)):
        asked = []
        with pytest.raises(error):
            trained(2, checkpoint=bad, schedule=asked.append)
        assert not asked


def test_a_checkpoint_that_is_a_link_stays_one(tmp_path):
    (tmp_path / "drive").mkdir()
    (tmp_path / "a.pt").symlink_to(tmp_path / "drive" / "a.pt")
    trained(2, checkpoint=tmp_path / "a.pt")
    trained(4, checkpoint=tmp_path / "a.pt", resume=True)
    assert (tmp_path / "a.pt").is_symlink()
    assert len(torch.load(tmp_path / "drive" / "a.pt", weights_only=True)["history"]["loss"]) == 4


def test_a_validation_that_draws_random_numbers_does_not_change_the_training(tmp_path):
    def drawing(model):
        return torch.rand(1).item() + random.random()

    plain, _ = trained(9, every=4)
    assert equal(plain, trained(9, every=4, validate=drawing)[0])
    trained(6, every=4, validate=drawing, checkpoint=tmp_path / "a.pt")
    assert equal(plain, trained(9, every=4, validate=drawing, checkpoint=tmp_path / "a.pt", resume=True)[0])


def test_a_part_called_module_is_not_taken_for_the_model(tmp_path):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.gain = made(), nn.Parameter(torch.ones(13))

        def forward(self, source, target):
            return self.module(source, target) * self.gain

    wrapper = Wrapper()
    train(wrapper, BATCHES, updates=2, checkpoint=tmp_path / "a.pt", device="cpu", progress=False)
    assert not torch.equal(wrapper.gain, torch.ones(13))
    assert "gain" in torch.load(tmp_path / "a.pt", weights_only=True)["model"]


def test_random_states_come_back():
    states = random_states(torch.device("cpu"))
    first = torch.rand(3).tolist(), random.random()
    restore_random(states, torch.device("cpu"))
    assert (torch.rand(3).tolist(), random.random()) == first


# Stopping

@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_it_harms(tmp_path, wrong):
    calls = []

    def poisoned(logits, target, **options):
        calls.append(1)
        return PLAIN(logits, target, **options) * (wrong if len(calls) == 6 else 1)

    model = made()
    for checkpoint, last in ((tmp_path / "a.pt", tmp_path / "a.pt"), (None, "missing")):
        calls.clear()
        with pytest.raises(FloatingPointError, match=f"update 6 has loss {wrong} .*last good checkpoint is {re.escape(str(last))}$"):
            train(model, BATCHES, updates=9, every=2, loss=poisoned, device="cpu", progress=False, checkpoint=checkpoint)
        assert all(weight.isfinite().all() for weight in model.parameters())
    assert len(torch.load(tmp_path / "a.pt", weights_only=True)["history"]["loss"]) == 4


def test_a_gradient_that_is_not_finite_stops_too(tmp_path):
    def root(logits, target, **options):  # loss 0, gradient infinite
        return PLAIN(logits, target, **options) * 0 + (logits[0, 0, 0] * 0).sqrt()

    with pytest.raises(FloatingPointError, match="update 1 has .*last good checkpoint is missing"):
        trained(2, loss=root, checkpoint=tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())


def test_a_gradient_that_float16_never_gets_finite_is_an_error_and_not_a_training_that_stands_still():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.nan

    with pytest.raises(FloatingPointError, match="update 17 has loss .* and gradient norm nan"):
        trained(60, precision="float16",
                loss=lambda logits, target, **options: smoothed_cross_entropy(Broken.apply(logits), target, **options))


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_norm_is_that_of_the_weights_the_optimizer_holds(precision):
    model = made()
    optimizer = torch.optim.SGD(model.output.parameters(), lr=0.1)
    norm = train(model, BATCHES, updates=1, precision=precision, optimizer=optimizer, device="cpu", progress=False).norm[0]
    expected = model.output.weight.grad.norm().item()
    assert norm == pytest.approx(expected, rel=0.01) and norm < 10


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_a_rate_that_is_none_reaches_neither_weights_nor_checkpoint(tmp_path, rate):
    with pytest.raises(ValueError, match=f"schedule must give a rate that is finite and at least 0, got {rate} for update 4"):
        trained(6, every=2, checkpoint=tmp_path / "a.pt", schedule=lambda update: rate if update == 4 else 1e-3)
    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    assert len(saved["history"]["loss"]) == 2 and all(weight.isfinite().all() for weight in saved["model"].values())


def test_weights_that_are_not_finite_are_never_written(tmp_path):
    with pytest.raises(FloatingPointError, match="update 1 left weights that are not finite; .* missing"):
        train(made().half(), BATCHES, updates=3, every=1, checkpoint=tmp_path / "a.pt", device="cpu", progress=False)
    assert not list(tmp_path.iterdir())  # Adam's ε of 1e-9 is 0 in float16


def test_a_norm_that_overflows_in_float16_does_not_make_weights_nan():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(13, 13)

        def forward(self, source, target):
            return self.table(target)

    calls = []

    def loud(*inputs, **options):
        calls.append(1)
        return smoothed_cross_entropy(*inputs, **options) * (1e22 if len(calls) == 1 else 1)
    model = Table()
    train(model, BATCHES, updates=2, loss=loud, precision="float16", device="cpu", progress=False)
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_an_old_file_is_not_called_the_last_good_checkpoint(tmp_path):
    (tmp_path / "a.pt").write_text("of another training")
    with pytest.raises(FloatingPointError, match="is missing"):
        trained(2, loss=lambda *a, **k: PLAIN(*a, **k) * math.nan, checkpoint=tmp_path / "a.pt")


def test_an_interrupt_from_outside_finishes_the_update_writes_and_resumes_to_the_bit(tmp_path, through):
    path = tmp_path / "a.pt"
    process = child("""
class Slow:
    def __iter__(self):
        for number, batch in enumerate(BATCHES):
            if number == 8:
                print("now", flush=True)
                time.sleep(1)
            yield batch

try:
    trained(9, batches=Slow(), checkpoint=Path(sys.argv[1]), **EVERYTHING)
except KeyboardInterrupt as error:
    print(error)""", path)
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "stopped after update 5\n", err
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]
    resumed, history = trained(9, seed=99, checkpoint=path, resume=True, **EVERYTHING)
    assert equal(resumed, through[0]) and numbers(history) == numbers(through[1])


def test_a_second_interrupt_does_not_wait_and_the_old_handler_comes_back():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), finish_first() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_the_program_ignores_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with finish_first() as interrupted:
            signal.raise_signal(signal.SIGINT)
            assert not interrupted()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("update", [3, 6])
def test_an_interrupt_in_the_middle_of_an_update_finishes_that_one_also_the_last(tmp_path, update):
    calls = []

    def pressed(*inputs, **options):
        calls.append(1)
        if len(calls) == update:
            signal.raise_signal(signal.SIGINT)
        return smoothed_cross_entropy(*inputs, **options)

    with pytest.raises(KeyboardInterrupt, match=f"stopped after update {update}"):
        trained(6, loss=pressed, checkpoint=tmp_path / "a.pt")
    assert len(torch.load(tmp_path / "a.pt", weights_only=True)["history"]["loss"]) == update


def test_it_trains_in_a_thread_where_there_are_no_signals():
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(1) as pool:
        _, history = pool.submit(trained, 2).result()
    assert len(history.loss) == 2


# Wrong arguments

@pytest.mark.parametrize("options, message", [
    *(({name: value}, f"{name} must be an int above 0, got {value}") for name in ("updates", "accumulate", "every")
      for value in (0, -1, 1.5)),
    ({"clip": 0.0}, "clip must be None or above 0, got 0.0"), ({"clip": math.nan}, "clip must be None or above 0, got nan"),
    ({"precision": "half"}, "precision must be float32, bfloat16, float16 or None, got 'half'"),
    ({"resume": True}, "checkpoint must be a path to resume, got None"),
    ({"optimizer": torch.optim.SGD(made().parameters(), lr=0.1)}, "optimizer must be that of the model")])
def test_a_wrong_argument_is_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trained(**{"updates": 2} | options)


def test_too_few_batches_are_an_error_that_says_when():
    with pytest.raises(ValueError, match="batches must hold 2 for each update, got 1 for update 3"):
        trained(5, batches=list(itertools.islice(BATCHES, 5)), accumulate=2)


# Several processes

GLOO = """
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel
init_process_group("gloo")
rank, folder = get_rank(), Path(sys.argv[1]).parent
"""


def torchrun(code: str, folder: Path) -> tuple[str, str, int]:
    process = child(GLOO + code + "\ndestroy_process_group()", folder / "a.pt",
                    launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"))
    out, err = process.communicate(timeout=120)
    return out, err, process.returncode


def test_two_processes_with_unequal_tokens_train_as_one_with_both_and_resume_to_the_bit(tmp_path):
    out, err, code = torchrun("""
parts = [BATCHES.rows(list(rows)) for rows in (range(0, 3), range(3, 40), range(40, 45), range(45, 50))]
mine = parts[rank::2] * 9                       # 3 and 5 rows, or 37 and 5
options = dict(batches=mine, accumulate=2, device="cpu", progress=False, every=2, clip=0.5)
def run(updates, dropout, **more):
    torch.manual_seed(0)
    model = made(dropout=dropout)
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(rank)
    return model, train(wrapped, updates=updates, **options | more)
model, history = run(3, 0.0)
if rank == 0:
    torch.save([model.state_dict(), history.loss, history.tokens, history.norm], folder / "plain.pt")
model, history = run(4, 0.1)
run(2, 0.1, checkpoint=folder / "c.pt")
torch.manual_seed(77)
other, again = run(4, 0.1, checkpoint=folder / "c.pt", resume=True)
(folder / f"resumed{rank}").write_text(str(equal(model, other) and numbers(history) == numbers(again)))
try:
    train(made(), mine, updates=1, device="cpu", progress=False)
except ValueError as error:
    (folder / f"bare{rank}").write_text(str(error))
def stops():
    for number, batch in enumerate(mine):
        if rank == 1 and number == 3:
            signal.raise_signal(signal.SIGINT)    # only one of the two
        yield batch
try:
    run(9, 0.1, batches=stops(), checkpoint=folder / "d.pt")
except KeyboardInterrupt as error:
    (folder / f"stopped{rank}").write_text(str(error))
""", tmp_path)
    assert code == 0, err[-3000:]
    parts = [BATCHES.rows(list(rows)) for rows in (range(0, 3), range(3, 40), range(40, 45), range(45, 50))]
    alone, history = trained(3, batches=parts * 9, accumulate=4, clip=0.5, dropout=0.0)
    weights, loss, tokens, norm = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert tokens == history.tokens
    assert loss == pytest.approx(history.loss, rel=1e-4) and norm == pytest.approx(history.norm, rel=1e-3)
    assert all(torch.allclose(weights[name], weight, atol=1e-3) for name, weight in alone.state_dict().items())
    read = {name: [(tmp_path / f"{name}{rank}").read_text() for rank in (0, 1)] for name in ("resumed", "bare", "stopped")}
    assert read["resumed"] == ["True", "True"]
    assert all("model must be in DistributedDataParallel" in text for text in read["bare"])
    assert read["stopped"][0] == read["stopped"][1] and "stopped after update 2" in read["stopped"][0]
    with pytest.raises(ValueError, match="checkpoint must be of 1 processes, got one of 2"):
        trained(4, checkpoint=tmp_path / "c.pt", resume=True)


def test_alone_there_is_one_process():
    assert processes() == 1
