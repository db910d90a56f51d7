"""Each version of transformers loads what the others saved, with and without Heedful; pins and docs agree.

The table of docs/versions.md has each private name from other libraries that Heedful uses; each still exists.
"""

import inspect
import itertools
import json
import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from heedful import HeedForConditionalGeneration, HeedRNNForConditionalGeneration, Translator
from heedful.verification.verification import check_remote_code
from heedful.versions_heed import NEWEST_TRANSFORMERS
from helpers import assert_near

ROOT = Path(__file__).resolve().parents[2]
# The environments that `make oldest`, `make test` and `make newest` make.
PLACES = {"oldest": ".venv-oldest", "pinned": ".venv", "newest": ".venv-newest"}
ENVIRONMENTS = {name: ROOT / place / "bin" / "python" for name, place in PLACES.items()}
PINS = {"oldest": "constraints-oldest.txt", "pinned": "constraints.txt"}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def run(python: Path, action: str, folder: Path) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": str(folder / "modules")}
    results = folder / "results.json"
    command = [str(python), str(ROOT / "tests" / "support" / "version_process.py"), action, str(folder), str(results)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    deprecated = re.findall(r".*(?:\[transformers\].*deprecated|FutureWarning|DeprecationWarning).*", finished.stderr)
    assert not deprecated  # no such warning comes from us
    return json.loads(results.read_text())


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("writer", ENVIRONMENTS)
def test_a_folder_means_the_same_to_all_versions_with_heedful_and_without(writer, tmp_path):
    here = {name: python for name, python in ENVIRONMENTS.items() if python.exists()}
    if writer not in here or len(here) < 2:
        pytest.skip("two environments are needed: `make oldest` and `make newest` make them")
    written = run(here[writer], "write", tmp_path)
    assert len({token for row in written["joint"]["beams"] for token in row}) > 5
    for reader, action in itertools.product(here, ("read", "alone")):
        found = run(here[reader], action, tmp_path)
        if reader in PINS:
            assert found["transformers"] == pins(PINS[reader])["transformers"]
        for name in found.keys() - {"transformers"}:
            logits = found[name]["logits"]
            assert_near(torch.tensor(logits), torch.tensor(written[name]["logits"]), 1e-6)
            assert found[name] == written[name] | {"logits": logits}, (reader, action, name)


def test_the_oldest_pins_are_older_and_are_the_declared_floor_and_the_guide_and_the_code_name_what_is_pinned():
    oldest, newest = pins("constraints-oldest.txt"), pins("constraints.txt")
    assert {*oldest} <= {*newest}
    for name in oldest:
        assert tuple(map(int, oldest[name].split("."))) < tuple(map(int, newest[name].split("."))), name
    floor = re.search(r'"transformers>=([\d.]+)', (ROOT / "pyproject.toml").read_text())[1]
    assert re.fullmatch(rf"{re.escape(floor)}\.\d+", oldest["transformers"])
    assert newest["transformers"] == NEWEST_TRANSFORMERS  # which travels with models
    guide = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    for name, version in oldest.items():
        assert re.findall(rf"^\| {name} \| (\S+) \| (\S+) \|$", guide, re.MULTILINE) == [(version, newest[name])]


# What we touch of other libraries.
TOOL = runpy.run_path(str(ROOT / "scripts" / "upkeep" / "touched.py"))
PAGE = TOOL["PAGE"].read_text(encoding="utf-8")
ROWS = TOOL["rows"](PAGE)
# At most so many: whoever adds one takes another away, or says in docs/records/log.md why not.
MOST = 74


def test_the_table_is_what_the_tree_touches_and_every_row_has_its_reason():
    assert TOOL["table"](PAGE) == PAGE, "python scripts/upkeep/touched.py --write"
    assert not [name for name, told in ROWS.items() if "?" in (name[0], *told) or not all(told)]
    assert len(ROWS) <= MOST


@pytest.mark.parametrize("name", ROWS)
def test_it_is_still_there(name):
    where, why, without = ROWS[name]
    try:
        TOOL["resolve"](name)
    except LookupError as error:
        pytest.fail(f"{error}. {where} need it: {why}. Without it: {without}.")


def test_our_methods_take_what_the_libraries_hand_to_those_that_they_override():
    for name, overrides in TOOL["touched"]()[1].items():
        theirs = TOOL["resolve"](name)
        for ours in filter(inspect.isfunction, overrides if inspect.isfunction(theirs) else ()):
            taken = inspect.signature(ours).parameters.values()
            takes_any = any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in taken)
            for number, each in enumerate(inspect.signature(theirs).parameters.values()):
                has_place = number < sum(one.kind == one.POSITIONAL_OR_KEYWORD for one in taken)
                is_known = has_place or takes_any or each.name in {one.name for one in taken}
                assert is_known, f"{ours.__qualname__} must take `{each.name}`, which {name} takes"


# What an earlier Heedful saved means the same today. The folders' code is left out; what it computed is in
# `expected.json`.
FOLDERS = {path.name: path for path in sorted((ROOT / "tests" / "saved").iterdir())}
EXPECTED = {name: json.loads((folder / "expected.json").read_text()) for name, folder in FOLDERS.items()}
SOURCE, TARGET = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 0, 0]]), torch.tensor([[1, 13, 14], [1, 15, 16]])


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


def test_verifying_says_that_code_is_old_and_how_to_renew_it_which_does(tmp_path):
    folder = tmp_path / "model"
    model = AutoModelForSeq2SeqLM.from_pretrained(FOLDERS["transformer"])
    model.save_pretrained(folder)
    path = folder / "versions_heed.py"
    todays = path.read_text()
    path.write_text(re.sub("(?m)^NEWEST_TRANSFORMERS = .*$", 'NEWEST_TRANSFORMERS = "5.18.2"', todays))
    message = r"older than the installed Heedful's and supports transformers up to 5\.18\.2; .* run in Python: (.*)"
    finding = check_remote_code(folder, model)
    assert not finding.passed
    exec(re.search(message, finding.message)[1])
    assert path.read_text() == todays
    path.unlink()
    (folder / "generation_heed.py").write_text("# as it was before there was that file\n")
    assert "supports transformers up to 5.23;" in check_remote_code(folder, model).message
