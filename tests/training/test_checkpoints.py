"""Checkpoints are whole or absent, whatever happens to the disk while they are written or lie there."""

import json
import logging
import re
import shutil
from itertools import product
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.training.publication import average_weights
from heedful.training.run_folder import checkpoints
from heedful.training.run_folder.checkpoints import MANIFEST, checkpoint_path, newest_whole_checkpoint
from heedful.training.run_folder.progress import Progress
from helpers import assert_error, tiny_model
from process_checks import equal
from tiny_runs import full_disk

RECIPE = "name: 뜻\n"
SIZES = {"vocab_size": 260, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
SIZES |= {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


@pytest.fixture(scope="module")
def tokenizers():
    return train_tokenizers(["a b"], ["b a"], vocab_size=260)


def save(folder, tokenizers, update, seed=0, **sizes):
    model = tiny_model(seed=seed, **{**SIZES, **sizes})
    optimizer = torch.optim.Adam(model.parameters())
    model(input_ids=torch.tensor([[5, 2]]), labels=torch.tensor([[6, 2]])).loss.backward()
    optimizer.step()
    weights = dict(model.named_parameters())
    state = checkpoints.TrainingState(Progress(update=update), weights, optimizer.state_dict())
    return checkpoints.save_checkpoint(folder, model, state, tokenizers, RECIPE)


@pytest.fixture(scope="module")
def saved(tokenizers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for update in (3, 7, 20):
        save(folder, tokenizers, update, seed=update)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def test_a_whole_checkpoint_is_an_ordinary_model_folder_with_every_file_in_its_manifest(saved):
    assert sorted(path.name for path in saved.iterdir()) == ["update-00000003", "update-00000007", "update-00000020"]
    path = checkpoint_path(saved, 20)
    assert checkpoints.find_damage(path) is None
    named = set(json.loads((path / MANIFEST).read_text()))
    assert named == {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {MANIFEST}
    assert {"model.safetensors", "config.json", "tokenizer.json", "training_state/optimizer.pt"} <= named
    assert {"training_state/progress.json", "training_state/recipe.yaml"} <= named
    state = AutoModelForSeq2SeqLM.from_pretrained(path).state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in load_file(path / "model.safetensors").items())
    assert AutoTokenizer.from_pretrained(path)("a b")["input_ids"][-1] == 2
    assert (path / "training_state/recipe.yaml").read_text(encoding="utf-8") == RECIPE


def replace_file(text, name=MANIFEST):
    return lambda path: (path / name).write_bytes(text((path / name).read_bytes()))


def flip_a_bit(path, name="model.safetensors"):
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).unlink()
    (path / name).write_bytes(content)


OPTIMIZER = "training_state/optimizer.pt"
NO_MANIFEST = "manifest.json is missing or unreadable"
DAMAGE = {
    "truncated": (replace_file(lambda text: text[:-9], "model.safetensors"), r"model.safetensors has \d+ bytes .*"),
    "a flipped bit": (lambda path: flip_a_bit(path, OPTIMIZER), f"{OPTIMIZER} has another checksum"),
    "a missing file": (lambda path: (path / "config.json").unlink(), "config.json is missing"),
    "half a manifest": (replace_file(lambda text: text[:50]), NO_MANIFEST),
    "a flipped bit in the manifest": (replace_file(lambda text: text.replace(b'"size"', b'"sixe"')), NO_MANIFEST),
    "an empty folder": (lambda path: [shutil.rmtree(path), path.mkdir()], NO_MANIFEST),
    "a manifest of nothing": (replace_file(lambda text: b"{}"), NO_MANIFEST),
    "files elsewhere": (replace_file(lambda text: b'{"../x": {"size": 1, "sha256": ""}}'), NO_MANIFEST),
    "a manifest that is a folder": (lambda path: [(path / MANIFEST).unlink(), (path / MANIFEST).mkdir()], NO_MANIFEST),
    "a file": (lambda path: [shutil.rmtree(path), path.write_text("")], "it is not a folder"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_found_and_the_newest_whole_one_used(folder, caplog, kind):
    damage, description = DAMAGE[kind]
    damage(checkpoint_path(folder, 20))
    with caplog.at_level(logging.WARNING, logger="heedful"):
        assert newest_whole_checkpoint(folder) == checkpoint_path(folder, 7)
    assert "update-00000020 is damaged" in caplog.text
    damage(checkpoint_path(folder, 7))
    assert newest_whole_checkpoint(folder) == checkpoint_path(folder, 3)
    damage(checkpoint_path(folder, 3))
    with pytest.raises(ValueError, match=r"all are damaged: update-00000020 \(.*overwrite=true or another `output`"):
        newest_whole_checkpoint(folder)
    assert re.fullmatch(description, checkpoints.find_damage(checkpoint_path(folder, 3)))


def test_odd_files_among_the_checkpoints_are_left_alone_or_put_aside(folder):
    """And what a killed run left is deleted, and what is damaged put aside."""
    assert newest_whole_checkpoint(folder / "nowhere") is None
    assert checkpoints.list_checkpoints(folder / "nowhere") == []
    numbers = (3, 7, 20)
    assert checkpoints.list_checkpoints(folder) == [(update, checkpoint_path(folder, update)) for update in numbers]
    half, other, link = (f".update-000000{number}.abcdefgh.partial" for number in ("08", 13, 14))
    (folder / half / "training_state").mkdir(parents=True)
    for name in ("update-00000020.damaged", "update-00000015.partial"):
        (folder / name).mkdir()
    for name in ("update-00000012", "update-00000001", other, "x.partial"):
        (folder / name).write_text("mine")
    (folder / "y.partial").symlink_to(folder)
    (folder / link).symlink_to(folder.parent)
    assert newest_whole_checkpoint(folder) == checkpoint_path(folder, 20)
    before = {path.name for path in folder.iterdir()}
    checkpoints.clear_leftovers(folder, 7)
    names = {path.name for path in folder.iterdir()}
    assert before - names == {half, "update-00000012", "update-00000020"}
    assert names - before == {"update-00000012.damaged"}
    assert (folder / "update-00000020.damaged" / "model.safetensors").is_file()
    assert newest_whole_checkpoint(folder) == checkpoint_path(folder, 7)
    checkpoints.prune_checkpoints(folder, {7})
    assert [update for update, _ in checkpoints.list_checkpoints(folder)] == [7]


def test_what_cannot_be_read_is_no_damage_and_what_cannot_be_deleted_now_left_for_later(folder, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "checksum", Mock(side_effect=OSError(5, "Input/output error")))
        assert_error("Input/output error", newest_whole_checkpoint, folder, error=OSError)
        patch.setattr(shutil, "rmtree", Mock(side_effect=OSError("Device or resource busy")))
        checkpoints.prune_checkpoints(folder, {20})
    assert "update-00000003 could not be deleted: Device or resource busy" in caplog.text
    checkpoints.prune_checkpoints(folder, {20, 99})
    assert [update for update, _ in checkpoints.list_checkpoints(folder)] == [20]


def test_an_older_format_is_refused_with_the_way_out(folder):
    file = checkpoint_path(folder, 7) / "training_state/progress.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 1, "unheard_of": 1}))
    way = "resume with the version that wrote it, or .*`model.start_from`"
    assert_error(rf"has format 1; this Heedful loads 3: {way}", checkpoints.load_progress, checkpoint_path(folder, 7))


WRITERS = [*product([None], [0, 600, 5000, 10_000, 20_000])]  # all in turn
WRITERS += product([TokenizerPair, HeedForConditionalGeneration, torch], [2000])


@pytest.mark.parametrize(("writer", "room"), WRITERS)
def test_whoever_writes_when_the_disk_is_full_the_error_is_the_same(tokenizers, tmp_path, monkeypatch, writer, room):
    whole = save(tmp_path, tokenizers, 1)
    sizes = {file.stat().st_size for file in whole.rglob("*") if file.is_file()}
    assert min(sizes) < 600 < 20_000 < max(sizes)
    owner, name = (checkpoints, "save_checkpoint") if writer is None else (writer, "save_pretrained")
    name = "save" if writer is torch else name
    write = getattr(owner, name)

    def write_with_little_room(*given, **named):
        with full_disk(room):
            return write(*given, **named)

    monkeypatch.setattr(owner, name, write_with_little_room)
    assert_error("update-00000002 could not be written: ", save, tmp_path, tokenizers, 2, error=OSError)
    # The older checkpoint is left, and nothing half written.
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]
    assert newest_whole_checkpoint(tmp_path) == whole
    monkeypatch.undo()
    assert checkpoints.find_damage(save(tmp_path, tokenizers, 2)) is None


def test_the_average_is_the_mean_of_every_weight_also_of_those_in_several_files(folder, tokenizers, tmp_path):
    paths = [path for _, path in checkpoints.list_checkpoints(folder)]
    by_hand = [load_file(path / "model.safetensors") for path in paths]
    average = average_weights(paths)
    assert average.keys() == by_hand[0].keys()
    for name, weight in average.items():
        expected = torch.stack([weights[name].double() for weights in by_hand]).mean(0).float()
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0)
    names = sorted(average)
    for number, part in enumerate((names[:4], names[4:]), 1):
        file = paths[0] / f"model-0000{number}-of-00002.safetensors"
        save_file({name: by_hand[0][name].clone() for name in part}, file)
    (paths[0] / "model.safetensors").unlink()
    assert equal(average_weights(paths), average)
    for sizes in ({"encoder_layers": 2}, {"encoder_ffn_dim": 12}):
        other = save(tmp_path / str(sizes), tokenizers, 9, **sizes)
        message = "update-00000009 and .*update-00000003 are from different models"
        assert_error(message, average_weights, [paths[0], other])
