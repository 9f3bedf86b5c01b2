"""A cluster-wide KV cache for LLM inference on Ray."""

__version__ = "0.1.0"
