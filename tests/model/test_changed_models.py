"""A model that a user changed in one line is trained, decoded and exported as changed, or refused: never as before."""

import types
from functools import cache, partial

import pytest
import torch
from torch import nn
from transformers import Seq2SeqTrainer
from transformers.configuration_utils import strict
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

import heedful
from heedful import Translator, attention_heed, prepare_for_inference
from heedful.attention_heed import HeedAttention, eager_attention
from heedful.decoding.loading import load_model
from heedful.decoding.native.conditions import WEIGHTS
from heedful.export.ctranslate2_export import export_ctranslate2
from heedful.export.onnx.onnx_export import export_onnx
from heedful.export.page import write_page
from heedful.export.transformers_export import export_transformers
from heedful.modeling_heed import HeedEncoder
from heedful.verification.verification import check_engines, verify
from helpers import shake, tiny_config
from trainer_runs import SOURCES, joint_tokenizers, logged, trained

Base = heedful.HeedForConditionalGeneration


class OwnLoss(Base):
    def loss(self, *given, **settings):
        return super().loss(*given, **settings) + 1000


class OwnForward(Base):
    def forward(self, *given, num_items_in_batch=None, **settings):
        output = super().forward(*given, num_items_in_batch=num_items_in_batch, **settings)
        if output.loss is not None:
            output.loss = output.loss + output.logits.square().mean()
        return output


class OwnGenerate(Base):
    def generate(self, *given, **settings):
        return super().generate(*given, **settings).fill_(self.config.eos_token_id)


class OwnInputs(Base):
    def prepare_inputs_for_generation(self, input_ids, *given, **settings):
        return super().prepare_inputs_for_generation(torch.full_like(input_ids, 7), *given, **settings)


class OwnEmbeddings(Base):
    def __init__(self, config):
        super().__init__(config)
        self.model.encoder.embedding_scale *= 3


class Temperature(HeedAttention):
    def __init__(self, *given, **settings):
        super().__init__(*given, **settings)
        self.temperature = nn.Parameter(torch.full((1,), 0.2))

    def forward(self, states, call):
        return super().forward(states * self.temperature, call)


class Doubled(HeedAttention):
    def project_source(self, *given, **settings):
        return tuple(2 * states for states in super().project_source(*given, **settings))


class OwnEncoder(HeedEncoder):
    def add_positions(self, embeddings, positions):
        return super().add_positions(embeddings, positions.flip(-1))


class LoudNorm(nn.LayerNorm):
    def forward(self, states):
        return 2 * super().forward(states)


@strict
class OwnConfig(heedful.HeedConfig):
    sharpness: float = 5.0


class OwnField(Base):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.decoder.layers:
            layer.cross_attn.scaling *= config.sharpness


def with_attention(kind, model):
    for layer in model.model.encoder.layers:
        own = layer.self_attn
        layer.self_attn = kind(model.config, "encoder")
        layer.self_attn.load_state_dict(own.state_dict(), strict=False)
    return model


def with_method(place, name, method, model):
    part = model.get_submodule(place)
    original = getattr(part, name)
    setattr(part, name, types.MethodType(lambda self, *given, **settings: method(original(*given, **settings)), part))
    return model


def with_part(place, make, model):
    model.set_submodule(place, make(model))
    return model


def with_own_class(place, kind, model):
    model.get_submodule(place).__class__ = kind
    return model


def own_function(module, query, key, value, mask, **settings):
    return eager_attention(module, query.flip(-1), key, value, mask, **settings)


def with_function(model):
    ALL_ATTENTION_FUNCTIONS.register("mine", own_function)
    model.set_attn_implementation("mine")
    return model


NORM = "model.encoder.layers.0.self_attn_residual.norm"
# The class, and a change of its instance.
CHANGES = {
    "a loss": (OwnLoss, None),
    "a forward that adds to the loss": (OwnForward, None),
    "the loss of one model": (Base, partial(with_method, "", "loss", lambda loss: loss + 1000)),
    "generate": (OwnGenerate, None),
    "the inputs of a step": (OwnInputs, None),
    "the scale of embeddings": (OwnEmbeddings, None),
    "a field of the config": (OwnField, None),
    "a parameter of attention": (Base, partial(with_attention, Temperature)),
    "a method of one attention": (
        Base,
        partial(with_method, "model.encoder.layers.0.self_attn", "project_own", lambda found: [2 * x for x in found]),
    ),
    "the class of one attention": (Base, partial(with_own_class, "model.decoder.layers.0.cross_attn", Doubled)),
    "the attention function": (Base, with_function),
    "the encoder's positions": (Base, partial(with_own_class, "model.encoder", OwnEncoder)),
    "a norm": (Base, partial(with_part, NORM, lambda model: LoudNorm(model.config.d_model))),
    "an embedding": (
        Base,
        partial(with_part, "model.encoder.embed_positions", lambda model: nn.Embedding(99, model.config.d_model)),
    ),
}


