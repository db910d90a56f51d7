"""What would ruin a training run, found before it starts: data, tokenizer, model and schedule against each other.

`diagnose` reads the data, trains the tokenizer in a temporary folder and builds the model as training does, and runs
every check on them. Nothing is written into the run's folder.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from heedful.data.batching import UpdateBatches
from heedful.data.sources import read_pairs
from heedful.data.tokenization import TokenizerPair
from heedful.diagnosis.estimate import seconds_per_token
from heedful.diagnosis.findings import SEVERITIES, Finding, Pairs, Severity, in_order
from heedful.diagnosis.pair_checks import (
    check_cleaning,
    check_length_ratios,
    check_overlap,
    check_pointless_pairs,
    check_scripts,
    check_text,
    cleaned,
)
from heedful.diagnosis.run_checks import RunPlan, check_epochs, check_intervals, check_schedule
from heedful.diagnosis.tokenizer_checks import (
    Encoded,
    check_decoding_lengths,
    check_ends,
    check_lengths,
    check_normalization,
    check_positions,
    check_special_ids,
    check_tokenizer_ids,
    check_unknown_tokens,
    check_vocabulary_use,
    encode,
)
from heedful.inference.loading import first_line, load_model
from heedful.training.folder import check_output_folder
from heedful.training.model_of_recipe import make_model
from heedful.training.preparation import load_or_train_tokenizers
from heedful.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAIRS = 100_000
TIMED = 3  # updates


@dataclass
class Diagnosis:
    """What was found in a recipe.

    Attributes:
        findings: The worst first.
        looked_at: Training pairs that were looked at.
        total: All training pairs; `None` for a stream whose end was not reached.
    """

    findings: list[Finding] = field(default_factory=list)
    looked_at: int = 0
    total: int | None = None

    @property
    def has_errors(self) -> bool:
        """Whether the run would be ruined."""
        return any(finding.severity == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {**asdict(self), "has_errors": self.has_errors}

    def __str__(self) -> str:
        counts = {severity: sum(f.severity == severity for f in self.findings) for severity in SEVERITIES}
        told = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items())
        if self.looked_at == self.total:
            scope = f"all {self.looked_at:,} training pairs were looked at"
        else:
            of = "" if self.total is None else f" of {self.total:,}"
            scope = f"only the first {self.looked_at:,}{of} training pairs were looked at"
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.severity:<8} {finding.where}  [{finding.check}]")
            lines += [f"         {part}" for part in (finding.told, finding.advice) if part]
            lines += [f"           {example}" for example in finding.examples]
        return "\n".join([*lines, f"{told}; {scope}"])


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
    train, held_out = read_splits(recipe, limit)
    findings = check_output(recipe) + check_card(recipe) + _pair_findings(recipe, train, held_out)
    held_out_pairs = [pair for split in held_out for pair in split]
    kept, _, _ = cleaned(train, recipe.data.cleaning, held_out_pairs)
    if len(kept):
        with tempfile.TemporaryDirectory() as temporary:
            findings += _model_findings(recipe, kept, held_out, Path(temporary))
    return Diagnosis(in_order(findings), len(train), train.total)


def read_splits(recipe: Recipe, limit: int = PAIRS) -> tuple[Pairs, list[Pairs]]:
    """Read the first training pairs, and all validation and test pairs, the validation first.

    Raises:
        FileNotFoundError: If a file of the recipe does not exist.
        ValueError: If the data cannot be read.
    """
    data, locations = recipe.data, recipe.data.locations
    where = {"validation": ("data.validation", locations.validation)}
    where |= {name: (f"data.test.{name}", location) for name, location in locations.test.items()}
    pairs = read_pairs(locations.train, data.source, data.target, split="train", streaming=data.streaming)
    train = Pairs.first(pairs, limit, "train", "data.train")
    held_out = []
    for name, (key, location) in where.items():
        pairs = read_pairs(location, data.source, data.target, split=name)
        held_out.append(Pairs.first(pairs, len(pairs), name, key))
    return train, held_out


def check_output(recipe: Recipe) -> list[Finding]:
    """Tell where training would refuse its folder."""
    try:
        check_output_folder(recipe)
    except ValueError as error:
        return [Finding("warning", "output", "output", str(error))]
    return []


def check_card(recipe: Recipe) -> list[Finding]:
    """Tell what a published model lacks."""
    if recipe.card.license is not None or "builtin:" in recipe.data.train:
        return []
    told = "The model card will say that the license is unknown, so nobody may use the model."
    return [Finding("note", "card", "card.license", told, "Name it as the Hub does, such as apache-2.0.")]


def _pair_findings(recipe: Recipe, train: Pairs, held_out: list[Pairs]) -> list[Finding]:
    rules, data, card = recipe.data.cleaning, recipe.data, recipe.card
    findings = check_cleaning(train, rules, held_out)
    findings += check_pointless_pairs(train, rules) + check_overlap(train, rules, held_out)
    # What cleaning drops does no harm.
    kept, _, _ = cleaned(train, rules, [pair for split in held_out for pair in split])
    findings += check_length_ratios(kept) + check_text(kept)
    for split in held_out:
        findings += check_pointless_pairs(split, None) + check_length_ratios(split) + check_text(split)
    languages = (card.source_language or data.source, card.target_language or data.target)
    return findings + check_scripts(kept, held_out, languages)


def _model_findings(recipe: Recipe, train: Pairs, held_out: list[Pairs], temporary: Path) -> list[Finding]:
    """Check what tokenizer, model and schedule make of the training pairs that cleaning keeps."""
    key = tokenizer_key(recipe)
    try:
        tokenizers = load_or_train_tokenizers(recipe, train, tokenizer_folder(recipe, temporary), is_main=True)
    except ValueError as error:
        # From all pairs the vocabulary may well become as large as it should.
        severity: Severity = "error" if train.is_whole else "warning"
        return [Finding(severity, "tokenizer", key, str(error), "Nothing behind it could be checked.")]
    findings = check_tokenizer_ids(tokenizers, key) + check_normalization(train, tokenizers, key)
    languages = (recipe.data.target, recipe.data.source) if recipe.data.both_directions else ()
    try:
        encoded = encode(train, tokenizers, languages)
        held = [encode(split, tokenizers, languages) for split in held_out]
    except ValueError as error:
        return [*findings, Finding("error", "tokenizer", key, str(error), "Set `data.both_directions`.")]
    limits = (recipe.data.max_source_tokens, recipe.data.max_target_tokens)
    rows = encoded.within(limits)
    findings += check_ends(encoded, tokenizers, key) + check_lengths(encoded, limits)
    for split in (encoded, *held):
        findings += check_unknown_tokens(split, tokenizers, key)
    findings += check_decoding_lengths(held[0], recipe)
    if not len(rows):
        return findings
    findings += check_vocabulary_use(rows, tokenizers, key)
    return findings + _run_findings(recipe, tokenizers, rows, held)


def _run_findings(recipe: Recipe, tokenizers: TokenizerPair, rows: Encoded, held: Sequence[Encoded]) -> list[Finding]:
    start_from = recipe.model.start_from
    try:
        model = _model_of_shapes(recipe, tokenizers)
    except ValueError as error:
        return [Finding("error", "model", "model" if start_from is None else "model.start_from", str(error))]
    key = "model.start_from" if start_from is not None else "model"
    findings = check_special_ids(tokenizers, model.config, model.generation_config, key)
    findings += check_positions(rows, held, model.config, recipe)
    if any(finding.severity == "error" for finding in findings):
        return findings  # such a model cannot be run, so its speed is not to be had
    batches = first_epoch(recipe, rows)
    seconds = None
    if recipe.optimization.max_minutes is not None:
        try:
            seconds = measured_seconds(recipe, tokenizers, rows, batches)
        except (ValueError, torch.OutOfMemoryError) as error:  # the recipe may be for another machine than this one
            told = f"How far the run comes in its time could not be measured here: {first_line(error)}"
            findings.append(Finding("note", "speed", "optimization.max_minutes", told))
    per_epoch = None
    if rows.pairs.total is not None:  # the rest is taken to be like what was looked at
        per_epoch = len(batches) * rows.pairs.total / rows.pairs.looked_at
    plan = RunPlan(per_epoch, seconds)
    findings += check_schedule(recipe, plan, model.config.d_model)
    return findings + check_epochs(recipe, plan) + check_intervals(recipe, plan)


def _model_of_shapes(recipe: Recipe, tokenizers: TokenizerPair) -> "PreTrainedModel":
    """Make a fresh model without memory for its weights, or load the one that training starts from."""
    if recipe.model.start_from is not None:
        return load_model(recipe.model.start_from)  # without the checks of ids, which tell one error and stop
    with torch.device("meta"):
        return make_model(recipe.model, tokenizers)


def first_epoch(recipe: Recipe, rows: Encoded) -> list[list[list[int]]]:
    """Make the updates of the first epoch, as training does: lists of buckets of places in `rows`."""
    lengths = rows.lengths()
    return UpdateBatches(lengths[:, 0], lengths[:, 1], recipe.batching).epoch(0)


def measured_seconds(
    recipe: Recipe, tokenizers: TokenizerPair, rows: Encoded, batches: list[list[list[int]]]
) -> float:
    """Time a few updates on this machine, and return the mean seconds of an update.

    Args:
        recipe: The run.
        tokenizers: The model's tokenizers.
        rows: Training rows within the recipe's limits.
        batches: The updates of an epoch.

    Raises:
        ValueError: If this machine has not the device or the precision that the recipe asks for.
    """
    updates = [
        [
            [{"input_ids": rows.sources[row].tolist(), "labels": rows.targets[row].tolist()} for row in bucket]
            for bucket in update
        ]
        for update in batches[:TIMED]
    ]
    speed, lengths = seconds_per_token(recipe, tokenizers, updates), rows.lengths()
    padded = [sum(len(bucket) * int(lengths[bucket].max(axis=0).sum()) for bucket in update) for update in batches]
    return speed * sum(padded) / len(padded)


def tokenizer_key(recipe: Recipe) -> str:
    """Return the recipe's key that decides the tokenizer."""
    if recipe.tokenizer.path is not None:
        return "tokenizer.path"
    return "tokenizer.vocab_size" if recipe.model.start_from is None else "model.start_from"


def tokenizer_folder(recipe: Recipe, temporary: Path) -> Path:
    """Return the folder of the tokenizer that a resumed run has, else one where a new one may be trained."""
    earlier = recipe.folder / "tokenizer"
    return earlier if recipe.resume and earlier.is_dir() else temporary / "tokenizer"
