"""The pairs of a recipe: read, cleaned, and held out for validation."""

import logging
from collections.abc import Sized
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from heedful.data.cleaning import CleaningReport, clean_pairs, sample, split_for_validation
from heedful.data.data_recipe import DataRecipe
from heedful.data.languages import LOOKED_AT
from heedful.data.sources import read_pairs, read_parts, references_of, texts_of
from heedful.data.tokenization import TokenizerPair
from heedful.evaluation.metrics import fitting_tokenizer, references_left

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Splits:
    """The pairs of a recipe: rows with `source` and `target`, perhaps `references`, `part` and `row`."""

    train: "Dataset | IterableDataset"
    validation: Any  # a Dataset, or `None` if `clean` shall hold some out
    tests: "dict[str, Dataset]"  # by their keys in the recipe
    total: int | None  # training pairs in all; `None` for a stream with more
    report: CleaningReport = field(default_factory=CleaningReport)  # a stream fills it when it is read
    others: frozenset[str] = frozenset()  # more texts that must not be trained on
    is_held_out: bool = False  # whether the validation pairs were training pairs


def read_splits(data: DataRecipe, limit: int | None = None) -> Splits:
    """Read all pairs, or `limit` drawn training pairs (the first of a stream) with their numbers as `row`."""
    from datasets import Dataset

    where = data.located
    read = partial(read_pairs, source=data.source, target=data.target, references=data.references)
    validation = None if where.validation is None else read(where.validation, split="validation")
    tests = {f"data.test.{name}": read(location, split=name) for name, location in where.test.items()}
    others = frozenset(t for name, place in data.held_out.items() for t in texts_of(place, name))
    train = read_parts(data.parts, data.streaming)
    total = len(train) if isinstance(train, Sized) else None
    if limit is not None:
        numbers = range(limit) if total is None else sample(range(total), limit)
        drawn: Any = train if total is None else train.select(numbers)
        rows = [{"part": 0, **pair, "row": number + 1} for number, pair in zip(numbers, drawn, strict=False)]
        total = len(rows) if total is None and len(rows) < limit else total
        train = Dataset.from_list(rows)
    return Splits(train, validation, tests, total, others=others)


def check_references(splits: Splits, ignore: str | None, bleu_tokenizer: str | None) -> None:
    """Raise a `ValueError` if scores would see nothing, or no words, in the references of a split."""
    for split in (splits.validation or sample(splits.train, LOOKED_AT), *splits.tests.values()):
        left = references_left(ignore, references_of(split), "decoding.")
        fitting_tokenizer(bleu_tokenizer, left, "decoding.bleu_tokenizer")


def clean(splits: Splits, data: DataRecipe) -> Splits:
    """Apply the cleaning rules to the training pairs, and hold out validation pairs if there are none."""
    others = ({"source": text, "target": text} for text in splits.others)
    held_out = chain(splits.validation or (), *splits.tests.values(), others)
    train, report = clean_pairs(splits.train, data.cleaning, held_out, data.both_directions)
    kept = replace(splits, train=train, report=report)
    if splits.validation is not None:
        return kept
    whole = train["group" if "group" in train.column_names else "source"][:]
    numbers = split_for_validation(whole, train["target"][:] if data.both_directions else ())
    logger.info("%s training pairs are held out for validation (`data.validation` is empty)", len(numbers[1]))
    train, validation = (train.select(rows, keep_in_memory=True) for rows in numbers)
    return replace(kept, train=train, validation=validation, is_held_out=True)


def check_symbols(tokenizers: TokenizerPair, kept: Splits, ignore: str | None) -> None:
    """Raise a `ValueError` if a closed vocabulary lacks a symbol of the pairs; not for streams."""
    tokenizers.check_symbols(kept.validation, "`data.validation`")
    for key, test in kept.tests.items():
        tokenizers.check_symbols(test, f"`{key}`", ignore)
    if isinstance(kept.train, Sized):
        tokenizers.check_symbols(cast("Dataset", kept.train), "`data.train` after cleaning")
