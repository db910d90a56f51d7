"""What the studies of attention measure, on what can be checked by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.attention.recording import record_weights
from heedful.data.epochs.encoding import EncodedPairs
from heedful.data.epochs.micro_batches import collate
from heedful_lab.studies.attention import dilution, homonyms, masking, scaling, single_heads
from heedful_lab.studies.attention.homonyms import WORDS, sentences, separation, split_meanings
from heedful_lab.studies.attention.single_heads import attention_modules, head_importance, look_of
from heedful_lab.studies.measures import Head
from helpers import sentences as random_tokens
from helpers import tiny_model


@given(st.floats(-20, 20), st.floats(-20, 20), st.integers(2, 300))
def test_the_kept_weight_is_torchs_softmax(score, others, count):
    scores = torch.full((count,), others, dtype=torch.float64)
    scores[0] = score
    assert dilution.kept_weight(score, others, count) == pytest.approx(scores.softmax(0)[0].item(), rel=1e-9)


def test_products_have_the_variance_d_k_and_saturate_with_the_width_and_scaled_ones_have_one_and_do_not():
    narrow, wide = (scaling.softmax_of_random(d_k, False, 2) for d_k in (16, 1024))
    assert (narrow.variance, wide.variance) == (pytest.approx(16, rel=0.03), pytest.approx(1024, rel=0.03))
    assert wide.largest > 0.9 > narrow.largest
    assert wide.entropy < 0.2 * narrow.entropy
    assert wide.gradient < 0.3 * narrow.gradient
    narrow, wide = (scaling.softmax_of_random(d_k, True, 2) for d_k in (16, 1024))
    assert (narrow.variance, wide.variance) == (pytest.approx(1, rel=0.03), pytest.approx(1, rel=0.03))
    assert wide.largest == pytest.approx(narrow.largest, abs=0.02)
    assert wide.gradient == pytest.approx(narrow.gradient, abs=0.02)


def test_the_derivatives_norm_is_autograds(monkeypatch):
    monkeypatch.setattr(scaling, "QUERIES", 1)
    monkeypatch.setattr(scaling, "KEYS", 5)
    found = scaling.softmax_of_random(8, True, 3)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 1, 8, generator=generator)
    keys = torch.cat([torch.randn(1, 1, 8, generator=generator) for _ in range(5)], dim=1)
    scores = (query @ keys.transpose(1, 2))[0, 0].double() / math.sqrt(8)
    derivative = torch.autograd.functional.jacobian(lambda values: values.softmax(-1), scores)
    assert found.gradient == pytest.approx(derivative.norm().item(), rel=1e-5)
    assert found.largest == pytest.approx(scores.softmax(-1).max().item(), rel=1e-5)


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word["form"])
def test_a_verb_or_a_modifier_decides_the_meaning_and_nothing_else_tells_them_apart(word):
    form, rests = f" {word['form']} ", []
    for meaning in word["meanings"]:
        rest, deciding = set(), [korean for korean, _ in (*meaning["verbs"], *meaning["modifiers"])]
        for decides, own in zip(deciding, sentences(word["form"], meaning), strict=True):
            assert all(source.count(form) == 1 for source, _ in own)
            assert all(f" {decides}{form}" in source or f"{form}{decides}." in source for source, _ in own)
            rest |= {source.replace(f" {decides}{form}", form).replace(f"{form}{decides}.", form) for source, _ in own}
        rests.append((rest, set(deciding)))
    (first, one), (second, other) = rests[:2]
    assert first == second
    assert one.isdisjoint(other)
    meaning, other = split_meanings(word, seed=1)[:2]
    assert not {pair for some in meaning.train for pair in some} & {pair for some in meaning.test for pair in some}
    said = {source: target for some in (meaning.test, other.test) for pairs in some for source, target in pairs}
    translator = SimpleNamespace(translate=lambda texts: [[SimpleNamespace(text=said[text])] for text in texts])
    assert homonyms.translated_meanings(translator, [meaning, other]) == (1, 0)


def test_one_vector_cannot_be_told_apart_and_two_can():
    torch.manual_seed(0)
    same, one, other = torch.randn(3, 8)
    states = torch.stack([torch.stack([same, own]).repeat(2, 3, 1, 1) for own in (one, other)])
    states[1, :, :, 0] += 2e-3 * torch.randn(8)  # less than what counts
    before, after = separation(states, 2 * states)
    assert tuple(before) == pytest.approx((0.5, 0.5, 1, 1), abs=1e-4)
    cosine = torch.cosine_similarity(one, other, dim=0).item()
    assert tuple(after) == pytest.approx((1, 1, 1, cosine), abs=1e-5)
    assert separation(states, states.flip(0))[1][:2] == (0, 0)


SOURCE, TARGET, OTHER_TOKEN = [12, 40, 7, 33, 21, 2], [50, 8, 19, 64, 31, 11, 2], 77


@pytest.fixture(params=["eager", "sdpa"])
def model(request):
    return tiny_model(attention=request.param)


@torch.no_grad()
def logits(model, target, **inputs):
    return model(input_ids=torch.tensor([SOURCE]), decoder_input_ids=torch.tensor([target]), **inputs).logits[0]


def test_the_scores_masked_by_minus_infinity_give_the_models_own_weights(model):
    fed = [model.config.decoder_start_token_id, *TARGET[:-1]]
    own = torch.stack(record_weights(model, SOURCE, fed, ["decoder"])["decoder"])
    found = masking.scores_of(model, SOURCE, fed)
    torch.testing.assert_close(masking.WAYS["−∞ before"](found), own, atol=1e-6, rtol=1e-5)
    sums = masking.WAYS["0 after"](found).sum(-1)
    assert sums.max() < 1 + 1e-5
    assert sums[..., :-1].mean() < 0.9


def test_without_the_mask_a_prediction_depends_on_later_tokens_and_only_meanwhile(model):
    changed = [*TARGET[:-1], OTHER_TOKEN]
    before = logits(model, TARGET)
    torch.testing.assert_close(logits(model, changed)[:-1], before[:-1])
    mask = torch.tensor([[1] * len(TARGET) + [0, 0]])
    with masking.seeing_all():
        seen = logits(model, TARGET)
        beside_padding = logits(model, [*TARGET, 0, 0], decoder_attention_mask=mask, use_cache=False)
        torch.testing.assert_close(beside_padding[: len(TARGET)], seen, atol=1e-5, rtol=1e-5)  # still hidden
        assert (logits(model, changed)[:-1] - seen[:-1]).abs().amax(-1).min() > 1e-4
    torch.testing.assert_close(logits(model, TARGET), before)


def test_one_pass_gives_the_loss_and_gradient_of_one_by_one_with_the_mask_alone(model):
    gradients = []
    for is_one_pass in (True, False):
        model.zero_grad()
        loss = masking.next_token_loss(model, SOURCE, TARGET, is_one_pass)
        loss.backward()
        gradients.append((loss.detach(), torch.cat([one.grad.flatten() for one in model.parameters()])))
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    with torch.no_grad(), masking.seeing_all():
        once, by_one = (masking.next_token_loss(model, SOURCE, TARGET, way).item() for way in (True, False))
    assert once != pytest.approx(by_one, abs=1e-4)


@torch.no_grad()
def loss_of(model, row) -> float:
    batch = collate([row], 0)
    return torch.nn.functional.cross_entropy(model(**batch).logits[0], batch["labels"][0]).item()


def some_rows(*lengths) -> EncodedPairs:
    torch.manual_seed(0)
    rows = [{"input_ids": one.tolist(), "labels": one.flip(0).tolist()} for one in random_tokens(*lengths)]
    return EncodedPairs(rows)


@pytest.fixture
def uneven():
    return tiny_model(decoder_layers=3, decoder_attention_heads=2, d_v=6)


@pytest.mark.parametrize("head", [Head("encoder", 1, 2), Head("decoder", 2, 1), Head("cross", 0, 0)], ids=str)
def test_a_head_that_is_left_out_adds_nothing_is_of_no_importance_and_the_others_stay(uneven, head):
    rows = some_rows(7)
    row = rows[0]
    module = attention_modules(uneven)[head.kind, head.layer]
    before = {name: value.clone() for name, value in uneven.state_dict().items()}
    start = head.number * module.d_v

    def silence(_, inputs):
        states = inputs[0].clone()
        states[..., start : start + module.d_v] = 0
        return (states,)

    hook = module.out_proj.register_forward_pre_hook(silence)
    expected = loss_of(uneven, row)
    hook.remove()
    pruned = single_heads.without_heads(uneven, [head])
    assert loss_of(pruned, row) == pytest.approx(expected, rel=1e-6)
    assert head_importance(pruned, rows)[head] == 0
    assert loss_of(uneven, row) != pytest.approx(expected, rel=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in uneven.state_dict().items())


def test_importance_is_the_derivative_of_the_loss_by_the_head_and_leaves_the_model_as_it_is(uneven):
    rows = some_rows(5, 8, 6)
    uneven = uneven.double().train()
    step, derivatives = 1e-4, {}
    for head in single_heads.heads_of(uneven):
        module = attention_modules(uneven)[head.kind, head.layer]
        columns = slice(head.number * module.d_v, (head.number + 1) * module.d_v)
        original, losses = module.out_proj.weight.detach().clone(), []
        for factor in (1 + step, 1 - step):
            module.out_proj.weight.data[:, columns] = original[:, columns] * factor
            losses.append([loss_of(uneven, rows[index]) for index in range(len(rows))])
            module.out_proj.weight.data.copy_(original)
        derivatives[head] = sum(abs(high - low) / (2 * step) for high, low in zip(*losses, strict=True))
    found = head_importance(uneven, rows)
    assert set(found) == set(derivatives)
    for place in attention_modules(uneven):
        inside = [head for head in derivatives if head[:2] == place]
        expected = torch.nn.functional.normalize(torch.tensor([derivatives[head] for head in inside]), dim=0)
        assert [found[head] for head in inside] == pytest.approx(expected.tolist(), rel=1e-3)
    # The model is as it was.
    assert uneven.training
    assert all(parameter.grad is None for parameter in uneven.parameters())
    assert not any(module.out_proj._forward_pre_hooks for module in attention_modules(uneven).values())


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
