"""Generation does not depend on the cache, on the padding, or on the other sentences of the batch."""

import pytest
import torch

from heedful.versions_heed import cache_of
from helpers import (
    ENDS,
    FIRST_WORD,
    POSITIONS,
    START,
    VARIANTS,
    assert_near,
    each_once,
    padded,
    pairwise,
    sentences,
    tiny_model,
)

STRATEGIES = {
    "greedy": {"do_sample": False},
    "beam_4": {"do_sample": False, "num_beams": 4, "length_penalty": 0.6},
    "sampling": {"do_sample": True, "top_k": 0},
}
LENGTHS = (9, 2, 6)
SIDES = ["left", "right"]


def without_padding(row):
    """Cut a generated row behind its end token: shorter hypotheses are filled up."""
    end = next((place for place, token in enumerate(row) if token in ENDS), len(row))
    return row[: end + 1]


def generate(model, rows, side="right", **settings):
    """Return the tokens of each sentence without the padding behind it."""
    torch.manual_seed(5)
    ids, mask = padded(rows, side)
    tokens = model.generate(ids, attention_mask=mask, max_length=13, **settings)
    return [without_padding(row) for row in tokens.tolist()]


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_step_by_step_gives_the_logits_of_one_pass(variant):
    model = tiny_model(**VARIANTS[variant])
    source, mask = padded(sentences(7, 4))
    target = torch.randint(FIRST_WORD, 71, (2, 9))
    whole = model(source, attention_mask=mask, decoder_input_ids=target).logits
    encoder_outputs, cache, steps = model.model.encoder(source, attention_mask=mask), None, []
    for piece in target.split([1, 1, 3, 1, 2, 1], dim=1):
        outputs = model(
            encoder_outputs=encoder_outputs,
            attention_mask=mask,
            decoder_input_ids=piece,
            past_key_values=cache,
            use_cache=True,
        )
        cache = cache_of(outputs)
        steps.append(outputs.logits)
    assert_near(torch.cat(steps, 1), whole, 2e-5)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cached_step_after_a_padded_prefix_equals_one_pass(variant):
    model = tiny_model(**VARIANTS[variant])
    source = torch.randint(FIRST_WORD, 99, (2, 5))
    target, mask = padded(sentences(6, 3), "left")
    whole = model(source, decoder_input_ids=target, decoder_attention_mask=mask).logits[:, -1]
    first = model(source, decoder_input_ids=target[:, :4], decoder_attention_mask=mask[:, :4], use_cache=True)
    last = model(
        source,
        decoder_input_ids=target[:, 4:],
        decoder_attention_mask=mask,
        past_key_values=cache_of(first),
    ).logits[:, -1]
    assert_near(last, whole, 2e-5)


@pytest.mark.parametrize(("variant", "strategy"), each_once(VARIANTS, STRATEGIES, ["default", "neighbourhoods"]))
def test_generation_is_the_same_with_every_cache_and_without(variant, strategy):
    model, rows = tiny_model(**VARIANTS[variant]), sentences(*LENGTHS)
    plain = generate(model, rows, use_cache=False, **STRATEGIES[strategy])
    assert generate(model, rows, **STRATEGIES[strategy]) == plain
    assert generate(model, rows, cache_implementation="static", **STRATEGIES[strategy]) == plain


@pytest.mark.parametrize(("variant", "strategy", "side"), pairwise(VARIANTS, ["greedy", "beam_4"], SIDES))
def test_a_batch_is_translated_as_each_of_its_sentences_alone(variant, strategy, side):
    model, rows = tiny_model(**VARIANTS[variant]), sentences(*LENGTHS)
    alone = [generate(model, [row], **STRATEGIES[strategy])[0] for row in rows]
    assert generate(model, rows, side, **STRATEGIES[strategy]) == alone


