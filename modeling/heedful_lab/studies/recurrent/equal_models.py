"""Recurrent models with about as many parameters as the studies' Transformer."""

from typing import Any

from heedful_lab.studies.study import description_of
from heedful_lab.studies.training import model_changes

RATE = 0.01  # better for recurrent models than the Transformer's 0.005


def recurrent_models() -> dict[str, dict[str, Any]]:
    """Return the changes for each recurrent model by name, such as "LSTM + attention"."""
    description = description_of(__file__)
    return {
        name: model_changes({**description["shared"], **options}, RATE)
        for name, options in description["models"].items()
    }
