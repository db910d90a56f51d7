"""Turn a recipe into its corpus: load, clean, tokenizers, symbols, rows of token ids.

Training, dry runs and `heedful doctor` share these steps, so a user's mistake has the same message everywhere.
"""

import logging
from collections.abc import Sized
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

from accelerate import Accelerator

from heedful.data.cleaning import Splits, check_references, check_symbols, clean, read_splits
from heedful.data.data_recipe import DataRecipe
from heedful.data.epochs.corpus import Corpus, encode
from heedful.data.sources import sample
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import TokenizerRecipe, train_tokenizers
from heedful.files import written_folder
from heedful.training.model_of_recipe import check_model
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import to_yaml
from heedful.training.run_folder.checkpoints import newest_whole_checkpoint

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)


def named_tokenizers(where: str | None) -> TokenizerPair | None:
    """Load the tokenizers of `tokenizer.path` or `model.start_from`, if the recipe names one."""
    return None if where is None else TokenizerPair.from_pretrained(where)


def kept_tokenizers(folder: Path, checkpoints: Path | None) -> tuple[TokenizerPair | None, Path | None]:
    """Load a run's tokenizers; if they come from the checkpoint, also return it."""
    failure: Exception | None = None
    try:
        if folder.is_dir():
            return TokenizerPair.from_pretrained(folder), None
    except Exception as error:  # each library raises a different type, tokenizers a bare Exception
        failure = error
    checkpoint = None if checkpoints is None else newest_whole_checkpoint(checkpoints)
    if checkpoint is None and failure is not None:
        must = f"be a run's folder with a whole tokenizer, but {folder} cannot be read: {failure}"
        advice = "No checkpoint has another one: start again with overwrite=true or another `output`."
        raise ValueError(f"`output` must {must}. {advice}") from failure
    return None if checkpoint is None else TokenizerPair.from_pretrained(checkpoint), checkpoint


def earlier_tokenizers(recipe: Recipe) -> TokenizerPair | None:
    """Load the tokenizers that a run would begin with."""
    if recipe.given_tokenizer is None and recipe.resume:
        return kept_tokenizers(recipe.folder / "tokenizer", recipe.folder / "checkpoints")[0]
    return named_tokenizers(recipe.given_tokenizer)


def tokenizers_of(settings: TokenizerRecipe, data: DataRecipe, kept: Splits) -> TokenizerPair:
    """Train tokenizers on cleaned pairs; a vocabulary of all words includes held-out pairs."""
    pairs = kept.train
    logger.info("training the tokenizer (%s, %s tokens)", settings.algorithm, settings.vocab_size or "all")
    if settings.sentences is not None and isinstance(pairs, Sized):
        pairs = sample(cast("Dataset", pairs), settings.sentences)
    rest = kept.validation if kept.is_held_out and ("word", None) in settings.sides else ()
    own = settings.target_algorithm
    return train_tokenizers(
        (pair["source"] for pair in chain(islice(pairs, settings.sentences), rest)),
        (pair["target"] for pair in chain(islice(pairs, settings.sentences), rest)),
        algorithm=settings.algorithm if own is None else (settings.algorithm, own),
        vocab_size=settings.vocab_size,
        joint=settings.joint,
        target_vocab_size=settings.target_vocab_size,
        languages=data.control_tokens,
    )


def corpus_of(recipe: Recipe, given: TokenizerPair | None, accelerator: Accelerator | None = None) -> Corpus:
    """Load, clean, tokenize and encode a recipe's data; tokenizers are trained unless `given`."""
    check_model(recipe, given)
    splits = read_splits(recipe.data)
    check_references(splits, recipe.decoding.ignore, recipe.decoding.bleu_tokenizer)
    kept = clean(splits, recipe.data)
    tokenizers = given or tokenizers_of(recipe.tokenizer, recipe.data, kept)
    check_symbols(tokenizers, kept, recipe.decoding.ignore)
    check_model(recipe, tokenizers)
    return encode(recipe.data, recipe.batching, kept, tokenizers, recipe.optimization.distillation, accelerator)


def prepare_corpus(recipe: Recipe, folder: Path, accelerator: Accelerator | None = None) -> Corpus:
    """Return a run's corpus; its tokenizers are loaded from `folder`, or saved there."""
    is_main, checkpoint = accelerator is None or accelerator.is_main_process, None
    given = named_tokenizers(recipe.given_tokenizer)
    if given is None:
        given, checkpoint = kept_tokenizers(folder, recipe.folder / "checkpoints" if recipe.resume else None)
    if given is not None and checkpoint is not None and is_main:
        logger.warning("%s is missing or damaged: it is restored from %s", folder, checkpoint)
    corpus = corpus_of(recipe, given, accelerator)
    if is_main and (given is None or checkpoint is not None):
        with written_folder(folder) as partial:
            corpus.tokenizers.save_pretrained(partial)
            (partial / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")  # marks them as this run's
    return corpus
