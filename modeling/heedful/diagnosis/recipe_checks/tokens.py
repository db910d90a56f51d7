"""Checks of tokenizers, of what they make of the pairs, and of the model's config that has to agree with them."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful.data.encoding import PairEncoder
from heedful.data.tokenization import TokenizerPair
from heedful.diagnosis.findings import EXAMPLES, Finding, Level, RowCheck, collected, graded, percent, shortened
from heedful.diagnosis.recipe_checks.pairs import Pairs
from heedful.inference.translation import position_limit
from heedful.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

RARE = 5  # types that are seen fewer times than this are hardly learnt
LOOKED_AT_FOR_UNKNOWN_WORDS = 200  # pairs
SHORTER_VOCABULARY = 0.4  # share of rare types from which on the vocabulary is called too large

ENDLESS = RowCheck(
    "ends",
    "{count} of {total} targets do not end in the end token (id {end}): the model would not learn to stop.",
    "Give the tokenizer a post-processor that appends it.",
    error=0.0,
)
STARTED = RowCheck(
    "ends",
    "{count} of {total} targets begin with the token the decoder starts with (id {start}): the model would learn to "
    "write it.",
    "Take it out of the tokenizer's post-processor.",
    error=0.0,
)
CONTROLLED = RowCheck(
    "ends",
    "{count} of {total} rows have a padding or end token in their middle: a text that holds its name is taken for it.",
    "Save the tokenizer with `split_special_tokens=True`, or take the names out of the texts.",
    warning=0.001,
    error=0.1,
)
UNKNOWN = RowCheck(
    "unknown_tokens",
    "{unknown} of {tokens} {side} tokens of the {split} pairs ({tokens_share}, in {count} of {total} rows) are "
    "unknown{words}.",
    "The algorithms bpe and unigram know every text; word needs a larger vocabulary or more sentences.",
    warning=0.005,
    error=0.1,
)
TOO_LONG = RowCheck(
    "lengths",
    "{count} of {total} training rows ({share}) have more than {limit} {side} tokens (up to {longest}) and are "
    "dropped.",
    "Raise it, or split the texts into sentences.",
    warning=0.02,
    error=0.5,
)
WITHOUT_POSITION = RowCheck(
    "positions",
    "{count} of {total} {split} rows are longer than the model's {limit} positions (up to {longest} tokens): training "
    "stops there.",
    "{advice}",
    error=0.0,
)
CUT_OFF = RowCheck(
    "decoding_lengths",
    "{count} of {total} validation references ({share}) need more than {limit} new tokens (up to {longest}): their "
    "translations are cut off.",
    "Raise it to {enough} at least.",
    warning=0.01,
    error=0.5,
)


@dataclass
class Encoded:
    """The pairs of one split as token ids.

    Attributes:
        pairs: The texts.
        sources: Source ids of every row, special ids included.
        targets: Labels of every row.
        numbers: Which of the pairs each row was made of; with both directions each pair makes two rows.
    """

    pairs: Pairs
    sources: list[np.ndarray]
    targets: list[np.ndarray]
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def name(self) -> str:
        """The split."""
        return self.pairs.name

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of source and target, `(rows, 2)`."""
        return np.array([[len(s), len(t)] for s, t in zip(self.sources, self.targets, strict=True)]).reshape(-1, 2)

    def examples(self, rows: Sequence[int]) -> tuple[str, ...]:
        """Show the pairs of the first few of these rows."""
        return self.pairs.examples(list(dict.fromkeys(self.numbers[row] for row in rows)))

    def within(self, limits: tuple[int | None, int | None]) -> "Encoded":
        """Return the rows that training keeps: none longer than the limits of source and target."""
        most = [np.inf if limit is None else limit for limit in limits]
        rows = np.flatnonzero((self.lengths() <= most).all(axis=1)).tolist()
        sources, targets = ([column[row] for row in rows] for column in (self.sources, self.targets))
        return Encoded(self.pairs, sources, targets, [self.numbers[row] for row in rows])


def encode(pairs: Pairs, tokenizers: TokenizerPair, languages: tuple[str, ...] = ()) -> Encoded:
    """Encode a split as training does, but without leaving out what is too long.

    Args:
        pairs: The texts.
        tokenizers: The model's tokenizers.
        languages: The target language of each direction; empty for a model of one direction.

    Raises:
        ValueError: If the tokenizers know several languages and none is given.
    """
    encoded = Encoded(pairs, [], [], [])
    for direction in range(max(1, len(languages))):
        sides = (pairs.sources, pairs.targets)[:: -1 if direction else 1]
        texts = ({"source": source, "target": target} for source, target in zip(*sides, strict=True))
        encoder = PairEncoder(tokenizers, languages=languages[direction : direction + 1])
        for number, row in enumerate(encoder.rows(texts)):
            encoded.sources.append(np.asarray(row["input_ids"], dtype=np.int32))
            encoded.targets.append(np.asarray(row["labels"], dtype=np.int32))
            encoded.numbers.append(number)
    return encoded


