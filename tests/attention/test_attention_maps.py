"""All attention of one pair, of every kind of model, whatever computes attention otherwise, and each of its steps."""

import copy
import re
from functools import partial
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, ByT5Tokenizer, LongT5Config, MarianConfig, ProphetNetConfig
from transformers.modeling_outputs import Seq2SeqLMOutput

import heedful
from heedful import HeedRNNConfig, HeedRNNForConditionalGeneration, TokenizerPair, Translator, prepare_for_inference
from heedful.attention import drawing, recording
from heedful.attention.maps import attention_map, attention_maps, attention_maps_of_ids
from heedful.attention.recording import record_weights, recorded_heads
from heedful.data.labels import shown_words, token_labels, token_words
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.native.engine import NativeDecoder
from heedful_lab.studies.attention.single_heads import attention_modules
from helpers import assert_error, assert_refused, tiny_config
from pretrained_checkpoints import ENGLISH, KOREAN, marian

SOURCE, TARGET = "고양이가 잔다.", "The cat sleeps."
KINDS = ["cross", "encoder", "decoder"]
SIZES = {
    **{"vocab_size": 290, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16},
    **{"decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
}


def other_model(config, tokenizers, **options):
    return AutoModelForSeq2SeqLM.from_config(config(**SIZES, **tokenizers.special_ids()), **options).eval()


def assert_equal(found, expected):
    assert found.kinds == expected.kinds
    for kind in expected.kinds:
        np.testing.assert_allclose(found.weights[kind], expected.weights[kind], atol=1e-6)


def test_every_kind_layer_and_head_has_the_models_own_weights_and_only_if_asked(model, tokenizers, monkeypatch):
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    source, target = tokenizers.encode_source([SOURCE]), tokenizers.encode_target([TARGET])
    with torch.no_grad():
        outputs = model(input_ids=torch.tensor(source), labels=torch.tensor(target), output_attentions=True)
    assert maps.kinds == KINDS
    for kind in KINDS:
        expected = torch.cat(outputs[f"{kind}_attentions"]).numpy()
        assert (maps.layers(kind), maps.heads(kind)) == (2, 4)
        np.testing.assert_allclose(maps.weights[kind], expected, atol=1e-6)
        one = maps.map(kind, layer=0, head=3)
        np.testing.assert_array_equal(one.weights, maps.weights[kind][0, 3])
        np.testing.assert_allclose(maps.map(kind).weights, maps.weights[kind][1].mean(axis=0), atol=1e-7)
        assert one.weights.shape == (len(one.target_tokens), len(one.source_tokens))
        np.testing.assert_allclose(expected.sum(axis=-1), 1, atol=1e-5)
        assert min(np.abs(expected[0] - expected[1]).max(), np.abs(expected[:, 0] - expected[:, 1]).max()) > 1e-3
        for layer, head in ((0, 1), (-1, None), (-2, None)):
            alone = attention_map(model, tokenizers, SOURCE, TARGET, layer, head, kind)
            among = maps.map(kind, layer, head)
            np.testing.assert_allclose(alone.weights, among.weights, atol=1e-6)
            assert (alone.source_tokens, alone.target_tokens) == (among.source_tokens, among.target_tokens)
            assert alone.kind == kind
    assert np.triu(maps.weights["decoder"], k=1).max() == 0
    assert attention_maps_of_ids(model, tokenizers, [5, 6, 2], [5, 2], ["cross"], 0).layers("cross") == 1
    monkeypatch.setattr(model.get_decoder(), "forward", lambda *_, **__: pytest.fail("The decoder has nothing to do."))
    assert attention_maps_of_ids(model, tokenizers, [5, 6, 2], [5, 2], ["encoder"], 0).layers("encoder") == 1


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex_attention"])
def test_the_attention_function_does_not_matter_and_stays(model, tokenizers, kernel):
    expected = attention_maps(model, tokenizers, SOURCE, TARGET)
    model = copy.deepcopy(model)
    model.set_attn_implementation(kernel)
    assert_equal(attention_maps(model, tokenizers, SOURCE, TARGET), expected)
    assert model.config._attn_implementation == kernel


@pytest.mark.parametrize("config", [MarianConfig, transformers.BartConfig])
def test_other_models_are_set_to_eager_for_the_duration(tokenizers, config):
    model = other_model(config, tokenizers, attn_implementation="sdpa")
    found = attention_maps(model, tokenizers, SOURCE, TARGET)
    parts = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    assert set(parts) == {"sdpa"}
    model.set_attn_implementation("eager")
    assert_equal(found, attention_maps(model, tokenizers, SOURCE, TARGET))
    assert found.kinds == KINDS
    np.testing.assert_allclose(found.weights["cross"].sum(axis=-1), 1, atol=1e-5)


def test_translators_native_decoders_and_prepared_models_have_the_models_attention(model, tokenizers):
    expected = attention_maps(model, tokenizers, SOURCE)
    assert_equal(attention_maps(Translator(model, tokenizers, "native"), tokenizers, SOURCE), expected)
    assert_equal(attention_maps(NativeDecoder(model), tokenizers, SOURCE), expected)
    with prepare_for_inference(model):
        assert_equal(attention_maps(model, tokenizers, SOURCE), expected)
        cross = attention_maps(model, tokenizers, SOURCE, kinds=["cross"])
        np.testing.assert_allclose(cross.weights["cross"], expected.weights["cross"], atol=1e-6)


def test_a_pass_that_fails_leaves_no_hook_and_the_former_attention_function(model, tokenizers, monkeypatch):
    other = other_model(MarianConfig, tokenizers, attn_implementation="sdpa")
    for each in (model, other):
        assert_error("`layer`", attention_map, each, tokenizers, SOURCE, TARGET, layer=9)
    assert other.config._attn_implementation == "sdpa"
    attention_map(model, tokenizers, SOURCE, TARGET, layer=0)
    monkeypatch.setattr(model.get_decoder().layers[1].feed_forward, "forward", Mock(side_effect=MemoryError))
    assert_error(None, attention_map, model, tokenizers, SOURCE, TARGET, layer=0, error=MemoryError)
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert not any(getattr(hook, "func", None) is recording._keep_heads for hook in hooks)


def test_kinds_layers_and_heads_that_are_not_there_and_empty_sequences_are_named(model, tokenizers):
    look = partial(attention_maps, model, tokenizers)
    assert look(SOURCE, TARGET, kinds=["decoder", "cross"]).kinds == ["cross", "decoder"]
    maps = look(SOURCE, TARGET, kinds=["cross"])
    assert_error("`kind` must be one of cross, but is 'encoder'", maps.map, "encoder")
    assert_error("`kind` must be cross, encoder or decoder, but is 'self'", look, SOURCE, TARGET, kinds=["self"])
    assert_error("`kinds` must name at least one", look, SOURCE, TARGET, kinds=[])
    for ids, side in ((([], [5, 2]), "source"), (([5, 2], []), "target")):
        assert_error(f"{side} must have at least one token", attention_maps_of_ids, model, tokenizers, *ids)
    assert_error("`source` must be a sentence, but is ' '", look, " ")
    maps = look(SOURCE, TARGET)
    wrong = [({"layer": layer}, f"`layer` must be between -2 and 1, but is {layer}") for layer in (2, -3)]
    wrong += [({"head": head}, f"`head` must be between 0 and 3, but is {head}") for head in (4, -1)]
    for kind in KINDS:
        alone = partial(attention_map, model, tokenizers, SOURCE, TARGET, kind=kind)
        for look in (partial(maps.map, kind), alone, partial(maps.steps, kind)):
            assert_refused(wrong, lambda arguments, look=look: look(**arguments))


def test_a_target_language_is_led_by_its_tag():
    words = train_tokenizers(["개가 달린다"], ["the dog"], vocab_size=None, algorithm="word", languages=["en", "fr"])
    model = other_model(MarianConfig, words)
    maps = attention_maps(model, words, "개가 달린다", "the dog", target_language="fr")
    assert maps.source_tokens == ["<2fr>", "▁개가", "▁달린다", "</s>"]
    assert maps.source_words == [None, 0, 1, None]
    assert_error("language", attention_maps, model, words, "개가 달린다", "the dog")


def recurrent(tokenizers, **options):
    torch.manual_seed(0)
    sizes = {"embedding_size": 16, "hidden_size": 16, "vocab_size": 290}
    return HeedRNNForConditionalGeneration(HeedRNNConfig(**sizes, **tokenizers.special_ids(), **options)).eval()


@pytest.mark.parametrize("attention", ["dot", "scaled_dot", "general", "additive"])
def test_a_recurrent_model_has_its_cross_attention(tokenizers, attention):
    model = recurrent(tokenizers, attention=attention, bidirectional=False)
    maps = attention_maps(Translator(model, tokenizers), tokenizers, SOURCE, TARGET)
    source, target = tokenizers.encode_source([SOURCE]), tokenizers.encode_target([TARGET])
    with torch.no_grad():
        outputs = model(input_ids=torch.tensor(source), labels=torch.tensor(target), output_attentions=True)
    assert (maps.kinds, maps.layers("cross"), maps.heads("cross")) == (["cross"], 1, 1)
    np.testing.assert_allclose(maps.weights["cross"], torch.cat(outputs.cross_attentions).numpy(), atol=1e-6)
    assert maps.weights["cross"].shape == (1, 1, len(maps.target_tokens), len(maps.source_tokens))
    for kind in ("encoder", "decoder"):
        message = f"`kind` must be one that the model has, but is '{kind}' instead"
        assert_error(message, attention_map, model, tokenizers, SOURCE, TARGET, kind=kind)
        assert_error(message, attention_maps, model, tokenizers, SOURCE, TARGET, kinds=["cross", kind])
    for look in (partial(attention_map, model, tokenizers, SOURCE, TARGET), maps.map):
        assert_error("`layer` must be between -1 and 0, but is 1", look, layer=1)


def test_models_without_attention_steps_or_kinds_are_errors(tokenizers, monkeypatch):
    model = recurrent(tokenizers, attention="none", input_feeding=False)
    for look in (attention_maps, attention_map):
        assert_error("its config's `attention` is 'none' instead", look, model, tokenizers, SOURCE, TARGET)
    other = recurrent(tokenizers)
    monkeypatch.setattr(other, "forward", lambda **_: Seq2SeqLMOutput())
    with pytest.raises(ValueError, match="`model` must return attention weights, but returns none"):
        attention_maps(other, tokenizers, SOURCE, TARGET)
    message = "The model must be a Heed Transformer, loaded after `import heedful`, to show its scores"
    for other in (other_model(MarianConfig, tokenizers), recurrent(tokenizers)):
        maps = attention_maps(other, tokenizers, SOURCE, TARGET, kinds=["cross"])
        for look in (maps.steps, partial(maps.scores, "cross")):
            assert_error(message, look)
        assert_error("`kind` must be one of cross, but is 'encoder'", maps.steps, "encoder")


PROPHET = {f"num_{side}_{part}": 2 for side in ("encoder", "decoder") for part in ("layers", "attention_heads")}
WINDOWS = {
    "(12, 5)": transformers.LEDConfig(**SIZES, attention_window=4),
    "(5, 5)": transformers.LEDConfig(**SIZES, attention_window=4),  # a window as wide as the source is long
    "dict": transformers.PegasusXConfig(**SIZES, block_size=4),
    "(2, 4, 12)": LongT5Config(vocab_size=290, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, local_radius=3),
    "sum to": ProphetNetConfig(vocab_size=290, hidden_size=16, decoder_ffn_dim=16, encoder_ffn_dim=16, **PROPHET),
    "(60, 60)": transformers.BigBirdPegasusConfig(**SIZES, block_size=4, num_random_blocks=1),
}


@pytest.mark.parametrize("found", WINDOWS)
def test_weights_of_windows_blocks_and_streams_are_refused_by_their_shape(tokenizers, found):
    model = AutoModelForSeq2SeqLM.from_config(WINDOWS[found]).eval()
    model.config.decoder_start_token_id = 1
    size = {"(5, 5)": 5, "(60, 60)": 57}.get(found, 12)
    look = partial(attention_maps_of_ids, model, tokenizers, range(5, 5 + size), range(5, 9))
    for kinds in (None, ["encoder"]):
        rest = "(4, 5)" if found == "(5, 5)" else found
        assert_error(f"must be of .* tokens, with rows that sum to 1, .* {re.escape(rest)}", look, kinds=kinds)
    if "LED" in type(model).__name__:  # whose decoder looks at everything
        assert look(kinds=["cross"]).weights["cross"].shape == (2, 2, 4, size)


def test_words_are_shown_whole_and_scripts_without_spaces_by_their_tokens(tokenizers):
    words_of = {"고양이가  잔다. a": ["고양이가", "잔다.", "a"], "a\tb … 😀": ["a", "b", "…", "😀"]}
    words_of["猫が眠る。 cat"] = ["猫", "が", "眠", "る", "。", "cat"]
    for (text, words), tokenizer in product(words_of.items(), (tokenizers.source, ByT5Tokenizer())):
        ids = tokenizer(text).input_ids
        shown = shown_words(tokenizer, ids)
        assert shown.labels == [*words, "</s>"]
        assert shown.of_tokens == sorted(shown.of_tokens)
        *found, end = token_words(tokenizer, ids)
        assert (end, {*found} - {None}) == (None, {*range(len(text.split()))})
        assert len(shown.of_tokens) == len(found) + 1 == len(ids)
    broken = tokenizers.source("네").input_ids[0]
    assert shown_words(tokenizers.source, [broken, 2]) == (["‹EB›", "</s>"], [0, 1])
    assert shown_words(ByT5Tokenizer(), [0xEB + 3, 1]) == (["‹EB›", "</s>"], [0, 1])
    assert token_labels(ByT5Tokenizer(), ByT5Tokenizer()("네 a").input_ids) == ["네", "…", "…", "▁", "a", "</s>"]
    pair = train_tokenizers(["개가 달린다"], ["the dog runs"], vocab_size=100, algorithm="word")
    assert token_words(pair.target, pair.encode_target(["the cat runs"])[0]) == [0, 1, 2, None]


def test_words_are_shown_without_the_marks_of_sentencepiece_tags_and_characters_letter_by_letter(tmp_path):
    texts = ["고양이가 잔다.", "개가 달린다."]
    pair = train_tokenizers(texts, texts, vocab_size=290, algorithm="unigram", languages=["en"])
    ids = pair.encode_source(["고양이가 zz 달린다."], target_language="en")[0]
    assert "▁" in "".join(token_labels(pair.source, ids))
    assert shown_words(pair.source, ids).labels == ["<2en>", "고양이가", "zz", "달린다.", "</s>"]
    words = train_tokenizers(texts, texts, vocab_size=100, algorithm="word")
    assert shown_words(words.source, words.encode_source(["고양이가 zz"])[0]).labels == ["고양이가", "<unk>", "</s>"]
    dates = ["2021-03-03", "1 March 2021"]
    pair = train_tokenizers(dates, dates, vocab_size=300, algorithm="character")
    shown = [shown_words(pair.target, pair.encode_target([text])[0]).labels for text in dates]
    assert shown == [[*dates[0], "</s>"], ["1", "March", "2021", "</s>"]]
    pieces = train_tokenizers(dates, dates, vocab_size=265)
    assert shown_words(pieces.target, pieces.encode_target(dates)[0]).labels == [dates[0], "</s>"]
    model = marian(tmp_path / "marian")
    pair = TokenizerPair.from_pretrained(model)
    source, target = KOREAN[0], ENGLISH[0]
    assert shown_words(pair.source, pair.encode_source([source])[0]).labels == [*source.split(), "</s>"]
    assert shown_words(pair.target, pair.encode_target([target])[0]).labels == [*target.split(), "</s>"]


VARIANTS = [
    {},
    {"position_encoding": "rotary"},
    {"attention_scoring": "additive"},
    {"attention_scoring": "dot"},
    {"d_k": 6, "d_v": 10, "encoder_key_value_heads": 2, "decoder_key_value_heads": 1},
    {"encoder_neighbourhood": 2, "decoder_neighbourhood": 3},
]


def made(tokenizers, **options):
    torch.manual_seed(1)
    config = tiny_config(vocab_size=290, **tokenizers.special_ids(), **options)
    return heedful.HeedForConditionalGeneration(config).eval()


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: " ".join(map(str, options.values())) or "paper")
def test_the_steps_are_what_the_model_computes(tokenizers, options):
    model, before = made(tokenizers, **options), {}
    modules = attention_modules(model)
    for place, module in modules.items():
        module.out_proj.register_forward_pre_hook(
            lambda _, inputs, place=place: before.__setitem__(place, inputs[0][0].unflatten(-1, (4, -1)).numpy())
        )
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    radii = {side: options.get(f"{side}_neighbourhood") for side in ("encoder", "decoder")}
    assert maps.neighbourhoods == {side: radius for side, radius in radii.items() if radius}
    for (kind, layer), module in modules.items():
        for head in range(4):
            steps = maps.steps(kind, layer, head)
            weights = maps.weights[kind][layer, head]
            np.testing.assert_array_equal(steps.attention.weights, weights)
            np.testing.assert_allclose(torch.tensor(steps.scaled).softmax(-1), weights, atol=1e-6)
            np.testing.assert_array_equal(np.isinf(steps.scores), weights == 0)  # what is masked
            np.testing.assert_allclose(steps.output, before[kind, layer][:, head], atol=1e-5)
            np.testing.assert_allclose(weights @ steps.value, steps.output, atol=1e-5)
            assert steps.scaling == (module.d_k**-0.5 if module.config.attention_scoring == "scaled_dot" else 1)
            np.testing.assert_array_equal(steps.scores, maps.scores(kind)[layer, head])
            if module.additive_score is None:
                seen = np.isfinite(steps.scores)
                np.testing.assert_allclose((steps.query @ steps.key.T)[seen], steps.scores[seen], atol=1e-5)


