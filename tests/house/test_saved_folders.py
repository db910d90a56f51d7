"""Folders that earlier versions saved mean the same today: by the package, and alone once their code is renewed.

`heed_transformer` and `heed_recurrent` were saved when the package was called heed, the other two before transformers
had two names for a cache. Their code is left out; what it computed is in `expected.json`.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from heedful import HeedForConditionalGeneration, HeedRNNForConditionalGeneration, Translator
from heedful.diagnosis.verification import check_remote_code
from helpers import WITHOUT_HEEDFUL, assert_near, fresh_process

FOLDERS = {path.name: path for path in sorted((Path(__file__).parents[1] / "saved").iterdir())}
EXPECTED = {name: json.loads((folder / "expected.json").read_text()) for name, folder in FOLDERS.items()}
SOURCE, TARGET = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 0, 0]]), torch.tensor([[1, 13, 14], [1, 15, 16]])
ALONE = """
import torch
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules."), type(model)
source = torch.tensor(source)
options = {"attention_mask": (source != 0).long(), "max_new_tokens": 8, "do_sample": False}
assert model.generate(source, **options).tolist() == expected["greedy"]
assert model.generate(source, num_beams=3, num_return_sequences=2, **options).tolist() == expected["beams"]
"""


@torch.no_grad()
@pytest.mark.parametrize("name", FOLDERS)
def test_the_package_computes_and_generates_what_the_code_in_the_folder_did_and_text_goes_in_and_out(name):
    model = AutoModelForSeq2SeqLM.from_pretrained(FOLDERS[name]).eval()
    assert type(model) is (HeedRNNForConditionalGeneration if "recurrent" in name else HeedForConditionalGeneration)
    options = {"attention_mask": (SOURCE != 0).long(), "max_new_tokens": 8, "do_sample": False}
    logits = model(SOURCE, attention_mask=options["attention_mask"], decoder_input_ids=TARGET).logits
    assert_near(logits[:, -1, ::29], torch.tensor(EXPECTED[name]["logits"]))
    assert model.generate(SOURCE, **options).tolist() == EXPECTED[name]["greedy"]
    beams = model.generate(SOURCE, num_beams=3, num_return_sequences=2, **options)
    assert beams.tolist() == EXPECTED[name]["beams"]
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS[name])
    inputs = tokenizer(["나는 책을 읽는다."], return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    place = FOLDERS[name] / "target_tokenizer"
    target = AutoTokenizer.from_pretrained(place) if place.is_dir() else tokenizer
    translator = Translator.from_pretrained(FOLDERS[name])
    ((translation,),) = translator.translate(["나는 책을 읽는다."], max_new_tokens=5)
    assert [translation.text] == target.batch_decode(generated, skip_special_tokens=True)


@pytest.mark.multiprocess
def test_a_folder_that_is_loaded_and_saved_again_generates_the_same_where_heedful_is_not_installed(tmp_path):
    pieces, values = {}, {"source": SOURCE.tolist()}
    for name, folder in FOLDERS.items():
        AutoModelForSeq2SeqLM.from_pretrained(folder).save_pretrained(tmp_path / name)
        values[name] = [str(tmp_path / name), EXPECTED[name]]
        pieces[name] = f"folder, expected = {name}\n{ALONE}"
    assert fresh_process(pieces, values, tmp_path / "work", WITHOUT_HEEDFUL) == {}


def test_verifying_says_that_code_is_old_and_how_to_renew_it_which_does(tmp_path):
    folder = tmp_path / "model"
    model = AutoModelForSeq2SeqLM.from_pretrained(FOLDERS["transformer"])
    model.save_pretrained(folder)
    path = folder / "versions_heed.py"
    todays = path.read_text()
    path.write_text(re.sub("(?m)^NEWEST_TRANSFORMERS = .*$", 'NEWEST_TRANSFORMERS = "5.18.2"', todays))
    message = r"it is older than the installed Heedful's and knows transformers up to 5\.18\.2; .* run in Python: (.*)"
    finding = check_remote_code(folder, model)
    assert not finding.passed
    exec(re.search(message, finding.message)[1])
    assert path.read_text() == todays
    path.unlink()
    (folder / "generation_heed.py").write_text("# as it was before there was that file\n")
    assert "knows transformers up to 5.23;" in check_remote_code(folder, model).message
