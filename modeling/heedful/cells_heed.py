"""Recurrent cells: their equations, runs over padded sequences (B batch, S source length), and the cache."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from transformers.cache_utils import Cache, CacheLayerMixin

from .configuration_heed_rnn import HeedRNNConfig
from .fast_paths_heed import is_original, is_traced, is_transformed

# A cell's state between positions: (h,), or an LSTM's (h, c), each (B, hidden_size).
State = tuple[torch.Tensor, ...]
# The plain cell's activations, and torch's cells that compute it in one operation.
ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid, "linear": torch.positive}
FUSED_PLAIN_CELLS = {"tanh": torch.rnn_tanh_cell, "relu": torch.rnn_relu_cell}


# Equations


class Cell(nn.RNNBase):
    """Base class of the three cells. All inputs pass through `forward`, so that hooks on a cell see them."""

    weight_ih_l0: torch.Tensor
    weight_hh_l0: torch.Tensor
    bias_ih_l0: torch.Tensor
    bias_hh_l0: torch.Tensor
    # Each cell's equations, and the same as one torch operation.
    step: Callable[[torch.Tensor, State], State]
    fused_step: Callable[..., Any] | None

    def forward(
        self,
        inputs: torch.Tensor,
        state: State | None = None,
        tokens: torch.Tensor | None = None,
        is_reversed: bool = False,
        is_fused: bool = True,
    ) -> Any:
        """Take each sequence's next token, `(B, input_size)`, or whole sequences, `(B, length, input_size)`.

        Return the next state, or for whole sequences the outputs, `(B, length, hidden_size)` with zeros at padding
        (where `tokens` is false), and the last state. `is_fused` runs torch's cell, if there is one.
        """
        is_fused = is_fused and self.fused_step is not None
        if inputs.dim() > 2:
            run = run_fused if is_fused else run_by_steps
            return run(self, inputs, state, tokens, is_reversed)
        state = state or no_state(self, inputs)
        if not is_fused:
            return self.step(self.read(inputs), state)
        dtype = self.weight_ih_l0.dtype
        parts = tuple(part.to(dtype) for part in state)
        new = self.fused_step(inputs.to(dtype), parts if len(parts) > 1 else parts[0], *self.all_weights[0])
        return new if isinstance(new, tuple) else (new,)

    def read(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return W x + b, `(…, gates · hidden_size)`, for `(…, input_size)` inputs."""
        return F.linear(inputs, self.weight_ih_l0, self.bias_ih_l0)

    def whole(self, inputs: torch.Tensor | PackedSequence, state: Any = None) -> Any:
        """Run torch's loop over `(B, length, input_size)` or packed sequences."""
        # torch's second list of the weights lacks offloaded ones.
        self._flat_weights = [*self.all_weights[0]]
        return super().forward(inputs, state)


class RNNCell(Cell, nn.RNN):
    """h' = tanh(W x + b + U h + d) (Elman, 1990), or another activation."""

    def __init__(self, *sizes: int, activation: str = "tanh", **options: Any):
        super().__init__(*sizes, nonlinearity="relu" if activation == "relu" else "tanh", **options)
        self.activation = activation

    @property
    def fused_step(self) -> Callable[..., Any] | None:
        """Torch's cell with this activation, if any."""
        return FUSED_PLAIN_CELLS.get(self.activation)

    def step(self, read: torch.Tensor, state: State) -> State:
        """Return the next state from `read`, the next token's W x + b, `(B, hidden_size)`."""
        (hidden,) = state
        kept = F.linear(hidden, self.weight_hh_l0, self.bias_hh_l0)
        return (ACTIVATIONS[self.activation]((read + kept).to(hidden.dtype)),)


