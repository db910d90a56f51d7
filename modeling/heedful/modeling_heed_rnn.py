"""Recurrent encoder-decoders for transformers, the models to compare with *Attention Is All You Need* (2017).

In this file: encoder, attention to the source, decoder, model, output. The cells are in `cells_heed.py`. Loss,
loading, saving and `generate()` are the Transformer's.

Letters in shape comments: B batch, S source length, T target length, E = embedding_size, H = hidden_size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import can_return_tuple

from .cells_heed import (
    Cell,
    LSTMCell,
    RecurrentCache,
    RecurrentMemory,
    State,
    keep_at_padding,
    make_cell,
    may_fuse,
    padding_free,
)
from .configuration_heed_rnn import HeedRNNConfig
from .encoder_decoder_heed import EncoderDecoder, OutputLayer
from .generation_heed import HeedGenerationMixin
from .messages_heed import wrong
from .pretrained_heed import HeedBaseModel
from .versions_heed import CACHE, decoder_output, either_cache_name

DEFAULT_MAX_LENGTH = 512  # tokens of the longest translation, unless `generate()` gets another limit

MaybeTensor = torch.Tensor | None
# Attends from (B, length, H) states to the source; returns the pre-softmax layer's input, and the weights.
Look = Callable[[torch.Tensor], tuple[torch.Tensor, MaybeTensor]]
# The next states, the next step's extra input, the pre-softmax layer's input, the weights, and each layer's outputs.
Run = tuple[list[State], MaybeTensor, torch.Tensor, MaybeTensor, list[torch.Tensor]]


# Encoder


class HeedRNNEncoderLayer(nn.Module):
    """One cell, or two that run in opposite directions (Schuster and Paliwal, 1997)."""

    def __init__(self, config: HeedRNNConfig, input_size: int):
        super().__init__()
        self.config = config
        self.reads_backwards = config.reverse_source
        width = config.hidden_size // 2 if config.bidirectional else config.hidden_size
        self.first_cell = make_cell(config, input_size, width)
        self.second_cell = make_cell(config, input_size, width) if config.bidirectional else None

    def forward(self, hidden_states: torch.Tensor, tokens: torch.Tensor | None) -> tuple[torch.Tensor, State]:
        """Return the outputs `(B, S, H)` and the last state for `(B, S, input_size)` inputs."""
        is_fused = may_fuse(self.config, hidden_states.device, tokens)
        outputs, state = self.first_cell(hidden_states, None, tokens, self.reads_backwards, is_fused)
        if self.second_cell is None:
            return outputs, state
        others, other_state = self.second_cell(hidden_states, None, tokens, not self.reads_backwards, is_fused)
        joined = tuple(torch.cat(pair, dim=-1) for pair in zip(state, other_state, strict=True))
        return torch.cat([outputs, others], dim=-1), joined


@dataclass
class RecurrentEncoderOutput(BaseModelOutput):
    """Output of the encoder."""

    # Each layer's state after its last token: (B, encoder_layers · parts, H); an LSTM has two parts, h and c.
    final_state: torch.Tensor | None = None


class HeedRNNPreTrainedModel(HeedBaseModel):
    """Base class of Heed's recurrent models and stacks: initial weights, and settings for transformers."""

    config: HeedRNNConfig
    config_class = HeedRNNConfig
    auto_map = {
        "AutoConfig": "configuration_heed_rnn.HeedRNNConfig",
        "AutoModel": "modeling_heed_rnn.HeedRNNModel",
        "AutoModelForSeq2SeqLM": "modeling_heed_rnn.HeedRNNForConditionalGeneration",
    }
    supports_gradient_checkpointing = False
    _no_split_modules = ["HeedRNNEncoderLayer"]
    _is_stateful = True  # assisted decoding would go back by tokens

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
        """Raise a `ValueError` for every attention function but eager."""
        if attn_implementation != "eager":
            must = "be eager for a recurrent model, which has no other attention function"
            raise wrong("attn_implementation", must, repr(attn_implementation))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw matrices from Glorot's uniform distribution, recurrent ones orthogonal for each gate."""
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
    def _init_cell(cell: Cell) -> None:
        # In float32: 16 bits cannot be made orthogonal. Copied whole: transformers marks only whole weights as loaded.
        drawn = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in cell.named_parameters()}
        if isinstance(cell, LSTMCell):
            # An LSTM that remembers at first learns longer distances (Jozefowicz et al., 2015).
            drawn["bias_ih_l0"][cell.hidden_size : 2 * cell.hidden_size] = 1
        gates = (drawn[name].split(cell.hidden_size) for name in ("weight_ih_l0", "weight_hh_l0"))
        for read, kept in zip(*gates, strict=True):
            nn.init.xavier_uniform_(read)
            nn.init.orthogonal_(kept)
        for name, weight in cell.named_parameters():
            init.copy_(weight, drawn[name])


