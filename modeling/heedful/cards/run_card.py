"""Model cards for finished runs."""

import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.utils import yaml_dump

from heedful.cards.learning_curve import CURVE_FILE, leave_learning_curve
from heedful.cards.model_card import METRIC_NAMES, CardFacts, facts_of_model, is_on_the_hub, write_model_card
from heedful.data.epochs.corpus import StoredRows
from heedful.data.sources import references_of, sample
from heedful.decoding.confidence import MOST, Confidence, settings_of
from heedful.decoding.translation import Translator
from heedful.evaluation.metrics import comparable, references_left
from heedful.files import write_text
from heedful.recipe_keys import keys_of
from heedful.training.publication import is_translation, language_codes
from heedful.training.recipe import Recipe
from heedful.training.run import RunResult
from heedful.training.start_checks import tokenizer_key

BUILTIN_LICENSE = "apache-2.0"
RESULTS_FILE = ".eval_results/heedful.yaml"
TOKENS = {
    **{"bpe": "byte-level BPE pieces", "unigram": "byte-level Unigram pieces", "word": "words"},
    **{"character": "characters and bytes", "jamo": "jamo, characters and bytes"},
}


def publish_run(result: RunResult) -> Iterator[str]:
    """Write a run's card and the formats in `publish.also`; yield lines about scores, cost and places."""
    card = write_run_card(result)
    for name, values in result.metrics.items():
        scores = ", ".join(f"{key} {value:.2f}" for key, value in values.items() if isinstance(value, float))
        yield f"{name}: {scores}"
    done = result.progress
    yield f"{done.update:,} updates, {done.target_tokens:,} target tokens, {done.seconds / 60:.1f} min"
    yield f"model: {result.folder}\ncard: {card}"
    if (curve := card.with_name(CURVE_FILE)).is_file():
        yield f"learning curve: {curve}"
    if result.recipe.publish.also:
        from heedful.export.transformers_export import export_run

        yield f"as a class of transformers' own: {export_run(result)}"
    yield from result.ended


def facts_in_numbers(result: RunResult) -> dict[str, Any]:
    """Return a finished run's facts for programs."""
    done = result.progress
    facts = {"model": str(result.folder), "parameters": result.parameters, "metrics": result.metrics}
    facts |= {"ended": result.ended} if result.ended else {}
    return facts | {"updates": done.update, "target_tokens": done.target_tokens, "minutes": done.seconds / 60}


def write_run_card(result: RunResult) -> Path:
    """Write card, learning curve and scores into a run's folder; return the card's path."""
    facts = facts_of(result)
    curve = leave_learning_curve(result.recipe.folder, result.folder)
    _leave_results(result)
    return write_model_card(result.folder, replace(facts, run={**(facts.run or {}), "learning_curve": curve}))


