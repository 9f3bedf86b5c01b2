"""Tells Ray Serve's LLM deployments that nothing is to be downloaded, so that no node starts a process to check."""

from __future__ import annotations

from ray.llm._internal.common.callbacks.base import CallbackBase


class ModelIsHere(CallbackBase):
    """Use it for a model in a folder that every node sees."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False
