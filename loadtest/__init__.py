"""Load from outside: scenarios and benchmarks know URLs, not modules. Only `replay/` joins everything."""
