"""The Kustomize folders render, are valid for Kubernetes to the last field, and agree with
themselves and with the package.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tree import tracked

from midstream.schemas.base.settings import PREFIX, SECRETS, Settings

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "bucket", "keda")
#: Its schemas check the manifests; the oldest of this list and the newest must both accept them.
VERSIONS = ("1.27", "1.32")
#: Components that an overlay may add, and what they bring.
COMPONENTS = {
    "namespace": {"Namespace"},
    "ingress": {"Ingress"},
    "monitors": {"ServiceMonitor", "PodMonitor"},
    "gradients": set(),  # kinds that the base has too
}
#: Kinds that others than Kubernetes define.
FOREIGN = {"ScaledObject", "ServiceMonitor", "PodMonitor"}
#: The oldest kubectl whose kustomize knows what the folders use.
OLDEST = (1, 27)
WORKLOADS = {"Deployment", "StatefulSet"}
#: Set by continuous integration, where a missing kubectl is a failure.
CI = "KUBECTL_REQUIRED"

Document = dict[str, Any]


def kubectl() -> tuple[int, ...]:
    """The version of kubectl; empty without it."""
    if shutil.which("kubectl") is None:
        return ()
    command = ["kubectl", "version", "--client", "-o", "json"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return tuple(map(int, re.findall(r"[0-9]+", told["clientVersion"]["gitVersion"])[:2]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone has, with the secrets that the script makes."""
    if (there := kubectl()) < OLDEST:
        reason = (
            f"kubectl {'.'.join(map(str, OLDEST))} or newer is needed, and there is "
            f"{'.'.join(map(str, there)) or 'none'}: the manifests were NOT rendered"
        )
        if os.environ.get(CI):
            pytest.fail(reason)
        pytest.skip(reason)
    copy = tmp_path_factory.mktemp("clone")
    for path in tracked():
        if path.parts[0] in ("deploy", "compose"):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy / path)
    for overlay in OVERLAYS:
        made = subprocess.run(
            [copy / "deploy" / "kubernetes" / "secrets.sh", overlay],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert made.count("made ") == len(
            list((copy / "deploy" / "kubernetes" / overlay / "secrets").iterdir())
        ), "a clone brings secrets"
    (copy / "deploy" / "kubernetes" / "bucket" / "secrets" / "artifact_secret_key").write_text(
        "secret"
    )
    return copy / "deploy" / "kubernetes"


@cache
def rendered(folder: Path, overlay: str) -> tuple[Document, ...]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder / overlay)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")  # nor warnings of deprecated fields
    return tuple(yaml.safe_load_all(done.stdout))


@pytest.fixture(params=OVERLAYS)
def documents(request: pytest.FixtureRequest, folder: Path) -> tuple[Document, ...]:
    return rendered(folder, request.param)


def of(documents: tuple[Document, ...], *kinds: str) -> dict[str, Document]:
    return {found["metadata"]["name"]: found for found in documents if found["kind"] in kinds}


