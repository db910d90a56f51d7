"""Questions: a head with nouns that attend to the adjective before them, found and left out.

The control is other words' weight on the word before, because a head for the previous word would seem to do the same.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from heedful.data.labels import token_words
from heedful.decoding.translation import Translator
from heedful_lab.figures import bars
from heedful_lab.korean_english.conjugation import attributive
from heedful_lab.korean_english.lexicon import lexicon
from heedful_lab.studies.attention.single_heads import without_heads
from heedful_lab.studies.measures import Head, attention_by_head, score
from heedful_lab.studies.pairs import Pair, held_out_pairs
from heedful_lab.studies.report import Cell, Outcome
from heedful_lab.studies.study import Lab

PAIRS = 200


def adjectives() -> dict[str, str]:
    """Return the built-in corpus's adjectives in English by their Korean form before a noun: 용감한, brave."""
    return {attributive(adjective.korean): adjective.english for adjective in lexicon()[2]}


def described_pairs() -> list[Pair]:
    """Return test pairs with an adjective before a noun."""
    known = adjectives()
    return [pair for pair in held_out_pairs() if known.keys() & set(pair[0].split()[:-1])][:PAIRS]


def questions_of_heads(translator: Translator, pairs: Sequence[Pair]) -> dict[Head, tuple[float, float]]:
    """Return each encoder head's mean weight of nouns on their adjective, and of other words on the word before."""
    known = adjectives()
    found: dict[tuple[Head, bool], list[float]] = defaultdict(list)
    for (source, _), weights_by_head in zip(pairs, attention_by_head(translator, pairs, ["encoder"]), strict=True):
        words, places = source.split(), defaultdict[int | None, list[int]](list)
        tokenizers = translator.tokenizers
        for place, word in enumerate(token_words(tokenizers.source, tokenizers.encode_source([source])[0])):
            places[word].append(place)
        for head, weights in weights_by_head.items():
            for word in range(1, len(words)):
                asked = weights[places[word]][:, places[word - 1]].sum(-1).mean().item()
                found[head, words[word - 1] in known].append(asked)
    heads = dict.fromkeys(head for head, _ in found)
    return {head: (fmean(found[head, True]), fmean(found[head, False])) for head in heads}


def translated_adjectives(translator: Translator, pairs: Sequence[Pair]) -> float:
    """Return the percentage of adjectives with their English in the translation."""
    known, right = adjectives(), []
    translations = translator.translate([source for source, _ in pairs])
    for (source, _), (best, *_) in zip(pairs, translations, strict=True):
        words = best.text.lower().rstrip(".?").split()
        right += [known[word] in words for word in source.split()[:-1] if word in known]
    return 100 * fmean(right)


def run(lab: Lab) -> Outcome:
    """Find the head, and leave out each encoder head in turn."""
    translator = lab.train("built-in corpus").translator()
    pairs = described_pairs()
    rows: list[tuple[Cell, ...]] = []
    found = questions_of_heads(translator, pairs)
    asking = max(found, key=lambda head: found[head][0] - found[head][1])
    lost: dict[Head, tuple[float, float]] = {}
    for head, both in found.items():
        without = Translator(without_heads(translator.model, [head]), translator.tokenizers)
        lost[head] = translated_adjectives(without, pairs), score(without, pairs)
        rows.append((str(head), *both, *lost[head]))
    rows.append(("none left out", "–", "–", translated_adjectives(translator, pairs), score(translator, pairs)))
    others = [values for head, values in lost.items() if head != asking]
    values: dict[str, Cell] = {"head": str(asking), "asked": found[asking][0], "otherwise": found[asking][1]}
    values |= {"without": lost[asking][0], "bleu_without": lost[asking][1]}
    values |= zip(("others", "bleu_others"), map(fmean, zip(*others, strict=True)), strict=True)
    panel = bars(
        {str(head): both[0] - both[1] for head, both in found.items()}, "weight on the adjective, over control"
    )
    return Outcome({"heads": rows}, {"heads": [panel]}, values, {"pairs": len(pairs)})
