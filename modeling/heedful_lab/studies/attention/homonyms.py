"""Homonyms: one vector before attention, several after it, layer by layer.

A model learns the built-in corpus and sentences with homonyms, such as 배 (pear, ship, belly). A probe finds the
meaning in held-out sentences by the nearest centroid (cosine), with or without the sentence's deciding word in the
centroids.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch.nn.functional import normalize

from heedful.decoding.translation import Translator
from heedful.figures import Panel, lines
from heedful_lab.course.embeddings import layer_names, plane, word_states
from heedful_lab.figures import labelled_points
from heedful_lab.studies import measures
from heedful_lab.studies.pairs import Pair, corpus_pairs, held_out_pairs
from heedful_lab.studies.report import Outcome
from heedful_lab.studies.study import Lab, description_of
from heedful_lab.studies.training import study_recipe

DESCRIPTION = description_of(__file__)
LEXICON = DESCRIPTION["lexicon"]
WORDS: list[dict[str, Any]] = LEXICON["words"]
DRAWN = 50  # sentences for each deciding word
HELD_OUT = 10  # of these, not in training
PROBED = 10  # of the others, for centroids


class Meaning(NamedTuple):
    """A word's sentences in one meaning, for each deciding verb and modifier."""

    noun: str  # in English
    train: list[list[Pair]]
    test: list[list[Pair]]


class LayerScores(NamedTuple):
    """How well one layer separates a word's meanings in held-out sentences."""

    seen: float  # share of sentences with the nearest centroid's meaning
    unseen: float  # the same, centroids without the sentence's deciding word
    within: float  # mean cosine between sentences of the same meaning
    between: float  # and of different meanings


def sentences(form: str, meaning: Mapping[str, Any]) -> list[list[Pair]]:
    """Return all sentences with a word in one meaning, for each deciding verb and modifier."""

    def pairs(modifier: Sequence[str], verbs: Sequence[Sequence[str]]) -> list[Pair]:
        found = []
        for time, (subject, i, my), verb in product(LEXICON["times"], LEXICON["subjects"], verbs):
            article = my if meaning.get("is_of_body") else "the"
            translated = f"{i} {verb[1]} {article} {modifier[1]}{meaning['noun']}{time[1]}."
            found.append((f"{time[0]}{subject} {modifier[0]}{form} {verb[0]}.", translated))
        return found

    by_modifier = (pairs([f"{word} " for word in one], LEXICON["feelings"]) for one in meaning["modifiers"])
    return [*(pairs(["", ""], [verb]) for verb in meaning["verbs"]), *by_modifier]


def split_meanings(word: Mapping[str, Any], seed: int) -> list[Meaning]:
    """Return a word's meanings, with equally many sentences for each deciding word, some held out."""
    meanings = []
    for meaning in word["meanings"]:
        random = Random(f"{seed} {meaning['noun']}")
        drawn = [random.sample(own, DRAWN) for own in sentences(word["form"], meaning)]
        parts = [own[HELD_OUT:] for own in drawn], [own[:HELD_OUT] for own in drawn]
        meanings.append(Meaning(meaning["noun"], *parts))
    return meanings


