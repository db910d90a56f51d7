"""Stages of a recipe: one tokenizer, one folder, one log and one card, and the same to the bit when it is killed."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from guides import commands_of, run_commands, text_of
from heedful import TokenizerPair
from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.publishing.exports.transformers_export import check_recipe
from heedful.publishing.run_card import facts_of, publish_run
from heedful.training import preparation
from heedful.training import run as run_module
from heedful.training import stages as stages_module
from heedful.training.loop.schedule import learning_rate
from heedful.training.processes.signals import TrainingInterrupted
from heedful.training.recipe_file import read_recipe
from heedful.training.run import train
from heedful.training.stages import rehearsed, stages_of
from helpers import assert_refused, run_python
from process_checks import equal
from tiny_runs import SIZES, logged, recipe_file, table_file, tiny_recipe, tiny_tree

BOTH = {"name": "both", "data": {"both_directions": True}}
ONE = {"name": "one", "optimization": {"max_updates": 4, "learning_rate": 0.001}, "seed": 2}
STAGES = {"stages": [BOTH, ONE], "checkpoints.every_updates": 2, "data.test": {"test": "builtin:test:2"}}
STAGES |= {"decoding.max_length": 60}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of a run of two stages that nothing has stopped."""
    return train(tiny_recipe(tmp_path_factory.mktemp("whole") / "run", STAGES))


def test_each_stage_begins_with_the_model_of_the_one_before_and_the_last_ones_is_published(whole):
    folder = whole.recipe.folder
    assert {path.name for path in folder.iterdir()} == {"recipe.yaml", "log.jsonl", "stages", "model"}
    first, second = (folder / "stages" / name / "model" for name in ("1-both", "2-one"))
    weights, before, after = (load_file(each / "model.safetensors") for each in (whole.folder, first, second))
    assert equal(weights, after)
    assert not equal(before, after)
    assert read_recipe(second / "recipe.yaml").model.start_from == str(first)
    assert [(stage.name, stage.progress.update) for stage in whole.stages] == [("both", 6), ("one", 4)]
    # It was made of the first stage's last weights: one more update changes little.
    losses = logged(folder, "train/loss")
    assert losses[6] < losses[0] - 0.3


def test_one_log_counts_on_and_one_card_names_the_stages(whole):
    pytest.importorskip("matplotlib")
    lines = [json.loads(line) for line in (whole.recipe.folder / "log.jsonl").read_text().splitlines()]
    trained = [(line["stage"], line["update"]) for line in lines if "train/loss" in line]
    assert trained == [*(("both", n) for n in range(1, 7)), *(("one", n) for n in range(7, 11))]
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    list(publish_run(whole))
    card = (whole.folder / "README.md").read_text(encoding="utf-8")
    assert "| Updates | 10 |" in card
    assert "| both | 6 |" in card
    assert "| one | 4 |" in card
    assert "learning_curve.png" in card


def test_one_tokenizer_has_the_tags_of_all_stages_and_a_stage_of_one_direction_writes_its_tag(whole):
    pair = TokenizerPair.from_pretrained(whole.folder)
    assert set(pair.languages) == {"ko", "en"}
    assert whole.corpus.target_language == "en"
    assert whole.corpus.rows[0]["input_ids"][:1] == pair.head("en")


def test_the_tokenizer_of_stages_learns_from_both_sides_as_that_of_a_run_does(tmp_path):
    stages = {"stages": [{"name": name, "optimization": {"max_updates": 1}} for name in ("one", "two")]}
    of_stages, alone = (
        train(tiny_recipe(tmp_path / name, {**changes, "optimization.max_updates": 1}))
        for name, changes in (("stages", stages), ("run", {}))
    )
    found, expected = (
        TokenizerPair.from_pretrained(result.folder).source.get_vocab() for result in (of_stages, alone)
    )
    assert found == expected


