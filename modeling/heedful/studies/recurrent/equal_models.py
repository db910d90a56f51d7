"""Models of about as many parameters as the studies' Transformer, and how all of them are trained alike."""

from typing import Any

from heedful.studies.study import description_of
from heedful.studies.training import LEARNING, model_changes

RATE = 0.01  # of the recurrent models; better for these than the 0.005 that serves the Transformer
TRAINING = {**LEARNING, "optimization.max_grad_norm": 1.0, "optimization.max_updates": 1000}


def recurrent_models() -> dict[str, dict[str, Any]]:
    """Return the changes that train each recurrent model, by its name, such as "LSTM + attention"."""
    description = description_of(__file__)
    return {
        name: model_changes({**description["shared"], **options}, RATE)
        for name, options in description["models"].items()
    }
