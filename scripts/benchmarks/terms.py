"""Count the terms of a glossary in translations, and score these with and without it.

    python scripts/benchmarks/terms.py runs/pairs/model --train train.jsonl.gz --test validation.jsonl.gz \
        --source en --target de

The glossary has words and phrases of the test pairs with their translations, found by alignment, without ambiguous and
common ones.
"""

from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import process_time
from typing import Annotated, Any

import typer
from harness import Json, Row, begin, report

from heedful import Translator
from heedful.data.epochs.terms import RARE, aligned, phrases
from heedful.data.glossary import Glossary, words_of
from heedful.data.sources import read_pairs
from heedful.evaluation.metrics import score_translations

MOST_OF_PAIR = 2  # terms


def glossary_of(train: list[Any], test: list[Any]) -> str:
    """Return the lines of a glossary for test pairs."""
    texts = [[pair[side] for pair in (*train, *test)] for side in ("source", "target")]
    words = [[[word.text.lower() for word in words_of(text)] for text in side] for side in texts]
    counts, random = Counter(chain.from_iterable(words[0])), Random(1)
    found: defaultdict[str, set[str]] = defaultdict(set)
    links = aligned(*words)[len(train) :]
    for number, (pair, own) in enumerate(zip(test, links, strict=True), start=len(train)):
        source, target, kept = words_of(pair["source"]), words_of(pair["target"]), list[tuple[str, str]]()
        for first, after, begin_, end in phrases(own):
            rare = all(word.isalpha() and counts[word] <= RARE for word in words[0][number][first:after])
            if rare and all(word.text.isalpha() for word in target[begin_:end]):
                term = pair["source"][source[first].start : source[after - 1].end]
                kept.append((term.lower(), pair["target"][target[begin_].start : target[end - 1].end]))
        for term, translation in random.sample(kept, min(MOST_OF_PAIR, len(kept))):
            found[term].add(translation)
    return "".join(f"{term}\t{min(translations)}\n" for term, translations in found.items() if len(translations) == 1)


def main(
    model: Annotated[str, typer.Argument(help="Folder of a model.")],
    train: Annotated[str, typer.Option(help="Pairs, as recipes name them, to align with the test pairs.")],
    test: Annotated[str, typer.Option(help="Test pairs.")],
    source: Annotated[str, typer.Option(help="Column of the sources.")],
    target: Annotated[str, typer.Option(help="Column of the targets.")],
    num_beams: Annotated[int, typer.Option(help="Beam width.")] = 5,
    json: Json = None,
) -> None:
    """Print the share of terms in the outputs, BLEU, chrF, and CPU seconds."""
    begin(1)
    pairs = [list(read_pairs(location, source, target)) for location in (train, test)]
    sources, references = [pair["source"] for pair in pairs[1]], [[pair["target"]] for pair in pairs[1]]
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "terms.tsv"
        path.write_text(glossary_of(*pairs), encoding="utf-8")
        translator = Translator.from_pretrained(model, "cpu", glossary=path)
    glossary = translator.glossary
    assert glossary is not None
    forced = Glossary.forced
    for name in ("none", "only marks", "marks and forced words"):
        translator.glossary = None if name == "none" else glossary
        Glossary.forced = (lambda *_: []) if name == "only marks" else forced  # type: ignore[method-assign]
        start = process_time()
        texts = [best.text for best, *_ in translator.translate_lines(sources, num_beams=num_beams, split=False)]
        seconds, scores = process_time() - start, score_translations(texts, references, bootstrap=0)
        counts = glossary.counts(sources, texts)
        row: Row = {"glossary": name, "terms": counts["in_sources"]}
        row["in outputs"] = round(100 * counts["in_outputs"] / max(1, counts["in_sources"]), 1)
        row |= {"BLEU": round(scores["bleu"], 2), "chrF": round(scores["chrf"], 2), "seconds": round(seconds, 1)}
        rows.append(row)
    report(rows, json)


if __name__ == "__main__":
    typer.run(main)
