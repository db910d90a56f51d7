"""Damaged texts are damaged as their papers say, anew in every epoch, and everything else stays as it is."""

import gzip
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from guides import commands_of, run_commands, text_of
from heedful import HeedConfig, TokenizerPair
from heedful.checking.doctor import diagnose
from heedful.conversion.model_conversion import convert
from heedful.data.data_recipe import MASK, SENTINELS, DenoiseRules
from heedful.data.epochs.augmentation import drawn_numbers
from heedful.data.epochs.denoising import Denoising, deleted, infilled, reordered, spans
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder
from heedful.data.mixture import source_prefixes
from heedful.data.tokenizer_training import train_tokenizers
from heedful.training.preparation import corpus_of, prepare_corpus
from heedful.training.recipe_file import make_recipe, read_recipe
from heedful.training.run import train
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import assert_refused
from pretrained_checkpoints import t5
from tiny_runs import tiny_recipe, tiny_tree

PAIRS = [{"source": pair["ko"], "target": pair["en"]} for pair in korean_english_pairs("train", 60)]
TEXTS = [pair["target"] for pair in PAIRS]
KINDS = ("spans", "infilling", "deletion", "order")
MARKS = [1000 + number for number in range(100)]
LENGTHS, SEEDS = st.integers(1, 80), st.integers(0, 999)
BOTH = {"sides": ["source", "target"]}


def runs_of(flags) -> list[int]:
    """Return the lengths of the runs of what is true."""
    return [len(run) for run in "".join("x" if flag else " " for flag in flags).split()]


@settings(max_examples=200, deadline=None)
@given(length=LENGTHS, seed=SEEDS, share=st.sampled_from([0.15, 0.5, 0.9]))
def test_the_missing_spans_and_what_is_kept_are_the_text(length, seed, share):
    text = list(range(length))
    source, missing = spans(text, share, 3, MARKS, drawn_numbers(seed))
    number = sum(token >= 1000 for token in source)
    assert [token for token in source if token >= 1000] == MARKS[:number]
    assert [token for token in missing if token >= 1000] == MARKS[: number + 1]  # the last one ends the target
    assert missing[-1] == MARKS[number]
    pieces = {mark: [] for mark in MARKS}
    for token in missing:
        if token >= 1000:
            piece = pieces[token]
        else:
            piece.append(token)
    back = [token for each in source for token in (pieces[each] if each >= 1000 else [each])]
    assert back == text
    dropped = [token not in source for token in text]
    assert sum(dropped) == (min(max(round(length * share), 1), length - 1))
    assert len(runs_of(dropped)) == number  # no span is empty or touches another
    assert number == (0 if length < 2 else min(max(round(sum(dropped) / 3), 1), length - sum(dropped) + 1))


def test_spans_lie_anywhere_and_have_their_length_on_average():
    found, lengths = Counter(), []
    for seed in range(2000):
        source, _ = spans(list(range(8)), 0.15, 3, MARKS, drawn_numbers(seed))
        found[source.index(MARKS[0])] += 1
        long, _ = spans(list(range(100)), 0.15, 3, MARKS, drawn_numbers(seed))
        lengths += runs_of(token not in long for token in range(100))
    assert sorted(found) == list(range(8))
    assert min(found.values()) > 150
    assert np.mean(lengths) == 3
    assert {1, 2, 3, 4, 5, 6} <= {*lengths}
    few, _ = spans(list(range(99)), 0.9, 1, MARKS[:5], drawn_numbers(1))
    assert sum(token >= 1000 for token in few) == 4  # one mark is left for the end of the target


