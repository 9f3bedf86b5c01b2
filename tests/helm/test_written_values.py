"""Values as people write them into a file: large numbers, names with dots, labels without quotes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, HELMS, NAMESPACE, PLAINTEXT, Object, find, helm, pod, refusal


def written(folder: Path, text: str, *, binary: str = "helm4", release: str = "rel") -> tuple[Object, ...]:
    """Objects of a release with this file of values, in plaintext."""
    path = folder / "values.yaml"
    path.write_text(text)
    done = helm(
        *(binary, "template", release, str(CHART), "--namespace", NAMESPACE, "--values", str(path), "--set", PLAINTEXT)
    )
    assert done.returncode == 0, done.stderr
    return tuple(item for item in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if item)


@pytest.mark.parametrize("binary", HELMS)
def test_a_large_user_id_stays_a_whole_number(binary: str, tmp_path: Path) -> None:
    """OpenShift's user ids have ten digits. Helm reads a number of a file as a float."""
    text = "security: {runAsUser: 1000680000, runAsGroup: 1000690000}\npriorityClass: {value: 1000000}"
    objects = written(tmp_path, text, binary=binary)
    shard = pod(objects, "shard")
    prepare, _ = shard.containers
    assert prepare["command"][-4:] == ["-o", "1000680000", "-g", "1000690000"], "install takes no 1.00068e+09"
    given = shard.spec["securityContext"]
    assert (given["runAsUser"], given["runAsGroup"], given["fsGroup"]) == (1000680000, 1000690000, 1000690000)
    assert repr(find(objects, "PriorityClass")["value"]) == "1000000"


# -- names ----

SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035, which Kubernetes asks of a Service
NAME_MAX = 63  # characters of a Service's name, and of a pod's label


@pytest.mark.parametrize(
    ("release", "text"),
    [
        ("cache.eu-1", "{}"),
        ("cache", "nameOverride: kv.v1"),
        ("a" * 39 + ".b", "{}"),
        ("a" * 53, "tiers: {memoryNodes: {enabled: true, nodeSelector: {pool: memory}}}"),
    ],
)
def test_names_of_any_release_are_names_of_services(release: str, text: str, tmp_path: Path) -> None:
    for mode in ("standalone", "ray"):
        objects = written(tmp_path, f"{text}\n" if mode == "standalone" else "mode: ray", release=release)
        names = [item["metadata"]["name"] for item in objects if item["kind"] in ("Service", "StatefulSet")]
        # A StatefulSet's pods have its name, a dash and the hash of its template in a label.
        assert all(SERVICE_NAME.fullmatch(name) and len(name) + 11 <= NAME_MAX for name in names), names
    assert "fullnameOverride" in refusal("fullnameOverride=a.b")
