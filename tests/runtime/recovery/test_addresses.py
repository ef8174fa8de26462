"""Hosts that find their own names at the loopback, as Debian's, are reached by others."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from msc.runtime.recovery.addresses import (
    gloo_interface,
    gloo_reaches_others,
    is_loopback,
    listening_host,
)

NAMES = {"here": "127.0.1.1", "there": "10.7.0.1", "unbound": "192.0.2.1"}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(host: str, port: int | None, *_: Any, **__: Any) -> list[Any]:
        if host not in NAMES:
            raise socket.gaierror(f"nobody knows {host}")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (NAMES[host], port or 0))]

    monkeypatch.setattr(socket, "getaddrinfo", find)


def test_what_only_this_host_reaches() -> None:
    assert is_loopback("127.0.1.1")
    assert is_loopback("::1")
    assert not is_loopback("fe80::1%eth0")
    assert not is_loopback("10.0.0.7")


def test_a_name_that_means_the_loopback_only_here_is_listened_for_everywhere() -> None:
    assert listening_host("here") == ""
    assert listening_host("there") == "there"
    for given in ("localhost", "127.0.0.1", "10.7.0.1"):
        assert listening_host(given) == given


@pytest.mark.parametrize("name", ["here", "unbound", "unknown"])
def test_gloo_is_alone_at_what_the_name_says(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert not gloo_reaches_others()


def test_gloo_is_reached_where_it_can_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        address = probe.getsockname()[0]
    monkeypatch.setitem(NAMES, "mine", address)
    monkeypatch.setattr(socket, "gethostname", lambda: "mine")
    assert gloo_reaches_others()
    found = gloo_interface(address)
    assert found is not None
    assert found["GLOO_SOCKET_IFNAME"] != "lo"


def test_an_interface_is_found_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert gloo_interface("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert gloo_interface("192.0.2.1") is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert gloo_interface("192.0.2.1") == {}
