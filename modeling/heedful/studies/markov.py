"""From Markov to attention: how well ever more memory foretells the next target token, with and without the source.

Counts remember a fixed window of tokens; a recurrent decoder has a state that everything must pass through; the
Transformer's decoder looks at every earlier token. Without the source each is a language model, with it a translator.
The same tokenizer, test sentences and tokens, </s> included, for all of them. "Without the source" is the same kind of
model trained on pairs whose source is always the same, which tells it nothing.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from heedful.data.sources import read_pairs
from heedful.studies.comparison import LEARNING, encoded, held_out_pairs, loss_per_token
from heedful.studies.figures import draw_lines, new_figure
from heedful.studies.ngrams import NgramModel
from heedful.studies.study import Cell, Figure, Lab, Outcome, Study, Table
from heedful.studies.training import Training, study_recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

Pairs = list[dict[str, str]]

WINDOWS = (0, 1, 2, 3, 4)
NAMES = {0: "unigram", 1: "first-order Markov"}
NOTHING = "."  # the source of a model that is to have none
TRANSLATED = 10  # test pairs of a model without the source, whose translations mean nothing
RECURRENT = {
    "model_type": "heed_rnn",
    "cell": "gru",
    "embedding_size": 64,
    "hidden_size": 128,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "input_feeding": False,
    "dropout": 0.0,
}
RECURRENT_LEARNING_RATE = 0.01  # better for these than the 0.005 that serves the Transformer
STATE = {**RECURRENT, "attention": "none"}
LOOKING = {**RECURRENT, "attention": "additive"}


@dataclass
class Memory:
    """A model of the next token.

    Attributes:
        name: What it is.
        reads: What it knows of the sentence.
        numbers: Parameters, or n-grams that were counted.
        target_tokens: Target tokens of its training, as often as they came.
        perplexity: Of the test sentences, per token.
    """

    name: str
    reads: str
    numbers: int
    target_tokens: int
    perplexity: float


def run(lab: Lab) -> Outcome:
    """Count, train, and measure the perplexity of the same test sentences."""
    translator = lab.train("Transformer, with the source")
    counted = _count(lab, translator)
    trained = [_measured(translator, held_out_pairs(), "Transformer with the source", "all before it, the source")]
    folder = translator.folder / "tokenizer"
    names = {"GRU, the source through its state": STATE, "GRU with additive attention": LOOKING}
    for name, options in names.items():
        training = lab.train(name, _recurrent(options) | {"tokenizer.path": str(folder)})
        reads = "a state, the source" if options is LOOKING else "a state, which begins with the source's"
        trained.insert(len(trained) - 1, _measured(training, held_out_pairs(), name, reads))
    alone: dict[str, dict[str, Any]] = {"GRU": _recurrent(STATE), "Transformer": {}}
    blind = [
        _measured(
            replace(lab, data=None).train(f"{name}, without the source", changes | _without_source(lab, folder)),
            [pair | {"source": NOTHING} for pair in held_out_pairs()],
            f"{name} without the source",
            "a state" if changes else "all before it",
        )
        for name, changes in alone.items()
    ]
    models = [*counted, *blind, *trained]
    figure = Figure("perplexity", "Test perplexity per token; counts by their window.", _draw(counted, blind, trained))
    return Outcome([_table(models)], [figure], _values(counted, blind, trained), _findings())


def _recurrent(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "model.options": options,
        "model.attn_implementation": None,
        "optimization.max_grad_norm": 1.0,
        "optimization.learning_rate": RECURRENT_LEARNING_RATE,
    }


def _training_pairs(lab: Lab) -> Pairs:
    where = lab.data or study_recipe(dict(lab.study.changes)).data.train
    return list(read_pairs(where, "ko", "en", split="train"))


def _without_source(lab: Lab, tokenizer: Any) -> dict[str, Any]:
    """Return the changes that train a model on the targets alone, with the translator's tokenizer."""
    validation = read_pairs(study_recipe({}).data.validation, "ko", "en", split="validation")
    files = {
        name: lab.write_pairs([(NOTHING, pair["target"]) for pair in pairs])
        for name, pairs in (("train", _training_pairs(lab)), ("validation", validation))
    }
    test = lab.write_pairs([(NOTHING, pair["target"]) for pair in held_out_pairs()[:TRANSLATED]])
    return {
        "data.train": files["train"],
        "data.validation": files["validation"],
        "data.test": {"test": test},
        "data.source": "source",
        "data.target": "target",
        "data.cleaning.drop_overlap": False,  # every source is in the held-out data
        "tokenizer.path": str(tokenizer),
    }


