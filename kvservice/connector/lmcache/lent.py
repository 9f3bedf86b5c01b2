"""Memory that LMCache lends for a task, and may take back amid one.

It lends under locks of its own. They end early when an operator clears its level 1 by force, and when their time is
over. Then the memory is another object's at once, and nobody waits for the task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvservice.api.layout import Array
from kvservice.errors import Unavailable


@dataclass(frozen=True, slots=True)
class LentMemory:
    """The bytes of one object."""

    array: Array
    is_lent: Callable[[], bool]  # False before the memory is given away; any thread may call

    def copy_to(self, slot: Array) -> None:
        """Raises Unavailable when the slot may hold bytes of another object now."""
        np.copyto(slot, self.array, casting="no")
        if not self.is_lent():
            raise Unavailable("LMCache took the memory of an object back while it was stored")
