"""`heedful doctor` on recipes that are sound, and on recipes with one thing wrong."""

import json

import pytest
import yaml
from accelerate.state import AcceleratorState

from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.data.tokenizer_training import train_tokenizers
from heedful.diagnosis.doctor import LEVELS, Diagnosis, diagnose
from heedful.diagnosis.findings import RecipeFinding, graded, percent
from heedful.training.recipe_file import read_recipe
from helpers import tiny_config
from tiny_runs import tiny_recipe, tiny_tree

# A run that validates, saves and passes over its pairs as often as it should; the tokenizer is small enough.
SOUND = {
    "data.train": "builtin:train:600",
    "tokenizer.vocab_size": 300,
    "optimization.max_updates": 60,
    "validation.every_updates": 20,
    "checkpoints.every_updates": 20,
    "decoding.max_length": 128,
}


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Forget the precision of earlier runs in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def severe(tmp_path):
    """Diagnose the sound recipe with changes; return level, check and key of all but notes."""

    def check(changes=None, limit=100_000):
        recipe = tiny_recipe(tmp_path / "run", {**SOUND, **(changes or {})})
        diagnosis = diagnose(recipe, limit)
        assert not (tmp_path / "run").exists()
        return [(f.level, f.check, f.where) for f in diagnosis.findings if f.level != "note"]

    return check


def corpus(folder, pairs, name="pairs"):
    """Write pairs as a file, and return what a recipe calls it."""
    path = folder / f"{name}.jsonl"
    rows = [json.dumps({"ko": source, "en": target}, ensure_ascii=False) for source, target in pairs]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(path)


PAIRS = [(pair["ko"], pair["en"]) for pair in korean_english_pairs("train", 600)]


def test_a_sound_recipe_has_nothing_severe(severe):
    assert severe() == []


@pytest.mark.parametrize("name", ["quickstart", "ko-en", "multi30k-de-en", "scan"])
def test_shipped_recipes_have_no_error(name, tmp_path):
    overrides = {
        "quickstart": ["data.train=builtin:train:900", "tokenizer.vocab_size=600"],
        # Their own corpora are not here: what is checked are their keys.
        "ko-en": ["tokenizer.vocab_size=600", "data.source=ko"],
        "multi30k-de-en": ["tokenizer.vocab_size=600", "model.config=null", "card.source_language=null"],
        "scan": ["tokenizer.vocab_size=4000"],
    }[name]
    if name != "quickstart":
        where = "{train: 'builtin:train:900', validation: 'builtin:validation:50', test: {a: 'builtin:test:50'}}"
        places = yaml.safe_load(where)
        overrides += [f"data.{key}={json.dumps(value)}" for key, value in places.items()]
        overrides += ["data.folder=null", "data.source=ko", "data.target=en"]
    overrides += [f"output={tmp_path / 'run'}", "optimization.max_minutes=null", "optimization.max_updates=3000"]
    diagnosis = diagnose(read_recipe(name, overrides))
    assert [finding for finding in diagnosis.findings if finding.level == "error"] == []
    assert diagnosis.looked_at == diagnosis.total == 900


