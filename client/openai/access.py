"""ASGI middleware: every request needs an API key, once there are any."""

import contextlib
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.client.errors import ShoalError
from shoal.client.openai.answers import error_response
from shoal.client.openai.api_keys import MAX_KEY_LENGTH, KeyRing
from shoal.client.openai.key_limits import KeyAccount

# All else is closed. Compared with the path that is routed by, never with a rebuilt URL.
PUBLIC_PATHS = frozenset({"/health/live", "/health/ready"})
SCHEME = "bearer"
TENANT_HEADER, TIER_HEADER = "x-shoal-tenant", "x-shoal-slo-class"
# A gateway says by these whose a request is and how urgent; the backend knows what they mean.
FORWARDED_HEADERS = (TENANT_HEADER, TIER_HEADER, "x-shoal-timeout", "x-shoal-cache-salt")
HOW_TO = (
    "Send the header 'Authorization: Bearer KEY'; "
    "who runs this server makes keys with `shoal keys add`."
)


class Access:
    """Which keys are valid, and what each has used."""

    def __init__(self, share: float = 1.0) -> None:
        """``share``: how much of each key's limits this process may give out."""
        self._share = share
        self._ring: KeyRing | None = None  # None: nobody needs a key
        self._accounts: dict[str, KeyAccount] = {}  # by the key's hash

    @property
    def needs_key(self) -> bool:
        return self._ring is not None

    def replace(self, ring: KeyRing) -> None:
        """From now on these keys are valid. Running requests go on."""
        accounts = {}
        for key in ring.keys:
            account = self._accounts.get(key.sha256) or KeyAccount(key, self._share)
            account.configure(key)
            accounts[key.sha256] = account
        self._ring, self._accounts = ring, accounts

    def account_of(self, headers: Headers) -> KeyAccount | None:
        """Whose request this is; None where nobody needs a key. Raises ShoalError (401)."""
        if self._ring is None:
            return None
        given = headers.getlist("authorization")
        if not given:
            raise _refusal(f"An API key is needed. {HOW_TO}")
        scheme, _, presented = given[0].partition(" ")
        presented = presented.strip()
        well_formed = len(given) == 1 and scheme.lower() == SCHEME and presented
        if not well_formed or len(presented) > MAX_KEY_LENGTH:
            raise _refusal(f"The Authorization header holds no API key. {HOW_TO}")
        key = self._ring.find(presented)
        if key is None:
            raise _refusal(f"The API key is not valid, or was revoked. {HOW_TO}")
        return self._accounts[key.sha256]


class AccessMiddleware:
    """Refuses requests without a valid key; leaves the key's account in the request's state."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        with contextlib.ExitStack() as stack:
            try:
                account = self._access.account_of(Headers(scope=scope))
                scope.setdefault("state", {})["account"] = account
                if account is not None and scope["method"] == "POST":
                    stack.callback(account.leave, account.enter())
            except ShoalError as error:
                response = error_response(error)
                if error.status == 401:
                    response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            await self._app(scope, receive, send)


def owned_by(account: KeyAccount | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Request parameters as the key has them: its tenant and tier, whatever the client says.

    The backend derives the salt of the prefix cache from the tenant, so that tenants share no
    cached prefix; a client's own salt only divides its tenant's further.
    """
    if account is None:
        return dict(parameters)
    owned = {name: value for name, value in parameters.items() if name != TIER_HEADER}
    owned[TENANT_HEADER] = account.key.owner
    if account.key.slo_class is not None:
        owned[TIER_HEADER] = account.key.slo_class
    return owned


def request_parameters(request: Request) -> dict[str, Any]:
    """What goes to the backend beside the body: whose the request is, and how urgent."""
    given = {name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers}
    return owned_by(request.state.account, given)


def _refusal(message: str) -> ShoalError:
    return ShoalError(message, 401, "invalid_api_key")
