import pytest

from small_studies import run_smallest


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Run a study at its smallest, once for all tests of a file."""
    found = {}

    def run(name):
        if name not in found:
            found[name] = run_smallest(name, tmp_path_factory.mktemp(name))
        return found[name]

    return run
