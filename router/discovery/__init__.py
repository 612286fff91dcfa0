"""Which replicas there are: sources that list them, one rule that compares lists with rows, and what carries it out.

Read `kept.py` and `reconcile.py` first: they hold the rules. `sources.py` is the interface of a source; to add one,
write `read`, which gives its whole list or raises, and the rest follows. `following.py` is the loop over all of them.
"""
