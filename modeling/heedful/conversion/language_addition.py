"""Add a target language to a multilingual model: a tag, and pieces for badly segmented words.

Texts in old languages contain no new piece, so their ids stay. A piece's row and bias are the means over its old
pieces; the tag's row is a copy of a relative's. A mean is at most its largest part, so greedy output stays the same
before training. Probabilities fall by a factor that depends on the state, so beams may change their order.
"""

import copy
import json
import math
import operator
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from heedful.checksums_heed import TARGET_FOLDER, write_checksums
from heedful.configuration_base_heed import position_limit
from heedful.conversion.model_conversion import Conversion, convert, largest_difference, write_card
from heedful.conversion.tokenizer_conversion import without_special_pieces
from heedful.data.sources import read_pairs, reading, texts_of
from heedful.data.tokenization import LANGUAGE_TAG, TokenizerPair
from heedful.decoding.loading import load_model, model_folder, tokenizer_folder
from heedful.decoding.translation import Translator
from heedful.files import check_at_least, check_is_new, new_folder, read_object, write_text
from heedful.messages_heed import wrong
from heedful.symbols_heed import trimmed
from heedful.training.recipe_file import recipe_of

COMPARED = 100  # old languages' texts, translated before and after
MOST_TOKENS = 100  # greedy output
TOLERANCE = 1e-5  # logits in float32: matrices of other sizes round differently
SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@dataclass(frozen=True)
class NewLanguage:
    """A language to add, and texts to learn its pieces from."""

    name: str  # as `--to` names it, or NLLB's token, such as jej_Hang
    pairs: str  # texts in the language, for `read_pairs`
    column: str = "target"  # column with the texts
    like: str | None = None  # a known language; default: the first, or the checkpoint's
    pieces: int = 500  # most pieces to learn
    old: Sequence[str] = ()  # files of the old languages, in addition to the model's training data

    def __post_init__(self) -> None:
        check_at_least(0, pieces=self.pieces)
        if not LANGUAGE_TAG.fullmatch(f"<2{self.name}>"):
            raise wrong("add_language", "be of letters, digits, '-' and '_'", repr(self.name))


class Piece(NamedTuple):
    """A new vocabulary piece."""

    halves: tuple[str, str]  # may be new
    parts: list[str]  # old pieces
    score: float  # Unigram's score


class _Begun(NamedTuple):
    model: Any
    dtype: torch.dtype  # dtype of the saved weights
    pair: TokenizerPair
    token: str  # the new tag
    relative: str  # the tag whose row it gets
    conversion: Conversion | None  # of the checkpoint, if any


def add_language(
    source: str | Path, target: str | Path, new: NewLanguage, source_language: str | None = None
) -> Conversion:
    """Write a model with one more target language. Before training, its greedy outputs are the same.

    `source` is a Heed model with several target languages, or an NLLB checkpoint, which is converted from
    `source_language` into the relative. It raises the errors of `convert`.
    """
    check_is_new(Path(target))
    texts = [text for pair in read_pairs(new.pairs, new.column, new.column) if (text := trimmed(pair["target"]))]
    if not texts:
        raise ValueError(f"`pairs` must hold texts of the new language, but {new.pairs} has none.")
    begun = _begin(str(source), new, source_language)
    old_words, compared = _read_old(begun, _old_texts(Path(source), new.old))
    backend = begun.pair.source.backend_tokenizer
    words = Counter(word for text in texts for word in _words(backend, text)) if new.pieces else Counter()
    pieces = learn_pieces(backend, words, "\n".join(old_words), new.pieces)
    notes = [f"The token {begun.token} begins as a copy of {begun.relative}."]
    with new_folder(target) as folder:
        begun.pair.save_pretrained(folder)
        first = _grow_tokenizers(folder, begun, pieces)
        grown = TokenizerPair.from_pretrained(folder)
        if pieces:
            after = grown.source.backend_tokenizer
            assert all(_ids(backend, word) == _ids(after, word) for word in old_words)
            lengths = (sum(n * len(_ids(each, word)) for word, n in words.items()) for each in (after, backend))
            mean, mean_before = (length / len(texts) for length in lengths)
            what = f"texts in the language have {mean:.1f} tokens on average instead of {mean_before:.1f}"
            notes.append(f"{len(pieces)} new pieces begin as means of their parts: {what}.")
        larger = _grown_model(begun, len(grown.source), first, pieces)
        grown.check_config(larger.config)
        difference, same = _compare(begun, larger, grown, compared, first)
        why = "probabilities are smaller, because the softmax has more terms, and beams may change their order"
        kept = f"{len(compared)} old texts have the same greedy output as before"
        notes.append(f"{kept}, and {same} of them also with the model's own settings: {why}.")
        if begun.conversion is not None:
            larger.generation_config.forced_bos_token_id = first
        torch.nn.Module.to(larger, begun.dtype).save_pretrained(folder)
        base = begun.conversion or Conversion(str(source), Path(target), "heed", 0, 0.0)
        facts: dict[str, Any] = {"parameters": larger.num_parameters(), "difference": difference, "added": new.name}
        conversion = replace(base, folder=Path(target), notes=(*base.notes, *notes), **facts)
        write_card(folder, conversion)
    return conversion


