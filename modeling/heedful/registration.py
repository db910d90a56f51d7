"""Registration of Heed's models in transformers' Auto classes and pipelines, without importing these.

Importing the Auto classes would make `import heedful` take seconds. So a finder at the head of `sys.meta_path`
registers each class when Python imports its Auto class.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import heedful


def _register_config() -> None:
    from transformers import AutoConfig

    for config in (heedful.HeedConfig, heedful.HeedRNNConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        config.register_for_auto_class()


def _register_models() -> None:
    from transformers import AutoModel, AutoModelForSeq2SeqLM

    for model in (heedful.HeedModel, heedful.HeedRNNModel):
        AutoModel.register(model.config_class, model, exist_ok=True)
    for whole in (heedful.HeedForConditionalGeneration, heedful.HeedRNNForConditionalGeneration):
        AutoModelForSeq2SeqLM.register(whole.config_class, whole, exist_ok=True)


def _send_code_along(kind: str) -> None:
    """Let `save_pretrained` copy a model family's code into saved folders."""
    getattr(heedful, f"{kind}Model").register_for_auto_class("AutoModel")
    getattr(heedful, f"{kind}ForConditionalGeneration").register_for_auto_class("AutoModelForSeq2SeqLM")


def _register_tokenizer() -> None:
    from transformers import AutoTokenizer, PreTrainedConfig

    from heedful.tokenization_heed import HeedSourceTokenizer

    # A folder's tokenizer is found by its class name. With HeedConfig it would replace tokenizers with untrusted code.
    of_no_model = type("HeedSourceTokenizerConfig", (PreTrainedConfig,), {})
    AutoTokenizer.register(of_no_model, fast_tokenizer_class=HeedSourceTokenizer)


def _register_pipeline() -> None:
    from transformers import AutoModelForSeq2SeqLM
    from transformers.pipelines import PIPELINE_REGISTRY

    for task in (heedful.HeedTranslationPipeline, heedful.HeedText2TextPipeline):
        PIPELINE_REGISTRY.register_pipeline(task.task_id, task, pt_model=AutoModelForSeq2SeqLM, type="text")


CONFIGS = {"heedful.configuration_heed", "heedful.configuration_heed_rnn"}
MODELS = {"heedful.modeling_heed", "heedful.modeling_heed_rnn"}
# For each imported module: Heed's modules that its registration needs, and the registration.
_REGISTRATIONS: dict[str, tuple[set[str], Callable[[], None]]] = {
    "transformers.models.auto.configuration_auto": (CONFIGS, _register_config),
    "transformers.models.auto.modeling_auto": (MODELS, _register_models),
    "transformers.models.auto.tokenization_auto": ({"heedful.tokenization_heed"}, _register_tokenizer),
    "transformers.pipelines": ({"heedful.pipeline_heed"}, _register_pipeline),
    "heedful.modeling_heed": (set(), partial(_send_code_along, "Heed")),
    "heedful.modeling_heed_rnn": (set(), partial(_send_code_along, "HeedRNN")),
}
_WATCHED = set(_REGISTRATIONS).union(*(modules for modules, _ in _REGISTRATIONS.values()))
_in_progress: set[str] = set()


def _register_what_is_ready() -> None:
    """Register the classes whose Auto classes are completely imported."""
    for module, (heed_modules, register) in list(_REGISTRATIONS.items()):
        ready = module in sys.modules and not {module, *heed_modules} & _in_progress
        if ready and module in _REGISTRATIONS:
            del _REGISTRATIONS[module]
            register()


class _AutoClassFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in _WATCHED:
            return None
        _WATCHED.remove(fullname)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            _in_progress.add(fullname)
            try:
                execute(module)
            finally:
                _in_progress.remove(fullname)
            _register_what_is_ready()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Register classes for modules already imported, and watch for later imports."""
    if not any(isinstance(finder, _AutoClassFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoClassFinder())
    _register_what_is_ready()
