"""What went wrong in an output is found from its source, and what a translator may do is no fault."""

import json

import pytest
from transformers import GenerationConfig

from guides import commands_of, text_of
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.translation import Translator
from heedful.evaluation.faults import find_faults, usual_ratios
from heedful.verification import samples
from heedful.verification.verification import check_inputs
from memorised import memorised_model, saved_in

USUAL = (0.4, 1.0, 2.5)
SENTENCE = "The dog runs in the park with a ball."
# Source, output, and what is missing.
NUMBERS = [
    ("It costs 1,000.50 euros.", "Es kostet 1.000,50 Euro.", ""),
    ("It costs 4.50.", "Es kostet 4,5.", ""),
    ("On 3/12/2021.", "Am 12.03.2021.", ""),
    ("10,000 won and 1.5 million", "1만 원과 1500000", ""),
    ("I have 24 dogs.", "Ich habe vierundzwanzig Hunde.", ""),
    ("٢٠٢١ in room ３７", "2021 in Raum 37", ""),
    ("See https://a.example/2021/12", "Siehe dort", ""),
    ("At 12 he fed 3 dogs.", "Um 12:00 fütterte er drei Hunde.", ""),
    ("I have 3 dogs.", "Ich habe 5 Hunde.", "3"),
    ("In 1987 she had 2 dogs.", "1987 hatte sie zwei Hunde.", ""),
    ("In 1987 he left.", "Er ging.", "1987"),
    ("I have 24 dogs and 20 cats.", "Ich habe 42 Hunde und 20 Katzen.", "24"),
    ("From 13 to 24 of 100", "Von 13 von 100", "24"),
    ("1,234,567 of 987", "1.234.576 von 987", "567"),
    ("9" * 5000, "9" * 4999, "9" * 5000),
    ("7 or 5" + "0" * 5000, "7", "5" + "0" * 5000),
]
# Source, output, and the names of its faults.
TEXTS = [
    (SENTENCE, "Der Hund rennt mit einem Ball durch den Park.", set()),
    (" \u200b", "Etwas.", {"too_long"}),
    (" ", "", set()),
    (SENTENCE, "", {"too_short"}),
    (SENTENCE, "Ja.", {"too_short"}),
    ("Yes.", "Ja, und dann ging er noch in den Park zu den Hunden.", {"too_long"}),
    ("No, no, no, no!", "Nein, nein, nein, nein!", set()),
    ("He said no.", "No no no.", set()),
    (SENTENCE, "The dog dog dog, dog runs in the park.", {"repeated"}),
    (SENTENCE, "in the park in the Park in the park", {"repeated"}),
    (SENTENCE, "He runs in the park. He runs in the park.", {"repeated"}),
    (SENTENCE, "Der Huhuhuhuhund rennt im Park.", {"repeated"}),
    (SENTENCE, "公园公园公园里的狗在跑，带着一个球在跑着", {"repeated"}),
    ("Mail a.B@c.org or see www.d.org/.", "Schreib an A.b@c.org oder www.d.org!", set()),
    ("문서는 (https://d.org/x?y=1)에 있다.", "It is at https://d.org/x?y=1.", set()),
    ("Mail a.b@c.org about it now.", "Schreib jetzt an uns.", {"lost_address"}),
]


def test_numbers_may_change_their_form_but_not_vanish():
    for source, output, missing in NUMBERS:
        assert find_faults(source, output, None, True).get("lost_number", "") == missing, (source, output)


def test_each_fault_is_found_and_nothing_else():
    config = GenerationConfig(usual_length_ratios=USUAL)
    for source, output, names in TEXTS:
        assert find_faults(source, output, config, True).keys() == names, (source, output)
        if output and any(map(str.isalpha, source)):
            assert not {"too_short", "too_long"} & find_faults(source, output, None, True).keys()
    assert find_faults("Two.", "Zwei", config, False) == {"cut_off": "Zwei"}


def test_usual_ratios_are_those_of_most_pairs():
    sources = ["a" * length for length in range(20, 120)]
    low, usual, high = usual_ratios(sources, [2 * text for text in sources[:-1]] + [""])
    assert 1.7 < usual < 2
    assert (low, high) == (pytest.approx(usual / 3, rel=1e-3), pytest.approx(3 * usual, rel=1e-3))
    assert usual_ratios(sources[:19], sources[:19]) is None


PAIRS = {
    "고양이 24 마리가 온다.": "The 42 cats come.",
    "개가 온다.": "The dog the dog the dog comes.",
    "비가 온다.": "It rains.",
    "ASDF": "It rains rains rains rains.",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that has learned faults by heart, where the guide has its own."""
    tokenizers = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=290)
    place = tmp_path_factory.mktemp("faults")
    model = memorised_model(tokenizers, PAIRS)
    model.generation_config.usual_length_ratios = USUAL
    saved_in(place / "runs" / "quickstart" / "model", model, tokenizers)
    (place / "korean.txt").write_text("".join(f"{source}\n" for source in list(PAIRS)[:3]) + "\n")
    rows = [f"{source}\t{'The 24 cats come.' if '24' in source else target}\n" for source, target in PAIRS.items()]
    (place / "pairs.tsv").write_text("source\ttarget\n" + "".join(rows))
    return place


def test_the_commands_of_the_guide_report_the_faults(folder, heedful_command, printed, monkeypatch):
    monkeypatch.chdir(folder)
    section = text_of("terms_tags_documents").split("## Nothing vanishes")[1].split("\n## ")[0]
    translate, evaluate, _ = commands_of(section)
    code, _, errors = heedful_command(*translate.split())
    assert code == 0
    assert errors.splitlines()[-3:] == [
        *("line 1: lost number (24)", "line 2: repeated (the dog the dog the dog)"),
        "faults: lost number (1); repeated (1)",
    ]
    rows = printed(*translate.replace("--output english.txt", "--json").split()).splitlines()
    assert [json.loads(row)["faults"].keys() for row in rows] == [{"lost_number"}, {"repeated"}, set(), set()]
    assert (folder / "english.txt").read_text().splitlines() == [*list(PAIRS.values())[:3], ""]
    found = "lost number (1, references 0); repeated (2, references 2)"
    assert printed(*evaluate.split()).splitlines()[-1].split(maxsplit=1) == ["faults", found]
    assert json.loads(printed(*evaluate.split(), "--json"))["faults"] == {"lost_number": [1, 0], "repeated": [2, 2]}


@pytest.mark.parametrize(("usual", "level"), [("비가 온다.", "FAIL"), ("개가 온다.", "pass")])
def test_verify_finds_inputs_that_run_away_if_ordinary_texts_do_not(folder, monkeypatch, usual, level):
    translator = Translator.from_pretrained(folder / "runs" / "quickstart" / "model")
    monkeypatch.setitem(samples.INPUTS, "junk", lambda _: "ASDF")
    found = check_inputs("junk", translator.model, translator.tokenizers, [usual])
    assert (found.level, found.figure) == (level, 1)
    assert found.message.endswith("; 'ASDF' gives 'It rains rains rains rains.'")
    assert check_inputs("empty input", translator.model, translator.tokenizers, [usual]).figure == 0
