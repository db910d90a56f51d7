"""Heedful: encoder-decoder models for Hugging Face users.

`import heedful` costs next to nothing: public names are imported at first use, and the Auto classes of transformers
learn of Heed's models when they are imported themselves, before or after this package.
"""

import importlib
import warnings

from heedful.registration import install

__version__ = "0.1.0"

_HOMES = {
    "BackTranslation": "heedful.inference.teaching.back_translation",
    "BeamSearch": "heedful.inference.strategies.beam_search",
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
    "MinimumBayesRisk": "heedful.inference.strategies.minimum_bayes_risk",
    "NativeDecoder": "heedful.inference.native.decoder",
    "SeededSampling": "heedful.inference.strategies.sampling",
    "TokenizerPair": "heedful.data.tokenization",
    "Translator": "heedful.inference.translation",
    "attention_map": "heedful.inference.attention.maps",
    "attention_maps": "heedful.inference.attention.maps",
    "compare_translations": "heedful.evaluation.comparison",
    "draw_attention": "heedful.inference.attention.drawing",
    "draw_attention_grid": "heedful.inference.attention.drawing",
    "make_recipe": "heedful.training.recipe_file",
    "prepare_for_inference": "heedful.inference.native.prepared_model",
    "read_recipe": "heedful.training.recipe_file",
    "train": "heedful.training.run",
    "write_attention_report": "heedful.inference.attention.report",
}
# Names that were exported until 0.1, each with the module that has it.
_MOVED = {
    "alignment_errors": "heedful.inference.attention.measures",
    "attention_entropy": "heedful.inference.attention.measures",
    "attention_rollout": "heedful.inference.attention.measures",
    "dual_cross_entropy": "heedful.inference.scoring",
    "record_gates": "heedful.inference.attention.recording",
    "word_alignment": "heedful.inference.attention.measures",
    "word_attention": "heedful.inference.attention.measures",
    "write_run_card": "heedful.publishing.run_card",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str):
    """Import a public name at its first use."""
    home = _HOMES.get(name) or _MOVED.get(name)
    if home is None:
        raise AttributeError(f"module 'heedful' has no attribute {name!r}")
    if name in _MOVED:
        advice = f"`from heedful import {name}` will be removed: use `from {home} import {name}`."
        warnings.warn(advice, FutureWarning, stacklevel=2)
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(__all__)


install()
