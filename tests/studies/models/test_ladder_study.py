"""The ladder at a small size: its rungs, and what it compares."""

import gzip
import json
from dataclasses import replace

import pytest

from heedful.data.sources import read_pairs
from heedful.studies.models import ladder
from heedful.studies.study import Lab, run_study


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory):
    """Run the study with ten updates a rung on pairs of the built-in corpus; return its settings and results."""
    folder = tmp_path_factory.mktemp("ladder")
    data = folder / "pairs"
    data.mkdir()
    for name, where in (("train", "train:900"), ("validation", "validation:8"), ("test_2016_flickr", "test:6")):
        rows = [{"de": pair["source"], "en": pair["target"]} for pair in read_pairs(f"builtin:{where}", "ko", "en")]
        text = "\n".join(json.dumps(row) for row in rows)
        (data / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    small = {"tokenizer.vocab_size": 500, "decoding.max_length": 6, "optimization.tokens_per_update": 512}
    small["optimization.mixed_precision"] = "no"  # one process cannot change it between trainings
    study = replace(ladder.STUDY, changes={**ladder.STUDY.changes, **small})
    narrow = [(ladder.DESCRIPTION["recurrent"], ("embedding_size", "hidden_size"))]
    narrow.append((ladder.RUNGS[-1]["options"], ("d_model", "encoder_ffn_dim", "decoder_ffn_dim")))
    lab = Lab(study, updates=10, data=str(data), folder=folder / "trainings")
    with pytest.MonkeyPatch.context() as patch:
        for options, widths in narrow:
            for name in widths:
                patch.setitem(options, name, 32)
        written = run_study(lab, folder / "out")
    return lab, json.loads((written / "results.json").read_text())


def test_all_rungs_have_the_same_data_tokenizer_and_number_of_updates(laboratory):
    lab, _ = laboratory
    assert [one.name for one in lab.trainings] == [rung["name"] for rung in ladder.RUNGS]
    own = ("model.options", "model.attn_implementation", "optimization.learning_rate")
    shared = [{key: value for key, value in one.changes.items() if key not in own} for one in lab.trainings]
    assert all(one == shared[0] for one in shared)
    tokenizers = {(one.folder / "model" / "tokenizer.json").read_text() for one in lab.trainings}
    assert len(tokenizers) == 1
    assert {one.updates for one in lab.trainings} == {10}
    assert len({one.target_tokens for one in lab.trainings}) == 1


def test_each_rung_is_the_model_that_its_name_says(laboratory):
    lab, _ = laboratory
    configs = [one.translator().model.config for one in lab.trainings]
    kinds = [getattr(config, "cell", config.model_type) for config in configs]
    assert kinds == ["rnn", "lstm", "gru", "gru", "heed"]
    assert [config.attention for config in configs[:4]] == ["none", "none", "none", "additive"]
    assert [config.bidirectional for config in configs[:4]] == [False, False, False, True]


def test_the_table_counts_who_is_ahead_of_what_was_published(laboratory):
    _, results = laboratory
    (table,) = results["tables"]
    published = [row[-1] for row in table["rows"]]
    assert published == ["none", "13.8", "20.6", "28.3", "36.5"]
    ahead = sum(row[3] > float(row[-1]) for row in table["rows"] if row[-1] != "none")
    assert results["values"]["ahead"] == ahead
    assert results["values"]["compared"] == 4


def test_it_needs_a_folder():
    with pytest.raises(ValueError, match=r"`--data` must be a folder for the study ladder"):
        Lab(ladder.STUDY)
