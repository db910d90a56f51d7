"""From a recipe to its corpus: tokenizers, training rows planned as updates, and validation pairs."""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from heedful.data import mixture
from heedful.data.batching import BatchingSettings, Row, UpdateBatches, stream_updates
from heedful.data.cleaning import CleaningReport, clean_pairs, split_for_validation
from heedful.data.encoding import EncodedPairs, PairEncoder
from heedful.data.sources import read_pairs, references_of
from heedful.data.teacher import TeacherTokens
from heedful.data.tokenization import TokenizerPair
from heedful.evaluation.metrics import references_left
from heedful.training.model_of_recipe import check_model
from heedful.training.processes.collectives import Pairs, encode_in_shares
from heedful.training.recipe import Recipe
from heedful.training.tokenizers import given_tokenizers, load_or_train_tokenizers

if TYPE_CHECKING:
    from heedful.data.epochs.augmentation import Augmentation
    from heedful.data.epochs.sampling import Sampling

logger = logging.getLogger(__name__)

Update = list[list[Row]]  # buckets of rows


@dataclass(kw_only=True)
class Corpus:
    """Training rows and validation pairs of one run: a `StoredCorpus` or a `StreamedCorpus`."""

    tokenizers: TokenizerPair
    batching: BatchingSettings
    validation: EncodedPairs
    validation_pairs: list[dict[str, Any]]  # the same pairs as text, perhaps with `references`
    report: CleaningReport
    target_language: str | None  # which validation and test pairs are translated into, if the model knows several
    encoder: PairEncoder  # of training pairs; it counts those that are too long
    tests: dict[str, EncodedPairs]  # the sources of test pairs, by their keys in the recipe
    fingerprint: str  # a checksum of the validation rows, and of the training rows unless they are a stream
    parts: dict[str, int] = field(default_factory=dict)  # rows of each part of a mixture, by its key in the recipe
    pairs: int | None = None  # number of training rows; `None` for a stream whose end has not been reached yet

    @property
    def longest_source(self) -> int | None:
        """The tokens of the longest source that is trained on, as far as it is known; `None` is any number."""
        return self.encoder.max_source_tokens

    def updates(self, epoch: int) -> Iterator[Update]:
        """Yield the updates of an epoch, counted from 0, each a list of buckets of rows."""
        raise NotImplementedError

    def _note_pairs(self, count: int) -> None:
        if not count:
            limits = (self.encoder.max_source_tokens, self.encoder.max_target_tokens)
            raise ValueError(
                f"No training pair is left: {self.encoder.too_long} are longer than `data.max_source_tokens` "
                f"({limits[0]}) or `data.max_target_tokens` ({limits[1]})."
            )
        self.pairs = count


@dataclass(kw_only=True)
class StoredCorpus(Corpus):
    """A corpus whose training rows are in memory."""

    rows: EncodedPairs
    sampling: "Sampling | None" = None  # chooses them anew in every epoch
    augmentation: "Augmentation | None" = None  # changes them anew in every epoch
    teacher: TeacherTokens | None = None  # what it says goes along with each row

    def __post_init__(self):
        self._note_pairs(len(self.rows))

    @property
    def longest_source(self) -> int | None:
        """The tokens of the longest source that is trained on, in the first epoch where they change."""
        return int(max(rows.source_lengths.max() for rows in (self.rows, self._texts(0))))

    def _texts(self, epoch: int) -> EncodedPairs:
        """Return the rows of an epoch."""
        rows = self.rows
        for drawn in (self.sampling, self.augmentation):
            rows = rows if drawn is None else drawn.rows(rows, epoch)
        return rows

    def updates(self, epoch: int) -> Iterator[Update]:
        """Yield the updates of an epoch, counted from 0, each a list of buckets of rows."""
        rows, teacher = self._texts(epoch), self.teacher
        for update in UpdateBatches(rows.source_lengths, rows.target_lengths, self.batching).epoch(epoch):
            buckets = [[rows[index] for index in bucket] for bucket in update]
            yield buckets if teacher is None else [list(map(teacher.with_tokens, bucket)) for bucket in buckets]


@dataclass(kw_only=True)
class StreamedCorpus(Corpus):
    """A corpus whose training pairs are read and encoded anew in every epoch, by all ranks together."""

    stream: Pairs  # cleaned ones
    pool_size: int  # rows that are read, sorted and shuffled at a time
    accelerator: Accelerator | None  # `None` for one process

    def updates(self, epoch: int) -> Iterator[Update]:
        """Yield the updates of an epoch, counted from 0, each a list of buckets of rows."""
        rows, count = filter(None, encode_in_shares(self.encoder, self.stream, self.accelerator)), 0
        for update in stream_updates(rows, self.batching, pool_size=self.pool_size, epoch=epoch):
            count += sum(map(len, update))
            yield update
        self._note_pairs(count)


