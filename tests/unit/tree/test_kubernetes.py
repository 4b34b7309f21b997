"""The Kustomize folders render, are valid for Kubernetes to the last field, and agree with
themselves and with the package.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tree import ROOT, tracked

from midstream.schemas.base.version import __version__
from midstream.schemas.settings.settings import PREFIX, SECRETS, Settings, known_settings, variable

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "bucket", "keda")
#: Its schemas check the manifests; the oldest of this list and the newest must both accept them.
VERSIONS = ("1.27", "1.32")
#: Components that an overlay may add.
COMPONENTS = ("namespace", "ingress", "monitors", "gradients")
#: One that takes something away.
WITHOUT_REDIS = "redis-address"
#: Kinds that others than Kubernetes define.
FOREIGN = {"ScaledObject", "ServiceMonitor", "PodMonitor", "PrometheusRule"}
#: The oldest kubectl whose kustomize knows what the folders use.
OLDEST = (1, 27)
WORKLOADS = {"Deployment", "StatefulSet"}
#: Set by continuous integration, where a missing kubectl is a failure.
CI = "KUBECTL_REQUIRED"

Document = dict[str, Any]
Documents = tuple[Document, ...]


def kubectl() -> tuple[int, ...]:
    """The version of kubectl; empty without it."""
    if shutil.which("kubectl") is None:
        return ()
    command = ["kubectl", "version", "--client", "-o", "json"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return tuple(map(int, re.findall(r"[0-9]+", told["clientVersion"]["gitVersion"])[:2]))


def rendered(folder: Path) -> Documents:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == ""  # nor warnings of deprecated fields
    return tuple(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def overlays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Documents]:
    """Every overlay, and `all`: the overlay `cpu` with all components. Made of what a clone has,
    with the secrets that the script makes.
    """
    if (there := kubectl()) < OLDEST:
        reason = (
            f"kubectl {'.'.join(map(str, OLDEST))} or newer is needed, and there is "
            f"{'.'.join(map(str, there)) or 'none'}: the manifests were NOT rendered"
        )
        if os.environ.get(CI):
            pytest.fail(reason)
        pytest.skip(reason)
    clone = tmp_path_factory.mktemp("clone")
    for path in tracked():
        if path.parts[0] in ("deploy", "compose"):
            (clone / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, clone / path)
    folder = clone / "deploy" / "kubernetes"
    for overlay in OVERLAYS:
        subprocess.run([folder / "secrets.sh", overlay], check=True, capture_output=True)
    (folder / "bucket" / "secrets" / "artifact_secret_key").write_text("secret")
    known = {*COMPONENTS, WITHOUT_REDIS}
    assert {path.name for path in (folder / "components").iterdir()} == known
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "kustomization.yaml").write_text(
        f"resources: [../cpu]\ncomponents: [../components/{WITHOUT_REDIS}]\n"
    )
    (folder / "all").mkdir()
    (folder / "all" / "kustomization.yaml").write_text(
        "namespace: midstream\nresources: [../cpu]\n"
        f"components: [{', '.join(f'../components/{name}' for name in COMPONENTS)}]\n"
    )
    return {name: rendered(folder / name) for name in (*OVERLAYS, "all", "elsewhere")}


@pytest.fixture(params=(*OVERLAYS, "all"))
def documents(request: pytest.FixtureRequest, overlays: dict[str, Documents]) -> Documents:
    return overlays[request.param]


def of(documents: Documents, *kinds: str) -> dict[str, Document]:
    return {found["metadata"]["name"]: found for found in documents if found["kind"] in kinds}


def containers(documents: Documents) -> Iterator[tuple[str, Document, Document]]:
    """(workload, pod, container)."""
    for name, found in of(documents, *WORKLOADS).items():
        pod = found["spec"]["template"]["spec"]
        for container in pod["containers"]:
            yield name, pod, container


def variables(container: Document) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container.get("env", [])}


def test_every_manifest_is_strictly_valid(documents: Documents) -> None:
    assert len(documents) > 25
    for document in documents:
        if document["kind"] not in FOREIGN:
            for version in VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)


def test_every_volume_secret_and_map_that_a_pod_names_exists(documents: Documents) -> None:
    volumes, secrets, maps = (
        of(documents, kind) for kind in ("PersistentVolumeClaim", "Secret", "ConfigMap")
    )
    for name, pod, container in containers(documents):
        templates = of(documents, *WORKLOADS)[name]["spec"].get("volumeClaimTemplates", [])
        known = {volume["name"] for volume in pod["volumes"]}
        known |= {claim["metadata"]["name"] for claim in templates}
        assert {mount["name"] for mount in container["volumeMounts"]} == known, name
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in volumes
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
            for source in volume.get("projected", {}).get("sources", []):
                held = secrets[source["secret"]["name"]]["data"]
                assert {item["key"] for item in source["secret"]["items"]} <= held.keys(), name
        for source in container.get("envFrom", []):
            assert source["configMapRef"]["name"] in maps


def test_services_and_scalers_lead_to_workloads_and_their_ports(documents: Documents) -> None:
    workloads = of(documents, *WORKLOADS)
    ports: dict[str, set[str]] = {}
    for name, _, container in containers(documents):
        ports.setdefault(name, set()).update(port["name"] for port in container.get("ports", []))
    for name, service in of(documents, "Service").items():
        labels = workloads[name]["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports[name]
    for scaler in of(documents, "HorizontalPodAutoscaler", "ScaledObject").values():
        target = scaler["spec"]["scaleTargetRef"]
        assert target["name"] in of(documents, target["kind"])


def test_every_variable_is_a_setting_and_secrets_are_in_files(documents: Documents) -> None:
    settings = set(map(variable, known_settings()))
    open_ones = settings - set(map(variable, SECRETS))
    given = {name for found in of(documents, "ConfigMap").values() for name in found["data"]}
    given |= {name for _, _, container in containers(documents) for name in variables(container)}
    assert {
        name
        for name in given
        if name.startswith(PREFIX)
        and name not in open_ones
        and name.removesuffix("_FILE") not in settings - {name}
    } == set()


def test_every_container_is_confined_and_probed(documents: Documents) -> None:
    for name, pod, container in containers(documents):
        assert pod["automountServiceAccountToken"] is False
        # else Kubernetes would set variables such as REDIS_PORT
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "startupProbe" in container, name
        assert "livenessProbe" in container or name == "redis", name
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name


def test_every_pod_has_rules_of_the_network(documents: Documents) -> None:
    rules = {name: found["spec"] for name, found in of(documents, "NetworkPolicy").items()}
    assert set(rules["nothing"]["policyTypes"]) == {"Ingress", "Egress"}
    assert not rules["nothing"].get("ingress")
    assert not rules["nothing"].get("egress")
    for name, _, container in containers(documents):
        assert rules[name]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == name
        allowed = {
            port["port"] for rule in rules[name].get("ingress", []) for port in rule["ports"]
        }
        assert {port["containerPort"] for port in container.get("ports", [])} <= allowed, name


def test_a_drain_leaves_the_service_up(documents: Documents) -> None:
    budgets = of(documents, "PodDisruptionBudget")
    assert budgets.keys() == of(documents, *WORKLOADS).keys() - {"flower", "gradients"}
    for name in ("api", "callbacks"):
        replicas = of(documents, "Deployment")[name]["spec"]["replicas"]
        assert replicas > budgets[name]["spec"]["minAvailable"]


def test_workers_scale_by_metrics_that_exist(overlays: dict[str, Documents]) -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    [metric] = of(overlays["gpu"], "HorizontalPodAutoscaler")["worker"]["spec"]["metrics"]
    assert not of(overlays["keda"], "HorizontalPodAutoscaler")
    [trigger] = of(overlays["keda"], "ScaledObject")["worker"]["spec"]["triggers"]
    names = set(re.findall(r"midstream_\w+", trigger["metadata"]["query"]))
    assert names == {"midstream_queue_depth", "midstream_running_jobs"}
    for name in (*names, metric["external"]["metric"]["name"]):
        assert f"`{name}`" in page
    worker = of(overlays["gpu"], "StatefulSet")["worker"]["spec"]["template"]["spec"]
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def settings_of(documents: Documents) -> Document:
    """The ConfigMap with the settings, beside that with the script that starts Redis."""
    maps = of(documents, "ConfigMap").items()
    return next(found for name, found in maps if name.startswith("midstream"))


def test_with_a_bucket_no_volume_is_shared_and_its_users_have_the_key(
    overlays: dict[str, Documents],
) -> None:
    documents = overlays["bucket"]
    users = {"api", "callbacks", "worker"}
    assert "captures" not in of(documents, "PersistentVolumeClaim")
    with_key = set()
    for name, pod, container in containers(documents):
        shared = [volume for volume in pod["volumes"] if volume["name"] == "captures"]
        assert shared == ([{"name": "captures", "emptyDir": {}}] if name in users else [])
        if key := variables(container).get(f"{PREFIX}ARTIFACT_SECRET_KEY_FILE"):
            with_key.add(name)
            mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert str(Path(key).parent) in mounted
    held = [secret["data"] for secret in of(documents, "Secret").values()]
    assert any("artifact_secret_key" in data for data in held)
    assert with_key == users
    rule = of(documents, "NetworkPolicy")["bucket"]["spec"]
    assert set(rule["podSelector"]["matchExpressions"][0]["values"]) == users
    assert [port["port"] for port in rule["egress"][0]["ports"]] == [443]
    found = settings_of(documents)
    given = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in found["data"].items()
        if "ARTIFACT" in name
    }
    assert Settings(**given, artifact_secret_key="x").artifacts.startswith("s3://")


def test_the_ingress_leads_to_the_api_by_a_host_that_it_allows(
    overlays: dict[str, Documents],
) -> None:
    documents = overlays["all"]
    [rule] = of(documents, "Ingress")["api"]["spec"]["rules"]
    found = settings_of(documents)
    assert rule["host"] in found["data"][f"{PREFIX}ALLOWED_HOSTS"].split(",")
    assert found["data"][f"{PREFIX}PUBLIC_URL"] == f"https://{rule['host']}"
    service = rule["http"]["paths"][0]["backend"]["service"]
    ports = of(documents, "Service")[service["name"]]["spec"]["ports"]
    assert service["port"]["name"] in [port["name"] for port in ports]


def test_monitors_cover_every_process_with_the_observe_key(overlays: dict[str, Documents]) -> None:
    documents = overlays["all"]
    services = of(documents, "ServiceMonitor")["services"]["spec"]
    pods = of(documents, "PodMonitor")["processes"]["spec"]
    chosen = [set(each["selector"]["matchExpressions"][0]["values"]) for each in (services, pods)]
    assert set().union(*chosen) == of(documents, *WORKLOADS).keys() - {"redis"}
    secret = services["endpoints"][0]["authorization"]["credentials"]
    assert secret["key"] == "observe_key"
    assert secret["key"] in of(documents, "Secret")[secret["name"]]["data"]
    for name in chosen[0]:
        ports = of(documents, "Service")[name]["spec"]["ports"]
        assert services["endpoints"][0]["port"] in [port["name"] for port in ports]
    for name, _, container in containers(documents):
        if name in chosen[1]:
            names = [port["name"] for port in container["ports"]]
            assert pods["podMetricsEndpoints"][0]["port"] in names


def test_prometheus_finds_every_process_that_needs_no_key(documents: Documents) -> None:
    for name, _, container in containers(documents):
        template = of(documents, *WORKLOADS)[name]["spec"]["template"]["metadata"]
        told = template.get("annotations", {})
        scraped = name not in ("api", "flower", "redis")
        assert (told.get("prometheus.io/scrape") == "true") is scraped, name
        if scraped:
            ports = [port["containerPort"] for port in container["ports"]]
            assert int(told["prometheus.io/port"]) in ports


def test_images_have_the_version_of_the_package(documents: Documents) -> None:
    images = {
        container["image"]
        for name, _, container in containers(documents)
        if name not in ("redis", "gradients")  # a version of its own; the overlay names its image
    }
    names = ("service", "worker-cpu", "worker-gpu")
    assert images <= {f"midstream-{name}:{__version__}" for name in names}


def test_with_a_redis_elsewhere_none_is_made_and_all_reach_it(
    overlays: dict[str, Documents],
) -> None:
    documents = overlays["elsewhere"]
    for kind in (*WORKLOADS, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        assert "redis" not in of(documents, kind)
    found = settings_of(documents)["data"]
    assert found[f"{PREFIX}REDIS_REPLICAS"] == "1"
    rule = of(documents, "NetworkPolicy")["redis-address"]["spec"]
    reached = set(rule["podSelector"]["matchExpressions"][0]["values"])
    assert of(documents, *WORKLOADS).keys() <= reached


def test_artifacts_have_a_volume_where_they_are_registered_and_loaded(
    documents: Documents,
) -> None:
    folder = settings_of(documents)["data"][f"{PREFIX}ARTIFACTS_DIR"]
    users = {
        name
        for name, pod, container in containers(documents)
        for mount in container["volumeMounts"]
        if mount["mountPath"] == folder
    }
    assert users == of(documents, *WORKLOADS).keys() & {"api", "worker", "gradients"}


def test_the_alerts_and_the_dashboard_are_those_of_compose(overlays: dict[str, Documents]) -> None:
    documents = overlays["all"]
    compose = yaml.safe_load((ROOT / "compose" / "alerts.yml").read_text())
    assert of(documents, "PrometheusRule")["midstream"]["spec"] == compose
    board = of(documents, "ConfigMap")["grafana-dashboard"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(board["data"]["midstream.json"])["panels"]


def test_an_overlay_renders_without_a_first_step_or_names_it(tmp_path: Path) -> None:
    if kubectl() < OLDEST:
        pytest.skip("kubectl is needed")
    for path in tracked():
        if path.parts[0] in ("deploy", "compose"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / path)
    script = tmp_path / "deploy" / "kubernetes" / "render.sh"

    def done(overlay: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script, overlay], capture_output=True, text=True, check=False)

    assert len(list(yaml.safe_load_all(done("cpu").stdout))) > 25
    refused = done("bucket")
    assert refused.returncode == 1
    assert "needs the secret key of its bucket first" in refused.stderr
    (tmp_path / "deploy/kubernetes/bucket/secrets/artifact_secret_key").write_text("secret")
    assert done("bucket").returncode == 0
