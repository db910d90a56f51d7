"""The sizes and options of a recurrent encoder-decoder: what *Attention Is All You Need* replaced."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Literal

from transformers.configuration_utils import PreTrainedConfig, strict
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Keys that transformers and its neighbours write into a config.json beside the fields.
EXTRA_KEYS = (
    "auto_map",
    "custom_pipelines",
    "model_type",
    "name_or_path",
    "quantization_config",
    "torch_dtype",
)
FORMAT_VERSION = 1

_is_generating = ContextVar("_is_generating", default=False)


@contextmanager
def vocabulary_of_the_target() -> Iterator[None]:
    """Let `HeedRNNConfig.get_text_config()` tell the number of target tokens as `vocab_size`, in this thread."""
    token = _is_generating.set(True)
    try:
        yield
    finally:
        _is_generating.reset(token)


class OfferedPipelines(dict):
    """The tasks that a folder brings code for, without those that the installed Heed has: it wins over copied code.

    `pipeline()` demands trust in the copied code for a task that it finds here, and looks among the registered ones
    for any other.
    """

    def __contains__(self, task) -> bool:
        """Tell whether the folder's code is needed for a task."""
        from transformers.pipelines import PIPELINE_REGISTRY

        return super().__contains__(task) and task not in PIPELINE_REGISTRY.supported_tasks


