"""Every attention kernel computes the same, and what one cannot do is refused by name."""

import itertools
import threading

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForSeq2SeqLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import helpers
from heedful import HeedConfig, HeedForConditionalGeneration, attending_heed
from helpers import VARIANTS, assert_near, empty_cache, padded_batch, pairwise, tiny_config, tiny_model, uncompiled

SOURCE = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
TARGET = torch.tensor([[1, 13, 14], [1, 15, 16]])
GENERAL = [name for name in VARIANTS if name not in ("additive", "shaw")]


def batch(side="right"):
    return padded_batch((9, 4, 1), (5, 7, 2), side)


@pytest.mark.parametrize(
    ("variant", "kernel", "side"), pairwise(GENERAL, ["sdpa", "flex_attention"], ["left", "right", "no mask"])
)
def test_a_kernel_gives_logits_loss_and_gradients_of_eager_attention_with_padding_anywhere(variant, kernel, side):
    inputs = batch("right" if side == "no mask" else side)
    real = inputs["decoder_attention_mask"].bool()
    if side == "no mask":
        inputs, real = {name: inputs[name] for name in inputs if not name.endswith("mask")}, torch.ones_like(real)
    labels = inputs["decoder_input_ids"].masked_fill(~real, -100)
    models = [tiny_model(attention=name, **VARIANTS[variant]).train() for name in ("eager", kernel)]
    with uncompiled(kernel), torch.no_grad():
        expected, found = (model(**inputs, labels=labels) for model in models)
    assert_near(found.logits[real], expected.logits[real])
    assert_near(found.loss, expected.loss)
    assert models[1].config._attn_implementation == kernel
    if kernel == "sdpa":
        whole = helpers.masked_batch((9, 4, 1), (5, 7, 2))
        assert_near(*(helpers.loss_and_gradients(model, whole) for model in models[::-1]), 2e-5)


CACHED = ["default", "rotary", "t5", "neighbourhoods", "grouped"]
CACHES = [("eager", "static"), ("sdpa", "dynamic"), ("sdpa", "static"), ("flex_attention", "dynamic")]


@torch.no_grad()
@pytest.mark.parametrize(("variant", "form", "side"), pairwise(CACHED, CACHES, ["left", "right"]), ids=str)
def test_decoding_with_a_cache_and_generate_give_the_logits_of_eager_attention(variant, form, side):
    inputs, (kernel, cache), logits = batch(side), form, []
    target, mask = inputs["decoder_input_ids"], inputs["decoder_attention_mask"]
    eager, model = (tiny_model(attention=name, **VARIANTS[variant]) for name in ("eager", kernel))
    expected = eager(**inputs).logits
    with uncompiled(kernel):
        given = {"attention_mask": inputs["attention_mask"], "past_key_values": empty_cache(model, cache, 9, 7)}
        given["encoder_outputs"] = model.model.encoder(inputs["input_ids"], inputs["attention_mask"])
        for start, end in itertools.pairwise([0, *range(2, 8)]):  # the first two at once, and the rest one by one
            step = {"decoder_input_ids": target[:, start:end], "decoder_attention_mask": mask[:, :end]}
            logits.append(model(**given, **step, use_cache=True).logits)
        assert_near(torch.cat(logits, 1)[mask.bool()], expected[mask.bool()])
        asked = {name: inputs[name] for name in ("input_ids", "attention_mask")} | {"max_new_tokens": 6}
        asked |= {"num_beams": 1 if side == "left" else 3, "return_dict_in_generate": True, "output_logits": True}
        found = model.generate(**asked, cache_implementation=None if cache == "dynamic" else cache)
    expected = eager.generate(**asked)
    assert torch.equal(found.sequences, expected.sequences)
    assert_near(torch.stack(found.logits), torch.stack(expected.logits), 2e-5)


@pytest.mark.slow
@torch.no_grad()
def test_flex_attention_as_torch_compiles_it_gives_the_logits_of_eager_attention():
    changes = {"encoder_layers": 1, "decoder_layers": 1, **VARIANTS["neighbourhoods"]}
    inputs = batch("left")
    real = inputs["decoder_attention_mask"].bool()
    expected = tiny_model(attention="eager", **changes)(**inputs).logits[real]
    assert_near(tiny_model(attention="flex_attention", **changes)(**inputs).logits[real], expected)


