"""`python -m tests.browser.picture OUT.webp`: docs/img/console.webp, three nodes with disks under load. Two minutes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from PIL import Image

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.browser.test_console import BROWSER, DISK_BYTES, SITE, running
from tests.conftest import ROOT

SECONDS = 75  # the charts show a minute
POOL_BYTES = 24 * MiB  # so that memory and disk together hold less than what is asked for


def picture(out: Path, folder: Path) -> None:
    disk = {"KVSERVICE_DISK_PATH": str(folder / "disk"), "KVSERVICE_DISK_BYTES": str(DISK_BYTES)}
    with LocalCluster(nodes=3, lookup_partitions=1, pool_bytes=POOL_BYTES, environment=disk) as cluster:
        environment = {**os.environ, "KVSERVICE_RUNTIME_DIR": str(cluster.root), "KVSERVICE_SERVICE": cluster.service}
        sockets = [cluster.socket(node) for node in cluster.nodes]
        load = [sys.executable, "-m", "tests.browser.load", "--plain", *sockets]
        console = [sys.executable, "-m", "kvservice", "console", "--port", "0"]
        with (
            running(*load, environment=environment, log=folder / "load"),
            running(*console, environment=environment, log=folder / "console"),
        ):
            said = partial(re.search, r"http://\S+")
            address = eventually(lambda: said((folder / "console").read_text()), "the console", 60)
            shot = folder / "console.png"
            subprocess.run(
                ["node", ROOT / "tests/browser/picture.mjs", address[0], shot, str(SECONDS)],
                env={**os.environ, "KVSERVICE_TEST_SITE": str(SITE), "KVSERVICE_TEST_BROWSER": BROWSER},
                check=True,
            )
    with Image.open(shot) as image:
        image.save(out, quality=85)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        picture(Path(sys.argv[1]).resolve(), Path(name))
