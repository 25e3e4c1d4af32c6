"""edgekv: language models that decode inside a fixed key/value byte budget."""

__version__ = "0.1.0"
