"""What would ruin a training run, found before it starts: data, tokenizer, model and schedule against each other.

`diagnose` reads the data, trains the tokenizer in a temporary folder and builds the model as training does, and runs
every check on them. Nothing is written into the run's folder.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heedful.data.batching import UpdateBatches
from heedful.data.cleaning import split_for_validation
from heedful.data.micro_batches import split_update
from heedful.data.mixture import read_parts
from heedful.data.sources import read_pairs
from heedful.data.teacher import TeacherTokens
from heedful.data.tokenization import TokenizerPair
from heedful.diagnosis.estimate import Rehearsal
from heedful.diagnosis.findings import Finding, Level
from heedful.diagnosis.recipe_checks import pairs as texts
from heedful.diagnosis.recipe_checks import tokens
from heedful.diagnosis.recipe_checks.pairs import Pairs, cleaned
from heedful.diagnosis.recipe_checks.run_length import RunPlan, check_run_length
from heedful.diagnosis.recipe_checks.speed import check_speed
from heedful.diagnosis.recipe_checks.tokens import Encoded, encode
from heedful.inference.loading import first_line, load_model
from heedful.training.model_of_recipe import make_model
from heedful.training.processes.devices import make_accelerator
from heedful.training.recipe import Recipe
from heedful.training.run_folder.folder import check_output_folder
from heedful.training.start_checks import faults_of_lengths, faults_of_limits, faults_of_targets
from heedful.training.tokenizers import load_or_train_tokenizers

TIMED = 3  # updates
LEVELS: tuple[Level, ...] = ("error", "warning", "note")

Numbers = list[list[int]]  # of the rows of an update, bucket by bucket


@dataclass
class Diagnosis:
    """What was found in a recipe, the worst first."""

    findings: list[Finding]
    looked_at: int  # training pairs
    total: int | None  # training pairs in all; None for a stream whose end was not reached

    def __post_init__(self) -> None:
        """Sort the findings; those of one level stay in order."""
        self.findings = sorted(self.findings, key=lambda finding: LEVELS.index(finding.level))

    @property
    def has_errors(self) -> bool:
        """Whether the run would be ruined."""
        return any(finding.level == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        names = ("check", "where", "told", "advice", "examples")
        findings = [{"severity": f.level, **{name: getattr(f, name) for name in names}} for f in self.findings]
        return {**vars(self), "findings": findings, "has_errors": self.has_errors}

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.level:<8} {finding.where}  [{finding.check}]")
            lines += [f"         {part}" for part in (finding.told, finding.advice) if part]
            lines += [f"           {example}" for example in finding.examples]
        counts = Counter(finding.level for finding in self.findings)
        told = ", ".join(f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}" for level in LEVELS)
        scope = f"all {self.looked_at:,}"
        if self.looked_at != self.total:
            scope = f"only the first {self.looked_at:,}" + ("" if self.total is None else f" of {self.total:,}")
        return "\n".join([*lines, f"{told}; {scope} training pairs were looked at"])


def diagnose(recipe: Recipe, limit: int = 100_000) -> Diagnosis:
    """Run every check on a recipe, its vocabulary trained on the first `limit` training pairs, which are looked at.

    Raises:
        FileNotFoundError: If a file of the recipe does not exist.
        ValueError: If the data cannot be read, or `limit` is below 1.
    """
    if limit < 1:
        raise ValueError(f"`--pairs` must be at least 1, but is {limit} instead.")
    train, held_out = _read_splits(recipe, limit)
    with tempfile.TemporaryDirectory() as temporary:
        findings = list(_check(recipe, train, held_out, Path(temporary)))
    return Diagnosis(findings, train.looked_at, train.total)


def _read_splits(recipe: Recipe, limit: int) -> tuple[Pairs, list[Pairs]]:
    """Read the first training pairs, and all validation and test pairs, the validation first."""
    data, where = recipe.data, recipe.data.locations
    train = Pairs.first(read_parts(data.parts, data.streaming), limit, "train", "data.train")
    held_out = []
    if where.validation is None:  # training splits it off, from the pairs that cleaning keeps
        rest, numbers = split_for_validation(train.sources)
        held_out.append(replace(train.chosen(numbers), name="validation"))
        train = train.chosen(rest)
    splits = {} if where.validation is None else {"validation": where.validation}
    for name, location in {**splits, **where.test}.items():
        pairs = read_pairs(location, data.source, data.target, split=name, references=data.references)
        key = "data.validation" if name == "validation" else f"data.test.{name}"
        held_out.append(Pairs.first(pairs, len(pairs), name, key))
    return train, held_out


def _check(recipe: Recipe, train: Pairs, held_out: list[Pairs], temporary: Path) -> Iterator[Finding]:
    """Run every check: what training would refuse, what a published model lacks, pairs, tokens, model and run."""
    all_held_out = [pair for split in held_out for pair in split]
    kept, dropped, reasons = cleaned(train, recipe.data.cleaning, all_held_out, recipe.data.both_directions)
    try:
        check_output_folder(recipe)
    except ValueError as error:
        yield Finding("output", "warning", str(error), "output")
    if recipe.card.license is None and "builtin:" not in recipe.data.train:
        told = "The model card will say that the license is unknown, so nobody may use the model."
        yield Finding("card", "note", told, "card.license", "Name it as the Hub does, such as apache-2.0.")
    yield from texts.check_cleaning(train, dropped, reasons)
    yield from _check_pairs(recipe, train, kept, held_out)
    if len(kept):
        yield from _check_tokens(recipe, kept, held_out, temporary)


def _check_pairs(recipe: Recipe, train: Pairs, kept: Pairs, held_out: list[Pairs]) -> Iterator[Finding]:
    """Run the checks of texts; what cleaning drops does no harm."""
    rules, data, card = recipe.data.cleaning, recipe.data, recipe.card
    yield from texts.check_pointless_pairs(train, rules)
    yield from texts.check_overlap(train, rules, held_out)
    yield from texts.check_sides(train)
    yield from texts.check_length_ratios(kept)
    yield from texts.check_text(kept)
    for split in held_out:
        yield from texts.check_pointless_pairs(split, None)
        yield from texts.check_length_ratios(split)
        yield from texts.check_text(split)
    languages = (card.source_language or data.source, card.target_language or data.target)
    yield from texts.check_scripts(kept, held_out, languages)


def _check_tokens(recipe: Recipe, train: Pairs, held_out: list[Pairs], temporary: Path) -> Iterator[Finding]:
    """Run the checks of what the tokenizers make of the pairs, then those of the model and its run."""
    key = "tokenizer.vocab_size" if recipe.model.start_from is None else "model.start_from"
    if recipe.tokenizer.path is not None:
        key = "tokenizer.path"
    earlier = recipe.folder / "tokenizer"
    folder = earlier if recipe.resume and earlier.is_dir() else temporary / "tokenizer"
    try:
        split_off = held_out[0] if recipe.data.validation is None else ()
        tokenizers = load_or_train_tokenizers(recipe, train, folder, is_main=True, held_out=split_off)
    except ValueError as error:
        yield Finding("tokenizer", "error", str(error), key, "Nothing behind it could be checked.")
        return
    wanted, size = recipe.tokenizer.vocab_size, len(tokenizers.source)
    if key == "tokenizer.vocab_size" and wanted is not None and size < wanted:
        told = (
            f"The pairs that were looked at allow {size:,} tokens, to which the vocabulary of {wanted:,} is lowered."
        )
        yield Finding(
            "tokenizer", "warning" if train.is_whole else "note", told, key, f"Set it to {size // 2:,} or so."
        )
    try:
        for pairs in (train, *held_out):
            tokenizers.check_symbols(pairs, f"`{pairs.key}`")
    except ValueError as error:
        yield Finding("unknown_tokens", "error" if train.is_whole else "warning", str(error), key)
        return
    yield from tokens.check_tokenizer_ids(tokenizers, key)
    yield from tokens.check_normalization(train, tokenizers, key)
    try:
        encoded, *held = (encode(split, tokenizers, recipe.data.parts) for split in (train, *held_out))
    except ValueError as error:
        advice = "Take a tokenizer of these languages, or let one be trained."
        yield Finding("tokenizer", "error", str(error), key, advice)
        return
    limits = (recipe.data.max_source_tokens, recipe.data.max_target_tokens)
    for split in (encoded, *held):
        yield from tokens.check_unknown_tokens(split, tokenizers, key)
    rows = encoded.within(limits)
    faults = [*faults_of_targets(recipe, tokenizers, [*train.targets, *held_out[0].targets])]
    faults += faults_of_limits(recipe, len(encoded) - len(rows), len(rows))
    yield from (Finding(*fault[:2], fault.told, fault.key) for fault in faults if fault.check != "unknown_tokens")
    if len(rows) and (teacher := recipe.optimization.distillation) is not None:
        try:
            TeacherTokens(teacher).check(tokenizers, rows)
        except ValueError as error:
            yield Finding("distillation", "error", str(error), "optimization.distillation")
            return
    if len(rows):
        yield from tokens.check_vocabulary_use(rows, tokenizers, key)
        yield from _check_run(recipe, tokenizers, rows, held)


def _check_run(recipe: Recipe, tokenizers: TokenizerPair, rows: Encoded, held: Sequence[Encoded]) -> Iterator[Finding]:
    """Run the checks of the model, and of the length of its run."""
    key = "model" if recipe.model.start_from is None else "model.start_from"
    try:
        if recipe.model.start_from is not None:
            model = load_model(recipe.model.start_from)  # without the checks of ids, which stop at the first error
        else:
            with torch.device("meta"):  # the weights take no memory
                model = make_model(recipe.model, tokenizers)
    except ValueError as error:
        yield Finding("model", "error", str(error), key)
        return
    findings = list(tokens.check_special_ids(tokenizers, model.config, model.generation_config, key))
    splits = {"data.train": rows, "data.validation": held[0], **{split.pairs.key: split for split in held[1:]}}
    for fault in faults_of_lengths(recipe, model.config, splits):
        examples = splits.get(fault.key, held[0]).examples(fault.rows)
        findings.append(Finding(fault.check, fault.level, fault.told, fault.key, examples=examples))
    yield from findings
    if any(finding.level == "error" and finding.check != "decoding_lengths" for finding in findings):
        return  # such a model cannot be run, so its speed cannot be measured
    yield from check_speed(recipe, model.config)
    updates = UpdateBatches(rows.source_lengths, rows.target_lengths, recipe.batching).epoch(0)
    seconds = per_epoch = None
    if recipe.optimization.max_minutes is not None:
        try:
            seconds = _seconds_per_update(recipe, tokenizers, rows, updates)
        except (ValueError, torch.OutOfMemoryError) as error:  # the recipe may be for another machine than this one
            told = f"How far the run comes in its time could not be measured here: {first_line(error)}"
            yield Finding("speed", "note", told, "optimization.max_minutes")
    if rows.pairs.total is not None:  # the rest is taken to be like what was looked at
        per_epoch = len(updates) * rows.pairs.total / rows.pairs.looked_at
    yield from check_run_length(recipe, RunPlan(per_epoch, seconds), model.config.d_model)


def _seconds_per_update(recipe: Recipe, tokenizers: TokenizerPair, rows: Encoded, updates: list[Numbers]) -> float:
    """Time a few updates on this machine, and return the mean seconds of an update of an epoch.

    Raises a `ValueError` if this machine does not have the device or the precision that the recipe asks for.
    """
    settings = recipe.optimization
    accelerator = make_accelerator(settings)
    rehearsal = Rehearsal(accelerator, make_model(recipe.model, tokenizers), recipe)
    timed = ([[rows[number] for number in bucket] for bucket in update] for update in updates[:TIMED])
    budget, world_size = settings.micro_batch_tokens, accelerator.num_processes
    speed = rehearsal.seconds_per_token([split_update(update, budget, world_size) for update in timed])
    padded = (
        len(bucket) * int(rows.source_lengths[bucket].max() + rows.target_lengths[bucket].max())
        for update in updates
        for bucket in update
    )
    return speed * sum(padded) / len(updates)
