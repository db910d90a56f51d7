"""Checks on texts: each is given a corpus with exactly its defect, and one without."""

import unicodedata

from datasets import Dataset

from heedful.checking import pairs as checks
from heedful.checking.pairs import Pairs
from heedful.data.cleaning import Splits, clean
from heedful.data.data_recipe import CleaningRules, DataRecipe
from heedful_lab.korean_english.pairs import korean_english_pairs

CLEAN = [(pair["ko"], pair["en"]) for pair in korean_english_pairs("train", 400)]
HELD_OUT = [(pair["ko"], pair["en"]) for pair in korean_english_pairs("validation", 50)]
OFF = CleaningRules(drop_overlap=False)


def dataset(pairs):
    return Dataset.from_list([{"source": pair[0], "target": pair[1], "row": row} for row, pair in enumerate(pairs, 1)])


def split(pairs, name="train", key="data.train") -> Pairs:
    return Pairs.of(name, key, dataset(pairs))


def with_pairs(*added, place=100):
    """Return the clean pairs with others in between; the first of them is row 101."""
    return split([*CLEAN[:place], *added, *CLEAN[place:]])


def held_out(pairs=HELD_OUT, key="data.validation"):
    return [split(pairs, key.split(".")[-1], key)]


def dropped_by_cleaning(pairs, rules, test=HELD_OUT):
    splits = Splits(dataset(pairs), dataset(HELD_OUT), {"data.test.a": dataset(test)}, len(pairs))
    return checks.check_cleaning(split(pairs), clean(splits, DataRecipe("a.tsv", "ko", "en", cleaning=rules)))


def only(findings, check):
    (finding,) = findings
    assert finding.check == check
    return finding


def test_clean_pairs_give_no_finding():
    train = split(CLEAN)
    for found in (
        dropped_by_cleaning(CLEAN, CleaningRules()),
        checks.check_pointless_pairs(train, OFF),
        checks.check_overlap(train, OFF, held_out()),
        checks.check_length_ratios(train),
        checks.check_text(train),
        checks.check_scripts(train, held_out(), ("ko", "en")),
        checks.check_sides(train),
    ):
        assert list(found) == []


def test_pairs_that_teach_nothing_are_told_with_their_rows_unless_the_rules_drop_them():
    pointless = {"empty": ("", "Hello."), "identical": ("PyTorch", "PyTorch"), "duplicate": CLEAN[3]}
    for kind, pair in pointless.items():
        rules = OFF if kind != "empty" else None
        finding = only(checks.check_pointless_pairs(with_pairs(pair), rules), kind)
        assert "1 of 401 train pairs" in finding.message
        assert finding.where.startswith(f"data.cleaning.drop_{kind}" if rules else "data.train")
        assert finding.examples[0].startswith("train row 101: ")
    rules = CleaningRules(drop_identical=True, drop_duplicates=True)
    pairs = [*CLEAN[:100], *pointless.values(), *CLEAN[100:]]
    assert list(checks.check_pointless_pairs(split(pairs), rules)) == []
    finding = only(dropped_by_cleaning(pairs, rules), "cleaning")
    assert finding.level == "note"
    assert "3 of 403" in finding.message
    assert "empty 1, identical 1, duplicate 1" in finding.message
    assert "train row 101" in finding.examples[0]


def test_a_corpus_of_copies_is_an_error_and_copies_that_are_to_be_learned_are_a_warning_that_says_so():
    copies = [(target, target) for _, target in CLEAN]
    assert only(checks.check_pointless_pairs(split(copies), OFF), "identical").level == "error"
    finding = only(checks.check_pointless_pairs(split([*copies[:300], *CLEAN[300:]]), OFF), "identical")
    assert finding.level == "warning"
    assert finding.advice.endswith("drops them. Keep them if source and target may be equal, as in spelling.")


def test_held_out_pairs_in_training_are_told_with_what_dropping_them_costs_and_those_that_are_dropped_counted():
    (seen, translation), (other, _), train = CLEAN[0], CLEAN[1], split(CLEAN)
    tests = held_out([*HELD_OUT, (seen, translation), (other, "Another translation.")], key="data.test.unseen")
    finding = only(checks.check_overlap(train, OFF, tests), "overlap")
    assert finding.where == "data.test.unseen"
    assert "2 of 52 unseen sources" in finding.message
    assert "1 with the same target" in finding.message
    assert "drops 2 training pairs" in finding.advice
    assert "unseen row 51" in finding.examples[0]
    for key, level in (("data.test.a", "error"), ("data.validation", "warning")):
        assert only(checks.check_overlap(train, OFF, held_out(CLEAN[:50], key)), "overlap").level == level
    assert list(checks.check_overlap(train, CleaningRules(), held_out(CLEAN[:5], "data.test.a"))) == []
    finding = only(dropped_by_cleaning(CLEAN, CleaningRules(), CLEAN[:5]), "cleaning")
    assert (finding.level, "overlap" in finding.message) == ("note", True)


