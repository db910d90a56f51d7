"""Convert tokenizers into a `TokenizerPair` that gives the same ids for the same text.

Tokenizers of the `tokenizers` library become plain `PreTrainedTokenizerFast` files; others (Marian's, M2M100's,
ByT5's) stay. Four things change: the decoder's start token is called `bos_token`; each embedding row without a token
gets one that no text can contain; special tokens in a sentence are text, except gaps (T5's `<extra_id_0>`); MADLAD's
words `<2xx>` become tags of the `TokenizerPair`.
"""

import json
import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from heedful.checksums_heed import has_tokenizer
from heedful.configuration_heed import HeedConfig
from heedful.data.tokenization import GAP, LANGUAGE_TAG, TokenizerPair, encode_texts, options_inside, tokenizing
from heedful.messages_heed import wrong

# In these, the decoder's start token is the target language; in others, the token after it.
LANGUAGE_IN_START = ("MBartTokenizer", "MBartTokenizerFast")
TEXTS = (  # to compare, with random vocabulary tokens
    "",
    "Good morning!",
    "The committee agreed that prices would rise by 4.5 % (or €12.80) a year.",
    "  two  spaces,\ta tab, x² ≤ ½ and ﬁve ﬂags  ",
    "Größere Straßen führen über Köln nach Brüssel; „ça va“, dit-elle.",
    "안녕하세요, 오늘은 날씨가 참 좋네요.",
    "В лесу родилась ёлочка.",
    "我们明天上午九点开会。",
    "कल 🙂 كيف حالك",
)
RANDOM_TEXTS = 200


class ConvertedTokenizers(NamedTuple):
    """A converted checkpoint's tokenizers."""

    pair: TokenizerPair | None
    settings: dict[str, Any]  # for the generation config
    notes: tuple[str, ...]  # one sentence each, for users
    languages: tuple[str, ...] = ()  # source and target, if the tokenizer has them


def convert_tokenizers(
    source: str, config: HeedConfig, source_language: str | None = None, target_language: str | None = None
) -> ConvertedTokenizers:
    """Return a checkpoint's tokenizers, and put their special ids and the language's start token into the config."""
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        if source_language or target_language:
            raise ValueError(f"`target_language` needs a tokenizer, but {source} has none.")
        return ConvertedTokenizers(None, {}, ("The source has no tokenizer, so the new folder has none.",))
    settings = _choose_languages(tokenizer, config, source_language, target_language)
    start = config.decoder_start_token_id
    bos = None if start == tokenizer.pad_token_id else tokenizer.convert_ids_to_tokens(start)
    notes: tuple[str, ...] = ()
    pair = _fast_pair(tokenizer, config, bos) if isinstance(tokenizer, PreTrainedTokenizerFast) else None
    if pair is None:
        pair = _kept_pair(tokenizer, config, bos)
        notes = (f"The tokenizer stays a {type(tokenizer).__name__}: no plain fast tokenizer gives the same ids.",)
    config.bos_token_id = pair.special_ids()["bos_token_id"]
    pair.check_config(config)
    sides = {"source": ("text", config.vocab_size), "target": ("text_target", config.target_vocab_size)}
    for side, (name, size) in sides.items():
        ids = [id_ for row in encode_texts(getattr(pair, side), name, TEXTS) for id_ in row]
        if others := [id_ for id_ in ids if type(id_) is not int or not 0 <= id_ < size]:
            raise ValueError(f"The {side}'s tokenizer must give ids from 0 to {size - 1}, but gives {others[0]!r}.")
    languages = (tokenizer.src_lang, tokenizer.tgt_lang) if settings else ()
    return ConvertedTokenizers(pair, settings, notes, languages)


def load_tokenizer(source: str) -> Any:
    """Load a checkpoint's tokenizer without running its code, or return None if it has none."""
    if Path(source).is_dir() and not has_tokenizer(source):
        return None
    try:
        with tokenizing("be loaded"):
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options_inside(source))
    except ImportError as error:
        raise ImportError(f"The tokenizer in {source} needs sentencepiece: pip install 'heedful[convert]'.") from error


def _choose_languages(
    tokenizer: Any, config: HeedConfig, source_language: str | None, target_language: str | None
) -> dict[str, Any]:
    chosen = {"source_language": source_language, "target_language": target_language}
    if not hasattr(tokenizer, "src_lang"):
        for name, language in chosen.items():
            if language is not None:
                raise wrong(name, f"be None for a {type(tokenizer).__name__}, without languages", repr(language))
        return {}
    source = source_language or tokenizer.src_lang
    target = target_language or tokenizer.tgt_lang
    tokens = getattr(tokenizer, "lang_code_to_token", None)  # M2M100's "en" is `__en__`
    if tokens is None:
        special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        tokens = {token: token for token in special if re.fullmatch(r"[a-z]{2,3}_[A-Za-z]{2,4}", token)}
    for name, language in zip(chosen, (source, target), strict=True):
        if language not in tokens:
            why = "the tokenizer adds a language to each sentence, and a converted folder has one direction"
            raise wrong(name, f"be one of {', '.join(sorted(tokens))}", repr(language), advice=why)
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    language_id = tokenizer.convert_tokens_to_ids(tokens[target])
    if language_id >= config.vocab_size:
        must = f"below `vocab_size`, {config.vocab_size}"
        raise ValueError(f"The tokenizer's id of {target} must be {must}, but is {language_id} instead.")
    if type(tokenizer).__name__ in LANGUAGE_IN_START:
        config.decoder_start_token_id = language_id
        return {"decoder_start_token_id": language_id}
    return {"forced_bos_token_id": language_id}


