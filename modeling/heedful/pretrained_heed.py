"""Loading, resizing and saving for both families.

Loading refuses missing and unknown weights and wrong shapes, which transformers only logs. Saving adds checksums of
the weights, and the code, so that a saved model loads without Heedful.
"""

import copy
import math
import re
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from .checksums_heed import write_checksums
from .configuration_base_heed import CHANGED_CODE, HeedBaseConfig
from .fast_paths_heed import foreign_code, is_eager, is_known, is_ours, method_of_one
from .messages_heed import listed, wrong
from .processor_heed import multiplies_bytes_exactly
from .versions_heed import check_peft

PUSH_SETTINGS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr")  # of `push_to_hub`
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
OLD_FORM = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin(\.index\.json)?")  # weights
# Methods that neither encode nor decode: a saved model needs no user's versions of them.
UNSAVED = ("loss", "save_pretrained", "from_pretrained")
ALIGNMENT = 64  # bytes; torch puts tensors on the CPU at multiples of it


class HubAccess:
    """A model's revision and token, for its tokenizers; the token is never shown, copied or saved."""

    def __init__(self, revision: str | None = None, token: str | bool | None = None):
        self.revision, self.token = revision, token

    def __reduce__(self) -> tuple[type["HubAccess"], tuple[str | None]]:
        return HubAccess, (self.revision,)


