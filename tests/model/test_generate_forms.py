"""Every form of `generate()` against the plainest loop: one sentence, no cache, straight from the logits.

That the cache, padding and the batch change nothing is in test_generation.py.
"""

import itertools
from unittest.mock import Mock

import pytest
import torch
from transformers import GenerationMixin, WatermarkingConfig

import helpers
from heedful import BeamSearch
from heedful.versions_heed import cache_of
from helpers import ENDS, POSITIONS, START, VARIANTS, assert_near, each_once, padded, pairwise, sentences, tiny_model
from plain_strategies import PlainBeamSearch, cut, without_padding

LENGTHS = (9, 2, 6)
START_OF_THREE = torch.full((3, 1), START)
LIMIT = 8
FULL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def model_and_batch(variant="default", side="right", **changes):
    model = tiny_model(**VARIANTS[variant], **changes)
    rows = sentences(*LENGTHS)
    ids, mask = padded(rows, side)
    return model, rows, {"input_ids": ids, "attention_mask": mask, "max_new_tokens": LIMIT}


@torch.no_grad()
def logits_of(model, source, tokens):
    """Return the logits of the next token."""
    return model(input_ids=source[None], decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def forbid(logits, tokens):
    return logits.index_fill(0, torch.tensor(sorted(set(tokens)), dtype=torch.long), -torch.inf)


def greedy(model, source, *, process=None, prompt=(START,), ends=ENDS, repeats=False):
    """Take the best token, which is a new one, again and again; `process(tokens, logits)` changes logits first."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + LIMIT and (len(tokens) == len(prompt) or tokens[-1] not in ends):
        logits = forbid(logits_of(model, source, tokens), [] if repeats else tokens)
        tokens.append((process(tokens, logits) if process else logits).argmax().item())
    return tokens


def greedy_all(model, rows, **options):
    return without_padding([greedy(model, row, **options) for row in rows])


def log_probabilities(model, source, tokens):
    """Return the next token's log-probabilities, normalised before tokens are ruled out, as beams have them."""
    return forbid(logits_of(model, source, tokens).log_softmax(-1), tokens)


CACHED = [("left", None), ("right", "dynamic"), ("left", "static")]


@pytest.mark.parametrize(("variant", "form"), each_once(VARIANTS, CACHED, POSITIONS))
def test_greedy_search(variant, form):
    model, rows, batch = model_and_batch(variant, form[0])
    found = model.generate(**batch, do_sample=False, cache_implementation=form[1])
    assert without_padding(found) == greedy_all(model, rows)


def beams_of(model, source, prompt=(START,), **options):
    """Return the scores and tokens of four beams, best first."""

    def next_token(after):
        return log_probabilities(model, source, [*prompt, *after[1:]]), torch.ones(1)

    return PlainBeamSearch(next_token, beams=4, limit=LIMIT, **options).search()


@pytest.mark.parametrize(("variant", "length_penalty"), each_once(VARIANTS, [0.0, 0.6, 2.0]))
def test_beam_search_and_its_n_best(variant, length_penalty):
    model, rows, batch = model_and_batch(variant)
    options = {"num_beams": 4, "num_return_sequences": 4, "do_sample": False, "length_penalty": length_penalty}
    found = model.generate(**batch, **FULL, **options)
    expected = [entry for row in rows for entry in beams_of(model, row, alpha=length_penalty)]
    assert [cut(row) for row in found.sequences.tolist()] == [cut(tokens) for _, tokens in expected]
    assert found.sequences_scores.tolist() == pytest.approx([score for score, _ in expected], abs=1e-4)


def test_beam_samples_are_the_draws_of_the_plainest_loop():
    model, rows, _ = model_and_batch()
    settings = {"do_sample": True, "top_k": 0, "num_beams": 3, "max_new_tokens": 5, "early_stopping": True}
    found, by_order = [], {True: [], False: []}
    for row in rows:
        torch.manual_seed(11)
        found.append(cut(model.generate(row[None], **settings)[0].tolist()))
        for is_sorted, samples in by_order.items():
            torch.manual_seed(11)
            samples.append(beam_sample(model, row, is_sorted))
    assert found in by_order.values()  # from transformers 5.24 on the best draws come first


def beam_sample(model, source, is_sorted, beams=3, limit=5):
    running, finished = [(0.0, [START])] + [(-1e9, [START])] * (beams - 1), []
    for length in range(1, limit + 1):
        totals = torch.stack([score + log_probabilities(model, source, tokens) for score, tokens in running])
        drawn = torch.multinomial(totals.flatten().softmax(-1)[None], (1 + len(ENDS)) * beams)[0].tolist()
        places = [divmod(place, totals.shape[1]) for place in drawn]
        candidates = [(totals[beam, token].item(), [*running[beam][1], token]) for beam, token in places]
        candidates = sorted(candidates, key=lambda entry: -entry[0]) if is_sorted else candidates
        finished += [
            (score / length, tokens) for score, tokens in candidates[:beams] if tokens[-1] in ENDS or length == limit
        ]
        if len(finished) >= beams:
            break
        going = [entry for entry in candidates if entry[1][-1] not in ENDS]
        running = sorted(going, key=lambda entry: -entry[0])[:beams]
    return max(finished)[1]


def nucleus(logits):
    values, order = logits.sort(descending=True)
    mass_before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
    return forbid(logits, order[mass_before >= 0.8].tolist())


# In the order in which they are applied.
FILTERS = {
    "temperature": (0.7, lambda logits: logits / 0.7),
    "top_k": (5, lambda logits: logits.masked_fill(logits < logits.topk(5).values[-1], -torch.inf)),
    "top_p": (0.8, nucleus),
    "min_p": (0.1, lambda logits: logits.masked_fill(logits.softmax(-1) < 0.1 * logits.softmax(-1).max(), -torch.inf)),
}


@pytest.mark.parametrize("names", [(), *((name,) for name in FILTERS), ("temperature", "top_k", "top_p")], ids=str)
def test_samples_are_the_draws_of_the_plainest_loop_and_their_scores_the_filtered_logits(names):
    model, rows, batch = model_and_batch()
    options = {"do_sample": True, "top_k": 0} | {name: FILTERS[name][0] for name in names}

    def filtered(row, tokens):
        logits = forbid(logits_of(model, row, tokens), tokens)
        for name in names:
            logits = FILTERS[name][1](logits)
        return logits

    for seed, row in enumerate(rows):
        torch.manual_seed(seed)
        ours = model.generate(row[None], max_new_tokens=LIMIT, **options)[0].tolist()
        torch.manual_seed(seed)
        tokens = [START]
        while len(tokens) <= LIMIT and tokens[-1] not in ENDS:
            tokens.append(torch.multinomial(filtered(row, tokens).softmax(-1)[None], 1).item())
        assert ours == tokens
    found = model.generate(**batch, **FULL, num_return_sequences=4, **options)
    assert names or len({tuple(row) for row in found.sequences[:4].tolist()}) > 1
    for number, row in enumerate(found.sequences.tolist()):
        if row[1] not in ENDS:
            scores, expected = found.scores[1][number], filtered(rows[number // 4], row[:2])
            assert torch.equal(scores.isinf(), expected.isinf())
            assert_near(scores[scores.isfinite()], expected[expected.isfinite()], 2e-5)


RECORDED = [(name, "dynamic") for name in ("default", "grouped", "separate_vocabularies", "neighbourhoods")]
RECORDED.append(("neighbourhoods", "static"))


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("variant", "cache"), RECORDED)
def test_scores_attention_and_states_are_those_of_one_pass_and_change_no_token(variant, cache, beams):
    model, _, batch = model_and_batch(variant)
    recorded = {"output_attentions": True, "output_hidden_states": True}
    options = FULL | {"no_repeat_ngram_size": 0, "do_sample": False, "num_beams": beams, "eos_token_id": None}
    options["cache_implementation"] = cache
    found = model.generate(**batch, **options, **recorded)
    assert found.sequences.shape == (3, 1 + LIMIT)
    assert torch.equal(found.sequences, model.generate(**batch, **options).sequences)
    del batch["max_new_tokens"]
    whole = model(**batch, decoder_input_ids=found.sequences[:, :-1], **recorded)
    parents = found.beam_indices if beams > 1 else torch.arange(3)[:, None].expand(-1, LIMIT)
    for step in range(LIMIT):
        rows = parents[:, step]
        assert_near(found.logits[step][rows], whole.logits[:, step], 2e-5)
        scores = whole.logits[:, step] if beams == 1 else whole.logits[:, step].log_softmax(-1)
        assert_near(found.scores[step][rows], scores, 2e-5)
        for own, cross, own_whole, cross_whole in zip(
            *(found.decoder_attentions[step], found.cross_attentions[step]),
            *(whole.decoder_attentions, whole.cross_attentions),
            strict=True,
        ):
            room = step + 1 if cache == "dynamic" else own.shape[-1]
            assert own.shape == (3 * beams, model.config.decoder_attention_heads, 1, room)
            assert not own[..., step + 1 :].any()
            assert_near(own[rows, :, 0, : step + 1], own_whole[:, :, step, : step + 1], 2e-5)
            assert_near(cross[rows, :, 0], cross_whole[:, :, step], 2e-5)
        for one, other in zip(found.decoder_hidden_states[step], whole.decoder_hidden_states, strict=True):
            assert_near(one[rows, 0], other[:, step], 2e-5)
    for name in ("encoder_hidden_states", "encoder_attentions"):
        for one, other in zip(found[name], whole[name], strict=True):
            assert_near(one, other)


@pytest.mark.parametrize("beams", [1, 4])
def test_transition_scores_are_those_that_transformers_computes(beams):
    model, _, batch = model_and_batch()
    found = model.generate(**batch, **FULL, do_sample=False, num_beams=beams, num_return_sequences=beams)
    given = (found.sequences, found.scores, found.beam_indices if beams > 1 else None)
    for normalize in (False, True):
        ours = model.compute_transition_scores(*given, normalize_logits=normalize)
        assert_near(ours, GenerationMixin.compute_transition_scores(model, *given, normalize_logits=normalize))


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_of_the_users_own_is_filled_and_reset(kind, beams):
    model, _, batch = model_and_batch()
    batch |= {"do_sample": False, "num_beams": beams}
    own = helpers.empty_cache(model, kind, 9, 16)
    plain = model.generate(**batch, use_cache=False)
    for _ in range(2):
        found = model.generate(**batch, past_key_values=own, return_dict_in_generate=True).sequences
        assert torch.equal(found, plain)
        assert own.get_seq_length() > 0
        own.reset()
        if own.get_seq_length():
            break  # a dynamic cache keeps its length in transformers 5.17


FOUR_OF_EACH = {
    "beams": {"num_beams": 4},
    "n_best": {"num_beams": 4, "num_return_sequences": 4},
    "draws": {"do_sample": True, "num_return_sequences": 4},
    "strategy": {"num_beams": 4, "custom_generate": BeamSearch()},
    "static": {"num_beams": 4, "cache_implementation": "static"},
}


@torch.no_grad()
@pytest.mark.parametrize("form", FOUR_OF_EACH)
def test_a_returned_cache_has_keys_of_the_source_for_each_hypothesis(form):
    model, _, batch = model_and_batch()
    options = {"do_sample": False, "return_dict_in_generate": True} | FOUR_OF_EACH[form]
    cache = cache_of(model.generate(**batch, **options))
    alone = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}, decoder_input_ids=START_OF_THREE)
    layers = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
    for (own, source), plain in zip(layers, cache_of(alone).cross_attention_cache.layers, strict=True):
        assert len(own.keys) == 12
        for one, other in ((source.keys, plain.keys), (source.values, plain.values)):
            assert_near(one, other.repeat_interleave(4, dim=0))
    if form != "static":
        cache.batch_select_indices(torch.tensor([11, 0]))
        assert {len(layer.keys) for layer in cache.cross_attention_cache.layers} == {2}


