{{/* The file of --config: each value as JSON, which is YAML, so that numbers arrive as written. */}}
{{- define "wandistill.config" -}}
{{- $values := .root.Values -}}
{{- $settings := include "wandistill.training" .root | fromJson -}}
{{- range $key, $value := .sizes.settings }}{{ $_ := set $settings $key $value }}{{ end -}}
{{- $found := include "wandistill.teacher" .root | fromJson -}}
{{- $_ := set $settings "teacher_path" (ternary $found.path (printf "/cache/%s" $values.teacher.path) (eq $values.teacher.path "")) -}}
{{- $_ := set $settings "student_config" (ternary "/etc/wandistill/student.yaml" $values.student.config (not (empty $values.student.custom))) -}}
{{- $_ := set $settings "teacher_device_strategy" .sizes.placement -}}
{{- $_ := set $settings "teacher_dtype" .job.pool.resolvedDtype -}}
{{- $_ := set $settings "device" (ternary "cuda" "cpu" .job.pool.onGpu) -}}
{{- if $values.data.prompts }}{{ $_ := set $settings "data_path" "/etc/wandistill/prompts.txt" -}}
{{- else if $values.data.configMap.name }}{{ $_ := set $settings "data_path" (printf "/data/%s" $values.data.configMap.key) -}}
{{- else if $values.data.existingClaim }}{{ $_ := set $settings "data_path" (printf "/data/%s" $values.data.path) }}{{ end -}}
{{- with $values.teacher.revision }}{{ $_ := set $settings "teacher_revision" . }}{{ end -}}
{{- range $key := keys $settings | sortAlpha }}
{{- printf "%s: %s\n" $key (index $settings $key | toJson) }}
{{- end }}
{{- end }}

{{/* A job's name with its files, its spec and the pod that prepares it, as JSON. Takes dict "root", "job", "sizes". */}}
{{- define "wandistill.job" -}}
{{- $files := include "wandistill.files" . -}}
{{- $spec := include "wandistill.spec" . -}}
{{- $prepare := "" -}}
{{- if .root.Values.prepare.enabled }}{{ $prepare = include "wandistill.preparePod" . }}{{ end -}}
{{- $digest := include "wandistill.digest" (dict "files" $files "spec" $spec "prepare" $prepare) -}}
{{- $name := include "wandistill.jobName" (dict "root" .root "pool" .job.pool.name "suffix" $digest) -}}
{{- dict "name" $name "files" $files "spec" $spec "prepare" $prepare | toJson -}}
{{- end }}

{{/* What is mounted at /etc/wandistill, as JSON. */}}
{{- define "wandistill.files" -}}
{{- $files := dict "train.yaml" (include "wandistill.config" .) -}}
{{- with .root.Values.student.custom }}{{ $_ := set $files "student.yaml" (printf "%s\n" (toJson .)) }}{{ end -}}
{{- with .root.Values.data.prompts }}{{ $_ := set $files "prompts.txt" (printf "%s\n" (join "\n" .)) }}{{ end -}}
{{- toJson $files -}}
{{- end }}

{{/* The spec of the PyTorchJob with @JOB@ for its name. Takes dict "root", "job", "sizes". */}}
{{- define "wandistill.spec" -}}
{{- $options := .root.Values.job -}}
nprocPerNode: {{ toString .job.master.ranks | quote }}
runPolicy:
  cleanPodPolicy: {{ $options.cleanPodPolicy }}
  suspend: {{ or $options.suspend (ne $options.queue "") }}
  {{- if gt (int $options.deadlineSeconds) 0 }}
  activeDeadlineSeconds: {{ int $options.deadlineSeconds }}
  {{- end }}
  {{- if ge (int $options.ttlSecondsAfterFinished) 0 }}
  ttlSecondsAfterFinished: {{ int $options.ttlSecondsAfterFinished }}
  {{- end }}
pytorchReplicaSpecs:
  Master: {{- include "wandistill.replica" (dict "root" .root "pool" .job.master "sizes" .sizes.master "count" 1) | nindent 4 }}
  {{- if gt (int .job.workerCount) 0 }}
  Worker: {{- include "wandistill.replica" (dict "root" .root "pool" .job.workers "sizes" .sizes.pod "count" (int .job.workerCount)) | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "wandistill.replica" -}}
replicas: {{ .count }}
restartPolicy: ExitCode
template:
  metadata:
    labels: {{- mergeOverwrite (include "wandistill.labels" .root | fromYaml) (dict "wandistill.dev/pool" .pool.name) (deepCopy .root.Values.podLabels) | toYaml | nindent 6 }}
    annotations: {{- include "wandistill.podAnnotations" (dict "root" .root "scrape" (include "wandistill.scrape" (dict "root" .root "port" .root.Values.metrics.port) | fromYaml)) | nindent 6 }}
  spec: {{- include "wandistill.pod" . | nindent 4 }}
{{- end }}

{{/* Meshes hold connections that outlive the job, and nothing may move a pod that trains. Takes dict "root", "scrape". */}}
{{- define "wandistill.podAnnotations" -}}
{{- mergeOverwrite (dict "cluster-autoscaler.kubernetes.io/safe-to-evict" "false" "karpenter.sh/do-not-disrupt" "true" "sidecar.istio.io/inject" "false") .scrape (deepCopy .root.Values.podAnnotations) | toYaml -}}
{{- end }}

{{/*
The digest that ends a job's name: over its files and what reaches its pods, without labels and the metrics port. The
Python renderer makes the same (wandistill/kube/job.py). Takes dict "files" (JSON), "spec" (YAML) and "prepare" (YAML,
of the pod that prepares, or empty).
*/}}
{{- define "wandistill.digest" -}}
{{- $replicas := dict -}}
{{- range $role, $replica := (fromYaml .spec).pytorchReplicaSpecs -}}
{{- $spec := $replica.template.spec -}}
{{- $container := index $spec.containers 0 -}}
{{- $_ := unset $container "ports" -}}
{{- $env := list -}}
{{- range $container.env }}{{ if ne .name "WANDISTILL_METRICS_PORT" }}{{ $env = append $env . }}{{ end }}{{ end -}}
{{- $_ := set $container "env" $env -}}
{{- $_ := set $replicas $role (dict "replicas" $replica.replicas "spec" $spec) -}}
{{- end -}}
{{- $hashed := dict "files" (fromJson .files) "spec" $replicas -}}
{{- if .prepare }}{{ $_ := set $hashed "prepare" (fromYaml .prepare) }}{{ end -}}
{{- $hashed | toJson | sha256sum | trunc 8 -}}
{{- end }}

{{/* Annotations by which a Prometheus without its operator finds a port, where they are wanted. Takes dict "root", "port". */}}
{{- define "wandistill.scrape" -}}
{{- if .root.Values.metrics.annotations -}}
prometheus.io/scrape: "true"
prometheus.io/port: {{ int .port | quote }}
prometheus.io/path: /metrics
{{- else -}}
{}
{{- end -}}
{{- end }}
