{{/* The spec of the pod that fetches the teacher and encodes the prompts for job @JOB@. Takes dict "root". */}}
{{- define "wandistill.preparePod" -}}
{{- $values := .root.Values -}}
{{- $own := $values.prepare -}}
{{- $sizes := index (.root.Files.Get "files/catalog.json" | fromJson).prepare (include "wandistill.teacher" .root | fromJson).name -}}
{{ include "wandistill.podCommon" .root }}
restartPolicy: Never
{{- if $own.affinity }}
affinity: {{- toYaml $own.affinity | nindent 2 }}
{{- else }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
      - matchExpressions:
        - {key: kubernetes.io/arch, operator: In, values: [amd64]}
{{- end }}
tolerations: {{- toYaml $own.tolerations | nindent 2 }}
{{- with $own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
containers:
- name: prepare
  image: {{ include "wandistill.image" (dict "root" .root "which" "train") }}
  imagePullPolicy: {{ $values.image.train.pullPolicy }}
  command: [wandistill, prepare, --only, embeddings]
  args: [--config, /etc/wandistill/train.yaml, --device, cpu, --output_dir, /output/@JOB@]
  {{- $variables := list
    (list "WANDISTILL_RELEASE" .root.Release.Name)
    (list "WANDISTILL_RUN" "@JOB@")
    (list "OMP_NUM_THREADS" (toString $sizes.threads))
  }}
  env: {{- include "wandistill.environment" (dict "root" .root "own" $variables) | nindent 2 }}
  envFrom: {{- toYaml $values.extraEnvFrom | nindent 4 }}
  {{- $cpus := ternary $sizes.cpus $own.cpus (eq (toString $own.cpus) "") }}
  {{- $requests := dict "cpu" $cpus "memory" $sizes.memory "ephemeral-storage" $sizes.scratch }}
  resources: {{- mergeOverwrite (dict "requests" $requests "limits" (dict "memory" $sizes.memory)) (deepCopy $own.resources) | toYaml | nindent 4 }}
  securityContext: {{- toYaml $values.securityContext | nindent 4 }}
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts: {{- include "wandistill.mounts" .root | nindent 2 }}
volumes: {{- include "wandistill.volumes" (dict "root" .root "sizes" $sizes) | nindent 0 }}
{{- end }}
