"""Heedful: encoder-decoder models for Hugging Face users.

`import heedful` costs next to nothing: public names are imported at first use, and the Auto classes of transformers
learn of Heed's models when they are imported themselves, before or after this package.
"""

import importlib

from heedful.registration import install

__version__ = "0.1.0"

_HOMES = {
    "BackTranslation": "heedful.distillation.back_translation",
    "BeamSearch": "heedful.decoding.strategies.beam_search",
    "HeedConfig": "heedful.configuration_heed",
    "HeedDecoder": "heedful.modeling_heed",
    "HeedEncoder": "heedful.modeling_heed",
    "HeedForConditionalGeneration": "heedful.modeling_heed",
    "HeedModel": "heedful.modeling_heed",
    "HeedPreTrainedModel": "heedful.modeling_heed",
    "HeedRNNConfig": "heedful.configuration_heed_rnn",
    "HeedRNNDecoder": "heedful.modeling_heed_rnn",
    "HeedRNNEncoder": "heedful.modeling_heed_rnn",
    "HeedRNNForConditionalGeneration": "heedful.modeling_heed_rnn",
    "HeedRNNModel": "heedful.modeling_heed_rnn",
    "HeedRNNPreTrainedModel": "heedful.modeling_heed_rnn",
    "HeedSeq2SeqTrainer": "heedful.training.trainer.trainer",
    "HeedText2TextPipeline": "heedful.pipeline_heed",
    "HeedTranslationPipeline": "heedful.pipeline_heed",
    "MinimumBayesRisk": "heedful.decoding.strategies.minimum_bayes_risk",
    "SeededSampling": "heedful.decoding.strategies.sampling",
    "TokenizerPair": "heedful.data.tokenization",
    "Translator": "heedful.decoding.translation",
    "attention_map": "heedful.attention.maps",
    "attention_maps": "heedful.attention.maps",
    "compare_translations": "heedful.evaluation.comparison",
    "draw_attention": "heedful.attention.drawing",
    "draw_attention_grid": "heedful.attention.drawing",
    "make_recipe": "heedful.training.recipe_file",
    "prepare_for_inference": "heedful.decoding.native.engine",
    "read_recipe": "heedful.training.recipe_file",
    "train": "heedful.training.run",
    "write_attention_report": "heedful.attention.report",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str):
    """Import a public name at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'heedful' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(__all__)


install()
