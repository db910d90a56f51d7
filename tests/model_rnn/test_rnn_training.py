"""Recurrent models train by the recipes, loop, Trainer and scripts that Transformers train by, as exactly."""

import re
from collections import Counter

import pytest
import torch

from heedful import HeedRNNForConditionalGeneration
from heedful.cards.run_card import write_run_card
from heedful.training.model_of_recipe import make_model
from heedful.training.preparation import prepare_corpus
from heedful.training.run import train
from heedful.training.run_folder.checkpoints import checkpoint_path
from helpers import assert_error, assert_refused, checkpoint_activations, tiny_rnn
from tiny_runs import logged, tiny_recipe

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

OPTIONS = {"model_type": "heed_rnn", "embedding_size": 8, "hidden_size": 12, "dropout": 0.0}
CHANGES = {"model.options": OPTIONS, "optimization.tokens_per_update": 500}
CHANGES |= {"validation.every_updates": 3, "validation.sentences": 3, "validation.max_new_tokens": 12}


def test_a_run_trains_publishes_and_writes_its_card_and_another_goes_on_from_it(tmp_path):
    options, kernel = {**OPTIONS, "cell": "lstm", "attention": "general"}, {"model.attn_implementation": "sdpa"}
    changes = {"model.options": options, "data.test": {"small": "builtin:test:5"}}
    result = train(tiny_recipe(tmp_path / "run", {**CHANGES, **changes}))
    assert 0 < result.metrics["validation"]["loss"] < 7
    card = write_run_card(result).read_text()
    assert "Recurrent encoder-decoder (1 + 1 lstm layers, hidden size 12, embeddings of 8, general attention" in card
    losses_of_run = logged(tmp_path / "run", "train/loss")
    assert losses_of_run[-1] < losses_of_run[0]
    tokenizers = prepare_corpus(tiny_recipe(tmp_path, CHANGES), tmp_path / "tokenizer").tokenizers
    start = {"model": {"start_from": str(checkpoint_path(tmp_path / "run" / "checkpoints", 6))}}
    model = make_model(tiny_recipe(tmp_path / "second", start).model, tokenizers)
    assert isinstance(model, HeedRNNForConditionalGeneration)
    misspelt = {"model.options": {**OPTIONS, "model_type": "heed_rrn"}}
    unused = [
        (misspelt, "`model.options.model_type` must be heed or heed_rnn"),
        ({"model.options": {**OPTIONS, "cel": "gru"}}, "`cel` is not a field of HeedRNNConfig.*`cell`"),
        ({"model.options": {**OPTIONS, "vocab_size": 5}}, "`model.options.vocab_size` must be left to the tokenizer"),
        (kernel, "`model.attn_implementation` must be empty for a recurrent model"),
        ({"model.activation_checkpointing": True}, "`model.activation_checkpointing` must be false for a recurrent"),
        ({**start, **kernel}, "`attn_implementation` must be eager for a recurrent model"),
    ]

    def make(changes):
        make_model(tiny_recipe(tmp_path, {"model.options": OPTIONS, **changes}).model, tokenizers)

    assert_refused(unused, make)
    assert_error("does not support", checkpoint_activations, model)


def test_under_fsdp_no_weights_are_gathered_at_every_token():
    model, names, calls = tiny_rnn(), {""}, Counter()
    for rule in model._fsdp_plan:
        pattern = re.compile(re.escape(rule).replace(r"\*", r"\d+"))
        names |= {name for name, _ in model.named_modules() if pattern.fullmatch(name)}
    assert {"model.encoder.layers.0", "model.encoder.layers.1"} <= names
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[8, 9, 2, 10, 11]]))
    assert set(calls.values()) == {1}
