{{/* The disk tier's volume in the pods of shards. Each of these is empty without a disk. */}}
{{- define "kvservice.diskMount" -}}
{{- if .Values.tiers.disk.volume -}}
- {name: blocks, mountPath: {{ .Values.tiers.disk.path }}}
{{- end }}
{{- end -}}

{{/* Room for blocks on the disk; empty = chosen by the shard. The index and folders need some too, and the kubelet evicts a
     pod whose emptyDir is over its limit, so blocks take nine tenths of that. */}}
{{- define "kvservice.diskSize" -}}
{{- with .Values.tiers.disk -}}
{{- if and .size (eq .volume "emptyDir") -}}
{{- printf "%dMi" (div (mul 9 (include "kvservice.mib" .size | int)) 10) -}}
{{- else -}}
{{- .size -}}
{{- end -}}
{{- end -}}
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
