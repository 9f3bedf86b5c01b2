{{/* The disk tier's volume in the pods of shards. Each of these is empty without a disk. */}}
{{- define "kvservice.diskMount" -}}
{{- if .Values.tiers.disk.volume -}}
- {name: blocks, mountPath: {{ .Values.tiers.disk.path }}}
{{- end }}
{{- end -}}

{{- define "kvservice.diskVolume" -}}
{{- $size := .Values.tiers.disk.size -}}
{{- with .Values.tiers.disk -}}
{{- if eq .volume "hostPath" -}}
- name: blocks
  hostPath: {path: {{ .path }}, type: DirectoryOrCreate}
{{- else if eq .volume "emptyDir" -}}
- name: blocks
  emptyDir: {sizeLimit: {{ required "tiers.disk.size: an emptyDir needs a limit, such as 500Gi" $size }}}
{{- else if and (eq .volume "claim") .claimName -}}
- name: blocks
  persistentVolumeClaim: {claimName: {{ .claimName }}}
{{- else if eq .volume "claim" -}}
- name: blocks
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources: {requests: {storage: {{ required "tiers.disk.size: a claim needs a size, such as 500Gi" $size }}}}
{{- end }}
{{- end }}
{{- end -}}

{{/* The key of blocks that belong to no tenant, in the pods of shards. Each of these is empty without its secret. */}}
{{- define "kvservice.codecKeyDir" -}}/etc/kvservice-codec{{- end -}}

{{- define "kvservice.codecKeyMount" -}}
{{- if .Values.tiers.codecKeySecretName -}}
- {name: codec-key, mountPath: {{ include "kvservice.codecKeyDir" . }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvservice.codecKeyVolume" -}}
{{- with .Values.tiers.codecKeySecretName -}}
- name: codec-key
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* Credentials of the object store, as variables of every key of the secret. */}}
{{- define "kvservice.objectsEnvFrom" -}}
{{- if and .Values.tiers.objects.url .Values.tiers.objects.secretName -}}
envFrom:
  - secretRef: {name: {{ .Values.tiers.objects.secretName }}}
{{- end }}
{{- end -}}
