"""Cut a vocabulary to the tokens that given texts need: the texts keep these tokens, and the tokens their logits.

Every source becomes a Heed model first, so one way fits all families. Fewer pieces only remove ways to cut a text.
Unigram's best way stays if its pieces stay. BPE merges shorter pieces first, so those within its pieces stay too.
"""

import json
import re
import tempfile
import timeit
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel

from heedful.checksums_heed import TARGET_FOLDER, write_checksums
from heedful.conversion.families import EMBEDDINGS
from heedful.conversion.model_conversion import Conversion, convert, relative_difference, write_card
from heedful.data.sources import ROWS_PER_CHUNK, reading, texts_of
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.loading import load_model, model_folder
from heedful.decoding.search_settings import ID_SETTING
from heedful.files import import_extra, new_folder, read_object, write_text
from heedful.symbols_heed import trimmed

KINDS = {"BPE": True, "M2M100Tokenizer": True, "Unigram": False, "MarianTokenizer": False}  # whether they merge pieces
FIXED = re.compile(r"<0x[0-9A-F]{2}>|>>.+<<|▁?<extra_id_\d+>")  # bytes, languages of Marian, gaps of T5
BIAS, IDS = "sequence_bias", re.compile(r"(?<![\d.+-])\d+(?![\d.e])")  # ids in JSON, without a bias' floats
COMPARED, MOST_TOKENS = 10, 12  # texts with compared logits, and tokens in these
TOLERANCE = 1e-5  # for logits in float32, because larger matrices round differently


def cut_vocabulary(
    source: str, target: Path, keep_tokens_of: list[str], keep: int | None, languages: tuple[str | None, str | None]
) -> Conversion:
    """Write a model with the tokens of some files' texts, special tokens, languages, bytes and Latin letters.

    `source` is a Heed model, or a checkpoint, which is converted first. `keep` is the most tokens in a vocabulary: the
    texts' most frequent ones, then others by id. By default only the texts' ones stay. It raises the errors of
    `convert`, and a `ValueError` for no texts, a small `keep`, other `KINDS`, and a token or logit that would change.
    """
    with tempfile.TemporaryDirectory() as work, new_folder(target) as folder:
        with reading("keep_tokens_of"):
            texts = list(dict.fromkeys(filter(None, map(trimmed, chain.from_iterable(map(texts_of, keep_tokens_of))))))
        if not texts:
            raise ValueError(f"`keep_tokens_of` must hold texts, but {', '.join(keep_tokens_of)} has none.")
        place, base = model_folder(source), Conversion(source, target, "heed", 0, 0.0)
        if read_object(place / "config.json").get("model_type") != "heed":
            place, base = Path(work) / "heed", convert(source, Path(work) / "heed", *languages)
        elif languages != (None, None):
            raise ValueError("`source_language` and `target_language` must be left out for a Heed model.")
        model: Any = load_model(place)
        before, pair, dtype = _figures(model, place), TokenizerPair.from_pretrained(place), model.dtype
        rows = _cut_tokenizers(folder, pair, model.float(), texts, keep)
        after = TokenizerPair.from_pretrained(folder)
        smaller = _smaller_model(model, after, rows)
        same, difference = _compare(rows, (model, smaller), (pair, after), texts)
        torch.nn.Module.to(smaller, dtype).save_pretrained(folder)
        notes = [f"{name}: {before[name]:,} before, {now:,} after." for name, now in _figures(smaller, folder).items()]
        notes += [f"{same:,} of {len(texts):,} texts keep all their tokens."]
        facts: dict[str, Any] = {"folder": target, "notes": (*base.notes, *notes), "tokens": len(rows[1])}
        facts |= {"parameters": smaller.num_parameters(), "difference": max(base.difference, difference)}
        write_card(folder, conversion := replace(base, **facts))
    return conversion


