"""The guide of publishing runs as it is written, against a stand-in of the Hub."""

import json

import pytest

from card_facts import card_facts
from guides import blocks_of, python_of, text_of
from heedful.cards.model_card import write_model_card
from helpers import run_python
from hub_stand_in import HubStandIn
from memorised import SHOWN, saved_model

MARK = "--- next block"


@pytest.mark.slow
def test_the_guide_of_publishing_prints_what_it_says_and_the_code_of_the_pushed_card_runs(tmp_path):
    folder = saved_model(tmp_path / "runs/quickstart/model", SHOWN, vocab_size=272, norm_placement="post")
    write_model_card(folder, card_facts(example={"source": "제 이모는 변호사예요."}))
    with HubStandIn() as hub:
        environment = hub.environment(tmp_path / "caches")
        setting = f"import os; os.chdir({json.dumps(str(tmp_path))})"
        script = f"\nprint({MARK!r})\n".join([setting, *python_of(text_of("publish")), "print(revision)"])
        _, *published, revision = run_python("-c", script, **environment).stdout.split(f"{MARK}\n")
        card = hub.repositories["me/model"].commits[revision.strip()]["README.md"].decode()
        code = "\n".join(python_of(card))
        printed = run_python("-c", code, **environment).stdout
    for (block, expected), found in zip(blocks_of(text_of("publish")), published, strict=True):
        assert found == expected, block
    assert 'repository = "me/model"' in code
    assert printed.splitlines() == ["My aunt is a lawyer."] * 3
