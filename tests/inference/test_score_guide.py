"""The guide to scores and comparisons says what the package does: its commands and its Python run."""

import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.cli import main as cli
from heedful.data.tokenizer_training import train_tokenizers
from heedful.evaluation import comparison
from heedful.evaluation.error_rates import ERROR_RATES

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "score_and_compare.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^heedful (\w+ .*)$", GUIDE, flags=re.MULTILINE)


@pytest.fixture
def place(model, tokenizers, pairs, tmp_path, monkeypatch):
    """A working directory with the models and files that the guide speaks of."""
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "backward", "other"):
        model.save_pretrained(f"runs/{name}/model")
        tokenizers.save_pretrained(f"runs/{name}/model")
    both = train_tokenizers(list(pairs), list(pairs.values()), vocab_size=300, languages=("ko", "en"))
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": len(both.source)}
    HeedForConditionalGeneration(HeedConfig(**sizes, **both.special_ids())).save_pretrained("runs/both/model")
    both.save_pretrained("runs/both/model")
    table = "".join(f"{source}\t{target}\n" for source, target in pairs.items())
    lines = {"source": list(pairs), "target": list(pairs.values()), "seed1": list(pairs.values())}
    lines |= {name: [*pairs.values()][::-1] for name in ("seed2", "other1", "other2", "other3")}
    lines["other1"][0], lines["other2"][0] = "No.", "Never."
    for name, texts in lines.items():
        Path(f"{name}.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    Path("pairs.tsv").write_text(f"source\ttarget\n{table}", encoding="utf-8")
    (rows,) = re.findall(r'^\{"source": .*\}$', GUIDE, flags=re.MULTILINE)
    Path("words.jsonl").write_text(f"{rows}\n", encoding="utf-8")
    return tmp_path


def test_every_command_of_the_guide_runs(place, monkeypatch, capsys, pairs):
    assert len(COMMANDS) >= 11
    printed = {}
    for command in COMMANDS:
        quick = ["--resamples", "40", "--trials", "40"] if command.startswith("compare ") else []
        monkeypatch.setattr(sys, "argv", ["heedful", *shlex.split(command), *quick])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capsys.readouterr()
        assert not ended.value.code, (command, output.err)
        printed[command] = output.out
    told = printed["score runs/quickstart/model pairs.tsv"]
    assert told.splitlines()[0].split("\t") == ["log_probability", "per_token", "tokens"]
    scored = [json.loads(line) for line in Path("scored.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["target"] for row in scored] == list(pairs.values())
    assert "dual_cross_entropy" in scored[0]
    *_, accepted, ignoring = [out for command, out in printed.items() if " --references accepted" in command]
    assert "nrefs:2" in accepted
    assert "What matches [0-9] is taken out" in ignoring
    assert "commonest confusions" in ignoring
    compared = json.loads(Path("comparison.json").read_text(encoding="utf-8"))
    assert list(compared["systems"]) == ["old.txt", "runs/other/model"]
    assert "± " in printed[COMMANDS[-1]]


def test_the_python_of_the_guide_runs(place, capsys, monkeypatch):
    quick = partial(comparison.ComparisonSettings, resamples=40, trials=40)
    monkeypatch.setattr(comparison, "ComparisonSettings", quick)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    for code in blocks:
        exec(code, {})
    first, second, compared = capsys.readouterr().out.splitlines()
    assert "</s>" in first
    assert float(first.split()[-1]) < float(second.split()[-1])
    assert float(compared.split()[0]) > 0
    assert compared.split()[1] == "2"


def test_every_column_is_explained():
    for name in ("log_probability", "per_token", "tokens", "token_scores", "dual_cross_entropy", *ERROR_RATES):
        assert f"`{name}`" in GUIDE
