"""Rules that follow the prompt's beginning: to where its state is, or to where its hash says."""
