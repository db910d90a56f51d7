"""Sources made for targets: the same in every batch, drawn from the model's distribution."""

import collections
import gzip
import json
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from guides import assert_named, commands_of, python_of, run_commands, text_of
from heedful import BackTranslation, SeededSampling, Translator
from heedful.data.sources import read_pairs
from heedful.distillation.back_translation import LOOP
from helpers import assert_error, assert_refused
from memorised import saved_in

GUIDE = text_of("backtranslate").split("## More pairs")[0]


@pytest.fixture
def lines(pairs) -> list[str]:
    """The model's sources, of very different lengths; here they are the targets to be translated back."""
    texts = list(pairs)
    return [*texts, " ".join(texts[:3]), *texts[::-1], " ".join(texts)]


def test_what_is_random_follows_from_the_seed_and_the_line(model, tokenizers, lines):
    def made(seed, engine="native", **batches):
        translator = Translator(model, tokenizers, engine=engine)
        making = BackTranslation("sampling", temperature=1.5, seed=seed)
        return list(making.pairs(translator, lines, max_new_tokens=30, **batches))

    expected = made(3)
    for road, batches in product(("native", "generate"), ({"token_budget": 1}, {"token_budget": 60, "chunk_size": 5})):
        assert made(3, road, **batches) == expected
    assert made(4) != expected
    assert len(expected) > 7
    # The same text in another line has other numbers.
    assert len({tuple(row.items()) for row in expected}) > len({row["target"] for row in expected})


def test_tokens_are_drawn_with_the_models_probabilities_and_scored_by_them(model, tokenizers, lines):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, 4)
    for settings, kept in (({}, 4), ({"temperature": 2.0}, 4), ({"top_k": 2}, 2)):
        (processor,) = SeededSampling(seed=1, **settings).processors(range(4000))
        counts = collections.Counter(processor(torch.zeros(4000, 1), logits).argmax(-1).tolist())
        expected = (logits[0] / settings.get("temperature", 1.0))[:kept].softmax(-1)
        found = torch.tensor([counts[token] / 4000 for token in range(4)])
        assert found[:kept].tolist() == pytest.approx(expected.tolist(), abs=0.03)
        assert found[kept:].sum() == 0
    translator = Translator(model, tokenizers)
    found = [best for (best,) in translator.translate_lines(lines, sampling=SeededSampling(seed=2, temperature=0.7))]
    scores = translator.score_pairs(zip(lines, (best.text for best in found), strict=True))
    same = [(one, other) for one, other in zip(found, scores, strict=True) if one.token_ids == other.token_ids]
    assert len(same) > 5
    assert [one.score for one, _ in same] == pytest.approx([other.per_token for _, other in same], abs=1e-5)


def test_a_loop_is_up_to_four_words_four_times_in_a_row():
    for text in ("no no no no", "a b a b a b a b c", "x a b c d a b c d a b c d a b c d"):
        assert LOOP.search(text + " ")
    for text in ("no no no", "na nano nano nano", "a b a b a b a c", "1 11 11 11 1"):
        assert not LOOP.search(text + " ")


def test_beam_and_greedy_are_the_translators_own_and_useless_lines_are_left_out(model, tokenizers, pairs):
    translator, lines = (
        Translator(model, tokenizers),
        ["\ufeff네.\r\n", "\n", "  \n", *(f"{text}\n" for text in pairs)],
    )
    expected = [{"source": text, "target": target} for target, text in [("네.", "Yes."), *pairs.items()]]
    for making in (BackTranslation("greedy"), BackTranslation("beam")):
        assert list(making.pairs(translator, lines)) == expected
        assert making.left_out == 2
    making = BackTranslation("greedy")
    with pytest.warns(UserWarning, match="cut off at 6 tokens"):
        assert len(list(making.pairs(translator, list(pairs), max_new_tokens=6))) == 8 - making.left_out < 8


