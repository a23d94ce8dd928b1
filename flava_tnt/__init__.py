"""flava_tnt pretrains FLAVA-like multimodal models with PyTorch, from a laptop to many nodes."""

__version__ = "0.1.0"
