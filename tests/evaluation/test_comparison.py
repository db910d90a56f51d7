"""Systems compared: sacrebleu's tests, seeds, sentences won and lost, and `heedful compare`."""

import copy
import json
import os
import random
import re
import unicodedata
from pathlib import Path
from statistics import mean, stdev

import pytest
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.significance import PairedTest

from heedful import Translator, compare_translations
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.engines import Translation
from heedful.evaluation.comparison import ComparisonSettings, comparison_table
from heedful.evaluation.metrics import METRICS
from helpers import assert_refused, untrained_folder
from memorised import PAIRS, memorised_model, saved_in
from tiny_runs import table_file

WORDS = ["the", "cat", "a", "dog", "sees", "runs", "in", "park", "and", "she", "reads", "no", "books", "today"]
QUICK = ComparisonSettings(resamples=100, trials=200, seed=7)


@pytest.fixture(scope="module")
def references() -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 12))).capitalize() + "." for _ in range(40)]


def damaged(texts: list[str], share: float, seed: int) -> list[str]:
    """Return translations in which some words are others."""
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) if draw.random() < share else word for word in text.split()) for text in texts]


@pytest.fixture(scope="module")
def systems(references) -> dict[str, list[list[str]]]:
    shares = {"baseline": 0.3, "alike": 0.27, "better": 0.1}
    return {name: [damaged(references, share, seed)] for seed, (name, share) in enumerate(shares.items())}


def test_scores_intervals_and_p_values_are_those_of_sacrebleu(systems, references, monkeypatch):
    found = compare_translations(systems, references, references, QUICK)
    named = [(name, texts) for name, (texts,) in systems.items()]
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    for kind, test, samples in (("bs", "bootstrap", 100), ("ar", "randomization", 200)):
        metrics = {name: make() for name, make in {"bleu": BLEU, "chrf": CHRF, "ter": TER}.items()}
        _, theirs = PairedTest(named, metrics, [references], kind, samples)()
        for name, title in {"bleu": "BLEU", "chrf": "chrF2", "ter": "TER"}.items():
            for (system, _), expected in zip(named, theirs[title], strict=True):
                ours = found["systems"][system][name]
                assert ours["score"] == pytest.approx(expected.score, rel=1e-6)
                # sacrebleu counts no trial whose difference is as large as the systems', as TER often has it.
                if (test, name) == ("randomization", "ter") and expected.p_value:
                    assert expected.p_value <= ours["randomization_p"] < expected.p_value + 0.1
                else:
                    assert ours.get(f"{test}_p") == expected.p_value
                if expected.ci:
                    middle, width = sum(ours["interval"]) / 2, ours["interval"][1] - ours["interval"][0]
                    assert (middle, width) == pytest.approx((expected.mean, 2 * expected.ci), rel=1e-4)
    better, alike = found["systems"]["better"]["chrf"], found["systems"]["alike"]["chrf"]
    assert max(better["bootstrap_p"], better["randomization_p"]) < 0.02
    assert min(alike["bootstrap_p"], alike["randomization_p"]) > 0.05
    assert better["difference"] == better["score"] - found["systems"]["baseline"]["chrf"]["score"]
    assert "seed:7" in found["bleu_signature"]
    assert os.environ["SACREBLEU_SEED"] == "7"


def test_what_differs_in_one_sentence_or_in_none_is_not_significant_and_exact_matches_are_tested_too(references):
    one = [*references[:-1], "Something else."]
    found = compare_translations({"a": [references], "b": [one], "c": [references]}, references, references, QUICK)
    for metric in ("bleu", "chrf", "ter", "exact_match"):
        values, same = (found["systems"][name][metric] for name in "bc")
        assert values["randomization_p"] == 1.0
        assert values["bootstrap_p"] > 0.05
        assert (same["difference"], same["bootstrap_p"], same["randomization_p"]) == (0, 1.0, 1.0)
    none, half = ["?"] * 40, [*references[:20], *["?"] * 20]
    found = compare_translations({"none": [none], "half": [half]}, references, references, QUICK)
    values = found["systems"]["half"]["exact_match"]
    assert (values["score"], values["difference"]) == (50.0, 50.0)
    assert (values["bootstrap_p"], values["randomization_p"]) == pytest.approx((1 / 101, 1 / 201))
    assert values["interval"][0] < 50 < values["interval"][1] < 70


