"""Model cards: every fact is in, nothing is left to fill in, the metadata is what the Hub reads, the code runs."""

import dataclasses
import json
import re
import runpy
import shutil
from functools import partial
from pathlib import Path

import jinja2
import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from card_facts import FACTS, PREDICTIONS, REFERENCES, RUN, SCORES, card_facts
from guides import assert_named, python_of
from heedful.cards import model_card
from heedful.cards.hub import check_folder, files_to_push, read_card
from heedful.cards.model_card import CardFacts, card_metadata, code, render, render_model_card, write_model_card
from heedful.conversion.model_conversion import Conversion, write_card
from heedful.evaluation.metrics import METRICS, score_translations, scores_table
from heedful.files import private
from heedful.training.recipe_file import read_recipe, to_yaml
from helpers import assert_error, assert_refused
from memorised import PAIRS, saved_model

ROOT = Path(__file__).parents[2]


def card_of(**changes) -> str:
    return render_model_card(card_facts(**changes))


def body_of(**changes) -> str:
    return card_of(**changes).split("\n---\n", 1)[1]


@pytest.fixture(scope="module")
def card() -> str:
    return card_of()


def test_every_fact_is_in_the_card(card):
    # fmt: off
    facts = (
        "# heed-tiny-ko-en", "ko → en", "translates ko into en", "1,234,567", "290 byte-level", "2+2 pre-norm",
        "Apache-2.0", "`builtin:train:1000`", "`someone/pairs:news:train`", "`more.jsonl`", "`local.tsv`",
        "| train | 98,765 |", "| validation | 432 |", "kept 98,765", "| empty | 31 |", "| overlap | 7 |",
        "| learning_rate | 0.0007 |", "| schedule.name | inverse_sqrt |", r"| note | a\|b c |",
        "20,000", "3,456,789", "2 h 3 min", "2 CPU cores", "1.2345 (perplexity 3.44)",
        "heedful 0.1.0, transformers 5.23.0, torch 2.13.0", 'He says "yes".', "cannot translate real text",
    )
    # fmt: on
    assert [fact for fact in facts if fact not in card.split("\n---\n", 1)[1]] == []
    scores = SCORES["built-in test"]
    intervals = [(scores[name], *scores[f"{name}_interval"]) for name in ("bleu", "token_error_rate")]
    assert all(f"| {value:.2f} [{low:.2f}, {high:.2f}] |" in card for value, low, high in intervals)
    assert f"built-in test, BLEU: `{scores['bleu_signature']}`" in card
    assert "- built-in test: lost number 1,234 (5), repeated 2 (0)\n" in card
    assert "false alarms" not in card_of(scores={"news": SCORES["news"]})
    assert "95 % intervals" not in card_of(scores={"news": SCORES["news"]})
    assert "cannot translate real text" not in card_of(datasets=["someone/pairs"])
    assert "/home" not in card_of(recipe={"output": "/home/me/runs/one"})  # paths of the training machine stay there
    assert "{{ 7 * 7 }}" in card_of(hardware="{{ 7 * 7 }}")  # a text in the facts is never taken for a template
    for seconds, shown in ((5.4, "5 s"), (125, "2 min 5 s"), (3599.9, "1 h 0 min"), (90000, "25 h 0 min")):
        assert f"| Time | {shown} |" in card_of(seconds=seconds)


def test_what_is_no_translation_between_languages_is_called_none():
    sides = ("question", "answer")
    for source, target in (("und", "und"), ("ko", "ko"), ("en", "zxx"), ("ko", "und")):
        text = body_of(source_language=source, target_language=target, sides=sides)
        assert "An encoder-decoder that turns `question` into `answer`, trained from raw pairs of texts" in text
        assert "| Direction | `question` → `answer` |" in text
        for word in ("translates", "mistranslate", "Translating", f"{source} into {target}"):
            assert word not in text.split("## How to use")[0], word
    assert "`question`" not in body_of(sides=sides)


