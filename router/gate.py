"""Who may come in: asked of every request before anything of it is read, scored or forwarded.

Model     liveness paths are open to all; else, once there are client keys, one of them is needed, in `Authorization:
          Bearer` or in `x-api-key` as Anthropic's API has it. A request that has been through this very router is
          refused, whatever its key: a replica URL leads back here
Valid     one pass over a request's fields; a few microseconds
Source    RFC 9110 sections 7.6.3 (Via) and 11.6.1 (WWW-Authenticate), RFC 5842 section 7.2 (508)
"""

from __future__ import annotations

import secrets

from router.actions import Refuse
from router.http.head import RequestHead
from router.keys import ClientKeys, SecretKey, bearer
from router.routes import Route

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})  # probes of platforms carry no keys
CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key", b"cookie"})  # of a client, not for a replica

_NO_KEY = Refuse(401, "AuthenticationError", "An API key is needed: Authorization: Bearer KEY.")
_WRONG_KEY = Refuse(401, "AuthenticationError", "This API key is not known here.")
_NO_ADMIN_KEY = Refuse(401, "AuthenticationError", "This changes replicas, so it needs the admin key.")
_LOOP = Refuse(508, "LoopDetected", "This request came back to the router that sent it: a replica's URL points here.")


class Gate:
    """keys : of clients; None: everybody may come in. Exchange it when the file has changed.
    admin : key for what changes replicas; None: nobody may
    """

    def __init__(self, *, keys: ClientKeys | None = None, admin: SecretKey | None = None) -> None:
        self.keys = keys
        self._admin = admin
        self._mark = b"tfirst-" + secrets.token_hex(8).encode()  # of this process: another router is no loop
        self.via = b"1.1 " + self._mark

    def admit(self, head: RequestHead) -> Refuse | None:
        """Why a request may not come in; None when it may, and then its head says whose key it carried."""
        keys = self.keys
        given = anthropic = None
        for lower, _, value in head.headers:
            if lower == b"authorization":
                given = value
            elif lower == b"x-api-key":
                anthropic = value
            elif lower == b"via" and self._mark in value:
                return _LOOP
        if keys is None or (head.route is Route.ANSWERED and head.path in OPEN_PATHS):
            return None
        key = bearer(given) or (anthropic or b"").strip()
        if not key:
            return _NO_KEY
        head.client = keys.name_of(key) or ""
        if head.client or (self._admin is not None and self._admin.matches(key)):
            return None
        return _WRONG_KEY

    def admin(self, head: RequestHead) -> Refuse | None:
        """Why a request may not change replicas; None when it may. Without an admin key there is no such path."""
        if self._admin is None:
            return Refuse(404, "NotFoundError", f"{head.path} is not served on the traffic port.")
        return None if self._admin.matches(bearer(head.get(b"authorization"))) else _NO_ADMIN_KEY
