"""The parts of the directory: which holder has which block, in dictionaries or in tables."""
