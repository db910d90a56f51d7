"""What makes training fast changes no result: products by oneDNN, cheap dropout masks, the loss without all logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, LogitsProcessorList
from transformers.generation import MinLengthLogitsProcessor

from heedful import attending_heed, fast_paths_heed, loss_heed, packed_rows_heed
from heedful.fast_paths_heed import HeedDropout, linear, project, project_together
from heedful.packed_rows_heed import PackedTokens
from heedful.versions_heed import cache_of
from helpers import VARIANTS, assert_error, pairwise, tiny_model


@pytest.fixture(autouse=True, scope="module")
def products_of_onednn():
    """Take oneDNN's products wherever torch has them, also on a processor on which MKL is faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_paths_heed, "multiplies_by_onednn", torch.backends.mkldnn.is_available)
        patch.setattr(fast_paths_heed, "WORTH_ONEDNN", 100)
        yield


def make_model(**options):
    return tiny_model(**options).train()


def make_batch(rows=5, length=7):
    torch.manual_seed(1)
    labels = torch.randint(4, 50, (rows, length))
    labels[1, 3:] = labels[3, 5:] = -100
    return {"input_ids": torch.randint(4, 50, (rows, 6)), "labels": labels}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(found, wanted, tolerance=1e-5):
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    inner=st.integers(1, 40),
    outer=st.integers(1, 40),
    has_bias=st.booleans(),
)
def test_a_product_and_its_gradients_are_those_of_torch(shape, inner, outer, has_bias):
    shape = [8, *shape]
    inputs = [torch.randn(*shape, inner), torch.randn(outer, inner), torch.randn(outer) if has_bias else None]
    gradient = torch.randn(*shape, outer)

    def run(function):
        leaves = [None if each is None else each.clone().requires_grad_() for each in inputs]
        output = function(*leaves)
        output.backward(gradient)
        return [output, *(leaf.grad for leaf in leaves if leaf is not None)]

    torch.testing.assert_close(run(linear), run(F.linear), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
def test_products_are_those_of_onednn_where_it_has_them(monkeypatch):
    taken, apply = [], fast_paths_heed.OneDnnProduct.apply
    monkeypatch.setattr(fast_paths_heed.OneDnnProduct, "apply", lambda *given: taken.append(change) or apply(*given))
    for change in ("none", "off", "float64", "autocast", "few"):
        dtype = torch.float64 if change == "float64" else torch.float32
        layer, states = nn.Linear(4, 3, dtype=dtype), torch.randn(1 if change == "few" else 9, 4, dtype=dtype)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast")
        with torch.backends.mkldnn.flags(enabled=change != "off"), autocast:
            assert project(states, layer).shape == (len(states), 3)
    assert taken == ["none"]


def test_projections_together_are_projections_one_by_one_and_can_be_differentiated_twice():
    def first_and_second(parts, leaves):
        first = torch.autograd.grad(sum(part.pow(3).sum() for part in parts), leaves, create_graph=True)
        return first, torch.autograd.grad(first[0].pow(2).sum(), leaves[:2])

    for with_bias in (True, False):
        layers = nn.ModuleList([nn.Linear(8, width, bias=with_bias) for width in (4, 4, 6)])
        states = torch.randn(3, 5, 8, requires_grad=True)
        ways = project_together(states, *layers), [layer(states) for layer in layers]
        torch.testing.assert_close(list(ways[0]), ways[1])
        found, wanted = (first_and_second(parts, [states, *layers.parameters()]) for parts in ways)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-3, atol=1e-2)
    for device in ("cpu", "meta"):  # they are joined on the CPU alone
        states, *linears = torch.randn(3, 16, device=device), *(nn.Linear(16, 16, device=device) for _ in range(3))
        found = {each.grad_fn.name() for each in project_together(states, *linears)}
        assert (found == {"SplitWithSizesBackward0"}) == (device == "cpu")


def test_dropout_drops_its_share_and_scales_the_rest_independently():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        dropped = HeedDropout(0.3).train()(torch.ones(301, 333, dtype=dtype))
        assert dropped.dtype == dtype
        assert (dropped == 0).float().mean().item() == pytest.approx(0.3, abs=0.005)
        torch.testing.assert_close(dropped[dropped != 0].unique().float(), torch.tensor([1 / 0.7]), rtol=0.01, atol=0)
    kept = (HeedDropout(0.5).train()(torch.ones(400_000)) != 0).float() - 0.5
    assert all(abs((kept[:-distance] * kept[distance:]).mean().item()) < 0.002 for distance in range(1, 9))
    assert all(abs(kept[lane::4].mean().item()) < 0.005 for lane in range(4))  # four features share a random number


