"""Checks on tokenizers, the pairs' tokens, and the special ids in the model's config."""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from heedful.checking.findings import EXAMPLES, RecipeFinding, RowCheck, graded, percent
from heedful.checking.pairs import Pairs
from heedful.data.epochs.encoding import EncodedPairs
from heedful.data.labels import FALLBACK_BYTE
from heedful.data.sources import sample
from heedful.data.tokenization import TokenizerPair, encode_texts
from heedful.messages_heed import shortened
from heedful.verification.samples import id_set

RARE = 5  # types with fewer occurrences are hardly learnt
LOOKED_AT_FOR_UNKNOWN_WORDS = 200  # pairs
SHORTER_VOCABULARY = 0.4  # share of rare types at which a vocabulary is too large

OF_TOKENS = "{unknown:,} of {tokens:,} {side} tokens of the {split} pairs ({share}, in {count} of {total} rows) are "
ADVICE = "All algorithms except word can encode any text. Word needs a larger vocabulary or more sentences."
UNKNOWN = RowCheck("unknown_tokens", OF_TOKENS + "unknown{words}.", ADVICE, warning=0.005, error=0.1)


def check_special_ids(config: Any, generation_config: Any, key: str) -> Iterator[RecipeFinding]:
    """Compare special ids in config and generation config."""

    def problem(message: str, advice: str, level: Any = "error") -> RecipeFinding:
        return RecipeFinding("special_ids", level, message, key, advice)

    ours, theirs = config.eos_token_id, generation_config.eos_token_id
    if id_set(ours) - id_set(theirs):
        message = f"The generation config's `eos_token_id` is {theirs}, without the config's {ours}: sentences would "
        yield problem(message + "never end.", f"Set `eos_token_id` to {ours} in generation_config.json.")
    for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
        ours, theirs = getattr(config, name, None), getattr(generation_config, name, None)
        if None not in (ours, theirs) and ours != theirs:
            message = f"`{name}` is {ours} in the config and {theirs} in the generation config."
            level = "error" if name == "decoder_start_token_id" else "warning"
            yield problem(message, f"Set it to {ours} in generation_config.json.", level)
    if generation_config.decoder_start_token_id is None and generation_config.bos_token_id is None:
        yield problem("The generation config has no `decoder_start_token_id`: generation cannot start.", "Add it.")


def check_tokenizer_ids(tokenizers: TokenizerPair, key: str) -> Iterator[RecipeFinding]:
    """Find ids with two tokens, ids beyond a tokenizer's size, and equal special ids."""
    for side, tokenizer in _sides(tokenizers):
        vocabulary = tokenizer.get_vocab()
        counts = np.bincount(np.fromiter(vocabulary.values(), dtype=np.int64))
        doubled = np.flatnonzero(counts > 1)
        if len(doubled):
            names = " and ".join(repr(token) for token, id_ in vocabulary.items() if id_ == doubled[0])
            message = f"{len(doubled):,} ids of the {side} tokenizer belong to several tokens, such as {doubled[0]} "
            yield RecipeFinding("tokenizer_ids", "warning", f"{message}to {names}.", key, "Train the tokenizer again.")
        if len(counts) > len(tokenizer):
            message = f"The {side} tokenizer has {len(tokenizer):,} tokens, but ids up to {len(counts) - 1:,}: an "
            message += "embedding matrix with this size lacks the last ids."
            yield RecipeFinding("tokenizer_ids", "error", message, key, "Fill the holes in its vocabulary.")
        for name in ("pad_token_id", "unk_token_id"):
            if getattr(tokenizer, name) is not None and getattr(tokenizer, name) == tokenizer.eos_token_id:
                message = f"`{name}` and `eos_token_id` of the {side} tokenizer are both {tokenizer.eos_token_id}."
                yield RecipeFinding("tokenizer_ids", "warning", message, key, "Give each a separate token.")


