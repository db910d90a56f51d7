"""`heedful train --dry-run`: its figures are those of the run, and it leaves nothing behind."""

import copy
from itertools import count

import pytest
import torch
import yaml
from accelerate.utils import DistributedType

from heedful.checking.estimate import Rehearsal, count_matrices, count_parameters, dry_run, plan_batches, state_memory
from heedful.checking.memory import HeldBytes
from heedful.data.epochs.micro_batches import split_update
from heedful.training.model_of_recipe import make_model
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import make_accelerator
from heedful.training.recipe_file import read_recipe, to_yaml
from helpers import run_python
from row_lengths import padding_share
from tiny_runs import recipe_file, tiny_recipe

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return prepare_corpus(tiny_recipe(folder), folder / "tokenizer")


def test_the_plan_is_that_of_training_and_counts_tokens_and_padding(corpus):
    plan = plan_batches(corpus, token_budget=500)
    updates = [split_update(update, 500, 1) for update in corpus.training.updates(0)]
    assert (plan.updates_per_epoch, plan.first) == (len(updates), updates[:12])
    assert plan.micro_batches == max(len(part) for (part,) in updates)
    batches = [batch for (part,) in updates for batch in part]
    rows, numbers = [row for batch in batches for row in batch], count()
    lengths = [[len(row[name]) for row in rows] for name in ("input_ids", "labels")]
    padding = padding_share([[next(numbers) for _ in batch] for batch in batches], *lengths)
    assert plan.padding == pytest.approx(padding)
    assert plan.target_tokens == pytest.approx(sum(lengths[1]) / len(updates))
    assert plan.padded_tokens == pytest.approx(sum(map(sum, lengths)) / (1 - padding) / len(updates))


def test_parameters_are_counted_by_what_they_do_and_by_matrix_and_tied_ones_once(corpus, tmp_path):
    options = {"d_k": 4, "d_v": 12, "norm_placement": "pre", "attention_scoring": "additive"}
    changes = {f"model.options.{name}": value for name, value in options.items()}
    model = make_model(tiny_recipe(tmp_path / "run", changes).model, corpus.tokenizers)
    counts, matrices, config = count_parameters(model), count_matrices(model), model.config
    assert counts["together"] == model.num_parameters() == sum(counts.values()) - counts["together"]
    assert counts["embeddings"] == 400 * 32
    for part, attentions in (("encoder", config.encoder_layers), ("decoder", 2 * config.decoder_layers)):
        found = matrices[part]
        assert sum(found.values()) == counts[part]
        heads = attentions * getattr(config, f"{part}_attention_heads")
        assert found["W_Q"] == found["W_K"] == heads * config.d_model * 4
        assert found["W_V, value down"] == found["W_O, value up"] == heads * config.d_model * 12
        assert found["other"] == heads * 4  # the additive score's weight of each head
    recipe = tiny_recipe(tmp_path / "run", {"model.options": {"model_type": "heed_rnn", "hidden_size": 16}})
    assert count_matrices(make_model(recipe.model, corpus.tokenizers)) == {}  # of attention
    untied = {"model.options.tie_word_embeddings": False}
    counts = count_parameters(make_model(tiny_recipe(tmp_path / "run", untied).model, corpus.tokenizers))
    assert counts["embeddings"] == 3 * 400 * 32


def test_what_is_held_all_the_time_follows_from_the_parameters():
    alone = state_memory(1000, 1, DistributedType.NO)
    assert alone == {"weights": 4000, "gradients": 4000, "the optimizer's state": 8000}
    assert state_memory(1000, 2, DistributedType.MULTI_CPU)["gradients in exchange"] == 4000
    assert sum(state_memory(1000, 4, DistributedType.FSDP).values()) == 4000


