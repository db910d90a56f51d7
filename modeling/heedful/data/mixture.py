"""The parts of a mixture: read one after another, each with the tokens that go before its sources."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from heedful.data.data_recipe import DENOISE, OTHER_DIRECTION, SENTINELS, DenoiseRules, MixturePart, languages_of
from heedful.data.epochs.encoding import CHUNK
from heedful.data.sources import read_pairs, reading
from heedful.data.tokenization import GAP, TokenizerPair
from heedful.messages_heed import wrong
from heedful.symbols_heed import symbols_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


def source_prefixes(parts: Mapping[str, MixturePart], tokenizers: TokenizerPair) -> list[list[int]]:
    """Return the ids before the sources of each part: of its language if the model knows several, and of its tag.

    A text that is damaged may be in a language that no pair is translated into: it then has the tag alone. T5's own
    tokenizers, which have its sentinels and no such tag, need none.
    """
    known, tokens = tokenizers.languages, tokenizers.source.added_tokens_encoder
    is_known, needs_tag = len(known) > 1, bool(known) or SENTINELS[0] not in tokens or f"<{DENOISE}>" in tokens
    languages = languages_of(parts) or {str(p.to) for p in parts.values() if is_known and p.tag != DENOISE}
    if not {*languages} <= {*known}:
        wanted, found = ", ".join(languages), ", ".join(known) or "none"
        must = f"have a tag of each language that is learned ({wanted})"
        raise wrong("tokenizer.path` or `model.start_from", must, f"those of {found}", verb="has")
    prefixes = []
    for key, part in parts.items():
        has_none = part.tag == DENOISE and not (is_known and part.to in known)
        prefixes.append([] if has_none else tokenizers.head(part.to if is_known else None))
        if part.tag is not None and (part.tag != DENOISE or needs_tag):
            name, advice = ("data.denoise", "no `data.denoise`") if part.tag == DENOISE else (f"{key}.tag", "no tag")
            prefixes[-1] += control_ids([f"<{part.tag}>"], tokenizers, name, advice)
    return prefixes


def control_ids(tokens: Collection[str], tokenizers: TokenizerPair, key: str, advice: str) -> list[int]:
    """Return the ids of control tokens; one that is none, or that a text may hold but as a gap, is a `ValueError`."""
    ids = [int(tokenizers.source.added_tokens_encoder.get(token, -1)) for token in tokens]
    is_closed = symbols_of(tokenizers.source) is not None  # which reads nothing but its symbols
    texts = [] if is_closed else [text for token in tokens for text in (token, f"a {token} a")]
    read = {id_ for row in (tokenizers.source(texts, verbose=False)["input_ids"] if texts else []) for id_ in row}
    for token, id_ in zip(tokens, ids, strict=True):
        if id_ < 0 or (id_ in read and not GAP.fullmatch(token)):
            must = "be a special token that the tokenizer never reads out of a text"
            raise wrong(key, must, token, advice=f"let one be trained (no `tokenizer.path`), or use {advice}")
    return ids


def mark_ids(rules: DenoiseRules, tokenizers: TokenizerPair) -> list[int]:
    """Return the ids of the rules' marks; tokenizers that cannot say what is missing are a `ValueError`."""
    if rules and (not tokenizers.is_joint or symbols_of(tokenizers.source) is not None):
        where = "the vocabulary is closed" if tokenizers.is_joint else "source and target have two vocabularies"
        raise wrong("data.denoise", f"be empty where {where}", "given")
    return control_ids(rules.marks, tokenizers, "data.denoise", "another `data.denoise.kind`")


def read_parts(parts: Mapping[str, MixturePart], streaming: bool = False) -> "Dataset | IterableDataset":
    """Read all parts but the other direction, one after another; of several, each pair has its number as `part`."""
    import pyarrow as pa
    from datasets import Dataset, IterableDataset

    read: dict[int, Dataset | IterableDataset] = {}
    for number, (key, part) in enumerate(parts.items()):
        if key != OTHER_DIRECTION:
            with reading(key):
                read[number] = read_pairs(part.train, str(part.source), str(part.target), streaming=streaming)
    if len(read) == 1:
        return read.popitem()[1]
    if streaming:
        return IterableDataset.from_generator(partial(_in_turns, read))
    tables = {number: pairs.data.table.select(["source", "target"]) for number, pairs in read.items()}
    numbers = {number: pa.array([number] * len(table), pa.int32()) for number, table in tables.items()}
    return Dataset(pa.concat_tables([tables[number].append_column("part", numbers[number]) for number in read]))


def _in_turns(streams: Mapping[int, Iterable[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield a chunk of each stream, then the next chunk of each, until all have ended."""
    rest = {number: iter(pairs) for number, pairs in streams.items()}
    while rest:
        for number in list(rest):
            chunk = [{**pair, "part": number} for pair in islice(rest[number], CHUNK)]
            yield from chunk
            if not chunk:
                del rest[number]


def both_ways(pairs: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield pairs chunk by chunk, and after each chunk its pairs of the first part again, target to source: part 1."""
    stream = iter(pairs)
    while chunk := [{"part": 0, **pair} for pair in islice(stream, CHUNK)]:
        yield from chunk
        first = (pair for pair in chunk if pair["part"] == 0)
        yield from ({**pair, "source": pair["target"], "target": pair["source"], "part": 1} for pair in first)


def with_other_direction(pairs: "Dataset | IterableDataset") -> "Dataset | IterableDataset":
    """Return what `both_ways` yields."""
    from datasets import Dataset, IterableDataset

    if isinstance(pairs, Dataset):
        return Dataset.from_list([*both_ways(pairs)])
    return cast("IterableDataset", IterableDataset.from_generator(both_ways, gen_kwargs={"pairs": pairs}))


def numbers_of_parts(pairs: "Dataset") -> np.ndarray:
    """Return the number of each pair's part, `(pairs,)`."""
    return np.array(pairs["part"][:]) if "part" in pairs.column_names else np.zeros(len(pairs), np.int64)


def rows_of_parts(parts: Collection[str], numbers: np.ndarray) -> dict[str, int]:
    """Count the rows of each part by its key, from the `(rows,)` numbers of their parts; none is a `ValueError`."""
    counts = dict(zip(parts, np.bincount(numbers, minlength=len(parts)).tolist(), strict=True))
    for key in [key for key, count in counts.items() if not count]:
        raise ValueError(f"`{key}` must hold pairs to train on, but cleaning and the longest lengths leave none.")
    return counts