def learn_pieces(backend: Any, words: Mapping[str, int], old: str, most: int) -> dict[str, Piece]:
    """Continue BPE (Sennrich et al., 2016) on counted words: the commonest neighbours become a piece, in order.

    Ties are broken by the strings; pairs that occur once are skipped. A piece must not occur in the text `old`, and
    must not repeat a single piece, because it would get that row. A Unigram piece scores the logarithm of its share in
    the tokens, and must score more than its parts together, so that Unigram chooses it.
    """
    state = json.loads(backend.to_str())["model"]
    scores = dict(state["vocab"]) if state["type"] == "Unigram" else None
    known, pieces = backend.get_vocab(), dict[str, Piece]()
    cuts = [(cut, count) for word, count in words.items() for cut in _mergeable(backend, known, word)]
    total = sum(len(cut) * count for cut, count in cuts)
    counts: Counter[tuple[str, str]] = Counter()
    places: dict[tuple[str, str], set[int]] = defaultdict(set)
    for number, (cut, count) in enumerate(cuts):
        for two in pairwise(cut):
            counts[two] += count
            places[two].add(number)
    heap = [(-count, two) for two, count in counts.items()]
    heapify(heap)
    while heap and len(pieces) < most:
        seen, two = heappop(heap)
        if seen != -counts[two] or seen > -2:  # counted again since, or once
            continue
        piece, score = "".join(two), math.log(counts[two] / total)
        parts = [part for half in two for part in (pieces[half].parts if half in pieces else [half])]
        is_chosen = scores is None or score > sum(scores[part] for part in parts)
        if piece in known or piece in pieces or piece in old or len({*parts}) < 2 or not is_chosen:
            continue
        pieces[piece] = Piece(two, parts, score)
        touched = set()
        for number in places.pop(two):
            before, count = cuts[number]
            after = _merged(before, two)
            cuts[number] = after, count
            for sign, cut in ((-count, before), (count, after)):
                for each in pairwise(cut):
                    counts[each] += sign
                    places[each].add(number)
                    touched.add(each)
        for each in touched:
            heappush(heap, (-counts[each], each))
    return pieces


def _mergeable(backend: Any, vocabulary: Mapping[str, int], word: str) -> Iterator[list[str]]:
    """Yield runs of pieces that spell a word, without bytes and unknown pieces."""
    run: list[str] = []
    for token in backend.model.tokenize(word):
        if token.value in word and vocabulary.get(token.value) == token.id:
            run.append(token.value)
        else:
            yield run
            run = []
    yield run


