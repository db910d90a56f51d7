"""Where sentences end, and how they are put together again."""

import time
from itertools import chain

from heedful.sentences_heed import joined_sentences, split_sentences

SENTENCES = [
    ["Mr. Smith paid 3.50 dollars.", "Dr. J. R. Brown, i.e. he, did not."],
    ['"Really?!"', "She nodded …", "Yes."],
    ["Wait... he said.", "Fine."],
    ["1. The first point.", "It cost 5.", "Done!"],
    ["U.S. troops came.", "네.", "네!"],
    ["우리는 2024. 3. 15. 오후에 만났다.", "비가 왔다."],
    ['"어디 가?" 라고 그가 물었다.', '"집에."', "그가 웃었다."],
    ["See pp. 3 and vol. 2.", "Then go."],
]
TEXTLESS = ["<3", "-", "3.5", "12", "00:00:02,830 --> 00:00:05,560", "00:02.0 --> 00:05.5 align:start", "WEBVTT"]
TEXTLESS += ["③ ½", "$$ x = y $$", r"\[ x = y \]", "[1]: https://a.b/c", "[1]: ./a.html 'a'"]
WITH_MARKUP = {
    "| One. Two. | 12 | a \\| b |": ["One.", "Two.", "a \\| b"],
    "|a|b c|": ["a", "b c"],
    "> | a | b |": ["a", "b"],
    "Home | About": ["Home", "About"],
    "- [ ] do it": ["do it"],
    "![](a.png)": [],
    'see ![alt](a.png "t") there': ["see", "there"],
    "https://a.b/c?d=e": [],
    "1. https://a.b": [],
    "[^1]: See mailto:a@b.c": ["See"],
    "Mail to me@a-b.org, please.": ["Mail to", "please."],
    "[text](http://a.b/c_(d)) more.": ["[text]", "more."],
    "(See www.a.b.)": ["(See"],
    "<i>Hello you.</i>": ["Hello you."],
}
REPEATED = [".", "a. ", "A. ", "。a", "a.", '."', "(A.", "! ", " ", "1. ", "- ", "<a> ", "`"]
REPEATED += ["![", "](", "http://", "a@", "</a>", "|"]


def test_sentences_end_where_a_reader_ends_them_in_linear_time_with_the_spaces_of_the_script():
    for sentences in SENTENCES:
        pieces = [("", "  "), *[(sentence, "  ") for sentence in sentences[:-1]], (sentences[-1], " ")]
        assert split_sentences("  " + "  ".join(sentences) + " ") == pieces
    for line in ("- ", "  * ", "1) ", "## ", "> - ", "가. ", "③", "10. "):
        assert split_sentences(f"{line}Yes. No.", keeps_markup=True) == [("", line), ("Yes.", " "), ("No.", "")]
    for line in ("<p class='a'>", "</ul> </div>", "---", "* * *", "| --- | :--: |", "```python", " <br/> ", *TEXTLESS):
        assert split_sentences(line, keeps_markup=True) == [("", line)]
    for line in ("a <b> c", "C++", "P(A|B) is 3.5", "[Kim]: Hi"):
        assert split_sentences(line, keeps_markup=True) == [(line, "")]
    for line, sentences in WITH_MARKUP.items():
        pieces = split_sentences(line, keeps_markup=True)
        assert [sentence for sentence, _ in pieces if sentence] == sentences
        assert "".join(chain.from_iterable(pieces)) == line
    # Chinese and Japanese ones need no space.
    pieces = split_sentences("「猫は寝る。」犬は走る！雨だ。")
    assert pieces == [("「猫は寝る。」", ""), ("犬は走る！", ""), ("雨だ。", "")]
    for text in chain.from_iterable((f"a {each * 30_000}", f"{each * 30_000}a") for each in REPEATED):
        begun = time.process_time()
        pieces = split_sentences(text, keeps_markup=True)
        assert time.process_time() - begun < 5
        assert "".join(chain.from_iterable(pieces)) == text
    join = joined_sentences
    assert join("It rains.", "Yes.") == join("It rains. ", "Yes.") == "It rains. Yes."
    assert join("雨だ。 ", "はい。") == join("雨だ。", "はい。") == "雨だ。はい。"
    assert join("雨だ。\n", "はい。") == "雨だ。\nはい。"
    assert join("<i>", "Yes.", "<i>") == "<i>Yes."