MOMENTS = ("before the tokenizers", "before the first update", "in a stage", "at the border", "at the end")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_is_killed_goes_on_to_the_same_bit(whole, tmp_path, monkeypatch, moment):
    calls = []

    def killed_before_a_train(stage, *rest):
        if len(calls) == {"before the first update": 0, "at the border": 1}.get(moment, 9):
            raise TrainingInterrupted("killed")
        calls.append(stage.name)
        return run_module.train_one(stage, *rest)

    def killed_before_a_save(*_, **__):
        raise TrainingInterrupted("killed")

    with monkeypatch.context() as patch:
        patch.setattr(stages_module, "train_one", killed_before_a_train)
        if moment == "at the end":
            patch.setattr(stages_module, "written_folder", killed_before_a_save)
        if moment == "before the tokenizers":
            patch.setattr(stages_module.preparation, "save_tokenizers", killed_before_a_save)
        if moment == "in a stage":
            patch.setattr(run_module, "publish_weights", killed_before_a_save)
        with pytest.raises(TrainingInterrupted):
            train(tiny_recipe(tmp_path / "run", STAGES))
    assert not (tmp_path / "run" / "model").exists()
    with pytest.raises(ValueError, match="`output` must be an empty folder"):
        train(tiny_recipe(tmp_path / "run", STAGES))
    result = train(tiny_recipe(tmp_path / "run", {**STAGES, "resume": True}))
    assert result.metrics == whole.metrics
    assert equal(load_file(result.folder / "model.safetensors"), load_file(whole.folder / "model.safetensors"))
    assert logged(tmp_path / "run", "train/loss") == logged(whole.recipe.folder, "train/loss")


def test_each_stage_that_ends_early_says_so_and_the_last_one_goes_on_by_its_own_key(tmp_path):
    late = {"max_minutes": 1e-6}
    stages = [{"name": "a", "optimization": late}, {"name": "b", "optimization": late | {"max_updates": 2}}]
    file = recipe_file(tmp_path, {"stages": stages})
    result = train(read_recipe(file))
    *_, first, last = publish_run(result)
    assert first.startswith("Training ended after update 1 of 6, by `stages.a.optimization.max_minutes`")
    assert first.endswith(": the next stage goes on from there.")
    assert json.loads((result.folder / "metrics.json").read_text())["ended"]["message"] == last
    assert "`resume=true stages.b.optimization.max_minutes=…` goes on" in last
    card = (result.folder / "README.md").read_text(encoding="utf-8")
    assert f"\n{first}\n\n{last}\n" in card
    assert "ended:" not in card
    result = train(read_recipe(file, ["resume=true", "stages.b.optimization.max_minutes=9"]))
    assert result.progress.update == 2
    assert [*publish_run(result)][-1] == first
    assert (result.folder / "metrics.json").read_text().count("ended") == 0


def test_what_is_the_users_stays_when_a_run_goes_on(whole):
    (whole.folder / "NOTES.md").write_text("mine")
    train(tiny_recipe(whole.recipe.folder, {**STAGES, "resume": True}))
    assert (whole.folder / "NOTES.md").read_text() == "mine"
    assert read_recipe(whole.folder / "recipe.yaml").stages == [BOTH, ONE]  # of the whole run, not of the last stage


def test_a_stage_that_is_over_cannot_change_when_a_run_goes_on(whole):
    cases = [
        ({"stages": [{**BOTH, "seed": 5}, ONE]}, "Stage both of the recipe: `seed` must be as in the run"),
        ({"optimization.max_updates": 9}, r"Stage both .*`optimization\.max_updates` must be as it was \(6\), .* 9"),
        ({"stages": [BOTH, {**ONE, "seed": 3}]}, "Stage one of the recipe: `seed` must be as in the run"),
        ({"stages": [BOTH]}, "`stages` must be as in the run"),
    ]
    resumed = {**STAGES, "resume": True}
    assert_refused(cases, lambda changes: train(tiny_recipe(whole.recipe.folder, resumed | changes)))


