"""What studies that compare trained models share: settings under which the small model learns to translate."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heedful.data.encoding import EncodedPairs, PairEncoder
from heedful.data.sources import read_pairs
from heedful.studies.study import Lab
from heedful.studies.training import Training, study_recipe
from heedful.training.loop.validation import validation_loss
from heedful.training.processes.devices import make_accelerator

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from heedful.data.tokenization import TokenizerPair

# With these the small model is past the point where it finds out which source word a target word belongs to.
LEARNING = {
    "data.test": {"test": "builtin:test:500"},
    "tokenizer.vocab_size": 2000,
    "model.options.dropout": 0.0,
    "optimization.learning_rate": 0.005,
    "optimization.warmup_updates": 100,
    "optimization.max_updates": 500,
}
TEST_PAIRS = "builtin:test:500"
TOKEN_BUDGET = 4096  # of one batch in measurements; it does not change them


def train_with_seeds(lab: Lab, name: str, changes: dict[str, Any], count: int) -> list[Training]:
    """Train the same model from several seeds, the study's first, so that differences can be told from chance."""
    return [
        replace(lab, seed=seed).train(name if count == 1 else f"{name}, seed {seed}", changes)
        for seed in range(lab.seed, lab.seed + count)
    ]


def mean(values: list[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def spread(values: list[float]) -> float:
    """Return the difference between the largest and the smallest."""
    return max(values) - min(values)


def held_out_pairs() -> list[dict[str, str]]:
    """Return the test pairs as `source` and `target` texts."""
    return list(read_pairs(TEST_PAIRS, "ko", "en", split="test"))


def encoded(pairs: list[dict[str, str]], tokenizers: "TokenizerPair") -> EncodedPairs:
    """Return pairs as token ids, all of them."""
    return EncodedPairs(PairEncoder(tokenizers).rows(pairs))


def loss_per_token(model: "PreTrainedModel", rows: EncodedPairs) -> float:
    """Return the negative log-likelihood in nats per target token, </s> included, without label smoothing."""
    return validation_loss(
        model, rows, TOKEN_BUDGET, model.config.pad_token_id, make_accelerator(study_recipe({}).optimization)
    )
