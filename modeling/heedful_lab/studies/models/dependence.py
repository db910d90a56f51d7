"""Long-range dependence: long sources, gradients at distant tokens, and lengths beyond training (section 4)."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import fmean

import torch

from heedful.decoding.translation import Translator
from heedful.figures import Panel, lines
from heedful_lab.studies.measures import score
from heedful_lab.studies.pairs import Pair, corpus_pairs, joined_pairs, reversal_pairs
from heedful_lab.studies.report import Outcome
from heedful_lab.studies.study import Lab, description_of
from heedful_lab.studies.training import Training, model_changes

MOST_SENTENCES = 3  # joined in a source
SENTENCES = {"train": 60_000, "validation": 600, "test": 2_000}
GROUPS = (10, 18, 26, 34, 50)  # upper limits of length groups, in tokens
MEASURED = 40  # sources per group with measured gradients

# JoeyNMT's published task: 50 symbols, sequences of up to 25 in training and up to 30 in the test.
SYMBOLS = 50
SEEN, LONGEST = 25, 30
SEQUENCE_GROUPS = (5, 10, 15, 20, SEEN, LONGEST)  # upper limits, in symbols
SEQUENCES = {"train": 50_000, "validation": 500, "test": 1_000}
PUBLISHED_REVERSAL = 95.19

DESCRIPTION = description_of(__file__)
MODELS = DESCRIPTION["models"]
JOINED = DESCRIPTION["joined"]
REVERSAL = {**DESCRIPTION["reversal"], "tokenizer.vocab_size": None}  # each symbol is a word
RATIO = "gradient, first / average"

ByLength = dict[str, list[float]]  # values by length group, by model


def joined_sentences(split: str, count: int, seed: int) -> list[Pair]:
    """Return pairs of the built-in corpus, one to three neighbours joined."""
    draw = Random(seed)
    sizes = iter(lambda: draw.randint(1, MOST_SENTENCES), None)
    return joined_pairs(corpus_pairs(f"builtin:{split}:{count}"), sizes)


def reversed_sequences(longest: int, count: int, seed: int) -> list[Pair]:
    """Return random sequences of one to `longest` symbols and their reversals."""
    return reversal_pairs(
        lambda random: [f"s{random.randrange(SYMBOLS)}" for _ in range(random.randint(1, longest))], count, seed
    )


def run(lab: Lab) -> Outcome:
    """Train three models on joined sentences and reversal, and measure scores and gradients by length."""
    joined = {split: joined_sentences(split, count, lab.seed) for split, count in SENTENCES.items()}
    sequences = {
        split: reversed_sequences(SEEN if split != "test" else LONGEST, count, lab.seed + number)
        for number, (split, count) in enumerate(SEQUENCES.items())
    }
    data, rates, options = lab.write_data(**joined), DESCRIPTION["joined_rates"], DESCRIPTION["joined_options"]
    on_joined = {
        name: lab.train(f"joined, {name}", JOINED | data | model_changes({**model, **options[name]}, rates[name]))
        for name, model in MODELS.items()
    }
    data = lab.write_data(**sequences)
    on_sequences = {
        name: lab.train(f"reversal, {name}", REVERSAL | data | model_changes(model)) for name, model in MODELS.items()
    }
    bleu, gradients = _by_length(on_joined, _tokens, GROUPS, joined["test"], "bleu")
    exact, reversal_gradients = _by_length(on_sequences, _symbols, SEQUENCE_GROUPS, sequences["test"], "exact_match")
    reversal = {name: [one.bleu(), *exact[name]] for name, one in on_sequences.items()}
    best = max(reversal, key=lambda name: reversal[name][0])
    rows = {"bleu": bleu, "gradients": gradients, "reversal": reversal, "reversal_gradients": reversal_gradients}
    return Outcome(
        {table: [(model, *numbers) for model, numbers in by_model.items()] for table, by_model in rows.items()},
        {
            "length": _panels(GROUPS, "source tokens, at most", {"BLEU": bleu, RATIO: gradients}),
            "reversal": _panels(SEQUENCE_GROUPS, "symbols, at most", {"exact in %": exact, RATIO: reversal_gradients}),
        },
        {"reversal_best": best, "reversal_bleu": reversal[best][0], "reversal_published": PUBLISHED_REVERSAL},
        {"longest": LONGEST},
    )


def _by_length(
    trainings: Mapping[str, Training],
    lengths: Callable[[Translator, Sequence[Pair]], list[int]],
    ends: Sequence[int],
    pairs: Sequence[Pair],
    metric: str,
) -> tuple[ByLength, ByLength]:
    """Return each group's score, and the relative gradient at the first source token."""
    scores, gradients = {}, {}
    for name, training in trainings.items():
        translator = training.translator()
        groups = _grouped(ends, pairs, lengths(translator, pairs))
        scores[name] = [score(translator, some, metric) for some in groups]
        gradients[name] = [_share_at_the_first(translator, some[:MEASURED]) for some in groups]
    return scores, gradients


def _tokens(translator: Translator, pairs: Sequence[Pair]) -> list[int]:
    return [len(tokens) for tokens in translator.tokenizers.encode_source([source for source, _ in pairs])]


def _symbols(translator: Translator, pairs: Sequence[Pair]) -> list[int]:
    return [len(source.split()) for source, _ in pairs]


def _grouped(ends: Sequence[int], pairs: Sequence[Pair], lengths: Sequence[int]) -> list[list[Pair]]:
    """Return the pairs of each length group, without longer ones."""
    groups: list[list[Pair]] = [[] for _ in (*ends, "longer")]
    for pair, length in zip(pairs, lengths, strict=True):
        groups[bisect_left(ends, length)].append(pair)
    return groups[:-1]


def _share_at_the_first(translator: Translator, pairs: Sequence[Pair]) -> float:
    """Return the gradient norm at the first source token's embedding, relative to all tokens; mean over pairs."""
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
    return fmean(shares)


def _panels(ends: Sequence[int], label: str, measures: Mapping[str, ByLength]) -> list[Panel]:
    """Return a panel for each measure."""
    return [
        lines({name: list(zip(ends, numbers, strict=True)) for name, numbers in values.items()}, label, measure)
        for measure, values in measures.items()
    ]
