"""The scripts, run as functions on tiny models."""

import ast
import json
import math
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from heedful import Translator
from heedful.cards.model_card import CardFacts, write_model_card
from heedful.data.tokenizer_training import train_tokenizers
from heedful.training.recipe_file import read_recipe
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import assert_error, load_script, tiny_model, untrained_folder

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str):
    return load_script(f"scripts/{name}.py")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return untrained_folder(tmp_path_factory.mktemp("scripts") / "model", max_new_tokens=6)


@pytest.fixture
def run_script(monkeypatch):
    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, arguments)])
        script.main()

    return run


def test_the_quickstart_goes_on_to_its_scores_where_no_picture_can_be_drawn(tmp_path, monkeypatch, capsys, run_script):
    scores = {name: {"exact_match": 97.5} for name in ("test", "compositional")}
    scores |= {"ended": {"message": "Training ended after update 423 of 550"}}

    def run(command, **_):
        if command[3] == "train":
            (tmp_path / "runs/quickstart/model").mkdir(parents=True)
            (tmp_path / "runs/quickstart/model/metrics.json").write_text(json.dumps(scores))
        printed = {"train": "", "translate": "a\n" * 5, "attention": ""}[command[3]]
        return SimpleNamespace(returncode=2 * (command[3] == "attention"), stdout=printed)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", run)
    run_script(load("quickstart"))
    printed = capsys.readouterr().out
    assert "test            97.5 %" in printed
    assert "heat map   none, see above" in printed
    assert printed.endswith("\nTraining ended after update 423 of 550\n")
    monkeypatch.setattr("subprocess.run", lambda *arguments, **_: pytest.fail("It trains."))
    assert_error("It takes no arguments", run_script, load("quickstart"), "--help", error=SystemExit)


def test_finetuning_lowers_the_loss_and_saves_an_ordinary_folder_which_it_then_refuses(model_folder, tmp_path, capsys):
    settings = {"train": "builtin:train:96", "validation": "builtin:validation:8", "source": "ko", "target": "en"}
    settings |= {"epochs": 3.0, "batch_size": 16, "accumulation": 2, "learning_rate": 1e-2, "warmup_steps": 1}
    output, script = tmp_path / "finetuned", load("finetune")
    script.finetune(model=model_folder, output=output, **settings)
    scores = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{'eval_loss'")]
    assert ast.literal_eval(scores[-1])["eval_loss"] < 0.98 * math.log(400)  # 400 tokens: guessing costs log 400
    tuned = AutoModelForSeq2SeqLM.from_pretrained(output)
    inputs = AutoTokenizer.from_pretrained(output)(["달걀은 신선해요?"], return_tensors="pt")
    assert tuned.generate(**inputs, max_new_tokens=5).shape[0] == 1
    before = AutoModelForSeq2SeqLM.from_pretrained(model_folder)
    assert not tuned.lm_head.weight.equal(before.lm_head.weight)
    assert_error("`--output` must be an empty folder", script.finetune, model=model_folder, output=output, **settings)
    assert AutoModelForSeq2SeqLM.from_pretrained(output).lm_head.weight.equal(tuned.lm_head.weight)


def test_generating_prints_what_the_model_translates(model_folder, capsys):
    texts = ["달걀은 신선해요?", "네."]
    translator = Translator.from_pretrained(model_folder, engine="generate")
    for num_beams in (1, 3):
        load("generate").generate(model_folder, texts, num_beams)
        expected = [best.text for best, *_ in translator.translate(texts, num_beams=num_beams)]
        assert capsys.readouterr().out == "\n".join(expected) + "\n"


def test_publishing_checks_the_folder_pushes_it_and_names_the_revision(model_folder, tmp_path, monkeypatch, capsys):
    asked = []

    def upload_folder(repo_id, folder_path, **_):
        asked.append((repo_id, (folder_path / "README.md").read_text(encoding="utf-8")))
        return SimpleNamespace(oid="abc123", commit_url="https://hub/me/model/commit/abc123")

    def create_repo(name, **options):
        asked.append((name, options["private"]))
        return SimpleNamespace(repo_id=name)

    hub = SimpleNamespace(create_repo=create_repo, upload_folder=upload_folder)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda token=None: hub)
    folder = shutil.copytree(model_folder, tmp_path / "model")
    publish = load("publish").publish
    assert_error(r"README\.md", publish, folder, "me/model", error=FileNotFoundError, private=True)
    facts = json.loads((SCRIPTS.parent / "tests/cards/quickstart_facts.json").read_text(encoding="utf-8"))
    write_model_card(folder, CardFacts(**facts))
    publish(folder, "me/model", private=True)
    assert asked[0] == ("me/model", True)
    assert 'repository = "me/model"' in asked[1][1]
    printed = capsys.readouterr().out
    assert "pipeline_tag: translation" in printed
    assert "from_pretrained('me/model', revision='abc123')" in printed


def test_examples_begin_with_the_command_to_type_and_are_listed():
    for path in sorted(SCRIPTS.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert f" scripts/{path.name}" in text or "`make quickstart`" in text, path
        assert f"`{path.name}`" in (SCRIPTS / "README.md").read_text(encoding="utf-8")


def test_the_train_script_is_the_train_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "missing.yaml"])
    assert_error(r"^2$", runpy.run_path, str(SCRIPTS / "train.py"), error=SystemExit, run_name="__main__")
    assert "missing.yaml does not exist" in capsys.readouterr().err


