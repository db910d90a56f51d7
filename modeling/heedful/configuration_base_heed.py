"""Base class of both families' configurations: vocabularies, special ids and spelling checks."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any

from transformers.configuration_utils import PreTrainedConfig, strict
from transformers.utils import logging

from .checksums_heed import CONFIG_KEY

logger = logging.get_logger(__name__)

HEED_TYPES = ("heed", "heed_rnn")  # both families; their tokenizers fit their vocabularies exactly
# Model types without a length limit, whatever their `max_position_embeddings`.
MODELS_OF_ANY_LENGTH = ("m2m_100", "nllb-moe", "t5", "mt5", "umt5", "longt5")
CHANGED_CODE = "changed_code"  # the user's class or method that a saved model used; the folder does not contain it
# Keys that other libraries write into config.json.
EXTRA_KEYS = (
    "attn_implementation",
    "auto_map",
    CHANGED_CODE,
    "custom_pipelines",
    "model_type",
    "name_or_path",
    "output_attentions",
    "quantization_config",
    "torch_dtype",
)
# Field names of other libraries, mapped to ours; "" has no counterpart.
MEANT_KEYS = {
    "decoder_bidirectional": "bidirectional",
    "feed_forward_proj": "activation_function",
    "num_labels": "",
    "post_norm_eps": "",
    "share_embeddings": "share_encoder_decoder_embeddings",
    "static_position_embeddings": "position_encoding",
    "tie_encoder_decoder": "",
}
# Field names of T5, BERT, Llama and others, and ours with the same meaning.
SYNONYMS: dict[str, tuple[str, ...]] = {
    others: tuple(fields.split())
    for names, fields in {
        "num_hidden_layers num_layers n_layers n_layer": "encoder_layers decoder_layers",
        "num_encoder_layers": "encoder_layers",
        "num_decoder_layers": "decoder_layers",
        "num_attention_heads num_heads n_heads n_head nhead": "encoder_attention_heads decoder_attention_heads",
        "num_key_value_heads": "encoder_key_value_heads decoder_key_value_heads",
        "intermediate_size d_ff ffn_dim dim_feedforward": "encoder_ffn_dim decoder_ffn_dim",
        "hidden_size n_embd embed_dim": "d_model",
        "d_kv head_dim": "d_k d_v",
        "dropout_rate hidden_dropout_prob hidden_dropout": "dropout",
        "attention_probs_dropout_prob attn_dropout": "attention_dropout",
        "hidden_act hidden_activation activation": "activation_function",
        "layer_norm_epsilon rms_norm_eps norm_eps norm_epsilon": "layer_norm_eps",
        "n_positions": "max_position_embeddings",
        "src_vocab_size": "vocab_size",
        "tgt_vocab_size": "decoder_vocab_size",
    }.items()
    for others in names.split()
}
TASK, TEXT_TASK = "heed-translation", "heed-text2text"  # names of the pipelines
FORMAT_VERSION = 1
IGNORED_LABEL = -100  # marks labels without a prediction, as in transformers

# `get_text_config()` must have the target's size in `generate()`, the source's for peft; the Trainer changes it.
_is_generating = ContextVar("_is_generating", default=False)


class OfferedPipelines(dict[str, dict[str, Any]]):
    """Maps each task to the folder's pipeline code; `task in` is False if the installed Heedful has the task.

    `pipeline()` takes the default task from the keys, and requires trust in the folder's code if `task in` is True.
    """

    def __contains__(self, task: object) -> bool:
        """Return whether the folder has code for a task and the installed Heedful has none."""
        if not super().__contains__(task):
            return False
        from transformers.pipelines import PIPELINE_REGISTRY  # slow to import

        return task not in PIPELINE_REGISTRY.supported_tasks


@strict
class HeedBaseConfig(PreTrainedConfig):
    """The fields of both families, documented by `HeedConfig`, and their checks."""

    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    vocab_size: int = 37000
    decoder_vocab_size: int | None = None
    label_smoothing: float | int = 0.1
    source_word_dropout: float | int = 0.0
    target_word_dropout: float | int = 0.0
    tie_word_embeddings: bool = True
    share_encoder_decoder_embeddings: bool = True
    tie_output_embeddings: bool = True
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        if self.format_version > FORMAT_VERSION:  # first: a newer version may have renamed any other field
            cure = "install that one, or, without Heedful, load the model's code with `trust_remote_code=True`"
            found = f"is {self.format_version} instead: a newer Heedful wrote the model ({cure})"
            raise ValueError(f"`format_version` must be at most {FORMAT_VERSION}, but {found}.")
        kwargs.pop(CONFIG_KEY, None)  # describes the folder, not the model
        self._check_spelling(kwargs)
        if "custom_pipelines" in kwargs:
            kwargs["custom_pipelines"] = OfferedPipelines(kwargs["custom_pipelines"])
        self._take_synonyms(kwargs)
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        self.validate_architecture()
        super().__post_init__(**kwargs)

    def _take_synonyms(self, kwargs: dict[str, Any]) -> None:
        """Set the fields given by another library's names; one stack's name wins over a name for both."""
        fields, taken = type(self).__dataclass_fields__, set[str]()
        for synonym in sorted(kwargs, key=lambda name: -len(self._fields_of(name))):
            names = self._fields_of(synonym)
            value = kwargs.pop(synonym) if names else None
            for name in names:
                present = getattr(self, name)
                if name in taken or present in (value, fields[name].default):
                    setattr(self, name, value)
                    taken.add(name)
                elif len(names) == 1:
                    must = f"`{synonym}` must be left out if `{name}`, its other name, is given"
                    raise ValueError(f"{must}, but they are {value} and {present} instead.")

    @classmethod
    def _fields_of(cls, name: str) -> tuple[str, ...]:
        """Return the fields that another library's name sets."""
        known = cls.__dataclass_fields__
        names = () if name in known else SYNONYMS.get(name, (cls.attribute_map.get(name, ""),))
        return tuple(each for each in names if each in known)

    def __setattr__(self, name: str, value: Any) -> None:
        for field in self._fields_of(name) or (name,):
            moves_both = field == "vocab_size" and self.has_one_vocabulary
            super().__setattr__(field, value)
            if moves_both:
                self.decoder_vocab_size = value

    @contextmanager
    def vocabulary_of_the_target(self) -> Iterator[None]:
        """Let `get_text_config()` return the target's vocabulary size, in this thread."""
        token = _is_generating.set(True)
        try:
            yield
        finally:
            _is_generating.reset(token)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return one side's config, as transformers does; within `generate()` the target's by default."""
        if decoder == encoder and _is_generating.get() and self.decoder_vocab_size != self.vocab_size:
            config = copy.copy(self)
            config.vocab_size = self.target_vocab_size
            return config
        return super().get_text_config(decoder=decoder, encoder=encoder)

    @property
    def target_vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return self.decoder_vocab_size or self.vocab_size

    @property
    def has_one_vocabulary(self) -> bool:
        """Whether source and target share a vocabulary, in one embedding matrix or two."""
        return self.share_encoder_decoder_embeddings and self.decoder_vocab_size == self.vocab_size

    @property
    def shares_source_and_target_embeddings(self) -> bool:
        """Whether encoder and decoder share one embedding matrix."""
        return self.tie_word_embeddings and self.share_encoder_decoder_embeddings

    @property
    def shares_target_and_output_embeddings(self) -> bool:
        """Whether the decoder's embedding matrix is also the pre-softmax matrix."""
        return self.tie_word_embeddings and self.tie_output_embeddings

    def validate_architecture(self) -> None:
        """Raise a `ValueError` that names the field if the model cannot be built."""
        self._check_own_fields()
        self._check_embeddings()

    def _check_own_fields(self) -> None:
        self._check_shares("label_smoothing", "source_word_dropout", "target_word_dropout")

    def _require(self, is_met: Any, name: str, rule: str, found: str | None = None) -> None:
        """Raise a `ValueError` if a field breaks its rule; `found` replaces the field's value in the message."""
        if not is_met:
            raise ValueError(f"`{name}` must be {rule}, but {found or f'is {getattr(self, name)}'} instead.")

    def _check_at_least_one(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(value is None or value >= 1, name, "at least 1")

    def _check_shares(self, *names: str) -> None:
        for name in names:
            self._require(0 <= getattr(self, name) < 1, name, "at least 0 and below 1")

    def _check_embeddings(self) -> None:
        """Check vocabularies, special ids and sharing."""
        self._require(
            not self.shares_source_and_target_embeddings or self.decoder_vocab_size == self.vocab_size,
            "share_encoder_decoder_embeddings",
            "False if `decoder_vocab_size` differs from `vocab_size`",
            f"it is True with {self.decoder_vocab_size} and {self.vocab_size}",
        )
        target = self.target_vocab_size
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            limit = min(self.vocab_size, target) if name == "pad_token_id" else target
            ids = getattr(self, name)
            for token_id in ids if isinstance(ids, list) else [ids]:
                is_met = token_id is None or 0 <= token_id < limit
                self._require(is_met, name, f"at least 0 and below {limit}", f"is {token_id}")

    def _check_spelling(self, keys: dict[str, Any]) -> None:
        """Raise a `ValueError` for a key that resembles a field: the base class would keep it without effect."""
        from transformers import GenerationConfig

        family = type(self).__name__
        names = [*type(self).__dataclass_fields__, *filter(self._fields_of, SYNONYMS)]
        known = {*GenerationConfig().to_dict(), *EXTRA_KEYS}
        unknown = (key for key in keys if key not in known and not self._fields_of(key))
        for key in (key for key in unknown if not key.startswith("_")):
            meant = MEANT_KEYS.get(key, key)
            nearest = get_close_matches(meant, names, n=1, cutoff=0.8 if meant == key else 1.0)
            if nearest:
                raise ValueError(f"`{key}` is not a field of {family}; did you mean `{nearest[0]}`?")
            logger.warning_once(f"`{key}` is not a field of {family}: it is kept without effect.")


def special_token(model: Any, *names: str) -> Any:
    """Return the first of these special ids (or id lists) in the generation config or config, else `None`."""
    found = (getattr(config, name, None) for name in names for config in (model.generation_config, model.config))
    return next((value for value in found if value is not None), None)


def position_limit(config: Any) -> int | None:
    """Return an encoder-decoder's longest sequence, or `None` for no limit."""
    is_extended = config.model_type == "heed" and config.position_encoding != "learned"
    is_extended = is_extended or config.model_type in MODELS_OF_ANY_LENGTH
    return None if is_extended else getattr(config, "max_position_embeddings", None)
