"""Runs the containers of a rendered pod in the image's root file system: a mount namespace, chroot, and the user, the
groups, the capabilities and the read-only root that the pod asks for.

What differs from a container, and only this: processes and network are the machine's own, there is no cgroup and no
seccomp, and cluster names become addresses of loopback.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helm.chart import Object, Pod, find
from tests.helm.pod_process import ContainerProcess, Place
from tests.helm.test_images_and_docs import instructions
from tests.integration.certificates import write

DEVICES = ("null", "zero", "random", "urandom")


def image_environment(dockerfile: Path) -> dict[str, str]:
    """The variables that the last stage sets."""
    (words,) = (words for name, words in instructions(dockerfile)[-6:] if name == "ENV")
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {name: value.replace("$PATH", path) for name, _, value in map(lambda w: w.partition("="), words.split())}


class Node:
    """A machine that runs pods: its folders for hostPath volumes, and the volumes of its pods."""

    def __init__(self, name: str, rootfs: Path) -> None:
        self.name, self.rootfs = name, rootfs
        self.root = Path(tempfile.mkdtemp(prefix=f"kvn-{name}-"))
        self.memory = Path(tempfile.mkdtemp(prefix=f"kvn-{name}-", dir="/dev/shm"))

    def volumes(self, pod: Pod, objects: tuple[Object, ...], place: Place) -> dict[str, Path]:
        """Name of each volume of the pod -> its folder, as the kubelet makes it."""
        group = pod.spec["securityContext"]["fsGroup"]
        found = {}
        for volume in pod.spec["volumes"]:
            if "hostPath" in volume:
                path = volume["hostPath"]["path"]
                target = (self.memory if path.startswith("/dev/shm/") else self.root) / path.strip("/").replace(
                    "/", "-"
                )
                target.mkdir(exist_ok=True)  # the kubelet's DirectoryOrCreate: root's, 0755
            else:
                target = Path(tempfile.mkdtemp(dir=self.root))
                if "configMap" in volume:
                    for name, text in find(objects, "ConfigMap", volume["configMap"]["name"])["data"].items():
                        target.joinpath(name).write_text(place.local(text))
                elif "secret" in volume:
                    write(target)
                    for file in target.iterdir():
                        os.chown(file, 0, group)
                        file.chmod(volume["secret"]["defaultMode"])
                os.chown(target, 0, group)
                target.chmod(0o2777 if "emptyDir" in volume else 0o2750)
            found[volume["name"]] = target
        return found

    def close(self) -> None:
        shutil.rmtree(self.root)
        shutil.rmtree(self.memory)


class RootfsProcess(ContainerProcess):
    """One container of a pod on a node."""

    def __init__(
        self, pod: Pod, container: Mapping[str, Any], node: Node, place: Place, volumes: Mapping[str, Path], log: Path
    ) -> None:
        self._node, self._volumes = node, volumes
        self._security = {**pod.spec["securityContext"], **container["securityContext"]}
        self._image = image_environment(Path(__file__).parents[2] / "docker" / "shard.Dockerfile")
        super().__init__(container, place, log)

    def wrapped(self, words: list[str]) -> list[str]:
        return ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-euc", self._script(), "sh", *words]

    def _environment(self) -> dict[str, str]:
        given = super()._environment()
        del given["PATH"], given["PYTHONPATH"]  # of the tests' own environment
        return {**self._image, **given}

    def _script(self) -> str:
        root = shlex.quote(str(self._node.rootfs))
        lines = [f"mount --bind {root} {root}", f"cd {root}", "mount --rbind /proc proc", "mount --rbind /sys sys"]
        lines += ["mount -t tmpfs tmpfs dev", "mkdir dev/shm", "mount -t tmpfs -o size=64m,mode=1777 tmpfs dev/shm"]
        for device in DEVICES:
            lines += [f"touch dev/{device}", f"mount --bind /dev/{device} dev/{device}"]
        for mount in self.container.get("volumeMounts", []):
            target = shlex.quote(mount["mountPath"].lstrip("/"))
            lines += [f"mkdir -p {target}", f"mount --bind {shlex.quote(str(self._volumes[mount['name']]))} {target}"]
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {target}")
        if self._security["readOnlyRootFilesystem"]:
            lines.append(f"mount -o remount,bind,ro {root}")
        return "\n".join([*lines, f'exec chroot . /usr/bin/setpriv {self._privileges()} "$@"'])

    def _privileges(self) -> str:
        added = "".join(f",+{name.lower()}" for name in self._security["capabilities"].get("add", []))
        assert self._security["capabilities"]["drop"] == ["ALL"]
        words = [f"--reuid={self._security['runAsUser']}", f"--regid={self._security['runAsGroup']}"]
        words += [f"--groups={self._security['fsGroup']}", f"--bounding-set=-all{added}", "--inh-caps=-all"]
        return " ".join(words if self._security["allowPrivilegeEscalation"] else [*words, "--no-new-privs"])
