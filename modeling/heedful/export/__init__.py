"""Write a saved model for transformers, ONNX, CTranslate2 or a web page, after a comparison of outputs."""
