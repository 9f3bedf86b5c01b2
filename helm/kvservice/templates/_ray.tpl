{{/* Environment of every Ray container. */}}
{{- define "kvservice.rayEnv" -}}
- {name: HOME, value: /home/kvservice}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: KVSERVICE_SERVICE, value: {{ .Values.cache.service | quote }}}
{{- with include "kvservice.tlsEnv" . }}{{ . | nindent 0 }}{{ end }}
{{- with include "kvservice.tokenEnv" . }}{{ . | nindent 0 }}{{ end }}
{{- if eq .Values.ray.auth.mode "disabled" }}
# With `token` the operator sets this and the token. Without it, some of Ray's commands would turn tokens on by themselves.
- {name: RAY_AUTH_MODE, value: disabled}
{{- end }}
{{- with include "kvservice.transferEnv" . | trim }}{{ . | nindent 0 }}{{ end }}
{{- with .Values.ray.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvservice.rayMounts" -}}
- {name: config, mountPath: /etc/kvservice, readOnly: true}
- {name: shm, mountPath: /dev/shm}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: /home/kvservice, subPath: home}
{{- with include "kvservice.diskMount" . }}{{ . | nindent 0 }}{{ end }}
{{- with include "kvservice.tlsMount" . }}{{ . | nindent 0 }}{{ end }}
{{- with include "kvservice.tenantsMount" . }}{{ . | nindent 0 }}{{ end }}
{{- with include "kvservice.codecKeyMount" . }}{{ . | nindent 0 }}{{ end }}
{{- with include "kvservice.tokenMount" . }}{{ . | nindent 0 }}{{ end }}
{{- with .Values.ray.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Dict "root" $ "shm" size. */}}
{{- define "kvservice.rayVolumes" -}}
- name: config
  configMap: {name: {{ include "kvservice.fullname" .root }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .shm }}}
