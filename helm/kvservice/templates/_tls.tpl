{{/* Where the secret is mounted in every pod. */}}
{{- define "kvservice.tlsDir" -}}/etc/kvservice-tls{{- end -}}

{{/* Name of the Secret: the given one, else cert-manager's or the chart's own. Empty with `allowPlaintext` alone. */}}
{{- define "kvservice.tlsSecret" -}}
{{- if .Values.tls.secretName -}}
{{- .Values.tls.secretName -}}
{{- else if or .Values.tls.certManager.enabled (not .Values.tls.allowPlaintext) -}}
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

