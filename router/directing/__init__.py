"""Telling engines where a prompt's state is to come from: how, when, and what if it does no good."""
