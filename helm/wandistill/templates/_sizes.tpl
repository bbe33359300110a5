{{/*
The sizes of a job's pods as JSON: {placement, settings, pod, master}, and what NOTES tells of the plan: {needed, seconds},
GiB of the fullest GPU (empty with `computed`) and seconds of a step. Sizes come from the tables that the planner made, or
from `computed`, and none is calculated here; a step's seconds are put together of the teacher's part and the rest. Takes dict "root", "job".
*/}}
{{- define "wandistill.sizes" -}}
{{- $root := .root -}}
{{- $job := .job -}}
{{- $pool := $job.pool -}}
{{- $catalog := $root.Files.Get "files/catalog.json" | fromJson -}}
{{- $numbers := dict -}}
{{- with index $root.Values.computed $pool.name -}}
{{- $inputs := include "wandistill.inputs" (dict "root" $root "pool" $pool) -}}
{{- if ne .inputs $inputs -}}
{{- fail (printf "computed.%s was made for other values: run 'wandistill values' on the values again." $pool.name) -}}
{{- end -}}
{{- $numbers = dict "placement" .placement "settings" (default dict .settings) "needed" "" "seconds" (default "" .stepSeconds) "memory" .memory "shm" .shm "masterMemory" (default .memory .teacherMemory) "masterShm" (default .shm .teacherShm) -}}
{{- else -}}
{{- $numbers = include "wandistill.lookUp" (dict "root" $root "job" $job "catalog" $catalog) | fromJson -}}
{{- end -}}
{{- $pod := include "wandistill.podSizes" (dict "pool" $pool "catalog" $catalog "placement" $numbers.placement "memory" $numbers.memory "shm" $numbers.shm) | fromJson -}}
{{- $master := include "wandistill.podSizes" (dict "pool" $job.master "catalog" $catalog "placement" $numbers.placement "memory" $numbers.masterMemory "shm" $numbers.masterShm) | fromJson -}}
{{- dict "placement" $numbers.placement "settings" $numbers.settings "needed" $numbers.needed "seconds" $numbers.seconds "pod" $pod "master" $master | toJson -}}
{{- end }}

{{/* Processor, threads and scratch space beside memory and /dev/shm. */}}
{{- define "wandistill.podSizes" -}}
{{- $kind := ternary (ternary "cpu" "gpu" (eq .placement "cpu")) "none" .pool.onGpu -}}
{{- $cores := index .catalog.cores $kind -}}
{{- dict "memory" .memory "shm" .shm "cpus" (index $cores.cpus (toString .pool.ranks)) "threads" $cores.threads "scratch" (index .catalog.scratch (ternary "gpu" "none" .pool.onGpu)) | toJson -}}
{{- end }}

{{/* What the sizes of a pool depend on, as wandistill/kube/pools.py has it. Takes dict "root", "pool". */}}
{{- define "wandistill.inputs" -}}
{{- $catalog := .root.Files.Get "files/catalog.json" | fromJson -}}
{{- $pool := .pool -}}
{{- $own := dict -}}
{{- range $catalog.poolInputs }}{{ $_ := set $own . (toString (index $pool .)) }}{{ end -}}
{{- $training := include "wandistill.training" .root | fromJson -}}
{{- $kept := dict -}}
{{- range $catalog.trainingInputs }}{{ if hasKey $training . }}{{ $_ := set $kept . (index $training .) }}{{ end }}{{ end -}}
{{- dict "teacher" .root.Values.teacher.model "student" .root.Values.student "pool" $own "topology" .root.Values.topology "training" $kept | toJson | sha256sum | trunc 16 -}}
{{- end }}

{{/* Ends with the command that computes what the tables do not have. Takes dict "pool", "what". */}}
{{- define "wandistill.outside" -}}
{{- fail (printf "pools.%s: %s is outside the chart's tables: run 'wandistill values -f my.yaml > computed.yaml' on your values and add -f computed.yaml." .pool.name .what) -}}
{{- end }}

