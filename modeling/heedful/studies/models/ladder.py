"""The ladder: what each invention gave, on the same pairs, with the same tokenizer and the same number of updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heedful.studies.figures import Figure, bars
from heedful.studies.report import Outcome, Table
from heedful.studies.study import Lab, Study
from heedful.studies.training import model_changes, transformer

TEST = "test_2016_flickr"
CHANGES = {
    "data.train": "train.jsonl.gz",
    "data.validation": "validation.jsonl.gz",
    "data.test": {TEST: f"{TEST}.jsonl.gz"},
    "data.source": "de",
    "data.target": "en",
    "data.max_source_tokens": 100,
    "data.max_target_tokens": 100,
    "tokenizer.vocab_size": 5000,
    "optimization.warmup_updates": 300,
    "optimization.max_updates": 1600,
    "optimization.tokens_per_update": 8192,
    "optimization.buckets_per_update": 4,
    "optimization.max_grad_norm": 1.0,
    "optimization.mixed_precision": "bf16",
    "validation.every_updates": 400,
    "validation.max_new_tokens": 80,
    "checkpoints.every_updates": 50,
    "checkpoints.keep_last": 5,
    "checkpoints.publish": "average",
    "decoding.num_beams": 5,
    "decoding.max_length": 100,
}
# The width that the published recurrent models have.
RECURRENT = {
    "model_type": "heed_rnn",
    "embedding_size": 256,
    "hidden_size": 512,
    "bidirectional": False,
    "attention": "none",
    "input_feeding": False,
    "bridge": "copy",
    "reverse_source": True,
    "dropout": 0.3,
}
ATTENDING = {
    "bidirectional": True,
    "attention": "additive",
    "input_feeding": True,
    "bridge": "linear",
    "reverse_source": False,
}


@dataclass(frozen=True)
class Rung:
    """One model of the ladder.

    Attributes:
        name: What the report calls it.
        options: Its config.
        published: BLEU of its counterpart in the pytorch-seq2seq notebooks, on the same test set; 0 for none.
        rate: Peak learning rate.
    """

    name: str
    options: Mapping[str, Any]
    published: float
    rate: float = 0.0015


RUNGS = (
    Rung("RNN", {**RECURRENT, "cell": "rnn"}, 0.0),
    Rung("LSTM", {**RECURRENT, "cell": "lstm"}, 13.8),
    # As Cho et al. (2014) have it, the decoder reads the encoder's last state beside each token.
    Rung("GRU", {**RECURRENT, "cell": "gru", "input_feeding": True, "dropout": 0.2}, 20.6, rate=0.003),
    Rung("bi-GRU + additive", {**RECURRENT, "cell": "gru", **ATTENDING}, 28.3),
    Rung("Transformer", transformer(256, layers=3, heads=8, ffn_dim=512, dropout=0.2), 36.5),
)
FINDINGS = [
    "BLEU on the test set: RNN {RNN:.1f}, LSTM {LSTM:.1f}, GRU {GRU:.1f}, bidirectional GRU with additive "
    "attention {bi_GRU:.1f}, Transformer {Transformer:.1f}.",
    "{ahead} of {compared} models score above their published counterparts.",
]


def run(lab: Lab) -> Outcome:
    """Train a model of each kind and score it on the test set."""
    trainings = [lab.train(rung.name, model_changes(rung.options, rung.rate)) for rung in RUNGS]
    scores = {rung.name: training.metrics[TEST] for rung, training in zip(RUNGS, trainings, strict=True)}
    bleu = {name: one["bleu"] for name, one in scores.items()}
    rows = []
    for rung, training in zip(RUNGS, trainings, strict=True):
        published = f"{rung.published:.1f}" if rung.published else "none"
        measured = training.loss, bleu[rung.name], scores[rung.name]["chrf"]
        rows.append((rung.name, training.parameters, *measured, published))
    compared = [rung for rung in RUNGS if rung.published]
    values: dict[str, float] = {name.split()[0].replace("-", "_"): score for name, score in bleu.items()}
    values |= {"ahead": sum(bleu[rung.name] > rung.published for rung in compared), "compared": len(compared)}
    header = "model | parameters :, | validation loss :.3f | BLEU :.2f | chrF :.2f | published BLEU"
    caption = f"BLEU on the 1,000 sentences of {TEST}, beam 5, case kept, 13a."
    return Outcome(
        [Table.of("ladder", "Multi30k, German to English, beam 5", header, rows)],
        [Figure("bleu", caption, [bars(bleu, f"BLEU, {TEST}")])],
        values,
        FINDINGS,
    )


STUDY = Study("ladder", "What did gates, attention and the Transformer each give?", run, CHANGES, data="folder")
