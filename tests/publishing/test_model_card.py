"""Model cards: every fact is in, nothing is left to fill in, the metadata is what the Hub reads, the code runs."""

import dataclasses
import json
import re
from pathlib import Path

import jinja2
import pytest
from huggingface_hub import ModelCard

from heedful.data.tokenizer_training import train_tokenizers
from heedful.evaluation.metrics import METRICS, score_translations
from heedful.publishing.hub import read_card
from heedful.publishing.model_card import (
    RunFacts,
    card_metadata,
    code,
    render,
    render_model_card,
    with_repository,
    write_model_card,
)
from heedful.training.recipe_file import read_recipe
from memorised import PAIRS, memorised_model

ROOT = Path(__file__).parents[2]

PREDICTIONS = ["The cat sat on the mat.", "A dog runs in the park.", "It rains."] * 4
REFERENCES = ["The cat sat on the mat.", "The dog runs through the park.", "It rains."] * 4

FACTS = {
    "name": "heed-tiny-ko-en",
    "source_language": "ko",
    "target_language": "en",
    "license": "Apache-2.0",
    "datasets": ["builtin:train:1000", "someone/pairs:news:train", "/home/me/secret/more.jsonl", "local.tsv"],
    "pairs": {"train": 98765, "validation": 432},
    "cleaning": {"kept": 98765, "dropped": {"empty": 31, "overlap": 7}, "examples": {"empty": [["", "x"]]}},
    "parameters": 1234567,
    "architecture": "An encoder-decoder of 2+2 pre-norm layers, d_model 48.",
    "vocabulary": "290 byte-level BPE pieces for both languages",
    "joint_vocabulary": True,
    "recipe": {"learning_rate": 0.0007, "schedule": {"name": "inverse_sqrt", "warmup": 400}, "note": "a|b\nc"},
    "updates": 20000,
    "target_tokens": 3456789,
    "seconds": 7384.2,
    "hardware": "2 CPU cores",
    "scores": {
        "built-in test": score_translations(PREDICTIONS, REFERENCES, bootstrap=40),
        "news": score_translations(PREDICTIONS[:5], REFERENCES[:5], metrics=("chrf",)),
    },
    "validation_loss": 1.2345,
    "versions": {"heedful": "0.1.0", "transformers": "5.23.0", "torch": "2.13.0"},
    "example_source": '그는 "네"라고 한다.',
    "example_translation": 'He says "yes".',
}


def changed(**changes) -> RunFacts:
    return RunFacts(**(FACTS | changes))


@pytest.fixture(scope="module")
def card() -> str:
    return render_model_card(changed())


def body_of(card: str) -> str:
    return card.split("\n---\n", 1)[1]


def test_every_fact_is_in_the_card(card):
    # fmt: off
    facts = (
        "# heed-tiny-ko-en", "ko → en", "1,234,567", "290 byte-level", "2+2 pre-norm", "Apache-2.0",
        "`builtin:train:1000`", "`someone/pairs:news:train`", "`more.jsonl`", "`local.tsv`",
        "| train | 98,765 |", "| validation | 432 |", "kept 98,765", "| empty | 31 |", "| overlap | 7 |",
        "| learning_rate | 0.0007 |", "| schedule.name | inverse_sqrt |", r"| note | a\|b c |",
        "20,000", "3,456,789", "2 h 3 min", "2 CPU cores", "1.2345 (perplexity 3.44)",
        "heedful 0.1.0, transformers 5.23.0, torch 2.13.0", 'He says "yes".',
    )
    # fmt: on
    assert [fact for fact in facts if fact not in body_of(card)] == []


@pytest.mark.parametrize(("source", "target"), [("und", "und"), ("ko", "ko"), ("en", "zxx"), ("ko", "und")])
def test_what_is_no_translation_between_languages_is_called_none(source, target, card):
    sides = ("`question`", "`answer`")
    text = body_of(render_model_card(changed(source_language=source, target_language=target, sides=sides)))
    assert "An encoder-decoder that turns `question` into `answer`, trained from raw pairs of texts" in text
    assert "| Direction | `question` → `answer` |" in text
    for told in ("translates", "mistranslate", "Translating", f"{source} into {target}"):
        assert told not in text.split("## How to use")[0], told
    assert "translates ko into en" in body_of(card)
    assert "`question`" not in body_of(render_model_card(changed(sides=sides)))


