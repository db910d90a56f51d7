"""What the skill says to run, an assistant can run: every command, on a table of its own, with JSON that parses."""

import json
import shlex
from pathlib import Path

import pytest

from guides import commands_of
from heedful.cards import hub
from heedful_lab.korean_english.pairs import korean_english_pairs

ROOT = Path(__file__).parents[2]
SKILL = (ROOT / "skills/train-with-heedful/SKILL.md").read_text(encoding="utf-8")
QUICK = ["optimization.max_updates=2", "model.options={d_model: 32, encoder_ffn_dim: 32, decoder_ffn_dim: 32}"]
QUICK += ["validation.every_updates=2", "validation.sentences=4", "tokenizer.vocab_size=300"]
MORE = {"train": QUICK, "doctor": QUICK, "evaluate": ["--max-new-tokens", "8"], "compare": ["--resamples", "40"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_command_of_the_skill_runs_in_its_order(heedful_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "push", lambda *_, **__: hub.Pushed("me/pairs", "1", "https://hub/me/pairs/commit/1"))
    table = [f"{pair['ko']}\t{pair['en']}\n" for pair in korean_english_pairs("train", 300)]
    Path("pairs.tsv").write_text("source\ttarget\n" + "".join(table), encoding="utf-8")
    Path("test.tsv").write_text("source\ttarget\n" + "".join(table[:8]), encoding="utf-8")
    Path("new.txt").write_text("네.\n비가 온다.\n", encoding="utf-8")
    commands = [shlex.split(line) for line in commands_of(SKILL)]
    assert len(commands) == 10
    for name, *words in commands:
        if name == "compare":
            heedful_command("train", "pairs.yaml", "output=runs/other", "seed=2", *QUICK)
        code, shown, errors = heedful_command(name, *words, *MORE.get(name, []))
        assert code == 0 or (name == "doctor" and code == 1), (name, words, errors)  # 300 pairs are few
        if "--json" in words and "--output" not in words:
            assert json.loads(shown), (name, words)
    assert [json.loads(line)["text"] for line in Path("new.jsonl").read_text(encoding="utf-8").splitlines()]
    assert Path("page.html").stat().st_size > 10_000