def test_all_that_is_right_counts_and_what_is_ignored_does_not(references):
    numbered = [f"{text} {number}" for number, text in enumerate(references)]
    accepted = [["Nothing.", text] if number % 2 else [text] for number, text in enumerate(references)]
    settings = ComparisonSettings(resamples=40, trials=40, ignore=r"\d+", examples=1)
    systems = {"same": [numbered], "other": [["Nothing. 7"] * 40]}
    found = compare_translations(systems, accepted, references, settings)
    same, other = (found["systems"][name] for name in systems)
    assert (same["exact_match"]["score"], same["token_error_rate"]["score"]) == (100, 0)
    assert other["exact_match"]["score"] == 50
    assert all("nrefs:var" in found[f"{name}_signature"] for name in ("bleu", "exact_match"))
    assert found["settings"]["ignore"] == r"\d+"
    (example, *_) = other["examples"]
    assert example["other"]["text"] == "Nothing."
    assert example["reference"] == " / ".join(accepted[example["number"] - 1])
    told = comparison_table(found).splitlines()
    assert told[1] == r"Matches of \d+ are removed from predictions and references before scoring."
    alone = compare_translations(systems, references, references, settings)
    assert alone["systems"]["other"]["exact_match"]["score"] == 0


def test_several_seeds_are_compared_by_the_mean_of_their_scores(references):
    seeds = {name: [damaged(references, share, seed) for seed in range(3)] for name, share in (("a", 0.3), ("b", 0.1))}
    found = compare_translations(seeds, references, references, QUICK)["systems"]["b"]
    scores = [CHRF().corpus_score(texts, [references]).score for texts in seeds["b"]]
    assert found["chrf"]["scores"] == pytest.approx(scores)
    assert found["chrf"]["score"] == pytest.approx(mean(scores))
    assert found["chrf"]["deviation"] == pytest.approx(stdev(scores))
    low, high = found["chrf"]["interval"]
    assert low < mean(scores) < high
    # Equal seeds are one; their number need not be the same.
    alone, repeated = (
        compare_translations({"a": seeds["a"][:1] * a, "b": seeds["b"][:1] * b}, references, references, QUICK)[
            "systems"
        ]["b"]
        for a, b in ((1, 1), (2, 3))
    )
    for metric in ("bleu", "chrf", "ter", "exact_match"):
        assert repeated[metric]["deviation"] == pytest.approx(0)
        for key in ("score", "difference", "bootstrap_p", "randomization_p"):
            assert alone[metric][key] == pytest.approx(repeated[metric][key])


def test_sentences_won_and_lost_are_counted_and_the_most_telling_are_shown(references):
    right = ["The cat sleeps.", "It rains.", "She reads a book.", "Yes."]
    baseline = ["The cat sleeps.", "It pours.", "She", "Yes."]
    other = ["A dog runs.", "It rains.", "She reads a look.", "Yes."]
    settings = ComparisonSettings(resamples=40, trials=40, examples=1)
    systems, sources = {"old": [baseline], "new": [other]}, ["Eins.", "Zwei.", "Drei.", "Vier."]
    found = compare_translations(systems, right, sources, settings)
    new = found["systems"]["new"]
    assert (new["wins"], new["losses"], new["ties"]) == (2, 1, 1)
    assert [example["number"] for example in new["examples"]] == [2, 1]
    lost = new["examples"][1]
    assert (lost["source"], lost["reference"]) == ("Eins.", "The cat sleeps.")
    chrf = CHRF().sentence_score("A dog runs.", ["The cat sleeps."]).score
    assert lost["new"] == {"text": "A dog runs.", "chrf": pytest.approx(chrf)}
    assert lost["old"] == {"text": "The cat sleeps.", "chrf": pytest.approx(100)}
    told = comparison_table(found)
    assert "new against old, by sentence chrF: 2 better, 1 worse, 1 equal" in told
    assert "A dog runs." in told
    moved = references[1:] + references[:1]  # the same translations win nothing, whatever the number of seeds
    same = compare_translations({"a": [moved] * 2, "b": [moved] * 3}, references, references, settings)
    assert [same["systems"]["b"][key] for key in ("wins", "losses", "ties")] == [0, 0, len(references)]


