"""A language added to a model: what it knew stays, new texts get pieces, and what cannot grow is refused by name."""

import re
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import GenerationConfig

from guides import commands_of, run_commands, text_of
from heedful import TokenizerPair, Translator
from heedful.cards.hub import check_folder
from heedful.checksums_heed import changed_files
from heedful.conversion import language_addition as addition
from heedful.conversion.language_addition import NewLanguage, add_language, learn_pieces
from heedful.conversion.model_conversion import convert
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.loading import load_model
from helpers import assert_error, assert_refused, change_json, rounding, tiny_model
from memorised import PAIRS, memorised_model, saved_in
from pretrained_checkpoints import m2m100, nllb, t5
from tiny_runs import logged, table_file, tiny_tree

KOREAN, ENGLISH = list(PAIRS), list(PAIRS.values())
CZECH = ["Kočka spí dlouho.", "Pes běží dlouho v parku.", "Dlouho prší v parku.", "Kočka čte knihu dlouho."]
CZECH += ["Kočka", "běží", "prší", "čte", "spí"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with texts of the new language and of the old ones."""
    monkeypatch.chdir(tmp_path)
    table_file(tmp_path / "new.tsv", [("source", "target"), *((f"{text[::-1]}", text) for text in CZECH)])
    table_file(tmp_path / "old.tsv", PAIRS.items())
    return tmp_path


def of_languages(folder, algorithm="bpe", **options):
    size = None if algorithm in ("word", "character") else 275
    pair = train_tokenizers(KOREAN, ENGLISH, vocab_size=size, algorithm=algorithm, languages=["ko", "en"])
    return saved_in(folder, memorised_model(pair, PAIRS, "en", **options), pair)


def new(name="cs", **settings) -> NewLanguage:
    return NewLanguage(name, "new.tsv", **{"pieces": 30, "old": ["old.tsv"], **settings})


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_old_texts_keep_tokens_and_outputs_and_new_rows_are_means_of_old_ones(place, algorithm):
    options = {"output_bias": True, "tie_output_embeddings": False} if algorithm == "bpe" else {}
    source = of_languages(place / "model", algorithm, **options)
    result = add_language(source, place / "larger", new(like="en"))
    before, after = (TokenizerPair.from_pretrained(folder) for folder in (source, "larger"))
    first, grown = len(before.source), len(after.source)
    assert changed_files(place / "larger", "tokenizer") == []
    assert after.languages == (*before.languages, "cs")
    assert after.head("cs") == [first]
    assert grown > first + 10
    assert before.encode_target(KOREAN + ENGLISH) == after.encode_target(KOREAN + ENGLISH)
    for language in before.languages:
        assert before.encode_source(KOREAN + ENGLISH, language) == after.encode_source(KOREAN + ENGLISH, language)
    rows = after.encode_target(CZECH)
    assert after.decode_target(rows) == CZECH
    assert sum(map(len, rows)) < 0.6 * sum(map(len, before.encode_target(CZECH)))
    written = after.encode_target(["<2cs> </s>"])[0]
    assert (first in written, written.count(after.source.eos_token_id)) == (False, 1)
    old, larger = weights_of(source), weights_of("larger")
    assert old.keys() == larger.keys()
    relative, changed = before.head("en")[0], [name for name in old if old[name].shape != larger[name].shape]
    assert len(changed) == (3 if algorithm == "bpe" else 1)
    for name, weight in larger.items():
        assert torch.equal(weight[:first] if name in changed else weight, old[name])
    names = after.source.convert_ids_to_tokens(range(first + 1, grown))
    for name in changed:
        assert torch.equal(larger[name][first], old[name][relative])
        for id_, piece in enumerate(names, start=first + 1):
            # Cut by the old vocabulary alone, which the new pieces continue.
            parts = [token.id for token in before.source.backend_tokenizer.model.tokenize(piece)]
            assert torch.equal(larger[name][id_], old[name][parts].mean(0))
    translator = Translator.from_pretrained("larger")
    for text, expected in PAIRS.items():
        assert translator.translate([text], target_language="en")[0][0].text == expected
    assert result.difference < rounding(translator.model)
    assert all(each in Path("larger/README.md").read_text() for each in ("another target language, cs", "&lt;2en>"))
    # A second language comes behind the first.
    add_language("larger", place / "largest", new("sk", pieces=0))
    assert TokenizerPair.from_pretrained("largest").languages == ("ko", "en", "cs", "sk")


def test_pieces_are_the_commonest_neighbours_first_and_none_is_in_an_old_text():
    backend = train_tokenizers(["x"], ["x"], vocab_size=260).source.backend_tokenizer
    words = {"abc": 5, "bd": 4, "cd": 4, "zz": 9, "qr": 1}
    found = learn_pieces(backend, words, "", 10)
    assert [(piece, each.halves, each.parts) for piece, each in found.items()] == [
        ("ab", ("a", "b"), ["a", "b"]),  # as often as "bc", and first by its string; "zz" would be a second "z"
        ("abc", ("ab", "c"), ["a", "b", "c"]),
        ("bd", ("b", "d"), ["b", "d"]),
        ("cd", ("c", "d"), ["c", "d"]),
    ]
    assert list(learn_pieces(backend, words, "xabx\nd", 10)) == ["bc", "abc", "bd", "cd"]
    assert list(learn_pieces(backend, words, "", 1)) == ["ab"]
    assert learn_pieces(backend, words, "", 0) == {}
    # "bc" comes eight times, but three times once "ab" has been taken.
    assert list(learn_pieces(backend, {"abc": 5, "ab": 4, "bc": 3, "ef": 4}, "", 4)) == ["ab", "abc", "ef", "bc"]


def test_pieces_of_unigram_are_those_that_its_search_chooses():
    pair = train_tokenizers(KOREAN, ENGLISH, vocab_size=275, algorithm="unigram")
    backend = pair.source.backend_tokenizer
    words = Counter({"he": 2, "qx": 4000, "eee": 2})
    assert list(learn_pieces(backend, words, "", 10)) == ["qx"]  # "he" comes too seldom for its score to win


def test_a_piece_is_left_out_where_the_models_own_training_data_have_it_and_a_missing_file_is_named(place):
    source = of_languages(place / "model")
    data = {"data.train": "one.tsv", "data.mixture": {"more": {"train": "old.tsv"}}}
    tree = tiny_tree(place / "run", {"data.source": "1", "data.target": "2", **data})
    (source / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    table_file(source / "one.tsv", [("고양이", "Kočka běží")])
    table_file(source / "old.tsv", [("고양이", "Kočka běží dlouho")])
    pieces = []
    for name, old in (("own", []), ("both", ["new.tsv"])):
        result = add_language(source, place / name, new(old=old))
        vocabulary = TokenizerPair.from_pretrained(name).source.get_vocab()
        pieces.append([piece for piece in vocabulary if piece in ("Ġdlouho", "Ġparku")])
        assert "old texts have the same greedy output" in result.notes[-1]
    assert pieces == [["Ġparku"], []]
    (source / "one.tsv").unlink()
    must = "`old` must name the model's training data, because `data.train` of .*/one.tsv in the model's folder does"
    assert_error(must, add_language, source, place / "none", new(old=[]))


@pytest.mark.parametrize("algorithm", ["word", "character"])
def test_vocabularies_of_words_and_characters_get_a_tag_alone(place, algorithm):
    source = of_languages(place / "model", algorithm)
    assert_error("must be BPE or Unigram to get", add_language, source, place / "larger", new())
    add_language(source, place / "larger", new(pieces=0))
    before, after = (TokenizerPair.from_pretrained(folder) for folder in (source, "larger"))
    assert (after.languages, len(after.source)) == (("ko", "en", "cs"), len(before.source) + 1)
    assert before.encode_source(KOREAN, "en") == after.encode_source(KOREAN, "en")


def test_an_nllb_checkpoint_gets_a_token_in_the_place_of_its_relatives(place):
    source = nllb(place / "nllb")
    result = add_language(source, place / "larger", new("csb_Latn", like="eng_Latn"), "kor_Hang")
    convert(source, place / "plain", "kor_Hang", "eng_Latn")
    before, after = (TokenizerPair.from_pretrained(folder) for folder in ("plain", "larger"))
    first, relative = len(before.source), before.target.convert_tokens_to_ids("eng_Latn")
    assert before.encode_source(KOREAN + ENGLISH) == after.encode_source(KOREAN + ENGLISH)
    for row, expected in zip(*(pair.encode_target(KOREAN + ENGLISH) for pair in (after, before)), strict=True):
        assert (row[0], expected[0], row[1:]) == (first, relative, expected[1:])
    assert len(after.encode_target(CZECH)[0]) < len(before.encode_target(CZECH)[0])
    models = [load_model(folder) for folder in ("plain", "larger")]
    rows = [model.lm_head.weight for model in models]
    assert torch.equal(rows[1][: len(rows[0])], rows[0])
    assert torch.equal(rows[1][first], rows[0][relative])
    assert len(rows[1]) > first + 5
    assert models[1].generation_config.forced_bos_token_id == first
    # Forced into the old language, it gives the old output.
    inputs = before.source(KOREAN[:1], return_tensors="pt")
    plain = GenerationConfig(max_new_tokens=9, decoder_start_token_id=2, eos_token_id=2, pad_token_id=1)
    outputs = [model.generate(**inputs, generation_config=plain, forced_bos_token_id=relative) for model in models]
    assert outputs[0].tolist() == outputs[1].tolist()
    assert "csb_Latn begins as a copy of eng_Latn" in " ".join(result.notes)
    check_folder(place / "larger")


def test_tokens_behind_a_unigram_vocabulary_keep_their_ids_and_texts_their_tokens(place):
    convert(t5(place / "madlad", tags=("<2en>", "<2ko>"), sentinels=0), place / "model")
    add_language("model", place / "larger", new(pieces=5))
    before, after = (TokenizerPair.from_pretrained(folder) for folder in ("model", "larger"))
    ids = before.source.get_vocab()
    assert "<unused_0>" in ids
    assert {name: after.source.get_vocab()[name] for name in ids} == ids
    texts = [*KOREAN, "<2cs> a <unused_0>"]
    assert before.encode_source(texts[:-1], "ko") == after.encode_source(texts[:-1], "ko")
    assert not {len(ids), ids["<unused_0>"]} & {*after.encode_source(texts[-1:], "ko")[0]}


def test_wrong_use_is_refused_by_name_and_nothing_is_left(place, refused):
    of_languages(place / "model")
    for name, languages in (("one", []), ("untied", ["ko", "en"])):
        pair = train_tokenizers(KOREAN, ENGLISH, vocab_size=270, languages=languages)
        options = {"share_encoder_decoder_embeddings": name == "one", **pair.special_ids()}
        saved_in(place / name, tiny_model(vocab_size=len(pair.source), **options), pair)
    nllb(place / "nllb")
    Path("rnn").mkdir()
    Path("rnn/config.json").write_text('{"model_type": "heed_rnn"}')
    Path("empty.tsv").write_text("source\ttarget\nx\t \n")
    cases = [
        (
            ("model", "--add-language", "en"),
            "`--add-language` must be a new language, but the model has <2en> already",
        ),
        (("model", "--add-language", "c s"), "`--add-language` must be of letters"),
        (("model", "--like", "de"), "`--like` must be one of ko, en, but is 'de'"),
        (("model", "--old", "nowhere.tsv"), "`--old` must be a file"),
        (("model", "--pieces", -1), "`--pieces` must be at least 0, but is -1"),
        (("model", "--pairs", "empty.tsv"), "`--pairs` must hold texts of the new language, but empty.tsv has none"),
        (("model", "--source-language", "ko"), "`--source-language` must be None for a Heed model"),
        (("model", "--target-language", "ko"), "`--add-language` must not come with --target-language"),
        (("model", "--decoder-layers", 1), "`--add-language` must not come with --decoder-layers"),
        (("one",), "one must have several target languages in its recipe"),
        (("rnn",), "must be heed or m2m_100 .* but is heed_rnn"),
        (("untied",), "`share_encoder_decoder_embeddings` must be True for `--add-language`"),
        (("nllb", "--add-language", "ces_Latn", "--like", "eng_Latn"), "the model has ces_Latn already"),
        (("nllb", "--like", "english"), "`--like` must be one of ace_Arab"),
    ]
    for (model, *options), message in cases:
        given = {"--add-language": "cs", "--pairs": "new.tsv", "--old": "old.tsv"}
        given |= dict(zip(options[::2], options[1::2], strict=True))
        assert re.search(message, refused("convert", model, "larger", *chain(*given.items())))
    assert "`--pairs` must be given with" in refused("convert", "model", "larger", "--add-language", "cs")
    assert "`--like` must be left out without" in refused("convert", "model", "larger", "--like", "ko")
    assert_refused(
        [
            ("model", "`old` must name texts in the old languages"),
            (m2m100(place / "m2m"), "fast one .* M2M100Tokenizer"),
        ],
        lambda model: add_language(model, place / "larger", NewLanguage("cs", "new.tsv")),
    )
    assert not Path("larger").exists()


def test_an_old_output_that_changes_is_an_error_and_no_folder_is_left(place, monkeypatch):
    source, grown = of_languages(place / "model", output_bias=True), addition._grown_model
    monkeypatch.setattr(addition, "MOST_TOKENS", 12)

    def likelier(begun, *others):
        larger = grown(begun, *others)
        larger.lm_head.bias.data[-1] = 100
        return larger

    for settings, same in (({"num_beams": 3, "length_penalty": 0.5}, 12), ({"suppress_tokens": [*range(2, 275)]}, 0)):
        # The latter leaves a new token as the best.
        change_json(source / "generation_config.json", **settings, max_new_tokens=12)
        note = add_language(source, place / f"own{same}", new()).notes[-1]
        told = f"12 old texts have the same greedy output as before, and {same} of them also with the model's own"
        assert told in note
    monkeypatch.setattr(addition, "_grown_model", likelier)
    assert_error("greedy output differs for 12 of 12 old texts", add_language, source, place / "larger", new())
    monkeypatch.setattr(addition, "largest_difference", lambda *_: 2e-5)
    assert_error("larger model's logits differ by 2.0e-05", add_language, source, place / "larger", new())
    assert not Path("larger").exists()


def test_the_guides_commands_add_a_language_train_with_old_pairs_and_show_what_was_forgotten(place, printed):
    section = text_of("convert").split("## A language added to a model")[1].split("\n## ")[0]
    german, french = ([f"{word} {text[::-1]}" for text in ENGLISH] for word in ("die", "le"))
    for name, texts in (("german.tsv", german), ("french.tsv", french), ("czech.tsv", CZECH[:6])):
        code = {"g": "de", "f": "fr", "c": "cs"}[name[0]]
        table_file(place / name, [("en", code), *zip(ENGLISH, texts, strict=True)])
        table_file(place / f"old.{code}.tsv", [("source", "target"), *zip(ENGLISH, texts, strict=True)])
    table_file(place / "czech-validation.tsv", [("en", "cs"), ("It snows.", "Sněží."), ("No.", "Ne.")])
    changes = {"optimization.max_updates": 8, "tokenizer.vocab_size": 280, "data.validation": "old.fr.tsv"}
    tree = tiny_tree(place / "runs/pairs", changes)
    tree["data"] = {"train": "german.tsv", "source": "en", "target": "de", "validation": "validation.tsv"}
    tree["data"]["mixture"] = {"french": {"train": "french.tsv", "target": "fr", "to": "fr"}}
    table_file(place / "validation.tsv", [("en", "de"), ("It snows.", "Es schneit.")])
    Path("pairs.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    (text,) = re.findall("```yaml\n(.*?)```", section, re.DOTALL)
    tree = tiny_tree(place, {"optimization.max_updates": 12}) | yaml.safe_load(text)
    del tree["tokenizer"]
    Path("czech.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    nllb(place / "nllb")
    table_file(place / "kashubian.tsv", [("source", "target"), *zip(ENGLISH, CZECH[:6], strict=True)])
    table_file(place / "polish.tsv", zip(ENGLISH, german, strict=True))
    commands = [command.replace("facebook/nllb-200-distilled-600M", "nllb") for command in commands_of(section)]
    assert [command.split()[0] for command in commands] == ["convert", "train", "evaluate", "compare", "convert"]
    printed("train", "pairs.yaml")
    # The whole comparison is that of each direction alone.
    more = {"compare": ["--resamples", "40", "--trials", "40"]}
    outputs = [*run_commands(printed, commands, more).values()]
    assert "The token <2cs> begins as a copy of <2de>." in outputs[0]
    assert re.search(r"^de +6 .* runs/czech/model\nfr +6 .* runs/czech/model$", outputs[3], re.MULTILINE)
    tokenizers = [TokenizerPair.from_pretrained(folder) for folder in ("runs/larger", "runs/czech/model")]
    assert tokenizers[0].fingerprint() == tokenizers[1].fingerprint()
    losses = logged(Path("runs/czech"), "train/loss")
    assert losses[-1] < losses[0] - 0.3
