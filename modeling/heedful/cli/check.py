"""For those who check: recipes, runs, models and rivals, the paper's claims, and what is installed here."""

import json
import re
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Exit, Option

from heedful.cli import options
from heedful.cli.evaluate import columns_of, recipe_in, scoring_of
from heedful.files import read_lines, read_object, write_text


def doctor(
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    pairs: Annotated[int, Option("--pairs", help="Training pairs to look at; of a stream the first.")] = 100_000,
    as_json: options.AsJson = False,
):
    """Check a recipe before it is trained: data, tokenizer, model, schedule. Exit code 1 if it would be ruined."""
    from heedful.proposals.proposal import complete
    from heedful.training.recipe_file import read_recipe

    settings = read_recipe(recipe, overrides, complete)
    from heedful.diagnosis.doctor import diagnose

    options.quieten()
    diagnosis = diagnose(settings, pairs)
    options.print_result(diagnosis.to_dict(), diagnosis, as_json)
    if diagnosis.has_errors:
        raise Exit(1)


def plot(
    runs: Annotated[list[Path], Argument(metavar="RUN…", help="Folders of runs, finished or not.")],
    output: Annotated[Path, Option("-o", "--output", help="Picture: .png or .svg.")] = Path("learning_curve.png"),
    metric: Annotated[list[str] | None, Option(help="Such as bleu, train/loss. Default: losses and scores.")] = None,
):
    """Draw the learning curve of a run, or of several runs in one picture."""
    from heedful.publishing.learning_curve import draw_learning_curves

    print(draw_learning_curves(runs, output, metric or ()))


def verify(
    model: options.Model,
    text: Annotated[list[str] | None, Option("--text", help="Sentence to try the model with; repeatable.")] = None,
    data: Annotated[Path | None, Option("--data", help="Text file of such sentences, one a line.")] = None,
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run code that is not Heed's.")] = False,
    as_json: options.AsJson = False,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Option(help="To compute in.")] = "float32",
    device: options.Device = None,
):
    """Check a saved model, Heed's or any encoder-decoder: batches, padding, cache, loss, saving, tokenizers."""
    from heedful.diagnosis.verification import verify as verify_model

    texts = list(text or [])
    if data is not None:
        texts += filter(str.strip, read_lines(data, "--data"))
        if not texts:
            raise ValueError(f"`--data` must hold sentences, but {data} has none.")
    options.quieten()
    result = verify_model(model, texts, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    options.print_result(result.to_dict(), result.table(), as_json)
    if result.failed:
        raise Exit(1)


def compare(
    systems: Annotated[list[str], Argument(metavar="A B…", help="Models or files of predictions; seeds with commas.")],
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
    resamples: Annotated[int, Option(help="Of the paired bootstrap.")] = 1000,
    trials: Annotated[int, Option(help="Of the approximate randomization.")] = 10_000,
    seed: Annotated[int, Option(help="Of both tests.")] = 12345,
    examples: Annotated[int, Option(help="Sentences to show that a system wins, and that it loses.")] = 3,
    output: Annotated[Path | None, Option("-o", "--output", help="File for all of it as JSON.")] = None,
    as_json: options.AsJson = False,
    device: options.Device = None,
):
    """Compare systems with the first: paired tests of BLEU, chrF, TER, exact match, error rates; who wins where.

    With `--data de=FILE --data fr=FILE`, models of several languages are compared in one table, a row a direction.
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
        must = "at least two, all different, and none of them empty"
        raise ValueError(f"The systems must be {must}, but are {' '.join(systems)} instead.")
    files = [place for place in places if Path(place).is_file()]
    if files and directions.keys() != {to}:
        raise ValueError(f"The systems must be models where `data` names languages, but {files[0]} is a file.")
    for name, value in (search | {"target_language": to, "device": device}).items():
        if value is not None and files == places:
            raise ValueError(f"`{name}` must be left out where no model translates, but only files are given.")
    recipes = list(filter(None, map(recipe_in, (place for place in places if place not in files))))
    tokenize, ignore = scoring_of(recipes, tokenize, ignore)
    settings = comparison.ComparisonSettings(tokenize, lowercase, resamples, trials, seed, examples, ignore, ter)
    pairs = {}
    for into, where in directions.items():
        columns = columns_of(where, source, target, next(iter(recipes), None), into)
        pairs[into] = list(options.read_pairs(where, *columns, split="test", references=references))
    accepted = {into: references_of(rows) for into, rows in pairs.items()}
    for each in accepted.values():  # raises now what it would raise when all is translated
        metrics.fitting_tokenizer(tokenize, metrics.references_left(ignore, each))
    texts = {(to, place): comparison.read_predictions(Path(place), len(pairs[to]), accepted[to]) for place in files}
    from heedful.inference.loading import model_folder

    options.quieten()
    sources = {into: [pair["source"] for pair in rows] for into, rows in pairs.items()}
    for place, folder in {place: model_folder(place) for place in places if place not in files}.items():
        translator = options.load_translator(folder, device)
        for into, sentences in sources.items():
            if into not in (to, *translator.tokenizers.languages):
                known = ", ".join(translator.tokenizers.languages) or "it names none"
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
    """Return the places of pairs by the language that they are translated into: `--to`, or that before each `=`."""
    marks = [None if Path(place).exists() else re.fullmatch(r"([\w-]+)=(.+)", place) for place in data]
    if not any(marks):
        return {to: data}
    if to is not None or not all(marks):
        raise ValueError(f"`data` must name a language for each file, without `to`, but is {' '.join(data)} instead.")
    directions: dict[str | None, list[str]] = {}
    for mark in marks:
        directions.setdefault(mark[1], []).append(mark[2])  # type: ignore[index]
    return directions


def study(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="Without it, the studies are listed.")] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="New folder. Default: runs/studies/NAME.")] = None,
    seed: Annotated[int, Option(help="Of weights, data and everything drawn.")] = 1,
    updates: Annotated[int | None, Option(help="Of each training. Default: the study's own.")] = None,
    data: Annotated[str | None, Option(help="Other data: builtin:[bold]train[/bold]:COUNT, or a folder.")] = None,
    settings: Annotated[list[str] | None, Argument(metavar="[NAME=VALUE]…", help="Settings of the study.")] = None,
    as_json: options.AsJson = False,
):
    """Run one of the paper's arguments as an experiment: tables, figures and findings in a folder.

    Trained models are kept in the folder `trainings` next to the output, and found there the next time.
    """
    from heedful.studies.catalogue import NAMES, find_study
    from heedful.studies.study import Lab, run_study

    if name is None:
        if (output, seed, updates, data) != (None, 1, None, None):
            raise ValueError("The name of a study must be given where there are options, but is missing.")
        questions = {known: find_study(known).question for known in NAMES}
        lines = "\n".join(f"{known:<12}{question}" for known, question in questions.items())
        return options.print_result(questions, lines, as_json)
    folder = output or Path("runs/studies") / name
    lab = Lab(find_study(name), seed, updates, data, folder.parent / "trainings", changed=settings or ())
    options.quieten()
    made = run_study(lab, folder)
    options.print_result(read_object(made / "results.json"), made / "report.md", as_json)
    return None


def version():
    """Print the versions of Heedful and of the packages under it."""
    from importlib.metadata import version as version_of

    for name in ("heedful", "transformers", "torch", "tokenizers", "datasets", "accelerate"):
        print(f"{name} {version_of(name)}")
