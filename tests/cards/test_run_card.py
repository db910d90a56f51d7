import json
import re
import shutil
from dataclasses import asdict, replace
from importlib.metadata import version

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from heedful.cards.model_card import CardFacts, render_model_card
from heedful.cards.run_card import facts_of, write_run_card
from heedful.data.sources import sample
from heedful.decoding.translation import Translator
from heedful.training.recipe import CardRecipe, ModelRecipe
from heedful.training.run import train
from tiny_runs import tiny_recipe

CHANGES = {
    "data.test": {"unseen": "builtin:test:6"},
    "optimization.max_updates": 2,
    "decoding.bootstrap": 40,
    "card.limits": "It has seen 300 sentences.",
    "card.intended_use": "Tests only.",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run; nobody may change its folder."""
    return train(tiny_recipe(tmp_path_factory.mktemp("finished") / "private", CHANGES))


@pytest.fixture
def result(finished, tmp_path):
    return replace(finished, folder=shutil.copytree(finished.folder, tmp_path / "model"))


def test_a_run_that_translates_nothing_publishes_a_model_and_a_card_that_do_not_speak_of_it(tmp_path):
    changes = {"optimization.max_updates": 2, "card.source_language": "zxx", "card.limits": None}
    result = train(tiny_recipe(tmp_path / "private", CHANGES | changes))
    assert [*json.loads((result.folder / "config.json").read_text())["custom_pipelines"]] == ["heed-text2text"]
    card = write_run_card(result).read_text(encoding="utf-8").split("The recipe:")[0]
    assert '[0]["generated_text"]' in card
    left = re.sub(r"[Tt]ranslator(\.translate)?|built-in Korean-English.*", "", card)
    assert re.findall(r".*[Tt]ranslat.*|.*[Ss]entence.*", left) == []


def test_scores_on_a_data_set_of_the_hub_are_left_as_the_hub_collects_them_and_no_others(result):
    scores = result.metrics["unseen"]
    file = result.folder / ".eval_results/heedful.yaml"
    write_run_card(result)
    assert not file.exists()
    data = replace(result.recipe.data, test={"unseen": "builtin:test:6", "news": "wmt/wmt14:de-en:test"})
    changed = replace(result, recipe=replace(result.recipe, data=data), metrics={**result.metrics, "news": scores})
    write_run_card(changed)
    (entry,) = parse_eval_result_entries(yaml.safe_load(file.read_text()))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("wmt/wmt14", "de-en", round(scores["bleu"], 2))
    assert entry.notes == f"BLEU {scores['bleu_signature']}"
    write_run_card(result)
    assert not file.exists()


def test_the_card_is_filled_from_the_run_and_tells_nothing_private(result):
    pytest.importorskip("matplotlib")
    path = write_run_card(result)
    text = path.read_text(encoding="utf-8")
    told = [
        *("# tiny", "Tests only.", "It has seen 300 sentences.", "`builtin:train:300`"),
        *("1 + 1 layers", "400 byte-level"),
        *("| optimization.learning_rate | 0.003 |", "| unseen | 6 |", f"| Updates | {result.progress.update} |"),
        *(f"| Target tokens seen | {result.progress.target_tokens:,} |", f"| {result.parameters:,} |"),
        *(sample(result.corpus.validation_pairs, 1)[0]["source"], f"heedful {version('heedful')}"),
        *("![Losses and scores over the updates](learning_curve.png)", f"{result.metrics['validation']['loss']:.4f}"),
    ]
    assert [each for each in told if each not in text] == []
    data = ModelCard.load(path).data
    assert (data.license, set(data.language)) == ("apache-2.0", {"ko", "en"})
    assert str(result.recipe.folder) not in text
    assert "private" not in text
    assert (result.folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    nowhere = replace(result, recipe=replace(result.recipe, output="nowhere"))
    assert "learning_curve" not in write_run_card(nowhere).read_text(encoding="utf-8")


def test_facts_are_the_runs(result):
    facts = facts_of(result)
    run, recipe = facts.run, facts.run["recipe"]
    assert run["pairs"] == {"train": result.corpus.training.pairs, "validation": 20, "unseen": 6}
    assert run["target_tokens"] == result.progress.target_tokens > 0
    assert set(facts.scores) == {"unseen"}
    assert {"output", "card", "resume", "overwrite"}.isdisjoint(recipe)
    assert "folder" not in recipe["data"]
    kept = json.loads(json.dumps(asdict(facts)))  # as `scripts/upkeep/model_card.py` does
    assert render_model_card(CardFacts(**kept)) == render_model_card(facts)
    example = run["example"]
    said = Translator.from_pretrained(result.folder).translate([example["source"]])[0][0].text
    assert example["translation"] == said


def test_what_the_recipe_says_goes_before_what_is_guessed_and_the_vocabulary_is_described_as_it_was_made(result):
    card = CardRecipe(license="mit", source_language="ja", target_language="de", dataset="someone/pairs")
    facts = facts_of(replace(result, recipe=replace(result.recipe, card=card)))
    assert (facts.license, facts.source_language, facts.target_language) == ("mit", "ja", "de")
    assert facts.datasets == ["someone/pairs"]
    data = replace(result.recipe.data, train="mine.tsv", source="command", target="actions")
    pairs = [{"source": str(number), "target": "GO STOP"} for number in range(20)]
    given = {"recipe": replace(result.recipe, data=data, card=CardRecipe())}
    facts = facts_of(replace(result, corpus=replace(result.corpus, validation_pairs=pairs), **given))
    # Unknown licenses and languages are not made up.
    assert (facts.license, facts.source_language, facts.target_language) == ("unknown", "und", "und")
    assert facts.run["sides"] == ["command", "actions"]
    for changes, said in (({"algorithm": "word"}, "400 words for both sides"), ({"path": "x"}, "a given tokenizer")):
        tokenizer = replace(result.recipe.tokenizer, **changes)
        assert said in facts_of(replace(result, recipe=replace(result.recipe, tokenizer=tokenizer))).vocabulary
    further = facts_of(replace(result, recipe=replace(result.recipe, model=ModelRecipe(start_from="x"))))
    assert further.license == "unknown"  # of what the first model learned from, the recipe says nothing
    assert "a given tokenizer" in further.vocabulary


def test_a_stream_of_two_vocabularies_without_a_test_set_is_described(tmp_path):
    changes = {"tokenizer.joint": False, "tokenizer.target_vocab_size": 380, "validation.sentences": 7}
    changes |= {"data.streaming": True, "data.pool_size": 50, "optimization.max_updates": 2}
    result = train(tiny_recipe(tmp_path / "run", changes))
    facts = facts_of(result)
    assert facts.vocabulary == "400 byte-level BPE pieces for the source, 380 for the target"
    assert facts.run["joint_vocabulary"] is False
    # The validation pairs are scored.
    assert facts.run["pairs"] == {"train": 300, "validation": 20}
    assert facts.scores["validation"]["count"] == 7
    assert result.metrics["validation"]["chrf"] == facts.scores["validation"]["chrf"]
    assert "loss" not in facts.scores["validation"]
    assert "validation" in write_run_card(result).read_text(encoding="utf-8")
