"""Tests the server process: loading, serving, draining, aborting and failing, and invalid flags of
`dantinox serve`.
"""

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from dantinox import cli
from dantinox.config.engine_options import EngineOptions
from dantinox.serve.app import make_app
from dantinox.serve.operations.api_keys import ApiKeys, read_keys
from dantinox.serve.operations.limits import Limits
from dantinox.serve.operations.reload import Reloader
from dantinox.serve.options import Options
from dantinox.serve.server import listen, serve

from .fakes import SAYS
from .process import FakeRunning

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def process(pause=0.0, *more):
    command = [sys.executable, "-m", "tests.serve.process", str(pause), *more]
    made = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        word, port = made.stdout.readline().split()
        assert word == "listening"
        made.url = f"http://127.0.0.1:{port}"
        yield made
    finally:
        made.kill()
        made.communicate()


def stream(url, tokens, found):
    """Reads a stream into `found`, in a thread."""

    def read():
        body = {"prompt": "a", "max_tokens": tokens, "stream": True}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
                found.extend(answer.iter_lines())
        except httpx.HTTPError as error:
            found.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def wait_for(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the condition does not become true"
        time.sleep(0.01)


class Here:
    """A server in this process, with an engine without a model, while `talk(server)` runs in a
    thread.

    Attributes:
      code: the exit code.
      exits: the exit codes of forced exits, which here end only the engine.
    """

    def __init__(self, monkeypatch, talk, pause=0.0, stuck=False, keys=None, may_load=None):
        self.engine, self.ready, self.exits, self.errors = (
            FakeRunning(pause=pause),
            threading.Event(),
            [],
            [],
        )
        self.engine.stuck, self.engine.may_load = stuck, may_load
        monkeypatch.setattr("dantinox.serve.server.exit_now", self._exit)
        options, reloader = None, None
        if keys is not None:
            known = ApiKeys(read_keys(keys), keys)
            reloader = Reloader(known)
            options = Options(keys=known, reloader=reloader)
        with listen("127.0.0.1", 0) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            thread = threading.Thread(target=self._talk, args=(talk,))
            thread.start()
            self.code = serve(
                make_app(self.engine, options),
                self.engine,
                listener,
                Limits(),
                self.ready.set,
                reloader,
            )
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _exit(self, code):
        self.exits.append(code)
        self.engine.stuck = False

    def _talk(self, talk):
        try:
            talk(self)
        except BaseException as error:
            self.errors.append(error)
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGTERM)

    def signal(self, number):
        os.kill(os.getpid(), number)
        time.sleep(0.01)


def health(url):
    return httpx.get(f"{url}/health").json()["status"]


def check_draining(url, send_signal):
    """Running responses are completed; new requests get 503."""
    lines = []
    reader = stream(url, 30, lines)
    wait_for(lambda: lines)
    send_signal(signal.SIGTERM)
    wait_for(lambda: health(url) == "draining")
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503 and "retry-after" in refused.headers
    reader.join(10)
    assert sum('"text"' in line for line in lines) == 30 and lines[-2] == "data: [DONE]"


def test_a_signal_drains(monkeypatch):
    def talk(server):
        wait_for(lambda: health(server.url) == "loading")
        assert httpx.get(f"{server.url}/health").status_code == 503 and not server.ready.is_set()
        server.engine.may_load.set()
        assert server.ready.wait(20) and httpx.get(f"{server.url}/health").status_code == 200
        check_draining(server.url, server.signal)

    server = Here(monkeypatch, talk, pause=0.05, may_load=threading.Event())
    assert server.code == 0 and not server.exits


@pytest.mark.slow
def test_a_signal_drains_a_process():
    with process(pause=0.05) as server:
        assert server.stdout.readline() == "ready\n"
        check_draining(server.url, server.send_signal)
        assert server.wait(60) == 0
        assert server.stderr.read() == ""


def test_a_second_signal_aborts(monkeypatch):
    """The server ends even if closing the engine blocks: a timer ends the process."""
    monkeypatch.setattr("dantinox.serve.server.ABORT_SECONDS", 1.0)
    before = time.monotonic()

    def talk(server):
        assert server.ready.wait(20)
        lines = []
        reader = stream(server.url, 200, lines)
        wait_for(lambda: lines)
        server.signal(signal.SIGINT)
        wait_for(lambda: health(server.url) == "draining")
        server.signal(signal.SIGTERM)
        reader.join(30)

    server = Here(monkeypatch, talk, pause=0.2, stuck=True)
    assert server.code == 1 and server.exits == [1] and time.monotonic() - before < 30


