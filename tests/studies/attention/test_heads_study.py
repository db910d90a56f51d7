import json
import math
from dataclasses import replace

import pytest
import torch

from heedful.data.encoding import EncodedPairs
from heedful.data.micro_batches import collate
from heedful.studies import pairs
from heedful.studies.attention import heads
from heedful.studies.attention.single_heads import (
    Head,
    Look,
    attention_modules,
    head_importance,
    heads_of,
    without_heads,
)
from heedful.studies.study import Lab, run_study
from helpers import sentences, tiny_model


def loss_of(model, row) -> float:
    batch = collate([row], 0)
    with torch.no_grad():
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


@pytest.mark.parametrize("head", [Head("encoder", 1, 2), Head("decoder", 2, 1), Head("cross", 0, 0)])
def test_a_head_that_is_left_out_adds_nothing_and_the_others_stay(model, head):
    row = some_rows(7)[0]
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
    assert loss_of(model, row) != pytest.approx(expected, rel=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_without_its_cross_heads_a_model_does_not_see_the_source(model):
    pruned = without_heads(model, [head for head in heads_of(model) if head.kind == "cross"])
    first, second = some_rows(7, 7)[0], some_rows(7, 7)[1]
    other = {"input_ids": second["input_ids"], "labels": first["labels"]}
    assert loss_of(model, first) != pytest.approx(loss_of(model, other), rel=1e-3)
    assert loss_of(pruned, first) == pytest.approx(loss_of(pruned, other), rel=1e-6)


def test_importance_is_the_derivative_of_the_loss_by_the_head(model):
    rows = some_rows(5, 8, 6)
    model = model.double()
    step, derivatives = 1e-4, {}
    for head in heads_of(model):
        module = attention_modules(model)[head.kind, head.layer]
        columns = slice(head.number * module.d_v, (head.number + 1) * module.d_v)
        original, losses = module.out_proj.weight.detach().clone(), []
        for factor in (1 + step, 1 - step):
            with torch.no_grad():
                module.out_proj.weight[:, columns] = original[:, columns] * factor
            losses.append([loss_of(model, rows[index]) for index in range(len(rows))])
            with torch.no_grad():
                module.out_proj.weight.copy_(original)
        derivatives[head] = sum(abs(high - low) / (2 * step) for high, low in zip(*losses, strict=True))
    found = head_importance(model, rows)
    for (kind, layer), _ in attention_modules(model).items():
        inside = [head for head in derivatives if head[:2] == (kind, layer)]
        norm = math.sqrt(sum(derivatives[head] ** 2 for head in inside))
        assert [found[head] for head in inside] == pytest.approx(
            [derivatives[head] / norm for head in inside], rel=1e-3
        )


def test_importance_leaves_the_model_as_it_is(model):
    model.train()
    found = head_importance(model, some_rows(5))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.out_proj._forward_pre_hooks for module in attention_modules(model).values())
    assert set(found) == set(heads_of(model))


def test_a_head_that_is_left_out_is_of_no_importance(model):
    head = Head("cross", 1, 1)
    found = head_importance(without_heads(model, [head]), some_rows(5, 6))
    assert found[head] == 0
    assert found[Head("cross", 1, 0)] == pytest.approx(1)


def test_a_look_tells_where_the_weight_is():
    look = Look()
    look.add(torch.eye(4).roll(1, dims=1))  # every token looks at the next one, the last at the first
    assert [look.mean(place) for place in ("previous", "same", "next")] == [0, 0, 1]
    assert look.mean("first") == look.mean("</s>") == 1 / 4
    assert look.mean("entropy") == 0
    assert look.mean("largest weight") == 1
    look.add(torch.full((4, 4), 1 / 4))
    assert look.mean("next") == pytest.approx((3 + 3 / 4) / 6)
    assert look.mean("entropy") == pytest.approx(math.log(4) / 2)


def test_the_study_writes_its_tables_and_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "TEST_PAIRS", "builtin:test:6")
    for name, value in {"SEEDS": 1, "SHARES": (0, 0.5, 1), "RANDOM_ORDERS": 1}.items():
        monkeypatch.setattr(heads, name, value)
    small = {
        "data.test": {"test": "builtin:test:6"},
        "tokenizer.vocab_size": 400,
        "optimization.tokens_per_update": 256,
        "decoding.max_length": 6,
    }
    study = replace(heads.STUDY, changes={**heads.STUDY.changes, **small})
    lab = Lab(study, updates=4, data="builtin:train:400", folder=tmp_path / "trainings")
    folder = run_study(lab, tmp_path / "heads")
    results = json.loads((folder / "results.json").read_text())
    tables = {table["name"]: table["rows"] for table in results["tables"]}
    assert [row[0] for row in tables["quality"]] == [1, 4, 8]
    assert tables["quality"][0][2] == tables["quality"][1][2] == results["values"]["parameters"]
    assert len(tables["looks"]) == 3 * 2 * 4
    assert [row[1] for row in tables["pruning"]] == [24, 12, 0, 48, 24, 0]
    full, half, none = (row[2:4] for row in tables["pruning"][:3])
    assert full[0] == full[1]  # nothing is left out, in any order
    assert half[0] != half[1]
    assert none[0] == pytest.approx(none[1])
    assert {path.name for path in folder.glob("*.svg")} == {"heads-looks.svg", "heads-pruning.svg"}