def test_nothing_is_left_to_fill_in_and_tables_are_whole(tmp_path, monkeypatch, card):
    few = {"scores": {"x": {"count": 1}}, "cleaning": {"kept": 3}, "example": {"translation": ""}}
    for each in (card, card_of(**few)):
        assert not re.search(r"\{\{|\}\}|\{%|%\}|TODO|More Information Needed|None\b|Undefined", each)
        assert "\n\n\n" not in each
        assert re.search(r"[^\n]\n\Z", each)
    (tmp_path / "template.md").write_text("{{ unheard_of }}", encoding="utf-8")
    monkeypatch.setattr("heedful.cards.model_card.TEMPLATES", tmp_path)
    assert_error("unheard_of", render, "template.md", card_metadata(card_facts()), error=jinja2.UndefinedError)
    for table in re.findall(r"(?:^\|.*\n)+", card.split("\n---\n", 1)[1], re.MULTILINE):
        rows = [re.sub(r"\\\|", "", row).count("|") for row in table.splitlines()]
        assert len(rows) > 2
        assert len(set(rows)) == 1, table


def test_what_scores_ignored_is_said_to_readers_and_to_the_hub():
    scores = {"plain": score_translations(PREDICTIONS, REFERENCES, metrics=("bleu", "exact_match"))}
    scores["short"] = score_translations(PREDICTIONS, REFERENCES, metrics=("bleu", "exact_match"), ignore="[.?]")
    card = card_of(scores=scores)
    said = "matches of `[.?]` were removed from predictions and references before scoring."
    assert re.findall(f"^For (.*), {re.escape(said)}$", card, re.MULTILINE) == ["short"]
    found = {(each.dataset_name, each.metric_type): each.metric_args for each in ModelCard(card).data.eval_results}
    assert found["plain", "exact_match"] is None
    assert found["short", "exact_match"] == {"ignore": "[.?]"}
    assert found["short", "bleu"] == {"signature": scores["short"]["bleu_signature"], "ignore": "[.?]"}


def test_the_metadata_is_what_the_hub_reads_also_of_what_is_no_translation(card, tmp_path):
    data = ModelCard(card).data
    assert (data.language, data.license, data.library_name) == (["ko", "en"], "apache-2.0", "transformers")
    assert (data.pipeline_tag, data.datasets, data.metrics) == ("translation", ["someone/pairs"], list(METRICS))
    assert "heed" in data.tags
    results = {(result.dataset_name, result.metric_type): result for result in data.eval_results}
    bleu, scores = results["built-in test", "bleu"], SCORES["built-in test"]
    assert len(results) == len(METRICS) + 1
    assert (bleu.metric_value, bleu.dataset_type) == (round(scores["bleu"], 2), "built-in-test")
    assert bleu.metric_args == {"signature": scores["bleu_signature"]}
    assert results["news", "chrf"].metric_value == round(SCORES["news"]["chrf"], 2)
    assert all(isinstance(result, EvalResult) for result in data.eval_results)
    assert {result.task_type for result in results.values()} == {"translation"}
    other = card_metadata(card_facts(license="My Own License"))
    assert (other.license, other.license_name) == ("other", "my-own-license")
    data = ModelCard(card_of(source_language="und", target_language="und")).data
    assert data.pipeline_tag == "text-generation"
    assert "translation" not in data.tags
    assert {(result.task_type, result.task_name) for result in data.eval_results} == {("text-generation", None)}
    path = write_model_card(tmp_path, card_facts())
    assert path == tmp_path / "README.md"
    assert path.read_text(encoding="utf-8") == card
    data = read_card(path).data
    assert (data.model_name, data.license) == ("heed-tiny-ko-en", "apache-2.0")
    assert ModelCardData(**data.to_dict()).to_dict() == data.to_dict()


