{{/* Where the secret is mounted in every pod. */}}
{{- define "kvservice.tlsDir" -}}/etc/kvservice-tls{{- end -}}

{{/* Each of these is nothing without a secret. The variable is for commands in the pod and for routers. */}}
{{- define "kvservice.tlsEnv" -}}
{{- if .Values.tls.secretName -}}
- {name: KVSERVICE_TLS_DIR, value: {{ include "kvservice.tlsDir" . }}}
{{- end }}
{{- end -}}

{{- define "kvservice.tlsMount" -}}
{{- if .Values.tls.secretName -}}
- {name: tls, mountPath: {{ include "kvservice.tlsDir" . }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvservice.tlsVolume" -}}
{{- with .Values.tls.secretName -}}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* What a probe asks: dict "root" "port" "service". The kubelet's gRPC speaks no TLS, so with it the metrics are asked. */}}
{{- define "kvservice.health" -}}
{{- if .root.Values.tls.secretName -}}
httpGet: {path: /metrics, port: {{ .root.Values.cache.metricsPort }}}
{{- else -}}
grpc: {port: {{ .port }}, service: {{ .service }}}
{{- end -}}
{{- end -}}
