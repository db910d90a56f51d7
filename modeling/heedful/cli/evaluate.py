"""`heedful evaluate`: translate and score a test set, in one or several processes."""

import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from heedful.cli import options
from heedful.files import check_at_least, one_line
from heedful.messages_heed import wrong
from heedful.training.processes.launcher import world_size

logger = logging.getLogger(__name__)


def evaluate(
    model: options.AnyModel,
    data: options.Data,
    source: options.OwnSource = None,
    target: options.OwnTarget = None,
    num_beams: options.Beams = None,
    max_new_tokens: options.MaxNewTokens = None,
    to: options.TargetLanguage = None,
    glossary: options.GlossaryFile = None,
    tokenize: options.BleuTokenizer = None,
    lowercase: options.Lowercase = False,
    references: options.References = None,
    ignore: options.Ignore = None,
    ter: options.Ter = None,
    bootstrap: Annotated[int, Option(help="Resamples for the 95 % intervals; 0: no intervals.")] = 1000,
    metric: Annotated[str | None, Option(help="Additional score: comet:FOLDER, a saved COMET model.")] = None,
    confusions: Annotated[int, Option(help="Number of common token confusions to show.")] = 0,
    document: Annotated[bool, Option("--document", help="Give the model the sentences before each.")] = False,
    token_budget: options.TokenBudget = 8192,
    predictions: Annotated[Path | None, Option(help="File for the outputs, one per line.")] = None,
    as_json: options.AsJson = False,
    revision: options.Revision = None,
    device: options.Device = None,
) -> None:
    """Translate and score a test set: BLEU, chrF, chrF++ and TER with signatures, exact match, error rates, faults.

    With torchrun or accelerate launch, the processes share the sentences.
    """
    from heedful.data.sources import references_of
    from heedful.evaluation import error_rates, faults, metrics

    options.check_output(predictions, "--predictions", data)
    check_at_least(0, confusions=confusions)
    recipe = recipe_in(model, revision)
    tokenize, ignore = scoring_of([recipe] if recipe else [], tokenize, ignore)
    scoring: dict[str, Any] = {"tokenize": tokenize, "lowercase": lowercase, "bootstrap": bootstrap, "ignore": ignore}
    metrics.score_translations([""], [""], **scoring)  # raises before the translation
    source, target = columns_of(data, source, target, recipe)
    documents = documents_of(recipe) if document else None
    pairs = list(options.read_pairs(data, source, target, split="test", references=references, documents=documents))
    accepted = references_of(pairs)
    left = metrics.references_left(ignore, accepted)
    metrics.fitting_tokenizer(tokenize, left)
    if recipe is not None:
        _warn_of_direction(model, recipe, source, target)
        _report_on_pairs(Path(model), recipe, pairs)
    learned = None if metric is None else learned_metric(metric, device)
    options.quieten()
    search: dict[str, Any] = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "target_language": to}
    search["context"] = documents.sentences - 1 if documents else 0
    of_model = {"device": device, "revision": revision, "glossary": glossary}
    best, translator = _translate_all(model, of_model, pairs, ignore, token_budget=token_budget, **search)
    if not best:
        return
    texts = [each.text for each in best]
    if predictions is not None:
        with options.writing(predictions) as stream:
            stream.writelines(one_line(text) + "\n" for text in texts)
    scoring["metrics"] = metrics.affordable_metrics(ter, texts, accepted)
    scores = metrics.score_translations(texts, accepted, **scoring)
    sources, seen = [pair["source"] for pair in pairs], metrics.comparable(texts, ignore)
    config, terms = translator.model.generation_config, translator.glossary
    scores["faults"] = faults.count_faults(pairs, best, config, terms)
    lines = [metrics.scores_table(scores)]
    if learned is not None:
        lines.append(learned.added_to(scores, sources, seen, left))
    if terms is not None:
        scores["terms"] = terms.counts(sources, texts)
        lines.append("glossary         {in_outputs} of {in_sources} terms in the outputs".format(**scores["terms"]))
    if confusions:
        scores["confusions"] = error_rates.commonest_confusions(seen, left, sources, confusions, lowercase)
        lines.append(error_rates.confusions_table(scores["confusions"]))
    options.print_result(scores, "\n".join(lines), as_json)


def learned_metric(name: str, device: str | None = None) -> Any:
    """Return the `--metric` by its name among the entry points `heedful.metrics`."""
    kind, _, folder = name.partition(":")
    known = {each.name: each for each in entry_points(group="heedful.metrics")}
    if kind not in known or not folder:
        raise wrong("--metric", f"be {' or '.join(f'{each}:FOLDER' for each in known)}", name)
    return known[kind].load()(folder, device)


