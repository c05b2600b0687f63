"""Tests of the limits on open connections: in total, of one address, and which connections are
closed for new ones.
"""

import contextlib
import json
import re
import resource
import socket
import time

import pytest

from dantinox.serve import server
from dantinox.serve.app import make_app
from dantinox.serve.operations import connection
from dantinox.serve.server import allow_open_files

from .fakes import FakeEngine
from .sockets import serving

ASK = json.dumps({"prompt": "a", "max_tokens": 3})
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEADERS = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(ASK)}"
REQUEST = f"POST /v1/completions HTTP/1.1\r\n{HEADERS}\r\n\r\n{ASK}".encode()


@pytest.fixture
def limited(monkeypatch):
    """Sets the limits: in total, of one address, of refused connections, and the seconds after
    which one counts as idle.
    """

    def limit(total, of_address=100, refused=100, idle_seconds=0.0):
        monkeypatch.setattr(connection, "MAX_CONNECTIONS", total)
        monkeypatch.setattr(connection, "MAX_CONNECTIONS_OF_ADDRESS", of_address)
        monkeypatch.setattr(connection, "MAX_REFUSED", refused)
        monkeypatch.setattr(connection, "IDLE_SECONDS", idle_seconds)

    return limit


@pytest.fixture
def connect():
    with serving(make_app(FakeEngine(pause=0.02))) as port, contextlib.ExitStack() as stack:

        def connect(address="127.0.0.1"):
            return stack.enter_context(
                socket.create_connection(("127.0.0.1", port), 5, source_address=(address, 0))
            )

        yield connect


def status(client, data=HEALTH):
    """Returns the status of the response to a request, or 0 if the server closes the connection."""
    with contextlib.suppress(ConnectionError):
        if data:
            client.sendall(data)
        found = b""
        while b"\r\n\r\n" not in found and (part := client.recv(65536)):
            found += part
        head, _, body = found.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        while length and len(body) < int(length[1]) and (part := client.recv(65536)):
            body += part
        return int(head[9:12] or 0)
    return 0


def is_closed(client):
    client.settimeout(0.5)
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_connections_beyond_the_limit_are_refused_and_the_others_go_on(connect, limited):
    limited(3, idle_seconds=60)
    admitted = [connect() for _ in range(3)]
    assert [status(client) for client in admitted] == [200] * 3
    further = [connect() for _ in range(3)]
    assert [status(client) for client in further] == [503] * 3
    assert all(map(is_closed, further))
    assert [status(client) for client in admitted] == [200] * 3
    admitted.pop().close()
    time.sleep(0.1)
    assert status(connect()) == 200


def test_requests_at_work_go_on_while_others_are_refused(connect, limited):
    limited(2)
    working = [connect() for _ in range(2)]
    for client in working:
        client.sendall(REQUEST)
    time.sleep(0.02)
    assert status(connect()) == 503  # a connection with a request is not idle
    assert [status(client, b"") for client in working] == [200] * 2


def test_the_connection_that_is_idle_for_longest_is_closed(connect, limited):
    limited(3)
    first, second, third = (connect() for _ in range(3))
    for client in (first, second, third, first):
        assert status(client) == 200
    second.sendall(b"GET /health HTTP/1.1\r\n")  # an incomplete head does not count as a request
    assert status(connect()) == 200
    assert is_closed(second) and not is_closed(third) and status(first) == 200


def test_a_connection_with_an_incomplete_body_is_closed_for_a_new_one(connect, limited):
    limited(2)
    idle, slow = connect(), connect()
    assert (
        status(slow, REQUEST.replace(b"\r\n", b"\r\nExpect: 100-continue\r\n", 1)[:-5]) == 100
    )  # waits for the rest of the body
    assert status(idle) == 200
    assert status(connect()) == 200
    assert is_closed(slow) and not is_closed(idle)


def test_requests_are_read_before_their_connections_count_as_idle(limited, monkeypatch):
    """Many connections arrive while the server is busy: those with a request are answered, whatever
    their number.
    """
    limited(40)
    monkeypatch.setattr(server, "ACCEPTED_AT_ONCE", 5)

    async def app(scope, receive, send):
        if scope["path"] == "/busy":
            time.sleep(0.3)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    with serving(app) as port, contextlib.ExitStack() as stack:
        connect = lambda: stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))  # noqa: E731
        connect().sendall(b"GET /busy HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.1)
        honest = [connect() for _ in range(10)]
        for client in honest:
            client.sendall(HEALTH)
        for _ in range(120):
            connect()
        assert [status(client, b"") for client in honest] == [200] * 10


def test_one_address_leaves_connections_to_others(connect, limited):
    limited(4, of_address=2, idle_seconds=60)
    own = [connect() for _ in range(2)]
    assert [status(client) for client in own] == [200] * 2
    assert status(connect()) == 503
    assert status(connect("127.0.0.2")) == 200 and status(own[0]) == 200


def test_an_address_at_its_limit_loses_its_own_idle_connection(connect, limited):
    limited(4, of_address=2)
    other, own = connect("127.0.0.2"), [connect() for _ in range(2)]
    assert [status(client) for client in (other, *own)] == [200] * 3
    assert status(connect()) == 200
    assert is_closed(own[0]) and status(own[1]) == 200 and status(other) == 200


def test_refused_connections_are_bounded(connect, limited):
    limited(1, refused=2, idle_seconds=60)
    assert status(connect()) == 200
    waiting = [connect() for _ in range(2)]
    time.sleep(0.05)
    assert is_closed(connect())
    assert [status(client) for client in waiting] == [503] * 2


@pytest.mark.parametrize(
    ("soft", "hard", "count", "expected"),
    [
        (200, 400, 100, None),
        (200, 400, 300, (300, 400)),
        (200, 400, 1000, (400, 400)),
        (200, -1, 1000, (1000, -1)),
        (-1, -1, 9, None),
    ],
)
def test_the_limit_on_open_files_is_raised(monkeypatch, soft, hard, count, expected):
    """-1 is `resource.RLIM_INFINITY`: no limit."""
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: found.append(limits))
    allow_open_files(count)
    assert found == ([] if expected is None else [expected])
