"""From Markov to attention: next-token prediction with more and more memory, with and without the source.

All models share tokenizer and test tokens (with </s>); those without the source have one constant source.
"""

import math
from typing import Any, NamedTuple

from heedful.decoding.translation import Translator
from heedful.figures import lines
from heedful_lab.studies.measures import encoded, loss_per_token, training_pairs
from heedful_lab.studies.models.ngrams import NgramModel
from heedful_lab.studies.pairs import Pair, corpus_pairs, held_out_pairs
from heedful_lab.studies.recurrent.equal_models import RATE
from heedful_lab.studies.report import Cell, Outcome
from heedful_lab.studies.study import Lab, description_of
from heedful_lab.studies.training import Training, model_changes, study_recipe

WINDOWS = (0, 1, 2, 3, 4)
NAMES = {0: "unigram", 1: "first-order Markov"}
NOTHING = "."  # constant source for models without a source
TRANSLATED = 10  # test pairs without the source
DESCRIPTION = description_of(__file__)


class Memory(NamedTuple):
    """A model of the next token."""

    name: str
    reads: str  # its input
    size: int  # number of parameters, or of counted n-grams
    target_tokens: int  # in training, with repetitions
    perplexity: float  # per token of the test sentences


def run(lab: Lab) -> Outcome:
    """Count, train, and measure perplexity on the same test sentences."""
    pairs = held_out_pairs()
    translator = lab.train("Transformer, with the source")
    same_tokenizer = {"tokenizer.path": str(translator.folder / "tokenizer")}
    state, attending = _recurrent("none"), _recurrent("additive")
    seeing = []
    for name, changes, reads in (
        ("GRU, the source through its state", state, "a state, which begins with the source's"),
        ("GRU with additive attention", attending, "a state, the source"),
    ):
        seeing.append(_measured(lab.train(name, changes | same_tokenizer), pairs, name, reads))
    seeing.append(_measured(translator, pairs, "Transformer with the source", "all before it, the source"))
    blind, blind_pairs, blind_changes = [], _blind(pairs), _without_source(lab) | same_tokenizer
    for name, changes, reads in (("GRU", state, "a state"), ("Transformer", {}, "all before it")):
        training = lab.train(f"{name}, without the source", changes | blind_changes)
        blind.append(_measured(training, blind_pairs, f"{name} without the source", reads))
    counted, others = _count(translator.translator(), training_pairs(lab), pairs), [*blind, *seeing]
    counts = [(window, model.perplexity) for window, model in zip(WINDOWS, counted, strict=True)]
    levels = {model.name: [(window, model.perplexity) for window in (WINDOWS[0], WINDOWS[-1])] for model in others}
    axes = "tokens of the window", "test perplexity per token"
    panel = lines({"counts (Kneser-Ney)": counts} | levels, *axes, log="y", xticks=WINDOWS)
    best = min(counted, key=lambda model: model.perplexity)
    values: dict[str, Cell] = {"window_name": best.name, "window": best.perplexity}
    return Outcome({"perplexity": [*counted, *others]}, {"perplexity": [panel]}, values)


def _recurrent(attention: str) -> dict[str, Any]:
    changes = model_changes({**DESCRIPTION["recurrent"], "attention": attention}, RATE)
    return {**changes, "optimization.max_grad_norm": 1.0}


def _blind(pairs: list[Pair]) -> list[Pair]:
    return [(NOTHING, target) for _, target in pairs]


def _without_source(lab: Lab) -> dict[str, Any]:
    train, validation = training_pairs(lab), corpus_pairs(study_recipe({}).data.validation or "")
    files = lab.write_data(_blind(train), _blind(validation), test=_blind(held_out_pairs()[:TRANSLATED]))
    return {**files, "data.cleaning.drop_overlap": False}  # held-out data has the same source


def _count(translator: Translator, trained_on: list[Pair], tested_on: list[Pair]) -> list[Memory]:
    """Count n-grams of targets, and measure other targets."""
    tokenizers, start = translator.tokenizers, translator.model.config.decoder_start_token_id
    train, test = (tokenizers.encode_target([target for _, target in some]) for some in (trained_on, tested_on))
    models = []
    for window in WINDOWS:
        model = NgramModel(train, window, len(tokenizers.target), start)
        reads = f"{window or 'no'} token{'s' * (window != 1)} before it"
        name = NAMES.get(window, f"window of {window}")
        models.append(Memory(name, reads, model.size(), sum(map(len, train)), model.perplexity(test)))
    return models


def _measured(training: Training, pairs: list[Pair], name: str, reads: str) -> Memory:
    translator = training.translator()
    loss = loss_per_token(translator.model, encoded(pairs, translator.tokenizers))
    return Memory(name, reads, training.parameters, training.target_tokens, math.exp(loss))