def _count(lab: Lab, training: Training) -> list[Memory]:
    """Count the n-grams of the targets that the translator was trained on."""
    translator = training.translator()
    tokenizers, start = translator.tokenizers, translator.model.config.decoder_start_token_id
    train = tokenizers.encode_target([pair["target"] for pair in _training_pairs(lab)])
    test = tokenizers.encode_target([pair["target"] for pair in held_out_pairs()])
    models = []
    for window in WINDOWS:
        model = NgramModel(train, window, len(tokenizers.target), start)
        reads = f"{window or 'no'} token{'s' * (window != 1)} before it"
        name = NAMES.get(window, f"window of {window}")
        models.append(Memory(name, reads, model.size(), sum(map(len, train)), model.perplexity(test)))
    return models


def _measured(training: Training, pairs: Pairs, name: str, reads: str) -> Memory:
    translator = training.translator()
    loss = loss_per_token(translator.model, encoded(pairs, translator.tokenizers))
    return Memory(name, reads, training.parameters, training.target_tokens, math.exp(loss))


def _table(models: list[Memory]) -> Table:
    columns = ("model", "reads", "parameters or counts", "target tokens of training", "perplexity")
    rows = [(model.name, model.reads, model.numbers, model.target_tokens, model.perplexity) for model in models]
    formats = {"parameters or counts": ",", "target tokens of training": ",", "perplexity": ".2f"}
    title = "Perplexity of the test sentences per target token, </s> included"
    return Table("perplexity", title, columns, rows, formats)


def _values(counted: list[Memory], blind: list[Memory], trained: list[Memory]) -> dict[str, Cell]:
    best = min(counted, key=lambda model: model.perplexity)
    return {
        "unigram": counted[0].perplexity,
        "markov": counted[1].perplexity,
        "window": best.perplexity,
        "window_name": best.name,
        "recurrent_alone": blind[0].perplexity,
        "transformer_alone": blind[1].perplexity,
        "recurrent_state": trained[0].perplexity,
        "recurrent_attention": trained[1].perplexity,
        "transformer": trained[2].perplexity,
    }


def _findings() -> list[str]:
    return [
        "Counts: {unigram:.1f} without any memory, {markov:.2f} with one token, {window:.2f} with the best of them "
        "({window_name}).",
        "Without the source a recurrent decoder comes to {recurrent_alone:.2f}, the Transformer's to "
        "{transformer_alone:.2f}.",
        "With the source: {recurrent_state:.2f} where it must pass through the recurrent state, "
        "{recurrent_attention:.2f} where a recurrent decoder attends to it, {transformer:.2f} in the Transformer.",
    ]


def _draw(counted: list[Memory], blind: list[Memory], trained: list[Memory]) -> "Picture":
    figure = new_figure()
    axes = figure.axes[0]
    points = [(window, model.perplexity) for window, model in zip(WINDOWS, counted, strict=True)]
    lines = {"counts (Kneser-Ney)": points}
    for model in [*blind, *trained]:
        lines[model.name] = [(WINDOWS[0], model.perplexity), (WINDOWS[-1], model.perplexity)]
    draw_lines(axes, lines, "tokens of the window", "test perplexity per token", log="y")
    axes.set_xticks(WINDOWS)
    return figure


STUDY = Study("markov", "What does each kind of memory buy in foretelling the next token?", run, LEARNING)
