"""Our beam search, with all its options, equals the plainest one, and transformers' own where it has none."""

from functools import partial
from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import helpers
import plain_strategies as plain
from heedful import BeamSearch
from heedful.decoding.strategies.steps import average
from heedful.versions_heed import CACHE, cache_of
from helpers import ENDS, START, assert_error, assert_near, assert_refused, each_once, padded, sentences, tiny_model
from plain_strategies import KINDS, LENGTHS, LIMIT, assert_same, contains, cut, decode, gnmt, model_of, unmet

SETTINGS = {
    "four_beams": {"num_beams": 4},
    "n_best": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.6},
    "early_stopping": {"num_beams": 3, "early_stopping": True},
    "never": {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0},
    "static_cache": {"num_beams": 4, "cache_implementation": "static"},
    "processors": {"num_beams": 5, "num_return_sequences": 5, "repetition_penalty": 1.5, "min_new_tokens": 3},
}


def each_alone(models, rows, averaged=None, **options):
    """Decode each sentence with the plainest implementation; return `(score, tokens)` of all."""
    found = []
    for row in rows:

        def next_token(tokens, row=row):
            asked = [plain.ask(model, row, tokens) for model in models]
            return averaged(asked) if averaged else asked[0]

        found += plain.PlainBeamSearch(next_token, **options).search()
    return found


@pytest.mark.parametrize(
    ("variant", "setting"), each_once(["default", "grouped", "neighbourhoods"], SETTINGS, ["default"])
)
def test_without_options_it_is_the_beam_search_of_transformers(variant, setting):
    model, (ids, mask) = tiny_model(**helpers.VARIANTS[variant]), padded(sentences(*LENGTHS))
    options = SETTINGS[setting] | {"attention_mask": mask, "do_sample": False, "max_length": 13}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options |= {"output_attentions": True, "output_hidden_states": True}
    theirs = model.generate(ids, **options)
    ours = model.generate(ids, custom_generate=BeamSearch(), **options)
    assert [cut(row) for row in ours.sequences.tolist()] == [cut(row) for row in theirs.sequences.tolist()]
    assert_near(ours.sequences_scores, theirs.sequences_scores)
    assert torch.equal(ours.beam_indices, theirs.beam_indices.long())
    for name in ("scores", "logits"):
        # Behind its end a sentence's rows may hold anything.
        one, other = (
            model.compute_transition_scores(found.sequences, getattr(found, name), found.beam_indices)
            for found in (ours, theirs)
        )
        assert_near(one, other)
        assert {len(step) for step in getattr(ours, name)} == {3 * options["num_beams"]}
    for name in ("cross_attentions", "decoder_attentions", "decoder_hidden_states"):
        for one, other in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            assert [layer.shape for layer in one] == [layer.shape for layer in other]
    assert torch.equal(ours.encoder_hidden_states[-1], theirs.encoder_hidden_states[-1])
    assert torch.equal(ours.encoder_attentions[-1], theirs.encoder_attentions[-1])


def test_one_beam_is_greedy_search_and_finished_rows_are_filled_with_padding():
    model, (ids, mask) = tiny_model(), padded(sentences(*LENGTHS))
    options = {"attention_mask": mask, "max_length": 13, "do_sample": False}
    greedy = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, custom_generate=BeamSearch(), **options), greedy)
    # With these a longer hypothesis would be looked for, but greedy search stops at its first.
    options |= {"length_penalty": 9.0, "early_stopping": "never"}
    assert torch.equal(model.generate(ids, custom_generate=BeamSearch(), **options), greedy)
    for beams in (1, 4):
        rows = model.generate(ids, attention_mask=mask, max_length=13, num_beams=beams, custom_generate=BeamSearch())
        assert {token for row in rows.tolist() for token in row[len(cut(row)) :]} == {helpers.PAD}


@pytest.mark.parametrize(("kind", "cached"), [("heed", False), *((kind, True) for kind in KINDS)])
def test_gnmt_penalties_and_a_length_limit_by_source_equal_the_plainest_search(kind, cached):
    model, rows = model_of(kind), sentences(*LENGTHS)
    strategy = BeamSearch(length_penalty_form="gnmt", tokens_beyond_source=2)
    options = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.6, "use_cache": cached}
    ours = decode(model, rows, strategy, max_new_tokens=9, **options)
    plain = {"beams": 4, "penalty": gnmt, "alpha": 0.6}
    theirs = (each_alone([model], [row], limit=min(9, len(row) + 2), **plain) for row in rows)
    assert_same(ours, [*chain.from_iterable(theirs)])


def test_forced_words_may_be_an_argument_of_generate_as_in_transformers_4():
    model, rows, words = tiny_model(), sentences(*LENGTHS), [[20, 21]]
    forced = decode(model, rows, BeamSearch(), num_beams=4, force_words_ids=words)
    assert forced == decode(model, rows, BeamSearch(force_words_ids=words), num_beams=4)
    assert forced != decode(model, rows, BeamSearch(), num_beams=4)


