"""What is left to do when the first copy makes the context unusable: a program of its own, started by `test_copies`."""

from __future__ import annotations

import re

from kvservice.copying.cuda.copies import CudaCopies
from kvservice.copying.cuda.device import CudaKV
from kvservice.copying.cuda.driver import Driver
from kvservice.copying.cuda.pinning import Pinning
from kvservice.core.segment.copy_runs import CopyTemplate
from kvservice.errors import TransferError
from tests.gpu.slots import SLOT, segment
from tests.stand_in_driver.engine import Cache

driver = Driver.of_device("0")
driver.bind()
cache = Cache(driver)
with segment() as made:
    pinning = Pinning(made.address, made.geometry, driver.pin, driver.unpin, driver.bind)
    pinning._thread.join(30)
    copies = CudaCopies(driver, cache.address, made.address, pinning, None)
    try:
        copies.store(CopyTemplate(cache.layout, SLOT).expand([0], [0]))
    except TransferError:
        found = re.search("CUDA error (.*)\\)", driver.fatal)
        print("fatal:", found and found[1])
    copies.close()
    CudaKV(driver, cache.base, 0, [1]).close()
    print("closed")
    pinning.undo()
    print(pinning.unpin_failures, "piece not unpinned")
