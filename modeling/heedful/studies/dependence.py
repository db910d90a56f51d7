"""Long-range dependence: what a model makes of long sources, how its gradients reach far back, and beyond what it saw.

Section 4 argues that short paths between positions make dependencies easier to learn. A recurrent model without
attention has to carry the whole source through every step, one with attention looks at it, a Transformer does nothing
else.
"""

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from heedful.data.sources import read_pairs
from heedful.evaluation.metrics import score_translations
from heedful.studies.figures import draw_lines, new_figure
from heedful.studies.study import Figure, Lab, Outcome, Study, Table
from heedful.studies.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

    from heedful.inference.translation import Translator

RECURRENT: dict[str, Any] = {"model_type": "heed_rnn", "embedding_size": 64, "hidden_size": 128, "dropout": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    # All it knows of the source is its state: with that of the GRU it would not get far.
    "LSTM, no attention": {
        **RECURRENT,
        "embedding_size": 128,
        "hidden_size": 256,
        "cell": "lstm",
        "bidirectional": False,
        "attention": "none",
        "input_feeding": False,
        "bridge": "copy",
    },
    "GRU + additive": {**RECURRENT, "cell": "gru", "attention": "additive"},
    "Transformer": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
    },
}
# Up to so many sentences are joined to one source.
MOST_SENTENCES = 3
SENTENCES = {"train": 60_000, "validation": 600, "test": 2_000}
# Upper ends of the groups of sources, in tokens.
GROUPS = (10, 18, 26, 34, 50)
# Sources of a group whose gradients are measured.
MEASURED = 40

# The task that JoeyNMT publishes: 50 symbols, at most 25 of them in training and at most 30 in the test.
SYMBOLS = 50
SEEN, LONGEST = 25, 30
# Upper ends of the groups of sequences, in symbols; one ends at `SEEN`.
SEQUENCE_GROUPS = (5, 10, 15, 20, SEEN, LONGEST)
SEQUENCES = {"train": 50_000, "validation": 500, "test": 1_000}
PUBLISHED_REVERSAL = 95.19

JOINED: dict[str, Any] = {
    "data.source": "source",
    "data.target": "target",
    "data.cleaning.drop_overlap": False,
    "tokenizer.vocab_size": 2000,
    "optimization.warmup_updates": 100,
    "optimization.max_updates": 1600,
    "optimization.tokens_per_update": 4096,
    "optimization.max_grad_norm": 1.0,
    "validation.every_updates": 200,
    "logging.every_updates": 100,
    "decoding.max_length": 160,
}
JOINED_RATES = {"LSTM, no attention": 0.004, "GRU + additive": 0.01, "Transformer": 0.005}
JOINED_OPTIONS: dict[str, dict[str, Any]] = {
    # Read from its end, a source begins where its translation does (Sutskever et al., 2014, section 3.3).
    "LSTM, no attention": {"dropout": 0.0, "reverse_source": True},
    "GRU + additive": {"dropout": 0.0},
    "Transformer": {"dropout": 0.0},
}
REVERSAL: dict[str, Any] = {
    "data.source": "source",
    "data.target": "target",
    "tokenizer.algorithm": "word",
    "tokenizer.vocab_size": None,
    "optimization.learning_rate": 0.004,
    "optimization.max_updates": 1500,
    "optimization.tokens_per_update": 4096,
    "optimization.warmup_updates": 200,
    "optimization.max_grad_norm": 1.0,
    "decoding.bleu_tokenizer": "none",
}