def recipe_in(model: str, revision: str | None = None) -> Any:
    """Return the recipe from a model's folder, here or on the Hub, or `None`."""
    with suppress(OSError, ValueError):
        from heedful.decoding.loading import model_folder
        from heedful.training.recipe_file import recipe_of

        return recipe_of(model_folder(model, revision))
    return None


def documents_of(recipe: Any) -> Any:
    """Return a recipe's `data.documents`, which `--document` needs."""
    if recipe is None or not recipe.data.documents:
        raise wrong("--document", "be left out unless the model's recipe.yaml has `data.documents`", "given")
    return recipe.data.documents


def scoring_of(recipes: Sequence[Any], tokenize: str | None, ignore: str | None) -> list[str | None]:
    """Return BLEU's tokenizer and the ignored text, as given or from the models' recipes."""
    asked = {"bleu_tokenizer": tokenize, "ignore": ignore}
    for key, given in asked.items():
        own = {getattr(recipe.decoding, key) for recipe in recipes} - {None, "13a"}  # the usual one
        if given is None and own:
            asked[key], *others = sorted(own)
            also = f", though another has {', '.join(others)}" if others else ""
            logger.info("scored with `%s` %s, as in the model's recipe%s", key, asked[key], also)
    return [given or None for given in asked.values()]


def columns_of(
    data: list[str], source: str | None, target: str | None, recipe: Any, into: str | None = None
) -> tuple[str, str]:
    """Return the pairs' columns: those given, the recipe's, `source` and `target`, or the language `into`."""
    named = [] if recipe is None else [(recipe.data.source, recipe.data.target)]
    named.append(("source", "target"))
    choices = [(source or one, target or other) for one, other in [*((one, into) for one, _ in named if into), *named]]
    choices.sort(key=lambda columns: not any(map(str.isalpha, columns[0])))  # numbers fit every table
    for choice in choices if len(data) == 1 and None in (source, target) else ():
        with suppress(ValueError):
            first = next(iter(options.read_pairs(data, *choice, split="test", streaming=True)))
            roles = import_module("heedful.checking.pairs").roles_of
            if any(map(str.isalpha, choice[0])) or not all(map(roles, first.values())):  # names of columns
                return choice
    return choices[-1 if into else 0]


def _report_on_pairs(model: Path, recipe: Any, pairs: list[Any]) -> None:
    """Report pairs that were in training, or that its rules drop."""
    import numpy as np

    from heedful.data.cleaning import Judge
    from heedful.data.epochs.encoding import SOURCES_FILE, source_digests

    judge, seen = Judge(replace(recipe.data.cleaning, drop_overlap=False)), set[bytes]()
    reasons = (judge.reason_to_drop(pair["source"].strip(), pair["target"].strip(), 0, seen) for pair in pairs)
    broken, file = Counter(filter(None, reasons)), model.resolve().parent / SOURCES_FILE
    found = {f"{reason}, by the rules of `data.cleaning`": count for reason, count in broken.items()}
    if file.is_file():
        trained = np.fromfile(file, np.uint64)
        found["with a source from training"] = np.isin(source_digests(pairs), trained).sum()
    for what, count in found.items():
        if count:
            logger.info("%s of %s scored pairs are %s", f"{count:,}", f"{len(pairs):,}", what)


def _warn_of_direction(model: str, recipe: Any, source: str, target: str) -> None:
    directions = {(part.source, part.target) for part in recipe.data.parts.values()}
    if (target, source) in directions and (source, target) not in directions:
        should = f"`--source` and `--target` should be {target} and {source}, as {model} was trained"
        warnings.warn(f"{should}, but are {source} and {target} instead.", stacklevel=3)


def _translate_all(
    folder: str, of_model: dict[str, Any], pairs: list[Any], ignore: str | None, **settings: Any
) -> tuple[list[Any], Any]:
    """Return each source's best translation, which only the main process has, and the translator."""
    from heedful.data.sources import sources_of
    from heedful.decoding.translation import Translator

    accelerator = None
    if world_size() > 1:
        from heedful.training.loop.validation import translate_on_ranks
        from heedful.training.processes.devices import join_processes

        accelerator = join_processes(of_model["device"])
        of_model = of_model | {"device": accelerator.device}
    translator, sources = Translator.from_pretrained(folder, **of_model), sources_of(pairs)
    translator.tokenizers.check_symbols(pairs, "`--data`", ignore)
    if accelerator is None:
        with options.progress_bar(total=len(sources)) as bar:
            found = translator.translate_lines(sources, progress=bar.update, split=False, **settings)
            return [best for best, *_ in found], translator
    best = translate_on_ranks(translator, sources, accelerator, **settings)
    accelerator.end_training()
    return best if accelerator.is_main_process else [], translator
