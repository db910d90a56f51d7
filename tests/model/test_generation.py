"""Generation of both families does not depend on the cache, on padding, or on the other sentences of the batch."""

import pytest
import torch

from heedful.versions_heed import cache_of
from helpers import FAMILIES, POSITIONS, assert_near, each_once, generated, padded, pairwise, sentences, tiny_model

MODELS = {f"{family} {name}": (family, name) for family, (*_, names) in FAMILIES.items() for name in names}
TRANSFORMERS = [name for name, (family, _) in MODELS.items() if family == "transformer"]
THOROUGH = ["transformer default", "transformer neighbourhoods", "recurrent default"]
STRATEGIES = {
    "greedy": {"do_sample": False},
    "beam_4": {"do_sample": False, "num_beams": 4, "length_penalty": 0.6},
    "four_beams_returned": {"num_beams": 4, "num_return_sequences": 4},
    "sampling": {"do_sample": True, "top_k": 0},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}
LENGTHS = (9, 2, 6)
SIDES = ["left", "right"]


def model_of(name):
    family, variant = MODELS[name]
    return tiny_model(family=family, **FAMILIES[family][2][variant])


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_decoding_step_by_step_gives_the_logits_of_one_pass(name):
    model = model_of(name)
    source, mask = padded(sentences(7, 4))
    target = torch.stack(sentences(9, 9))
    whole = model(source, attention_mask=mask, decoder_input_ids=target).logits
    given = {"encoder_outputs": model.model.encoder(source, attention_mask=mask), "attention_mask": mask}
    cache, steps = None, []
    for piece in target.split([1, 1, 3, 1, 2, 1], dim=1):
        outputs = model(**given, decoder_input_ids=piece, past_key_values=cache, use_cache=True)
        cache = cache_of(outputs)
        steps.append(outputs.logits)
    assert_near(torch.cat(steps, 1), whole, 2e-5)
    assert cache.get_seq_length() == 9


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_cached_step_after_a_padded_prefix_equals_one_pass(name):
    model, source = model_of(name), torch.stack(sentences(5, 5))
    target, mask = padded(sentences(6, 3), "left")
    whole = model(source, decoder_input_ids=target, decoder_attention_mask=mask).logits[:, -1]
    cut = 4 if name in TRANSFORMERS else 2  # up to which the second row is all padding
    first = model(source, decoder_input_ids=target[:, :cut], decoder_attention_mask=mask[:, :cut], use_cache=True)
    rest = {"decoder_input_ids": target[:, cut:], "decoder_attention_mask": mask}
    last = model(source, **rest, past_key_values=cache_of(first), use_cache=False)
    assert_near(last.logits[:, -1], whole, 2e-5)
    assert cache_of(first).get_seq_length() == 6


@pytest.mark.parametrize(("name", "strategy"), each_once(MODELS, STRATEGIES, THOROUGH))
def test_generation_is_the_same_with_every_cache_and_without(name, strategy):
    model, rows = model_of(name), sentences(*LENGTHS)
    plain = generated(model, rows, use_cache=False, **STRATEGIES[strategy])
    assert generated(model, rows, **STRATEGIES[strategy]) == plain
    if name in TRANSFORMERS:
        assert generated(model, rows, cache_implementation="static", **STRATEGIES[strategy]) == plain
    assert len({tuple(row) for row in plain}) > 1


@pytest.mark.parametrize(("name", "strategy", "side"), pairwise(MODELS, ["greedy", "beam_4"], SIDES))
def test_a_batch_is_translated_as_each_of_its_sentences_alone(name, strategy, side):
    model, rows = model_of(name), sentences(*LENGTHS)
    alone = [generated(model, [row], **STRATEGIES[strategy])[0] for row in rows]
    assert generated(model, rows, side, **STRATEGIES[strategy]) == alone


