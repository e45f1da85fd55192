"""The files that run a server elsewhere say what is so: of its metrics, its options, its times, its paths."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from server_support import Live, build, random_params

from jpaged.server.app import GET, OPEN, POST
from jpaged.server.config import ServerConfig, read_config

REPO = Path(__file__).parents[2]
DOCKERFILE = (REPO / "Dockerfile").read_text()
UNIT = (REPO / "configs/jpaged.service").read_text()
GUIDE = (REPO / "docs/serving.md").read_text()
BOARD = json.loads((REPO / "configs/grafana.json").read_text())
FUNCTIONS = {"histogram_quantile", "label_values", "rate", "sum"}
# The longest that ending takes beside shutdown_timeout: connections, spans, and a step that is under way.
ENDING = 30


@pytest.fixture(scope="module")
def kinds():
    found = yaml.safe_load_all((REPO / "configs/kubernetes.yaml").read_text())
    return {document["kind"]: document for document in found}


@pytest.fixture(scope="module")
def pod(kinds):
    return kinds["Deployment"]["spec"]["template"]["spec"]


def test_the_python_of_the_guide_talks_to_a_server(capsys):
    (block,) = re.findall("```python\n(.*?)```", GUIDE, re.DOTALL)
    with Live(build(random_params()), model="smollm2") as live:
        exec(compile(block.replace("127.0.0.1:8000", f"127.0.0.1:{live.port}"), "serving.md", "exec"), {})
        assert live.service.metrics.output_tokens._value.get() > 0
    assert capsys.readouterr().out


def names_in(promql: str) -> set[str]:
    """The metrics that a query reads: what is neither a label, a text, a range nor a function."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|\bby \([^)]*\)', " ", promql)
    return set(re.findall(r"\b[a-z_]\w*\b", bare)) - FUNCTIONS - {"model", "instance"}


def queries() -> list[str]:
    targets = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", [])]
    return targets + [one["definition"] for one in BOARD["templating"]["list"] if one["type"] == "query"]


def test_the_names_in_a_query_are_found():
    query = 'histogram_quantile(0.5, sum by (le) (rate(a_b_bucket{model=~"$model"}[$__rate_interval]))) / c * 1000'
    assert names_in(query) == {"a_b_bucket", "c"}


def test_the_dashboard_shows_the_metrics_that_there_are_and_all_of_them():
    with Live(build(random_params())) as live:
        live.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
        raw = live.call("GET", "/metrics")[2].decode()
    families = list(text_string_to_metric_families(raw))
    samples = {sample.name for family in families for sample in family.samples}
    shown = set().union(*map(names_in, queries()))
    if sys.platform != "linux":  # elsewhere there are no figures of the process
        shown = {name for name in shown if not name.startswith("process_")}
    assert shown - samples == set(), "shown, and not there"
    left_out = [family.name for family in families if not shown & {sample.name for sample in family.samples}]
    assert left_out == [], "there, and not shown"


def test_every_query_of_the_dashboard_is_of_the_chosen_servers_and_source():
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            for name in names_in(target["expr"]):
                chosen = ['instance=~"$instance"'] + ['model=~"$model"'] * name.startswith("jpaged_")
                labels = re.findall(rf"\b{name}\{{([^}}]*)\}}", target["expr"])
                assert labels and set(labels) == {",".join(chosen)}, target["expr"]
    assert {one["name"] for one in BOARD["templating"]["list"]} == {"datasource", "model", "instance"}


def test_panels_of_the_dashboard_do_not_lie_on_each_other():
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_each_file_says_what_it_is_for():
    for name in ("jpaged.service", "kubernetes.yaml"):
        first, second, *_ = (REPO / "configs" / name).read_text().splitlines()
        assert f"configs/{name}" in first and second.startswith("# ")
    assert "configs/grafana.json" in BOARD["description"] and "# docker build" in DOCKERFILE.splitlines()[0]


def test_kubernetes_gives_the_server_a_good_file(kinds, pod, tmp_path):
    (name, text), *others = kinds["ConfigMap"]["data"].items()
    assert not others
    path = tmp_path / name
    path.write_text(text)
    config = read_config(path)
    (container,) = pod["containers"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "config"]
    assert container["args"] == [f"{mount['mountPath']}/{name}"]
    assert config.open_metrics  # who reads the annotations has no key
    assert pod["terminationGracePeriodSeconds"] >= config.shutdown_timeout + ENDING


def test_kubernetes_asks_what_is_there(kinds, pod):
    (container,) = pod["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/health",
    }
    assert {probe["path"] for probe in probes.values()} <= OPEN  # a probe has no key
    (port,) = container["ports"]
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert kinds["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    annotations = kinds["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"]) == port_of_the_image()
    assert [one["name"] for one in container["env"]] == ["JPAGED_API_KEY"]


def test_kubernetes_runs_the_image_as_its_user_and_writes_where_it_may(pod):
    (container,) = pod["containers"]
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["fsGroup"]) == (int(user[1]), int(user[2]))
    written = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
    assert container["securityContext"]["readOnlyRootFilesystem"] and written == {"/cache", "/tmp"}


def port_of_the_image() -> str:
    return re.search(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE)[1]


def test_the_image_starts_the_server_itself_and_asks_it_where_it_listens():
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    words = json.loads(entry)  # no shell is between, which would keep SIGTERM to itself
    port = port_of_the_image()
    assert words == ["jpaged", "serve", "--host", "0.0.0.0", "--port", port, "--exit-on-crash"]
    assert f"http://127.0.0.1:{port}/health" in DOCKERFILE
    assert re.search(r"^VOLUME /cache$", DOCKERFILE, re.MULTILINE) and "JPAGED_CACHE=/cache" in DOCKERFILE


def test_the_image_is_made_of_what_the_package_is():
    lines = [line for line in (REPO / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    let_in = {line[1:] for line in lines if line.startswith("!")}
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    named = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert let_in == packages | named
    for name in let_in:
        assert re.search(rf"^COPY .*\b{re.escape(name)}\b", DOCKERFILE, re.MULTILINE), name


def test_systemd_waits_longer_than_ending_takes():
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(seconds) >= ServerConfig().shutdown_timeout + ENDING
    assert "KillSignal=SIGTERM" in UNIT and "EnvironmentFile=-" in UNIT
    assert not re.search(r"^MemoryDenyWriteExecute", UNIT, re.MULTILINE)  # XLA runs what it compiles


def row_of(name: str) -> str:
    """What the guide's table says of a key."""
    field = ServerConfig.model_fields[name]
    told, shown = re.fullmatch(r"(.*?)(?: \[default: (.*)\])?\.?", field.description).groups()
    if shown is None and field.default in ([], {}, None, ""):
        shown = "none"
    elif shown is None:
        shown = yaml.safe_dump(field.default).split("\n")[0]
    return f"| `{name}` | {shown} | {told}. |"


def test_the_guide_has_every_key_of_the_file_with_its_default():
    rows = re.findall(r"^\| `\w+` \| .* \|$", GUIDE, re.MULTILINE)
    assert rows == [row_of(name) for name in ServerConfig.model_fields]


def test_the_guide_has_every_endpoint():
    table = GUIDE.split("## Endpoints")[1].split("\n\n")[1]
    named = set(re.findall(r"`((?:GET|POST) /[\w/{}.]*)`", table))
    there = {f"POST {path}" for path in POST} | {f"GET {path.replace('{id:path}', '{id}')}" for path in GET}
    assert named == there | {"GET /openapi.json", "GET /dashboard", "GET /chat"}