def test_the_quickstart_translates_sentences_that_come_after_the_tested_ones():
    quickstart = load("quickstart")
    assert read_recipe(quickstart.RECIPE).data.test["test"] == "builtin:test:1000"
    unseen = list(korean_english_pairs("test", 1000 + quickstart.SENTENCES))[-quickstart.SENTENCES :]
    assert not {pair["ko"] for pair in korean_english_pairs("train", 5000)} & {pair["ko"] for pair in unseen}


@pytest.mark.parametrize("name", ["low_resource", "optimizers"])
def test_the_page_of_a_series_of_runs_has_the_tables_that_were_measured(name):
    script = load(f"upkeep/{name}")
    known = json.loads(script.FOUND.read_text(encoding="utf-8"))
    if name == "optimizers":
        tables = [script.table(task, script.whole_runs(known, task)) for task in {run["task"] for run in known}]
    else:
        tables = [script.table(known, pairs) for pairs in {row["pairs"] for row in known["rows"]}]
    page = (SCRIPTS.parent / "docs/studies" / f"{name.replace('_', '')}.md").read_text(encoding="utf-8")
    assert tables
    assert [table for table in tables if f"\n\n{table}\n\n" not in page] == []


def test_whatever_a_model_has_learned_it_puts_spaces_and_changes_no_letter(tmp_path, capsys, monkeypatch, run_script):
    texts = ["나는 학교에 간다.", "물", "가 나 다 라 마 바 사", "a b 뷁 c"]
    closed = [text.replace(" ", "") for text in texts]
    tokenizers = train_tokenizers(texts[:3], texts[:3], vocab_size=None, algorithm="character")
    sizes = {"vocab_size": len(tokenizers.source), "share_encoder_decoder_embeddings": True}
    tiny_model(**sizes, **tokenizers.special_ids()).save_pretrained(tmp_path / "model")
    tokenizers.save_pretrained(tmp_path / "model")
    rows = [json.dumps({"source": source, "target": text}) for source, text in zip(closed, texts, strict=True)]
    (tmp_path / "test.jsonl").write_text("\n".join(rows))
    script, asked = load("spacing_f1"), []
    scored = script.spacing_scores
    monkeypatch.setattr(script, "spacing_scores", lambda pairs: scored(asked.append(list(pairs)) or asked[0]))
    run_script(script, tmp_path / "test.jsonl", tmp_path / "model")
    assert [prediction.replace(" ", "") for prediction, _ in asked[0]] == closed
    assert any(" " in prediction for prediction, _ in asked[0])
    assert capsys.readouterr().out.startswith("spaces: precision ")


def test_spaces_are_scored_where_they_stand_among_the_letters_of_the_reference():
    script = load("spacing_f1")
    texts = ["나는 학교에 간다.", "나는학교에 간 다.", "나는 교에 간다.", "나는학교에간다."]
    found = [script.counts(text, texts[0]) for text in texts]
    assert found == [(2, 2, 2), (1, 2, 2), (1, 2, 2), (0, 0, 2)]  # the third has lost a letter behind its first space
    assert script.spacing_scores([("a b c", "a b c"), ("ab cd", "a bcd")]) == pytest.approx([200 / 3] * 3)


def test_a_job_on_the_hub_trains_by_a_recipe_and_pushes_what_it_made(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    job, sent = load("hf_job"), []
    monkeypatch.setattr(job, "push", lambda *given, **named: sent.append((given, named)) or SimpleNamespace(url="url"))
    made = []
    hub = SimpleNamespace(create_repo=lambda *given, **options: made.append([*Path(tmp_path / "True").glob("*")]))
    monkeypatch.setattr(job, "HfApi", lambda: hub)
    changes = ["data.train=builtin:train:200", "data.validation=builtin:validation:5"]
    changes += ["data.test={t: 'builtin:test:3'}"]
    changes += ["optimization.max_updates=1", "tokenizer.vocab_size=300", "model.options.d_model=32"]
    for is_pushed in (False, True):
        job.main("me/model", "quickstart", [*changes, f"output={tmp_path}/{is_pushed}"], is_pushed, private=True)
    assert sent == [((tmp_path / "True/model", "me/model"), {"private": True})]
    assert made == [[]]  # the repository was there before the training began
    changes = ["publish.also=[transformers]", "data.mixture={a: {train: x, to: ko}}"]
    assert_error(r"`publish\.also` must be empty", job.main, "me/model", "quickstart", changes, True)
    assert len(made) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "url"


def test_the_prose_check_finds_habits_in_pages_docstrings_and_messages_but_not_in_code(tmp_path, monkeypatch):
    prose = load("upkeep/prose")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("Plain words.\n\n```\nwhat is code\n```\n\nThe log tells what a rank lost.\n")
    (tmp_path / "code.py").write_text(
        "def what():  # what a comment\n"
        '    """Return the weights of a layer."""\n'
        '    raise ValueError("it tells more than this")\n'
    )
    files = [tmp_path / "page.md", tmp_path / "code.py"]
    assert [place.split(": ")[0] for place in prose.places("what", files)] == ["page.md:7", "code.py:1"]
    assert [place.split(": ")[0] for place in prose.places("of a", files)] == ["code.py:2"]
    assert [place.split(": ")[0] for place in prose.places("tell", files)] == ["page.md:7", "code.py:3"]
    assert any(fault.startswith("pages: what, per 1,000 words: 111.11") for fault in prose.report(files)[1])