def test_no_stage_learns_a_text_that_another_one_is_validated_or_tested_with(tmp_path):
    pairs = [*korean_english_pairs("test", 4), *korean_english_pairs("train", 20)]
    file = table_file(tmp_path / "pairs.tsv", [("ko", "en"), *((pair["ko"], pair["en"]) for pair in pairs)])
    first = {"name": "first", "data": {"train": file, "both_directions": True, "test": {}}}
    recipe = tiny_recipe(tmp_path / "run", {"stages": [first, ONE], "data.test": {"mine": "builtin:test:4"}})
    data = stages_of(recipe)["first"].data
    assert data.held_out == {"one.mine": "builtin:test:4"}
    report = preparation.clean(preparation.read_splits(data), data).report
    assert report.dropped["overlap"] == 4
    assert report.kept == 20
    alone = {"stages": [first, ONE], "data.validation": None}
    with pytest.raises(ValueError, match=r"`data\.validation` must be given where"):
        stages_of(tiny_recipe(tmp_path / "run", alone))
    same = {"stages": [{"name": "first", "seed": 3}, ONE], "data.validation": None}
    assert len(stages_of(tiny_recipe(tmp_path / "run", same))) == 2


def test_a_card_has_the_data_of_all_stages_and_claims_no_license_of_one(whole):
    first, second = whole.stages
    own = replace(first, data=replace(first.data, train="mine.tsv"))
    assert facts_of(whole).license == "apache-2.0"
    facts = facts_of(replace(whole, stages=(own, second)))
    assert facts.license == "unknown"
    assert facts.datasets == ["mine.tsv", "builtin:train:300"]


@pytest.mark.multiprocess
def test_two_processes_train_all_stages_as_one_does_and_move_an_earlier_run_aside(tmp_path):
    changes = {**STAGES, "model.options": {**SIZES, "dropout": 0.0}}
    path = recipe_file(tmp_path, {**changes, "output": str(tmp_path / "run")})
    train(read_recipe(path))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run_python(*launcher, "-m", "heedful", "train", path, "overwrite=true")
    of_one = logged(tmp_path / "run.1", "train/loss")
    assert len(of_one) == 10
    assert logged(tmp_path / "run", "train/loss") == pytest.approx(of_one)


WRONG = [
    ([{"data": {}}], r"`stages\.1\.name` must be another one for each stage, .* but is None instead"),
    ([BOTH, BOTH], r"`stages\.2\.name` must be another one .* 'both'"),
    ([{"name": "a b"}], r"`stages\.1\.name` must be .*'a b'"),
    (
        [{"name": "a", "model": {"options": {"d_model": 8}}}],
        r"`stages\.a\.model\.options` must be left out, .*: all",
    ),
    ([{"name": "a", "model": {"start_from": "x"}}], r"`stages\.a\.model\.start_from` must be left out"),
    ([{"name": "a", "tokenizer": {"vocab_size": 500}}], r"`stages\.a\.tokenizer` must be left out"),
    ([{"name": "a", "output": "x"}], r"`stages\.a\.output` must be left out"),
    (
        [{"name": "a", "optimization": {"max_update": 3}}],
        r"Stage a of the recipe: `optimization\.max_update` is not",
    ),
    ([{"name": "a", "data": {"train": "builtin:train:0"}}], "builtin"),
    ([ONE, {"name": "a", "optimization": {"distillation": "nowhere"}}], "nowhere"),
    (5, "`stages` must be a list"),
]


def test_what_a_stage_cannot_change_is_named_before_anything_is_written(tmp_path):
    def run(changes):
        train(read_recipe(recipe_file(tmp_path, {"output": str(tmp_path / "run"), **changes})))

    assert_refused(WRONG, lambda stages: run({"stages": stages}))
    many = {"stages": [BOTH, ONE], "publish.also": ["transformers"]}
    with pytest.raises(ValueError, match="of several target languages"):
        check_recipe(tiny_recipe(tmp_path / "run", many))
    with pytest.raises(ValueError, match=r"`tokenizer\.sentences` must be empty where"):
        run({"stages": [ONE], "tokenizer.sentences": 9})
    assert not [*(tmp_path / "run").glob("*")]


