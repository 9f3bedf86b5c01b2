{{/* Security context of a pod that meets the restricted standard. */}}
{{- define "kvservice.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.security.runAsUser }}
runAsGroup: {{ .Values.security.runAsGroup }}
fsGroup: {{ .Values.security.runAsGroup }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Security context of a container; dict "root" $ "rdma" bool. */}}
{{- define "kvservice.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .root.Values.security.readOnlyRootFilesystem }}
capabilities:
  drop: [ALL]
  {{- if .rdma }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{/* Requests and limits; dict "root" $ "cpu" "memory" "extra" "gpus" "devices". The memory limit is the given memory. */}}
{{- define "kvservice.resources" -}}
{{- $values := .root.Values -}}
{{- $fixed := dict -}}
{{- range $name, $amount := .extra }}{{- $_ := set $fixed $name $amount }}{{- end }}
{{- if .gpus }}{{- $_ := set $fixed "nvidia.com/gpu" .gpus }}{{- end }}
{{- if and .devices $values.rdma.enabled }}
{{- range $name, $amount := $values.rdma.resources }}{{- $_ := set $fixed $name $amount }}{{- end }}
{{- end }}
{{- if and .devices $values.hugepages.enabled }}
{{- $_ := set $fixed (printf "hugepages-%s" $values.hugepages.size) $values.hugepages.amount }}
{{- end -}}
requests:
  cpu: {{ .cpu | quote }}
  memory: {{ .memory }}
  {{- range $name, $amount := $fixed }}
  {{ $name }}: {{ $amount | quote }}
  {{- end }}
limits:
  memory: {{ .memory }}
  {{- range $name, $amount := $fixed }}
  {{ $name }}: {{ $amount | quote }}
  {{- end }}
{{- end -}}

{{/* Where a pod may run; dict of nodeSelector, tolerations, affinity, priorityClassName. */}}
{{- define "kvservice.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Spread over failure domains; dict "constraints" "labels" (text). */}}
{{- define "kvservice.spread" -}}
{{- $labels := .labels -}}
{{- with .constraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml . | nindent 4 }}
    {{- if not (hasKey . "labelSelector") }}
    labelSelector:
      matchLabels: {{- $labels | nindent 8 }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "kvservice.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
