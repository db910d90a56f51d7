"""Heed: encoder-decoder models for Hugging Face users.

`import heed` costs next to nothing: public names are imported at first use, and the Auto classes of transformers
learn of Heed's models when they are imported themselves, before or after this package.
"""

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

__version__ = "0.1.0"

_HOMES = {
    "BeamSearch": "heed.inference.strategies.beam_search",
    "ContrastiveSearch": "heed.inference.strategies.contrastive",
    "HeedConfig": "heed.configuration_heed",
    "HeedDecoder": "heed.modeling_heed",
    "HeedEncoder": "heed.modeling_heed",
    "HeedForConditionalGeneration": "heed.modeling_heed",
    "HeedModel": "heed.modeling_heed",
    "HeedPreTrainedModel": "heed.modeling_heed",
    "HeedSeq2SeqTrainer": "heed.training.trainer",
    "HeedTranslationPipeline": "heed.pipeline_heed",
    "MinimumBayesRisk": "heed.inference.strategies.minimum_bayes_risk",
    "NativeDecoder": "heed.inference.native.decoder",
    "TokenizerPair": "heed.data.tokenization",
    "Translator": "heed.inference.translation",
    "attention_map": "heed.inference.attention",
    "draw_attention": "heed.inference.attention",
    "prepare_for_inference": "heed.inference.native.preparation",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str):
    """Import a public name at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'heed' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(__all__)


def _register_config():
    from transformers import AutoConfig

    from heed.configuration_heed import HeedConfig

    AutoConfig.register(HeedConfig.model_type, HeedConfig, exist_ok=True)
    HeedConfig.register_for_auto_class()


def _register_models():
    from transformers import AutoModel, AutoModelForSeq2SeqLM

    from heed.configuration_heed import HeedConfig
    from heed.modeling_heed import HeedForConditionalGeneration, HeedModel

    AutoModel.register(HeedConfig, HeedModel, exist_ok=True)
    AutoModelForSeq2SeqLM.register(HeedConfig, HeedForConditionalGeneration, exist_ok=True)
    HeedModel.register_for_auto_class("AutoModel")
    HeedForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")


def _register_pipeline():
    from transformers import AutoModelForSeq2SeqLM
    from transformers.pipelines import PIPELINE_REGISTRY

    from heed.pipeline_heed import TASK, HeedTranslationPipeline

    PIPELINE_REGISTRY.register_pipeline(TASK, HeedTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text")


# Which module of transformers learns of Heed's classes, from which module of Heed, and how.
_REGISTRATIONS = {
    "transformers.models.auto.configuration_auto": ("heed.configuration_heed", _register_config),
    "transformers.models.auto.modeling_auto": ("heed.modeling_heed", _register_models),
    "transformers.pipelines": ("heed.pipeline_heed", _register_pipeline),
}
_WATCHED = {*_REGISTRATIONS, "heed.configuration_heed", "heed.modeling_heed", "heed.pipeline_heed"}
_in_progress: set[str] = set()


def _register_what_is_ready():
    """Register the classes whose Auto classes are imported; what is still being imported has its turn when done."""
    for auto_module, (heed_module, register) in list(_REGISTRATIONS.items()):
        ready = auto_module in sys.modules and not {auto_module, heed_module} & _in_progress
        if ready and auto_module in _REGISTRATIONS:
            del _REGISTRATIONS[auto_module]
            register()


class _AutoClassFinder(MetaPathFinder):
    """Registers Heed's classes right after the modules concerned have been imported.

    Importing them here instead would make `import heed` four times as slow as `import transformers`.
    """

    def find_spec(self, fullname, path=None, target=None):
        """Find the module as Python would, and let its loader register Heed's classes when it is done."""
        if fullname not in _WATCHED:
            return None
        _WATCHED.remove(fullname)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module):
            _in_progress.add(fullname)
            try:
                execute(module)
            finally:
                _in_progress.remove(fullname)
            _register_what_is_ready()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AutoClassFinder())
_register_what_is_ready()
