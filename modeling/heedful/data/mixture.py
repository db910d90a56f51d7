"""What a recipe says of its training pairs: the parts they come from, and what each epoch changes in them."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from heedful.configuration_base_heed import position_limit
from heedful.data.epochs.encoding import CHUNK
from heedful.data.sources import read_pairs, reading
from heedful.data.tokenization import GAP, LANGUAGE_TAG, TokenizerPair
from heedful.data.tokenizer_training import OTHER_TAG, SPECIAL_TOKENS
from heedful.symbols_heed import symbols_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedConfig

OTHER_DIRECTION = "data.both_directions"
DENOISE = "denoise"  # the tag of texts that are damaged
MASK, SENTINELS = "<mask>", [f"<extra_id_{number}>" for number in range(100)]  # called as BART and T5 call them
TAKEN = (*SPECIAL_TOKENS, f"<{DENOISE}>", MASK, *SENTINELS)
USUAL_SHARES = {"spans": 0.15, "infilling": 0.3, "deletion": 0.1}  # those of the papers


@dataclass
class MixturePart:
    """A part of the training data; what is not given is as in the first one."""

    train: str | list[str]
    source: str | None = None
    target: str | None = None
    to: str | None = None  # the language of its targets
    tag: str | None = None  # bt for the token <bt> before its sources


@dataclass(frozen=True)
class AugmentationRules:
    """Which shares of the training pairs are changed in an epoch; targets change only where pairs are joined."""

    lower_case: float = 0.0  # of the sources
    typos: float = 0.0  # of the words of sources
    no_final_punctuation: float = 0.0  # of the sources
    joined: float = 0.0  # of the pairs

    def __post_init__(self) -> None:
        for name, share in asdict(self).items():
            if not 0 <= share <= 1:
                raise ValueError(f"`data.augmentation.{name}` must be from 0 to 1, but is {share} instead.")


@dataclass(frozen=True)
class DenoiseRules:
    """Texts that are damaged anew in every epoch, so that the model learns to mend them; true if there are any."""

    text: list[str] = field(default_factory=list)  # files in the target language, one text a line
    sides: list[Literal["source", "target"]] = field(default_factory=list)  # of the pairs
    alone: bool = False  # the pairs themselves are not learned
    kind: Literal["spans", "infilling", "deletion", "order"] = "spans"
    share: float | None = None  # of the tokens of a text
    length: int = 3  # of a span, on average; of a word's way, at most

    def __post_init__(self) -> None:
        if not self and (self.alone, self.kind, self.share, self.length) != (False, "spans", None, 3):
            raise ValueError("`data.denoise` must name a `text` or one of the `sides`, but names neither.")
        if len({*self.sides}) < len(self.sides):
            raise ValueError(f"`data.denoise.sides` must name each side once, but is {self.sides} instead.")
        if self.share is not None and (self.kind == "order" or not 0 < self.share < 1):
            must = "empty where words change places" if self.kind == "order" else "above 0 and below 1"
            raise ValueError(f"`data.denoise.share` must be {must}, but is {self.share} instead.")
        if self.length < 1 or (self.kind == "deletion" and self.length != 3):
            must = "3 where single tokens are deleted" if self.length > 0 else "at least 1"
            raise ValueError(f"`data.denoise.length` must be {must}, but is {self.length} instead.")

    def __bool__(self) -> bool:
        return bool(self.text or self.sides)

    @property
    def marks(self) -> list[str]:
        """The control tokens that stand for what is missing."""
        return {"spans": SENTINELS, "infilling": [MASK]}.get(self.kind, []) if self else []


def check_mixture(mixture: dict[str, MixturePart], target: str, other: str | None = None) -> None:
    """Check what can be known before a part is read; `other` is the language of a second direction, if any."""
    if other == target:
        must = "another language than `data.target` where `data.both_directions` is true"
        raise ValueError(f"`data.source` must be {must}, but both are {other!r}.")
    languages = {"data.target": target} | ({} if other is None else {"data.source": other})
    languages |= {f"data.mixture.{name}.to": part.to or target for name, part in mixture.items()}
    if len({*languages.values()}) > 1:
        for key, language in languages.items():
            if not LANGUAGE_TAG.fullmatch(f"<2{language}>"):
                must = "a language's code of letters, digits, '-' and '_' where there are several"
                raise ValueError(f"`{key}` must be {must}, but is {language!r} instead.")
    for name, part in mixture.items():
        key, token = f"data.mixture.{name}", f"<{part.tag}>"
        if part.to is None and part.target not in (None, target) and re.fullmatch("[a-z]{2,3}", part.target or ""):
            raise ValueError(f"`{key}.to` must be given where its target is {part.target}, not {target}, but is not.")
        if part.tag is not None and (not OTHER_TAG.fullmatch(token) or token in TAKEN):
            must = "letters, digits, '-' and '_', a letter first, and not pad, s, unk, mask, denoise or extra_id_0"
            raise ValueError(f"`{key}.tag` must be {must}, but is {part.tag!r} instead.")


def check_room(data: Any, config: "PreTrainedConfig") -> None:
    """Raise a `ValueError` where rows made anew in an epoch may have more tokens than the model has positions."""
    limit, is_new = position_limit(config), data.augmentation.joined or data.streaming or data.denoise
    for side in ("source", "target"):
        most = getattr(data, f"max_{side}_tokens")
        if limit is not None and is_new and (most is None or most > limit):
            where = "where rows are made anew (`data.streaming`, `data.denoise`, `data.augmentation.joined`)"
            must = f"at most {limit}, the positions of the model, {where}"
            raise ValueError(f"`data.max_{side}_tokens` must be {must}, but is {most} instead.")


def languages_of(parts: Mapping[str, MixturePart]) -> tuple[str, ...]:
    """Return the target languages of a model that learns several; otherwise none."""
    translated = [part for part in parts.values() if part.tag != DENOISE]
    languages = tuple(dict.fromkeys(str(part.to) for part in translated[::-1]))
    return languages if len(languages) > 1 else ()


def control_tokens(data: Any) -> tuple[str, ...]:
    """Return what tokenizers of such training data need besides the usual: tags of languages and parts, and marks."""
    tags = [f"<{part.tag}>" for part in data.parts.values() if part.tag]
    return (*languages_of(data.parts), *dict.fromkeys([*tags, *data.denoise.marks]))


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
        raise ValueError(f"`tokenizer.path` or `model.start_from` must {must}, but has those of {found}.")
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
            must = f"a special token that the tokenizer never reads out of a text, but {token} is none"
            raise ValueError(f"`{key}` must be {must}: let one be trained (no `tokenizer.path`), or use {advice}.")
    return ids


def mark_ids(rules: DenoiseRules, tokenizers: TokenizerPair) -> list[int]:
    """Return the ids of the rules' marks; tokenizers that cannot say what is missing are a `ValueError`."""
    if rules and (not tokenizers.is_joint or symbols_of(tokenizers.source) is not None):
        where = "the vocabulary is closed" if tokenizers.is_joint else "source and target have two vocabularies"
        raise ValueError(f"`data.denoise` must be empty where {where}, but is not.")
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
