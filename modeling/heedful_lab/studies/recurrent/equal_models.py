"""Models of about as many parameters as the studies' Transformer."""

from typing import Any

from heedful_lab.studies.study import description_of
from heedful_lab.studies.training import model_changes

RATE = 0.01  # of the recurrent models; better for these than the 0.005 that serves the Transformer


def recurrent_models() -> dict[str, dict[str, Any]]:
    """Return the changes that train each recurrent model, by its name, such as "LSTM + attention"."""
    description = description_of(__file__)
    return {
        name: model_changes({**description["shared"], **options}, RATE)
        for name, options in description["models"].items()
    }
