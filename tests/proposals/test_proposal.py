"""The table of what is proposed for which data and machine."""

import random
from itertools import pairwise, product
from pathlib import Path
from random import Random

import pytest

from heedful.data.tokenizer_training import train_tokenizers
from heedful.proposals.proposal import DataFacts, Machine, propose, survey, this_machine
from heedful_lab.korean_english.pairs import korean_english_pairs
from tiny_runs import tiny_recipe

STUDY = Path(__file__).parents[2] / "docs" / "studies" / "speedrun.md"
LAPTOP, SERVER = Machine(cores=2, has_gpu=False), Machine(cores=16, has_gpu=True)
# Pairs, bytes of a pair, the longest side, machine: vocabulary, layers, d_model, dropout, tokens of an update, and
# precision.
TABLE = [
    (100, 60, 60, LAPTOP, (700, 2, 128, 0.3, 2048, "bf16")),
    (2_000, 133, 120, SERVER, (3000, 2, 128, 0.3, 2048, "bf16")),
    (29_000, 133, 120, LAPTOP, (8000, 2, 128, 0.1, 2048, "bf16")),
    (12_000, 133, 120, LAPTOP, (7200, 2, 128, 0.2, 2048, "bf16")),
    (113_000, 133, 120, LAPTOP, (8000, 2, 128, 0.0, 2048, "bf16")),
    (113_000, 133, 120, SERVER, (11100, 3, 256, 0.1, 6144, "bf16")),
    (4_500_000, 300, 500, SERVER, (32000, 6, 512, 0.1, 25_000, "bf16")),
]


@pytest.mark.parametrize(("pairs", "pair_bytes", "longest", "machine", "expected"), TABLE)
def test_what_is_proposed(pairs, pair_bytes, longest, machine, expected):
    settings = propose(DataFacts(pairs, pair_bytes, (longest, longest)), machine)[0]
    options = settings["model.options"]
    found = (settings["tokenizer.vocab_size"], options["encoder_layers"], options["d_model"], options["dropout"])
    found += (settings["optimization.tokens_per_update"], settings["optimization.mixed_precision"])
    assert found == expected


def test_the_study_has_the_proposed_settings():
    rows = STUDY.read_text().split("## What `heedful init` proposes")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows if row.startswith("|")][2:]
    assert len(rows) >= 9
    for pairs, machine, *expected, _ in rows:
        facts = DataFacts(int(pairs.replace(",", "")), 90.0, (100, 100))
        settings = propose(facts, SERVER if machine == "GPU" else LAPTOP)[0]
        options = settings["model.options"]
        layers = f"{options['encoder_layers']} + {options['decoder_layers']}"
        names = ["optimizer", "learning_rate", "embedding_learning_rate", "weight_decay"]
        names += ["tokens_per_update", "max_updates"]
        *rates, tokens, updates = (settings.get(f"optimization.{name}") for name in names)
        found = [layers, options["d_model"], settings["tokenizer.vocab_size"], options["dropout"]]
        found += [tokens, updates, ", ".join(str(part) for part in rates if part)]
        assert expected == [f"{value:,}" if isinstance(value, int) else str(value) for value in found], pairs


def test_muon_is_proposed_on_cpus_where_it_was_measured(tmp_path):
    names = ("optimizer", "learning_rate", "embedding_learning_rate", "weight_decay")
    keys = [f"optimization.{name}" for name in names]
    for pairs, machine, expected in (
        (2000, LAPTOP, ("muon", 0.004, 0.008, 0.63)),
        (12_000, LAPTOP, ("muon", 0.006, 0.012, 0.16)),
        (113_000, LAPTOP, ("muon", 0.006, 0.012, 0.16)),
        (113_000, SERVER, ("adam", 0.0015, None, None)),
    ):
        settings = propose(DataFacts(pairs, 90.0, (100, 100)), machine)[0]
        assert tuple(map(settings.get, keys)) == expected
        chosen = {key: value for key, value in settings.items() if key.startswith("optimization.")}
        assert tiny_recipe(tmp_path, chosen).optimization.optimizer == expected[0]