def test_the_gradient_of_dropout_goes_where_the_states_went():
    for p, shape in itertools.product([0.0, 1e-6, 0.1, 0.999, 1 - 1e-9, 1.0], [(0, 3), (1,), (7,), (2, 3, 5)]):
        states = torch.ones(shape, requires_grad=True)
        dropped = HeedDropout(p).train()(states)
        dropped.sum().backward()
        assert torch.equal(states.grad, dropped.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_does_nothing_in_evaluation_follows_the_seed_and_can_be_differentiated_twice(dtype):
    dropout, states = HeedDropout(0.5), torch.randn(50, dtype=dtype, requires_grad=True)
    assert dropout.eval()(states) is states
    first, second = (torch.manual_seed(3) and dropout.train()(states) for _ in range(2))
    assert torch.equal(first, second)
    dropped = dropout(states)
    assert not torch.equal(first, dropped)
    (first,) = torch.autograd.grad(dropped.pow(3).sum(), states, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), states)
    kept = dropped.detach() != 0
    assert 0 < kept.sum() < 50
    torch.testing.assert_close(second, 6 * dropped.detach() * 4 * kept)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(2, 40), seed=st.integers(0, 99), scale=st.floats(0.01, 100))
def test_a_norm_that_keeps_its_output_has_torch_s_output_and_gradients(rows, width, seed, scale):
    torch.manual_seed(seed)
    states, weight, bias = torch.randn(2, rows, width) * scale, torch.rand(width) + 0.5, torch.randn(width)
    upstream = torch.randn(2, rows, width)

    def plain(states, weight, bias, epsilon):
        return F.layer_norm(states, (width,), weight, bias, epsilon)

    def run(function, dtype):
        leaves = [each.to(dtype).requires_grad_() for each in (states, weight, bias)]
        output = function(*leaves, 1e-5)
        return output, torch.autograd.grad(output, leaves, upstream.to(dtype))

    found, ours = run(fast_paths_heed.LeanLayerNorm.apply, torch.float32)
    (wanted, theirs), (_, exact) = run(plain, torch.float32), run(plain, torch.float64)
    assert torch.equal(found, wanted)
    # What is subtracted to find the gradient of the states is as large as this.
    steepest = states.var(-1, correction=0).add(1e-5).rsqrt().max() * upstream.abs().max()
    for one, other, right, size in zip(ours, theirs, exact, (steepest, rows, rows), strict=True):
        # Where two features are nearly equal torch's own gradient is not exact either.
        assert (one - right).abs().max() <= 1e-4 * size + 2 * (other - right).abs().max()


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_a_step_with_lean_norms_has_the_gradients_of_one_without(placement, monkeypatch):
    model, batch = make_model(norm_placement=placement), make_batch()
    calls = []
    plain = fast_paths_heed.LeanLayerNorm.apply
    monkeypatch.setattr(fast_paths_heed.LeanLayerNorm, "apply", lambda *given: calls.append(1) or plain(*given))
    found = gradients(model, model.loss_of(batch))
    assert len(calls) == 2 * 2 + 2 * 3
    monkeypatch.setattr(fast_paths_heed, "can_use_lean_norm", lambda norm, states: False)
    assert_same(found, gradients(model, model.loss_of(batch)))


def test_a_norm_keeps_its_input_where_the_output_does_not_give_it_back():
    norm, states, can_use = nn.LayerNorm(8), torch.randn(2, 8, requires_grad=True), fast_paths_heed.can_use_lean_norm
    assert can_use(norm, states)
    assert not can_use(nn.LayerNorm(8).bfloat16(), states.bfloat16())
    with torch.no_grad():
        assert not can_use(norm, states)  # as in a frozen model
        norm.weight[3], norm.bias[0] = 1e-6, 0.5  # a weight near zero
    assert not can_use(norm, states)


def make_padded_batch(side="right"):
    torch.manual_seed(2)
    lengths = torch.tensor([6, 2, 4, 1, 3])[:, None]
    places = torch.arange(6) if side == "right" else torch.arange(5, -1, -1)
    return make_batch() | {"attention_mask": (places < lengths).long()}


@pytest.fixture
def packed_rows(monkeypatch):
    """Numbers of rows that were computed instead of a padded batch's."""
    rows, pack = [], PackedTokens.pack

    def noting(self, states):
        packed = pack(self, states)
        rows.append((packed.shape[1], states.shape[0] * states.shape[1]))
        return packed

    monkeypatch.setattr(PackedTokens, "pack", noting)
    return rows