@settings(max_examples=200, deadline=None)
@given(length=LENGTHS, seed=SEEDS, share=st.sampled_from([0.3, 0.8]))
def test_infilling_has_one_mask_for_each_span_and_keeps_the_rest_in_order(length, seed, share):
    text = list(range(length))
    source = infilled(text, share, 3, -1, drawn_numbers(seed))
    kept = [token for token in source if token >= 0]
    assert kept == sorted(kept)
    assert max(runs_of(token < 0 for token in source)) == 1
    spans_of_tokens = runs_of(token not in kept for token in text)
    assert len(spans_of_tokens) <= source.count(-1)
    wanted = max(1, round(length * share))
    assert length - len(kept) <= wanted
    assert length - len(kept) == wanted or source.count(-1) == length - wanted + 1  # as many as fit


def test_the_lengths_of_infilled_spans_are_poissons():
    lengths = Counter()
    for seed in range(1000):
        source = infilled(list(range(200)), 0.3, 3, -1, drawn_numbers(seed))
        places = [place for place, token in enumerate(source) if token < 0]
        for place in places:
            before = source[place - 1] if place else -1
            behind = source[place + 1] if place + 1 < len(source) else 200
            lengths[behind - before - 1] += 1
    share = {length: count / lengths.total() for length, count in lengths.items()}
    assert share[0] == pytest.approx(np.exp(-3), abs=0.01)  # which put in a mask where nothing is missing
    assert share[3] == pytest.approx(27 / 6 * np.exp(-3), abs=0.02)


def test_deleted_tokens_are_a_share_and_the_others_keep_their_order():
    left = [deleted(list(range(50)), 0.1, drawn_numbers(seed)) for seed in range(200)]
    assert all(tokens == sorted(tokens) for tokens in left)
    assert np.mean([len(tokens) for tokens in left]) == pytest.approx(45, abs=0.5)


def test_words_move_no_farther_than_they_may():
    words = [str(number) for number in range(12)]
    ways = Counter()
    for seed in range(500):
        found = reordered(words, 3, drawn_numbers(seed))
        assert sorted(found) == sorted(words)
        ways.update(abs(place - int(word)) for place, word in enumerate(found))
    assert sorted(ways) == [0, 1, 2, 3]
    assert {tuple(reordered(["a", "b"], 1, drawn_numbers(seed))) for seed in range(50)} == {("a", "b"), ("b", "a")}


@pytest.fixture(scope="module")
def tokenizers():
    tags = ["<denoise>", MASK, *SENTINELS]
    return train_tokenizers([p["source"] for p in PAIRS], TEXTS, vocab_size=500, languages=tags)


def rows_of(tokenizers, kind, texts=TEXTS, seed=1, **limits):
    """Return whole rows, pairs between them, and what damages them."""
    tag = tokenizers.source.added_tokens_encoder["<denoise>"]
    encoder = PairEncoder(tokenizers, **limits, heads=[[], [tag]])
    pairs = [{"source": text, "target": text, "part": 1} for text in texts]
    mixed = [each for two in zip(pairs, PAIRS, strict=False) for each in two]
    return EncodedPairs(encoder.rows(mixed)), Denoising(DenoiseRules(text=["x"], kind=kind), encoder, seed)


def listed(rows):
    return [rows[number] for number in range(len(rows))]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_damaged_anew_in_every_epoch_each_by_its_number_alone_and_pairs_never(tokenizers, kind):
    rows, denoising = rows_of(tokenizers, kind)
    first, again, second = (listed(denoising.rows(rows, epoch)) for epoch in (0, 0, 1))
    whole, tag, end = listed(rows), rows[0]["input_ids"][0], tokenizers.source.eos_token_id
    assert first == again
    assert first[1::2] == second[1::2] == whole[1::2]
    texts = first[::2]
    assert sum(one != other for one, other in zip(texts, second[::2], strict=True)) > 40
    assert sum(one != other for one, other in zip(texts, whole[::2], strict=True)) > 40
    assert all((row["input_ids"][0], row["input_ids"][-1], row["labels"][-1]) == (tag, end, end) for row in texts)
    if kind != "spans":
        assert [row["labels"] for row in texts] == [row["labels"] for row in whole[::2]]
    elsewhere = rows_of(tokenizers, kind, seed=2)[1]
    assert listed(elsewhere.rows(rows, 0)) != first
    # Other rows before it, and rows that were left out, change nothing in a row of the same number.
    stream = [None, *(whole[1] for _ in range(9)), *whole[10:]]
    assert list(denoising.damaged(iter(stream), 0))[10:] == first[10:]


