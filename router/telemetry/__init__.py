"""Traces and logs: what one request did, for whoever follows it across services."""
