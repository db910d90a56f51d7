"""The tokenizers of a run: given by its recipe, trained, or restored from a checkpoint."""

import logging
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from pathlib import Path

from heedful.data.mixture import languages_of
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import to_yaml
from heedful.training.run_folder.checkpoints import newest_whole_checkpoint, written_folder

logger = logging.getLogger(__name__)


def given_tokenizers(recipe: Recipe, folder: Path, is_main: bool) -> TokenizerPair | None:
    """Load the tokenizers that the recipe names or the run has in `folder`; `None` where they are to be trained.

    Two that must be one are a `ValueError`.
    """
    where = recipe.tokenizer.path or recipe.model.start_from
    if where is None:
        return _load_tokenizers_of_run(recipe, folder, is_main)
    given = TokenizerPair.from_pretrained(where)
    if recipe.data.both_directions and not given.is_joint:
        must = "hold one tokenizer of both sides where `data.both_directions` is true"
        raise ValueError(f"`tokenizer.path` or `model.start_from` must {must}, but {where} holds two.")
    return given


def load_or_train_tokenizers(
    recipe: Recipe,
    pairs: Iterable[Mapping[str, str]],
    folder: Path,
    is_main: bool,
    held_out: Iterable[Mapping[str, str]] = (),
) -> TokenizerPair:
    """Load the tokenizers that the recipe names or the run has in `folder`; otherwise train them on cleaned pairs.

    Trained ones are saved in `folder`, by the main process. `held_out` are training pairs that were held out of the
    others: a vocabulary of all words has theirs, too.
    """
    settings = recipe.tokenizer
    given = given_tokenizers(recipe, folder, is_main)
    if given is not None:
        return given
    parts = recipe.data.parts
    logger.info("training the tokenizer (%s, %s tokens)", settings.algorithm, settings.vocab_size or "all")
    own, rest = settings.target_algorithm, held_out if ("word", None) in settings.sides else ()
    tokenizers = train_tokenizers(
        (pair["source"] for pair in chain(islice(pairs, settings.sentences), rest)),
        (pair["target"] for pair in chain(islice(pairs, settings.sentences), rest)),
        algorithm=settings.algorithm if own is None else (settings.algorithm, own),
        vocab_size=settings.vocab_size,
        joint=settings.joint,
        target_vocab_size=settings.target_vocab_size,
        languages=(*languages_of(parts), *dict.fromkeys(f"<{part.tag}>" for part in parts.values() if part.tag)),
    )
    if is_main:
        _save_tokenizers(tokenizers, folder, recipe)
    return tokenizers


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
            _save_tokenizers(TokenizerPair.from_pretrained(checkpoint), folder, recipe)
        return TokenizerPair.from_pretrained(checkpoint)
    if failure is not None:
        raise ValueError(
            f"`output` must be the folder of a run with a whole tokenizer, but {folder} cannot be read: {failure}. "
            "There is no checkpoint with another: start again with overwrite=true or another `output`."
        ) from failure
    return None


def _save_tokenizers(tokenizers: TokenizerPair, folder: Path, recipe: Recipe) -> None:
    # A run that dies here leaves no half-written tokenizer to resume with.
    with written_folder(folder) as partial:
        tokenizers.save_pretrained(partial)
        (partial / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")  # by it a run knows its own
