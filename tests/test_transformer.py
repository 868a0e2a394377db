"""Transformer and its configuration (chapter 09): equal to PyTorch's, the paper's counts, what may see what, saving, wrong input."""

import copy
import io
import itertools
import json
import math
import re
import weakref
from dataclasses import FrozenInstanceError, asdict, fields, replace

import pytest
import torch
import torch.nn.functional as F
from conftest import FEW, tokens
from conftest import SMALL as TINY
from conftest import transformer as made
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from book.transformer import (DecoderLayer, MultiHeadAttention, Transformer, TransformerConfig, causal_mask, positional_encoding,
                              record_attention)

PATHS = ("self_attention", "cross_attention")
SRC, TGT = tokens(2, 7, 13), tokens(2, 5, 17, seed=1)


# The configuration

@pytest.mark.parametrize("name, value, message", [
    *((name, value, "an int above 0") for value in (0, -3, 8.0, True, "8") for name in (
        "src_vocab_size", "tgt_vocab_size", "d_model", "n_heads", "n_layers", "d_ff", "d_k", "d_v", "max_length")),
    *((name, None, "an int above 0") for name in (
        "src_vocab_size", "tgt_vocab_size", "d_model", "n_heads", "n_layers", "d_ff", "max_length")),
    *((name, value, "in [0, 1)") for value in (1.0, -0.1, math.nan, None, False, "0.1") for name in (
        "dropout", "attention_dropout", "activation_dropout")),
    *((name, value, "a bool") for value in (1, 0, "no") for name in ("bias", "norm_first", "final_norm")),
    ("bias", None, "a bool"), ("norm_first", None, "a bool"),
    ("n_heads", 5, "a divisor of d_model 12"),
    ("positions", "sinus", "one of ('sinusoidal', 'learned', 'none')"), ("positions", None, "one of ('sinusoidal', 'learned', 'none')"),
    ("tie_embeddings", "both", "one of ('none', 'decoder', 'all')"), ("tie_embeddings", True, "one of ('none', 'decoder', 'all')"),
    *((name, value, "an id below 13") for value in (-1, 13, 4.0, True, None, "4") for name in ("pad", "bos", "eos")),
    ("pad", 1, "one of three ids, with bos 1 and eos 2")])
def test_a_value_that_cannot_be_is_named(name, value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name} must be {message}, got {value!r}')}$"):
        replace(TINY, **{name: value})


def test_every_field_refuses_something():
    for field in fields(TransformerConfig):
        with pytest.raises(ValueError, match=f"^{field.name} must be .*, got <object"):
            replace(TINY, **{field.name: object()})


@pytest.mark.parametrize("sizes", [(20, 5), (5, 20)])
def test_special_ids_must_fit_the_smaller_vocabulary(sizes):
    with pytest.raises(ValueError, match="eos must be an id below 5, got 7"):
        TransformerConfig(*sizes, eos=7)


@pytest.mark.parametrize("changed", [{"bos": 2}, {"eos": 0}, {"pad": 2}])
def test_three_special_ids_differ(changed):
    with pytest.raises(ValueError, match="pad must be one of three ids, with bos . and eos ."):
        replace(TINY, **changed)


def test_one_matrix_for_all_needs_one_vocabulary_and_one_for_the_decoder_does_not():
    with pytest.raises(ValueError, match="tgt_vocab_size must be src_vocab_size 13 to share a matrix, got 17"):
        replace(TINY, tie_embeddings="all")
    replace(TINY, tie_embeddings="decoder")


def test_heads_with_sizes_of_their_own_need_not_divide_the_model():
    assert made(d_model=13, d_k=2, d_v=3)(SRC, TGT).shape == (2, 5, 17)
    with pytest.raises(ValueError, match="n_heads"):
        replace(TINY, d_model=13, d_k=2)


def test_a_dropout_may_be_a_whole_number():
    assert made(dropout=0)(SRC, TGT).shape == (2, 5, 17)


def test_each_option_reaches_its_place():
    model = made(dropout=0.1, attention_dropout=0.2, activation_dropout=0.3)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        assert {part.dropout.p for part in layer.residuals} == {0.1} and layer.feed_forward[2].p == 0.3
        assert {part.dropout for part in layer.modules() if isinstance(part, MultiHeadAttention)} == {0.2}
    assert {model.source_positions.dropout.p, model.target_positions.dropout.p} == {0.1}


