"""A recipe's model, and the engine that trains it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from accelerate.utils import DistributedType

import heedful
from heedful.configuration_base_heed import HeedBaseConfig, position_limit
from heedful.data.epochs.teacher import TeacherTokens
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.loading import load_model
from heedful.messages_heed import wrong
from heedful.protocols import TrainableModel
from heedful.training.loop.feed import Feed, may_pack
from heedful.training.processes.devices import runs_on_cpu
from heedful.training.processes.launcher import world_size
from heedful.training.recipe import ModelRecipe, OptimizationRecipe, Recipe
from heedful.training.recipe_file import MODELS, sizes, suggestion
from heedful.training.updates.compilation import body_of, check_compile
from heedful.training.updates.engine import TrainingEngine
from heedful.training.updates.model_size import check_memory
from heedful.training.updates.objective import Objective
from heedful.training.updates.optimizers import make_optimizer
from heedful.versions_heed import CHECKPOINTING

MODEL_TYPES = ("heed", "heed_rnn")


def make_model(recipe: ModelRecipe, tokenizers: TokenizerPair, checkpoint: Path | None = None) -> TrainableModel:
    """Make the recipe's model with fresh weights, or with weights from `start_from` or a checkpoint.

    Raises a `ValueError` if the config contradicts the tokenizers, or if its sizes differ from the checkpoint's.
    """
    if recipe.start_from is None:
        config = config_of(recipe, tokenizers.vocabularies(), tokenizers.is_joint)
        model = _class_of(config)(config)
    else:
        model = cast("TrainableModel", load_model(recipe.start_from))
        tokenizers.check_config(model.config)
    if recipe.attn_implementation is not None:
        model.set_attn_implementation(recipe.attn_implementation)
    if checkpoint is not None:
        try:
            model = type(model).from_pretrained(checkpoint, config=model.config, trust_remote_code=False)
        except RuntimeError as error:  # for weights with other sizes
            must = f"have the resumed run's sizes ({checkpoint}), also with allow_changes=true"
            raise wrong("model", must, "others", verb="has") from error
    if recipe.activation_checkpointing:
        getattr(model, f"{CHECKPOINTING}_enable")()
    return model


def make_engine(accelerator: Accelerator, model: TrainableModel, settings: OptimizationRecipe) -> TrainingEngine:
    """Return the engine for a model that has the same float32 weights on every rank."""
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    if settings.shrink_token_budget and is_sharded:
        must = "be false if weights are sharded, because no rank can continue without the others"
        raise wrong("optimization.shrink_token_budget", must, "true", advice="set `optimization.token_budget` lower")
    must = "be another one if weights are sharded, because Muon needs whole matrices"
    settings.require(settings.optimizer != "muon" or not is_sharded, "optimizer", must)
    packs = not is_sharded and may_pack(model, accelerator)
    body = None
    if settings.compile is True or (settings.compile == "auto" and accelerator.device.type == "cuda"):
        body = body_of(model, settings, accelerator, is_sharded, packs)
    feed = Feed(accelerator, model.config, settings.micro_batch_tokens, Objective.of(settings, model.config), packs)
    # A gradient scaler waits for each update anyway, and only Adam can skip a step on a GPU.
    decides_on_device = accelerator.device.type == "cuda" and accelerator.scaler is None and not is_sharded
    decides_on_device = decides_on_device and settings.optimizer in ("adam", "adamw")
    return TrainingEngine(model, make_optimizer(model, settings), feed, body, decides_on_device)


def check_model(recipe: Recipe, given: TokenizerPair | None) -> None:
    """Check a recipe's model before anything slow; tokenizers are `given`, or will be trained."""
    settings, options, optimization = recipe.tokenizer, recipe.model.options, recipe.optimization
    if optimization.distillation is not None and given is not None:
        TeacherTokens(optimization.distillation).check(given)
    if given is not None:
        vocabularies, is_joint = given.vocabularies(), given.is_joint
        target = vocabularies["decoder_vocab_size"]
    else:
        # The future tokenizer's values; if the number of words is unknown, any will do.
        is_joint, target = settings.joint, settings.vocab_size if settings.joint else settings.sides[1][1]
        vocabularies = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        source = vocabularies["vocab_size"] = settings.vocab_size or options.get("vocab_size", 1000)
        vocabularies["decoder_vocab_size"] = target or options.get("decoder_vocab_size", source)
    if recipe.model.start_from is None:
        config = config_of(recipe.model, vocabularies, is_joint)
        Objective.of(optimization, config)
        if optimization.compile is True:
            check_compile(optimization, config, recipe.model.activation_checkpointing)
        recipe.data.check_room(position_limit(config))
        check_memory(_class_of(config), config, runs_on_cpu(optimization.device) and world_size() == 1)
    must = f"be at most {target}, the vocabulary's size"
    recipe.decoding.require(target is None or recipe.decoding.num_beams <= target, "num_beams", must)


