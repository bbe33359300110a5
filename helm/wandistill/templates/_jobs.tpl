{{/*
The jobs that the topology makes of the pools, as JSON: a list of {pool, master, workers, workerCount, split}, each pool
with its name and what it leaves out filled in.
*/}}
{{- define "wandistill.jobs" -}}
{{- $catalog := .Files.Get "files/catalog.json" | fromJson -}}
{{- $pools := dict -}}
{{- range $name, $given := .Values.pools -}}
{{- if not (kindIs "invalid" $given) -}}
{{- $pool := mergeOverwrite (deepCopy $catalog.pool) (deepCopy $given) -}}
{{- $gpus := int $pool.gpusPerNode -}}
{{- $_ := set $pool "name" $name -}}
{{- $_ := set $pool "onGpu" (gt $gpus 0) -}}
{{- $_ := set $pool "ranks" (ternary $gpus (int $pool.processesPerNode) (gt $gpus 0)) -}}
{{- $_ := set $pool "resolvedDtype" (ternary (ternary "bfloat16" "float32" (gt $gpus 0)) $pool.dtype (eq $pool.dtype "auto")) -}}
{{- include "wandistill.checkPool" $pool -}}
{{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- end -}}
{{- $names := join ", " (keys $pools | sortAlpha) -}}
{{- if not $pools -}}
{{- fail "pools is empty: take a preset, such as -f helm/wandistill/presets/4x24gb.yaml." -}}
{{- end -}}
{{- if and (eq .Values.topology "single") (ne (len $pools) 1) -}}
{{- fail (printf "topology single takes one pool, but pools has %s: set topology to independent for a job on each, or to teacher-and-students." $names) -}}
{{- end -}}
{{- $jobs := list -}}
{{- if eq .Values.topology "teacher-and-students" -}}
{{- include "wandistill.checkSplit" (dict "pools" $pools "names" $names) -}}
{{- $jobs = list (dict "pool" $pools.students "master" $pools.teacher "workers" $pools.students "workerCount" (int $pools.students.nodes) "split" true) -}}
{{- else -}}
{{- range $name := keys $pools | sortAlpha -}}
{{- $pool := index $pools $name -}}
{{- $count := sub (int $pool.nodes) 1 -}}
{{- $jobs = append $jobs (dict "pool" $pool "master" $pool "workers" $pool "workerCount" $count "split" false) -}}
{{- end -}}
{{- end -}}
{{- toJson $jobs -}}
{{- end }}

{{- define "wandistill.checkPool" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .name) -}}
{{- fail (printf "pools.%s: a pool's name is lower-case letters, digits and '-', and begins with a letter." .name) -}}
{{- end -}}
{{- if and .onGpu (not .gpu) -}}
{{- fail (printf "pools.%s.gpu is empty, but gpusPerNode is %d: name the GPU." .name (int .gpusPerNode)) -}}
{{- end -}}
{{- if and (not .onGpu) .gpu -}}
{{- fail (printf "pools.%s.gpu is %s, but gpusPerNode is 0: set the number of GPUs of a node." .name .gpu) -}}
{{- end -}}
{{- if and (contains "mig-" .gpuResource) (or (ne (int .gpusPerNode) 1) (not .gpuMemory)) -}}
{{- fail (printf "pools.%s.gpuResource %s: a process sees one MIG device; set gpusPerNode to 1 and gpuMemory to the profile's memory." .name .gpuResource) -}}
{{- end -}}
{{- end }}

{{- define "wandistill.checkSplit" -}}
{{- if ne .names "students, teacher" -}}
{{- fail (printf "topology teacher-and-students takes the pools teacher and students, but pools has %s." .names) -}}
{{- end -}}
{{- $teacher := .pools.teacher -}}
{{- $students := .pools.students -}}
{{- if or (ne (int $teacher.nodes) 1) (ne (int $teacher.ranks) 1) -}}
{{- fail "pools.teacher: serves with one rank: set nodes to 1, and gpusPerNode or processesPerNode to 1." -}}
{{- end -}}
{{- range list $teacher $students -}}
{{- if not (has .placement (list "auto" "gpu0")) -}}
{{- fail (printf "pools.%s.placement %s: teacher-and-students is gpu0; leave placement out." .name .placement) -}}
{{- end -}}
{{- end -}}
{{- if ne $teacher.onGpu $students.onGpu -}}
{{- fail "pools.teacher and pools.students: one has GPUs and the other none, but a job's ranks exchange tensors one way; give both GPUs, or neither." -}}
{{- end -}}
{{- if ne $teacher.resolvedDtype $students.resolvedDtype -}}
{{- fail (printf "pools.teacher.dtype is %s and pools.students.dtype %s: the teacher has one dtype; give both the same." $teacher.resolvedDtype $students.resolvedDtype) -}}
{{- end -}}
{{- end }}
