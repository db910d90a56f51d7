"""`heedful doctor` on recipes that are sound, and on recipes with one thing wrong."""

import json

import pytest
import torch

from heedful import HeedConfig, HeedForConditionalGeneration, processor_heed
from heedful.checking.doctor import LEVELS, Diagnosis, check_speed, diagnose
from heedful.checking.findings import RecipeFinding, percent
from heedful.data.tokenizer_training import train_tokenizers
from heedful.training.recipe_file import read_recipe
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import tiny_config
from tiny_runs import recipe_file, tiny_recipe

# A run that validates, saves and passes over its pairs as often as it should; the tokenizer is small enough.
SOUND = {
    "data.train": "builtin:train:600",
    "tokenizer.vocab_size": 300,
    "optimization.max_updates": 60,
    "validation.every_updates": 20,
    "checkpoints.every_updates": 20,
    "decoding.max_length": 128,
}
pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture
def diagnosed(tmp_path):
    def check(changes=None, limit=100_000):
        files = {*tmp_path.rglob("*")}
        diagnosis = diagnose(tiny_recipe(tmp_path / "run", {**SOUND, **(changes or {})}), limit)
        assert {*tmp_path.rglob("*")} == files
        return diagnosis

    return check


@pytest.fixture
def severe(diagnosed):
    """Return level, check and key of all but notes."""
    return lambda *given: [(f.level, f.check, f.where) for f in diagnosed(*given).findings if f.level != "note"]


def corpus(folder, pairs):
    """Write pairs as a file, and return what a recipe calls it."""
    rows = [json.dumps({"ko": source, "en": target}, ensure_ascii=False) for source, target in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(folder / "pairs.jsonl")


PAIRS = [(pair["ko"], pair["en"]) for pair in korean_english_pairs("train", 600)]


def test_a_sound_recipe_has_nothing_severe_but_a_folder_that_training_would_refuse_is_told(severe, tmp_path):
    assert severe() == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text("")
    assert severe() == [("warning", "output", "output")]


@pytest.mark.parametrize("name", ["quickstart", "ko-en", "multi30k-de-en", "scan"])
def test_shipped_recipes_have_no_error(name, tmp_path):
    """Their own corpora are not here: what is checked are their keys."""
    data = {"train": "builtin:train:900", "validation": "builtin:validation:50", "folder": None}
    data |= {"test": {"a": "builtin:test:50"}, "source": "ko", "target": "en"}
    overrides = [f"data.{key}={json.dumps(value)}" for key, value in data.items()]
    overrides += [f"output={tmp_path / 'run'}", "optimization.max_minutes=null", "optimization.max_updates=3000"]
    overrides += [f"tokenizer.vocab_size={4000 if name == 'scan' else 600}"]
    overrides += ["model.config=null", "card.source_language=null"] if name == "multi30k-de-en" else []
    diagnosis = diagnose(read_recipe(name, overrides))
    assert [finding for finding in diagnosis.findings if finding.level == "error"] == []
    assert diagnosis.looked_at == diagnosis.total == 900


BROKEN = [  # changes of the recipe, and what is found
    ({"model.options.d_model": 10**9}, ("error", "model", "model.options")),
    ({"decoding.bleu_tokenizer": "13b"}, ("error", "installed", "decoding.bleu_tokenizer")),
    ({"decoding.ignore": "."}, ("error", "references", "decoding.ignore")),
    ({"tokenizer.vocab_size": 90000}, ("warning", "tokenizer", "tokenizer.vocab_size")),
    ({"data.max_source_tokens": 3}, ("error", "lengths", "data.max_source_tokens")),
    ({"model.options.pad_token_id": 7}, ("error", "model", "model.options.pad_token_id")),
    ({"model.options.encoder_attention_heads": 5}, ("error", "model", "model")),
    ({"decoding.max_length": 3}, ("error", "decoding_lengths", "decoding.max_length")),
    ({"data.cleaning.max_ratio": 1.0}, ("error", "cleaning", "data.cleaning")),
    ({"optimization.tokens_per_update": 10**6}, ("warning", "epochs", "optimization.tokens_per_update")),
    (
        {"model.options.position_encoding": "learned", "model.options.max_position_embeddings": 4},
        ("error", "positions", "data.train"),
    ),
]


@pytest.mark.parametrize(("changes", "expected"), BROKEN)
def test_what_is_wrong_is_named_by_its_key(severe, changes, expected):
    assert expected in severe(changes)


def test_a_test_set_that_is_trained_on_swapped_files_and_a_tokenizer_of_other_words_are_errors(severe, tmp_path):
    changes = {"data.test": {"leak": "builtin:train:40"}, "data.cleaning": {"drop_overlap": False}}
    assert ("error", "overlap", "data.test.leak") in severe(changes)
    assert severe({**changes, "data.cleaning": {"drop_overlap": True}}) == []
    pairs = corpus(tmp_path, [(target, source) for source, target in PAIRS[:30]])
    assert ("error", "scripts", "data.validation") in severe({"data.validation": pairs})
    foreign = [f"Wort{number}" for number in range(50)]
    train_tokenizers(foreign, foreign, vocab_size=None, algorithm="word").save_pretrained(tmp_path / "words")
    found = severe({"tokenizer.path": str(tmp_path / "words")})
    assert ("error", "unknown_tokens", "data.validation") in found


def test_broken_pairs_are_named_by_the_row_of_their_file_although_cleaning_drops_rows_before(diagnosed, tmp_path):
    pairs = [("", "Empty."), *PAIRS[:9], ("종", "A bell: \x07"), *PAIRS[9:], (PAIRS[0][0], "A lost letter: \ufffd")]
    found = {finding.check: finding for finding in diagnosed({"data.train": corpus(tmp_path, pairs)}).findings}
    for check, row in {"cleaning": 1, "control_characters": 11, "replacement_characters": 603}.items():
        assert found[check].examples[0].startswith(f"train row {row}: ")


def test_a_model_to_start_from_is_checked_with_its_tokenizer(severe, tmp_path):
    train_tokenizers(*zip(*PAIRS, strict=True), vocab_size=300).save_pretrained(tmp_path / "model")
    HeedForConditionalGeneration(tiny_config(vocab_size=300)).save_pretrained(tmp_path / "model")
    start = {"model.options": {}, "model.start_from": str(tmp_path / "model")}
    assert severe(start) == []
    for name, check in (("generation_config.json", "special_ids"), ("config.json", "model")):
        path = tmp_path / "model" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 9}))
        assert severe(start) == [("error", check, "model.start_from")]