class HeedBaseModel(PreTrainedModel):
    """Base class of both families' models and stacks: loading, resizing, saving."""

    config: HeedBaseConfig
    base_model_prefix = "model"
    # For each Auto class, the class that it loads from a saved folder's code.
    auto_map: ClassVar[dict[str, str]]
    side: Literal["encoder", "decoder"] | None = None  # `None` for a whole model
    # Set by the enclosing model: only the whole model has all of the vocabulary's matrices.
    is_part_of_a_model = False
    embed_tokens: nn.Embedding  # in stacks

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls._auto_class = None  # or transformers would copy a user's file into each folder

    def look_up(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Return the `(batch, length, width)` embeddings of `(batch, length)` token ids, or the given ones."""
        if inputs_embeds is None and input_ids is not None:
            self.check_token_ids(input_ids)
            return self.drop_words(self.embed_tokens(input_ids))
        if inputs_embeds is None or input_ids is not None:
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"Exactly one of `input_ids` and `inputs_embeds` must be given, but {given} was.")
        return self.drop_words(inputs_embeds)

    def drop_words(self, embeddings: torch.Tensor) -> torch.Tensor:
        """In training, drop `(batch, length, width)` embeddings at whole positions, and divide the others by 1 - p.

        This is word dropout (Gal and Ghahramani, 2016), for each position, as in Sennrich and Zhang (2019).
        """
        if not self.training:
            return embeddings
        p = self.config.target_word_dropout if self.side == "decoder" else self.config.source_word_dropout
        return embeddings * F.dropout(torch.ones_like(embeddings[..., :1]), p) if p else embeddings

    def check_token_ids(self, input_ids: torch.Tensor) -> None:
        """Raise a `ValueError` if ids are not `(batch, length)`, or, on the CPU, if one is outside the vocabulary."""
        if input_ids.dim() != 2 or (is_eager() and not input_ids.shape[1]):
            must = "Token ids must be of shape (batch, length), with at least one token"
            raise ValueError(f"{must}, but are of {tuple(input_ids.shape)} instead.")
        # Not on a GPU, where each call would synchronize.
        if input_ids.device.type != "cpu" or not is_eager() or input_ids.numel() == 0:
            return
        # From the config: adapters that replace embeddings lack their number.
        limit = self.config.target_vocab_size if self.side == "decoder" else self.config.vocab_size
        for bound in map(int, input_ids.aminmax()):
            if not 0 <= bound < limit:
                raise ValueError(f"Token ids must be at least 0 and below {limit}, but one is {bound} instead.")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, but refuse missing and unknown weights.

        `output_loading_info=True` returns a report instead. A model without a head loads from a folder with one; a
        model with a head loads from a folder without one, and gets a new head.

        Raises:
            ValueError: If weights are missing or unknown, a file is broken, or the model needs a user's code.
            RuntimeError: If weights have other shapes and `ignore_mismatched_sizes` is not set.
        """
        source, may_differ = pretrained_model_name_or_path, bool(kwargs.get("ignore_mismatched_sizes"))
        is_strict = source is not None and kwargs.get("state_dict") is None and not kwargs.get("output_loading_info")
        # transformers' own error for other shapes does not name the weights.
        asked = {**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": may_differ or is_strict}
        load: Any = super().from_pretrained
        try:
            model, report = load(source, *args, **asked)
        except Exception as error:
            # By its name: a model from the Hub may run without this library.
            if type(error).__name__ != "SafetensorError":
                raise
            raise ValueError(f"{source} must hold whole safetensors files, but one is broken: {error}") from error
        changed = getattr(model.config, CHANGED_CODE, None)
        if changed and changed_code(model) is None:
            must = f"{source} must hold a model of Heedful's own code, but `{changed}` is a user's"
            way = f"load it with your own class's `from_pretrained`, or pass `{CHANGED_CODE}=None` to do without it"
            raise ValueError(f"{must}: {way}.")
        own_report = model.__dict__.pop("_own_report", report)
        if is_strict:
            adapter: Any = next(iter((getattr(model, "peft_config", None) or {}).values()), None)
            if adapter is not None:  # the report is about the adapter's base model
                source = adapter.base_model_name_or_path or source
            check_names(model, own_report, source)
            check_matrices(model, own_report, source, may_differ)
            if adapter is not None and (lacking := report["missing_keys"]):
                raise ValueError(f"The adapter must have all its weights, but lacks {listed(lacking)}.")
        check_device_map(model)
        widen_second_products(model)
        align_weights(model)
        check_quantization(model)
        # Pipelines load the target's tokenizer with it.
        model.hub_access = HubAccess(kwargs.get("revision"), kwargs.get("token"))
        return (model, report) if kwargs.get("output_loading_info") else model

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        """Keep the report on the model's own weights: with an adapter, transformers returns only the adapter's."""
        super()._adjust_missing_and_unexpected_keys(loading_info)
        self._own_report = loading_info.to_dict()

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter as transformers does; an `ImportError` names the required peft version."""
        check_peft()
        return super().load_adapter(*args, **kwargs)

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Add an adapter as transformers does; an `ImportError` names the required peft version."""
        check_peft()
        super().add_adapter(*args, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with Heed's code, so that each Auto class finds its model in the folder.

        If the model runs your code, no code is saved, and config.json names your class or method.

        Raises:
            ValueError: If torchao's `quantize_` changed the weights: they cannot be written then.
        """
        if self.quantized_weights() and getattr(self, "hf_quantizer", None) is None:
            must = "The weights must be quantized by `from_pretrained` to be saved, but `quantize_` did it instead"
            raise ValueError(f"{must}: save them plain, and load with `quantization_config=TorchAoConfig(...)`.")
        self._keep_sharing()
        for name in ("auto_map", CHANGED_CODE):
            vars(self.config).pop(name, None)
        if (changed := changed_code(self)) is not None:
            setattr(self.config, CHANGED_CODE, changed)
        elif any(reference.endswith(f".{type(self).__name__}") for reference in self.auto_map.values()):
            self.config.auto_map = dict(self.auto_map)
            # transformers' saver copies each imported file, so this line adds the pipeline's.
            from .pipeline_heed import pipelines_of_folder

            offered = getattr(self.config, "custom_pipelines", None) or {}
            self.config.custom_pipelines = pipelines_of_folder(next(iter(offered), None))
        # transformers would upload before the checksums are written.
        pushes = not kwargs.get("variant") and kwargs.pop("push_to_hub", False)
        settings = {name: kwargs.pop(name) for name in PUSH_SETTINGS if pushes and name in kwargs}
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", args[0] if args else True):
            _sign_weights(Path(save_directory), not (kwargs.get("variant") or getattr(self, "peft_config", None)))
            if pushes:
                self.push_to_hub(settings.pop("repo_id", Path(save_directory).name), **settings)

    def quantized_weights(self) -> list[str]:
        """Return the names of weights that torchao has quantized."""
        weights = self.named_parameters()
        return [name for name, weight in weights if type(weight.data).__module__.split(".")[0] == "torchao"]

    def _keep_sharing(self: Any) -> None:
        """Restore tying in the config: with two vocabularies, merging an adapter marks all matrices untied."""
        if self.config.tie_word_embeddings or self.side is not None:
            return
        model, head = self.base_model, self.get_output_embeddings()
        target = model.decoder.embed_tokens.weight
        shares_input = model.encoder.embed_tokens.weight is target
        shares_output = head is not None and head.weight is target
        if shares_input or shares_output:
            self.config.tie_word_embeddings = True
            self.config.share_encoder_decoder_embeddings = shares_input
            self.config.tie_output_embeddings = shares_output

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize and return the source embeddings; if `config.has_one_vocabulary`, also the target's and the output.

        With two vocabularies, `resize_decoder_token_embeddings` resizes the target's. A decoder alone resizes its own.

        Args:
            new_num_tokens: New number of tokens; by default unchanged.
            pad_to_multiple_of: Rounds the number up.
            mean_resizing: Whether new rows are drawn around the old rows' mean, or as in a new model.

        Raises:
            ValueError: If a special id leaves the vocabulary, weights are not in memory, or this stack is in a model.
        """
        both = self.side is None and self.config.has_one_vocabulary
        sides: list[str] = ["encoder", "decoder"] if both else [self.side or "encoder"]
        return self._resize(sides, new_num_tokens, pad_to_multiple_of, mean_resizing)

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the target embeddings and the output like `resize_token_embeddings`, for two vocabularies.

        Raises:
            ValueError: If source and target share a matrix, or as `resize_token_embeddings` does.
        """
        if self.config.shares_source_and_target_embeddings:
            must, advice = "be False to resize only the target's embeddings", "call `resize_token_embeddings`"
            raise wrong("share_encoder_decoder_embeddings", must, True, advice=f"{advice}, which resizes both")
        return self._resize(["decoder"], new_num_tokens, pad_to_multiple_of, mean_resizing)

    def _resize(
        self, sides: list[str], new_num_tokens: int | None, pad_to_multiple_of: int | None, mean_resizing: bool
    ) -> nn.Embedding:
        stacks: list[Any] = [self if self.side is not None else getattr(self.base_model, side) for side in sides]
        modules: list[Any] = [stack.embed_tokens for stack in stacks]
        if new_num_tokens is None and pad_to_multiple_of is None:
            return modules[0]
        size = _rounded_up(modules[0].num_embeddings if new_num_tokens is None else new_num_tokens, pad_to_multiple_of)
        config = self._config_of_size(sides, size)
        if "decoder" in sides and (head := self.get_output_embeddings()) is not None:
            modules.append(head)
        if self.is_part_of_a_model:
            must = f"`{type(self).__name__}` must not be resized within a model, whose other parts keep their size"
            raise ValueError(f"{must}: resize the whole model (`resize_token_embeddings`).")
        has_map, weights = bool(getattr(self, "hf_device_map", None)), [module.weight for module in modules]
        if any((weight.is_meta and has_map) or not weight.numel() for weight in weights):
            must = "The embeddings must be in memory to be resized, but are offloaded or spread over processes"
            raise ValueError(f"{must}: load the model without `device_map` and ZeRO-3, resize it and save it.")
        for module in modules:
            _resize_rows(module, size, mean_resizing)
        for name in ("share_encoder_decoder_embeddings", "vocab_size", "decoder_vocab_size"):
            setattr(self.config, name, getattr(config, name))
        self.vocab_size = self.config.vocab_size  # transformers keeps it here too
        self.tie_weights()
        return modules[0]

    def _config_of_size(self, sides: list[str], size: int) -> HeedBaseConfig:
        """Return a checked config with a new vocabulary size for these sides."""
        config = copy.copy(self.config)
        if self.side is None and len(sides) == 1:
            config.share_encoder_decoder_embeddings = False
        if "encoder" in sides or config.has_one_vocabulary:
            config.vocab_size = size
        if "decoder" in sides:
            config.decoder_vocab_size = size
        config.validate_architecture()
        return config


@torch.no_grad()
def _resize_rows(module: Any, size: int, mean_resizing: bool) -> None:
    """Resize embeddings, or a pre-softmax layer and its bias, in place."""
    # Hewitt (2021, "Initializing New Word Embeddings for Pretrained Language Models").
    for old in module.parameters(recurse=False):
        new = old.new_empty(max(0, size - len(old)), *old.shape[1:])
        if mean_resizing:
            spread = old.float().std(0, correction=0) * 1e-4
            new.copy_(torch.randn(new.shape, device=new.device) * spread + old.float().mean(0))
        else:
            new.normal_(std=old.shape[-1] ** -0.5) if old.dim() > 1 else new.zero_()
        old.data, old.grad = torch.cat([old[:size], new]), None
    setattr(module, "num_embeddings" if isinstance(module, nn.Embedding) else "out_features", size)


def _sign_weights(folder: Path, is_whole: bool) -> None:
    """Write the saved weights' checksums, give these files the config's mode, and remove an earlier model's files."""
    if not (folder / "config.json").is_file():  # adapters
        return
    if is_whole:
        # transformers has removed an earlier model's shards, but not a single file, which it would load first.
        names = [path.name for path in folder.iterdir()]
        left = "model.safetensors" if any(map(SHARD.fullmatch, names)) else "model.safetensors.index.json"
        for name in (left, *filter(OLD_FORM.fullmatch, names)):
            (folder / name).unlink(missing_ok=True)
    for path in folder.glob("*.safetensors"):
        path.chmod((folder / "config.json").stat().st_mode)  # safetensors lets only the owner open its files
    write_checksums(folder, "weights")


def _rounded_up(size: int, multiple: int | None) -> int:
    if multiple is None:
        return size
    if not isinstance(multiple, int):  # in transformers' words, which its tests expect
        asked = f"Asking to pad the embedding matrix to a multiple of `{multiple}`, which is not and integer"
        raise ValueError(f"{asked}. Please make sure to pass an integer")
    if multiple < 1:
        raise ValueError(f"`pad_to_multiple_of` must be at least 1, but is {multiple} instead.")
    return math.ceil(size / multiple) * multiple


def widen_second_products(model: PreTrainedModel) -> None:
    """Convert T5's second feed-forward matrices to float32, as transformers does: their products overflow float16."""
    config: Any = model.config
    if model.dtype == torch.float16 and getattr(config, "position_encoding", None) == "t5":
        for name, weight in model.named_parameters() if config.norm_type == "rmsnorm" else ():
            if ".fc2." in name and type(weight.data) is torch.Tensor and not weight.is_meta:
                weight.data = weight.data.float()


@torch.no_grad()
def align_weights(model: PreTrainedModel) -> None:
    """Move loaded weights to aligned addresses: at others MKL sums in another order."""
    for weight in model.parameters():
        if weight.device.type == "cpu" and type(weight.data) is torch.Tensor and weight.data_ptr() % ALIGNMENT:
            weight.data = weight.data.clone()


def check_device_map(model: PreTrainedModel) -> None:
    """Raise a `ValueError` if a `device_map` puts only one of two tied matrices on the disk."""
    devices = getattr(model, "hf_device_map", None) or {}
    if "disk" not in devices.values():
        return
    for pair in model.all_tied_weights_keys.items():
        parts = [[part for part in devices if not part or f"{name}.".startswith(f"{part}.")] for name in pair]
        found = [devices[max(those, key=len)] if those else None for those in parts]
        if found[0] != found[1]:
            places = " and ".join(f"{name} on {device}" for name, device in zip(pair, found, strict=True))
            must = f"`device_map` must put tied matrices on one device, but puts {places} instead"
            raise ValueError(f'{must}; `device_map="auto"` with `max_memory` does so.')


def changed_code(model: HeedBaseModel) -> str | None:
    """Return the name of a user's class or method (not torch's, adapters' or quantizers') in a model, or `None`."""
    kinds = type(model).__mro__
    for kind in kinds[: kinds.index(next(filter(is_ours, kinds)))]:
        for name, value in vars(kind).items():
            is_method = isinstance(value, (FunctionType, property, classmethod, staticmethod))
            if is_method and name not in UNSAVED and kind.__module__.split(".")[0] != "torch":
                return f"{kind.__module__}.{kind.__qualname__}.{name}"
    if not is_known(ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation)):
        return f"attention function {model.config._attn_implementation}"
    is_wrapped = getattr(model, "peft_config", None) or getattr(model, "hf_quantizer", None)
    parts = [each for each in model.modules() if each is not model and type(each).__module__.split(".")[0] != "torch"]
    parts = [each for each in parts if not is_wrapped or is_ours(type(each))]
    patched = ((type(each).__qualname__, method_of_one(each)) for each in [model, *parts])
    own = (f"{kind}.{name}" for kind, name in patched if name is not None and name not in UNSAVED)
    return foreign_code(parts) or next(own, None)


def check_quantization(model: Any) -> None:
    """Raise a `ValueError` if torchao has quantized no weight, or if its products would be wrong here."""
    settings = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    is_torchao = getattr(settings, "quant_method", None) == QuantizationMethod.TORCHAO
    if is_torchao and not model.quantized_weights():
        must = "`quantization_config` must fit the model, but no weight could be quantized with it"
        sizes = f"`d_model` ({model.config.d_model}) and the inner sizes"
        raise ValueError(f"{must}: `group_size` must divide {sizes}.")
    weights = [model.get_parameter(name) for name in model.quantized_weights()]
    on_cpu = [weight for weight in weights if weight.device.type == "cpu"]
    if any(getattr(each, "act_quant_kwargs", None) for each in on_cpu) and not multiplies_bytes_exactly():
        must = "`quantization_config` must quantize only weights on this processor, which lacks VNNI instructions"
        raise ValueError(f"{must}, but quantizes activations too: torch's 8-bit products would be wrong.")


def check_names(model: Any, report: dict[str, Any], source: Any) -> None:
    """Raise a `ValueError` if the loading report has missing or unknown weights."""
    missing, unknown = report["missing_keys"], report["unexpected_keys"]
    name, base, prefix = type(model).__name__, model.base_model, f"{model.base_model_prefix}."
    if name not in (model.config.architectures or [name]):
        # With or without a head: only the stacks must match.
        unknown = [key for key in unknown if hasattr(base, key.removeprefix(prefix).split(".")[0])]
        missing = missing if base is model else [key for key in missing if key.startswith(prefix)]
    for what, keys in {"lacks": missing, "also holds": unknown}.items():
        if keys:
            must = f"{source} must hold the weights of its config's {name}, but {what} {listed(keys)}"
            raise ValueError(f"{must}; `output_loading_info=True` loads the rest and returns a list.")


def check_matrices(model: Any, report: dict[str, Any], source: Any, may_differ: bool) -> None:
    """Raise if `source` holds weights with other shapes, unless they `may_differ`, or two different tied matrices."""
    shapes = [f"{key} {tuple(found)} instead of {tuple(wanted)}" for key, found, wanted in report["mismatched_keys"]]
    if shapes and not may_differ:
        must = f"{source} must hold weights of its config's shapes, but has {listed(shapes)}"
        raise RuntimeError(f"{must}; `ignore_mismatched_sizes=True` draws them at random.")
    # transformers then unties them.
    for pair in (getattr(model, "_tied_weights_keys", None) or {}).items():
        one, other = (model.get_parameter(key) for key in pair)
        if one is not other and one.device == other.device and one.device.type != "meta":
            must = f"{source} must hold one matrix for {pair[0]} and {pair[1]}, which the config ties, but holds two"
            raise ValueError(f"{must} different ones: set `tie_word_embeddings` to False in its config.")
