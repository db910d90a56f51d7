import re
from pathlib import Path

import pytest
import yaml

from heedful.data.sources import read_pairs
from heedful.evaluation.metrics import METRICS, SMALLEST_BOOTSTRAP
from heedful.proposals import proposal as proposal_module
from heedful.proposals.proposal import DataFacts, complete, propose, survey, this_machine
from heedful.recipe_keys import keys_of
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import make_recipe, read_recipe, recipe_of, to_yaml, yaml_text
from heedful.training.updates.schedule import learning_rate
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import assert_error, assert_refused
from tiny_runs import tiny_tree

SMALLEST = """
name: small
data: {train: a.tsv, validation: b.tsv, source: ko, target: en}
optimization: {max_updates: 5}
"""


def written(tmp_path, text=SMALLEST):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_sections_that_are_empty_or_missing_have_their_defaults(tmp_path):
    recipe = read_recipe(written(tmp_path, SMALLEST + "card:\nvalidation:\n"), ["validation.sentences=3"])
    assert (recipe.validation.sentences, recipe.validation.every_updates) == (3, 1000)
    assert (recipe.card.license, recipe.optimization.learning_rate) == (None, 1.0)
    assert recipe.output == str(recipe.folder) == "runs/small"
    for changes, tokens in (({}, 2000), ({"buckets_per_update": 4}, 500), ({"token_budget": 77}, 77)):
        changes = {f"optimization.{name}": value for name, value in changes.items()}
        assert make_recipe(tiny_tree("x", changes)).optimization.micro_batch_tokens == tokens


def refused(cases):
    assert_refused(cases, lambda changes: make_recipe(tiny_tree("x", changes)))


def test_an_unknown_key_is_refused_and_the_nearest_is_named_with_its_section():
    nearest = {
        "optimization.lerning_rate": "optimization.learning_rate",
        "data.cleaning.maxratio": "data.cleaning.max_ratio",
        "validaton": "validation",
        "checkpoints.keep": "checkpoints.keep_last",
        "tokenizer.7": "tokenizer.",
    }
    refused([({key: 1}, f"`{key}` is not a key of a recipe; did you mean `{meant}") for key, meant in nearest.items()])


SELECTED = f"one of loss, {', '.join(name for name in METRICS if name != 'ter')}"  # which takes too long


def test_a_value_of_another_type_is_refused():
    cases = [
        ("name", 5, "text"),
        *[("seed", value, "a whole number") for value in ("one", True, 1.5)],
        *[("resume", value, "true or false") for value in ("yes", 1)],
        *[("data.train", value, "text or a list") for value in (3, None, [1, 2])],
        *[("data.test", value, "a mapping") for value in (["a.tsv"], {"a": 5})],
        ("data.max_source_tokens", "many", "a whole number or empty"),
        ("data.cleaning.max_ratio", "wide", "a number or empty"),
        *[("optimization.learning_rate", value, "a number") for value in ("fast", True, None)],
        ("optimization.max_updates", 1e5, "a whole number or empty"),
        ("optimization.schedule", "exponential", "one of paper, inverse_sqrt, cosine, linear, constant or empty"),
        ("optimization.mixed_precision", True, "one of no, tf32, bf16, fp16"),
        ("tokenizer.algorithm", "wordpiece", "one of bpe, unigram, character, jamo, word"),
        ("decoding.length_penalty_form", "wu", "one of power, gnmt"),
        ("validation.select", "ter", SELECTED),
        ("logging.trackers", "tensorboard", "a list"),
        ("model.options", ["dropout"], "a mapping"),
    ]
    message = "`{}` must be {}, but is {!r} instead"
    refused([({key: value}, re.escape(message.format(key, wanted, value))) for key, value, wanted in cases])


def test_a_section_must_hold_keys_and_the_keys_without_a_default():
    message = "`{}` must be a section with keys, but is 5 instead"
    refused([({section: 5}, message.format(section)) for section in ("data", "model", "data.cleaning")])
    for key in ("name", "data", "optimization", "data.train", "data.target"):
        tree = tiny_tree("x")
        *sections, last = key.split(".")
        del (tree[sections[0]] if sections else tree)[last]
        assert_error(f"`{key}` must be given, but is missing", make_recipe, tree)


