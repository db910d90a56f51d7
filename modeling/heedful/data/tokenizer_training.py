"""Train tokenizers from raw text: BPE and Unigram on bytes, characters, or words."""

import json
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, get_args

from heedful.data.tokenization import LANGUAGE_TAG, SEPARATOR, TokenizerPair
from heedful.messages_heed import wrong
from heedful.recipe_keys import Section, key
from heedful.symbols_heed import CHARACTER, check_are_several

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer, models, trainers
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

PAD, BOS, EOS, UNKNOWN = SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
OTHER_TAG = re.compile("<[A-Za-z][A-Za-z0-9_-]*>")  # not a language tag
Algorithm = Literal["bpe", "unigram", "character", "jamo", "word"]
SUBWORDS = ("bpe", "unigram")  # their vocabularies have any size
# The fewest tokens, special ones not counted; 256 are bytes.
SMALLEST_VOCABULARY = {"bpe": 256, "unigram": 257, "character": 256, "jamo": 256, "word": 1}
FALLBACK_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # for characters without a token
JAMO_OR_CHARACTER = rf"[\u1100-\u11ff\ua960-\ua97c\ud7b0-\ud7fb]|{CHARACTER}"  # single Korean letters
# Scores of unseen bytes: the lowest plus 0.0001 times 0 to 255.
UNSEEN_BYTES_BAND = 0.026
# The trainers allocate memory for every token, and end the process if they get none.
MOST_TOKENS = 2**20
# Training time grows with the square of the longest word, so longer ones are cut.
LONGEST_WORD = 1000
LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD}}}(?=\S)|\s{{{LONGEST_WORD}}}(?=\s)")


@dataclass
class TokenizerRecipe(Section, section="tokenizer"):
    """The recipe's tokenizer: trained on the training pairs, or from a folder."""

    path: str | None = key("folder with a trained tokenizer; empty: trains one on the training pairs", None)
    algorithm: Algorithm = key(
        "bpe, unigram (on bytes), character, jamo (Korean letters): any text; word: symbols such as phonemes", "bpe"
    )
    vocab_size: int | None = key(
        "number of tokens, special ones included; empty (only for character, jamo or word): all in the texts. Then "
        "the word vocabulary is closed: other words are errors, not <unk>",
        8000,
        least=1,
    )
    joint: bool = key("one vocabulary for both sides (section 5.1 of the paper)", True)
    target_algorithm: Algorithm | None = key("the target's algorithm, if not joint; empty: `algorithm`", None)
    target_vocab_size: int | None = key("target size; empty: `vocab_size` or all by `target_algorithm`", None, least=1)
    sentences: int | None = key("number of pairs to train the tokenizer on, drawn once; empty: all", None, least=1)

    def check(self) -> None:
        """Refuse vocabularies that cannot be trained."""
        if self.path is None:
            is_met = not self.joint or self.target_algorithm is None
            self.require(is_met, "target_algorithm", "be empty if `tokenizer.joint` is true")
            for name, (algorithm, size) in zip(("vocab_size", "target_vocab_size"), self.sides, strict=True):
                check_size(f"tokenizer.{name}", algorithm, size)

    @property
    def sides(self) -> tuple[tuple[Algorithm, int | None], ...]:
        """Algorithm and vocabulary size of source and target."""
        source = (self.algorithm, self.vocab_size)
        if self.target_algorithm is None and self.target_vocab_size is None:
            return source, source
        return source, (self.target_algorithm or self.algorithm, self.target_vocab_size)


def check_size(name: str, algorithm: Algorithm, size: int | None, special: int = len(SPECIAL_TOKENS)) -> None:
    """Raise a `ValueError` if a vocabulary with `special` tokens cannot have a size."""
    least = special + SMALLEST_VOCABULARY[algorithm]
    if size is None and algorithm in SUBWORDS:
        raise wrong(name, f"be a number for {algorithm}", None)
    if size is not None and size < least:
        tags = ", with the tags and mask of `data`," * (special > len(SPECIAL_TOKENS))
        must = f"be at least {least} for {algorithm} ({special} special tokens{tags} and {least - special} more)"
        raise wrong(name, must, size)