def test_rows_that_have_slipped_are_length_outliers_unless_lengths_differ_widely_everywhere():
    slipped = with_pairs(("네.", CLEAN[0][1] * 8), (CLEAN[0][0] * 9, "No."))
    finding = only(checks.check_length_ratios(slipped), "length_ratio")
    assert "2 of 402" in finding.message
    assert {example.split(":")[0] for example in finding.examples} == {"train row 101", "train row 102"}
    pairs = split([("jump " * (n % 9 + 1), "I_JUMP " * (n % 40 + 1)) for n in range(400)])
    assert list(checks.check_length_ratios(pairs)) == []


DEFECTIVE = {
    "marks": r'"She said \"yes\" to it."',
    "control_characters": "sen\x07tence",
    "replacement_characters": "sen\ufffdtence",
    "mojibake": "schön ist Ã¤hnlich",
    "html": "Tom &amp; Jerry",
    "decomposed": "ᄒᆞᆫ글",
    "tabs": "sen\ttence",
}


def test_every_defect_of_a_text_is_found_and_named_with_its_row():
    for name in checks.DEFECTS:
        finding = only(checks.check_text(with_pairs((CLEAN[0][0], DEFECTIVE[name]))), name)
        assert "0 sources and 1 targets of 401" in finding.message
        assert finding.examples[0].startswith("train row 101: ")
        assert finding.advice
    broken = split([(ko.encode().decode("latin-1"), en) for ko, en in CLEAN])
    assert {finding.check: finding.level for finding in checks.check_text(broken)}["mojibake"] == "error"
    broken = split([(unicodedata.normalize("NFD", ko), en) for ko, en in CLEAN])
    assert only(checks.check_text(broken), "decomposed").level == "warning"
    for text in ("Tom<br/>Jerry", "<p class='a'>Tom</p>", "caf&eacute;", "&#233;t&#xe9;", "<B>Tom"):
        assert only(checks.check_text(with_pairs((CLEAN[0][0], text))), "html").examples
    texts = ["a < b > c", "<2en> x", "<s>", "<bt> <person>", "a<b && c>d;", "x <- y"]
    assert list(checks.check_text(split([(text, text) for text in texts]))) == []
    texts = ["naïve façade à la carte", "„Das ist die BÖ“, sagte er", "«Été»", "AT&T & Co; R&D", "Größe: 5 × 7"]
    assert list(checks.check_text(split([(text, text) for text in [*texts, "„Ä“", "ÃO"]]))) == []


def test_swapped_languages_those_that_contradict_the_scripts_and_targets_in_another_are_told():
    turned, untranslated = [(en, ko) for ko, en in HELD_OUT], [(ko, ko) for ko, _ in CLEAN[:40]]
    finding = only(checks.check_scripts(split(CLEAN), held_out(turned), (None, None)), "scripts")
    assert (finding.level, finding.where) == ("error", "data.validation")
    assert "swapped" in finding.message
    for languages, expected in (
        (("en", "ko"), [("error", "data.source"), ("error", "data.target")]),
        (("ru", "en"), [("warning", "data.source")]),
    ):
        found = checks.check_scripts(split(CLEAN), [], languages)
        assert [(finding.level, finding.where) for finding in found] == expected
    finding = only(checks.check_scripts(split([*CLEAN, *untranslated]), [], ("ko", "en")), "scripts")
    assert finding.level == "warning"
    assert "40 of 440 training targets" in finding.message
    assert finding.examples[0].startswith("train row 401")
    assert list(checks.check_scripts(split([*CLEAN, *untranslated[:3]]), [], ("ko", "en"))) == []


