"""The traffic port: every byte between clients and replicas, and no rule. Start at `server.py`."""
