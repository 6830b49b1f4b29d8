"""spectrain: train, evaluate and export drafter heads for lossless speculative decoding."""

__version__ = "0.1.0"