@pytest.mark.parametrize("options", [{"share_layers": True}, {"position_encoding": "t5"}])
def test_models_whose_scores_are_not_told_show_the_weights_of_every_layer(tokenizers, options):
    model = made(tokenizers, **options)
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    assert [len(maps.weights[kind]) for kind in ("encoder", "decoder", "cross")] == [2, 2, 2]
    assert np.abs(maps.weights["encoder"][0] - maps.weights["encoder"][-1]).max() > 1e-6
    with recorded_heads(model, ["encoder"], 1) as states:
        found = record_weights(model, [5, 6, 7], [1, 5], ["encoder"], 1)
    assert not states
    expected = record_weights(model, [5, 6, 7], [1, 5], ["encoder"])["encoder"][1]
    assert torch.equal(found["encoder"][0], expected)
    assert_error(r"to show its scores, but .* has relative positions .* shared layers", maps.steps, "encoder")


@pytest.mark.parametrize("layer", [None, 1])
def test_the_grid_draws_scores_as_dots_below_weights(model, tokenizers, tmp_path, drawn, layer, monkeypatch):
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    for room in (len(maps.target_tokens), len(maps.target_tokens) - 1):
        monkeypatch.setattr(drawing, "NUMBERED", room)
        drawing.draw_attention_grid(maps, tmp_path / "a.png", "decoder", layer, tokens=True, scores=True)
    layers = [0, 1] if layer is None else [layer]
    numbered, axes = (np.array(figure.axes).reshape(len(layers), 2, 4) for figure in drawn)
    for (row, number), head in product(enumerate(layers), range(4)):
        image, dots = axes[row, 0, head].images[0], axes[row, 1, head].collections[0]
        np.testing.assert_array_equal(image.get_array(), maps.weights["decoder"][number, head])
        scores = maps.scores("decoder")[number, head]
        seen = np.isfinite(scores)
        np.testing.assert_allclose(dots.get_array(), scores[seen], rtol=1e-6)
        sizes = np.abs(scores[seen]) / np.abs(scores[seen]).max()
        np.testing.assert_allclose(dots.get_sizes() / dots.get_sizes().max(), sizes, rtol=1e-5)
        np.testing.assert_array_equal(dots.get_offsets(), np.argwhere(seen)[:, ::-1])
        written = [f"{score:.1f}".replace("-inf", "−∞") for score in scores.flat]
        assert [text.get_text() for text in numbered[row, 1, head].texts] == written
        assert list(axes[row, 1, head].texts) == []
