"""The table of what is proposed for which data and machine."""

import pytest

from heedful.training.proposal import DataFacts, Machine, look_at, propose, this_machine

LAPTOP, SERVER = Machine(cores=2, has_gpu=False), Machine(cores=16, has_gpu=True)
# Pairs, bytes of a pair, the longest side, machine: vocabulary, layers, d_model, dropout, tokens of an update, and
# precision.
TABLE = [
    (100, 60, 60, LAPTOP, (500, 2, 128, 0.3, 2048, "no")),
    (2_000, 87, 80, LAPTOP, (1500, 2, 128, 0.3, 2048, "no")),
    (2_000, 133, 120, SERVER, (1500, 2, 128, 0.3, 2048, "bf16")),
    (29_000, 133, 120, LAPTOP, (5600, 3, 256, 0.2, 6144, "no")),
    (113_000, 133, 120, LAPTOP, (8000, 3, 256, 0.1, 6144, "no")),
    (113_000, 133, 120, SERVER, (11100, 3, 256, 0.1, 6144, "bf16")),
    (4_500_000, 300, 500, SERVER, (32000, 6, 512, 0.1, 25_000, "bf16")),
]


@pytest.mark.parametrize(("pairs", "pair_bytes", "longest", "machine", "expected"), TABLE)
def test_what_is_proposed(pairs, pair_bytes, longest, machine, expected):
    settings = propose(DataFacts(pairs, pair_bytes, longest), machine).settings
    options = settings["model.options"]
    found = (settings["tokenizer.vocab_size"], options["encoder_layers"], options["d_model"], options["dropout"])
    found += (settings["optimization.tokens_per_update"], settings["optimization.mixed_precision"])
    assert found == expected


@pytest.mark.parametrize(("pair_bytes", "longest"), [(20, 15), (87, 80), (133, 120), (200, 200)])
def test_two_thousand_pairs_take_less_than_ten_minutes_on_two_cores(pair_bytes, longest):
    proposal = propose(DataFacts(2000, pair_bytes, longest), LAPTOP)
    assert 0.5 < proposal.minutes < 10
    assert proposal.settings["optimization.max_minutes"] >= 2 * proposal.minutes


def test_a_run_is_validated_and_saved_and_its_schedule_ends_with_it():
    for pairs in (10, 1000, 100_000, 10**7):
        for machine in (LAPTOP, SERVER):
            settings = propose(DataFacts(pairs, 90.0, 100), machine).settings
            updates = settings["optimization.max_updates"]
            assert 600 <= updates <= 100_000
            assert settings["optimization.warmup_updates"] <= updates / 5
            assert 5 <= updates / settings["validation.every_updates"] <= 15
            assert settings["checkpoints.every_updates"] == settings["validation.every_updates"]


def test_facts_are_those_of_the_texts():
    pairs = [{"source": "가" * 2, "target": "ab"}] * 99 + [{"source": "x" * 500, "target": "y"}]
    assert look_at(pairs) == DataFacts(100, (99 * 8 + 501) / 100, 500)
    assert look_at(pairs, 5000).pairs == 5000
    with pytest.raises(ValueError, match="must hold at least one pair"):
        look_at([])


def test_a_recipe_for_the_cpu_is_proposed_no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert (this_machine().has_gpu, this_machine("cpu").has_gpu) == (True, False)
    assert this_machine().cores >= 1
