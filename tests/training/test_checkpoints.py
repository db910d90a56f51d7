import json
import logging
import re
import shutil
from dataclasses import replace
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
from heedful.training.run_folder.checkpoints import (
    MANIFEST,
    TrainingState,
    checkpoint_path,
    clear_leftovers,
    find_damage,
    list_checkpoints,
    load_progress,
    load_state,
    newest_whole_checkpoint,
    prune_checkpoints,
)
from heedful.training.run_folder.progress import Progress
from helpers import tiny_model
from process_checks import equal
from tiny_runs import full_disk

RECIPE = "name: 뜻\n"
SIZES = {"vocab_size": 260, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
SIZES |= {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


@pytest.fixture(scope="module")
def tokenizers():
    return train_tokenizers(["a b"], ["b a"], vocab_size=260)


def state_of(model, optimizer, update):
    progress = Progress(update=update, best=[(1.5, 3)], window={"loss": 0.1 + 0.2})
    return TrainingState(progress, dict(model.named_parameters()), optimizer.state_dict())


def save(folder, tokenizers, update, seed=0, **sizes):
    model = tiny_model(seed=seed, **{**SIZES, **sizes})
    optimizer = torch.optim.Adam(model.parameters())
    model(input_ids=torch.tensor([[5, 2]]), labels=torch.tensor([[6, 2]])).loss.backward()
    optimizer.step()
    return checkpoints.save_checkpoint(folder, model, state_of(model, optimizer, update), tokenizers, RECIPE)


@pytest.fixture(scope="module")
def saved(tokenizers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for update in (3, 7, 20):
        save(folder, tokenizers, update, seed=update)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def test_a_whole_checkpoint_has_every_file_in_its_manifest_and_nothing_is_left_beside_it(saved):
    assert sorted(path.name for path in saved.iterdir()) == ["update-00000003", "update-00000007", "update-00000020"]
    path = checkpoint_path(saved, 20)
    assert find_damage(path) is None
    named = set(json.loads((path / MANIFEST).read_text()))
    assert named == {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {MANIFEST}
    assert {"model.safetensors", "config.json", "tokenizer.json", "training_state/optimizer.pt"} <= named
    assert {"training_state/progress.json", "training_state/recipe.yaml"} <= named
    assert (path / "training_state/recipe.yaml").read_text(encoding="utf-8") == RECIPE


def truncate(path):
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-100])


def flip_a_bit(path, name="model.safetensors"):
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).unlink()
    (path / name).write_bytes(content)


def write_manifest(text):
    return lambda path: (path / MANIFEST).write_text(text((path / MANIFEST).read_text()))


OPTIMIZER = "training_state/optimizer.pt"
NO_MANIFEST = "manifest.json is missing or unreadable"
DAMAGE = {
    "truncated": (truncate, r"model.safetensors has \d+ bytes instead of \d+"),
    "a flipped bit": (lambda path: flip_a_bit(path, OPTIMIZER), f"{OPTIMIZER} has another checksum"),
    "a missing file": (lambda path: (path / "config.json").unlink(), "config.json is missing"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), NO_MANIFEST),
    "half a manifest": (write_manifest(lambda text: text[:50]), NO_MANIFEST),
    "a flipped bit in the manifest": (write_manifest(lambda text: text.replace('"size"', '"sixe"')), NO_MANIFEST),
    "an empty folder": (lambda path: [shutil.rmtree(path), path.mkdir()], NO_MANIFEST),
    "a manifest of nothing": (write_manifest(lambda text: "{}"), NO_MANIFEST),
    "a manifest of files elsewhere": (write_manifest(lambda text: '{"../x": {"size": 1, "sha256": ""}}'), NO_MANIFEST),
    "a manifest that is a folder": (lambda path: [(path / MANIFEST).unlink(), (path / MANIFEST).mkdir()], NO_MANIFEST),
    "a file": (lambda path: [shutil.rmtree(path), path.write_text("")], "it is no folder"),
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
    assert re.fullmatch(description, find_damage(checkpoint_path(folder, 3)))


def test_checkpoints_are_listed_oldest_first_and_the_newest_is_never_a_half_written_one(folder):
    assert newest_whole_checkpoint(folder / "nowhere") is None
    assert list_checkpoints(folder / "nowhere") == []
    (folder / "notes").mkdir()
    assert newest_whole_checkpoint(folder) == checkpoint_path(folder, 20)
    checkpoint_path(folder, 20).rename(folder / ".update-00000020.abcdefgh.partial")
    assert newest_whole_checkpoint(folder) == checkpoint_path(folder, 7)
    assert list_checkpoints(folder) == [(update, checkpoint_path(folder, update)) for update in (3, 7)]


def test_odd_files_among_the_checkpoints_are_left_alone_or_put_aside(folder):
    """And what a killed run left is deleted, and what is damaged put aside."""
    (folder / ".update-00000008.abcdefgh.partial" / "training_state").mkdir(parents=True)
    (folder / "update-00000020.damaged").mkdir()
    (folder / "update-00000012").write_text("")
    (folder / "update-00000001").write_text("")
    (folder / ".update-00000013.abcdefgh.partial").write_text("mine")
    (folder / "x.partial").write_text("mine")
    (folder / "y.partial").symlink_to(folder)
    (folder / ".update-00000014.abcdefgh.partial").symlink_to(folder.parent)
    (folder / "update-00000015.partial").mkdir()
    clear_leftovers(folder, 7)
    names = {"x.partial", "y.partial", "update-00000012.damaged", "update-00000001", "update-00000020.damaged"}
    names |= {"update-00000003", "update-00000007", "update-00000015.partial"}
    names |= {f".update-000000{number}.abcdefgh.partial" for number in (13, 14)}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "update-00000020.damaged" / "model.safetensors").is_file()
    assert newest_whole_checkpoint(folder) == checkpoint_path(folder, 7)
    prune_checkpoints(folder, {7})
    assert [update for update, _ in list_checkpoints(folder)] == [7]


