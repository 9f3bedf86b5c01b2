"""The page on Ray Serve, "In an app you have": an app of `ray.serve.llm` itself, deployed with what stands there."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("ray.serve.llm")

from openai import OpenAI

from examples.demo.serve import BLOCK_TOKENS, MODEL, model_config, wait_running
from kvservice.serve.section import parse_section
from kvservice.serve.service import ensure_service
from kvservice.testing.eventually import eventually
from tests.serve.serving import SERVICE, Serving, arguments, deploy_file, known_keys, serving

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
SECTION = re.compile(r"## In an app you have\n.*?```python\n(.*?)```", re.DOTALL)
PROMPTS = 6
TEXT = "Log number {}. The pilot of the supply boat knew every rock by its name and told the keeper which had moved. "


def config_of_page(model: Path) -> dict[str, Any]:
    """The LLMConfig of the page, with the model, the service and the machine of the tests."""
    found = SECTION.search(PAGE.read_text())
    assert found is not None
    code = found[1].replace("from ray.serve.llm import LLMConfig", "LLMConfig = dict")
    names: dict[str, Any] = {}
    exec(code.replace("meta-llama/Llama-3.1-8B-Instruct", str(model)).replace('"default"', f'"{SERVICE}"'), names)
    page = names["llama"]
    base = model_config(str(model), page["deployment_config"]["request_router_config"], max_num_batched_tokens=512)
    base["engine_kwargs"] |= page["engine_kwargs"]
    base["placement_group_config"] = {"bundles": [{"CPU": 1}]}
    return base


@pytest.fixture
def own(shallow_model: Path) -> Iterator[Serving]:
    with serving(1) as found:
        assert ensure_service(parse_section(arguments()["kvservice"])).started
        given = {"llm_configs": [config_of_page(shallow_model)]}
        given["ingress_deployment_config"] = arguments()["ingress_deployment_config"]
        deploy_file(
            {"name": "own", "route_prefix": "/own", "import_path": "ray.serve.llm:build_openai_app", "args": given}
        )
        wait_running("own", 600.0)
        yield found


def decisions() -> Counter[str]:
    """What Ray's metrics have of the router, by reason."""
    found: Counter[str] = Counter()
    (address,) = (f"http://127.0.0.1:{node['MetricsExportPort']}/metrics" for node in ray.nodes())
    with urllib.request.urlopen(address, timeout=10) as answer:
        for metric in text_string_to_metric_families(answer.read().decode()):
            for sample in metric.samples:
                if sample.name == "ray_kvservice_router_decisions_total":
                    found[sample.labels["reason"]] += int(sample.value)
    return found


def test_an_app_of_ray_serve_llm_stores_hits_and_is_routed(own: Serving) -> None:
    with OpenAI(base_url=f"{own.base_url}/own/v1", api_key="none", timeout=90, max_retries=0) as api:

        def ask(number: int) -> Any:
            return api.completions.create(model=MODEL, prompt=TEXT.format(number) * 12, max_tokens=4, temperature=0)

        first = [ask(number) for number in range(PROMPTS)]
        blocks = sum(answer.usage.prompt_tokens // BLOCK_TOKENS for answer in first)
        eventually(lambda: known_keys() >= blocks, "the prompts' blocks in the directory")
        again = [ask(number) for number in range(PROMPTS)]
    for one, other in zip(first, again, strict=True):
        assert other.usage.prompt_tokens_details.cached_tokens == one.usage.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        assert other.choices[0].text == one.choices[0].text
    eventually(lambda: decisions().total() >= 2 * PROMPTS, "the router's decisions in Ray's metrics", 60)
    assert decisions()["hit"] == PROMPTS
