"""Train the quickstart's model, and write its scores into the README and its card to model_card.md, with its facts.

    python scripts/upkeep/model_card.py runs/card                                # two minutes; the folder must be new
    python scripts/upkeep/model_card.py runs/card optimization.max_minutes=60    # if other work slows it down

A test renders the card again, and compares its scores with the README's.
"""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from heedful.cards.model_card import render_model_card
from heedful.cards.run_card import facts_of
from heedful.evaluation.metrics import scores_table
from heedful.training.recipe_file import read_recipe
from heedful.training.run import train

ROOT = Path(__file__).parents[2]
CARD = ROOT / "model_card.md"
FACTS = ROOT / "tests" / "cards" / "quickstart_facts.json"
README = ROOT / "README.md"
SCORES = re.compile(r"^1000 pairs\n(.+\n)+", re.MULTILINE)  # that `heedful evaluate` prints


def main(output: str, *overrides: str) -> None:
    """Train, and write the facts, the card and the scores."""
    recipe = read_recipe("quickstart", [f"output={output}", *overrides])
    facts = facts_of(train(recipe))
    FACTS.write_text(json.dumps(asdict(facts), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    CARD.write_text(render_model_card(facts), encoding="utf-8")
    shown = scores_table(facts.scores["compositional"]) + "\n"
    README.write_text(SCORES.sub(shown, README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
