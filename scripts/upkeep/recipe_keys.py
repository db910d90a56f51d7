"""Write docs/recipe.md, the table of a recipe's keys, from what each key says of itself.

    python scripts/upkeep/recipe_keys.py            # print it
    python scripts/upkeep/recipe_keys.py --write    # bring the page up to date

What a key says of itself stands at its field.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import yaml

from heedful.recipe_keys import keys_of
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import listing, make_recipe
from heedful.training.run_folder.folder import leaves

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipe.md"
HEAD = """# The keys of a recipe

`heedful recipes keys` prints them as a recipe with every default: keep what you change. Any key can be set on the
command line: `heedful train quickstart optimization.max_minutes=3`. "Resumes" marks the keys that may change when a
run is resumed. `python scripts/upkeep/recipe_keys.py --write` makes this page.

"""


def page() -> str:
    """Return the page: a table of all keys, their defaults, values and meanings."""
    defaults = leaves(asdict(make_recipe(yaml.safe_load(listing()))))
    lines = ["| key | default | takes | meaning | resumes |", "|---|---|---|---|---|"]
    for key in keys_of(Recipe):
        meaning = key.meaning.replace("|", "\\|").replace("<", "&lt;")
        if key.is_section:
            lines.append(f"| **{key.name}** | | | {meaning} | |")
        else:
            default = yaml.safe_dump(defaults.get(key.name), default_flow_style=True).removesuffix("\n...\n").strip()
            shown = "" if default == "null" else f"`{default}`"
            lines.append(f"| `{key.name}` | {shown} | {key.values} | {meaning} | {'yes' * key.resumes} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