def test_names_of_others_and_answers_of_the_model_are_text_on_one_line():
    """A heading, a sentence, a list and a table hold a name as text: no further heading, link, tag or code."""
    name = "a\n---\n# Fake\n<script>x</script> [free](https://x) | `c"
    shown = r"a --- # Fake &lt;script>x&lt;/script> [free]\(https://x) \| \`c"
    limits = RUN["card"] | {"limits": name}
    text = body_of(name=name, datasets=[name], card=limits, scores={name: {"count": 3, "bleu": 1.0}})
    assert f"\n# {shown}\n" in text
    assert f"\n- `{code(name)[1:-1]}`\n" in text
    assert f"\n| {shown} | 3 |" in text
    assert "\n---\n" not in text
    assert "\n# Fake" not in text
    assert code("`a` | b\n# c") == r"`'a' \| b # c`"
    answer = "<img src=x onerror=alert(1)> ![t](https://x) `c`\n\n# Fake"
    said = r'written: "&lt;img src=x onerror=alert(1)> ![t]\(https://x) \`c\` # Fake"'
    assert said in body_of(example={"translation": answer}, name=3)


# fmt: off
PRIVATE = {
    "/home/secret/a.tsv": "a.tsv", "~/secret/a.tsv": "a.tsv", "~secret/a.tsv": "a.tsv", "../secret/a.tsv": "a.tsv",
    "x/../../secret/a": "a", r"C:\secret\a.tsv": "a.tsv", "c:/secret/a/": "a", r"\\secret\share\a": "a",
    "file:///secret/a": "a", "File:secret/a": "a", "https://secret:secret@x.org/a.tsv?token=secret": "https://x.org/a.tsv",
    "s3://secret@bucket/a": "s3://bucket/a", "me/pairs": "me/pairs", "hf://datasets/me/p@main/a": "hf://datasets/me/p@main/a",
    "builtin:train:3": "builtin:train:3", "data/a.tsv": "data/a.tsv", r"\d+": r"\d+", "~ 5 %": "~ 5 %", "/": "/",
}
# fmt: on


def test_of_a_path_or_an_address_nothing_private_is_told_in_a_card_or_a_recipe():
    assert {place: private(place) for place in PRIVATE} == PRIVATE
    places = [*PRIVATE]
    card = card_of(datasets=places, recipe={"data": {"train": places, "mixture": [{"a": places}]}}, hardware=places[0])
    assert "secret" not in card
    recipe = read_recipe(ROOT / "configuration" / "recipes" / "quickstart.yaml")
    data = dataclasses.replace(recipe.data, train=places[:2], test={"x": places[2]}, held_out={"y": places[3:5]})
    recipe = dataclasses.replace(recipe, data=data, decoding=dataclasses.replace(recipe.decoding, ignore="/[0-9]/"))
    written = yaml.safe_load(to_yaml(recipe, is_private=True))
    assert written["data"]["train"] == ["a.tsv", "a.tsv"]
    assert written["decoding"]["ignore"] == "/[0-9]/"
    assert "secret" not in json.dumps(written)
    assert "secret" in to_yaml(recipe)


@pytest.mark.parametrize(
    ("metadata", "license", "language"),
    [
        ("license: [mit, gpl]\nlanguage: [1, 2]", "mit", "und"),
        ("license: 3\nlanguage: {a: b}\nlicense_link: [4]", "unknown", "und"),
        ("license: \"mit |\\n\\n# Owned\"\nlanguage: '<script>'\nlicense_name: '<b>'", "unknown", "und"),
        ("license: other\nlanguage:\n- ko\n- '[x](y)'\nlicense_link: https://x.org/LICENSE", "other", "ko"),
    ],
)
def test_what_a_card_of_others_says_is_an_identifier_in_ours_or_is_left_out(tmp_path, metadata, license, language):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "README.md").write_text(f"---\n{metadata}\n---\n")
    notes = ("A <b> note.",)
    write_card(tmp_path, Conversion(str(source), Path("out\n# Fake"), "bart", 5, 0.0, ("<b>", "<i>"), notes))
    data, text = read_card(tmp_path / "README.md").data, (tmp_path / "README.md").read_text(encoding="utf-8")
    assert (data.license, data.language) == (license, [language])
    assert f"| License | {license}" in text
    for raw in ("<b>", "<script>", "\n# Owned", "\n# Fake", "](y)"):
        assert raw not in text


