"""The files of deploy/ agree with the server: metrics, labels, flags, paths, ports and keys."""

import http.server
import json
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from dantinox.cli import command_parser
from dantinox.config import UserError
from dantinox.config.help_pages import all_pages
from dantinox.serve.app import make_app
from dantinox.serve.operations.api_keys import read_keys, single_key
from dantinox.serve.options import Options

from .fakes import FakeEngine

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMQL_LABELS = {"instance", "job", "le"}  # of Prometheus itself and of histograms


def load(name):
    (content,) = yaml.safe_load_all((DEPLOY / name).read_text())
    return content


DASHBOARD, COMPOSE = json.loads((DEPLOY / "grafana.json").read_text()), load("compose.yaml")
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
RULES = [rule for group in load("alerts.yaml")["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
DASHBOARD_EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = DASHBOARD_EXPRESSIONS + [rule["expr"] for rule in RULES]


@pytest.fixture(scope="module")
def served():
    """Metric name → label names, of a server that has answered a request and an unknown path."""
    options = Options()
    options.keys.replace([single_key("secret-of-one")])
    with TestClient(
        make_app(FakeEngine(), options),
        base_url="http://localhost",
        headers={"x-api-key": "secret-of-one"},
    ) as http:
        assert (
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
        )
        families = list(text_string_to_metric_families(http.get("/metrics").text))
    found = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


# --- metrics


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_and_label_exists(served, expression):
    names = re.findall(r"\bdantinox_\w+", expression)
    assert names or "up{" in expression
    assert [name for name in names if name not in served] == []
    known = PROMQL_LABELS.union(*(served[name] for name in names))
    labels = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    labels += [
        label.strip()
        for group in re.findall(r"\bby \(([^)]*)\)", expression)
        for label in group.split(",")
    ]
    assert [label for label in labels if label not in known] == []


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_are_balanced_and_counters_have_rates(expression):
    for opening, closing in ("()", "[]", "{}"):
        assert expression.count(opening) == expression.count(closing)
    for name in re.findall(r"\b\w+_(?:total|bucket)\b", expression):
        assert re.search(rf"\b(?:rate|increase)\({name}\b", expression), f"{name} is a counter"


def test_every_subject_is_in_the_dashboard(served):
    shown = {
        name.removesuffix("_total").removesuffix("_bucket")
        for name in re.findall(r"\bdantinox_\w+", str(EXPRESSIONS))
    }
    subjects = (
        "ready responses requests refused first_token_seconds token_seconds queued_seconds"
        " request_seconds busy slots queued "
    )
    subjects += (
        "new_tokens prompt_tokens reused_tokens key_requests"
        " key_tokens key_refused reloads compilations"
    )
    assert shown >= {f"dantinox_{subject}" for subject in subjects.split()}


def test_panels_have_titles_units_and_places():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    places = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not places & cells and all(0 <= x < 24 for x, _ in cells), panel["title"]
        places |= cells
    for panel in PANELS:
        assert (
            panel["description"] and panel["fieldConfig"]["defaults"]["unit"] and panel["targets"]
        )
        assert panel["datasource"]["uid"] == "${datasource}"


def test_alerts_have_the_fields_of_prometheus():
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 8
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert (
            rule["labels"]["severity"] in ("info", "warning", "critical")
            and rule["annotations"]["summary"]
        )
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))
        for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
            assert label == "instance" or re.search(rf"by \([^)]*\b{label}\b", rule["expr"])


# --- flags, paths and ports


def container():
    (deployment,) = [manifest for manifest in MANIFESTS if manifest["kind"] == "Deployment"]
    return deployment["spec"]["template"]["spec"]["containers"][0]


def entry_point():
    (line,) = re.findall(
        r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE
    )
    return json.loads(line)


def service_command():
    (line,) = re.findall(
        r"^ExecStart=(.*)$", (DEPLOY / "dantinox.service").read_text(), re.MULTILINE
    )
    return shlex.split(line)


