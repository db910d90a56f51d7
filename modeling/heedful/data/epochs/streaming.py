"""Streams: pairs read anew in every epoch, encoded in shares, and grouped into updates by pools."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice

from accelerate import Accelerator
from accelerate.utils import gather_object

from heedful.data.epochs.batching import BatchingSettings, Row, UpdateBatches
from heedful.data.epochs.encoding import CHUNK, PairEncoder

Pairs = Iterable[Mapping[str, str]]


def encode_in_shares(encoder: PairEncoder, pairs: Pairs, accelerator: Accelerator | None) -> Iterator[Row | None]:
    """Yield the rows of a stream, the same on all ranks, each of which encodes a share."""
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
) -> Iterator[list[list[Row]]]:
    """Yield updates of a stream, pool by pool; the last one of a pool goes into the next pool."""
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
