"""Becomes `tests/__init__.py`: importing any test registers the models first."""

from tests.models import adapters  # noqa: F401
