"""Write each test's outcome, with the reason for a skip or failure, to the file of `--outcomes`."""

import json
from pathlib import Path

import pytest

RANK = {"passed": 0, "skipped": 1, "failed": 2}


def pytest_addoption(parser):
    """Add `--outcomes FILE`."""
    parser.addoption("--outcomes", type=Path, required=True)


class Outcomes:
    """The worst outcome of each test's parts, with its reason."""

    def __init__(self):
        self.tests = {}

    def pytest_runtest_logreport(self, report):
        """Record one part of the test: set-up, call, a subtest, or tear-down."""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else str(report.longrepr)
        else:
            reason = ""
        name = report.nodeid.split("::", 1)[1]
        known = self.tests.get(name, {"outcome": "passed", "reason": ""})
        if RANK[report.outcome] > RANK[known["outcome"]]:
            known = {"outcome": report.outcome, "reason": reason}
        self.tests[name] = known


@pytest.hookimpl
def pytest_configure(config):
    """Start recording."""
    config.pluginmanager.register(Outcomes(), "outcomes")


def pytest_sessionfinish(session):
    """Write the outcomes."""
    outcomes = session.config.pluginmanager.get_plugin("outcomes").tests
    session.config.getoption("--outcomes").write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
