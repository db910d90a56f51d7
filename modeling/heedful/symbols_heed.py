"""Checks of texts, and of their symbols in closed vocabularies (phonemes, commands)."""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import Any

# Unicode's categories for invisible characters: controls, formats such as zero-width space, and spaces.
UNSEEN = ("Cc", "Cf", "Zl", "Zp", "Zs")
# A visible character (an "extended grapheme cluster"), or several under an IPA tie bar.
CHARACTER = r"(?:\X(?<=[\u035c\u0361]))*\X"
HANGUL_FILLERS = "\u115f\u1160\u3164\uffa0"  # letters by category


def trimmed(text: str) -> str:
    """Strip white space around a text; a text without visible characters becomes empty."""
    is_seen = any(unicodedata.category(each) not in UNSEEN and each not in HANGUL_FILLERS for each in text)
    return text.strip() if is_seen else ""


def check_are_several(texts: Any, name: str) -> None:
    """Raise a `ValueError` for anything but a list or stream, also for one text or a mapping."""
    with suppress(TypeError):
        if not isinstance(texts, str | bytes | Mapping):
            iter(texts)
            return
    shown = f"the text {texts!r:.60}" if isinstance(texts, str) else f"a {type(texts).__name__}"
    raise ValueError(f"`{name}` must be a list or a stream, but is {shown} instead.")


def checked_texts(texts: Any, name: str = "texts", first: int = 0) -> list[str]:
    """Return a list of texts; for other items a `ValueError` gives their number, counted from `first`."""
    check_are_several(texts, name)
    found: list[str] = list(texts)
    for index, text in enumerate(found, start=first):
        if not isinstance(text, str):
            raise ValueError(f"`{name}[{index}]` must be a string, but is {type(text).__name__} instead.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"`{name}[{index}]` must be Unicode, but is not: {error}.") from error
    return found


UNKNOWN = "the unknown token, for text that the target's vocabulary lacks"


def unknown_id(tokenizer: Any) -> int | None:
    """Return the id for unknown words, or `None` if it is also the end's or padding's."""
    unknown = tokenizer.unk_token_id
    return None if unknown in (tokenizer.eos_token_id, tokenizer.pad_token_id) else unknown


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode ids without control tokens, but with `<unk>`."""
    unknown, options = unknown_id(tokenizer), {"clean_up_tokenization_spaces": False}
    if unknown is None or unknown not in ids:
        return str(tokenizer.decode(ids, skip_special_tokens=True, **options))
    special = (id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special)
    control = {*tokenizer.all_special_ids, *special} - {unknown}
    text = str(tokenizer.decode([id_ for id_ in ids if id_ not in control], **options))
    if is_of_words(tokenizer):  # `<unk>` has no word mark, and would stick to the preceding word
        text = re.sub(f" ?{re.escape(tokenizer.unk_token)}", lambda _: f" {tokenizer.unk_token}", text).strip()
    return text


def is_of_words(tokenizer: Any) -> bool:
    """Return whether each token is a word."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kinds = [type(getattr(backend, part, None)).__name__ for part in ("pre_tokenizer", "model")]
    return kinds == ["Metaspace", "WordLevel"]


class UnknownSymbol(ValueError):
    """Text number `index` (from 0) has a symbol that its side's closed vocabulary lacks."""

    def __init__(self, index: int, message: str):
        super().__init__(index, message)  # for pickling
        self.index, self.message = index, message

    def __str__(self) -> str:
        return f"`texts[{self.index}]`: {self.message}"

    def at(self, place: str) -> ValueError:
        """Return the error with the text's place, such as "line 12"."""
        return ValueError(f"{place}: {self.message}")


@contextmanager
def naming_the_line(numbers: Sequence[int]) -> Iterator[None]:
    """Name the line with a symbol that a closed vocabulary lacks."""
    try:
        yield
    except UnknownSymbol as error:
        raise error.at(f"Line {numbers[error.index]}") from None


def symbols_of(tokenizer: Any) -> list[str] | None:
    """Return a closed vocabulary's symbols (it has words, and no unknown token), or `None` for others."""
    model = tokenizer.backend_tokenizer.model if is_of_words(tokenizer) else None
    if model is None or model.token_to_id(model.unk_token) is not None:
        return None
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    # Each begins with the word mark.
    return [token[1:] for id_, token in enumerate(tokens) if id_ not in tokenizer.added_tokens_decoder]


def unknown_symbol(tokenizer: Any, side: str, texts: Sequence[str]) -> UnknownSymbol | None:
    """Find the first symbol that a closed vocabulary lacks, and the most similar ones."""
    known = symbols_of(tokenizer)
    if known is None:
        return None
    symbols, by_letters = frozenset(known), {symbol.lower(): symbol for symbol in known}
    backend = tokenizer.backend_tokenizer
    for index, text in enumerate(texts):
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text)):
            if (symbol := word[1:]) not in symbols:
                alike = [repr(by_letters[each]) for each in get_close_matches(symbol.lower(), by_letters, n=3)]
                whose = "source" if side == "text" else "target"
                hint = f" (nearest: {', '.join(alike)})." if alike else "."
                rule = f"each symbol must be one of the {len(known)} of the {whose}'s vocabulary"
                return UnknownSymbol(index, f"{rule}, but {symbol!r} is none{hint}")
    return None
