"""The reference engine in thirty lines: the same questions twice, the second time from the cache.

    python examples/reference_engine.py models/SmolLM2-135M-Instruct

The pool is one of this process, or the service that runs on this machine. The engine is for reading, testing and
measuring, and not for serving.
"""

from __future__ import annotations

import sys

from kvservice.engine.loop import ReferenceEngine
from kvservice.engine.options import EngineOptions
from kvservice.engine.sampling import Sampling

STORY = "The keeper of the lighthouse climbed the stairs every evening, lit the lamp and looked out over the sea. " * 8
QUESTIONS = ("Who lit the lamp?", "What did he look at?")


def main(folder: str) -> None:
    options = EngineOptions(device_memory="256MiB", memory="256MiB")
    with ReferenceEngine.from_pretrained(folder, options, dtype="float32") as engine:
        for turn in ("cold", "warm"):
            for question in QUESTIONS:
                (output,) = engine.generate([f"{STORY}\n{question}\n"], Sampling(max_tokens=12))
                print(
                    f"{turn}: {question} {len(output.prompt)} tokens, {output.local_tokens} in the engine, "
                    f"{output.loaded_tokens} from the pool: {output.texts[0]!r}"
                )
            engine.forget()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder of a model, for example models/SmolLM2-135M-Instruct, which `make model` makes")
    main(sys.argv[1])
