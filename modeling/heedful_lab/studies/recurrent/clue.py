"""The clue: a story of words; the last line ("the weapon was") asks for one that the model must remember."""

from collections import defaultdict
from collections.abc import Sequence
from random import Random
from statistics import fmean

from heedful.decoding.translation import Translator
from heedful.figures import lines
from heedful_lab.studies.measures import attention_by_head, score
from heedful_lab.studies.pairs import Pair
from heedful_lab.studies.recurrent.equal_models import recurrent_models
from heedful_lab.studies.report import Cell, Outcome
from heedful_lab.studies.study import Lab, description_of

DESCRIPTION = description_of(__file__)
CLUES = {kind: words.split() for kind, words in DESCRIPTION["clues"].items()}
NUMBERS = (2, 4, 8, 12)  # words before the last line
PAIRS = {"train": 40_000, "validation": 400, "test": 2_000}
LOOKED_AT = 200  # test pairs with measured attention
MODELS = ("LSTM", "LSTM, four times as long", "LSTM + attention", "Transformer")


def story(random: Random, number: int) -> Pair:
    """Return a story of `number` clues of different kinds with a question for one, and its answer."""
    words = {kind: random.choice(CLUES[kind]) for kind in random.sample(sorted(CLUES), number)}
    asked = random.choice(list(words))
    return f"{' '.join(words.values())} . the {asked} was", words[asked]


def stories(count: int, seed: int) -> list[Pair]:
    """Return stories with each number of clues in turn."""
    random = Random(seed)
    return [story(random, NUMBERS[number % len(NUMBERS)]) for number in range(count)]


def clues_of(pair: Pair) -> list[str]:
    """Return the words before the last line."""
    return pair[0].partition(" . ")[0].split()


def distance(pair: Pair) -> int:
    """Return the number of words between the deciding word and the last line."""
    clues = clues_of(pair)
    return len(clues) - 1 - clues.index(pair[1])


def weight_on_the_clue(translator: Translator, pairs: Sequence[Pair]) -> tuple[str, float]:
    """Return the head with the largest mean weight from the question to the deciding word, and this weight."""
    found = defaultdict[str, list[float]](list)
    for (source, word), by_head in zip(pairs, attention_by_head(translator, pairs, ["cross", "encoder"]), strict=True):
        words = source.split()
        rows = {"cross": 0, "encoder": len(words) - 2}  # the answer's step; the kind in the last line
        for head, weights in by_head.items():
            found[str(head)].append(weights[rows[head.kind], words.index(word)].item())
    best = max(found, key=lambda head: fmean(found[head]))
    return best, fmean(found[best])


def run(lab: Lab) -> Outcome:
    """Train the models on stories, and measure their answers by number of clues and by distance."""
    data = {split: stories(count, lab.seed + number) for number, (split, count) in enumerate(PAIRS.items())}
    files = lab.write_data(**data) | {"tokenizer.vocab_size": None}
    most = max(NUMBERS)
    by_number = [[pair for pair in data["test"] if len(clues_of(pair)) == number] for number in NUMBERS]
    by_distance = [[pair for pair in by_number[-1] if distance(pair) * 4 // most == quarter] for quarter in range(4)]
    rows, far = list[tuple[Cell, ...]](), list[tuple[Cell, ...]]()
    curves, losses = {}, {}
    for name in MODELS:
        model, _, is_long = name.partition(", ")
        updates = {"optimization.max_updates": 4 * lab.study.changes["optimization.max_updates"]} if is_long else {}
        training = lab.train(name, recurrent_models().get(model, {}) | files | updates)
        translator = training.translator()
        exact, quarters = (
            [score(translator, pairs, "exact_match") for pairs in groups] for groups in (by_number, by_distance)
        )
        looks = weight_on_the_clue(translator, data["test"][:LOOKED_AT]) if model != "LSTM" else ("–", "–")
        rows.append((name, training.parameters, *exact, *looks))
        far.append((name, *quarters))
        curves[name], losses[name] = list(zip(NUMBERS, exact, strict=True)), training.curve()
    named = lines(curves, "clues in the story", "decisive words named, in %", xticks=NUMBERS, ylim=(0, 105))
    panels = [named, lines(losses, "update", "validation loss")]
    return Outcome({"clues": rows, "distance": far}, {"clues": panels})
