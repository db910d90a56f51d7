"""Recurrent encoder-decoders for transformers: what *Attention Is All You Need* (2017) compares itself with.

It reads from top to bottom: the cells' equations, a layer that runs them over padded sequences, encoder, attention to
the source, cache, decoder, model, loss.

Letters in shape comments: B batch, S source length, T target length, E = embedding_size, H = hidden_size, V = number
of target tokens.
"""

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple

from .configuration_heed_rnn import HeedRNNConfig, vocabulary_of_the_target

IGNORED_LABEL = -100
# Longest translation, in tokens, unless `generate()` is told otherwise.
DEFAULT_MAX_LENGTH = 512
# Bytes, a multiple of which is where torch puts a tensor on the CPU.
ALIGNMENT = 64

# What a cell hands from one position to the next: (h,), or (h, c) of an LSTM, each (B, hidden).
State = tuple[torch.Tensor, ...]


# Cells


class Cell(nn.RNNBase):
    """What the three cells share: all reading goes through `forward`, so that hooks on a cell see all of it."""

    def forward(self, inputs, state: State | None = None, tokens=None, is_reversed=False, is_fused=True):  # type: ignore[override]
        """Read one token of each sequence, or whole ones.

        Args:
            inputs: `(batch, input_size)`, or `(batch, length, input_size)`.
            state: `(batch, hidden_size)` tensors to begin with; `None` is zeros, for whole sequences only.
            tokens: `(batch, length)`, true at tokens and false at padding, wherever it stands; `None` has no padding.
            is_reversed: Whether each sequence is read from its end.
            is_fused: Whether torch's own loop runs, or the equations.

        Returns:
            The next state; of whole sequences the output at each token `(batch, length, hidden_size)`, zeros at
            padding, and the state behind the last token that was read.
        """
        if inputs.dim() == 2:
            return run_one_step(self, inputs, state, is_fused)
        run = run_fused if is_fused else run_by_steps
        return run(self, inputs, state, tokens, is_reversed)

    def whole(self, inputs, state=None):
        """Run torch's own loop over `(batch, length, input_size)` or packed sequences."""
        # torch keeps a list of the weights beside them, which knows nothing of weights that are loaded when needed.
        self._flat_weights = self.all_weights[0]
        return super().forward(inputs, state)


class RNNCell(Cell, nn.RNN):
    """h' = tanh(W x + b + U h + d) (Elman, 1990). Over a whole sequence it is `torch.nn.RNN`."""

    def step(self, read: torch.Tensor, state: State) -> State:
        """Return the next state, of `(batch, hidden_size)` tensors, from `read`, the W x + b of the next token."""
        (hidden,) = state
        kept = F.linear(hidden, self.weight_hh_l0, self.bias_hh_l0)
        return (torch.tanh((read + kept).to(hidden.dtype)),)

    def fused_step(self, inputs: torch.Tensor, state: State) -> State:
        """Do as `step` does, in fewer operations."""
        return (torch.rnn_tanh_cell(inputs, state[0], *self.all_weights[0]),)


class LSTMCell(Cell, nn.LSTM):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997; Gers et al., 2000). As a whole it is `torch.nn.LSTM`.

    Its cell c is only ever scaled and added to, so that gradients reach far back.
    """

    def step(self, read: torch.Tensor, state: State) -> State:
        """Return the next state (h, c) from `read`, the `(batch, 4 · hidden_size)` W x + b of the next token."""
        hidden, cell = state
        kept = F.linear(hidden, self.weight_hh_l0, self.bias_hh_l0)
        input_gate, forget_gate, candidate, output_gate = (read + kept).to(cell.dtype).chunk(4, dim=-1)
        cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
        return output_gate.sigmoid() * cell.tanh(), cell

    def fused_step(self, inputs: torch.Tensor, state: State) -> State:
        """Do as `step` does, in fewer operations."""
        return torch.lstm_cell(inputs, state, *self.all_weights[0])


class GRUCell(Cell, nn.GRU):
    """Gated recurrent unit (Cho et al., 2014), the reset gate after the product. As a whole it is `torch.nn.GRU`."""

    def step(self, read: torch.Tensor, state: State) -> State:
        """Return the next state from `read`, the `(batch, 3 · hidden_size)` W x + b of the next token."""
        (hidden,) = state
        kept = F.linear(hidden, self.weight_hh_l0, self.bias_hh_l0)
        read, kept = (part.to(hidden.dtype).chunk(3, dim=-1) for part in (read, kept))
        reset_gate = torch.sigmoid(read[0] + kept[0])
        update_gate = torch.sigmoid(read[1] + kept[1])
        candidate = torch.tanh(read[2] + reset_gate * kept[2])
        return (update_gate * hidden + (1 - update_gate) * candidate,)

    def fused_step(self, inputs: torch.Tensor, state: State) -> State:
        """Do as `step` does, in fewer operations."""
        return (torch.gru_cell(inputs, state[0], *self.all_weights[0]),)


CELLS = {"rnn": RNNCell, "lstm": LSTMCell, "gru": GRUCell}


def make_cell(config: HeedRNNConfig, input_size: int, hidden_size: int) -> Cell:
    """Return a cell of the config's kind."""
    return CELLS[config.cell](input_size, hidden_size, batch_first=True)


def read_by(cell: Cell, inputs: torch.Tensor) -> torch.Tensor:
    """Return W x + b of `(…, input_size)` inputs: `(…, gates · hidden_size)`, of all tokens at once."""
    return F.linear(inputs, cell.weight_ih_l0, cell.bias_ih_l0)


# Cells over padded sequences


def may_fuse(config: HeedRNNConfig, device: torch.device) -> bool:
    """Tell whether torch's fused cells run.

    On the CPU they know no mixed precision. The equations do: under autocast their products are in bfloat16, and the
    state stays in float32.
    """
    is_mixed = device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return config.use_fused_cells and not is_mixed


def run_fused(cell: Cell, inputs, state: State | None, tokens, is_reversed: bool = False):
    """Run a cell over padded sequences by torch's own loop; arguments and result are those of `Cell.forward`."""
    dtype = cell.weight_ih_l0.dtype
    inputs = inputs.to(dtype)
    state = no_state(cell, inputs) if state is None else tuple(part.to(dtype) for part in state)
    given = tuple(part[None].contiguous() for part in state)  # (1, B, hidden) each
    given = given if len(given) > 1 else given[0]
    if tokens is None:
        outputs, last = cell.whole(inputs.flip(1) if is_reversed else inputs, given)
        return outputs.flip(1) if is_reversed else outputs, as_state(last)
    order = reading_order(tokens, is_reversed)
    lengths = tokens.sum(1).cpu()
    laid_out = inputs.take_along_dim(order[..., None], 1)
    # A row of padding alone cannot be packed: it is read as one token, and what came of it is taken back.
    packed = pack_padded_sequence(laid_out, lengths.clamp(min=1), batch_first=True, enforce_sorted=False)
    outputs, last = cell.whole(packed, given)
    outputs, _ = pad_packed_sequence(outputs, batch_first=True, total_length=inputs.shape[1])
    outputs = outputs.take_along_dim(order.argsort(1)[..., None], 1)
    if bool(lengths.all()):
        return outputs, as_state(last)
    return outputs * tokens[..., None], keep_at_padding(tokens.any(1), as_state(last), state)


