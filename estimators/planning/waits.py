"""How long requests wait for one of several servers, and how many wait too long.

Model     M/G/c: Erlang's wait of M/M/c times (1 + cv2) / 2; some request waits with Erlang's probability C, and then
          exponentially long
Valid     steady state, Poisson arrivals; exact for one server and for exponential service, within some per cent for
          several servers whose service varies less
Blind to  bursts longer than Poisson's, servers of different speed, order of service
Source    Erlang 1917; Pollaczek 1930 for one server; Lee and Longton 1959 for the factor; Harchol-Balter 2013, ch. 14
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf

from estimators.ranges import require


@dataclass(frozen=True, slots=True)
class Wait:
    """mean_s : over all requests, inf where there is no steady state; probability : that one waits at all, 0..1"""

    mean_s: float
    probability: float

    def longer_than(self, limit_s: float) -> float:
        """Share of requests that wait longer than `limit_s`, 0..1; all do where it is negative."""
        if limit_s < 0 or self.mean_s == inf:
            return 1.0
        if self.mean_s == 0.0:
            return 0.0
        return self.probability * exp(-limit_s * self.probability / self.mean_s)


NONE = Wait(0.0, 0.0)
MOST_SERVERS = 2000  # more are taken as so many: the wait is then an upper bound, and next to nothing


def wait(*, servers: int, utilisation: float, service_s: float, cv2: float = 0.0) -> Wait:
    """Wait for one of `servers` (>= 1) that are busy `utilisation` (>= 0) of the time; at 1 and above it never ends.

    service_s >= 0; cv2 : variance of service times over their squared mean, >= 0
    """
    require(servers >= 1, "servers", servers)
    require(0 <= utilisation < inf, "utilisation", utilisation)
    require(0 <= service_s < inf, "service_s", service_s)
    require(0 <= cv2 < inf, "cv2", cv2)
    if service_s == 0 or utilisation == 0:
        return NONE
    if utilisation >= 1:
        return Wait(inf, 1.0)
    servers = min(servers, MOST_SERVERS)
    probability = _waits(servers, utilisation)
    mean_s = (1.0 + cv2) / 2.0 * probability / (servers * (1.0 - utilisation)) * service_s
    return Wait(mean_s, probability)


def _waits(servers: int, utilisation: float) -> float:
    """Erlang's C from his B, which grows by one server at a time without large numbers."""
    blocked = 1.0
    offered = servers * utilisation
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1.0 - utilisation * (1.0 - blocked))


def one_after_another(first: Wait, second: Wait) -> Wait:
    """Two queues in a row, as if independent: the means add up, and one of them is waited for or the other."""
    free = (1.0 - first.probability) * (1.0 - second.probability)
    return Wait(first.mean_s + second.mean_s, 1.0 - free)
