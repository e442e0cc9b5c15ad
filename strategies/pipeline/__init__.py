"""The pipeline engine: plain PyTorch, no Lightning import."""