def no_state(cell: Cell, inputs: torch.Tensor) -> State:
    """Return the state before the first token of `(batch, …)` inputs: zeros, in the dtype of the weights."""
    zeros = torch.zeros(inputs.shape[0], cell.hidden_size, dtype=cell.weight_ih_l0.dtype, device=inputs.device)
    return (zeros, zeros) if isinstance(cell, LSTMCell) else (zeros,)


def as_state(last: torch.Tensor | tuple[torch.Tensor, ...]) -> State:
    """Return what torch gives as the last state, `(1, batch, hidden)`, as we do."""
    return tuple(part[0] for part in (last if isinstance(last, tuple) else (last,)))


def reading_order(tokens: torch.Tensor, is_reversed: bool) -> torch.Tensor:
    """Return the positions of `(batch, length)` tokens in the order in which they are read, padding last."""
    length = tokens.shape[1]
    place = torch.arange(length, device=tokens.device)
    return torch.where(tokens, length - place if is_reversed else place, 2 * length + place).argsort(1)


def run_by_steps(cell: Cell, inputs, state: State | None, tokens, is_reversed: bool = False):
    """Do as `run_fused` does, position after position, by the equations as they are written."""
    length = inputs.shape[1]
    state = no_state(cell, inputs) if state is None else state
    read, outputs = read_by(cell, inputs), []
    for place in reversed(range(length)) if is_reversed else range(length):
        new = cell.step(read[:, place], state)
        state = new if tokens is None else keep_at_padding(tokens[:, place], new, state)
        outputs.append(state[0] if tokens is None else state[0] * tokens[:, place, None])
    return torch.stack(outputs[::-1] if is_reversed else outputs, dim=1), state


def keep_at_padding(is_token: torch.Tensor, new: State, old: State) -> State:
    """Return the new state of the `(batch,)` rows that read a token, and the old one of those that read padding."""
    return tuple(torch.where(is_token[:, None], after, before) for after, before in zip(new, old, strict=True))


def run_one_step(cell: Cell, inputs: torch.Tensor, state: State, is_fused: bool) -> State:
    """Read one `(batch, input_size)` token per sequence."""
    if not is_fused:
        return cell.step(read_by(cell, inputs), state)
    dtype = cell.weight_ih_l0.dtype
    return cell.fused_step(inputs.to(dtype), tuple(part.to(dtype) for part in state))