class LSTMCell(Cell, nn.LSTM):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997; Gers et al., 2000)."""

    fused_step = staticmethod(torch.lstm_cell)

    def step(self, read: torch.Tensor, state: State) -> State:
        """Return the next state (h, c) from `read`, the next token's W x + b, `(B, 4 · hidden_size)`."""
        hidden, cell = state
        gates = self.gates(read, hidden)
        # Since c is only scaled and added to, gradients reach far back.
        cell = gates["forget"] * cell + gates["input"] * gates["candidate"]
        return gates["output"] * cell.tanh(), cell

    def gates(self, read: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gates, between 0 (closed) and 1, and the candidate, each `(…, hidden_size)`."""
        kept = F.linear(hidden, self.weight_hh_l0, self.bias_hh_l0)
        input_gate, forget_gate, candidate, output_gate = (read + kept).to(hidden.dtype).chunk(4, dim=-1)
        opened = {"forget": forget_gate.sigmoid(), "input": input_gate.sigmoid(), "output": output_gate.sigmoid()}
        return {**opened, "candidate": candidate.tanh()}


class GRUCell(Cell, nn.GRU):
    """Gated recurrent unit (Cho et al., 2014), with the reset gate after the product."""

    fused_step = staticmethod(torch.gru_cell)

    def step(self, read: torch.Tensor, state: State) -> State:
        """Return the next state from `read`, the next token's W x + b, `(B, 3 · hidden_size)`."""
        (hidden,) = state
        gates = self.gates(read, hidden)
        return (gates["update"] * hidden + (1 - gates["update"]) * gates["candidate"],)

    def gates(self, read: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return reset (0 forgets h), update (1 keeps h) and candidate, each `(…, hidden_size)`."""
        kept = F.linear(hidden, self.weight_hh_l0, self.bias_hh_l0)
        of_input, of_state = (part.to(hidden.dtype).chunk(3, dim=-1) for part in (read, kept))
        reset_gate = torch.sigmoid(of_input[0] + of_state[0])
        update_gate = torch.sigmoid(of_input[1] + of_state[1])
        candidate = torch.tanh(of_input[2] + reset_gate * of_state[2])
        return {"reset": reset_gate, "update": update_gate, "candidate": candidate}


CELLS = {"rnn": RNNCell, "lstm": LSTMCell, "gru": GRUCell}


def make_cell(config: HeedRNNConfig, input_size: int, hidden_size: int) -> Cell:
    """Return the config's kind of cell."""
    options = {"activation": config.activation_function} if config.cell == "rnn" else {}
    return CELLS[config.cell](input_size, hidden_size, batch_first=True, **options)


# Cells over padded sequences


def may_fuse(config: HeedRNNConfig, device: torch.device, tokens: torch.Tensor | None = None) -> bool:
    """Return whether torch's fused cells run: not under the CPU's autocast, `torch.func` or a replaced `F.linear`."""
    if not config.use_fused_cells or not is_original(nn.Linear) or is_transformed():
        return False
    is_mixed = device.type == "cpu" and torch.is_autocast_enabled("cpu")  # products in bfloat16, states in float32
    return not is_mixed and not (is_traced() and tokens is not None)  # traced code must not leave out padding


def run_fused(
    cell: Cell, inputs: torch.Tensor, state: State | None, tokens: torch.Tensor | None, is_reversed: bool = False
) -> tuple[torch.Tensor, State]:
    """Run torch's loop over padded sequences, with the arguments of `Cell.forward`."""
    dtype = cell.weight_ih_l0.dtype
    inputs = inputs.to(dtype)
    state = no_state(cell, inputs) if state is None else tuple(part.to(dtype) for part in state)
    parts = tuple(part[None].contiguous() for part in state)  # (1, B, hidden_size) each
    given = parts if len(parts) > 1 else parts[0]
    if tokens is None:
        outputs, last = cell.whole(inputs.flip(1) if is_reversed else inputs, given)
        return outputs.flip(1) if is_reversed else outputs, as_state(last)
    length, position = inputs.shape[1], torch.arange(inputs.shape[1], device=tokens.device)
    # Positions in reading order, padding last.
    order = torch.where(tokens, length - position if is_reversed else position, 2 * length + position).argsort(1)
    lengths = tokens.sum(1).cpu()
    laid_out = inputs.take_along_dim(order[..., None], 1)
    # A row of padding only counts as one token; its effect is undone below.
    packed = pack_padded_sequence(laid_out, lengths.clamp(min=1), batch_first=True, enforce_sorted=False)
    outputs, last = cell.whole(packed, given)
    outputs, _ = pad_packed_sequence(outputs, batch_first=True, total_length=length)
    outputs = outputs.take_along_dim(order.argsort(1)[..., None], 1)
    if bool(lengths.all()):
        return outputs, as_state(last)
    return outputs * tokens[..., None], keep_at_padding(tokens.any(1), as_state(last), state)


def no_state(cell: Cell, inputs: torch.Tensor) -> State:
    """Return the state before the first token of `(B, …)` inputs: zeros in the weights' dtype."""
    zeros = torch.zeros(inputs.shape[0], cell.hidden_size, dtype=cell.weight_ih_l0.dtype, device=inputs.device)
    return (zeros, zeros) if isinstance(cell, LSTMCell) else (zeros,)


def as_state(last: torch.Tensor | tuple[torch.Tensor, ...]) -> State:
    """Return torch's last state, `(1, B, hidden_size)`, as a `State`."""
    return tuple(part[0] for part in (last if isinstance(last, tuple) else (last,)))


def run_by_steps(
    cell: Cell, inputs: torch.Tensor, state: State | None, tokens: torch.Tensor | None, is_reversed: bool = False
) -> tuple[torch.Tensor, State]:
    """Do the same as `run_fused`, position by position, with the equations."""
    state = no_state(cell, inputs) if state is None else state
    read, outputs, positions = cell.read(inputs), [], range(inputs.shape[1])
    for position in reversed(positions) if is_reversed else positions:
        new = cell.step(read[:, position], state)
        state = new if tokens is None else keep_at_padding(tokens[:, position], new, state)
        outputs.append(state[0] if tokens is None else state[0] * tokens[:, position, None])
    return torch.stack(outputs[::-1] if is_reversed else outputs, dim=1), state


def keep_at_padding(is_token: torch.Tensor, new: State, old: State) -> State:
    """Return the `(batch,)` rows' new states, or their old states at padding."""
    return tuple(torch.where(is_token[:, None], after, before) for after, before in zip(new, old, strict=True))


def padding_free(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a `(B, length)` mask of bools, or `None` without padding."""
    if mask is None:
        return None
    tokens = mask != 0
    return tokens if is_traced() or is_transformed() or not bool(tokens.all()) else None


# The cache


class RecurrentMemory(CacheLayerMixin):
    """The only layer in a `RecurrentCache`."""

    states: list[State]  # for each layer, the lowest first; empty before the first token
    fed: torch.Tensor | None  # input to the next step: the attention output, or the encoder's last state
    keys: torch.Tensor | None  # the projected source, (B, S, hidden_size)

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def keep(self, states: list[State], fed: torch.Tensor | None, length: int) -> None:
        """Keep the states after `length` more tokens."""
        self.states, self.fed = states, fed
        self._length += length

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self._length

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return a mask's length and its first position."""
        return self._length + query_length, 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Raise a `ValueError`: there are no keys and values."""
        raise ValueError("A recurrent cache must be given states by its model, but is given keys and values instead.")

    lazy_initialization = update

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.states = [tuple(map(change, state)) for state in self.states]
        self.fed, self.keys = (None if rows is None else change(rows) for rows in (self.fed, self.keys))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each row continue from another row."""
        self._change(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._change(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise a `ValueError`: earlier states are not kept."""
        raise ValueError("A recurrent state cannot be cropped: the states before the last token are not kept.")

    def reset(self) -> None:
        """Forget everything."""
        self.states, self.fed, self.keys, self._length = [], None, None, 0


class RecurrentCache(Cache):
    """The cache of `generate()`: its size does not depend on the number of tokens."""

    layers: Any  # one `RecurrentMemory`, which `generate()` reorders and resets

    def __init__(self) -> None:
        super().__init__(layers=[RecurrentMemory()])

    def __len__(self) -> int:
        """Return the number of layers that have a state."""
        return len(self.layers[0].states)

    @property
    def self_attention_cache(self) -> "RecurrentCache":
        """The part that one sentence's hypotheses do not share: all of it."""
        return self
