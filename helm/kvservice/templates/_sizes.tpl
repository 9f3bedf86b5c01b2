{{/* "16Gi" or "512Mi" as a number of MiB. */}}
{{- define "kvservice.mib" -}}
{{- if hasSuffix "Gi" . -}}
{{- mul 1024 (trimSuffix "Gi" . | int) -}}
{{- else -}}
{{- trimSuffix "Mi" . | int -}}
{{- end -}}
{{- end -}}

{{/* Sum of sizes in MiB, as a quantity: list of sizes. */}}
{{- define "kvservice.sum" -}}
{{- $total := 0 -}}
{{- range . -}}{{- $total = add $total (include "kvservice.mib" . | int) -}}{{- end -}}
{{- printf "%dMi" $total -}}
{{- end -}}

{{/* /dev/shm of a Ray pod: the pool, the mirror, Ray's object store, what engines use. */}}
{{- define "kvservice.rayShm" -}}
{{- include "kvservice.sum" (list .Values.cache.pool .Values.cache.mirror .Values.ray.objectStore .Values.ray.engineShm) -}}
{{- end -}}

{{/* Seconds from the start of preStop to SIGKILL. */}}
{{- define "kvservice.terminationSeconds" -}}
{{- add (int .Values.cache.drainSeconds) (int .Values.cache.graceSeconds) 15 -}}
{{- end -}}
