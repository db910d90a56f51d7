"""Conditions for packed weights: supported models and calls, and changes that end their use."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

from heedful.configuration_base_heed import position_limit
from heedful.configuration_heed import RELATIVE_ENCODINGS, HeedConfig
from heedful.decoding.engines import evaluation_mode
from heedful.decoding.native import kernels
from heedful.decoding.native.network import NativeNetwork
from heedful.decoding.search_settings import HUB_MODES, OTHER_MODES, SEARCH_SETTINGS, asked_of
from heedful.fast_paths_heed import foreign_code, foreign_hooks, method_of_one, runs_known_functions
from heedful.generation_heed import FiniteLogits
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.protocols import Seq2SeqModel
from heedful.versions_heed import CACHE

NAME = "the native decoder"
COMPARED = 4  # numbers per weight, the only trace of a fused optimizer; tokens whose logits are compared
# The largest relative difference between these logits, by weight type.
LIMITS = {"int8": 0.3, "bfloat16": 0.1, "float16": 0.02, "float32": 1e-4, "float64": 1e-4}
# Settings for other decoding methods. The last two need source tokens, but only their encoding is left.
UNREAD = (
    *OTHER_MODES, *HUB_MODES, *SEARCH_SETTINGS, "force_words_ids", "do_sample", "max_time", "stop_strings",
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
)  # fmt: skip
RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
UNREAD_ARGUMENTS = ("streamer", "synced_gpus", "decoder_attention_mask", "decoder_inputs_embeds")
# All weights that engines support. For a new weight or config field, decide what each engine does.
WEIGHTS = re.compile(
    r"lm_head\.(weight|bias)|model\.(en|de)coder\.((embed_tokens|embed_positions|embedding_norm|norm)\.(weight|bias)|"
    r"relative_positions\..+|layers\.\d+\.((self|cross)_attn\.([qkv]|out)_proj|feed_forward\.(fc1|fc_gate|fc2)|"
    r"(self_attn|cross_attn|feed_forward)_residual\.norm)\.(weight|bias)|"
    r"layers\.\d+\.(self|cross)_attn\.(additive_score|relative_(keys|values))\..+)"
)
NORMS: dict[str, type[nn.Module]] = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
# The models that `kernels.cpp` supports: like the paper's, with equally wide heads.
COMPILED: dict[str, tuple[object, ...]] = {
    "activation_function": ("relu",),
    "norm_type": ("layernorm",),
    "embedding_norm": (False,),
    "encoder_neighbourhood": (None,),
    "decoder_neighbourhood": (None,),
    "position_encoding": ("sinusoidal", "learned", "none"),
}


def model_obstacle(model: Seq2SeqModel) -> str | None:
    """Return why the native decoder cannot run a model, or `None`."""
    if (reason := obstacle_to_copies(model, NAME)) is not None:
        return reason
    if model.config.attention_scoring == "additive":
        return f"`attention_scoring` must be scaled_dot or dot for {NAME}, but is additive instead."
    if model.config.position_encoding in RELATIVE_ENCODINGS:
        must = f"`position_encoding` must be sinusoidal, learned, rotary or none for {NAME}"
        return f"{must}, but is {model.config.position_encoding} instead."
    for name, weight in model.named_parameters():
        if weight.device.type != "cpu":
            return f"The model's weights must be on the CPU for {NAME}, but {name} is on {weight.device} instead."
    return None


def obstacle_to_copies(model: Seq2SeqModel, engine: str) -> str | None:
    """Return why an engine with copied weights would give other results than a model, or `None`."""
    if not isinstance(model, HeedForConditionalGeneration):
        found = type(model).__name__
        if type(model).__module__.startswith("transformers_modules."):
            found += " of the code in its folder (to have Heedful's, load it after `import heedful`)"
        return f"The model must be a HeedForConditionalGeneration, but is a {found} instead."
    if not runs_known_functions(model):
        return f"`F.linear` and the attention function must be torch's or transformers' for {engine}, but one is not."
    if (name := foreign_code(model.modules())) is not None:
        return f"The model's classes and methods must be Heed's for {engine}, but {name} is not."
    if unread := sorted(type(model.config).__dataclass_fields__.keys() - HeedConfig.__dataclass_fields__.keys()):
        return f"The config's fields must be supported by {engine}, but `{unread[0]}` is not."
    for name, module in model.named_modules():
        # Adapters and quantizers replace plain modules or tensors.
        kind = type(module)
        has_weights = kind.__module__.startswith("torch.") and any(True for _ in module.parameters(recurse=False))
        has_none = kind is nn.Identity and name.endswith("embedding_norm")
        is_other_norm = name.endswith("norm") and kind is not NORMS[model.config.norm_type] and not has_none
        if is_other_norm or (has_weights and kind not in (nn.Linear, nn.Embedding, *NORMS.values())):
            return f"The model's modules must be Heed's for {engine}, but {name} is a {kind} instead."
        if foreign_hooks(module) or method_of_one(module):
            name = name or "the model itself"
            return f"The model must have no forward hooks and no replaced methods for {engine}, but {name} has one."
    for name, parameter in model.named_parameters():
        is_plain = type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor
        if not is_plain or parameter.is_meta or not parameter.is_floating_point():
            found = f"{name} is a {type(parameter.data).__name__} of {parameter.dtype} on {parameter.device} instead."
            return f"The model's weights must be floating-point numbers in memory for {engine}, but {found}"
    if unread := [name for name in model.state_dict() if not WEIGHTS.fullmatch(name)]:
        return f"The model's weights must be supported by {engine}, but {unread[0]} is not."
    return None


def kernels_obstacle(config: HeedConfig, precision: str) -> str | None:
    """Return why `kernels.cpp` cannot run a model here, or `None`."""
    if kernels.library() is None:
        return "they could not be compiled here"
    if precision == "int8" and not kernels.has_bytes():
        return "the processor lacks AVX-512 VNNI"
    head = config.d_model / config.decoder_attention_heads
    for name, known in {**COMPILED, "d_k": (None, head), "d_v": (None, head)}.items():
        if getattr(config, name) not in known:
            return f"they do not support `{name}` {getattr(config, name)}"
    return None


def settings_obstacle(
    config: GenerationConfig, stopping_criteria: Iterable[StoppingCriteria] = (), **model_kwargs: Any
) -> str | None:
    """Return why the native decoder cannot run a call of `generate()`, or only its config; else `None`."""
    for name, value in asked_of(config, UNREAD).items():
        why = ", which has no source tokens" * name.startswith("encoder_")
        return f"`{name}` must not be set with {NAME}{why}, but is {value!r} instead."
    for name in RECORDS:
        if config.return_dict_in_generate and getattr(config, name, None):
            return f"`{name}` must be False with {NAME}, which keeps no such records, but is True instead."
    for each in stopping_criteria:
        if type(each) not in (MaxLengthCriteria, EosTokenCriteria):  # the native search applies these
            kind = type(each).__name__
            return f"`stopping_criteria` must be lengths and end tokens with {NAME}, but one is a {kind} instead."
    for name in UNREAD_ARGUMENTS:
        if model_kwargs.get(name) is not None and model_kwargs[name] is not False:
            return f"`{name}` must be None with {NAME}, but is given instead."
    processors = model_kwargs.get("logits_processor") or ()
    if any(isinstance(each, FiniteLogits) and each.fills_cache for each in processors):
        return f"`{CACHE}` must be None with {NAME}, which fills no cache, but is given instead."
    return padding_obstacle(model_kwargs.get("attention_mask"))


def padding_obstacle(attention_mask: torch.Tensor | None) -> str | None:
    """Return an error for a `(batch, source_length)` mask that hides a whole source, or `None`."""
    if attention_mask is None or bool(attention_mask.any(dim=1).all()):
        return None
    return "`attention_mask` must leave a token in each source, but one is all padding instead."


@torch.no_grad()
def difference(model: HeedForConditionalGeneration, network: NativeNetwork, precision: str) -> str | None:
    """Return an error if the packed weights' logits for a few tokens differ beyond rounding, or `None`."""
    config = model.config
    tokens = torch.arange(min(COMPARED, position_limit(config) or COMPARED))[None]
    prompt = tokens % config.target_vocab_size
    prompt[0, 0] = config.decoder_start_token_id or 0
    with evaluation_mode(model), torch.autocast("cpu", enabled=False):
        expected = model(tokens % config.vocab_size, decoder_input_ids=prompt, use_cache=False).logits[:, -1].float()
        state = network.start(network.encode(tokens % config.vocab_size, None), None, prompt, 1)
        distance = (network.step(prompt[:, -1], state) - expected).norm() / expected.norm().clamp(min=1e-6)
    limit = LIMITS["int8" if precision == "int8" else str(model.dtype).removeprefix("torch.")]
    if not distance > limit:  # NaN passes, because the search finds it
        return None
    must = f"The model's logits must be the same with {NAME} as with its own code"
    return f"{must}, but differ by {distance:.1%}: its classes, or functions that they call, were changed."


