"""Stands in for a file that transformers' source distribution leaves out: no generation tests."""


class GenerationTesterMixin:
    """Has no tests; tests/test_modeling_common.py demands that the tests of a model that generates inherit from it."""
