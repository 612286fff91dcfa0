"""A broken stream goes on elsewhere: what was sent, whether and how it can go on, and how two answers become one.

Plain code; `docs/resume.md` says what a client sees.
"""
