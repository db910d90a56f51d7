"""The ladder: each invention's gain, with the same pairs, tokenizer and number of updates."""

from heedful_lab.figures import bars
from heedful_lab.studies.report import Outcome
from heedful_lab.studies.study import Lab, description_of
from heedful_lab.studies.training import model_changes

TEST = "test_2016_flickr"
RATE = 0.0015  # default peak learning rate
DESCRIPTION = description_of(__file__)
RUNGS = DESCRIPTION["rungs"]


def run(lab: Lab) -> Outcome:
    """Train a model of each kind and score it on the test set."""
    rows, bleu = [], {}
    for rung in RUNGS:
        name, published = rung["name"], rung["published"]
        is_recurrent = "cell" in rung["options"]
        options = {**(DESCRIPTION["recurrent"] if is_recurrent else {}), **rung["options"]}
        training = lab.train(name, model_changes(options, rung.get("learning_rate", RATE)))
        bleu[name], chrf = training.metrics[TEST]["bleu"], training.metrics[TEST]["chrf"]
        rows.append((name, training.parameters, training.loss, bleu[name], chrf, str(published or "none")))
    compared = [rung for rung in RUNGS if rung["published"]]
    ahead = [rung for rung in compared if bleu[rung["name"]] > rung["published"]]
    values = {"ahead": len(ahead), "compared": len(compared)}
    return Outcome({"ladder": rows}, {"bleu": [bars(bleu, f"BLEU, {TEST}")]}, values)