def averaged(logs):
    return (sum(each.exp() for each in logs) / len(logs)).log()


@pytest.mark.parametrize(("kind", "cached"), [("heed", True), ("t5", False)])
def test_an_ensemble_equals_the_plainest_search_over_averages(kind, cached):
    # Heed alone takes padding on the left.
    third, side = ("heed", "left") if kind == "heed" else ("marian", "right")
    models, rows = [model_of(kind, 0), model_of(kind, 1), model_of(third, 2)], sentences(*LENGTHS)
    strategy = BeamSearch(models=models[1:], length_penalty_form="gnmt")
    options = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.6, "use_cache": cached}
    ours = decode(models[0], rows, strategy, side, **options)
    plainest = {"beams": 3, "limit": LIMIT, "penalty": gnmt, "alpha": 0.6}
    assert_same(ours, each_alone(models, rows, averaged, **plainest))


def test_an_ensemble_goes_on_with_padded_prompts_as_with_each_alone():
    models, source = [model_of("heed", seed) for seed in (0, 1)], torch.randint(14, 71, (2, 5))
    prompts = [torch.tensor([START, 30, 31, 32]), torch.tensor([START, 40])]
    ids, mask = padded(prompts, "left")
    options = {"custom_generate": BeamSearch(models=models[1:]), "num_beams": 3, "max_new_tokens": 6}
    options["return_dict_in_generate"] = True
    together = models[0].generate(source, decoder_input_ids=ids, decoder_attention_mask=mask, **options)
    for number, prompt in enumerate(prompts):
        alone = models[0].generate(source[number, None], decoder_input_ids=prompt[None], **options)
        tokens = together.sequences[number, 4 - len(prompt) :].tolist()
        assert cut(tokens) == cut(alone.sequences[0].tolist())
        assert_near(together.sequences_scores[number], alone.sequences_scores[0])


def test_options_of_all_kinds_work_together():
    models, rows = [model_of("heed", seed) for seed in (0, 1)], sentences(*LENGTHS)
    strategy = BeamSearch(
        **{"models": models[1:], "force_words_ids": [[20, 21]]},
        **{"length_penalty_form": "gnmt", "tokens_beyond_source": 4},
    )
    settings = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.6}
    together = decode(models[0], rows, strategy, **settings)
    assert_same(together, [entry for row in rows for entry in decode(models[0], [row], strategy, **settings)])
    assert all(contains(tokens, [20, 21]) for _, tokens in together)


def test_prompts_embeddings_encoder_outputs_and_stopping_criteria_are_taken_as_generate_takes_them():
    model, (ids, mask) = tiny_model(), padded(sentences(*LENGTHS))
    both = {"attention_mask": mask, "num_beams": 4, "do_sample": False}
    for source in (
        lambda: {"input_ids": ids},
        lambda: {"inputs_embeds": model.get_input_embeddings()(ids)},
        lambda: {"encoder_outputs": model.get_encoder()(ids, attention_mask=mask)},
    ):
        options = both | {"decoder_input_ids": torch.tensor([[START, 30, 31]] * 3), "max_new_tokens": 6}
        theirs = model.generate(**source(), **options)
        ours = model.generate(**source(), **options, custom_generate=BeamSearch())
        assert [cut(row) for row in ours.tolist()] == [cut(row) for row in theirs.tolist()]
    options = both | {"max_length": 12, "stopping_criteria": [lambda tokens, scores, **_: tokens[:, -1] % 3 == 0]}
    theirs, ours = model.generate(ids, **options), model.generate(ids, custom_generate=BeamSearch(), **options)
    for one, other in zip(ours.tolist(), theirs.tolist(), strict=True):
        end = next((place for place, token in enumerate(one) if token in ENDS or (place and token % 3 == 0)), len(one))
        assert one[: end + 1] == other[: end + 1]


REFUSED = {
    "`num_beam_groups` must not be set with BeamSearch": ({}, {"num_beam_groups": 2}),
    "`diversity_penalty` must not be set with BeamSearch": ({}, {"diversity_penalty": 1.0}),
    "`do_sample` must be False": ({}, {"do_sample": True}),
    "`force_words_ids` must be given once": ({"force_words_ids": [[20]]}, {"force_words_ids": [[21]]}),
    "`num_beams` must be at least 2 with forced words": ({"force_words_ids": [[20]]}, {"num_beams": 1}),
    "`length_penalty_form` must be": ({"length_penalty_form": "wu"}, {}),
    "`tokens_beyond_source` must be at least 1": ({"tokens_beyond_source": 0}, {}),
    "`penalty_alpha` must not be set": ({}, {"penalty_alpha": 0.5}),
    "`dola_layers` must not be set": ({}, {"dola_layers": "low"}),
}


def test_settings_that_cannot_be_combined_are_refused_by_name():
    model, ids, base = tiny_model(), torch.tensor([[20, 21]]), {"num_beams": 4, "max_new_tokens": 5}
    cases = [(given, message) for message, given in REFUSED.items()]
    assert_refused(cases, lambda given: model.generate(ids, custom_generate=BeamSearch(**given[0]), **base | given[1]))


