"""Markup: which texts a line has, what stays, and tags around the words that attend to theirs, each exactly once."""

import random
import re
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from guides import commands_of, run_commands, text_of
from heedful import HeedRNNConfig, HeedRNNForConditionalGeneration
from heedful.decoding.markup import KINDS, WORD, MarkedParagraphs, Placing, _spans
from heedful.decoding.translation import Translator
from helpers import assert_error, assert_refused


def read(markup, line, number):
    """Return a line's sentences, and the line with their tags in the same places."""
    pieces = markup.take_apart(number, line)
    sentences, parts = [], []
    for place, (text, part) in enumerate(markup.taken_apart[number]):
        marked = markup.marked.get((number, place))
        tags = [(tag.place, tag.place + tag.length, tag.raw) for tag in marked.tags] if marked else []
        sentences += [text] * (marked is not None)
        parts.append(markup.written(text, tags) if marked else part)
    assert pieces == [text for text, _ in markup.taken_apart[number]]
    return "|".join(sentences), "".join(parts)


# The sentences of a line, and the line after a round trip, if it differs.
LINES = {
    ("html", "<h1 class='a>b'>One <b>two</b></h1><p>Three.<p>Four"): "One two|Three.|Four",
    ("html", "a &amp; b &lt; c&#160;d, &copy; &#38;"): (
        "a & b < c\xa0d, © &",
        "a &amp; b &lt; c&#160;d, © &amp;",
    ),
    ("html", "Red<br>blue <!-- no --> sea"): ("Red blue sea", "Red<br> blue <!-- no -->sea"),
    ("html", "  <li> Tom's <img alt='x'> dog </li>"): ("Tom's dog", "  <li> Tom's <img alt='x'>dog </li>"),
    ("html", "Run <code>ls. <b>x</b></code> or <i translate='no'>Tom</i>."): "Run 3 or 4.",
    ("html", "<script>if (a<b && c>d) go();</script><P>Yes</P>"): "Yes",
    ("html", "<B>Un<i>fin</i>ished <b></b>A<i><br></i>B"): "Unfinished AB",
    ("html", "a < b, 2 <3"): ("a < b, 2 <3", "a &lt; b, 2 &lt;3"),
    ("html", "<p>&nbsp;</p> 12 <hr> -"): "",
    (
        "html",
        "<p><b>One. Two</b> three. <i>Four</i>.  Five <b>six.</b> Seven</p>",
    ): "One.|Two three.|Four.|Five six.|Seven",
    ("xml", "<a><x:b c='&lt;'>One</x:b> &brand; <?do it?><![CDATA[no]]></a>"): "One 3",
    ("xml", '<s translatable="false">Tom</s>'): "",
    ("xml", "<g>Li <li>and</li> p</g>"): "Li and p",
    ("placeholders", "Copy %1$s of %d to {name}, 50%% of {{ b }} or ${x}?"): "Copy 3 of 4 to 6, 50% of 7 or 8?",
    ("placeholders", "{n, plural, one {# file} other {{n} files}} in 3 days <b>"): "4 in 3 days <b>",
    ("placeholders", "{a}: %s"): "",
}


def test_a_line_has_sentences_without_tags_and_can_be_written_again():
    for (kind, line), expected in LINES.items():
        texts, again = expected if isinstance(expected, tuple) else (expected, line)
        assert read(MarkedParagraphs(kind), line, 1) == (texts, again)


def test_elements_and_comments_go_on_in_later_lines():
    markup = MarkedParagraphs("html")
    lines = {"<div><em>One": "One", "two</em> <!-- no": "two", "no > <i>": "", "--> three</div>": "three"}
    for number, (line, text) in enumerate({**lines, "<pre>": "", "4 four</pre> five": "five"}.items(), start=1):
        assert read(markup, line, number) == (text, line)
    markup.end()


MALFORMED = {
    ("html", "<b>x\ny</i>"): "in line 2 '</i>' closes nothing, where <b> of line 1 is open",
    ("html", "x</div>"): "in line 1 '</div>' closes nothing[.]",
    ("html", "x\n<b>x"): "in line 2 '<b>' is never closed",
    ("html", "x\n<!-- x"): "in line 2 '<!--' is never closed",
    ("html", "x\n<b\ny>"): "in line 2 '<b' begins no tag that ends in its line",
    ("xml", "<li>x</ul>"): "'</ul>' closes nothing, where <li>",
    ("xml", "a <3"): "'<3' begins no tag",
    ("markdown", ""): f"`markup` must be one of {' '.join(KINDS)}, but is 'markdown'",
}


def test_markup_that_is_not_well_formed_is_named_with_its_line():
    def read_all(given):
        markup = MarkedParagraphs(given[0])
        for number, line in enumerate(given[1].split("\n"), start=1):
            markup.take_apart(number, line)
        markup.end()

    assert_refused(MALFORMED.items(), read_all)


