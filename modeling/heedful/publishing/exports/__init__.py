"""A Heed model written for another engine, ONNX or CTranslate2, and compared with `generate()` before it appears."""
