"""From a recipe to its corpus: tokenizers, training rows planned as updates, and validation pairs."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from heedful.data.batching import BatchingSettings, Row, UpdateBatches, stream_updates
from heedful.data.bpe_dropout import BpeDropout
from heedful.data.cleaning import CleaningReport, clean_pairs, split_for_validation
from heedful.data.encoding import EncodedPairs, PairEncoder
from heedful.data.sources import read_pairs
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.files import written_whole
from heedful.inference.distillation import TeacherTokens
from heedful.inference.translation import MOST_SOURCE_TOKENS
from heedful.training.checkpoints.checkpoints import newest_whole_checkpoint
from heedful.training.model_of_recipe import check_model
from heedful.training.processes.collectives import Pairs, encode_in_shares
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import to_yaml

logger = logging.getLogger(__name__)

Update = list[list[Row]]  # buckets of rows


@dataclass(kw_only=True)
class Corpus:
    """Training rows and validation pairs of one run: a `StoredCorpus` or a `StreamedCorpus`."""

    tokenizers: TokenizerPair
    batching: BatchingSettings
    validation: EncodedPairs
    validation_pairs: list[dict[str, str]]  # the same pairs as text
    report: CleaningReport
    encoder: PairEncoder  # of training pairs; it counts those that are too long
    dropout: BpeDropout | None = None  # cuts their words anew in every epoch
    fingerprint: str  # a checksum of the validation rows, and of the training rows unless they are a stream
    pairs: int | None = None  # number of training rows; `None` for a stream whose end has not been reached yet

    @property
    def longest_source(self) -> int | None:
        """The tokens of the longest source that is trained on, as far as it is known; `None` is any number."""
        return self.encoder.max_source_tokens

    @property
    def target_language(self) -> str | None:
        """The language that validation and test pairs are translated into, if the model knows several."""
        return self.encoder.languages[0] if self.encoder.languages else None

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
    """A corpus whose training rows are in memory, in `rows`."""

    rows: EncodedPairs

    def __post_init__(self):
        self._note_pairs(len(self.rows))

    @property
    def longest_source(self) -> int | None:
        """The tokens of the longest source that is trained on."""
        return int(max(self.rows.source_lengths))

    def updates(self, epoch: int) -> Iterator[Update]:
        """Yield the updates of an epoch, counted from 0, each a list of buckets of rows."""
        rows = self.rows if self.dropout is None else self.dropout.rows(self.rows, epoch)
        for update in UpdateBatches(rows.source_lengths, rows.target_lengths, self.batching).epoch(epoch):
            yield [[rows[index] for index in bucket] for bucket in update]


@dataclass(kw_only=True)
class StreamedCorpus(Corpus):
    """A corpus whose training pairs are read and encoded anew in every epoch, by all ranks together."""

    stream: Pairs  # cleaned ones
    pool_size: int  # rows that are read, sorted and shuffled at a time
    accelerator: Accelerator | None  # `None` for one process

    def updates(self, epoch: int) -> Iterator[Update]:
        """Yield the updates of an epoch, counted from 0, each a list of buckets of rows."""
        encode = self.encoder.rows if self.dropout is None else partial(self.dropout.stream, epoch=epoch)
        rows, count = encode_in_shares(self.encoder, encode, self.stream, self.accelerator), 0
        for update in stream_updates(rows, self.batching, pool_size=self.pool_size, epoch=epoch):
            count += sum(map(len, update))
            yield update
        self._note_pairs(count)


def prepare_corpus(recipe: Recipe, folder: Path, accelerator: Accelerator | None = None) -> Corpus:
    """Read, clean, tokenize and encode what the recipe names, the same on every rank; `None` is one process.

    The run's tokenizers are in `folder`, where the main process saves them unless they exist.
    """
    is_main = accelerator is None or accelerator.is_main_process
    check_model(recipe, _given_tokenizers(recipe, folder, is_main))
    data, where = recipe.data, recipe.data.locations
    sides = (data.source, data.target)
    validation = list(read_pairs(where.validation, *sides, split="validation")) if where.validation else []
    tests = [read_pairs(location, *sides, split=name) for name, location in where.test.items()]
    pairs = read_pairs(where.train, *sides, split="train", streaming=data.streaming)
    pairs, report = clean_pairs(pairs, data.cleaning, held_out=chain(validation, *tests))
    if where.validation is None:
        rest, numbers = split_for_validation(pairs["source"][:])
        pairs, validation = pairs.select(rest, keep_in_memory=True), list(pairs.select(numbers, keep_in_memory=True))
        logger.info("%s training pairs are held out for validation (`data.validation` is empty)", len(validation))
    tokenizers = load_or_train_tokenizers(recipe, pairs, folder, is_main)
    check_model(recipe, tokenizers)
    encoder = PairEncoder(tokenizers, data.max_source_tokens, data.max_target_tokens, data.target_languages)
    held_out = EncodedPairs(PairEncoder(tokenizers, languages=data.target_languages).rows(validation))
    fingerprint = held_out.fingerprint()
    shared: dict[str, Any] = {"tokenizers": tokenizers, "batching": recipe.batching, "encoder": encoder}
    if recipe.tokenizer.dropout:
        shared["dropout"] = BpeDropout(encoder, recipe.tokenizer.dropout, recipe.seed)
    shared |= {"validation": held_out, "validation_pairs": validation, "report": report}
    if data.streaming:
        source = {"stream": pairs, "pool_size": data.pool_size, "accelerator": accelerator}
        return StreamedCorpus(**shared, **source, fingerprint=fingerprint)
    rows = EncodedPairs(encoder.rows(pairs))
    for side, lengths in (("source", rows.source_lengths), ("target", rows.target_lengths)):
        longest = int(lengths.max(initial=0))
        if longest > MOST_SOURCE_TOKENS and getattr(data, f"max_{side}_tokens") is None:
            raise ValueError(
                f"`data.max_{side}_tokens` must be given where pairs have more than {MOST_SOURCE_TOKENS} tokens, "
                f"of which attention takes the square, but is empty, and the longest has {longest}."
            )
    fingerprint += rows.fingerprint()
    if recipe.optimization.distillation is not None:
        fingerprint += TeacherTokens(recipe.optimization.distillation).check(tokenizers, rows)
    return StoredCorpus(**shared, rows=rows, fingerprint=fingerprint)


def _given_tokenizers(recipe: Recipe, folder: Path, is_main: bool) -> TokenizerPair | None:
    given = recipe.tokenizer.path or recipe.model.start_from
    return _load_tokenizers_of_run(recipe, folder, is_main) if given is None else TokenizerPair.from_pretrained(given)


def load_or_train_tokenizers(recipe: Recipe, pairs: Pairs, folder: Path, is_main: bool) -> TokenizerPair:
    """Load the tokenizers that the recipe names or the run has in `folder`; otherwise train them on cleaned pairs.

    Trained ones are saved in `folder`, by the main process.
    """
    settings = recipe.tokenizer
    given = _given_tokenizers(recipe, folder, is_main)
    if given is not None:
        return given
    logger.info("training the tokenizer (%s, %s tokens)", settings.algorithm, settings.vocab_size or "all")
    tokenizers = train_tokenizers(
        (pair["source"] for pair in islice(pairs, settings.sentences)),
        (pair["target"] for pair in islice(pairs, settings.sentences)),
        algorithm=settings.algorithm,
        vocab_size=settings.vocab_size,
        joint=settings.joint,
        target_vocab_size=settings.target_vocab_size,
        languages=(recipe.data.source, recipe.data.target) if recipe.data.both_directions else (),
    )
    if is_main:
        _save_tokenizers(tokenizers, folder, recipe)
    return tokenizers


def _load_tokenizers_of_run(recipe: Recipe, folder: Path, is_main: bool) -> TokenizerPair | None:
    """Load the tokenizers in `folder`; where they are missing or damaged, those of the checkpoint to be resumed."""
    failure: Exception | None = None
    try:
        if folder.is_dir():
            return TokenizerPair.from_pretrained(folder)
    except Exception as error:  # each library raises another type, tokenizers a bare Exception
        failure = error
    checkpoint = newest_whole_checkpoint(recipe.folder / "checkpoints") if recipe.resume else None
    if checkpoint is not None:
        if is_main:
            logger.warning("%s is missing or damaged: it is restored from %s", folder, checkpoint)
            _save_tokenizers(TokenizerPair.from_pretrained(checkpoint), folder, recipe)
        return TokenizerPair.from_pretrained(checkpoint)
    if failure is not None:
        raise ValueError(
            f"`output` must be the folder of a run with a whole tokenizer, but {folder} cannot be read: {failure}. "
            "There is no checkpoint with another: start again with overwrite=true or another `output`."
        ) from failure
    return None


def _save_tokenizers(tokenizers: TokenizerPair, folder: Path, recipe: Recipe) -> None:
    # A run that dies here leaves no half-written tokenizer to resume with.
    with written_whole(folder) as partial:
        tokenizers.save_pretrained(partial)
        (partial / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")  # by it a run knows its own
