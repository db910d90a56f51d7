"""The scripts, run as functions on tiny models."""

import ast
import importlib.util
import math
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.data.tokenizer_training import train_tokenizers
from heedful.training.recipe_file import read_recipe

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model_folder(tmp_path) -> Path:
    pairs = list(korean_english_pairs("train", 300))
    tokenizers = train_tokenizers([p["ko"] for p in pairs], [p["en"] for p in pairs], vocab_size=400)
    sizes = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 1}
    model = HeedForConditionalGeneration(HeedConfig(vocab_size=400, d_model=32, **sizes))
    model.save_pretrained(tmp_path / "model")
    tokenizers.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def finetune(model_folder: Path, output: Path, **changes):
    settings = {"train": "builtin:train:96", "validation": "builtin:validation:8", "source": "ko", "target": "en"}
    load("finetune").finetune(
        model=model_folder,
        output=output,
        **{**settings, "epochs": 2.0, "batch_size": 16, "learning_rate": 5e-3, "warmup_steps": 1, **changes},
    )


def test_finetuning_with_the_trainer_lowers_the_loss_and_saves_an_ordinary_folder(model_folder, tmp_path, capsys):
    output = tmp_path / "finetuned"
    finetune(model_folder, output, accumulation=2, epochs=6.0)
    scores = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{'eval_loss'")]
    assert ast.literal_eval(scores[-1])["eval_loss"] < 0.95 * math.log(400)  # 400 tokens: guessing costs log 400
    tuned = AutoModelForSeq2SeqLM.from_pretrained(output)
    inputs = AutoTokenizer.from_pretrained(output)(["달걀은 신선해요?"], return_tensors="pt")
    assert tuned.generate(**inputs, max_new_tokens=5).shape[0] == 1
    before = AutoModelForSeq2SeqLM.from_pretrained(model_folder)
    assert not tuned.lm_head.weight.equal(before.lm_head.weight)


def test_finetuning_refuses_a_folder_that_holds_something(model_folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="`--output` must be an empty folder"):
        finetune(model_folder, tmp_path / "full")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


def test_the_train_script_is_the_train_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "missing.yaml"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPTS / "train.py"), run_name="__main__")
    assert stopped.value.code == 2
    assert "missing.yaml does not exist" in capsys.readouterr().err


def test_the_quickstart_does_not_begin_when_it_is_asked_for_help(monkeypatch):
    quickstart = load("quickstart")
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--help"])
    monkeypatch.setattr(quickstart, "heedful", lambda *arguments: pytest.fail("It trains."))
    with pytest.raises(SystemExit, match="It takes no arguments"):
        quickstart.main()


def test_the_quickstart_translates_sentences_that_come_after_the_tested_ones():
    quickstart = load("quickstart")
    recipe = read_recipe(SCRIPTS.parent / quickstart.RECIPE)
    assert recipe.data.test["test"] == "builtin:test:1000"
    unseen = list(korean_english_pairs("test", 1000 + quickstart.SENTENCES))[-quickstart.SENTENCES :]
    trained = {pair["ko"] for pair in korean_english_pairs("train", 5000)}
    assert len(unseen) == 5
    assert not trained & {pair["ko"] for pair in unseen}
