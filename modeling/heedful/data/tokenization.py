"""Tokenizers trained from raw text, and the pair of them that a translation model uses.

Source and target sequences end in `</s>` and have no `<s>`: the decoder starts with it. Nothing in a sentence
is ever taken for a control token, so "<s>" or "<2en>" inside a text is plain text.
"""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
TARGET_FOLDER = "target_tokenizer"
Algorithm = Literal["bpe", "unigram", "word"]

# What from_pretrained leaves in a tokenizer and save_pretrained would write out again.
LOCAL_KEYS = ("local_files_only", "is_local", "name_or_path", "_commit_hash", "backend")
# The Unigram trainer puts unseen bytes at the lowest score plus 0.0001 times 0 to 255.
UNSEEN_BYTES_BAND = 0.026
LANGUAGE_TAG = re.compile(r"<2([A-Za-z0-9_-]+)>")


class TokenizerPair:
    """The tokenizers of a model: one for both sides (joint), or one for each.

    Args:
        source: the source's tokenizer.
        target: the target's tokenizer; the same object where they are joint.

    Attributes:
        source: as given.
        target: as given.
        languages: the languages that have a tag `<2xx>` in the source vocabulary, in the order of their ids.

    Raises:
        ValueError: if a tokenizer has no padding or end token, or the two disagree about them.
    """

    def __init__(self, source: "PreTrainedTokenizerFast", target: "PreTrainedTokenizerFast"):
        for side, tokenizer in (("source", source), ("target", target)):
            for token in ("pad_token_id", "eos_token_id"):
                if getattr(tokenizer, token) is None:
                    raise ValueError(f"`{token}` of the {side} tokenizer must be set, but is None instead.")
        for token in ("pad_token_id", "eos_token_id"):
            ids = getattr(source, token), getattr(target, token)
            if ids[0] != ids[1]:
                raise ValueError(
                    f"`{token}` must be the same in both tokenizers, "
                    f"but is {ids[0]} in the source's and {ids[1]} in the target's instead."
                )
        self.source = source
        self.target = target
        tags = sorted((id_, str(token)) for id_, token in source.added_tokens_decoder.items())
        matches = (LANGUAGE_TAG.fullmatch(token) for _, token in tags)
        self.languages = tuple(match[1] for match in matches if match)

    @property
    def pad_token_id(self) -> int:
        """The id of padding, which Trainer asks of a `processing_class`."""
        return self.source.pad_token_id

    @property
    def model_input_names(self) -> list[str]:
        """What the source's tokenizer makes, which Trainer asks of a `processing_class`."""
        return self.source.model_input_names

    @property
    def is_joint(self) -> bool:
        """Whether both sides share one tokenizer."""
        return self.source is self.target

    def encode_source(self, texts: Sequence[str], target_language: str | None = None) -> list[list[int]]:
        """Encode source texts, without truncation.

        Args:
            texts: the sentences.
            target_language: the language to translate into; its tag comes first. Needed exactly where the
                tokenizer knows several.

        Raises:
            ValueError: if the language is unknown, or missing where there are several.
        """
        prefix = self._language_prefix(target_language)
        texts = _checked_texts(texts)
        if not texts:
            return []
        encoded = self.source(texts, return_attention_mask=False, truncation=False, verbose=False)
        return [prefix + ids for ids in encoded["input_ids"]] if prefix else encoded["input_ids"]

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode target texts, without truncation: the labels of a model."""
        texts = _checked_texts(texts)
        if not texts:
            return []
        options: dict[str, Any] = {"return_attention_mask": False, "truncation": False, "verbose": False}
        return self.target(text_target=texts, **options)["input_ids"]

    def decode_target(self, batch_of_ids: Iterable[Iterable[int]]) -> list[str]:
        """Turn target ids (lists, arrays or a tensor) back into texts.

        Control tokens are left out, and so are negative ids: the -100 with which labels are padded.
        """
        batch = [[int(id_) for id_ in ids if id_ >= 0] for ids in batch_of_ids]
        if not batch:
            return []
        return self.target.batch_decode(batch, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def special_ids(self) -> dict[str, int | None]:
        """Return the ids that a model's config must agree with.

        Decoders start with `<s>`; with a tokenizer that has none (Marian's, T5's) they start with padding.
        """
        bos, pad = self.target.bos_token_id, self.target.pad_token_id
        return {
            "pad_token_id": pad,
            "bos_token_id": bos,
            "eos_token_id": self.target.eos_token_id,
            "decoder_start_token_id": pad if bos is None else bos,
        }

    def check_config(self, config: "PreTrainedConfig") -> None:
        """Check that a model's config fits these tokenizers.

        Raises:
            ValueError: naming every field that does not: the special ids, `vocab_size`, `decoder_vocab_size`.
        """
        expected: dict[str, int | None] = {"vocab_size": len(self.source), **self.special_ids()}
        found = {name: getattr(config, name, None) for name in expected}
        decoder_size = getattr(config, "decoder_vocab_size", None)
        expected["decoder_vocab_size"] = len(self.target)
        # A config without the field, or with None in it, means that both sides have `vocab_size` tokens.
        found["decoder_vocab_size"] = found["vocab_size"] if decoder_size is None else decoder_size
        wrong = [
            f"`{name}` must be {value}, but is {found[name]} instead."
            for name, value in expected.items()
            if found[name] != value
        ]
        if wrong:
            raise ValueError("The model's config does not fit the tokenizers: " + " ".join(wrong))

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the tokenizers so that `from_pretrained` and transformers' `AutoTokenizer` can load them.

        A joint tokenizer lies in the folder itself; of two, the target's lies in `target_tokenizer` inside.

        Raises:
            ValueError: if the pair is joint and the folder holds another pair's `target_tokenizer`.
        """
        folder = Path(folder)
        if self.is_joint and (folder / TARGET_FOLDER).exists():
            raise ValueError(
                f"{folder} must not hold a `{TARGET_FOLDER}` when a joint tokenizer is saved there, "
                f"but does: remove it or choose another folder."
            )
        _save(self.source, folder, {} if self.is_joint else {TARGET_FOLDER: TARGET_FOLDER})
        if not self.is_joint:
            _save(self.target, folder / TARGET_FOLDER)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "TokenizerPair":
        """Load a saved pair, or any Hugging Face tokenizer as a joint pair. The network is not touched.

        Raises:
            FileNotFoundError: if the folder, or a tokenizer in it, does not exist.
        """
        folder = Path(folder)
        source = _load(folder)
        # Of a pair that was saved apart, the source knows that the other one belongs to it.
        is_apart = (folder / TARGET_FOLDER).is_dir() or TARGET_FOLDER in source.init_kwargs
        target = _load(folder / TARGET_FOLDER) if is_apart else source
        return cls(source, target)

    def _language_prefix(self, target_language: str | None) -> list[int]:
        known = ", ".join(self.languages) or "none"
        if target_language is None:
            if len(self.languages) > 1:
                raise ValueError(f"`target_language` must be one of {known}, but is None instead.")
            return []
        if target_language not in self.languages:
            raise ValueError(
                f"`target_language` must be a language of the tokenizer ({known}), but is {target_language!r} instead."
            )
        return [int(self.source.added_tokens_encoder[f"<2{target_language}>"])]