@pytest.mark.parametrize(("variant", "beams"), each_once(VARIANTS, [1, 4], ["learned"]))
def test_a_prefix_is_kept_and_gone_on_with_and_gets_the_start_token(variant, beams):
    model, rows, batch = model_and_batch(variant)
    prompt = [START, 30, 31, 32]
    options = {"do_sample": False, "num_beams": beams, "length_penalty": 1.0}
    found = model.generate(**batch, decoder_input_ids=torch.tensor([prompt] * 3), **options)
    assert torch.equal(model.generate(**batch, decoder_input_ids=torch.tensor([prompt[1:]] * 3), **options), found)
    if beams == 1:
        assert without_padding(found) == greedy_all(model, rows, prompt=prompt)
        return
    best = [prompt + beams_of(model, row, prompt)[0][1][1:] for row in rows]
    assert [cut(tokens) for tokens in found.tolist()] == [cut(tokens) for tokens in best]


def only(logits, tokens):
    return forbid(logits, {*range(len(logits))} - {*tokens})


def without_a_pair_twice(tokens, logits):
    return forbid(logits, [second for first, second in itertools.pairwise(tokens) if first == tokens[-1]])


def penalised(tokens, logits):
    seen = torch.tensor(sorted(set(tokens)))
    return logits.index_put((seen,), torch.minimum(logits[seen] * 3.0, logits[seen] / 3.0))


