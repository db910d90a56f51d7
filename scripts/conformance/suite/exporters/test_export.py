"""Stands in for a file of transformers' repository that its source distribution leaves out: tests of its exporters.

They are Heedful's own; where the originals can be had, `run.py` takes those.
"""

import copy

import torch
from parameterized import parameterized
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
from transformers.exporters.utils import decompose_for_generation, get_leaf_tensors

EXPORTERS = {"dynamo": (DynamoExporter, DynamoConfig), "onnx": (OnnxExporter, OnnxConfig)}
SHAPES = [(f"{name}_{shapes}", name, shapes == "dynamic") for name in EXPORTERS for shapes in ("fixed", "dynamic")]


def tensors_of(model, inputs):
    """Return what a model, or an exported one, gives for inputs, each tensor under its name."""
    torch.manual_seed(0)
    with torch.no_grad():
        return get_leaf_tensors(model(**copy.deepcopy(inputs)))


class ExportTesterMixin:
    """What transformers' exporters must make of one pass; `all_model_classes` names the classes."""

    # False where a model reads token after token: such a loop is unrolled, and the length with it.
    exports_any_length = True

    def _check_export(self, exporter, is_dynamic, model, inputs, others=()):
        """Export a model with some inputs, and compare it with these and with others."""
        make, config = EXPORTERS[exporter]
        exported = make().export(model, copy.deepcopy(inputs), config(dynamic=is_dynamic))
        for given in (inputs, *others):
            expected, found = tensors_of(model, given), tensors_of(exported, given)
            assert expected
            assert set(found) == set(expected)
            for name, values in expected.items():
                torch.testing.assert_close(found[name], values, rtol=1e-4, atol=1e-4)

    @parameterized.expand(SHAPES)
    def test_an_exported_model_gives_what_the_model_gives(self, name, exporter, is_dynamic):
        """The bare model without masks, the one with a head with them; of other shapes too where these may change."""
        for model_class, has_masks in zip(self.all_model_classes, (False, True), strict=True):
            config, batch = self.model_tester.prepare_config_and_inputs_for_common()
            inputs = {name: values for name, values in batch.items() if has_masks or "mask" not in name}
            length = 5 if self.exports_any_length else None
            others = [{name: values[1:4, :length].contiguous() for name, values in inputs.items()}]
            with self.subTest(model_class.__name__):
                model = model_class(config).eval()
                self._check_export(exporter, is_dynamic, model, inputs, others if is_dynamic else [])


class ExportGenerateTesterMixin:
    """What transformers' exporters must make of the parts that `generate()` runs."""

    @parameterized.expand(SHAPES)
    def test_exported_parts_of_generation_give_what_the_parts_give(self, name, exporter, is_dynamic):
        """The encoder, and steps of the decoder with a cache."""
        for model_class in self.all_generative_model_classes:
            config, batch = self.model_tester.prepare_config_and_inputs_for_common()
            model = model_class(config).eval()
            given = {name: batch[name] for name in ("input_ids", "attention_mask")}
            for part_name, (part, inputs) in decompose_for_generation(model, given).items():
                with self.subTest(f"{model_class.__name__}/{part_name}"):
                    self._check_export(exporter, is_dynamic, part, inputs)