@collected
def check_special_ids(
    tokenizers: TokenizerPair, config: "PreTrainedConfig", generation_config: Any, key: str
) -> Iterator[Finding]:
    """Compare the special ids of tokenizer, config and generation config, and their ranges.

    Args:
        tokenizers: The model's tokenizers.
        config: The model's config.
        generation_config: The model's generation config.
        key: The recipe's key that names the model.
    """

    def problem(level: Level, told: str, advice: str) -> Finding:
        return Finding("special_ids", level, told, key, advice)

    try:
        tokenizers.check_config(config)
    except ValueError as error:
        yield problem("error", str(error), "Training refuses them: give the model the tokenizer it was made with.")
    ours, theirs = config.eos_token_id, generation_config.eos_token_id
    if set(_as_list(ours)) - set(_as_list(theirs)):
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
        if any(not 0 <= id_ < size for id_ in _as_list(forced)):
            told = f"The generation config's `{name}` is {forced}, outside the {size} target tokens."
            yield problem("error", told, "Set it to an id of the target vocabulary.")


@collected
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


@collected
def check_ends(encoded: Encoded, tokenizers: TokenizerPair, key: str) -> Iterator[Finding]:
    """Check that every sequence ends in one end token, has no start token, and no control token comes from text."""
    pad, end = tokenizers.target.pad_token_id, tokenizers.target.eos_token_id
    start = tokenizers.special_ids()["decoder_start_token_id"]
    found: dict[RowCheck, list[int]] = {ENDLESS: [], STARTED: [], CONTROLLED: []}
    sides = [(tokenizers.source, encoded.sources), (tokenizers.target, encoded.targets)]
    inner = [rows for tokenizer, rows in sides if tokenizer.eos_token_id == end]
    for row, labels in enumerate(encoded.targets):
        if not len(labels) or labels[-1] != end:
            found[ENDLESS].append(row)
        if len(labels) and labels[0] == start != end:
            found[STARTED].append(row)
        if any(((rows[row][:-1] == pad) | (rows[row][:-1] == end)).any() for rows in inner):
            found[CONTROLLED].append(row)
    for check, rows in found.items():
        yield from check.findings(encoded, rows, key, {"start": start, "end": end})


@collected
def check_unknown_tokens(encoded: Encoded, tokenizers: TokenizerPair, key: str) -> Iterator[Finding]:
    """Measure how much of each side is unknown to the tokenizer, with the words and pairs."""
    sides = {
        "source": (tokenizers.source, encoded.sources, encoded.pairs.sources),
        "target": (tokenizers.target, encoded.targets, encoded.pairs.targets),
    }
    for side, (tokenizer, rows, texts) in sides.items():
        if tokenizer.unk_token_id is None:
            continue
        counts = [int((ids == tokenizer.unk_token_id).sum()) for ids in rows]
        found = [row for row, count in enumerate(counts) if count]
        unknown, tokens = sum(counts), sum(map(len, rows))
        some = [texts[encoded.numbers[row]] for row in found[:LOOKED_AT_FOR_UNKNOWN_WORDS]]
        words = ", ".join(map(shortened, unknown_words(tokenizer, some)[: 2 * EXAMPLES]))
        share = unknown / max(1, tokens)
        fields = {"side": side, "unknown": f"{unknown:,}", "tokens": f"{tokens:,}", "tokens_share": percent(share)}
        fields["words"] = f", such as {words}" if words else ""
        yield from UNKNOWN.findings(encoded, found, key, fields, share)


