"""`heedful compare`: systems on the same test set, with paired tests."""

import json
import re
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from heedful.cli import options
from heedful.cli.evaluate import columns_of, recipe_in, scoring_of
from heedful.files import write_text


def compare(
    systems: Annotated[list[str], Argument(metavar="A B…", help="Models or files of outputs; commas join seeds.")],
    data: options.Data,
    source: options.OwnSource = None,
    target: options.OwnTarget = None,
    num_beams: options.Beams = None,
    max_new_tokens: options.MaxNewTokens = None,
    to: options.TargetLanguage = None,
    tokenize: options.BleuTokenizer = None,
    lowercase: options.Lowercase = False,
    references: options.References = None,
    ignore: options.Ignore = None,
    ter: options.Ter = None,
    resamples: Annotated[int, Option(help="Resamples of the paired bootstrap.")] = 1000,
    trials: Annotated[int, Option(help="Trials of the approximate randomization.")] = 10_000,
    seed: Annotated[int, Option(help="Seed of both tests.")] = 12345,
    examples: Annotated[int, Option(help="Number of best and worst sentences to show per system.")] = 3,
    output: Annotated[Path | None, Option("-o", "--output", help="JSON file for all results.")] = None,
    as_json: options.AsJson = False,
    device: options.Device = None,
) -> None:
    """Compare systems with the first one: paired tests of each score of `heedful evaluate`, best and worst sentences.

    With `--data de=FILE --data fr=FILE`, multilingual models are compared in one table with a row per direction.
    """
    from heedful.data.sources import references_of
    from heedful.evaluation import comparison, metrics

    directions = _directions(data, to)
    read = chain(*directions.values(), *(system.split(",") for system in systems))
    options.check_output(output, "--output", read)
    search: dict[str, Any] = {"num_beams": num_beams, "max_new_tokens": max_new_tokens}
    named = {system: [system] if Path(system).exists() else system.split(",") for system in systems}
    places = [place for seeds in named.values() for place in seeds]
    if len(systems) < 2 or len({*places}) < max(len(places), len(systems)) or not all(places):
        must = "at least two different names, none of them empty"
        raise ValueError(f"The systems must be {must}, but are {' '.join(systems)} instead.")
    files = [place for place in places if Path(place).is_file()]
    if files and directions.keys() != {to}:
        raise ValueError(f"The systems must be models if `data` names languages, but {files[0]} is a file.")
    for name, value in (search | {"target_language": to, "device": device}).items():
        if value is not None and files == places:
            raise ValueError(f"`{name}` must be left out if only files are given: no model translates.")
    recipes = list(filter(None, map(recipe_in, (place for place in places if place not in files))))
    tokenize, ignore = scoring_of(recipes, tokenize, ignore)
    settings = comparison.ComparisonSettings(tokenize, lowercase, resamples, trials, seed, examples, ignore, ter)
    pairs = {}
    for into, where in directions.items():
        columns = columns_of(where, source, target, next(iter(recipes), None), into)
        pairs[into] = list(options.read_pairs(where, *columns, split="test", references=references))
    accepted = {into: references_of(rows) for into, rows in pairs.items()}
    for each in accepted.values():  # raises before the translation
        metrics.fitting_tokenizer(tokenize, metrics.references_left(ignore, each))
    texts = {(to, place): comparison.read_predictions(Path(place), len(pairs[to]), accepted[to]) for place in files}
    from heedful.decoding.loading import model_folder

    options.quieten()
    sources = {into: [pair["source"] for pair in rows] for into, rows in pairs.items()}
    for place, folder in {place: model_folder(place) for place in places if place not in files}.items():
        translator = options.load_translator(folder, device)
        for into, sentences in sources.items():
            if into not in (to, *translator.tokenizers.languages):
                known = ", ".join(translator.tokenizers.languages) or "none"
                raise ValueError(f"`data` must name languages of {place} ({known}), but names {into}.")
            translations = translator.translate_lines(sentences, split=False, target_language=into, **search)
            texts[into, place] = [best.text for best, *_ in translations]
    compared = {}
    for into in pairs:
        translated = {name: [texts[into, place] for place in seeds] for name, seeds in named.items()}
        compared[into] = comparison.compare_translations(translated, accepted[into], sources[into], settings)
    is_one = directions.keys() == {to}
    result = compared[to] if is_one else {"directions": compared}
    if output is not None:
        write_text(output, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    table = comparison.comparison_table(result) if is_one else comparison.directions_table(compared)
    options.print_result(result, table, as_json)


def _directions(data: list[str], to: str | None) -> dict[str | None, list[str]]:
    """Return the paths of pairs by target language, from `--to` or before each `=`."""
    marks = [None if Path(place).exists() else re.fullmatch(r"([\w-]+)=(.+)", place) for place in data]
    if not any(marks):
        return {to: data}
    if to is not None or not all(marks):
        raise ValueError(f"`data` must name a language for each file, without `to`, but is {' '.join(data)} instead.")
    directions: dict[str | None, list[str]] = {}
    for mark in marks:
        directions.setdefault(mark[1], []).append(mark[2])  # type: ignore[index]
    return directions
