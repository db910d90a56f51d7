"""How many cells lie between two words: as a chain has them, and none that attention goes around."""

import pytest
import torch

from heedful.studies.models.paths import MODELS, cells_between, cut_before, make_model


@pytest.mark.parametrize("length", [2, 5])
def test_without_attention_all_cells_of_both_sides_lie_between_the_first_word_and_the_last(length):
    torch.manual_seed(0)
    chain, backwards, told = (make_model(name) for name in list(MODELS)[:3])
    assert [cells_between(chain, length, place) for place in (0, length - 1)] == [length + 1, 2 * length]
    assert [cells_between(backwards, length, place) for place in (0, length - 1)] == [2, length + 1]
    assert [cells_between(told, length, place) for place in (0, length - 1)] == [length, length]


@pytest.mark.parametrize("name", list(MODELS)[3:])
def test_attention_leads_around_all_cells_but_the_one_that_reads_the_word(name):
    torch.manual_seed(0)
    assert cells_between(make_model(name), 6, 5) == 1


def test_a_cut_is_gone_afterwards_and_every_step_is_seen():
    model = make_model("LSTM")
    ids = torch.arange(4, 9)[None]
    whole = model(input_ids=ids, decoder_input_ids=ids).logits
    with cut_before(model, 2) as steps:
        cut = model(input_ids=ids, decoder_input_ids=ids).logits
    assert len(steps) == 10
    torch.testing.assert_close(cut, whole)  # only gradients know of it
    assert not any("step" in vars(cell) for cell in steps)