def backends():
    """Return what torch may compute `sdpa` by: cuDNN, flash, memory-efficient and plain."""
    cuda = torch.backends.cuda
    kinds = (cuda.cudnn_sdp_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    return tuple(is_enabled() for is_enabled in kinds)


ALL, ALL_BUT_CUDNN = (True, True, True, True), (False, True, True, True)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(attending_heed, "DEVICE_OF_CUDNN", "cpu")
    yield
    assert backends() == ALL


@pytest.fixture
def seen(monkeypatch):
    """Put a function that notes the backends of each call in the place of transformers' own for `sdpa`."""
    found, own = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def noting(*args, **kwargs):
        found.append(backends())
        return own(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", noting)
    return found


@pytest.mark.parametrize("variant", ["default", "neighbourhoods", "t5"])
def test_cudnn_is_left_out_of_every_call_of_sdpa_on_gpus_also_of_one_repeated_for_its_gradient(seen, variant, request):
    model = tiny_model(attention="sdpa", **VARIANTS[variant]).train()
    model(SOURCE, labels=TARGET)
    assert set(seen) == {ALL}  # on the CPU
    request.getfixturevalue("as_on_a_gpu")
    seen.clear()
    model(SOURCE, labels=TARGET).loss.backward()
    once = len(seen)
    helpers.checkpoint_activations(model)
    model(SOURCE, labels=TARGET).loss.backward()
    assert len(seen) == 3 * once
    model.generate(SOURCE, max_new_tokens=3)
    assert len(seen) > 3 * once
    assert set(seen) == {ALL_BUT_CUDNN}


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_users_own_choice_of_backends_is_left_as_it_is_and_cudnn_is_back_after_a_failure(seen, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, *args, **kwargs: q)
    cudnn, math, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
    for chosen in ([cudnn], [math], [cudnn, math], [cudnn, flash, SDPBackend.EFFICIENT_ATTENTION]):
        seen.clear()
        with sdpa_kernel(chosen):
            expected = backends()
            tiny_model(attention="sdpa")(SOURCE, labels=TARGET)
            assert backends() == expected
        assert set(seen) == {expected}
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    seen.clear()
    with pytest.raises(TypeError):
        tiny_model(attention="sdpa")(SOURCE, labels=TARGET)
    assert (seen, backends()) == ([ALL_BUT_CUDNN], ALL)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_two_threads_do_not_leave_cudnn_out_for_good(monkeypatch):
    monkeypatch.setattr(attending_heed, "chooses_from_all", lambda: True)
    entered, may_leave = threading.Event(), threading.Event()

    def slow(*args):
        if threading.current_thread() is first:
            entered.set()
            assert may_leave.wait(30)
        else:
            may_leave.set()
            first.join()

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", slow)
    first = threading.Thread(target=attending_heed.sdpa_without_cudnn)
    first.start()
    assert entered.wait(30)
    attending_heed.sdpa_without_cudnn()  # as if this thread had asked before the first went in
    assert backends() == ALL


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("backend", ["as it is", "aot_eager"])
def test_cudnn_is_left_out_of_a_compiled_model_which_is_one_graph(backend):
    found, results = [], []

    class Noting(torch.fx.Interpreter):
        def run_node(self, node):
            if "scaled_dot_product" in str(node.target):
                found.append(backends())
            return super().run_node(node)

    runs = {"as it is": lambda graph, examples: Noting(graph).run}
    torch.compiler.reset()
    model = tiny_model(attention="sdpa", encoder_layers=1, decoder_layers=1).train()
    for called in (model, torch.compile(model, fullgraph=True, backend=runs.get(backend, backend))):
        model.zero_grad()
        loss = called(SOURCE, labels=TARGET).loss
        loss.backward()
        results.append(torch.cat([loss.detach()[None], model.lm_head.weight.grad.flatten()]))
    torch.compiler.reset()
    assert_near(*results)
    assert found == [ALL_BUT_CUDNN] * (3 if backend == "as it is" else 0)


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
def test_cudnn_is_back_after_a_compilation_that_fails_in_the_middle_of_attention(monkeypatch):
    untraceable = torch.compiler.disable(ALL_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", untraceable)
    model = tiny_model(attention="sdpa", encoder_layers=1, decoder_layers=1)
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=r"torch\.compiler\.disable"):
        torch.compile(model, fullgraph=True, backend="eager")(SOURCE, labels=TARGET)
    assert backends() == ALL
    found = torch.compile(model, backend="eager")(SOURCE, labels=TARGET).loss
    torch.compiler.reset()
    assert_near(found, model(SOURCE, labels=TARGET).loss)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_exported_model_knows_nothing_of_it():
    model = tiny_model(attention="sdpa", encoder_layers=1, decoder_layers=1)
    given = {"input_ids": SOURCE, "decoder_input_ids": TARGET, "use_cache": False}
    program = torch.export.export(model, (), given)
    called = {str(node.target) for node in program.graph.nodes}
    assert any("scaled_dot_product_attention" in name for name in called)
    assert not any("sdp" in name for name in called)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_training_step_asks_an_accelerator_for_no_number(kernel):
    # A meta tensor has no values, so whatever would wait for one fails.
    for number, changes in enumerate(VARIANTS.values()):
        if kernel != "eager" and changes.keys() & {"attention_scoring", "position_encoding"}:
            continue
        sizes = {"encoder_layers": 1, "decoder_layers": 1}
        model = tiny_model(attention=kernel, **sizes | changes).train().to("meta")
        inputs = {name: value.to("meta") for name, value in batch().items()}
        inputs["labels"] = inputs["decoder_input_ids"]
        if number % 2:
            del inputs["decoder_input_ids"], inputs["decoder_attention_mask"]
        loss = model(**inputs, num_items_in_batch=torch.ones((), device="meta")).loss
        loss.backward()
        assert loss.device.type == "meta"


def test_flex_attention_refuses_gradients_on_the_cpu_dropout_and_a_static_cache():
    model, message = tiny_model(attention="flex_attention", attention_dropout=0.25), "must be eager or sdpa"
    static = {"past_key_values": empty_cache(model, "static", 4, 8), "use_cache": True}
    with uncompiled("flex_attention"):
        with pytest.raises(ValueError, match=rf"{message} to compute gradients on the CPU.*torch.no_grad"):
            model(SOURCE, labels=TARGET)
        with torch.no_grad():
            assert model(SOURCE, labels=TARGET).loss.isfinite()
            with pytest.raises(ValueError, match=rf"{message} with a static cache, but is flex_attention"):
                model.generate(SOURCE, max_new_tokens=4, cache_implementation="static")
            helpers.assert_error(rf"{message} with a static cache", model, SOURCE, decoder_input_ids=TARGET, **static)
            with pytest.raises(ValueError, match=r"`attention_dropout` must be 0 .* flex_attention.* is 0.25"):
                model.train()(SOURCE, labels=TARGET)


ROADS = [
    lambda name, config: HeedForConditionalGeneration(config).set_attn_implementation(name),
    lambda name, config: HeedForConditionalGeneration(config).model.encoder.set_attn_implementation(name),
    lambda name, config: HeedForConditionalGeneration(config).model.decoder.set_attn_implementation(name),
    lambda name, config: HeedForConditionalGeneration(config).set_attn_implementation({"": name}),
]
OTHER = ["flash_attention_2", "paged|sdpa", "kernels-community/flash-attn2", "of_my_own"]


REFUSED = [
    *(({"attention_scoring": "additive"}, name, "additive") for name in ("sdpa", "flex_attention", *OTHER)),
    *(({"position_encoding": "shaw"}, name, "is shaw") for name in ("sdpa", "flex_attention", *OTHER)),
    *(({"position_encoding": "t5"}, name, "is t5") for name in OTHER),
    *(({"decoder_neighbourhood": 2}, name, "a neighbourhood") for name in OTHER),
    *(({"d_k": 6}, name, "`d_k` differs from `d_v`") for name in OTHER),
    *(({}, name, "one of eager, .*sdpa") for name in ("paged|sdpa", "paged|eager", "nonsense")),
]


def test_a_kernel_that_would_compute_something_else_is_refused_by_name(tmp_path, monkeypatch):
    kernels = ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(type(kernels)._global_mapping, "of_my_own", kernels["sdpa"])  # as by `register`

    def by_the_constructor(name, config):
        HeedForConditionalGeneration._from_config(config, attn_implementation=name)

    def by_a_folder(name, config):
        HeedForConditionalGeneration(config).save_pretrained(tmp_path)
        kind = next(classes)
        kind.from_pretrained(tmp_path, attn_implementation=name)

    classes = itertools.cycle([AutoModelForSeq2SeqLM, HeedForConditionalGeneration])
    roads = itertools.cycle([*ROADS, by_a_folder])
    for changes, name, message in REFUSED:
        for road in (by_the_constructor, next(roads)):  # all roads lead to one check
            with pytest.raises(ValueError, match=rf"`attn_implementation` must be .*{message}") as caught:
                road(name, tiny_config(**changes))
            assert str(caught.value).endswith(f"is {name} instead.")
    model = HeedForConditionalGeneration(tiny_config(attention_scoring="additive"))
    assert model.config._attn_implementation == "eager"
    model.config._attn_implementation = "sdpa"  # as nobody can forbid
    helpers.assert_error("must be eager if `attention_scoring` is additive, but is sdpa", model, SOURCE, labels=TARGET)
    # Widths are compared as they are, not as they are written.
    for heads, has_flash in ((4, True), (2, False)):
        model = HeedForConditionalGeneration(tiny_config(d_k=8, decoder_attention_heads=heads))
        assert model._supports_flash_attn is has_flash


def test_encoder_and_decoder_have_one_kernel_and_two_are_refused():
    two, model = {"encoder": "sdpa", "decoder": "eager"}, tiny_model()
    roads = [
        model.set_attn_implementation,
        lambda names: HeedForConditionalGeneration._from_config(tiny_config(), attn_implementation=names),
        lambda names: HeedConfig(attn_implementation=names),
    ]
    for road in roads:
        helpers.assert_refused([(two, "`attn_implementation` must be one name for encoder and decoder")], road)
    model.model.encoder.set_attn_implementation("eager")
    assert model.config._attn_implementation == model.model.decoder.config._attn_implementation == "eager"
