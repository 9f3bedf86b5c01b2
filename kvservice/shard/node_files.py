"""The files of one cache shard: in its node's runtime directory, and its segment. Calls block for a moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from kvservice import discovery
from kvservice.memory.segment import segment_path
from kvservice.shard.server_config import ShardServerConfig


class NodeFiles:
    def __init__(self, config: ShardServerConfig) -> None:
        settings = config.settings
        self._place = (settings.service, config.node_id, settings.runtime_root)
        self.segment = segment_path(settings.service, config.node_id, config.segment_dir)

    @property
    def directory(self) -> Path:
        """Raises ConfigError for a user without a home directory."""
        return discovery.node_directory(*self._place)

    @property
    def socket(self) -> str:
        """Of engines. Raises ConfigError when the path is too long."""
        return discovery.shard_socket(*self._place)

    @property
    def rpc_socket(self) -> str:
        """Of commands. Raises ConfigError when the path is too long."""
        return discovery.rpc_socket(*self._place)

    def there(self) -> set[Path]:
        """Which of our files there are, also as links to nothing. In a folder of another user it sees none."""
        return {path for path in self._own() if os.path.lexists(path)}

    def lacks_some(self) -> bool:
        """Whether something has removed a file that a running shard keeps."""
        names = (discovery.RECORD_NAME, discovery.SECRET_NAME, discovery.EPOCH_NAME)
        return not all((self.directory / name).exists() for name in names)

    def remove(self, *, keep_memory: bool = False) -> None:
        """Remove them, but with `keep_memory` what the next start of this memory needs: marks stay then, because this
        node tells them to nodes that were away."""
        kept: set[Path] = set()
        if keep_memory:
            discovery.name_kept_memory(self.directory, self.segment)
            kept = {self.directory / name for name in discovery.KEPT_NAMES}
        self._remove(self._own() - kept)

    def remove_new(self, before: set[Path]) -> None:
        """Remove those that were not there before."""
        self._remove(self._own() - before)

    def _own(self) -> set[Path]:
        """All of them in the directory, beside the record."""
        return {self.directory / name for name in discovery.OWN_NAMES}

    def _remove(self, files: Iterable[Path]) -> None:
        for path in files:
            with contextlib.suppress(NotADirectoryError, PermissionError):  # then it is none of ours
                path.unlink(missing_ok=True)
        for empty in (self.directory, self.directory.parent):
            with contextlib.suppress(OSError):  # rmdir fails while there are other files; those stay
                empty.rmdir()