def test_the_script_of_a_text_is_that_of_most_letters_and_names_commands_and_german_say_nothing():
    mixed = [("제한된 Mozilla Firefox 열기", "Open a restricted Mozilla Firefox")] * 60
    assert [*map(checks.script_of, (mixed[0][0], "안녕하세요 PC", "42"))] == ["Latin", "Hangul", None]
    assert list(checks.check_scripts(split([*CLEAN, *mixed]), [], ("ko", "en"))) == []
    pairs = [("jump twice", "I_JUMP I_JUMP"), ("grüße überall", "greetings everywhere"), ("12 + 3", "15")] * 10
    assert list(checks.check_scripts(split(pairs), [split(pairs, "validation")], ("command", "actions"))) == []


def test_pairs_the_wrong_way_round_are_told_however_many_they_are():
    for every in (3, 20):
        pairs = [pair[::-1] if number % every == 1 else pair for number, pair in enumerate(CLEAN)]
        finding = only(checks.check_scripts(split(pairs), [], ("ko", "en")), "scripts")
        assert finding.level == "warning"
        assert f"{len(range(1, 400, every))} of 400 training pairs" in finding.message
        told = "go from Latin to Hangul script, and most others from Hangul to Latin: they are swapped."
        assert told in finding.message
        assert finding.examples[0].startswith("train row 2: ")
    tamil = [("the dog sees the house", "நாய் வீட்டை பார்க்கிறது")] * 40
    turned = [pair[::-1] for pair in tamil]
    for languages in (("en", "ta"), ("English", "tam_Taml")):
        found = [*checks.check_scripts(split(turned), [split(tamil, "validation")], languages)]
        assert [finding.level for finding in found] == ["error"] * 3
        assert all(finding.message.endswith("source and target are swapped.") for finding in found)


def test_sources_with_several_targets_are_told_from_a_share_on_with_the_way_out():
    lemmas = [(f"w{number // 5}", f"w{number}") for number in range(400)]
    finding = only(checks.check_targets(split(lemmas)), "several_targets")
    assert (finding.level, finding.where) == ("warning", "data.source")
    assert "400 of 400 train pairs (100 %) have a source that also has other targets" in finding.message
    assert "join both (`data.source: [lemma, features]`)" in finding.advice
    finding = only(checks.check_targets(split([*CLEAN, *lemmas[:80]])), "several_targets")
    assert finding.level == "note"
    assert list(checks.check_targets(split([*CLEAN, *CLEAN, *lemmas[:40]]))) == []


NUMBERS = [str(number) for number in range(len(CLEAN))]
SENTENCES = [english for _, english in CLEAN]


def test_what_a_column_holds_is_found():
    shortened = ["The same ten sentences, each of them forty times."[: 20 + number % 10] for number in range(400)]
    for texts, kind in (
        (NUMBERS, "numbers"),
        ([f"{number % 28 + 1}/{number % 12 + 1}/2024" for number in range(400)], "dates"),
        (["V;PST;3;PL", "N;ACC;SG", "Case=Nom|Number=Plur"] * 100, "tags"),
        ([f"v.{tense}.{person}" for tense in ("prs", "pst", "fut") for person in ("1sg", "2sg", "3sg")] * 40, "tags"),
        ([f"doc-{number // 8}" for number in range(400)], "ids"),
        ([f"GEN.{number // 30}.{number % 30 + 1}" for number in range(400)], "ids"),
        (["en"] * 400, "one value"),
        (["The same sentence, again and again."] * 400, "one value"),
        (["train", "dev"] * 200, "labels"),
        ([""] * 399 + ["a note"], "no texts"),
        (list(range(400)), "no texts"),
        (SENTENCES, None),
        ([text.split()[0] + str(number) + " a" for number, text in enumerate(SENTENCES)], None),
        (shortened, None),
        (["".join(word) for word in zip(SENTENCES, SENTENCES[::-1], strict=True)], None),
    ):
        assert checks.kind_of(texts) == kind, texts[:3]


def test_a_side_without_sentences_and_names_of_columns_that_are_read_as_a_pair_are_a_warning():
    for texts, kind in ((NUMBERS, "numbers"), (["네."] * len(CLEAN), "one value")):
        finding = only(checks.check_sides(split(list(zip(texts, SENTENCES, strict=True)))), "sides")
        assert (finding.level, finding.where) == ("warning", "data.source")
        assert f"The sources are {kind}, not sentences, such as" in finding.message
        finding = only(checks.check_sides(split(list(zip(SENTENCES, texts, strict=True)))), "sides")
        assert finding.where == "data.target"
    finding = only(checks.check_sides(split([("질문", "답변"), *CLEAN])), "sides")
    assert finding.examples == ("train row 1: '질문' → '답변'",)