def test_of_texts_alone_the_held_out_ones_have_the_tag_of_the_language_they_are_in():
    tags = ["ko", "en", "<denoise>", *SENTINELS]
    tokenizers = train_tokenizers([p["source"] for p in PAIRS], TEXTS, vocab_size=500, languages=tags)
    known = tokenizers.source.added_tokens_encoder
    for sides, language in (([], "en"), (["source"], "en"), (["source", "target"], "en")):
        data = make_recipe(tiny_tree("run", {"data.denoise": {"text": ["x"], "sides": sides, "alone": True}})).data
        encoder = PairEncoder(tokenizers, heads=source_prefixes(data.parts, tokenizers))
        (row,) = listed(Denoising(data.denoise, encoder, 1).held_out(PAIRS[:1]))
        assert row["input_ids"][:2] == [known[f"<2{language}>"], known["<denoise>"]]


def test_t5s_own_tokenizer_which_has_no_tag_learns_missing_spans_without_one(tmp_path, recipe_of):
    convert(t5(tmp_path / "t5"), tmp_path / "model")
    given = TokenizerPair.from_pretrained(tmp_path / "model")
    mixed = corpus_of(recipe_of({}, {"data.max_source_tokens": None, "data.max_target_tokens": None}), given)
    found = texts_of(mixed)
    assert all(("<extra_id_0>" in source) == ("<extra_id_0>" in target) for source, target in found)
    assert sum("<extra_id_0>" in source for source, _ in found) == 80
    assert not any("<denoise>" in source for source, _ in found)
    alone = corpus_of(recipe_of({"alone": True}, {"data.train": None}), given)
    assert all("<extra_id_0>" in given.source.decode(row["input_ids"]) for row in listed(alone.validation))
    with pytest.raises(ValueError, match=r"`data.denoise` must be a special token .* but is <mask> instead"):
        corpus_of(recipe_of({"kind": "infilling"}), given)
    # What the tokenizer does not know is a part of the text, at its ends too.
    encoder = PairEncoder(given)
    rows = EncodedPairs(encoder.rows([{"source": "漢 字 漢", "target": "漢 字 漢"}] * 40))
    first = {row["input_ids"][0] for row in listed(Denoising(DenoiseRules(text=["x"]), encoder, 1).rows(rows, 0))}
    assert given.source.added_tokens_encoder["<extra_id_0>"] in first


def test_words_change_places_and_tokens_go_in_the_text_itself(tokenizers):
    for kind, same in (("order", sorted), ("deletion", set)):
        rows, denoising = rows_of(tokenizers, kind)
        for row in listed(denoising.rows(rows, 0))[::2]:
            source, target = (tokenizers.decode_target([row[name]])[0] for name in ("input_ids", "labels"))
            assert target in TEXTS
            assert same is set or sorted(source.split()) == sorted(target.split())
            assert len(row["input_ids"]) <= len(row["labels"]) + 1 or kind == "order"


def test_a_row_that_would_be_too_long_stays_whole_for_that_epoch(tokenizers):
    rows, denoising = rows_of(tokenizers, "spans", ["a", "ab", "A dog."], max_target_tokens=4)
    short = listed(denoising.rows(rows, 0))[0]
    assert len(short["labels"]) <= 4
    rows, denoising = rows_of(tokenizers, "spans", ["ab"], max_target_tokens=3)
    assert listed(denoising.rows(rows, 0)) == listed(rows)  # <extra_id_0>b<extra_id_1></s> has four


