"""Every form of `generate()` against the plainest loop: one sentence, no cache, straight from the logits.

That the cache, padding and the batch change nothing is in test_generation.py.
"""

import itertools
from unittest.mock import Mock

import pytest
import torch
from transformers import WatermarkingConfig

from heedful import BeamSearch
from heedful.versions_heed import cache_of
from helpers import ENDS, POSITIONS, START, VARIANTS, assert_near, each_once, padded, pairwise, sentences, tiny_model
from plain_strategies import PlainBeamSearch, cut, without_padding

START_OF_THREE = torch.full((3, 1), START)
LIMIT = 8
FULL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def model_and_batch(variant="default", side="right", **changes):
    model = tiny_model(**VARIANTS[variant], **changes)
    rows = sentences(9, 2, 6)
    ids, mask = padded(rows, side)
    return model, rows, {"input_ids": ids, "attention_mask": mask, "max_new_tokens": LIMIT}


@torch.no_grad()
def logits_of(model, source, tokens):
    return model(input_ids=source[None], decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def forbid(logits, tokens):
    return logits.index_fill(0, torch.tensor(sorted(set(tokens)), dtype=torch.long), -torch.inf)


def greedy(model, source, *, process=None, prompt=(START,), ends=ENDS):
    """Take the best token, which is a new one, again and again; `process(tokens, logits)` changes logits first."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + LIMIT and (len(tokens) == len(prompt) or tokens[-1] not in ends):
        logits = forbid(logits_of(model, source, tokens), tokens)
        tokens.append((process(tokens, logits) if process else logits).argmax().item())
    return tokens


def greedy_all(model, rows, **options):
    return without_padding([greedy(model, row, **options) for row in rows])


CACHED = [("left", None), ("right", "dynamic"), ("left", "static")]


@pytest.mark.parametrize(("variant", "form"), each_once(VARIANTS, CACHED, POSITIONS))
def test_greedy_search(variant, form):
    model, rows, batch = model_and_batch(variant, form[0])
    found = model.generate(**batch, do_sample=False, cache_implementation=form[1])
    assert without_padding(found) == greedy_all(model, rows)


def beams_of(model, source, prompt=(START,), **options):
    """Return the scores and tokens of four beams, best first."""

    def next_token(after):  # beams have log-probabilities that are normalised before tokens are ruled out
        tokens = [*prompt, *after[1:]]
        return forbid(logits_of(model, source, tokens).log_softmax(-1), tokens)

    return PlainBeamSearch(next_token, beams=4, limit=LIMIT, **options).search()


@pytest.mark.parametrize(("variant", "length_penalty"), each_once(VARIANTS, [0.0, 0.6, 2.0]))
def test_beam_search_and_its_n_best(variant, length_penalty):
    model, rows, batch = model_and_batch(variant)
    options = {"num_beams": 4, "num_return_sequences": 4, "do_sample": False, "length_penalty": length_penalty}
    found = model.generate(**batch, **FULL, **options)
    expected = [entry for row in rows for entry in beams_of(model, row, alpha=length_penalty)]
    assert [cut(row) for row in found.sequences.tolist()] == [cut(tokens) for _, tokens in expected]
    assert found.sequences_scores.tolist() == pytest.approx([score for score, _ in expected], abs=1e-4)


def test_samples_are_the_draws_of_the_plainest_loop():
    model, rows, batch = model_and_batch()
    for seed, row in enumerate(rows):
        torch.manual_seed(seed)
        ours = model.generate(row[None], max_new_tokens=LIMIT, do_sample=True, top_k=5, temperature=0.7)[0].tolist()
        torch.manual_seed(seed)
        tokens = [START]
        while len(tokens) <= LIMIT and tokens[-1] not in ENDS:
            logits = forbid(logits_of(model, row, tokens), tokens) / 0.7
            best = logits.masked_fill(logits < logits.topk(5).values[-1], -torch.inf)
            tokens.append(torch.multinomial(best.softmax(-1)[None], 1).item())
        assert ours == tokens
    found = model.generate(**batch, do_sample=True, top_k=0, num_return_sequences=4)
    assert len({tuple(row) for row in found[:4].tolist()}) > 1


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


def test_what_forces_or_forbids_tokens_or_ends_a_sentence_is_obeyed_and_a_streamer_gets_each_token():
    model, rows, batch = model_and_batch()
    options = {"do_sample": False, "suppress_tokens": [95, 18], "min_new_tokens": 4}
    options["stopping_criteria"] = [lambda ids, scores, **kwargs: ids[:, -1] > 60]

    def allowed(sentence, tokens):
        return [2, 15 + 10 * len(tokens), 50 + sentence, *range(55, 70)]

    found = without_padding(model.generate(**batch, **options, prefix_allowed_tokens_fn=allowed))
    for number, row in enumerate(rows):

        def process(tokens, logits, number=number):
            forbidden = {*range(len(logits))} - {*allowed(number, tokens)} | {95, 18}
            return forbid(logits, [*forbidden, *(ENDS if len(tokens) < 5 else ())])

        assert found[number] == greedy(model, row, process=process, ends=[*ENDS, *range(61, 99)])
    streamer = Mock()
    tokens = model.generate(rows[0][None], do_sample=False, max_new_tokens=LIMIT, streamer=streamer)[0].tolist()
    assert [call.args[0].flatten().tolist() for call in streamer.put.call_args_list] == [[each] for each in tokens]
    streamer.end.assert_called_once()


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
