"""Sources made for targets: the same in every batch, drawn from the model's distribution, noised as in the paper."""

import collections
import gzip
import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from heedful import BackTranslation, SeededSampling, Translator
from heedful.cli import main as cli
from heedful.data.sources import read_pairs
from heedful.inference.teaching.back_translation import LOOP, noised
from helpers import assert_refused

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "backtranslate.md").read_text(encoding="utf-8")


@pytest.fixture
def lines(pairs) -> list[str]:
    """The model's sources, of very different lengths; here they are the targets to be translated back."""
    texts = list(pairs)
    return [*texts, " ".join(texts[:3]), *texts[::-1], " ".join(texts)]


def hot(**settings) -> BackTranslation:
    return BackTranslation("sampling", temperature=1.5, **settings)


@pytest.mark.parametrize(
    ("method", "engine"), [("sampling", "native"), ("sampling", "generate"), ("noised", "native")]
)
def test_what_is_random_follows_from_the_seed_and_the_line_and_not_from_the_batch(
    model, tokenizers, lines, method, engine
):
    translator = Translator(model, tokenizers, engine=engine)
    make = hot if method == "sampling" else lambda seed: BackTranslation("noised", num_beams=2, seed=seed)
    settings = {"max_new_tokens": 40}
    expected = list(make(seed=3).pairs(translator, lines, **settings))
    for batches in ({"token_budget": 1}, {"token_budget": 60, "chunk_size": 5}):
        assert list(make(seed=3).pairs(translator, lines, **settings, **batches)) == expected
    assert list(make(seed=4).pairs(translator, lines, **settings)) != expected
    assert len(expected) > 7
    made = collections.defaultdict(list)
    for row in expected:
        made[row["target"]].append(row["source"])
    # The same text in another line has other numbers.
    assert any(len({*sources}) > 1 for sources in made.values())


def test_both_engines_draw_the_same(model, tokenizers, lines):
    drawn = [
        [best.token_ids for (best,) in Translator(model, tokenizers, engine).translate_lines(lines, sampling=sampling)]
        for engine in ("native", "generate")
        for sampling in [SeededSampling(seed=5, top_k=3)]
    ]
    assert drawn[0] == drawn[1]


def test_tokens_are_drawn_with_the_models_probabilities(model, tokenizers):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, 4)
    for settings, kept in (({}, 4), ({"temperature": 2.0}, 4), ({"top_k": 2}, 2)):
        (processor,) = SeededSampling(seed=1, **settings).processors(range(4000))
        counts = collections.Counter(processor(torch.zeros(4000, 1), logits).argmax(-1).tolist())
        expected = (logits[0] / settings.get("temperature", 1.0))[:kept].softmax(-1)
        found = torch.tensor([counts[token] / 4000 for token in range(4)])
        assert found[:kept].tolist() == pytest.approx(expected.tolist(), abs=0.03)
        assert found[kept:].sum() == 0


def test_a_drawn_translation_has_the_score_of_its_tokens(model, tokenizers, lines):
    translator = Translator(model, tokenizers)
    found = [best for (best,) in translator.translate_lines(lines, sampling=SeededSampling(seed=2, temperature=0.7))]
    scores = translator.score_pairs(zip(lines, (best.text for best in found), strict=True))
    same = [(one, other) for one, other in zip(found, scores, strict=True) if one.token_ids == other.token_ids]
    assert len(same) > 5
    assert [one.score for one, _ in same] == pytest.approx([other.per_token for _, other in same], abs=1e-5)


def test_noise_deletes_replaces_and_moves_words_as_often_and_far_as_the_paper_says():
    words = [f"w{place}" for place in range(50)]
    found = [noised(" ".join(words), 1, number).split() for number in range(200)]
    assert sum(map(len, found)) / 10_000 == pytest.approx(0.9, abs=0.02)
    assert sum(text.count("_") for text in found) / 10_000 == pytest.approx(0.09, abs=0.02)
    assert len({tuple(text) for text in found}) == 200
    moves = []
    for text in found:
        places = [int(word[1:]) for word in text if word != "_"]
        moves += [abs(sorted(places).index(place) - index) for index, place in enumerate(places)]
    assert max(moves) == 3
    assert noised("", 1, 1) == ""


def test_beam_and_greedy_are_the_translators_own_and_useless_lines_are_left_out(model, tokenizers, pairs):
    translator = Translator(model, tokenizers)
    lines = ["\ufeff네.\r\n", "\n", "  \n", *(f"{text}\n" for text in pairs)]
    for method in ("greedy", "beam"):
        making = BackTranslation(method)
        rows = list(making.pairs(translator, lines))
        assert rows == [{"source": text, "target": target} for target, text in [("네.", "Yes."), *pairs.items()]]
        assert making.left_out == 2
    making = BackTranslation("greedy")
    with pytest.warns(UserWarning, match="cut off at 6 tokens"):
        assert len(list(making.pairs(translator, list(pairs), max_new_tokens=6))) == 8 - making.left_out < 8


def test_a_loop_is_some_words_four_times_on_end():
    for text in ("no no no no", "a b a b a b a b c", "x a b c d a b c d a b c d a b c d"):
        assert LOOP.search(text + " ")
    for text in ("no no no", "na nano nano nano", "a b a b a b a c", "1 11 11 11 1"):
        assert not LOOP.search(text + " ")