def test_the_generated_sentences_of_these_tests_differ_and_end_early():
    tokens = [generate(tiny_model(**VARIANTS[name]), sentences(*LENGTHS), do_sample=False) for name in VARIANTS]
    sentences_of_all = [row for rows in tokens for row in rows]
    assert len({len(row) for row in sentences_of_all}) > 5
    assert sum(len(row) == 13 for row in sentences_of_all) > 5
    assert all(row[0] == START for row in sentences_of_all)


@torch.no_grad()
@pytest.mark.parametrize(("variant", "side"), each_once(VARIANTS, SIDES, POSITIONS))
def test_padding_and_neighbours_do_not_change_logits(variant, side):
    model, rows = tiny_model(**VARIANTS[variant]), sentences(*LENGTHS)
    target = torch.randint(FIRST_WORD, 71, (3, 5))
    ids, mask = padded(rows, side)
    together = model(ids, attention_mask=mask, decoder_input_ids=target).logits
    alone = [model(row[None], decoder_input_ids=words[None]).logits for row, words in zip(rows, target, strict=True)]
    assert_near(together, torch.cat(alone), 2e-5)


@pytest.mark.parametrize(("variant", "cache"), each_once(VARIANTS, ["dynamic", "static"], POSITIONS))
def test_generation_continues_a_left_padded_decoder_prompt(variant, cache):
    model = tiny_model(**VARIANTS[variant])
    source = torch.randint(FIRST_WORD, 71, (2, 5))
    prompts = [torch.cat([torch.tensor([START]), row]) for row in sentences(4, 1)]
    ids, mask = padded(prompts, "left")
    settings = {"do_sample": False, "max_length": 12, "eos_token_id": None, "cache_implementation": cache}
    settings["suppress_tokens"] = [0]  # padding, which stands in the prompt of one of them and may not come again
    together = model.generate(source, decoder_input_ids=ids, decoder_attention_mask=mask, **settings)
    for row, prompt, tokens in zip(source, prompts, together, strict=True):
        alone = model.generate(row[None], decoder_input_ids=prompt[None], **settings)[0]
        assert tokens[mask.shape[1] - len(prompt) :].tolist() == alone[: 12 - mask.shape[1] + len(prompt)].tolist()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_asking_for_attention_weights_changes_no_token(cache):
    model, rows = tiny_model(attention="sdpa", decoder_neighbourhood=2), sentences(*LENGTHS)
    ids, mask = padded(rows)
    settings = {"do_sample": False, "max_length": 9, "eos_token_id": None, "cache_implementation": cache}
    plain = model.generate(ids, attention_mask=mask, **settings)
    outputs = model.generate(
        ids, attention_mask=mask, output_attentions=True, return_dict_in_generate=True, **settings
    )
    assert torch.equal(outputs.sequences, plain)
    assert [step[0].shape[:3] for step in outputs.cross_attentions] == [(3, 4, 1)] * 8
    last_step = outputs.decoder_attentions[-1][0][..., :8]
    assert ((last_step > 0) == torch.tensor([False] * 5 + [True] * 3)).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_score_of_a_beam_is_the_log_probability_of_its_tokens(variant):
    model, rows = tiny_model(**VARIANTS[variant]), sentences(*LENGTHS)
    ids, mask = padded(rows)
    settings = {"num_beams": 4, "do_sample": False, "max_length": 8, "eos_token_id": None, "length_penalty": 0.0}
    settings |= {"return_dict_in_generate": True, "output_scores": True, "no_repeat_ngram_size": 0}
    outputs = model.generate(ids, attention_mask=mask, **settings)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, decoder_input_ids=outputs.sequences[:, :-1]).logits
    chosen = logits.log_softmax(-1).gather(-1, outputs.sequences[:, 1:, None])
    assert_near(outputs.sequences_scores, chosen.sum((1, 2)))


def test_without_a_given_length_generation_stops_at_max_position_embeddings():
    model = tiny_model(max_position_embeddings=30)
    tokens = model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, eos_token_id=None)
    assert tokens.shape == (1, 30)
