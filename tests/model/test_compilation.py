"""Compiled and exported models compute what the model computes, and are compiled once for every shape."""

import pytest
import torch
from torch.export import Dim, export
from transformers import CompileConfig, DynamicCache, EncoderDecoderCache

import helpers
from heedful.versions_heed import cache_of
from helpers import assert_near, loss_and_gradients, masked_batch, padded, sentences, slow_but, tiny_model

# Source and target lengths, and with them batch sizes; all numbers differ, since torch takes equal sizes for one.
# The longest is so long that a neighbourhood is computed in windows.
SHAPES = [((9, 4, 1), (5, 7, 2)), ((8, 5, 3, 2), (10, 6, 1, 3)), ((90, 5, 3, 2, 2), (13, 8, 1, 3, 1))]
MOST_GRAPHS = 3  # the first and two recompilations


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def counting_backend():
    """Return a backend that runs captured graphs as they are, and the list of them."""
    graphs = []
    return lambda graph, examples: graphs.append(graph) or graph.forward, graphs


def compiled(module, dynamic=None):
    backend, graphs = counting_backend()
    return torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic), graphs


def batches():
    """Return sources, padded on alternating sides, masks and labels of the shapes."""
    return [masked_batch(*shape, side) for shape, side in zip(SHAPES, ("left", "right", "left"), strict=True)]


VARIANTS = {**helpers.VARIANTS, "eager": {"attention": "eager"}}
ENCODINGS = ["default", "rotary", "shaw", "t5", "eager"]
# Whether all shapes have one graph from the first on, or it is compiled anew where the second differs from the first.
COMPILED = [
    ("default", True),
    *((variant, None) for variant in [*ENCODINGS, "neighbourhoods", "grouped", "shared_layers"]),
]


@pytest.mark.parametrize(("variant", "dynamic"), slow_but(COMPILED[:1], COMPILED))
def test_a_compiled_model_gives_the_loss_and_the_gradients_of_the_model_at_every_shape(variant, dynamic):
    model = tiny_model(**{"encoder_layers": 1, "decoder_layers": 1, **VARIANTS[variant]}).train()
    fast, graphs = compiled(model, dynamic)
    for given in batches():
        assert_near(*(loss_and_gradients(called, given) for called in (fast, model)))
    assert 0 < len(graphs) <= (1 if dynamic else MOST_GRAPHS)


