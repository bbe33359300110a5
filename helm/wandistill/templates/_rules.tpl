{{/* Rules between values that no schema can say; wandistill/kube/rules.py has the same sentences. */}}
{{- define "wandistill.rules" -}}
{{- include "wandistill.checkImage" (dict "root" . "which" "train" "name" "registry.example.com/wandistill") -}}
{{- $pods := include "wandistill.podCount" . -}}
{{- include "wandistill.checkClaim" (dict "name" "output" "own" .Values.output "needed" true "shared" (gt (int $pods) 1)) -}}
{{- include "wandistill.checkClaim" (dict "name" "teacher.cache" "own" .Values.teacher.cache "needed" false "shared" (gt (int $pods) 1)) -}}
{{- $teacher := .Values.teacher -}}
{{- $embedded := eq "embedded" (include "wandistill.teacher" . | fromJson).name -}}
{{- if and $embedded $teacher.path -}}
{{- fail "teacher.path is set, but teacher.model is embedded: name the model that the folder holds." -}}
{{- end -}}
{{- if and $teacher.revision (or $embedded $teacher.path) -}}
{{- fail (printf "teacher.revision is set, but %s: only weights from the hub have revisions." (ternary "teacher.model is embedded" "teacher.path is set" (eq $teacher.path ""))) -}}
{{- end -}}
{{- if and (not $embedded) (not (include "wandistill.cache" .)) -}}
{{- fail (printf "teacher.model %s: its weights need a claim: set teacher.cache.existingClaim or teacher.cache.create.enabled." $teacher.model) -}}
{{- end -}}
{{- $given := list -}}
{{- if .Values.data.prompts }}{{ $given = append $given "prompts" }}{{ end -}}
{{- if .Values.data.configMap.name }}{{ $given = append $given "configMap" }}{{ end -}}
{{- if .Values.data.existingClaim }}{{ $given = append $given "existingClaim" }}{{ end -}}
{{- if gt (len $given) 1 -}}
{{- fail (printf "data has %s: take one of them." (join " and " $given)) -}}
{{- end -}}
{{- if and (not $given) (not $embedded) -}}
{{- fail (printf "data is empty, but teacher.model is %s: set data.prompts, data.configMap.name or data.existingClaim." $teacher.model) -}}
{{- end -}}
{{- if and (eq .Values.topology "teacher-and-students") (eq "replan" (default "" (include "wandistill.training" . | fromJson).on_oom)) -}}
{{- fail "training.on_oom is replan, but topology teacher-and-students has one placement, gpu0: leave on_oom out." -}}
{{- end -}}
{{- if and .Values.prepare.enabled (eq "online" (default "" (include "wandistill.training" . | fromJson).embeddings)) -}}
{{- fail "prepare.enabled is true, but training.embeddings is online: there is nothing to prepare; leave one of the two out." -}}
{{- end -}}
{{- $catalog := .Files.Get "files/catalog.json" | fromJson -}}
{{- range $key := keys .Values.training | sortAlpha -}}
{{- $name := replace "-" "_" $key -}}
{{- if hasKey $catalog.owned $name -}}
{{- fail (printf "training.%s: belongs to %s." $key (index $catalog.owned $name)) -}}
{{- end -}}
{{- if not (has $name $catalog.settings) -}}
{{- fail (printf "training.%s: '%s' is not a setting of wandistill train; wandistill train --help lists them." $key $name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Takes dict "root", "which", "name" that it might have. */}}
{{- define "wandistill.checkImage" -}}
{{- if not (index .root.Values.image .which).repository -}}
{{- fail (printf "image.%s.repository is empty: build and push the image with 'make image IMAGE=registry.example.com/wandistill' and 'docker push %s:%s', then set image.%s.repository to %s." .which .name .root.Chart.AppVersion .which .name) -}}
{{- end -}}
{{- end }}

{{/* The pods of all jobs of the release, which mount its claims; a run and what prepares it are two. */}}
{{- define "wandistill.podCount" -}}
{{- $pods := ternary 1 0 .Values.prepare.enabled -}}
{{- range .Values.pools }}{{ if not (kindIs "invalid" .) }}{{ $pods = add $pods (int (default 1 .nodes)) }}{{ end }}{{ end -}}
{{- $pods -}}
{{- end }}

{{- define "wandistill.checkClaim" -}}
{{- $create := .own.create -}}
{{- if and .own.existingClaim $create.enabled -}}
{{- fail (printf "%s: existingClaim and create are both set: take one of them." .name) -}}
{{- end -}}
{{- if and .needed (not .own.existingClaim) (not $create.enabled) -}}
{{- fail (printf "%s: there is no claim for runs: set %s.existingClaim to one, or %s.create.enabled to true." .name .name .name) -}}
{{- end -}}
{{- if and $create.enabled .shared (not (has "ReadWriteMany" $create.accessModes)) -}}
{{- fail (printf "%s.create.accessModes is %s, but more than one pod mounts the claim: set it to ReadWriteMany, with a storage class that has it." .name (join ", " $create.accessModes)) -}}
{{- end -}}
{{- end }}
