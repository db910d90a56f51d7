"""From a recipe to its corpus in five steps: read, clean, tokenizers, symbols, rows of token ids.

Training and a dry run compose them; `heedful doctor` makes its checks between them, and `heedful init` calls the first
two. Each mistake of a user is raised by one of them, and so is the same everywhere.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from accelerate import Accelerator

from heedful.data import mixture
from heedful.data.cleaning import CleaningReport, clean_pairs, sample, source_digests, split_for_validation
from heedful.data.epochs.batching import BatchingSettings, Row, UpdateBatches
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder
from heedful.data.languages import LOOKED_AT
from heedful.data.sources import read_pairs, references_of, texts_of
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.evaluation.metrics import fitting_tokenizer, references_left
from heedful.training.model_of_recipe import check_model
from heedful.training.recipe import DataRecipe, DecodingRecipe, Recipe
from heedful.training.recipe_file import to_yaml
from heedful.training.run_folder.checkpoints import newest_whole_checkpoint, written_folder

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from heedful.data.epochs.denoising import Denoising
    from heedful.data.epochs.teacher import TeacherTokens

logger = logging.getLogger(__name__)

Update = list[list[Row]]  # buckets of rows


@dataclass(frozen=True)
class Splits:
    """The pairs of a recipe, as rows with `source` and `target`, perhaps `references`, `part` and `row`."""

    train: "Dataset | IterableDataset"
    validation: Any  # a Dataset, or `None` where `clean` is to hold some out of the training pairs
    tests: "dict[str, Dataset]"  # by their keys in the recipe
    total: int | None  # training pairs in all; `None` for a stream whose end was not reached
    report: CleaningReport = field(default_factory=CleaningReport)  # of a stream it fills while the stream is read
    others: frozenset[str] = frozenset()  # texts that are not trained on either
    is_held_out: bool = False  # whether the validation pairs come from those of training


def read_splits(data: DataRecipe, limit: int | None = None) -> Splits:
    """Read all pairs, or only `limit` of training, drawn, of a stream the first; these have their numbers as `row`."""
    from datasets import Dataset

    where = data.located
    read = partial(read_pairs, source=data.source, target=data.target, references=data.references)
    validation = None if where.validation is None else read(where.validation, split="validation")
    tests = {f"data.test.{name}": read(location, split=name) for name, location in where.test.items()}
    others = frozenset(t for name, place in data.held_out.items() for t in texts_of(place, name))
    train = mixture.read_parts(data.parts, data.streaming)
    total = len(train) if isinstance(train, Sized) else None
    if limit is not None:
        numbers = range(limit) if total is None else sample(range(total), limit)
        drawn: Any = train if total is None else train.select(numbers)
        rows = [{"part": 0, **pair, "row": number + 1} for number, pair in zip(numbers, drawn, strict=False)]
        total = len(rows) if total is None and len(rows) < limit else total
        train = Dataset.from_list(rows)
    return Splits(train, validation, tests, total, others=others)


def check_references(splits: Splits, decoding: DecodingRecipe) -> None:
    """Raise a `ValueError` if scores would see nothing of the references of a held-out split, or no words in them."""
    for split in (splits.validation or sample(splits.train, LOOKED_AT), *splits.tests.values()):
        left = references_left(decoding.ignore, references_of(split), "decoding.")
        fitting_tokenizer(decoding.bleu_tokenizer, left, "decoding.bleu_tokenizer")


def clean(splits: Splits, data: DataRecipe) -> Splits:
    """Apply the recipe's rules to the training pairs, and then hold validation pairs out of them if there are none."""
    others = ({"source": text, "target": text} for text in splits.others)
    held_out = chain(splits.validation or (), *splits.tests.values(), others)
    train, report = clean_pairs(splits.train, data.cleaning, held_out, data.both_directions, data.denoised)
    kept = replace(splits, train=train, report=report)
    if splits.validation is not None:
        return kept
    whole = train["group" if "group" in train.column_names else "source"][:]
    numbers = split_for_validation(whole, train["target"][:] if data.both_directions else ())
    logger.info("%s training pairs are held out for validation (`data.validation` is empty)", len(numbers[1]))
    train, validation = (train.select(rows, keep_in_memory=True) for rows in numbers)
    return replace(kept, train=train, validation=validation, is_held_out=True)


