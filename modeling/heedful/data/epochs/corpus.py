"""A run's rows: training pairs as token ids, in memory or streamed, and held-out pairs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from heedful.data.cleaning import CleaningReport, Splits
from heedful.data.data_recipe import DataRecipe
from heedful.data.epochs import encoding
from heedful.data.epochs.batching import BatchingSettings, Row, UpdateBatches
from heedful.data.epochs.draws import HELD_OUT, Augmentation, Denoising, Sampling, Windows
from heedful.data.epochs.encoding import CHUNK, EncodedPairs, PairEncoder
from heedful.data.epochs.teacher import TeacherTokens
from heedful.data.epochs.terms import Terms
from heedful.data.sources import numbers_of_parts
from heedful.data.tokenization import TokenizerPair

Pairs = Iterable[Mapping[str, str]]
Update = list[list[Row]]  # buckets of rows
Draw = Callable[[EncodedPairs, int], EncodedPairs]


@dataclass(frozen=True)
class StoredRows:
    """Training rows in memory."""

    rows: EncodedPairs
    batching: BatchingSettings
    drawn: Sequence[Draw]  # choose or change rows in every epoch
    teacher: TeacherTokens | None  # gives each row its tokens
    parts: dict[str, int]  # rows of each mixture part, by recipe key
    digests: np.ndarray  # source checksums
    fingerprint: str  # a checksum of the rows

    @property
    def pairs(self) -> int:
        """Number of training rows."""
        return len(self.rows)

    @property
    def longest_source(self) -> int:
        """Tokens of the longest training source, before or after the first epoch's changes."""
        return int(max(rows.source_lengths.max() for rows in (self.rows, self._rows_of(0))))

    def _rows_of(self, epoch: int) -> EncodedPairs:
        rows = self.rows
        for draw in self.drawn:
            rows = draw(rows, epoch)
        return rows

    def updates(self, epoch: int) -> Iterator[Update]:
        """Yield an epoch's updates, lists of buckets of rows; epochs count from 0."""
        rows, teacher = self._rows_of(epoch), self.teacher
        for update in UpdateBatches(rows.source_lengths, rows.target_lengths, self.batching).epoch(epoch):
            buckets = [[rows[index] for index in bucket] for bucket in update]
            yield buckets if teacher is None else [list(map(teacher.with_tokens, bucket)) for bucket in buckets]


@dataclass
class StreamedRows:
    """Training pairs that all ranks read and encode again in every epoch."""

    stream: Pairs  # cleaned
    encoder: PairEncoder
    batching: BatchingSettings
    pool_size: int  # rows sorted and shuffled together
    accelerator: Accelerator | None  # `None` for one process
    pairs: int | None = None  # known after an epoch
    parts: dict[str, int] = field(default_factory=dict, init=False)  # not counted
    fingerprint = ""

    @property
    def longest_source(self) -> int | None:
        """Most tokens in a training source; `None` without a limit."""
        return self.encoder.max_source_tokens

    def updates(self, epoch: int) -> Iterator[Update]:
        """Yield an epoch's updates, lists of buckets of rows; epochs count from 0."""
        rows, counts = encode_in_shares(self.encoder, self.stream, self.accelerator), Counter[bool]()
        fitting = (row for row in rows if counts.update([row is not None]) or row is not None)
        yield from stream_updates(fitting, self.batching, pool_size=self.pool_size, epoch=epoch)
        if not counts[True]:
            raise _nothing_left(self.encoder, counts[False])
        self.pairs = counts[True]


def encode_in_shares(encoder: PairEncoder, pairs: Pairs, accelerator: Accelerator | None) -> Iterator[Row | None]:
    """Yield a stream's rows, the same on all ranks; each rank encodes a share."""
    if accelerator is None or accelerator.num_processes == 1:
        yield from encoder.rows(pairs)
        return
    rank, world_size = accelerator.process_index, accelerator.num_processes
    stream = iter(pairs)
    while chunk := list(islice(stream, CHUNK * world_size)):
        share = list(encoder.rows(chunk[rank * CHUNK : (rank + 1) * CHUNK]))
        for rows in gather_object([share]):
            yield from rows


def stream_updates(
    rows: Iterable[Row], settings: BatchingSettings, *, pool_size: int, epoch: int = 0
) -> Iterator[Update]:
    """Yield a stream's updates, pool by pool; a pool's last update goes into the next pool."""
    stream = iter(rows)
    waiting: list[Row] = []
    for pool_number in count():
        arrived = list(islice(stream, pool_size))
        pool = waiting + arrived
        lengths = [len(row["input_ids"]) for row in pool], [len(row["labels"]) for row in pool]
        plan = UpdateBatches(*lengths, settings).epoch(epoch, pool_number)
        updates = [[[pool[i] for i in bucket] for bucket in update] for update in plan]
        if len(arrived) < pool_size:  # the end of the stream
            yield from updates
            return
        *complete, last = updates
        yield from complete
        waiting = [row for bucket in last for row in bucket]


