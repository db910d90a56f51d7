"""What a user's own code within a model sees, and may keep of it: the same as with BART.

Each habit puts code into a model that notes the tensors it is given. Of BART and of Heed it asks two things: the notes
tell of the same rows, and the tensors can be trained with afterwards.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from torch import nn
from torch.nn.utils import parametrize
from transformers import BartConfig, BartForConditionalGeneration, LogitsProcessorList
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heedful.fast_paths_heed import runs_known_code
from helpers import FAMILIES, tiny_model

SOURCE = torch.randint(14, 99, (2, 6), generator=torch.Generator().manual_seed(0))
BEAMS, STEPS = 3, 4
CALL = {"num_beams": BEAMS, "max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}


def make_model(name):
    if name != "bart":
        return tiny_model(family=name)
    sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "vocab_size": 99, "dropout": 0.0}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    torch.manual_seed(0)
    return BartForConditionalGeneration(BartConfig(**sizes, **ids)).eval()


class Notes(list):
    """The tensors that a user's code was given, and what it saw of the rows."""

    def __init__(self):
        super().__init__()
        self.rows = set()

    def see(self, encoded, mask):
        self.append(encoded[0] if isinstance(encoded, tuple | dict) else encoded)
        self.rows.add((len(self[-1]), None if mask is None else tuple(mask.shape)))


def noted_forward(notes, forward, *args, **kwargs):
    """Note the rows that a whole model is given, and keep its logits."""
    outputs = forward(*args, **kwargs)
    note_source(notes, kwargs)
    notes.append(outputs.logits)
    return outputs


def note_source(notes, kwargs):
    if kwargs.get("encoder_outputs") is not None:
        notes.see(kwargs["encoder_outputs"], kwargs.get("attention_mask"))


def last_linear(model):
    """Return a linear layer of the decoder's."""
    return [part for name, part in model.named_modules() if isinstance(part, nn.Linear) and "decoder" in name][-1]


def subclass(model, notes, patch):
    def forward(self, *args, **kwargs):
        return noted_forward(notes, super(type(self), self).forward, *args, **kwargs)

    forward = functools.wraps(type(model).forward)(forward)
    model.__class__ = type("Mine", (type(model),), {"forward": forward, "__module__": "mine"})


def forward_of_the_class(model, notes, patch):
    forward = type(model).forward

    @functools.wraps(forward)
    def own(self, *args, **kwargs):
        return noted_forward(notes, forward.__get__(self), *args, **kwargs)

    patch.setattr(type(model), "forward", own)


def forward_of_the_object(model, notes, patch):
    model.forward = functools.wraps(model.forward)(functools.partial(noted_forward, notes, model.forward))


def inputs_of_a_step(model, notes, patch):
    prepare = model.prepare_inputs_for_generation

    def own(*args, **kwargs):
        given = prepare(*args, **kwargs)
        note_source(notes, given)
        return given

    model.prepare_inputs_for_generation = own


def hook(model, notes, patch):
    model.register_forward_hook(lambda module, args, kwargs, output: note_source(notes, kwargs), with_kwargs=True)


def gate_in_a_processor(model, notes, patch):
    """A copy gate: it mixes what a hook has seen of the source into the scores, a number for each row."""
    hook(model, notes, patch)
    gate = [lambda input_ids, scores: scores + 0.1 * notes[-1].mean(dim=(1, 2))[:, None]]
    return {"logits_processor": LogitsProcessorList(gate)}


