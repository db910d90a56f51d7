"""Substitutes for transformers' tests of its exporters, which its source distribution lacks.

If the originals are available, `run.py` uses those.
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
    """Return the outputs of a model or exported model, by name."""
    torch.manual_seed(0)
    with torch.no_grad():
        return get_leaf_tensors(model(**copy.deepcopy(inputs)))


class ExportTesterMixin:
    """Exporters on one pass of each class in `all_model_classes`."""

    # False for recurrent models: their loop is unrolled at one length.
    exports_any_length = True

    def _check_export(self, exporter, is_dynamic, model, inputs, others=()):
        """Export a model with some inputs, and compare it on these and others."""
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
        """The bare model without masks, the model with a head with masks; also other shapes if these may change."""
        for model_class, has_masks in zip(self.all_model_classes, (False, True), strict=True):
            config, batch = self.model_tester.prepare_config_and_inputs_for_common()
            inputs = {name: values for name, values in batch.items() if has_masks or "mask" not in name}
            length = 5 if self.exports_any_length else None
            others = [{name: values[1:4, :length].contiguous() for name, values in inputs.items()}]
            with self.subTest(model_class.__name__):
                model = model_class(config).eval()
                self._check_export(exporter, is_dynamic, model, inputs, others if is_dynamic else [])


class ExportGenerateTesterMixin:
    """Exporters on the parts that `generate()` runs."""

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