def test_activations_grow_with_the_micro_batch_and_weights_stay_as_they_are(corpus, tmp_path):
    recipe = tiny_recipe(tmp_path / "run")
    model = make_model(recipe.model, corpus.tokenizers)
    rehearsal = Rehearsal(make_accelerator(recipe.optimization), model, recipe.optimization)
    model = rehearsal.engine.network
    before = copy.deepcopy(model.state_dict())
    rows = plan_batches(corpus, 2000).costliest[0]
    whole, half = (rehearsal.activation_memory(part, 0.0) for part in (rows, rows[: len(rows) // 2]))
    assert 0.35 < half / whole < 0.65
    logits = 4 * len(rows) * max(len(row["labels"]) for row in rows) * 400
    assert 2 * logits < whole < 40 * logits
    speed = rehearsal.speed([[[rows]]])
    assert min(speed.of_token, speed.of_step) > 0
    assert speed.seconds(300) == pytest.approx(300 * speed.of_token + speed.of_step)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_dry_run_tells_everything_and_writes_nothing(tmp_path, printed):
    recipe = recipe_file(tmp_path, {"optimization.max_updates": 60, "optimization.max_epochs": 4})
    text = printed("train", recipe, "seed=7", "--dry-run")
    assert [entry.name for entry in tmp_path.iterdir()] == ["recipe.yaml"]
    assert text.splitlines()[-1] == "Nothing was trained, and nothing was written."
    result = dry_run(read_recipe(recipe, ["seed=7"]))
    parts = dict(part.split("\n", 1) for part in f"\n\n{text}".split("\n\n--- ")[1:])
    assert yaml.safe_load(parts["recipe"]) == yaml.safe_load(to_yaml(read_recipe(recipe, ["seed=7"])))
    per_epoch = result.batches.updates_per_epoch
    first = result.batches.first[0][0][0][0]
    for line in (
        f"updates per epoch    {per_epoch}",
        f"updates of the run   {4 * per_epoch} (`optimization.max_epochs`)",
        "epochs of the run    4.0",
        " ".join(map(str, first["input_ids"])),
        result.corpus.tokenizers.decode_target([first["labels"]])[0],
        "update         1  0.0015",
        "s per update on 1 × ",
        ", float32, measured on a few updates",
        "  W_V, value down",
    ):
        assert line in text
    together = str(result).split("together")[-1]
    assert f"{sum(result.memory.values()) / 2**20:,.0f} MiB" in together


def test_a_stream_says_what_it_cannot_tell_and_a_dry_run_warns_of_a_folder_that_training_would_refuse(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("ko\ten\n" + "".join(f"문장 {n}\tSentence {n}\n" for n in range(500)), encoding="utf-8")
    changes = {"data.train": str(pairs), "data.streaming": True, "data.pool_size": 200, "tokenizer.vocab_size": 300}
    (tmp_path / "run").write_text("a file")
    with pytest.warns(UserWarning, match=r"Training would refuse the recipe: `output` must be a folder, but"):
        text = str(dry_run(tiny_recipe(tmp_path / "run", changes)))
    assert "updates per epoch    unknown, because the data are streamed" in text
    assert "epochs of the run    unknown" in text
    assert "updates of the run   6 (`optimization.max_updates`)" in text


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_print_one_estimate_for_two(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    output = run_python(*launcher, "-m", "heedful", "train", recipe_file(tmp_path), "--dry-run").stdout
    assert output.count("--- model") == 1
    assert "on each of 2 processes" in output
    assert "gradients in exchange" in output
    assert not (tmp_path / "run").exists()


def test_bytes_of_a_layer_forwards_and_backwards_are_what_its_formula_says():
    layer = torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.Sigmoid(), torch.nn.Linear(400, 100))
    inputs = torch.randn(50, 100)
    layer(inputs).sum().backward()  # gradients are there from here on
    with HeldBytes() as memory:
        layer(inputs).sum().backward()
    hidden, outer, weight = 4 * 50 * 400, 4 * 50 * 100, 4 * 400 * 100
    # Saved: the sigmoid's output. At worst: its gradient and the linear layer's before it, or a weight's.
    assert hidden + outer <= memory.peak <= 4 * hidden + 2 * outer + 2 * weight
    assert memory.now == 0
