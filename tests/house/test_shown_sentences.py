"""What the documents say that the quickstart's model says, it says.

After `make quickstart`, this names each line that differs:

    .venv/bin/python -m pytest tests/house/test_shown_sentences.py -m ""
"""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from heedful.cli.main import app
from memorised import SHOWN

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "runs" / "quickstart" / "model"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
# A block of Python and, right behind it, what it prints; a command of the shell and what stands below it.
PYTHON = re.compile(r"```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^\$ (.*\bheedful translate .*)\n((?:(?!\$ |```).+\n)*)", re.MULTILINE)
SENTENCE = re.compile("[가-힣][가-힣 ]*[.?]")
TRAINED_ANEW = {"finetune.md", "lora.md"}  # print what their own models have learned


def examples():
    """Yield each document, what it runs, and what it shows below that."""
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for pattern in (PYTHON, COMMAND):
            for code, shown in pattern.findall(text):
                if SENTENCE.search(code) and document.name not in TRAINED_ANEW:
                    yield document, code, shown


def test_every_translation_that_a_document_shows_is_of_a_sentence_whose_translation_is_known():
    names = {document.name for document, *_ in examples()}
    assert names >= {"README.md", "publish.md", "load_and_generate.md", "serve.md"}
    for document, code, shown in examples():
        if re.search("[A-Z][a-z]+ ", shown):  # more than numbers and types
            for sentence in SENTENCE.findall(code):
                assert sentence in SHOWN, (document.name, sentence)
                assert SHOWN[sentence] in shown, (document.name, sentence)


@pytest.mark.slow
def test_the_quickstarts_model_says_what_the_documents_show():
    if not MODEL.is_dir():
        pytest.skip("`make quickstart` has not been run here")
    from heedful import Translator

    translations = Translator.from_pretrained(MODEL).translate(list(SHOWN))
    said = {source: best.text for source, (best, *_) in zip(SHOWN, translations, strict=True)}
    wrong = [
        f"{document.name}: {sentence} is {said[sentence]!r}, but the document shows {shown!r}"
        for document, code, shown in examples()
        for sentence in SENTENCE.findall(code)
        if said.get(sentence, SHOWN.get(sentence)) != SHOWN.get(sentence)
    ]
    for document, command, shown in examples():
        if "heedful translate" in command:
            *before, words = command.replace("runs/quickstart/model", str(MODEL)).split("heedful ")
            given = shlex.split(before[0].strip(" |"))[1] if before and before[0] else None
            result = CliRunner().invoke(app, shlex.split(words), input=given)
            if result.stdout != shown.rstrip("\n") + "\n":
                wrong.append(f"{document.name}: $ {command} prints {result.stdout!r}, but shown is {shown!r}")
    assert wrong == []
