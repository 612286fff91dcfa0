"""Parts of `loadtest/bench_proxy.py`: a stub engine, a load generator, and the proxies that are compared."""
