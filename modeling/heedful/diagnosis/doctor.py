"""What would ruin a training run, found before it starts: data, tokenizer, model and schedule against each other.

`diagnose` reads the data, trains the tokenizer in a temporary folder and builds the model as training does, and runs
every check on them. Nothing is written into the run's folder.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heedful.data.batching import UpdateBatches
from heedful.data.sources import read_pairs
from heedful.data.tokenization import TokenizerPair
from heedful.diagnosis.estimate import seconds_per_token
from heedful.diagnosis.findings import Finding, Level, Report
from heedful.diagnosis.recipe_checks import pairs as texts
from heedful.diagnosis.recipe_checks import tokens
from heedful.diagnosis.recipe_checks.pairs import Pairs, cleaned
from heedful.diagnosis.recipe_checks.run_length import RunPlan, check_run_length
from heedful.diagnosis.recipe_checks.scripts import check_scripts
from heedful.diagnosis.recipe_checks.tokens import Encoded, encode
from heedful.inference.loading import first_line, load_model
from heedful.training.folder import check_output_folder
from heedful.training.model_of_recipe import make_model
from heedful.training.preparation import load_or_train_tokenizers
from heedful.training.recipe import Recipe

PAIRS = 100_000
TIMED = 3  # updates
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass
class Diagnosis(Report):
    """What was found in a recipe.

    Attributes:
        findings: The worst first.
        looked_at: Training pairs that were looked at.
        total: All training pairs; None for a stream whose end was not reached.
    """

    looked_at: int = 0
    total: int | None = None

    def __post_init__(self) -> None:
        """Sort the findings; those of one level stay in order."""
        self.findings = sorted(self.findings, key=lambda finding: LEVELS.index(finding.level))

    @property
    def has_errors(self) -> bool:
        """Whether the run would be ruined."""
        return bool(self.at("error"))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        findings = self.rows(
            severity="level", check="check", where="where", told="told", advice="advice", examples="examples"
        )
        numbers = {"looked_at": self.looked_at, "total": self.total}
        return {"findings": findings, **numbers, "has_errors": self.has_errors}

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.level:<8} {finding.where}  [{finding.check}]")
            lines += [f"         {part}" for part in (finding.told, finding.advice) if part]
            lines += [f"           {example}" for example in finding.examples]
        counts = {level: len(self.at(level)) for level in LEVELS}
        told = ", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items())
        scope = f"all {self.looked_at:,}"
        if self.looked_at != self.total:
            scope = f"only the first {self.looked_at:,}" + ("" if self.total is None else f" of {self.total:,}")
        return "\n".join([*lines, f"{told}; {scope} training pairs were looked at"])


def diagnose(recipe: Recipe, limit: int = PAIRS) -> Diagnosis:
    """Run every check on a recipe.

    Args:
        recipe: The run.
        limit: Training pairs to look at, the first ones; the vocabulary is then trained on these, too.

    Raises:
        FileNotFoundError: If a file of the recipe does not exist.
        ValueError: If the data cannot be read, or `limit` is below 1.
    """
    if limit < 1:
        raise ValueError(f"`--pairs` must be at least 1, but is {limit} instead.")
    train, held_out = _read_splits(recipe, limit)
    kept, dropped, reasons = cleaned(train, recipe.data.cleaning, [pair for split in held_out for pair in split])
    findings = _check_surroundings(recipe) + texts.check_cleaning(train, dropped, reasons)
    findings += _check_pairs(recipe, train, kept, held_out)
    if len(kept):
        with tempfile.TemporaryDirectory() as temporary:
            findings += _check_tokens(recipe, kept, held_out, Path(temporary))
    return Diagnosis(findings, len(train), train.total)


def _read_splits(recipe: Recipe, limit: int) -> tuple[Pairs, list[Pairs]]:
    """Read the first training pairs, and all validation and test pairs, the validation first."""
    data, where = recipe.data, recipe.data.locations
    pairs = read_pairs(where.train, data.source, data.target, split="train", streaming=data.streaming)
    train = Pairs.first(pairs, limit, "train", "data.train")
    held_out = []
    for name, location in {"validation": where.validation, **where.test}.items():
        pairs = read_pairs(location, data.source, data.target, split=name)
        key = "data.validation" if name == "validation" else f"data.test.{name}"
        held_out.append(Pairs.first(pairs, len(pairs), name, key))
    return train, held_out


def _check_surroundings(recipe: Recipe) -> list[Finding]:
    """Tell whether training would refuse its folder, and what a published model lacks."""
    findings = []
    try:
        check_output_folder(recipe)
    except ValueError as error:
        findings.append(Finding("output", "warning", str(error), "output"))
    if recipe.card.license is None and "builtin:" not in recipe.data.train:
        told = "The model card will say that the license is unknown, so nobody may use the model."
        advice = "Name it as the Hub does, such as apache-2.0."
        findings.append(Finding("card", "note", told, "card.license", advice))
    return findings


def _check_pairs(recipe: Recipe, train: Pairs, kept: Pairs, held_out: list[Pairs]) -> list[Finding]:
    """Run the checks of texts; what cleaning drops does no harm."""
    rules, data, card = recipe.data.cleaning, recipe.data, recipe.card
    findings = texts.check_pointless_pairs(train, rules) + texts.check_overlap(train, rules, held_out)
    findings += texts.check_length_ratios(kept) + texts.check_text(kept)
    for split in held_out:
        findings += (
            texts.check_pointless_pairs(split, None) + texts.check_length_ratios(split) + texts.check_text(split)
        )
    languages = (card.source_language or data.source, card.target_language or data.target)
    return findings + check_scripts(kept, held_out, languages)


def _check_tokens(recipe: Recipe, train: Pairs, held_out: list[Pairs], temporary: Path) -> list[Finding]:
    """Run the checks of what the tokenizers make of the pairs, then those of the model and its run."""
    key = "tokenizer.vocab_size" if recipe.model.start_from is None else "model.start_from"
    if recipe.tokenizer.path is not None:
        key = "tokenizer.path"
    earlier = recipe.folder / "tokenizer"
    folder = earlier if recipe.resume and earlier.is_dir() else temporary / "tokenizer"
    try:
        tokenizers = load_or_train_tokenizers(recipe, train, folder, is_main=True)
    except ValueError as error:
        # From all pairs the vocabulary may well become as large as it should.
        level: Level = "error" if train.is_whole else "warning"
        return [Finding("tokenizer", level, str(error), key, "Nothing behind it could be checked.")]
    findings = tokens.check_tokenizer_ids(tokenizers, key) + tokens.check_normalization(train, tokenizers, key)
    try:
        encoded, *held = (encode(split, tokenizers, recipe.data.target_languages) for split in (train, *held_out))
    except ValueError as error:
        return [*findings, Finding("tokenizer", "error", str(error), key, "Set `data.both_directions`.")]
    limits = (recipe.data.max_source_tokens, recipe.data.max_target_tokens)
    findings += tokens.check_ends(encoded, tokenizers, key) + tokens.check_lengths(encoded, limits)
    for split in (encoded, *held):
        findings += tokens.check_unknown_tokens(split, tokenizers, key)
    findings += tokens.check_decoding_lengths(held[0], recipe)
    rows = encoded.within(limits)
    if not len(rows):
        return findings
    return findings + tokens.check_vocabulary_use(rows, tokenizers, key) + _check_run(recipe, tokenizers, rows, held)


def _check_run(recipe: Recipe, tokenizers: TokenizerPair, rows: Encoded, held: Sequence[Encoded]) -> list[Finding]:
    """Run the checks of the model, and of the length of its run."""
    key = "model" if recipe.model.start_from is None else "model.start_from"
    try:
        if recipe.model.start_from is not None:
            model = load_model(recipe.model.start_from)  # without the checks of ids, which stop at the first error
        else:
            with torch.device("meta"):  # the weights take no memory
                model = make_model(recipe.model, tokenizers)
    except ValueError as error:
        return [Finding("model", "error", str(error), key)]
    findings = tokens.check_special_ids(tokenizers, model.config, model.generation_config, key)
    findings += tokens.check_positions(rows, held, model.config, recipe)
    if any(finding.level == "error" for finding in findings):
        return findings  # such a model cannot be run, so its speed cannot be measured
    updates = UpdateBatches(rows.lengths()[:, 0], rows.lengths()[:, 1], recipe.batching).epoch(0)
    seconds = per_epoch = None
    if recipe.optimization.max_minutes is not None:
        try:
            seconds = _seconds_per_update(recipe, tokenizers, rows, updates)
        except (ValueError, torch.OutOfMemoryError) as error:  # the recipe may be for another machine than this one
            told = f"How far the run comes in its time could not be measured here: {first_line(error)}"
            findings.append(Finding("speed", "note", told, "optimization.max_minutes"))
    if rows.pairs.total is not None:  # the rest is taken to be like what was looked at
        per_epoch = len(updates) * rows.pairs.total / rows.pairs.looked_at
    return findings + check_run_length(recipe, RunPlan(per_epoch, seconds), model.config.d_model)


def _seconds_per_update(
    recipe: Recipe, tokenizers: TokenizerPair, rows: Encoded, updates: list[list[list[int]]]
) -> float:
    """Time a few updates on this machine, and return the mean seconds of an update of an epoch.

    Raises:
        ValueError: If this machine does not have the device or the precision that the recipe asks for.
    """
    timed = [
        [
            [{"input_ids": rows.sources[row].tolist(), "labels": rows.targets[row].tolist()} for row in bucket]
            for bucket in update
        ]
        for update in updates[:TIMED]
    ]
    lengths = rows.lengths()
    padded = [sum(len(bucket) * int(lengths[bucket].max(axis=0).sum()) for bucket in update) for update in updates]
    return seconds_per_token(recipe, tokenizers, timed) * sum(padded) / len(padded)
