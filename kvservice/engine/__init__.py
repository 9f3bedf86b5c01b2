"""The reference engine: a small paged engine as code to read, to test and to measure with. It is not for serving.

    with ReferenceEngine.from_pretrained("models/SmolLM2-135M-Instruct", EngineOptions(mode="embedded")) as engine:
        print(engine.generate(["The lighthouse"], Sampling(max_tokens=16))[0].texts[0])

`blocks` and `schedule` decide and are pure. `paged` and `model` hold K/V and compute. `cache` drives the halves of the
connector, which vLLM's connector drives too. `loop` is the engine: import its classes from there.
"""