- name: scratch
  emptyDir: {sizeLimit: {{ .root.Values.security.scratch }}}
{{- with include "kvservice.diskVolume" .root }}{{ . | nindent 0 }}{{ end }}
{{- with include "kvservice.tlsVolume" .root }}{{ . | nindent 0 }}{{ end }}
{{- with include "kvservice.tenantsVolume" .root }}{{ . | nindent 0 }}{{ end }}
{{- with include "kvservice.codecKeyVolume" .root }}{{ . | nindent 0 }}{{ end }}
{{- with include "kvservice.tokenVolume" .root }}{{ . | nindent 0 }}{{ end }}
{{- with .root.Values.ray.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Ray's parameters of every node. The object store gets a size, because by default it takes a third of the memory. */}}
{{- define "kvservice.rayStart" -}}
object-store-memory: {{ mul 1048576 (include "kvservice.mib" .Values.ray.objectStore | int) | quote }}
{{- end -}}

{{/* Shared by head and workers: dict "root" "component" "own" (values of placement) "spread" "token" "shm". */}}
{{- define "kvservice.rayPod" -}}
{{- if not .token }}
serviceAccountName: {{ include "kvservice.serviceAccount" .root }}
automountServiceAccountToken: false
{{- end }}
enableServiceLinks: false # their variables would look like settings
terminationGracePeriodSeconds: {{ include "kvservice.terminationSeconds" .root }}
securityContext: {{- include "kvservice.podSecurity" .root | nindent 2 }}
{{- include "kvservice.pullSecrets" .root }}
{{- include "kvservice.placement" (dict "root" .root "own" .own) }}
{{- $labels := printf "%s\napp.kubernetes.io/component: %s" (include "kvservice.raySelector" .root) .component }}
{{- include "kvservice.spread" (dict "constraints" .spread "labels" $labels) }}
initContainers:
  # Everybody can write to volumes, and sockets are trusted only in a folder that nobody else can write to.
  - name: private-home
    image: {{ include "kvservice.image" .root }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [install, -d, -m, "0700", /scratch/home]
    securityContext: {{- include "kvservice.containerSecurity" .root | nindent 6 }}
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    volumeMounts:
      - {name: scratch, mountPath: /scratch}
volumes: {{- include "kvservice.rayVolumes" (dict "root" .root "shm" .shm) | nindent 2 }}
{{- end -}}

{{/* Hands blocks over, then lets Ray end its processes: dict "root" $ "shard" bool. */}}
{{- define "kvservice.rayPreStop" -}}
preStop:
  exec:
    command:
      - /bin/sh
      - -c
      - {{ if .shard }}kvservice drain --local --timeout {{ .root.Values.cache.drainSeconds }}; {{ end }}ray stop --grace-period {{ .root.Values.cache.graceSeconds }}
{{- end -}}

{{/* The probe asks the raylet and not the cache, because an engine serves without the cache too. */}}
{{- define "kvservice.raylet" -}}
httpGet: {path: /api/local_raylet_healthz, port: 52365}
{{- end -}}

{{- define "kvservice.rayCluster" -}}
{{- $ := . -}}
rayVersion: {{ .Values.ray.version | quote }}
authOptions:
  mode: {{ .Values.ray.auth.mode }}
  {{- with .Values.ray.auth.secretName }}
  secretName: {{ . }}
  {{- end }}
{{- if .Values.ray.tls.enabled }}
tlsOptions: {enabled: true}
{{- end }}
{{- if .Values.ray.autoscaling.enabled }}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ .Values.ray.autoscaling.idleTimeoutSeconds }}
  securityContext: {{- include "kvservice.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 200m, memory: 512Mi}
    limits: {memory: 1Gi}
{{- end }}
{{- with .Values.ray.gcsFaultTolerance }}
{{- if .enabled }}
gcsFaultToleranceOptions:
  backend: redis
  redisAddress: {{ required "ray.gcsFaultTolerance.redisAddress: give host:port of the Redis" .redisAddress | quote }}
  {{- if .passwordSecret }}
  redisPassword:
    valueFrom:
      secretKeyRef: {name: {{ .passwordSecret }}, key: {{ .passwordKey }}}
  {{- end }}
{{- end }}
{{- end }}
headGroupSpec:
  rayStartParams:
    dashboard-host: {{ .Values.ray.listenAddress | quote }}
    num-cpus: "0"
    {{- include "kvservice.rayStart" . | nindent 4 }}
  template:
    metadata:
      labels: {{- include "kvservice.rayLabels" (dict "root" . "component" "head") | nindent 8 }}
      annotations:
        kvservice/config: {{ include "kvservice.toml" . | sha256sum }}
    spec:
      {{- include "kvservice.rayPod" (dict "root" . "component" "head" "own" .Values.ray.head "spread" list "token" .Values.ray.autoscaling.enabled "shm" (include "kvservice.headShm" .)) | nindent 6 }}
      containers:
        - name: ray-head
          image: {{ include "kvservice.image" . }}
          imagePullPolicy: {{ .Values.image.pullPolicy }}
          env: {{- include "kvservice.rayEnv" . | nindent 12 }}
          {{- with include "kvservice.objectsEnvFrom" . }}{{ . | nindent 10 }}{{ end }}
          ports:
            - {name: gcs-server, containerPort: 6379}
            - {name: dashboard, containerPort: 8265}
            - {name: client, containerPort: 10001}
            - {name: serve, containerPort: 8000}
            - {name: metrics, containerPort: 8080}
            {{- if .Values.ray.head.shard }}
            - {name: cache-metrics, containerPort: {{ .Values.cache.metricsPort }}}
            {{- end }}
          lifecycle:
            # Every head starts the service, also after a restart or an upgrade. It keeps trying in the background, because
            # the cluster exists only after this hook. Its output is in the head's log.
            postStart:
              exec:
                command:
                  - /bin/sh
                  - -c
                  - >-
                    log=/proc/1/fd/1; test -w $log || log=/tmp/kvservice-up.log;
                    (until kvservice up --address 127.0.0.1:6379 --config /etc/kvservice/kvservice.toml;
                    do sleep 5; done) >$log 2>&1 </dev/null &
            {{- include "kvservice.rayPreStop" (dict "root" . "shard" .Values.ray.head.shard) | nindent 12 }}
          startupProbe:
            {{- include "kvservice.raylet" . | nindent 12 }}
            periodSeconds: 5
            failureThreshold: 60
          livenessProbe:
            {{- include "kvservice.raylet" . | nindent 12 }}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 12
          readinessProbe:
            httpGet: {path: /api/gcs_healthz, port: 8265}
            periodSeconds: 5
            timeoutSeconds: 5
          securityContext: {{- include "kvservice.containerSecurity" . | nindent 12 }}
          resources:
            {{- $memory := include "kvservice.sum" (list .Values.ray.head.memory (include "kvservice.headShm" .)) }}
            {{- include "kvservice.resources" (dict "root" . "cpu" .Values.ray.head.cpu "memory" $memory "extra" dict "gpus" 0 "devices" false) | nindent 12 }}
          volumeMounts: {{- include "kvservice.rayMounts" . | nindent 12 }}
workerGroupSpecs:
  {{- range .Values.ray.workerGroups }}
  - groupName: {{ .name }}
    replicas: {{ .replicas }}
    minReplicas: {{ .minReplicas }}
    maxReplicas: {{ .maxReplicas }}
    rayStartParams: {{- include "kvservice.rayStart" $ | nindent 6 }}
    template:
      metadata:
        labels: {{- include "kvservice.rayLabels" (dict "root" $ "component" "worker") | nindent 10 }}
        annotations:
          kvservice/config: {{ include "kvservice.toml" $ | sha256sum }}
      spec:
        {{- $spread := .topologySpreadConstraints | default $.Values.ray.topologySpreadConstraints }}
        {{- include "kvservice.rayPod" (dict "root" $ "component" "worker" "own" . "spread" $spread "token" false "shm" (include "kvservice.rayShm" $)) | nindent 8 }}
        containers:
          - name: ray-worker
            image: {{ include "kvservice.image" $ }}
            imagePullPolicy: {{ $.Values.image.pullPolicy }}
            env: {{- include "kvservice.rayEnv" $ | nindent 14 }}
            {{- with include "kvservice.objectsEnvFrom" $ }}{{ . | nindent 12 }}{{ end }}
            ports:
              - {name: metrics, containerPort: 8080}
              - {name: serve, containerPort: 8000}
              - {name: cache-metrics, containerPort: {{ $.Values.cache.metricsPort }}}
              {{- $first := add1 $.Values.cache.metricsPort }}
              {{- range $index := until (include "kvservice.copyWorkers" (dict "root" $ "group" .) | int) }}
              - {name: copy-metrics-{{ $index }}, containerPort: {{ add $first $index }}}
              {{- end }}
            lifecycle: {{- include "kvservice.rayPreStop" (dict "root" $ "shard" true) | nindent 14 }}
            startupProbe:
              {{- include "kvservice.raylet" $ | nindent 14 }}
              periodSeconds: 5
              failureThreshold: 60
            livenessProbe:
              {{- include "kvservice.raylet" $ | nindent 14 }}
              periodSeconds: 10
              timeoutSeconds: 5
              failureThreshold: 12
            readinessProbe:
              {{- if $.Values.ray.serve.enabled }}
              # Serve's proxy runs only where replicas run. Other pods take no requests.
              httpGet: {path: /-/healthz, port: 8000}
              {{- else }}
              {{- include "kvservice.raylet" $ | nindent 14 }}
              {{- end }}
              periodSeconds: 5
              timeoutSeconds: 5
            securityContext: {{- include "kvservice.containerSecurity" $ | nindent 14 }}
            resources:
              {{- $memory := include "kvservice.sum" (list .memory (include "kvservice.rayShm" $)) }}
              {{- include "kvservice.resources" (dict "root" $ "cpu" .cpu "memory" $memory "extra" .extraResources "gpus" .gpus "devices" true) | nindent 14 }}
            volumeMounts: {{- include "kvservice.rayMounts" $ | nindent 14 }}
  {{- end }}
{{- end -}}

{{/* Arguments of the builder. A builder of kvservice waits for the service that the head starts, and starts none itself:
     its settings would not be those of the chart. */}}
{{- define "kvservice.serveArgs" -}}
{{- $args := deepCopy .Values.ray.serve.args -}}
{{- if hasPrefix "kvservice.serve:" .Values.ray.serve.importPath -}}
{{- $section := merge (dict) (get $args "kvservice" | default dict) (dict "service" .Values.cache.service "start" false) -}}
{{- $_ := set $args "kvservice" $section -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}

{{/* What Serve deploys. */}}
{{- define "kvservice.serveConfig" -}}
proxy_location: EveryNode
http_options: {host: {{ .Values.ray.listenAddress | quote }}, port: 8000}
applications:
  - name: {{ .Values.ray.serve.name }}
    route_prefix: {{ .Values.ray.serve.routePrefix }}
    import_path: {{ .Values.ray.serve.importPath }}
    {{- with .Values.ray.serve.runtimeEnv }}
    runtime_env: {{- toYaml . | nindent 6 }}
    {{- end }}
    args: {{- include "kvservice.serveArgs" . | nindent 6 }}
{{- end -}}
