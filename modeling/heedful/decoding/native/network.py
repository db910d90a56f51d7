"""A Heed model's weights and decoding step, packed for the CPU: the readable reference for `kernels.cpp`.

Three things make a step cheap:

- One matrix product gives query, key and value, another gives the source's keys and values for all layers.
- Each sentence has its source's keys and values once, and all its hypotheses query them in one product.
- Hypotheses never move. Each writes its newest key and value into its own slot, and keeps its ancestors' slots. Beam
  search reorders these numbers, not the cache.

Letters in shape comments: N sentences, K hypotheses per sentence, R = N·K rows, S source length, T room for target
tokens, t target tokens so far, H heads, D = d_model, V target tokens, C candidates.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from heedful import modeling_heed as heed
from heedful.attending_heed import WindowedMask, neighbourhood_attention, pays_in_windows, windowed_mask
from heedful.attention_heed import HeedAttention
from heedful.configuration_heed import HeedConfig
from heedful.decoding.native.kernels import Precision, Product, packed_linear
from heedful.positions_heed import positions_of

Groups = Sequence[Sequence[int]]  # sentences and their length
Mask = torch.Tensor | WindowedMask | None
SUBLAYERS = "self_attn", "cross_attn", "feed_forward"
CHUNK = 64  # tokens; `best_tokens` sorts only the best chunks
FIRST_ROOM = 32  # target tokens in a new cache; doubled when it is full


class NativeNetwork:
    """A Heed model's encoder, decoder step and output in float32, with packed copies of its weights."""

    def __init__(self, model: heed.HeedForConditionalGeneration, precision: Precision = "float32"):
        self.config: HeedConfig = model.config
        self.new_state: Callable[..., DecodingState] = SourceState
        encoder, decoder = model.model.encoder, model.model.decoder
        self.embed_source = _Embedding(encoder)
        self.embed_target = _Embedding(decoder)
        self.encoder_layers = [_EncoderLayer(layer, precision) for layer in encoder.layers] * encoder.rounds
        self.decoder_layers = [DecoderLayer(layer, precision) for layer in decoder.layers] * decoder.rounds
        self.encoder_norm, self.decoder_norm = _norm(encoder.norm), _norm(decoder.norm)
        cross = [layer.cross_attn for layer in decoder.layers] * decoder.rounds
        self.project_source = _joined([each for one in cross for each in _key_values(one)], precision)
        self.output = packed_linear(model.lm_head.weight, model.lm_head.bias, precision)

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Encode `(N, S)` source tokens with a mask that is 0 at padding: `(N, S, D)`."""
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None
        positions = positions_of(input_ids.shape[1], 0, attention_mask, input_ids.device)
        mask = self._encoder_mask(input_ids, attention_mask)
        return self.encode_groups(input_ids, positions, [input_ids.shape], mask).view(*input_ids.shape, -1)

    def encode_groups(
        self, input_ids: torch.Tensor, positions: torch.Tensor, groups: Groups, mask: Mask
    ) -> torch.Tensor:
        """Encode tokens in groups of (sentences, length): `(tokens, D)`."""
        states = self.embed_source(input_ids, positions).view(input_ids.numel(), -1)
        for layer in self.encoder_layers:
            states = layer(states, groups, mask, positions)
        return self.encoder_norm(states)

    def _encoder_mask(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Mask:
        """Return the additive self-attention mask for `(N, S)` tokens, in windows if faster, or `None`."""
        radius, length = self.config.encoder_neighbourhood, input_ids.shape[1]
        if radius is None:
            return _source_mask(attention_mask)
        if pays_in_windows(length, radius):
            tokens = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            return windowed_mask(tokens, radius, False, torch.float32)
        places = torch.arange(length)
        near = (places[:, None] - places).abs() <= radius
        return _additive(near if attention_mask is None else near & attention_mask.bool()[:, None, None])

    def start(
        self, source: torch.Tensor, attention_mask: torch.Tensor | None, prompt: torch.Tensor, beams: int
    ) -> "DecodingState":
        """Start to decode `(N, S, D)` sources. The first step uses the `(N, length)` prompts' newest tokens."""
        state = self.new_state(self, source, attention_mask, beams)
        for tokens in prompt[:, :-1].T:
            self.step(tokens.repeat_interleave(beams), state)
        return state

    def step(self, tokens: torch.Tensor, state: "DecodingState") -> torch.Tensor:
        """Decode the `(R)` newest tokens and return the next tokens' `(R, V)` logits."""
        assert isinstance(state, SourceState)
        state.make_room()
        states = self.embed_target(tokens, torch.tensor([state.length]))  # (R, D)
        for number, layer in enumerate(self.decoder_layers):
            states = layer(states, state, number)
        state.length += 1
        return self.output(self.decoder_norm(states))

    def continuations(
        self, logits: torch.Tensor, scores: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the best continuations for logits and `(N, K)` scores, like `best_tokens`."""
        if count == 1:
            best, tokens = logits.max(-1, keepdim=True)
            return best - logits.logsumexp(-1, keepdim=True) + scores, torch.zeros_like(tokens), tokens
        return best_tokens(logits.log_softmax(-1, dtype=torch.float32), scores, count)


class DecodingState:
    """The target tokens' cache for N sentences with K hypotheses each: R `rows`."""

    def __init__(self, layers: int, rows: int, beams: int, width: int):
        self.rows, self.beams = rows, beams  # R at first, later fewer
        self.length = 0  # number of target tokens decoded
        # (R, T): slots of a row's keys and values; later positions have the row's own.
        self.slots = torch.empty(rows, 0, dtype=torch.int32)
        self.target = torch.empty(layers, 0, width)  # (layers, slots, width), `width` of keys and values together

    def make_room(self) -> None:
        """Double the cache if it has no room for the next token."""
        room = self.slots.shape[1]
        if self.length < room:
            return
        added = max(FIRST_ROOM, room)
        slots = (room + torch.arange(added)) * self.rows + torch.arange(len(self.slots))[:, None]
        self.slots = torch.cat([self.slots, slots.int()], 1)
        self.target = F.pad(self.target, (0, 0, 0, added * self.rows))

    def follow(self, parents: torch.Tensor) -> None:
        """Continue each sentence's hypothesis j from hypothesis `parents[n, j]`; `(N, K)`."""
        rows = torch.arange(len(parents))[:, None] * self.beams + parents
        self.slots[:, : self.length] = self.slots[rows.flatten(), : self.length]

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences except those with the given numbers, `(n)`."""
        self.slots = self.slots[self.rows_of(sentences)]

    def rows_of(self, sentences: torch.Tensor) -> torch.Tensor:
        """Return the rows of `(n)` sentences, `(n·K)`."""
        return (sentences[:, None] * self.beams + torch.arange(self.beams)).flatten()


class SourceState(DecodingState):
    """The cache with all sources' keys and values, including padding."""

    def __init__(self, network: NativeNetwork, source: torch.Tensor, attention_mask: torch.Tensor | None, beams: int):
        first, layers = network.decoder_layers[0], len(network.decoder_layers)
        super().__init__(layers, len(source) * beams, beams, sum(first.self_attn.widths[1:]))
        projected = network.project_source(source.float().flatten(0, 1))  # (N·S, layers·H·(d_k + d_v))
        parts = projected.view(*source.shape[:2], layers, -1).unbind(2)
        self.source = [_by_head(part, first.cross_attn) for part in parts]
        self.source_mask = _source_mask(attention_mask)
        self.radius = network.config.decoder_neighbourhood

    def extend(self, number: int, newest: torch.Tensor) -> torch.Tensor:
        """Write a layer's `(R, width)` newest keys and values, and return all visible ones, `(R, t, width)`."""
        self.target[number, self.slots[:, self.length]] = newest
        first = 0 if self.radius is None else max(0, self.length - self.radius)
        return self.target[number, self.slots[:, first : self.length + 1]]

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop sentences like `DecodingState.keep`, with their sources."""
        super().keep(sentences)
        self.source = [(key[sentences], value[sentences]) for key, value in self.source]
        self.source_mask = None if self.source_mask is None else self.source_mask[sentences]


class _Embedding:
    """Token embeddings, scaled, plus positions (sections 3.4 and 3.5 of the paper)."""

    def __init__(self, stack: heed.HeedStack):
        self.weight = stack.embed_tokens.weight.detach()
        self.scale = stack.embedding_scale
        self.norm = _norm(stack.embedding_norm)
        self.encode_positions = stack.embed_positions
        self.known_positions: torch.Tensor | None = None  # (number, D): the first positions' encodings

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed `(…, length)` tokens at positions whose shape broadcasts to theirs: `(…, length, D)`."""
        states = F.embedding(tokens, self.weight).float() * self.scale
        if self.encode_positions is not None:
            states = states + F.embedding(positions, self._table(int(positions.max()) + 1))
        return self.norm(states)

    def encoding(self, position: int) -> torch.Tensor | None:
        """Return one position's `(D)` encoding, if any."""
        return None if self.encode_positions is None else self._table(position + 1)[position]

    def _table(self, needed: int) -> torch.Tensor:
        """Return at least `needed` encodings, kept because computing them takes longer than a small layer."""
        known = self.known_positions
        if known is None or len(known) < needed:
            encode = self.encode_positions
            number = encode.num_embeddings if isinstance(encode, nn.Embedding) else max(FIRST_ROOM, 2 * needed)
            if needed > number:
                must = f"have at most {number} tokens (`max_position_embeddings` of learned positions)"
                raise ValueError(f"A sequence must {must}, but it has {needed} instead.")
            # A local name: another thread may assign a shorter table.
            assert encode is not None
            known = self.known_positions = encode(torch.arange(number)).float()
        return known


class _Attention:
    """An attention's sizes and packed projections; the query's weights contain 1/√d_k."""

    def __init__(self, module: HeedAttention, precision: Precision, is_cross_attention: bool):
        self.d_k, self.d_v = module.d_k, module.d_v
        self.heads = module.q_proj.out_features // module.d_k
        self.widths = [self.heads * self.d_k, self.heads * self.d_k, self.heads * self.d_v]
        self.rotary = None if is_cross_attention else module.rotary
        bias = module.q_proj.bias
        query = module.q_proj.weight * module.scaling, None if bias is None else bias * module.scaling
        self.project = _joined([query] if is_cross_attention else [query, *_key_values(module)], precision)
        self.project_output = packed_linear(module.out_proj.weight, module.out_proj.bias, precision)


class _FeedForward:
    """FFN(x) (section 3.3 of the paper) for `(rows, D)` states with packed weights."""

    def __init__(self, module: heed.HeedFeedForward, precision: Precision):
        is_relu = isinstance(module.activation, nn.ReLU) and module.fc_gate is None
        self.inner = packed_linear(module.fc1.weight, module.fc1.bias, precision, relu=is_relu)
        self.outer = packed_linear(module.fc2.weight, module.fc2.bias, precision)
        self.activation = None if is_relu else module.activation
        gate = module.fc_gate
        self.gate = None if gate is None else packed_linear(gate.weight, gate.bias, precision)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        inner = self.inner(states)
        if self.gate is not None and self.activation is not None:
            inner = self.activation(self.gate(states)) * inner
        elif self.activation is not None:
            inner = self.activation(inner)
        return self.outer(inner)


class _Layer:
    """An encoder or decoder layer's packed weights and residual connections (section 3.1)."""

    def __init__(self, layer: heed.HeedEncoderLayer | heed.HeedDecoderLayer, precision: Precision):
        self.self_attn = _Attention(layer.self_attn, precision, is_cross_attention=False)
        self.feed_forward = _FeedForward(layer.feed_forward, precision)
        residuals = {name: getattr(layer, f"{name}_residual") for name in SUBLAYERS if hasattr(layer, name)}
        self.is_post_norm = residuals["self_attn"].is_post_norm
        self.norm_modules = {name: residual.norm for name, residual in residuals.items()}
        self.norms = {name: _norm(residual.norm) for name, residual in residuals.items()}

    def connect(self, name: str, states: torch.Tensor, sublayer: Product) -> torch.Tensor:
        if self.is_post_norm:
            return self.norms[name](states + sublayer(states))
        return states + sublayer(self.norms[name](states))


class _EncoderLayer(_Layer):
    def __call__(self, states: torch.Tensor, groups: Groups, mask: Mask, positions: torch.Tensor) -> torch.Tensor:
        """Transform the `(tokens, D)` states in groups of (sentences, length). Only a single group has a mask."""

        def attend(states: torch.Tensor) -> torch.Tensor:
            attention, found = self.self_attn, []
            projected = attention.project(states).split([count * length for count, length in groups])
            for group, shape in zip(projected, groups, strict=True):
                parts = group.split(attention.widths, dim=-1)
                query, key, value = (part.view(*shape, attention.heads, -1).transpose(1, 2) for part in parts)
                if attention.rotary is not None:
                    query, key = attention.rotary(query, positions), attention.rotary(key, positions)
                if isinstance(mask, WindowedMask):
                    output, _ = neighbourhood_attention(_kernel, None, query, key, value, mask)
                else:
                    output, _ = _kernel(None, query, key, value, mask)
                found.append(output.reshape(len(group), -1))
            return attention.project_output(torch.cat(found))

        states = self.connect("self_attn", states, attend)
        return self.connect("feed_forward", states, self.feed_forward)


class DecoderLayer(_Layer):
    """One step of self-attention, attention to the source and a feed-forward network, for R rows."""

    def __init__(self, layer: heed.HeedDecoderLayer, precision: Precision):
        super().__init__(layer, precision)
        self.cross_attn = _Attention(layer.cross_attn, precision, is_cross_attention=True)

    def __call__(self, states: torch.Tensor, state: SourceState, number: int) -> torch.Tensor:
        """Transform the newest tokens' `(R, D)` states."""

        def attend_to_target(states: torch.Tensor) -> torch.Tensor:
            attention = self.self_attn
            width = attention.widths[0]
            projected = attention.project(states)
            if attention.rotary is not None:
                turned = projected[:, : 2 * width].unflatten(1, (-1, 1, attention.d_k))  # (R, 2 H, 1, d)
                turned = attention.rotary(turned, torch.tensor([[state.length]])).flatten(1)
                projected = torch.cat([turned, projected[:, 2 * width :]], 1)
            query = projected[:, None, :width].unflatten(2, (attention.heads, -1)).transpose(1, 2)
            key, value = _by_head(state.extend(number, projected[:, width:]), attention)
            output, _ = _kernel(None, query, key, value)  # (R, 1, H, d_v)
            return attention.project_output(output.reshape(len(states), -1))

        def attend_to_source(states: torch.Tensor) -> torch.Tensor:
            attention = self.cross_attn
            query = attention.project(states).view(-1, state.beams, attention.heads, attention.d_k).transpose(1, 2)
            output, _ = _kernel(None, query, *state.source[number], state.source_mask)  # (N, K, H, d_v)
            return attention.project_output(output.reshape(len(states), -1))

        states = self.connect("self_attn", states, attend_to_target)
        states = self.connect("cross_attn", states, attend_to_source)
        return self.connect("feed_forward", states, self.feed_forward)


def _kernel(
    module: None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, None]:
    """Attend from `(N, H, S, d_k)` scaled queries, with transformers' signature: `(N, S, H, d_v)`."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0).transpose(1, 2), None


def _norm(module: nn.Module | None) -> Product:
    if module is None or isinstance(module, nn.Identity):
        return lambda states: states
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    weight, shape = module.weight.detach().float(), [*module.weight.shape]
    if isinstance(module, nn.RMSNorm):
        return partial(F.rms_norm, normalized_shape=shape, weight=weight, eps=module.eps)
    bias, epsilon = module.bias.detach().float(), module.eps
    return lambda states: torch.layer_norm(states, shape, weight, bias, epsilon)


def _key_values(module: HeedAttention) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the key and value projections' weight and bias, repeated for heads that share them."""

    def repeated(parameter: torch.Tensor, width: int) -> torch.Tensor:
        by_head = parameter.view(-1, width, *parameter.shape[1:])
        return by_head.repeat_interleave(module.num_key_value_groups, dim=0).flatten(0, 1)

    sides = (module.k_proj, module.d_k), (module.v_proj, module.d_v)
    return [(repeated(each.weight, d), None if each.bias is None else repeated(each.bias, d)) for each, d in sides]


def _joined(projections: list[tuple[torch.Tensor, torch.Tensor | None]], precision: Precision) -> Product:
    weights, biases = zip(*projections, strict=True)
    return packed_linear(torch.cat(weights), None if biases[0] is None else torch.cat(biases), precision)


def _by_head(states: torch.Tensor, attention: _Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """Split `(rows, length, H·(d_k + d_v))` keys and values into `(rows, H, length, d)` each."""
    key, value = (part.unflatten(2, (attention.heads, -1)) for part in states.split(attention.widths[-2:], dim=-1))
    return key.transpose(1, 2), value.transpose(1, 2)


def _additive(allowed: torch.Tensor) -> torch.Tensor:
    """Return 0 for allowed scores, else a finite minimum, so that fully masked rows are not NaN."""
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


def _source_mask(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return `(N, 1, 1, S)` from an `(N, S)` mask, or `None` without padding."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return _additive(attention_mask.bool())[:, None, None]


def best_tokens(
    log_probabilities: torch.Tensor, scores: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the best continuations: scores, hypotheses and tokens, `(N, C)` with C ≤ `count`, best first.

    They are chosen by `(N·K, V)` log-probabilities and `(N, K)` scores. Sorting all is slow, so only the C chunks with
    the highest maxima are sorted; they contain the C best.
    """
    (sentences, beams), vocabulary = scores.shape, log_probabilities.shape[-1]
    whole = vocabulary // CHUNK
    chunks = [log_probabilities[:, : whole * CHUNK].unflatten(1, (whole, CHUNK)).amax(-1)] if whole else []
    if vocabulary % CHUNK:
        chunks.append(log_probabilities[:, whole * CHUNK :].amax(-1, keepdim=True))
    maxima = torch.cat(chunks, dim=1) if len(chunks) > 1 else chunks[0]
    number = maxima.shape[1]  # chunks of a row
    maxima = (maxima.view(sentences, beams, number) + scores[..., None]).flatten(1)
    best = maxima.topk(min(count, maxima.shape[1])).indices  # (N, chunks looked at)
    parents = best // number
    tokens = (best % number)[..., None] * CHUNK + torch.arange(CHUNK)  # (N, chunks sorted, CHUNK)
    is_beyond, tokens = tokens >= vocabulary, tokens.clamp(max=vocabulary - 1)
    places = parents[..., None] * vocabulary + tokens
    found = log_probabilities.reshape(sentences, -1).gather(1, places.flatten(1)).view(places.shape)
    found = (found + scores.gather(1, parents)[..., None]).masked_fill(is_beyond, -torch.inf)
    totals, order = found.flatten(1).topk(min(count, beams * vocabulary))
    return totals, parents.gather(1, order // CHUNK), tokens.flatten(1).gather(1, order)