def test_numbers_that_yaml_takes_for_text_or_whole_are_numbers(tmp_path):
    for text, number in {"1e-3": 0.001, "1E3": 1000.0, "'0.5'": 0.5, "2": 2.0, ".5": 0.5}.items():
        rate = read_recipe(written(tmp_path), [f"optimization.learning_rate={text}"]).optimization.learning_rate
        assert (type(rate), rate) == (float, number)


def test_overrides_are_yaml_and_the_last_one_wins(tmp_path):
    overrides = ["seed=4", "seed=7", "data.train=[a.de, a.en]", "model.options.dropout=0.3", "data.folder="]
    overrides += ["data.test={one: x=y.tsv}", "card.limits='a: b = c'", "data.source=1", "data.streaming=no"]
    # A bare no is a precision, and false only where that may be.
    precise = SMALLEST.replace("{max_updates: 5}", "{max_updates: 5, mixed_precision: no}")
    recipe = read_recipe(written(tmp_path, precise), overrides)
    assert (recipe.seed, recipe.model.options, recipe.card.limits) == (7, {"dropout": 0.3}, "a: b = c")
    data = recipe.data
    assert (data.train, data.folder, data.test) == (["a.de", "a.en"], None, {"one": "x=y.tsv"})
    assert (data.source, data.streaming, recipe.optimization.mixed_precision) == ("1", False, "no")


def test_the_text_of_an_override_is_the_text_that_was_typed(tmp_path):
    for key, text in [
        *[("output", text) for text in ("runs/try #2", "#1")],
        *[("name", text) for text in ("2026", "{x")],
        ("card.limits", "Not for C #1 uses: never"),
        ("decoding.ignore", "[0-9]"),
        ("data.source", "no"),
    ]:
        section, _, name = key.rpartition(".")
        recipe = read_recipe(written(tmp_path), [f"{key}={text}"])
        assert getattr(getattr(recipe, section) if section else recipe, name) == text


def test_an_alias_which_could_repeat_others_without_end_is_refused(tmp_path):
    path = written(tmp_path, SMALLEST + "card: {limits: &text few, license: *text}\n")
    assert_error(r"must be YAML, but is not: it has an alias .* write the value again", read_recipe, path)


def test_an_override_that_cannot_be_used_is_refused(tmp_path):
    cases = {
        "seed": "An override must be written key=value, but is 'seed' instead",
        "=5": "An override must be written key=value, but is '=5' instead",
        "name.first=x": "`name` in the override 'name.first=x' must be a section, but is 'small' instead",
        "seed=[1": r"`seed` must be a whole number, but is '\[1' instead",
        "seed=5 #6": "`seed` must be a whole number, but is '5 #6' instead",
        "model.options.x=[1": r"The value of an override must be YAML, but '\[1' is not",
        "sed=3": "`sed` is not a key of a recipe; did you mean `seed`",
    }
    assert_refused(cases.items(), lambda override: read_recipe(written(tmp_path), [override]))


IN_RANGE = {"optimization.warmup_updates": 0, "optimization.beta1": 0, "optimization.tokens_per_update": 1, "seed": 0}
IN_RANGE |= {"data.max_source_tokens": None, "validation.sentences": 0, "validation.patience": None}
IN_RANGE |= {"decoding.bootstrap": SMALLEST_BOOTSTRAP}
OUTSIDE = {"least": -1, "above": 0, "below": 0, "most": 0.5}  # of a bound, what is added to it


def test_a_number_out_of_the_range_of_its_key_is_refused_and_the_ends_of_a_range_are_in_it():
    ranges = {key.name: key for key in keys_of(Recipe) if key.bounds}
    assert {"seed", "data.max_source_tokens", "optimization.beta1", "checkpoints.keep_last"} <= ranges.keys()
    cases = [(name, limit + OUTSIDE[bound]) for name, key in ranges.items() for bound, limit in key.bounds.items()]
    cases += [(name, float("nan")) for name, key in ranges.items() if "a number" in key.values]
    cases += [("optimization.tokens_per_update", 0), ("decoding.bootstrap", -1)]
    cases += [("decoding.bootstrap", SMALLEST_BOOTSTRAP - 1), ("optimization.learning_rate", float("inf"))]
    message = r"`{}` must be .*, but is {:g}(\.0)? instead"
    refused([({name: value}, message.format(name, value)) for name, value in cases if value < 2**32])
    make_recipe(tiny_tree("x", IN_RANGE))


