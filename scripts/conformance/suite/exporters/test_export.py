"""Stands in for a file that transformers' source distribution leaves out: no export tests."""


class ExportTesterMixin:
    """Has no tests; tests/test_modeling_common.py inherits from it."""
