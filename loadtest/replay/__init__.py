"""Traces and what is made of them; the one place in this package that may import all the others."""