def prepare_corpus(recipe: Recipe, folder: Path, accelerator: Accelerator | None = None) -> Corpus:
    """Read, clean, tokenize and encode what the recipe names, the same on every rank; `None` is one process.

    The run's tokenizers are in `folder`, where the main process saves them unless they exist.
    """
    is_main = accelerator is None or accelerator.is_main_process
    check_model(recipe, given_tokenizers(recipe, folder, is_main))
    data, where = recipe.data, recipe.data.locations
    read = partial(read_pairs, source=data.source, target=data.target, references=data.references)
    validation = list(read(where.validation, split="validation")) if where.validation else []
    tests = [read(location, split=name) for name, location in where.test.items()]
    for held_out_pairs in (validation, *tests):
        references_left(recipe.decoding.ignore, references_of(held_out_pairs), "decoding.")
    pairs: Any = mixture.read_parts(data.parts, data.streaming)
    pairs, report = clean_pairs(pairs, data.cleaning, chain(validation, *tests), data.both_directions)
    if where.validation is None:
        rest, numbers = split_for_validation(pairs["source"][:], pairs["target"][:] if data.both_directions else ())
        pairs, validation = pairs.select(rest, keep_in_memory=True), list(pairs.select(numbers, keep_in_memory=True))
        logger.info("%s training pairs are held out for validation (`data.validation` is empty)", len(validation))
    split_off = validation if where.validation is None else ()
    tokenizers = load_or_train_tokenizers(recipe, pairs, folder, is_main, split_off)
    tokenizers.check_symbols(validation, "`data.validation`")
    for name, test in zip(where.test, tests, strict=True):
        tokenizers.check_symbols(test, f"`data.test.{name}`", recipe.decoding.ignore)
    if not data.streaming:
        tokenizers.check_symbols(pairs, "`data.train` after cleaning")
    check_model(recipe, tokenizers)
    heads = mixture.source_prefixes(data.parts, tokenizers)
    encoder = PairEncoder(tokenizers, data.max_source_tokens, data.max_target_tokens, heads)
    ways = mixture.both_ways if data.both_directions else iter
    held_out = EncodedPairs(PairEncoder(tokenizers, heads=heads).rows(ways(validation)))
    language = data.target if mixture.languages_of(data.parts) else None
    shared: dict[str, Any] = {"tokenizers": tokenizers, "target_language": language, "encoder": encoder}
    shared |= {"validation": held_out, "validation_pairs": validation, "fingerprint": held_out.fingerprint()}
    shared |= {"batching": recipe.batching, "report": report, "tests": {}}
    for name, test in zip(where.test, tests, strict=True):
        sources = tokenizers.encode_source(test["source"][:], language)
        shared["tests"][f"data.test.{name}"] = EncodedPairs({"input_ids": ids, "labels": []} for ids in sources)
    if data.both_directions:
        pairs = mixture.with_other_direction(pairs)
    if data.streaming:
        return StreamedCorpus(**shared, stream=pairs, pool_size=data.pool_size, accelerator=accelerator)
    return _stored(recipe, pairs, shared)


def _stored(recipe: Recipe, pairs: Any, shared: dict[str, Any]) -> StoredCorpus:
    """Encode all training pairs, and prepare what every epoch draws from them."""
    data, encoder = recipe.data, shared["encoder"]
    rows = EncodedPairs(encoder.rows(pairs))
    numbers = mixture.numbers_of_parts(pairs)[rows.numbers]
    if data.mixture:
        shared["parts"] = mixture.rows_of_parts(data.parts, numbers)
    if data.temperature != 1:
        from heedful.data.epochs.sampling import Sampling

        shared["sampling"] = Sampling(numbers, data.temperature, recipe.seed)
    if any(asdict(data.augmentation).values()):
        from heedful.data.epochs.augmentation import Augmentation

        shared["augmentation"] = Augmentation(data.augmentation, pairs, encoder, recipe.seed)
    shared["fingerprint"] += rows.fingerprint()
    if recipe.optimization.distillation is not None:
        shared["teacher"] = TeacherTokens(recipe.optimization.distillation)
        shared["fingerprint"] += shared["teacher"].check(encoder.tokenizers, rows)
    return StoredCorpus(**shared, rows=rows)