def train_tokenizers(
    source_texts: Iterable[str],
    target_texts: Iterable[str],
    *,
    vocab_size: int | None,
    algorithm: Algorithm | tuple[Algorithm, Algorithm] = "bpe",
    joint: bool = True,
    target_vocab_size: int | None = None,
    languages: Sequence[str] = (),
) -> TokenizerPair:
    """Train a pair of tokenizers; the same texts always give the same pair.

    `algorithm` is one for both sides, or a pair for separate source and target vocabularies:

    - "bpe" and "unigram" work on bytes. Decoding returns any text exactly, in NFC.
    - "character" has a token for each character as readers see it: a letter with marks, a Korean syllable, an emoji,
      letters under a tie bar. Others are spelled in code points or bytes, so decoding is exact too.
    - "jamo" also cuts Korean syllables into letters. `TokenizerPair.decode_target` and the pipeline join them; the
      tokenizer itself returns text that is not yet in NFC.
    - "word" splits at spaces, for symbols such as phonemes and commands. If `vocab_size` is None, the vocabulary is
      closed, and an unseen word raises an `UnknownSymbol`; otherwise it becomes `<unk>`.

    Ids 0 to 3 are `<pad>`, `<s>`, `</s>` and `<unk>`. Tags for the `languages` follow in the source vocabulary; names
    in angle brackets, such as `<bt>`, are tags themselves. `<sep>` is in the target vocabulary too. `vocab_size`
    counts all tokens; a warning follows if the texts allow fewer. None keeps all tokens of "character", "jamo" and
    "word". `target_vocab_size` is for a separate target; None means `vocab_size`, or all if the target has its own
    algorithm. Texts are read once, and need not fit in memory.
    """
    algorithms = (algorithm, algorithm) if isinstance(algorithm, str) else algorithm
    for each in algorithms:
        if each not in get_args(Algorithm):
            raise wrong("algorithm", f"be one of {', '.join(get_args(Algorithm))}", repr(each))
    tags = _language_tags(languages)
    of_target = [tag for tag in tags if tag == SEPARATOR]
    is_same = isinstance(algorithm, str) and target_vocab_size is None
    size, size_name = (vocab_size, "vocab_size") if is_same else (target_vocab_size, "target_vocab_size")
    sides = [("vocab_size", algorithms[0], vocab_size, len(tags)), (size_name, algorithms[1], size, len(of_target))]
    for name, each, number, more in sides[:1] if joint else sides:
        check_size(name, each, number, len(SPECIAL_TOKENS) + more)
        if number is not None and number > MOST_TOKENS:
            raise wrong(name, f"be at most {MOST_TOKENS}", number)
    if joint:
        if target_vocab_size is not None:
            raise wrong("target_vocab_size", "be None for a joint vocabulary", target_vocab_size)
        if not isinstance(algorithm, str):
            raise wrong("algorithm", "be a single one for a joint vocabulary", repr(algorithm))
    for name, texts in (("source_texts", source_texts), ("target_texts", target_texts)):
        check_are_several(texts, name)
    texts = chain(source_texts, target_texts) if joint else source_texts
    source = _train_one(texts, algorithms[0], vocab_size, "vocab_size", tags)
    target = source if joint else _train_one(target_texts, algorithms[1], size, size_name, of_target)
    return TokenizerPair(source, target)


def _language_tags(languages: Sequence[str]) -> list[str]:
    if isinstance(languages, str):
        raise wrong("languages", "be a list", f"the string {languages!r}")
    tags = [language if OTHER_TAG.fullmatch(language) else f"<2{language}>" for language in languages]
    for language, tag in zip(languages, tags, strict=True):
        if not (OTHER_TAG.fullmatch(tag) or LANGUAGE_TAG.fullmatch(tag)) or [*tags, *SPECIAL_TOKENS].count(tag) > 1:
            raise wrong("languages", "be different codes of letters, digits, '-' and '_'", repr(language), verb="has")
    return tags