def test_no_text_holds_a_mark(tokenizers):
    ids = tokenizers.source(f"<extra_id_0> {MASK} a<denoise>")["input_ids"]
    assert not {*ids[:-1]} & {*tokenizers.source.added_tokens_decoder}
    rows, denoising = rows_of(tokenizers, "infilling", ["A <mask> and <extra_id_7> in <denoise> text."] * 20)
    for row in listed(denoising.rows(rows, 0))[::2]:
        assert tokenizers.decode_target([row["labels"]]) == ["A <mask> and <extra_id_7> in <denoise> text."]


@pytest.fixture
def recipe_of(tmp_path):
    """Make a tiny recipe with 80 texts of its own in a packed file."""
    texts = [pair["en"] for pair in korean_english_pairs("train", 380)][300:]
    with gzip.open(tmp_path / "own.txt.gz", "wt", encoding="utf-8") as file:
        file.write("".join(f"{text}\n" for text in texts))

    def make(denoise, changes=None):
        pairs = {"data.train": "builtin:train:50", "data.denoise": {"text": [str(tmp_path / "own.txt.gz")]} | denoise}
        return tiny_recipe(tmp_path / "run", pairs | (changes or {}))

    return make


def texts_of(corpus, epoch=0):
    tokenizer = corpus.tokenizers.source
    rows = [row for update in corpus.training.updates(epoch) for bucket in update for row in bucket]
    return sorted(tuple(tokenizer.batch_decode([row["input_ids"], row["labels"]])) for row in rows)


def test_texts_and_sides_are_parts_of_the_data_stored_or_streamed(recipe_of):
    stored, streamed = (corpus_of(recipe_of(BOTH, {"data.streaming": each}), None) for each in (False, True))
    names = ("data.train", "data.denoise.source", "data.denoise.target", "data.denoise.text.1")
    assert stored.training.parts == dict(zip(names, (50, 50, 50, 80), strict=True))
    for corpus in (stored, streamed):
        assert sum(source.startswith("<denoise>") for source, _ in texts_of(corpus)) == 180
        assert all(("<extra_id_0>" in target) == source.startswith("<denoise>") for source, target in texts_of(corpus))
    assert texts_of(stored) == texts_of(streamed) != texts_of(streamed, 1)  # in the order of the files there, too
    assert stored.validation.sources.tolist() == streamed.validation.sources.tolist()
    sampled = corpus_of(recipe_of(BOTH, {"data.temperature": 1000.0}), None)
    counts = Counter(source.startswith("<denoise>") for source, _ in texts_of(sampled))
    assert (counts[False], counts[True]) == (58, 172)  # a quarter of 230 for each part


def test_a_stream_takes_a_chunk_of_each_part_in_turn(recipe_of, monkeypatch):
    monkeypatch.setattr("heedful.data.mixture.CHUNK", 10)
    corpus = corpus_of(recipe_of({"sides": ["source"]}, {"data.streaming": True}), None)
    numbers = [pair["part"] for pair in corpus.training.stream]
    assert numbers == [part for _ in range(5) for part in [0] * 10 + [1] * 10 + [2] * 10] + [2] * 30


def test_a_model_learns_from_texts_alone_and_is_validated_on_held_out_ones(recipe_of):
    alone = {"alone": True, "kind": "infilling"}
    corpus = corpus_of(recipe_of(alone, {"data.train": None}), None)
    again = corpus_of(recipe_of(alone, {"data.train": None}), None)
    assert corpus.training.parts == {"data.denoise.text.1": 80}
    texts = corpus.tokenizers.decode_target(row["labels"] for row in listed(corpus.validation))
    assert texts == [pair["target"] for pair in corpus.validation_pairs]
    sources = corpus.tokenizers.source.batch_decode([row["input_ids"] for row in listed(corpus.validation)])
    assert all(source.startswith("<denoise>") and MASK in source for source in sources)
    assert corpus.fingerprint == again.fingerprint
    side = corpus_of(recipe_of({"text": [], "sides": ["source"], "alone": True}), None)
    assert side.training.parts == {"data.denoise.source": 50}
    assert len(side.validation) == 20