def given_tokenizers(recipe: Recipe, folder: Path | None, is_main: bool) -> TokenizerPair | None:
    """Load the tokenizers that the recipe names or the run has in `folder`; `None` if they are to be trained."""
    where = recipe.tokenizer.path or recipe.model.start_from
    if where is None:
        return None if folder is None else _load_tokenizers_of_run(recipe, folder, is_main)
    given = TokenizerPair.from_pretrained(where)
    if recipe.data.both_directions and not given.is_joint:
        must = "hold one tokenizer of both sides where `data.both_directions` is true"
        raise ValueError(f"`tokenizer.path` or `model.start_from` must {must}, but {where} holds two.")
    return given


def earlier_tokenizers(recipe: Recipe) -> TokenizerPair | None:
    """Load the tokenizers that a run would begin with, as `given_tokenizers` does, and write nothing."""
    return given_tokenizers(recipe, recipe.folder / "tokenizer" if recipe.resume else None, is_main=False)


def tokenizers_of(recipe: Recipe, kept: Splits) -> TokenizerPair:
    """Train the recipe's tokenizers on cleaned pairs; a vocabulary of all words has those of held-out pairs, too."""
    settings, pairs = recipe.tokenizer, kept.train
    logger.info("training the tokenizer (%s, %s tokens)", settings.algorithm, settings.vocab_size or "all")
    if settings.sentences is not None and isinstance(pairs, Sized):
        pairs = sample(cast("Dataset", pairs), settings.sentences)
    rest = kept.validation if kept.is_held_out and ("word", None) in settings.sides else ()
    own = settings.target_algorithm
    return train_tokenizers(
        (pair["source"] for pair in chain(islice(pairs, settings.sentences), rest)),
        (pair["target"] for pair in chain(islice(pairs, settings.sentences), rest)),
        algorithm=settings.algorithm if own is None else (settings.algorithm, own),
        vocab_size=settings.vocab_size,
        joint=settings.joint,
        target_vocab_size=settings.target_vocab_size,
        languages=mixture.control_tokens(recipe.data),
    )


def _load_tokenizers_of_run(recipe: Recipe, folder: Path, is_main: bool) -> TokenizerPair | None:
    """Load the tokenizers in `folder`; where they are missing or damaged, those of the checkpoint to be resumed."""
    failure: Exception | None = None
    try:
        if folder.is_dir():
            return TokenizerPair.from_pretrained(folder)
    except Exception as error:  # each library raises another type, tokenizers a bare Exception
        failure = error
    checkpoint = newest_whole_checkpoint(recipe.folder / "checkpoints") if recipe.resume else None
    if checkpoint is None and failure is not None:
        must = f"be the folder of a run with a whole tokenizer, but {folder} cannot be read: {failure}"
        advice = "There is no checkpoint with another: start again with overwrite=true or another `output`."
        raise ValueError(f"`output` must {must}. {advice}") from failure
    tokenizers = None if checkpoint is None else TokenizerPair.from_pretrained(checkpoint)
    if tokenizers is not None and is_main:
        logger.warning("%s is missing or damaged: it is restored from %s", folder, checkpoint)
        save_tokenizers(tokenizers, folder, recipe)
    return tokenizers