COMMANDS = {
    "Dockerfile": entry_point()[2:],
    "dantinox.service": service_command()[2:],
    "compose.yaml": [*entry_point()[2:], *COMPOSE["services"]["server"]["command"]],
    "kubernetes.yaml": [*entry_point()[2:], *container()["args"]],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_exists(name):
    parser = command_parser("serve")
    assert entry_point()[:2] == ["dantinox", "serve"] and service_command()[1] == "serve"
    help_text = all_pages(parser)
    flags = [word for word in COMMANDS[name] if word.startswith("--")]
    assert flags and all(re.search(rf"{flag}\b", help_text) for flag in flags)
    options = parser.parse_args(COMMANDS[name])
    assert options.port == 8000


def test_flags_in_the_readme_exist():
    known = {flag for action in command_parser("serve")._actions for flag in action.option_strings}
    text = (DEPLOY / "README.md").read_text()
    foreign = {"--build", "--rm", "--from-file", "--now"}  # of docker, kubectl and systemctl
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - foreign <= known


def test_ports_and_probes():
    server, pod = COMPOSE["services"]["server"], container()
    assert server["ports"] == ["127.0.0.1:8000:8000"] and pod["ports"][0]["containerPort"] == 8000
    (service,) = [manifest for manifest in MANIFESTS if manifest["kind"] == "Service"]
    (deployment,) = [manifest for manifest in MANIFESTS if manifest["kind"] == "Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    with TestClient(
        make_app(FakeEngine(), Options(hosts=frozenset({"ip"}))), base_url="http://10.1.2.3:8000"
    ) as http:
        for probe in (
            "startupProbe",
            "readinessProbe",
        ):  # kubelet sends the address of the pod as host
            assert http.get(pod[probe]["httpGet"]["path"]).status_code == 200
    mounted = {mount["name"] for mount in pod["volumeMounts"]}
    assert mounted == {
        volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]
    }
    assert (
        service["metadata"]["name"] in pod["args"]
    )  # --allow_host, because clients send the name of the service
    assert (job := load("monitoring/prometheus.yaml")["scrape_configs"][0])["static_configs"][0][
        "targets"
    ] == ["server:8000"]
    assert job["job_name"] in RULES[0]["expr"] and "server" in server["command"]


def test_files_of_the_compose_file_exist():
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = (
                volume.rpartition(":/")[0]
                if not volume.endswith(":ro")
                else volume.removesuffix(":ro").rpartition(":/")[0]
            )
            if source.startswith("./") and source != "./keys":
                assert (DEPLOY / source).is_file(), source
            elif not source.startswith((".", "$")):
                assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("status, healthy", [(200, True), (503, False)])
def test_the_health_check_of_the_image(status, healthy):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args):
            """Writes no log."""

    (line,) = re.findall(r"^  CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    program, flag, code = json.loads(line)
    assert (program, flag) == ("python", "-c") and "http://127.0.0.1:8000/health" in code
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        code = code.replace(":8000", f":{server.server_port}")
        done = subprocess.run([sys.executable, flag, code], capture_output=True)
        thread.join()
    assert (done.returncode == 0) == healthy


def test_the_image_runs_without_privileges_and_has_its_volumes():
    text = (DEPLOY / "Dockerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER 10001$", last, re.MULTILINE) and "COPY --from=build" in last
    (volumes,) = re.findall(r"^VOLUME (\[.*\])$", last, re.MULTILINE)
    assert {"/model", "/runs", "/home/dantinox/.cache"} == {*json.loads(volumes)}
    assert entry_point()[entry_point().index("--run_dir") + 1] == "/model"
    links = [
        path.resolve() for path in (DEPLOY.parent / "dantinox").rglob("*") if path.is_symlink()
    ]
    assert links and all(f"COPY {path.relative_to(DEPLOY.parent)} /src/" in text for path in links)
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert (DEPLOY.parent / name).exists() and f"!{name}" in (
                DEPLOY / "Dockerfile.dockerignore"
            ).read_text().split()


def test_example_keys_must_be_replaced(tmp_path):
    text = (DEPLOY / "keys.example.yaml").read_text()
    with pytest.raises(UserError, match="must be a string of 8"):
        read_keys(DEPLOY / "keys.example.yaml")
    filled = text.replace("sha256: REPLACE", f"sha256: {'ab' * 32}")
    for number in range(2):
        filled = filled.replace("key: REPLACE", f"key: my-own-key-{number}", 1)
    (tmp_path / "keys.yaml").write_text(filled)
    assert [(key.name, key.admin) for key in read_keys(tmp_path / "keys.yaml")] == [
        ("admin", True), ("prometheus", False), ("alice", False),
    ]  # fmt: skip