def test_a_wrong_fact_is_named():
    cases = [({name: None}, f"`{name}` must not be empty, but is None") for name in FACTS]
    cases += [
        ({"name": ""}, "`name` must not be empty"),
        ({"scores": {}}, "`scores` must not be empty"),
        ({"source_language": "Korean"}, "`source_language` must be a language's code such as ko, but is 'Korean'"),
        ({"scores": {"news": {"bleu": 3.0}}}, r"`scores\['news'\]` must have `count` .* KeyError: 'count'"),
        ({"scores": {"news": {"count": 1, "faults": {"repeated": "ab"}}}}, r"`scores\['news'\]` must have `count`"),
        ({"scores": {"news": {"count": 3, "bleu": [1]}}}, r"`scores\['news'\]` must have .* TypeError"),
        ({"scores": {"news": {"count": 3, "bleu": 1, "bleu_interval": [0]}}}, r"`scores.* must .* IndexError"),
    ]
    assert_refused(cases, lambda changes: card_facts(**changes))


# The card of the project: that of the quickstart's model


@pytest.fixture(scope="module")
def quickstart() -> CardFacts:
    facts = runpy.run_path(str(ROOT / "scripts" / "upkeep" / "model_card.py"))["FACTS"]
    return CardFacts(**json.loads(facts.read_text(encoding="utf-8")))


def test_the_facts_of_the_project_are_of_the_quickstarts_recipe_and_its_card_is_rendered_from_them(quickstart):
    path = ROOT / "model_card.md"
    assert path.read_text(encoding="utf-8") == render_model_card(quickstart)
    assert not path.is_symlink()
    data = read_card(path).data
    assert (data.license, data.language, data.library_name) == ("apache-2.0", ["ko", "en"], "transformers")
    assert {result.metric_type for result in data.eval_results} == set(quickstart.metrics)
    recipe, run = read_recipe(ROOT / "configuration" / "recipes" / "quickstart.yaml"), quickstart.run
    assert (quickstart.name, run["updates"]) == (recipe.name, recipe.optimization.max_updates)
    assert run["recipe"]["optimization"]["learning_rate"] == recipe.optimization.learning_rate
    assert run["recipe"]["model"]["options"] == recipe.model.options
    assert run["card"] == dataclasses.asdict(recipe.card)
    assert set(quickstart.scores) == set(recipe.data.test)
    assert list(quickstart.metrics) == [*METRICS]
    assert scores_table(quickstart.scores["compositional"]) in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "language", "count"),
    [({}, None, 3), ({"joint": False}, None, 3), ({"vocab_size": 272, "languages": ["ko", "en"]}, "en", 2)],
    ids=["joint", "separate", "languages"],
)
def test_the_code_in_the_card_runs(tmp_path, capsys, options, language, count):
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    saved_model(tmp_path, PAIRS, language, **{"vocab_size": 264, **layers, **options})
    joint, example = options.get("joint", True), {"source": "고양이가 잔다.", "language": language}
    card = card_of(joint_vocabulary=joint, example=example)
    moved = model_card.with_repository(card, str(tmp_path))
    assert f"repository = {json.dumps(str(tmp_path))}" in moved
    assert model_card.with_repository(moved, "heed-tiny-ko-en") == card
    blocks, names = python_of(moved), {}
    assert len(blocks) == count
    for block in blocks:  # a folder has no revisions; the guide of publishing runs them as they are
        exec(block.replace('revision = "main"', "revision = None"), names)
    assert capsys.readouterr().out.splitlines() == ["The cat sleeps."] * count


# The card of a fine-tuned model: what its maker says, what its folder tells, and nothing of anybody else's

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
def command(heedful_command, folder):
    return partial(heedful_command, "card", folder)


