"""Rules that look at how much each replica has to do, and not at what it holds."""
