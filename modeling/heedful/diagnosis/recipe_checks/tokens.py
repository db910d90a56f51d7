"""Checks of tokenizers, of what they make of the pairs, and of the model's config that has to agree with them."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful.data.batching import Row
from heedful.data.encoding import EncodedPairs, PairEncoder
from heedful.data.mixture import OTHER_DIRECTION, MixturePart, both_ways, source_prefixes
from heedful.data.tokenization import TokenizerPair
from heedful.diagnosis.findings import EXAMPLES, Finding, Level, RowCheck, graded, percent
from heedful.diagnosis.recipe_checks.pairs import Pairs
from heedful.diagnosis.samples import id_set
from heedful.files import shortened
from heedful.inference.attention.labels import FALLBACK_BYTE
from heedful.training.start_checks import UNKNOWN as MOST_UNKNOWN

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

RARE = 5  # types that are seen fewer times than this are hardly learnt
LOOKED_AT_FOR_UNKNOWN_WORDS = 200  # pairs
SHORTER_VOCABULARY = 0.4  # share of rare types from which on the vocabulary is called too large

UNKNOWN = RowCheck(
    "unknown_tokens",
    "{unknown:,} of {tokens:,} {side} tokens of the {split} pairs ({share}, in {count} of {total} rows) are "
    "unknown{words}.",
    "Every algorithm but word knows every text; word needs a larger vocabulary or more sentences.",
    warning=0.005,
    error=MOST_UNKNOWN,
)


class Encoded(EncodedPairs):
    """The pairs of one split as token ids.

    `numbers` tells of which of the pairs each row was made: with both directions each pair makes two rows.
    """

    def __init__(self, pairs: Pairs, rows: Iterable[Row | None], numbers: Iterable[int]):
        super().__init__(rows)
        self.pairs, self.numbers, self.name = pairs, np.array([*numbers], np.int64), pairs.name

    def examples(self, rows: Sequence[int]) -> tuple[str, ...]:
        """Show the pairs of the first few of these rows."""
        return self.pairs.examples(list(dict.fromkeys(self.numbers[row] for row in rows)))

    def column(self, name: str) -> Iterator[list[int]]:
        """Yield the `input_ids` or the `labels` of every row."""
        return (self[row][name] for row in range(len(self)))

    def within(self, limits: tuple[int | None, int | None]) -> "Encoded":
        """Return the rows that training keeps: none longer than the limits of source and target."""
        most = [np.inf if limit is None else limit for limit in limits]
        fits = (self.source_lengths <= most[0]) & (self.target_lengths <= most[1])
        rows = np.flatnonzero(fits)
        return Encoded(self.pairs, (self[row] for row in rows.tolist()), self.numbers[rows])


def encode(pairs: Pairs, tokenizers: TokenizerPair, parts: Mapping[str, MixturePart] | None = None) -> Encoded:
    """Encode a split as training does, but without leaving out what is too long.

    `parts` are those of the recipe's training data; a `ValueError` says that the tokenizers lack a tag of theirs.
    """
    parts = parts or {}
    texts: list[Any] = [{**pair, "number": number} for number, pair in enumerate(pairs)]
    if OTHER_DIRECTION in parts:
        texts = [*both_ways(texts)]
    rows = PairEncoder(tokenizers, heads=source_prefixes(parts, tokenizers)).rows(texts)
    return Encoded(pairs, rows, (pair["number"] for pair in texts))


def check_special_ids(
    tokenizers: TokenizerPair, config: "PreTrainedConfig", generation_config: Any, key: str
) -> Iterator[Finding]:
    """Compare the special ids of tokenizer, config and generation config of the model that `key` names."""

    def problem(level: Level, told: str, advice: str) -> Finding:
        return Finding("special_ids", level, told, key, advice)

    try:
        tokenizers.check_config(config)
    except ValueError as error:
        yield problem("error", str(error), "Training refuses them: give the model the tokenizer it was made with.")
    ours, theirs = config.eos_token_id, generation_config.eos_token_id
    if id_set(ours) - id_set(theirs):
        told = f"The generation config's `eos_token_id` is {theirs}, without the config's {ours}: sentences would "
        yield problem("error", told + "never end.", f"Set `eos_token_id` to {ours} in generation_config.json.")
    for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
        ours, theirs = getattr(config, name, None), getattr(generation_config, name, None)
        if None not in (ours, theirs) and ours != theirs:
            told = f"`{name}` is {ours} in the config and {theirs} in the generation config."
            level: Level = "error" if name == "decoder_start_token_id" else "warning"
            yield problem(level, told, f"Set it to {ours} in generation_config.json.")
    if generation_config.decoder_start_token_id is None and generation_config.bos_token_id is None:
        yield problem("error", "The generation config has no `decoder_start_token_id`: it cannot start.", "Add it.")
    size = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        forced = getattr(generation_config, name, None)
        if any(not 0 <= id_ < size for id_ in id_set(forced)):
            told = f"The generation config's `{name}` is {forced}, outside the {size} target tokens."
            yield problem("error", told, "Set it to an id of the target vocabulary.")


def check_tokenizer_ids(tokenizers: TokenizerPair, key: str) -> Iterator[Finding]:
    """Find ids that collide inside a tokenizer: two tokens with one id, ids beyond its size, equal special ids."""
    for side, tokenizer in _sides(tokenizers):
        vocabulary = tokenizer.get_vocab()
        counts = np.bincount(np.fromiter(vocabulary.values(), dtype=np.int64))
        doubled = np.flatnonzero(counts > 1)
        if len(doubled):
            names = " and ".join(repr(token) for token, id_ in vocabulary.items() if id_ == doubled[0])
            told = f"{len(doubled):,} ids of the {side} tokenizer belong to several tokens, such as {doubled[0]} to "
            yield Finding("tokenizer_ids", "warning", f"{told}{names}.", key, "Train the tokenizer anew.")
        if len(counts) > len(tokenizer):
            told = f"The {side} tokenizer has {len(tokenizer):,} tokens, but ids up to {len(counts) - 1:,}: an "
            told += "embedding of its size lacks the last ones."
            yield Finding("tokenizer_ids", "error", told, key, "Fill the holes in its vocabulary.")
        for name in ("pad_token_id", "unk_token_id"):
            if getattr(tokenizer, name) is not None and getattr(tokenizer, name) == tokenizer.eos_token_id:
                told = f"`{name}` and `eos_token_id` of the {side} tokenizer are both {tokenizer.eos_token_id}."
                yield Finding("tokenizer_ids", "warning", told, key, "Give each a token of its own.")


def check_unknown_tokens(encoded: Encoded, tokenizers: TokenizerPair, key: str) -> Iterator[Finding]:
    """Measure how much of each side is unknown to the tokenizer, with the words and pairs."""
    sides = {
        "source": (tokenizers.source, encoded.column("input_ids"), encoded.source_lengths, encoded.pairs.sources),
        "target": (tokenizers.target, encoded.column("labels"), encoded.target_lengths, encoded.pairs.targets),
    }
    for side, (tokenizer, rows, lengths, texts) in sides.items():
        if tokenizer.unk_token_id is None:
            continue
        counts = [ids.count(tokenizer.unk_token_id) for ids in rows]
        found = [row for row, count in enumerate(counts) if count]
        unknown, tokens = sum(counts), int(lengths.sum())
        some = [texts[encoded.numbers[row]] for row in found[:LOOKED_AT_FOR_UNKNOWN_WORDS]]
        shown = ", ".join(map(shortened, unknown_words(tokenizer, some)[: 2 * EXAMPLES]))
        words = f", such as {shown}" if shown else ""
        fields: dict[str, Any] = {"side": side, "unknown": unknown, "tokens": tokens, "words": words}
        yield from UNKNOWN.findings(encoded, found, key, unknown / max(1, tokens), **fields)


def unknown_words(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> list[str]:
    """List the words, or pieces of them, that a tokenizer does not know, the most frequent first.

    A tokenizer that cannot tell where in the text its tokens stand (a slow one) gives an empty list.
    """
    if not tokenizer.is_fast:
        return []
    counts: Counter[str] = Counter()
    for text in texts:
        encoded = tokenizer(text, return_offsets_mapping=True, truncation=False, verbose=False)
        places = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        counts.update(text[start:end].strip() for id_, (start, end) in places if id_ == tokenizer.unk_token_id)
    return [word for word, _ in counts.most_common() if word]


def check_vocabulary_use(train: Encoded, tokenizers: TokenizerPair, key: str) -> Iterator[Finding]:
    """Count the types that the training rows show fewer than 1, 2, … 5 times: the model hardly learns them.

    Special tokens and single characters, which every text needs, do not count.
    """
    pieces = "" if train.pairs.is_whole else f" (Looked at: the first {train.pairs.looked_at:,} pairs.)"
    for side, tokenizer in _sides(tokenizers):
        columns = {"source": ["input_ids"], "target": ["labels"]}.get(side, ["input_ids", "labels"])
        known, added = tokenizer.get_vocab().items(), tokenizer.added_tokens_decoder
        types = [
            id_ for token, id_ in known if id_ not in added and len(FALLBACK_BYTE.sub("", token).lstrip("▁ ")) > 1
        ]
        if not types:
            continue
        ids = chain.from_iterable(row for name in columns for row in train.column(name))
        seen = np.bincount(np.fromiter(ids, np.int64), minlength=len(tokenizer))[types]
        fewer = [int((seen < times).sum()) for times in range(1, RARE + 1)]
        share = fewer[-1] / len(types)
        if share < 0.02:
            continue
        counts = ", ".join(f"{count:,} fewer than {times}" for times, count in enumerate(fewer[1:], start=2))
        told = f"Of {len(types):,} types of the {side} vocabulary the training rows show {fewer[0]:,} never, {counts} "
        told += f"times ({percent(share)}).{pieces}"
        enough = f"About {len(tokenizer) - fewer[-1]:,} tokens would do for these data."
        level = graded(share, SHORTER_VOCABULARY) if train.pairs.is_whole else "note"
        yield Finding("vocabulary_use", level, told, key, enough if share >= SHORTER_VOCABULARY else "")


def check_normalization(pairs: Pairs, tokenizers: TokenizerPair, key: str) -> Iterator[Finding]:
    """Look whether the source tokenizer makes more tokens of a decomposed text (NFD) than of the same in NFC.

    Training normalizes to NFC while reading. Texts that a user gives the model are as they are.
    """
    composed = [text for text in pairs.sources[:200] if unicodedata.normalize("NFD", text) != text]
    if not composed:
        return
    nfc, nfd = (
        sum(map(len, tokenizers.source([unicodedata.normalize(form, text) for text in composed])["input_ids"]))
        for form in ("NFC", "NFD")
    )
    if nfd <= nfc:
        return
    told = f"Decomposed text (NFD, as some systems write it) costs {nfd / nfc:.1f} times the tokens of NFC with "
    told += "this tokenizer. Training reads everything as NFC; whoever uses the model must do so too."
    yield Finding("normalization", "note", told, key, "Add the normalizer NFC to the tokenizer.")


def _sides(tokenizers: TokenizerPair) -> "list[tuple[str, PreTrainedTokenizerFast]]":
    if tokenizers.is_joint:
        return [("joint", tokenizers.source)]
    return [("source", tokenizers.source), ("target", tokenizers.target)]
