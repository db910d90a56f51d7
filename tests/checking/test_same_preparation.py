"""The doctor prepares a recipe's data as training does, so that the two cannot disagree."""

import logging
from collections import Counter
from random import Random

import pytest

from heedful.checking.doctor import diagnose
from heedful.training.model_of_recipe import make_model
from heedful.training.preparation import prepare_corpus
from heedful.training.start_checks import check_installed, check_start, faults
from tiny_runs import table_file, tiny_recipe


def refusal_of_training(recipe, folder):
    """Return the message with which a run ends before its first update, `None` if it begins."""
    try:
        check_installed(recipe.optimization, recipe.decoding.bleu_tokenizer, recipe.logging.trackers)
        corpus = prepare_corpus(recipe, folder)
        check_start(faults(recipe, corpus, make_model(recipe.model, corpus.tokenizers).config))
        list(corpus.training.updates(0))
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return None


# Errors of the doctor that ruin a run, or its scores, but do not keep it from beginning.
RUIN = {"schedule", "intervals", "decoding_lengths", "overlap", "scripts", "empty", "identical", "special_ids"}


def refusals_of_doctor(recipe):
    """Return what the doctor says that training refuses."""
    try:
        findings = diagnose(recipe).findings
    except (ValueError, FileNotFoundError) as error:
        return [str(error)]
    errors = [finding for finding in findings if finding.level == "error" and finding.check not in RUIN]
    refused = [each for each in errors if " drop " not in each.message and "are unknown" not in each.message]
    return ["\n".join([each.message, *each.examples]) for each in refused]


def test_what_training_leaves_out_of_a_test_and_what_it_holds_out_after_cleaning_is_no_error(tmp_path):
    words = [("one two", "eins zwei"), ("two one", "zwei eins"), ("one", "eins"), ("two", "zwei")]
    ignored = {
        "data.train": table_file(tmp_path / "train.tsv", words * 10),
        "data.validation": table_file(tmp_path / "validation.tsv", [("two two", "zwei zwei")]),
        "data.test": {"numbers": table_file(tmp_path / "test.tsv", [("one one", "eins 7")])},
        "tokenizer": {"algorithm": "word", "vocab_size": None, "joint": False},
        "decoding.ignore": "[0-9]",
    }
    rows = [(f"source {number}", f"target {number}") for number in range(100)]
    rows += [(f"long {number} " * 30, f"long {number}") for number in range(100)]
    cleaned = {"data.train": table_file(tmp_path / "long.tsv", rows), "data.validation": None}
    cleaned |= {"data.cleaning": {"max_ratio": 4}, "tokenizer.vocab_size": 300}
    cleaned |= {"model.options.position_encoding": "learned", "model.options.max_position_embeddings": 32}
    for name, changes in (("ignored", ignored), ("cleaned", cleaned)):
        recipe = tiny_recipe(tmp_path / "run", {**changes, "data.source": "1", "data.target": "2"})
        assert refusal_of_training(recipe, tmp_path / name) is None
        assert [finding for finding in diagnose(recipe).findings if finding.level == "error"] == []


WORDS = ["one", "two", "three", "four", "five", "7", "한글", "x"]
TOKENIZERS = [
    {"algorithm": "bpe", "vocab_size": 300},
    {"algorithm": "bpe", "vocab_size": 300, "joint": False},
    {"algorithm": "bpe", "vocab_size": 20},
    {"algorithm": "word", "vocab_size": None},
    {"algorithm": "word", "vocab_size": None, "joint": False},
    {"algorithm": "word", "vocab_size": 9},
    {"algorithm": "character", "vocab_size": None},
    {"algorithm": "character", "vocab_size": 270},
    {"algorithm": "character", "vocab_size": None, "joint": False, "target_algorithm": "word"},
]


