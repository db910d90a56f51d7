"""The guide to fine-tuning runs as it is written, and prints what it shows."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from trainer_runs import joint_tokenizers
from transformers.utils import logging as transformers_logging

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.cli import main as cli
from heedful.publishing.hub import check_folder, read_card
from memorised import SHOWN

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "finetune.md"
# A block of Python and, right behind it, what it prints, if anything.
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with an untrained model and a table of pairs, as the guide supposes."""
    tokenizers = joint_tokenizers()
    torch.manual_seed(0)
    sizes = {"d_model": 48, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "norm_placement": "pre", "dropout": 0.0}
    model = HeedForConditionalGeneration(HeedConfig(vocab_size=len(tokenizers.source), **sizes))
    model.save_pretrained(tmp_path / "runs" / "quickstart" / "model")
    tokenizers.save_pretrained(tmp_path / "runs" / "quickstart" / "model")
    lines = ["ko\ten", *(f"{source}\t{target}" for source, target in SHOWN.items())]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "caches")
    return tmp_path


def test_the_guide_prints_what_it_says_it_prints(place, capsys, monkeypatch):
    transformers_logging.disable_progress_bar()
    blocks = BLOCK.findall(GUIDE.read_text(encoding="utf-8"))
    assert len(blocks) == GUIDE.read_text(encoding="utf-8").count("```python") == 4
    names = {}
    for code, expected in blocks:
        exec(code, names)
        lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("{")]  # Trainer's log
        assert "".join(f"{line}\n" for line in lines) == expected
    folder = place / "runs" / "finetuned"
    for command in re.findall(
        r"^heedful ((?:evaluate|card) .*?)(?: > (.*))?$", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE
    ):
        monkeypatch.setattr(sys, "argv", ["heedful", *shlex.split(command[0])])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code, capsys.readouterr().err
        if command[1]:
            Path(command[1]).write_text(capsys.readouterr().out, encoding="utf-8")
    check_folder(folder)
    found = {each.metric_type: each.metric_value for each in read_card(folder / "README.md").data.eval_results}
    assert (found["exact_match"], found["character_error_rate"]) == (100, 0)
    names["trainer"].create_model_card(language=["ko", "en"], license="apache-2.0")
    check_folder(folder)


def test_every_link_of_the_guide_leads_somewhere():
    targets = re.findall(r"\]\(([^)#:]+)\)", GUIDE.read_text(encoding="utf-8"))
    assert targets
    assert all((GUIDE.parent / target).exists() for target in targets)
