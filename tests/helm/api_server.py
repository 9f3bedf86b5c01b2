"""What the chart renders when Helm can ask a cluster, with a stand-in for the API server: it knows the namespace
`default` or that of the release, and at most one Secret. Helm's own client asks it, as it asks a real one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

from tests.helm.chart import CHART, NAMESPACE, RELEASE, Object, helm

# Group and version -> the kinds that the chart makes or asks for.
KINDS = {
    "v1": ("Namespace", "Secret", "ServiceAccount", "ConfigMap", "Service", "Pod"),
    "apps/v1": ("DaemonSet", "StatefulSet"),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "scheduling.k8s.io/v1": ("PriorityClass",),
}


def installed(
    values: str, *settings: str, kept: Object | None = None, of_namespace: bool = False
) -> tuple[Object, ...]:
    """What Helm renders in a cluster that has the Secret `kept`, if any. `of_namespace`: for a user with rights in the
    release's namespace alone, which exists then. Else the namespace is made by the installation."""
    arguments = [word for setting in settings for word in ("--set", setting)]
    with _api_server(kept, of_namespace) as address:
        done = helm(
            *("helm4", "template", RELEASE, str(CHART), "--dry-run=server", "--kube-apiserver", address),
            *("--disable-openapi-validation", "--no-hooks"),
            *("--namespace", NAMESPACE, "--values", str(CHART / "ci" / values), *arguments),
        )
    assert done.returncode == 0, done.stderr
    return tuple(item for item in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if item)


def _group(name: str) -> dict[str, Any]:
    version = {"groupVersion": name, "version": "v1"}
    return {"name": name.partition("/")[0], "versions": [version], "preferredVersion": version}


def _resources(name: str) -> dict[str, Any]:
    def resource(kind: str) -> dict[str, Any]:
        plural = f"{kind.lower()}es" if kind.endswith("s") else f"{kind.lower().removesuffix('y')}s"
        plural = "networkpolicies" if kind == "NetworkPolicy" else plural
        return {
            "name": plural,
            "kind": kind,
            "namespaced": kind not in ("Namespace", "PriorityClass"),
            "verbs": ["get"],
        }

    return {"kind": "APIResourceList", "groupVersion": name, "resources": [resource(kind) for kind in KINDS[name]]}


@contextmanager
def _api_server(kept: Object | None, of_namespace: bool) -> Iterator[str]:
    known: dict[str, Any] = {
        "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [_group(name) for name in KINDS if "/" in name],
        },
        **{f"/api{'s' if '/' in name else ''}/{name}": _resources(name) for name in KINDS},
    }
    if of_namespace:
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        known[f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"] = account
    else:
        default = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}
        known["/api/v1/namespaces/default"] = default
    if kept is not None:
        owner = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
        theirs = {**kept, "metadata": {**kept["metadata"], "annotations": owner}}
        known[f"/api/v1/namespaces/{NAMESPACE}/secrets/{kept['metadata']['name']}"] = theirs

    def refusal(path: str) -> tuple[int, str]:
        of_others = of_namespace and f"/namespaces/{NAMESPACE}/" not in path
        return (403, "Forbidden") if of_others else (404, "NotFound")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            code, answer = 200, known.get(path)
            if answer is None:
                code, reason = refusal(path)
                failure = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
                answer = {**failure, "reason": reason, "code": code, "message": f"{path}: {reason}"}
            body = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
