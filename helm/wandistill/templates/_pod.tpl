{{/* The spec of a pool's pods; the job's name in it is @JOB@. Takes dict "root", "pool", "sizes". */}}
{{- define "wandistill.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $pool := .pool -}}
{{ include "wandistill.podCommon" $root }}
terminationGracePeriodSeconds: {{ int $values.job.terminationGracePeriodSeconds }}
{{- if $pool.affinity }}
affinity: {{- toYaml $pool.affinity | nindent 2 }}
{{- else }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
      - matchExpressions:
        - {key: kubernetes.io/arch, operator: In, values: [amd64]}
        {{- if and $pool.onGpu (not $pool.nodeSelector) }}
        - {key: nvidia.com/gpu.product, operator: In, values: {{ index ($root.Files.Get "files/catalog.json" | fromJson).products $pool.gpu | toJson }}}
        {{- end }}
{{- end }}
{{- $tolerations := $pool.tolerations }}
{{- if $pool.onGpu }}{{ $tolerations = prepend $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}{{ end }}
tolerations: {{- toYaml $tolerations | nindent 2 }}
{{- range $key := list "nodeSelector" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
{{- with index $pool $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
containers:
- name: pytorch
  image: {{ include "wandistill.image" (dict "root" $root "which" "train") }}
  imagePullPolicy: {{ $values.image.train.pullPolicy }}
  command: [wandistill, launch, --]
  args: [--config, /etc/wandistill/train.yaml, --resume, auto, --output_dir, /output/@JOB@]
  env: {{- include "wandistill.environment" (dict "root" $root "own" (include "wandistill.rankVariables" . | fromJsonArray)) | nindent 2 }}
  envFrom: {{- toYaml $values.extraEnvFrom | nindent 4 }}
  ports:
  - name: metrics
    containerPort: {{ int $values.metrics.port }}
    protocol: TCP
  resources: {{- include "wandistill.resources" . | nindent 4 }}
  securityContext: {{- toYaml $values.securityContext | nindent 4 }}
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
  - {name: shm, mountPath: /dev/shm}
  {{- include "wandistill.mounts" $root | nindent 2 }}
volumes:
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .sizes.shm }}}
{{ include "wandistill.volumes" (dict "root" $root "sizes" .sizes) }}
{{- end }}

{{/* What all pods of a release are alike in. */}}
{{- define "wandistill.podCommon" -}}
automountServiceAccountToken: {{ ne .Values.serviceAccount.name "" }}
{{- with .Values.serviceAccount.name }}
serviceAccountName: {{ . }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.train.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "wandistill.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: config, mountPath: /etc/wandistill, readOnly: true}
- {name: output, mountPath: /output}
{{- if include "wandistill.cache" . }}
- {name: cache, mountPath: /cache}
{{- end }}
{{- if or .Values.data.configMap.name .Values.data.existingClaim }}
- {name: data, mountPath: /data, readOnly: true}
{{- end }}
{{- if .Values.teacher.caBundle.configMap }}
- {name: ca, mountPath: /etc/wandistill-ca, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}

{{- define "wandistill.volumes" -}}
{{- $root := .root -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .sizes.scratch }}}
- name: config
  configMap: {name: "@JOB@"}
- name: output
  persistentVolumeClaim: {claimName: {{ default (printf "%s-output" $root.Release.Name) $root.Values.output.existingClaim }}}
{{- if include "wandistill.cache" $root }}
- name: cache
  persistentVolumeClaim: {claimName: {{ default (printf "%s-cache" $root.Release.Name) $root.Values.teacher.cache.existingClaim }}}
{{- end }}
{{- with $root.Values.data.configMap.name }}
- name: data
  configMap: {name: {{ . }}}
{{- end }}
{{- with $root.Values.data.existingClaim }}
- name: data
  persistentVolumeClaim: {claimName: {{ . }}}
{{- end }}
{{- with $root.Values.teacher.caBundle.configMap }}
- name: ca
  configMap: {name: {{ . }}, items: [{key: {{ $root.Values.teacher.caBundle.key }}, path: ca.crt}]}
{{- end }}
{{- with $root.Values.extraVolumes }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}

{{/* Variables of the pods that train, as JSON: a list of name and value. */}}
{{- define "wandistill.rankVariables" -}}
{{- $values := .root.Values -}}
{{- list
  (list "WANDISTILL_NPROC" (toString .pool.ranks))
  (list "WANDISTILL_RESTARTS" (toString (int $values.job.restarts)))
  (list "WANDISTILL_PREPARE_WAIT" (ternary (toString (int $values.prepare.waitSeconds)) "" $values.prepare.enabled))
  (list "WANDISTILL_RELEASE" .root.Release.Name)
  (list "WANDISTILL_RUN" "@JOB@")
  (list "WANDISTILL_POOL" .pool.name)
  (list "WANDISTILL_METRICS_PORT" (toString (int $values.metrics.port)))
  (list "OMP_NUM_THREADS" (toString (default .sizes.threads (int .pool.threads))))
| toJson -}}
{{- end }}

{{/* The environment of a pod: its "own" variables and what all have. Takes dict "root", "own". */}}
{{- define "wandistill.environment" -}}
{{- $values := .root.Values -}}
{{- $teacher := $values.teacher -}}
{{- $certificates := ternary "/etc/wandistill-ca/ca.crt" "" (ne $teacher.caBundle.configMap "") -}}
{{- $pairs := list
  (list "USER" "wandistill")
  (list "HOME" "/tmp")
  (list "XDG_CACHE_HOME" "/tmp/cache")
  (list "HF_HOME" (ternary "/cache/huggingface" "/tmp/huggingface" (ne (include "wandistill.cache" .root) "")))
  (list "TRITON_CACHE_DIR" "/tmp/triton")
  (list "TORCHINDUCTOR_CACHE_DIR" "/tmp/inductor")
  (list "HF_HUB_OFFLINE" (ternary "1" "" $teacher.offline))
  (list "HF_ENDPOINT" $teacher.endpoint)
  (list "HTTP_PROXY" $teacher.proxy.http)
  (list "HTTPS_PROXY" $teacher.proxy.https)
  (list "NO_PROXY" $teacher.proxy.noProxy)
  (list "SSL_CERT_FILE" $certificates)
  (list "REQUESTS_CA_BUNDLE" $certificates)
-}}
{{- range concat .own $pairs }}
{{- if index . 1 }}
- name: {{ index . 0 }}
  value: {{ index . 1 | quote }}
{{- end }}
{{- end }}
{{- with $teacher.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- with $values.extraEnv }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}

{{- define "wandistill.resources" -}}
{{- $beside := deepCopy .root.Values.extraResources -}}
{{- if .pool.onGpu }}{{ $_ := set $beside .pool.gpuResource (int .pool.gpusPerNode) }}{{ end -}}
{{- $cpus := ternary .sizes.cpus .pool.cpus (eq (toString .pool.cpus) "") -}}
{{- $requests := merge (dict "cpu" $cpus "memory" .sizes.memory "ephemeral-storage" .sizes.scratch) $beside -}}
{{- $limits := merge (dict "memory" .sizes.memory) $beside -}}
{{- mergeOverwrite (dict "requests" $requests "limits" $limits) (deepCopy .pool.resources) | toYaml -}}
{{- end }}