def facts_of(result: RunResult) -> CardFacts:
    """Return the facts for a card, from the run and its recipe."""
    recipe, corpus, progress, data = result.recipe, result.corpus, result.progress, result.recipe.data
    source_language, target_language = language_codes(recipe.card, data, corpus.validation_pairs)
    scores = {
        name: {key: value for key, value in values.items() if key not in ("loss", "perplexity")}
        for name, values in result.metrics.items()
        if "count" in values
    }
    files: list[Any] = [data.train, *(part.train for part in data.mixture.values()), *data.denoise]
    trained = [place for each in files for place in (each if isinstance(each, list) else [each])]
    is_own = recipe.model.start_from is None and all("builtin:" in each for each in trained)
    is_trained = tokenizer_key(recipe.tokenizer, recipe.model) == "tokenizer.vocab_size"
    tokens = [TOKENS[kind] if is_trained else "pieces from a given tokenizer" for kind, _ in recipe.tokenizer.sides]
    source, language = sample(corpus.validation_pairs, 1)[0]["source"], corpus.target_language
    confidence = _calibrated(result, translator := Translator.from_pretrained(result.folder))
    columns = {"source": data.source, "target": data.target}
    translation = next(translator.translate_lines([source], split=False, target_language=language))[0].text
    pairs = {
        "train": corpus.training.pairs if corpus.training.pairs is not None else corpus.report.kept,
        **{f"of these {key}": count for key, count in corpus.training.parts.items()},
        "validation": len(corpus.validation_pairs),
        **{name: values["count"] for name, values in scores.items() if name != "validation"},
    }
    return facts_of_model(
        translator.model,
        translator.tokenizers,
        tokens,
        name=recipe.name,
        source_language=source_language,
        target_language=target_language,
        license=recipe.card.license or (BUILTIN_LICENSE if is_own else "unknown"),
        datasets=[recipe.card.dataset] if recipe.card.dataset else list(dict.fromkeys(trained)),
        scores=scores,
        run={
            "recipe": _shown(asdict(recipe)),
            "card": asdict(recipe.card),
            "sides": [side if column.isdigit() else column for side, column in columns.items()],
            "pairs": pairs,
            "cleaning": corpus.report.to_dict(),
            "joint_vocabulary": corpus.tokenizers.is_joint,
            "target_tokens": progress.target_tokens,
            "seconds": progress.seconds,
            "updates": progress.update,
            "ended": result.ended,
            "hardware": result.hardware,
            "validation_loss": result.metrics["validation"]["loss"],
            "example": {"source": source, "translation": translation, "language": language},
            "learning_curve": "",
            "confidence": confidence,
        },
    )


def _leave_results(result: RunResult) -> None:
    """Write scores on the Hub's data sets in the Hub's form (its docs, "eval results")."""
    entries, file = [], result.folder / RESULTS_FILE
    for test, location in result.recipe.data.located.test.items():
        scores = result.metrics[test]
        metric = next(filter(scores.__contains__, METRIC_NAMES), None)
        if metric and isinstance(location, str) and is_on_the_hub(location):
            repository, _, task = location.partition(":")
            notes = f"{METRIC_NAMES[metric]} {scores.get(f'{metric}_signature', '')}".strip()
            value = round(float(scores[metric]), 2)
            benchmark = {"id": repository, "task_id": task.partition(":")[0] or "default"}
            entries.append({"dataset": benchmark, "value": value, "notes": notes})
    file.unlink(missing_ok=True)
    if entries:
        file.parent.mkdir(exist_ok=True)
        write_text(file, yaml_dump(entries))


def _calibrated(result: RunResult, translator: Translator) -> Confidence | None:
    held_out, recipe = result.corpus.validation_pairs, result.recipe
    pairs, exact = sample(held_out, MOST), not is_translation(*language_codes(recipe.card, recipe.data, held_out))
    settings: Any = {"target_language": result.corpus.target_language, "split": False}
    with warnings.catch_warnings(action="ignore"):  # the run has warned of long outputs
        best = [row[0] for row in translator.translate_lines([pair["source"] for pair in pairs], **settings)]
    ignore = result.recipe.decoding.ignore
    seen = comparable([one.text for one in best], ignore)
    best = [replace(one, text=text) for one, text in zip(best, seen, strict=True)]
    right = references_left(ignore, references_of(pairs), "decoding.")
    config, corpus = translator.model.generation_config, result.corpus
    found = Confidence.of_pairs(best, right, exact, config.num_beams or 1)
    if found is not None:
        held, numbers = corpus.validation, range(len(corpus.validation))
        training = corpus.training
        known = training.rows if isinstance(training, StoredRows) else held.chosen(np.array(numbers[::2]))
        others = [held[number]["input_ids"] for number in numbers[1::2]]
        found = found.for_kind(settings_of(config, corpus.target_language), known.sources, others)
        found.save(result.folder)
    return found


def _shown(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the recipe's non-empty keys that a card shows."""
    hidden = {key.name for key in keys_of(Recipe) if not key.on_card}
    kept = {}
    for name, value in tree.items():
        value = _shown(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        if value not in (None, {}, [], "") and f"{prefix}{name}" not in hidden:
            kept[name] = value
    return kept
