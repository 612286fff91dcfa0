"""The page at the admin port: the fleet, live decisions and what estimates were worth, for eyes.

Read first `live.py` (what is remembered of decisions), then `shown.py` (as plain values), `server.py` (over HTTP) and
`static/` (HTML, CSS and modules of JavaScript, served as they are).
"""

from router.page.live import Live
from router.page.server import Page

__all__ = ["Live", "Page"]
