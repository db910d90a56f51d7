"""The guide to fine-tuning runs as it is written, and prints what it shows."""

import json
import re
import shlex
from itertools import cycle, islice
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from heedful.publishing.hub import check_folder, read_card
from memorised import PAIRS, SHOWN, memorised_model
from trainer_runs import joint_tokenizers

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "finetune.md"
# A block of Python and, right behind it, what it prints, if anything.
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)


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
    monkeypatch.setattr("heedful.data.korean_english.pairs.korean_english_pairs", draw)
    return tmp_path


@pytest.mark.slow
def test_the_guide_prints_what_it_says_learns_what_is_new_and_forgets_nothing(
    place, capsys, monkeypatch, heedful_command
):
    transformers_logging.disable_progress_bar()
    blocks = BLOCK.findall(GUIDE.read_text(encoding="utf-8"))
    assert len(blocks) == GUIDE.read_text(encoding="utf-8").count("```python") == 5
    names = {}
    for code, expected in blocks:
        exec(code, names)
        lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("{")]  # Trainer's log
        assert "".join(f"{line}\n" for line in lines) == expected
    exact = {}
    for command in re.findall(r"^heedful (evaluate .*?)(?: > .*)?$", GUIDE.read_text("utf-8"), flags=re.MULTILINE):
        arguments = shlex.split(command)
        code, output, errors = heedful_command(*arguments, *({"--json"} - {*arguments}))
        assert not code, errors
        model, _, data, *_ = arguments[1:]
        exact[Path(model).name, data] = json.loads(output)["exact_match"]
        Path("new.json").write_text(output, encoding="utf-8")
    assert exact == {
        **{("model", "known.tsv"): 100, ("model", "new.tsv"): 0},
        **{("finetuned", "known.tsv"): 100, ("finetuned", "new.tsv"): 100},
    }
    (card,) = re.findall(r"^heedful (card .*)$", GUIDE.read_text("utf-8"), flags=re.MULTILINE)
    assert heedful_command(*shlex.split(card))[0] == 0
    folder = place / "runs" / "finetuned"
    check_folder(folder)
    found = {each.metric_type: each.metric_value for each in read_card(folder / "README.md").data.eval_results}
    assert (found["exact_match"], found["character_error_rate"]) == (100, 0)
    names["trainer"].create_model_card(language=["ko", "en"], license="apache-2.0")
    check_folder(folder)