def padding_free(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a `(batch, length)` mask as true and false, or `None` where nothing is padding."""
    if mask is None:
        return None
    tokens = mask != 0
    return None if bool(tokens.all()) else tokens


# Encoder


class HeedRNNEncoderLayer(nn.Module):
    """One recurrent layer, or two that read in opposite directions side by side (Schuster and Paliwal, 1997)."""

    def __init__(self, config: HeedRNNConfig, input_size: int):
        super().__init__()
        self.config = config
        self.reads_backwards = config.reverse_source
        width = config.hidden_size // 2 if config.bidirectional else config.hidden_size
        self.first_cell = make_cell(config, input_size, width)
        self.second_cell = make_cell(config, input_size, width) if config.bidirectional else None

    def forward(self, hidden_states: torch.Tensor, tokens: torch.Tensor | None) -> tuple[torch.Tensor, State]:
        """Read `(batch, source_length, input_size)`; return outputs, `hidden_size` wide, and the last state."""
        is_fused = may_fuse(self.config, hidden_states.device)
        outputs, state = self.first_cell(hidden_states, None, tokens, self.reads_backwards, is_fused)
        if self.second_cell is None:
            return outputs, state
        others, other_state = self.second_cell(hidden_states, None, tokens, not self.reads_backwards, is_fused)
        joined = tuple(torch.cat(pair, dim=-1) for pair in zip(state, other_state, strict=True))
        return torch.cat([outputs, others], dim=-1), joined


@dataclass
class RecurrentEncoderOutput(BaseModelOutput):
    """What the encoder hands to the decoder.

    Attributes:
        final_state: `(batch, encoder_layers · parts, hidden_size)`, the state behind the last token of each layer,
            from the lowest; an LSTM's has two parts, h and c.
    """

    final_state: torch.FloatTensor | None = None


class HubToken:
    """Opens a private repository for what is loaded after the model; it is never shown, copied or saved."""

    def __init__(self, value: str | bool | None = None):
        self.value = value

    def __reduce__(self):
        return HubToken, ()


class HeedRNNPreTrainedModel(PreTrainedModel):
    """What every recurrent Heed model shares: loading, initial weights, and what transformers may do with it."""

    config: HeedRNNConfig
    config_class = HeedRNNConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False
    _no_split_modules = ["HeedRNNEncoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _is_stateful = True  # a state cannot be taken back by a token, as assisted decoding needs it
    # Set by the model that holds this one, since only the whole has all matrices of a vocabulary.
    is_part_of_a_model = False

    def set_attn_implementation(self, attn_implementation: str | dict, *args, **kwargs):
        """Refuse every attention function but eager: a recurrent model has one way to attend.

        Raises:
            ValueError: If another one is named.
        """
        if attn_implementation != "eager":
            raise ValueError(
                "`attn_implementation` must be eager for a recurrent model, which has one way to attend, "
                f"but is {attn_implementation!r} instead."
            )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Draw matrices from Glorot's uniform distribution, recurrent ones orthogonal, a block for each gate."""
        super()._init_weights(module)
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.embedding_size**-0.5)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, HeedRNNAttention) and module.weight is not None:
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)
        elif isinstance(module, Cell):
            self._init_cell(module)

    @staticmethod
    def _init_cell(cell: Cell):
        # Drawn beside and copied whole: of a part nobody knows whether it was loaded, and no matrix of 16 bits can be
        # made orthogonal.
        drawn = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in cell.named_parameters()}
        if isinstance(cell, LSTMCell):
            # An LSTM that begins by remembering learns to do so over longer distances (Jozefowicz et al., 2015).
            drawn["bias_ih_l0"][cell.hidden_size : 2 * cell.hidden_size] = 1
        gates = (drawn[name].split(cell.hidden_size) for name in ("weight_ih_l0", "weight_hh_l0"))
        for read, kept in zip(*gates, strict=True):
            nn.init.xavier_uniform_(read)
            nn.init.orthogonal_(kept)
        for name, weight in cell.named_parameters():
            init.copy_(weight, drawn[name])

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load as transformers does, but refuse weights that are not this model's, and remember where they were.

        transformers draws missing weights at random and drops unknown ones, with a line in the log. Here both are an
        error, unless `output_loading_info=True` asks for the report of them or a `state_dict` is given. A model
        without its head loads from a folder with one, and the other way round, with a new head.

        Raises:
            ValueError: If weights are missing or unknown, which the message names, or a file is broken.
            RuntimeError: If weights have other shapes and `ignore_mismatched_sizes` is not set.
        """
        place, may_differ = pretrained_model_name_or_path, bool(kwargs.get("ignore_mismatched_sizes"))
        is_strict = place is not None and kwargs.get("state_dict") is None and not kwargs.get("output_loading_info")
        # transformers' own error for other shapes names none of them.
        asked = {**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": may_differ or is_strict}
        try:
            model, report = super().from_pretrained(place, *args, **asked)
        except Exception as error:
            if type(error).__name__ != "SafetensorError":
                raise
            raise ValueError(f"{place} must hold whole safetensors files, but one is broken: {error}") from error
        own_report = model.__dict__.pop("_own_report", report)
        if is_strict:
            check_weights(model, own_report, place, may_differ)
            check_adapter(model, report)
        check_places(model)
        align_weights(model)
        # With these a pipeline finds the target's tokenizer.
        model.config._commit_hash = getattr(model.config, "_commit_hash", None) or kwargs.get("revision")
        model._hub_token = HubToken(kwargs.get("token"))
        return (model, report) if kwargs.get("output_loading_info") else model

    def _adjust_missing_and_unexpected_keys(self, loading_info):
        """Keep the report of the model's own weights: after an adapter transformers returns the adapter's alone."""
        super()._adjust_missing_and_unexpected_keys(loading_info)
        self._own_report = loading_info.to_dict()

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as transformers does; where the code travels along, every Auto class finds its model in the folder."""
        self._keep_sharing()
        if self._auto_class is not None:
            self.config.auto_map = {
                "AutoConfig": "configuration_heed_rnn.HeedRNNConfig",
                "AutoModel": "modeling_heed_rnn.HeedRNNModel",
                "AutoModelForSeq2SeqLM": "modeling_heed_rnn.HeedRNNForConditionalGeneration",
            }
            # transformers' saver sends along what a file imports, so this line brings the pipeline's file.
            from .pipeline_heed import CUSTOM_PIPELINES

            self.config.custom_pipelines = copy.deepcopy(CUSTOM_PIPELINES)
        super().save_pretrained(save_directory, *args, **kwargs)

    def _keep_sharing(self):
        """Let the config say which matrices are one, after peft wrote there that none is.

        Merging an adapter sets `tie_word_embeddings` to False where source and output embeddings are two matrices:
        with separate vocabularies they always are, though the target's is one with either.
        """
        if self.config.tie_word_embeddings or isinstance(self, HeedRNNStack):
            return
        source, target = self.base_model.encoder.embed_tokens, self.base_model.decoder.embed_tokens
        head = self.get_output_embeddings()
        shares_input = source.weight is target.weight
        shares_output = head is not None and head.weight is target.weight
        if shares_input or shares_output:
            self.config.tie_word_embeddings = True
            self.config.share_encoder_decoder_embeddings = shares_input
            self.config.tie_output_embeddings = shares_output

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resize the source embeddings; with one vocabulary for both sides the target's and the output too.

        Source and target have one vocabulary where `config.has_one_vocabulary` says so. Where they have two,
        `resize_decoder_token_embeddings` resizes the other. A decoder on its own resizes what it has.

        Args:
            new_num_tokens: Number of tokens from now on; `None` keeps it, but for the padding.
            pad_to_multiple_of: Rounds the number up.
            mean_resizing: Draw new rows around the mean of the old ones, instead of as those of a new model.

        Returns:
            The resized embeddings.

        Raises:
            ValueError: If a special id would no longer be in the vocabulary, the weights lie on the disk or another
                device, or this is a part of a model, whose other parts would keep their size.
        """
        has_both_sides = self.config.has_one_vocabulary and not isinstance(self, HeedRNNStack)
        side = "decoder" if isinstance(self, HeedRNNDecoder) else "encoder"
        sides = ["encoder", "decoder"] if has_both_sides else [side]
        return self._resize(sides, new_num_tokens, pad_to_multiple_of, mean_resizing)

    def resize_decoder_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resize the target embeddings and the output alone; from then on source and target have two vocabularies.

        The arguments are those of `resize_token_embeddings`.

        Returns:
            The resized target embeddings.

        Raises:
            ValueError: If source and target share a matrix, or as `resize_token_embeddings` does.
        """
        if self.config.shares_source_and_target_embeddings:
            raise ValueError(
                "`share_encoder_decoder_embeddings` must be False where the target's embeddings alone are resized, "
                "but is True instead; `resize_token_embeddings` resizes both."
            )
        return self._resize(["decoder"], new_num_tokens, pad_to_multiple_of, mean_resizing)

    def _resize(self, sides: list[str], new_num_tokens, pad_to_multiple_of, mean_resizing) -> nn.Embedding:
        """Resize the embeddings of the sides, and the output with the decoder's; return the first."""
        stacks = [self if isinstance(self, HeedRNNStack) else getattr(self.base_model, side) for side in sides]
        size = stacks[0].embed_tokens.num_embeddings if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None and not isinstance(pad_to_multiple_of, int):
            # The words of transformers, which its tests look for.
            raise ValueError(
                "Asking to pad the embedding matrix to a multiple of "
                f"`{pad_to_multiple_of}`, which is not and integer. Please make sure to pass an integer"
            )
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            raise ValueError(f"`pad_to_multiple_of` must be at least 1, but is {pad_to_multiple_of} instead.")
        if pad_to_multiple_of is not None:
            size = math.ceil(size / pad_to_multiple_of) * pad_to_multiple_of
        if new_num_tokens is None and pad_to_multiple_of is None:
            return stacks[0].embed_tokens
        config = self._config_of_size(sides, size)
        head = self.get_output_embeddings() if "decoder" in sides else None
        modules = [stack.embed_tokens for stack in stacks] + ([head] if head is not None else [])
        if self.is_part_of_a_model:
            raise ValueError(
                f"`{type(self).__name__}` must not be resized within a model, whose other parts would keep their "
                "size: call `resize_token_embeddings` or `resize_decoder_token_embeddings` of the whole model."
            )
        if any(module.weight.is_meta and hasattr(module, "_hf_hook") for module in modules):
            raise ValueError(
                "The embeddings must be in memory to be resized, but are offloaded: load the model without "
                "`device_map`, resize it and save it."
            )
        if head is not None:
            # First: tied weights change with the embeddings, in place.
            self._resize_head(head, size, mean_resizing)
        for stack in stacks:
            self._get_resized_embeddings(stack.embed_tokens, size, mean_resizing=mean_resizing)
        for name in ("share_encoder_decoder_embeddings", "vocab_size", "decoder_vocab_size"):
            setattr(self.config, name, getattr(config, name))
        self.vocab_size = self.config.vocab_size  # transformers keeps it here too
        self.tie_weights()
        return stacks[0].embed_tokens

    def _config_of_size(self, sides: list[str], size: int) -> HeedRNNConfig:
        """Return a config whose vocabularies of these sides have another size, after checking it."""
        config = copy.copy(self.config)
        if not isinstance(self, HeedRNNStack) and len(sides) == 1:
            config.share_encoder_decoder_embeddings = False
        if "encoder" in sides or config.has_one_vocabulary:
            config.vocab_size = size
        if "decoder" in sides:
            config.decoder_vocab_size = size
        config.validate_architecture()
        return config

    @torch.no_grad()
    def _resize_head(self, head: nn.Linear, size: int, mean_resizing: bool):
        """Give the pre-softmax layer as many rows; it stays the same module, with what hangs on it."""
        old_size = head.weight.shape[0]
        resized = self._get_resized_lm_head(head, size, mean_resizing=mean_resizing)
        if resized is head:
            return
        if size > old_size and not mean_resizing:
            resized.weight[old_size:].normal_(std=self.config.embedding_size**-0.5)  # as in `_init_weights`
        head.out_features = size
        head.weight = nn.Parameter(resized.weight, requires_grad=head.weight.requires_grad)


