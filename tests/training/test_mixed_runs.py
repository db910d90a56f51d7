"""Several corpora, languages and tags in one model, and what the guide says of them, through the real commands."""

import json
import re
from pathlib import Path

import pytest
import yaml

from guides import commands_of, run_commands, text_of
from heedful import TokenizerPair
from heedful.data.sources import read_pairs
from heedful.training.preparation import prepare_corpus
from heedful.training.recipe_file import make_recipe, read_recipe
from helpers import assert_error, assert_refused
from tiny_runs import logged, tiny_recipe, tiny_tree

EN = ["A dog.", "A cat.", "Two men.", "A girl sings.", "The red car.", "Snow falls."]
DE = ["Ein Hund.", "Eine Katze.", "Zwei Männer.", "Ein Mädchen singt.", "Das rote Auto.", "Es schneit."]
FR = ["Un chien.", "Un chat.", "Deux hommes.", "Une fille chante."]


def section(title: str) -> str:
    guides = "".join(map(text_of, ("several_corpora", "backtranslate", "low_resource")))
    return re.search(rf"^## {title}\n(.*?)^##? ", guides, re.MULTILINE | re.DOTALL)[1]


def table(path, sources, targets, names=("en", "de")):
    rows = [names, *zip(sources, targets, strict=True)]
    Path(path).write_text("".join(f"{source}\t{target}\n" for source, target in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """The guide's files in the working directory; writes a recipe of what it says of them, or of the first alone."""
    monkeypatch.chdir(tmp_path)
    for name, number in (("train", 0), ("validation", 5)):
        for language, texts in (("en", EN), ("de", DE)):
            Path(f"{name}.{language}").write_text("\n".join(texts[number : number + 5] * 2) + "\n", encoding="utf-8")
    table("french.tsv", EN[:4], FR, ("en", "fr"))
    table("french-test.tsv", EN[:2], FR[:2], ("en", "fr"))
    made = [{"source": f"Made {number}.", "target": text} for number, text in enumerate([*DE, "Neu."])]
    Path("made.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in made), encoding="utf-8")
    (text,) = re.findall("```yaml\n(.*?)```", section("Several corpora in one model"), re.DOTALL)
    tree = tiny_tree(tmp_path, {"optimization.max_updates": 8, "optimization.learning_rate": 0.01})
    tree |= {"name": "pairs", "output": "runs/pairs", **yaml.safe_load(text)}
    tree["tokenizer"]["vocab_size"] = 300

    def recipe(path="pairs.yaml", is_first_alone=True, **changes):
        keys = ("train", "validation", "source", "target") if is_first_alone else tree["data"]
        found = {**tree, "data": {key: tree["data"][key] for key in keys}, **changes}
        kept = {key: value for key, value in found.items() if value}
        Path(path).write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")

    return recipe


def test_the_guides_second_recipe_goes_on_from_the_model_of_the_first_and_its_commands_run(corpora, printed):
    part = section("One run after another")
    (text,) = re.findall("```yaml\n(.*?)```", part, re.DOTALL)
    corpora()
    corpora("one.yaml", tokenizer=None, **yaml.safe_load(text))
    few = " optimization.max_updates=2 optimization.warmup_updates=1 optimization.tokens_per_update=300"
    both, *uses = commands_of(section("Both directions in one model"))
    run_commands(printed, [both + few, *uses, *(command + few for command in commands_of(part))])
    card = Path("runs/both/model/README.md").read_text(encoding="utf-8")
    assert "| of these data.train | 10 |\n| of these data.mixture.back | 10 |" in card
    assert set(TokenizerPair.from_pretrained("runs/one/model").languages) == {"de", "en"}
    assert all(len(logged(Path("runs") / name, "update")) for name in ("both", "one"))


def test_the_guides_commands_make_a_model_of_several_corpora_and_languages(corpora, printed, refused):
    corpora(is_first_alone=False)
    told = printed("train", "pairs.yaml", "--dry-run")
    assert "of data.train 10\n  of data.mixture.synthetic 6\n  of data.mixture.french 4\n" in told
    outputs = run_commands(printed, commands_of(section("Several corpora in one model")))
    assert [command.split()[0] for command in outputs] == ["train", "translate", "evaluate"]
    assert [*outputs.values()][2].startswith("2 pairs")
    card = Path("runs/pairs/model/README.md").read_text(encoding="utf-8")
    # The sixth German text is the validation's target, so the pair that was made for it is dropped.
    for line in ("train | 20 |", "of these data.train | 10 |", "of these data.mixture.synthetic | 6 |", "overlap | 1"):
        assert f"| {line}" in card
    assert all(f"- `{name}`" in card for name in ("made.jsonl", "french.tsv"))
    assert set(TokenizerPair.from_pretrained("runs/pairs/model").languages) == {"de", "fr"}
    assert "`--to` must be one of" in refused("translate", "runs/pairs/model", "A dog.", "--to", "cs")
    assert logged(Path("runs/pairs"), "update")[-1] == 8


def test_the_guides_commands_diversify_and_make_noise(corpora, printed):
    corpora()
    Path("texts.jsonl").write_text('{"en": "Two dogs."}\n{"en": "The red cat."}\n', encoding="utf-8")
    titles = ("More pairs out of the same pairs", "Texts in the source language", "Noise that users make")
    assert len(run_commands(printed, [command for title in titles for command in commands_of(section(title))])) == 8
    assert [pair["source"] for pair in read_pairs("chosen.jsonl", "en", "de")] == ["Two dogs.", "The red cat."]
    assert len(Path("forward.de").read_text(encoding="utf-8").splitlines()) == 10
    assert {pair["target"] for pair in read_pairs("backward.jsonl", "source", "target")} <= set(DE)
    card = Path("runs/diverse/model/README.md").read_text(encoding="utf-8")
    assert "| of these data.train | 5 |" in card  # each was there twice
    assert "| duplicate |" in card
    assert read_recipe("runs/noisy/recipe.yaml").data.augmentation.joined == 0.1


@pytest.fixture
def parts(tmp_path):
    """Change a tiny recipe of five pairs with a part of four, and prepare it."""
    train = table(tmp_path / "train.tsv", EN[:5], DE[:5])
    changes = {"data.train": train, "data.validation": table(tmp_path / "validation.tsv", EN[5:], DE[5:])}
    changes |= {"data.source": "en", "data.target": "de", "tokenizer.vocab_size": 280}

    def prepare(mixture=None, **more):
        recipe = tiny_recipe(tmp_path / "run", {"data.mixture": mixture or {}, **changes, **more})
        return prepare_corpus(recipe, tmp_path / f"tokenizer{len(list(tmp_path.iterdir()))}"), recipe

    return prepare


def sources_of(corpus, epoch=0):
    decode = corpus.tokenizers.source.decode
    rows = [row for update in corpus.training.updates(epoch) for bucket in update for row in bucket]
    return sorted(decode(row["input_ids"]).removesuffix("</s>") for row in rows)


def test_a_part_with_exchanged_columns_makes_a_model_of_both_directions_also_from_a_stream(parts, tmp_path):
    back = {"train": str(tmp_path / "train.tsv"), "source": "de", "target": "en", "to": "en"}
    tagged = {"train": table(tmp_path / "few.tsv", EN[:3], DE[:3]), "tag": "bt"}
    corpora = [parts({"back": back, "tagged": tagged}, **{"data.streaming": each})[0] for each in (False, True)]
    for corpus in corpora:
        assert (corpus.target_language, len(corpus.validation)) == ("de", 1)
        assert set(corpus.tokenizers.languages) == {"de", "en"}
        rows = [row["labels"] for update in corpus.training.updates(0) for bucket in update for row in bucket]
        assert sorted(corpus.tokenizers.decode_target(rows)) == sorted([*EN[:5], *DE[:5], *DE[:3]])
        assert [source[:5] for source in sources_of(corpus)] == ["<2de>"] * 8 + ["<2en>"] * 5
        assert sum("<bt>" in source for source in sources_of(corpus)) == 3
    assert list(corpora[0].training.parts.values()) == [5, 5, 3]


def test_pairs_that_are_held_out_are_of_the_first_part_and_in_none(parts, tmp_path):
    back = {"train": str(tmp_path / "train.tsv"), "source": "de", "target": "en", "to": "en"}
    corpus, _ = parts({"back": back}, **{"data.validation": None})
    (held,) = corpus.validation_pairs
    assert held["source"] in EN
    assert corpus.training.parts == {"data.train": 4, "data.mixture.back": 4}
    assert not any(held[side] in source for side in ("source", "target") for source in sources_of(corpus))


def test_held_out_texts_are_dropped_from_every_part_and_duplicates_of_other_parts_too(parts, tmp_path):
    sources, targets = [EN[5], "Made.", DE[5], EN[0], "Gut."], ["Neu.", DE[5], "New.", DE[0], "Well."]
    part = {"held": {"train": table(tmp_path / "held.tsv", sources, targets)}}
    corpus, _ = parts(part, **{"data.cleaning.drop_duplicates": True})
    assert corpus.report.to_dict()["dropped"] == {"overlap": 3, "duplicate": 1}
    assert corpus.training.parts == {"data.train": 5, "data.mixture.held": 1}


PART = {"train": "b.tsv"}
MIXED = {"data.mixture": {"a": PART}}
WRONG = [
    ({"data.temperature": 2.0}, r"`data.temperature` must be 1 without a `data.mixture`, but is 2.0"),
    ({"data.temperature": 0.5, "data.mixture": {"a": PART}}, r"`data.temperature` must be at least 1, but is 0.5"),
    ({"data.mixture": {"a": {}}}, r"`data.mixture.a.train` must be given, but is missing"),
    ({"data.mixture": {"a": {**PART, "tags": "x"}}}, r"`data.mixture.a.tags` is not a key .* `data.mixture.a.tag`"),
    ({"data.mixture": [PART]}, r"`data.mixture` must be a mapping"),
    ({"data.mixture": {"a": {**PART, "target": "fr"}}}, r"`data.mixture.a.to` must be given if the target is fr"),
    ({"data.mixture": {"a": {**PART, "to": "a b"}}}, r"`data.mixture.a.to` must be a language code"),
    ({"data.mixture": {"a": {**PART, "to": "fr"}}, "data.target": "the text"}, r"`data.target` must be a language"),
    *[
        ({"data.mixture": {"a": {**PART, "tag": tag}}}, rf"`data.mixture.a.tag` must be letters, .* but is '{tag}'")
        for tag in ("unk", "2de", "b>t", "mask", "denoise", "extra_id_7")
    ],
    ({**MIXED, "data.validation": None, "data.source": "a,b"}, r"`data.validation` must be given if `data.mixture`"),
    ({"data.both_directions": True}, r"`data.both_directions` is not a key .*did you mean `data.mixture`"),
    ({"data.augmentation": {"joined": 0.1}, "data.streaming": True}, r"`data.streaming` must be false"),
    ({"data.augmentation": {"typo": 0.1}}, r"`data.augmentation.typo` is not a key .* `data.augmentation.typos`"),
    ({"data.mixture": {"a": PART}, "tokenizer.sentences": 9}, r"`tokenizer.sentences` must be empty if"),
]


def test_wrong_mixtures_are_refused_by_name_before_anything_is_read():
    assert_refused(WRONG, lambda changes: make_recipe(tiny_tree("x", changes)))


def test_an_empty_part_is_named(parts, tmp_path):
    path = tmp_path / "none.tsv"
    empty, missing = ({"none": {"train": str(tmp_path / name)}} for name in ("none.tsv", "no.tsv"))
    for rows, mixture, error, message in (
        ([(" ", " ")], empty, ValueError, "`data.mixture.none` must hold pairs to train on, but cleaning"),
        ([], empty, ValueError, "none.tsv must hold at least one row, but is empty"),
        ([], missing, FileNotFoundError, "`data.mixture.none` must be a file that exists, but .*no.tsv does not"),
    ):
        table(path, *([*zip(*rows, strict=True)] or ([], [])))
        assert_error(message, parts, mixture, error=error)