def _fast_pair(tokenizer: Any, config: HeedConfig, bos: str | None) -> TokenizerPair | None:
    """Return plain fast tokenizers, or None if their ids differ."""
    source = target = plain_fast(tokenizer, config.vocab_size, bos, _language_tags(tokenizer))
    if getattr(tokenizer, "src_lang", None) is not None:
        tokenizer.set_tgt_lang_special_tokens(tokenizer.tgt_lang)
        target = plain_fast(tokenizer, config.vocab_size, bos)
        tokenizer.set_src_lang_special_tokens(tokenizer.src_lang)
    pair = TokenizerPair(source, target)
    texts = _comparison_texts(tokenizer)
    is_same = pair.source(texts)["input_ids"] == tokenizer(texts)["input_ids"]
    is_same = is_same and pair.encode_target(texts) == tokenizer(text_target=texts)["input_ids"]
    return pair if is_same else None


def _language_tags(tokenizer: Any) -> list[str]:
    """Return the target language tokens `<2xx>`, if the tokenizer keeps them whole before a sentence."""
    tags = [token for token in tokenizer.added_tokens_encoder if LANGUAGE_TAG.fullmatch(token)]
    rest = tokenizer("a")["input_ids"]
    starts = [tokenizer(f"{tag} a")["input_ids"] == [tokenizer.added_tokens_encoder[tag], *rest] for tag in tags]
    return tags if all(starts) else []


def plain_fast(tokenizer: Any, size: int, bos: str | None, tags: Sequence[str] = ()) -> Any:
    """Return a plain tokenizer of `size` tokens with a `bos_token` and language tags."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    for token in state["added_tokens"]:
        token["special"] = (token["special"] and not GAP.fullmatch(token["content"])) or token["content"] in tags
    if state["model"]["type"] == "Unigram":
        special = [*tokenizer.all_special_tokens, *tags]
        state["pre_tokenizer"] = without_special_pieces(state["pre_tokenizer"], special)
    names = {name: getattr(tokenizer, f"{name}_token") for name in ("pad", "eos", "unk", "sep", "cls", "mask")}
    names = {name: token for name, token in names.items() if token is not None and not GAP.fullmatch(token)}
    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        bos_token=bos,
        **{f"{name}_token": token for name, token in names.items()},
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        model_max_length=tokenizer.model_max_length,
        model_input_names=["input_ids", "attention_mask"],
    )
    _fill_up(plain, size)
    return plain


def without_special_pieces(pre_tokenizer: dict[str, Any] | None, tokens: list[str]) -> dict[str, Any]:
    """Return a pre-tokenizer that splits special tokens in a text, because Unigram has them as pieces."""
    cuts = [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in dict.fromkeys(tokens) if len(token) > 1]
    cut = {"type": "Split", "pattern": {"Regex": "|".join(cuts)}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [pre_tokenizer, cut] if pre_tokenizer else [cut]}


def _kept_pair(tokenizer: Any, config: HeedConfig, bos: str | None) -> TokenizerPair:
    # M2M100's class may not count its language tokens.
    languages = list(getattr(tokenizer, "lang_token_to_id", ()))
    _add_special(tokenizer, [token for token in languages if token not in tokenizer.added_tokens_encoder])
    if not getattr(tokenizer, "separate_vocabs", False):
        return TokenizerPair(*[_adapted(tokenizer, config.vocab_size, bos)] * 2)
    # Each of Marian's two vocabularies gets a tokenizer.
    source_pieces, target_pieces = tokenizer.spm_files
    source = _one_sided(tokenizer, tokenizer.encoder, source_pieces)
    target = _one_sided(tokenizer, tokenizer.target_encoder, target_pieces)
    return TokenizerPair(_adapted(source, config.vocab_size, bos), _adapted(target, config.decoder_vocab_size, bos))


def _one_sided(tokenizer: Any, vocabulary: dict[str, int], pieces: str) -> Any:
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "vocab.json"
        path.write_text(json.dumps(vocabulary), encoding="utf-8")
        names = {f"{name}_token": str(getattr(tokenizer, f"{name}_token")) for name in ("pad", "eos", "unk")}
        return type(tokenizer)(
            source_spm=pieces, target_spm=pieces, vocab=str(path), model_max_length=tokenizer.model_max_length, **names
        )


def _adapted(tokenizer: Any, size: int | None, bos: str | None) -> Any:
    """Give a tokenizer Heedful's settings and return it; `init_kwargs` is saved."""
    for name, value in (("bos_token", bos), ("split_special_tokens", True)):
        setattr(tokenizer, name, value)
        tokenizer.init_kwargs[name] = value
    _fill_up(tokenizer, size or len(tokenizer))
    return tokenizer


def _fill_up(tokenizer: Any, size: int) -> None:
    """Give each embedding row a token."""
    if len(tokenizer) > size:
        most = f"at most {size} tokens, the model's `vocab_size` (of the target `decoder_vocab_size`)"
        raise ValueError(f"A tokenizer must have {most}, but has {len(tokenizer)} instead.")
    _add_special(tokenizer, [f"<unused_{number}>" for number in range(size - len(tokenizer))])


def _add_special(tokenizer: Any, tokens: list[str]) -> None:
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True)


def _comparison_texts(tokenizer: Any) -> list[str]:
    generator = random.Random(0)
    special = set(tokenizer.all_special_tokens) | {str(token) for token in tokenizer.added_tokens_decoder.values()}
    vocabulary = tokenizer.get_vocab()
    pieces = [piece for piece in sorted(vocabulary, key=vocabulary.__getitem__) if piece not in special]
    rows = [generator.choices(pieces, k=generator.randint(1, 30)) for _ in range(RANDOM_TEXTS)]
    texts = [*TEXTS, *(tokenizer.convert_tokens_to_string(row) for row in rows)]
    return [text for text in texts if not any(token in text for token in special)]
