"""The paper's decoder with one call of `kernels.cpp` per step.

Letters in shape comments: N open sentences, K hypotheses each, R = N·K rows, S source length, D = d_model, V target
tokens.
"""

import ctypes
from typing import cast

import torch
from torch import nn

from heedful.decoding.native.kernels import CompiledProduct, Layer, Model, Norm, Precision, library, place_of
from heedful.decoding.native.network import DecoderLayer, DecodingState, NativeNetwork
from heedful.modeling_heed import HeedForConditionalGeneration


class CompiledNetwork(NativeNetwork):
    """A network for a model without `kernels_obstacle`, with one call per decoder step."""

    def __init__(self, model: HeedForConditionalGeneration, precision: Precision = "float32"):
        super().__init__(model, precision)
        self._library, self.new_state = cast("ctypes.CDLL", library()), CompiledState
        self._norms: list[torch.Tensor] = []  # kept in memory for the kernels
        self._embedding = self.embed_target.weight.float().contiguous()
        self.layers = [self._described(layer) for layer in self.decoder_layers]
        config, output = self.config, cast("CompiledProduct", self.output).linear
        sizes = len(self.layers), config.d_model, config.decoder_attention_heads, config.decoder_ffn_dim
        embedding = place_of(self._embedding, output.out_features, config.d_model)
        last = self._norm(model.model.decoder.norm), output, embedding, self.embed_target.scale
        self.stack = Model(*sizes, config.norm_placement == "post", *last)

    def _described(self, layer: DecoderLayer) -> Layer:
        own, cross, inner = layer.self_attn, layer.cross_attn, layer.feed_forward
        products = own.project, own.project_output, cross.project, cross.project_output, inner.inner, inner.outer
        linears = (cast("CompiledProduct", each).linear for each in products)
        return Layer(*linears, *map(self._norm, layer.norm_modules.values()))

    def _norm(self, norm: nn.LayerNorm | None) -> Norm:
        if norm is None:
            return Norm()
        weight, bias = (each.detach().float().contiguous() for each in (norm.weight, norm.bias))
        self._norms += weight, bias
        return Norm(*(place_of(each, self.config.d_model) for each in (weight, bias)), norm.eps)

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Encode like `NativeNetwork.encode`, one length at a time, because masked sums depend on the batch."""
        if attention_mask is None or len(attention_mask.unique()) == 1:
            return super().encode(input_ids, None)
        lengths, order = attention_mask.bool().sum(1).sort()
        mask, states = attention_mask.bool()[order], torch.zeros(*input_ids.shape, self.config.d_model)
        groups = torch.stack(lengths[lengths > 0].unique(return_counts=True)[::-1], 1).tolist()
        states[mask] = self.encode_groups(input_ids[order][mask], mask.cumsum(1)[mask] - 1, groups, None)
        return states[order.argsort()]

    def step(self, tokens: torch.Tensor, state: DecodingState) -> torch.Tensor:
        """Decode the `(R)` newest tokens; return the next tokens' `(R, V)` logits, valid until the next step."""
        assert isinstance(state, CompiledState)
        state.make_room()
        position = self.embed_target.encoding(state.length)
        rows, room, tokens = len(state.slots), state.slots.shape[1], tokens.contiguous()
        read = [place_of(tokens, rows, dtype=torch.int64), place_of(state.slots, rows, room, dtype=torch.int32)]
        read += (place_of(each, rows, dtype=torch.int32) for each in (state.starts, state.counts))
        is_refused = self._library.step(
            ctypes.byref(self.stack), state.layers, rows, state.length, room, *read,
            None if position is None else place_of(position, self.config.d_model), state.logits.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        if is_refused:
            limit, found = self.stack.output.out_features, [*map(int, tokens.aminmax())]
            must = f"Each source must have a token, and token ids must be at least 0 and below {limit}"
            raise ValueError(f"{must}, but are between {found[0]} and {found[1]} instead, or a source has none.")
        state.length += 1
        return state.logits[:rows]

    def continuations(
        self, logits: torch.Tensor, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each sentence's best continuations, like `best_tokens` for log-probabilities."""
        (sentences, beams), vocabulary = scores.shape, logits.shape[1]
        count, logits, scores = min(count, beams * vocabulary), logits.float().contiguous(), scores.contiguous()
        best = torch.empty(sentences, count)
        parents, tokens = (torch.empty(sentences, count, dtype=torch.long) for _ in range(2))
        sizes = sentences, beams, vocabulary, count
        given = place_of(logits, sentences * beams, vocabulary), place_of(scores, sentences, beams)
        places = best.data_ptr(), parents.data_ptr(), tokens.data_ptr()
        self._library.continuations(*given, *sizes, *places, torch.get_num_threads())
        return best, parents, tokens


class CompiledState(DecodingState):
    """The cache, with keys and values for all source tokens except padding."""

    def __init__(
        self, network: CompiledNetwork, source: torch.Tensor, attention_mask: torch.Tensor | None, beams: int
    ):
        mask = torch.ones(source.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        counts = mask.sum(1, dtype=torch.int32)
        # (R): first and number of a row's source tokens
        of_sentences = (counts.cumsum(0) - counts).int(), counts
        self.starts, self.counts = (each.repeat_interleave(beams) for each in of_sentences)
        count = len(network.layers)
        self.layers = (Layer * count)(*network.layers)
        projected = network.project_source(source.float()[mask])  # (source tokens, layers · 2 D)
        self._source = projected.unflatten(1, (count, -1)).transpose(0, 1).contiguous()
        super().__init__(count, len(self.counts), beams, self._source.shape[-1])
        self.logits = torch.empty(self.rows, network.stack.output.out_features)

    def make_room(self) -> None:
        """Double a full cache, and give the kernels its address."""
        before = self.target
        super().make_room()
        if self.target is not before:
            for layer, target, source in zip(self.layers, self.target, self._source, strict=True):
                layer.target, layer.source = target.data_ptr(), source.data_ptr()

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop sentences like `DecodingState.keep`."""
        super().keep(sentences)
        rows = self.rows_of(sentences)
        self.starts, self.counts = self.starts[rows], self.counts[rows]