class Fingerprint:
    """A model's weights and hooks when it was copied."""

    def __init__(self, model: nn.Module):
        self._model, self._traces = model, _traces(model)
        # Views of the weights, because writing to `.data` or a fused optimizer changes no version.
        flat = [parameter.detach().flatten() for parameter in model.parameters()]
        self._samples = [numbers[:: max(1, len(numbers) // COMPARED)] for numbers in flat]
        self._values = _bits(self._samples)

    @property
    def has_changed(self) -> bool:
        """Whether the model's weights, their numbers, or foreign hooks have changed."""
        # First the addresses: if they changed, the samples are from former weights.
        return _traces(self._model) != self._traces or not torch.equal(_bits(self._samples), self._values)


def _traces(model: nn.Module) -> list[tuple[int, int]]:
    """Return numbers that change if a weight is replaced or written, or foreign code is added."""
    modules = list(model.modules())
    kinds = {type(module): None for module in modules}
    found = [(0, int(runs_known_functions(model))), *((id(kind), id(kind.forward)) for kind in kinds)]
    for module in modules:
        found += [(id(module), id(hook)) for hook in foreign_hooks(module)]
        own = (parameter for parameter in module._parameters.values() if parameter is not None)
        found += [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in own]
    return found


def _bits(samples: list[torch.Tensor]) -> torch.Tensor:
    places = {(sample.dtype, sample.device) for sample in samples}
    if len(places) > 1:
        samples = [sample.float().cpu() for sample in samples]
    return torch.cat(samples).float().view(torch.int32)  # so NaN equals itself
