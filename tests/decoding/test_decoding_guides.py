"""The guides to decoding, scores and comparisons say what the package does: their commands and their Python run."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from comet_checkpoint import comet_checkpoint
from guides import commands_of, python_of, run_commands, text_of
from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.confidence import Confidence
from heedful.evaluation import comparison
from heedful.evaluation.error_rates import ERROR_RATES
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import tiny_model
from memorised import saved_in

GUIDE = text_of("score_and_compare")
COMMANDS = commands_of(GUIDE)


@pytest.fixture
def place(model, tokenizers, pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "backward", "other"):
        saved_in(f"runs/{name}/model", model, tokenizers)
    both = train_tokenizers(list(pairs), list(pairs.values()), vocab_size=300, languages=("ko", "en"))
    saved_in("runs/both/model", tiny_model(vocab_size=len(both.source), **both.special_ids()), both)
    comet_checkpoint(Path("path/to/wmt22-comet-da"))
    Confidence("chrf", 1, [-2.0, 0.0], [20.0, 95.0], []).save(Path("runs/quickstart/model"))
    table = "".join(f"{source}\t{target}\n" for source, target in pairs.items())
    lines = {"source": list(pairs), "target": list(pairs.values()), "seed1": list(pairs.values())}
    lines["korean"] = list(pairs)
    lines |= {name: [*pairs.values()][::-1] for name in ("seed2", "other1", "other2", "other3")}
    lines["other1"][0], lines["other2"][0] = "No.", "Never."
    for name, texts in lines.items():
        Path(f"{name}.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    Path("pairs.tsv").write_text(f"source\ttarget\n{table}", encoding="utf-8")
    (rows,) = re.findall(r'^\{"source": .*\}$', GUIDE, flags=re.MULTILINE)
    Path("words.jsonl").write_text(f"{rows}\n", encoding="utf-8")
    return tmp_path


def test_every_command_of_the_guide_runs(place, printed, pairs):
    assert len(COMMANDS) >= 14
    found = run_commands(printed, COMMANDS, {"compare": ["--resamples", "40", "--trials", "40"]})
    told = found["score runs/quickstart/model pairs.tsv"]
    assert told.splitlines()[0].split("\t") == ["log_probability", "per_token", "tokens"]
    scored = [json.loads(line) for line in Path("scored.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["target"] for row in scored] == list(pairs.values())
    assert "dual_cross_entropy" in scored[0]
    *_, accepted, ignoring = [out for command, out in found.items() if " --references accepted" in command]
    assert "nrefs:2" in accepted
    assert "Matches of [0-9] are removed" in ignoring
    assert "commonest confusions" in ignoring
    (learned,) = [out for command, out in found.items() if "--metric" in command]
    assert re.search(r"^COMET +-?\d+\.\d{4}$", learned, re.MULTILINE)
    likely = [json.loads(line) for line in Path("english.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["text"] for row in likely] == list(pairs.values())
    assert all(20 <= row["confidence"] <= 95 for row in likely)
    compared = json.loads(Path("comparison.json").read_text(encoding="utf-8"))
    assert list(compared["systems"]) == ["old.txt", "runs/other/model"]
    assert "± " in found[COMMANDS[-1]]


def test_the_python_of_the_guide_runs_and_every_column_is_explained(place, capsys, monkeypatch):
    quick = partial(comparison.ComparisonSettings, resamples=40, trials=40)
    monkeypatch.setattr(comparison, "ComparisonSettings", quick)
    for code in python_of(GUIDE):
        exec(code, {})
    first, second, compared = capsys.readouterr().out.splitlines()
    assert "</s>" in first
    assert float(first.split()[-1]) < float(second.split()[-1])
    assert float(compared.split()[0]) > 0
    assert compared.split()[1] == "2"
    for name in ("log_probability", "per_token", "tokens", "token_scores", "dual_cross_entropy", *ERROR_RATES):
        assert f"`{name}`" in GUIDE


BLOCKS = python_of(text_of("decoding"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders like the ones that two runs leave, untrained."""
    pairs = list(korean_english_pairs("train", 300))
    tokenizers = train_tokenizers([p["ko"] for p in pairs], [p["en"] for p in pairs], vocab_size=400)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 80}
    found = {}
    for seed, name in enumerate(("runs/quickstart/model", "runs/other/model")):
        torch.manual_seed(seed)
        model = HeedForConditionalGeneration(HeedConfig(vocab_size=400, **sizes))
        model.generation_config.max_length = 60
        found[name] = saved_in(tmp_path_factory.mktemp("run"), model, tokenizers)
    return found


def test_the_python_of_the_guide_runs_and_keeps_its_promises(folders, capsys):
    transformers_logging.disable_progress_bar()
    names = {}
    assert len(BLOCKS) >= 8
    for block in BLOCKS:
        for name, folder in folders.items():
            block = block.replace(name, str(folder))
        exec(block, names)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) >= 10
    tokenizer, translate = names["tokenizer"], names["translate"]
    for text in translate(names["forced"], num_beams=4, max_new_tokens=16):
        assert " woman" in text or " lady" in text
    assert names["prepared"].kernel in printed
    woman = names["woman"]
    assert tokenizer.decode(woman) == " woman"
    for row in names["found"].sequences.tolist():
        assert any(row[start : start + len(woman)] == woman for start in range(len(row)))