def joined_pairs(split: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Return neighbouring pairs of the built-in corpus, one to three of them joined to one pair."""
    pairs = [(pair["source"], pair["target"]) for pair in read_pairs(f"builtin:{split}:{count}", "ko", "en")]
    draw, joined = random.Random(seed), []
    while pairs:
        size = draw.randint(1, MOST_SENTENCES)
        part, pairs = pairs[:size], pairs[size:]
        joined.append((" ".join(source for source, _ in part), " ".join(target for _, target in part)))
    return joined


def reversal_pairs(longest: int, count: int, seed: int) -> list[tuple[str, str]]:
    """Return random sequences of one to `longest` symbols, each with the same symbols from the last to the first."""
    draw = random.Random(seed)
    sequences = [[f"s{draw.randrange(SYMBOLS)}" for _ in range(draw.randint(1, longest))] for _ in range(count)]
    return [(" ".join(sequence), " ".join(reversed(sequence))) for sequence in sequences]


def run(lab: Lab) -> Outcome:
    """Train the three models on joined sentences and on reversal; score by length, and measure gradients."""
    joined = {split: joined_pairs(split, count, lab.seed) for split, count in SENTENCES.items()}
    reversed_ = {
        split: reversal_pairs(SEEN if split != "test" else LONGEST, count, lab.seed + number)
        for number, (split, count) in enumerate(SEQUENCES.items())
    }
    on_joined = _train(lab, "joined", {**JOINED, **_files(lab, joined)}, JOINED_RATES, JOINED_OPTIONS)
    on_reversed = _train(lab, "reversal", {**REVERSAL, **_files(lab, reversed_)})
    bleu, gradients = {}, {}
    for name, training in on_joined.items():
        translator = training.translator()
        groups = _groups(translator, joined["test"])
        bleu[name] = [_bleu(translator, pairs) for pairs in groups]
        gradients[name] = [_share_at_the_first(translator, pairs[:MEASURED]) for pairs in groups]
    exact, turned_gradients = {}, {}
    for name, training in on_reversed.items():
        translator = training.translator()
        groups = _sequence_groups(reversed_["test"])
        exact[name] = [_exact(translator, pairs) for pairs in groups]
        turned_gradients[name] = [_share_at_the_first(translator, pairs[:MEASURED]) for pairs in groups]
    tables = [
        _table_by_length("bleu", "BLEU by source length, in tokens", GROUPS, bleu, ".1f"),
        _table_by_length("gradients", GRADIENTS.format("source length, in tokens"), GROUPS, gradients, ".3f"),
        _reversal_table(on_reversed, exact),
        _table_by_length(
            "reversal_gradients", GRADIENTS.format("symbols to reverse"), SEQUENCE_GROUPS, turned_gradients, ".3f"
        ),
    ]
    figures = [
        Figure(
            "length",
            "Left: BLEU by source length. Right: gradient at the first source token, over that at an average one.",
            _draw_by_length(GROUPS, "source tokens, at most", {"BLEU": bleu, RATIO: gradients}),
        ),
        Figure(
            "reversal",
            f"Left: sequences that are reversed without a fault, by their length; at most {SEEN} symbols in training. "
            "Right: gradient at the first symbol, over that at an average one.",
            _draw_by_length(SEQUENCE_GROUPS, "symbols, at most", {"exact in %": exact, RATIO: turned_gradients}),
        ),
    ]
    return Outcome(tables, figures, _values(bleu, turned_gradients, on_reversed, exact), FINDINGS)


GRADIENTS = "Gradient of the loss at the first source token, times that of an average one, by {}"
RATIO = "gradient, first / average"
FINDINGS = [
    "From sources of at most {short} tokens to those of more than {long}, BLEU goes from {bleu_lstm_short:.1f} to "
    "{bleu_lstm_long:.1f} for the LSTM without attention, from {bleu_gru_short:.1f} to {bleu_gru_long:.1f} for the "
    "GRU with attention, and from {bleu_transformer_short:.1f} to {bleu_transformer_long:.1f} for the Transformer.",
    "Of sequences of at most {few} symbols the LSTM without attention reverses {exact_lstm_short:.1f} % without a "
    "fault, of those of more than {many} and at most {seen} {exact_lstm_long:.1f} %; the GRU with attention "
    "{exact_gru_short:.1f} % and {exact_gru_long:.1f} %, the Transformer {exact_transformer_short:.1f} % and "
    "{exact_transformer_long:.1f} %.",
    "Of more than {many} symbols to reverse, up to {seen}, the first gets {gradient_lstm_long:.2f} of an average "
    "one's gradient in the LSTM without attention, {gradient_gru_long:.2f} in the GRU with attention, "
    "{gradient_transformer_long:.2f} in the Transformer; of at most {few} it gets {gradient_lstm_short:.2f}, "
    "{gradient_gru_short:.2f} and {gradient_transformer_short:.2f}.",
    "Reversing sequences, up to {beyond} symbols longer than any in training, the best model is the {reversal_best} "
    "with BLEU {reversal_bleu:.2f}; JoeyNMT publishes {reversal_published:.2f} for its own.",
]


def _files(lab: Lab, pairs: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, Any]:
    """Write the pairs of each split, and return the recipe's keys for them."""
    files = {split: lab.write_pairs(some) for split, some in pairs.items()}
    return {
        "data.train": files["train"],
        "data.validation": files["validation"],
        "data.test": {"test": files["test"]},
    }


def _train(
    lab: Lab,
    task: str,
    changes: Mapping[str, Any],
    rates: Mapping[str, float] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Training]:
    """Train each model, with a learning rate and more options by its name; return the trainings by name."""
    trainings = {}
    for name, model in MODELS.items():
        own: dict[str, Any] = {
            "model.options": {**model, **(options or {}).get(name, {})},
            "model.attn_implementation": None if "model_type" in model else "eager",
        }
        own |= {"optimization.learning_rate": rates[name]} if rates else {}
        trainings[name] = lab.train(f"{task}, {name}", {**changes, **own})
    return trainings


def _groups(translator: "Translator", pairs: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Return the pairs of each group of `GROUPS`, by the number of source tokens."""
    lengths = [len(ids) for ids in translator.tokenizers.encode_source([source for source, _ in pairs])]
    bounds = zip((0, *GROUPS), GROUPS, strict=False)
    return [
        [pair for pair, length in zip(pairs, lengths, strict=True) if low < length <= high] for low, high in bounds
    ]


def _bleu(translator: "Translator", pairs: Sequence[tuple[str, str]]) -> float:
    texts = [found[0].text for found in translator.translate([source for source, _ in pairs])]
    return score_translations(texts, [target for _, target in pairs], metrics=["bleu"])["bleu"]


def _share_at_the_first(translator: "Translator", pairs: Sequence[tuple[str, str]]) -> float:
    """Return how large the gradient at the first source token is, over the average of all source tokens.

    It is the norm of the gradient of a pair's loss with respect to the embedding, averaged over pairs.
    """
    import torch

    model, tokenizers = translator.model, translator.tokenizers
    shares = []
    for source, target in pairs:
        source_ids, target_ids = tokenizers.encode_source([source])[0], tokenizers.encode_target([target])[0]
        with torch.enable_grad():
            embedded = model.get_input_embeddings()(torch.tensor([source_ids])).detach().requires_grad_()
            loss = model(inputs_embeds=embedded, labels=torch.tensor([list(target_ids)])).loss
            (gradient,) = torch.autograd.grad(loss, embedded)
        norms = gradient[0].norm(dim=-1)  # (source_length)
        shares.append((norms[0] / norms.mean()).item())
    return sum(shares) / len(shares)


def _sequence_groups(pairs: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Return the pairs of each group of `SEQUENCE_GROUPS`, by the number of symbols."""
    groups: list[list[tuple[str, str]]] = [[] for _ in SEQUENCE_GROUPS]
    for pair in pairs:
        groups[bisect_left(SEQUENCE_GROUPS, len(pair[0].split()))].append(pair)
    return groups


def _exact(translator: "Translator", pairs: Sequence[tuple[str, str]]) -> float:
    """Return the percentage of sequences that are reversed without a fault."""
    found = translator.translate([source for source, _ in pairs])
    right = [translations[0].text == target for (_, target), translations in zip(pairs, found, strict=True)]
    return 100 * sum(right) / len(right)


def _spans(groups: Sequence[int]) -> list[str]:
    return [f"{low + 1} to {high}" for low, high in zip((0, *groups), groups, strict=False)]


def _table_by_length(
    name: str, title: str, groups: Sequence[int], values: Mapping[str, Sequence[float]], form: str
) -> Table:
    columns = _spans(groups)
    rows: list[tuple[str | float, ...]] = [(model, *numbers) for model, numbers in values.items()]
    return Table(name, title, ("model", *columns), rows, dict.fromkeys(columns, form))


def _reversal_table(trainings: Mapping[str, Training], exact: Mapping[str, Sequence[float]]) -> Table:
    columns = ("model", "BLEU", *(f"exact in %, {span}" for span in _spans(SEQUENCE_GROUPS)))
    rows: list[tuple[str | float, ...]] = [
        (name, one.metrics["test"]["bleu"], *exact[name]) for name, one in trainings.items()
    ]
    title = f"Reversal: trained on up to {SEEN} symbols, tested on up to {LONGEST}"
    return Table("reversal", title, columns, rows, {"BLEU": ".2f"} | dict.fromkeys(columns[2:], ".1f"))


def _values(bleu, turned_gradients, trainings: Mapping[str, Training], exact) -> dict[str, str | int | float]:
    values: dict[str, str | int | float] = {"short": GROUPS[0], "long": GROUPS[-2], "beyond": LONGEST - SEEN}
    values |= {"few": SEQUENCE_GROUPS[0], "many": SEQUENCE_GROUPS[-3], "seen": SEEN}
    for name in MODELS:
        key = name.split()[0].rstrip(",").lower()
        values |= {f"bleu_{key}_short": bleu[name][0], f"bleu_{key}_long": bleu[name][-1]}
        for measure, numbers in (("exact", exact[name]), ("gradient", turned_gradients[name])):
            values |= {f"{measure}_{key}_short": numbers[0], f"{measure}_{key}_long": numbers[-2]}
    best = max(trainings, key=lambda name: trainings[name].metrics["test"]["bleu"])
    return values | {
        "reversal_best": best,
        "reversal_bleu": trainings[best].metrics["test"]["bleu"],
        "reversal_published": PUBLISHED_REVERSAL,
    }


def _draw_by_length(groups: Sequence[int], label: str, measures) -> "Picture":
    """Draw each measure, which has a value for every group in each model, beside the others."""
    figure = new_figure(columns=len(measures))
    for axes, (measure, values) in zip(figure.axes, measures.items(), strict=True):
        lines = {name: list(zip(groups, numbers, strict=True)) for name, numbers in values.items()}
        draw_lines(axes, lines, label, measure)
    return figure


STUDY = Study("dependence", "How far back do models reach, and how far beyond what they saw?", run, data="none")