def train_tokenizers(
    source_texts: Iterable[str],
    target_texts: Iterable[str],
    *,
    vocab_size: int | None,
    algorithm: Algorithm = "bpe",
    joint: bool = True,
    target_vocab_size: int | None = None,
    languages: Sequence[str] = (),
) -> TokenizerPair:
    """Train a pair of tokenizers. The same texts always give the same tokenizers.

    Ids 0 to 3 are `<pad>`, `<s>`, `</s>` and `<unk>`, followed by one tag per language (in the source
    vocabulary only, where there are two).

    Args:
        source_texts: read once; need not fit in memory.
        target_texts: read once, after `source_texts`.
        vocab_size: the exact number of tokens, special ones included. None, with "word" alone, means every
            word.
        algorithm: "bpe" and "unigram" work on bytes: any text comes back exactly (in Unicode's form NFC).
            "word" takes what stands between spaces, and is meant for small closed vocabularies such as SCAN's:
            unseen words become `<unk>`, and of spaces only single ones between words come back.
        joint: one vocabulary for both sides.
        target_vocab_size: the target's size where they are not joint; None means `vocab_size`.
        languages: the target languages of a multilingual model.

    Raises:
        ValueError: if an argument is out of range, or the vocabulary is larger than the texts allow.
    """
    if algorithm not in ("bpe", "unigram", "word"):
        raise ValueError(f"`algorithm` must be bpe, unigram or word, but is {algorithm!r} instead.")
    for name, texts in (("source_texts", source_texts), ("target_texts", target_texts)):
        if isinstance(texts, str):
            raise ValueError(f"`{name}` must be several texts, but is one string instead.")
    tags = _language_tags(languages)
    if joint:
        if target_vocab_size is not None:
            raise ValueError(
                f"`target_vocab_size` must be None for a joint vocabulary, but is {target_vocab_size} instead."
            )
        both = _train(chain(source_texts, target_texts), algorithm, vocab_size, "vocab_size", tags)
        return TokenizerPair(both, both)
    source = _train(source_texts, algorithm, vocab_size, "vocab_size", tags)
    name = "vocab_size" if target_vocab_size is None else "target_vocab_size"
    target = _train(target_texts, algorithm, target_vocab_size or vocab_size, name, [])
    return TokenizerPair(source, target)


