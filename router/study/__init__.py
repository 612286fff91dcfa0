"""What receipts teach afterwards: why one decision, how right the estimates were, which arm is better.

Read first `explain.py` (one receipt), `calibration.py` (all of them), `ab.py` (arms of an experiment). Everything here
takes receipts and gives numbers or text; the commands in `router/cli/` read files and print.
"""
