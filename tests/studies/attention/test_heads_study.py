import math

import pytest
import torch

from heedful.data.encoding import EncodedPairs
from heedful.data.micro_batches import collate
from heedful.studies.attention.single_heads import (
    Head,
    attention_modules,
    head_importance,
    heads_of,
    look_of,
    without_heads,
)
from helpers import sentences, tiny_model


@torch.no_grad()
def loss_of(model, row) -> float:
    batch = collate([row], 0)
    return torch.nn.functional.cross_entropy(model(**batch).logits[0], batch["labels"][0]).item()


def some_rows(*lengths) -> EncodedPairs:
    torch.manual_seed(0)
    rows = [{"input_ids": one.tolist(), "labels": one.flip(0).tolist()} for one in sentences(*lengths)]
    return EncodedPairs(rows)


@pytest.fixture
def model():
    return tiny_model(decoder_layers=3, decoder_attention_heads=2, d_v=6)


def test_every_head_of_every_layer_is_counted_once(model):
    found = heads_of(model)
    assert len(found) == len(set(found)) == 2 * 4 + 3 * 2 + 3 * 2
    assert {head.kind for head in found} == {"encoder", "decoder", "cross"}


@pytest.mark.parametrize("head", [Head("encoder", 1, 2), Head("decoder", 2, 1), Head("cross", 0, 0)], ids=str)
def test_a_head_that_is_left_out_adds_nothing_is_of_no_importance_and_the_others_stay(model, head):
    rows = some_rows(7)
    row = rows[0]
    module = attention_modules(model)[head.kind, head.layer]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start = head.number * module.d_v

    def silence(_, inputs):
        states = inputs[0].clone()
        states[..., start : start + module.d_v] = 0
        return (states,)

    hook = module.out_proj.register_forward_pre_hook(silence)
    expected = loss_of(model, row)
    hook.remove()
    pruned = without_heads(model, [head])
    assert loss_of(pruned, row) == pytest.approx(expected, rel=1e-6)
    assert head_importance(pruned, rows)[head] == 0
    assert loss_of(model, row) != pytest.approx(expected, rel=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_without_its_cross_heads_a_model_does_not_see_the_source(model):
    pruned = without_heads(model, [head for head in heads_of(model) if head.kind == "cross"])
    first, second = some_rows(7, 7)[0], some_rows(7, 7)[1]
    other = {"input_ids": second["input_ids"], "labels": first["labels"]}
    assert loss_of(model, first) != pytest.approx(loss_of(model, other), rel=1e-3)
    assert loss_of(pruned, first) == pytest.approx(loss_of(pruned, other), rel=1e-6)


def test_importance_is_the_derivative_of_the_loss_by_the_head_and_leaves_the_model_as_it_is(model):
    rows = some_rows(5, 8, 6)
    model = model.double().train()
    step, derivatives = 1e-4, {}
    for head in heads_of(model):
        module = attention_modules(model)[head.kind, head.layer]
        columns = slice(head.number * module.d_v, (head.number + 1) * module.d_v)
        original, losses = module.out_proj.weight.detach().clone(), []
        for factor in (1 + step, 1 - step):
            module.out_proj.weight.data[:, columns] = original[:, columns] * factor
            losses.append([loss_of(model, rows[index]) for index in range(len(rows))])
            module.out_proj.weight.data.copy_(original)
        derivatives[head] = sum(abs(high - low) / (2 * step) for high, low in zip(*losses, strict=True))
    found = head_importance(model, rows)
    assert set(found) == set(derivatives)
    for place in attention_modules(model):
        inside = [head for head in derivatives if head[:2] == place]
        expected = torch.nn.functional.normalize(torch.tensor([derivatives[head] for head in inside]), dim=0)
        assert [found[head] for head in inside] == pytest.approx(expected.tolist(), rel=1e-3)
    # The model is as it was.
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.out_proj._forward_pre_hooks for module in attention_modules(model).values())


def test_a_look_says_where_the_weight_is():
    look = look_of(torch.eye(4).roll(1, dims=1))  # every token looks at the next one, the last at the first
    means = {name: values.mean().item() for name, values in look.items()}
    assert means == {
        **dict.fromkeys(("previous", "same", "entropy"), 0),
        **dict.fromkeys(("first", "</s>"), 1 / 4),
        **dict.fromkeys(("next", "largest weight"), 1),
    }
    assert [len(values) for values in look.values()] == [3, 4, 3, 4, 4, 4, 4]
    assert look_of(torch.full((4, 4), 1 / 4))["entropy"].mean() == pytest.approx(math.log(4))
