"""A Heed model written for ONNX, CTranslate2 or transformers alone, and compared before it appears."""
