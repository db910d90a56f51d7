"""A plugin of pytest: at the end of a run, which extras are not installed, and what was skipped for want of each.

A test that needs a package of an extra asks for it first, by `pytest.importorskip`; a whole file asks at its top.
"""

import re
import tomllib
from collections import Counter
from importlib import metadata

import pytest


def is_installed(name: str) -> bool:
    """Tell whether a distribution of this name is there, whatever it is imported as."""
    try:
        return bool(metadata.distribution(name))
    except metadata.PackageNotFoundError:
        return False


def pytest_terminal_summary(terminalreporter, config):
    """Say which extras are not installed, and what `pytest.importorskip` skipped for want of each."""
    project = tomllib.loads((config.rootpath / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    absent = {}  # a package that several extras have counts for the first of them
    for extra, requirements in project["optional-dependencies"].items():
        for name in (re.match(r"[\w-]+", each)[0] for each in requirements):
            if not is_installed(name):
                absent.setdefault(name, extra)
    skipped = Counter()
    for report in terminalreporter.getreports("skipped"):
        if found := re.search(r"could not import '(\w+)", str(report.longrepr)):
            extra = absent.get(found[1].replace("_", "-"))
            skipped[extra, "files" if isinstance(report, pytest.CollectReport) else "tests"] += 1
    if absent:
        terminalreporter.section("extras that are not installed")
    for extra in dict.fromkeys(absent.values()):
        names = ", ".join(name for name in absent if absent[name] == extra)
        tests, files = (skipped[extra, kind] for kind in ("tests", "files"))
        terminalreporter.write_line(f"{extra} ({names}): skipped tests {tests}, whole files {files}")