def test_a_stage_with_another_optimizer_has_the_schedule_of_that_one(tmp_path):
    def rates(first, second):
        changes = {"optimization.optimizer": first, "optimization.schedule": None}
        stages = [{"name": "a"}, {"name": "b", "optimization": {"optimizer": second}}]
        found = stages_of(tiny_recipe(tmp_path / "run", {**changes, "stages": stages}))
        return [round(learning_rate(8, stage.optimization, d_model=16), 5) for stage in found.values()]

    paper = round(0.003 * 16**-0.5 * 8**-0.5, 5)
    assert rates("schedule_free", "adam") == [0.003, paper]
    assert rates("adam", "schedule_free") == [paper, 0.003]


def test_a_file_has_paths_of_its_folder_in_stages_and_an_override_names_a_stage(tmp_path):
    (tmp_path / "pairs.tsv").write_text("source\ttarget\n")
    path = recipe_file(tmp_path, {"stages": [{"name": "a", "data": {"train": "pairs.tsv"}}, ONE]})
    recipe = read_recipe(path, ["stages.one.optimization.max_updates=3", "seed=5"])
    first, second = stages_of(recipe).values()
    assert first.data.train == str(tmp_path / "pairs.tsv")
    assert (first.seed, second.seed, second.optimization.max_updates) == (5, 2, 3)
    assert second.optimization.learning_rate == 0.001
    with pytest.raises(ValueError, match=r"`stages\.two\.seed` must name a stage \(a, one\), but names 'two'"):
        read_recipe(path, ["stages.two.seed=3"])
    empty = {"name": "b", "data": {"test": {}}}
    recipe = tiny_recipe(tmp_path / "run", {"stages": [empty, ONE], "data.test": {"test": "builtin:test:4"}})
    assert [len(stage.data.test) for stage in stages_of(recipe).values()] == [0, 1]


def test_the_guides_recipe_is_one_and_its_commands_run(tmp_path, monkeypatch, printed):
    section = text_of("low_resource").split("## In stages")[1].split("\n## ")[0]
    written = yaml.safe_load(re.search(r"```yaml\n(.*?)```", section, re.DOTALL)[1])["stages"]
    assert [list(stages_of(tiny_recipe(tmp_path, {"stages": written})))] == [["both", "one"]]
    monkeypatch.chdir(tmp_path)
    tree = tiny_tree("runs/pairs", {**STAGES, "optimization.max_updates": 4, "optimization.warmup_updates": 1})
    tree["stages"] = [BOTH, {"name": "one", "optimization": {"max_updates": 1000, "max_minutes": 0.001}}]
    Path("pairs.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    commands = commands_of(section)
    assert len(commands) == 4
    run_commands(printed, commands)


def test_a_dry_run_and_the_doctor_read_all_stages(tmp_path, printed, heedful_command):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_tree(tmp_path / "run", STAGES)), encoding="utf-8")
    shown = printed("train", path, "--dry-run")
    assert shown.startswith("stage both:\n")
    assert "\nstage one:\n" in shown
    code, output, _ = heedful_command("doctor", path, "--json", "--pairs", "200")
    assert set(json.loads(output)) == {"both", "one"}
    assert code == 0
    code, output, _ = heedful_command("doctor", path, "stages.one.data.max_source_tokens=2")
    assert code == 1
    assert "No training pair is left" in output.split("stage one:")[1]
    assert not (tmp_path / "run").exists()
    with rehearsed(read_recipe(path)) as stages:
        assert {stage.tokenizer.path for stage in stages.values()} != {None}