def test_held_out_texts_are_no_texts_to_learn_from_and_one_text_is_no_copy(tmp_path, recipe_of):
    held_out = [pair["en"] for pair in korean_english_pairs("validation", 20)]
    (tmp_path / "more.txt").write_text("\n".join([*held_out, "A new text."]), encoding="utf-8")
    for streaming in (False, True):
        changes = {"data.cleaning.drop_identical": True, "data.streaming": streaming}
        corpus = corpus_of(recipe_of({"text": [str(tmp_path / "more.txt")], "kind": "order"}, changes), None)
        found = texts_of(corpus)
        assert [target for source, target in found if source.startswith("<denoise>")] == ["A new text.</s>"]
    only = recipe_of({"text": [str(tmp_path / "more.txt")], "alone": True}, {"data.train": None})
    assert corpus_of(only, None).training.pairs == 1


def test_noise_in_sources_leaves_texts_alone(recipe_of):
    changes = {"data.augmentation": {"lower_case": 1.0, "joined": 0.5}}
    found = texts_of(corpus_of(recipe_of({"kind": "deletion", "share": 0.01}, changes), None))
    texts = [pair for pair in found if pair[0].startswith("<denoise>")]
    assert len(texts) == 80
    assert sum(f"<denoise>{target}" == source for source, target in texts) > 40
    assert all(source == source.lower() for source, _ in found if not source.startswith("<denoise>"))


def test_where_a_model_knows_several_languages_a_text_has_the_tag_of_its_own(recipe_of):
    corpus = corpus_of(recipe_of(BOTH, {"data.both_directions": True}), None)
    heads = Counter(re.match("(<2..>)?(<denoise>)?", source)[0] for source, _ in texts_of(corpus))
    assert heads == {"<2en>": 50, "<2ko>": 50, "<2en><denoise>": 130, "<2ko><denoise>": 50}
    part = {"train": "builtin:train:30", "target": "ko", "source": "en", "to": "fr"}
    corpus = corpus_of(recipe_of(BOTH, {"data.mixture": {"other": part}}), None)
    heads = Counter(re.match("(<2..>)?(<denoise>)?", source)[0] for source, _ in texts_of(corpus))
    assert heads == {"<2en>": 50, "<2fr>": 30, "<2en><denoise>": 130, "<denoise>": 50}  # nothing is put into Korean


def test_a_run_that_translates_goes_on_from_one_that_mends(tmp_path):
    changes = {"data.train": "builtin:train:60", "optimization.max_updates": 2}
    first = train(tiny_recipe(tmp_path / "mend", {**changes, "data.denoise": {**BOTH, "alone": True}}))
    further = {**changes, "tokenizer": {}, "model": {"start_from": str(first.folder)}}
    result = train(tiny_recipe(tmp_path / "translate", further))
    assert result.corpus.training.pairs == 60
    known = TokenizerPair.from_pretrained(result.folder).source.added_tokens_encoder
    assert {"<denoise>", *SENTINELS} < {*known}
    plain = corpus_of(tiny_recipe(tmp_path / "x", changes), result.corpus.tokenizers)
    assert plain.training.rows.fingerprint() == result.corpus.training.rows.fingerprint()
    assert not any(source.startswith("<") for source, _ in texts_of(plain))


