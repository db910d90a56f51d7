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
    "SeededSampling": "heedful.inference.strategies.sampling",
    "TokenizerPair": "heedful.data.tokenization",
    "Translator": "heedful.inference.translation",
    "alignment_errors": "heedful.inference.attention.measures",
    "attention_entropy": "heedful.inference.attention.measures",
    "attention_map": "heedful.inference.attention.maps",
    "attention_maps": "heedful.inference.attention.maps",
    "attention_rollout": "heedful.inference.attention.measures",
    "compare_translations": "heedful.evaluation.comparison",
    "draw_attention": "heedful.inference.attention.drawing",
    "draw_attention_grid": "heedful.inference.attention.drawing",
    "dual_cross_entropy": "heedful.inference.scoring",
    "make_recipe": "heedful.training.recipe_file",
    "prepare_for_inference": "heedful.inference.native.engine",
    "read_recipe": "heedful.training.recipe_file",
    "record_gates": "heedful.inference.attention.recording",
    "train": "heedful.training.run",
    "word_alignment": "heedful.inference.attention.measures",
    "word_attention": "heedful.inference.attention.measures",
    "write_attention_report": "heedful.inference.attention.report",
    "write_run_card": "heedful.publishing.run_card",
}
# Names that go with the next version: where they are, and what to use.
_DEPRECATED = {
    "NativeDecoder": ("heedful.inference.native.decoder", "`prepare_for_inference(model)`, or `Translator`"),
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str):
    """Import a public name at its first use."""
    home = _HOMES.get(name)
    if name in _DEPRECATED:
        home, instead = _DEPRECATED[name]
        warnings.warn(f"`heedful.{name}` goes with the next version: use {instead}.", FutureWarning, stacklevel=2)
    if home is None:
        raise AttributeError(f"module 'heedful' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(__all__)


install()