def _train_one(
    texts: Iterable[str], algorithm: Algorithm, vocab_size: int | None, size_name: str, tags: list[str]
) -> "PreTrainedTokenizerFast":
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    control = [AddedToken(token, special=True, normalized=False) for token in [*SPECIAL_TOKENS, *tags]]
    tokenizer, trainer = _untrained(algorithm, vocab_size, control)
    tokenizer.train_from_iterator(_without_long_words(texts) if algorithm in SUBWORDS else texts, trainer)
    if algorithm == "unigram":
        tokenizer = _with_repeatable_scores(tokenizer, len(control))
    elif algorithm not in SUBWORDS:
        tokenizer.model = _counted_model(tokenizer, algorithm, vocab_size, len(control))
    size = tokenizer.get_vocab_size()
    if vocab_size is not None and size != vocab_size:
        logger.warning("`%s` is lowered from %s to %s: the texts give no more tokens.", size_name, vocab_size, size)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B:1 {EOS}:1", special_tokens=[(EOS, SPECIAL_TOKENS.index(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=None if algorithm == "word" and vocab_size is None else UNKNOWN,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )


def _without_long_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts with overlong words in pieces; a warning counts these texts."""
    count = 0
    for text in texts:
        if len(text) > LONGEST_WORD and LONG_WORD.search(text):
            count += 1
            yield from LONG_WORD.sub(r"\g<0>\n", text).split("\n")
        else:
            yield text
    if count:
        what = f"{count} texts with {LONGEST_WORD} letters or spaces in a row"
        warnings.warn(f"The tokenizer was trained on pieces of {what}.", stacklevel=2)


def _untrained(
    algorithm: Algorithm, vocab_size: int | None, control: "list[AddedToken]"
) -> "tuple[Tokenizer, trainers.Trainer]":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    options: dict[str, Any] = {"special_tokens": control, "show_progress": False}
    if algorithm == "word":
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        one_space = normalizers.Replace(Regex(r"\s+"), " ")
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), one_space, normalizers.Strip()])
        # Every word begins with a space, so the word "<s>" is no control token. Texts may contain ▁, the usual mark.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="always")
        tokenizer.decoder = decoders.Metaspace(replacement=" ", prepend_scheme="always")
        return tokenizer, trainers.WordLevelTrainer(vocab_size=vocab_size or 2**62, **options)
    if algorithm not in SUBWORDS:
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))  # counts the characters
        tokenizer.normalizer = normalizers.NFD() if algorithm == "jamo" else normalizers.NFC()
        pattern = JAMO_OR_CHARACTER if algorithm == "jamo" else CHARACTER
        # Control and byte tokens have several characters, so no text becomes one.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        size = 2**62 if vocab_size is None else vocab_size - len(FALLBACK_BYTES)
        return tokenizer, trainers.WordLevelTrainer(vocab_size=size, **options)
    options |= {"vocab_size": vocab_size, "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE() if algorithm == "bpe" else models.Unigram())
    # ByteLevel's regular expression cuts the text of control tokens into parts, so no text becomes one, not even with
    # Unigram, whose pieces include the control tokens.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if algorithm == "bpe":
        return tokenizer, trainers.BpeTrainer(min_frequency=2, **options)
    return tokenizer, trainers.UnigramTrainer(unk_token=UNKNOWN, **options)


def _counted_model(
    tokenizer: "Tokenizer", algorithm: Algorithm, vocab_size: int | None, control: int
) -> "models.Model":
    """Return a tokenizer's model, made from the words or characters that its trainer counted."""
    from tokenizers import models

    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if algorithm == "word":
        # An unknown token outside a closed vocabulary makes the model refuse unknown words.
        return models.WordLevel(vocabulary, unk_token="" if vocab_size is None else UNKNOWN)
    tokens[control:control] = FALLBACK_BYTES
    ids = {token: id_ for id_, token in enumerate(tokens)}
    return models.BPE(ids, [], byte_fallback=True, ignore_merges=True)


def _with_repeatable_scores(tokenizer: "Tokenizer", control_tokens: int) -> "Tokenizer":
    """Make ids and scores repeatable: Unigram's trainer adds floats in a hash table's order."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    pieces = [(piece, round(score, 6)) for piece, score in vocabulary[control_tokens:]]
    lowest = min(score for _, score in pieces)
    unseen, same = lowest + UNSEEN_BYTES_BAND, round(lowest - 1, 6)
    pieces = [(piece, same if len(piece) == 1 and score <= unseen else score) for piece, score in pieces]
    pieces.sort(key=lambda entry: (-entry[1], entry[0]))
    state["model"]["vocab"] = [*vocabulary[:control_tokens], *pieces]
    return Tokenizer.from_str(json.dumps(state))