def test_no_line_takes_more_than_linear_time():
    for piece in ("<a ", "<a b='", "<!--", "<script>", "{", "%1", "&a", "<b>x", "x<br>", "</", "%s ", "<b>x</b>. "):
        begun = time.process_time()
        for kind in KINDS[3:]:
            with suppress(ValueError):
                MarkedParagraphs(kind).take_apart(1, piece * 1000)
        assert time.process_time() - begun < 5


def placed(source, target, links, kinds="html,placeholders"):
    """Put the tags of a source into its translation, whose words attend to those of the source by links."""
    markup = MarkedParagraphs(kinds)
    for number, line in enumerate(source.split("\n")):
        markup.take_apart(number, line)
    (key, marked) = markup.marked.popitem()
    words = ([match.span() for match in WORD.finditer(text)] for text in (marked.text, target))
    spans = [np.array(each, int).reshape(-1, 2) for each in words]
    weights = np.full((len(spans[1]), len(spans[0])), 1e-3)
    for link in links.split():
        row, column, *share = link.split("-")
        weights[int(row), int(column)] = float(*share or [1.0])
    placing = Placing(marked, target, *spans, weights)
    pieces = [part for _, part in markup.taken_apart[number]]
    pieces[key[1]] = markup.written(target, placing.found)
    return "".join(pieces) + "?" * placing.is_doubtful


# Words are counted from 0; a link is from a target word to a source word, perhaps with its share.
PLACED = [
    ("a <b>b</b> c", "C B A", "0-2 1-1 2-0", "C <b>B</b> A"),
    ("<b>a b c</b>", "C B A &", "", "<b>C B A &amp;</b>"),
    ("a <b>b</b>", "A B B2 C", "0-0 1-1 2-1 3-0", "A <b>B B2</b> C"),
    ("a <b>b</b> c", "B A B2", "0-1 1-0 2-1", "<b>B A B2</b>"),  # to all words that attend to it
    ("a <b>b</b> c", "B A B2", "0-1 1-0 2-1-.5 2-0-.5", "<b>B</b> A B2"),
    ("<b>a <i>b</i></b> c", "B C D A", "0-1 1-2 2-2 3-0", "<b><i>B</i> C D A</b>"),
    ("<b>a</b> <i>b</i> c", "A B A2 C", "0-0 1-1 2-0 3-2", "<b>A B A2</b> <i>C</i>?"),
    ("a <b>b</b>", "A B", "0-0 1-0", "<b>A B</b>?"),
    ("a <br/> b", "B A", "0-1 1-0", "B A<br/>"),
    ("a <br/> b", "B A", "0-1 1-0-.9 1-1-.1", "<br/>B A"),
    ("Un<br/>b", "Unb", "0-0", "Unb<br/>"),
    ("<br/> a <b>b<wbr></b>", "B A", "0-1 1-0", "<br/> <b>B<wbr></b> A"),
    ("a <b>b</b> <br/>c", "B C B2", "0-1-.9 0-0-.1 1-2 2-1-.9 2-0-.1", "<br/><b>B C B2</b>"),
    ("<i>\na</i> b <b>c", "C B A", "0-2 1-1 2-0", "C B A</i><b>"),
    ("%s a", "X A", "0-0 1-1", "%s A"),
    ("a %s", "X Y A X.", "0-1 1-1 2-0 3-0 4-1", "%s A X."),
    ("a %s", "A X Y.", "0-0 1-1 2-1 3-1", "A %s."),
    ("a %s b {n}", "4 A 3 %d", "", "{n} A %s "),  # copies
    ("<code>x</code> a", "A 3", "0-1 1-0", "A <code>x</code>"),
    ("가 <b>나</b>", "我们吃饭", "0-0 1-0 2-1 3-1", "我们<b>吃饭</b>"),
    ("a <b>b</b>", "", "", "<b></b>?"),
]


def test_tags_are_around_the_words_that_attend_to_theirs():
    faults = [(case, found) for *case, expected in PLACED if (found := placed(*case)) != expected]
    assert not faults


def test_each_byte_of_a_character_belongs_to_it():
    texts = ["", "a", "a \ufffd", "a 가", "a 가"]  # the last token is a byte, like the one before
    assert _spans(lambda _: texts, range(4), "a 가").tolist() == [[0, 1], [2, 3], [2, 3], [2, 3]]


def random_markup(drawn, depth=0):
    """Return words with tags in a valid nesting."""
    parts = []
    for _ in range(drawn.randint(1, 3)):
        name, inside = f"n{drawn.randrange(10**9)}", random_markup(drawn, depth + 1) if depth < 3 else "x"
        parts.append(drawn.choice(["a", "b", f"<{name}>{inside}</{name}>", f"<{name}/>", f"<{name}></{name}>"]))
    return drawn.choice([" ", ""]).join(parts)


