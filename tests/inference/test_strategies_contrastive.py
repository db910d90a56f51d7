"""Contrastive search equals the plainest one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful import ContrastiveSearch
from heedful.inference.strategies.contrastive import choose
from helpers import ENDS, START, assert_near, padded, sentences, tiny_model
from plain_strategies import KINDS, contrastive_search, model_of, without_padding

LENGTHS = (9, 2, 6)
LIMIT = 8


def decode(model, rows, strategy, side="right", **options):
    ids, mask = padded(rows, side)
    options = {"do_sample": False, "max_new_tokens": LIMIT} | options
    return model.generate(ids, attention_mask=mask, custom_generate=strategy, **options)


@pytest.mark.parametrize(
    ("alpha", "k", "cached"), [(0.6, 4, True), (0.9, 7, False), (0.0, 3, True), (1.0, 2, False), (0.6, 4, False)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_contrastive_search_equals_the_plainest(kind, alpha, k, cached):
    model, rows = model_of(kind), sentences(*LENGTHS)
    ours = decode(model, rows, ContrastiveSearch(alpha, k), "left" if kind == "heed" else "right", use_cache=cached)
    theirs = [contrastive_search(model, row, alpha=alpha, k=k, limit=LIMIT) for row in rows]
    assert without_padding(ours) == theirs


def test_the_penalty_changes_the_output():
    model, rows = model_of("marian"), sentences(*LENGTHS)
    greedy = model.generate(padded(rows)[0], attention_mask=padded(rows)[1], max_new_tokens=LIMIT, do_sample=False)
    assert without_padding(decode(model, rows, ContrastiveSearch(0.0, 5))) == without_padding(greedy)
    assert without_padding(decode(model, rows, ContrastiveSearch(0.9, 5))) != without_padding(greedy)


def test_the_arguments_that_transformers_4_knew_mean_what_they_meant():
    model, rows = tiny_model(), sentences(*LENGTHS)
    old = decode(model, rows, ContrastiveSearch(), penalty_alpha=0.8, top_k=5)
    assert torch.equal(old, decode(model, rows, ContrastiveSearch(0.8, 5)))


def test_scores_attention_and_states_are_those_of_the_chosen_tokens():
    model, rows = tiny_model(), sentences(*LENGTHS)
    ids, mask = padded(rows)
    found = decode(
        model,
        rows,
        ContrastiveSearch(0.8, 4),
        **{"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "eos_token_id": None},
        **{"output_attentions": True, "output_hidden_states": True},
    )
    with torch.no_grad():
        whole = model(
            ids,
            attention_mask=mask,
            decoder_input_ids=found.sequences[:, :-1],
            output_attentions=True,
            output_hidden_states=True,
        )
    assert_near(torch.stack(found.logits, 1), whole.logits, 2e-5)
    assert found.sequences.shape == (3, 1 + LIMIT)
    assert_near(torch.cat([step[-1] for step in found.cross_attentions], 2), whole.cross_attentions[-1])
    assert_near(
        torch.cat([step[-1] for step in found.decoder_hidden_states], 1), whole.decoder_hidden_states[-1], 2e-5
    )
    assert_near(found.encoder_hidden_states[-1], whole.encoder_hidden_states[-1])
    assert_near(found.encoder_attentions[-1], whole.encoder_attentions[-1])
    chosen = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    every = torch.stack(found.scores, 1).log_softmax(-1)
    assert_near(chosen, every.gather(-1, found.sequences[:, 1:, None])[..., 0])
    assert (chosen >= every.topk(4).values[..., -1]).all()


def test_a_padded_prompt_changes_nothing():
    model = tiny_model()
    source = torch.randint(14, 71, (2, 5))
    prompts = [torch.tensor([START, 30, 31, 32]), torch.tensor([START, 40])]
    ids, mask = padded(prompts, "left")
    options = {"custom_generate": ContrastiveSearch(0.8, 4), "do_sample": False, "eos_token_id": None}
    together = model.generate(source, decoder_input_ids=ids, decoder_attention_mask=mask, max_new_tokens=6, **options)
    for row, prompt, tokens in zip(source, prompts, together, strict=True):
        alone = model.generate(row[None], decoder_input_ids=prompt[None], max_new_tokens=6, **options)[0]
        assert tokens[4 - len(prompt) :].tolist() == alone.tolist()


def test_encoder_outputs_given_by_the_user_are_left_as_they_are():
    model, (ids, mask) = tiny_model(), padded(sentences(*LENGTHS))
    encoded = model.get_encoder()(ids, attention_mask=mask)
    options = {"attention_mask": mask, "custom_generate": ContrastiveSearch(0.6, 4), "max_new_tokens": 5}
    first = model.generate(encoder_outputs=encoded, **options)
    assert encoded.last_hidden_state.shape[0] == 3
    assert torch.equal(first, model.generate(ids, **options))


REFUSED = {
    "`penalty_alpha` must be between 0 and 1, but is None": ((None, 4), {}),
    "`penalty_alpha` must be between 0 and 1, but is 1.5": ((1.5, 4), {}),
    "`penalty_alpha` must be given once": ((0.6, 4), {"penalty_alpha": 0.5}),
    "`top_k` must be between 1 and the 99": ((0.6, 100), {}),
    "`top_k` must be between 1 and the 99 target tokens, but is 0": ((0.6, 0), {}),
    "`num_beams` must be 1": ((0.6, 4), {"num_beams": 3}),
    "`do_sample` must be False": ((0.6, 4), {"do_sample": True}),
    "`num_return_sequences` must be 1": ((0.6, 4), {"num_return_sequences": 2, "do_sample": None, "num_beams": 2}),
    "the cache is static": ((0.6, 4), {"cache_implementation": "static"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_cannot_be_combined_are_refused_by_name(message):
    own, options = REFUSED[message]
    if "num_return_sequences" in message:
        message = "`num_beams` must be 1"
    with pytest.raises(ValueError, match=message):
        decode(tiny_model(), sentences(3), ContrastiveSearch(*own), **options)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_the_choice_is_the_best_by_the_formula(seed, alpha):
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.rand(1, 4, generator=generator)
    states, context = torch.randn(1, 4, 3, generator=generator), torch.randn(1, 5, 3, generator=generator)
    is_context = torch.tensor([[False, True, True, True, True]])
    values = [
        (1 - alpha) * probabilities[0, v].item()
        - alpha * max(torch.cosine_similarity(states[0, v], context[0, j], dim=0).item() for j in range(1, 5))
        for v in range(4)
    ]
    chosen = choose(probabilities, states, context, is_context, alpha).item()
    assert values[chosen] == pytest.approx(max(values), abs=1e-5)


def test_a_forbidden_candidate_is_never_chosen():
    states = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    chosen = choose(torch.tensor([[1.0, 0.0]]), states, states[:, :1], torch.tensor([[True]]), 1.0)
    assert chosen.item() == 0
    assert START not in ENDS
