"""The card of a fine-tuned model: what its maker says, what its folder tells, and nothing of anybody else's."""

import json
import shutil
from functools import partial

import pytest

from card_facts import SCORES, card_facts
from guides import assert_named
from heedful.cards.hub import check_folder, files_to_push, read_card
from heedful.cards.model_card import write_finetuned_card, write_model_card
from memorised import saved_model

TOLD = ["--license", "MIT", "--dataset", "pairs.tsv", "--dataset", "me/more", "--base-model", "someone/base"]
LANGUAGES = ["--source-language", "kor_Hang", "--target-language", "English"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("saved") / "finetuned", vocab_size=272)


@pytest.fixture
def folder(saved, tmp_path):
    """A model as a trainer saves it: without a card."""
    return shutil.copytree(saved, tmp_path / "finetuned")


@pytest.fixture
def card(heedful_command, folder):
    """Run the command in this process; return its exit code, output and errors."""
    return partial(heedful_command, "card", folder)


def test_a_folder_with_its_card_can_be_pushed(card, folder):
    with pytest.raises(FileNotFoundError, match=r"must hold README.md, but does not \(`heedful card` writes one\)"):
        check_folder(folder)
    assert card(*TOLD, *LANGUAGES) == (0, f"{folder / 'README.md'}\n", "")
    check_folder(folder)
    data = read_card(folder / "README.md").data
    assert (data.language, data.license, data.base_model) == (["ko", "en"], "mit", "someone/base")
    assert (data.datasets, data.pipeline_tag, data.eval_results) == (["me/more"], "translation", None)
    text = (folder / "README.md").read_text(encoding="utf-8").split("\n---\n", 1)[1]
    told = (
        *("fine-tuned with a Trainer from [someone/base](https://huggingface.co/someone/base).", "No scores were"),
        *("- `pairs.tsv`\n- `me/more`", "| Direction | ko → en |", "272 tokens for both sides", "| License | MIT |"),
    )
    assert [each for each in told if each not in text] == []


def test_a_dry_run_of_a_push_makes_all_checks_and_lists_what_is_sent(card, folder, heedful_command, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: pytest.fail("the Hub was asked"))
    assert "must hold README.md" in heedful_command("push", folder, "me/tiny", "--dry-run")[2]
    assert card(*TOLD, *LANGUAGES)[0] == 0
    (folder / "training_args.bin").touch()
    with pytest.warns(UserWarning, match="training_args.bin"):
        code, output, _ = heedful_command("push", folder, "me/tiny", "--dry-run")
    assert (code, output.splitlines()) == (0, files_to_push(folder))
    assert {"config.json", "README.md", "model.safetensors", "tokenizer.json", "modeling_heed.py"} <= {*output.split()}
    assert "me /tiny" in heedful_command("push", folder, "me /tiny", "--dry-run")[2]


TASK = ["--task", "answering questions", "--source-language", "ko", "--name", "answers"]
OTHERS = {
    "trained from nothing": (
        [*TOLD[:4], *LANGUAGES],
        ["translates ko into en, trained from nothing with a Trainer.", "| Trained from | nothing |"],
        ["ine-tuned", "began with", "None", "\n\n\n"],
    ),
    "no translation": (
        [*TOLD, *TASK],
        ["An encoder-decoder for answering questions, fine-tuned", "| Task | answering questions |"],
        ["translates", "Translating", "Direction", "| und "],
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_does_not_translate_or_had_no_base_model_says_what_it_does(card, folder, kind):
    arguments, told, untold = OTHERS[kind]
    assert card(*arguments)[0] == 0
    check_folder(folder)
    text = (folder / "README.md").read_text(encoding="utf-8")
    own, usage = text.split("## How to use")
    assert [each for each in told if each not in text] == []
    assert [each for each in untold if each in own] == []
    data = read_card(folder / "README.md").data
    if kind == "trained from nothing":
        assert data.base_model is None
        return
    assert (data.language, data.pipeline_tag, data.model_name) == (["ko"], "text-generation", "answers")
    assert "translation" not in data.tags
    assert 'print(generate(text)[0]["generated_text"])' in usage
    assert [*json.loads((folder / "config.json").read_text())["custom_pipelines"]] == ["heed-text2text"]


def test_scores_are_those_that_were_measured(card, folder, tmp_path):
    (tmp_path / "news.json").write_text(json.dumps(SCORES["built-in test"]), encoding="utf-8")
    assert card(*TOLD, *LANGUAGES, "--scores", tmp_path / "news.json")[0] == 0
    results = {result.metric_type: result for result in read_card(folder / "README.md").data.eval_results}
    bleu = SCORES["built-in test"]["bleu"]
    assert (results["bleu"].metric_value, results["bleu"].dataset_name) == (round(bleu, 2), "news")
    assert f"| news | 12 | {bleu:.2f} [" in (folder / "README.md").read_text(encoding="utf-8")
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    wrong = [*TOLD, *LANGUAGES, "--scores", tmp_path / "other.json", "--overwrite"]
    assert_named(card, [(wrong, "`scores['other']` must have `count`")])


def test_a_card_that_is_there_is_replaced_only_when_asked_and_that_of_the_base_model_is_not_read(
    card, folder, tmp_path
):
    (folder / "README.md").write_text("Mine.", encoding="utf-8")
    assert_named(card, [([*TOLD, *LANGUAGES], "has README.md; `--overwrite` replaces it.")])
    assert (folder / "README.md").read_text(encoding="utf-8") == "Mine."
    assert card(*TOLD, *LANGUAGES, "--overwrite")[0] == 0
    assert "Mine." not in (folder / "README.md").read_text(encoding="utf-8")
    base = tmp_path / "base"
    base.mkdir()
    write_model_card(base, card_facts(license="cc-by-nc-4.0"))
    told = {"license": "mit", "datasets": ["mine.tsv"], "source_language": "ko", "target_language": "en"}
    path = write_finetuned_card(folder, base_model=str(base), overwrite=True, **told)
    text = path.read_text(encoding="utf-8")
    assert "cc-by-nc" not in text
    assert str(tmp_path) not in text
    assert "from `base`." in text
    assert read_card(path).data.base_model is None  # which must be an id on the Hub


WRONG = [
    ([], "Missing option '--license'. All that is missing: --license, --dataset."),
    (["--license", "", "--dataset", "x", "--base-model", "y", *LANGUAGES], "`--license` must not be empty"),
    (TOLD[2:] + LANGUAGES, "Missing option '--license'"),
    ([*TOLD[:-1], "", *LANGUAGES], "`--base-model` must not be empty, but is '' instead"),
    (TOLD, "must be two languages, but are und and und instead: for what is no translation, `--task`"),
    ([*TOLD, "--source-language", "ko"], "must be two languages, but are ko and und instead"),
    ([*TOLD, "--source-language", "Klingo", "--target-language", "en"], "such as ko, but is 'Klingo' instead"),
    ([*TOLD, *LANGUAGES, "--scores", "nowhere.json"], "`--scores` must be files"),
]


def test_what_is_missing_or_wrong_is_named(card, folder):
    assert_named(card, WRONG)
    assert not (folder / "README.md").exists()