@pytest.mark.parametrize("variant", slow_but(["neighbourhoods"], ["default", "neighbourhoods"]))
def test_generate_with_a_static_cache_and_a_compiled_step_gives_the_same_logits(variant):
    model = tiny_model(encoder_layers=1, decoder_layers=1, **VARIANTS[variant])
    torch.manual_seed(1)
    backend, graphs = counting_backend()
    settings = CompileConfig(fullgraph=True, backend=backend, mode=None)
    settings._compile_all_devices = True  # `generate()` compiles on accelerators alone otherwise
    fast, counts = {"cache_implementation": "static", "compile_config": settings}, []
    for source, mask in (padded(sentences(9, 4, 1), "left"), padded(sentences(9, 9, 9))):
        given = {"attention_mask": mask, "max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
        found, expected = (model.generate(source, **given, **more) for more in (fast, {}))
        assert torch.equal(found.sequences, expected.sequences)
        assert_near(torch.stack(found.logits), torch.stack(expected.logits))
        counts.append(len(graphs))
    assert 0 < counts[0] == counts[1] <= MOST_GRAPHS  # a batch without padding needs no other graph


@pytest.mark.slow
def test_the_default_backend_gives_the_loss_and_nearly_the_gradients_of_the_model():
    model = tiny_model(encoder_layers=1, decoder_layers=1).train()
    roads = torch.compile(model, fullgraph=True), model
    assert_near(*(loss_and_gradients(called, batches()[0]) for called in roads), 1e-4)


BATCH, SOURCE_LENGTH, TARGET_LENGTH = (Dim(name, max=512) for name in ("batch", "source_length", "target_length"))


@torch.no_grad()
@pytest.mark.parametrize("variant", slow_but(["default"], ENCODINGS))
def test_an_exported_model_gives_the_loss_and_the_logits_of_the_model_at_other_shapes(variant, tmp_path):
    model = tiny_model(encoder_layers=1, decoder_layers=1, **VARIANTS[variant])
    first, *others = batches()
    source_shapes, target_shapes = {0: BATCH, 1: SOURCE_LENGTH}, {0: BATCH, 1: TARGET_LENGTH}
    shapes = {"input_ids": source_shapes, "attention_mask": source_shapes, "labels": target_shapes}
    torch.export.save(export(model, (), first, dynamic_shapes=shapes), tmp_path / "program.pt2")
    run = torch.export.load(tmp_path / "program.pt2").module()
    for batch in [{name: value[:1, :1] for name, value in first.items()}, *others]:
        found, expected = run(**batch), model(**batch)
        assert_near(found.logits, expected.logits)
        assert_near(found.loss, expected.loss)


class DecoderStep(torch.nn.Module):
    """One step of decoding whose cache is plain tensors: a key and a value of each layer."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, states, mask, own, cross):
        given = {"encoder_outputs": (states,), "attention_mask": mask, "decoder_input_ids": input_ids}
        cache = EncoderDecoderCache(DynamicCache(own), DynamicCache(cross))
        outputs = self.model(**given, past_key_values=cache, use_cache=True)
        return outputs.logits, tensors(cache_of(outputs).self_attention_cache)


def tensors(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


@torch.no_grad()
@pytest.mark.parametrize("variant", slow_but(["default"], ENCODINGS[:4]))
def test_an_exported_step_of_the_decoder_continues_a_cache_of_any_length(variant):
    model = tiny_model(encoder_layers=1, decoder_layers=1, **VARIANTS[variant])

    def example(batch):
        mask, target = batch["attention_mask"], batch["labels"].clamp(min=0)
        given = {"encoder_outputs": model.model.encoder(batch["input_ids"], mask), "attention_mask": mask}
        past = cache_of(model(**given, decoder_input_ids=target[:, :-1], use_cache=True))
        caches = tensors(past.self_attention_cache), tensors(past.cross_attention_cache)
        expected = model(**given, decoder_input_ids=target).logits[:, -1:]
        return (target[:, -1:].contiguous(), given["encoder_outputs"].last_hidden_state, mask, *caches), expected

    source, caches = {0: BATCH, 1: SOURCE_LENGTH}, []
    for length in (TARGET_LENGTH, SOURCE_LENGTH):
        caches.append([({0: BATCH, 2: length}, {0: BATCH, 2: length})])
    first, *others = batches()
    run = export(DecoderStep(model), example(first)[0], dynamic_shapes=({0: BATCH}, source, source, *caches)).module()
    for batch in others:
        given, expected = example(batch)
        logits, own = run(*given)
        assert_near(logits, expected)
        assert own[0][0].shape[2] == batch["labels"].shape[1]


@pytest.mark.slow
@torch.no_grad()
def test_the_module_of_transformers_that_exports_a_step_with_a_static_cache_works():
    from transformers.integrations.executorch import Seq2SeqLMExportableModule

    model = tiny_model(encoder_layers=1, decoder_layers=1)
    exported = Seq2SeqLMExportableModule(model, batch_size=1, max_hidden_seq_length=64, max_cache_length=16).export()
    torch.manual_seed(1)
    states, target = torch.randn(1, 7, model.config.d_model), torch.randint(14, 71, (1, 6))
    step = exported.exported_decoder.module()
    logits = torch.cat([step(target[:, at : at + 1], states, torch.tensor([at])) for at in range(6)], dim=1)
    assert_near(logits, model(encoder_outputs=(states,), decoder_input_ids=target).logits)