def _checked_texts(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise ValueError(f"`texts` must be a list of strings, but is the string {texts!r} instead.")
    return list(texts)


def _language_tags(languages: Sequence[str]) -> list[str]:
    if isinstance(languages, str):
        raise ValueError(f"`languages` must be a list, but is the string {languages!r} instead.")
    tags = [f"<2{language}>" for language in languages]
    for language, tag in zip(languages, tags, strict=True):
        if not LANGUAGE_TAG.fullmatch(tag) or tags.count(tag) > 1:
            raise ValueError(
                f"`languages` must be different codes of letters, digits, '-' and '_', but has {language!r} instead."
            )
    return tags


def _train(
    texts: Iterable[str], algorithm: Algorithm, vocab_size: int | None, size_name: str, tags: list[str]
) -> "PreTrainedTokenizerFast":
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    control = [AddedToken(token, special=True, normalized=False) for token in [*SPECIAL_TOKENS, *tags]]
    least = len(control) + {"bpe": 256, "unigram": 257, "word": 1}[algorithm]
    if vocab_size is None and algorithm != "word":
        raise ValueError(f"`{size_name}` must be a number for {algorithm}, but is None instead.")
    if vocab_size is not None and vocab_size < least:
        raise ValueError(
            f"`{size_name}` must be at least {least} for {algorithm} ({len(control)} special tokens and "
            f"{least - len(control)} more), but is {vocab_size} instead."
        )
    tokenizer, trainer = _untrained(algorithm, vocab_size, control)
    tokenizer.train_from_iterator(texts, trainer)
    if algorithm == "unigram":
        tokenizer = _with_settled_scores(tokenizer, len(control))
    size = tokenizer.get_vocab_size()
    if vocab_size is not None and size != vocab_size:
        raise ValueError(
            f"`{size_name}` must not be larger than the texts allow, which is {size}, but is {vocab_size} instead."
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B:1 {EOS}:1", special_tokens=[(EOS, SPECIAL_TOKENS.index(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )


def _untrained(algorithm: Algorithm, vocab_size: int | None, control: list) -> "tuple[Tokenizer, Any]":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if algorithm == "word":
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        one_space = normalizers.Replace(Regex(r"\s+"), " ")
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), one_space, normalizers.Strip()])
        # Words carry a mark, so that the word "<s>" can't be mistaken for the control token.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
        size = 2**62 if vocab_size is None else vocab_size
        return tokenizer, trainers.WordLevelTrainer(vocab_size=size, special_tokens=control, show_progress=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "special_tokens": control,
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    trainer: Any
    if algorithm == "bpe":
        tokenizer = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(min_frequency=2, **options)
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(unk_token=UNKNOWN, **options)
    # Pieces never cross the borders of ByteLevel's regular expression, which cuts every control token into
    # several: no piece can be one, not even with Unigram, which has them among its pieces.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, trainer


def _with_settled_scores(tokenizer: "Tokenizer", control_tokens: int) -> "Tokenizer":
    """Undo what the Unigram trainer leaves to chance.

    It adds up floats in the order of a hash table, and gives unseen bytes small penalties in that order, too: ids
    and scores change from run to run. Here scores are rounded, unseen bytes all get the same one, and pieces are
    sorted.
    """
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    pieces = [(piece, round(score, 6)) for piece, score in vocabulary[control_tokens:]]
    lowest = min(score for _, score in pieces)
    unseen = lowest + UNSEEN_BYTES_BAND
    settled = [
        (piece, round(lowest - 1, 6) if len(piece) == 1 and score <= unseen else score) for piece, score in pieces
    ]
    settled.sort(key=lambda entry: (-entry[1], entry[0]))
    state["model"]["vocab"] = [*vocabulary[:control_tokens], *settled]
    return Tokenizer.from_str(json.dumps(state))


def _save(tokenizer: "PreTrainedTokenizerFast", folder: Path, more: dict[str, str] | None = None) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    for key in (*LOCAL_KEYS, TARGET_FOLDER):
        settings.pop(key, None)
    settings |= more or {}
    if type(tokenizer) is PreTrainedTokenizerFast:
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 knows, too
    text = json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def _load(folder: Path) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} must be a folder with a tokenizer, but does not exist.")
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must hold a tokenizer, but has no {path.name}.")
    settings = json.loads(path.read_text(encoding="utf-8"))
    # Named directly, because AutoTokenizer would first ask what model lies in the folder.
    ours = settings.get("tokenizer_class") == "PreTrainedTokenizerFast"
    loader: Any = PreTrainedTokenizerFast if ours else AutoTokenizer
    return loader.from_pretrained(folder, local_files_only=True)
