"""What Heedful touches of other libraries is in the table of docs/versions.md, is still there, and is still alike."""

import inspect
import runpy
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "upkeep" / "touched.py"))
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