def save_tokenizers(tokenizers: TokenizerPair, folder: Path, recipe: Recipe) -> None:
    """Save a run's tokenizers, as a whole or not at all, with its recipe, by which it knows them as its own."""
    with written_folder(folder) as partial:
        tokenizers.save_pretrained(partial)
        (partial / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")


def check_symbols(tokenizers: TokenizerPair, kept: Splits, ignore: str | None) -> None:
    """Raise a `ValueError` if a closed vocabulary lacks a symbol of the pairs; those of a stream are met later."""
    tokenizers.check_symbols(kept.validation, "`data.validation`")
    for key, test in kept.tests.items():
        tokenizers.check_symbols(test, f"`{key}`", ignore)
    if isinstance(kept.train, Sized):
        tokenizers.check_symbols(cast("Dataset", kept.train), "`data.train` after cleaning")


@dataclass(frozen=True, kw_only=True)
class _HeldOut:
    """What both kinds of corpus have."""

    tokenizers: TokenizerPair
    batching: BatchingSettings
    encoder: PairEncoder  # of training pairs
    validation: EncodedPairs
    validation_pairs: list[dict[str, Any]]  # the same pairs as text, perhaps with `references`
    tests: dict[str, EncodedPairs]  # the sources of test pairs, by their keys in the recipe
    report: CleaningReport
    target_language: str | None  # which validation and test pairs are translated into, if the model knows several
    fingerprint: str  # a checksum of the validation rows, and of the training rows unless they are a stream
    denoising: "Denoising | None"  # damages texts anew in every epoch
    parts: dict[str, int] = field(default_factory=dict)  # rows of each part of a mixture, by its key in the recipe


@dataclass(frozen=True, kw_only=True)
class StoredCorpus(_HeldOut):
    """A corpus whose training rows are in memory."""

    rows: EncodedPairs
    too_long: int  # training rows that the limits of the recipe leave out
    drawn: Sequence[Callable[[EncodedPairs, int], EncodedPairs]]  # choose or change them anew in every epoch
    teacher: "TeacherTokens | None"  # what it says goes along with each row
    digests: np.ndarray  # checksums of the training sources

    @property
    def pairs(self) -> int:
        """Number of training rows."""
        return len(self.rows)

    @property
    def longest_source(self) -> int:
        """Length in tokens of the longest training source, in the first epoch where rows change."""
        return int(max(rows.source_lengths.max() for rows in (self.rows, self._rows_of(0))))

    def _rows_of(self, epoch: int) -> EncodedPairs:
        rows = self.rows
        for draw in self.drawn:
            rows = draw(rows, epoch)
        return rows

    def updates(self, epoch: int) -> Iterator[Update]:
        """Yield the updates of an epoch, counted from 0, each a list of buckets of rows."""
        rows, teacher = self._rows_of(epoch), self.teacher
        for update in UpdateBatches(rows.source_lengths, rows.target_lengths, self.batching).epoch(epoch):
            buckets = [[rows[index] for index in bucket] for bucket in update]
            yield buckets if teacher is None else [list(map(teacher.with_tokens, bucket)) for bucket in buckets]


@dataclass(frozen=True, kw_only=True)
class StreamedCorpus(_HeldOut):
    """A corpus whose training pairs are read and encoded anew in every epoch, by all ranks together."""

    stream: Iterable[Mapping[str, str]]  # cleaned pairs
    pool_size: int  # rows that are read, sorted and shuffled at a time
    accelerator: Accelerator | None  # `None` for one process
    counts: list[int] = field(default_factory=list)  # of the rows of each epoch that was read to its end

    @property
    def pairs(self) -> int | None:
        """Number of training rows; `None` before the stream was read to its end."""
        return self.counts[-1] if self.counts else None

    @property
    def longest_source(self) -> int | None:
        """Length in tokens of the longest training source, at most; `None` if there is no limit."""
        return self.encoder.max_source_tokens

    def updates(self, epoch: int) -> Iterator[Update]:
        """Yield the updates of an epoch, counted from 0, each a list of buckets of rows."""
        from heedful.data.epochs.streaming import encode_in_shares, stream_updates

        encoder, count = replace(self.encoder, too_long=0), 0
        rows = encode_in_shares(encoder, self.stream, self.accelerator)
        rows = rows if self.denoising is None else self.denoising.damaged(rows, epoch)
        for update in stream_updates(filter(None, rows), self.batching, pool_size=self.pool_size, epoch=epoch):
            count += sum(map(len, update))
            yield update
        if not count:
            raise _nothing_left(encoder)
        self.counts.append(count)


Corpus = StoredCorpus | StreamedCorpus  # the training rows and validation pairs of one run


def _nothing_left(encoder: PairEncoder) -> ValueError:
    source, target = encoder.max_source_tokens, encoder.max_target_tokens
    limits = f"`data.max_source_tokens` ({source}) or `data.max_target_tokens` ({target})"
    return ValueError(f"No training pair is left: {encoder.too_long} are longer than {limits}.")


def encode(recipe: Recipe, kept: Splits, tokenizers: TokenizerPair, accelerator: Accelerator | None = None) -> Corpus:
    """Turn pairs into rows of token ids, and prepare what every epoch draws from them; `None` is one process."""
    data = recipe.data
    heads = mixture.source_prefixes(data.parts, tokenizers)
    language = data.target if len(tokenizers.languages) > 1 else None
    ways = mixture.both_ways if data.both_directions else iter
    validation = EncodedPairs(PairEncoder(tokenizers, heads=heads).rows(ways(kept.validation)))
    tests = {key: tokenizers.encode_source(test["source"][:], language) for key, test in kept.tests.items()}
    encoder = PairEncoder(tokenizers, data.max_source_tokens, data.max_target_tokens, heads)
    denoising = None
    if data.denoise:
        from heedful.data.epochs.denoising import Denoising

        denoising = Denoising(data.denoise, encoder, recipe.seed)
        validation = denoising.held_out(kept.validation) if data.denoise.alone else validation
    held_out = _HeldOut(
        tokenizers=tokenizers,
        batching=recipe.batching,
        encoder=encoder,
        validation=validation,
        validation_pairs=list(kept.validation),
        tests={key: EncodedPairs({"input_ids": ids, "labels": []} for ids in rows) for key, rows in tests.items()},
        report=kept.report,
        target_language=language,
        fingerprint=validation.fingerprint(),
        denoising=denoising,
    )
    pairs = mixture.with_other_direction(kept.train) if data.both_directions else kept.train
    if isinstance(pairs, Sized):
        return _stored(recipe, pairs, held_out)
    return StreamedCorpus(**vars(held_out), stream=pairs, pool_size=data.pool_size, accelerator=accelerator)


def _stored(recipe: Recipe, pairs: Any, held_out: _HeldOut) -> StoredCorpus:
    data, encoder, teacher = recipe.data, held_out.encoder, recipe.optimization.distillation
    rows = EncodedPairs(encoder.rows(pairs))
    if not len(rows):
        raise _nothing_left(encoder)
    numbers = mixture.numbers_of_parts(pairs)[rows.numbers]
    fingerprint, drawn = held_out.fingerprint + rows.fingerprint(), []
    parts = mixture.rows_of_parts(data.parts, numbers) if data.mixture or data.denoise else {}
    if data.temperature != 1:
        from heedful.data.epochs.sampling import Sampling

        drawn.append(Sampling(numbers, data.temperature, recipe.seed).rows)
    if held_out.denoising is not None:
        drawn.append(held_out.denoising.rows)
    if any(asdict(data.augmentation).values()):
        from heedful.data.epochs.augmentation import Augmentation

        drawn.append(Augmentation(data.augmentation, pairs, encoder, recipe.seed, data.denoised).rows)
    tokens = None
    if teacher is not None:
        from heedful.data.epochs.teacher import TeacherTokens

        tokens = TeacherTokens(teacher)
        fingerprint += tokens.check(encoder.tokenizers, rows)
    own = {"rows": rows, "too_long": encoder.too_long, "drawn": drawn, "teacher": tokens}
    own["digests"] = np.unique(source_digests(pairs))
    return StoredCorpus(**vars(replace(held_out, fingerprint=fingerprint, parts=parts)) | own)


def corpus_of(recipe: Recipe, given: TokenizerPair | None, accelerator: Accelerator | None = None) -> Corpus:
    """Read, clean, tokenize and encode what the recipe names; tokenizers are trained unless they are `given`."""
    check_model(recipe, given)
    splits = read_splits(recipe.data)
    check_references(splits, recipe.decoding)
    kept = clean(splits, recipe.data)
    tokenizers = given or tokenizers_of(recipe, kept)
    check_symbols(tokenizers, kept, recipe.decoding.ignore)
    check_model(recipe, tokenizers)
    return encode(recipe, kept, tokenizers, accelerator)


def prepare_corpus(recipe: Recipe, folder: Path, accelerator: Accelerator | None = None) -> Corpus:
    """Return the corpus of a run, and save its tokenizers in `folder`, where earlier ones are taken from."""
    is_main = accelerator is None or accelerator.is_main_process
    given = given_tokenizers(recipe, folder, is_main)
    corpus = corpus_of(recipe, given, accelerator)
    if given is None and is_main:
        save_tokenizers(corpus.tokenizers, folder, recipe)
    return corpus
