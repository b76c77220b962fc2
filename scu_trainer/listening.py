"""Open a port for our servers, and decide which requests they accept.

Other programs can reach a port on loopback, and so can every web site that is open in a browser on this machine. The
Host header has the name that a request was sent to: if that is not ours, a site has pointed its own name at this
machine (DNS rebinding). The Origin header has the page that sent the request: browsers add it to requests from other
sites.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import socket
from collections.abc import Collection
from typing import TYPE_CHECKING, Optional

from scu_trainer.errors import SettingsError

if TYPE_CHECKING:
    from starlette.datastructures import Headers

HOST = "127.0.0.1"
MOST_PORT, PORT_OF_HTTP = 65535, 80
FOREIGN_HOST, FOREIGN_ORIGIN = 421, 403
"""HTTP status codes: Misdirected Request, Forbidden."""


def check_address(host: str, port: int) -> None:
    """Raise SettingsError if ``host`` is not an IP address, or ``port`` is out of range."""
    if not 0 <= port <= MOST_PORT:
        raise SettingsError(f"--port is {port}; give 1 to {MOST_PORT}, or 0 for a free one")
    try:
        _parse_address(host)
    except ValueError as error:
        raise SettingsError(f"--host is {host!r}; give an address of this machine, such as {HOST}") from error


def is_loopback(host: str) -> bool:
    return _parse_address(host).is_loopback


def is_every_address(host: str) -> bool:
    return _parse_address(host).is_unspecified


def _parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(HOST if host == "localhost" else host)


def url_host(host: str) -> str:
    """Return ``host`` as it is written in a URL."""
    return f"[{host}]" if ":" in host else host


def allowed_hosts(host: str, port: int) -> set[str]:
    """Return the accepted values of the Host header, such as "127.0.0.1:7860". Clients leave out the port of HTTP."""
    names = {url_host(name) for name in ({host, HOST, "localhost"} if is_loopback(host) else {host})}
    return {f"{name}:{port}" for name in names} | (names if port == PORT_OF_HTTP else set())


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises SettingsError if the port is in use or cannot be opened."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
        opened.listen(128)
    except OSError as error:
        opened.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        raise SettingsError(f"port {port} of {host} {why}; give another --port, or 0 for a free one") from error
    return opened


def refusal_status(hosts: Collection[str], headers: Headers) -> Optional[int]:
    """Return the status code that refuses a request which was sent to another name than ours, or came from a foreign
    page; None if the request is accepted."""
    if headers.get("host", "").lower() not in hosts or len(headers.getlist("host")) != 1:
        return FOREIGN_HOST
    origin = headers.get("origin")
    is_foreign = origin is not None and origin.lower().removeprefix("http://") not in hosts
    return FOREIGN_ORIGIN if is_foreign else None


def is_same_secret(given: str, secret: bytes) -> bool:
    """Compare in constant time, so that the time does not reveal where the secrets differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret)
