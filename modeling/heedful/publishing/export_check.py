"""What every export has in common: what is exported, and a comparison on sentences.

An exporter writes into a `new_folder`, runs the written model on sentences, and hands what `generate()` and the engine
gave to `compare`; `Comparison.refuse` raises inside the block, so that nothing is left of an export that differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.data.tokenization import TokenizerPair
from heedful.inference.loading import adapted_model, is_adapter, load_model, model_folder


def sentences_to_compare(path: str | Path | None = None, count: int = 500) -> list[str]:
    """Return the first sentences of a text file, or built-in Korean and English ones.

    The built-in ones try models of any language with tokens and lengths of real text.

    Args:
        path: A text file in UTF-8, one sentence a line; blank lines are left out.
        count: How many at most.

    Raises:
        ValueError: If the file holds no sentence or is not UTF-8, or `count` is below 1.
        FileNotFoundError: If there is no such file.

    """
    if count < 1:
        raise ValueError(f"`count` must be at least 1, but is {count} instead.")
    if path is None:
        pairs = korean_english_pairs("test", (count + 1) // 2)
        return [sentence for pair in pairs for sentence in (pair["ko"], pair["en"])][:count]
    try:
        # Lines end where files end them, and at nothing else that Unicode calls a line's end.
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"`sentences` must be a text file in UTF-8, but {path} is not: {error}") from error
    sentences = [line.strip() for line in lines if line.strip()][:count]
    if not sentences:
        raise ValueError(f"`sentences` must hold a sentence to compare on, but {path} has none.")
    return sentences


def load_pair(model: str | Path) -> tuple[Any, TokenizerPair]:
    """Load what is to be exported: a model and its tokenizers.

    Args:
        model: A folder, of a model or of an adapter, which is merged into the model it was trained on, or an id on
            the Hub.

    Returns:
        The model, on the CPU and in evaluation mode, and its tokenizers.

    Raises:
        FileNotFoundError: If the model or its tokenizers are missing.
        ValueError: If one of them cannot be used, they do not fit each other, or the model is no Heed model.

    """
    folder = model_folder(model)
    loaded: Any = load_model(folder)
    if loaded.config.model_type == "heed_rnn":
        raise ValueError(
            "`model_type` must be heed to be exported, but is heed_rnn instead: the engines know no recurrent "
            f"decoder, such as this one of {loaded.config.cell} cells."
        )
    if loaded.config.model_type != "heed":  # before its tokenizers, which may be of a kind that Heed cannot read
        raise ValueError(
            f"`model_type` must be heed to be exported, but is {loaded.config.model_type} instead; `heedful convert` "
            "turns Marian, BART, mBART, M2M100 and NLLB models into Heed models."
        )
    if is_adapter(folder) and not (folder / "tokenizer.json").is_file():
        folder = adapted_model(folder)
    tokenizers = TokenizerPair.from_pretrained(folder)
    tokenizers.check_config(loaded.config)
    return loaded, tokenizers


@dataclass(frozen=True)
class Difference:
    """One sentence to which an engine gave other tokens than `generate()`.

    Attributes:
        number: Of the sentence, from 0.
        sentence: The source.
        expected: What `generate()` gave, tokens or text.
        found: What the engine gave.

    """

    number: int
    sentence: str
    expected: Sequence[int] | str
    found: Sequence[int] | str


@dataclass(frozen=True)
class Comparison:
    """What `generate()` and an engine made of the same sentences.

    Attributes:
        sentences: How many were compared.
        differences: Those that differ, in their order.

    """

    sentences: int
    differences: tuple[Difference, ...]

    @property
    def likeness(self) -> float:
        """Share of tokens that the outputs have in common, the mean over the sentences: 1 where none differs."""
        matchers = (SequenceMatcher(None, each.expected, each.found, autojunk=False) for each in self.differences)
        return 1 - sum(1 - matcher.ratio() for matcher in matchers) / max(1, self.sentences)

    def refuse(self, engine: str, largest_share: float = 0.0) -> None:
        """Raise a `ValueError` with the first sentence that differs, unless few enough do.

        Args:
            engine: Its name, for the message.
            largest_share: Share of sentences that may differ: 0 where the same numbers are computed.

        Raises:
            ValueError: If more differ, or none was compared.

        """
        if not self.sentences:
            raise ValueError("`sentences` must hold a sentence to compare on, but hold none.")
        if len(self.differences) <= largest_share * self.sentences:
            return
        first = self.differences[0]
        raise ValueError(
            f"The exported model's output differs from generate()'s for {len(self.differences)} of {self.sentences} "
            f"sentences, so that no folder is left. The first is sentence {first.number + 1}, {first.sentence!r}: "
            f"generate() gives {_shown(first.expected)}, {engine} {_shown(first.found)}."
        )


def compare(
    sentences: Sequence[str], expected: Sequence[Sequence[int] | str], found: Sequence[Sequence[int] | str]
) -> Comparison:
    """Compare what `generate()` and an engine made of sentences.

    Args:
        sentences: The sources.
        expected: For each sentence what `generate()` gave: its tokens, </s> included and padding not, or its text.
        found: The same of the engine.

    Raises:
        ValueError: If there are not as many outputs as sentences.

    """
    for name, outputs in (("expected", expected), ("found", found)):
        if len(outputs) != len(sentences):
            raise ValueError(
                f"`{name}` must have an output for each of the {len(sentences)} sentences, but has {len(outputs)} "
                "instead."
            )
    rows = enumerate(zip(sentences, expected, found, strict=True))
    return Comparison(
        len(sentences),
        tuple(
            Difference(number, sentence, ours, theirs)
            for number, (sentence, ours, theirs) in rows
            if not _are_equal(ours, theirs)
        ),
    )


def _are_equal(ours: Sequence[int] | str, theirs: Sequence[int] | str) -> bool:
    if isinstance(ours, str) or isinstance(theirs, str):
        return ours == theirs
    return [int(token) for token in ours] == [int(token) for token in theirs]


def _shown(output: Sequence[int] | str) -> str:
    return repr(output) if isinstance(output, str) else "tokens " + str([int(token) for token in output])