# An option with its value and others beside it, and what it does to logits.
PROCESSED = [
    ({"forced_bos_token_id": 44}, lambda tokens, logits: only(logits, [44]) if len(tokens) == 1 else logits),
    ({"forced_eos_token_id": 2}, lambda tokens, logits: only(logits, [2]) if len(tokens) == LIMIT else logits),
    (
        {"bad_words_ids": [[95], [29], [18, 24], [40, 85]]},
        lambda tokens, logits: forbid(logits, [95, 29, {18: 24, 40: 85}.get(tokens[-1], 95)]),
    ),
    (
        {"suppress_tokens": [95, 18], "begin_suppress_tokens": [29]},
        lambda tokens, logits: forbid(logits, [95, 18] + [29] * (len(tokens) == 1)),
    ),
    ({"min_new_tokens": 6}, lambda tokens, logits: forbid(logits, ENDS) if len(tokens) < 7 else logits),
    (
        {"sequence_bias": [[[40], 5.0], [[60], -5.0]]},
        lambda tokens, logits: logits.index_add(0, torch.tensor([40, 60]), torch.tensor([5.0, -5.0])),
    ),
    ({"repetition_penalty": 3.0, "no_repeat_ngram_size": 0}, penalised),
    ({"no_repeat_ngram_size": 2}, without_a_pair_twice),
]


