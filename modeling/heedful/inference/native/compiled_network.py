"""The decoder of the paper as one call of `kernels.cpp` at each step.

Letters in shape comments: N sentences still open, K hypotheses of each, R = N·K rows, S source length, D = d_model,
V target tokens.
"""

import ctypes
from typing import Any, cast

import torch
from torch import nn

from heedful.inference.native.kernels import CompiledProduct, Layer, Model, Norm, can_multiply, library
from heedful.inference.native.network import FIRST_ROOM, NativeNetwork, obstacle
from heedful.inference.native.weights import Precision
from heedful.modeling_heed import HeedForConditionalGeneration


class CompiledNetwork(NativeNetwork):
    """A network whose decoder takes a step in one call; made where `is_compilable` says that this can be."""

    def __init__(self, model: HeedForConditionalGeneration, precision: Precision = "float32"):
        """Pack the weights; errors are those of `NativeNetwork`."""
        super().__init__(model, precision)
        self._library: Any = library()
        self._embedding = self.embed_target.weight.float().contiguous()
        self._norms = list[torch.Tensor]()
        self.described_layers = [self._described(layer) for layer in self.decoder_layers]
        self._last_norm = self._norm(model.model.decoder.norm)

    def describe(self, layers: Any) -> Model:
        """Return the model as `kernels.cpp` knows it, with the layers of one search."""
        config, embed, output = self.config, self.embed_target, self.output
        sizes = len(layers), config.d_model, config.decoder_attention_heads, config.decoder_ffn_dim
        first = ctypes.addressof(layers), cast("CompiledProduct", output).linear, self._last_norm
        is_post_norm = self.decoder_layers[0].is_post_norm
        return Model(*first, self._embedding.data_ptr(), embed.scale, *sizes, is_post_norm)

    def _norm(self, module: nn.Module) -> Norm:
        if isinstance(module, nn.Identity):
            return Norm()
        norm: Any = module
        weight, bias = (each.detach().float().contiguous() for each in (norm.weight, norm.bias))
        self._norms += weight, bias
        return Norm(weight.data_ptr(), bias.data_ptr(), norm.eps)

    def _described(self, layer: Any) -> Layer:
        own, cross, inner = layer.self_attn, layer.cross_attn, layer.feed_forward
        products = own.project, own.project_output, cross.project, cross.project_output, inner.inner, inner.outer
        return Layer(*(product.linear for product in products), *map(self._norm, layer.norm_modules))

    def start(  # type: ignore[override]
        self, source: torch.Tensor, attention_mask: torch.Tensor | None, prompt: torch.Tensor, beams: int
    ) -> "CompiledState":
        """Begin to decode as `NativeNetwork.start` does."""
        state = CompiledState(self, source, attention_mask, beams)
        for tokens in prompt[:, :-1].T:
            self.step(tokens.repeat_interleave(beams), state)
        return state

    def step(self, tokens: torch.Tensor, state: Any) -> torch.Tensor:
        """Read the `(R)` newest tokens and return the `(R, V)` logits of the next ones, until the next step."""
        state.make_room()
        position = self.embed_target.encoding(state.length)
        rows, tokens = len(tokens), tokens.contiguous()
        call = state.length, state.slots.shape[1], tokens.data_ptr(), state.slots.data_ptr(), state.starts.data_ptr()
        self._library.step(
            ctypes.byref(state.model), rows, *call, state.counts.data_ptr(),
            None if position is None else position.data_ptr(), state.logits.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        state.length += 1
        return state.logits[:rows]

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the `(R)` likeliest tokens of `(R, V)` logits."""
        tokens = torch.empty(len(logits), dtype=torch.long)
        self._library.likeliest(logits.data_ptr(), *logits.shape, tokens.data_ptr())
        return tokens

    def continuations(
        self, logits: torch.Tensor, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the best continuations of each sentence's hypotheses, as `best_tokens` of log-probabilities."""
        (sentences, beams), vocabulary = scores.shape, logits.shape[1]
        count, scores = min(count, beams * vocabulary), scores.contiguous()
        best = torch.empty(sentences, count)
        parents, tokens = (torch.empty(sentences, count, dtype=torch.long) for _ in range(2))
        sizes = sentences, beams, vocabulary, count
        places = best.data_ptr(), parents.data_ptr(), tokens.data_ptr()
        self._library.continuations(logits.data_ptr(), scores.data_ptr(), *sizes, *places, torch.get_num_threads())
        return best, parents, tokens


class CompiledState:
    """The cache of N sentences with K hypotheses each.

    Hypotheses never move: each writes the key and value of its newest token into a slot of its own, and knows the
    slots of its ancestors. Source tokens that are padding are left out.
    """

    def __init__(
        self, network: CompiledNetwork, source: torch.Tensor, attention_mask: torch.Tensor | None, beams: int
    ):
        """Project `(N, S, D)` encoded sentences with a mask that is 0 at padding."""
        mask = torch.ones(source.shape[:2]) if attention_mask is None else attention_mask
        mask = mask.bool() | ~mask.bool().any(1, keepdim=True)  # of nothing but padding all is attended to
        counts, layers = mask.sum(1), network.described_layers
        projected = network.project_source(source.float()[mask])  # (source tokens, layers · 2 D)
        self.source = projected.unflatten(1, (len(layers), -1)).transpose(0, 1).contiguous()
        self.beams, self.width = beams, self.source.shape[-1]
        self.counts, self.starts = (
            each.int().repeat_interleave(beams) for each in (counts, counts.cumsum(0) - counts)
        )  # (R)
        self.length = 0  # target tokens that were read
        self.rows = len(self.counts)  # at the beginning: later there are fewer
        self.slots = torch.empty(self.rows, 0, dtype=torch.int32)  # (R, tokens there is room for)
        self.target = torch.empty(len(layers), 0, self.width)  # (layers, slots, 2 D)
        self._layers = (Layer * len(layers))(*layers)
        self.model = network.describe(self._layers)
        self.logits = torch.empty(self.rows, self.model.output.out_features)

    def make_room(self) -> None:
        """Double the cache if it has no room for the next token's keys and values."""
        room = self.slots.shape[1]
        if self.length < room:
            return
        added = max(FIRST_ROOM, room)
        slots = (room + torch.arange(added)) * self.rows + torch.arange(len(self.slots))[:, None]
        self.slots = torch.cat([self.slots, slots.int()], 1)
        self.target = torch.cat([self.target, torch.empty(len(self.target), added * self.rows, self.width)], 1)
        for number, layer in enumerate(self._layers):
            layer.target, layer.source = self.target[number].data_ptr(), self.source[number].data_ptr()

    def follow(self, parents: torch.Tensor) -> None:
        """Let hypothesis j of each sentence go on from hypothesis `parents[n, j]`; `(N, K)`."""
        rows = torch.arange(len(parents))[:, None] * self.beams + parents
        self.slots[:, : self.length] = self.slots[rows.flatten(), : self.length]

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences except those with the given numbers, `(n)`."""
        rows = (sentences[:, None] * self.beams + torch.arange(self.beams)).flatten()
        self.slots, self.counts, self.starts = (each[rows] for each in (self.slots, self.counts, self.starts))


def make_network(model: HeedForConditionalGeneration, precision: Precision) -> NativeNetwork:
    """Pack a model's weights, for `kernels.cpp` if it can compute the decoder; errors are those of `NativeNetwork`."""
    return (CompiledNetwork if is_compilable(model, precision) else NativeNetwork)(model, precision)


def is_compilable(model: HeedForConditionalGeneration, precision: Precision) -> bool:
    """Return whether `kernels.cpp` can compute a model's decoder here: if it is much like the paper's."""
    if obstacle(model) is not None:
        return False
    config: Any = model.config
    heads, width = config.decoder_attention_heads, config.d_model
    return (
        precision != "bfloat16"
        and config.activation_function == "relu"
        and config.norm_type == "layernorm"
        and not config.embedding_norm
        and config.decoder_neighbourhood is None
        and config.position_encoding in ("sinusoidal", "learned", "none")
        and all(size is None or size * heads == width for size in (config.d_k, config.d_v))
        and all(can_multiply(size, precision == "int8") for size in (width, config.decoder_ffn_dim))
    )