def assert_packing_changes_nothing(model, batch, rows, monkeypatch):
    """Compare loss and gradients with those of all positions; return the numbers of rows that were computed."""
    loss = model.loss_of(batch)
    found, packed = gradients(model, loss), {*rows}
    assert packed
    monkeypatch.setattr(packed_rows_heed, "LEAST_PADDING", 1.0)
    rows.clear()
    whole = model.loss_of(batch)
    assert not rows
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    assert_same(found, gradients(model, whole))
    return packed


PACKED = ["default", "modern", "rotary", "t5", "neighbourhoods", "grouped", "shared_layers", "bart"]


@pytest.mark.parametrize(("name", "kernel", "side"), pairwise(PACKED, ["eager", "sdpa"], ["right", "left"]))
def test_padding_that_is_not_computed_changes_neither_loss_nor_gradients(name, kernel, side, packed_rows, monkeypatch):
    model, batch = make_model(label_smoothing=0.1, **VARIANTS[name]), make_padded_batch(side)
    model.set_attn_implementation(kernel)
    targets, sources = 35 - 4 - 2, 6 + 2 + 4 + 1 + 3
    found = assert_packing_changes_nothing(model, batch, packed_rows, monkeypatch)
    assert {(targets + 1, 35), (sources + 1, 30)} <= found


def test_a_mask_and_labels_within_the_targets_change_nothing_where_padding_is_not_computed(packed_rows, monkeypatch):
    model, batch = make_model(), make_padded_batch()
    batch["decoder_input_ids"] = torch.randint(4, 50, (5, 7))
    batch["decoder_attention_mask"] = (torch.rand(5, 7) > 0.4).long()
    batch["labels"] = batch["labels"].masked_fill(torch.rand(5, 7) > 0.5, -100)
    batch["decoder_attention_mask"][:, 0] = 1
    batch["labels"][:, 0] = 7
    assert_packing_changes_nothing(model, batch, packed_rows, monkeypatch)


def without_a_source(model, batch):
    batch["attention_mask"][1] = 0
    batch["labels"][1], batch["labels"][:, 0] = -100, 5
    batch["labels"] = batch["labels"][:, :1]


def with_a_cache(model, batch):
    del batch["attention_mask"]
    first = {"decoder_input_ids": batch["labels"][:, :1] * 0 + 4, "use_cache": True}
    batch["past_key_values"] = cache_of(model(input_ids=batch["input_ids"], **first))


# Where logits are seen, and where something else is.
LOGITS_SEEN = {
    "asked": lambda model, batch: batch.update(logits_to_keep=0),
    "hook": lambda model, batch: model.lm_head.register_forward_hook(lambda *_: None),
    "subclass": lambda model, batch: setattr(model.lm_head, "__class__", type("Adapted", (nn.Linear,), {})),
}
OBSERVED = LOGITS_SEEN | {
    "recorded": lambda model, batch: batch.update(output_hidden_states=True),
    "configured": lambda model, batch: setattr(model.config, "output_hidden_states", True),
    **{"empty source": without_a_source, "cache": with_a_cache},
}


@pytest.mark.parametrize("which", OBSERVED)
def test_logits_and_padding_are_computed_where_someone_may_look_at_them(which, packed_rows):
    model, batch = make_model(), make_padded_batch() | {"logits_to_keep": torch.arange(0)}
    OBSERVED[which](model, batch)
    outputs = model(**batch)
    assert not packed_rows
    assert (outputs.logits is not None) == (which in LOGITS_SEEN)
    if which in ("recorded", "configured"):
        assert {tuple(states.shape[:2]) for states in outputs.decoder_hidden_states} == {(5, 7)}


def test_padding_is_left_out_until_somebody_watches_and_again_afterwards(packed_rows):
    """A hook counts from the next step on, whatever it is and whenever it is added; transformers' own do not."""
    model, batch = make_model(), make_padded_batch()
    layer, seen = model.model.encoder.layers[0], []
    hooked = model.model.decoder.layers[1].feed_forward
    watchers = [
        lambda: hooked.register_forward_hook(lambda module, given, output: seen.append(output.shape[:2])),
        lambda: layer.feed_forward.fc1.register_forward_hook(lambda *_: None),
        lambda: layer.self_attn.register_forward_pre_hook(lambda *_: None),
        lambda: layer.self_attn_residual.norm.register_full_backward_hook(lambda *_: None),
        lambda: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
        lambda: torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None),
    ]

    def is_packed(**arguments):
        packed_rows.clear()
        model(**batch, **arguments, logits_to_keep=torch.arange(0))
        return bool(packed_rows)

    assert not is_packed(output_attentions=True, output_hidden_states=True)
    assert is_packed()
    for watch in watchers:
        handle = watch()
        assert not is_packed()
        assert not is_packed()
        handle.remove()
        assert is_packed()
    assert seen == [(5, 7)] * 2
    other = make_model().model.encoder.layers[1]
    other.register_forward_hook(lambda *_: None)
    model.model.encoder.layers[1] = other
    assert not is_packed()