EPOCHS = {"optimization.max_updates": None, "optimization.max_epochs": 1}
FREE = {"optimization.optimizer": "schedule_free", "optimization.schedule": None}
CONTRADICTIONS = [
    ({"optimization.buckets_per_update": 3000}, "`optimization.tokens_per_update` must be at least 3000, but is 2000"),
    ({"allow_changes": True}, r"`allow_changes` must be false unless `resume` is"),
    ({"resume": True, "overwrite": True}, r"`resume` and `overwrite` must not both be true"),
    ({"optimization.max_updates": None}, r"One of `optimization.max_updates`, .* must be given, but none is"),
    ({"optimization.schedule": "cosine", **EPOCHS}, "`optimization.max_updates` must be given for the cosine sched"),
    ({"optimization.schedule": "linear", **EPOCHS}, "`optimization.max_updates` must be given for the linear sched"),
    ({"optimization.weight_decay": 0.1}, r"`optimization.weight_decay` must be 0 with adam.*but is 0.1 instead"),
    (
        {**FREE, "optimization.schedule": "linear"},
        r"`optimization.schedule` must be constant or empty .* linear instead",
    ),
    ({**FREE, "optimization.beta1": 0}, r"`optimization.beta1` must be above 0 with schedule_free"),
    ({"decoding.length_penalty": 0.6}, r"`decoding.length_penalty` must be 1 if `decoding.num_beams` is 1.*0.6"),
    ({"decoding.length_penalty_form": "gnmt"}, r"must be power if `decoding.num_beams` is 1.*but is gnmt instead"),
    ({"data.test": {"validation": "a.tsv"}}, r"`data.test` must not have a set called validation"),
    ({"data.test": {"ended": "a.tsv"}}, r"`data.test` must not have a set called ended"),
    ({"data.validation": None, "data.references": "x"}, "`data.validation` must be given if `data.references` is"),
    ({"data.validation": None, "data.streaming": True}, "`data.validation` must be given if `data.streaming` is"),
    ({"decoding.ignore": "(a"}, r"`decoding.ignore` must be a regular expression, but is '\(a' instead: missing \)"),
    (
        {"decoding.ignore": [9]},
        r"`decoding.ignore` must be text or empty, but is \[9\] .*: put quotes around",
    ),
    ({"decoding.bootstrap": 7}, r"`decoding.bootstrap` must be 0 or at least 40, but is 7 instead"),
    (
        {"data.mixture": {"a": {"train": "b.tsv", "tag": "bt"}}, "tokenizer.vocab_size": 260},
        r"`tokenizer.vocab_size` must be at least 261 for bpe \(5 special tokens, with .* 256 more\), but is 260",
    ),
    ({"decoding.max_length": 1}, r"`decoding.max_length` must be at least 2, but is 1 instead"),
    ({"validation.select": "bleu"}, r"`validation.select` must be loss if `validation.sentences` is 0"),
    ({"model.start_from": "m"}, r"`model.start_from` must be empty if `model.config` or `model.options` are given"),
    *[({"name": name}, "`name` must not be empty, but is '") for name in ("", "  ")],
    ({"seed": 2**32}, r"`seed` must be at least 0 and below 4294967296, but is 4294967296 instead"),
    ({"tokenizer": {"joint": False, "target_vocab_size": 0}}, r"`tokenizer.target_vocab_size` must be at least 1"),
]


def test_keys_that_exclude_each_other_are_refused():
    refused(CONTRADICTIONS)