def test_two_thousand_pairs_take_less_than_ten_minutes_on_two_cores_and_the_time_grows_steadily():
    settings, minutes = propose(DataFacts(2000, 133, (120, 120)), LAPTOP)
    assert 0.5 < minutes < 10
    # A slow machine may take longer: without its last updates the rate would not fall to 0.
    assert "optimization.max_minutes" not in settings
    for pairs, most in ((5000, 6), (20_000, 6), (100_000, 6), (300_000, 20)):
        assert most / 3 < propose(DataFacts(pairs, 90.0, (100, 100)), LAPTOP)[1] < most
    counts = [round(1000 * 1.05**step) for step in range(90)]
    minutes = [propose(DataFacts(count, 90.0, (100, 100)), LAPTOP)[1] for count in counts]
    assert max(after / before for before, after in pairwise(minutes)) < 2


def test_the_last_translations_are_published_if_the_rate_falls_to_0():
    published = [
        propose(DataFacts(5000, 90.0, (100, 100), (kind, kind)), LAPTOP, None, schedule)[0]["checkpoints.publish"]
        for kind, schedule in (("bpe", "linear"), ("bpe", "constant"), ("word", "linear"))
    ]
    assert published == ["last", "best", "best"]


def test_a_run_is_validated_and_saved_and_its_schedule_ends_with_it():
    for pairs, machine in product((10, 1000, 100_000, 10**7), (LAPTOP, SERVER)):
        settings = propose(DataFacts(pairs, 90.0, (100, 100)), machine)[0]
        updates = settings["optimization.max_updates"]
        assert 600 <= updates <= 100_000
        assert settings["optimization.warmup_updates"] <= updates / 5
        assert 5 <= updates / settings["validation.every_updates"] <= 15
        assert settings["checkpoints.every_updates"] == settings["validation.every_updates"]
    settings, minutes = propose(DataFacts(20_000, 90.0, (100, 100)), LAPTOP, updates=900)
    assert minutes < propose(DataFacts(20_000, 90.0, (100, 100)), LAPTOP)[1] / 3
    found = {settings[f"{key}_updates"] for key in ("optimization.warmup", "validation.every", "checkpoints.every")}
    assert (settings["optimization.max_updates"], found) == (900, {90})
    shrinking = settings["optimization.weight_decay"] * settings["optimization.learning_rate"] * 900
    assert shrinking == pytest.approx(4, 0.01)
    strong, weak = (propose(DataFacts(20_000, 90.0, (100, 100)), LAPTOP, updates=each)[0] for each in (600, 6))
    assert weak["optimization.weight_decay"] == strong["optimization.weight_decay"]


LETTERS, PHONEMES = "abdefiklmnoprstu", [f"P{number}" for number in range(30)]
generator = random.Random(0)
SPELLINGS = ["".join(generator.choices(LETTERS, k=generator.randint(3, 9))) for _ in range(400)]
SOUNDS = [" ".join(generator.choices(PHONEMES, k=generator.randint(2, 9))) for _ in range(400)]
SENTENCES = [pair["en"] for pair in korean_english_pairs("train", 400)]
KOREAN = [pair["ko"] for pair in korean_english_pairs("train", 400)]
LABELS = [generator.choice(["yes", "no", "perhaps"]) for _ in range(400)]
JAPANESE = ["".join(generator.choices("今日元気私本学校行読はをがのですか", k=9)) for _ in range(400)]
COMMANDS = [" ".join(generator.choices(["jump", "walk", "left", "twice", "and"], k=4)) for _ in range(400)]
ACTIONS = [command.upper().replace(" ", " I_") for command in COMMANDS]
# Sentences of a few words, of which somebody will use others.
NOUNS = [f"{first}{second}" for first in "노키마모프의책가신컴" for second in ("트북이", "보드", "우스는", "니터")]
TEMPLATES = [" ".join(generator.choices(NOUNS, k=5)) for _ in range(400)]
SIDES = [
    (SPELLINGS, SOUNDS, ("character", "word")),
    (SOUNDS, SPELLINGS, ("word", "character")),
    (SOUNDS, [" ".join(sound.split()[::-1]) for sound in SOUNDS], ("word", "word")),
    ([text.replace(" ", "") for text in KOREAN], KOREAN, ("character", "character")),
    (KOREAN, SENTENCES, ("bpe", "bpe")),
    (SENTENCES, LABELS, ("bpe", "word")),
    (JAPANESE, SENTENCES, ("bpe", "bpe")),
    (SENTENCES, SPELLINGS, ("bpe", "character")),
    (COMMANDS, ACTIONS, ("word", "word")),
    (TEMPLATES, [f"{text} {text}." for text in TEMPLATES], ("bpe", "bpe")),
]


