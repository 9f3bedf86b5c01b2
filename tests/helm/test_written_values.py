"""Values as people write them into a file: large numbers, names with dots, labels without quotes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, HELMS, NAMESPACE, PLAINTEXT, Object, find, helm, pod


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
