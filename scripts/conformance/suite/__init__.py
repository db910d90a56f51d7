"""Becomes `tests/__init__.py`: every process that imports one of the tests makes the models known first."""

from tests.models import adapters  # noqa: F401
