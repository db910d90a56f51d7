"""transformers' own exporters take a Heed model, and what they write computes what the model does."""

import pytest
import torch

from helpers import slow_but, tiny_model

exporters = pytest.importorskip("transformers.exporters")
if not hasattr(exporters, "ExportedModel"):
    pytest.skip("before 5.24 transformers saves no exported model", allow_module_level=True)


@pytest.mark.parametrize("name", slow_but(["Dynamo"], ["Dynamo", "Onnx"]))
def test_an_exported_graph_gives_the_models_logits_after_it_was_saved(name, tmp_path):
    if name == "Onnx":
        pytest.importorskip("onnxruntime")
    model = tiny_model().eval()
    given = {
        "input_ids": torch.tensor([[5, 6, 7, 2], [8, 9, 2, 0]]),
        "decoder_input_ids": torch.tensor([[2, 9], [2, 8]]),
    }
    given["attention_mask"] = given["input_ids"].ne(0).long()
    exported = getattr(exporters, f"{name}Exporter")().export(model, given, getattr(exporters, f"{name}Config")())
    exported.save_pretrained(tmp_path)
    loaded = exporters.ExportedModel.from_pretrained(tmp_path, trust_remote_code=True)
    with torch.no_grad():
        expected = model(**given).logits
    torch.testing.assert_close(torch.as_tensor(loaded(**given)["logits"]), expected, rtol=0, atol=1e-5)