@pytest.mark.parametrize(("sources", "targets", "expected"), SIDES)
def test_tokens_that_fit_are_found_and_make_a_recipe(sources, targets, expected, tmp_path):
    pairs = [{"source": source, "target": target} for source, target in zip(sources, targets, strict=True)]
    facts = survey(pairs)
    assert facts.algorithms == expected
    settings = propose(facts, LAPTOP)[0]
    recipe = tiny_recipe(tmp_path, {key: value for key, value in settings.items() if key.startswith("tokenizer.")})
    assert tuple(algorithm for algorithm, _ in recipe.tokenizer.sides) == expected
    assert all((size is None) == (algorithm != "bpe") for algorithm, size in recipe.tokenizer.sides)
    assert recipe.tokenizer.joint is (expected[0] == expected[1])
    units = {"bpe": lambda text: (), "word": str.split, "character": list}
    texts = zip(expected, (sources, targets), strict=True)
    assert settings["decoding.max_length"] > max(len(units[each](text)) for each, side in texts for text in side)


def test_facts_are_those_of_the_texts_and_the_machine(monkeypatch):
    pairs = [{"source": "가" * 2, "target": f"ab {number}{number}"} for number in range(10, 99)]
    pairs += [{"source": "x" * 500, "target": "y z"}]
    # The words that come twice are 가가 and ab.
    facts = DataFacts(90, (89 * 13 + 503) / 90, (500, 7), ("bpe", "bpe"), 0.0, 2)
    assert survey(pairs, algorithms=("bpe", "bpe")) == facts
    assert survey([{"source": "हिन्दी में", "target": "in Hindi!"}] * 2, algorithms=("bpe", "bpe")).words == 4
    facts = survey(pairs, 5000, ("character", "bpe"))
    assert facts == DataFacts(5000, (89 * 7 + 3) / 90, (500, 7), ("character", "bpe"), (89 * 2 + 500) / 90, 2)
    # One that is far longer than the others sets no limit.
    longer = [*pairs * 3, {"source": "x" * 9000, "target": "z"}]
    assert survey(longer, algorithms=("bpe", "bpe")).longest[0] == 1000
    with pytest.raises(ValueError, match="must hold at least one pair"):
        survey([])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert (this_machine().has_gpu, this_machine("cpu").has_gpu) == (True, False)
    assert this_machine().cores >= 1


@pytest.mark.parametrize("kind", ["dates", "templates"])
def test_a_vocabulary_is_no_larger_than_the_words_need(kind):
    random = Random(0)
    texts = [f"{random.randint(1, 28)}.{random.randint(1, 12)}.{random.randint(1900, 2030)}" for _ in range(6000)]
    if kind == "templates":
        texts = [f"order {random.choice(SPELLINGS[:40])} before {date[-4:]}" for date in texts]
    facts = survey([{"source": text, "target": text[::-1]} for text in texts], algorithms=("bpe", "bpe"))
    size = propose(facts, LAPTOP)[0]["tokenizer.vocab_size"]
    assert 300 <= size <= 1000
    assert size <= 1.3 * len(train_tokenizers(texts, [text[::-1] for text in texts], vocab_size=size).source)