def test_a_file_that_cannot_be_read_is_no_damage(folder, monkeypatch):
    monkeypatch.setattr(checkpoints, "checksum", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        newest_whole_checkpoint(folder)


def test_a_checkpoint_that_cannot_be_deleted_now_is_left_for_later(folder, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", Mock(side_effect=OSError("Device or resource busy")))
        prune_checkpoints(folder, {20})
    assert "update-00000003 could not be deleted: Device or resource busy" in caplog.text
    prune_checkpoints(folder, {20, 99})
    assert [update for update, _ in list_checkpoints(folder)] == [20]


def test_a_checkpoint_is_an_ordinary_model_folder(saved):
    path = checkpoint_path(saved, 20)
    state = AutoModelForSeq2SeqLM.from_pretrained(path).state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in load_file(path / "model.safetensors").items())
    assert AutoTokenizer.from_pretrained(path)("a b")["input_ids"][-1] == 2


@pytest.mark.parametrize(
    ("written", "way"), [(3, "upgrade it"), (1, "resume with the version that wrote it, or .*`model.start_from`")]
)
def test_another_format_is_refused_with_the_way_out(folder, written, way):
    file = checkpoint_path(folder, 7) / "training_state/progress.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": written, "unheard_of": 1}))
    with pytest.raises(ValueError, match=rf"has format {written}; this Heedful reads 2: {way}"):
        load_progress(checkpoint_path(folder, 7))


def test_progress_moving_average_and_scaler_come_back(tokenizers, tmp_path):
    model = tiny_model(**SIZES)
    average = {name: weight.detach() + 1 for name, weight in model.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    scaler.scale(torch.ones(1))
    state = state_of(model, torch.optim.Adam(model.parameters()), 4)
    state = replace(state, moving_average=average, scaler=scaler.state_dict())
    loaded = load_state(checkpoints.save_checkpoint(tmp_path, model, state, tokenizers, RECIPE))
    assert load_progress(checkpoint_path(tmp_path, 4)) == loaded.progress == state.progress
    assert (loaded.scaler, loaded.scaler["scale"]) == (state.scaler, 128)
    assert loaded.moving_average.keys() == average.keys()
    assert all(torch.equal(loaded.moving_average[name], value) for name, value in average.items())


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
    with pytest.raises(OSError, match="update-00000002 could not be written: "):
        save(tmp_path, tokenizers, 2)
    # The older checkpoint is left, and nothing half written.
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]
    assert newest_whole_checkpoint(tmp_path) == whole
    monkeypatch.undo()
    assert find_damage(save(tmp_path, tokenizers, 2)) is None


def test_the_average_is_the_mean_of_every_weight_also_of_those_in_several_files(folder):
    paths = [path for _, path in list_checkpoints(folder)]
    by_hand = [load_file(path / "model.safetensors") for path in paths]
    average = average_weights(paths)
    assert average.keys() == by_hand[0].keys()
    for name, weight in average.items():
        expected = torch.stack([weights[name].double() for weights in by_hand]).mean(0).float()
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0)
    embedding = "model.encoder.embed_tokens.weight"
    assert not torch.equal(average[embedding], by_hand[0][embedding])
    names = sorted(average)
    for number, part in enumerate((names[:4], names[4:]), 1):
        file = paths[0] / f"model-0000{number}-of-00002.safetensors"
        save_file({name: by_hand[0][name].clone() for name in part}, file)
    (paths[0] / "model.safetensors").unlink()
    assert equal(average_weights(paths), average)


@pytest.mark.parametrize("sizes", [{"encoder_layers": 2}, {"encoder_ffn_dim": 12}])
def test_checkpoints_of_different_models_are_not_averaged(saved, tokenizers, tmp_path, sizes):
    other = save(tmp_path, tokenizers, 9, **sizes)
    with pytest.raises(ValueError, match=r"update-00000009 is of another model than .*update-00000003"):
        average_weights([checkpoint_path(saved, 3), other])
