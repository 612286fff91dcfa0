"""The best of all (replica, path) by one stated measure; `docs/objectives.md` says when to use which."""

from policies.objectives.cost import Cost
from policies.objectives.end_to_end import EndToEnd
from policies.objectives.first_token import FirstToken
from policies.objectives.makespan import Makespan
from policies.objectives.quantile import Quantile

__all__ = ["Cost", "EndToEnd", "FirstToken", "Makespan", "Quantile"]