def _merged(cut: list[str], two: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for each in cut:
        if merged and (merged[-1], each) == two:
            merged[-1] += each
        else:
            merged.append(each)
    return merged


def _words(backend: Any, text: str) -> list[str]:
    """Return the text parts that may hold pieces, in the pieces' spelling."""
    text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    parts = [(text, ())] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
    return [word for word, _ in parts]


def _ids(backend: Any, word: str) -> list[int]:
    return [token.id for token in backend.model.tokenize(word)]


def _begin(source: str, new: NewLanguage, source_language: str | None) -> _Begun:
    kind = read_object(model_folder(source) / "config.json").get("model_type")
    if kind not in ("heed", "m2m_100"):
        raise wrong("model_type", "be heed or m2m_100 (NLLB) for `add_language`", kind)
    with tempfile.TemporaryDirectory() as work:
        folder, conversion = model_folder(source), None
        if kind == "m2m_100":
            folder = Path(work) / "heed"
            try:
                conversion = convert(source, folder, source_language, new.like)
            except ValueError as error:
                raise ValueError(str(error).replace("`target_language`", "`like`")) from error
        elif source_language is not None:
            raise wrong("source_language", "be None for a Heed model", repr(source_language))
        model: Any = load_model(folder)
        dtype = model.dtype
        pair = TokenizerPair.from_pretrained(tokenizer_folder(folder))
    if conversion is not None:
        token, relative = new.name, pair.target.convert_ids_to_tokens(model.generation_config.forced_bos_token_id)
    elif len(pair.languages) < 2:
        must = "have several target languages in its recipe to learn one more"
        raise ValueError(f"The model in {source} must {must}, but it has no tags `<2xx>`.")
    else:
        token, relative = f"<2{new.name}>", f"<2{new.like or pair.languages[0]}>"
        if relative not in pair.source.added_tokens_encoder:
            raise wrong("like", f"be one of {', '.join(pair.languages)}", repr(new.like))
    pair.check_is_fast("`add_language`")
    if token in pair.source.get_vocab():
        raise ValueError(f"`add_language` must be a new language, but the model has {token} already.")
    if not model.config.share_encoder_decoder_embeddings:
        raise wrong("share_encoder_decoder_embeddings", "be True for `add_language`", False)
    _check_can_grow(json.loads(pair.source.backend_tokenizer.to_str()), new.pieces)
    return _Begun(model.float(), dtype, pair, token, str(relative), conversion)


def _check_can_grow(state: dict[str, Any], pieces: int) -> None:
    model, kind = state["model"], state["model"]["type"]
    if kind == "BPE":
        kind += " without merges" * (not model["merges"])
        kind += " with word markers" * bool(model["continuing_subword_prefix"] or model["end_of_word_suffix"])
    if kind not in ("BPE", "Unigram") and (pieces or kind[:3] not in ("BPE", "Wor")):
        must = "BPE or Unigram to get new pieces (`pieces` of 0 adds only a tag)"
        raise ValueError(f"The tokenizer must be {must}, but is {kind} instead.")


def _old_texts(source: Path, old: Sequence[str]) -> Iterator[str]:
    for place in old:
        with reading("old"):
            yield from texts_of(place)
    if not (source / "recipe.yaml").is_file():
        return
    for key, part in recipe_of(source).data.parts.items():
        try:
            for pair in read_pairs(part.train, str(part.source), str(part.target), streaming=True):
                yield from (pair["source"], pair["target"])
        except (OSError, ValueError) as error:
            if not old:
                found = str(error).replace("`location`", f"`{key}` of the model's recipe")
                raise ValueError(f"`old` must name the model's training data, because {found}") from error


def _read_old(begun: _Begun, texts: Iterable[str]) -> tuple[set[str], list[str]]:
    """Return the old texts' words, and the first texts that fit the model."""
    backend, limit = begun.pair.source.backend_tokenizer, position_limit(begun.model.config) or math.inf
    words: set[str] = set()
    compared: dict[str, None] = {}
    for text in texts:
        short = trimmed(text)
        words.update(*(_words(backend, each) for each in {text, short}))  # only sources are trimmed
        if short and len(compared) < COMPARED and len(begun.pair.source(short)["input_ids"]) < limit:
            compared[short] = None
    if not compared:
        raise ValueError("`old` must name texts in the old languages, but there are none.")
    return words, list(compared)


def _grow_tokenizers(folder: Path, begun: _Begun, pieces: Mapping[str, Piece]) -> int:
    """Add the tag and then the pieces to the saved tokenizers, and return the tag's id."""
    first = 0
    for place in (folder,) if begun.pair.is_joint else (folder, folder / TARGET_FOLDER):
        state = read_object(place / "tokenizer.json")
        model, added, cut = state["model"], state["added_tokens"], state["pre_tokenizer"]
        # Added tokens join the vocabulary, so that the next ids follow them.
        if model["type"] == "Unigram":
            special = [each["content"] for each in added if each["id"] >= len(model["vocab"])] + [begun.token]
            model["vocab"] += [[token, 0.0] for token in special]
            first = len(model["vocab"]) - 1
            model["vocab"] += [[piece, each.score] for piece, each in pieces.items()]
            if cut is None or cut["type"] != "ByteLevel":  # it would split a token's text
                state["pre_tokenizer"] = without_special_pieces(cut, special)
        else:
            model["vocab"] |= {each["content"]: each["id"] for each in added}
            first = len(model["vocab"])
            model["vocab"] |= {token: id_ for id_, token in enumerate([begun.token, *pieces], start=first)}
            model.get("merges", []).extend(list(each.halves) for each in pieces.values())
        added.append({"id": first, "content": begun.token, **SPECIAL})
        if begun.conversion is not None and place != folder:  # each target begins with its language
            written = json.dumps(state["post_processor"]).replace(json.dumps(begun.relative), json.dumps(begun.token))
            state["post_processor"] = json.loads(written)
            state["post_processor"]["special_tokens"][begun.token]["ids"] = [first]
        write_text(place / "tokenizer.json", json.dumps(state, ensure_ascii=False))
    write_checksums(folder, "tokenizer")
    return first


@torch.no_grad()
def _grown_model(begun: _Begun, size: int, first: int, pieces: Mapping[str, Piece]) -> Any:
    larger, ids = copy.deepcopy(begun.model), begun.pair.source.get_vocab()
    larger.resize_token_embeddings(size, mean_resizing=False)
    rows = [[ids[begun.relative]], *([ids[part] for part in each.parts] for each in pieces.values())]
    weights = larger.state_dict()
    for name, old in begun.model.state_dict().items():
        if weights[name].shape != old.shape:
            for id_, row in enumerate(rows, start=first):
                weights[name][id_] = old[row].mean(0).to(begun.dtype)
        assert torch.equal(weights[name][: len(old)], old), name
    return larger


def _outputs(model: Any, pair: TokenizerPair, texts: list[str], languages: Sequence[Any], settings: Any) -> list[Any]:
    """Return the texts' translations as tokens, into each language in turn, without sampling."""
    own, found = model.generation_config, list[Any](texts)
    model.generation_config = copy.deepcopy(settings)
    model.generation_config.do_sample = False
    with warnings.catch_warnings(action="ignore"):  # outputs that are cut off
        for number, language in enumerate(languages):
            rows = Translator(model, pair).translate(texts[number :: len(languages)], target_language=language)
            found[number :: len(languages)] = [best.token_ids for best, *_ in rows]
    model.generation_config = own
    return found


def _compare(begun: _Begun, larger: Any, grown: TokenizerPair, texts: list[str], first: int) -> tuple[float, int]:
    """Return the largest logit difference and the number of equal outputs; greedy ones must be equal."""
    difference = largest_difference(begun.model, larger, first)
    if not difference <= TOLERANCE:
        raise ValueError(f"The larger model's logits differ by {difference:.1e}, so no folder is written.")
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")
    own, languages = begun.model.generation_config, begun.pair.languages or (None,)
    # Without settings that forbid tokens, because a new one might become the best.
    plain = GenerationConfig(**{name: getattr(own, name) for name in names}, max_new_tokens=MOST_TOKENS)
    models = (begun.model, begun.pair), (larger, grown)
    greedy, by_own = ([_outputs(*each, texts, languages, search) for each in models] for search in (plain, own))
    if differences := [row for row in zip(texts, *greedy, strict=True) if row[1] != row[2]]:
        text, expected, new = differences[0]
        what = f"{len(differences)} of {len(texts)} old texts, so no folder is written"
        raise ValueError(f"The greedy output differs for {what}. The first is {text!r}: {expected}, now {new}.")
    return difference, sum(map(operator.eq, *by_own))
