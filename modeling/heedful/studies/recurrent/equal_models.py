"""Models of about as many parameters as the studies' Transformer, and how all of them are trained alike."""

from typing import Any

from heedful.studies.training import LEARNING, model_changes

# One layer that reads forwards alone, so that what its gates do can be read from left to right.
SHARED = {
    "model_type": "heed_rnn",
    "embedding_size": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "bidirectional": False,
    "input_feeding": False,
    "bridge": "copy",
    "dropout": 0.0,
}
# By cell and attention, the `hidden_size` that makes about 360,000 parameters with 2,000 tokens.
HIDDEN_SIZES = {
    ("rnn", "none"): 296,
    ("lstm", "none"): 137,
    ("gru", "none"): 162,
    ("rnn", "additive"): 210,
    ("lstm", "additive"): 123,
    ("gru", "additive"): 141,
}
RATE = 0.01  # of the recurrent models; better for these than the 0.005 that serves the Transformer
TRAINING = {**LEARNING, "optimization.max_grad_norm": 1.0, "optimization.max_updates": 1000}


def recurrent_models() -> dict[str, dict[str, Any]]:
    """Return the changes that train each recurrent model, by its name, such as "LSTM + attention"."""
    return {
        cell.upper() + (" + attention" if attention != "none" else ""): model_changes(
            {**SHARED, "cell": cell, "attention": attention, "hidden_size": size}, RATE
        )
        for (cell, attention), size in HIDDEN_SIZES.items()
    }
