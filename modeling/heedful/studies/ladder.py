"""The ladder: what each invention gave, on the same pairs, with the same tokenizer and the same number of updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heedful.studies.figures import bar_chart
from heedful.studies.study import Figure, Lab, Outcome, Study, Table

CHANGES = {
    "data.train": "train.jsonl.gz",
    "data.validation": "validation.jsonl.gz",
    "data.test": {"test_2016_flickr": "test_2016_flickr.jsonl.gz"},
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


@dataclass(frozen=True)
class Rung:
    """One model of the ladder.

    Attributes:
        name: What the report calls it.
        options: Its config.
        rate: Peak learning rate.
        published: BLEU of its counterpart in the pytorch-seq2seq notebooks, on the same test set; 0 for none.
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
    Rung(
        "bi-GRU + additive",
        {
            **RECURRENT,
            "cell": "gru",
            "bidirectional": True,
            "attention": "additive",
            "input_feeding": True,
            "bridge": "linear",
            "reverse_source": False,
        },
        28.3,
    ),
    Rung(
        "Transformer",
        {
            "d_model": 256,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 512,
            "decoder_ffn_dim": 512,
            "dropout": 0.2,
        },
        36.5,
    ),
)


def run(lab: Lab) -> Outcome:
    """Train a model of each kind and score it on the test set."""
    rows, values = [], {}
    for rung in RUNGS:
        is_recurrent = "model_type" in rung.options
        changes = {
            "model.options": dict(rung.options),
            "model.attn_implementation": None if is_recurrent else "eager",
            "optimization.learning_rate": rung.rate,
        }
        training = lab.train(rung.name, changes)
        (scores,) = (scores for name, scores in training.metrics.items() if name != "validation")
        loss = training.metrics["validation"]["loss"]
        published = f"{rung.published:.1f}" if rung.published else "none"
        rows.append((rung.name, training.parameters, loss, scores["bleu"], scores["chrf"], published))
        values[rung.name.split()[0].replace("-", "_")] = scores["bleu"]
    ahead = [row[0] for row, rung in zip(rows, RUNGS, strict=True) if rung.published and row[3] > rung.published]
    compared = [rung.name for rung in RUNGS if rung.published]
    findings = [
        "BLEU on the test set: RNN {RNN:.1f}, LSTM {LSTM:.1f}, GRU {GRU:.1f}, bidirectional GRU with additive "
        "attention {bi_GRU:.1f}, Transformer {Transformer:.1f}.",
        "{ahead} of {compared} models score above their published counterparts.",
    ]
    columns = ("model", "parameters", "validation loss", "BLEU", "chrF", "published BLEU")
    formats = {"parameters": ",", "validation loss": ".3f", "BLEU": ".2f", "chrF": ".2f"}
    figure = bar_chart({row[0]: row[3] for row in rows}, "BLEU, test_2016_flickr")
    return Outcome(
        [Table("ladder", "Multi30k, German to English, beam 5", columns, rows, formats)],
        [Figure("bleu", "BLEU on the 1,000 sentences of test_2016_flickr, beam 5, case kept, 13a.", figure)],
        {**values, "ahead": len(ahead), "compared": len(compared)},
        findings,
    )


STUDY = Study("ladder", "What did gates, attention and the Transformer each give?", run, CHANGES, data="folder")