def containers(documents: tuple[Document, ...]) -> Iterator[tuple[str, Document, Document]]:
    """(workload, pod, container)."""
    for name, found in of(documents, *WORKLOADS).items():
        pod = found["spec"]["template"]["spec"]
        for container in pod["containers"]:
            yield name, pod, container


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_strictly_valid(documents: tuple[Document, ...], version: str) -> None:
    assert len(documents) > 25
    for document in documents:
        if document["kind"] not in FOREIGN:
            kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_field_is_found(documents: tuple[Document, ...]) -> None:
    relay = of(documents, "Deployment")["relay"]
    wrong = relay | {"spec": relay["spec"] | {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_everything_that_is_referred_to_exists(documents: tuple[Document, ...]) -> None:
    volumes, secrets, maps = (
        of(documents, "PersistentVolumeClaim"),
        of(documents, "Secret"),
        of(documents, "ConfigMap"),
    )
    for name, pod, container in containers(documents):
        templates = of(documents, *WORKLOADS)[name]["spec"].get("volumeClaimTemplates", [])
        known = {volume["name"] for volume in pod["volumes"]} | {
            claim["metadata"]["name"] for claim in templates
        }
        assert {mount["name"] for mount in container["volumeMounts"]} == known, name
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in volumes
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
            for source in volume.get("projected", {}).get("sources", []):
                assert {item["key"] for item in source["secret"]["items"]} <= secrets[
                    source["secret"]["name"]
                ]["data"].keys(), name
        for source in container.get("envFrom", []):
            assert source["configMapRef"]["name"] in maps
    for name, service in of(documents, "Service").items():
        target = of(documents, *WORKLOADS)[name]
        assert (
            service["spec"]["selector"].items()
            <= target["spec"]["template"]["metadata"]["labels"].items()
        )
        ports = {
            port["name"]
            for container in target["spec"]["template"]["spec"]["containers"]
            for port in container["ports"]
        }
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for name, scaler in of(documents, "HorizontalPodAutoscaler").items():
        assert name in of(documents, scaler["spec"]["scaleTargetRef"]["kind"])


def test_every_variable_is_a_setting(documents: tuple[Document, ...]) -> None:
    settings = {PREFIX + name.upper() for name in Settings.__struct_fields__}
    given = {name for found in of(documents, "ConfigMap").values() for name in found["data"]}
    given |= {
        variable["name"]
        for _, _, container in containers(documents)
        for variable in container.get("env", [])
    }
    ours = {name for name in given if name.startswith(PREFIX)}
    assert {
        name for name in ours if name not in settings and name.removesuffix("_FILE") not in settings
    } == set()


def test_secrets_are_in_files_alone(documents: tuple[Document, ...]) -> None:
    secret = {name.upper() for name in SECRETS}
    for _, _, container in containers(documents):
        assert (
            not {variable["name"].removeprefix(PREFIX) for variable in container.get("env", [])}
            & secret
        )
    for found in of(documents, "ConfigMap").values():
        assert not {name.removeprefix(PREFIX) for name in found["data"]} & secret


def test_every_overlay_has_secrets_of_its_own_which_the_script_made(folder: Path) -> None:
    values = set()
    for overlay in OVERLAYS:
        [data] = [
            found["data"]
            for name, found in of(rendered(folder, overlay), "Secret").items()
            if not name.startswith("midstream-bucket")
        ]
        for name, value in data.items():
            assert base64.b64decode(value) == (folder / overlay / "secrets" / name).read_bytes()
        values |= set(data.values())
    assert len(values) == len(OVERLAYS) * len(data)


def test_every_container_is_confined_and_probed(documents: tuple[Document, ...]) -> None:
    for name, pod, container in containers(documents):
        assert pod["automountServiceAccountToken"] is False
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


def test_every_pod_has_rules_of_the_network(documents: tuple[Document, ...]) -> None:
    policies = of(documents, "NetworkPolicy")
    everything = policies["nothing"]["spec"]
    assert set(everything["policyTypes"]) == {"Ingress", "Egress"}
    assert not everything.get("ingress")
    assert not everything.get("egress")
    component = "app.kubernetes.io/component"
    named = {
        found["spec"]["podSelector"].get("matchLabels", {}).get(component)
        for found in policies.values()
    } - {None}
    assert named == of(documents, *WORKLOADS).keys()
    for name, pod, container in containers(documents):
        allowed = {
            port["port"]
            for rule in policies[name]["spec"].get("ingress", [])
            for port in rule["ports"]
        }
        assert {port["containerPort"] for port in container.get("ports", [])} <= allowed, name
        # else Kubernetes would set variables such as REDIS_PORT
        assert pod["enableServiceLinks"] is False


def test_a_drain_leaves_the_service_up(documents: tuple[Document, ...]) -> None:
    budgets = of(documents, "PodDisruptionBudget")
    assert budgets.keys() == of(documents, *WORKLOADS).keys() - {"flower"}
    for name in ("api", "callbacks"):
        assert (
            of(documents, "Deployment")[name]["spec"]["replicas"]
            > budgets[name]["spec"]["minAvailable"]
        )


def test_workers_scale_by_a_metric_that_exists(folder: Path) -> None:
    documents = rendered(folder, "gpu")
    scaler = of(documents, "HorizontalPodAutoscaler")["worker"]["spec"]
    [metric] = scaler["metrics"]
    assert (
        f"`{metric['external']['metric']['name']}`"
        in (ROOT / "docs" / "observability.md").read_text()
    )
    [worker] = of(documents, "StatefulSet")["worker"]["spec"]["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_keda_scales_by_metrics_that_exist_in_place_of_the_autoscaler(folder: Path) -> None:
    documents = rendered(folder, "keda")
    assert not of(documents, "HorizontalPodAutoscaler")
    scaler = of(documents, "ScaledObject")["worker"]["spec"]
    assert scaler["scaleTargetRef"]["name"] in of(documents, scaler["scaleTargetRef"]["kind"])
    [trigger] = scaler["triggers"]
    page = (ROOT / "docs" / "observability.md").read_text()
    names = set(re.findall(r"midstream_\w+", trigger["metadata"]["query"]))
    assert names == {"midstream_queue_depth", "midstream_running_jobs"}
    assert all(f"`{name}`" in page for name in names)


def test_with_a_bucket_no_volume_of_captures_is_shared_and_the_bucket_is_reached(
    folder: Path,
) -> None:
    documents = rendered(folder, "bucket")
    assert "captures" not in of(documents, "PersistentVolumeClaim")
    users = {"api", "callbacks", "worker"}
    for name, pod, container in containers(documents):
        [*captures] = [volume for volume in pod["volumes"] if volume["name"] == "captures"]
        assert captures == ([{"name": "captures", "emptyDir": {}}] if name in users else [])
        variables = {
            variable["name"]: variable.get("value", "") for variable in container.get("env", [])
        }
        assert (f"{PREFIX}ARTIFACT_SECRET_KEY_FILE" in variables) == (name in users)
        if name in users:
            folder_of, _, key = variables[f"{PREFIX}ARTIFACT_SECRET_KEY_FILE"].rpartition("/")
            [mount] = [
                mount["name"]
                for mount in container["volumeMounts"]
                if mount["mountPath"] == folder_of
            ]
            [volume] = [volume for volume in pod["volumes"] if volume["name"] == mount]
            assert key in of(documents, "Secret")[volume["secret"]["secretName"]]["data"]
    rule = of(documents, "NetworkPolicy")["bucket"]["spec"]
    assert set(rule["podSelector"]["matchExpressions"][0]["values"]) == users
    assert [port["port"] for port in rule["egress"][0]["ports"]] == [443]
    [data] = [found["data"] for found in of(documents, "ConfigMap").values()]
    given = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in data.items()
        if "ARTIFACT" in name
    }
    assert Settings(**given, artifact_secret_key="x").artifacts.startswith("s3://")


@pytest.fixture(scope="module")
def extended(folder: Path) -> tuple[Document, ...]:
    """The overlay `cpu` with all components."""
    (folder / "all").mkdir(exist_ok=True)
    (folder / "all" / "kustomization.yaml").write_text(
        "namespace: midstream\nresources: [../cpu]\n"
        f"components: [{', '.join(f'../components/{name}' for name in COMPONENTS)}]\n"
    )
    return rendered(folder, "all")


def test_components_add_what_they_are_named_for(
    folder: Path, extended: tuple[Document, ...]
) -> None:
    assert {path.name for path in (folder / "components").iterdir()} == COMPONENTS.keys()
    kinds = {found["kind"] for found in extended}
    assert kinds - {found["kind"] for found in rendered(folder, "cpu")} == set().union(
        *COMPONENTS.values()
    )
    for document in extended:
        if document["kind"] not in FOREIGN:
            kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_the_ingress_leads_to_the_api_by_a_host_that_it_allows(
    extended: tuple[Document, ...],
) -> None:
    [rule] = of(extended, "Ingress")["api"]["spec"]["rules"]
    [data] = [found["data"] for found in of(extended, "ConfigMap").values()]
    assert rule["host"] in data[f"{PREFIX}ALLOWED_HOSTS"].split(",")
    assert data[f"{PREFIX}PUBLIC_URL"] == f"https://{rule['host']}"
    service = rule["http"]["paths"][0]["backend"]["service"]
    ports = of(extended, "Service")[service["name"]]["spec"]["ports"]
    assert service["port"]["name"] in [port["name"] for port in ports]


def test_monitors_cover_every_process_with_the_observe_key(
    extended: tuple[Document, ...],
) -> None:
    services = of(extended, "ServiceMonitor")["services"]["spec"]
    pods = of(extended, "PodMonitor")["processes"]["spec"]
    chosen = [set(found["selector"]["matchExpressions"][0]["values"]) for found in (services, pods)]
    assert set().union(*chosen) == of(extended, *WORKLOADS).keys() - {"redis"}
    [endpoint], [pod_endpoint] = services["endpoints"], pods["podMetricsEndpoints"]
    secret = endpoint["authorization"]["credentials"]
    assert secret["key"] == "observe_key"
    assert secret["key"] in of(extended, "Secret")[secret["name"]]["data"]
    for name in chosen[0]:
        ports = of(extended, "Service")[name]["spec"]["ports"]
        assert endpoint["port"] in [port["name"] for port in ports]
    for name, _, container in containers(extended):
        if name in chosen[1]:
            assert pod_endpoint["port"] in [port["name"] for port in container["ports"]]


def test_prometheus_finds_every_process_that_needs_no_key(documents: tuple[Document, ...]) -> None:
    for name, found in of(documents, *WORKLOADS).items():
        told = found["spec"]["template"]["metadata"].get("annotations", {})
        assert (told.get("prometheus.io/scrape") == "true") == (
            name not in ("api", "flower", "redis")
        ), name
        if told:
            [container] = found["spec"]["template"]["spec"]["containers"]
            assert int(told["prometheus.io/port"]) in [
                port["containerPort"] for port in container["ports"]
            ]


def test_images_have_the_version_of_the_package(documents: tuple[Document, ...]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = {
        container["image"]
        for name, _, container in containers(documents)
        if name != "redis"  # its version is its own
    }
    assert {image.rpartition(":")[2] for image in images} == {version}
    assert {image.partition(":")[0] for image in images} <= {
        "midstream-service",
        "midstream-worker-cpu",
        "midstream-worker-gpu",
    }
