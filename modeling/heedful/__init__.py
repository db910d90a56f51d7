"""Heedful: encoder-decoder models for Hugging Face users.

`import heedful` costs next to nothing: public names are imported at first use, and the Auto classes of transformers
learn of Heed's models when they are imported themselves, before or after this package.
"""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

__version__ = "0.1.0"

_HOMES = {
    "BeamSearch": "heedful.inference.strategies.beam_search",
    "ContrastiveSearch": "heedful.inference.strategies.contrastive",
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
    "HeedSeq2SeqTrainer": "heedful.training.trainer",
    "HeedTranslationPipeline": "heedful.pipeline_heed",
    "MinimumBayesRisk": "heedful.inference.strategies.minimum_bayes_risk",
    "NativeDecoder": "heedful.inference.native.decoder",
    "TokenizerPair": "heedful.data.tokenization",
    "Translator": "heedful.inference.translation",
    "alignment_errors": "heedful.inference.attention.measures",
    "attention_entropy": "heedful.inference.attention.measures",
    "attention_map": "heedful.inference.attention.maps",
    "attention_maps": "heedful.inference.attention.maps",
    "attention_rollout": "heedful.inference.attention.measures",
    "draw_attention": "heedful.inference.attention.drawing",
    "draw_attention_grid": "heedful.inference.attention.drawing",
    "prepare_for_inference": "heedful.inference.native.prepared_model",
    "word_alignment": "heedful.inference.attention.measures",
    "write_attention_report": "heedful.inference.attention.report",
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


def _register_config():
    from transformers import AutoConfig

    from heedful.configuration_heed import HeedConfig
    from heedful.configuration_heed_rnn import HeedRNNConfig

    for config in (HeedConfig, HeedRNNConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        config.register_for_auto_class()


def _register_models():
    from transformers import AutoModel, AutoModelForSeq2SeqLM

    from heedful import modeling_heed, modeling_heed_rnn

    for model, whole in (
        (modeling_heed.HeedModel, modeling_heed.HeedForConditionalGeneration),
        (modeling_heed_rnn.HeedRNNModel, modeling_heed_rnn.HeedRNNForConditionalGeneration),
    ):
        AutoModel.register(model.config_class, model, exist_ok=True)
        AutoModelForSeq2SeqLM.register(whole.config_class, whole, exist_ok=True)


def _send_code_along(module: str, kind: str):
    """Let `save_pretrained` put the code of a module's models into their folders."""
    models = importlib.import_module(module)
    getattr(models, f"{kind}Model").register_for_auto_class("AutoModel")
    getattr(models, f"{kind}ForConditionalGeneration").register_for_auto_class("AutoModelForSeq2SeqLM")


def _register_pipeline():
    from transformers import AutoModelForSeq2SeqLM
    from transformers.pipelines import PIPELINE_REGISTRY

    from heedful.pipeline_heed import TASK, HeedTranslationPipeline

    PIPELINE_REGISTRY.register_pipeline(TASK, HeedTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text")


# Which module has been imported when something is to be registered, which modules of Heed it needs, and how.
_REGISTRATIONS: dict[str, tuple[set[str], Callable[[], None]]] = {
    "transformers.models.auto.configuration_auto": (
        {"heedful.configuration_heed", "heedful.configuration_heed_rnn"},
        _register_config,
    ),
    "transformers.models.auto.modeling_auto": (
        {"heedful.modeling_heed", "heedful.modeling_heed_rnn"},
        _register_models,
    ),
    "transformers.pipelines": ({"heedful.pipeline_heed"}, _register_pipeline),
    "heedful.modeling_heed": (set(), partial(_send_code_along, "heedful.modeling_heed", "Heed")),
    "heedful.modeling_heed_rnn": (set(), partial(_send_code_along, "heedful.modeling_heed_rnn", "HeedRNN")),
}
_WATCHED = set(_REGISTRATIONS).union(*(modules for modules, _ in _REGISTRATIONS.values()))
_in_progress: set[str] = set()


def _register_what_is_ready():
    """Register the classes whose Auto classes are imported; what is still being imported has its turn when done."""
    for module, (heed_modules, register) in list(_REGISTRATIONS.items()):
        ready = module in sys.modules and not {module, *heed_modules} & _in_progress
        if ready and module in _REGISTRATIONS:
            del _REGISTRATIONS[module]
            register()


class _AutoClassFinder(MetaPathFinder):
    """Registers Heed's classes right after the modules concerned have been imported.

    Importing them here instead would make `import heedful` four times as slow as `import transformers`.
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