def test_settings_that_would_be_ignored_or_cannot_be_are_named(model, tokenizers, monkeypatch):
    cases = [
        ({"method": "guess"}, "`method` must be one of greedy, beam, sampling"),
        ({"method": "greedy", "num_beams": 3}, "`num_beams` is for beam"),
        ({"method": "beam", "temperature": 1.0}, "`temperature` is for sampling"),
        ({"method": "beam", "seed": 1}, "`seed` is for sampling"),
        ({"method": "beam", "num_beams": 1}, "`num_beams` must be at least 2"),
        ({"method": "sampling", "top_k": 0}, "`top_k` must be at least 1"),
        ({"method": "sampling", "seed": -1}, "`seed` must be at least 0"),
        ({"method": "sampling", "temperature": 0.0}, "`temperature` must be above 0"),
    ]
    assert_refused(cases, lambda settings: BackTranslation(**settings))
    translator = Translator(model, tokenizers)
    cases = [(given, "`sampling` must come with one beam") for given in ({"num_beams": 2}, {"split": True})]
    assert_refused(cases, lambda given: translator.translate_lines([], sampling=SeededSampling(), **given))
    monkeypatch.setattr(model.generation_config, "do_sample", True)
    message = "`do_sample` of the generation config must be False for beam"
    assert_error(message, lambda: list(BackTranslation().pairs(translator, ["네."])))
    assert len(list(BackTranslation("sampling").pairs(translator, ["네."]))) <= 1


def test_the_command_writes_pairs_and_nothing_after_wrong_use(folder, pairs, tmp_path, heedful_command):
    backtranslate = partial(heedful_command, "backtranslate", folder)
    expected = [{"source": text, "target": target} for target, text in pairs.items()]
    texts, path = tmp_path / "texts.txt", tmp_path / "pairs.jsonl.gz"
    texts.write_text("".join(f"{text}\n\n" for text in pairs), encoding="utf-8")
    code, output, errors = backtranslate(texts, "-o", path)
    assert (code, output) == (0, ""), errors
    assert errors.splitlines()[-1].startswith(f"8 pairs in {path}; 8 lines left out")
    assert list(read_pairs(str(path), "source", "target")) == expected
    assert [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()] == expected
    lines = [text.encode() for text in pairs]
    whole = gzip.compress(b"\n".join([lines[0], lines[1] + b"\xff", lines[2]]))
    (tmp_path / "texts.txt.gz").write_bytes(whole)
    with pytest.warns(UserWarning, match="Line 2 must be UTF-8, .*: the line is left out"):
        _, _, errors = backtranslate(tmp_path / "texts.txt.gz", "-o", path)
    assert errors.splitlines()[-1].startswith(f"2 pairs in {path}; 1 lines left out")
    cut, objects, out = tmp_path / "cut.txt.gz", tmp_path / "a.jsonl", tmp_path / "none.jsonl"
    cut.write_bytes(whole[:-9])
    objects.write_text("{}\n", encoding="utf-8")
    texts.write_text("\n\n", encoding="utf-8")
    cases = [
        ([cut, "-o", out], f"{cut} must be a complete gzip file, but breaks after line"),
        ([texts, "-o", tmp_path / "pairs.txt"], "`--output` must end in .jsonl or .jsonl.gz"),
        ([tmp_path / "none", "-o", out], "`TEXTS` must be a text file"),
        ([objects, "-o", out], "`--target` must name a column"),
        ([objects, "-o", objects], "`--output` must not be an input file"),
        ([texts, "-o", out, "--top-k", 3], "`--top-k` is for sampling, and must be left out of beam"),
        ([texts, "-o", out], "but all 2 were left out"),
        ([texts, "-o", tmp_path / "new" / "deep" / "pairs.jsonl"], "but all 2 were left out"),
    ]
    before = {*tmp_path.rglob("*")}
    assert_named(backtranslate, cases)
    assert {*tmp_path.rglob("*")} == before


def test_the_commands_and_python_of_the_guide_run(model, tokenizers, pairs, tmp_path, monkeypatch, capsys, printed):
    monkeypatch.chdir(tmp_path)
    saved_in("runs/backward/model", model, tokenizers)
    Path("texts.txt").write_text("".join(f"{text}\n" for text in pairs), encoding="utf-8")
    assert len(run_commands(printed, commands_of(GUIDE))) == 2
    drawn = [json.loads(line) for line in Path("drawn.jsonl").read_text(encoding="utf-8").splitlines()]
    (code,) = python_of(GUIDE)
    found = {}
    exec(code, found)
    assert found["pairs"] == drawn
    assert len(capsys.readouterr().out.splitlines()) == 2
