"""Who sends an HTTP request: the clients among which the pipeline shares its places."""

from contextvars import ContextVar
from ipaddress import ip_address, ip_network

from starlette.requests import Request

IPV6_PREFIX = 64
"""bits of an address that one customer of a provider can't choose"""
caller: ContextVar[str | None] = ContextVar("caller", default=None)
"""name of the client whose request is handled"""


def name_of(request: Request) -> str | None:
    """Return the remote address, of IPv6 its network; None where there is none.

    Behind a proxy on this machine it is the address in `X-Forwarded-For`: uvicorn puts it there.
    """
    host = request.client.host if request.client else ""
    try:
        address = ip_address(host)
    except ValueError:
        return host or None
    if address.version == 6 and not address.ipv4_mapped:
        return str(ip_network((address, IPV6_PREFIX), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)