@pytest.mark.parametrize(("options", "process"), PROCESSED, ids=[next(iter(row[0])) for row in PROCESSED])
def test_what_forbids_or_forces_tokens_or_discourages_repetition(options, process):
    model, rows, batch = model_and_batch()
    found = without_padding(model.generate(**batch, do_sample=False, **options))
    repeats = "no_repeat_ngram_size" in options
    assert found == greedy_all(model, rows, process=process, repeats=repeats)
    assert found != greedy_all(model, rows, repeats=repeats), "the option changes nothing here"


def test_a_function_allows_tokens_and_criteria_end_each_sentence_by_itself():
    model, rows, batch = model_and_batch()

    def allowed(sentence, tokens):
        return [15 + 10 * len(tokens), 50 + sentence, *range(60, 70)]

    batch["do_sample"] = False
    found = without_padding(model.generate(**batch, prefix_allowed_tokens_fn=allowed))
    for number, row in enumerate(rows):

        def process(tokens, logits, number=number):
            return only(logits, allowed(number, tokens))

        assert found[number] == greedy(model, row, process=process)
    criteria = [lambda ids, scores, **kwargs: ids[:, -1] > 60]
    found = without_padding(model.generate(**batch, stopping_criteria=criteria))
    assert found == greedy_all(model, rows, ends=[*ENDS, *range(61, 99)])
    assert len({len(row) for row in found}) > 1
    assert model.generate(**batch, max_time=0.0).shape == (3, 2)