def test_every_field_changes_the_card(card):
    # fmt: off
    others = {
        "name": "other", "source_language": "de", "target_language": "fr", "license": "mit", "datasets": ["o/o"],
        "pairs": {"train": 5}, "cleaning": {"kept": 5}, "parameters": 7, "architecture": "Other.",
        "vocabulary": "other", "joint_vocabulary": False, "recipe": {"other": 1}, "updates": 3,
        "target_tokens": 9, "seconds": 4.0, "hardware": "other", "scores": {"other": {"count": 1, "bleu": 2.0}},
        "validation_loss": 2.0, "versions": {"heedful": "9", "transformers": "9", "torch": "9"},
        "example_source": "other", "example_translation": "other", "example_language": "fr",
        "intended_use": "Other.", "limits": ["Other."], "learning_curve": "curve.png",
    }
    # fmt: on
    assert set(others) | {"sides"} == {field.name for field in dataclasses.fields(RunFacts)}
    for name, value in others.items():
        assert render_model_card(changed(**{name: value})) != card, name


def test_nothing_is_left_to_fill_in():
    for facts in (changed(), changed(scores={"x": {"count": 1}}, cleaning={"kept": 3}, example_translation="")):
        card = render_model_card(facts)
        assert not re.search(r"\{\{|\}\}|\{%|%\}|TODO|More Information Needed|None\b|Undefined", card)
        assert "\n\n\n" not in card
        assert card.endswith("\n")
        assert not card.endswith("\n\n")


def test_a_name_that_only_the_template_knows_is_an_error(tmp_path, monkeypatch):
    template = tmp_path / "template.md"
    template.write_text("{{ unheard_of }}", encoding="utf-8")
    monkeypatch.setattr("heedful.publishing.model_card.TEMPLATES", tmp_path)
    with pytest.raises(jinja2.UndefinedError, match="unheard_of"):
        render("template.md", card_metadata(changed()))


def test_tables_are_whole():
    for table in re.findall(r"(?:^\|.*\n)+", body_of(render_model_card(changed())), re.MULTILINE):
        rows = [re.sub(r"\\\|", "", row).count("|") for row in table.splitlines()]
        assert len(rows) > 2
        assert len(set(rows)) == 1, table


def test_scores_come_with_intervals_and_signatures():
    card = render_model_card(changed())
    scores = FACTS["scores"]["built-in test"]
    low, high = scores["bleu_interval"]
    assert f"| {scores['bleu']:.2f} [{low:.2f}, {high:.2f}] |" in card
    assert f"built-in test, BLEU: `{scores['bleu_signature']}`" in card
    assert f"| news | 5 | – | {FACTS['scores']['news']['chrf']:.2f} | – | – | – | – |" in card
    low, high = scores["token_error_rate_interval"]
    assert f"| {scores['token_error_rate']:.2f} [{low:.2f}, {high:.2f}] |" in card
    assert "95 % intervals" in card
    assert "95 % intervals" not in render_model_card(changed(scores={"news": FACTS["scores"]["news"]}))


def test_what_scores_ignored_stands_beside_them_for_readers_and_for_the_hub():
    scores = {"plain": score_translations(PREDICTIONS, REFERENCES, metrics=("bleu", "exact_match"))}
    scores["short"] = score_translations(PREDICTIONS, REFERENCES, metrics=("bleu", "exact_match"), ignore="[.?]")
    card = render_model_card(changed(scores=scores))
    told = "what matches `[.?]` was taken out of predictions and references before they were scored."
    assert re.findall(f"^Of (.*), {re.escape(told)}$", card, re.MULTILINE) == ["short"]
    found = {(each.dataset_name, each.metric_type): each.metric_args for each in ModelCard(card).data.eval_results}
    assert found["plain", "exact_match"] is None
    assert found["short", "exact_match"] == {"ignore": "[.?]"}
    assert found["short", "bleu"] == {"signature": scores["short"]["bleu_signature"], "ignore": "[.?]"}