def test_the_guides_commands_learn_from_texts(tmp_path, monkeypatch, printed):
    monkeypatch.chdir(tmp_path)
    section = text_of("low_resource").split("## Texts without translations")[1].split("\n## ")[0]
    tree = tiny_tree("runs/pairs", {"data.train": "builtin:train:60", "optimization.warmup_updates": 1})
    Path("pairs.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    Path("english.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    commands = commands_of(re.sub(r"max_updates=\d+", "max_updates=4", section))
    mend, _ = run_commands(printed, commands).values()
    assert "model: runs/mend/model" in mend
    assert "of these data.denoise.text.1 | 60" in Path("runs/mend/model/README.md").read_text(encoding="utf-8")
    assert read_recipe("runs/pairs/model/recipe.yaml").model.start_from.endswith("runs/mend/model")


def test_the_doctor_takes_no_text_for_a_pair(recipe_of):
    checks = {finding.check: finding.message for finding in diagnose(recipe_of(BOTH)).findings}
    assert not {"identical", "length_ratio", "scripts", "sides"} & {*checks}
    alone = diagnose(recipe_of({"alone": True}, {"data.train": None}))
    assert not {"scripts", "sides"} & {finding.check for finding in alone.findings}
    assert alone.total == 80


TEXT = {"text": ["x.txt"]}
REFUSED = [
    ({"kind": "deletion"}, r"`data.denoise` must name a `text` or one of the `sides`, but names neither"),
    ({"sides": ["middle"]}, r"`data.denoise.sides` must be a list, but is \['middle'\]"),
    ({"sides": ["source", "source"]}, r"`data.denoise.sides` must name each side once"),
    ({**TEXT, "kind": "noise"}, r"`data.denoise.kind` must be one of spans, infilling, deletion, order"),
    ({**TEXT, "share": 0.0}, r"`data.denoise.share` must be above 0 and below 1, but is 0.0"),
    ({**TEXT, "share": 1.0}, r"`data.denoise.share` must be above 0 and below 1, but is 1.0"),
    ({**TEXT, "kind": "order", "share": 0.1}, r"`data.denoise.share` must be empty where words change places"),
    ({**TEXT, "length": 0}, r"`data.denoise.length` must be at least 1, but is 0"),
    ({**TEXT, "kind": "deletion", "length": 2}, r"`data.denoise.length` must be 3 where single tokens are deleted"),
]


def test_wrong_use_is_refused_by_name_before_anything_is_read(tmp_path):
    def make(changes):
        return make_recipe(tiny_tree(tmp_path / "run", changes))

    more = [
        ({"data.train": None}, r"`data.train` must be given, but for `data.denoise.text` with `alone: true`"),
        ({"data.train": None, "data.denoise": TEXT}, r"`data.train` must be given, but"),
        ({"data.train": None, "data.denoise": {**TEXT, **BOTH, "alone": True}}, r"`data.train` must be given, but"),
        ({"data.denoise": TEXT, "data.validation": None}, r"`data.validation` must be given where `data.denoise` is"),
        ({"data.denoise": TEXT, "tokenizer.joint": False}, r"`tokenizer.joint` must be true where .*`data.denoise`"),
        ({"data.denoise": TEXT, "tokenizer.sentences": 9}, r"`tokenizer.sentences` must be empty where"),
        (
            {"data.denoise": TEXT, "optimization.distillation": "x"},
            r"`data.denoise` must be empty where `optimization",
        ),
        (
            {"data.denoise": TEXT, "data.streaming": True, "data.temperature": 2.0},
            r"`data.temperature` must be 1 in a stream",
        ),
        ({"data.mixture": {"a": {"train": "x.tsv", "tag": "denoise"}}}, r"`data.mixture.a.tag` must be .* 'denoise'"),
        (
            {"data.denoise": {**TEXT, "alone": True}, "data.both_directions": True},
            r"`data.both_directions` must be left out where `data.denoise.alone` is true",
        ),
        (
            {"data.denoise": {**TEXT, "alone": True}, "data.augmentation": {"typos": 0.1}},
            r"`data.augmentation` must be left out where `data.denoise.alone` is true",
        ),
    ]
    assert_refused([*(({"data.denoise": rules}, message) for rules, message in REFUSED), *more], make)


def test_paths_lie_beside_the_recipe_and_its_card_is_not_that_of_other_texts(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.txt").write_text("A text.", encoding="utf-8")
    tree = tiny_tree(tmp_path / "run", {"data.denoise": {"text": ["own.txt"]}, "card.license": "mit"})
    (tmp_path / "recipes" / "mine.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe("recipes/mine.yaml")
    assert recipe.data.parts["data.denoise.text.1"].train == ["recipes/own.txt"] * 2
    assert recipe.card.license == "mit"
    assert read_recipe("recipes/mine.yaml", ["data.denoise.text=[other.txt]"]).card.license is None


def test_damaged_texts_must_have_room_in_the_model(recipe_of):
    config = HeedConfig(position_encoding="learned", max_position_embeddings=64)
    recipe_of({}, {"data.max_source_tokens": 64, "data.max_target_tokens": 64}).data.check_room(config)
    with pytest.raises(ValueError, match=r"`data.max_source_tokens` must be at most 64, .*`data.denoise`.* is 256"):
        recipe_of({}).data.check_room(config)


def test_rows_that_are_left_out_before_do_not_shift_what_is_damaged(recipe_of):
    changes = {"data.max_source_tokens": 22, "data.augmentation": {"typos": 1.0}}
    corpus = corpus_of(recipe_of({"kind": "deletion", "share": 0.01}, changes), None)
    assert corpus.training.parts["data.train"] < 50
    texts = [source for source, _ in texts_of(corpus) if source.startswith("<denoise>")]
    assert len(texts) == corpus.training.parts["data.denoise.text.1"]


def test_files_and_tokenizers_that_cannot_do_it_are_refused_by_name(tmp_path, recipe_of):
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    (tmp_path / "blank.txt").write_text("\n \n", encoding="utf-8")
    plain = train_tokenizers(TEXTS, TEXTS, vocab_size=300)
    known = {token: number for number, token in enumerate(["<denoise>", *SENTINELS])}
    readable = train_tokenizers(TEXTS, TEXTS, vocab_size=500, languages=list(known))
    readable.source.split_special_tokens = False
    unmarked = train_tokenizers(TEXTS, TEXTS, vocab_size=400, languages=["<denoise>"])
    separate = train_tokenizers(TEXTS, TEXTS, vocab_size=400, joint=False, languages=["<denoise>"])
    for name, each in {"plain": plain, "readable": readable, "unmarked": unmarked, "separate": separate}.items():
        each.save_pretrained(tmp_path / name)

    def prepare(given):
        denoise, changes = given
        prepare_corpus(recipe_of(denoise, changes), tmp_path / "tokenizer")

    words = {"tokenizer.algorithm": "word", "tokenizer.vocab_size": None, "data.validation": "builtin:train:20"}
    words["data.cleaning.drop_overlap"] = False
    tag = r"`data.denoise` must be a special token .* but is <{}> instead"
    cases = [
        (({"text": [str(tmp_path / "empty.txt")]}, {}), r"empty.txt must hold at least one line, but is empty"),
        (({"text": [str(tmp_path / "blank.txt")]}, {}), r"`data.denoise.text.1` must hold pairs to train on"),
        (({}, {"tokenizer.path": str(tmp_path / "plain")}), tag.format("denoise")),
        (({}, {"tokenizer.path": str(tmp_path / "readable")}), tag.format("denoise")),
        (({}, {"tokenizer.path": str(tmp_path / "unmarked")}), tag.format("extra_id_0")),
        (({"kind": "infilling"}, {"tokenizer.path": str(tmp_path / "unmarked")}), tag.format("mask")),
        (({}, {"tokenizer.path": str(tmp_path / "separate")}), r"must be empty where source and target have two"),
        (({}, words), r"`data.denoise` must be empty where the vocabulary is closed"),
    ]
    assert_refused(cases, prepare)
    assert not (tmp_path / "tokenizer").exists()
    prepare(({"kind": "deletion"}, {"tokenizer.path": str(tmp_path / "unmarked")}))
