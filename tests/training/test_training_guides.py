"""The guides to fine-tuning and to training in Python run as they are written, and print what they show."""

import json
import re
import shlex
from itertools import cycle, islice
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from guides import blocks_of, commands_of, run_commands, text_of
from heedful.cards.hub import check_folder, read_card
from memorised import PAIRS, SHOWN, memorised_model
from trainer_runs import joint_tokenizers

LEARNED = {source: target for source, target in SHOWN.items() if "lawyer" in target}
# What the guide draws from the built-in corpus: pairs to fine-tune with and, of other sentences, what was known.
DRAWN = {"validation": LEARNED, "train": {source: SHOWN[source] for source in SHOWN.keys() - LEARNED}, "test": PAIRS}


def draw(split, count):
    return islice(cycle({"ko": source, "en": target} for source, target in DRAWN[split].items()), min(count, 130))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model that knows eleven pairs, which are all that the built-in corpus has."""
    tokenizers, pairs = joint_tokenizers(), SHOWN | PAIRS
    memorised_model(tokenizers, pairs).save_pretrained(tmp_path / "runs" / "quickstart" / "model")
    tokenizers.save_pretrained(tmp_path / "runs" / "quickstart" / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "caches")
    monkeypatch.setattr("heedful_lab.korean_english.pairs.korean_english_pairs", draw)
    return tmp_path


@pytest.mark.slow
def test_the_guide_prints_what_it_says_learns_what_is_new_and_forgets_nothing(place, capsys, printed):
    transformers_logging.disable_progress_bar()
    text = text_of("finetune")
    blocks = blocks_of(text)
    assert len(blocks) == text.count("```python") == 4
    names = {}
    for code, expected in blocks:
        exec(code, names)
        lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("{")]  # Trainer's log
        assert "".join(f"{line}\n" for line in lines) == expected
    exact = {}
    for command in re.findall(r"^heedful (evaluate .*?)(?: > .*)?$", text, flags=re.MULTILINE):
        arguments = shlex.split(command)
        output = printed(*arguments, *({"--json"} - {*arguments}))
        model, _, data, *_ = arguments[1:]
        exact[Path(model).name, data] = json.loads(output)["exact_match"]
        Path("new.json").write_text(output, encoding="utf-8")
    assert exact == {
        **{("model", "known.tsv"): 100, ("model", "new.tsv"): 0},
        **{("finetuned", "known.tsv"): 100, ("finetuned", "new.tsv"): 100},
    }
    assert len(run_commands(printed, commands_of(text, "card"))) == 1
    folder = place / "runs" / "finetuned"
    check_folder(folder)
    found = {each.metric_type: each.metric_value for each in read_card(folder / "README.md").data.eval_results}
    assert (found["exact_match"], found["character_error_rate"]) == (100, 0)
    names["trainer"].create_model_card(language=["ko", "en"], license="apache-2.0")
    check_folder(folder)


def test_the_guide_from_nothing_learns_publishes_and_prints_what_it_says(tmp_path, monkeypatch, capsys, printed):
    monkeypatch.chdir(tmp_path)
    transformers_logging.disable_progress_bar()
    text = text_of("train_from_nothing")
    blocks, names = blocks_of(text), {}
    assert len(blocks) == text.count("```python") == 6
    for number, (code, expected) in enumerate(blocks):
        if number == 5:  # which needs the card
            _, listed = run_commands(printed, commands_of(text)).values()
            assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {*listed.split()}
        exec(code, names)
        lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("{'")]  # Trainer's log
        assert "".join(f"{line}\n" for line in lines) == expected
    assert "trained from nothing with a Trainer" in Path("runs/commands/model/README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_on_training_in_python_prints_what_it_says_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, names = text_of("train_in_python"), {}
    blocks = blocks_of(text)
    assert len(blocks) == text.count("```python") >= 5
    for code, shown in blocks:
        exec(code, names)
        printed, told = capsys.readouterr()
        assert printed == shown, code
        assert ("update/s" in told and "100%" in told) == ("train(recipe)" in code), told
