{{/* The settings file that shards, lookup partitions and `kvservice up` read. */}}
{{- define "kvservice.toml" -}}
service = {{ .Values.cache.service | quote }}
pool_bytes = {{ printf "%sB" .Values.cache.pool | quote }}
mirror_bytes = {{ printf "%sB" .Values.cache.mirror | quote }}
{{- with .Values.cache.slab }}
slab_bytes = {{ printf "%sB" . | quote }}
{{- end }}
eviction = {{ .Values.cache.eviction | quote }}
{{- with .Values.tiers.disk }}
{{- if .volume }}
disk_path = {{ .path | quote }}
{{- with include "kvservice.diskSize" $ }}
disk_bytes = {{ printf "%sB" . | quote }}
{{- end }}
disk_write = {{ .write | quote }}
disk_codec = {{ .codec | quote }}
disk_io = {{ .io | quote }}
{{- end }}
{{- end }}
{{- with .Values.tiers.objects }}
{{- if .url }}
objects_url = {{ .url | quote }}
objects_write = {{ .write | quote }}
objects_codec = {{ .codec | quote }}
objects_namespace = {{ .namespace | quote }}
{{- end }}
{{- end }}
{{- if .Values.tiers.codecKeySecretName }}
codec_key_file = "{{ include "kvservice.codecKeyDir" . }}/codec.key"
{{- end }}
max_age_seconds = {{ .Values.tiers.maxAgeSeconds }}
spill = {{ .Values.tiers.spill | quote }}
transport = {{ .Values.cache.transport | quote }}
lease_seconds = {{ .Values.cache.leaseSeconds }}
heartbeat_seconds = {{ .Values.cache.heartbeatSeconds }}
metrics_port = {{ .Values.cache.metricsPort }}
lookup_partitions = {{ .Values.lookup.partitions }}
{{- if include "kvservice.tlsSecret" . }}
tls_dir = "{{ include "kvservice.tlsDir" . }}"
{{- else }}
allow_plaintext = true
{{- end }}
{{- if .Values.tenants.secretName }}
tenants_file = "{{ include "kvservice.tenantsDir" . }}/tenants.json"
{{- end }}
{{- if eq .Values.mode "ray" }}
lookup_port = {{ .Values.lookup.port }}
copy_workers = {{ .Values.ray.copyWorkers | quote }}
head_shard = {{ .Values.ray.head.shard }}
{{- else }}
lookup = {{ include "kvservice.lookupAddresses" . | quote }}
runtime_dir = {{ .Values.shard.hostRuntimeDir | quote }}
{{- end }}
{{- end -}}

{{/* The JSON that makes a vLLM engine use the cache. */}}
{{- define "kvservice.transferConfig" -}}
{"kv_connector":"KVServiceConnector","kv_connector_module_path":"kvservice.connector.vllm","kv_role":"kv_both","kv_connector_extra_config":{"mode":"service","service":{{ .Values.cache.service | quote }}}}
{{- end -}}

{{/* Fails when two parts of one pod would listen at the same port: the later one serves nothing there. */}}
{{- define "kvservice.checkPorts" -}}
{{- $metrics := int .Values.cache.metricsPort -}}
{{- $lookup := int .Values.lookup.port -}}
{{- if eq .Values.mode "standalone" -}}
{{- range $name, $port := dict "lookup.port" $lookup "shard.port" (int .Values.shard.port) -}}
{{- if eq $port $metrics -}}
{{- fail (printf "cache.metricsPort is %d, as %s: choose another port" $metrics $name) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $taken := dict "6379" "Ray's control state" "8000" "Serve" "8080" "Ray's metrics" "8265" "Ray's dashboard" "10001" "Ray's client" "52365" "Ray's agent" -}}
{{- range $index := until (add1 (include "kvservice.copyWorkersMost" .) | int) -}}
{{- $port := add $metrics $index | toString -}}
{{- with get $taken $port -}}
{{- fail (printf "cache.metricsPort takes the port %s of %s: choose another one" $port .) -}}
{{- end -}}
{{- $_ := set $taken $port "the metrics" -}}
{{- end -}}
{{- range $index := until (int .Values.lookup.partitions) -}}
{{- $port := add $lookup $index | toString -}}
{{- with get $taken $port -}}
{{- fail (printf "lookup.port takes the port %s of %s for partition %d: choose another one" $port . $index) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