def random_file(random, path, words, counts=(1, 3, 40, 40, 40)):
    """Write a table of pairs, in which some are empty, long or repeated; return its path, now and then of none."""
    rows = []
    for _ in range(random.choice(counts) if random.random() < 0.97 else 0):
        lengths = random.choice([(1, 1), (2, 3), (3, 2), (4, 4), (1, 9), (0, 2), (60, 2), (2, 60)])
        rows.append([" ".join(random.choices(words, k=length)) for length in lengths])
    return "nowhere.tsv" if random.random() < 0.02 else table_file(path, rows + rows[:2])


def random_recipe(random, folder):
    """Return a recipe of a random kind; a contradiction of its keys is a `ValueError`."""
    words = random.choice([WORDS, WORDS[:3], WORDS[:6]])
    held_out = random.choice([words, words, WORDS])
    changes = {
        "data.train": random_file(random, folder / "train.tsv", words, (2, 40, 40, 40, 80, 80)),
        "data.source": "1",
        "data.target": random.choice(["2", "2", "2", "2", "3"]) if random.random() < 0.2 else "2",
        "data.validation": random_file(random, folder / "v.tsv", held_out) if random.random() < 0.7 else None,
        "data.test": {
            name: random_file(random, folder / f"{name}.tsv", held_out) for name in random.choice(["", "a", "a", "ab"])
        },
        "data.streaming": random.random() < 0.25,
        "data.max_source_tokens": random.choice([None, 256, 256, 20, 4]),
        "data.max_target_tokens": random.choice([256, 256, 256, 20, 4]),
        "data.cleaning": {
            "drop_duplicates": random.random() < 0.3,
            "drop_identical": random.random() < 0.3,
            "drop_overlap": random.random() < 0.7,
            "max_ratio": random.choice([None, None, 3.0, 3.0, 1.0]),
        },
        "tokenizer": random.choice(TOKENIZERS),
        "decoding.ignore": random.choice([None] * 5 + ["[0-9]"] * 5 + ["."]),
        "decoding.num_beams": random.choice([1, 1, 1, 1, 1, 5, 280]),
        "validation.sentences": random.choice([0, 3]),
        "validation.max_new_tokens": random.choice([8, 24, 128]),
    }
    if random.random() < 0.25:
        part = {"train": random_file(random, folder / "part.tsv", words), "source": "2", "target": "1"}
        changes["data.mixture"] = {"more": part | random.choice([{}, {"tag": "bt"}, {"to": "de"}])}
        changes["data.temperature"] = random.choice([1.0, 1.0, 3.0])
    if random.random() < 0.2:
        changes["data.augmentation"] = random.choice([{"joined": 0.5}, {"typos": 0.5}, {"lower_case": 1.0}])
    if random.random() < 0.3:
        options = {"position_encoding": "learned", "max_position_embeddings": random.choice([24, 300])}
        changes |= {f"model.options.{name}": value for name, value in options.items()}
    if random.random() < 0.15:
        (folder / "texts.txt").write_text("\n".join(random.choices(words, k=20)), encoding="utf-8")
        changes["data.denoise"] = [str(folder / "texts.txt")]
    return tiny_recipe(folder / "run", changes)


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 220), marks=pytest.mark.slow)], ids=len)
def test_what_training_refuses_the_doctor_calls_an_error_and_nothing_else(seeds, tmp_path):
    verdicts = Counter()
    for seed in seeds:
        random, folder, recipe = Random(seed), tmp_path / str(seed), None
        folder.mkdir()
        while recipe is None:
            try:
                recipe = random_recipe(random, folder)
            except ValueError:  # reading it is refused, by whoever reads it
                verdicts["not read"] += 1
        refused, found = refusal_of_training(recipe, folder / "tokenizer"), refusals_of_doctor(recipe)
        assert bool(refused) == bool(found), (seed, refused, found)
        verdicts["refused" if refused else "begun"] += 1
        verdicts["same message"] += refused in found
    logging.getLogger(__name__).info("verdicts: %s", dict(verdicts))
    assert min(verdicts["refused"], verdicts["begun"]) > len(seeds) / 5
    # Of several mistakes the doctor may find another one first.
    assert verdicts["same message"] > 0.8 * verdicts["refused"]
