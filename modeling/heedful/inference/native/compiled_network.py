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
        self._encoder_layers = [self._described(layer) for layer in self.encoder_layers]
        self.described_layers = [self._described(layer) for layer in self.decoder_layers]
        self._last_norms = self._norm(model.model.encoder.norm), self._norm(model.model.decoder.norm)

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

    def describe_decoder(self, layers: Any) -> Model:
        """Return the decoder as `kernels.cpp` knows it, with the layers of one search."""
        config, output = self.config, cast("CompiledProduct", self.output).linear
        embedding = self._embedding.data_ptr(), self.embed_target.scale
        sizes = config.d_model, config.decoder_attention_heads, config.decoder_ffn_dim
        is_post_norm = self.decoder_layers[0].is_post_norm
        return Model(
            ctypes.addressof(layers), output, self._last_norms[1], *embedding, len(layers), *sizes, is_post_norm
        )

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Encode as `NativeNetwork.encode` does, but for padding, whose states are 0."""
        config, mask = self.config, _token_mask(input_ids.shape, attention_mask)
        positions = positions_of(input_ids.shape[1], 0, attention_mask, input_ids.device)
        states = self.embed_source(input_ids[mask], positions.expand_as(input_ids)[mask]).contiguous()  # (tokens, D)
        starts, counts = (each.repeat_interleave(mask.sum(1)) for each in _starts_and_counts(mask))
        layers = (Layer * len(self._encoder_layers))(*self._encoder_layers)
        sizes = config.d_model, config.encoder_attention_heads, config.encoder_ffn_dim
        stack = Model(layers=ctypes.addressof(layers), norm=self._last_norms[0])
        stack.number_of_layers, (stack.width, stack.heads, stack.inner) = len(layers), sizes
        stack.is_post_norm = self.encoder_layers[0].is_post_norm
        places = states.data_ptr(), starts.data_ptr(), counts.data_ptr()
        self._library.encode(ctypes.byref(stack), len(states), *places, torch.get_num_threads())
        return states.new_zeros(*input_ids.shape, config.d_model).masked_scatter_(mask[..., None], states)

    def start(
        self, source: torch.Tensor, attention_mask: torch.Tensor | None, prompt: torch.Tensor, beams: int
    ) -> Any:
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
        mask, layers = _token_mask(source.shape[:2], attention_mask), network.described_layers
        projected = network.project_source(source.float()[mask])  # (source tokens, layers · 2 D)
        self._source = projected.unflatten(1, (len(layers), -1)).transpose(0, 1).contiguous()
        self.starts, self.counts = (each.repeat_interleave(beams) for each in _starts_and_counts(mask))  # (R)
        super().__init__(len(layers), len(self.counts), beams, self._source.shape[-1], torch.float32)
        self._layers = (Layer * len(layers))(*layers)
        self.model = network.describe_decoder(self._layers)
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


def _token_mask(shape: torch.Size, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Return which of `(N, S)` source tokens are attended to: all of a source that has nothing but padding."""
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool)
    mask = attention_mask.bool()
    return mask | ~mask.any(1, keepdim=True)


def _starts_and_counts(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the tokens of each sentence begin if only they are kept, and how many they are: `(N)`."""
    counts = mask.sum(1, dtype=torch.int32)
    return (counts.cumsum(0) - counts).int(), counts


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
        precision != "bfloat16"
        and config.activation_function == "relu"
        and config.norm_type == "layernorm"
        and not config.embedding_norm
        and config.encoder_neighbourhood is config.decoder_neighbourhood is None
        and config.position_encoding in ("sinusoidal", "learned", "none")
        and head == width / config.decoder_attention_heads
        and all(size in (None, head) for size in (config.d_k, config.d_v))
        and all(can_multiply(size, precision == "int8") for size in (width, *inner))
    )