class HeedRNNStack(HeedRNNPreTrainedModel):
    """Base class of encoder and decoder: token embeddings, and mask checks."""

    def __init__(self, config: HeedRNNConfig, vocab_size: int):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.embedding_size)
        self.dropout = nn.Dropout(config.dropout)

    def embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Look up `(B, length)` ids, or take `(B, length, E)` embeddings, and drop out."""
        return self.dropout(self.look_up(input_ids, inputs_embeds))

    @staticmethod
    def _check_mask(attention_mask: torch.Tensor | None, length: int) -> None:
        if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.shape[1] != length):
            must = f"The attention mask must cover {length} tokens as (batch, {length})"
            raise ValueError(f"{must}, but is of shape {tuple(attention_mask.shape)} instead.")


class HeedRNNEncoder(HeedRNNStack):
    """Recurrent layers that encode the source token by token."""

    side = "encoder"
    # Each layer is gathered when it runs; see the config's plan for the decoder.
    _fsdp_plan = {"layers.*": "free_full_weight"}

    def __init__(self, config: HeedRNNConfig):
        super().__init__(config, config.vocab_size)
        sizes = [config.embedding_size] + [config.hidden_size] * (config.encoder_layers - 1)
        self.layers = nn.ModuleList([HeedRNNEncoderLayer(config, size) for size in sizes])
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> RecurrentEncoderOutput:
        """Encode the source, with the arguments and errors of `HeedEncoder.forward`, but without attentions.

        Return `last_hidden_state` `(batch, source_length, hidden_size)`, zeros at padding, and `final_state`.
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
    """Makes the decoder's first state from the last state of the encoder's upper layers."""

    def __init__(self, config: HeedRNNConfig):
        super().__init__()
        self.parts = 2 if config.cell == "lstm" else 1
        self.layers = config.decoder_layers
        self.kind = config.bridge
        count = self.layers * self.parts if config.bridge == "linear" else 0
        self.projections = nn.ModuleList([nn.Linear(config.hidden_size, config.hidden_size) for _ in range(count)])

    def forward(self, final_state: torch.Tensor | None, like: torch.Tensor) -> list[State]:
        """Return the decoder layers' first states from the encoder's, `(B, encoder_layers · parts, H)`, or zeros."""
        if self.kind == "none":
            return [(torch.zeros_like(like[:, 0]),) * self.parts for _ in range(self.layers)]
        layers, states = self.layers_of(final_state), []
        for layer in range(self.layers):
            parts = layers[:, max(0, layers.shape[1] - self.layers + layer)].unbind(1)
            if self.kind == "linear":
                projections = self.projections[layer * self.parts : (layer + 1) * self.parts]
                parts = tuple(projection(part) for projection, part in zip(projections, parts, strict=True))
                parts = (torch.tanh(parts[0]), *parts[1:])  # h lies between -1 and 1, c anywhere
            states.append(parts)
        return states

    def layers_of(self, final_state: torch.Tensor | None) -> torch.Tensor:
        """Return the encoder's last state as `(B, encoder_layers, parts, H)`."""
        if final_state is None:
            raise ValueError("`encoder_outputs` must hold the `final_state` of this model's encoder, but does not.")
        return final_state.unflatten(1, (-1, self.parts))


# Attention to the source


