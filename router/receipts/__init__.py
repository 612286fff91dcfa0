"""Receipts: everything that went into one decision, and later what really happened.

Read first `schema.py` (what a line says), then `writer.py` (from the loop to the file) and `reading.py` (back).
"""

from router.receipts.schema import SCHEMA, Candidate, Receipt, Resume, Shadow
from router.receipts.writer import ReceiptWriter

__all__ = ["SCHEMA", "Candidate", "Receipt", "ReceiptWriter", "Resume", "Shadow"]