def test_a_configuration_cannot_change_and_equals_its_copy():
    with pytest.raises(FrozenInstanceError):
        TINY.d_model = 24
    assert replace(TINY) == TINY and hash(replace(TINY)) == hash(TINY)


# Sizes against the paper's

def count(config: TransformerConfig) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(config).parameters())


@pytest.mark.parametrize("config, parameters", [
    (TransformerConfig.base(37_000), 63_045_632), (TransformerConfig.big(37_000), 214_171_648),
    (replace(TransformerConfig.base(37_000), bias=True, final_norm=True), 63_084_544),
    (replace(TransformerConfig.base(37_000), tie_embeddings="none"), 63_045_632 + 2 * 37_000 * 512),
    (replace(TransformerConfig.base(37_000), tie_embeddings="decoder"), 63_045_632 + 37_000 * 512),
    (replace(TransformerConfig.base(37_000), positions="learned"), 63_045_632 + 2 * 1024 * 512)])
def test_parameters_are_as_many_as_on_paper(config, parameters):
    assert count(config) == parameters


def test_base_and_big_are_table_3s():
    base, big = TransformerConfig.base(100), TransformerConfig.big(100)
    assert (base.n_layers, base.d_model, base.d_ff, base.n_heads, base.dropout) == (6, 512, 2048, 8, 0.1)
    assert (big.n_layers, big.d_model, big.d_ff, big.n_heads, big.dropout) == (6, 1024, 4096, 16, 0.3)
    assert not (base.norm_first or base.bias or base.attention_dropout or base.activation_dropout)


@pytest.mark.parametrize("ties, matrices", [("none", 3), ("decoder", 2), ("all", 1)])
def test_tied_matrices_share_storage_also_after_moving_copying_and_training(ties, matrices):
    model = made(tgt_vocab_size=13, tie_embeddings=ties)
    target = tokens(2, 5, 13)
    for moved in (model, copy.deepcopy(model), made(tgt_vocab_size=13, tie_embeddings=ties).double()):
        moved(SRC, target).square().mean().backward()
        torch.optim.SGD(moved.parameters(), lr=0.1).step()
        assert len({m.weight.data_ptr() for m in (moved.source, moved.target, moved.output)}) == matrices


# Equal to PyTorch's

def copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    theirs.in_proj_weight.copy_(ours.input.weight)
    theirs.in_proj_bias.copy_(ours.input.bias)
    theirs.out_proj.load_state_dict(ours.output.state_dict())


@torch.no_grad()
def as_torch(model: Transformer) -> nn.Transformer:
    """PyTorch's module with our weights, or whatever stands in their place."""
    c = model.config
    shape = dict(dim_feedforward=c.d_ff, dropout=0.0, batch_first=True, norm_first=c.norm_first)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(c.d_model, c.n_heads, **shape), c.n_layers,
                                    nn.LayerNorm(c.d_model), enable_nested_tensor=False)
    theirs = nn.Transformer(c.d_model, c.n_heads, num_decoder_layers=c.n_layers, custom_encoder=encoder, **shape)
    theirs = theirs.to(model.output.weight.dtype).train(model.training)
    for mine, other in ((model.encoder, theirs.encoder), (model.decoder, theirs.decoder)):
        other.norm.load_state_dict(mine.norm.state_dict())
        for layer, copied in zip(mine.layers, other.layers, strict=True):
            copy_attention(layer.self_attention, copied.self_attn)
            if isinstance(layer, DecoderLayer):
                copy_attention(layer.cross_attention, copied.multihead_attn)
            copied.linear1.load_state_dict(layer.feed_forward[0].state_dict())
            copied.linear2.load_state_dict(layer.feed_forward[3].state_dict())
            for i, residual in enumerate(layer.residuals, start=1):
                getattr(copied, f"norm{i}").load_state_dict(residual.norm.state_dict())
    return theirs


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("norm_first, training, padded", itertools.product([False, True], repeat=3))
def test_outputs_and_all_gradients_equal_those_of_nn_transformer(dtype, tolerance, norm_first, training, padded):
    ours = made(dtype=dtype, bias=True, norm_first=norm_first, final_norm=True).train(training)
    theirs, src, tgt = as_torch(ours), SRC.clone(), TGT.clone()
    if padded:
        src[1, 4:], tgt[0, 3:] = 0, 0
    hidden = theirs(ours.source_positions(ours.source(src)), ours.target_positions(ours.target(tgt)),
                    tgt_mask=~causal_mask(5), src_key_padding_mask=src == 0, memory_key_padding_mask=src == 0)
    logits, expected = ours(src, tgt), ours.output(hidden)
    pairs = [(logits, expected)]
    words = [ours.source.weight, ours.target.weight, ours.output.weight]
    pairs += zip(torch.autograd.grad(logits.square().mean(), words, retain_graph=True),
                 torch.autograd.grad(expected.square().mean(), words, retain_graph=True))
    logits.square().mean().backward()
    in_their_layout = copy.deepcopy(ours)
    for place, weight in zip(in_their_layout.parameters(), ours.parameters()):
        place.data = weight.grad
    expected.square().mean().backward()
    pairs += [(mine, weight.grad) for mine, weight in zip(as_torch(in_their_layout).parameters(), theirs.parameters())]
    assert len(pairs) == 4 + len(list(theirs.parameters()))
    for mine, other in pairs:
        assert (mine - other).abs().max() <= tolerance * other.abs().max()


