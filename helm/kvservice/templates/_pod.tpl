{{/* Security context of a pod that meets the restricted standard. A number in a file of values is a float to Helm, which
     would write a million as 1e+06, so large numbers are made whole. */}}
{{- define "kvservice.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.security.runAsUser }}
runAsGroup: {{ int64 .Values.security.runAsGroup }}
fsGroup: {{ int64 .Values.security.runAsGroup }}
seccompProfile: {type: RuntimeDefault}
{{- with .Values.security.seLinuxOptions }}
seLinuxOptions: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Security context of a container. */}}
{{- define "kvservice.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .Values.security.readOnlyRootFilesystem }}
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Security context of a shard. A user other than root holds a capability only through a file that has it, and a
     process whose privileges may not grow need not get it from there. */}}
{{- define "kvservice.shardSecurity" -}}
{{- if and .Values.rdma.enabled .Values.rdma.lockMemory -}}
allowPrivilegeEscalation: true
readOnlyRootFilesystem: {{ .Values.security.readOnlyRootFilesystem }}
capabilities: {drop: [ALL], add: [IPC_LOCK]}
{{- else -}}
{{- include "kvservice.containerSecurity" . -}}
{{- end -}}
{{- end -}}

{{/* Environment of whatever runs a shard: which networks the transport uses. */}}
{{- define "kvservice.transferEnv" -}}
{{- if .Values.rdma.enabled }}
{{- with .Values.rdma.env }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- with .Values.cache.transferDevices }}
- {name: UCX_NET_DEVICES, value: {{ . | quote }}}
{{- end }}
{{- with .Values.cache.transferPorts }}
- {name: UCX_TCP_PORT_RANGE, value: {{ . | quote }}}
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

{{/* Where a pod may run: dict "root" $ "own" (nodeSelector, tolerations, affinity, priorityClassName of this kind of pod).
     What the whole chart selects and tolerates counts for every pod. */}}
{{- define "kvservice.placement" -}}
{{- with merge (dict) (.own.nodeSelector | default dict) .root.Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat .root.Values.tolerations (.own.tolerations | default list) }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.priorityClassName | default (include "kvservice.priorityClass" .root) }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* The chart's PriorityClass. Its name is the cluster's, so the namespace is in it. Empty where there is none. */}}
{{- define "kvservice.priorityClass" -}}
{{- if and .Values.priorityClass.create (eq .Values.mode "standalone") -}}
{{- printf "%s-%s" .Release.Namespace (include "kvservice.fullname" .) -}}
{{- end -}}
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

{{/* A folder of the node that prepare-host gives to the shards' user: dict "value" its name in the values, "path". One that
     the system needs would be closed to everybody else. */}}
{{- define "kvservice.ownFolder" -}}
{{- $system := list "/" "/bin" "/boot" "/dev" "/dev/shm" "/etc" "/home" "/lib" "/lib64" "/media" "/mnt" "/opt" "/proc" "/root" "/run" "/run/lock" "/run/user" "/sbin" "/srv" "/sys" "/tmp" "/usr" "/usr/local" "/var" "/var/cache" "/var/lib" "/var/lib/kubelet" "/var/log" "/var/run" "/var/tmp" -}}
{{- if has (clean .path) $system -}}
{{- fail (printf "%s: %s is a folder of the node's system, and prepare-host would close it to everybody else: name a folder in it, such as %s/kvservice" .value .path (clean .path | trimSuffix "/")) -}}
{{- end -}}
{{- .path -}}
{{- end -}}