def test_a_file_that_is_no_mapping_in_yaml_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"The recipe .*nowhere.yaml does not exist"):
        read_recipe(tmp_path / "nowhere.yaml")
    not_yaml = b"name: [", b"a: b: c", b"\t- x", "name: 한국".encode("cp949")
    cases = [
        *[(text, r"The recipe .*recipe.yaml must be YAML, but is not") for text in not_yaml],
        *[
            (
                b"name: " + text,
                "must be YAML, but is not: it is nested too deeply, or a value does not fit its type",
            )
            for text in (b"[" * 700, b"1" + b":1" * 300 + b".5", b"!!timestamp x", b"!!bool x", b"!!set [a]")
        ],
        *[(text, "must be a mapping of keys to values") for text in (b"", b"- name", b"just text")],
        (b"name: a\ndata: {source: ko}\nseed: 1\ndata: {source: en}", "`data` .* once, but is in lines 2 and 4"),
        (b"data: {train: a, train: b}", "`train` must occur once, but is in lines 1 and 1"),
    ]
    path = tmp_path / "recipe.yaml"
    assert_refused(cases, lambda content: (path.write_bytes(content), read_recipe(path)))


def test_a_recipe_written_as_yaml_is_read_back_the_same():
    changes = {"data.train": ["한국.ko", "a.en"], "data.test": {"one": "a", "two": ["b", "c"]}}
    changes |= {"card.limits": "뜻: x\ny", "optimization.epsilon": 1e-9, "data.cleaning.max_ratio": 2.5}
    changes |= {"optimization.mixed_precision": "no", "data.source": "no", "name": "1e3", "logging.trackers": ["a"]}
    recipe = make_recipe(tiny_tree("x", changes))
    text = to_yaml(recipe)
    assert make_recipe(yaml.safe_load(text)) == recipe
    assert to_yaml(make_recipe(yaml.safe_load(text))) == text
    assert "한국.ko" in text
    assert "warmup_updates" in text