def config_of(recipe: ModelRecipe, vocabularies: dict[str, int | None], is_joint: bool) -> HeedBaseConfig:
    """Make a config from the config file, the recipe's options, and the tokenizers' values."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    options = (read_config(recipe.config) if recipe.config is not None else {}) | recipe.options
    for name in vocabularies.keys() & recipe.options.keys():
        if options[name] != vocabularies[name]:
            must = f"be left to the tokenizer, which sets it to {vocabularies[name]}"
            raise wrong(f"model.options.{name}", must, options[name])
    if not is_joint:
        options["share_encoder_decoder_embeddings"] = False
    kind = options.pop("model_type", "heed")
    if kind not in MODEL_TYPES:
        raise wrong("model.options.model_type", f"be {' or '.join(MODEL_TYPES)}", kind)
    is_recurrent = kind == "heed_rnn"
    if is_recurrent and recipe.attn_implementation is not None:
        must = "be empty for a recurrent model, which has only one attention"
        raise wrong("model.attn_implementation", must, repr(recipe.attn_implementation))
    is_met = not (is_recurrent and recipe.activation_checkpointing)
    recipe.require(is_met, "activation_checkpointing", "be false for a recurrent model")
    made: type[HeedBaseConfig] = heedful.HeedRNNConfig if is_recurrent else heedful.HeedConfig
    options |= vocabularies
    try:
        return made(**options)
    except StrictDataclassFieldValidationError as error:
        named = re.search(r"field '(\w+)'", str(error))
        if named is None or named[1] not in options:
            raise
        hint = made.__dataclass_fields__[named[1]].type
        types = hint.__name__ if isinstance(hint, type) else str(hint).replace(" | ", " or ")
        raise wrong(f"model.options.{named[1]}", f"be {types}", repr(options[named[1]])) from error


def read_config(path: str | Path) -> dict[str, Any]:
    """Return a config.json's fields, by path, folder or size name."""
    path = Path(path)
    named = [MODELS / path / "config.json"] if path.name == str(path) else []
    file = next((file for file in (path, path / "config.json", *named) if file.is_file()), None)
    if file is None:
        found = f"does not exist{suggestion(path, sizes())}: `heedful recipes` lists the included sizes"
        raise FileNotFoundError(f"The model config {path} (`model.config`) {found}.")
    config = f"The model config {file} (`model.config`)"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{config} must be JSON, but is not: {error}") from error
    kind = fields.get("model_type", "heed") if isinstance(fields, dict) else type(fields).__name__
    if kind not in MODEL_TYPES:
        raise ValueError(f"{config} must be of type {' or '.join(MODEL_TYPES)}, but is of {kind} instead.")
    return {name: value for name, value in fields.items() if name not in ("architectures", "transformers_version")}


def _class_of(config: HeedBaseConfig) -> Callable[[Any], TrainableModel]:
    is_recurrent = isinstance(config, heedful.HeedRNNConfig)
    return heedful.HeedRNNForConditionalGeneration if is_recurrent else heedful.HeedForConditionalGeneration