{{- define "wandistill.lookUp" -}}
{{- $root := .root -}}
{{- $pool := .job.pool -}}
{{- $catalog := .catalog -}}
{{- $training := include "wandistill.training" $root | fromJson -}}
{{- $teacher := (include "wandistill.teacher" $root | fromJson).name -}}
{{- if $root.Values.student.custom }}{{ include "wandistill.outside" (dict "pool" $pool "what" "a student of your own") }}{{ end -}}
{{- if $pool.gpuMemory }}{{ include "wandistill.outside" (dict "pool" $pool "what" (printf "gpuMemory %v" $pool.gpuMemory)) }}{{ end -}}
{{- if eq $pool.placement "custom" }}{{ include "wandistill.outside" (dict "pool" $pool "what" "placement custom") }}{{ end -}}
{{- if and (eq $pool.placement "gpu0") (gt (int $pool.nodes) 1) (not .job.split) -}}
{{- include "wandistill.outside" (dict "pool" $pool "what" (printf "placement gpu0 on %d nodes" (int $pool.nodes))) -}}
{{- end -}}
{{- range $key, $value := $catalog.sizing -}}
{{- if and (hasKey $training $key) (ne (toString (index $training $key)) (toString $value)) -}}
{{- include "wandistill.outside" (dict "pool" $pool "what" (printf "training.%s %v" $key (index $training $key))) -}}
{{- end -}}
{{- end -}}
{{- if eq (toString (default 4 $training.guidance_scale)) "1" }}{{ include "wandistill.outside" (dict "pool" $pool "what" "training.guidance_scale 1") }}{{ end -}}
{{- $name := ternary $teacher (printf "%s-none" $teacher) $pool.onGpu -}}
{{- $text := $root.Files.Get (printf "files/tables/%s.json" $name) -}}
{{- if not $text }}{{ include "wandistill.outside" (dict "pool" $pool "what" (printf "%s without GPU" $teacher)) }}{{ end -}}
{{- $table := fromJson $text -}}
{{- $gpu := default "none" $pool.gpu -}}
{{- if not (hasKey $table.gpus $gpu) -}}
{{- fail (printf "pools.%s.gpu %s: is not in the catalogue; known are %s." $pool.name $gpu (join ", " (keys $table.gpus | sortAlpha))) -}}
{{- end -}}
{{- $column := int (index $table.gpus $gpu) -}}
{{- $batch := toString (default $catalog.batchSize $training.batch_size) -}}
{{- $slot := printf "%s%s" $batch (ternary "c" "" (eq (toString (default false $training.gradient_checkpointing)) "true")) -}}
{{- if not (hasKey $table.slots $slot) }}{{ include "wandistill.outside" (dict "pool" $pool "what" (printf "training.batch_size %s" $batch)) }}{{ end -}}
{{- $index := int (index $table.slots $slot) -}}
{{- $dtype := index $catalog.dtypes $pool.resolvedDtype -}}
{{- $resolution := default (ternary "64x64" "832x480" (eq $teacher "embedded")) $training.resolution -}}
{{- $profile := printf "%s-%s" (default "adamw" $training.optimizer) (default "no" $training.mixed_precision) -}}
{{- $before := printf "%s/%s/%s" $root.Values.student.config $profile $resolution -}}
{{- $several := gt (int $pool.nodes) 1 -}}
{{- $auto := printf "%s/%d%s/%s" $before (int $pool.ranks) (ternary "+" "" $several) $dtype -}}
{{- if not (hasKey $table.auto $auto) -}}
{{- include "wandistill.outside" (dict "pool" $pool "what" (printf "student %s with optimizer and mixed_precision %s at %s on %d ranks a node" $root.Values.student.config $profile $resolution (int $pool.ranks))) -}}
{{- end -}}
{{- $rows := printf "%s/%d%s/%s" $before (int $pool.ranks) (ternary "+" "" (and $several (eq (int $pool.ranks) 1))) $dtype -}}
{{- $what := printf "%s in %s with student %s and batch_size %s on %d x %s" $teacher $pool.resolvedDtype $root.Values.student.config $batch (int $pool.ranks) $gpu -}}
{{- $letters := index $table.autos (int (index (splitList " " (index $table.auto $auto)) $index)) -}}
{{- $letter := index (splitList "" $letters) $column -}}
{{- $placement := $pool.placement -}}
{{- if .job.split -}}
{{- $placement = "gpu0-students" -}}
{{- else if eq $placement "auto" -}}
{{- if eq $letter "n" -}}
{{- fail (printf "pools.%s: no placement fits: %s; 'wandistill plan --model %s --student %s --gpu %s --gpus %d --host_memory 1TiB --batch_size %s --teacher_dtype %s' says what would make it fit." $pool.name $what $teacher $root.Values.student.config $gpu (int $pool.ranks) $batch $pool.resolvedDtype) -}}
{{- end -}}
{{- $placement = index $catalog.letters $letter -}}
{{- end -}}
{{- $cell := include "wandistill.cell" (dict "table" $table "rows" $rows "placement" $placement "index" $index "column" $column) | fromJson -}}
{{- if not $cell.there -}}
{{- fail (printf "pools.%s: placement %s: with one rank it is gpu." $pool.name $placement) -}}
{{- end -}}
{{- if eq $cell.verdict "n" -}}
{{- $fits := list -}}
{{- range $catalog.letters -}}
{{- $other := include "wandistill.cell" (dict "table" $table "rows" $rows "placement" . "index" $index "column" $column) | fromJson -}}
{{- if and $other.there (ne $other.verdict "n") }}{{ $fits = append $fits . }}{{ end -}}
{{- end -}}
{{- $needed := ternary (printf "%s GiB needed on a GPU" $cell.needed) "the teacher does not fit, block by block, beside the students" (ne $cell.needed "") -}}
{{- fail (printf "pools.%s: placement %s does not fit: %s, %s has %s: %s. Placements that fit there: %s." $pool.name $pool.placement $needed $gpu (index $catalog.usable $gpu) $what (default "none; take a smaller student, batch_size or dtype, or another GPU" (join ", " $fits))) -}}
{{- end -}}
{{- $serves := has $cell.verdict (list "s" "u") -}}
{{- if $serves -}}
{{- $cell = include "wandistill.cell" (dict "table" $table "rows" $rows "placement" "gpu0-serves" "index" $index "column" $column) | fromJson -}}
{{- end -}}
{{- $needed := $cell.needed -}}
{{- $waits := printf "%s/%d/%s" $resolution (int $pool.ranks) $dtype -}}
{{- if eq $placement "sequential" }}{{ $waits = printf "%s/%d/%s" $before (int $pool.ranks) $dtype }}{{ end -}}
{{- $way := ternary (ternary "gpu0-teacher" "gpu0-serves" .job.split) $placement (or .job.split $serves) -}}
{{- $waits = index $table.teacher (printf "%s/%s" $waits $way) -}}
{{- $nodes := add (int $pool.nodes) (ternary 1 0 .job.split) -}}
{{- $train := printf "%s/%d%s" $before (int $pool.ranks) (ternary "" (ternary "+" "++" (eq $nodes 2)) (eq $nodes 1)) -}}
{{- $trainSeconds := include "wandistill.seconds" (dict "table" $table "row" (index $table.train $train) "index" $index "column" $column) -}}
{{- $teacherSeconds := list -}}
{{- $cells := dict "table" $table "rows" $rows "index" $index "column" $column -}}
{{- if and $pool.onGpu (eq "replan" (default "" $training.on_oom)) -}}
{{- $cell = include "wandistill.cell" (merge (dict "placement" "replan") $cells) | fromJson -}}
{{- end -}}
{{- $master := $cell -}}
{{- $settings := dict -}}
{{- if eq $placement "gpu0" }}{{ $_ := set $settings "teacher_rank_trains" (ternary "no" "yes" $serves) }}{{ end -}}
{{- if .job.split -}}
{{- $_ := set $settings "teacher_rank_trains" "no" -}}
{{- $placement = "gpu0" -}}
{{- $other := default "none" .job.master.gpu -}}
{{- if not (hasKey $table.gpus $other) -}}
{{- fail (printf "pools.teacher.gpu %s: is not in the catalogue; known are %s." $other (join ", " (keys $table.gpus | sortAlpha))) -}}
{{- end -}}
{{- $master = include "wandistill.cell" (dict "table" $table "rows" $rows "placement" "gpu0-teacher" "index" $index "column" (int (index $table.gpus $other))) | fromJson -}}
{{- if eq $master.verdict "n" -}}
{{- fail (printf "pools.teacher: placement gpu0 does not fit: %s GiB needed on its GPU, %s has %s: %s." $master.needed $other (index $catalog.usable $other) $what) -}}
{{- end -}}
{{- $one := include "wandistill.seconds" (dict "table" $table "row" $waits "index" $index "column" (int (index $table.gpus $other))) -}}
{{- $teacherSeconds = list (mulf $one $pool.nodes $pool.ranks) 0 -}}
{{- else -}}
{{- $teacherSeconds = splitList "/" (include "wandistill.seconds" (dict "table" $table "row" $waits "index" $index "column" $column)) -}}
{{- end -}}
{{- /* As the planner has it: a step's answers are asked for while the students take the step before. */ -}}
{{- $step := maxf (first $teacherSeconds) (addf (last $teacherSeconds) $trainSeconds) -}}
{{- $seconds := printf "%.2g" $step | float64 | toString -}}
{{- dict "placement" $placement "settings" $settings "needed" $needed "seconds" $seconds "memory" $cell.memory "shm" $cell.shm "masterMemory" $master.memory "masterShm" $master.shm | toJson -}}
{{- end }}

{{/* One cell of a table as JSON: {there, verdict, needed, memory, shm}. */}}
{{- define "wandistill.cell" -}}
{{- $row := index .table.rows (printf "%s/%s" .rows .placement) -}}
{{- if $row -}}
{{- $parts := splitList "," (index (splitList " " $row) .index) -}}
{{- $verdict := index (splitList "" (index .table.verdicts (int (index $parts 0)))) .column -}}
{{- $size := splitList " " (index .table.sizes (int (index $parts 2))) -}}
{{- dict "there" true "verdict" $verdict "needed" (index $parts 1) "memory" (printf "%sMi" (index $size 0)) "shm" (printf "%sMi" (index $size 1)) | toJson -}}
{{- else -}}
{{- dict "there" false | toJson -}}
{{- end -}}
{{- end }}

{{/* Seconds on a GPU as wandistill/kube/times.py writes them, of a row that has the number of a text for each batch size. Takes dict "table", "row", "index", "column". */}}
{{- define "wandistill.seconds" -}}
{{- index (splitList " " (index .table.seconds (int (index (splitList " " .row) .index)))) .column -}}
{{- end }}