def test_without_final_norms_ours_is_the_papers_and_not_nn_transformers():
    plain, normed = made(), made(final_norm=True)
    for stack in ("encoder", "decoder"):
        assert isinstance(getattr(plain, stack).norm, nn.Identity) and isinstance(getattr(normed, stack).norm, nn.LayerNorm)
        assert isinstance(getattr(made(norm_first=True), stack).norm, nn.LayerNorm)
    assert not torch.allclose(plain(SRC, TGT), normed(SRC, TGT), atol=1e-2)


# What may see what

KINDS = [{}, {"norm_first": True}, {"positions": "learned"}, {"positions": "none"}, {"tie_embeddings": "decoder"}, {"bias": True}]


@pytest.mark.parametrize("changed", KINDS)
def test_future_tokens_do_not_change_the_past(changed):
    model = made(**changed)
    before = model(SRC, TGT)
    for place in range(5):
        other = TGT.clone()
        other[:, place] = (other[:, place] - 2) % 14 + 3
        after = model(SRC, other)
        assert torch.allclose(before[:, :place], after[:, :place], atol=1e-6)
        assert not torch.allclose(before[:, place], after[:, place], atol=1e-3)


@pytest.mark.parametrize("changed", KINDS)
def test_every_source_token_reaches_every_logit(changed):
    model = made(**changed)
    for place in range(7):
        other = SRC.clone()
        other[:, place] = (other[:, place] - 2) % 10 + 3
        assert ((model(SRC, TGT) - model(other, TGT)).abs().amax(dim=-1) > 1e-5).all()


@pytest.mark.parametrize("changed", KINDS)
@pytest.mark.parametrize("more", [1, 6])
def test_padding_changes_no_logit_of_a_real_position(changed, more):
    model = made(**changed)
    assert torch.allclose(model(F.pad(SRC, (0, more)), F.pad(TGT, (0, more)))[:, :5], model(SRC, TGT), atol=1e-5)


def test_what_stands_in_the_padding_row_of_the_source_does_not_matter():
    model, src = made(), F.pad(SRC, (0, 2))
    before = model(src, TGT)
    nn.init.normal_(model.source.weight.data[0], std=100.0)
    assert torch.allclose(before, model(src, TGT), atol=1e-5)


def test_another_padding_id_is_honoured():
    model = made(pad=5, bos=0)
    src = SRC.masked_fill(SRC == 5, 6)
    assert torch.allclose(model(F.pad(src, (0, 2), value=5), TGT), model(src, TGT), atol=1e-5)
    assert not torch.allclose(model(F.pad(src, (0, 2), value=0), TGT), model(src, TGT), atol=1e-3)


def test_an_empty_batch_gives_an_empty_batch():
    assert made()(SRC[:0], TGT[:0]).shape == (0, 5, 17)


