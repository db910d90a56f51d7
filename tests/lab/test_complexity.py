"""Table 1: its layers against their equations, its formulas against what torch counts, and time, memory and paths."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from heedful_lab.studies.catalogue import find_study
from heedful_lab.studies.complexity import complexity, reach
from heedful_lab.studies.complexity.counts import Sizes, operations, path_length, term_of_table_1
from heedful_lab.studies.complexity.layers import ConvolutionalLayer, SelfAttentionLayer, make_layer
from heedful_lab.studies.complexity.measurement import KINDS, held_bytes
from heedful_lab.studies.study import Lab
from helpers import assert_near, sentences, shake, tiny_model
from small_studies import SMALLEST

SMALL = {"d_model": 24, "heads": 3, "neighbourhood": 5, "kernel_width": 3, "cell": "lstm"}
OTHERS = [{}, {"neighbourhood": 20, "kernel_width": 7}, {"d_model": 40, "heads": 1, "cell": "gru"}, {"cell": "rnn"}]


@torch.no_grad()
def counted(kind, length, sizes):
    """Run a layer on the device `meta`, and return its multiply-adds.

    There it takes the operators that `FlopCounterMode` knows, and not those that the CPU has in their place.
    """
    with torch.device("meta"):
        layer = make_layer(kind, sizes, kernel="eager")
    with FlopCounterMode(display=False) as operations:
        layer(torch.empty(1, length, sizes.d_model, device="meta"))
    return operations.get_total_flops() // 2


@pytest.mark.parametrize("others", OTHERS, ids=str)
def test_the_formula_is_what_torch_counts(others):
    sizes = Sizes(**{**SMALL, **others})
    for kind, length in itertools.product(KINDS, (2, 16, 33, 60)):
        assert counted(kind, length, sizes) == operations(kind, length, sizes) > 0, (kind, length)


def test_the_terms_have_the_powers_of_table_1():
    for kind, length, *powers in (
        ("self_attention", 2, 1, 0, 0),
        ("restricted", 1, 1, 1, 0),
        ("recurrent", 1, 2, 0, 0),
        ("convolutional", 1, 2, 0, 1),
    ):
        once = term_of_table_1(kind, 10, Sizes(**SMALL))
        assert term_of_table_1(kind, 30, Sizes(**SMALL)) == once * 3**length
        for name, power in zip(("d_model", "neighbourhood", "kernel_width"), powers, strict=True):
            more = Sizes(**{**SMALL, name: 3 * SMALL[name]})
            assert term_of_table_1(kind, 10, more) == once * 3**power, (kind, name)


def asked(**changes):
    return Sizes(**{"d_model": 16, "heads": 2, "neighbourhood": 3, "kernel_width": 5, "cell": "lstm", **changes})


@pytest.mark.parametrize("kind", reach.KINDS)
def test_the_formula_is_what_gradients_say(kind):
    for sizes in (asked(), asked(neighbourhood=2, kernel_width=3)):
        for length in (2, 5, 9, 10, 26):
            path = reach.path_by_gradient(kind, length, sizes, 0)
            assert path == path_length(kind, length, sizes), (length, sizes)
    if kind == "recurrent":  # one layer reaches everything before, through every cell between
        assert {reach.cells_between_ends(9, asked(cell=cell), 0) for cell in ("rnn", "gru", "lstm")} == {9}


WIDTH = 8


@torch.no_grad()
@pytest.mark.parametrize(
    ("width", "dilation", "is_causal"),
    [
        (2, 1, True),
        *((*kernel, is_causal) for kernel in ((1, 1), (3, 1), (3, 4), (5, 2)) for is_causal in (False, True)),
    ],
)
def test_a_convolutional_layer_is_torch_s_convolution_a_gate_and_a_scaled_sum(width, dilation, is_causal):
    layer = ConvolutionalLayer(WIDTH, width, dilation, is_causal).double().eval()
    shake(layer)
    given = torch.randn(2, 11, WIDTH, dtype=torch.float64)
    reach = dilation * (width - 1)
    weight, bias = layer.convolution.weight, layer.convolution.bias
    both_sides = F.conv1d(given.transpose(1, 2), weight, bias, padding=reach, dilation=dilation)  # 11 + reach
    start = 0 if is_causal else reach // 2
    value, gate = both_sides[..., start : start + 11].transpose(1, 2).chunk(2, dim=-1)
    assert_near(layer(given), (given + value * gate.sigmoid()) / math.sqrt(2), 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("radius", [None, 3])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_self_attention_is_that_of_the_model_s_encoder(radius, kernel):
    model = tiny_model(attention=kernel, encoder_neighbourhood=radius)
    seen = []
    attention = model.model.encoder.layers[1].self_attn
    hook = attention.register_forward_hook(lambda module, args, output: seen.append((args[0], output[0])))
    model.model.encoder(sentences(90)[0][None])
    hook.remove()
    layer = SelfAttentionLayer(32, 4, radius, kernel=kernel).eval()
    layer.attention.load_state_dict(attention.state_dict())
    ((given, expected),) = seen
    assert torch.equal(layer(given), expected)


TINY = Sizes(d_model=16, heads=2, neighbourhood=16, kernel_width=3, cell="lstm")


def test_memory_grows_with_the_length_and_with_its_square_where_all_pairs_are_held():
    for kind in KINDS:
        layer = make_layer(kind, TINY)
        short, long = (held_bytes(layer, torch.randn(1, length, 16)) for length in (1024, 2048))
        least, most = (3.8, 4.2) if kind in ("plain", "masked", "additive") else (1.9, 2.05)
        assert least < long / short < most, kind


STUDY = find_study("complexity")
OUT_OF_RANGE = {
    "d_model": ["0"],
    "heads": ["0", "3", "", "1.5"],
    "neighbourhood": ["0"],
    "rounds": ["0", "a"],
    "kernel_width": ["1", "4", "-3"],
    "lengths": ["8,16", "8,8,16", "16,8,32", "1,2,3", "", "a", "1,,2", "1 2"],
    "reach_lengths": ["1", "9,5", "9,257"],
    "cell": ["transformer"],
}


def test_a_setting_out_of_range_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(complexity, "measure", lambda *arguments: pytest.fail("must not be reached"))
    assert Lab(STUDY, changed=["lengths=64, 128,256"]).settings()["lengths"] == [64, 128, 256]
    for name, values in OUT_OF_RANGE.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"`{name}` must .* instead\."):
                STUDY.run(Lab(STUDY, changed=[*SMALLEST["complexity"].settings, f"{name}={value}"]))
    with pytest.raises(ValueError, match=r"must be those of the study complexity \(d_model, .*\), but one is width"):
        Lab(STUDY, changed=["width=3"])
