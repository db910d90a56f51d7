"""What people write with any encoder-decoder of transformers works with both families, as it does with Marian."""

import copy
import functools
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode
from transformers import LogitsProcessorList
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heedful.fast_paths_heed import runs_known_code
from heedful.versions_heed import CACHE, cache_of
from helpers import assert_near, assert_refused, tiny_model

HEED = ("transformer", "recurrent")


def make_model(name: str):
    """Return a tiny model that is training, without dropout."""
    return tiny_model(family=name, attention="eager" if name == "transformer" else None).train()


def make_batch(rows: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(14, 99, (rows, 5))
    labels[1, 3:] = -100
    mask = torch.ones(rows, 6, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": torch.randint(14, 99, (rows, 6)), "attention_mask": mask, "labels": labels}


def linears(model) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def matrices(model) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.dim() > 1 and parameter.requires_grad]


def train_step(model, **arguments):
    outputs = model(**make_batch(), **arguments)
    outputs.loss.backward()
    return outputs


def hooks(model, register, is_global):
    kinds = nn.Linear | nn.LayerNorm if is_global else nn.Linear
    seen, expected = set(), {module for module in model.modules() if isinstance(module, kinds)}
    noting = [lambda module, *_: seen.add(module)]
    handles = [register(*noting)] if is_global else [register(module, *noting) for module in expected]
    try:
        train_step(model)
    finally:
        for handle in handles:
            handle.remove()
    assert expected <= seen


class HandWrittenLora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, states):
        output = self.base(states)
        output += self.b(self.a(states))
        return output


def hand_written_lora(model):
    for name, module in linears(model).items():
        if name != "lm_head":
            model.set_submodule(name, HandWrittenLora(module))
    train_step(model)
    assert all(part.weight.grad.any() for name, part in linears(model).items() if name.endswith((".a", ".b")))


def loss_of(model, parameters, batch):
    return functional_call(model, parameters, kwargs=batch).loss


def detached(model):
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def func_jvp(model):
    parameters = detached(model)
    tangents = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    _, found = jvp(lambda given: loss_of(model, given, make_batch()), (parameters,), (tangents,))
    train_step(model)
    wanted = sum((p.grad * tangents[name]).sum() for name, p in model.named_parameters() if p.grad is not None)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def per_sample_gradients(model):
    batch = make_batch()
    del batch["attention_mask"]
    parameters = detached(model)

    def loss(given, row):
        return loss_of(model, given, {name: values[None] for name, values in row.items()})

    found = vmap(grad(loss), in_dims=(None, 0), randomness="different")(parameters, batch)
    wanted = grad(loss)(parameters, {name: values[2] for name, values in batch.items()})
    for name, value in wanted.items():
        torch.testing.assert_close(found[name][2], value, rtol=1e-3, atol=1e-5)


def second_derivatives(model):
    first = torch.autograd.grad(model(**make_batch()).loss, matrices(model), create_graph=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in first), matrices(model))
    assert all(each.abs().max() > 0 for each in second)


def counted_operations(model):
    counts = []
    for is_fast in (False, True):
        with FlopCounterMode(display=False) as counter, torch.backends.mkldnn.flags(enabled=is_fast):
            model(**make_batch()).loss.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 1e5


CALLS = {
    function.__name__: function
    for function in (
        *(hand_written_lora, func_jvp, per_sample_gradients, second_derivatives),
        counted_operations,
    )
}
for direction in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
    hook = f"register_{direction}_hook"
    CALLS[hook] = functools.partial(hooks, register=getattr(nn.Module, hook), is_global=False)
for hook in ("register_module_forward_hook", "register_module_full_backward_hook"):
    CALLS[hook] = functools.partial(hooks, register=getattr(nn.modules.module, hook), is_global=True)


@pytest.mark.parametrize("name", HEED)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_works_with_marian_works_with_both_families(call, name):
    CALLS[call](make_model(name))


# What is said, and what is not


@pytest.mark.parametrize("name", HEED)
def test_a_number_of_new_tokens_is_taken_without_a_word_and_a_cache_has_a_layer_for_each_of_the_decoder(name):
    model, source = make_model(name).eval(), make_batch()["input_ids"]
    with patch("transformers.generation.utils.logger.warning") as warning:
        assert model.generate(source, max_new_tokens=4, min_new_tokens=4).shape == (3, 5)
    assert not [call for call in warning.call_args_list if "max_length" in str(call)]
    assert len(cache_of(model(source, decoder_input_ids=source, use_cache=True))) == 2


@pytest.mark.parametrize("name", HEED)
def test_a_source_that_is_no_batch_is_named(name):
    model, source = make_model(name).eval(), make_batch()["input_ids"]
    cases = [(source[0], r"\(batch, source_length\).*\(6,\)"), (source[:0], r"\(0, 6\)"), (source[:, :0], r"\(3, 0\)")]
    assert_refused(cases, model.generate)
    cases = [(source[0], r"\(batch, length\).*\(6,\)"), (source[:, :0], r"at least one token, but are of \(3, 0\)")]
    assert_refused(cases, model.get_encoder())
    assert_refused([(source[:, :0], r"at least one token")], lambda labels: model(source, labels=labels))
    assert_refused([(source, r"use `generate\(\)` to produce one, or `get_encoder\(\)`")], model)