@pytest.mark.slow
def test_a_second_signal_aborts_a_process(interruptible):
    """The process ends even if closing the engine blocks."""
    with process(0.2, "stuck") as server:
        assert server.stdout.readline() == "ready\n"
        lines = []
        reader = stream(server.url, 200, lines)
        wait_for(lambda: lines)
        before = time.monotonic()
        server.send_signal(signal.SIGINT)
        wait_for(lambda: health(server.url) == "draining")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 1 and time.monotonic() - before < 30
        assert "Traceback" not in server.stderr.read()
        reader.join(30)


def test_a_fault_of_the_engine_ends_the_server(monkeypatch):
    def talk(server):
        assert server.ready.wait(20)
        lines = []
        reader = stream(server.url, 100, lines)
        wait_for(lambda: lines)
        assert (
            httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "fault"}, timeout=60
            ).status_code
            == 503
        )
        answer = httpx.get(f"{server.url}/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "failed")
        reader.join(30)
        assert any("the engine has failed" in str(line) for line in lines)

    assert Here(monkeypatch, talk, pause=0.1).code == 1


# --- the command


@pytest.fixture
def refused(capfd, run_dir, monkeypatch):
    """Returns a function that runs the command with an error and returns its message."""
    monkeypatch.delenv("DANTINOX_API_KEY", raising=False)

    def run(*argv, where=run_dir):
        code = cli.main(["serve", "--run_dir", str(where), *map(str, argv)])
        out, err = capfd.readouterr()
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
        return err

    return run


def test_the_command_serves_with_its_flags(capfd, run_dir, monkeypatch, tmp_path):
    """The command runs with an engine that has no model."""
    made = []

    class AsyncEngine(FakeRunning):
        def __init__(self, run, options, *, name, **others):
            super().__init__(run)
            self.options, self.others, self.name = options, others, name
            made.append(self)

    def ask():
        wait_for(lambda: made and made[0].state == "ready", 30)
        headers = {"authorization": "Bearer 0123456789", "host": "a.example"}
        found.append(httpx.get(f"{url}/v1/models").status_code)
        found.append(
            httpx.get(f"{url}/v1/models", headers=headers | {"host": "b.example"}).status_code
        )
        body = {
            "model": "gpt-4o",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
        }
        found.append(httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers).json())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("dantinox.serve.pool.model_loading.AsyncEngine", AsyncEngine)
    monkeypatch.delenv("DANTINOX_API_KEY", raising=False)
    (tmp_path / "key").write_text("0123456789\n")
    (tmp_path / "lite.html").write_text("Lite")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    found, asking = [], threading.Thread(target=ask)
    asking.start()
    lite = ["--lite", str(tmp_path / "lite.html")]
    flags = (
        f"--port {port} --slots 3 --context 100 --queue 5 --name x --api_key_file"
        f" {tmp_path / 'key'} --allow_host A.example"
    )
    flags += " --alias gpt-4o other=x"
    flags += f" --prefill_rows 4 --prefix_cache 7 --cache_dir {tmp_path / 'prefixes'}"
    code = cli.main(
        [
            "serve",
            "--run_dir",
            str(run_dir),
            *flags.split(),
            *lite,
            "--chat_template",
            "plain",
            "--top_p",
            "0.5",
        ]
    )
    asking.join()
    expected = EngineOptions(
        slots=3, context=100, queue=5, background=("steps", "echo"), prefill_rows=4,
        prefix_cache=7_000_000,
        cache_dir=tmp_path / "prefixes",
    )  # fmt: skip
    assert code == 0 and made[0].options == expected and made[0].name == "x"
    assert made[0].others == {"overrides": {"top_p": 0.5}, "lora_paths": {}}
    assert found[:2] == [401, 400] and found[2]["choices"][0]["message"]["content"] == SAYS[:4]
    assert (
        capfd.readouterr().out
        == f"x is served at {url} (a web page; OpenAI: {url}/v1, KoboldAI: {url}/api)\n"
    )


def test_a_folder_for_keys_needs_a_prefix_cache(refused, tmp_path):
    assert "--cache_dir" in refused("--prefix_cache", 0, "--cache_dir", tmp_path / "keys")
    assert not (tmp_path / "keys").exists()