def test_an_adapter_within_the_layers_is_given_packed_states_and_changes_nothing(packed_rows, monkeypatch):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules=["fc1", "q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(make_model(), adapter)
    assert_packing_changes_nothing(adapted, make_padded_batch(), packed_rows, monkeypatch)


def test_products_have_few_numbers_of_rows(packed_rows):
    """In bfloat16, oneDNN compiles a product for each new number, which took a quarter of a training step."""
    for count in range(40, 70):
        tokens = torch.arange(40) < torch.randint(10, 40, (count, 1), generator=torch.Generator().manual_seed(count))
        PackedTokens(tokens).pack(torch.zeros(count, 40, 1))
        assert packed_rows[-1][0] <= 1.07 * tokens.sum()
    assert len({rows for rows, _ in packed_rows}) < 15


def test_the_loss_multiplies_few_numbers_of_rows(monkeypatch):
    seen, states, weight = [], torch.randn(250, 4), torch.randn(9, 4)
    product = loss_heed.linear
    monkeypatch.setattr(loss_heed, "linear", lambda rows, *others: seen.append(len(rows)) or product(rows, *others))
    for count in range(150, 250):
        places = torch.arange(count)
        loss_heed.OutputLoss.apply(states, weight, None, torch.ones(250, dtype=torch.long), places, 0.1)
        assert seen[-1] <= 1.07 * count
    assert len({*seen}) < 20


def test_a_gradient_flows_through_packed_states_twice():
    packing = PackedTokens(torch.tensor([[True, True, False], [True, False, False]]))
    states = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[1.0, 1, 0], [1, 0, 0]], dtype=torch.float64)[..., None]

    def function(states):
        packed = packing.pack(states)
        assert packed.shape == (1, 4, 4)
        return packing.unpack(packed.pow(3)) * tokens

    torch.testing.assert_close(function(states), states.pow(3) * tokens)
    assert torch.autograd.gradcheck(function, states)
    assert torch.autograd.gradgradcheck(function, states)


FORMS = {
    **{"default": {}, "frozen": {"tie_word_embeddings": False}, "extreme": {}},
    "not smoothed": {"tie_word_embeddings": False, "output_bias": True, "label_smoothing": 0.0},
}


@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize("num_items", [None, 77])
def test_the_loss_without_logits_is_the_loss_with_them(which, num_items, monkeypatch):
    monkeypatch.setattr(loss_heed, "TOKENS_AT_ONCE", 4)
    model, batch = make_model(**{"label_smoothing": 0.1} | FORMS[which]), make_batch()
    model.lm_head.requires_grad_(which != "frozen")
    if which == "extreme":
        model.lm_head.weight.data.mul_(500)
    batch |= {"num_items_in_batch": num_items}
    whole, short = model(**batch), model(**batch, logits_to_keep=torch.arange(0))
    assert short.logits is None
    torch.testing.assert_close(short.loss, whole.loss, rtol=1e-5 if which == "extreme" else 1e-6, atol=0)
    wanted, found = gradients(model, whole.loss * 3), gradients(model, short.loss * 3)
    assert all(value.isfinite().all() for value in found.values())
    assert ("lm_head.weight" in found) == (which == "not smoothed")
    if which != "extreme":
        assert_same(found, wanted)


def test_the_loss_without_logits_never_holds_more_than_a_few_rows_of_them(monkeypatch):
    rows, plain = [], fast_paths_heed.linear

    def noting(states, weight, bias):
        rows.append(len(states) if len(weight) == 99 else 0)
        return plain(states, weight, bias)

    monkeypatch.setattr(loss_heed, "TOKENS_AT_ONCE", 8)
    for module in (fast_paths_heed, loss_heed):
        monkeypatch.setattr(module, "linear", noting)
    make_model().loss_of(make_batch()).backward()
    assert (max(rows), sum(rows)) == (8, int((make_batch()["labels"] != -100).sum()))


