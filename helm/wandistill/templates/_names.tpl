{{/* Labels of what the chart makes. */}}
{{- define "wandistill.labels" -}}
app.kubernetes.io/name: wandistill
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels of the objects themselves: those of Helm too. */}}
{{- define "wandistill.objectLabels" -}}
{{ include "wandistill.labels" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Annotations of what helm test makes and removes, in the order of its weight. */}}
{{- define "wandistill.testHook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{/* The reference of an image. Takes dict "root", "which". */}}
{{- define "wandistill.image" -}}
{{- $own := index .root.Values.image .which -}}
{{- $name := $own.repository -}}
{{- with .root.Values.global.imageRegistry }}{{ $name = printf "%s/%s" . $own.repository }}{{ end -}}
{{- if $own.digest }}{{ printf "%s@%s" $name $own.digest }}{{ else }}{{ printf "%s:%s" $name (default .root.Chart.AppVersion $own.tag) }}{{ end -}}
{{- end }}

{{/* The name of a job. Takes dict "root", "pool", "suffix". */}}
{{- define "wandistill.jobName" -}}
{{- $name := printf "%s-%s-%s" .root.Release.Name .pool .suffix -}}
{{- if gt (len $name) 50 -}}
{{- fail (printf "the job's name %s has %d characters, but pods' names leave 50: take a shorter name of the release or of the pool." $name (len $name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the job's name %s is not lower-case letters, digits and '-' that begin with a letter: take another name of the release." $name) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{/* Whether there is a claim for weights: "true" or nothing. */}}
{{- define "wandistill.cache" -}}
{{- if or .Values.teacher.cache.existingClaim .Values.teacher.cache.create.enabled }}true{{ end -}}
{{- end }}

{{/* The model of the catalogue as JSON: name, hub id. */}}
{{- define "wandistill.teacher" -}}
{{- $asked := .Values.teacher.model -}}
{{- $catalog := .Files.Get "files/catalog.json" | fromJson -}}
{{- $found := "" -}}
{{- range $name, $hub := $catalog.models -}}
{{- if or (eq $asked $name) (eq $asked $hub) }}{{ $found = dict "name" $name "path" $hub | toJson }}{{ end -}}
{{- end -}}
{{- if not $found -}}
{{- fail (printf "teacher.model %s: is not in the catalogue; known are %s and their hub ids. For weights of one of these shapes in a folder, set teacher.path." $asked (join ", " $catalog.modelNames)) -}}
{{- end -}}
{{- $found -}}
{{- end }}

{{/* Settings of the trainer with underscores, as JSON. */}}
{{- define "wandistill.training" -}}
{{- $plain := dict -}}
{{- range $key, $value := .Values.training -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $plain (replace "-" "_" $key) $value }}{{ end -}}
{{- end -}}
{{- toJson $plain -}}
{{- end }}
