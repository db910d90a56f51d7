"""A student that learns from a teacher's tokens: what the recipe refuses, and that it does learn."""

import shutil

import pytest
import torch

from heedful.data.epochs.teacher import TeacherTokens, teacher_tensors
from heedful.data.micro_batches import collate
from heedful.data.sources import read_pairs
from heedful.data.tokenizer_training import train_tokenizers
from heedful.diagnosis.doctor import diagnose
from heedful.diagnosis.estimate import dry_run
from heedful.training.model_of_recipe import check_model
from heedful.training.preparation import prepare_corpus
from heedful.training.recipe_file import read_recipe, to_yaml
from heedful.training.speed.end_to_end import laid_end_to_end
from helpers import assert_refused
from process_checks import write_teacher
from tiny_runs import logged, tiny_recipe


def test_a_student_comes_nearer_to_its_teacher_the_more_weight_it_has(make_loop, tmp_path, distillation):
    distances = []
    for weight in (0.01, 1.0):
        changes = {**distillation, "optimization.distillation_weight": weight, "optimization.max_updates": 12}
        make_loop(changes, tmp_path / str(weight)).run()
        added, loss = (logged(tmp_path / str(weight), f"train/{name}")[-1] for name in ("distillation", "loss"))
        distances.append(loss + added / weight)  # CE(teacher)
    assert distances[1] < distances[0] - 0.1


def test_what_the_teacher_says_lies_at_its_label_however_rows_are_laid(corpus, distillation):
    teacher = TeacherTokens(distillation["optimization.distillation"])
    rows = [teacher.with_tokens(corpus.rows[number]) for number in range(20)]
    for batch in (collate(rows, 0), laid_end_to_end(rows, 700, 0, 1)):
        found = teacher_tensors(rows, batch["labels"])
        is_label = batch["labels"] != -100
        for name, values in found.items():
            expected = torch.cat([torch.from_numpy(row[name].astype("float32")) for row in rows])
            expected = expected / expected.sum(-1, keepdim=True) if "prob" in name else expected
            assert torch.allclose(values[is_label].float(), expected, atol=1e-3)
        assert found["teacher_probabilities"][is_label].sum(-1) == pytest.approx(1, abs=1e-6)
        assert not found["teacher_probabilities"][~is_label].any()
    assert teacher_tensors([corpus.rows[0]], batch["labels"]) == {}  # as the row by which DDP builds its buckets


def test_dry_run_and_doctor_know_the_teacher(tmp_path, distillation, corpus):
    corpus.tokenizers.save_pretrained(tmp_path / "tokenizer")
    changes = {**distillation, "tokenizer": {"path": str(tmp_path / "tokenizer")}, "optimization.max_minutes": 1.0}
    assert "distillation_weight: 0.5" in str(dry_run(tiny_recipe(tmp_path / "run", changes)))
    assert not diagnose(tiny_recipe(tmp_path / "run", changes)).has_errors
    (finding, *_) = diagnose(tiny_recipe(tmp_path / "run", {**changes, "data.train": "builtin:train:301"})).findings
    assert (finding.level, finding.check, finding.where) == ("error", "distillation", "optimization.distillation")


def test_what_does_not_fit_the_teacher_is_refused_before_training(tmp_path, distillation, corpus, make_loop):
    folder = tmp_path / "teacher"
    shutil.copytree(distillation["optimization.distillation"], folder)
    changes = {"optimization.distillation": str(folder)}
    corpus.tokenizers.save_pretrained(tmp_path / "tokenizer")

    def prepare(**more):
        return prepare_corpus(tiny_recipe(tmp_path / "run", {**changes, **more}), tmp_path / "tokenizer")

    expected = prepare().fingerprint
    assert expected.startswith(corpus.fingerprint)
    with pytest.raises(ValueError, match=r"must be of all training pairs, but lacks '.+' with '.+'"):
        prepare(**{"data.train": "builtin:train:301"})
    pairs = read_pairs("builtin:train:200", "ko", "en")
    other = train_tokenizers(pairs["source"], pairs["target"], vocab_size=400)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"must be of the student's tokenizer, but is not: set `tokenizer.path`"):
        prepare_corpus(tiny_recipe(tmp_path / "run", changes), tmp_path / "other")
    with pytest.raises(ValueError, match="must be of the student's tokenizer"):
        check_model(tiny_recipe(tmp_path / "run", changes), other)  # before the corpus is read
    # Another teacher of the same pairs makes it another run.
    write_teacher(tmp_path / "second", corpus.tokenizers, "builtin:train:310")
    assert prepare(**{"optimization.distillation": str(tmp_path / "second")}).fingerprint != expected
    whole = (folder / "tokens.npy").read_bytes()
    for damaged, told in (
        (whole[:-2] + b"\x00\x01", "as it was written, but is damaged or changed"),
        (whole[:-9], "what `heedful distill-tokens` wrote, but is not"),
        (b"", "what `heedful distill-tokens` wrote, but is not"),
    ):
        (folder / "tokens.npy").write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"`optimization.distillation` \(.+teacher\) must be {told}"):
            prepare()
    (folder / "tokens.npy").unlink()
    with pytest.raises(ValueError, match="what `heedful distill-tokens` wrote, but is not: FileNotFoundError"):
        prepare()


def test_settings_that_a_teacher_excludes_are_named(tmp_path):
    teacher = {"optimization.distillation": "tokens"}
    cases = [
        ({"optimization.distillation_weight": 0.3}, "`optimization.distillation_weight` must be 0.5 where"),
        ({**teacher, "optimization.distillation_weight": 0.0}, "must be above 0 and at most 1, but is 0.0"),
        ({**teacher, "optimization.distillation_weight": 1.1}, "must be above 0 and at most 1, but is 1.1"),
        (
            {**teacher, "data.augmentation": {"typos": 0.1}},
            "`data.augmentation` must be empty where .+ {'typos': 0.1}",
        ),
        (
            {**teacher, "data.mixture": {"x": {"train": "builtin:train:9", "tag": "bt"}}},
            "`data.mixture.x.tag` must be empty where .+, but is bt",
        ),
        ({**teacher, "data.streaming": True}, "`data.streaming` must be false where .+, but is True instead"),
    ]
    assert_refused(cases, lambda changes: tiny_recipe(tmp_path, changes))


def test_a_teacher_beside_the_recipe_is_found_from_anywhere(tmp_path):
    (tmp_path / "tokens").mkdir()
    recipe = tiny_recipe(tmp_path, {"optimization.distillation": "tokens", "optimization.distillation_weight": 0.7})
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    assert read_recipe(tmp_path / "recipe.yaml").optimization.distillation == str(tmp_path / "tokens")
    assert read_recipe(tmp_path / "recipe.yaml", ["optimization.distillation=x"]).optimization.distillation == "x"
