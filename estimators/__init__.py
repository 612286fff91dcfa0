"""Facts in, numbers out: when a request would see its first token, and what that costs others."""
