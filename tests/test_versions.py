"""What the newest libraries saved is read by the oldest, and the other way round; and the pins agree with the docs."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from helpers import assert_near

ROOT = Path(__file__).resolve().parents[1]
OLDEST, NEWEST = (ROOT / name / "bin" / "python" for name in (".venv-oldest", ".venv"))


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def run(python: Path, action: str, folder: Path, results: Path) -> dict:
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT / "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(ROOT / "tests" / "version_process.py"), action, str(folder), str(results)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(results.read_text())


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("writer", ["oldest", "newest"])
def test_a_folder_means_the_same_to_the_oldest_and_the_newest_libraries(writer, tmp_path):
    for python in (OLDEST, NEWEST):
        if not python.exists():
            pytest.skip(f"{python.parents[1].name} is not there; `make oldest` makes it")
    one, other = (OLDEST, NEWEST) if writer == "oldest" else (NEWEST, OLDEST)
    written = run(one, "write", tmp_path, tmp_path / "written.json")
    found = run(other, "read", tmp_path, tmp_path / "read.json")
    versions = {written.pop("transformers"), found.pop("transformers")}
    assert versions == {pins(name)["transformers"] for name in ("constraints.txt", "constraints-oldest.txt")}
    for name, values in written.items():
        assert_near(torch.tensor(found[name].pop("logits")), torch.tensor(values.pop("logits")), 1e-6)
        assert found[name] == values, name
        assert len({token for row in values["beams"] for token in row}) > 5


def test_the_oldest_pins_are_older_and_are_the_declared_floor():
    oldest, newest = pins("constraints-oldest.txt"), pins("constraints.txt")
    assert {*oldest} <= {*newest}
    for name in oldest:
        assert tuple(map(int, oldest[name].split("."))) < tuple(map(int, newest[name].split("."))), name
    floor = re.search(r'"transformers>=([\d.]+)', (ROOT / "pyproject.toml").read_text())[1]
    assert re.fullmatch(rf"{re.escape(floor)}\.\d+", oldest["transformers"])


def test_the_guide_to_versions_names_what_is_pinned():
    guide = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    for name, version in pins("constraints-oldest.txt").items():
        (row,) = re.findall(rf"^\| {name} \| (\S+) \| (\S+) \|$", guide, re.MULTILINE)
        assert row == (version, pins("constraints.txt")[name])
