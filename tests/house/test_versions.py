"""What one version of transformers saved is read by the others, with Heedful and without; pins and docs agree.

What Heedful touches of other libraries is in the table of docs/versions.md, is still there, and is still alike.
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
            assert_near(torch.tensor(found[name].pop("logits")), torch.tensor(written[name]["logits"]), 1e-6)
            assert found[name] == {what: written[name][what] for what in found[name]}, (reader, action, name)


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


# What we touch of other libraries


TOOL = runpy.run_path(str(ROOT / "scripts" / "upkeep" / "touched.py"))
PAGE = TOOL["PAGE"].read_text(encoding="utf-8")
ROWS = TOOL["rows"](PAGE)
# At most so many: whoever adds one takes another away, or says in docs/records/log.md why not.
MOST = 73


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


def test_a_name_that_is_gone_is_said_to_be():
    assert TOOL["resolve"]("transformers.trainer.Trainer._save_checkpoint")
    with pytest.raises(LookupError, match=r"Trainer\._no_such is gone: .*\.Trainer has no _no_such"):
        TOOL["resolve"]("transformers.trainer.Trainer._no_such")


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