def test_a_sample_is_looked_at_where_there_are_more_pairs_and_of_a_stream_the_first(diagnosed, tmp_path):
    stream = {"data.train": corpus(tmp_path, PAIRS), "data.streaming": True}
    for changes, total, told in (({}, 600, "a sample of 400 of 600"), (stream, None, "only the first 400")):
        diagnosis = diagnosed(changes, 400)
        assert (diagnosis.looked_at, diagnosis.total, diagnosis.has_errors) == (400, total, False)
        assert f"{told} training pairs" in str(diagnosis)
    assert diagnosed(stream).total == 600
    for count, told in ((300, 1), (30_000, 0)):  # epochs are of the whole corpus
        changes = {"optimization.max_updates": 4000, "optimization.tokens_per_update": 3000}
        findings = diagnosed({**changes, "data.train": f"builtin:train:{count}"}, 300).findings
        assert [finding.check for finding in findings].count("epochs") == told


def test_the_command_ends_with_0_without_with_1_with_errors_and_with_2_where_nothing_can_be_checked(
    heedful_command, printed, refused, tmp_path
):
    path, error = (
        recipe_file(tmp_path, SOUND | {"data.train": "builtin:train:300"}),
        "optimization.warmup_updates=4000",
    )
    assert printed("doctor", path).splitlines()[-1].startswith("0 errors, ")
    code, output, errors = heedful_command("doctor", path, error)
    assert (code, "Traceback" in errors) == (1, False)
    assert output.splitlines()[0] == "error    optimization.warmup_updates  [schedule]"
    code, output, _ = heedful_command("doctor", path, error, "--json")
    answer = json.loads(output)
    assert (code, answer["has_errors"], answer["looked_at"]) == (1, True, 300)
    assert answer["findings"][0]["where"] == "optimization.warmup_updates"
    assert not (tmp_path / "run").exists()
    for argument, message in (
        ("data.train=nowhere.jsonl", "nowhere.jsonl"),
        ("tokenizer.path=/nowhere", "/nowhere"),
        ("--pairs=0", "`--pairs` must be at least 1, but is 0 instead."),
    ):
        assert message in refused("doctor", path, argument)


def test_findings_are_sorted_by_severity_and_counted_and_shares_written():
    findings = [RecipeFinding("check", level, "Told.", f"key{n}") for n, level in enumerate(LEVELS[::-1] * 2)]
    diagnosis = Diagnosis(findings, 5, 5)
    assert [finding.where for finding in diagnosis.findings] == ["key2", "key5", "key1", "key4", "key0", "key3"]
    assert "2 errors, 2 warnings, 2 notes" in str(diagnosis)
    expected = {0: "0 %", 0.0001: "less than 0.1 %", 0.0042: "0.42 %", 0.034: "3.4 %", 0.5: "50 %"}
    assert {share: percent(share) for share in expected} == expected


ON_GPU = {"optimization.device": "cuda", "optimization.mixed_precision": "bf16"}
CONFIG = HeedConfig(d_model=64, encoder_attention_heads=4, decoder_attention_heads=4)


def test_slow_choices_on_a_gpu_are_named_by_their_key(tmp_path, monkeypatch):
    eager, key = {"model.attn_implementation": "eager"}, "optimization.mixed_precision"
    for changes, options, found, has_gpu, has_bfloat16 in (
        ({}, {}, [], True, True),
        (eager, {}, [("warning", "model.attn_implementation")], True, True),
        ({}, {"attention_dropout": 0.1}, [("note", "model.options")], True, True),
        ({key: "no"}, {}, [("warning", key)], True, True),
        ({"optimization.device": "cpu", **eager}, {}, [], True, True),
        (eager, {}, [], False, True),
        ({"optimization.device": "cpu"}, {}, [("note", key)], False, False),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has=has_gpu: has)
        monkeypatch.setattr(processor_heed, "has_bfloat16", lambda has=has_bfloat16: has)
        recipe = tiny_recipe(tmp_path / "run", ON_GPU | changes)
        config = HeedConfig(**CONFIG.to_diff_dict() | options)
        speed = check_speed(recipe.optimization, recipe.model.attn_implementation, config)
        assert [(each.level, each.where) for each in speed] == found, (changes, options)