@torch.no_grad()
def align_weights(model: PreTrainedModel):
    """Copy weights that lie in memory as they do in their file to places where torch would have put them.

    Where in the file they lie depends on the number of files, and a product of one row adds up in another order
    where its matrix does not begin at a multiple of 16 bytes: a loaded model would differ from the saved one.
    """
    for weight in model.parameters():
        if weight.device.type == "cpu" and type(weight.data) is torch.Tensor and weight.data_ptr() % ALIGNMENT:
            weight.data = weight.data.clone()


def check_places(model: PreTrainedModel):
    """Refuse a `device_map` that puts one matrix in two places, of which the disk is one.

    Raises:
        ValueError: If it does; the message names both.
    """
    places = getattr(model, "hf_device_map", None) or {}
    if "disk" not in places.values():
        return
    for pair in model.all_tied_weights_keys.items():
        found = []
        for name in pair:
            parts = name.split(".")
            prefixes = [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
            found.append(next((places[prefix] for prefix in prefixes if prefix in places), None))
        if found[0] != found[1]:
            told = " and ".join(f"{name} on {place}" for name, place in zip(pair, found, strict=True))
            raise ValueError(
                f"`device_map` must put matrices that are one in one place, but puts {told} instead; "
                '`device_map="auto"` with `max_memory` sees to it.'
            )


def check_weights(model: PreTrainedModel, report: dict, place, may_differ: bool):
    """Raise if a model was not loaded whole, or not all of a file was used.

    Args:
        model: The model that was loaded.
        report: What `from_pretrained(output_loading_info=True)` tells of its own weights.
        place: The folder or repository, of the model or of an adapter, for the message.
        may_differ: Whether weights of other shapes are left as they were drawn.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        place = next(iter(model.peft_config.values())).base_model_name_or_path or place
    missing, unknown = report["missing_keys"], report["unexpected_keys"]
    name, base = type(model).__name__, model.base_model
    if name not in (model.config.architectures or [name]):
        # Saved without a head or with one: what lies outside the stacks may differ.
        prefix = f"{model.base_model_prefix}."
        unknown = [key for key in unknown if hasattr(base, key.removeprefix(prefix).split(".")[0])]
        missing = missing if base is model else [key for key in missing if key.startswith(prefix)]
    wrong = {"lacks": sorted(missing), "holds, unknown to it,": sorted(unknown)}
    for what, keys in wrong.items():
        if keys:
            told = f"{', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
            raise ValueError(
                f"{place} must hold the weights of a {name} of its config, but {what} {told}; "
                "`output_loading_info=True` loads the rest and returns a list."
            )
    shapes = [f"{key} {tuple(found)} instead of {tuple(wanted)}" for key, found, wanted in report["mismatched_keys"]]
    if shapes and not may_differ:
        raise RuntimeError(
            f"{place} must hold weights of the shapes that its config says, but has {', '.join(sorted(shapes)[:3])}; "
            "`ignore_mismatched_sizes=True` draws them at random."
        )
    # transformers lets go of a tie where the file holds two different matrices.
    for pair in (getattr(model, "_tied_weights_keys", None) or {}).items():
        one, other = (model.get_parameter(key) for key in pair)
        if one is not other and one.device == other.device and one.device.type != "meta":
            raise ValueError(
                f"{place} must hold one matrix for {pair[0]} and {pair[1]}, which the config ties, but holds two "
                "different ones: set `tie_word_embeddings` to False in its config."
            )


def check_adapter(model: PreTrainedModel, report: dict):
    """Raise if a model was loaded with an adapter whose file lacks some of its weights."""
    lacking = sorted(report["missing_keys"]) if getattr(model, "_hf_peft_config_loaded", False) else []
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ValueError(f"The adapter must have all its weights, but lacks {', '.join(lacking[:3])}{more}.")


class HeedRNNStack(HeedRNNPreTrainedModel):
    """What encoder and decoder share: token embeddings, and the checks on what they are given."""

    def __init__(self, config: HeedRNNConfig, vocab_size: int):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.embedding_size)
        self.dropout = nn.Dropout(config.dropout)

    def embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Look up `(batch, length)` token ids, or take `(batch, length, embedding_size)` embeddings, and drop out.

        Raises:
            ValueError: If both or neither are given, or an id is outside the vocabulary.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"Exactly one of `input_ids` and `inputs_embeds` must be given, but {given} was.")
        if inputs_embeds is None:
            self._check_token_ids(input_ids)
            inputs_embeds = self.embed_tokens(input_ids)
        return self.dropout(inputs_embeds)

    def _check_token_ids(self, input_ids: torch.Tensor):
        # Only on the CPU, where it costs microseconds: elsewhere it would wait for the device on every call.
        if input_ids.device.type != "cpu" or torch.compiler.is_compiling() or input_ids.numel() == 0:
            return
        limit = self.embed_tokens.num_embeddings
        lowest, highest = (bound.item() for bound in input_ids.aminmax())
        if lowest < 0 or highest >= limit:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"Token ids must be at least 0 and below {limit}, but one is {wrong} instead.")

    @staticmethod
    def _check_mask(attention_mask: torch.Tensor | None, length: int):
        if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.shape[1] != length):
            raise ValueError(
                f"The attention mask must cover {length} tokens as (batch, {length}), "
                f"but is of shape {tuple(attention_mask.shape)} instead."
            )


class HeedRNNEncoder(HeedRNNStack):
    """Recurrent layers that read the source token by token."""

    # Each layer is gathered where it runs. The decoder's cells run once for each token: see the config's plan.
    _fsdp_plan = {"layers.*": "free_full_weight"}

    def __init__(self, config: HeedRNNConfig):
        super().__init__(config, config.vocab_size)
        sizes = [config.embedding_size] + [config.hidden_size] * (config.encoder_layers - 1)
        self.layers = nn.ModuleList([HeedRNNEncoderLayer(config, size) for size in sizes])
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> RecurrentEncoderOutput:
        """Encode the source.

        Args:
            input_ids: `(batch, source_length)`.
            attention_mask: `(batch, source_length)`, 1 at tokens and 0 at padding, on either side.
            inputs_embeds: `(batch, source_length, embedding_size)` in place of `input_ids`.
            output_hidden_states: Whether to return what each layer reads and gives.
            kwargs: `return_dict`. (A recurrent encoder has no attention to record.)

        Returns:
            `last_hidden_state` `(batch, source_length, hidden_size)`, zeros at padding, and `final_state`.

        Raises:
            ValueError: If an id is outside the vocabulary, or the mask's width is not the source's length.
        """
        hidden_states = self.embed(input_ids, inputs_embeds)
        self._check_mask(attention_mask, hidden_states.shape[1])
        tokens = padding_free(attention_mask)
        seen, final = [hidden_states], []
        for number, layer in enumerate(self.layers):
            hidden_states, state = layer(self.dropout(hidden_states) if number else hidden_states, tokens)
            seen.append(hidden_states)
            final.extend(state)
        records = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return RecurrentEncoderOutput(
            last_hidden_state=hidden_states,
            hidden_states=tuple(seen) if records else None,
            final_state=torch.stack(final, dim=1),  # (B, layers · parts, H)
        )


class HeedRNNBridge(nn.Module):
    """Makes the decoder's first state of the encoder's last; its layers stand beside the encoder's uppermost ones."""

    def __init__(self, config: HeedRNNConfig):
        super().__init__()
        self.parts = 2 if config.cell == "lstm" else 1
        self.layers = config.decoder_layers
        self.kind = config.bridge
        self.projections = None
        if config.bridge == "linear":
            count = self.layers * self.parts
            self.projections = nn.ModuleList([nn.Linear(config.hidden_size, config.hidden_size) for _ in range(count)])

    def forward(self, final_state: torch.Tensor | None, like: torch.Tensor) -> list[State]:
        """Return a state of `(batch, hidden_size)` tensors for each layer of the decoder.

        Args:
            final_state: `(batch, encoder_layers · parts, hidden_size)`.
            like: `(batch, source_length, hidden_size)`, whose batch, width and dtype zeros are made of.
        """
        if self.kind == "none":
            return [(torch.zeros_like(like[:, 0]),) * self.parts for _ in range(self.layers)]
        layers, states = self.layers_of(final_state), []
        for layer in range(self.layers):
            beside = layers[:, max(0, layers.shape[1] - self.layers + layer)]
            parts = beside.unbind(1)
            if self.projections is not None:
                own = self.projections[layer * self.parts : (layer + 1) * self.parts]
                parts = tuple(projection(part) for projection, part in zip(own, parts, strict=True))
                parts = (torch.tanh(parts[0]), *parts[1:])  # h lies between -1 and 1, c anywhere
            states.append(tuple(parts))
        return states

    def layers_of(self, final_state: torch.Tensor | None) -> torch.Tensor:
        """Return the encoder's last state as `(batch, encoder_layers, parts, hidden_size)`."""
        if final_state is None:
            raise ValueError(
                "`encoder_outputs` must hold the `final_state` that this model's encoder returns, but does not."
            )
        return final_state.unflatten(1, (-1, self.parts))


# Attention to the source


class HeedRNNAttention(nn.Module):
    """How the decoder's state looks at the encoder's: scores, softmax, weighted sum, as in equation 1 with one head.

    The scores of a query q and a key k are qᵀk (`dot`), qᵀk/√H (`scaled_dot`), qᵀWk (`general`; Luong et al., 2015,
    section 3.1) or vᵀtanh(Wq + Uk) (`additive`; Bahdanau et al., 2015, appendix A.1.2).
    """

    def __init__(self, config: HeedRNNConfig):
        super().__init__()
        width = config.hidden_size
        self.scoring = config.attention
        self.scaling = width**-0.5 if config.attention == "scaled_dot" else 1.0
        self.q_proj = nn.Linear(width, width, bias=False) if config.attention == "additive" else None
        self.k_proj = nn.Linear(width, width, bias=False) if config.attention in ("general", "additive") else None
        self.weight = nn.Parameter(torch.empty(width)) if config.attention == "additive" else None

    def project_source(self, states: torch.Tensor) -> torch.Tensor:
        """Return Wk (`general`), Uk (`additive`) or k itself of `(batch, source_length, hidden_size)` states."""
        return states if self.k_proj is None else self.k_proj(states)

    def forward(self, query, keys, values, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend.

        Args:
            query: `(batch, target_length, hidden_size)` states of the decoder.
            keys: `(batch, source_length, hidden_size)`, as `project_source` returns them.
            values: `(batch, source_length, hidden_size)` states of the encoder.
            tokens: `(batch, source_length)`, false at padding; `None` has none.

        Returns:
            The context `(batch, target_length, hidden_size)` and weights `(batch, 1, target_length, source_length)`.
        """
        if self.q_proj is None:
            scores = torch.matmul(query * self.scaling, keys.transpose(1, 2))  # (B, T, S)
        else:
            scores = torch.tanh(self.q_proj(query)[:, :, None] + keys[:, None]) @ self.weight.to(keys.dtype)
        if tokens is not None:
            scores = scores.masked_fill(~tokens[:, None], torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1)
        return torch.matmul(weights.to(values.dtype), values), weights[:, None]


# Decoder


class RecurrentCache(Cache):
    """What `generate()` keeps between steps: the decoder's state, what it attended to, and the projected source.

    Its size does not depend on the number of tokens so far, and it cannot go back to an earlier one.

    Attributes:
        states: The state of each layer, `(batch, hidden_size)` tensors, from the lowest layer; empty before the first
            token.
        fed: What is read beside the next token, with input feeding: `(batch, embedding_size)`, or without attention
            the encoder's last state, `(batch, hidden_size)`.
        keys: The source as the attention projects it, `(batch, source_length, hidden_size)`.
    """

    is_compileable = False

    def __init__(self):
        super().__init__(layers=[])
        self.states: list[State] = []
        self.fed: torch.Tensor | None = None
        self.keys: torch.Tensor | None = None
        self._length = 0

    @property
    def self_attention_cache(self) -> "RecurrentCache":
        """The part that differs between hypotheses of one sentence: all of it."""
        return self

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that were read."""
        return self._length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return -1: any number of tokens may be read."""
        return -1

    def keep(self, states: list[State], fed: torch.Tensor | None, length: int):
        """Take over the states behind `length` more tokens."""
        self.states, self.fed = states, fed
        self._length += length

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]):
        self.states = [tuple(change(part) for part in state) for state in self.states]
        self.fed = None if self.fed is None else change(self.fed)
        self.keys = None if self.keys is None else change(self.keys)

    def reorder_cache(self, beam_idx: torch.LongTensor):
        """Let each row go on from another one."""
        self._change(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_select_indices(self, indices: torch.Tensor):
        """Keep the rows of these numbers."""
        self._change(lambda rows: rows[indices.to(rows.device)])

    def batch_repeat_interleave(self, repeats: int):
        """Repeat each row."""
        self._change(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def crop(self, max_length: int):
        """Refuse to go back to an earlier token.

        Raises:
            ValueError: Always: the states before the last one are gone.
        """
        raise ValueError("A recurrent state cannot be cropped: the states before the last token are not kept.")

    def reset(self):
        """Forget everything."""
        self.__init__()


def join_to_each(states: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """Join one `(batch, size)` vector of the source to each of the target's `(batch, length, width)` states."""
    context = context.to(states.dtype)[:, None].expand(-1, states.shape[1], -1)
    return torch.cat([states, context], dim=-1)


class HeedRNNDecoder(HeedRNNStack):
    """Recurrent layers that predict each target token from the state behind those before it, and from the source.

    The uppermost state h looks at the source; h and the context c that it finds are joined to tanh(W[h; c]) (Luong et
    al., 2015, equation 5), which the pre-softmax matrix reads, and with input feeding the next step too. Without
    attention c is the encoder's last state where it is fed (Cho et al., 2014, appendix A.1.1), or nothing.
    """

    def __init__(self, config: HeedRNNConfig):
        super().__init__(config, config.decoder_vocab_size)
        has_attention = config.attention != "none"
        self.feeds_last_state = config.input_feeding and not has_attention
        fed = (config.embedding_size if has_attention else config.hidden_size) if config.input_feeding else 0
        sizes = [config.embedding_size + fed] + [config.hidden_size] * (config.decoder_layers - 1)
        self.bridge = HeedRNNBridge(config)
        self.layers = nn.ModuleList([make_cell(config, size, config.hidden_size) for size in sizes])
        self.cross_attn = HeedRNNAttention(config) if has_attention else None
        joined = config.hidden_size * (2 if has_attention or self.feeds_last_state else 1)
        self.out_proj = nn.Linear(joined, config.embedding_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        encoder_final_state: torch.Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode the target's newest tokens.

        Args:
            input_ids: `(batch, target_length)`, without the tokens that the cache has read.
            attention_mask: `(batch, past_length + target_length)`, 0 at padding, on either side.
            encoder_hidden_states: `(batch, source_length, hidden_size)`.
            encoder_attention_mask: `(batch, source_length)`.
            encoder_final_state: `(batch, encoder_layers · parts, hidden_size)`, not needed beside a cache.
            past_key_values: Cache of earlier calls, extended in place.
            inputs_embeds: `(batch, target_length, embedding_size)` in place of `input_ids`.
            use_cache: Whether to return a cache; the config's `use_cache` by default.
            output_attentions: Whether to return the attention to the source.
            output_hidden_states: Whether to return what each layer reads and gives.
            kwargs: `return_dict`.

        Returns:
            `last_hidden_state` `(batch, target_length, embedding_size)`, the cache, and what was asked for.

        Raises:
            ValueError: If an id is outside the vocabulary, a mask's width is not the source's length, or past plus new
                length, the source is missing, the cache is another model's, or attention is asked for where there is
                none.
        """
        embeddings = self.embed(input_ids, inputs_embeds)
        length = embeddings.shape[1]
        records_attention = self.config.output_attentions if output_attentions is None else output_attentions
        self._check_what_is_given(encoder_hidden_states, past_key_values, records_attention)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = past_key_values if past_key_values is not None else RecurrentCache()
        self._check_mask(attention_mask, cache.get_seq_length() + length)
        self._check_mask(encoder_attention_mask, encoder_hidden_states.shape[1])
        tokens = padding_free(None if attention_mask is None else attention_mask[:, -length:])
        states = cache.states or self.bridge(encoder_final_state, encoder_hidden_states)
        fed = cache.fed
        if self.feeds_last_state and fed is None:
            fed = self.bridge.layers_of(encoder_final_state)[:, -1, 0]  # (B, H)
        look = self._look_at(encoder_hidden_states, encoder_attention_mask, cache, fed)
        is_step_by_step = self.config.input_feeding and self.cross_attn is not None
        run = self._feed_step_by_step if is_step_by_step else self._run_layers
        states, fed, outputs, weights, seen = run(embeddings, tokens, states, fed, look)
        if use_cache or past_key_values is not None:
            cache.keep(states, fed, length)
        records = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=outputs,
            past_key_values=cache if use_cache else None,
            hidden_states=(embeddings, *seen) if records else None,
            cross_attentions=(weights,) if records_attention and weights is not None else None,
        )

    def _check_what_is_given(self, encoder_hidden_states, cache, records_attention: bool):
        if encoder_hidden_states is None:
            raise ValueError("`encoder_hidden_states` must be given, but are not: this decoder reads a source.")
        if cache is not None and not isinstance(cache, RecurrentCache):
            raise ValueError(f"`past_key_values` must be a RecurrentCache, but is a {type(cache).__name__} instead.")
        if records_attention and self.cross_attn is None:
            raise ValueError(
                "`output_attentions` must be False where the config's `attention` is none, but is True instead."
            )

    def _look_at(self, source: torch.Tensor, mask: torch.Tensor | None, cache: RecurrentCache, fed) -> Callable:
        """Return a function from `(batch, length, hidden_size)` states to what the output reads, and the weights."""
        if self.cross_attn is None:
            join = functools.partial(join_to_each, context=fed) if self.feeds_last_state else nn.Identity()
            return lambda states: (self.dropout(torch.tanh(self.out_proj(join(states)))), None)
        if cache.keys is None:
            cache.keys = self.cross_attn.project_source(source)
        tokens = padding_free(mask)

        def look(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            context, weights = self.cross_attn(states, cache.keys, source, tokens)
            return self.dropout(torch.tanh(self.out_proj(torch.cat([states.to(context.dtype), context], -1)))), weights

        return look

    def _run_layers(self, embeddings, tokens, states: list[State], fed, look: Callable):
        """Run each layer over the whole target, then look at the source from all positions at once."""
        is_fused = may_fuse(self.config, embeddings.device)
        outputs, last, seen = join_to_each(embeddings, fed) if self.feeds_last_state else embeddings, [], []
        for number, (cell, state) in enumerate(zip(self.layers, states, strict=True)):
            inputs = self.dropout(outputs) if number else outputs
            outputs, state = cell(inputs, state, tokens, is_fused=is_fused)
            last.append(state)
            seen.append(outputs)
        outputs, weights = look(outputs)
        return last, fed, outputs, weights, seen

    def _feed_step_by_step(self, embeddings, tokens, states: list[State], fed, look: Callable):
        """Read token after token, each beside what the one before attended to."""
        is_fused = may_fuse(self.config, embeddings.device)
        fed = torch.zeros_like(embeddings[:, 0]) if fed is None else fed
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        seen: list[list[torch.Tensor]] = [[] for _ in self.layers]
        for place in range(embeddings.shape[1]):
            inputs = torch.cat([embeddings[:, place], fed.to(embeddings.dtype)], dim=-1)
            read = []
            for number, (cell, state) in enumerate(zip(self.layers, states, strict=True)):
                new = cell(self.dropout(inputs) if number else inputs, state, is_fused=is_fused)
                read.append(new if tokens is None else keep_at_padding(tokens[:, place], new, state))
                inputs = read[-1][0]
                seen[number].append(inputs)
            states = read
            output, weights = look(inputs[:, None])
            found.append((output, weights))
            fed = output[:, 0] if tokens is None else torch.where(tokens[:, place, None], output[:, 0], fed)
        outputs, weights = (torch.cat(parts, dim) for parts, dim in zip(zip(*found, strict=True), (1, 2), strict=True))
        return states, fed, outputs, weights, [torch.stack(layer, dim=1) for layer in seen]


# The model


class HeedRNNModel(HeedRNNPreTrainedModel):
    """Encoder and decoder without the pre-softmax layer.

    Args:
        config: Sizes and options.
    """

    def __init__(self, config: HeedRNNConfig):
        super().__init__(config)
        self.encoder = HeedRNNEncoder(config)
        self.decoder = HeedRNNDecoder(config)
        self.encoder.is_part_of_a_model = self.decoder.is_part_of_a_model = True
        self._tied_weights_keys = {}
        if config.shares_source_and_target_embeddings:
            self._tied_weights_keys["decoder.embed_tokens.weight"] = "encoder.embed_tokens.weight"
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the source embeddings."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module):
        """Replace the source embeddings, and the target's where they are shared."""
        self.encoder.embed_tokens = value
        if self.config.shares_source_and_target_embeddings:
            self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: RecurrentEncoderOutput | tuple | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> Seq2SeqModelOutput:
        """Encode the source, unless `encoder_outputs` is given, and decode the target, with the stacks' arguments.

        `encoder_outputs` is what the encoder returns, or a tuple of its `last_hidden_state` and `final_state`.

        Raises:
            ValueError: As the stacks raise it, or if the target is missing.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                output_hidden_states=output_hidden_states,
                return_dict=True,
            )
        elif not isinstance(encoder_outputs, RecurrentEncoderOutput):
            states, *rest = (
                encoder_outputs.to_tuple() if isinstance(encoder_outputs, BaseModelOutput) else encoder_outputs
            )
            final = rest[-1] if rest and isinstance(rest[-1], torch.Tensor) else None
            encoder_outputs = RecurrentEncoderOutput(last_hidden_state=states, final_state=final)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "`decoder_input_ids` or, for a loss, `labels` must be given, but neither was. (transformers' Trainer "
                "takes the labels away where `label_smoothing_factor` is set: give the data collator the model, "
                "`DataCollatorForSeq2Seq(tokenizer, model=model)`, so that it makes `decoder_input_ids`.)"
            )
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            encoder_final_state=encoder_outputs.final_state,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
        )


def check_generate_arguments(args: tuple, kwargs: dict):
    """Raise for arguments of `generate()` that transformers would drop silently, or fail at deep inside."""
    strategy = kwargs.get("custom_generate")
    if isinstance(strategy, type):
        raise ValueError(
            f"`custom_generate` must be an object such as {strategy.__name__}(…), but is the class itself instead."
        )
    for name in ("streamer", "assistant_model", "tokenizer", "assistant_tokenizer") if callable(strategy) else ():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"`{name}` must be None with a `custom_generate`, to which transformers hands none, but is a "
                f"{type(kwargs[name]).__name__} instead."
            )
    sources = [*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    sources.append(getattr(kwargs.get("encoder_outputs"), "last_hidden_state", None))
    source = next((given for given in sources if given is not None), None)
    prompt = kwargs.get("decoder_input_ids")
    if source is not None and prompt is not None and len(source) != len(prompt):
        raise ValueError(
            f"`decoder_input_ids` must have a row for each of the {len(source)} sources, "
            f"but have {len(prompt)} instead."
        )


def warn_of_other_search(config, strategy):
    """Warn where the model's folder asks for settings that transformers' own search does not read."""
    names = ("length_penalty_form", "tokens_beyond_source")
    unread = [name for name in names if getattr(config, name, None) not in (None, "power")]
    if unread and not callable(strategy):
        warnings.warn(
            f"`generate()` does not read {' and '.join(f'`{name}`' for name in unread)} of the generation config: "
            "give it `custom_generate=heed.BeamSearch()`, which does, or use heed's `Translator`.",
            stacklevel=4,
        )


class HeedRNNForConditionalGeneration(HeedRNNPreTrainedModel, GenerationMixin):
    """A recurrent encoder-decoder with its pre-softmax layer and training loss.

    Args:
        config: Sizes and options.
    """

    def __init__(self, config: HeedRNNConfig):
        super().__init__(config)
        self.model = HeedRNNModel(config)
        self.model.is_part_of_a_model = True
        self.lm_head = nn.Linear(config.embedding_size, config.decoder_vocab_size, bias=False)
        owner = "encoder" if config.shares_source_and_target_embeddings else "decoder"
        self._tied_weights_keys = {}
        if config.shares_target_and_output_embeddings:
            self._tied_weights_keys["lm_head.weight"] = f"model.{owner}.embed_tokens.weight"
        # Without a length, `generate()` would stop after 20 tokens and say so only in a log.
        self.generation_config.max_length = DEFAULT_MAX_LENGTH
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the pre-softmax linear layer."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module):
        """Replace the pre-softmax linear layer."""
        self.lm_head = new_embeddings

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.LongTensor:
        """Shift `(batch, target_length)` labels right by one: the decoder reads what stands before each label.

        Raises:
            ValueError: If labels are padded on the left, where the decoder's start would stand before the padding.
        """
        self._check_padding_side(labels)
        shifted = labels.roll(1, dims=1)
        shifted[:, :1] = self.config.decoder_start_token_id
        return shifted.masked_fill(shifted == IGNORED_LABEL, self.config.pad_token_id)

    @staticmethod
    def _check_padding_side(labels: torch.LongTensor):
        # Only on the CPU, where collators make batches: elsewhere it would wait for the device on every call.
        if labels.device.type != "cpu" or torch.compiler.is_compiling() or labels.numel() == 0:
            return
        is_target = labels != IGNORED_LABEL
        if (~is_target[:, 0] & is_target.any(dim=1)).any():
            raise ValueError(
                "`labels` must be padded on the right, but a row begins with -100 instead: a data collator pads them "
                'on the `padding_side` of its tokenizer, which must be "right". (With `decoder_input_ids` of your own '
                "the first labels may be -100.)"
            )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Tell `generate()` that keys and values are not what this model keeps: it makes its own cache."""
        return False

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        """Generate as transformers does, with tokens counted by the target's vocabulary where it has another size.

        Raises:
            ValueError: If a callable `custom_generate` would not be given the `streamer`, `assistant_model` or
                `tokenizer`, or `decoder_input_ids` have not a row for each source.
        """
        check_generate_arguments(args, kwargs)
        config = kwargs.get("generation_config") or self.generation_config
        warn_of_other_search(config, kwargs.get("custom_generate"))
        with vocabulary_of_the_target():
            return super().generate(*args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids, next_sequence_length=None, past_key_values=None, attention_mask=None, **kwargs
    ) -> dict:
        """Return what one step of `generate()` hands to `forward`."""
        newest = input_ids if past_key_values is None else input_ids[:, past_key_values.get_seq_length() :]
        given = {name: value for name, value in kwargs.items() if name not in ("is_first_iteration", "labels")}
        own = {"decoder_input_ids": newest, "attention_mask": attention_mask, "past_key_values": past_key_values}
        return own | given

    def compute_transition_scores(self, sequences, scores, beam_indices=None, normalize_logits=False) -> torch.Tensor:
        """Return the score of each generated token, `(rows, steps)`, 0 behind the end of a beam, as documented there.

        transformers' own takes the source's vocabulary for the target's.
        """
        if beam_indices is None:
            beam_indices = torch.arange(len(scores[0]), device=sequences.device)[:, None].expand(-1, len(scores))
        steps = int((beam_indices >= 0).sum(-1).max())
        stacked = torch.stack(tuple(scores[:steps]), dim=1)  # (rows, steps, V)
        stacked = stacked.log_softmax(-1) if normalize_logits else stacked
        rows, step = beam_indices[:, :steps], torch.arange(steps, device=sequences.device)
        return stacked[rows.clamp(min=0), step, sequences[:, -steps:]].masked_fill(rows < 0, 0.0)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: RecurrentEncoderOutput | tuple | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs,
    ) -> Seq2SeqLMOutput:
        """Score the next target token at every position; with labels, compute the loss too.

        Args:
            input_ids: `(batch, source_length)`.
            attention_mask: `(batch, source_length)`, 0 at padding.
            decoder_input_ids: `(batch, target_length)`; made from `labels` where missing.
            decoder_attention_mask: `(batch, target_length)`, with a cache that of all tokens so far.
            encoder_outputs: The encoder's output, in place of `input_ids`.
            past_key_values: Cache of earlier calls, extended in place.
            inputs_embeds: `(batch, source_length, embedding_size)`, in place of `input_ids`.
            decoder_inputs_embeds: `(batch, target_length, embedding_size)`, in place of `decoder_input_ids`.
            labels: `(batch, target_length)`, -100 where nothing is to be predicted.
            use_cache: Whether to return a cache; never with labels.
            logits_to_keep: Compute the logits of the last so many positions, or of these positions; 0 means all.
            num_items_in_batch: Number of labels over all micro-batches and processes of one update, by which the
                summed loss is divided; the labels of this call by default.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `loss` (in nats per label), `logits` `(batch, target_length, decoder_vocab_size)`, the cache, and what was
            asked to be recorded.

        Raises:
            ValueError: As the stacks raise it, or if no label is to be predicted.
        """
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])  # (B, T, V)
        loss = None if labels is None else self.loss(logits, labels, num_items_in_batch)
        recorded = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **recorded)

    def loss(self, logits: torch.Tensor, labels: torch.LongTensor, num_items_in_batch=None) -> torch.Tensor:
        """Sum the smoothed cross-entropy and divide it by the number of labels.

        Args:
            logits: `(batch, target_length, decoder_vocab_size)`.
            labels: `(batch, target_length)`, -100 where nothing is to be predicted.
            num_items_in_batch: Divisor in place of the number of labels here.

        Returns:
            A scalar in nats per label.

        Raises:
            ValueError: If no label is to be predicted, or labels and logits differ in length.
        """
        if logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"`labels` must have the shape of the logits, {tuple(logits.shape[:-1])}, "
                f"but have {tuple(labels.shape)} instead."
            )
        total = F.cross_entropy(
            logits.flatten(0, 1).float(),
            labels.to(logits.device).flatten(),
            ignore_index=IGNORED_LABEL,
            label_smoothing=self.config.label_smoothing if self.training else 0.0,
            reduction="sum",
        )
        if num_items_in_batch is None:
            num_items_in_batch = (labels != IGNORED_LABEL).sum()
            if not torch.compiler.is_compiling() and num_items_in_batch == 0:
                raise ValueError("`labels` must hold at least one label other than -100, but all are -100.")
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch


# transformers asks for it at each step of decoding, and to read it off the code takes as long as a cell does.
HeedRNNForConditionalGeneration.forward.__signature__ = inspect.signature(HeedRNNForConditionalGeneration.forward)

__all__ = [
    "HeedRNNDecoder",
    "HeedRNNEncoder",
    "HeedRNNForConditionalGeneration",
    "HeedRNNModel",
    "HeedRNNPreTrainedModel",
]
