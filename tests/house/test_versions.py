"""What one version of transformers saved is read by the others, with Heedful and without; pins and docs agree."""

import itertools
import json
import os
import re
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