BROKEN = {
    "too large": ({"model.options.d_model": 10**9}, ("error", "model", "model.options")),
    "beams": ({"decoding.num_beams": 500}, ("error", "model", "decoding.num_beams")),
    "scores": ({"decoding.bleu_tokenizer": "13b"}, ("error", "installed", "decoding.bleu_tokenizer")),
    "references": ({"decoding.ignore": "."}, ("error", "references", "decoding.ignore")),
    "warm-up": ({"optimization.warmup_updates": 4000}, ("error", "schedule", "optimization.warmup_updates")),
    "vocabulary": ({"tokenizer.vocab_size": 90000}, ("warning", "tokenizer", "tokenizer.vocab_size")),
    "too short": ({"data.max_source_tokens": 3}, ("error", "lengths", "data.max_source_tokens")),
    "ids": ({"model.options.pad_token_id": 7}, ("error", "model", "model.options.pad_token_id")),
    "heads": ({"model.options.encoder_attention_heads": 5}, ("error", "model", "model")),
    "cut off": ({"decoding.max_length": 3}, ("error", "decoding_lengths", "decoding.max_length")),
    "characters": ({"data.cleaning.max_characters": 1}, ("error", "cleaning", "data.cleaning")),
    "huge update": (
        {"optimization.tokens_per_update": 10**6},
        ("warning", "epochs", "optimization.tokens_per_update"),
    ),
    "never validated": ({"validation.every_updates": 61}, ("warning", "intervals", "validation.every_updates")),
    "positions": (
        {"model.options.position_encoding": "learned", "model.options.max_position_embeddings": 4},
        ("error", "positions", "data.train"),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_named_by_its_key(severe, name):
    changes, expected = BROKEN[name]
    assert expected in severe(changes)


def test_a_test_set_that_is_trained_on_is_an_error(severe):
    changes = {"data.test": {"leak": "builtin:train:40"}, "data.cleaning": {"drop_overlap": False}}
    assert ("error", "overlap", "data.test.leak") in severe(changes)
    assert severe({**changes, "data.cleaning": {"drop_overlap": True}}) == []


def test_swapped_validation_files_are_an_error(severe, tmp_path):
    pairs = corpus(tmp_path, [(target, source) for source, target in PAIRS[:30]])
    assert ("error", "scripts", "data.validation") in severe({"data.validation": pairs})


def test_broken_pairs_are_named_by_the_row_of_their_file(tmp_path):
    pairs = [*PAIRS[:300], (PAIRS[0][0], "A lost letter: \ufffd"), *PAIRS[300:]]
    recipe = tiny_recipe(tmp_path / "run", {**SOUND, "data.train": corpus(tmp_path, pairs)})
    (finding,) = (f for f in diagnose(recipe).findings if f.check == "replacement_characters")
    assert finding.examples[0].startswith("train row 301: ")


def test_row_numbers_are_the_files_although_cleaning_drops_rows_before(tmp_path):
    pairs = [("", "Empty."), *PAIRS[:9], ("종", "A bell: \x07"), *PAIRS[9:]]
    recipe = tiny_recipe(tmp_path / "run", {**SOUND, "data.train": corpus(tmp_path, pairs)})
    found = {finding.check: finding for finding in diagnose(recipe).findings}
    assert found["cleaning"].examples[0].startswith("train row 1: ")
    assert found["control_characters"].examples[0].startswith("train row 11: ")


def test_a_given_tokenizer_that_does_not_know_the_words_is_an_error(severe, tmp_path):
    foreign = [f"Wort{number}" for number in range(50)]
    train_tokenizers(foreign, foreign, vocab_size=None, algorithm="word").save_pretrained(tmp_path / "words")
    found = severe({"tokenizer.path": str(tmp_path / "words")})
    assert ("error", "unknown_tokens", "data.validation") in found


def test_a_model_to_start_from_is_checked_with_its_tokenizer(severe, tmp_path):
    from heedful import HeedForConditionalGeneration

    sources, targets = zip(*PAIRS, strict=True)
    train_tokenizers(sources, targets, vocab_size=300).save_pretrained(tmp_path / "model")
    model = HeedForConditionalGeneration(tiny_config(vocab_size=300))
    model.save_pretrained(tmp_path / "model")
    start = {"model.options": {}, "model.start_from": str(tmp_path / "model")}
    assert severe(start) == []
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 9}))
    assert severe(start) == [("error", "special_ids", "model.start_from")]
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 9}))
    assert severe(start) == [("error", "model", "model.start_from")]


def test_a_clock_that_ends_the_run_before_its_schedule_is_a_warning(severe):
    changes = {"optimization.schedule": "linear", "optimization.max_minutes": 0.02, "optimization.max_updates": 10**6}
    found = severe({**changes, "optimization.warmup_updates": 1, "validation.every_updates": 1})
    assert ("warning", "schedule", "optimization.max_updates") in found


def test_a_recipe_for_another_machine_can_be_checked_but_for_its_speed(tmp_path):
    changes = {"optimization.device": "auto", "optimization.mixed_precision": "fp16", "optimization.max_minutes": 5}
    diagnosis = diagnose(tiny_recipe(tmp_path / "run", {**SOUND, **changes}))
    assert not diagnosis.has_errors
    (finding,) = (finding for finding in diagnosis.findings if finding.check == "speed")
    assert (finding.level, finding.where) == ("note", "optimization.max_minutes")
    assert "`optimization.mixed_precision` must be no or bf16 on the CPU" in finding.message


def test_only_the_first_pairs_are_looked_at_where_there_are_more(tmp_path):
    recipe = tiny_recipe(tmp_path / "run", SOUND)
    diagnosis = diagnose(recipe, limit=400)
    assert (diagnosis.looked_at, diagnosis.total) == (400, 600)
    assert "only the first 400 of 600 training pairs" in str(diagnosis)


def test_a_vocabulary_that_all_pairs_cannot_fill_is_a_warning(severe):
    changes = {"tokenizer.vocab_size": 5000}
    assert ("warning", "tokenizer", "tokenizer.vocab_size") not in severe(changes, limit=300)
    assert ("warning", "tokenizer", "tokenizer.vocab_size") in severe(changes)


