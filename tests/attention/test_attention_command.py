"""`heedful attention`, `align` and `attention-numbers`: what they write, and what does not go together."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from guides import assert_named, commands_of, printing_of, python_of, run_commands, text_of
from heedful import attention_map, attention_maps
from heedful.attention.measures import attention_entropy, attention_rollout, word_alignment, write_links
from memorised import saved_in

SOURCE, TARGET = "개가 공원에서 달린다.", "The dog runs in the park."
BOTH = [SOURCE, "--target", TARGET]


@pytest.fixture
def run(printed, folder, tmp_path, monkeypatch):
    """Run a command with the model, which must succeed, in an empty folder; return what it prints."""
    monkeypatch.chdir(tmp_path)
    return lambda command, *arguments: printed(command, folder, *arguments)


@pytest.fixture(scope="module")
def maps(model, tokenizers):
    return attention_maps(model, tokenizers, SOURCE, TARGET)


def test_pictures_show_words_and_say_what_they_are(run, maps, drawn):
    for options, title in (
        ([], "cross attention, layer 1 (the last), mean of 4 heads"),
        (["--kind", "decoder", "--layer", 0, "--head", 2], "decoder attention, layer 0 of 0 to 1, head 2"),
        (["--rollout"], "rollout of cross attention, layer 1 (the last)"),
    ):
        drawn.clear()
        for more in ([], ["--tokens"]):
            assert run("attention", *BOTH, "-o", "map.png", *options, *more) == "map.png\n"
        assert [figure.get_suptitle() for figure in drawn] == [title, title]
        words, tokens = ([label.get_text() for label in figure.axes[0].get_yticklabels()] for figure in drawn)
        assert (words, tokens) == ([*TARGET.split(), "</s>"], maps.target_tokens)


def test_a_page_shows_words_unless_tokens_are_chosen_and_begins_with_what_was_chosen(run, maps, tmp_path):
    for options, count in ([], len([*TARGET.split(), "</s>"])), (["--tokens"], len(maps.target_tokens)):
        assert run("attention", *BOTH, "-o", "a.html", "--kind", "encoder", "--layer", 0, "--head", 3, *options)
        page = (tmp_path / "a.html").read_text(encoding="utf-8")
        assert f'"rows":{count},' in page, options
    assert f"<title>{SOURCE}</title>" in page
    assert '"start":{"kind":"encoder","layer":0,"head":3}' in page
    assert all(f'"{kind}":{{"layers":2,"heads":4' in page for kind in ("cross", "encoder", "decoder"))


def test_the_alignment_is_printed_as_pharaoh_links(run, maps):
    links = write_links(word_alignment(maps))
    assert len(links.split()) == len(TARGET.split())
    for options, chosen in (
        ([], None),
        (["--layer", 0, "--head", 2], maps.map("cross", 0, 2)),
        (["--rollout"], attention_rollout(maps)),
    ):
        assert run("align", *BOTH, *options) == write_links(word_alignment(maps, chosen)) + "\n"


def test_files_of_pairs_are_aligned_and_compared_with_gold(run, model, tokenizers, pairs, tmp_path):
    chosen = list(pairs.items())[:3]
    for name, texts in zip(("a.ko", "a.en"), zip(*chosen, strict=True), strict=True):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    links = [write_links(word_alignment(attention_maps(model, tokenizers, *pair))) for pair in chosen]
    data, gold = ["--data", "a.ko", "--data", "a.en"], tmp_path / "gold.txt"
    assert run("align", *data).splitlines() == links
    gold.write_text("\n".join(links) + "\n", encoding="utf-8")
    count = sum(len(line.split()) for line in links)
    *printed, last = run("align", *data, "--gold", gold).splitlines()
    assert printed == links
    assert last == f"AER 0.0000  precision 1.0000  recall 1.0000  links {count}"
    wrong = next(f"{link}\n" for link in ("0-0", "0-1") if link not in links[0].split())
    gold.write_text(f"{wrong}\n\n", encoding="utf-8")
    found = json.loads(run("align", *data, "--gold", gold, "--json"))
    errors = {"error_rate": 1.0, "precision": 0.0, "recall": 0.0, "links": count}
    assert found == {"alignments": links, "alignment_errors": errors}


def test_entropies_are_printed_for_every_head(run, maps):
    expected, asked = attention_entropy(maps, "encoder"), [*BOTH, "--entropy", "--kind", "encoder"]
    head, *rows = run("attention-numbers", *asked).splitlines()
    assert head.split("  ")[0] == "nats (share of log n)"
    assert [row.split()[:2] for row in rows] == [["layer", "0"], ["layer", "1"]]
    below = rows[1][head.index("head 2") :]  # another head may have the same number
    assert below.startswith(f"{expected.nats[1, 2]:.2f} ({expected.share[1, 2]:4.0%})")
    found = json.loads(run("attention-numbers", *asked, "--json"))["entropy"]
    np.testing.assert_allclose(found["nats"], expected.nats)
    np.testing.assert_allclose(found["share"], expected.share)


def test_json_has_the_weights_that_were_chosen(run, model, tokenizers, maps):
    (found,) = json.loads(run("attention-numbers", *BOTH, "--layer", 0, "--head", 1, "--json"))["maps"]
    expected = attention_map(model, tokenizers, SOURCE, TARGET, 0, 1)
    np.testing.assert_allclose(found["weights"], expected.weights, atol=1e-6)
    assert (found["source_tokens"], found["target_tokens"]) == (expected.source_tokens, expected.target_tokens)
    assert max(len(str(weight)) for row in found["weights"] for weight in row) <= len("0.123456")
    (rolled,) = json.loads(run("attention-numbers", *BOTH, "--rollout", "--json"))["maps"]
    np.testing.assert_allclose(rolled["weights"], attention_rollout(maps).weights, atol=1e-6)
    (own,) = json.loads(run("attention-numbers", SOURCE, "--json"))["maps"]  # of the model's own translation
    assert own["target_tokens"] == attention_maps(model, tokenizers, SOURCE).target_tokens


def test_every_step_of_a_head_is_printed_with_its_shape(run, maps):
    steps = maps.steps("decoder", 0, 2)
    text = run("attention-numbers", *BOTH, "--steps", "--kind", "decoder", "--layer", 0, "--head", 2)
    first, shapes, *_ = text.splitlines()
    assert first == "decoder attention, layer 0 of 0 to 1, head 2"
    count, weights = len(steps.query), steps.attention.weights
    assert shapes.count(f"({count}, 12)") == 3
    assert "√d_k = √12 = 3.464" in text
    assert f"Q Kᵀ ({count}, {count})" in text
    expected = {"1. Scores": steps.scores, "2. Scores": steps.scaled}
    expected["3. Weights"] = np.c_[weights, weights.sum(axis=1)]
    expected["4. Output"] = np.linalg.norm(steps.output, axis=1, keepdims=True)
    for heading, numbers in expected.items():
        (table,) = re.findall(rf"^{heading}.*?\n.*?\n(.*?)(?:\n\n|\Z)", text, flags=re.DOTALL | re.MULTILINE)
        rows = [line.replace("−∞", "-inf").split() for line in table.splitlines()]
        assert [row[0] for row in rows] == steps.attention.target_tokens
        np.testing.assert_allclose(np.array([row[1:] for row in rows], float), numbers, atol=0.0051)
    # The steps are what is printed unless something else is chosen, of head 0.
    assert run("attention-numbers", *BOTH).splitlines()[0] == "cross attention, layer 1 (the last), head 0"


PICTURE = ["-o", "map.png"]
FILES = ["--data", "builtin:test:2", "--source-column", "ko", "--target-column", "en"]
GOLD = [*BOTH, "--gold"]
COUNTED = "`--gold` must link words of the pair, counted from 0, but links"
REFUSED = {
    "attention": [
        ([SOURCE], "Missing option '-o' / '--output'"),
        ([SOURCE, "-o", "map.jpg"], "`--output` must end in one of .png, .svg, .pdf, .html, but is map.jpg"),
        ([SOURCE, *PICTURE, "--layer", 7], "`--layer` must be between -2 and 1, but is 7"),
        ([SOURCE, *PICTURE, "--head", 4], "`--head` must be between 0 and 3, but is 4"),
        ([SOURCE, *PICTURE, "--grid", "--head", 1], "`--head` must not come with --grid"),
        ([SOURCE, *PICTURE, "--grid", "--rollout"], "`--grid` must not come with --rollout"),
        ([SOURCE, *PICTURE, "--rollout", "--head", 1], "`--head` must not come with --rollout"),
        ([SOURCE, "-o", "a.html", "--grid"], "`--grid` must come with a picture"),
        ([SOURCE, "-o", "a.html", "--rollout"], "`--rollout` must come with a picture"),
        ([SOURCE, *PICTURE, "--scores"], "`--scores` must come with --grid"),
        ([SOURCE, "-o", "a.html", "--scores"], "`--scores` must come with --grid"),
        ([" ", *PICTURE], "`source` must be a sentence"),
    ],
    "align": [
        ([SOURCE, "--kind", "encoder"], "No such option: --kind"),
        ([SOURCE, "--grid"], "No such option: --grid"),
        ([SOURCE, "--rollout", "--head", 1], "`--head` must not come with --rollout"),
        ([SOURCE, "--data", "x"], "Either TEXT or --data must be given"),
        ([], "Either TEXT or --data must be given"),
        ([SOURCE, "--source-column", "ko"], "must come with --data"),
        (["--data", "builtin:test:2", "--target", "x"], "`--target` must come with TEXT"),
        ([SOURCE, "--gold", "nowhere.txt"], "nowhere.txt does not exist"),
        ([*FILES, "--gold", "one.txt"], "`--gold` must have 2 lines, one for each pair, but has 1 instead"),
        ([*GOLD, "3-5.txt"], f"{COUNTED} 3-5 of 3 and 6 words instead, in line 1 of 3-5.txt."),
        ([*GOLD, "2-6.txt"], f"{COUNTED} 2-6 of 3 and 6 words instead, in line 1 of 2-6.txt."),
        ([SOURCE, "--gold", "3-0.txt"], f"{COUNTED} 3-0 of 3 words instead, in line 1 of 3-0.txt."),
    ],
    "attention-numbers": [
        ([SOURCE, "--entropy", "--layer", 1], "need --steps or --json"),
        ([SOURCE, "--entropy", "--rollout"], "need --steps or --json"),
        ([SOURCE, "--steps", "--rollout"], "`--steps` must not come with --rollout"),
        ([SOURCE, "--steps", "--json"], "`--steps` must not come with --json"),
        ([SOURCE, "--steps", "--head", 4], "`--head` must be between 0 and 3, but is 4"),
        ([SOURCE, "--tokens"], "No such option: --tokens"),
        ([*FILES, "--entropy"], "No such option: --data"),
    ],
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_would_be_ignored_is_refused(heedful_command, folder, command, tmp_path, monkeypatch):
    if command == "attention":
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    links = {"one.txt": "0-0\n", "3-5.txt": "0-0 3-5", "2-6.txt": "0-0 2?6", "3-0.txt": "3-0"}
    for name, text in links.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert_named(partial(heedful_command, command, folder), REFUSED[command])
    assert {place.name for place in tmp_path.iterdir()} == {*links}


def test_a_picture_without_matplotlib_is_refused_before_the_model_is_loaded(heedful_command, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("heedful.decoding.translation.Translator.from_pretrained", None)
    assert_named(heedful_command, [(["attention", folder, SOURCE, "-o", "map.png"], "pip install 'heedful[plots]'")])


GUIDE = text_of("attention")
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
COMMANDS = commands_of(GUIDE + README, "attention|align|attention-numbers|embeddings")


@pytest.fixture
def place(model, tokenizers, tmp_path, monkeypatch):
    """A working directory with the model and the files that the guide speaks of."""
    monkeypatch.chdir(tmp_path)
    saved_in("runs/quickstart/model", model, tokenizers)
    files = {"source.txt": "네.\n비가 온다.\n", "target.txt": "Yes.\nIt rains.\n", "gold.txt": "0-0\n0-0 1?1\n"}
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    return tmp_path


def test_every_command_of_the_guide_and_the_readme_runs(place, printed):
    pytest.importorskip("matplotlib")
    assert len(COMMANDS) >= 12
    found = run_commands(printed, COMMANDS)
    for command in map(str.split, COMMANDS):
        assert "-o" not in command or Path(command[command.index("-o") + 1]).stat().st_size > 2000
    (aligned,) = (text for command, text in found.items() if command.endswith("target.txt"))
    assert [re.fullmatch(r"\d+-\d+( \d+-\d+)*", line) is not None for line in aligned.splitlines()] == [True, True]
    (compared,) = (text for command, text in found.items() if "--gold" in command)
    assert compared.splitlines()[-1].startswith("AER ")


def test_the_python_of_the_guide_runs(place, capsys):
    pytest.importorskip("matplotlib")
    _, code = python_of(GUIDE)
    exec(code, {})
    printed = capsys.readouterr().out
    differences = [float(line) for line in printed.splitlines() if re.fullmatch(r"[\d.e-]+", line)]
    assert len(differences) > 3
    assert max(differences) < 1e-5
    assert printed.startswith("['cross', 'encoder', 'decoder'] (2, 4, ")
    assert "</s> looks at " in printed
    assert {path.name for path in place.iterdir()} >= {"heads.png", "attention.html"}
    ((code, expected),) = printing_of(GUIDE)  # of machines that think
    exec(code, {})
    assert capsys.readouterr().out == expected