def files_in(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("x", encoding="utf-8")


def splits_of(recipe):
    located = recipe.data.located
    return located.train, located.validation, located.test


LOCATED = """
name: located
data:
  train: [a.ko, a.en]
  validation: part-*.tsv
  test: {near: near.tsv, hub: someone/pairs, built_in: "builtin:test:5", lost: lost.tsv}
  source: ko
  target: en
tokenizer: {path: tokenizer}
model: {start_from: runs/model}
optimization: {max_updates: 5}
"""


def test_paths_in_a_recipe_are_relative_to_its_file_and_others_to_the_working_directory(tmp_path, monkeypatch):
    files_in(tmp_path / "mine", "a.ko", "a.en", "part-1.tsv", "near.tsv", "b.tsv")
    files_in(tmp_path / "mine" / "tokenizer", "tokenizer.json")
    files_in(tmp_path / "runs" / "model", "config.json")
    written(tmp_path / "mine", LOCATED)
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe("mine/recipe.yaml", ["data.validation=b.tsv"])
    test = {"near": "mine/near.tsv", "hub": "someone/pairs", "built_in": "builtin:test:5", "lost": "lost.tsv"}
    assert splits_of(recipe) == (["mine/a.ko", "mine/a.en"], "b.tsv", test)
    found = recipe.output, recipe.tokenizer.path, recipe.model.start_from
    assert found == ("runs/located", "mine/tokenizer", "runs/model")
    assert read_recipe("mine/recipe.yaml").data.validation == "mine/part-*.tsv"
    # One that is written out in full and read in another folder, and the same recipe from its own.
    written(tmp_path / "runs", to_yaml(recipe))
    assert read_recipe("runs/recipe.yaml").data == recipe.data
    monkeypatch.chdir(tmp_path / "mine")
    assert splits_of(read_recipe("recipe.yaml"))[:2] == (["a.ko", "a.en"], "part-*.tsv")


def test_the_data_folder_is_relative_to_its_file_and_stands_before_file_names_only(tmp_path, monkeypatch):
    files_in(tmp_path / "mine" / "corpus", "a.tsv")
    files_in(tmp_path / "mine", "a.tsv")
    written(tmp_path / "mine", SMALLEST.replace("{train", "{folder: corpus, train"))
    monkeypatch.chdir(tmp_path)
    for override, train in (([], "mine/corpus"), (["data.folder=else"], "else"), (["data.folder="], "mine")):
        assert read_recipe("mine/recipe.yaml", override).data.located.train == f"{train}/a.tsv"
    test = {"moved": "/else/a.tsv", "built_in": "builtin:test:5"}
    changes = {"data.train": ["a.de", "a.en"], "data.validation": "a.tsv", "data.test": test, "data.folder": "corpora"}
    located = splits_of(make_recipe(tiny_tree("x", changes)))
    assert located == (["corpora/a.de", "corpora/a.en"], "corpora/a.tsv", test)
    data = make_recipe(tiny_tree("x", changes | {"data.mixture": {"more": {"train": "b.tsv"}}})).data
    assert [part.train for part in data.parts.values()] == [["corpora/a.de", "corpora/a.en"], "corpora/b.tsv"]
    assert data.located.parts == data.parts


def pairs_file(folder, count=40):
    pairs = korean_english_pairs("train", count)
    (folder / "pairs.tsv").write_text("".join(f"{pair['ko']}\t{pair['en']}\n" for pair in pairs), encoding="utf-8")


SHORT = "data: {train: pairs.tsv, source: 1, target: 2}\n"


def test_a_recipe_of_data_alone_is_completed_for_them_and_says_so(tmp_path, caplog):
    pairs_file(tmp_path)
    with caplog.at_level("INFO"):
        recipe = read_recipe(written(tmp_path, SHORT), ["optimization.device=cpu"], complete)
    proposal, _ = propose(survey(read_pairs(recipe.data.train, "1", "2")), this_machine("cpu"))
    assert recipe.name == "recipe"
    assert recipe.model.options == proposal["model.options"]
    assert recipe.optimization.max_updates == proposal["optimization.max_updates"]
    told = dict(line.strip().split(": ", 1) for line in caplog.text.splitlines()[1:])
    assert told == {key: str(value) for key, value in proposal.items()}
    assert read_recipe(written(tmp_path, to_yaml(recipe))) == recipe  # and nothing is chosen anew


def test_what_a_short_recipe_or_an_override_gives_is_kept(tmp_path, caplog):
    pairs_file(tmp_path)
    path = written(tmp_path, SHORT + "name: mine\nmodel: {config: small}\ntokenizer: {path: runs/tokenizer}\n")
    with caplog.at_level("INFO"):
        recipe = read_recipe(path, ["optimization.max_updates=7", "optimization.device=cpu"], complete)
    assert (recipe.name, recipe.model.config, recipe.model.options) == ("mine", "small", {})
    assert (recipe.optimization.max_updates, recipe.optimization.schedule) == (7, "linear")
    assert recipe.tokenizer.vocab_size == 8000
    assert "max_updates" not in caplog.text
    # Only a file without `optimization` is completed, and only where that is asked for.
    given = written(tmp_path, SHORT + "name: x\noptimization: {max_updates: 3}\n")
    assert read_recipe(given, complete=complete).model.options == {}
    way_out = r"`optimization` of .*recipe.yaml must be given, but is missing: .* complete such a file"
    for more, own, message in (
        ("model: {start_from: runs/model}\n", complete, "`optimization` must be given, but is missing"),
        ("", None, way_out),
    ):
        assert_error(message, read_recipe, written(tmp_path, SHORT + "name: x\n" + more), complete=own)


def test_what_is_proposed_fits_an_optimizer_schedule_or_model_of_the_users_own(tmp_path, monkeypatch):
    pairs_file(tmp_path)
    monkeypatch.setattr(proposal_module, "survey", lambda *_: DataFacts(12_000, 90.0, (100, 100)))

    def found(*overrides):
        own = [f"optimization.{override}" for override in ("device=cpu", *overrides)]
        settings = read_recipe(written(tmp_path, SHORT), own, complete).optimization
        peak = learning_rate(settings.warmup_updates, settings, d_model=128)
        return settings.optimizer, settings.embedding_learning_rate, round(peak, 4)

    assert found() == ("muon", 0.012, 0.006)
    for name in ("adam", "adamw", "schedule_free"):
        assert found(f"optimizer={name}") == (name, None, 0.002)
    assert found("schedule=paper", "optimizer=adam") == ("adam", None, 0.002)
    assert found("schedule=paper") == ("muon", 2.8021, 0.006)  # both are factors
    assert found("weight_decay=0.1")[0] == "muon"
    for own, published in (("seed=1", "last"), ("validation.patience=3", "best"), ("validation.select=bleu", "best")):
        assert read_recipe(written(tmp_path, SHORT), [own], complete).checkpoints.publish == published
    path = written(tmp_path, SHORT + "model: {config: rnn-gru-additive}\n")
    for own, chosen in (("seed=1", "adam"), ("optimization.weight_decay=0.1", "adamw")):
        assert read_recipe(path, ["optimization.device=cpu", own], complete).optimization.optimizer == chosen


@pytest.mark.parametrize("override", ["data.train=mine.tsv", "data={train: x, validation: y, source: ko, target: en}"])
def test_other_training_data_do_not_inherit_the_card_of_the_recipes_own(override):
    assert read_recipe("quickstart", ["seed=3"]).card.license == "apache-2.0"
    card = read_recipe("multi30k-de-en", [override, "card.license=mit"]).card
    assert (card.license, card.dataset, card.intended_use, card.limits) == ("mit", None, None, None)
    assert card.source_language == "de"
    assert read_recipe("multi30k-de-en", ["data.folder=else"]).card.dataset == "Multi30k"


def test_a_language_that_yaml_reads_as_false_is_norwegian(tmp_path):
    path = written(tmp_path, SMALLEST.replace("source: ko", "source: no"))
    overrides = ["data.target=no", "card.source_language=no", "data.validation=c", "data.mixture.more.train=b"]
    recipe = read_recipe(path, [*overrides, "data.mixture.more.source=no"])
    assert (recipe.data.source, recipe.data.target, recipe.card.source_language) == ("no", "no", "no")
    assert recipe.data.mixture["more"].source == "no"


@pytest.mark.parametrize("key", ["data.train", "seed", "data", "k" * 9000])
def test_messages_are_short_however_large_the_value_is(key):
    with pytest.raises(ValueError, match=r"must be|is not a key") as error:
        make_recipe(tiny_tree("x", {key: [["very long"] * 9000]}))
    assert len(str(error.value)) < 300


HOSTILE = ["a: b", 'quote " and \\', "line\nend\r\x85\u2028", "# no", "no", "5", "\x1b[0m가😀", "", None]


def test_a_text_is_written_for_yaml_on_one_line():
    for text in HOSTILE:
        written = yaml_text(text)
        assert len(written.splitlines()) == 1
        assert yaml.safe_load(f"a: {written} # {written}") == {"a": text}


def test_the_recipe_in_a_strangers_folder_names_no_file_elsewhere_and_no_pattern(tmp_path, monkeypatch):
    stranger, token = tmp_path / "stranger", tmp_path / "token.txt"
    stranger.mkdir()
    for file in (token, stranger / "own.txt"):
        file.write_text("a line\n")
    (stranger / "link.txt").symlink_to(token)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "glob", lambda *_: pytest.fail("a pattern was looked for"))
    names = ["token.txt", "../token.txt", "~/token.txt", str(token), "link.txt"]
    names += ["*.txt", "../**/*", "C:\\token.txt", ""]
    for name in names:
        for more in ({}, {"folder": ".."}, {"folder": str(tmp_path)}, {"held_out": {"train": name}}):
            data = {"train": [name, "own.txt"], "source": "a", "target": "b", "test": {"new": name}, **more}
            tree = {"name": "a", "data": data, "optimization": {"max_updates": 1}}
            (stranger / "recipe.yaml").write_text(yaml.safe_dump(tree))
            recipe = recipe_of(stranger)
            assert recipe.data.located.train[1] == str(stranger / "own.txt")
            read = [recipe.data.located.train[0], recipe.data.located.test["new"], *recipe.data.held_out.values()]
            assert all(Path(each).parent == stranger and not Path(each).is_file() for each in read), read
    (stranger / "recipe.yaml").write_text(yaml.safe_dump({**tree, "decoding": {"ignore": "(.+)+$x"}}))
    assert_error("`decoding.ignore` of .* must be a simple pattern", recipe_of, stranger)
    (stranger / "recipe.yaml").unlink()
    (stranger / "recipe.yaml").symlink_to(token)
    assert_error("has no recipe.yaml", recipe_of, stranger, error=FileNotFoundError)
