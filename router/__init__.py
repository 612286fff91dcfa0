"""The router: bytes in, a decision, bytes out."""

__version__ = "0.1.0"
