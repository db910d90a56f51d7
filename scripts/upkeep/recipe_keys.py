"""Write docs/recipe.md, the table of a recipe's keys, from the metadata of each key's field.

python scripts/upkeep/recipe_keys.py            # print the page
python scripts/upkeep/recipe_keys.py --write    # update the page
"""

import re
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

You can set each key in a recipe, or after its name on the command line:

```
heedful train quickstart optimization.max_minutes=3
```

`heedful recipes keys` prints all keys as a recipe with their defaults. A key without a default is empty. You may
change the keys with ✓ when you resume a run. `python scripts/upkeep/recipe_keys.py --write` makes this page.
"""
TABLE = "\n| key | meaning | values | default | resume |\n|---|---|---|---|---|\n"
SYMBOLS = {
    "at least": "≥",
    "at most": "≤",
    "above": ">",
    "below": "<",
    "a whole number": "integer",
    "a number": "number",
}
SYMBOLS |= {"true or false": "boolean", "a list": "list", "a mapping": "mapping"}


def page() -> str:
    """Return the page: a table for each section, with the keys, their defaults, ranges and meanings."""
    defaults = leaves(asdict(make_recipe(yaml.safe_load(listing()))))
    titles, rows = {"": "\n## The run\n"}, {"": ""}
    for key in keys_of(Recipe):
        meaning = key.meaning.replace("|", "\\|").replace("<", "&lt;")
        if key.is_section:
            titles[key.name], rows[key.name] = f"\n## {key.name}\n\n{meaning[0].upper()}{meaning[1:]}.\n", ""
        else:
            default = yaml.safe_dump(defaults.get(key.name), default_flow_style=True).removesuffix("\n...\n").strip()
            shown = "" if default == "null" else f"`{default}`"
            values = re.sub("|".join(SYMBOLS), lambda words: SYMBOLS[words[0]], key.values).replace("<", "&lt;")
            values = values.removesuffix(" or empty") if "empty" in meaning else values
            row = f"| `{key.name}` | {meaning} | {values} | {shown} | {'✓' * key.resumes} |\n"
            rows[key.name.rpartition(".")[0]] += row
    return HEAD + "".join(titles[name] + TABLE + rows[name] for name in titles)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
