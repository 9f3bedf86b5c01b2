{{/* Where the two secrets are mounted: the tenants file in the pods of shards, an engine's token in the pods of engines. */}}
{{- define "kvservice.tenantsDir" -}}/etc/kvservice-tenants{{- end -}}
{{- define "kvservice.tokenDir" -}}/etc/kvservice-token{{- end -}}

{{/* Each of these is empty without its secret. */}}
{{- define "kvservice.tenantsMount" -}}
{{- if .Values.tenants.secretName -}}
- {name: tenants, mountPath: {{ include "kvservice.tenantsDir" . }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvservice.tenantsVolume" -}}
{{- with .Values.tenants.secretName -}}
- name: tenants
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- define "kvservice.tokenEnv" -}}
{{- if .Values.tenants.tokenSecretName -}}
- {name: KVSERVICE_TOKEN_FILE, value: {{ include "kvservice.tokenDir" . }}/token}
{{- end }}
{{- end -}}

{{- define "kvservice.tokenMount" -}}
{{- if .Values.tenants.tokenSecretName -}}
- {name: token, mountPath: {{ include "kvservice.tokenDir" . }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvservice.tokenVolume" -}}
{{- with .Values.tenants.tokenSecretName -}}
- name: token
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}
