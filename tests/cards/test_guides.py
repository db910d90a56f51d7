"""The guides of loading and publishing run as they are written, the latter against a stand-in of the Hub."""

import json

import pytest

from card_facts import card_facts
from guides import blocks_of, python_of, text_of
from heedful.cards.model_card import write_model_card
from helpers import run_python
from hub_stand_in import HubStandIn
from memorised import SHOWN, saved_model

MARK = "--- next block"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model as `make quickstart` leaves it."""
    place = tmp_path_factory.mktemp("guides")
    folder = place / "runs" / "quickstart" / "model"
    saved_model(folder, SHOWN, vocab_size=272, norm_placement="post")
    write_model_card(folder, card_facts(example={"source": "제 이모는 변호사예요."}))
    return place


@pytest.fixture(scope="module")
def outputs(place):
    """What the blocks of publish.md, one after the other, and the code of the pushed card print."""
    with HubStandIn() as hub:
        environment = hub.environment(place / "caches")
        setting = f"import os; os.chdir({json.dumps(str(place))})"
        script = f"\nprint({MARK!r})\n".join([setting, *python_of(text_of("publish")), "print(revision)"])
        _, *published, revision = run_python("-c", script, **environment).stdout.split(f"{MARK}\n")
        card = hub.repositories["me/model"].commits[revision.strip()]["README.md"].decode()
        code = "\n".join(python_of(card))
        return {"publish": published, "card": run_python("-c", code, **environment).stdout, "code": code}


def check_printed(name, outputs):
    blocks = blocks_of(text_of(name))
    assert sum(bool(expected) for _, expected in blocks) >= 4
    for (code, expected), found in zip(blocks, outputs, strict=True):
        assert found == expected, code


def test_the_guide_of_loading_begins_from_the_quickstarts_model_and_prints_what_it_says(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    names, outputs = {}, []
    for code in python_of(text_of("load_and_generate")):
        exec(code, names)
        outputs.append(capsys.readouterr().out)
    check_printed("load_and_generate", outputs)


@pytest.mark.slow
def test_the_guide_of_publishing_prints_what_it_says_and_the_code_of_the_pushed_card_runs(outputs):
    check_printed("publish", outputs["publish"])
    assert 'repository = "me/model"' in outputs["code"]
    assert outputs["card"].splitlines() == ["My aunt is a lawyer."] * 3
