"""The model that a recipe describes, and the engine that trains it."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from heedful.data.mixture import check_room
from heedful.data.teacher import TeacherTokens
from heedful.data.tokenization import TokenizerPair
from heedful.training.loop.engine import TrainingEngine
from heedful.training.loop.feed import Feed, may_pack
from heedful.training.loop.objective import Objective, check_dropout
from heedful.training.loop.schedule import make_optimizer
from heedful.training.processes.devices import runs_on_cpu
from heedful.training.processes.launcher import world_size
from heedful.training.recipe import ModelRecipe, OptimizationRecipe, Recipe
from heedful.training.recipe_file import MODEL_TYPES, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from heedful.configuration_base_heed import HeedBaseConfig


def make_model(
    recipe: ModelRecipe, tokenizers: TokenizerPair, checkpoint: str | Path | None = None
) -> "PreTrainedModel":
    """Make the recipe's model: with fresh weights, those of the model that it starts from, or those of a checkpoint.

    Sizes of vocabularies and special ids come from the tokenizers, so that the two cannot disagree. A config that
    contradicts them, or has other sizes than the run's checkpoint, is a `ValueError`.
    """
    if recipe.start_from is None:
        model = _new_model(recipe, tokenizers)
    else:
        from heedful.inference.loading import load_model

        model = load_model(recipe.start_from)
        tokenizers.check_config(model.config)
    if recipe.attn_implementation is not None:
        model.set_attn_implementation(recipe.attn_implementation)
    if checkpoint is not None:
        try:
            model = type(model).from_pretrained(checkpoint, config=model.config, trust_remote_code=False)
        except RuntimeError as error:  # what transformers raises for weights of other sizes
            raise ValueError(
                f"`model` must have the sizes of the run that is resumed ({checkpoint}), with allow_changes=true too, "
                "but has others instead."
            ) from error
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def make_engine(accelerator: Accelerator, model: "PreTrainedModel", settings: OptimizationRecipe) -> TrainingEngine:
    """Return the engine that trains a model, which has the same float32 weights on every rank."""
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    if settings.shrink_token_budget and is_sharded:
        raise ValueError(
            "`optimization.shrink_token_budget` must be false where weights are sharded and no rank can continue "
            "without the others, but is true instead: set `optimization.token_budget` lower."
        )
    check_dropout(settings.r_drop, model.config)
    packs = not is_sharded and may_pack(model, accelerator)
    body = None
    if settings.compile is True or (settings.compile == "auto" and accelerator.device.type == "cuda"):
        from heedful.training.speed.compilation import body_of

        body = body_of(model, settings, accelerator, is_sharded, packs)
    feed = Feed(accelerator, model.config, settings.micro_batch_tokens, Objective.of(settings), packs)
    # A scale of gradients and a moving average wait for each update anyway.
    waits = accelerator.device.type != "cuda" or accelerator.scaler is not None or settings.ema_decay is not None
    return TrainingEngine(model, make_optimizer(model, settings), feed, body, not (waits or is_sharded))


def check_model(recipe: Recipe, given: TokenizerPair | None) -> None:
    """Check before anything slow what can be known of a model whose tokenizers are given, or else to be trained.

    Options that contradict each other, a model that no memory here can hold, a teacher of other tokens, and beams that
    are more than the tokens are a `ValueError`.
    """
    settings, options, teacher = recipe.tokenizer, recipe.model.options, recipe.optimization.distillation
    if teacher is not None and given is not None:
        TeacherTokens(teacher).check(given)
    target = settings.vocab_size if settings.joint else settings.target_vocab_size or settings.vocab_size
    if given is not None:
        known, target, is_joint = _vocabularies(given), len(given.target), given.is_joint
    else:
        # What the tokenizer will set; how many words there are is not known, and then of no matter.
        source = settings.vocab_size or options.get("vocab_size", 1000)
        known = {"vocab_size": source, "decoder_vocab_size": target or options.get("decoder_vocab_size", source)}
        known |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        is_joint = settings.joint
    if recipe.model.start_from is None:
        config = config_of(recipe.model, known, is_joint)
        check_dropout(recipe.optimization.r_drop, config)
        if recipe.optimization.compile is True:
            from heedful.training.speed.compilation import check_compile

            check_compile(recipe.optimization, config, recipe.model.gradient_checkpointing)
        check_room(recipe.data, config)
        _check_memory(config, runs_on_cpu(recipe.optimization.device) and world_size() == 1)
    for section in ("validation", "decoding"):
        beams = getattr(recipe, section).num_beams
        if target is not None and beams > target:
            raise ValueError(
                f"`{section}.num_beams` must be at most {target}, the size of the vocabulary, but is {beams} instead."
            )


def _check_memory(config: "HeedBaseConfig", is_alone: bool) -> None:
    from heedful.training.speed.model_size import check_memory

    check_memory(_class_of(config), config, is_alone)


def _vocabularies(tokenizers: TokenizerPair) -> dict[str, int | None]:
    sizes = {"vocab_size": len(tokenizers.source), "decoder_vocab_size": len(tokenizers.target)}
    return {**sizes, **tokenizers.special_ids()}


def _new_model(recipe: ModelRecipe, tokenizers: TokenizerPair) -> "PreTrainedModel":
    """Make a model of the config file, the options and the tokenizers."""
    config = config_of(recipe, _vocabularies(tokenizers), tokenizers.is_joint)
    _check_memory(config, is_alone=False)
    return _class_of(config)(config)


def config_of(recipe: ModelRecipe, vocabularies: dict[str, int | None], is_joint: bool) -> "HeedBaseConfig":
    """Make a config of the config file, the options above it, and what is known of the tokenizers."""
    from heedful.configuration_base_heed import REMOVED_KEYS

    options = (read_config(recipe.config) if recipe.config is not None else {}) | recipe.options
    for name in vocabularies.keys() & recipe.options.keys():
        if options[name] != vocabularies[name]:
            raise ValueError(
                f"`model.options.{name}` must be left to the tokenizer, which sets it to {vocabularies[name]}, "
                f"but is {options[name]} instead."
            )
    for name in REMOVED_KEYS:
        if recipe.options.get(name):
            raise ValueError(f"`model.options.{name}` must be left out, for it was removed, but is given instead.")
    if not is_joint:
        options["share_encoder_decoder_embeddings"] = False
    kind = options.pop("model_type", "heed")
    if kind not in MODEL_TYPES:
        raise ValueError(f"`model.options.model_type` must be {' or '.join(MODEL_TYPES)}, but is {kind} instead.")
    if kind == "heed":
        from heedful.configuration_heed import HeedConfig

        return _made(HeedConfig, options | vocabularies)
    from heedful.configuration_heed_rnn import HeedRNNConfig

    if recipe.attn_implementation is not None:
        raise ValueError(
            "`model.attn_implementation` must be empty for a recurrent model, which has one way to attend, "
            f"but is {recipe.attn_implementation!r} instead."
        )
    if recipe.gradient_checkpointing:
        raise ValueError("`model.gradient_checkpointing` must be false for a recurrent model, but is true instead.")
    return _made(HeedRNNConfig, options | vocabularies)


def _made(kind: type["HeedBaseConfig"], options: dict[str, Any]) -> "HeedBaseConfig":
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    try:
        return kind(**options)
    except StrictDataclassFieldValidationError as error:
        told = re.search(r"field '(\w+)'", str(error))
        if told is None or told[1] not in options:
            raise
        hint = kind.__dataclass_fields__[told[1]].type
        types = hint.__name__ if isinstance(hint, type) else str(hint).replace(" | ", " or ")
        raise ValueError(f"`model.options.{told[1]}` must be {types}, but is {options[told[1]]!r} instead.") from error


def _class_of(config: "HeedBaseConfig") -> type["PreTrainedModel"]:
    if config.model_type == "heed":
        from heedful.modeling_heed import HeedForConditionalGeneration

        return HeedForConditionalGeneration
    from heedful.modeling_heed_rnn import HeedRNNForConditionalGeneration

    return HeedRNNForConditionalGeneration
