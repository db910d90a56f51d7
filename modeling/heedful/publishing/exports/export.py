"""What every export has in common: a model is checked and loaded, and its new folder appears whole or not at all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.data.tokenization import TokenizerPair
from heedful.files import check_is_new, new_folder
from heedful.inference.loading import adapted_model, is_adapter, load_model, model_folder
from heedful.publishing.exports.comparison import Comparison


@dataclass(frozen=True)
class Export:
    """What was exported, and how it compared.

    Attributes:
        folder: The new folder.
        quantization: The type of its weights.
        size: Size of the files that hold the weights, in bytes.
        comparisons: What `generate()` and the engine made of the sentences, by the name of a search.
        difference: The largest difference of a logit, relative where logits are above 1; None where it is not known.
    """

    folder: Path
    quantization: str
    size: int
    comparisons: dict[str, Comparison]
    difference: float | None = None


@contextmanager
def begun_export(
    model: str | Path, target: str | Path, sentences: Sequence[str]
) -> Iterator[tuple[Any, TokenizerPair, list[str], Path]]:
    """Check and load what is to be exported, and yield it with a folder that goes away if the exporter fails.

    Args:
        model: A folder or an id on the Hub, of a model or of an adapter, which is merged into its model.
        target: The folder to write; it must not exist.
        sentences: Sources to compare on.

    Yields:
        The model, on the CPU and in evaluation mode; its tokenizers; the sentences without blank ones; and the folder
        to write to, which holds the tokenizers already and gets its name when all is in it.

    Raises:
        ValueError: If `target` exists, there is no sentence, or the model cannot be used.
        FileNotFoundError: If the model or its tokenizers are missing.
    """
    check_is_new(Path(target))
    sentences = [sentence for sentence in sentences if sentence.strip()]
    if not sentences:
        raise ValueError("`sentences` must hold a sentence to compare on, but hold none.")
    loaded, tokenizers = _load(model)
    with new_folder(target) as folder:
        tokenizers.save_pretrained(folder)
        yield loaded, tokenizers, sentences, folder


def check_quantization(quantization: str, known: Sequence[str]) -> None:
    """Raise a `ValueError` if a type of weights is not among the known ones."""
    if quantization not in known:
        raise ValueError(f"`quantization` must be one of {', '.join(known)}, but is {quantization!r} instead.")


def _load(model: str | Path) -> tuple[Any, TokenizerPair]:
    folder = model_folder(model)
    loaded: Any = load_model(folder)
    if loaded.config.model_type == "heed_rnn":
        raise ValueError(
            "`model_type` must be heed to be exported, but is heed_rnn instead: the engines know no recurrent "
            f"decoder, such as this one of {loaded.config.cell} cells."
        )
    if loaded.config.model_type != "heed":  # checked first: its tokenizers may be of a kind that Heedful cannot read
        raise ValueError(
            f"`model_type` must be heed to be exported, but is {loaded.config.model_type} instead; `heedful convert` "
            "turns Marian, BART, mBART, M2M100 and NLLB models into Heed models."
        )
    if is_adapter(folder) and not (folder / "tokenizer.json").is_file():
        folder = adapted_model(folder)
    tokenizers = TokenizerPair.from_pretrained(folder)
    tokenizers.check_config(loaded.config)
    return loaded, tokenizers
