{{/* Where the secret is mounted in every pod. */}}
{{- define "kvservice.tlsDir" -}}/etc/kvservice-tls{{- end -}}

{{/* Name of the Secret: the given one, else the chart's own. Empty with `allowPlaintext` alone. */}}
{{- define "kvservice.tlsSecret" -}}
{{- if .Values.tls.secretName -}}
{{- .Values.tls.secretName -}}
{{- else if not .Values.tls.allowPlaintext -}}
{{- include "kvservice.fullname" . }}-tls
{{- end -}}
{{- end -}}

{{/* Each of these is empty without a secret. The variable is for commands in the pod and for routers. */}}
{{- define "kvservice.tlsEnv" -}}
{{- if include "kvservice.tlsSecret" . -}}
- {name: KVSERVICE_TLS_DIR, value: {{ include "kvservice.tlsDir" . }}}
{{- end }}
{{- end -}}

{{- define "kvservice.tlsMount" -}}
{{- if include "kvservice.tlsSecret" . -}}
- {name: tls, mountPath: {{ include "kvservice.tlsDir" . }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvservice.tlsVolume" -}}
{{- with include "kvservice.tlsSecret" . -}}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* What a probe asks: dict "root" "port" "service". The kubelet's gRPC probe has no TLS, so with TLS the probe asks the metrics. */}}
{{- define "kvservice.health" -}}
{{- if include "kvservice.tlsSecret" .root -}}
httpGet: {path: /metrics, port: {{ .root.Values.cache.metricsPort }}}
{{- else -}}
grpc: {port: {{ .port }}, service: {{ .service }}}
{{- end -}}
{{- end -}}