def separation(train: torch.Tensor, test: torch.Tensor) -> list[LayerScores]:
    """Measure how well each layer separates meanings; states are `(meanings, words, sentences, layers + 1, width)`."""
    train, test = normalize(train, dim=-1), normalize(test, dim=-1)
    sums = train.sum(dim=2)  # (meanings, deciding words, layers + 1, width)
    together = sums.sum(dim=1, keepdim=True).expand_as(sums)
    states = test.flatten(0, 2).transpose(0, 1)  # (layers + 1, n, width)
    cosines = states @ states.mT  # (layers + 1, n, n)
    labels = torch.arange(len(test)).repeat_interleave(cosines.shape[1] // len(test))
    is_same, is_other_sentence = labels[:, None] == labels, ~torch.eye(len(labels), dtype=torch.bool)
    shares = _share_right(together, test), _share_right(together - sums, test)
    means = (cosines[:, some].mean(dim=1) for some in (is_same & is_other_sentence, ~is_same))
    return [LayerScores(*values) for values in zip(*(each.tolist() for each in (*shares, *means)), strict=True)]


def _share_right(centroids: torch.Tensor, test: torch.Tensor) -> torch.Tensor:
    """Return for each layer the share of states nearest to the centroid of their meaning."""
    scores = torch.einsum("mwsld,cwld->mwslc", test, normalize(centroids, dim=-1))
    # Rounded: equal vectors are equally near to all meanings, and the first is taken.
    chosen = scores.round(decimals=4).argmax(dim=-1)  # (meanings, deciding words, sentences, layers + 1)
    return (chosen == torch.arange(len(test))[:, None, None, None]).float().mean(dim=(0, 1, 2))


def translated_meanings(translator: Translator, meanings: Sequence[Meaning]) -> tuple[float, float]:
    """Return the share of held-out sentences translated with the right noun, and with another meaning's."""
    right, wrong = [], []
    for meaning in meanings:
        others = [other.noun for other in meanings if other is not meaning]
        for best, *_ in translator.translate([source for own in meaning.test for source, _ in own]):
            words = set(re.findall(r"\w+", best.text))
            right.append(meaning.noun in words)
            wrong.append(not words.isdisjoint(others))
    return fmean(right), fmean(wrong)


def run(lab: Lab) -> Outcome:
    """Train a model on homonyms too, and measure each layer with and without training."""
    words = {word["form"]: split_meanings(word, lab.seed) for word in WORDS}
    known = [pair for meanings in words.values() for meaning in meanings for own in meaning.train for pair in own]
    validation = corpus_pairs(study_recipe({}).data.validation or "")
    files = lab.write_data([*measures.training_pairs(lab), *known], validation, test=held_out_pairs())
    trained = lab.train("corpus and homonyms", files).translator()
    torch.manual_seed(lab.seed)
    untrained = Translator(type(trained.model)(trained.model.config), trained.tokenizers)
    layers = {form: _layers(trained, form, meanings) for form, meanings in words.items()}
    before = _means(_layers(untrained, form, meanings) for form, meanings in words.items())
    translated = {form: translated_meanings(trained, meanings) for form, meanings in words.items()}
    rows = []
    for form, meanings in words.items():
        unseen = (layers[form][number].unseen for number in (0, 1, -1))
        rows.append((form, ", ".join(meaning.noun for meaning in meanings), *unseen, *translated[form]))
    after, names, shown = _means(layers.values()), layer_names(len(before)), WORDS[0]["form"]
    values = {"chance": fmean(1 / len(meanings) for meanings in words.values())}
    values["right"], values["wrong"] = map(fmean, zip(*translated.values(), strict=True))
    return Outcome(
        {
            "words": rows,
            "layers": [(name, *own, *other[:2]) for name, own, other in zip(names, after, before, strict=True)],
        },
        {"layers": _layer_panels(after, before), "plane": _plane_panels(trained, shown, words[shown])},
        values,
        {"shown": shown},
    )


def _states(translator: Translator, form: str, texts: Any) -> torch.Tensor:
    """Return a word's vectors in nested lists of pairs, `(meanings, deciding words, sentences, layers + 1, width)`."""
    if isinstance(texts, tuple):  # a pair
        return word_states(translator, translator.tokenizers, form, texts[0]).vectors
    return torch.stack([_states(translator, form, part) for part in texts])


def _layers(translator: Translator, form: str, meanings: Sequence[Meaning]) -> list[LayerScores]:
    train = [[own[:PROBED] for own in meaning.train] for meaning in meanings]
    return separation(_states(translator, form, train), _states(translator, form, [one.test for one in meanings]))


def _means(layers_of_words: Iterable[Sequence[LayerScores]]) -> list[LayerScores]:
    return [LayerScores(*map(fmean, zip(*layers, strict=True))) for layers in zip(*layers_of_words, strict=True)]


def _layer_panels(after: Sequence[LayerScores], before: Sequence[LayerScores]) -> list[Panel]:
    def curve(layers: Sequence[LayerScores], name: str) -> list[tuple[float, float]]:
        return [(number, getattr(layer, name)) for number, layer in enumerate(layers)]

    shares = {
        f"deciding words {name}{training}": curve(layers, name)
        for training, layers in (("", after), (", untrained", before))
        for name in ("seen", "unseen")
    }
    cosines = {"within a meaning": curve(after, "within"), "between meanings": curve(after, "between")}
    passed, ticks = "layers passed (0: the embedding)", range(len(after))
    return [
        lines(shares, passed, "share of sentences with the right meaning", xticks=ticks, ylim=(0, 1)),
        lines(cosines, passed, "mean cosine", xticks=ticks),
    ]


def _plane_panels(translator: Translator, form: str, meanings: Sequence[Meaning]) -> list[Panel]:
    """Return panels for embedding, first and last layer, with a point for each held-out sentence."""
    states = normalize(_states(translator, form, [one.test for one in meanings]), dim=-1).flatten(1, 2)
    panels = []
    for number, title in ((0, "embedding"), (1, "layer 0"), (-1, "last layer")):
        points = iter(plane(states[:, :, number].flatten(0, 1)))
        clouds = {one.noun: [(*next(points), "") for _ in own] for one, own in zip(meanings, states, strict=True)}
        panels.append(labelled_points(clouds, title))
    return panels