def check_unknown_tokens(pairs: Pairs, tokenizers: TokenizerPair, key: str) -> Iterator[RecipeFinding]:
    """Measure each side's share of unknown tokens."""
    for side, name, texts in (("source", "text", pairs.sources), ("target", "text_target", pairs.targets)):
        tokenizer = getattr(tokenizers, side)
        if tokenizer.unk_token_id is None:
            continue
        rows = encode_texts(tokenizer, name, texts)
        counts = [ids.count(tokenizer.unk_token_id) for ids in rows]
        found, tokens = [number for number, count in enumerate(counts) if count], sum(map(len, rows))
        some = [texts[number] for number in sample(found, LOOKED_AT_FOR_UNKNOWN_WORDS)]
        words = ", ".join(map(shortened, unknown_words(tokenizer, some)[: 2 * EXAMPLES]))
        fields: Any = {"side": side, "tokens": tokens, "unknown": sum(counts), "share": sum(counts) / max(1, tokens)}
        yield from UNKNOWN.findings(pairs, found, key, words=f", such as {words}" if words else "", **fields)


def unknown_words(tokenizer: Any, texts: Sequence[str]) -> list[str]:
    """List the words, or parts of words, that the tokenizer lacks, the most frequent first."""
    if not tokenizer.is_fast:  # without offsets
        return []
    counts: Counter[str] = Counter()
    for text in texts:
        encoded = tokenizer(text, return_offsets_mapping=True, truncation=False, verbose=False)
        places = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        counts.update(text[start:end].strip() for id_, (start, end) in places if id_ == tokenizer.unk_token_id)
    return [word for word, _ in counts.most_common() if word]


def check_vocabulary_use(
    rows: EncodedPairs, tokenizers: TokenizerPair, key: str, looked_at: int | None = None
) -> Iterator[RecipeFinding]:
    """Count the types that never occur, or fewer than 5 times, in `looked_at` pairs (None: all pairs)."""
    seen_on = {"source": [rows.sources], "target": [rows.targets], "joint": [rows.sources, rows.targets]}
    for side, tokenizer in _sides(tokenizers):
        known, added = tokenizer.get_vocab().items(), tokenizer.added_tokens_decoder
        seen = np.bincount(np.concatenate(seen_on[side]), minlength=len(tokenizer))
        used = {token for token, id_ in known if seen[id_] >= RARE}
        state = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {}}
        for left, right in reversed(state["model"].get("merges") or ()):  # byte pairs
            used |= {left, right} if left + right in used else set()
        # No special tokens, and no single characters, which every text needs.
        of_several = ((token, id_, FALLBACK_BYTE.sub("", token).lstrip("▁ ")) for token, id_ in known)
        types = [(token, id_) for token, id_, text in of_several if len(text) > 1 and id_ not in added]
        unused = [int(seen[id_]) for token, id_ in types if token not in used]
        never, rare = unused.count(0), len(unused)
        share = rare / max(1, len(types))
        if share < 0.02:
            continue
        message = f"{never:,} of {len(types):,} entries of the {side} vocabulary never occur in training; "
        message += f"{rare:,} ({percent(share)}) occur fewer than {RARE} times (parts of other entries not counted)."
        message += "" if looked_at is None else f" (Checked: {looked_at:,} pairs.)"
        enough = f"About {len(tokenizer) - rare:,} tokens would be enough for these data."
        level = graded(share, SHORTER_VOCABULARY) if looked_at is None else "note"
        yield RecipeFinding("vocabulary_use", level, message, key, enough if share >= SHORTER_VOCABULARY else "")


def check_normalization(pairs: Pairs, tokenizers: TokenizerPair, key: str) -> Iterator[RecipeFinding]:
    """Find source tokenizers that split decomposed text (NFD) into more tokens than composed text (NFC)."""
    texts = [text for text in sample(pairs.sources, 200) if not unicodedata.is_normalized("NFD", text)]
    forms = ([unicodedata.normalize(form, text) for text in texts] for form in ("NFC", "NFD"))
    composed, decomposed = (sum(map(len, encode_texts(tokenizers.source, "text", form))) for form in forms)
    if decomposed > composed:
        message = f"Decomposed text (NFD, as some systems write it) costs {decomposed / composed:.1f} times the "
        message += "tokens of NFC here. Training converts all texts to NFC: whatever uses the model must convert too."
        yield RecipeFinding("normalization", "note", message, key, "Add the normalizer NFC to the tokenizer.")


def _sides(tokenizers: TokenizerPair) -> list[tuple[str, Any]]:
    sides = [("source", tokenizers.source), ("target", tokenizers.target)]
    return [("joint", tokenizers.source)] if tokenizers.is_joint else sides
