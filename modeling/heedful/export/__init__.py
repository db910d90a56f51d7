"""A saved model in other forms, each compared with it first: transformers' own class, ONNX, CTranslate2, one page."""