def unknown_words(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> list[str]:
    """List the words, or pieces of them, that a tokenizer does not know, the most frequent first.

    A tokenizer that cannot tell where in the text its tokens stand (a slow one) gives an empty list.
    """
    if not tokenizer.is_fast:
        return []
    counts: dict[str, int] = {}
    for text in texts:
        encoded = tokenizer(text, return_offsets_mapping=True, truncation=False, verbose=False)
        for id_, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            word = text[start:end].strip()
            if id_ == tokenizer.unk_token_id and word:
                counts[word] = counts.get(word, 0) + 1
    return sorted(counts, key=lambda word: -counts[word])


@collected
def check_lengths(encoded: Encoded, limits: tuple[int | None, int | None]) -> Iterator[Finding]:
    """Measure the share of training pairs that are too long for `max_source_tokens` or `max_target_tokens`."""
    for side, lengths, limit in zip(("source", "target"), encoded.lengths().T, limits, strict=True):
        found = _longest_first(lengths, limit)
        fields = {"side": side, "limit": limit, "longest": f"{lengths.max(initial=0):,}"}
        yield from TOO_LONG.findings(encoded, found, f"data.max_{side}_tokens", fields)


@collected
def check_positions(
    train: Encoded, held_out: Sequence[Encoded], config: "PreTrainedConfig", recipe: Recipe
) -> Iterator[Finding]:
    """Find rows that are longer than the model has positions, and lengths of decoding that are.

    Args:
        train: Training rows within the recipe's limits.
        held_out: Rows of validation and test data, which have no limits.
        config: The model's config; sinusoidal and relative positions of Heed models have no limit.
        recipe: The run.
    """
    limit = position_limit(config)
    if limit is None:
        return
    if recipe.validation.sentences != 0 and recipe.validation.max_new_tokens > limit:
        told = f"The model has {limit} positions, but validation may write {recipe.validation.max_new_tokens} tokens."
        advice = f"Set it to {limit} at most."
        yield Finding("positions", "error", told, "validation.max_new_tokens", advice)
    for encoded in (train, *held_out):
        key, advice = encoded.pairs.key, "Shorten or remove these pairs: nothing drops them."
        if encoded is train:
            key = "model"
            advice = "Lower `data.max_source_tokens` and `data.max_target_tokens` to it, or give the model more."
        lengths = encoded.lengths().max(axis=1)
        fields = {"limit": limit, "longest": f"{lengths.max(initial=0):,}", "advice": advice}
        yield from WITHOUT_POSITION.findings(encoded, _longest_first(lengths, limit), key, fields)


@collected
def check_decoding_lengths(validation: Encoded, recipe: Recipe) -> Iterator[Finding]:
    """Find validation references that are longer than a translation may become."""
    lengths = validation.lengths()[:, 1]
    longest = int(lengths.max(initial=0))
    # By key: the most new tokens, and what the key counts beside them: `max_length` the decoder's start token, too.
    limits = {"decoding.max_length": (recipe.decoding.max_length - 1, 1)}
    if recipe.validation.sentences != 0:
        limits["validation.max_new_tokens"] = (recipe.validation.max_new_tokens, 0)
    for key, (limit, more) in limits.items():
        fields = {"limit": limit, "longest": f"{longest:,}", "enough": longest + more}
        yield from CUT_OFF.findings(validation, _longest_first(lengths, limit), key, fields)


def _longest_first(lengths: np.ndarray, limit: int | None) -> list[int]:
    """Return the numbers of the rows above a limit, the longest first."""
    found = np.flatnonzero(lengths > limit) if limit is not None else np.empty(0, int)
    return found[np.argsort(-lengths[found], kind="stable")].tolist()


@collected
def check_vocabulary_use(train: Encoded, tokenizers: TokenizerPair, key: str) -> Iterator[Finding]:
    """Count the types that the training rows show fewer than 1, 2, … 5 times: the model hardly learns them.

    Special tokens and single characters, which every text needs, do not count.
    """
    pieces = "" if train.pairs.is_whole else f" (Looked at: the first {train.pairs.looked_at:,} pairs.)"
    for side, tokenizer in _sides(tokenizers):
        rows = [*(train.targets if side == "target" else train.sources), *(train.targets if side == "joint" else ())]
        known, added = tokenizer.get_vocab().items(), tokenizer.added_tokens_decoder
        types = [id_ for token, id_ in known if id_ not in added and len(token.removeprefix("▁")) > 1]
        if not rows or not types:
            continue
        seen = np.bincount(np.concatenate(rows), minlength=len(tokenizer))[types]
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


def check_normalization(pairs: Pairs, tokenizers: TokenizerPair, key: str) -> list[Finding]:
    """Look whether the source tokenizer makes more tokens of a decomposed text (NFD) than of the same in NFC.

    Training normalizes to NFC while reading. Texts that a user gives the model are as they are.
    """
    composed = [text for text in pairs.sources[:200] if unicodedata.normalize("NFD", text) != text]
    if not composed:
        return []
    nfc, nfd = (
        sum(map(len, tokenizers.source([unicodedata.normalize(form, text) for text in composed])["input_ids"]))
        for form in ("NFC", "NFD")
    )
    if nfd <= nfc:
        return []
    told = f"Decomposed text (NFD, as some systems write it) costs {nfd / nfc:.1f} times the tokens of NFC with "
    told += "this tokenizer. Training reads everything as NFC; whoever uses the model must do so too."
    return [Finding("normalization", "note", told, key, "Add the normalizer NFC to the tokenizer.")]


def _sides(tokenizers: TokenizerPair) -> "list[tuple[str, PreTrainedTokenizerFast]]":
    if tokenizers.is_joint:
        return [("joint", tokenizers.source)]
    return [("source", tokenizers.source), ("target", tokenizers.target)]


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else list(ids) if isinstance(ids, list) else [ids]