def test_a_streamer_gets_each_token_as_it_comes():
    model, rows, _ = model_and_batch()
    for row in rows:
        streamer = Mock()
        found = model.generate(row[None], do_sample=False, max_new_tokens=LIMIT, streamer=streamer)[0].tolist()
        assert [call.args[0].flatten().tolist() for call in streamer.put.call_args_list] == [
            [token] for token in found
        ]
        streamer.end.assert_called_once()
        assert found == greedy(model, row)


@pytest.mark.parametrize("variant", VARIANTS)
def test_assisted_decoding_gives_what_greedy_search_gives(variant):
    model, rows, _ = model_and_batch(variant)
    smaller = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    for assistant in (tiny_model(seed=1, **VARIANTS[variant] | smaller), model):
        for row in rows[: 2 if variant in POSITIONS else 1]:
            found = model.generate(row[None], do_sample=False, max_new_tokens=LIMIT, assistant_model=assistant)
            assert found[0].tolist() == greedy(model, row)


SIZES_APART = {
    "equal": {},
    "fewer_targets": VARIANTS["separate_vocabularies"],
    "more_targets": {"decoder_vocab_size": 120, "share_encoder_decoder_embeddings": False},
}


@pytest.mark.parametrize("sizes", SIZES_APART)
def test_prompt_lookup_and_a_watermark_take_tokens_of_the_targets_vocabulary(sizes):
    model, rows, _ = model_and_batch(**SIZES_APART[sizes])
    last = model.config.decoder_vocab_size - 1
    # The prompt repeats itself, so that there is something to look up.
    limit = {"do_sample": False, "max_new_tokens": LIMIT}
    prompted = {"decoder_input_ids": torch.tensor([[START, 20, last, 22, 20, last]]), "no_repeat_ngram_size": 0}
    for row, given in itertools.product(rows, (limit | prompted, limit)):
        plain = model.generate(row[None], **given)
        assert torch.equal(model.generate(row[None], prompt_lookup_num_tokens=3, **given), plain)
    watermark = WatermarkingConfig(bias=50.0)
    process = watermark.construct_processor(model.config.decoder_vocab_size, "cpu")
    for row in rows:
        found = model.generate(row[None], watermarking_config=watermark, **limit)
        expected = greedy(model, row, process=lambda tokens, logits: process(torch.tensor([tokens]), logits[None])[0])
        assert found[0].tolist() == expected


def test_an_assistant_of_other_targets_is_refused():
    model, rows, _ = model_and_batch("separate_vocabularies")
    other = tiny_model(**SIZES_APART["more_targets"])
    with pytest.raises(ValueError, match="different tokenizers"):
        model.generate(rows[0][None], assistant_model=other, max_new_tokens=LIMIT)
    # The config has the targets' size while tokens are generated, and never after.
    assert model.config.get_text_config() is model.config


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "side", "beams"),
    pairwise(["default", "rotary", "learned", "separate_vocabularies"], ["left", "right"], [1, 4]),
)
def test_embeddings_and_encoder_outputs_in_place_of_tokens_and_labels_as_trainers_hand_them_over(variant, side, beams):
    model, _, batch = model_and_batch(variant, side)
    batch |= {"do_sample": False, "num_beams": beams}
    expected = model.generate(**batch)
    assert torch.equal(model.generate(**batch, labels=torch.full((3, 5), 30)), expected)
    ids = batch.pop("input_ids")
    encoded = model.get_encoder()(ids, attention_mask=batch["attention_mask"])
    for source in ({"inputs_embeds": model.get_input_embeddings()(ids)}, {"encoder_outputs": encoded}):
        assert torch.equal(model.generate(**source, **batch), expected)