def test_every_tag_comes_back_once_in_a_valid_nesting_whatever_attends_to_what():
    drawn = random.Random(0)
    for _ in range(300):
        source = f"w {random_markup(drawn)} w"
        target = " ".join(drawn.choices(["X", "Y.", "Z"], k=drawn.randint(0, 8)))
        links = " ".join(f"{row}-{drawn.randrange(2)}-{drawn.random()}" for row in range(len(target.split())))
        found = placed(source, target, links, "xml").removesuffix("?")
        assert sorted(re.findall("<[^>]*>", found)) == sorted(re.findall("<[^>]*>", source)), source
        assert "".join(re.sub("<[^>]*>", "", found).split()) == "".join(target.split())
        left, before = re.sub("<[^>]*/>|[^<>]+(?=<|$)", "", found), None
        while left != before:  # innermost pairs first
            left, before = re.sub(r"<(\w+)></\1>", "", left), left
        assert left == "", found


GUIDE = text_of("terms_tags_documents").partition("\n## Tags")[2].partition("\n## ")[0]
PAGE, ENGLISH, STRINGS, TEXTS = re.findall(r"```(?:ht|x)ml\n(.*?)```", GUIDE, re.DOTALL)
KEPT = re.compile(r"<[^>]*>|%(?:1\$)?s|{name}|&amp;|^ *|make quickstart", re.MULTILINE)


def test_the_guide_s_commands_keep_markup_in_every_batch(model, tokenizers, folder, printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("page.html").write_text(PAGE, encoding="utf-8")
    Path("strings.xml").write_text(STRINGS, encoding="utf-8")
    commands = [command.replace("runs/quickstart/model", str(folder)) for command in commands_of(GUIDE)]
    with pytest.warns(UserWarning, match="a tag to whose words"):
        run_commands(printed, commands)
    page, strings = (Path(name).read_text(encoding="utf-8") for name in ("page.en.html", "strings.en.xml"))
    for given, *texts in ((PAGE, ENGLISH, page), (STRINGS, TEXTS, strings)):
        assert all(sorted(KEPT.findall(text)) == sorted(KEPT.findall(given)) for text in texts)
    translator, settings = Translator(model, tokenizers), {"markup": "html"}
    lines = PAGE.splitlines(keepends=True)
    with pytest.warns(UserWarning, match="a tag to whose words"):
        assert "".join(row[0].text for row in translator.translate_lines(lines, chunk_size=1, **settings)) == page
    ranked = next(
        translator.translate_lines(["<b>고양이가</b> 잔다."], num_beams=3, num_return_sequences=3, **settings)
    )
    assert all(sorted(re.findall("</?b>", each.text)) == ["</b>", "<b>"] for each in ranked)
    found = translator.translate(["<p>네. <b>비가 온다.</b></p>", " <p>네 &amp;</p>\n"], markup="html")
    assert [row[0].text.replace("<b>", "").replace("</b>", "") for row in found] == [
        f"<p>{' '.join(row[0].text for row in translator.translate(['네.', '비가 온다.']))}</p>",
        f" <p>{translator.translate(['네 &'])[0][0].text}</p>\n",
    ]


def test_no_failure_is_silent(model, tokenizers, refused, folder, monkeypatch):
    translator = Translator(model, tokenizers)
    wrong = [({"markup": "md"}, "`markup` must be one of html")]
    wrong.append(({"markup": "html", "split": True}, "`markup` must be left out with `split` or `paragraphs`"))
    wrong.append(({"markup": "html", "paragraphs": True}, "`markup` must be left out with `split`"))
    assert_refused(wrong, lambda settings: translator.translate_lines(["네."], **settings))
    assert "line 1 '</b>' closes nothing" in refused("translate", folder, "--markup", "html", "네</b>.", "네.")
    assert_error("in line 2 '<b>' is never closed", translator.translate, ["네.", "<b>네."], markup="html")
    with pytest.warns(UserWarning, match="too long"):
        (row,) = translator.translate_lines([f"<b>{'x' * 9000}</b>"], markup="xml", keep_going=True)
    assert row[0].text == "<b></b>"
    monkeypatch.setattr("heedful.decoding.markup.ENOUGH", 1.0)
    with pytest.warns(UserWarning, match="Sentences with a tag to whose words .*: 2"):
        translator.translate(["비가 <b>온다</b>.", "<b>네.</b>", "<b>비가</b> 온다."], markup="html")
    sizes = {"vocab_size": len(tokenizers.source), "d_model": 8, "attention": "none", **tokenizers.special_ids()}
    blind = Translator(HeedRNNForConditionalGeneration(HeedRNNConfig(**sizes)), tokenizers)
    with pytest.raises(ValueError, match=r"`markup` must be left out .* without attention"):
        blind.translate(["비가 <b>온다</b>."], markup="html", max_new_tokens=2)