@pytest.mark.parametrize("name", HEED)
def test_generation_goes_on_from_a_returned_cache(name):
    model, source = make_model(name).eval(), make_batch()["input_ids"]
    options = {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    whole = model.generate(source, max_new_tokens=5, **options)
    part = model.generate(source, max_new_tokens=3, **options)
    # With a mask, as transformers wants it, and without, where it would read all tokens once more; without the start.
    mask = {"decoder_attention_mask": torch.ones_like(part.sequences)}
    for prompt, given in ((part.sequences, mask), (part.sequences, {}), (part.sequences[:, 1:], {})):
        options[CACHE] = copy.deepcopy(cache_of(part))
        rest = model.generate(source, decoder_input_ids=prompt, max_new_tokens=2, **given, **options)
        assert torch.equal(rest.sequences, whole.sequences)
        assert_near(rest.logits[-1], whole.logits[-1])
    short = part.sequences[:, :3]
    cases = [(None, "more than the 3 tokens .* are 0 tokens"), (short, "are 3 tokens"), (short[:, 1:], "are 3 tokens")]
    call = functools.partial(model.generate, source, **{CACHE: cache_of(part)}, max_new_tokens=2)
    assert_refused(cases, lambda prompt: call(decoder_input_ids=prompt))


# What a user's own code within a model sees, and may keep of it. Each habit puts code into a model that notes the
# tensors it is given: of the rows that Marian shows it, and such that can be trained with afterwards.

SOURCE = torch.randint(14, 99, (2, 6), generator=torch.Generator().manual_seed(0))
BEAMS, STEPS = 3, 4
CALL = {"num_beams": BEAMS, "max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}


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
    return [part for name, part in model.named_modules() if isinstance(part, nn.Linear) and "decoder" in name][-1]


def subclass(model, notes):
    def forward(self, *args, **kwargs):
        return noted_forward(notes, super(type(self), self).forward, *args, **kwargs)

    forward = functools.wraps(type(model).forward)(forward)
    model.__class__ = type("Mine", (type(model),), {"forward": forward, "__module__": "mine"})


def forward_of_its_own(model, notes):
    model.forward = functools.wraps(model.forward)(functools.partial(noted_forward, notes, model.forward))


def hook(model, notes):
    model.register_forward_hook(lambda module, args, kwargs, output: note_source(notes, kwargs), with_kwargs=True)


def gate_in_a_processor(model, notes):
    """A copy gate: it mixes what a hook has seen of the source into the scores, a number for each row."""
    hook(model, notes)
    gate = [lambda input_ids, scores: scores + 0.1 * notes[-1].mean(dim=(1, 2))[:, None]]
    return {"logits_processor": LogitsProcessorList(gate)}


def strategy(model, notes):
    """Greedy search as it is written for Marian, over all rows of the beams."""

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


def layer_of_ones_own(model, notes):
    class Own(nn.Linear):
        table = None

        def forward(self, states):
            if self.table is None:  # made at the first call
                self.table = states.new_ones(self.out_features)
                notes.append(self.table)
            return super().forward(states) + self.table

    last_linear(model).__class__ = Own


def parametrization(model, notes):
    class Kept(nn.Module):
        def forward(self, weight):
            notes.append(weight * 1)
            return notes[-1]

    parametrize.register_parametrization(last_linear(model), "weight", Kept())


def replaced_forward_below_accelerate(model, notes):
    layer = last_linear(model)

    def forward(states):
        notes.append(F.linear(states, layer.weight, layer.bias))
        return notes[-1]

    layer.forward = forward
    cpu_offload(model, execution_device=torch.device("cpu"))


def attention_function(model, notes):
    def own(module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
        weights = torch.softmax(query @ key.transpose(2, 3) * scaling + (0 if mask is None else mask), -1)
        notes.append(weights)
        if not module.is_causal:
            notes.rows.add((query.shape[0], key.shape[0]))
        return (weights @ value).transpose(1, 2).contiguous(), weights

    ALL_ATTENTION_FUNCTIONS.register("noting", own)
    model.set_attn_implementation("noting")


# With what each sees of the source: its rows, and the shape of its mask. In Marian each hypothesis has its own.
EACH = {(len(SOURCE) * BEAMS, (len(SOURCE) * BEAMS, SOURCE.shape[1]))}
HABITS = dict.fromkeys((layer_of_ones_own, parametrization, replaced_forward_below_accelerate), frozenset())
HABITS |= dict.fromkeys((subclass, forward_of_its_own, hook, gate_in_a_processor, strategy), EACH)
HABITS[attention_function] = {(2, 2), (6, 6)}  # queries and keys, of the encoder and of the decoder
# A recurrent model has one way to attend.
TRIED = [(habit, name) for name in HEED for habit in HABITS if (habit, name) != (attention_function, "recurrent")]


@pytest.mark.parametrize(("habit", "name"), TRIED)
def test_a_users_code_sees_the_rows_that_it_sees_in_marian_and_may_keep_them(habit, name):
    model, notes = tiny_model(family=name), Notes()
    options = habit(model, notes) or {}
    model.generate(SOURCE, attention_mask=torch.ones_like(SOURCE), **CALL, **options)
    assert notes.rows == HABITS[habit]
    assert notes
    for tensor in notes:
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
            model.loss_of({"input_ids": source, "labels": source})
        assert len(calls) == len(wanted)


def test_a_plain_model_runs_known_code_alone_also_after_attention_was_recorded():
    for family in HEED:
        model = tiny_model(family=family)
        assert runs_known_code(model)
        model(SOURCE, decoder_input_ids=SOURCE, output_attentions=True)
        assert runs_known_code(model)
