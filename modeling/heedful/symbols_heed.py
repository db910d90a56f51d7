"""Closed vocabularies of symbols, such as phonemes and commands: what they hold, and which symbol they lack.

This file travels with every model, for its pipeline.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


class UnknownSymbol(ValueError):
    """A text has a symbol that the closed vocabulary of its side lacks.

    Attributes:
        index: The number of the text among those that were encoded, from 0.
        told: What is wrong, without the place.
    """

    def __init__(self, index: int, told: str):
        super().__init__(index, told)  # by which it is pickled
        self.index, self.told = index, told

    def __str__(self) -> str:
        return f"`texts[{self.index}]`: {self.told}"

    def at(self, place: str) -> ValueError:
        """Return the error of a user who knows the text by its place, such as "line 12"."""
        return ValueError(f"{place}: {self.told}")


def symbols_of(tokenizer: Any) -> list[str] | None:
    """Return all symbols of a closed vocabulary, one of words without a token for others; `None` of an open one."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    kinds = [type(getattr(backend, part, None)).__name__ for part in ("pre_tokenizer", "model")]
    if kinds != ["Metaspace", "WordLevel"] or backend.model.token_to_id(backend.model.unk_token) is not None:
        return None
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    # The first character of each is the mark of a word.
    return [token[1:] for id_, token in enumerate(tokens) if id_ not in tokenizer.added_tokens_decoder]


def unknown_symbol(tokenizer: Any, side: str, texts: Sequence[str]) -> UnknownSymbol | None:
    """Find the first symbol that a closed vocabulary lacks, if it is one, and those that are written most alike."""
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
                told = (
                    f"each symbol must be one of the {len(known)} of the {whose}'s vocabulary, but {symbol!r} is none"
                )
                return UnknownSymbol(index, told + (f" (nearest: {', '.join(alike)})." if alike else "."))
    return None