def test_comparisons_that_cannot_be_made_are_refused(references):
    pair = {"a": [references], "b": [references]}
    no_seeds, fewer = "must be a list with each seed's list", references[:-1]
    cases = [
        (({"a": [references]}, references, references, QUICK), "`systems` must be at least two, but are 1"),
        ((pair, fewer, fewer, QUICK), "must be equally many, but are 40 predictions and 39 references"),
        ((pair, references, fewer, QUICK), "`references` must be at least two, and as many as `sources`"),
        (({"a": references, "b": [references]}, references, references, QUICK), no_seeds),
        (({"a": [], "b": [references]}, references, references, QUICK), no_seeds),
        (
            (pair, references, references, ComparisonSettings(ignore=".")),
            "`ignore` must leave some text in the references",
        ),
    ]
    assert_refused(cases, lambda given: compare_translations(*given))
    cases = [
        ({"resamples": 39}, "`resamples` must be at least 40"),
        ({"trials": 0}, "`trials` must be at least 40"),
        ({"seed": 0}, "`seed` must be at least 1"),
        ({"examples": -1}, "`examples` must be at least 0"),
        ({"tokenize": "morse"}, "`tokenize` must be one of"),
        ({"ignore": ")"}, r"`ignore` must be a regular expression, but is '\)'"),
    ]
    assert_refused(cases, lambda settings: ComparisonSettings(**settings))


@pytest.fixture
def place(tmp_path, references, systems, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path, [{"source": f"Satz {number}.", "target": text} for number, text in enumerate(references)])
    for name, (texts,) in systems.items():
        (tmp_path / f"{name}.txt").write_text("".join(text + "\n" for text in texts))
    untrained_folder(tmp_path / "model")
    return tmp_path


def write_pairs(folder, rows):
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


COMPARE = ["compare", "--data", "test.jsonl", "--resamples", "40", "--trials", "40"]


def test_the_command_compares_models_files_and_seeds_and_writes_all_of_it(printed, place, references, systems):
    arguments = ("baseline.txt", "model", "alike.txt,better.txt", "--max-new-tokens", 5, "-o", "found.json")
    output = printed(*COMPARE, *arguments)
    found = json.loads((place / "found.json").read_text())
    translator = Translator.from_pretrained(place / "model")
    sources = [f"Satz {number}." for number in range(len(references))]
    texts = [best.text.replace("\n", " ") for (best,) in translator.translate(sources, max_new_tokens=5)]
    both = [*systems["alike"], *systems["better"]]
    named = {"baseline.txt": systems["baseline"], "model": [texts], "alike.txt,better.txt": both}
    settings = ComparisonSettings(resamples=40, trials=40)
    expected = compare_translations(named, references, sources, settings)
    assert found == json.loads(json.dumps(expected))
    assert output == comparison_table(expected) + "\n"
    assert "± " in output
    assert json.loads(printed(*COMPARE, *arguments, "--json")) == found


def test_a_file_of_evaluates_predictions_has_the_scores_of_its_model(printed, place, monkeypatch):
    """Targets with line breaks, and predictions in NFD: `evaluate` and `compare` see the same texts."""
    rows = [json.loads(line) for line in (place / "test.jsonl").read_text().splitlines()]
    for row in rows:
        row["target"] = row["target"].replace(" ", "\n", 1) + " é"
    write_pairs(place, rows)
    right = [[Translation(text=unicodedata.normalize("NFD", row["target"]))] for row in rows]
    for name in ("translate", "translate_lines"):
        monkeypatch.setattr(Translator, name, lambda self, texts, **_: right[: len(texts)])
    settings = ["--data", "test.jsonl", "--bootstrap", 0, "--json", "--predictions", "p.txt"]
    scores = json.loads(printed("evaluate", "model", *settings))
    assert scores["exact_match"] == 100.0
    compared = json.loads(printed(*COMPARE, "p.txt", "model", "--json"))["systems"]
    for system in ("p.txt", "model"):
        assert {name: compared[system][name]["score"] for name in METRICS} == {name: scores[name] for name in METRICS}


def test_lines_of_json_are_translations_where_the_targets_are_json(printed, place):
    write_pairs(place, [{"source": str(number), "target": json.dumps({"on": number})} for number in range(3)])
    for name, number in (("one", 0), ("other", 1)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps({"on": i + number}) + "\n" for i in range(3)))
    systems = json.loads(printed(*COMPARE, "one.jsonl", "other.jsonl", "--json"))["systems"]
    assert [systems[name]["exact_match"]["score"] for name in ("one.jsonl", "other.jsonl")] == [100.0, 0.0]


