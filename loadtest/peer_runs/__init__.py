"""Parts of `loadtest/peers.py`: who is compared, the seeded load, and the table."""