def test_epochs_are_of_the_whole_corpus_although_its_beginning_is_looked_at(tmp_path):
    changes = {**SOUND, "optimization.max_updates": 4000, "optimization.tokens_per_update": 3000}

    def told(count):
        recipe = tiny_recipe(tmp_path / "run", {**changes, "data.train": f"builtin:train:{count}"})
        return [finding.message for finding in diagnose(recipe, limit=300).findings if finding.check == "epochs"]

    assert len(told(300)) == 1
    assert told(30000) == []


def test_a_stream_is_looked_at_as_far_as_asked(tmp_path):
    pairs = corpus(tmp_path, PAIRS)
    recipe = tiny_recipe(tmp_path / "run", {**SOUND, "data.train": pairs, "data.streaming": True})
    diagnosis = diagnose(recipe, limit=500)
    assert (diagnosis.looked_at, diagnosis.total) == (500, None)
    assert not diagnosis.has_errors
    assert "only the first 500 training pairs" in str(diagnosis)
    assert diagnose(recipe).total == 600


def test_validation_pairs_that_training_holds_out_are_looked_at_too(tmp_path):
    changes = {**SOUND, "data.train": corpus(tmp_path, PAIRS[:100]), "data.validation": None}
    diagnosis = diagnose(tiny_recipe(tmp_path / "run", changes))
    assert diagnosis.looked_at == diagnosis.total == 100
    assert not diagnosis.has_errors
    assert "card.license" in {finding.where for finding in diagnosis.findings}  # the corpus is not our own


def test_a_folder_that_training_would_refuse_is_told(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text("")
    found = diagnose(tiny_recipe(tmp_path / "run", SOUND)).findings
    assert [finding.level for finding in found if finding.where == "output"] == ["warning"]


def recipe_file(folder, changes=None):
    path = folder / "recipe.yaml"
    tree = tiny_tree(folder / "run", {**SOUND, "data.train": "builtin:train:300", **(changes or {})})
    path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
    return path


def test_the_command_ends_with_0_without_and_with_1_with_errors(heedful_command, tmp_path):
    path = recipe_file(tmp_path)
    code, output, _ = heedful_command("doctor", path)
    assert code == 0
    assert output.splitlines()[-1].startswith("0 errors, ")
    code, output, errors = heedful_command("doctor", path, "optimization.warmup_updates=4000")
    assert code == 1
    assert output.splitlines()[0] == "error    optimization.warmup_updates  [schedule]"
    assert "Traceback" not in errors
    code, output, _ = heedful_command("doctor", path, "optimization.warmup_updates=4000", "--json")
    answer = json.loads(output)
    assert (code, answer["has_errors"], answer["looked_at"]) == (1, True, 300)
    assert answer["findings"][0]["where"] == "optimization.warmup_updates"
    assert not (tmp_path / "run").exists()


def test_an_unusable_recipe_ends_with_2_and_one_line(heedful_command, tmp_path):
    for override in ("optimisation.seed=1", "data.train=nowhere.jsonl", "tokenizer.path=/nowhere"):
        code, output, errors = heedful_command("doctor", recipe_file(tmp_path), override)
        assert (code, output) == (2, "")
        assert "Traceback" not in errors


def test_pairs_must_be_a_number_of_pairs(heedful_command, tmp_path):
    code, _, errors = heedful_command("doctor", recipe_file(tmp_path), "--pairs", "0")
    assert code == 2
    assert "`--pairs` must be at least 1, but is 0 instead." in errors


def test_findings_are_sorted_by_severity_and_counted():
    findings = [RecipeFinding("check", level, "Told.", f"key{n}") for n, level in enumerate(LEVELS[::-1] * 2)]
    diagnosis = Diagnosis(findings, 5, 5)
    assert [finding.level for finding in diagnosis.findings] == ["error"] * 2 + ["warning"] * 2 + ["note"] * 2
    assert [finding.where for finding in diagnosis.findings[:2]] == ["key2", "key5"]
    assert "2 errors, 2 warnings, 2 notes" in str(diagnosis)


def test_shares_are_graded_and_written():
    assert [graded(share, 0.1, 0.5) for share in (0.09, 0.1, 0.5)] == ["note", "warning", "error"]
    assert graded(1.0, 0.1) == "warning"
    expected = {0: "0 %", 0.0001: "less than 0.1 %", 0.0042: "0.42 %", 0.034: "3.4 %", 0.5: "50 %"}
    assert {share: percent(share) for share in expected} == expected