def test_the_generated_sentences_of_these_tests_differ_and_end_early():
    found = [row for name in TRANSFORMERS for row in generated(model_of(name), sentences(*LENGTHS), do_sample=False)]
    assert len({len(row) for row in found}) > 5
    assert sum(len(row) == 13 for row in found) > 5


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_padding_and_neighbours_do_not_change_logits(name):
    model, rows = model_of(name), sentences(*LENGTHS)
    target = torch.stack(sentences(5, 5, 5))
    alone = [model(row[None], decoder_input_ids=words[None]).logits for row, words in zip(rows, target, strict=True)]
    for side in SIDES:
        ids, mask = padded(rows, side)
        assert_near(model(ids, attention_mask=mask, decoder_input_ids=target).logits, torch.cat(alone), 2e-5)


PROMPTED = [*each_once(TRANSFORMERS, ["dynamic", "static"], POSITIONS), ("recurrent default", None)]


@pytest.mark.parametrize(("name", "cache"), PROMPTED)
def test_generation_continues_a_left_padded_decoder_prompt(name, cache):
    model, source = model_of(name), torch.stack(sentences(5, 5))
    prompts = [torch.cat([torch.tensor([model.config.decoder_start_token_id]), row]) for row in sentences(4, 1)]
    ids, mask = padded(prompts, "left")
    settings = {"do_sample": False, "max_length": 12, "eos_token_id": None, "cache_implementation": cache}
    settings["suppress_tokens"] = [0]  # padding, which stands in the prompt of one of them and may not come again
    together = model.generate(source, decoder_input_ids=ids, decoder_attention_mask=mask, **settings)
    for row, prompt, tokens in zip(source, prompts, together, strict=True):
        alone = model.generate(row[None], decoder_input_ids=prompt[None], **settings)[0]
        assert tokens[mask.shape[1] - len(prompt) :].tolist() == alone[: 12 - mask.shape[1] + len(prompt)].tolist()


# transformers' own reads the source's vocabulary size, and is wrong without a word where it is the smaller one.
MORE_TARGETS = {"decoder_vocab_size": 120, "share_encoder_decoder_embeddings": False}
SCORED = [*((name, 4) for name in TRANSFORMERS), ("recurrent separate_vocabularies", 3)]
SCORED += [(name, beams) for name in ("transformer more_targets", "recurrent more_targets") for beams in (1, 4)]


@pytest.mark.parametrize(("name", "beams"), SCORED)
def test_the_score_of_a_sequence_is_the_log_probability_of_its_tokens(name, beams):
    family, variant = name.split()
    model = tiny_model(family=family, **MORE_TARGETS) if variant == "more_targets" else model_of(name)
    ids, mask = padded(sentences(*LENGTHS))
    settings = {"num_beams": beams, "do_sample": False, "max_length": 8, "eos_token_id": None, "length_penalty": 0.0}
    settings |= {"return_dict_in_generate": True, "output_scores": True, "no_repeat_ngram_size": 0}
    outputs = model.generate(ids, attention_mask=mask, **settings)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, decoder_input_ids=outputs.sequences[:, :-1]).logits
    chosen = logits.log_softmax(-1).gather(-1, outputs.sequences[:, 1:, None])[..., 0]
    found = model.compute_transition_scores(
        outputs.sequences, outputs.scores, outputs.get("beam_indices"), normalize_logits=beams == 1
    )
    assert_near(found, chosen)
    if beams > 1:
        assert_near(outputs.sequences_scores, chosen.sum(1))


def test_without_a_given_length_generation_stops_at_max_position_embeddings_and_at_512():
    settings = {"do_sample": False, "eos_token_id": None, "no_repeat_ngram_size": 0}
    model = tiny_model(max_position_embeddings=30)
    assert model.generate(torch.tensor([[5, 6, 7]]), **settings).shape == (1, 30)
    model = tiny_model(family="recurrent", hidden_size=4, embedding_size=4)
    assert model.generate(torch.tensor([[5, 6]]), **settings).shape == (1, 512)
