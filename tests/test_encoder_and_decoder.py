"""Encoder and decoder, layers and stacks (chapter 08): equal to PyTorch's, who sees what, where dropout falls."""

import itertools

import pytest
import torch
from conftest import numbers
from torch import nn

from book.transformer import (Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward, MultiHeadAttention, Residual,
                              causal_mask, padding_mask)

SIZES = D_MODEL, N_HEADS, D_FF = 16, 4, 24
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 0, 0], [5, 6, 7, 8, 9, 4, 3]])  # the first sentence ends in two paddings
DTYPES = [(torch.float32, 1e-5), (torch.float64, 1e-10)]
FORMS = [((), {"norm_first": False}), ((), {"norm_first": True}),  # a layer, post-norm and pre-norm
         *(((3,), {"norm_first": norm_first, "final_norm": final_norm})  # a stack of three
           for norm_first, final_norm in ((False, None), (False, True), (True, None), (True, False)))]


def form(value):
    """The name of a case in FORMS."""
    if isinstance(value, tuple):
        return "stack" if value else "layer"
    return ",".join(f"{name}={option}" for name, option in value.items())


def make(kind, *sizes, **options):
    """Ours, without dropout unless told, every parameter drawn at random: a bias in the wrong place must not hide."""
    torch.manual_seed(0)
    made = kind(*sizes, *SIZES, **{"dropout": 0.0} | options)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
    return made


def pairs_of(ours, theirs):
    """Our parts and PyTorch's that do the same, as (attention, attention) or (part, part)."""
    if isinstance(ours, Encoder):  # or Decoder
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            yield from pairs_of(mine, other)
        if theirs.norm is not None:
            yield ours.norm, theirs.norm
        return
    yield ours.self_attention, theirs.self_attn
    if isinstance(ours, DecoderLayer):
        yield ours.cross_attention, theirs.multihead_attn
    yield ours.feed_forward[0], theirs.linear1
    yield ours.feed_forward[3], theirs.linear2
    for i, residual in enumerate(ours.residuals, start=1):
        yield residual.norm, getattr(theirs, f"norm{i}")


def copy_of(ours, norm_first):
    """PyTorch's module with our weights, in the same mode and precision."""
    stacked, decoding = isinstance(ours, Encoder), isinstance(ours, (Decoder, DecoderLayer))
    theirs = (nn.TransformerDecoderLayer if decoding else nn.TransformerEncoderLayer)(
        *SIZES, dropout=0.0, batch_first=True, norm_first=norm_first)
    if stacked:
        norm = nn.LayerNorm(D_MODEL) if isinstance(ours.norm, nn.LayerNorm) else None
        options = {} if decoding else {"enable_nested_tensor": False}
        theirs = (nn.TransformerDecoder if decoding else nn.TransformerEncoder)(
            theirs, len(ours.layers), norm=norm, **options)
    with torch.no_grad():
        for mine, other in pairs_of(ours, theirs):
            for parameter, value in zip(other.parameters(), mine.parameters(), strict=True):
                parameter.copy_(value)
    return theirs.to(next(ours.parameters()).dtype).train(ours.training)


def assert_equal_with_gradients(ours, theirs, output, expected, inputs, tolerance):
    """Outputs, and the gradients of a mean loss in inputs and all parameters, within tolerance of the largest value."""
    results = []
    for model, result in ((ours, output), (theirs, expected)):
        parameters = list(model.parameters())
        found = torch.autograd.grad(result.square().mean(), [*inputs, *parameters])
        results.append((found[:len(inputs)], dict(zip(parameters, found[len(inputs):]))))
    (mine, of_mine), (others, of_others) = results
    compared = [(output, expected), *zip(mine, others)]
    for part, other in pairs_of(ours, theirs):
        compared += zip((of_mine[p] for p in part.parameters()), (of_others[p] for p in other.parameters()), strict=True)
    assert sum(right.numel() for _, right in compared[1 + len(inputs):]) == sum(p.numel() for p in ours.parameters())
    largest = max(right.abs().max() for _, right in compared[1:])
    assert (output - expected).abs().max() <= tolerance * expected.abs().max()
    for left, right in compared[1:]:
        assert (left - right).abs().max() <= tolerance * largest


