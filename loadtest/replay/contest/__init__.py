"""All rules against each other on stated fleets, traces and loads: what `docs/results.md` is made of."""