def test_a_public_address_needs_a_key(refused, tmp_path, monkeypatch):
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        assert "--no_auth" in refused("--host", host)
    assert "No such file" in refused("--api_key_file", tmp_path / "none")
    for content in ("", "short", "with a space in it", "ü" * 10, "a" * 2000):
        (tmp_path / "key").write_text(content)
        assert "8 to 1024" in refused("--api_key_file", tmp_path / "key")
    (tmp_path / "key").write_text("long enough"[:4] * 3 + "\n")
    assert "contradict" in refused("--api_key_file", tmp_path / "key", "--no_auth")
    monkeypatch.setenv("DANTINOX_API_KEY", "12345678")
    assert "both" in refused("--api_key_file", tmp_path / "key")
    monkeypatch.setenv("DANTINOX_API_KEY", "123")
    assert "DANTINOX_API_KEY" in refused()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "[0, 65535]"),
        (["--port", "٣"], "[0, 65535]"),
        (["--slots", "0"], "[1, 1024]"),
        (["--context", "x"], "an integer"),
        (["--queue", "-1"], "--queue"),
        (["--allow_host", "a b"], "--allow_host"),
        (["--allow_host", "a:80"], "without a port"),
        (["--cors", "a.example"], "--cors"),
        (["--cors", "https://a.example/path"], "--cors"),
        (["--name", ""], "--name"),
        (["--name", "a\nb"], "--name"),
        (["--alias", "a", "a=x"], "already a name"),
        (["--alias", "circle=x"], "already a name"),
        (["--alias", "=x"], "--alias must be a printable name"),
        (["--api_keys", "/no/such/file"], "no keys file at /no/such/file"),
        (["--log", "xml"], "--log"),
        (["--lite", "/no/such/path"], "--lite"),
        (["--top_p", "7"], "generation.top_p must be a number in [0, 1]"),
        (["--host", "203.0.113.7", "--no_auth"], "cannot listen"),
        (["--slot", "3"], "did you mean --slots?"),
    ],
)
def test_invalid_flags(refused, flags, words):
    assert words in refused(*flags)


def test_a_port_in_use(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "address already in use" in refused("--port", taken.getsockname()[1])


def test_the_error_without_the_extra(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install -e '.[serve]'" in refused()


def test_a_missing_run(refused, tmp_path):
    assert str(tmp_path / "none") in refused(where=tmp_path / "none")


def test_sighup_reloads_the_keys(tmp_path, monkeypatch, caplog):
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: a, key: first-secret}]")

    def talk(server):
        assert server.ready.wait(20)

        def status(secret):
            return httpx.get(f"{server.url}/v1/models", headers={"x-api-key": secret}).status_code

        assert (status("first-secret"), status("second-secret")) == (200, 401)
        keys.write_text("keys: [{name: a, key: second-secret}]")
        server.signal(signal.SIGHUP)
        wait_for(lambda: status("second-secret") == 200)
        assert status("first-secret") == 401
        keys.write_text("keys: [")
        server.signal(signal.SIGHUP)
        wait_for(lambda: "continues as before" in caplog.text)
        assert status("second-secret") == 200
        server.signal(signal.SIGTERM)

    assert Here(monkeypatch, talk, keys=keys).code == 0
    (record,) = [
        record for record in caplog.records if "continues as before" in record.getMessage()
    ]
    assert record.levelname == "ERROR" and str(keys) in record.getMessage()


@pytest.mark.slow
def test_the_end_of_the_terminal_drains(tmp_path):
    """SIGHUP reloads, but a server must not survive the terminal in which it was started."""
    (tmp_path / "keys.yaml").write_text("keys: [{name: a, key: first-secret}]")
    ours, theirs = pty.openpty()
    # The child makes the terminal its own, and then becomes the server.
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    take += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    server_arguments = ["-m", "tests.serve.process", "0.0", "--keys", str(tmp_path / "keys.yaml")]
    command = [sys.executable, "-c", take, *server_arguments]
    server = subprocess.Popen(
        command, cwd=ROOT, stdin=theirs, stdout=subprocess.PIPE, start_new_session=True
    )
    os.close(theirs)
    try:
        assert (
            server.stdout.readline().startswith(b"listening")
            and server.stdout.readline() == b"ready\n"
        )
        os.close(ours)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()


def test_the_model_of_an_alias_must_exist(refused):
    message = refused("--alias", "gpt-4o=other")
    assert "the alias 'gpt-4o' stands for 'other', which is not a model of this server" in message


def test_help_imports_no_server():
    code = "import sys; from dantinox.cli import command_parser as made; made('serve'); "
    code += "print({'jax', 'uvicorn', 'starlette'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n"
