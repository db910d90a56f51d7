"""What a trainer saves and pushes is a whole model: weights, code, both tokenizers, and a card."""

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from heedful import HeedSeq2SeqTrainer, Translator
from heedful.data.tokenization import TokenizerPair
from heedful.publishing.finetuned_card import write_finetuned_card
from heedful.publishing.hub import check_folder, read_card
from helpers import CODE
from hub_stand_in import HubStandIn
from trainer_hub import PUSHES
from trainer_runs import (
    SEPARATE,
    SOURCES,
    TRAINERS,
    collator,
    encoded_pairs,
    fresh_model,
    joint_tokenizers,
    make_trainer,
    separate_tokenizers,
    trained,
)

both = pytest.mark.parametrize("kind", TRAINERS)
WHOLE = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
WHOLE |= {"target_tokenizer/tokenizer.json", "target_tokenizer/tokenizer_config.json"}


@both
def test_two_tokenizers_are_saved_with_every_checkpoint_and_at_the_end(kind, tmp_path):
    tokenizers = separate_tokenizers()
    rows = encoded_pairs(tokenizers)
    given = {"processing_class": tokenizers, "train_dataset": rows, "eval_dataset": rows}
    trainer = trained(kind, tmp_path, fresh_model(**SEPARATE), given, save_strategy="steps")
    trainer.save_model(tmp_path / "saved")
    for folder in (tmp_path / "checkpoint-2", tmp_path / "saved"):
        loaded = TokenizerPair.from_pretrained(folder)
        assert loaded.encode_target(SOURCES) == tokenizers.encode_target(SOURCES)
        assert loaded.encode_source(SOURCES) == tokenizers.encode_source(SOURCES)
        assert len(Translator.from_pretrained(folder).translate(SOURCES[:1], max_new_tokens=3)) == 1
    told = {"license": "mit", "datasets": ["pairs.tsv"], "base_model": "me/base"}
    card = write_finetuned_card(tmp_path / "saved", source_language="ko", target_language="en", **told)
    check_folder(tmp_path / "saved")
    assert read_card(card).data.license == "mit"


def test_with_tokenizers_that_fit_the_model_the_collator_is_made(tmp_path):
    for tokenizers in (joint_tokenizers(), joint_tokenizers().source):
        given = {"processing_class": tokenizers, "data_collator": None}
        assert trained(HeedSeq2SeqTrainer, tmp_path, given=given).state.global_step == 2
    with pytest.raises(ValueError, match="`vocab_size` must be 264, but is 272 instead"):
        make_trainer(HeedSeq2SeqTrainer, tmp_path / "run", given={"processing_class": separate_tokenizers()})
    assert not (tmp_path / "run").exists()


def warnings_of(caplog, folder, model, **given) -> bool:
    caplog.clear()
    make_trainer(HeedSeq2SeqTrainer, folder, model, given)
    return "only one would be saved" in caplog.text


def test_a_tokenizer_that_would_be_lost_is_warned_of(tmp_path, caplog):
    transformers_logging.enable_propagation()
    tokenizers = separate_tokenizers()
    separate = fresh_model(**SEPARATE)
    assert warnings_of(caplog, tmp_path, separate, processing_class=tokenizers.source)
    assert warnings_of(caplog, tmp_path, separate)  # the collator has one, which Trainer saves
    assert not warnings_of(caplog, tmp_path, separate, processing_class=tokenizers)
    assert not warnings_of(caplog, tmp_path, separate, data_collator=lambda rows: collator()(rows))
    assert not warnings_of(caplog, tmp_path, fresh_model(), processing_class=joint_tokenizers().source)
    # Two tokenizers of one size show in the folder that the model comes from.
    (tmp_path / "origin" / "target_tokenizer").mkdir(parents=True)
    model = fresh_model()
    model.config._name_or_path = str(tmp_path / "origin")
    assert warnings_of(caplog, tmp_path, model, processing_class=joint_tokenizers().source)


def test_a_token_that_no_text_would_give_is_told(tmp_path):
    tokenizer = deepcopy(joint_tokenizers().source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<ent>"]})
    with pytest.warns(UserWarning, match="^<ent> will be split in texts"):
        make_trainer(HeedSeq2SeqTrainer, tmp_path, given={"processing_class": tokenizer})


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """What a process that takes the stand-in for the Hub has pushed there."""
    folder = tmp_path_factory.mktemp("pushed")
    script = Path(__file__).parents[1] / "support" / "trainer_hub.py"
    with HubStandIn() as hub:
        environment = os.environ | hub.environment(folder / "caches")
        process = subprocess.run(
            [sys.executable, str(script), str(folder)], env=environment, capture_output=True, text=True, check=False
        )
    assert process.returncode == 0, process.stderr[-4000:]
    return hub.repositories


@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "strategy"), PUSHES)
def test_what_is_pushed_is_whole(repositories, kind, strategy, tmp_path):
    repository = repositories[f"me/{kind.__name__}-{strategy}"]
    files = repository.commits[repository.branches["main"]]
    assert files.keys() >= WHOLE
    # transformers' trainer sends the code with the last push alone.
    assert (files.keys() >= CODE) == (kind is HeedSeq2SeqTrainer or strategy == "end")
    folders = {path.split("/")[0] for path in files if "checkpoint" in path}
    expected = {"checkpoint": {"last-checkpoint"}, "all_checkpoints": {"checkpoint-1", "checkpoint-2"}}
    assert folders == expected.get(strategy, set())
    for folder in folders:
        names = {path.removeprefix(f"{folder}/") for path in files if path.startswith(f"{folder}/")}
        assert names >= WHOLE | CODE | {"trainer_state.json", "optimizer.pt", "scheduler.pt"}
    for path, content in files.items():
        (tmp_path / "fetched" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fetched" / path).write_bytes(content)
    assert Translator.from_pretrained(tmp_path / "fetched").model.config.d_model == 32
    if strategy == "end":
        check_folder(tmp_path / "fetched")
        assert b"Training hyperparameters" in files["README.md"]
