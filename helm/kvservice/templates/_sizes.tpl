{{/* "2Ti", "16Gi" or "512Mi" as a number of MiB. */}}
{{- define "kvservice.mib" -}}
{{- if hasSuffix "Ti" . -}}
{{- mul 1048576 (trimSuffix "Ti" . | int) -}}
{{- else if hasSuffix "Gi" . -}}
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

{{/* /dev/shm of the head: without a shard only Ray's object store. */}}
{{- define "kvservice.headShm" -}}
{{- if .Values.ray.head.shard -}}
{{- include "kvservice.rayShm" . -}}
{{- else -}}
{{- include "kvservice.sum" (list .Values.ray.objectStore) -}}
{{- end -}}
{{- end -}}

{{/* Most copy workers of one pod: dict "root" $ "group" (worker group). */}}
{{- define "kvservice.copyWorkers" -}}
{{- $wanted := toString .root.Values.ray.copyWorkers -}}
{{- $gpus := .group.gpus | default 0 | int -}}
{{- if eq $wanted "off" -}}0{{- else if eq $wanted "auto" -}}{{ $gpus }}{{- else -}}{{ min (int $wanted) (max $gpus 1) }}{{- end -}}
{{- end -}}

{{/* Most copy workers of any pod. */}}
{{- define "kvservice.copyWorkersMost" -}}
{{- $most := 0 -}}
{{- range .Values.ray.workerGroups -}}
{{- $most = max $most (include "kvservice.copyWorkers" (dict "root" $ "group" .) | int) -}}
{{- end -}}
{{- $most -}}
{{- end -}}

{{/* Seconds from the start of preStop to SIGKILL. */}}
{{- define "kvservice.terminationSeconds" -}}
{{- add (int .Values.cache.drainSeconds) (int .Values.cache.graceSeconds) 15 -}}
{{- end -}}

{{/* Periods of 5 s that a shard may take to start: ten minutes, and two seconds for each GiB of the pool. The kernel needs
     about a second to clear one. */}}
{{- define "kvservice.startPeriods" -}}
{{- add 120 (div (mul 2 (include "kvservice.mib" . | int)) (mul 5 1024)) -}}
{{- end -}}