@dataclass(frozen=True)
class Corpus:
    """A run's training rows and held-out pairs."""

    training: StoredRows | StreamedRows
    tokenizers: TokenizerPair
    validation: EncodedPairs
    validation_pairs: list[dict[str, Any]]  # texts, perhaps with `references` or a `place`
    tests: dict[str, EncodedPairs]  # test sources, by recipe key
    report: CleaningReport
    target_language: str | None  # in validation and tests, if the model has several
    fingerprint: str  # a checksum of the rows; a stream's training rows are left out
    context: int = 0  # most sentences before another in its window


def encode(
    data: DataRecipe,
    batching: BatchingSettings,
    kept: Splits,
    tokenizers: TokenizerPair,
    teacher: str | None = None,
    accelerator: Accelerator | None = None,
) -> Corpus:
    """Turn pairs into token ids, and prepare each epoch's draws. `teacher` is a folder."""
    heads = encoding.source_prefixes(data, tokenizers)
    encoder = PairEncoder(tokenizers, data.max_source_tokens, data.max_target_tokens, heads)
    denoising = Denoising(encoder, batching.seed) if data.denoise else None
    pairs: Any = kept.train
    held_out: Any = kept.validation
    if denoising is not None:
        pairs = pairs.select(np.flatnonzero(np.isin(numbers_of_parts(pairs), data.denoised)))
        held_out = [{"source": pair["target"], "target": pair["target"], "part": 1} for pair in held_out]
    validation = EncodedPairs(PairEncoder(tokenizers, heads=heads).rows(held_out))
    training: StoredRows | StreamedRows
    if isinstance(kept.train, Sized):
        rows, parts, drawn, known = EncodedPairs(encoder.rows(pairs)), dict[str, int](), list[Draw](), None
        numbers, fingerprint = numbers_of_parts(pairs)[rows.numbers], rows.fingerprint()
        digests = np.unique(encoding.source_digests(pairs))
        if data.mixture or data.denoise:
            first = min(data.denoised, default=0)
            parts = encoding.rows_of_parts([*data.parts][first:], numbers - first)
        if not len(rows):
            raise _nothing_left(encoder, rows.left_out)
        if denoising is not None:
            drawn.append(denoising.rows)
            validation = denoising.rows(validation, HELD_OUT)
        if data.temperature != 1:
            drawn.append(Sampling(numbers, data.temperature, batching.seed).rows)
        if data.augmentation.terms or data.augmentation.placeholders:
            drawn.append(Terms(data.augmentation, pairs, encoder, batching.seed).rows)
        if any(asdict(data.augmentation).values()):
            drawn.append(Augmentation(data.augmentation, pairs, encoder, batching.seed).rows)
        if (most := data.documents.sentences) is not None:
            validation = Windows(most, held_out, encoder, batching.seed).rows(validation, HELD_OUT)
            drawn.append(Windows(most, pairs, encoder, batching.seed).rows)
            fingerprint += drawn[-1](rows, 0).fingerprint()  # of the documents
        if teacher is not None:
            known = TeacherTokens(teacher)
            fingerprint += known.check(tokenizers, rows)
        training = StoredRows(rows, batching, drawn, known, parts, digests, fingerprint)
    else:
        training = StreamedRows(pairs, encoder, batching, data.pool_size, accelerator)
    language = data.target if len(tokenizers.languages) > 1 else None
    tests = {key: tokenizers.encode_source(test["source"][:], language) for key, test in kept.tests.items()}
    return Corpus(
        training=training,
        tokenizers=tokenizers,
        validation=validation,
        validation_pairs=list(kept.validation),
        tests={key: EncodedPairs({"input_ids": ids, "labels": []} for ids in rows) for key, rows in tests.items()},
        report=kept.report,
        target_language=language,
        fingerprint=validation.fingerprint() + training.fingerprint,
        context=(data.documents.sentences or 1) - 1,
    )


def _nothing_left(encoder: PairEncoder, too_long: int) -> ValueError:
    source, target = encoder.max_source_tokens, encoder.max_target_tokens
    limits = f"`data.max_source_tokens` ({source}) or `data.max_target_tokens` ({target})"
    return ValueError(f"No training pair is left: {too_long} exceed {limits}.")
