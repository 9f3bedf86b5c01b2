"""Run by the interpreter of .venv-helm: a JSON list of manifests in, a JSON list of findings out.

Built-in kinds go to kubernetes-validate, strictly; the kinds of KubeRay and the Prometheus operator to the schemas of
their CRDs (crds/, without their descriptions and CEL rules), those of cert-manager to the schemas of models made of its
CRDs. All are closed: a field that the schema does not know is a finding.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-not-found]
from cloudcoil.models.cert_manager import v1 as cert_manager  # type: ignore[import-not-found]

VERSIONS = ("1.29", "1.37")


def closed(schema: Any) -> Any:
    if isinstance(schema, dict):
        open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        if schema.get("type") == "object" and "properties" in schema and not open_ended:
            schema["additionalProperties"] = False
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("type", None)
        for value in schema.values():
            closed(value)
    elif isinstance(schema, list):
        for value in schema:
            closed(value)
    return schema


def operators() -> dict[tuple[str, str], Any]:
    found = {}
    for path in (Path(__file__).parent / "crds").glob("*.json.gz"):
        definition = json.loads(gzip.decompress(path.read_bytes()))
        schema = closed(definition["schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        validator = jsonschema.Draft7Validator(schema)
        found[definition["apiVersion"], definition["kind"]] = validator
    for model in (cert_manager.Certificate, cert_manager.Issuer):
        schema = closed(model.model_json_schema())
        schema["properties"]["metadata"] = {"type": "object"}
        found["cert-manager.io/v1", model.__name__] = jsonschema.Draft202012Validator(schema)
    return found


def findings(manifest: dict[str, Any], validators: dict[tuple[str, str], Any]) -> list[str]:
    what = f"{manifest.get('kind')}/{manifest.get('metadata', {}).get('name')}"
    validator = validators.get((manifest["apiVersion"], manifest["kind"]))
    if validator is not None:
        # Of a value that none of several schemas takes, the finding of the schema that it was nearest to.
        nearest = [jsonschema.exceptions.best_match([error]) for error in validator.iter_errors(manifest)]
        return [f"{what}: {error.json_path}: {error.message[:200]}" for error in nearest]
    found = []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{what} ({version}): {'.'.join(map(str, error.path))}: {error.message[:200]}")
        except kubernetes_validate.SchemaNotFoundError:
            found.append(f"{what}: no schema for {manifest['apiVersion']} {manifest['kind']}")
    return found


if __name__ == "__main__":
    known = operators()
    json.dump([line for manifest in json.load(sys.stdin) for line in findings(manifest, known)], sys.stdout)
