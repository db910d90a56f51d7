"""What a student learns from: a teacher's translations, chosen and kept by rule, and its most probable tokens."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from guides import assert_named, commands_of, run_commands, text_of
from heedful import BeamSearch, HeedForConditionalGeneration, TokenizerPair, Translator
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder
from heedful.data.epochs.micro_batches import collate
from heedful.data.epochs.teacher import TeacherTokens, teacher_tensors
from heedful.data.sources import read_pairs
from heedful.data.tokenizer_training import train_tokenizers
from heedful.distillation.back_translation import SequenceDistillation, is_useful
from heedful.distillation.candidates import CandidateChoice
from heedful.distillation.distillation import write_teacher_tokens
from helpers import assert_error, tiny_model
from memorised import saved_in
from tiny_runs import tiny_tree

SECTION = text_of("distill").split("## Candidates from")[0]


@pytest.fixture(scope="module")
def other(model) -> HeedForConditionalGeneration:
    """A second teacher, which is often of another opinion."""
    torch.manual_seed(1)
    weights = {name: weight + 0.1 * torch.randn_like(weight) for name, weight in model.state_dict().items()}
    second = HeedForConditionalGeneration(model.config).eval()
    second.load_state_dict(weights)
    return second


@pytest.fixture
def rows(pairs) -> list[dict[str, str]]:
    return [{"source": source, "target": "The dog eats an apple."} for source in pairs]


def test_an_ensemble_translates_as_its_models_do_together(model, other, tokenizers, pairs):
    ensemble, search = Translator(model, tokenizers, ensemble=[other]), {"num_beams": 3, "num_return_sequences": 2}
    found = ensemble.translate(list(pairs), **search, max_new_tokens=20)
    for source, translations in zip(pairs, found, strict=True):
        inputs = {"input_ids": torch.tensor(tokenizers.encode_source([source])), "max_new_tokens": 20, **search}
        strategy = {"custom_generate": BeamSearch(models=[other]), "return_dict_in_generate": True}
        plain = model.generate(**inputs, **strategy)
        assert [each.text for each in translations] == tokenizers.decode_target(plain.sequences)
        assert [each.score for each in translations] == pytest.approx(plain.sequences_scores.tolist(), abs=1e-5)
    alone = Translator(model, tokenizers).translate(list(pairs), **search)
    assert [each.text for row in alone for each in row] != [each.text for row in found for each in row]
    message = "`engine` must be generate for an `ensemble`, but is native"
    assert_error(message, Translator, model, tokenizers, engine="native", ensemble=[other])
    message = r"left out, because the model itself scores pairs, but are generate, float32 and 1 models"
    assert_error(message, ensemble.score_pairs, [("a", "b")])


def test_targets_are_the_best_of_the_beam_and_useless_ones_are_left_out(model, tokenizers, rows):
    translator, making = Translator(model, tokenizers), SequenceDistillation(6)
    rows = [*rows, {"source": "  ", "target": "."}]
    beams = translator.translate([row["source"] for row in rows], num_beams=6)
    pairs = [(row["source"], best) for row, (best,) in zip(rows, beams, strict=True)]
    expected = [{"source": source, "target": best.text} for source, best in pairs if best.text and best.finished]
    assert list(making.pairs(translator, rows)) == expected
    assert making.left_out == len(rows) - len(expected) >= 1
    making = SequenceDistillation(1)
    with pytest.warns(UserWarning, match="cut off at 6 tokens"):
        assert len(list(making.pairs(translator, rows, max_new_tokens=6))) == 9 - making.left_out < 8


def test_a_choice_is_made_from_the_whole_beam(model, tokenizers, rows):
    translator, seen = Translator(model, tokenizers), []

    def choose(given):
        seen.extend(given)
        yield from ({"source": source, "target": texts[-1][0]} for source, texts in seen)

    beams = translator.translate([row["source"] for row in rows], num_beams=6, num_return_sequences=6)
    useful = [[each for each in made if each.text.strip() and is_useful(each)] for made in beams]
    found = list(SequenceDistillation(6).pairs(translator, rows, choose))
    assert [pair["target"] for pair in found] == [made[-1].text.strip() for made in useful]
    assert [[score for _, score in texts] for _, texts in seen] == [[each.score for each in made] for made in useful]
    assert max(map(len, useful)) > 1


@pytest.mark.parametrize("is_ensemble", [False, True])
def test_most_probable_tokens_are_those_of_the_teachers_mean(model, other, tokenizers, pairs, tmp_path, is_ensemble):
    models = [model, other] if is_ensemble else [model]
    texts = [{"source": source, "target": target} for source, target in pairs.items()]
    translator = Translator(model, tokenizers, ensemble=models[1:])
    assert write_teacher_tokens(tmp_path / "teacher", translator, [*texts, texts[0]], (), 5, 60) == (9, 0)
    teacher, rows = TeacherTokens(tmp_path / "teacher"), EncodedPairs(PairEncoder(tokenizers).rows(texts))
    for row in (rows[number] for number in range(len(rows))):
        batch = collate([row], 0)
        with torch.inference_mode():
            probabilities = sum(each(**batch).logits[0].softmax(-1) for each in models) / len(models)
        expected = probabilities.topk(5)
        tokens, values = teacher_tensors([teacher.with_tokens(row)], batch["labels"][0]).values()
        assert torch.equal(tokens, expected.indices)
        assert torch.allclose(values, expected.values / expected.values.sum(-1, keepdim=True), atol=1e-3)
    with pytest.raises(ValueError, match="`top_k` must be at most 290, all tokens, but is 291"):
        write_teacher_tokens(tmp_path / "more", Translator(model, tokenizers), texts, (), 291)


def test_a_teacher_of_two_languages_knows_both_directions(tmp_path, pairs):
    tokenizers = train_tokenizers(list(pairs), list(pairs.values()), vocab_size=300, languages=("ko", "en"))
    teacher = Translator(tiny_model(vocab_size=len(tokenizers.source), **tokenizers.special_ids()), tokenizers)
    texts = [{"source": source, "target": target} for source, target in pairs.items()]
    write_teacher_tokens(tmp_path / "teacher", teacher, texts, ("en", "ko"))
    encoder = PairEncoder(tokenizers, heads=[tokenizers.head("en"), tokenizers.head("ko")])
    turned = [{"source": text["target"], "target": text["source"], "part": 1} for text in texts]
    rows = EncodedPairs(encoder.rows(texts + turned))
    assert len(rows) == 16
    TeacherTokens(tmp_path / "teacher").check(tokenizers, rows)


def test_a_tokenizer_is_known_by_what_it_does(tokenizers, pairs, tmp_path):
    tokenizers.save_pretrained(tmp_path)
    loaded = TokenizerPair.from_pretrained(tmp_path)
    loaded.source(list(pairs), padding=True, truncation=True, max_length=5)
    others = [train_tokenizers(list(pairs), list(pairs.values()), vocab_size=size) for size in (289, 290)]
    same = [each.fingerprint() == tokenizers.fingerprint() for each in (loaded, *others)]
    assert same == [True, False, True]
    loaded.source.add_tokens(["apple"])
    assert loaded.fingerprint() != tokenizers.fingerprint()


@pytest.fixture
def distill(model, other, tokenizers, pairs, tmp_path, monkeypatch, heedful_command):
    monkeypatch.chdir(tmp_path)
    for name, each in (("teacher", model), ("other", other)):
        saved_in(f"runs/{name}/model", each, tokenizers)
    Path("pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs.items()), encoding="utf-8")
    return partial(heedful_command, "distill")


def test_wrong_use_is_told_and_leaves_nothing(distill, heedful_command, other, pairs):
    texts = [text[::-1] for pair in pairs.items() for text in pair]
    saved_in("runs/stranger", other, train_tokenizers(texts, texts, vocab_size=290))
    data = ["runs/teacher/model", "--data", "pairs.tsv", "--source", "1", "--target", "2", "-o"]
    cases = [
        ([*data, "new.txt"], "`--output` must end in .jsonl or .jsonl.gz"),
        ([*data, "new.jsonl", "--num-beams", 0], "`--num-beams` must be at least 1, but is 0"),
        ([*data, "new.jsonl", "--num-beams", 1, "--reverse", "runs/other/model"], "`--num-beams` must be at least 2"),
        ([*data, "new.jsonl", "--to", "de"], "`--to` must be left out for a model without tags"),
    ]
    tokenizers = "`TEACHER` must all have one tokenizer, but those of runs/stranger and runs/tea"
    of_tokens = [
        ([*data, "new", "--top-k", 0], "`--top-k` must be at least 1, but is 0"),
        ([*data, "runs"], "`--output` must be a folder that does not exist yet"),
        (["runs/stranger", *data, "new"], tokenizers),
    ]
    before = {*Path().rglob("*")}
    assert_named(distill, cases)
    assert_named(partial(heedful_command, "distill-tokens"), of_tokens)
    assert {*Path().rglob("*")} == before


def test_the_commands_of_the_guide_run(distill, printed, fresh_accelerate, model, pairs, tokenizers):
    saved_in("runs/backward/model", model, tokenizers)
    commands = commands_of(SECTION, r"[\w-]+")
    names = ["distill", "train", "distill", "distill", "distill-tokens", "train"]
    assert [command.split()[0] for command in commands] == names
    changes = {"data.train": "pairs.tsv", "data.validation": "pairs.tsv", "data.source": "1", "data.target": "2"}
    changes |= {"data.cleaning.drop_overlap": False, "name": "student", "output": None, "overwrite": True}
    changes |= {"optimization.max_updates": 2, "optimization.tokens_per_update": 500}
    Path("pairs.yaml").write_text(json.dumps(tiny_tree(Path(), changes)))
    texts = (json.dumps({"ko": pair["source"]}) for pair in read_pairs("pairs.tsv", "1", "2"))
    Path("texts.jsonl").write_text("\n".join(texts))
    run_commands(printed, commands)
    assert [*read_pairs("distilled.jsonl", "ko", "en")] == [*read_pairs("pairs.tsv", "1", "2")]
    teacher, backward = map(Translator.from_pretrained, ("runs/teacher/model", "runs/backward/model"))
    outputs = teacher.translate([*pairs], num_beams=5, num_return_sequences=5)
    rows = [(source, [(each.text, each.score) for each in made]) for source, made in zip(pairs, outputs, strict=True)]
    assert [*read_pairs("chosen.jsonl", "ko", "en")] == [*CandidateChoice("reverse").pairs(rows, backward)]
    assert [*read_pairs("distilled.jsonl.gz", "1", "2")] == [*read_pairs("pairs.tsv", "1", "2")]
    log = [json.loads(line) for line in Path("runs/student/log.jsonl").read_text().splitlines()]
    assert all(log[number]["train/distillation"] for number in (0, 1))
