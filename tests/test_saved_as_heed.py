"""Folders that were saved when the package was called heed load as before: the same logits to the bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from heedful import HeedForConditionalGeneration, HeedRNNForConditionalGeneration, Translator
from hub_stand_in import HubStandIn

FOLDERS = {name: Path(__file__).parent / "saved_as_heed" / name for name in ("transformer", "recurrent")}
CLASSES = {"transformer": HeedForConditionalGeneration, "recurrent": HeedRNNForConditionalGeneration}
SOURCE, TARGET = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 0, 0]]), torch.tensor([[1, 13, 14], [1, 15, 16]])
# The code that lies in the folders says what the logits were.
AS_SAVED = """
import sys
sys.modules["heedful"] = None  # makes the import fail
import torch
from transformers import AutoModelForSeq2SeqLM
torch.set_num_threads(1)
source, target = torch.load(sys.argv[1])
logits = []
for place in sys.argv[3:]:
    model = AutoModelForSeq2SeqLM.from_pretrained(place, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        logits.append(model(source, attention_mask=(source != 0).long(), decoder_input_ids=target).logits)
torch.save(logits, sys.argv[2])
"""


@torch.no_grad()
def logits_of(model):
    return model.eval()(SOURCE, attention_mask=(SOURCE != 0).long(), decoder_input_ids=TARGET).logits


@pytest.fixture(scope="module")
def as_saved(tmp_path_factory):
    """Return the logits by the folders' own code: from the folder, and from repositories with its files."""
    place = tmp_path_factory.mktemp("as_saved")
    torch.save((SOURCE, TARGET), place / "tokens.pt")
    with HubStandIn() as hub:
        for name, folder in FOLDERS.items():
            hub.add(f"me/{name}", folder)
        environment = {**os.environ, **hub.environment(place), "HF_MODULES_CACHE": str(place / "modules")}
        models = [*map(str, FOLDERS.values()), *(f"me/{name}" for name in FOLDERS)]
        arguments = [str(place / "tokens.pt"), str(place / "logits.pt"), *models]
        finished = subprocess.run(
            [sys.executable, "-c", AS_SAVED, *arguments], env=environment, capture_output=True, text=True, check=False
        )
    assert finished.returncode == 0, finished.stderr[-2000:]
    logits = torch.load(place / "logits.pt")
    return {
        "code in the folder": dict(zip(FOLDERS, logits, strict=False)),
        "Hub": dict(zip(FOLDERS, logits[2:], strict=True)),
    }


@pytest.mark.parametrize("road", ["code in the folder", "Hub"])
@pytest.mark.parametrize("family", FOLDERS)
def test_the_package_computes_the_logits_of(family, road, as_saved):
    model = AutoModelForSeq2SeqLM.from_pretrained(FOLDERS[family])
    assert type(model) is CLASSES[family]
    assert torch.equal(logits_of(model), as_saved[road][family])


@pytest.mark.parametrize("family", FOLDERS)
def test_text_goes_in_and_out(family):
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS[family])
    model = CLASSES[family].from_pretrained(FOLDERS[family])
    inputs = tokenizer(["나는 책을 읽는다."], return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    (text,) = tokenizer.batch_decode(generated, skip_special_tokens=True)
    ((translation,),) = Translator.from_pretrained(FOLDERS[family]).translate(["나는 책을 읽는다."], max_new_tokens=5)
    assert translation.text == text
