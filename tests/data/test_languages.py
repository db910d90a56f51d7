"""Tests of how languages are recognised by names and texts, and scripts by Unicode."""

import pytest

from heedful.data.languages import is_unspaced, lacks_script, language_named, language_of, main_script, script_of

SPELLINGS = {
    "ko": "ko KO kor kor_Hang ko_KR ko-kr Korean korean 한국어 text_ko ko_sentence sentenceKo",
    "en": "en EN eng_Latn en_XX en-US English english src_en",
    "zh": "zh zho_Hans zh-CN zh_cn zh_Hant Chinese cn cmn",
    "no": "no nob_Latn nb Norwegian",
    None: "src tgt 1 2 source target input output in out question my_text id_text no_text word ipa phoneme é",
}
SENTENCES = {
    "en": "The dog sleeps in the house. | I have not read the book that you gave me.",
    "de": "Der Hund schläft im Haus. | Ich habe das Buch nicht gelesen, und wir gehen ins Kino.",
    "fr": "Le chien dort dans la maison. | Nous allons au marché avec les enfants.",
    "ko": "개가 집에서 자요. | 저는 책을 읽지 않았어요.",
    "ja": "犬は家で寝ている。 | 本を読まなかった。",
    "zh": "狗在家里睡觉。 | 我没有读那本书。",
    "ka": "ძაღლი სახლში წევს. | წიგნი",
    None: "SELECT name FROM users WHERE id = 3 | SELECT the_of FROM to",
}
WORDS = {
    "Tamil": "வீடு நாய்", "Georgian": "სახლი ძაღლი", "Ethiopic": "ሰላም ቤት", "Khmer": "សួស្តី ផ្ទះ",
    "Armenian": "տուն շուն", "Bengali": "বাড়ি কুকুর", "Myanmar": "မြန်မာ စာ", "Cyrillic": "дом собака",
    "CJK": "家で犬が", "Latin": "ｈｏｕｓｅ",
}  # fmt: skip


def test_a_language_is_known_by_every_common_spelling_and_by_texts_where_it_is_certain_and_src_is_none():
    for code, names in SPELLINGS.items():
        assert {name: language_named(name) for name in names.split()} == dict.fromkeys(names.split(), code)
    assert language_named("libellé EN (source)") == "en"
    assert language_named("texte de départ") is None
    for code, texts in SENTENCES.items():
        assert language_of("1", texts.split(" | ")) == code
        assert language_of("vi", texts.split(" | ")) == "vi"


@pytest.mark.parametrize(("script", "text"), WORDS.items())
def test_every_script_of_unicode_is_told_from_the_others(script, text):
    assert script_of(text) == main_script([text, text, "123"]) == script
    assert [lacks_script(text, other) for other in WORDS] == [other != script for other in WORDS]


def test_texts_without_spaces_are_told_from_words_with_spaces_between_them():
    joined = [["苹果", "香蕉"], ["我爱北京，天安门很大。"], ["สุนัขนอนอยู่ในบ้าน", "แมว"]]
    spaced = [["我 爱 北京 天安门"], ["개가 집에서 자요."], ["the dog"], [""], ["123"]]
    assert [*map(is_unspaced, joined), *map(is_unspaced, spaced)] == [True] * 3 + [False] * 5
