{{/* Prefix of the names of objects. A release may have dots in its name, and a Service may not. */}}
{{- define "kvservice.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Release.Name -}}
{{- if .Values.fullnameOverride -}}
{{- $full = .Values.fullnameOverride -}}
{{- else if not (contains $name .Release.Name) -}}
{{- $full = printf "%s-%s" .Release.Name $name -}}
{{- end -}}
{{- $full | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that select pods. They never change in an upgrade. */}}
{{- define "kvservice.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of every object. */}}
{{- define "kvservice.labels" -}}
{{ include "kvservice.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of a pod: dict "root" $ "component" "shard". */}}
{{- define "kvservice.podLabels" -}}
{{ include "kvservice.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels that select Ray pods. The operator labels them too, and sets app.kubernetes.io/name itself. */}}
{{- define "kvservice.raySelector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
kvservice/ray-node: "true"
{{- end -}}

{{/* Labels of a Ray pod: dict "root" $ "component" "worker". */}}
{{- define "kvservice.rayLabels" -}}
{{ include "kvservice.raySelector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvservice.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "kvservice.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "kvservice.fullname" . -}}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{/* host:port of every lookup partition, in partition order, separated by commas. */}}
{{- define "kvservice.lookupAddresses" -}}
{{- $name := printf "%s-lookup" (include "kvservice.fullname" .) -}}
{{- $found := list -}}
{{- range $i := until (int .Values.lookup.partitions) -}}
{{- $found = append $found (printf "dns:///%s-%d.%s.%s.svc:%d" $name $i $name $.Release.Namespace (int $.Values.lookup.port)) -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}
