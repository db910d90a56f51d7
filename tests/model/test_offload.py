"""accelerate's roads for models that do not fit: weights on the disk, the same results."""

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForSeq2SeqLM

from helpers import FAMILIES, SHARINGS, VARIANTS, assert_near, each_once, padded, rounding, sentences, tiny_model

torch.manual_seed(0)
SOURCE, MASK = padded(sentences(7, 4, 6))
TARGET = torch.randint(14, 70, (3, 5))
STACKS = ["model.encoder", "model.decoder"]
EMBEDDINGS = [f"{stack}.embed_tokens" for stack in STACKS]
LAYERS = [f"{stack}.layers.{number}" for stack in STACKS for number in range(2)]
REST = [f"{stack}.{name}" for stack in STACKS for name in ("embed_positions", "embedding_norm", "norm", "dropout")]
# Which weights lie on the disk; the others stay in memory.
ON_DISK = {"layers": LAYERS, "embeddings": [*EMBEDDINGS, "lm_head"], "every_other_layer": LAYERS[1::2]}
PLACES = {"everything": {"": "disk"}}
for name, parts in ON_DISK.items():
    PLACES[name] = {part: "disk" if part in parts else "cpu" for part in (*EMBEDDINGS, *REST, "lm_head", *LAYERS)}


@torch.no_grad()
def results_of(model):
    """Return everything that is to be the same, from one forward pass and from generating."""
    inputs = {"input_ids": SOURCE, "attention_mask": MASK}
    logits = model.eval()(**inputs, decoder_input_ids=TARGET).logits
    return logits, model.generate(**inputs, max_new_tokens=4, num_beams=3)


def assert_same(model, original):
    logits, tokens = results_of(model)
    expected_logits, expected_tokens = results_of(original)
    assert torch.equal(tokens, expected_tokens)
    # Products of weights that are loaded when needed are MKL's, not oneDNN's, which add in another order.
    # So do torch's fused cells where their weights do not lie side by side.
    assert_near(logits, expected_logits, rounding(original))


def on_disk(model):
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.is_meta}


def loaded(original, folder, shard="20KB", **settings):
    """Save a model, and load it with some of its weights on the disk."""
    original.save_pretrained(folder / "model", max_shard_size=shard)
    settings["offload_folder"] = folder / "offload"
    return AutoModelForSeq2SeqLM.from_pretrained(folder / "model", **settings)


# Of each family, variant, places and sizes of files.
TRIED = [("transformer", "default", *each) for each in each_once(PLACES, ["20KB", "5GB"], ["everything"])]
TRIED += [("transformer", name, "everything", "20KB") for name in VARIANTS if name != "default"]
TRIED += [("recurrent", name, "everything", "20KB") for name in ("default", "equations")]


@pytest.mark.parametrize(("family", "variant", "places", "shard"), TRIED)
def test_a_device_map_with_the_disk_changes_no_result(tmp_path, family, variant, places, shard):
    original = tiny_model(family=family, **FAMILIES[family][2][variant])
    model = loaded(original, tmp_path, shard, device_map=PLACES[places])
    assert set(model.hf_device_map.values()) == set(PLACES[places].values())
    assert on_disk(model)
    assert_same(model, original)
    if variant == "default" and places == "everything":
        model.save_pretrained(tmp_path / "again")
        assert_same(type(original).from_pretrained(tmp_path / "again"), original)


@pytest.mark.parametrize(("sharing", "road"), each_once(SHARINGS, ["cpu", "disk"]))
def test_a_model_in_memory_is_offloaded(tmp_path, sharing, road):
    original, where = tiny_model(**SHARINGS[sharing]), {"execution_device": torch.device("cpu")}
    model = copy.deepcopy(original)
    model = cpu_offload(model, **where) if road == "cpu" else disk_offload(model, str(tmp_path), **where)
    assert on_disk(model)
    assert_same(model, original)


@pytest.mark.parametrize(("sharing", "share"), each_once(SHARINGS, [5, 60, 90], ["all_shared"]))
def test_automatic_places_keep_matrices_that_are_one_together(tmp_path, sharing, share):
    original = tiny_model(**SHARINGS[sharing])
    memory = {"cpu": original.get_memory_footprint() * share // 100}
    model = loaded(original, tmp_path, device_map="auto", max_memory=memory)
    assert "disk" in model.hf_device_map.values()
    assert all(torch.equal(*pair) for pair in zip(results_of(model), results_of(original), strict=True))


def test_one_matrix_in_two_places_is_refused(tmp_path):
    places = {"model.encoder": "cpu", "model.decoder": "disk", "lm_head": "cpu"}
    with pytest.raises(ValueError, match=r"tied matrices on one device, but puts .* on disk"):
        loaded(tiny_model(), tmp_path / "one", device_map=places)
    original = tiny_model(**SHARINGS["nothing_shared"])
    assert_same(loaded(original, tmp_path / "three", device_map=places), original)
