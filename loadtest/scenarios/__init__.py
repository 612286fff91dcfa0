"""Scenarios for Locust, one file each, and what they share. They know URLs only."""
