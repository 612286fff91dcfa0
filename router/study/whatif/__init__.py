"""What another rule would have done with the requests of some receipts.

Read first `answer.py` (the estimate and how sure it is), then `played.py` (queues simulated anew), `service.py` (how
long replicas take, as the receipts have it) and `prompts.py` (which prompts share what).
"""