def test_settings_that_would_be_ignored_or_cannot_be_are_named(model, tokenizers, monkeypatch):
    cases = [
        ({"method": "guess"}, "`method` must be one of greedy, beam, sampling, noised"),
        ({"method": "greedy", "num_beams": 3}, "`num_beams` is for beam and noised"),
        ({"method": "beam", "temperature": 1.0}, "`temperature` is for sampling"),
        ({"method": "noised", "top_k": 5}, "`top_k` is for sampling"),
        ({"method": "beam", "seed": 1}, "`seed` is for sampling and noised"),
        ({"method": "beam", "num_beams": 1}, "`num_beams` must be at least 2"),
        ({"method": "sampling", "top_k": 0}, "`top_k` must be at least 1"),
        ({"method": "sampling", "seed": -1}, "`seed` must be at least 0"),
        ({"method": "sampling", "temperature": 0.0}, "`temperature` must be above 0"),
    ]
    assert_refused(cases, lambda settings: BackTranslation(**settings))
    translator = Translator(model, tokenizers)
    for settings in ({"num_beams": 2}, {"split": True}):
        with pytest.raises(ValueError, match="`sampling` must come with one beam"):
            translator.translate_lines([], sampling=SeededSampling(), **settings)
    monkeypatch.setattr(model.generation_config, "do_sample", True)
    with pytest.raises(ValueError, match="`do_sample` of the generation config must be False for beam"):
        list(BackTranslation().pairs(translator, ["네."]))
    assert len(list(hot(seed=1).pairs(translator, ["네."]))) <= 1


@pytest.fixture
def backtranslate(model, tokenizers, tmp_path, heedful_command):
    """Run `heedful backtranslate` on the model; return its exit code, output and errors."""
    model.save_pretrained(tmp_path / "model")
    tokenizers.save_pretrained(tmp_path / "model")
    return partial(heedful_command, "backtranslate", tmp_path / "model")


def test_the_command_writes_pairs_that_can_be_trained_on(backtranslate, pairs, tmp_path):
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n\n" for text in pairs), encoding="utf-8")
    path = tmp_path / "pairs.jsonl.gz"
    code, output, errors = backtranslate(tmp_path / "texts.txt", "-o", path)
    assert (code, output) == (0, ""), errors
    assert errors.splitlines()[-1].startswith(f"8 pairs in {path}; 8 lines left out")
    expected = [{"source": text, "target": target} for target, text in pairs.items()]
    assert list(read_pairs(str(path), "source", "target")) == expected
    assert [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()] == expected


def test_a_compressed_file_is_read_and_a_broken_line_is_no_target(backtranslate, pairs, tmp_path):
    lines = [text.encode() for text in pairs]
    (tmp_path / "texts.txt.gz").write_bytes(gzip.compress(b"\n".join([lines[0], lines[1] + b"\xff", lines[2]])))
    with pytest.warns(UserWarning, match="Line 2 must be UTF-8, .*: the line is left out"):
        _, _, errors = backtranslate(tmp_path / "texts.txt.gz", "-o", tmp_path / "pairs.jsonl")
    assert errors.splitlines()[-1].startswith(f"2 pairs in {tmp_path / 'pairs.jsonl'}; 1 lines left out")
    (tmp_path / "cut.txt.gz").write_bytes((tmp_path / "texts.txt.gz").read_bytes()[:-9])
    code, _, errors = backtranslate(tmp_path / "cut.txt.gz", "-o", tmp_path / "none.jsonl")
    assert code == 2
    assert f"{tmp_path / 'cut.txt.gz'} must be a whole gzip file, but breaks after line" in errors


def test_wrong_use_is_told_and_leaves_no_file(backtranslate, pairs, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("{}\n", encoding="utf-8")
    for arguments, message in (
        ([texts, "-o", tmp_path / "pairs.txt"], "`--output` must end in .jsonl or .jsonl.gz"),
        ([tmp_path / "none", "-o", tmp_path / "pairs.jsonl"], "`TEXTS` must be a file of sentences"),
        ([tmp_path / "a.jsonl", "-o", tmp_path / "pairs.jsonl"], "`TEXTS` must be a file of target sentences"),
        ([tmp_path / "a.jsonl", "-o", tmp_path / "a.jsonl"], "`--output` must be another file than those that are"),
        (
            [texts, "-o", tmp_path / "pairs.jsonl", "--top-k", 3],
            "`--top-k` is for sampling, and must be left out of beam",
        ),
        ([texts, "-o", tmp_path / "pairs.jsonl"], "but all 2 are left out"),
        ([texts, "-o", tmp_path / "new" / "deep" / "pairs.jsonl"], "but all 2 are left out"),
    ):
        code, output, errors = backtranslate(*arguments)
        assert (code, output) == (2, ""), arguments
        assert message in errors
        assert "Traceback" not in errors
        assert {path.name for path in tmp_path.iterdir()} == {"model", "texts.txt", "a.jsonl"}


def test_the_commands_and_the_python_of_the_guide_run(model, tokenizers, pairs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("runs/backward/model")
    tokenizers.save_pretrained("runs/backward/model")
    Path("texts.txt").write_text("".join(f"{text}\n" for text in pairs), encoding="utf-8")
    commands = re.findall(r"^heedful (.*)$", GUIDE, flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["heedful", *shlex.split(command)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code, command
    drawn = [json.loads(line) for line in Path("drawn.jsonl").read_text(encoding="utf-8").splitlines()]
    capsys.readouterr()
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    found = {}
    exec(code, found)
    assert found["pairs"] == drawn
    assert len(capsys.readouterr().out.splitlines()) == 2