@strict
class HeedRNNConfig(PreTrainedConfig):
    r"""Configuration of [`HeedRNNModel`] and [`HeedRNNForConditionalGeneration`].

    `HeedRNNConfig()` is Bahdanau's model (2015) in Luong's order (2015): a bidirectional GRU encoder, and a GRU
    decoder that is fed what it attended to. Every argument is keyword-only.

    Args:
        vocab_size (`int`): Number of source tokens, and of target tokens unless `decoder_vocab_size` is given.
        decoder_vocab_size (`int`, *optional*): Number of target tokens where source and target have separate
            vocabularies; `None` becomes `vocab_size`. Assigning `vocab_size` sets both where they are one.
        embedding_size (`int`): Width of the embeddings, and of what the pre-softmax matrix reads.
        hidden_size (`int`): Width of the decoder's state and of the encoder's output. A bidirectional encoder gives
            each direction half of it.
        encoder_layers, decoder_layers (`int`): Number of recurrent layers on top of each other.
        cell (`str`): `rnn` (Elman, 1990: tanh), `lstm` (Hochreiter and Schmidhuber, 1997, with the forget gate of Gers
            et al., 2000) or `gru` (Cho et al., 2014).
        bidirectional (`bool`): Whether each layer of the encoder reads the source in both directions (Schuster and
            Paliwal, 1997).
        attention (`str`): How the decoder's state q scores the encoder's state k: `dot` qᵀk, `scaled_dot`
            qᵀk/√hidden_size, `general` qᵀWk (Luong et al., 2015), `additive` vᵀtanh(Wq + Uk) (Bahdanau et al., 2015);
            or `none`: the last state is all that the decoder gets of the source (Sutskever et al., 2014).
        input_feeding (`bool`): Whether the decoder reads, beside each token, what it attended to before (Luong et al.,
            2015, section 3.3), for which training goes step by step; without attention, the encoder's last state (Cho
            et al., 2014).
        bridge (`str`): How the encoder's last state becomes the decoder's first: `linear` (a matrix for each layer),
            `copy`, or `none`, where the decoder begins with zeros.
        reverse_source (`bool`): Whether the source is read from its end (Sutskever et al., 2014, section 3.3).
        use_fused_cells (`bool`): Whether torch's fused cells run, or the equations as they are written: slower, but
            differentiable twice, and each gate can be looked at.
        dropout (`float`): Dropout on embeddings, between layers and on what the pre-softmax matrix reads.
        label_smoothing (`float`): ε_ls of the training loss. In evaluation mode the loss is the plain cross-entropy.
        tie_word_embeddings (`bool`): `False` gives source, target and output embeddings a matrix each. `True` shares
            them as the next two say.
        share_encoder_decoder_embeddings (`bool`): Source and target have one vocabulary, and unless
            `tie_word_embeddings` is False their embeddings are one matrix.
        tie_output_embeddings (`bool`): Target embeddings and the pre-softmax matrix are one.
        use_cache (`bool`): Whether `generate()` goes on from the last state instead of from the beginning.
        pad_token_id, bos_token_id, eos_token_id, decoder_start_token_id (`int`): Special ids. The decoder's
            first input is `decoder_start_token_id`.
        format_version (`int`): Raised by releases whose models an older Heed would read wrongly.

    Raises:
        ValueError: If a value is out of range, options exclude each other, or a key looks like a misspelt field; the
            message names the field.
    """

    model_type = "heed_rnn"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"d_model": "hidden_size", "num_hidden_layers": "encoder_layers"}
    # Not `layers.*`, of which only the encoder's run once: input feeding would gather the decoder's at every token.
    base_model_fsdp_plan = {"embed_tokens": "free_full_weight"}

    vocab_size: int = 37000
    decoder_vocab_size: int | None = None
    embedding_size: int = 512
    hidden_size: int = 1024
    encoder_layers: int = 1
    decoder_layers: int = 1
    cell: Literal["rnn", "lstm", "gru"] = "gru"
    bidirectional: bool = True
    attention: Literal["none", "dot", "scaled_dot", "general", "additive"] = "additive"
    input_feeding: bool = True
    bridge: Literal["linear", "copy", "none"] = "linear"
    reverse_source: bool = False
    use_fused_cells: bool = True
    dropout: float | int = 0.2
    label_smoothing: float | int = 0.1
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

    def __post_init__(self, **kwargs):
        """Check the fields against each other, then let the base class take the remaining keys."""
        if self.format_version > FORMAT_VERSION:  # before anything that a newer one may have renamed
            raise ValueError(
                f"`format_version` must be at most {FORMAT_VERSION}, but is {self.format_version} instead: the model "
                "was written by a newer Heed. Install that one, or load the code that lies with the model (without "
                "Heed, `trust_remote_code=True`)."
            )
        if kwargs.pop("decoder_bidirectional", False):
            raise ValueError(
                "`decoder_bidirectional` must be False, but is True instead: a decoder cannot read what it has not "
                "written yet. `bidirectional` is about the encoder."
            )
        self._check_spelling(kwargs)
        if "custom_pipelines" in kwargs:
            kwargs["custom_pipelines"] = OfferedPipelines(kwargs["custom_pipelines"])
        self._take_synonyms(kwargs)
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        self.validate_architecture()
        super().__post_init__(**kwargs)

    def _take_synonyms(self, kwargs: dict):
        """Set the fields that go by transformers' other names before they are checked; the base class would after."""
        for synonym in self.attribute_map.keys() & kwargs.keys():
            name, value = self.attribute_map[synonym], kwargs.pop(synonym)
            if getattr(self, name) not in (value, type(self).__dataclass_fields__[name].default):
                raise ValueError(
                    f"`{synonym}` must be left out beside `{name}`, which it is another name of, but they are {value} "
                    f"and {getattr(self, name)} instead."
                )
            setattr(self, name, value)

    def __setattr__(self, name, value):
        moves_both = name == "vocab_size" and self.has_one_vocabulary
        super().__setattr__(name, value)
        if moves_both:
            self.decoder_vocab_size = value

    def get_text_config(self, decoder=None, encoder=None) -> PreTrainedConfig:
        """Return the config of one side, as transformers does.

        `generate()` asks for neither side and takes `vocab_size` for the number of tokens that it chooses from: while
        it runs, that is `decoder_vocab_size`.
        """
        if decoder == encoder and _is_generating.get() and self.decoder_vocab_size != self.vocab_size:
            config = copy.copy(self)
            config.vocab_size = self.decoder_vocab_size or self.vocab_size
            return config
        return super().get_text_config(decoder=decoder, encoder=encoder)

    @property
    def has_one_vocabulary(self) -> bool:
        """Whether source and target have the same tokens, be it in one embedding matrix or in two."""
        return self.share_encoder_decoder_embeddings and self.decoder_vocab_size == self.vocab_size

    @property
    def shares_source_and_target_embeddings(self) -> bool:
        """Whether encoder and decoder read one embedding matrix."""
        return self.tie_word_embeddings and self.share_encoder_decoder_embeddings

    @property
    def shares_target_and_output_embeddings(self) -> bool:
        """Whether the decoder's embedding matrix is the pre-softmax matrix too."""
        return self.tie_word_embeddings and self.tie_output_embeddings

    def validate_architecture(self):
        """Raise a `ValueError` that names the field if the model cannot be built; run when made and when saved."""
        for name in ("vocab_size", "decoder_vocab_size", "embedding_size", "hidden_size", "encoder_layers"):
            self._check_at_least_one(name)
        self._check_at_least_one("decoder_layers")
        for name in ("dropout", "label_smoothing"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"`{name}` must be at least 0 and below 1, but is {value} instead.")
        if self.bidirectional and self.hidden_size % 2:
            raise ValueError(
                "`hidden_size` must be even with a bidirectional encoder, each of whose directions has half of it, "
                f"but is {self.hidden_size} instead."
            )
        if self.bidirectional and self.reverse_source:
            raise ValueError("`reverse_source` must be False with a bidirectional encoder, but is True instead.")
        if self.attention == "none" and self.bridge == "none" and not self.input_feeding:
            raise ValueError(
                "`bridge` must be linear or copy without attention and input feeding, or the decoder would know "
                "nothing of the source, but is none instead."
            )
        if self.bridge == "copy" and self.encoder_layers < self.decoder_layers:
            raise ValueError(
                f"`bridge` must be linear or none with more decoder layers ({self.decoder_layers}) than encoder "
                f"layers ({self.encoder_layers}), but is copy instead."
            )
        self._check_embeddings()

    def _check_at_least_one(self, name: str):
        value = getattr(self, name)
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {value} instead.")

    def _check_embeddings(self):
        """Check vocabularies, special ids and what is shared against each other."""
        if self.shares_source_and_target_embeddings and self.decoder_vocab_size != self.vocab_size:
            raise ValueError(
                "`share_encoder_decoder_embeddings` must be False where `decoder_vocab_size` differs from "
                f"`vocab_size`, but it is True with {self.decoder_vocab_size} and {self.vocab_size} instead."
            )
        end = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        target_size = self.decoder_vocab_size or self.vocab_size
        limits = {
            "pad_token_id": ([self.pad_token_id], min(self.vocab_size, target_size)),
            "bos_token_id": ([self.bos_token_id], target_size),
            "eos_token_id": (end, target_size),
            "decoder_start_token_id": ([self.decoder_start_token_id], target_size),
        }
        for name, (ids, limit) in limits.items():
            for token_id in ids:
                if token_id is not None and not 0 <= token_id < limit:
                    raise ValueError(f"`{name}` must be at least 0 and below {limit}, but is {token_id} instead.")

    def _check_spelling(self, keys):
        """Raise on a key that looks like a misspelt field: the base class would keep it and nothing would read it."""
        from transformers import GenerationConfig

        fields = list(type(self).__dataclass_fields__)
        # Keys of other libraries (quantisation, pipelines) and generation defaults may stand in a config.json.
        known = {
            *self.attribute_map,
            *GenerationConfig().to_dict(),
            "attn_implementation",
            "output_attentions",
        }
        for key in keys:
            if key.startswith("_") or key in known or key in EXTRA_KEYS:
                continue
            nearest = get_close_matches(key, fields, n=1, cutoff=0.8)
            if nearest:
                raise ValueError(f"`{key}` is not a field of HeedRNNConfig; did you mean `{nearest[0]}`?")
            logger.warning_once(f"`{key}` is not a field of HeedRNNConfig: it is kept, and Heed does not read it.")


__all__ = ["HeedRNNConfig"]