def _ids_of(pair: TokenizerPair, texts: Sequence[str]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each text's ids as a source, with the first target language, and as a target."""
    for first in range(0, len(texts), ROWS_PER_CHUNK):
        some = texts[first : first + ROWS_PER_CHUNK]
        yield from zip(pair.encode_source(some, *pair.languages[:1]), pair.encode_target(some), strict=True)


def _cut_tokenizers(folder: Path, pair: Any, model: Any, texts: Sequence[str], most: int | None) -> Any:
    """Write smaller tokenizers, and return the new ids by old ones on the source and target side."""
    pair.save_pretrained(folder)
    counts = Counter[int](), Counter[int]()
    for both in _ids_of(pair, texts):
        for count, ids in zip(counts, both, strict=True):
            count.update(ids)
    named = map(int, IDS.findall(_settings_with_ids(model)))
    always = {*pair.target.convert_ids_to_tokens([*named]), *ByteLevel.alphabet(), *"".join(texts)}
    if pair.is_joint or model.config.has_one_vocabulary:
        rows = [_new_ids(pair.source, counts[0] + counts[1], always, most)] * 2
    else:
        rows = [_new_ids(pair.source, counts[0], always, most), _new_ids(pair.target, counts[1], always, most)]
    for place, tokenizer, new in zip((folder, folder / TARGET_FOLDER), (pair.source, pair.target), rows, strict=True):
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        for path in place.glob("*.*"):
            _rewrite(path, {*tokens}, {tokens[row]: id_ for row, id_ in new.items()})
    write_checksums(folder, "tokenizer")
    return rows


def _settings_with_ids(model: Any) -> str:
    settings = model.generation_config.to_dict().items()
    return json.dumps({name: value for name, value in settings if name == BIAS or ID_SETTING.fullmatch(name)})


def _new_ids(tokenizer: Any, counts: Counter[int], always: set[str], most: int | None) -> dict[int, int]:
    """Return the new ids of the tokens that stay by their old ones, given counts in the texts."""
    kind = type(tokenizer.backend_tokenizer.model if tokenizer.is_fast else tokenizer).__name__
    if kind not in KINDS:
        raise ValueError(f"The tokenizer must be one of {', '.join(KINDS)}, but is {kind} instead.")
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    vocabulary = {*tokens}
    kept = {*filter(FIXED.fullmatch, tokens), *tokenizer.all_special_tokens, *tokenizer.added_tokens_encoder}
    used = [tokens[id_] for id_, _ in counts.most_common() if tokens[id_] not in kept]
    kept = {*kept, *always, *"".join(used)} & vocabulary
    if most is not None and most < len(kept):
        raise ValueError(f"`keep` must be at least {len(kept)} for special tokens and letters, but is {most} instead.")
    for token in (*used, *(tokens if most else ())):
        spans = combinations(range(len(token) + 1), 2) if KINDS[kind] else [(0, len(token))]
        more = ({token[first:last] for first, last in spans} & vocabulary) - kept
        if most is None or len(kept) + len(more) <= most:
            kept |= more
    # Padding needs the same id in two vocabularies. In Marian's it comes last, so it moves to the start.
    first = () if tokenizer.is_fast else (tokenizer.pad_token_id, tokenizer.eos_token_id)
    old = sorted((id_ for id_, token in enumerate(tokens) if token in kept), key=lambda id_: (id_ not in first, id_))
    return {row: id_ for id_, row in enumerate(old)}


def _rewrite(path: Path, tokens: set[str], ids: dict[str, int]) -> None:
    """Rewrite a tokenizer file with the new ids, and without the tokens that have none."""
    if path.suffix != ".json":
        state = import_extra("sentencepiece.sentencepiece_model_pb2", "convert").ModelProto()
        state.ParseFromString(path.read_bytes())
        pieces = [piece for piece in state.pieces if piece.piece in ids or piece.piece not in tokens]
        del state.pieces[:]
        state.pieces.extend(pieces)
        state.DiscardUnknownFields()  # self-tests with old pieces
        path.write_bytes(state.SerializeToString())
        return
    state = read_object(path)
    if path.name in ("vocab.json", "added_tokens.json"):
        state = {token: ids[token] for token in state if token in ids}
    elif path.name == "tokenizer.json":
        model, vocabulary = state["model"], state["model"]["vocab"]
        if model["type"] == "BPE":
            model["vocab"] = {token: ids[token] for token in vocabulary if token in ids}
            model["merges"] = [two for two in model["merges"] if {*two, "".join(two)} <= ids.keys()]
        else:
            model["vocab"] = [row for row in vocabulary if row[0] in ids]
            model["unk_id"] = None if model["unk_id"] is None else ids[vocabulary[model["unk_id"]][0]]
        state["added_tokens"] = [each | {"id": ids[each["content"]]} for each in state["added_tokens"]]
        for each in (state["post_processor"] or {}).get("special_tokens", {}).values():
            each["ids"] = [ids[token] for token in each["tokens"]]
    elif added := state.get("added_tokens_decoder"):
        state["added_tokens_decoder"] = {ids[each["content"]]: each for each in added.values()}
    write_text(path, json.dumps(state, ensure_ascii=False, indent=2))


def _smaller_model(model: Any, pair: TokenizerPair, rows: Any) -> Any:
    """Return a model with the kept rows of the embeddings, and the same other weights."""
    weights, settings = model.state_dict(), model.generation_config.to_dict()
    for name in weights.keys() & {*EMBEDDINGS, "lm_head.bias"}:
        weights[name] = weights[name][[*rows[0 if name == EMBEDDINGS[0] else 1]]]
    config = type(model.config)(**model.config.to_dict() | pair.vocabularies())
    smaller = type(model).from_pretrained(None, config=config, state_dict=weights, dtype=model.dtype)
    renumbered = json.loads(IDS.sub(lambda found: str(rows[1][int(found[0])]), _settings_with_ids(model)))
    smaller.generation_config = type(model.generation_config).from_dict(settings | renumbered)
    return smaller


@torch.no_grad()
def _compare(rows: Any, models: Any, pairs: Any, texts: Sequence[str]) -> tuple[int, float]:
    """Count the texts that keep all their tokens, and return the largest logit difference in the first texts."""
    same, largest = 0, 0.0
    for number, (text, before, after) in enumerate(zip(texts, *(_ids_of(pair, texts) for pair in pairs), strict=True)):
        kept = [[id_ for id_ in row if id_ in ids] for row, ids in zip(before, rows, strict=True)]
        expected = [[ids[id_] for id_ in row] for row, ids in zip(kept, rows, strict=True)]
        if number < COMPARED:
            inputs = ([torch.tensor([row[:MOST_TOKENS]]) for row in both] for both in (kept, expected))
            old, new = (model(each[0], decoder_input_ids=each[1]) for model, each in zip(models, inputs, strict=True))
            largest = max(relative_difference(old.logits[..., [*rows[1]]], new.logits), largest)
        is_same = kept == [*before]
        if (is_same and expected != [*after]) or not largest <= TOLERANCE:  # also not-a-number
            raise ValueError(f"The tokens or logits of {text!r} would differ, the latter by {largest:.1e}.")
        same += is_same
    return same, largest


@torch.no_grad()
def _figures(model: Any, folder: Path) -> dict[str, float]:
    """Return sizes, and the shortest time for a decoding step."""
    start = torch.tensor([[model.config.decoder_start_token_id]])
    encoded = model.get_encoder()(start)
    times = timeit.repeat(lambda: model(encoder_outputs=encoded, decoder_input_ids=start), number=1, repeat=20)
    files = [*folder.glob("*.*"), *folder.glob(f"{TARGET_FOLDER}/*")]
    return {
        "Source tokens": model.config.vocab_size,
        "Target tokens": model.config.target_vocab_size,
        "MB on disk": round(sum(path.stat().st_size for path in files) / 1e6, 1),
        "MB in memory": round(model.get_memory_footprint() / 1e6, 1),
        "Milliseconds for a decoding step": round(1000 * min(times), 1),
    }