def changed_model(name=None):
    kind, change = CHANGES.get(name, (Base, None))
    torch.manual_seed(0)
    settings = {"vocab_size": 272, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0, "label_smoothing": 0.1}
    model = kind(OwnConfig(**tiny_config(**settings).to_dict()) if kind is OwnField else tiny_config(**settings))
    shake(model)
    model.generation_config.update(max_length=None, max_new_tokens=12)
    return (model if change is None else change(model)).eval()


def losses_of(kind, model, folder):
    """Return the training loss of an update, and the validation loss after it."""
    run = trained(kind, folder, model, max_steps=1, remove_unused_columns=False, label_names=["labels"])
    return [*logged(run), run.evaluate()["eval_loss"]]


def tokens_of(model):
    """Return what `generate()` of a model gives for the sources one by one, up to the end."""
    rows = [torch.tensor([ids]) for ids in joint_tokenizers().encode_source(SOURCES)]
    with torch.no_grad():
        found = [model.generate(input_ids=row)[0, 1:].tolist() for row in rows]
    end = model.config.eos_token_id
    return joined(row[: row.index(end) + 1] if end in row else row for row in found)


def joined(rows):
    return [token for row in rows for token in (*row, -1)]


@cache
def plain_tokens():
    return tokens_of(changed_model())


def prepared_tokens(model):
    with prepare_for_inference(model):
        return tokens_of(model)


def outcome(expected, compute, *given):
    """Return "refused" for a `ValueError`, "computed" for what is expected, and else what is found."""
    try:
        found = compute(*given)
    except ValueError:
        return "refused"
    return "computed" if found == pytest.approx(expected, rel=1e-4) else found


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_trained_decoded_and_exported_or_refused(name, tmp_path):
    transformers_logging.disable_progress_bar()
    losses = losses_of(Seq2SeqTrainer, changed_model(name), tmp_path)
    model, tokenizers, folder = changed_model(name), joint_tokenizers(), tmp_path / "model"
    tokens = tokens_of(model)
    assert tokens != plain_tokens() or losses != losses_of(Seq2SeqTrainer, changed_model(), tmp_path)
    found = {"trainer": outcome(losses, losses_of, heedful.HeedSeq2SeqTrainer, changed_model(name), tmp_path)}
    translate = Translator(model, tokenizers).translate  # of one text at a time: a change may make padding count
    found["translator"] = outcome(tokens, lambda: joined(translate([text])[0][0].token_ids for text in SOURCES))
    found["native decoder"] = outcome(tokens, prepared_tokens, model)
    assert check_engines(model).level in ("pass", "skipped")
    model.save_pretrained(folder)
    tokenizers.save_pretrained(folder)
    found["loaded"] = outcome(tokens, lambda: tokens_of(load_model(folder)))
    if found["loaded"] == "refused":
        roads = {"transformers": export_transformers, "onnx": export_onnx, "ctranslate2": export_ctranslate2}
        for form, export in roads.items():
            found[form] = outcome(0, export, folder, tmp_path / form, SOURCES)
        found["page"] = outcome(0, write_page, [folder], tmp_path / "page.html")
        for path in folder.glob("*.py"):  # which a process of its own would run
            path.unlink()
        found["verify"] = outcome(True, lambda: verify(folder).failed != [])  # says so, or refuses the folder
    assert {str(each) for each in found.values()} <= {"computed", "refused"}, found


def test_changed_functions_that_no_class_shows_are_found_by_their_logits(monkeypatch):
    model, tokenizers = changed_model(), joint_tokenizers()
    before = tokens_of(model)
    original = attention_heed.project_together
    monkeypatch.setattr(attention_heed, "project_together", lambda *given: [2 * each for each in original(*given)])
    assert outcome(before, prepared_tokens, model) == "refused"
    assert check_engines(model).level == "FAIL"
    with pytest.warns(UserWarning, match="`generate\\(\\)` translates instead of the native decoder.* differ by"):
        (best,), *_ = Translator(model, tokenizers).translate(SOURCES[:1])
    assert joined([best.token_ids]) == tokens_of(model)[: len(best.token_ids) + 1] != before[: len(best.token_ids) + 1]


def test_every_weight_of_heeds_models_is_one_that_engines_know():
    for more in ({}, {"position_encoding": "shaw"}, {"position_encoding": "t5"}, {"attention_scoring": "additive"}):
        config = tiny_config(norm_placement="pre", embedding_norm=True, output_bias=True, attention_bias=True, **more)
        names = Base(config).state_dict()
        assert [name for name in names if not WEIGHTS.fullmatch(name)] == []
