"""Trained weights back into the ONNX file that they came from."""