def test_a_source_of_padding_only_gives_finite_logits_and_gradients():
    model, src = made(), SRC.clone()
    src[0] = 0
    logits = model(src, TGT)
    logits.square().mean().backward()
    assert logits.isfinite().all() and all(weight.grad.isfinite().all() for weight in model.parameters())
    assert torch.allclose(logits[1:], model(src[1:], TGT[1:]), atol=1e-5)


def test_encoding_once_and_decoding_equals_the_whole():
    model = made()
    memory, mask = model.encode(SRC)
    assert memory.shape == (2, 7, 12) and mask.shape == (2, 1, 1, 7) and mask.dtype == torch.bool
    assert torch.equal(model.decode(TGT, memory, mask), model(SRC, TGT))


@FEW
@given(data=st.data(), norm_first=st.booleans(), batch=st.integers(1, 3), S=st.integers(1, 8), T=st.integers(1, 8))
def test_in_any_batch_each_row_gives_what_it_gives_alone_without_its_padding(data, norm_first, batch, S, T):
    lengths = [(data.draw(st.integers(1, S)), data.draw(st.integers(1, T))) for _ in range(batch)]
    model, src, tgt = made(norm_first=norm_first), tokens(batch, S, 13), tokens(batch, T, 17)
    for row, (real_source, real_target) in enumerate(lengths):
        src[row, real_source:], tgt[row, real_target:] = 0, 0
    with torch.no_grad():
        logits = model(src, tgt)
        assert logits.shape == (batch, T, 17) and logits.isfinite().all()
        for row, (real_source, real_target) in enumerate(lengths):
            alone = model(src[row:row + 1, :real_source], tgt[row:row + 1, :real_target])[0]
            assert torch.allclose(logits[row, :real_target], alone, atol=1e-5)


@FEW
@given(data=st.data(), T=st.integers(2, 8))
def test_any_change_from_a_place_on_leaves_all_before_it(data, T):
    place = data.draw(st.integers(1, T - 1))
    rest = data.draw(st.lists(st.integers(0, 16), min_size=T - place, max_size=T - place))
    model, tgt = made(), tokens(1, T, 17)
    other = torch.cat([tgt[:, :place], torch.tensor([rest])], dim=1)
    with torch.no_grad():
        assert torch.allclose(model(SRC[:1], tgt)[:, :place], model(SRC[:1], other)[:, :place], atol=1e-5)


@FEW
@given(heads=st.integers(1, 4), width=st.integers(1, 5), n_layers=st.integers(1, 3), d_ff=st.integers(1, 16),
       sizes=st.tuples(st.none() | st.integers(1, 5), st.none() | st.integers(1, 5)), bias=st.booleans(),
       ties=st.sampled_from(TransformerConfig.TIES), norm_first=st.booleans())
def test_any_sizes_that_the_configuration_admits_build_run_and_survive_json(heads, width, n_layers, d_ff, sizes, bias, ties,
                                                                            norm_first):
    config = TransformerConfig(9, 9, d_model=heads * width, n_heads=heads, n_layers=n_layers, d_ff=d_ff, d_k=sizes[0],
                               d_v=sizes[1], bias=bias, tie_embeddings=ties, norm_first=norm_first)
    model = Transformer(config)
    assert model(tokens(2, 3, 9), tokens(2, 4, 9)).shape == (2, 4, 9)
    assert TransformerConfig(**json.loads(json.dumps(asdict(config)))) == config


# Before and in training

@pytest.mark.parametrize("ties", TransformerConfig.TIES)
@pytest.mark.parametrize("V", [100, 1000, 5000])
def test_an_untrained_model_loses_about_log_v(ties, V):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(V, V, d_model=64, n_heads=4, n_layers=2, d_ff=128, dropout=0.0, tie_embeddings=ties))
    src, read, target = (tokens(16, 12, V, seed) for seed in range(3))
    with torch.no_grad():
        logits = model(src, read)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten()).item()
    assert math.log(V) - 0.05 < loss < math.log(V) + 0.9
    assert abs(loss - math.log(V) - logits.var().item() / 2) < 0.25


