"""`heedful attention`: pictures, pages, alignments and numbers, and what does not go together."""

import json
import sys
from functools import partial

import numpy as np
import pytest

from heedful import attention_map, attention_maps
from heedful.inference.attention.measures import attention_entropy, attention_rollout, word_alignment, write_links

SOURCE, TARGET = "개가 공원에서 달린다.", "The dog runs in the park."


@pytest.fixture
def attention(heedful_command, folder):
    """Run the command in this process; return its exit code, output and errors."""
    return partial(heedful_command, "attention", folder)


@pytest.fixture
def told(attention):
    """Run the command, which must succeed, and return what it prints."""

    def run(*arguments):
        code, output, errors = attention(*arguments)
        assert code == 0, errors
        return output

    return run


@pytest.fixture
def refused(attention):
    def run(*arguments):
        code, output, errors = attention(*arguments)
        assert (code, output) == (2, "")
        assert "Traceback" not in errors
        return errors.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    "options",
    [
        ["--head", 1, "--layer", 0],
        ["--kind", "decoder"],
        ["--grid"],
        ["--grid", "--layer", 0, "--kind", "encoder"],
        ["--rollout"],
    ],
)
def test_pictures_are_drawn(told, tmp_path, options):
    path = tmp_path / "map.png"
    assert told(SOURCE, "-o", path, *options) == f"{path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [place.name for place in tmp_path.iterdir()] == ["map.png"]


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ([], "cross attention, layer 1 (the last), mean of 4 heads"),
        (["--kind", "decoder", "--layer", 0, "--head", 2], "decoder attention, layer 0 of 0 to 1, head 2"),
        (["--rollout"], "rollout of cross attention, layer 1 (the last)"),
    ],
)
def test_pictures_show_words_and_say_what_they_are(told, model, tokenizers, tmp_path, monkeypatch, options, title):
    drawn = []
    monkeypatch.setattr("heedful.inference.attention.drawing._save", lambda figure, path: drawn.append(figure) or path)
    told(SOURCE, "--target", TARGET, "-o", tmp_path / "map.png", *options)
    told(SOURCE, "--target", TARGET, "-o", tmp_path / "map.png", *options, "--tokens")
    assert [figure.get_suptitle() for figure in drawn] == [title, title]
    words, tokens = ([label.get_text() for label in figure.axes[0].get_yticklabels()] for figure in drawn)
    assert words == [*TARGET.split(), "</s>"]
    assert tokens == attention_maps(model, tokenizers, SOURCE, TARGET).target_tokens


def test_a_page_shows_words_unless_tokens_are_asked_for(told, model, tokenizers, tmp_path):
    tokens = len(attention_maps(model, tokenizers, SOURCE, TARGET).target_tokens)
    for options, count in ([], len([*TARGET.split(), "</s>"])), (["--tokens"], tokens):
        told(SOURCE, "--target", TARGET, "-o", tmp_path / "page.html", *options)
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert f'"rows":{count},' in page, options


def test_a_page_is_written_and_begins_with_what_was_chosen(told, tmp_path):
    path = tmp_path / "page.html"
    told(SOURCE, "-o", path, "--kind", "encoder", "--layer", 0, "--head", 3)
    page = path.read_text(encoding="utf-8")
    assert f"<title>{SOURCE}</title>" in page
    assert '"start":{"kind":"encoder","layer":0,"head":3}' in page
    assert all(f'"{kind}":{{"layers":2,"heads":4' in page for kind in ("cross", "encoder", "decoder"))


def test_the_alignment_is_printed_as_pharaoh_links(told, model, tokenizers):
    maps = attention_maps(model, tokenizers, SOURCE, TARGET)
    links = write_links(word_alignment(maps))
    assert told(SOURCE, "--target", TARGET, "--alignment") == f"{links}\n"
    assert len(links.split()) == len(TARGET.split())
    chosen = told(SOURCE, "--target", TARGET, "--alignment", "--layer", 0, "--head", 2)
    assert chosen == write_links(word_alignment(maps, maps.map("cross", 0, 2))) + "\n"


def test_files_of_pairs_are_aligned_and_compared_with_gold(told, model, tokenizers, pairs, tmp_path):
    chosen = list(pairs.items())[:3]
    for name, texts in zip(("a.ko", "a.en"), zip(*chosen, strict=True), strict=True):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    links = [write_links(word_alignment(attention_maps(model, tokenizers, *pair))) for pair in chosen]
    data = "--data", tmp_path / "a.ko", "--data", tmp_path / "a.en"
    assert told(*data, "--alignment").splitlines() == links
    gold = tmp_path / "gold.txt"
    gold.write_text("\n".join(links) + "\n", encoding="utf-8")
    count = sum(len(line.split()) for line in links)
    *printed, last = told(*data, "--gold", gold).splitlines()
    assert printed == links
    assert last == f"AER 0.0000  precision 1.0000  recall 1.0000  links {count}"
    wrong = next(f"{link}\n" for link in ("0-0", "0-1") if link not in links[0].split())
    gold.write_text(f"{wrong}\n\n", encoding="utf-8")
    found = json.loads(told(*data, "--gold", gold, "--json"))
    assert found["alignment_errors"] == {"error_rate": 1.0, "precision": 0.0, "recall": 0.0, "links": count}
    assert found["alignments"] == links


