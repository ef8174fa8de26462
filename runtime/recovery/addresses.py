"""By which address other hosts reach this one, where its own name does not say so.

Debian's installer writes the name of a machine into /etc/hosts beside 127.0.1.1. Who listens there,
or tells others that address, is alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def is_loopback(address: str) -> bool:
    """Whether only this host reaches an address, "10.0.0.7"."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listening_host(host: str) -> str:
    """Where to listen that other hosts find by the name, or at the address, `host`.

    That is the host itself, but all interfaces ("") if it is a name that only here means this host.
    """
    if host == "localhost":
        return host
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return host
    found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    return "" if is_loopback(str(found[0][4][0])) else host


def gloo_reaches_others() -> bool:
    """Whether gloo, which binds to the first address of this host's name, binds to one of use."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # it takes the loopback
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
            return not is_loopback(str(address[0]))
    return False


def gloo_interface(address: str) -> dict[str, str] | None:
    """The variable that lets gloo bind to the interface with this address, of this host.

    {} if the user has set it; None if no interface has that address.
    """
    if os.environ.get(_GLOO_INTERFACE):
        return {}
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(any_socket, _GET_ADDRESS, request)
            if socket.inet_ntoa(answer[20:24]) == address:
                return {_GLOO_INTERFACE: name}
    return None
