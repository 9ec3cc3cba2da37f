"""FineInfer: one engine that serves an LLM and fine-tunes LoRA adapters on the same weights."""

__version__ = "0.1.0"
__all__ = ["__version__"]
