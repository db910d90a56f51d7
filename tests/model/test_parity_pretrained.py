"""With copied weights, Heed computes and generates what BART, mBART and M2M100 (NLLB) do, cached and padded."""

import pytest
import torch
import transformers

from heedful.publishing.conversion.model_conversion import convert_model
from helpers import ENDS, assert_near, padded, sentences
from pretrained_checkpoints import SIZES, randomized

# Their padding is 1, and all but M2M100 count it among the positions, so they are padded on the right alone.
PAD, START = 1, 2
CLASSES = {
    "bart": (transformers.BartForConditionalGeneration, transformers.BartConfig),
    "mbart": (transformers.MBartForConditionalGeneration, transformers.MBartConfig),
    "m2m100": (transformers.M2M100ForConditionalGeneration, transformers.M2M100Config),
    "marian": (transformers.MarianMTModel, transformers.MarianConfig),
}
MARIAN = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2, "activation_function": "swish"}


@pytest.fixture(scope="module", params=CLASSES)
def models(request):
    torch.manual_seed(0)
    model, config = CLASSES[request.param]
    options = {"scale_embedding": request.param != "bart", "attention_dropout": 0.0}
    options |= MARIAN if request.param == "marian" else {}
    theirs = randomized(model(config(**SIZES, vocab_size=99, decoder_start_token_id=START, **options)))
    return convert_model(theirs), theirs


def with_padding(rows, side="right"):
    ids, mask = padded(rows, side)
    return ids.masked_fill(mask == 0, PAD), mask


@pytest.mark.parametrize("lengths", [((9, 4, 6), (5, 7, 2)), ((64, 64), (64, 64))], ids=["short", "longest"])
def test_logits_and_loss_equal_theirs(models, lengths):
    (source, mask), (target, _) = (with_padding(sentences(*each)) for each in lengths)
    inputs, kept = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}, target != PAD
    ours, theirs = (model(**inputs, labels=target.masked_fill(~kept, -100)) for model in models)
    assert theirs.logits.std() > 0.5
    assert_near(ours.logits[kept], theirs.logits[kept])
    assert_near(ours.loss, theirs.loss)


def test_sources_padded_on_the_left_are_what_they_are_alone(models):
    ours, theirs = models
    rows = sentences(9, 4, 6)
    target = torch.randint(4, 99, (3, 5))
    source, mask = with_padding(rows, "left")
    together = ours(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    for row, logits, tokens in zip(rows, together, target, strict=True):
        assert_near(logits, theirs(input_ids=row[None], decoder_input_ids=tokens[None]).logits[0])


@pytest.mark.parametrize("beams", [1, 4])
def test_generated_tokens_equal_theirs(models, beams):
    source, mask = with_padding(sentences(9, 4, 6))
    # M2M100 gives no position to padding, not even where it was generated in mid-sentence; Heed goes by masks.
    settings = transformers.GenerationConfig(
        suppress_tokens=[PAD],
        **{"num_beams": beams, "max_length": 16, "min_new_tokens": 9, "do_sample": False, "no_repeat_ngram_size": 1},
        **{"pad_token_id": PAD, "eos_token_id": ENDS, "decoder_start_token_id": START, "forced_bos_token_id": 40},
    )
    inputs = {"input_ids": source, "attention_mask": mask, "generation_config": settings}
    our_tokens, their_tokens = (model.generate(**inputs) for model in models)
    assert len(set(their_tokens.flatten().tolist())) > 12
    assert our_tokens.tolist() == their_tokens.tolist()
