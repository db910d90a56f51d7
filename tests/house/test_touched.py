"""What Heedful touches of other libraries is in the table of docs/versions.md, is still there, and is still alike."""

import inspect
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "upkeep" / "touched.py"
TOOL = runpy.run_path(str(SCRIPT))
PAGE = TOOL["PAGE"].read_text(encoding="utf-8")
ROWS = TOOL["rows"](PAGE)
# At most so many: whoever adds one takes another away, or says in docs/records/log.md why not.
MOST = 73


@pytest.fixture(scope="module")
def touched():
    return TOOL["touched"]()


def test_the_table_is_what_the_tree_touches_and_every_row_has_its_reason():
    # In a process of its own, for tests make subclasses of our classes.
    code = f"import runpy; t = runpy.run_path({str(SCRIPT)!r}); print(t['table'](t['PAGE'].read_text()), end='')"
    written = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert written == PAGE, "python scripts/upkeep/touched.py --write"
    assert not [name for name, told in ROWS.items() if "?" in (name[0], *told) or not all(told)]
    assert len(ROWS) <= MOST


@pytest.mark.parametrize("name", ROWS)
def test_it_is_still_there(name):
    where, why, without = ROWS[name]
    try:
        TOOL["resolve"](name)
    except LookupError as error:
        pytest.fail(f"{error}. {where} need it: {why}. Without it: {without}.")


def test_a_name_that_is_gone_is_told():
    assert TOOL["resolve"]("transformers.trainer.Trainer._save_checkpoint")
    with pytest.raises(LookupError, match=r"Trainer\._no_such is gone: .*\.Trainer has no _no_such"):
        TOOL["resolve"]("transformers.trainer.Trainer._no_such")


def test_our_methods_take_what_the_libraries_hand_to_those_that_they_override(touched):
    for name, overrides in touched[1].items():
        theirs = TOOL["resolve"](name)
        for ours in filter(inspect.isfunction, overrides if inspect.isfunction(theirs) else ()):
            taken = inspect.signature(ours).parameters.values()
            takes_any = any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in taken)
            for number, each in enumerate(inspect.signature(theirs).parameters.values()):
                has_place = number < sum(one.kind == one.POSITIONAL_OR_KEYWORD for one in taken)
                is_known = has_place or takes_any or each.name in {one.name for one in taken}
                assert is_known, f"{ours.__qualname__} must take `{each.name}`, which {name} takes"