def test_wrong_systems_are_told_before_a_model_is_loaded(refused, place, monkeypatch):
    monkeypatch.setattr(Translator, "from_pretrained", lambda *_: pytest.fail("a model was loaded"))
    (place / "short.txt").write_text("One.\n")
    (place / "long.txt").write_text("One.\n" * 41)
    (place / "bytes.txt").write_bytes(b"\xff\xfe" * 40)
    for arguments, message in (
        (["baseline.txt"], "The systems must be at least two different names, .* empty, but are baseline.txt"),
        (["baseline.txt", "baseline.txt"], "at least two different names"),
        (["baseline.txt", "alike.txt,"], "none of them empty, but are baseline.txt alike.txt, instead"),
        (["model", "short.txt"], "short.txt must hold .*: 40 lines for 40 pairs, .* has 1 instead: line 2 is"),
        (["model", "long.txt"], "long.txt must hold .* 40 pairs, but has 41 instead: line 41 has no pair"),
        (["model", "bytes.txt"], "must be a text file in UTF-8, but bytes.txt is not"),
        (["model", "test.jsonl"], "test.jsonl must hold translations, .* but line 1 is JSON"),
        (["model", "model/model.safetensors"], "must be a text file in UTF-8, but model/model.safetensors"),
        (["model", "nowhere/at/all"], "must be a folder with a model, or a model's id on the Hub"),
        (["baseline.txt", "alike.txt", "--num-beams", 2], "`--num-beams` must be left out if only files are given"),
        (["model", "alike.txt", "--references", "right"], "`right` must be a list .* missing instead in row 1 of"),
        (["model", "alike.txt", "--seed", 0], "`--seed` must be at least 1"),
        (["model", "alike.txt", "-o", "none/a.json"], "`--output` must lie in an existing folder"),
        (["model", "short.txt,alike.txt", "-o", "alike.txt"], "`--output` must not be an input file, but alike.txt"),
    ):
        assert re.search(message, refused(*COMPARE, *arguments)), message


def test_models_of_several_languages_are_compared_in_all_of_them_in_one_table(printed, refused, place):
    pair = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=270, languages=["ko", "en"])
    model = memorised_model(pair, PAIRS, "en")
    saved_in("before", model, pair)
    shaken = copy.deepcopy(model)
    shaken.lm_head.weight.data[80:90] = 0
    saved_in("after", shaken, pair)
    table_file(place / "en.tsv", [("source", "target"), *PAIRS.items()])
    table_file(place / "ko.tsv", [("source", "target"), *list(PAIRS.items())[:4]])
    Path("sources").write_text("".join(text + "\n" for text in PAIRS))
    Path("targets").write_text("".join(text + "\n" for text in PAIRS.values()))
    quick = ["--resamples", "40", "--trials", "40", "--max-new-tokens", 30]
    both = ["compare", "before", "after", "--data", "en=en.tsv", "--data", "ko=ko.tsv", *quick]
    found = json.loads(printed(*both, "--json"))
    alone = {
        language: json.loads(printed("compare", "before", "after", *data, "--to", language, *quick, "--json"))
        for language, data in {"en": ["--data", "sources", "--data", "targets"], "ko": ["--data", "ko.tsv"]}.items()
    }
    assert found == {"directions": alone}
    before, after = (alone["en"]["systems"][name]["chrf"] for name in ("before", "after"))
    assert (before["score"], after["difference"]) == (100, after["score"] - 100)
    assert after["difference"] < -5
    lines = printed(*both).splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [["en", "6"], ["ko", "4"]]
    for values in (after, alone["en"]["systems"]["after"]["bleu"]):
        expected = f"100.00 {values['score']:.2f} {values['difference']:+.2f} {values['bootstrap_p']:.4f}"
        assert expected in " ".join(lines[2].split())
    # A table with a column for each language, and two text files, which are one direction.
    table_file(place / "all.tsv", [("source", "ko", "en"), *((text, "", target) for text, target in PAIRS.items())])
    for data in (["en=all.tsv"], ["en=sources", "en=targets"]):
        files = [part for each in data for part in ("--data", each)]
        again = json.loads(printed("compare", "before", "after", *files, *quick, "--json"))
        assert again["directions"]["en"] == alone["en"]
    for arguments, message in (
        (["--data", "en=en.tsv", "--data", "ko.tsv"], "`--data` must name a language for each file"),
        (["--data", "en=en.tsv", "--to", "en"], "`--data` must name a language for each file, without `--to`"),
        (
            ["baseline.txt", "--data", "en=en.tsv"],
            "must be models if `--data` names languages, but baseline.txt is",
        ),
        (["--data", "en=en.tsv", "-o", "en.tsv"], "`--output` must not be an input file, but en.tsv is"),
        (["--data", "fr=en.tsv"], "`--data` must name languages of before .ko, en., but names fr"),
    ):
        assert re.search(message, refused("compare", "before", "after", *arguments)), message
