"""Checks on tokenizers, on what they make of the pairs, and on the model's config that has to agree with them."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful.data.encoding import PairEncoder
from heedful.data.tokenization import TokenizerPair
from heedful.diagnosis.findings import EXAMPLES, Finding, Pairs, graded, percent, shortened
from heedful.inference.translation import position_limit
from heedful.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
RARE = 5  # types seen fewer times than this are hardly learnt
LOOKED_AT_FOR_UNKNOWN_WORDS = 200  # pairs
SHORTER_VOCABULARY = 0.4  # share of rare types from which on the vocabulary is called too large


@dataclass
class Encoded:
    """The pairs of one split as token ids.

    Attributes:
        pairs: The texts.
        sources: Source ids of every row, special ids included.
        targets: Labels of every row.
        places: Which of the pairs each row was made of; with both directions each pair makes two rows.
    """

    pairs: Pairs
    sources: list[np.ndarray]
    targets: list[np.ndarray]
    places: list[int]

    def __len__(self) -> int:
        return len(self.places)

    def lengths(self) -> np.ndarray:
        """Return the tokens of source and target, `(rows, 2)`."""
        return np.array([[len(s), len(t)] for s, t in zip(self.sources, self.targets, strict=True)]).reshape(-1, 2)

    def examples(self, rows: Sequence[int] | np.ndarray) -> tuple[str, ...]:
        """Show the pairs of the first few of these rows."""
        return self.pairs.examples(list(dict.fromkeys(self.places[row] for row in rows)))

    def within(self, limits: tuple[int | None, int | None]) -> "Encoded":
        """Return the rows that training keeps: none longer than the limits of source and target."""
        lengths = self.lengths()
        fits = np.ones(len(self), dtype=bool)
        for side, limit in enumerate(limits):
            if limit is not None:
                fits &= lengths[:, side] <= limit
        rows = np.flatnonzero(fits).tolist()
        return Encoded(
            self.pairs,
            [self.sources[row] for row in rows],
            [self.targets[row] for row in rows],
            [self.places[row] for row in rows],
        )


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
    for number in range(max(1, len(languages))):
        sides = (pairs.sources, pairs.targets)[:: -1 if number else 1]
        texts = ({"source": source, "target": target} for source, target in zip(*sides, strict=True))
        for place, row in enumerate(PairEncoder(tokenizers, languages=languages[number : number + 1]).rows(texts)):
            encoded.sources.append(np.asarray(row["input_ids"], dtype=np.int32))
            encoded.targets.append(np.asarray(row["labels"], dtype=np.int32))
            encoded.places.append(place)
    return encoded


def check_special_ids(
    tokenizers: TokenizerPair, config: "PreTrainedConfig", generation_config: Any, key: str
) -> list[Finding]:
    """Hold the special ids of tokenizer, config and generation config against each other, and their ranges.

    Args:
        tokenizers: The model's tokenizers.
        config: The model's config.
        generation_config: The model's generation config.
        key: The recipe's key that names the model.
    """
    findings = []

    def add(severity, told, advice):
        findings.append(Finding(severity, "special_ids", key, told, advice))

    try:
        tokenizers.check_config(config)
    except ValueError as error:
        add("error", str(error), "Training refuses them: give the model the tokenizer it was made with.")
    for name in SPECIAL_IDS:
        ours, theirs = getattr(config, name, None), getattr(generation_config, name, None)
        if name == "eos_token_id":
            missing = set(_as_list(ours)) - set(_as_list(theirs))
            if missing:
                add(
                    "error",
                    f"The generation config's `eos_token_id` is {theirs}, without the config's {ours}: sentences "
                    "would never end.",
                    f"Set `eos_token_id` to {ours} in generation_config.json.",
                )
        elif theirs is not None and ours is not None and theirs != ours:
            add(
                "error" if name == "decoder_start_token_id" else "warning",
                f"`{name}` is {ours} in the config and {theirs} in the generation config.",
                f"Set it to {ours} in generation_config.json.",
            )
    if generation_config.decoder_start_token_id is None and generation_config.bos_token_id is None:
        add("error", "The generation config has no `decoder_start_token_id`: it cannot start.", "Add it.")
    size = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        value = getattr(generation_config, name, None)
        if any(not 0 <= id_ < size for id_ in _as_list(value)):
            add("error", f"The generation config's `{name}` is {value}, outside the {size} target tokens.", "Mend it.")
    return findings


def check_tokenizer_ids(tokenizers: TokenizerPair, key: str) -> list[Finding]:
    """Look for ids that collide inside a tokenizer: two tokens with one id, ids beyond its size, equal special ids."""
    findings = []
    for side, tokenizer in _sides(tokenizers):
        vocabulary = tokenizer.get_vocab()
        counts = np.bincount(np.fromiter(vocabulary.values(), dtype=np.int64))
        doubled = np.flatnonzero(counts > 1)
        if len(doubled):
            names = [token for token, id_ in vocabulary.items() if id_ == doubled[0]]
            told = f"{len(doubled):,} ids of the {side} tokenizer belong to several tokens, such as {doubled[0]} "
            told += f"to {' and '.join(map(repr, names))}."
            findings.append(Finding("warning", "tokenizer_ids", key, told, "Train the tokenizer anew."))
        if len(counts) > len(tokenizer):
            told = f"The {side} tokenizer has {len(tokenizer):,} tokens, but ids up to {len(counts) - 1:,}: an "
            told += "embedding of its size lacks the last ones."
            findings.append(Finding("error", "tokenizer_ids", key, told, "Fill the holes in its vocabulary."))
        special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "unk_token_id")}
        for name in ("pad_token_id", "unk_token_id"):
            if special[name] is not None and special[name] == special["eos_token_id"]:
                told = f"`{name}` and `eos_token_id` of the {side} tokenizer are both {special[name]}."
                findings.append(Finding("warning", "tokenizer_ids", key, told, "Give each a token of its own."))
    return findings


def check_ends(encoded: Encoded, tokenizers: TokenizerPair, key: str) -> list[Finding]:
    """Look whether every sequence ends in one end token, has no start token, and no control token comes from text."""
    pad, eos = tokenizers.target.pad_token_id, tokenizers.target.eos_token_id
    start = tokenizers.special_ids()["decoder_start_token_id"]
    endless = [row for row, labels in enumerate(encoded.targets) if not len(labels) or labels[-1] != eos]
    started = [row for row, labels in enumerate(encoded.targets) if len(labels) and labels[0] == start != eos]
    control = [
        row
        for row in range(len(encoded))
        if any(
            ((ids[:-1] == pad) | (ids[:-1] == eos)).any() and tokenizer.eos_token_id == eos
            for ids, tokenizer in (
                (encoded.sources[row], tokenizers.source),
                (encoded.targets[row], tokenizers.target),
            )
        )
    ]
    findings = []
    if endless:
        told = f"{len(endless):,} of {len(encoded):,} targets do not end in the end token (id {eos}): the model would "
        told += "not learn to stop."
        advice = "Give the tokenizer a post-processor that appends it."
        findings.append(Finding("error", "ends", key, told, advice, encoded.examples(endless)))
    if started:
        told = (
            f"{len(started):,} of {len(encoded):,} targets begin with the token the decoder starts with (id {start})"
        )
        told += ": the model would learn to write it."
        advice = "Take it out of the tokenizer's post-processor."
        findings.append(Finding("error", "ends", key, told, advice, encoded.examples(started)))
    if control:
        share = len(control) / len(encoded)
        told = f"{len(control):,} of {len(encoded):,} rows have a padding or end token in their middle: a text that "
        told += "holds its name is taken for it."
        advice = "Save the tokenizer with `split_special_tokens=True`, or take the names out of the texts."
        findings.append(Finding(graded(share, 0.001, 0.1), "ends", key, told, advice, encoded.examples(control)))
    return findings


def check_unknown_tokens(encoded: Encoded, tokenizers: TokenizerPair, key: str) -> list[Finding]:
    """Measure how much of each side is unknown to the tokenizer, with the words and pairs."""
    findings = []
    for side, tokenizer, rows in (
        ("source", tokenizers.source, encoded.sources),
        ("target", tokenizers.target, encoded.targets),
    ):
        unknown = tokenizer.unk_token_id
        if unknown is None or not rows:
            continue
        flat = np.concatenate(rows)
        count = int((flat == unknown).sum())
        if not count:
            continue
        found = [row for row, ids in enumerate(rows) if (ids == unknown).any()]
        share = count / len(flat)
        column = encoded.pairs.sources if side == "source" else encoded.pairs.targets
        texts = [column[encoded.places[row]] for row in found[:LOOKED_AT_FOR_UNKNOWN_WORDS]]
        words = unknown_words(tokenizer, texts)
        named = ", such as " + ", ".join(map(shortened, words[: 2 * EXAMPLES])) if words else ""
        findings.append(
            Finding(
                graded(share, 0.005, 0.1),
                "unknown_tokens",
                key,
                f"{count:,} of {len(flat):,} {side} tokens of the {encoded.pairs.name} pairs ({percent(share)}, in "
                f"{len(found):,} of {len(rows):,} rows) are unknown{named}.",
                "The algorithms bpe and unigram know every text; word needs a larger vocabulary or more sentences.",
                encoded.examples(found),
            )
        )
    return findings


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


def check_lengths(encoded: Encoded, limits: tuple[int | None, int | None]) -> list[Finding]:
    """Measure the share of training pairs that are too long for `max_source_tokens` or `max_target_tokens`."""
    findings = []
    lengths = encoded.lengths()
    for side, (name, limit) in enumerate(zip(("source", "target"), limits, strict=True)):
        found = np.flatnonzero(lengths[:, side] > limit) if limit is not None else np.empty(0, int)
        if not len(found):
            continue
        share = len(found) / len(encoded)
        findings.append(
            Finding(
                "error" if share == 1 else graded(share, 0.02, 0.5),
                "lengths",
                f"data.max_{name}_tokens",
                f"{len(found):,} of {len(encoded):,} training rows ({percent(share)}) have more than {limit} {name} "
                f"tokens (up to {lengths[:, side].max():,}) and are dropped.",
                "Raise it, or split the texts into sentences.",
                encoded.examples(found[np.argsort(-lengths[found, side], kind="stable")]),
            )
        )
    return findings


def check_positions(
    train: Encoded, held_out: Sequence[Encoded], config: "PreTrainedConfig", recipe: Recipe
) -> list[Finding]:
    """Find rows that are longer than the model has positions, and lengths of decoding that are.

    Args:
        train: Training rows within the recipe's limits.
        held_out: Rows of validation and test data, which have no limits.
        config: The model's config; sinusoidal and relative positions of Heed models have no limit.
        recipe: The run.
    """
    limit = position_limit(config)
    if limit is None:
        return []
    findings = []
    if recipe.validation.sentences != 0 and recipe.validation.max_new_tokens > limit:
        told = f"The model has {limit} positions, but validation may write {recipe.validation.max_new_tokens} tokens."
        advice = f"Set it to {limit} at most."
        findings.append(Finding("error", "positions", "validation.max_new_tokens", told, advice))
    for encoded in (train, *held_out):
        lengths = encoded.lengths()
        found = np.flatnonzero((lengths > limit).any(axis=1)) if len(encoded) else np.empty(0, int)
        if len(found):
            advice = "Lower `data.max_source_tokens` and `data.max_target_tokens` to it, or give the model more."
            findings.append(
                Finding(
                    "error",
                    "positions",
                    "model" if encoded is train else encoded.pairs.key,
                    f"{len(found):,} of {len(encoded):,} {encoded.pairs.name} rows are longer than the model's "
                    f"{limit} positions (up to {lengths.max():,} tokens): training stops there.",
                    advice if encoded is train else "Shorten or remove these pairs: nothing drops them.",
                    encoded.examples(found[np.argsort(-lengths[found].max(axis=1), kind="stable")]),
                )
            )
    return findings


def check_decoding_lengths(validation: Encoded, recipe: Recipe) -> list[Finding]:
    """Find validation references that are longer than a translation may become."""
    lengths = validation.lengths()[:, 1] if len(validation) else np.empty(0, int)
    # `max_length` counts the decoder's start token too.
    limits = {"decoding.max_length": recipe.decoding.max_length - 1}
    if recipe.validation.sentences != 0:
        limits["validation.max_new_tokens"] = recipe.validation.max_new_tokens
    findings = []
    for key, limit in limits.items():
        found = np.flatnonzero(lengths > limit)
        if not len(found):
            continue
        share = len(found) / len(lengths)
        findings.append(
            Finding(
                graded(share, 0.01, 0.5),
                "decoding_lengths",
                key,
                f"{len(found):,} of {len(lengths):,} validation references ({percent(share)}) need more than {limit} "
                f"new tokens (up to {lengths.max():,}): their translations are cut off.",
                f"Raise it to {int(lengths.max()) + int(key == 'decoding.max_length')} at least.",
                validation.examples(found[np.argsort(-lengths[found], kind="stable")]),
            )
        )
    return findings


def check_vocabulary_use(train: Encoded, tokenizers: TokenizerPair, key: str) -> list[Finding]:
    """Count the types that the training rows show fewer than 1, 2, … 5 times: the model hardly learns them.

    Special tokens and single characters, which every text needs, do not count.
    """
    findings = []
    for side, tokenizer in _sides(tokenizers):
        rows = [*(train.targets if side == "target" else train.sources), *(train.targets if side == "joint" else ())]
        if not rows:
            continue
        seen = np.bincount(np.concatenate(rows), minlength=len(tokenizer))
        types = [
            id_
            for token, id_ in tokenizer.get_vocab().items()
            if id_ not in tokenizer.added_tokens_decoder and len(token.removeprefix("▁")) > 1
        ]
        if not types:
            continue
        fewer = [int((seen[types] < times).sum()) for times in range(1, RARE + 1)]
        share = fewer[-1] / len(types)
        if share < 0.02:
            continue
        enough = len(tokenizer) - fewer[-1]
        counts = ", ".join(f"{count:,} fewer than {times}" for times, count in enumerate(fewer[1:], start=2))
        findings.append(
            Finding(
                graded(share, SHORTER_VOCABULARY) if train.pairs.is_whole else "note",
                "vocabulary_use",
                key,
                f"Of {len(types):,} types of the {side} vocabulary the training rows show {fewer[0]:,} never, "
                f"{counts} times ({percent(share)})."
                + ("" if train.pairs.is_whole else f" (Looked at: the first {train.pairs.looked_at:,} pairs.)"),
                f"About {enough:,} tokens would do for these data." if share >= SHORTER_VOCABULARY else "",
            )
        )
    return findings


def check_normalization(pairs: Pairs, tokenizers: TokenizerPair, key: str) -> list[Finding]:
    """Look whether the tokenizers make more tokens of a decomposed text (NFD) than of the same in NFC.

    Training normalizes to NFC while reading. Texts that a user gives the model are as they are.
    """
    findings = []
    for side, tokenizer in _sides(tokenizers):
        texts = pairs.targets if side == "target" else pairs.sources
        composed = [text for text in texts[:200] if unicodedata.normalize("NFD", text) != text]
        if not composed:
            continue
        counts = [
            sum(map(len, tokenizer([unicodedata.normalize(form, text) for text in composed])["input_ids"]))
            for form in ("NFC", "NFD")
        ]
        if counts[1] > counts[0] and side != "target":
            factor = counts[1] / counts[0]
            told = f"Decomposed text (NFD, as some systems write it) costs {factor:.1f} times the tokens of NFC with "
            told += "this tokenizer. Training reads everything as NFC; whoever uses the model must do so too."
            findings.append(Finding("note", "normalization", key, told, "Add the normalizer NFC to the tokenizer."))
    return findings


def _sides(tokenizers: TokenizerPair) -> "list[tuple[str, PreTrainedTokenizerFast]]":
    if tokenizers.is_joint:
        return [("joint", tokenizers.source)]
    return [("source", tokenizers.source), ("target", tokenizers.target)]


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else list(ids) if isinstance(ids, list) else [ids]