def test_models_and_inputs_that_the_search_cannot_take_are_refused():
    model, ids, other = tiny_model(), torch.tensor([[20, 21]]), tiny_model()
    other.generation_config.decoder_start_token_id = 7
    split = tiny_model(decoder_vocab_size=71, share_encoder_decoder_embeddings=False)
    members = [(tiny_model(vocab_size=98), "target size 99"), (split, "target size 99")]
    members += [(tiny_model().train(), "evaluation mode"), (other, "start token 1, but is 7 instead")]
    cases = [((BeamSearch(models=[member]), {}), rf"`models\[0\]` must .*{message}") for member, message in members]
    ensemble = BeamSearch(models=[tiny_model(seed=1)])
    for source in ({"inputs_embeds": torch.randn(1, 3, 32)}, {"encoder_outputs": model.get_encoder()(ids)}):
        cases.append(((ensemble, {"input_ids": None, **source}), "`input_ids` must be given"))
    only = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 1, "eos_token_id": 2}
    only["bad_words_ids"] = [[token] for token in range(99) if token != 50]
    cases.append(((BeamSearch(), only), "`num_return_sequences` must be at most"))
    cache = cache_of(model(ids, decoder_input_ids=torch.tensor([[START, 30]]), use_cache=True))
    filled = {"decoder_input_ids": torch.tensor([[START, 30, 31]]), CACHE: cache}
    cases.append(((BeamSearch(), filled), f"`{CACHE}` must be empty"))
    given = {"input_ids": ids, "num_beams": 2}
    assert_refused(cases, lambda case: model.generate(custom_generate=case[0], **given | case[1]))


def test_a_token_that_a_model_rules_out_is_no_number_gone_wrong():
    one = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert torch.equal(average([one, one]), one)


WORDS = {
    "one_token": [[40]],
    "two_phrases": [[20, 21], [33]],
    "overlapping": [[20, 21, 22], [21, 22, 23]],
    "alternatives": [[[20, 21], [22]], [[30, 31, 32], [33, 34]]],
    "many": [[20, 21], [22, 23], [24]],
}


@pytest.mark.parametrize(("kind", "name"), each_once(KINDS, WORDS, ["heed"]))
def test_constrained_search_equals_the_plainest(kind, name):
    words, model, rows = WORDS[name], model_of(kind), sentences(*LENGTHS)
    cached = kind != "t5"
    ours = decode(model, rows, BeamSearch(force_words_ids=words), num_beams=4, use_cache=cached)
    phrases = [[entry] if isinstance(entry[0], int) else entry for entry in words]
    asked = [partial(plain.ask, model, row) for row in rows]
    theirs = [plain.constrained_search(ask, phrases, beams=4, limit=LIMIT)[0] for ask in asked]
    assert_same(ours, theirs)
    assert not any(unmet(tokens, phrases) for _, tokens in ours)


PHRASES = st.lists(st.lists(st.integers(14, 24), min_size=1, max_size=3, unique=True), min_size=1, max_size=2)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(st.lists(PHRASES, min_size=1, max_size=3, unique_by=str), st.integers(2, 5), st.integers(0, 3))
def test_whatever_the_words_they_occur_in_the_output(words, beams, seed):
    torch.manual_seed(seed)
    rows = sentences(5, 3)
    strategy, options = BeamSearch(force_words_ids=words), {"max_new_tokens": 10, "no_repeat_ngram_size": 0}
    found = decode(tiny_model(), rows, strategy, num_beams=beams, **options)
    assert not any(unmet(tokens[1:], words) for _, tokens in found)


NONSENSE = {
    "must fit into the longest output, 8 tokens, but needs 9": {"force_words_ids": [list(range(20, 29))]},
    "must be a list of one or more constraints, but is ": {"force_words_ids": []},
    r"`force_words_ids\[0\]` must be a list of token ids": {"force_words_ids": [[]]},
    r"`force_words_ids\[1\]` must be a list of token ids": {"force_words_ids": [[20], 21]},
    "one or more constraints, but is 'word'": {"force_words_ids": "word"},
    "must hold token ids from 0 to 98 without end tokens, but holds 99": {"force_words_ids": [[99]]},
    "without end tokens, but holds 2 instead": {"force_words_ids": [[20, 2]]},
    "must hold different constraints": {"force_words_ids": [[20], [21], [20]]},
}


def test_words_that_make_no_sense_or_do_not_fit_are_refused_by_name():
    search = partial(decode, tiny_model(), num_beams=3)
    for message, words in NONSENSE.items():
        assert_error(message, search, sentences(4), BeamSearch(**words))
    strategy = BeamSearch(force_words_ids=[[20, 21, 22, 23]], tokens_beyond_source=1)
    assert_error("longest output, 3 tokens", search, sentences(5, 2), strategy)
    message = r"`force_words_ids` of sentence 0 must be possible within 8"
    assert_error(message, search, sentences(4), BeamSearch(force_words_ids=[[20]]), bad_words_ids=[[20]])