def test_the_metadata_is_what_the_hub_reads():
    data = ModelCard(render_model_card(changed())).data
    assert data.language == ["ko", "en"]
    assert data.license == "apache-2.0"
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "translation"
    assert data.datasets == ["someone/pairs"]
    assert data.metrics == list(METRICS)
    assert "heed" in data.tags
    results = {(result.dataset_name, result.metric_type): result for result in data.eval_results}
    scores = FACTS["scores"]["built-in test"]
    assert len(results) == 7
    assert results["built-in test", "bleu"].metric_value == round(scores["bleu"], 2)
    assert results["built-in test", "bleu"].metric_args == {"signature": scores["bleu_signature"]}
    assert results["built-in test", "bleu"].dataset_type == "built-in-test"
    assert {result.task_type for result in results.values()} == {"translation"}


def test_the_metadata_of_what_is_no_translation_files_it_elsewhere():
    data = ModelCard(render_model_card(changed(source_language="und", target_language="und"))).data
    assert data.pipeline_tag == "text-generation"
    assert "translation" not in data.tags
    assert {(result.task_type, result.task_name) for result in data.eval_results} == {("text-generation", None)}


def test_a_license_that_the_hub_does_not_know_keeps_its_name():
    data = card_metadata(changed(license="My Own License"))
    assert (data.license, data.license_name) == ("other", "my-own-license")


def test_the_builtin_corpus_is_named_as_a_limit():
    warning = "cannot translate real text"
    assert warning in render_model_card(changed())
    assert warning not in render_model_card(changed(datasets=["someone/pairs"]))


def test_paths_of_the_training_machine_stay_there():
    assert "/home" not in render_model_card(changed(recipe={"output": "/home/me/runs/one"}))


def test_text_in_the_facts_is_never_taken_for_a_template():
    assert "{{ 7 * 7 }}" in render_model_card(changed(hardware="{{ 7 * 7 }}"))


def test_names_of_others_are_text_on_one_line():
    """A heading, a sentence, a list and a table hold a name as text: no further heading, link, tag or code."""
    name = "a\n---\n# Fake\n<script>x</script> [free](https://x) | `c"
    shown = r"a --- # Fake \<script>x\</script> [free]\(https://x) \| \`c"
    facts = changed(name=name, datasets=[name], limits=[name], scores={name: {"count": 3, "bleu": 1.0}})
    text = body_of(render_model_card(facts))
    assert f"\n# {shown}\n" in text
    assert f"\n- `{code(name)[1:-1]}`\n" in text
    assert f"\n| {shown} | 3 |" in text
    assert "\n---\n" not in text
    assert "\n# Fake" not in text
    assert code("`a` | b\n# c") == r"`'a' \| b # c`"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(5.4, "| 5 s |"), (125, "| 2 min 5 s |"), (3599.9, "| 1 h 0 min |"), (90000, "| 25 h 0 min |")],
)
def test_durations_are_readable(seconds, shown):
    assert f"| Time {shown}" in render_model_card(changed(seconds=seconds))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(RunFacts) if field.name in FACTS])
def test_a_fact_that_is_none_is_named(name):
    with pytest.raises(ValueError, match=f"`{name}` must not be empty, but is None"):
        changed(**{name: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "`name` must not be empty"),
        ({"scores": {}}, "`scores` must not be empty"),
        ({"source_language": "Korean"}, "`source_language` must be a language's code such as ko, but is 'Korean'"),
        ({"scores": {"news": {"bleu": 3.0}}}, r"`scores\['news'\]` must have `count`"),
    ],
)
def test_a_wrong_fact_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        changed(**changes)


def test_the_card_lies_in_the_models_folder(tmp_path):
    path = write_model_card(tmp_path, changed())
    assert path == tmp_path / "README.md"
    assert path.read_text(encoding="utf-8") == render_model_card(changed())
    assert ModelCard.load(path).data.model_name == "heed-tiny-ko-en"


# The card of the project: that of the quickstart's model


@pytest.fixture(scope="module")
def quickstart() -> RunFacts:
    return RunFacts(**json.loads(Path(__file__).with_name("quickstart_facts.json").read_text(encoding="utf-8")))