def test_entropies_are_printed_for_every_head(told, model, tokenizers):
    expected = attention_entropy(attention_maps(model, tokenizers, SOURCE, TARGET), "encoder")
    head, *rows = told(SOURCE, "--target", TARGET, "--entropy", "--kind", "encoder").splitlines()
    assert head.split("  ")[0] == "nats (share of log n)"
    assert [row.split()[:2] for row in rows] == [["layer", "0"], ["layer", "1"]]
    assert f"{expected.nats[1, 2]:.2f} ({expected.share[1, 2]:4.0%})" in rows[1]
    found = json.loads(told(SOURCE, "--target", TARGET, "--entropy", "--kind", "encoder", "--json"))["entropy"]
    np.testing.assert_allclose(found["nats"], expected.nats)
    np.testing.assert_allclose(found["share"], expected.share)


def test_json_has_the_weights_that_were_chosen(told, model, tokenizers):
    (found,) = json.loads(told(SOURCE, "--target", TARGET, "--layer", 0, "--head", 1, "--json"))["maps"]
    expected = attention_map(model, tokenizers, SOURCE, TARGET, 0, 1)
    np.testing.assert_allclose(found["weights"], expected.weights, atol=1e-6)
    assert (found["source_tokens"], found["target_tokens"]) == (expected.source_tokens, expected.target_tokens)
    (rolled,) = json.loads(told(SOURCE, "--target", TARGET, "--rollout", "--json"))["maps"]
    expected = attention_rollout(attention_maps(model, tokenizers, SOURCE, TARGET))
    np.testing.assert_allclose(rolled["weights"], expected.weights, atol=1e-6)


PICTURE = ["-o", "map.png"]


IGNORED = [
    ([SOURCE], "Something must be asked for"),
    ([SOURCE, "-o", "map.jpg"], "`--output` must end in one of .png, .svg, .pdf, .html, but is map.jpg"),
    ([SOURCE, *PICTURE, "--layer", 7], "`--layer` must be between -2 and 1, but is 7"),
    ([SOURCE, *PICTURE, "--head", 4], "`--head` must be between 0 and 3, but is 4"),
    ([SOURCE, *PICTURE, "--grid", "--head", 1], "`--head` must not come with --grid"),
    ([SOURCE, *PICTURE, "--grid", "--rollout"], "`--rollout` must not come with --grid"),
    ([SOURCE, *PICTURE, "--rollout", "--head", 1], "`--head` must not come with --rollout"),
    ([SOURCE, "--grid", "--entropy"], "`--grid` must come with a picture"),
    ([SOURCE, "-o", "a.html", "--grid"], "`--grid` must come with a picture"),
    ([SOURCE, "-o", "a.html", "--rollout"], "`--rollout` must not come with a report"),
    ([SOURCE, "--alignment", "--kind", "encoder"], "`--kind` must be cross to align words"),
    ([SOURCE, *PICTURE, "--grid", "--alignment"], "`--grid` must not come with --alignment"),
    ([SOURCE, "--json", "--tokens"], "`--tokens` must come with a picture or page"),
    ([SOURCE, "--entropy", "--layer", 1], "must not come with --entropy alone"),
    ([SOURCE, "--entropy", "--rollout"], "must not come with --entropy alone"),
    ([SOURCE, "--data", "x", "--alignment"], "Either TEXT or --data must be given"),
    (["--alignment"], "Either TEXT or --data must be given"),
    ([SOURCE, "--alignment", "--source-column", "ko"], "must come with --data"),
    (["--data", "builtin:test:2", "--target", "x", "--alignment"], "`--target` must come with TEXT"),
    ([SOURCE, "--gold", "nowhere.txt"], "nowhere.txt does not exist"),
    ([" ", *PICTURE], "`source` must be a sentence"),
]


def test_what_would_be_ignored_is_refused(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, message in IGNORED:
        assert message in refused(*arguments), arguments
    assert list(tmp_path.iterdir()) == []


COLUMNS = ["--data", "builtin:test:2", "--source-column", "ko", "--target-column", "en"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (PICTURE, "`--output` must not come with --data"),
        (["--entropy"], "`--entropy` must not come with --data"),
        (["--gold", "gold.txt"], "`--gold` must have 2 lines, one for each pair, but has 1 instead"),
    ],
)
def test_what_is_of_one_sentence_is_refused_for_files(refused, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gold.txt").write_text("0-0\n", encoding="utf-8")
    assert message in refused(*COLUMNS, *arguments)


@pytest.mark.parametrize(
    ("target", "links", "named"),
    [
        (["--target", TARGET], "0-0 3-5", "links 3-5 of 3 and 6 words"),
        (["--target", TARGET], "0-0 2?6", "links 2-6 of 3 and 6 words"),
        ([], "3-0", "links 3-0 of 3 words"),
    ],
)
def test_links_of_words_that_there_are_not_are_refused(refused, tmp_path, target, links, named):
    gold = tmp_path / "gold.txt"
    gold.write_text(links, encoding="utf-8")
    message = refused(SOURCE, *target, "--gold", gold)
    assert message.endswith(
        f"`--gold` must link words of the pair, counted from 0, but {named} instead, in line 1 of {gold}."
    )


def test_a_picture_without_matplotlib_is_refused_before_the_model_is_loaded(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("heedful.inference.translation.Translator.from_pretrained", None)
    assert "pip install 'heedful[plots]'" in refused(SOURCE, "-o", tmp_path / "map.png")


def test_a_translation_of_the_models_own_is_followed(told, model, tokenizers):
    (found,) = json.loads(told(SOURCE, "--json"))["maps"]
    assert found["target_tokens"] == attention_maps(model, tokenizers, SOURCE).target_tokens