class HeedRNNAttention(nn.Module):
    """Attention to the source with one head: scores, softmax, weighted sum.

    Query q and key k have the score qᵀk (`dot`), qᵀk/√H (`scaled_dot`), qᵀWk (`general`; Luong et al., 2015, section
    3.1) or vᵀtanh(Wq + Uk) (`additive`; Bahdanau et al., 2015, appendix A.1.2).
    """

    def __init__(self, config: HeedRNNConfig):
        super().__init__()
        width = config.hidden_size
        self.scoring = config.attention
        self.scaling = width**-0.5 if config.attention == "scaled_dot" else 1.0
        is_additive = config.attention == "additive"
        self.q_proj = nn.Linear(width, width, bias=False) if is_additive else None
        self.k_proj = nn.Linear(width, width, bias=False) if is_additive or config.attention == "general" else None
        self.weight = nn.Parameter(torch.empty(width)) if is_additive else None

    def project_source(self, states: torch.Tensor) -> torch.Tensor:
        """Return Wk (`general`), Uk (`additive`) or k itself for `(B, S, H)` states."""
        return states if self.k_proj is None else self.k_proj(states)

    def forward(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from `(B, T, H)` states to values, with keys from `project_source`; `(B, S)` tokens mask padding.

        Return the context `(B, T, H)` and the weights `(B, 1, T, S)`.
        """
        if self.q_proj is None or self.weight is None:
            scores = torch.matmul(query * self.scaling, keys.transpose(1, 2))  # (B, T, S)
        else:
            scores = torch.tanh(self.q_proj(query)[:, :, None] + keys[:, None]) @ self.weight.to(keys.dtype)
        if tokens is not None:
            scores = scores.masked_fill(~tokens[:, None], torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1)
        return torch.matmul(weights.to(values.dtype), values), weights[:, None]


# Decoder


def join_to_each(states: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
    """Join a `(B, size)` vector, if any, to all `(B, length, width)` states."""
    if context is None:
        return states
    context = context.to(states.dtype)[:, None].expand(-1, states.shape[1], -1)
    return torch.cat([states, context], dim=-1)


class HeedRNNDecoder(HeedRNNStack):
    """Recurrent layers that predict each target token from the state before it, and from the source.

    The uppermost state h attends to the source, with context c; tanh(W[h; c]) (Luong et al., 2015, equation 5) is the
    input to the pre-softmax layer, and with input feeding also to the next step. Without attention, c is the encoder's
    last state if it is fed (Cho et al., 2014, appendix A.1.1), else nothing.
    """

    side = "decoder"

    def __init__(self, config: HeedRNNConfig):
        super().__init__(config, config.target_vocab_size)
        has_attention = config.attention != "none"
        self.feeds_last_state = config.input_feeding and not has_attention
        self.feeds_attention = config.input_feeding and has_attention
        fed = (config.embedding_size if has_attention else config.hidden_size) if config.input_feeding else 0
        sizes = [config.embedding_size + fed] + [config.hidden_size] * (config.decoder_layers - 1)
        self.bridge = HeedRNNBridge(config)
        self.layers = nn.ModuleList([make_cell(config, size, config.hidden_size) for size in sizes])
        self.cross_attn = HeedRNNAttention(config) if has_attention else None
        joined = config.hidden_size * (2 if has_attention or self.feeds_last_state else 1)
        self.out_proj = nn.Linear(joined, config.embedding_size, bias=False)
        self.post_init()

    @either_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        encoder_final_state: torch.Tensor | None = None,
        cache: RecurrentCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode the target's newest tokens, with the arguments and errors of `HeedDecoder.forward`.

        The source is `(batch, source_length, hidden_size)`, a row for each target; a first call also needs
        `encoder_final_state`, `(batch, encoder_layers · parts, hidden_size)`. `output_attentions` records attention to
        the source. Return `last_hidden_state` `(batch, target_length, embedding_size)`, cache and recorded outputs.

        Raises:
            ValueError: Also if the source is missing, the cache is another model's, or no attention can be returned.
        """
        embeddings = self.embed(input_ids, inputs_embeds)
        length = embeddings.shape[1]
        use_cache = self.config.use_cache if use_cache is None else use_cache
        records = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        records_attention = self.config.output_attentions if output_attentions is None else output_attentions
        if encoder_hidden_states is None:
            raise ValueError("`encoder_hidden_states` must be given, but are not: this decoder needs a source.")
        self._check_given(cache, records_attention)
        kept = RecurrentCache() if cache is None else cache
        memory = kept.layers[0]
        self._check_mask(attention_mask, memory.get_seq_length() + length)
        self._check_mask(encoder_attention_mask, encoder_hidden_states.shape[1])
        tokens = padding_free(None if attention_mask is None else attention_mask[:, -length:])
        states, fed = memory.states or self.bridge(encoder_final_state, encoder_hidden_states), memory.fed
        if self.feeds_last_state and fed is None:
            fed = self.bridge.layers_of(encoder_final_state)[:, -1, 0]  # (B, H)
        look = self._look_at(encoder_hidden_states, encoder_attention_mask, memory, fed)
        run = self._feed_step_by_step if self.feeds_attention else self._run_layers
        states, fed, outputs, weights, seen = run(embeddings, tokens, states, fed, look)
        if use_cache or cache is not None:
            memory.keep(states, fed, length)
        return decoder_output(
            outputs,
            kept if use_cache else None,
            hidden_states=(embeddings, *seen) if records else None,
            cross_attentions=(weights,) if records_attention and weights is not None else None,
        )

    def _check_given(self, cache: Any, records_attention: bool | None) -> None:
        if cache is not None and not isinstance(cache, RecurrentCache):
            raise wrong(CACHE, "be a RecurrentCache", f"a {type(cache).__name__}")
        if records_attention and self.cross_attn is None:
            raise wrong("output_attentions", "be False if the config's `attention` is none", True)

    def _look_at(self, source: torch.Tensor, mask: MaybeTensor, memory: RecurrentMemory, fed: MaybeTensor) -> Look:
        if self.cross_attn is None:
            return lambda states: (self.dropout(torch.tanh(self.out_proj(join_to_each(states, fed)))), None)
        if memory.keys is None:
            memory.keys = self.cross_attn.project_source(source)
        tokens = padding_free(mask)

        def look(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            context, weights = self.cross_attn(states, memory.keys, source, tokens)
            return self.dropout(torch.tanh(self.out_proj(torch.cat([states.to(context.dtype), context], -1)))), weights

        return look

    def _run_layers(
        self, embeddings: torch.Tensor, tokens: MaybeTensor, states: list[State], fed: MaybeTensor, look: Look
    ) -> Run:
        """Run each layer over the whole target, then attend from all positions at once."""
        is_fused = may_fuse(self.config, embeddings.device, tokens)
        outputs, last, seen = join_to_each(embeddings, fed), [], []
        for number, (cell, state) in enumerate(zip(self.layers, states, strict=True)):
            inputs = self.dropout(outputs) if number else outputs
            outputs, state = cell(inputs, state, tokens, is_fused=is_fused)
            last.append(state)
            seen.append(outputs)
        outputs, weights = look(outputs)
        return last, fed, outputs, weights, seen

    def _feed_step_by_step(
        self, embeddings: torch.Tensor, tokens: MaybeTensor, states: list[State], fed: MaybeTensor, look: Look
    ) -> Run:
        """Run all layers token by token, each token together with the previous step's attention output."""
        is_fused = may_fuse(self.config, embeddings.device)
        fed = torch.zeros_like(embeddings[:, 0]) if fed is None else fed
        found: list[tuple[torch.Tensor, Any]] = []
        seen: list[list[torch.Tensor]] = [[] for _ in self.layers]
        for position in range(embeddings.shape[1]):
            inputs = torch.cat([embeddings[:, position], fed.to(embeddings.dtype)], dim=-1)
            read = []
            for number, (cell, state) in enumerate(zip(self.layers, states, strict=True)):
                new = cell(self.dropout(inputs) if number else inputs, state, is_fused=is_fused)
                read.append(new if tokens is None else keep_at_padding(tokens[:, position], new, state))
                inputs = read[-1][0]
                seen[number].append(inputs)
            states = read
            output, weights = look(inputs[:, None])
            found.append((output, weights))
            fed = output[:, 0] if tokens is None else torch.where(tokens[:, position, None], output[:, 0], fed)
        outputs, weights = (torch.cat(parts, dim) for parts, dim in zip(zip(*found, strict=True), (1, 2), strict=True))
        return states, fed, outputs, weights, [torch.stack(layer, dim=1) for layer in seen]


# The model


class HeedRNNModel(EncoderDecoder, HeedRNNPreTrainedModel):
    """Encoder and decoder without the pre-softmax layer; `forward` is `EncoderDecoder`'s."""

    def __init__(self, config: HeedRNNConfig):
        super().__init__(config)
        self._hold_both_stacks(HeedRNNEncoder(config), HeedRNNDecoder(config))
        self.post_init()

    def _encoded(self, given: BaseModelOutput | tuple[Any, ...]) -> RecurrentEncoderOutput:
        """Return the encoder's output; a tuple may end in its `final_state`."""
        if isinstance(given, RecurrentEncoderOutput):
            return given
        given = given.to_tuple() if isinstance(given, BaseModelOutput) else given
        final = given[-1] if len(given) > 1 and isinstance(given[-1], torch.Tensor) else None
        return RecurrentEncoderOutput(last_hidden_state=given[0], final_state=final)

    def _beside_states(self, encoded: RecurrentEncoderOutput) -> dict[str, torch.Tensor | None]:
        return {"encoder_final_state": encoded.final_state}


class HeedRNNForConditionalGeneration(OutputLayer, HeedRNNPreTrainedModel, HeedGenerationMixin):
    """A recurrent encoder-decoder with pre-softmax layer and loss; `forward` is `OutputLayer`'s."""

    def __init__(self, config: HeedRNNConfig):
        super().__init__(config)
        model = HeedRNNModel(config)
        self._hold_head(model, nn.Linear(config.embedding_size, config.target_vocab_size, bias=False))
        # Without a length, `generate()` would stop after 20 tokens, with only a log message.
        self.generation_config.max_length = DEFAULT_MAX_LENGTH
        self.post_init()

    def _may_leave_out_logits(self) -> bool:
        return False  # it would gain little: the cells take most of the time

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model makes its own cache
