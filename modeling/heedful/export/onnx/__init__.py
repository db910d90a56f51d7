"""ONNX: a model's graphs, and a transformers model that runs them."""