def test_a_folder_with_its_card_can_be_pushed(command, folder):
    with pytest.raises(FileNotFoundError, match=r"must hold README.md, but does not \(`heedful card` writes one\)"):
        check_folder(folder)
    assert command(*TOLD, *LANGUAGES) == (0, f"{folder / 'README.md'}\n", "")
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


def test_a_dry_run_of_a_push_makes_all_checks_and_lists_what_is_sent(command, folder, heedful_command, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: pytest.fail("the Hub was asked"))
    assert "must hold README.md" in heedful_command("push", folder, "me/tiny", "--dry-run")[2]
    assert command(*TOLD, *LANGUAGES)[0] == 0
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
        ["ine-tuned", "base model", "None", "\n\n\n"],
    ),
    "no translation": (
        [*TOLD, *TASK],
        ["An encoder-decoder for answering questions, fine-tuned", "| Task | answering questions |"],
        ["translates", "Translating", "Direction", "| und "],
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_does_not_translate_or_had_no_base_model_says_what_it_does(command, folder, kind):
    arguments, told, untold = OTHERS[kind]
    assert command(*arguments)[0] == 0
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


def test_scores_are_those_that_were_measured(command, folder, tmp_path):
    (tmp_path / "news.json").write_text(json.dumps(SCORES["built-in test"]), encoding="utf-8")
    assert command(*TOLD, *LANGUAGES, "--scores", tmp_path / "news.json")[0] == 0
    results = {result.metric_type: result for result in read_card(folder / "README.md").data.eval_results}
    bleu = SCORES["built-in test"]["bleu"]
    assert (results["bleu"].metric_value, results["bleu"].dataset_name) == (round(bleu, 2), "news")
    assert f"| news | 12 | {bleu:.2f} [" in (folder / "README.md").read_text(encoding="utf-8")
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    wrong = [*TOLD, *LANGUAGES, "--scores", tmp_path / "other.json", "--overwrite"]
    assert_named(command, [(wrong, "`scores['other']` must have `count`")])


def test_a_card_is_replaced_only_when_asked_and_that_of_the_base_model_is_not_read(command, folder, tmp_path):
    (folder / "README.md").write_text("Mine.", encoding="utf-8")
    assert_named(command, [([*TOLD, *LANGUAGES], "has README.md; `--overwrite` replaces it.")])
    assert (folder / "README.md").read_text(encoding="utf-8") == "Mine."
    assert command(*TOLD, *LANGUAGES, "--overwrite")[0] == 0
    assert "Mine." not in (folder / "README.md").read_text(encoding="utf-8")
    base = tmp_path / "base"
    base.mkdir()
    write_model_card(base, card_facts(license="cc-by-nc-4.0"))
    told = {"license": "mit", "datasets": ["mine.tsv"], "source_language": "ko", "target_language": "en"}
    path = model_card.write_finetuned_card(folder, base_model=str(base), overwrite=True, **told)
    text = path.read_text(encoding="utf-8")
    assert "cc-by-nc" not in text
    assert str(tmp_path) not in text
    assert "from `base`." in text
    assert read_card(path).data.base_model is None  # which must be an id on the Hub


WRONG = [
    ([], "Missing option '--license'. Missing: --license, --dataset."),
    (["--license", "", "--dataset", "x", "--base-model", "y", *LANGUAGES], "`--license` must not be empty"),
    (TOLD[2:] + LANGUAGES, "Missing option '--license'"),
    ([*TOLD[:-1], "", *LANGUAGES], "`--base-model` must not be empty, but is '' instead"),
    (TOLD, "must be two languages, but are und and und instead: for other tasks than translation, describe"),
    ([*TOLD, "--source-language", "ko"], "must be two languages, but are ko and und instead"),
    ([*TOLD, "--source-language", "Klingo", "--target-language", "en"], "such as ko, but is 'Klingo' instead"),
    ([*TOLD, *LANGUAGES, "--scores", "nowhere.json"], "`--scores` must be files"),
]


def test_what_is_missing_or_wrong_is_named(command, folder):
    assert_named(command, WRONG)
    assert not (folder / "README.md").exists()
