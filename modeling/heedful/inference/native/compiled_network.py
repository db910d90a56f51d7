"""The paper's encoder as one call of `kernels.cpp`, and its decoder as one at each step.

Letters in shape comments: N sentences still open, K hypotheses of each, R = N·K rows, S source length, D = d_model,
V target tokens.
"""

import ctypes
from typing import Any, cast

import torch
from torch import nn

from heedful.inference.native.kernels import CompiledProduct, Layer, Model, Norm, can_multiply, library
from heedful.inference.native.network import DecodingState, NativeNetwork, obstacle
from heedful.inference.native.weights import Precision
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.positions_heed import positions_of


class CompiledNetwork(NativeNetwork):
    """A network whose encoder runs, and whose decoder takes a step, in one call; see `is_compilable`."""

    def __init__(self, model: HeedForConditionalGeneration, precision: Precision = "float32"):
        """Pack the weights; errors are those of `NativeNetwork`."""
        super().__init__(model, precision)
        self._library: Any = library()
        self._norms = list[torch.Tensor]()
        self._embedding = self.embed_target.weight.float().contiguous()
        stacks = {"encoder": self.encoder_layers, "decoder": self.decoder_layers}
        self._layers = {side: [self._described(layer) for layer in layers] for side, layers in stacks.items()}
        self._last_norms = {side: self._norm(getattr(model.model, side).norm) for side in stacks}

    def describe(self, side: str) -> tuple[Model, Any]:
        """Return the encoder or decoder as `kernels.cpp` knows it, and its layers."""
        layers, config = (Layer * len(self._layers[side]))(*self._layers[side]), self.config
        sizes = len(layers), config.d_model, *(getattr(config, f"{side}_{n}") for n in ("attention_heads", "ffn_dim"))
        stack = Model(ctypes.addressof(layers), *sizes, config.norm_placement == "post", self._last_norms[side])
        if side == "decoder":
            stack.output = cast("CompiledProduct", self.output).linear
            stack.embedding, stack.embedding_scale = self._embedding.data_ptr(), self.embed_target.scale
        return stack, layers

    def _described(self, layer: Any) -> Layer:
        own, inner = layer.self_attn, layer.feed_forward
        products = {"query_key_value": own.project, "self_output": own.project_output}
        products |= {"inner": inner.inner, "outer": inner.outer}
        if hasattr(layer, "cross_attn"):
            products |= {"query": layer.cross_attn.project, "cross_output": layer.cross_attn.project_output}
        norms = {f"{name}_norm": self._norm(module) for name, module in layer.norm_modules.items()}
        return Layer(**{name: product.linear for name, product in products.items()}, **norms)

    def _norm(self, module: nn.Module) -> Norm:
        if isinstance(module, nn.Identity):
            return Norm()
        norm: Any = module
        weight, bias = (each.detach().float().contiguous() for each in (norm.weight, norm.bias))
        self._norms += weight, bias
        return Norm(weight.data_ptr(), bias.data_ptr(), norm.eps)

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Encode as `NativeNetwork.encode` does, but for padding, whose states are 0."""
        mask, *places = _sources(input_ids.shape, attention_mask)
        starts, counts = (each.repeat_interleave(places[1]) for each in places)  # of each token's sentence
        positions = positions_of(input_ids.shape[1], 0, attention_mask, input_ids.device)
        states = self.embed_source(input_ids[mask], positions.expand_as(input_ids)[mask]).contiguous()  # (tokens, D)
        stack, _layers = self.describe("encoder")
        read = states.data_ptr(), starts.data_ptr(), counts.data_ptr()
        self._library.encode(ctypes.byref(stack), len(states), *read, torch.get_num_threads())
        return states.new_zeros(*input_ids.shape, states.shape[1]).masked_scatter_(mask[..., None], states)

    def state(self, source: torch.Tensor, attention_mask: torch.Tensor | None, beams: int) -> "CompiledState":
        """Return the cache of a search in which nothing was read yet."""
        return CompiledState(self, source, attention_mask, beams)

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

    def continuations(
        self, logits: torch.Tensor, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the best continuations of each sentence's hypotheses, as `best_tokens` of log-probabilities."""
        (sentences, beams), vocabulary = scores.shape, logits.shape[1]
        count, logits, scores = min(count, beams * vocabulary), logits.float().contiguous(), scores.contiguous()
        best = torch.empty(sentences, count)
        parents, tokens = (torch.empty(sentences, count, dtype=torch.long) for _ in range(2))
        sizes = sentences, beams, vocabulary, count
        places = best.data_ptr(), parents.data_ptr(), tokens.data_ptr()
        self._library.continuations(logits.data_ptr(), scores.data_ptr(), *sizes, *places, torch.get_num_threads())
        return best, parents, tokens


class CompiledState(DecodingState):
    """The cache with the keys and values of all source tokens that are no padding."""

    def __init__(
        self, network: CompiledNetwork, source: torch.Tensor, attention_mask: torch.Tensor | None, beams: int
    ):
        """Project `(N, S, D)` encoded sentences with a mask that is 0 at padding."""
        mask, *places = _sources(source.shape[:2], attention_mask)
        self.starts, self.counts = (each.repeat_interleave(beams) for each in places)  # (R)
        self.model, self._layers = network.describe("decoder")
        count = len(self._layers)
        projected = network.project_source(source.float()[mask])  # (source tokens, layers · 2 D)
        self._source = projected.unflatten(1, (count, -1)).transpose(0, 1).contiguous()
        super().__init__(count, len(self.counts), beams, self._source.shape[-1])
        self.logits = torch.empty(self.rows, self.model.output.out_features)

    def make_room(self) -> None:
        """Double the cache if it is full, and say where it lies now."""
        super().make_room()
        for number, layer in enumerate(self._layers):
            layer.target, layer.source = self.target[number].data_ptr(), self._source[number].data_ptr()

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop them as `DecodingState.keep`."""
        super().keep(sentences)
        rows = self.rows_of(sentences)
        self.starts, self.counts = self.starts[rows], self.counts[rows]


def _sources(
    shape: torch.Size, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which `(N, S)` source tokens are attended to: all where there is nothing but padding.

    If only they are kept, each sentence begins, and has as many tokens, as the `(N)` numbers beside it say.
    """
    mask = torch.ones(shape, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    mask = mask | ~mask.any(1, keepdim=True)
    counts = mask.sum(1, dtype=torch.int32)
    return mask, (counts.cumsum(0) - counts).int(), counts


def make_network(model: HeedForConditionalGeneration, precision: Precision) -> NativeNetwork:
    """Pack a model's weights, for `kernels.cpp` if it can compute the model; errors are those of `NativeNetwork`."""
    return (CompiledNetwork if is_compilable(model, precision) else NativeNetwork)(model, precision)


def is_compilable(model: HeedForConditionalGeneration, precision: Precision) -> bool:
    """Return whether `kernels.cpp` can compute a model here: one much like the paper's."""
    if obstacle(model) is not None:
        return False
    config: Any = model.config
    width, inner = config.d_model, (config.encoder_ffn_dim, config.decoder_ffn_dim)
    head = width / config.encoder_attention_heads
    return (
        config.activation_function == "relu"
        and config.norm_type == "layernorm"
        and not config.embedding_norm
        and config.encoder_neighbourhood is config.decoder_neighbourhood is None
        and config.position_encoding in ("sinusoidal", "learned", "none")
        and head == width / config.decoder_attention_heads
        and all(size in (None, head) for size in (config.d_k, config.d_v))
        and all(can_multiply(size, precision == "int8") for size in (width, *inner))
    )