def test_the_card_of_the_project_is_rendered_from_the_facts_of_its_run(quickstart):
    path = ROOT / "model_card.md"
    assert path.read_text(encoding="utf-8") == render_model_card(quickstart)
    assert not path.is_symlink()
    data = read_card(path).data
    assert (data.license, data.language, data.library_name) == ("apache-2.0", ["ko", "en"], "transformers")
    assert {result.metric_type for result in data.eval_results} == set(METRICS)


def test_the_facts_of_the_project_are_of_the_quickstarts_recipe(quickstart):
    recipe = read_recipe(ROOT / "configuration" / "recipes" / "quickstart.yaml")
    assert quickstart.name == recipe.name
    assert quickstart.updates == recipe.optimization.max_updates
    assert quickstart.recipe["optimization"]["learning_rate"] == recipe.optimization.learning_rate
    assert quickstart.recipe["model"]["options"] == recipe.model.options
    assert set(quickstart.scores) == set(recipe.data.test)


def test_the_readme_shows_the_scores_of_the_card(quickstart):
    """`heedful evaluate` prints what the card tells of the same pairs."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(
        r"^\$ heedful evaluate .* --data builtin:compositional:1000 .*\n((?:.+\n)+)", readme, re.MULTILINE
    )[1]
    scores = quickstart.scores["compositional"]
    lines = [f"{scores['count']} pairs"]
    for name, title, unit in (
        ("bleu", "BLEU                 ", ""),
        ("chrf", "chrF                 ", ""),
        ("ter", "TER                  ", ""),
        ("exact_match", "exact match          ", " %"),
        ("token_error_rate", "token error rate     ", " %"),
        ("character_error_rate", "character error rate ", " %"),
    ):
        low, high = scores[f"{name}_interval"]
        signature = scores.get(f"{name}_signature", "")
        lines.append(f"{title}{scores[name]:6.2f}{unit}  (95 %: {low:.2f} to {high:.2f})  {signature}".rstrip())
    assert shown.splitlines() == lines


def test_the_page_of_benchmarks_shows_the_exact_matches_of_the_card(quickstart):
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| (\w+), 1,000 \| exact match \*\*([\d.]+) %\*\* \|", page, re.MULTILINE)
    assert dict(rows) == {name: f"{scores['exact_match']:.1f}" for name, scores in quickstart.scores.items()}


def _code_blocks(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)


@pytest.mark.parametrize("joint", [True, False])
def test_the_code_in_the_card_runs(tmp_path, capsys, joint):
    pair = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=264, joint=joint)
    memorised_model(pair, PAIRS).save_pretrained(tmp_path)
    pair.save_pretrained(tmp_path)
    facts = changed(joint_vocabulary=joint, example_source="고양이가 잔다.")
    blocks = _code_blocks(with_repository(render_model_card(facts), str(tmp_path)))
    assert len(blocks) == 3
    names = {}
    for block in blocks:  # a folder has no revisions; the guide of publishing runs them as they are
        exec(block.replace('revision = "main"', "revision = None"), names)
    assert capsys.readouterr().out.splitlines() == ["The cat sleeps."] * 3


def test_the_code_in_the_card_of_a_model_of_several_languages_names_one(tmp_path, capsys):
    pair = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=272, languages=["ko", "en"])
    memorised_model(pair, PAIRS, "en").save_pretrained(tmp_path)
    pair.save_pretrained(tmp_path)
    facts = changed(example_source="고양이가 잔다.", example_language="en")
    blocks = _code_blocks(with_repository(render_model_card(facts), str(tmp_path)))
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        exec(block.replace('revision = "main"', "revision = None"), names)
    assert capsys.readouterr().out.splitlines() == ["The cat sleeps."] * 2


def test_a_card_gets_the_repository_to_which_it_is_pushed():
    card = render_model_card(changed())
    moved = with_repository(card, "me/model")
    assert 'repository = "heed-tiny-ko-en"' in card
    assert 'repository = "me/model"' in moved
    assert with_repository(moved, "heed-tiny-ko-en") == card