def strategy(model, notes, patch):
    """Greedy search as it is written for BART, over all rows of the beams."""

    def own(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        notes.see(model_kwargs["encoder_outputs"], model_kwargs.get("attention_mask"))
        encoded, mask = model_kwargs["encoder_outputs"], model_kwargs["attention_mask"]
        assert len(encoded.last_hidden_state) == len(mask) == len(input_ids)
        for _ in range(STEPS):
            given = {"encoder_outputs": encoded, "attention_mask": mask, "decoder_input_ids": input_ids}
            logits = model(**given, use_cache=False).logits[:, -1]
            notes.append(logits)
            input_ids = torch.cat([input_ids, logits.argmax(-1)[:, None]], dim=1)
        return input_ids

    return {"custom_generate": own}


def layer_of_ones_own(model, notes, patch):
    class Own(nn.Linear):
        table = None

        def forward(self, states):
            if self.table is None:  # made at the first call
                self.table = states.new_ones(self.out_features)
                notes.append(self.table)
            return super().forward(states) + self.table

    last_linear(model).__class__ = Own


def parametrization(model, notes, patch):
    class Kept(nn.Module):
        def forward(self, weight):
            notes.append(weight * 1)
            return notes[-1]

    parametrize.register_parametrization(last_linear(model), "weight", Kept())


def replaced_forward_below_accelerate(model, notes, patch):
    layer = last_linear(model)

    def forward(states):
        notes.append(F.linear(states, layer.weight, layer.bias))
        return notes[-1]

    layer.forward = forward
    cpu_offload(model, execution_device=torch.device("cpu"))


def patched(where, name, model, notes, patch):
    plain = getattr(where, name)

    def own(*args, **kwargs):
        notes.append(plain(*args, **kwargs))
        return notes[-1]

    patch.setattr(where, name, own)


def attention_function(model, notes, patch):
    def own(module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
        weights = torch.softmax(query @ key.transpose(2, 3) * scaling + (0 if mask is None else mask), -1)
        notes.append(weights)
        if not module.is_causal:
            notes.rows.add((query.shape[0], key.shape[0]))
        return (weights @ value).transpose(1, 2).contiguous(), weights

    ALL_ATTENTION_FUNCTIONS.register("noting", own)
    model.set_attn_implementation("noting")


HABITS = {
    function.__name__: function
    for function in (
        *(subclass, forward_of_the_class, forward_of_the_object, inputs_of_a_step, hook, gate_in_a_processor),
        *(strategy, layer_of_ones_own, parametrization, replaced_forward_below_accelerate, attention_function),
    )
}
HABITS["nn.Linear.forward"] = functools.partial(patched, nn.Linear, "forward")
HABITS["F.linear"] = functools.partial(patched, F, "linear")


@functools.cache
def notes_of(name, habit):
    with pytest.MonkeyPatch.context() as patch:
        model, notes = make_model(name), Notes()
        options = HABITS[habit](model, notes, patch) or {}
        model.generate(SOURCE, attention_mask=torch.ones_like(SOURCE), **CALL, **options)
    return notes


# A recurrent model has one way to attend.
TRIED = [(habit, name) for name in FAMILIES for habit in HABITS]
TRIED.remove(("attention_function", "recurrent"))


@pytest.mark.parametrize(("habit", "name"), TRIED)
def test_a_users_code_sees_the_rows_that_it_sees_in_bart_and_may_keep_them(habit, name):
    ours, theirs = (notes_of(each, habit) for each in (name, "bart"))
    assert ours.rows == theirs.rows
    assert bool(ours) == bool(theirs) is True
    for tensor in ours:
        assert not tensor.is_inference()
        (tensor.float() * torch.ones((), requires_grad=True)).sum().backward()


REPLACED = {
    **{"nn.Linear.forward": nn.Linear, "F.linear": nn.Linear, "F.dropout": nn.Dropout},
    **{"nn.LayerNorm.forward": nn.LayerNorm, "F.layer_norm": nn.LayerNorm},
}


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("which", REPLACED)
def test_a_function_of_torch_that_somebody_has_replaced_runs(which, is_training, monkeypatch):
    kind, name, calls = REPLACED[which], which.split(".")[-1], []
    where = F if which.startswith("F.") else kind
    plain = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs))
    model = tiny_model(dropout=0.1 if is_training else 0.0).train(is_training)
    # Dropout in the feed-forward network has the probability 0, and in evaluation none is called.
    layers = [part for part in model.modules() if isinstance(part, kind)]
    wanted = [part for part in layers if kind is not nn.Dropout or (is_training and part.p)]
    for rows in (2, 40):  # few and many
        calls.clear()
        source = torch.randint(14, 99, (rows, 30))
        with torch.set_grad_enabled(is_training):
            model(source, labels=source, skip_logits=True)
        assert len(calls) == len(wanted)


def test_a_plain_model_runs_known_code_alone_also_after_attention_was_recorded():
    for family in FAMILIES:
        model = tiny_model(family=family)
        assert runs_known_code(model)
        model(SOURCE, decoder_input_ids=SOURCE, output_attentions=True)
        assert runs_known_code(model)
    assert not runs_known_code(make_model("bart"))