@pytest.mark.parametrize("dtype, tolerance", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("n_layers, options", FORMS, ids=form)
@pytest.mark.parametrize("padded", [False, True])
def test_encoder_outputs_and_gradients_equal_pytorchs(dtype, tolerance, training, n_layers, options, padded):
    ours = make(Encoder if n_layers else EncoderLayer, *n_layers, **options).to(dtype).train(training)
    theirs = copy_of(ours, options["norm_first"])
    x = numbers(2, 7, D_MODEL, dtype=dtype).requires_grad_()
    mask = padding_mask(TOKENS) if padded else None
    expected = theirs(x, src_key_padding_mask=TOKENS == 0 if padded else None)  # True there: drop
    assert_equal_with_gradients(ours, theirs, ours(x, mask), expected, [x], tolerance)


@pytest.mark.parametrize("dtype, tolerance", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("n_layers, options", FORMS, ids=form)
@pytest.mark.parametrize("padded", [False, True])
def test_decoder_outputs_and_gradients_equal_pytorchs(dtype, tolerance, training, n_layers, options, padded):
    ours = make(Decoder if n_layers else DecoderLayer, *n_layers, **options).to(dtype).train(training)
    theirs = copy_of(ours, options["norm_first"])
    x = numbers(2, 5, D_MODEL, dtype=dtype).requires_grad_()
    memory = numbers(2, 7, D_MODEL, dtype=dtype).requires_grad_()
    target = torch.tensor([[1, 4, 5, 6, 7], [1, 4, 5, 0, 0]])  # padding on the right, as everywhere
    expected = theirs(x, memory, tgt_mask=~causal_mask(5), memory_key_padding_mask=TOKENS == 0 if padded else None,
                      tgt_key_padding_mask=target == 0 if padded else None)
    output = ours(x, memory, padding_mask(target) if padded else None, padding_mask(TOKENS) if padded else None)
    assert_equal_with_gradients(ours, theirs, output, expected, [x, memory], tolerance)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # pre-norm: it says that its fast path is off
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_whole_of_nn_transformer_equals_our_stacks_with_final_norms(norm_first):
    """nn.Transformer ends both stacks in a norm, also where the layers are post-norm (pytorch issue 24930)."""
    theirs = nn.Transformer(D_MODEL, N_HEADS, 2, 2, D_FF, dropout=0.0, batch_first=True, norm_first=norm_first)
    theirs.encoder.enable_nested_tensor = False
    assert isinstance(theirs.encoder.norm, nn.LayerNorm) and isinstance(theirs.decoder.norm, nn.LayerNorm)
    encoder, decoder = (make(kind, 2, norm_first=norm_first, final_norm=True) for kind in (Encoder, Decoder))
    theirs.encoder.load_state_dict(copy_of(encoder, norm_first).state_dict())
    theirs.decoder.load_state_dict(copy_of(decoder, norm_first).state_dict())
    source, x = numbers(2, 7, D_MODEL), numbers(2, 5, D_MODEL)
    memory = encoder(source, padding_mask(TOKENS))
    expected = theirs(source, x, tgt_mask=~causal_mask(5), src_key_padding_mask=TOKENS == 0,
                      memory_key_padding_mask=TOKENS == 0)
    assert torch.allclose(decoder(x, memory, memory_mask=padding_mask(TOKENS)), expected, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_comparison_with_the_other_norm_order_fails(norm_first):
    ours, x = make(EncoderLayer, norm_first=norm_first), numbers(2, 7, D_MODEL)
    assert (ours(x) - copy_of(ours, not norm_first)(x)).abs().max() > 0.1


def test_a_post_norm_encoder_layer_is_its_parts_written_out():
    ours, x = make(EncoderLayer), numbers(2, 7, D_MODEL)
    first, second = (residual.norm for residual in ours.residuals)
    x1 = first(x + ours.self_attention(x)[0])
    assert torch.allclose(ours(x), second(x1 + ours.feed_forward(x1)), atol=1e-6)


def test_a_pre_norm_decoder_layer_is_its_parts_written_out():
    ours, x, memory = make(DecoderLayer, norm_first=True), numbers(2, 5, D_MODEL), numbers(2, 7, D_MODEL)
    first, second, third = (residual.norm for residual in ours.residuals)
    x1 = x + ours.self_attention(first(x), mask=causal_mask(5))[0]
    x2 = x1 + ours.cross_attention(second(x1), memory)[0]
    assert torch.allclose(ours(x, memory), x2 + ours.feed_forward(third(x2)), atol=1e-6)


@pytest.mark.parametrize("norm_first, masked", itertools.product([False, True], repeat=2))
def test_no_decoder_position_sees_a_later_one_and_every_later_one_sees_it(norm_first, masked):
    ours, x, memory = make(Decoder, 3, norm_first=norm_first), numbers(1, 6, D_MODEL), numbers(1, 7, D_MODEL)
    mask = torch.ones(1, 1, 1, 6, dtype=torch.bool) if masked else None  # a mask beside must not lift the causal one
    before = ours(x, memory, mask)
    for t in range(6):
        other = x.clone()
        other[:, t] = numbers(D_MODEL)
        change = (ours(other, memory, mask) - before).abs().amax(dim=-1)[0]
        assert (change[:t] == 0).all() and (change[t:] > 1e-4).all()


def test_gradients_do_not_reach_later_target_tokens_either():
    ours, x = make(Decoder, 2), numbers(1, 6, D_MODEL).requires_grad_()
    ours(x, numbers(1, 7, D_MODEL))[:, 2].sin().sum().backward()
    assert (x.grad[:, 3:] == 0).all() and (x.grad[:, :3] != 0).any(dim=-1).all()


def test_every_decoder_position_sees_every_row_of_the_memory():
    decoder, memory, x = make(DecoderLayer), numbers(1, 7, D_MODEL), numbers(1, 5, D_MODEL)
    before = decoder(x, memory)
    for s in range(7):
        other = memory.clone()
        other[:, s] = numbers(D_MODEL)
        assert ((decoder(x, other) - before).abs().amax(dim=-1) > 1e-4).all()


def test_every_row_of_the_memory_sees_every_source_token():
    encoder, source = make(EncoderLayer), numbers(1, 7, D_MODEL)
    before = encoder(source)
    for s in range(7):
        other = source.clone()
        other[:, s] = numbers(D_MODEL)
        assert ((encoder(other) - before).abs().amax(dim=-1) > 1e-4).all()


def test_all_decoder_layers_read_the_same_memory_and_it_alone_carries_the_source():
    decoder, memory, seen = make(Decoder, 3), numbers(2, 7, D_MODEL), []
    for layer in decoder.layers:
        layer.cross_attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    decoder(numbers(2, 5, D_MODEL), memory)
    assert len(seen) == 3 and all(read is memory for read in seen)


@pytest.mark.parametrize("norm_first", [False, True])
def test_padding_in_the_source_changes_no_real_position(norm_first):
    encoder, decoder = (make(kind, 2, norm_first=norm_first) for kind in (Encoder, Decoder))
    x, source, tokens = numbers(1, 5, D_MODEL), numbers(1, 4, D_MODEL), torch.tensor([[5, 6, 7, 8]])
    padded, padded_tokens = torch.cat([source, 9 * numbers(1, 3, D_MODEL)], 1), torch.tensor([[5, 6, 7, 8, 0, 0, 0]])
    outputs = []
    for values, ids in ((source, tokens), (padded, padded_tokens)):
        mask = padding_mask(ids)
        memory = encoder(values, mask)
        outputs.append((memory[:, :4], decoder(x, memory, memory_mask=mask)))
    for short, long in zip(*outputs):
        assert torch.allclose(short, long, atol=1e-5)
    unmasked = decoder(x, encoder(padded))
    assert (unmasked - outputs[0][1]).abs().max() > 0.1  # without the masks it does


def test_padding_on_the_right_of_the_target_changes_no_real_position():
    decoder, x, memory = make(Decoder, 2), numbers(1, 4, D_MODEL), numbers(1, 7, D_MODEL)
    padded = torch.cat([x, 9 * numbers(1, 3, D_MODEL)], dim=1)
    assert torch.allclose(decoder(padded, memory)[:, :4], decoder(x, memory), atol=1e-6)


def test_a_sentence_alone_gives_what_it_gives_in_a_batch():
    encoder, decoder = make(Encoder, 2), make(Decoder, 2)
    source, x, mask = numbers(2, 7, D_MODEL), numbers(2, 5, D_MODEL), padding_mask(TOKENS)
    together = decoder(x, encoder(source, mask), memory_mask=mask)
    alone = decoder(x[:1], encoder(source[:1, :5]))
    assert torch.allclose(together[:1], alone, atol=1e-5)


@pytest.mark.parametrize("kind", [Encoder, Decoder])
@pytest.mark.parametrize("norm_first, final_norm, expected", [
    (False, None, False), (True, None, True), (False, True, True), (True, False, False)])
def test_the_final_norm_comes_with_pre_norm_unless_told_otherwise(kind, norm_first, final_norm, expected):
    ours = make(kind, 2, norm_first=norm_first, final_norm=final_norm)
    assert isinstance(ours.norm, nn.LayerNorm if expected else nn.Identity)
    assert all(r.norm_first == norm_first for r in ours.modules() if isinstance(r, Residual))
    inputs = (numbers(2, 5, D_MODEL), numbers(2, 7, D_MODEL))[:2 if kind is Decoder else 1]
    x, *more = inputs
    for layer in ours.layers:
        x = layer(x, *more)
    assert torch.equal(ours(*inputs), ours.norm(x))


OPTIONS = {"dropout": (0.3, 0.0, 0.0), "attention_dropout": (0.0, 0.3, 0.0), "activation_dropout": (0.0, 0.0, 0.3)}


@pytest.mark.parametrize("kind", [Encoder, Decoder])
@pytest.mark.parametrize("option, expected", OPTIONS.items(), ids=OPTIONS)
def test_each_dropout_argument_reaches_its_place_and_no_other(kind, option, expected):
    ours = make(kind, 2, **{option: 0.3})
    after, weights, inside = expected
    assert {r.dropout.p for r in ours.modules() if isinstance(r, Residual)} == {after}
    assert {a.dropout for a in ours.modules() if isinstance(a, MultiHeadAttention)} == {weights}
    for feed_forward in (f for f in ours.modules() if isinstance(f, FeedForward)):
        assert isinstance(feed_forward[1], nn.ReLU) and feed_forward[2].p == inside  # after the ReLU


@pytest.mark.parametrize("kind", [EncoderLayer, DecoderLayer])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_dropout_acts_in_training_only(kind, option):
    ours, inputs = make(kind, **{option: 0.3}), (numbers(2, 5, D_MODEL), numbers(2, 7, D_MODEL))
    inputs = inputs[:2 if kind is DecoderLayer else 1]
    once, again = ours(*inputs), ours(*inputs)
    assert not torch.allclose(once, again)
    ours.eval()
    assert torch.equal(ours(*inputs), ours(*inputs)) and not torch.allclose(once, ours(*inputs))


@pytest.mark.parametrize("kind", [EncoderLayer, DecoderLayer])
def test_without_dropout_training_and_evaluation_agree_exactly(kind):
    ours, inputs = make(kind), (numbers(2, 5, D_MODEL), numbers(2, 7, D_MODEL))[:2 if kind is DecoderLayer else 1]
    trained = ours.train()(*inputs)
    assert torch.equal(trained, ours.eval()(*inputs))


def test_the_papers_dropout_is_the_default():
    for ours in (EncoderLayer(*SIZES), DecoderLayer(*SIZES)):
        assert {r.dropout.p for r in ours.residuals} == {0.1}
        assert (ours.self_attention.dropout, ours.feed_forward[2].p) == (0.0, 0.0)


def test_a_dropped_sublayer_leaves_the_way_around_it():
    """With everything dropped after the sublayers, a pre-norm layer hands on what came in."""
    ours, x = make(DecoderLayer, norm_first=True), numbers(2, 5, D_MODEL)
    for residual in ours.residuals:
        residual.dropout.p = 1.0
    assert torch.equal(ours(x, numbers(2, 7, D_MODEL)), x)


@pytest.mark.parametrize("kind, expected", [(EncoderLayer, 3_150_336), (DecoderLayer, 4_199_936)])
def test_layers_of_base_size_have_the_papers_numbers_of_parameters(kind, expected):
    assert sum(p.numel() for p in kind(512, 8, 2048, bias=False).parameters()) == expected


def test_head_sizes_reach_every_attention():
    ours = make(Decoder, 2, d_k=3, d_v=5, bias=False)
    found = [a for a in ours.modules() if isinstance(a, MultiHeadAttention)]
    assert len(found) == 4
    assert all(a.sizes == (12, 12, 20) and a.input.out_features == 44 and a.output.bias is None for a in found)
    assert ours(numbers(2, 5, D_MODEL), numbers(2, 7, D_MODEL)).shape == (2, 5, D_MODEL)


def test_layers_of_a_stack_share_no_weights():
    parameters = list(make(Decoder, 3).parameters())
    assert len({p.data_ptr() for p in parameters}) == len(parameters)
    assert not torch.equal(*(layer.feed_forward[0].weight for layer in make(Encoder, 2).layers))


@pytest.mark.parametrize("kind", [Encoder, Decoder])
@pytest.mark.parametrize("sizes, message", [
    ((0, 16, 4, 24), "n_layers must be an int above 0, got 0"), ((2, 0, 4, 24), "d_model must be an int above 0, got 0"),
    ((2, 16, 0, 24), "n_heads must be an int above 0, got 0"), ((2, 16, 4, 0), "d_ff must be an int above 0, got 0"),
    ((2, 16, 3, 24), "d_model 16 and n_heads 3"), ((2.5, 16, 4, 24), "n_layers must be an int above 0, got 2.5")])
def test_wrong_sizes_are_named(kind, sizes, message):
    with pytest.raises(ValueError, match=message):
        kind(*sizes)


@pytest.mark.parametrize("x, memory, message", [
    ((2, 5, 12), (2, 7, 16), r"x must be .*16\) and not empty, got \(2, 5, 12\)"),
    ((2, 0, 16), (2, 7, 16), r"x must be .*got \(2, 0, 16\)"), ((2, 5, 16), (2, 0, 16), r"memory must be .*got \(2, 0, 16\)"),
    ((5, 16), (2, 7, 16), r"x must be .*got \(5, 16\)"),
    ((2, 5, 16), (2, 7, 12), r"memory must be .*got \(2, 7, 12\)"),
    ((2, 5, 16), (3, 7, 16), "memory must have x's batch size 2, got 3")])
@pytest.mark.parametrize("norm_first", [False, True])
def test_inputs_that_do_not_fit_are_named_in_pre_norm_and_post_norm(x, memory, message, norm_first):
    with pytest.raises(ValueError, match=message):
        make(Decoder, 2, norm_first=norm_first)(numbers(*x), numbers(*memory))


@pytest.mark.parametrize("kind", [Encoder, Decoder])
@pytest.mark.parametrize("option", OPTIONS)
def test_impossible_dropouts_are_named(kind, option):
    with pytest.raises(ValueError, match=f"^{option} must be in .* got 1.5"):
        kind(2, *SIZES, **{option: 1.5})


def test_a_decoder_without_memory_is_refused_since_it_would_look_at_its_own_future():
    with pytest.raises(ValueError, match="memory must be .* got None"):
        make(Decoder, 2)(numbers(1, 5, D_MODEL), None)


def test_masks_may_be_named():
    encoder, decoder, mask = make(Encoder, 2), make(Decoder, 2), padding_mask(TOKENS)
    source, x = numbers(2, 7, D_MODEL), numbers(2, 5, D_MODEL)
    memory = encoder(source, mask=mask)
    assert torch.equal(memory, encoder(source, mask))
    assert torch.equal(decoder(x, memory, memory_mask=mask), decoder(x, memory, None, mask))
