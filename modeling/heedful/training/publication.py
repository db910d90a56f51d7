"""A run's published model: a folder with averaged weights, and their scores."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import GenerationConfig

from heedful.configuration_base_heed import TASK, TEXT_TASK
from heedful.data.data_recipe import DataRecipe
from heedful.data.epochs.corpus import Corpus, StoredRows
from heedful.data.epochs.encoding import SOURCES_FILE
from heedful.data.languages import LANGUAGE_CODE, code_of, language_of
from heedful.data.sources import read_pairs, sample
from heedful.decoding.loading import load_model
from heedful.decoding.search_settings import LONGEST_SOURCE, SEARCH_SETTINGS
from heedful.decoding.translation import Translator
from heedful.evaluation.faults import USUAL_RATIOS, usual_ratios
from heedful.files import written_folder
from heedful.pipeline_heed import pipelines_of_folder
from heedful.protocols import TrainableModel
from heedful.training.loop.validation import score_pairs, validation_loss
from heedful.training.recipe import CardRecipe, DecodingRecipe, Recipe
from heedful.training.recipe_file import to_yaml
from heedful.training.run_folder.checkpoints import published_checkpoints
from heedful.training.run_folder.folder import foreign_files
from heedful.training.run_folder.progress import Progress

logger = logging.getLogger(__name__)

MODEL_FOLDER = "model"
UNDETERMINED = "und"  # ISO 639-2's code for an unnamed language
NO_LANGUAGE = "zxx"  # its code for text in no language


def language_codes(card: CardRecipe, data: DataRecipe, pairs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return source and target language codes from the card, column names, or texts of some pairs.

    Two forms of one language, such as en_US and en_GB, keep their countries or scripts.
    """
    named = card.source_language or data.source, card.target_language or data.target
    texts = ([pair[side] for pair in pairs] for side in ("source", "target"))
    sides = zip((card.source_language, card.target_language), named, texts, strict=True)
    source, target = (code_of(said or "") or language_of(name, some) or UNDETERMINED for said, name, some in sides)
    tags = [name.replace("_", "-") for name in named]
    are_forms = source == target != UNDETERMINED and tags[0] != tags[1] and all(map(LANGUAGE_CODE.fullmatch, tags))
    return (tags[0], tags[1]) if are_forms else (source, target)


def is_translation(source_language: str, target_language: str) -> bool:
    """Return whether two codes name different natural languages."""
    languages = {source_language, target_language}
    return len(languages) == 2 and not languages & {UNDETERMINED, NO_LANGUAGE}


def publish_weights(recipe: Recipe, corpus: Corpus, progress: Progress, accelerator: Accelerator) -> TrainableModel:
    """Write the published folder on the main process, and return its model on every rank."""
    checkpoints = published_checkpoints(recipe.folder / "checkpoints", recipe.checkpoints, progress)
    model = cast("TrainableModel", load_model(checkpoints[-1]))
    what = "weights" if len(checkpoints) == 1 else "average"
    logger.info("publishing the %s of %s", what, ", ".join(path.name for path in checkpoints))
    missing, unexpected = model.load_state_dict(average_weights(checkpoints), strict=False)
    assert set(missing) <= set(model.all_tied_weights_keys), missing
    assert not unexpected, unexpected
    model.generation_config = with_decoding(model.generation_config, recipe.decoding)
    setattr(model.generation_config, LONGEST_SOURCE, corpus.training.longest_source)
    if corpus.target_language is None:  # lengths depend on the language
        sides = ([pair[side] for pair in corpus.validation_pairs] for side in ("source", "target"))
        setattr(model.generation_config, USUAL_RATIOS, usual_ratios(*sides))
    codes = language_codes(recipe.card, recipe.data, corpus.validation_pairs)
    model.config.custom_pipelines = pipelines_of_folder(TASK if is_translation(*codes) else TEXT_TASK)
    if accelerator.is_main_process:
        with written_folder(recipe.folder / MODEL_FOLDER) as partial:
            model.save_pretrained(partial)
            corpus.tokenizers.save_pretrained(partial)
            (partial / "recipe.yaml").write_text(to_yaml(recipe, is_private=True), encoding="utf-8")
            for file in foreign_files(recipe.folder / MODEL_FOLDER):  # the user's files stay
                (partial / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(recipe.folder / MODEL_FOLDER / file, partial / file, follow_symlinks=False)
        if isinstance(training := corpus.training, StoredRows):
            training.digests.tofile(recipe.folder / SOURCES_FILE)
    accelerator.wait_for_everyone()
    return model


def average_weights(paths: list[Path]) -> dict[str, torch.Tensor]:
    """Average checkpoint weights (section 6.1), summed in float64."""
    total: dict[str, torch.Tensor] = {}
    for path in paths:
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file)
        if total and {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in total.items()}:
            raise ValueError(f"The checkpoints {path} and {paths[0]} are from different models: their weights differ.")
        for name, weight in weights.items():
            total[name] = total.get(name, 0) + weight.double()
    return {name: (weight / len(paths)).float() for name, weight in total.items()}


def with_decoding(config: GenerationConfig, decoding: DecodingRecipe) -> GenerationConfig:
    """Return a generation config with the recipe's decoding in place of earlier settings.

    transformers' own search ignores `length_penalty_form` and `tokens_beyond_source`, so they are written only if
    they change something.
    """
    before = config.to_dict().items()
    settings = {name: value for name, value in before if name[0] != "_" and name not in SEARCH_SETTINGS}
    settings |= {"num_beams": decoding.num_beams, "length_penalty": decoding.length_penalty}
    settings |= {"max_length": decoding.max_length, "early_stopping": False}
    own = {name: getattr(decoding, name) for name in SEARCH_SETTINGS}
    settings |= {name: value for name, value in own.items() if value not in SEARCH_SETTINGS[name]}
    # A new config: transformers ignores unknown settings in one made from a model's config.
    return type(config).from_dict(settings)


def score_published(
    folder: Path,
    data: DataRecipe,
    decoding: DecodingRecipe,
    corpus: Corpus,
    accelerator: Accelerator,
    token_budget: int,
    sentences: int | None,
) -> dict[str, Any]:
    """Score a published folder on the tests, or if there are none, on validation `sentences`."""
    translator = Translator.from_pretrained(folder, device=accelerator.device)
    loss = validation_loss(translator.model, corpus.validation, token_budget, accelerator)
    metrics: dict[str, Any] = {"validation": {"loss": loss, "perplexity": float(torch.tensor(loss).exp())}}
    scoring = {"bootstrap": decoding.bootstrap, "tokenize": decoding.bleu_tokenizer, "ignore": decoding.ignore}
    settings = {"target_language": corpus.target_language, "token_budget": token_budget, "context": corpus.context}
    columns: dict[str, Any] = {"references": data.references, "documents": data.documents}
    for name, location in data.located.test.items():
        pairs = list(read_pairs(location, data.source, data.target, split=name, **columns))
        metrics[name] = score_pairs(translator, pairs, accelerator, scoring, **settings)
    if not data.test:  # each card needs a score
        pairs = sample(corpus.validation_pairs, sentences or None, not corpus.context)
        metrics["validation"] |= score_pairs(translator, pairs, accelerator, scoring, **settings)
    return metrics


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in all sets' metrics, named for trackers."""
    return {
        f"test/{name}/{key}": value
        for name, values in metrics.items()
        for key, value in values.items()
        if isinstance(value, int | float)
    }
