"""The tokenizers of a run: given by its recipe, trained, or restored from a checkpoint."""

import logging
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

from heedful.data.mixture import languages_of
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import to_yaml
from heedful.training.run_folder.checkpoints import newest_whole_checkpoint, written_folder

logger = logging.getLogger(__name__)


def given_tokenizers(recipe: Recipe, folder: Path | None, is_main: bool) -> TokenizerPair | None:
    """Load the tokenizers that the recipe names or the run has in `folder`; `None` if they are to be trained."""
    where = recipe.tokenizer.path or recipe.model.start_from
    if where is None:
        return None if folder is None else _load_tokenizers_of_run(recipe, folder, is_main)
    given = TokenizerPair.from_pretrained(where)
    if recipe.data.both_directions and not given.is_joint:
        must = "hold one tokenizer of both sides where `data.both_directions` is true"
        raise ValueError(f"`tokenizer.path` or `model.start_from` must {must}, but {where} holds two.")
    return given


def earlier_tokenizers(recipe: Recipe) -> TokenizerPair | None:
    """Load the tokenizers that a run would begin with, as `given_tokenizers` does, and write nothing."""
    return given_tokenizers(recipe, recipe.folder / "tokenizer" if recipe.resume else None, is_main=False)


def tokenizers_of(recipe: Recipe, pairs: Iterable[Any], held_out: Iterable[Any] = ()) -> TokenizerPair:
    """Train the recipe's tokenizers on cleaned pairs; a vocabulary of all words has those of `held_out` pairs, too."""
    settings, parts = recipe.tokenizer, recipe.data.parts
    logger.info("training the tokenizer (%s, %s tokens)", settings.algorithm, settings.vocab_size or "all")
    rest = held_out if ("word", None) in settings.sides else ()
    own = settings.target_algorithm
    return train_tokenizers(
        (pair["source"] for pair in chain(islice(pairs, settings.sentences), rest)),
        (pair["target"] for pair in chain(islice(pairs, settings.sentences), rest)),
        algorithm=settings.algorithm if own is None else (settings.algorithm, own),
        vocab_size=settings.vocab_size,
        joint=settings.joint,
        target_vocab_size=settings.target_vocab_size,
        languages=(*languages_of(parts), *dict.fromkeys(f"<{part.tag}>" for part in parts.values() if part.tag)),
    )


def _load_tokenizers_of_run(recipe: Recipe, folder: Path, is_main: bool) -> TokenizerPair | None:
    """Load the tokenizers in `folder`; where they are missing or damaged, those of the checkpoint to be resumed."""
    failure: Exception | None = None
    try:
        if folder.is_dir():
            return TokenizerPair.from_pretrained(folder)
    except Exception as error:  # each library raises another type, tokenizers a bare Exception
        failure = error
    checkpoint = newest_whole_checkpoint(recipe.folder / "checkpoints") if recipe.resume else None
    if checkpoint is not None:
        if is_main:
            logger.warning("%s is missing or damaged: it is restored from %s", folder, checkpoint)
            save_tokenizers(TokenizerPair.from_pretrained(checkpoint), folder, recipe)
        return TokenizerPair.from_pretrained(checkpoint)
    if failure is not None:
        must = f"be the folder of a run with a whole tokenizer, but {folder} cannot be read: {failure}"
        advice = "There is no checkpoint with another: start again with overwrite=true or another `output`."
        raise ValueError(f"`output` must {must}. {advice}") from failure
    return None


def save_tokenizers(tokenizers: TokenizerPair, folder: Path, recipe: Recipe) -> None:
    """Save a run's tokenizers, as a whole or not at all, with its recipe, by which it knows them as its own."""
    with written_folder(folder) as partial:
        tokenizers.save_pretrained(partial)
        (partial / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
