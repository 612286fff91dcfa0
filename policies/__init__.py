"""Routing rules: numbers in, one choice out."""
