"""ONNX: the graphs of a model, and a model of transformers that runs them."""
