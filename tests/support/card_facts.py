"""Facts about an invented run, for tests of cards."""

from typing import Any

from heedful.cards.model_card import CardFacts
from heedful.evaluation.metrics import score_translations

PREDICTIONS = ["The cat sat on the mat.", "A dog runs in the park.", "It rains."] * 4
REFERENCES = ["The cat sat on the mat.", "The dog runs through the park.", "It rains."] * 4
SCORES = {
    "built-in test": score_translations(PREDICTIONS, REFERENCES, bootstrap=40)
    | {"faults": {"lost_number": [1234, 5], "repeated": [2, 0]}},
    "news": score_translations(PREDICTIONS[:5], REFERENCES[:5], metrics=("chrf",)),
}
FACTS: dict[str, Any] = {
    "name": "heed-tiny-ko-en",
    "source_language": "ko",
    "target_language": "en",
    "license": "Apache-2.0",
    "datasets": ["builtin:train:1000", "someone/pairs:news:train", "/home/me/secret/more.jsonl", "local.tsv"],
    "parameters": 1234567,
    "architecture": "An encoder-decoder of 2+2 pre-norm layers, d_model 48.",
    "vocabulary": "290 byte-level BPE pieces for both languages",
    "scores": SCORES,
    "versions": {"heedful": "0.1.0", "transformers": "5.23.0", "torch": "2.13.0"},
}
RUN: dict[str, Any] = {
    "recipe": {"learning_rate": 0.0007, "schedule": {"name": "inverse_sqrt", "warmup": 400}, "note": "a|b\nc"},
    "card": {"intended_use": None, "limits": None},
    "sides": ["source", "target"],
    "pairs": {"train": 98765, "validation": 432},
    "cleaning": {"kept": 98765, "dropped": {"empty": 31, "overlap": 7}, "examples": {"empty": [["", "x"]]}},
    "joint_vocabulary": True,
    "updates": 20000,
    "target_tokens": 3456789,
    "seconds": 7384.2,
    "hardware": "2 CPU cores",
    "validation_loss": 1.2345,
    "example": {"source": '그는 "네"라고 한다.', "translation": 'He says "yes".', "language": None},
    "learning_curve": "",
}


def card_facts(**changes: Any) -> CardFacts:
    """Return the facts with changes of fields, or of what the run says; an `example` is changed in part."""
    if "example" in changes:
        changes["example"] = RUN["example"] | changes["example"]
    run = RUN | {name: value for name, value in changes.items() if name in RUN}
    return CardFacts(**FACTS | {"run": run} | {name: value for name, value in changes.items() if name not in RUN})
