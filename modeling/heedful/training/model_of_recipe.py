"""The model that a recipe describes, and the engine that trains it."""

from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import Accelerator
from accelerate.utils import DistributedType

from heedful.data.tokenization import TokenizerPair
from heedful.training.loop.engine import Engine
from heedful.training.loop.schedule import make_optimizer
from heedful.training.recipe import ModelRecipe, OptimizationRecipe
from heedful.training.recipe_file import MODEL_TYPES, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def make_engine(accelerator: Accelerator, model: "PreTrainedModel", settings: OptimizationRecipe) -> Engine:
    """Return the engine that the launcher asks for; the model has the same float32 weights on every rank."""
    kind = accelerator.distributed_type
    if settings.shrink_token_budget and kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise ValueError(
            "`optimization.shrink_token_budget` must be false where weights are sharded and no rank can continue "
            "without the others, but is true instead: set `optimization.token_budget` lower."
        )
    if kind != DistributedType.DEEPSPEED:
        return Engine(accelerator, model, make_optimizer(model, settings))
    from heedful.training.processes.zero import ZeroEngine

    return ZeroEngine(accelerator, model, make_optimizer(model, settings))


def _new_model(recipe: ModelRecipe, tokenizers: TokenizerPair) -> "PreTrainedModel":
    """Make a model of the config file, the options and the tokenizers; the options stand above the file."""
    options = (read_config(recipe.config) if recipe.config is not None else {}) | recipe.options
    vocabularies: dict[str, int | None] = {
        "vocab_size": len(tokenizers.source),
        "decoder_vocab_size": len(tokenizers.target),
        **tokenizers.special_ids(),
    }
    for name in vocabularies.keys() & recipe.options.keys():
        if options[name] != vocabularies[name]:
            raise ValueError(
                f"`model.options.{name}` must be left to the tokenizer, which sets it to {vocabularies[name]}, "
                f"but is {options[name]} instead."
            )
    if not tokenizers.is_joint:
        options["share_encoder_decoder_embeddings"] = False
    kind = options.pop("model_type", "heed")
    if kind not in MODEL_TYPES:
        raise ValueError(f"`model.options.model_type` must be {' or '.join(MODEL_TYPES)}, but is {kind} instead.")
    if kind == "heed":
        from heedful.configuration_heed import HeedConfig
        from heedful.modeling_heed import HeedForConditionalGeneration

        return HeedForConditionalGeneration(HeedConfig(**options | vocabularies))
    from heedful.configuration_heed_rnn import HeedRNNConfig
    from heedful.modeling_heed_rnn import HeedRNNForConditionalGeneration

    if recipe.attn_implementation is not None:
        raise ValueError(
            "`model.attn_implementation` must be empty for a recurrent model, which has one way to attend, "
            f"but is {recipe.attn_implementation!r} instead."
        )
    if recipe.gradient_checkpointing:
        raise ValueError("`model.gradient_checkpointing` must be false for a recurrent model, but is true instead.")
    return HeedRNNForConditionalGeneration(HeedRNNConfig(**options | vocabularies))