def test_a_tied_model_that_is_given_the_answer_loses_far_less_than_log_v():
    """That the check above can fail: the target is not shifted."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(1000, 1000, d_model=64, n_heads=4, n_layers=2, d_ff=128, dropout=0.0,
                                          tie_embeddings="all"))
    target = tokens(16, 12, 1000)
    with torch.no_grad():
        loss = F.cross_entropy(model(target, target).flatten(0, 1), target.flatten()).item()
    assert loss < math.log(1000) - 1


def test_one_batch_can_be_learnt_by_heart():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(20, 20, d_model=32, n_heads=4, n_layers=1, d_ff=64, dropout=0.0, tie_embeddings="all"))
    src, tgt = tokens(4, 5, 20), tokens(4, 6, 20)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_in_training_and_not_in_evaluation(name):
    model = made(**{name: 0.5})
    assert torch.equal(model(SRC, TGT), made()(SRC, TGT))
    model.train()
    assert not torch.allclose(model(SRC, TGT), model(SRC, TGT), atol=1e-3)


def stack_inputs(model: Transformer) -> list[torch.Tensor]:
    """What encoder and decoder are given for SRC and TGT."""
    seen = []
    for stack in (model.encoder, model.decoder):
        stack.register_forward_pre_hook(lambda stack, inputs: seen.append(inputs[0]))
    model(SRC, TGT)
    return seen


def test_dropout_also_acts_on_the_embedded_input_of_both_stacks():
    assert all((given == 0).float().mean() > 0.3 for given in stack_inputs(made(dropout=0.5).train()))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none"])
def test_both_stacks_are_given_vectors_times_root_d_model_plus_positions(positions):
    model = made(positions=positions)
    for given, tokens_, embedding, encoding in zip(
            stack_inputs(model), (SRC, TGT), (model.source, model.target), (model.source_positions, model.target_positions)):
        table = {"sinusoidal": positional_encoding(tokens_.shape[1], 12).float(), "none": 0}.get(positions)
        table = encoding.table[:tokens_.shape[1]] if table is None else table
        assert torch.allclose(given, embedding.weight[tokens_] * 12**0.5 + table, atol=1e-5)


def test_without_dropout_training_and_evaluation_agree_exactly():
    model = made()
    assert torch.equal(model(SRC, TGT), model.train()(SRC, TGT))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_stays_finite_with_padding(dtype):
    model = made(dtype=dtype)
    assert model(F.pad(SRC, (0, 3)), F.pad(TGT, (0, 3))).isfinite().all()


# Save and load

@pytest.mark.parametrize("changed", [{}, {"tie_embeddings": "decoder"}, {"positions": "learned"}, {"bias": True, "norm_first": True}])
def test_a_loaded_model_gives_identical_logits(changed):
    model, file = made(**changed), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = Transformer(TransformerConfig(**json.loads(json.dumps(asdict(model.config))))).eval()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(loaded(SRC, TGT), model(SRC, TGT))
    assert (loaded.output.weight is loaded.target.weight) == (changed.get("tie_embeddings") == "decoder")


def test_the_file_keeps_a_table_of_positions_only_if_it_is_learnt():
    assert not [name for name in made().state_dict() if "positions" in name]
    assert [name for name in made(positions="learned").state_dict() if "positions" in name] == [
        "source_positions.table", "target_positions.table"]


# record_attention

def test_it_records_every_attention_by_name_with_rows_that_add_up_and_masks_kept():
    model, src = made(), F.pad(SRC, (0, 2))
    with record_attention(model) as weights:
        model(src, TGT)
    names = {f"{side}.layers.{i}.{path}" for side in ("encoder", "decoder") for i in (0, 1) for path in PATHS
             if (side, path) != ("encoder", "cross_attention")}
    assert weights.keys() == names
    for name, value in weights.items():
        T, S = (5 if "decoder" in name else 9), (9 if "encoder" in name or "cross" in name else 5)
        assert value.shape == (2, 3, T, S) and not value.requires_grad
        assert torch.allclose(value.sum(dim=-1), torch.ones(2, 3, T), atol=1e-5)
        if S == 9:
            assert (value[..., 7:] == 0).all()
        else:
            assert (value.triu(1) == 0).all()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch's own, while it compiles
def test_it_records_every_layer_of_a_compiled_model():
    model = made()
    compiled = torch.compile(model, backend="eager")
    compiled(SRC, TGT)
    for watched in (model, compiled):
        with record_attention(watched) as weights:
            compiled(SRC, TGT)
        assert len(weights) == 6


def test_decode_must_be_told_the_mask():
    model = made()
    with pytest.raises(TypeError, match="memory_mask"):
        model.decode(TGT, model.encode(SRC)[0])


def test_it_records_in_training_too():
    model = made(attention_dropout=0.5).train()
    with record_attention(model) as weights:
        model(SRC, TGT)
    assert len(weights) == 6 and all(torch.allclose(w.sum(dim=-1), torch.ones(())) for w in weights.values())


def test_outputs_are_those_of_the_unobserved_model():
    model = made()
    with record_attention(model):
        observed = model(SRC, TGT)
    assert torch.allclose(observed, model(SRC, TGT), atol=1e-5)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_it_leaves_no_hooks_and_the_fused_path_restored_also_after_an_error(monkeypatch):
    model = made()
    with record_attention(model):
        assert hooks(model) == 12
    assert hooks(model) == 0
    with pytest.raises(RuntimeError, match="stop"), record_attention(model):
        raise RuntimeError("stop")
    assert hooks(model) == 0
    asked = []
    attend = MultiHeadAttention.attend
    monkeypatch.setattr(MultiHeadAttention, "attend", lambda *inputs, need_weights=False, **options: (
        asked.append(need_weights), attend(*inputs, need_weights=need_weights, **options))[1])
    with record_attention(model):
        model(SRC, TGT)
    model(SRC, TGT)
    assert asked == [True] * 6 + [False] * 6


def test_a_second_call_replaces_what_the_first_kept_and_nothing_is_kept_alive_by_the_model():
    model = made()
    with record_attention(model) as weights:
        model(SRC, TGT)
        model(SRC[:1, :4], TGT[:1])
    assert weights["encoder.layers.0.self_attention"].shape == (1, 3, 4, 4)
    last = weakref.ref(weights.pop("encoder.layers.0.self_attention"))
    assert last() is None


# Wrong input

@pytest.mark.parametrize("src, tgt, message", [
    (SRC, TGT[:1], r"src and tgt must have one batch size, got \(2, 7\) and \(1, 5\)"),
    (SRC[:1], TGT, r"src and tgt must have one batch size, got \(1, 7\) and \(2, 5\)"),
    (SRC[:, :0], TGT, r"src must be \(B, T\), T at least 1, .*got \(2, 0\)"),
    (SRC, TGT[:, :0], r"tgt must be \(B, T\), T at least 1, .*got \(2, 0\)"),
    (SRC[..., None], TGT, r"src must be \(B, T\), .*got \(2, 7, 1\)"), (SRC, TGT[..., None], r"tgt must be .*got \(2, 5, 1\)"),
    (SRC.float(), TGT, "src must be .* int64 or int32, got .* of torch.float32"), (SRC, TGT.float(), "tgt must be .* int64 or int32, got .* of torch.float32"),
    (SRC + 10, TGT, "src must be ids from 0 to 12, got 13 to"), (SRC, TGT + 14, "tgt must be ids from 0 to 16"),
    (SRC - 9, TGT, "src must be ids from 0 to 12, got -"), (SRC, TGT - 9, "tgt must be ids from 0 to 16, got -"),
    (SRC.repeat(1, 2), TGT, "positions must be from 0 and below max_length 8, got 0 to 13"),
    (SRC, TGT.repeat(1, 2), "positions must be from 0 and below max_length 8, got 0 to 9")])
def test_input_that_cannot_be_is_named(src, tgt, message):
    with pytest.raises(ValueError, match=message):
        made(max_length=8)(src, tgt)


def test_a_memory_of_another_batch_or_a_mask_of_another_form_is_named():
    model = made()
    memory, mask = model.encode(SRC)
    with pytest.raises(ValueError, match="memory must have x's batch size 2, got 1"):
        model.decode(TGT, memory[:1], mask[:1])
    for wrong in (mask[:, 0], mask[:, 0, 0], torch.ones(5, 7, dtype=torch.bool)):  # (T, S) would be any (B, S) where T = B
        with pytest.raises(ValueError, match=re.escape(f"memory_mask must be (B, 1, 1, S), got {tuple(wrong.shape)}")):
            model.decode(TGT, memory, wrong)