def test_no_label_at_all_is_refused_without_logits_too_but_not_in_a_part_of_an_update():
    model, batch = make_model(), make_batch()
    batch["labels"].fill_(-100)
    assert_error("at least one label other than -100", model.loss_of, batch)
    assert all(not value.any() for value in gradients(model, model.loss_of(batch, 9)).values())


def test_training_in_bfloat16_on_the_cpu_runs_under_the_eager_kernel(monkeypatch):
    from transformers.integrations import sdpa_attention

    model, batch = make_model(), make_batch()
    batch["attention_mask"] = (torch.arange(6) < torch.tensor([6, 3, 4, 6, 1])[:, None]).long()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(**batch).loss
        monkeypatch.setattr(sdpa_attention.torch.nn.functional, "scaled_dot_product_attention", None)
        assert model(**batch).loss == wanted
        with pytest.raises(TypeError), torch.no_grad():
            model(**batch)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"d_k": 3, "d_v": 5}, {"decoder_key_value_heads": 2}], ids=str)
def test_targets_that_share_a_source_are_as_with_a_copy_each(kernel, options):
    model = make_model(**options).eval()
    model.set_attn_implementation(kernel)
    tokens, mask = torch.randint(4, 50, (6, 4)), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    source = model.model.encoder(torch.randint(4, 50, (2, 5)), mask).last_hidden_state
    given, copies = {"decoder_input_ids": tokens, "output_attentions": True}, source.repeat_interleave(3, 0)
    shared = model(encoder_outputs=(source,), attention_mask=mask, **given)
    apart = model(encoder_outputs=(copies,), attention_mask=mask.repeat_interleave(3, 0), **given)
    torch.testing.assert_close(shared.logits, apart.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shared.cross_attentions, apart.cross_attentions, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="must be a multiple of the number of sources, 2, but is 3"):
        model(encoder_outputs=(source,), decoder_input_ids=tokens[:3])


def test_beam_search_keeps_the_source_once_per_sentence_and_given_encoder_outputs_as_they_were():
    model, cache = make_model().eval(), EncoderDecoderCache(DynamicCache(), DynamicCache())
    encoded = model.model.encoder(torch.randint(4, 50, (3, 6)))
    before = encoded.last_hidden_state.clone()
    model.generate(encoder_outputs=encoded, num_beams=4, max_new_tokens=5, past_key_values=cache)
    assert {len(layer.keys) for layer in cache.cross_attention_cache.layers} == {3}
    assert {len(layer.keys) for layer in cache.self_attention_cache.layers} == {12}
    assert torch.equal(encoded.last_hidden_state, before)


def generation_config(fills):
    """Return a change that gives a config of its own, or lets the model's own fill one."""

    def change(model, options, request):
        config = GenerationConfig.from_model_config(model.config) if not fills else GenerationConfig(max_new_tokens=3)
        options["generation_config"] = config
        (model.generation_config if fills else config).return_dict_in_generate = True

    return change


def globally_hooked(model, options, request):
    request.addfinalizer(torch.nn.modules.module.register_module_forward_hook(lambda *_: None).remove)


def asked(**more):
    return lambda model, options, request: options.update(more)


SEEN = {
    **{"left open": generation_config(True), "configured": generation_config(False), "global hook": globally_hooked},
    "dictionary": asked(return_dict_in_generate=True),
    "cache": asked(past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache())),
    "static": asked(cache_implementation="static"),
    "criteria": asked(stopping_criteria=[lambda *_: torch.zeros(1, dtype=torch.bool)]),
    **{"positional": asked(), "autocast": asked(), "nobody": asked(num_beams=2)},
}


@pytest.mark.parametrize("which", SEEN)
def test_what_generate_computes_can_be_differentiated_where_somebody_sees_it(which, monkeypatch, request):
    modes, check = set(), attending_heed.check_length

    def noting(*args):
        modes.add(torch.is_inference_mode_enabled())
        return check(*args)

    monkeypatch.setattr(attending_heed, "check_length", noting)
    model, tokens, options = make_model().eval(), torch.randint(4, 50, (1, 6)), {}
    SEEN[which](model, options, request)
    options |= {} if which == "left open" else {"max_new_tokens": 3}
    positional = [None, LogitsProcessorList([MinLengthLogitsProcessor(2, 1)])] if which == "positional" else []
    with torch.autocast("cpu", enabled=which == "autocast", dtype=torch.bfloat16):
        found = model.generate(tokens, *positional, **options)
    assert modes == {which == "nobody"}
    if which == "nobody":  # whose tokens can be trained on
        model(input_ids=found, labels=found).loss.backward()
        assert model.lm_head.weight.grad is not None
